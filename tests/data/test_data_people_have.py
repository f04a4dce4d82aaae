"""Data as people have it, written by the packages that write it: streamed and built, it is what xarray reads."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import xarray
import zarr
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.reference import LazyReferenceMapper

from kit.cloud.simulated import simulated_cloud
from kit.config import Config
from kit.data.build.build import build
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.data.stores.url import open_store, write_object
from kit.data.stream.engine import Engine
from kit.errors import ConfigError, KitWarning, StoreError

SHAPE = (5, 13, 17)
DIMS = ("time", "y", "x")


def streamed(given, variables=()):
    """All of it, by name, read as patches that overlap; NaN where missing."""
    dataset = open_dataset(given)
    chosen = dataset.select(variables)
    shape = chosen[0].shape
    patch = tuple(-(-size * 2 // 3) for size in shape)
    corners = np.stack(np.meshgrid(*((0, size - side) for size, side in zip(shape, patch, strict=True))), -1)
    offsets = corners.reshape(-1, len(shape))
    whole = {info.name: np.full(shape, -777.0) for info in chosen}
    with Engine(dataset, variables) as engine:
        ((values, valid),) = engine.stream([offsets], patch)
    for sample, offset in enumerate(offsets):
        region = tuple(map(slice, offset, offset + np.array(patch)))
        for place, info in enumerate(chosen):
            whole[info.name][region] = np.where(valid[sample, place], values[sample, place], np.nan)
    return whole


def built(given, target, variables=(), **arguments):
    """A store made of it, as xarray opens it."""
    source = {"source": str(given), "arguments": arguments} if isinstance(given, str) else {}
    config = Config.make({"data": {"url": str(target), "patch": {}, "variables": list(variables), **source}})
    dataset = build(config, source=None if source else given, progress=False)
    return xarray.open_zarr(dataset.url, chunks=None)


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name], "f4"), np.asarray(values, "f4"))


def grid(seed=0):
    values = np.random.default_rng(seed).normal(size=SHAPE).astype("f4")
    values[2, 3:7, 5:9] = np.nan
    return values


# -- which variables are the data


@pytest.fixture
def nemo(tmp_path):
    """A file as the ocean model NEMO writes it: bounds of cells have the most dimensions, and are the largest."""
    y, x = SHAPE[1:]
    random = np.random.default_rng(3)
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "ORCA1_1m_grid_T.nc", "w") as file:
        for name, size in {"time_counter": None, "y": y, "x": x, "nvertex": 4, "axis_nbounds": 2}.items():
            file.createDimension(name, size)
        for name in ("nav_lat", "nav_lon"):
            variable = file.createVariable(name, "f4", ("y", "x"))
            variable.bounds = f"bounds_{name[4:]}"
            variable[:] = random.normal(size=(y, x))
            file.createVariable(f"bounds_{name[4:]}", "f4", ("y", "x", "nvertex"))[:] = random.normal(size=(y, x, 4))
        time = file.createVariable("time_counter", "f8", ("time_counter",))
        time.setncatts({"bounds": "time_counter_bounds", "units": "days since 1900-01-01", "calendar": "standard"})
        time[:] = [14.5]
        file.createVariable("time_counter_bounds", "f8", ("time_counter", "axis_nbounds"))[:] = [[0, 29]]
        for name in ("sosstsst", "sosaline"):
            variable = file.createVariable(name, "f4", ("time_counter", "y", "x"), fill_value=1e20)
            variable.setncatts({"coordinates": "nav_lat nav_lon", "cell_methods": "time: mean"})
            variable[:] = np.ma.masked_less(random.normal(size=(1, y, x)), -1)
        file.createVariable("tmask", "i1", ("time_counter", "y", "x"))[:] = 1
    return tmp_path / "ORCA1_1m_grid_T.nc"


def test_the_data_of_an_ocean_model_are_found_among_bounds_and_masks(nemo, tmp_path):
    with xarray.open_dataset(nemo) as opened:
        expected = {name: opened[name].values for name in ("sosstsst", "sosaline")}
        assert_same(streamed(opened), expected)
        left_out = open_dataset(opened).left_out
    assert (left_out["bounds_lon"], left_out["tmask"]) == ("bounds of nav_lon", "mask")
    with pytest.warns(KitWarning, match=r"Left out: tmask \(mask\)$"):
        assert_same(built(str(nemo), tmp_path / "t.zarr").data_vars, expected)


def test_a_zarr_store_with_bounds_and_a_grid_mapping_gives_its_data(tmp_path):
    of_grid = {"grid_mapping": "crs", "ancillary_variables": "doubt"}
    dataset = xarray.Dataset(
        {"rain": (DIMS, grid(), of_grid), "crs": ((), 0, {"grid_mapping_name": "latitude_longitude"}),
         "doubt": (DIMS, grid(1)), "land_mask": (DIMS, np.ones(SHAPE, "i1")),
         "y_bnds": (("y", "bnds"), np.ones((13, 2)))},
        coords={"y": ("y", np.arange(13.0), {"bounds": "y_bnds"})},
    )  # fmt: skip
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=2)
    expected = {"rain": dataset.rain.values}
    assert_same(streamed(tmp_path / "a.zarr"), expected)
    with pytest.warns(KitWarning, match="doubt .*, land_mask"):
        assert_same(built(str(tmp_path / "a.zarr"), tmp_path / "t.zarr").data_vars, expected)
    text = str(open_dataset(tmp_path / "a.zarr"))
    assert "quality of rain" in text
    assert "bounds of y" in text
    named = ["land_mask", "doubt"]
    assert_same(streamed(tmp_path / "a.zarr", named), {name: dataset[name].values for name in named})


def test_masks_alone_are_the_data():
    assert [*streamed(xarray.Dataset({"sea_mask": (DIMS, np.ones(SHAPE, "i1"))}))] == ["sea_mask"]


def test_times_text_and_other_shapes_are_left_out_with_a_word(tmp_path):
    dataset = xarray.Dataset(
        {"t": (DIMS, grid()), "co2": ("time", np.arange(5.0)), "station": ("y", [f"s{n}" for n in range(13)]),
         "seen": (DIMS, np.zeros(SHAPE, "datetime64[ns]"))}
    )  # fmt: skip
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=2)
    for number, given in enumerate([dataset, str(tmp_path / "a.zarr")]):
        assert_same(streamed(given), {"t": dataset.t.values})
        left_out = open_dataset(given).left_out
        assert set(left_out) == {"co2", "station", "seen"}
        assert "shape of t" in left_out["co2"]
        assert "number" in left_out["station"]
        with pytest.warns(KitWarning, match="co2") as said:
            assert_same(built(given, tmp_path / f"{number}.zarr").data_vars, {"t": dataset.t.values})
        assert len(said) == 1
        with pytest.raises(ConfigError, match="station holds .*no number"):
            streamed(given, ["t", "station"])


def test_what_xarray_unpacked_is_built_with_a_word_on_its_bytes(tmp_path):
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 5.0, "_FillValue": -32768}
    xarray.Dataset({"t": (DIMS, grid())}).to_netcdf(tmp_path / "a.nc", encoding={"t": packed})
    with xarray.open_dataset(tmp_path / "a.nc") as unpacked:
        with pytest.warns(KitWarning, match="t is stored as float64, 4 × .* int16"):
            assert built(unpacked, tmp_path / "b.zarr").t.dtype == np.float64
        assert built(unpacked.astype("float32") + 0, tmp_path / "c.zarr").t.dtype == np.float32
    assert "scale_factor" in built(str(tmp_path / "a.nc"), tmp_path / "d.zarr").t.encoding


# -- booleans, and fields that do not change


def of_booleans():
    return xarray.Dataset({"wet": (DIMS, grid() > 0)}, coords={"time": np.arange(5)})


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_booleans_are_read_and_built_and_are_booleans_again(tmp_path, zarr_format):
    dataset = of_booleans()
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, consolidated=False)
    dataset.to_netcdf(tmp_path / "a.nc")
    np.save(tmp_path / "a.npy", dataset.wet.values)
    for number, given in enumerate([dataset, dataset.chunk({"time": 2}), str(tmp_path / "a.zarr")]):
        assert_same(streamed(given), {"wet": dataset.wet.values})
        found = built(given, tmp_path / f"{number}.zarr")
        assert found.wet.dtype == bool
        assert_same(found.data_vars, {"wet": dataset.wet.values})
        assert_same(streamed(tmp_path / f"{number}.zarr"), {"wet": dataset.wet.values})
    assert_same(built(str(tmp_path / "a.nc"), tmp_path / "nc.zarr").data_vars, {"wet": dataset.wet.values})
    assert_same(built(str(tmp_path / "a.npy"), tmp_path / "npy.zarr").data_vars, {"values": dataset.wet.values})


def of_differing_ranks():
    depth = np.random.default_rng(5).normal(size=SHAPE[1:])
    return xarray.Dataset(
        {"t": (DIMS, grid()), "depth": (DIMS[1:], depth), "wet": (DIMS[1:], depth > 0), "x_only": ("x", np.arange(17)),
         "co2": ("time", np.arange(5.0)), "aslant": (("x", "y"), depth.T)}
    )  # fmt: skip


def cut(dataset, folder, **encoding):
    dataset.to_zarr(folder, zarr_format=3, consolidated=False, encoding=encoding)
    return str(folder)


NAMES = ["depth", "t", "wet", "x_only", "co2"]


@pytest.mark.parametrize("kind", ["in memory", "by dask", "a store", "shards"])
def test_a_field_that_lacks_a_dimension_is_repeated_along_it(tmp_path, kind):
    dataset = of_differing_ranks()
    expected = {name: dataset[name].broadcast_like(dataset.t).transpose(*DIMS).values for name in NAMES}
    given = {
        "in memory": lambda: dataset,
        "by dask": lambda: dataset.chunk({"time": 2, "y": 5}),
        "a store": lambda: cut(dataset, tmp_path / "a", t={"chunks": (2, 5, 6)}, depth={"chunks": (4, 9)}),
        "shards": lambda: cut(dataset, tmp_path / "a", t={"chunks": (2, 5, 6), "shards": (4, 10, 12)},
                              depth={"chunks": (4, 9), "shards": (8, 18)}, co2={"chunks": (2,), "shards": (4,)}),
    }[kind]()  # fmt: skip
    assert_same(streamed(given, NAMES), expected)
    found = built(given, tmp_path / "t.zarr", NAMES)
    assert_same(found.data_vars, expected)
    assert_same(built(given, tmp_path / "one.zarr", ["depth"]).data_vars, {"depth": dataset.depth})
    with pytest.raises(ConfigError, match="aslant has .*some of its dimensions"):
        streamed(given, ["t", "aslant"])


def test_a_repeated_field_is_read_and_kept_once(tmp_path):
    url = cut(of_differing_ranks(), tmp_path / "a", t={"chunks": (1, 13, 17)}, depth={"chunks": (13, 17)})
    with Engine(open_dataset(url), ["t", "depth"], cache_bytes=1 << 20) as engine:
        for _ in engine.stream([np.array([[time, 0, 0]]) for time in range(5)], (1, 13, 17)):
            pass
        assert (engine.counters["requests"], engine.counters["cache_hits"]) == (6, 4)
        assert engine.counters["bytes_read"] < 6 * 13 * 17 * 8 * 2


# -- a single array, and files


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_array_at_the_root_of_a_store_is_the_data(tmp_path, zarr_format):
    values = grid()
    zarr.save_array(str(tmp_path / "a.zarr"), values, zarr_format=zarr_format)
    held = zarr.storage.MemoryStore()
    zarr.save_array(held, values, zarr_format=zarr_format)
    zarr.save_array(fsspec_store(f"memory://alone{zarr_format}"), values, zarr_format=zarr_format)
    given = [str(tmp_path / "a.zarr"), held, zarr.open_array(held, mode="r"), f"memory://alone{zarr_format}"]
    for number, one in enumerate(given):
        (name,) = streamed(one)
        assert_same(streamed(one), {name: values})
        assert_same(built(one, tmp_path / f"{number}.zarr").data_vars, {name: values})


def fsspec_store(url):
    return zarr.storage.FsspecStore.from_url(url)


def test_an_npz_gives_the_arrays_of_the_largest_shape(tmp_path):
    arrays = {"t": grid(), "wet": grid(1) > 0, "edges": np.arange(6.0), "names": np.array(["a", "b"])}
    np.savez(tmp_path / "a.npz", **arrays)
    expected = {name: arrays[name] for name in ("t", "wet")}
    assert_same(streamed(tmp_path / "a.npz"), expected)
    with pytest.warns(KitWarning, match="edges .*, names"):
        assert_same(built(str(tmp_path / "a.npz"), tmp_path / "t.zarr").data_vars, expected)
    assert set(open_dataset(tmp_path / "a.npz").left_out) == {"edges", "names"}
    np.save(tmp_path / "a.npy", grid())
    assert_same(streamed(tmp_path / "a.npy"), {"values": grid()})
    np.savez(tmp_path / "o.npz", a=np.array([{}], object))
    with pytest.raises(StoreError, match=r"o\.npz cannot be read: .*allow_pickle"):
        open_dataset(tmp_path / "o.npz")


def in_groups():
    return xarray.DataTree.from_dict(
        {"/surface": xarray.Dataset({"t": (DIMS, grid())}, {"time": np.arange(5.0)}),
         "/deep/down": xarray.Dataset({"s": (DIMS, grid(1))})}
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_a_group_is_a_path_in_its_file_or_store(tmp_path, kind):
    tree, place = in_groups(), str(tmp_path / f"a.{kind}")
    tree.to_netcdf(place) if kind == "nc" else tree.to_zarr(place, consolidated=False)
    for number, (path, name) in enumerate({"surface": "t", "deep/down": "s"}.items()):
        expected = {name: tree[path][name].values}
        assert_same(streamed(f"{place}/{path}"), expected)
        assert_same(built(f"{place}/{path}", tmp_path / f"{number}.zarr").data_vars, expected)
        node = tree[path]
        assert_same(streamed(node), expected)
        assert_same(built(node, tmp_path / f"node{number}.zarr").data_vars, expected)
    with pytest.raises(StoreError, match="path: surface, deep/down|path: deep/down, surface"):
        open_dataset(place)
    with pytest.raises(StoreError, match=r"tree\['"):
        open_dataset(tree)


def test_a_netcdf_file_is_streamed_decoded_and_opened_again_by_loader_processes(tmp_path):
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -9999, "chunksizes": (2, 5, 6)}
    dataset = xarray.Dataset({"t": (DIMS, grid())}, {"time": np.arange(5)})
    dataset.to_netcdf(tmp_path / "a.nc", encoding={"t": packed})
    with xarray.open_dataset(tmp_path / "a.nc") as expected:
        assert_same(streamed(tmp_path / "a.nc"), {"t": expected.t.values})
    opened = open_dataset(tmp_path / "a.nc")
    assert opened.arrays["t"].chunk == (2, 5, 6)
    again = pickle.dumps(opened)
    assert len(again) < dataset.t.nbytes
    assert pickle.loads(again).xarray_object.t.equals(opened.xarray_object.t)
    assert samples_of_two_workers(tmp_path / "a.nc") == 8


def samples_of_two_workers(url):
    """How many of eight samples loader processes read."""
    config = Config.make({
        "data": {"url": str(url), "patch": {"time": 1, "y": 4, "x": 4}, "samples_per_epoch": 8, "standardize": False},
        "loader": {"batch_size": 4, "num_workers": 2},
    })  # fmt: skip
    data = PatchData(config)
    samples = sum(len(batch["values"]) for batch in data.train_dataloader())
    data.teardown()
    return samples


def test_a_file_in_a_bucket_is_read_by_ranges(tmp_path):
    in_groups().to_netcdf(tmp_path / "a.nc")
    with simulated_cloud() as cloud:
        url = cloud.url("bucket/a.nc")
        root = url.rpartition("/")[0]
        write_object(open_store(root, read_only=False), "a.nc", (tmp_path / "a.nc").read_bytes(), root)
        assert_same(streamed(f"{url}/surface"), {"t": grid()})
        assert_same(built(f"{url}/surface", tmp_path / "t.zarr").data_vars, {"t": grid()})
        with pytest.raises(StoreError, match="no file"):
            open_dataset(f"{root}/b.nc")


# -- pyramids


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_the_finest_level_of_an_image_pyramid_is_read_and_told(tmp_path, version):
    ome_zarr = pytest.importorskip("ome_zarr.writer")
    formats = pytest.importorskip("ome_zarr.format")
    image = np.random.default_rng(0).integers(0, 9000, (2, 64, 96)).astype("u2")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2 if version == "0.4" else 3)
    ome_zarr.write_image(image, group, axes="cyx", fmt=formats.format_from_version(version))
    dataset = open_dataset(tmp_path / "a.zarr")
    (info,) = dataset.arrays.values()
    assert info.dims == ("c", "y", "x")
    assert f"resolution {info.name}" in str(dataset)
    assert_same(streamed(tmp_path / "a.zarr"), {info.name: image})
    assert_same(built(str(tmp_path / "a.zarr"), tmp_path / "t.zarr").data_vars, {info.name: image})
    with pytest.raises(ConfigError, match=rf"a\.zarr/{dataset.levels[1]} opens"):
        dataset.select([dataset.levels[1]])
    coarser = f"{tmp_path}/a.zarr/{dataset.levels[1]}"
    values = zarr.open_array(coarser, mode="r")[...]
    assert open_dataset(coarser).select()[0].dims == ("c", "y", "x")
    assert_same(streamed(coarser), {dataset.levels[1]: values})


def test_a_tree_of_resolutions_gives_the_finest(tmp_path):
    levels = {
        str(level): xarray.Dataset({"t": (("y", "x"), grid()[0, : 3 * 2**level, : 4 * 2**level])})
        for level in (0, 1, 2)
    }
    tree = xarray.DataTree.from_dict(levels)
    tree.attrs["multiscales"] = [{"datasets": [{"path": path} for path in levels], "type": "reduce"}]
    tree.to_zarr(tmp_path / "a.zarr", consolidated=False)
    for number, given in enumerate([tree, str(tmp_path / "a.zarr")]):
        assert open_dataset(given).levels == ("2", "1", "0")
        assert_same(streamed(given), {"t": levels["2"].t.values})
        assert_same(built(given, tmp_path / f"{number}.zarr").data_vars, {"t": levels["2"].t.values})
    assert_same(streamed(tmp_path / "a.zarr" / "1"), {"t": levels["1"].t.values})


# -- Icechunk, kerchunk, VirtualiZarr


def of_two():
    random = np.random.default_rng(7)
    coordinates = {"time": np.arange("2001-01-01", "2001-01-06", dtype="datetime64[D]").astype("datetime64[ns]")}
    return xarray.Dataset({"t": (DIMS, grid()), "n": (DIMS, random.integers(0, 99, SHAPE))}, coordinates)


def repository(folder):
    icechunk = pytest.importorskip("icechunk")
    made = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    session = made.writable_session("main")
    chunks = {"t": {"chunks": (2, 5, 6)}}
    of_two().to_zarr(session.store, consolidated=False, encoding=chunks)
    (of_two() * 2).to_zarr(session.store, group="twice/over", consolidated=False, encoding=chunks)
    session.commit("both")
    return made


def test_an_icechunk_repository_is_read_by_its_path_session_and_store(tmp_path):
    made, dataset = repository(tmp_path / "repo"), of_two()
    expected = {name: dataset[name].values for name in ("t", "n")}
    session = made.readonly_session("main")
    given = [str(tmp_path / "repo"), made, session, session.store, xarray.open_zarr(session.store, consolidated=False)]
    for number, one in enumerate(given):
        assert_same(streamed(one), expected)
        found = built(one, tmp_path / f"{number}.zarr")
        assert_same(found.data_vars, expected)
        np.testing.assert_array_equal(found.time.values, dataset.time.values)
    twice = f"{tmp_path}/repo/twice/over"
    assert_same(streamed(twice), {name: 2 * values for name, values in expected.items()})
    assert_same(
        built(twice, tmp_path / "twice.zarr").data_vars, {name: 2 * values for name, values in expected.items()}
    )
    assert "IcechunkStore" in str(open_dataset(tmp_path / "repo"))


def test_loader_processes_open_a_repository_again(tmp_path):
    repository(tmp_path / "repo")
    assert samples_of_two_workers(tmp_path / "repo") == 8


def in_a_file(folder):
    packed = {"dtype": "int16", "scale_factor": 0.01, "_FillValue": -9999, "zlib": True, "chunksizes": (2, 5, 6)}
    of_two().to_netcdf(folder / "a.nc", encoding={"t": packed})
    with xarray.open_dataset(folder / "a.nc") as opened:
        return {name: opened[name].values for name in ("t", "n")}


def test_references_of_kerchunk_are_read_as_the_file_they_lead_into(tmp_path):
    hdf = pytest.importorskip("kerchunk.hdf")
    expected = in_a_file(tmp_path)
    references = hdf.SingleHdf5ToZarr(str(tmp_path / "a.nc"), inline_threshold=100).translate()
    (tmp_path / "a.json").write_text(json.dumps(references))
    (tmp_path / "a.parquet").mkdir()
    frames = LazyReferenceMapper.create(str(tmp_path / "a.parquet"), fs=LocalFileSystem(), engine="pyarrow")
    for key, value in sorted(references["refs"].items(), key=lambda item: "/." not in item[0]):  # metadata first
        frames[key] = value.encode() if isinstance(value, str) else value
    frames.flush()
    for number, given in enumerate([str(tmp_path / "a.json"), str(tmp_path / "a.parquet")]):
        found = streamed(given)
        assert set(found) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6)
        assert_same(built(given, tmp_path / f"{number}.zarr").data_vars, expected)
    (tmp_path / "b.json").write_text('{"some": "thing"}')
    with pytest.raises(StoreError, match="no references of kerchunk"):
        open_dataset(tmp_path / "b.json")
    leading = {"refs": references["refs"] | {"t/0.0.0": ["http://169.254.169.254/x", 0, 9]}}
    (tmp_path / "c.json").write_text(json.dumps(leading))
    with pytest.raises(StoreError, match="metadata"):
        open_dataset(tmp_path / "c.json")


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_what_virtualizarr_holds_is_read(tmp_path):
    virtualizarr = pytest.importorskip("virtualizarr")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr.parsers import HDFParser

    expected = in_a_file(tmp_path)
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    virtual = virtualizarr.open_virtual_dataset(f"file://{tmp_path}/a.nc", registry=registry, parser=HDFParser())
    store = HDFParser()(f"file://{tmp_path}/a.nc", registry=registry)
    for number, given in enumerate([virtual, store]):
        found = streamed(given)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6)
        assert_same(built(given, tmp_path / f"{number}.zarr").data_vars, expected)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_repository_in_a_bucket_is_found_by_its_url(tmp_path, scheme):
    repository(tmp_path / "repo")
    with simulated_cloud() as cloud:
        url = cloud.url("bucket/repo", scheme)
        store = open_store(url, read_only=False)
        for file in filter(Path.is_file, (tmp_path / "repo").rglob("*")):
            write_object(store, file.relative_to(tmp_path / "repo").as_posix(), file.read_bytes(), url)
        assert_same(streamed(url), {name: of_two()[name].values for name in ("t", "n")})
        assert_same(streamed(f"{url}/twice/over", ["n"]), {"n": 2 * of_two().n.values})
