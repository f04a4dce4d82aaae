"""After one pass over the data nothing is requested again: any order, layout, server, number of ranks and loaders."""

from contextlib import closing
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler

import numpy as np
import pytest
import zarr
from properties import crossed

import kit
from kit.data.build.build import build
from kit.data.build.layout import predict_reading
from kit.data.open_dataset import open_dataset
from kit.data.patches.loader import PatchLoader
from kit.data.patches.module import PatchData
from kit.data.sampling import sample_plan
from kit.data.stores.disk_cache import ReadCache
from kit.errors import ConfigError, KitWarning, PlanError

SHARDS = {"shards": {"time": 4, "lat": 32, "lon": 32}, "chunks": "none"}
GAP = {"chunking.latency_seconds": 0.03, "chunking.bandwidth_bytes_per_second": 80_000_000}


def config_of(tiny_config, url, folder, shard="shards", order="random", **changes):
    """16 × 48 × 48 elements, all of which an epoch touches."""
    return tiny_config(
        url, data__arguments={"time": 16, "lat": 48, "lon": 48}, data__patch={"time": 2, "lat": 16, "lon": 16},
        data__order=order, data__samples_per_epoch=256, data__standardize=False, loader__batch_size=8,
        data__variables=["wind"], chunking__chunk={"time": 1, "lat": 16, "lon": 16}, chunking__shard=SHARDS[shard],
        cache__size_bytes=8 << 20, cache__folder=str(folder or ""), **changes,
    )  # fmt: skip


def held_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stored_bytes(dataset):
    return sum(item.bytes for item in dataset.manifest.objects if item.array == "wind" and "/c/" in item.key)


def one_pass(loader):
    """Sum of all values, and what the pass counted."""
    before = loader.counters()
    total = sum(float(np.abs(batch["values"].numpy()).sum(dtype=np.float64)) for batch in loader)
    return total, {name: count - before[name] for name, count in loader.counters().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "shard", "merged"), crossed(["random", "grid", "block"], ["shards", "chunks"], [True, False])
)
def test_later_epochs_and_later_runs_request_nothing(cloud, tmp_path, tiny_config, order, shard, merged):
    config = config_of(tiny_config, cloud.url(f"ends-{shard}/t.zarr"), tmp_path / "c", shard, order)
    config = config.replace(GAP if merged else {"chunking.latency_seconds": 0.0})
    dataset = build(config, progress=False)
    data = PatchData(config)
    first = one_pass(data.train_dataloader())[1]
    assert first["requests"] > 0
    assert (first["requests_saved"] > 0) is (shard == "shards")
    assert (first["bytes_wasted"] > 0) is (shard == "shards" and merged)
    kit.data.prefetch(config, progress=False)  # what random offsets have left out
    for _ in range(3):
        assert one_pass(data.loader)[1]["requests"] == 0
    data.teardown()
    assert held_bytes(tmp_path / "c") <= 1.1 * stored_bytes(dataset)
    mark = cloud.counts()
    open_dataset(config).open_array("wind")
    alone = cloud.counts(since=mark).requests
    again = PatchData(config)
    mark = cloud.counts()
    loader = again.train_dataloader()
    batches = one_pass(loader)[1]
    assert (batches["requests"], batches["bytes_read"]) == (0, 0)
    assert batches["read_cache_hits"] > 0
    assert cloud.counts(since=mark).requests <= alone, "metadata and manifest, which tell whether it was rebuilt"
    again.teardown()


@pytest.mark.parametrize(("server", "kit_built"), crossed(["gcs", "s3", "http", "memory"], [True, False]))
def test_other_servers_are_asked_once_for_each_chunk(server, kit_built, request, cloud, tmp_path, tiny_config):
    name = f"once-{kit_built}/t.zarr"
    here = {"http": cloud.url(name), "memory": f"memory://{name}"}.get(server)
    here = here or f"{request.getfixturevalue(server)}/{name}"
    config = config_of(tiny_config, here, tmp_path / "c")
    build(config, progress=False)
    config = config.replace({"data.url": cloud.url(name, "http")}) if server == "http" else config
    dataset = open_dataset(config)
    dataset = dataset if kit_built else replace(dataset, manifest=None)
    with closing(loader_of(config, dataset)) as loader:
        values, counts = one_pass(loader)
        assert counts["requests"] > 0
    kit.data.prefetch(config, dataset, progress=False)
    with closing(loader_of(config, dataset)) as loader:
        again, counts = one_pass(loader)
        assert again == values
        assert counts["bytes_read"] == 0
        objects = len(dataset.manifest.objects) if dataset.manifest else 100
        assert counts["requests"] <= (0 if kit_built else objects)  # others are asked which object it is


def foreign(place, shards=None):
    """Written by zarr alone: 32 chunks, of which one holds nothing but fill values and is not stored."""
    group = zarr.open_group(str(place), mode="w")
    wind = group.create_array(
        "wind", shape=(8, 32, 32), chunks=(1, 16, 16), shards=shards, dtype="float32", fill_value=-1.0,
        dimension_names=("time", "lat", "lon"),
    )  # fmt: skip
    wind[...] = np.arange(8 * 32 * 32).reshape(8, 32, 32)
    wind[3, :16, 16:] = -1
    zarr.consolidate_metadata(group.store)
    return place


def foreign_config(url, folder, **changes):
    return kit.Config.make({
        "data": {"url": url, "patch": {"time": 2, "lat": 16, "lon": 16}, "order": "grid", "standardize": False},
        "loader": {"batch_size": 4}, "cache": {"size_bytes": 8 << 20, "folder": str(folder)},
    }).replace(changes)  # fmt: skip


ABSENT = pytest.mark.filterwarnings("ignore:.*(Consolidated|consolidated)", "ignore:.*absent from the store")


@ABSENT
@pytest.mark.parametrize(("server", "shards"), crossed(["gs", "s3", "http"], [None, (1, 32, 32)]))
def test_a_store_of_others_is_asked_once_which_object_each_key_names(cloud, tmp_path, server, shards):
    name = f"others-{server}-{bool(shards)}/t.zarr"
    cloud.upload(foreign(tmp_path / "t.zarr", shards), name)
    config = foreign_config(cloud.url(name, server), tmp_path / "c")
    objects = 8 if shards else 32
    dataset, mark = open_dataset(config), cloud.counts()
    kinds = lambda: {kind: used.requests for kind, used in cloud.counts(since=mark).kinds.items()}  # noqa: E731
    predict_reading(config, dataset)
    assert kinds().get("info", 0) <= objects  # a size and a tag are one question
    with closing(loader_of(config, dataset)) as loader:
        values = [one_pass(loader)[0] for _ in range(2)]
    first = kinds()
    assert first["info"] == objects
    assert shards or first["read"] == objects  # what is not there is looked for once
    for _ in range(2):
        with closing(loader_of(config, dataset)) as loader:
            assert one_pass(loader)[0] == values[0] == values[1]
    kit.data.prefetch(config, dataset, progress=False)
    assert kinds() == first
    assert loader.counters()["chunks_filled"] == 1


@ABSENT
def test_a_server_that_denies_objects_to_head_is_read_all_the_same(folder_server, monkeypatch, tmp_path):
    def deny(handler):
        handler.send_error(404)

    monkeypatch.setattr(SimpleHTTPRequestHandler, "do_HEAD", deny)
    foreign(tmp_path / "t.zarr")
    config = foreign_config(f"{folder_server}/t.zarr", tmp_path / "c")
    near = config.replace({"data.url": str(tmp_path / "t.zarr")})
    totals = []
    for one in (config, near):
        with closing(loader_of(one, open_dataset(one))) as loader:
            totals.append(one_pass(loader)[0])
    assert totals[0] == totals[1]


@pytest.mark.slow
@pytest.mark.parametrize("tagged", [True, False])
def test_a_web_server_without_head_is_read_and_cached_by_what_a_get_tells(
    tagged, folder_server, monkeypatch, tmp_path, tiny_config
):
    send = SimpleHTTPRequestHandler.send_header
    monkeypatch.delattr(SimpleHTTPRequestHandler, "do_HEAD")  # from here on it answers 501
    if not tagged:
        without = lambda self, name, text: name == "Last-Modified" or send(self, name, text)  # noqa: E731
        monkeypatch.setattr(SimpleHTTPRequestHandler, "send_header", without)
    config = config_of(tiny_config, str(tmp_path / "t.zarr"), tmp_path / "c", "chunks")
    dataset = replace(build(config, progress=False), manifest=None)
    expected = one_pass(PatchData(config).train_dataloader())[0]
    dataset = replace(dataset, url=f"{folder_server}/t.zarr")
    with closing(loader_of(config, dataset)) as loader:
        if tagged:
            assert one_pass(loader)[0] == expected
        else:
            with pytest.warns(KitWarning, match="neither tag nor time.* read without a cache"):
                assert one_pass(loader)[0] == expected
            assert loader.counters()["read_cache_misses"] == 0
            return
    kit.data.prefetch(config, dataset, progress=False)
    with closing(loader_of(config, dataset)) as loader:
        again, counts = one_pass(loader)
    assert (again, counts["bytes_read"]) == (expected, 0)


def loader_of(config, dataset, world_size=1, rank=0):
    plan = sample_plan(config, dataset, world_size)
    return PatchLoader(
        dataset, plan, config.loader, rank=rank, variables=config.data.variables, read_cache=ReadCache.of(config.cache)
    )


@pytest.mark.parametrize("order", ["random", "block"])
def test_ranks_and_trials_share_what_each_has_read(cloud, tmp_path, tiny_config, order):
    config = config_of(tiny_config, cloud.url("ends-shards/t.zarr"), tmp_path / "c", order=order)
    dataset = build(config, progress=False)
    for rank in range(2):
        with closing(loader_of(config, dataset, 2, rank)) as loader:
            one_pass(loader)
    missing = kit.data.prefetch(config, progress=False).requests
    assert missing <= 2
    for world_size in (1, 3):
        for rank in range(world_size):
            with closing(loader_of(config, dataset, world_size, rank)) as loader:
                assert one_pass(loader)[1]["requests"] == 0
    assert held_bytes(tmp_path / "c") <= 1.1 * stored_bytes(dataset)


def test_loader_processes_share_a_folder(cloud, tmp_path, tiny_config):
    config = config_of(tiny_config, cloud.url("ends-shards/t.zarr"), tmp_path / "c", loader__num_workers=2)
    build(config, progress=False)
    kit.data.prefetch(config, progress=False)
    data = PatchData(config)
    for _ in range(2):
        counts = one_pass(data.train_dataloader() if data.loader is None else data.loader)[1]
        assert (counts["requests"], counts["read_cache_hits"] > 0) == (0, True)
    data.teardown()


def test_a_cache_in_memory_ends_requests_too(cloud, tiny_config):
    config = config_of(tiny_config, cloud.url("ends-shards/t.zarr"), None)
    config = config.replace({"cache.size_bytes": (8 << 20) + 1})  # shared by readers of this process with that size
    build(config, progress=False)
    data = PatchData(config)
    data.train_dataloader()
    while one_pass(data.loader)[1]["requests"]:
        assert data.loader.epoch < 8
    assert one_pass(data.loader)[1]["requests"] == 0
    data.teardown()


def test_what_is_evicted_is_requested_again_and_right(cloud, tmp_path, tiny_config):
    config = config_of(tiny_config, cloud.url("ends-chunks/t.zarr"), tmp_path / "c", "chunks")
    dataset = build(config, progress=False)
    small = config.replace({"cache.size_bytes": stored_bytes(dataset) // 3})
    totals = []
    for one in (config.replace({"cache.size_bytes": 0}), small):
        data = PatchData(one)
        totals.append(one_pass(data.train_dataloader())[0])
        data.teardown()
    assert totals[0] == totals[1]
    assert held_bytes(tmp_path / "c") <= stored_bytes(dataset) // 3 + 8


# -- filling it beforehand


@pytest.mark.parametrize("shard", ["shards", "chunks"])
def test_prefetch_reads_all_once_and_goes_on_where_it_was_stopped(cloud, tmp_path, tiny_config, shard):
    config = config_of(tiny_config, cloud.url(f"ends-{shard}/t.zarr"), tmp_path / "c", shard)
    dataset = build(config, progress=False)
    seen = []

    def stop(done, total, count):
        seen.append((done, total, count))
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # one request in flight: hardly more is read than was told
        kit.data.prefetch(config.replace({"loader.requests_in_flight": 1}), progress=stop)
    assert seen[-1][0] == 5
    found = kit.data.prefetch(config, progress=False)
    assert found.objects == seen[0][1]
    assert found.requests > 0
    assert found.bytes_read < stored_bytes(dataset)
    assert found.held_bytes == stored_bytes(dataset)
    assert "held" in str(found)
    again = kit.data.prefetch(config, progress=False)
    assert (again.requests, again.bytes_read, again.held_bytes) == (0, 0, found.held_bytes)
    assert held_bytes(tmp_path / "c") <= 1.1 * stored_bytes(dataset)


def test_prefetch_refuses_what_cannot_hold_the_data_before_any_byte(cloud, tmp_path, tiny_config):
    config = config_of(tiny_config, cloud.url("ends-shards/t.zarr"), tmp_path / "c")
    build(config, progress=False)
    with pytest.raises(ConfigError, match=r"cache\.size_bytes: .* of wind.* at least"):
        kit.data.prefetch(config.replace({"cache.size_bytes": 10_000}), progress=False)
    with pytest.raises(ConfigError, match=r"cache\.size_bytes: is 0"):
        kit.data.prefetch(config.replace({"cache.size_bytes": 0}), progress=False)
    with pytest.raises(ConfigError, match=r"cache\.folder"):
        kit.data.prefetch(config.replace({"cache.folder": ""}), progress=False)
    here = config.replace({"data.url": str(tmp_path / "t.zarr")})
    build(here, progress=False)
    with pytest.raises(PlanError, match="is read without a cache"):
        kit.data.prefetch(here, progress=False)
