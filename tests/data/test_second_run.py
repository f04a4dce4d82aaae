"""A run that finds a full cache: what it asks before its first batch, and that it never gets what was there before."""

import json

import numpy as np
import pytest
import xarray
from properties import crossed
from test_cache_requests import config_of, one_pass
from tiny_source import Tiny
from zarr.core.sync import sync

import kit
from kit.data.build.build import build
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData
from kit.data.stores.fsspec import RemoteStore
from kit.data.stores.manifest import BUILD_KEY, FOLDER, MANIFEST_KEY
from kit.data.stores.metadata import NAMES
from kit.data.stores.url import delete_object, open_store
from kit.errors import CorruptChunkError, KitWarning, UnfinishedStoreError, UnreachableStoreError

pytestmark = pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)")
SIDES = {"time": 16, "lat": 48, "lon": 48}


@pytest.fixture
def round_trips(monkeypatch):
    """The keys that are read by fsspec: together those that are asked for while others are under way."""
    found, under_way, read = [], [], RemoteStore.get

    async def get(store, key, prototype, byte_range=None):
        if not under_way:
            found.append([])
        found[-1].append(key)
        under_way.append(key)
        try:
            return await read(store, key, prototype, byte_range)
        finally:
            under_way.remove(key)

    monkeypatch.setattr(RemoteStore, "get", get)
    return found


def grid_of(tiny_config, url, folder, **changes):
    """Every chunk once an epoch."""
    return config_of(tiny_config, url, folder, order="grid", **changes)


def run(config):
    """Sum of all values, and what one pass counted, as a new process would read."""
    data = PatchData(config)
    try:
        return one_pass(data.train_dataloader())
    finally:
        data.teardown()


@pytest.fixture
def disconnect(monkeypatch):
    """A function after which nothing answers where a bucket was."""

    def away(url):
        bucket = "/".join(url.split("/")[:3])
        monkeypatch.setenv("KIT_ENDPOINTS", json.dumps({bucket: "http://127.0.0.1:9"}))

    return away


def foreign(place, seed=1, zarr_format=3, **encoding):
    """What xarray writes, with consolidated metadata, over whatever was there."""
    source = Tiny(**SIDES, seed=seed)
    made = xarray.Dataset({"wind": (source.dims, source.values["wind"])}, source.coordinates)
    chunks = {"wind": {"chunks": (1, 16, 16)} | encoding}
    made.to_zarr(place, mode="w", zarr_format=zarr_format, consolidated=True, encoding=chunks)
    return place


@pytest.mark.parametrize("scheme", ["gs", "s3", "http"])
def test_of_a_store_that_kit_built_the_manifest_alone_is_asked_for(cloud, tmp_path, tiny_config, round_trips, scheme):
    name = f"second-{scheme}/t.zarr"
    build(grid_of(tiny_config, cloud.url(name), None), progress=False)
    config = grid_of(tiny_config, cloud.url(name, scheme), tmp_path / "c")
    round_trips.clear()
    open_dataset(config.replace({"cache.size_bytes": 0}))
    assert len(round_trips) == 2
    kit.data.prefetch(config, progress=False)
    round_trips.clear()
    mark = cloud.counts()
    counts = run(config)[1]
    assert (counts["requests"], counts["read_cache_hits"] > 0) == (0, True)
    assert round_trips == [[MANIFEST_KEY]]
    assert cloud.counts(since=mark).requests == 1


@pytest.mark.parametrize(("scheme", "zarr_format"), crossed(["gs", "s3", "http"], [2, 3]))
def test_of_a_store_of_others_all_is_asked_for_at_once(cloud, tmp_path, tiny_config, round_trips, scheme, zarr_format):
    name = f"others-{scheme}-{zarr_format}/t.zarr"
    url = cloud.upload(foreign(tmp_path / "t.zarr", zarr_format=zarr_format), name, scheme)
    config = grid_of(tiny_config, url, tmp_path / "c")
    kit.data.prefetch(config, progress=False)
    round_trips.clear()
    mark = cloud.counts()
    counts = run(config)[1]
    assert (counts["bytes_read"], counts["read_cache_hits"] > 0) == (0, True)
    assert [sorted(keys) for keys in round_trips] == [sorted([MANIFEST_KEY, BUILD_KEY, *NAMES])]
    # Beside them: which object each chunk is now, all of a batch at once, so before the first batch two round trips.
    assert cloud.counts(since=mark).requests == len(round_trips[0]) + counts["requests"]
    assert counts["requests"] == 16 * 3 * 3


def test_loader_processes_ask_for_no_metadata(cloud, tmp_path, tiny_config):
    config = grid_of(tiny_config, cloud.url("processes/t.zarr"), tmp_path / "c", loader__num_workers=2)
    build(config, progress=False)
    kit.data.prefetch(config, progress=False)
    mark = cloud.counts()
    assert run(config)[1]["requests"] == 0
    assert cloud.counts(since=mark).requests == 1


def test_of_stores_that_are_joined_each_is_asked_for_its_manifest(cloud, tmp_path, tiny_config):
    urls = [cloud.url(f"joined/{number}.zarr") for number in range(3)]
    for url in urls:
        config = grid_of(tiny_config, url, tmp_path / "c")
        build(config, progress=False)
        kit.data.prefetch(config, progress=False)
    patch = {"member": 1, **config.data.patch}
    config = config.replace({"data.url": urls[0], "data.more": urls[1:], "data.join": "member", "data.patch": patch})
    mark = cloud.counts()
    assert run(config)[1]["requests"] == 0
    assert cloud.counts(since=mark).requests == 3


@pytest.mark.slow
@pytest.mark.parametrize(("server", "ours"), crossed(["gcs", "s3", "http", "memory"], [True, False]))
def test_what_was_rebuilt_between_two_runs_is_read_anew(server, ours, request, cloud, tmp_path, tiny_config):
    name = f"anew-{ours}/t.zarr"
    here = {"http": cloud.url(name), "memory": f"memory://{name}"}.get(server)
    here = here or f"{request.getfixturevalue(server)}/{name}"
    there = cloud.url(name, "http") if server == "http" else here
    kept, seen = grid_of(tiny_config, there, tmp_path / "c"), []
    for seed, chunk in ((1, (1, 16, 16)), (2, (1, 16, 16)), (2, (2, 16, 16)), (1, (1, 16, 16))):
        if ours:
            sides = dict(zip(SIDES, chunk, strict=True))
            changes = {"data.url": here, "data.arguments": SIDES | {"seed": seed}, "chunking.chunk": sides}
            build(kept.replace(changes), overwrite=True, progress=False)
        else:
            foreign(open_store(here, read_only=False), seed, chunks=chunk)
        truth = run(kept.replace({"cache.size_bytes": 0}))[0]
        assert run(kept)[0] == truth
        values, counts = run(kept)
        assert (values, counts["bytes_read"]) == (truth, 0)
        seen.append(truth)
    assert seen[0] == seen[3] != seen[1] == pytest.approx(seen[2])


def test_a_store_that_is_being_rebuilt_or_is_now_of_others_is_seen_as_that(cloud, tmp_path, tiny_config):
    config = grid_of(tiny_config, cloud.url("turned/t.zarr"), tmp_path / "c")
    build(config, progress=False)
    kit.data.prefetch(config, progress=False)
    store = open_store(config.data.url, read_only=False)
    delete_object(store, MANIFEST_KEY, config.data.url)
    with pytest.raises(UnfinishedStoreError, match="12 of 12|0 of"):
        open_dataset(config)
    sync(store.delete_dir(FOLDER))
    foreign(store, seed=3)
    assert open_dataset(config).manifest is None
    assert run(config)[0] == run(config.replace({"cache.size_bytes": 0}))[0]


def test_metadata_that_were_damaged_are_refused_unless_the_cache_has_those_that_were_published(
    cloud, tmp_path, tiny_config
):
    config = grid_of(tiny_config, cloud.url("damaged/t.zarr"), tmp_path / "c")
    build(config, progress=False)
    expected = run(config)[0]
    document = tmp_path / "zarr.json"
    document.write_bytes(b"{}")
    for key in ("wind/zarr.json", "zarr.json"):
        cloud.upload(document, f"damaged/t.zarr/{key}")
        with pytest.raises(CorruptChunkError, match=rf"{key} .*published"):
            open_dataset(config.replace({"cache.size_bytes": 0}))
    assert run(config)[0] == expected


def test_an_open_dataset_in_a_bucket_is_read_as_it_was_described(cloud):
    """Its shape, its chunks and their encoding belong together, whatever was written since."""
    url = cloud.url("described/t.zarr")
    foreign(open_store(url, read_only=False))
    dataset = open_dataset(url)
    values = dataset.open_array("wind")[...]
    foreign(open_store(url, read_only=False), chunks=(16, 48, 48))
    assert dataset.open_array("wind").chunks == (1, 16, 16)
    again = open_dataset(url)
    assert again.open_array("wind").chunks == (16, 48, 48)
    assert np.array_equal(again.open_array("wind")[...], values, equal_nan=True)


# -- without a network


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_without_a_network_a_full_cache_is_enough(cloud, tmp_path, tiny_config, disconnect, scheme):
    name = f"away-{scheme}/t.zarr"
    build(grid_of(tiny_config, cloud.url(name), None), progress=False)
    config = grid_of(tiny_config, cloud.url(name, scheme), tmp_path / "c")
    kit.data.prefetch(config, progress=False)
    truth, opened = run(config)[0], open_dataset(config)
    times = opened.coordinate("time")
    disconnect(config.data.url)
    with pytest.warns(KitWarning, match=r"no connection to 127\.0\.0\.1:9.* read from cache\.folder .*/c instead"):
        values, counts = run(config)
    assert (values, counts["requests"], counts["read_cache_misses"]) == (truth, 0, 0)
    with pytest.warns(KitWarning, match="instead, as it was"):
        dataset = open_dataset(config)
    assert "from the cache alone" in str(dataset)
    assert np.array_equal(dataset.coordinate("time"), times)
    assert kit.data.prefetch(config, dataset, progress=False).requests == 0
    with pytest.warns(KitWarning, match="instead, as it was"):  # also of one that was opened before
        assert kit.data.prefetch(config, opened, progress=False).requests == 0
    with pytest.warns(KitWarning), pytest.raises(UnreachableStoreError, match="no connection") as told:
        kit.data.probe(config)
    assert "is not in the cache" not in str(told.value)  # no network is measured, whatever is held of the store
    for nowhere in ({"cache.size_bytes": 0}, {"cache.folder": str(tmp_path / "other")}):
        with pytest.raises(UnreachableStoreError, match="check the network"):
            open_dataset(config.replace(nowhere))


def test_without_a_network_what_the_cache_lacks_is_an_error_that_names_the_way_out(
    cloud, tmp_path, tiny_config, disconnect
):
    config = grid_of(tiny_config, cloud.url("half/t.zarr"), tmp_path / "c", loader__batches_ahead=1)
    build(config, progress=False)
    data = PatchData(config)
    next(iter(data.train_dataloader()))
    data.teardown()
    disconnect(config.data.url)
    missing = r"wind/c/.* is not in the cache, and the store could not be reached .*kit\.data\.prefetch"
    with pytest.warns(KitWarning, match="cache.* not there cannot be read"):
        dataset = open_dataset(config)
    with pytest.raises(UnreachableStoreError, match=missing):
        kit.data.prefetch(config, dataset, progress=False)
    with pytest.warns(KitWarning), pytest.raises(UnreachableStoreError, match=missing):
        run(config)


def test_without_a_network_the_store_is_read_as_it_was_last_opened(cloud, tmp_path, tiny_config, disconnect):
    config = grid_of(tiny_config, cloud.url("last/t.zarr"), tmp_path / "c")
    seen = []
    for seed in (1, 2, 1):
        build(config.replace({"data.arguments": SIDES | {"seed": seed}}), overwrite=True, progress=False)
        kit.data.prefetch(config, progress=False)
        seen.append(run(config)[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KIT_ENDPOINTS", json.dumps({"gs://last": "http://127.0.0.1:9"}))
            with pytest.warns(KitWarning, match="as it was"):
                assert run(config)[0] == seen[-1]
    assert seen[0] == seen[2] != seen[1]
    delete_object(open_store(config.data.url, read_only=False), MANIFEST_KEY, config.data.url)
    with pytest.raises(UnfinishedStoreError):
        open_dataset(config)
    disconnect(config.data.url)
    with pytest.raises(UnreachableStoreError, match="check the network"):
        open_dataset(config)
