"""Several stores are one dataset: years, members and static fields, of other writers, without a copy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import zarr

import kit
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.sampling import sample_plan
from kit.data.stores.http import HttpClient
from kit.data.stores.transfer import Counters
from kit.data.stream.fetch import EachItsOwn, ThreadClient, open_client
from kit.errors import ConfigError, MissingChunkError

SHAPE = (8, 12, 18)


def field(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype("float32")


def with_xarray(folder, number, zarr_format=3, first=0):
    xarray = pytest.importorskip("xarray")
    times = np.arange(SHAPE[0]) + SHAPE[0] * number + first
    made = xarray.Dataset(
        {"sst": (("time", "lat", "lon"), field(number))},
        {"time": ("time", times, {"units": "days since 2001-01-01"}), "lat": np.arange(SHAPE[1])},
    )
    path = folder / f"{number}.zarr"
    encoding = {"sst": {"chunks": (4, 6, 6)}}
    made.to_zarr(path, encoding=encoding, zarr_format=zarr_format, consolidated=zarr_format == 2)
    return path


def netcdf(folder, number):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    made = xarray.Dataset({"sst": (("time", "lat", "lon"), field(number))})
    made.to_netcdf(folder / f"{number}.nc", engine="h5netcdf", encoding={"sst": {"chunksizes": (4, 6, 6)}})
    return folder / f"{number}.nc"


def sharded(folder, number):
    group = zarr.open_group(str(folder / f"{number}.zarr"), mode="w")
    array = group.create_array(
        "sst", shape=SHAPE, chunks=(2, 6, 6), shards=(4, 12, 18), dtype="float32",
        dimension_names=("time", "lat", "lon"),
    )  # fmt: skip
    array[:] = field(number)
    return folder / f"{number}.zarr"


def icechunk(folder, number):
    library = pytest.importorskip("icechunk")
    place = folder / f"ice{number}"
    session = library.Repository.create(library.local_filesystem_storage(str(place))).writable_session("main")
    array = zarr.open_group(session.store, mode="w").create_array(
        "sst", shape=SHAPE, chunks=(4, 6, 6), dtype="float32", dimension_names=("time", "lat", "lon")
    )
    array[:] = field(number)
    session.commit("written")
    return place


def version2(folder, number):
    return with_xarray(folder, number, zarr_format=2)


MAKERS = {maker.__name__: maker for maker in (with_xarray, version2, netcdf, sharded, icechunk)}


def config_of(**changes):
    return Config().replace(
        {
            "data.url": "none", "data.patch": {"time": 3, "lat": 4, "lon": 5}, "data.samples_per_epoch": 24,
            "loader.batch_size": 4, "data.standardize": False, **changes,
        }
    )  # fmt: skip


def check(config, given, whole):
    """Every patch has the values of the array that the stores make together; returns what was counted."""
    data = kit.data.PatchData(config, given)
    loader = data.train_dataloader()
    for step, batch in enumerate(loader):
        for offset, values in zip(loader.plan.batch(0, step, 0), batch["values"].numpy(), strict=True):
            where = tuple(slice(at, at + side) for at, side in zip(offset, loader.plan.patch, strict=True))
            assert np.array_equal(values[0], whole[where])
    data.teardown()
    return loader.counters()


@pytest.mark.parametrize("kind", MAKERS)
def test_years_follow_one_another_whoever_wrote_them(tmp_path, kind):
    places = [MAKERS[kind](tmp_path, number) for number in range(3)]
    joined = kit.data.join(places, "time")
    assert joined.arrays["sst"].shape == (24, *SHAPE[1:])
    check(config_of(), joined, np.concatenate([field(number) for number in range(3)]))
    assert "3 stores along time" in str(joined)


@pytest.mark.parametrize("kind", MAKERS)
def test_members_of_an_ensemble_are_a_dimension_of_their_own(tmp_path, kind):
    places = [MAKERS[kind](tmp_path, number) for number in range(2)]
    joined = kit.data.join(places, "member")
    assert joined.arrays["sst"].dims == ("member", "time", "lat", "lon")
    whole = np.stack([field(number) for number in range(2)])
    check(config_of(**{"data.patch": {"member": 2, "time": 3, "lat": 4, "lon": 5}}), joined, whole)


def test_a_config_names_them_and_a_pickle_opens_them_again(tmp_path):
    places = [str(with_xarray(tmp_path, number)) for number in range(2)]
    config = config_of(**{"data.url": places[0], "data.more": (places[1],), "data.join": "time"})
    dataset = pickle.loads(pickle.dumps(open_dataset(config)))
    assert dataset.coordinate("time")[-1] == np.datetime64("2001-01-16")
    check(config.replace({"data.order": "block"}), dataset, np.concatenate([field(0), field(1)]))
    check(config, None, np.concatenate([field(0), field(1)]))


def test_a_static_field_of_another_store_lies_beside_the_others(tmp_path):
    depth = zarr.open_group(str(tmp_path / "static.zarr"), mode="w").create_array(
        "depth", shape=SHAPE[1:], chunks=(12, 9), dtype="float32", dimension_names=("lat", "lon")
    )
    depth[:] = field(7)[0]
    joined = kit.data.join([with_xarray(tmp_path, 0), tmp_path / "static.zarr"])
    config = config_of(**{"data.variables": ("sst", "depth")})
    data = kit.data.PatchData(config, joined)
    loader = data.train_dataloader()
    (first, *_) = loader
    for (time, lat, lon), values in zip(loader.plan.batch(0, 0, 0), first["values"].numpy(), strict=True):
        assert np.array_equal(values[0], field(0)[time : time + 3, lat : lat + 4, lon : lon + 5])
        assert np.array_equal(values[1], np.repeat(field(7)[:1, lat : lat + 4, lon : lon + 5], 3, axis=0))
    data.teardown()


@pytest.mark.parametrize("order", ["random", "grid", "block"])
def test_no_patch_reaches_over_a_gap_in_time(tmp_path, order):
    places = [with_xarray(tmp_path, 0), with_xarray(tmp_path, 1, first=100)]
    config = config_of(
        **{
            "data.url": str(places[0]), "data.more": (str(places[1]),), "data.join": "time", "data.order": order,
            "data.gap_dimension": "time", "data.samples_per_epoch": 200,
        }
    )  # fmt: skip
    for asked in (config, config.replace({"data.stride": {"time": 1}} if order == "grid" else {})):
        plan = sample_plan(asked, open_dataset(asked), 1)
        times = np.concatenate([plan.batch(0, step, 0)[:, 0] for step in range(plan.batches_per_epoch)])
        assert not ((times > 5) & (times < 8)).any()  # patches of 3 end at 8, or begin there
        assert {*times.tolist()} >= ({0, 3} if asked is config and order == "grid" else {0, 5, 8, 13})
    with pytest.raises(ConfigError, match="gap_dimension: unknown"):
        sample_plan(config.replace({"data.gap_dimension": "tim"}), open_dataset(config), 1)


def test_what_is_not_cut_alike_is_refused_with_what_differs(tmp_path):
    zarr.open_group(str(tmp_path / "other.zarr"), mode="w").create_array(
        "sst", shape=(6, *SHAPE[1:]), chunks=(4, 6, 6), dtype="float32", dimension_names=("time", "lat", "lon")
    )
    one = with_xarray(tmp_path, 0)
    with pytest.raises(ConfigError, match="chunk of 4"):
        kit.data.join([tmp_path / "other.zarr", one], "time")
    with pytest.raises(ConfigError, match="chunk .* in one store"):
        kit.data.join([one, sharded(tmp_path, 3)], "time")
    with pytest.raises(ConfigError, match="two stores have a variable 'sst'"):
        kit.data.join([one, one])


def test_what_lies_in_a_bucket_is_read_and_kept_as_if_it_were_alone(cloud, tmp_path):
    near = [with_xarray(tmp_path, number) for number in range(3)]
    far = [cloud.upload(place, f"joined/{place.name}") for place in near[:2]]
    kept = {"cache.size_bytes": 1 << 24, "cache.folder": str(tmp_path / "kept")}
    for url in far:
        kit.data.prefetch(config_of(**{"data.url": url, **kept}), progress=False)
    for places, client in ((far, HttpClient), ([*far, near[2]], EachItsOwn), (near, ThreadClient)):
        joined = kit.data.join([kit.data.join(places[:2], "time"), *places[2:]], "time") if places[2:] else None
        joined = joined or kit.data.join(places, "time")
        counts = check(config_of(**kept), joined, np.concatenate([field(number) for number in range(len(places))]))
        assert counts["read_cache_misses"] == 0
        assert bool(counts["read_cache_hits"]) == (places is not near)
        assert bool(counts["bytes_read"]) == (places is not far)
        made = open_client(joined.open_store(), joined.url, 5.0, Counters(), 8)
        made.close()
        assert isinstance(made, client)


def test_a_chunk_that_is_missing_is_told_with_the_store_that_lacks_it(tmp_path):
    places = [with_xarray(tmp_path, number) for number in range(2)]
    (places[1] / "sst/c/0/1/2").unlink()
    joined = kit.data.join([open_dataset(place, strict=True) for place in places], "time")
    with pytest.raises(MissingChunkError, match=r"/1\.zarr: .* no object sst/c/0/1/2"):
        check(config_of(**{"data.patch": {"time": 16, "lat": 12, "lon": 18}}), joined, np.zeros(0))
