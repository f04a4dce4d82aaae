"""Sources: whatever data lies in, its values, packing, coordinates and attributes arrive in the store."""

from pathlib import Path

import numpy as np
import pytest
import xarray
import zarr
from hypothesis import given
from hypothesis import strategies as st

from kit.config import Config
from kit.data.build import rechunk
from kit.data.build.arrays import ArraySource, open_npy
from kit.data.build.build import build
from kit.data.build.grids import XarraySource, ZarrSource
from kit.data.build.open_source import load_source, open_place
from kit.data.build.plan import plan_build
from kit.data.build.rechunk import pieces, read_pieces
from kit.data.build.source import remarks
from kit.data.open_dataset import open_dataset
from kit.errors import BuildError, ConfigError, KitWarning, MissingChunkError, StoreError

pytestmark = pytest.mark.filterwarnings("ignore:Left out")


def build_from(source, target, patch, given=None, **arguments):
    config = Config.make({
        "data": {"source": source and str(source), "arguments": arguments, "url": str(target), "patch": patch}
    })  # fmt: skip
    return build(config, source=given, progress=False)


def example(shape=(6, 5, 4)):
    values = np.random.default_rng(0).normal(size=shape).astype("f4")
    values[0, 0, 0] = np.nan
    coordinates = {"time": np.datetime64("2001-02-03", "ns") + np.arange(shape[0]) * np.timedelta64(6, "h")}
    coordinates["lat"] = ("lat", np.linspace(-10, 10, shape[1]), {"units": "degrees_north", "note": "cell centres"})
    return xarray.Dataset(
        {"t": (("time", "lat", "lon"), values, {"units": "K"}), "area": (("lat", "lon"), values[0])},
        coordinates, {"title": "an example"},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["sale.csv", "sale.parquet", "sale.npy", "sale.nc", "sale.zarr", "sale"])
def test_a_source_that_is_not_there_is_named_with_where_it_was_looked_for(tmp_path, name):
    (tmp_path / f"sales{Path(name).suffix}").touch()
    with pytest.raises(StoreError, match=rf"data\.source: .* {tmp_path}/{name}.*mean 'sales"):
        open_place(str(tmp_path / name))
    with pytest.raises(StoreError, match=rf"data\.source: .* {tmp_path}/old/{name}.*no folder {tmp_path}/old"):
        open_place(f"file://{tmp_path}/old/{name}")


@pytest.mark.parametrize("name", ["sales.csv", "sales.parquet"])
def test_a_table_is_no_source_and_no_store_and_told_what_reads_it(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"data\.source: .*EventData"):
        open_place(str(tmp_path / name))
    with pytest.raises(StoreError, match="EventData"):
        open_dataset(tmp_path / name)
    with pytest.raises(StoreError, match=rf"{name[1:]} .*mean '{name}'"):
        open_dataset(tmp_path / name[1:])


# -- xarray


@pytest.mark.parametrize("chunks", [None, {"time": 2}])
def test_an_xarray_object_in_hand_is_built(tmp_path, chunks):
    data = example() if chunks is None else example().chunk(chunks)
    dataset = build_from(None, tmp_path / "t.zarr", {"time": 2}, given=data)
    opened = xarray.open_zarr(dataset.url, chunks=None)
    np.testing.assert_array_equal(opened.t.values, data.t.values)
    np.testing.assert_array_equal(opened.time.values, data.time.values)
    assert opened.lat.attrs == {**data.lat.attrs, "standard_name": "latitude", "axis": "Y"}
    assert opened.t.attrs["units"] == "K"
    assert opened.attrs["title"] == "an example"
    assert [*dataset.arrays] == ["t"]


def test_a_data_array_and_a_plain_array_in_hand_are_built(tmp_path):
    values = np.arange(60, dtype="i2").reshape(6, 10)
    named = build_from(None, tmp_path / "a.zarr", {"y": 2}, given=xarray.DataArray(values, dims=("y", "x"), name="z"))
    np.testing.assert_array_equal(named.open_array("z")[...], values)
    plain = build_from(None, tmp_path / "b.zarr", {"dim_0": 2}, given=values)
    np.testing.assert_array_equal(plain.open_array("values")[...], values)


def test_a_netcdf_file_keeps_its_packing_and_its_times(tmp_path):
    data = example()
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -9999}
    data.to_netcdf(tmp_path / "e.nc", encoding={"t": packed, "time": {"units": "hours since 2000-01-01"}})
    dataset = build_from(tmp_path / "e.nc", tmp_path / "t.zarr", {"time": 2})
    assert dataset.arrays["t"].dtype == np.int16
    assert (dataset.arrays["t"].scale_factor, dataset.arrays["t"].missing) == (0.01, -9999)
    opened = xarray.open_zarr(dataset.url, chunks=None)
    expected = xarray.open_dataset(tmp_path / "e.nc")
    np.testing.assert_allclose(opened.t.values, expected.t.values, atol=1e-6)
    np.testing.assert_array_equal(opened.time.values, data.time.values)
    expected.close()


def test_what_is_no_source_of_numbers_is_refused(tmp_path):
    words = xarray.Dataset({"name": (("x",), ["a", "b"])})
    with pytest.raises(ConfigError, match="no numbers, only name"):
        XarraySource(words)
    with pytest.raises(ConfigError, match="did you mean 'area'"):
        XarraySource(example(), ["aera"])
    (tmp_path / "x.nc").write_bytes(b"not a file of that kind")
    with pytest.raises(StoreError, match=r"x\.nc cannot be read"):
        load_source(Config.make({"data": {"source": str(tmp_path / "x.nc")}}))
    with pytest.raises(StoreError, match="no file"):
        load_source(Config.make({"data": {"source": str(tmp_path / "y.nc")}}))


# -- Zarr


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_zarr_store_of_others_is_built_with_packing_and_coordinates(tmp_path, zarr_format):
    data = example()
    packed = {"t": {"dtype": "int16", "scale_factor": 0.01, "_FillValue": -9999}}
    data.to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, encoding=packed, consolidated=False)
    dataset = build_from(tmp_path / "a.zarr", tmp_path / "t.zarr", {"time": 2})
    mine, theirs = (
        xarray.open_zarr(path, chunks=None, consolidated=False) for path in (dataset.url, tmp_path / "a.zarr")
    )
    np.testing.assert_allclose(mine.t.values, theirs.t.values, atol=1e-9)
    np.testing.assert_array_equal(mine.time.values, theirs.time.values)
    assert dataset.arrays["t"].dtype == np.int16


def test_a_store_that_kit_built_must_be_whole(tmp_path, tiny_config):
    build(tiny_config(tmp_path / "a.zarr"), progress=False)
    source = ZarrSource(str(tmp_path / "a.zarr"))
    assert source.chunks["sst"] == (1, 4, 4)
    next((tmp_path / "a.zarr/sst/c").glob("*/*/*")).unlink()
    with pytest.raises(MissingChunkError, match=r"missing .*\(1 of"):
        ZarrSource(str(tmp_path / "a.zarr"))


# -- files


@pytest.mark.parametrize("order", ["C", "F"])
def test_any_block_of_a_mapped_file_is_its_own_values(tmp_path, order, monkeypatch):
    monkeypatch.setattr("kit.data.build.arrays.FETCH_BYTES", 200)
    values = np.asarray(np.random.default_rng(0).integers(0, 99, (7, 6, 5)), "i4", order=order)
    np.save(tmp_path / "a.npy", values)
    source = open_npy(tmp_path / "a.npy", dims=("z", "y", "x"))
    for region in (np.s_[0:7, 0:6, 0:5], np.s_[2:3, 1:6, 4:5], np.s_[1:7, 5:6, 0:3]):
        np.testing.assert_array_equal(source.read("values", region), values[region])


def test_a_npy_file_and_a_memmap_are_built(tmp_path):
    values = np.arange(300, dtype=">f8").reshape(10, 30)
    np.save(tmp_path / "a.npy", values)
    dataset = build_from(tmp_path / "a.npy", tmp_path / "a.zarr", {"y": 2}, dims=["y", "x"], name="v")
    np.testing.assert_array_equal(dataset.open_array("v")[...], values)
    values.tofile(tmp_path / "raw.bin")
    mapped = np.memmap(tmp_path / "raw.bin", ">f8", "r", shape=(10, 30))
    raw = build_from(None, tmp_path / "b.zarr", {"dim_0": 2}, given=mapped)
    np.testing.assert_array_equal(raw.open_array("values")[...], values)
    part = ArraySource(mapped[2:5])
    np.testing.assert_array_equal(part.read("values", np.s_[0:3, 0:30]), values[2:5])


def test_a_npy_file_of_objects_or_cut_short_is_refused(tmp_path):
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "c.npy").write_bytes(b"\x93NUMPY")
    for file in ("o.npy", "c.npy"):
        with pytest.raises(ConfigError, match=rf"{file} .*mapped"):
            load_source(Config.make({"data": {"source": str(tmp_path / file)}}))


@pytest.mark.parametrize(("mode", "names"), [("L", ["grey"]), ("RGB", ["red", "green", "blue"])])
def test_a_folder_of_images_is_a_stack_with_a_variable_a_band(tmp_path, mode, names):
    from PIL import Image

    shape = (5, 12, 16) if mode == "L" else (5, 12, 16, 3)
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for place, image in enumerate(values):
        (tmp_path / "in" / str(place % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "in" / str(place % 2) / f"{place}.png")
    dataset = build_from(tmp_path / "in", tmp_path / "t.zarr", {"image": 1, "y": 8, "x": 8})
    assert [*dataset.arrays] == names
    order = [0, 2, 4, 1, 3]
    for band, name in enumerate(names):
        expected = values[order] if mode == "L" else values[order][..., band]
        np.testing.assert_array_equal(dataset.open_array(name)[...], expected)
    Image.fromarray(values[0][:5]).save(tmp_path / "in" / "0" / "small.png")
    with pytest.raises(BuildError, match=r"small\.png is 16 × 5 .*first image is 16 × 12"):
        build_from(tmp_path / "in", tmp_path / "u.zarr", {"image": 1, "y": 8, "x": 8})
    with pytest.raises(ConfigError, match="no image file.*matches"):
        load_source(Config.make({"data": {"source": str(tmp_path / "in"), "arguments": {"pattern": "*.gif"}}}))


# -- where and how


@pytest.mark.parametrize("text", ["package.module:Name", "folder/file.py:Name", "file.py:make"])
def test_an_import_path_is_no_place(text):
    assert open_place(text) is None


def test_a_misspelt_argument_of_a_place_is_answered(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    config = Config.make({"data": {"source": str(tmp_path / "a.npy"), "arguments": {"nmae": "t"}}})
    with pytest.raises(ConfigError, match="did you mean 'name'"):
        load_source(config)


@given(data=st.data(), fetch=st.integers(1, 4000))
def test_pieces_tile_a_region_once_and_hold_no_more_than_they_may(data, fetch):
    shape = tuple(data.draw(st.integers(1, 15)) for _ in range(data.draw(st.integers(1, 3))))
    chunk = tuple(data.draw(st.integers(1, 15)) for _ in shape)
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    region = tuple(
        slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kit.data.build.rechunk.FETCH_BYTES", fetch)
        count = np.zeros(shape, int)
        for piece in pieces(region, chunk, 4):
            count[piece] += 1
            size = count[piece].size * 4
            assert size <= max(fetch, np.prod(chunk) * 4)
        assert (count[region] == 1).all()
        assert count.sum() == count[region].size
        values = np.arange(count.size, dtype="i4").reshape(shape)
        found = read_pieces(lambda piece: values[piece], region, chunk, values.dtype)
    np.testing.assert_array_equal(found, values[region])
    assert rechunk.FETCH_BYTES == 8 << 20


def test_a_store_of_several_shapes_gives_the_largest_unless_told(tmp_path):
    group = zarr.create_group(str(tmp_path / "a.zarr"))
    for name, shape in {"small": (3,), "large": (3, 4), "other": (3, 4)}.items():
        group.create_array(name, data=np.ones(shape, "f4"), chunks=shape)
    assert [*ZarrSource(str(tmp_path / "a.zarr")).variables] == ["large", "other"]
    assert [*ZarrSource(str(tmp_path / "a.zarr"), variables=["small"]).variables] == ["small"]


@pytest.mark.parametrize(("name", "joins"), [("part.nc", "open_mfdataset"), ("part.npy", "concatenate")])
def test_many_files_are_refused_with_what_joins_them(tmp_path, name, joins):
    (tmp_path / name).write_bytes(b"")
    for text in (str(tmp_path), f"{tmp_path}/p*{name[-4:]}"):
        with pytest.raises(ConfigError, match=rf"data\.source: .*source=\w+\.{joins}"):
            open_place(text)
    zarr.create_group(tmp_path / "store")
    (tmp_path / "store" / name).write_bytes(b"")
    assert open_place(str(tmp_path / "store"))


@pytest.mark.parametrize("as_store", [False, True])
def test_what_may_surprise_of_a_store_is_said_before_it_is_written(tmp_path, as_store):
    data = example()
    data["u"] = data["t"] * 2
    if as_store:
        data.to_zarr(tmp_path / "a.zarr", consolidated=False)
    else:
        data.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    source = str(tmp_path / ("a.zarr" if as_store else "a.nc"))
    config = Config.make({"data": {"source": source, "url": str(tmp_path / "b.zarr"), "patch": {"lat": 2}}})
    assert not plan_build(config).remarks
    asked = config.replace({"data.variables": ["t"]})
    (others,) = plan_build(asked).remarks
    assert "stores u too" in others
    assert not plan_build(asked.replace({"data.arguments": {"variables": ["t"]}})).remarks
    (again,) = plan_build(config.replace({"data.variables": ["t", "u", "area"]})).remarks
    assert "area 6 times" in again
    assert again in str(plan_build(config.replace({"data.variables": ["t", "u", "area"]})))


@pytest.mark.parametrize("as_store", [False, True])
def test_a_time_that_leaves_out_or_turns_back_is_told_of(tmp_path, as_store):
    def opened(times):
        given = example().isel(time=times)
        if not as_store:
            return given
        path = tmp_path / f"{len(times)}{times[-1]}.zarr"
        given.to_zarr(path, consolidated=False)
        return open_dataset(str(path))

    def told(times):
        source = opened(times)
        source = ZarrSource(source) if as_store else XarraySource(source)
        return source.notes, [*remarks(Config(), source)]

    assert told([0, 1, 2, 3]) == ([], [])
    (notes, (gap,)) = told([0, 1, 4, 5])
    assert not notes
    assert "data.gap_dimension: time" in gap
    for times in ([0, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]):
        ((note,), (_,)) = told(times)
        assert note.startswith("time turns back")
        assert "at 3 (" in note


def test_names_along_a_dimension_are_no_coordinate_of_the_store_and_said_to_be_left_out(tmp_path):
    given = example().assign_coords(lon=["a", "b", "c", "d"])
    config = Config.make({"data": {"url": str(tmp_path / "b.zarr"), "patch": {"lat": 2}}})
    with pytest.warns(KitWarning, match="lon is left out"):
        made = build(config, source=given, progress=False)
    assert "lon" not in made.coordinates
