"""A short trial asks for what was predicted, within 15 %: any order and layout, a cold cache, a warm one and none."""

import time
from itertools import chain, islice, product, repeat

import numpy as np
import pytest
import zarr
from properties import crossed
from test_cache_requests import GAP, config_of
from waiting import wait_until
from zarr.core.sync import sync

import kit
from kit.data.build.build import build
from kit.data.build.layout import predict_reading, price_store, requests_after
from kit.data.patches.module import PatchData
from kit.data.stores.manifest import FOLDER
from kit.data.stores.url import open_store
from kit.data.stream.scatter import touched

NAMES = {"requests": "requests", "bytes": "bytes_read"}


def counted(config, steps):
    """Requests and bytes of a sample, as a trial of so many steps counts them when it ends."""
    data = PatchData(config)
    loader = data.train_dataloader()
    epochs = chain.from_iterable(repeat(loader))  # kept until all is counted: an iterator's end cancels what it reads
    try:
        for _ in islice(epochs, steps + 1):  # the loop of a Trainer holds one batch more than it trained on
            wait_until(lambda: not coming(loader))  # a step that takes longer than the reading, on any machine
        counts = settled(loader)
    finally:
        data.teardown()
    return {f"{short}_per_sample": counts[name] / counts["samples"] for short, name in NAMES.items()}


def coming(loader):
    """Chunks that were not there when they were wanted, and are not decoded yet."""
    if loader.plan.windows:
        return 0  # of the window after the next, chunks are requested and not decoded
    now = loader.counters()
    return now["cache_misses"] - now["chunks_decoded"] - now["chunks_filled"]


def settled(loader):
    """What was counted, once the batches that were read ahead have come."""
    unchanged, before = 0, {}
    while unchanged < 8:
        time.sleep(0.05)
        now = loader.counters()
        unchanged = unchanged + 1 if not coming(loader) and now == before else 0
        before = now
    return before


@pytest.mark.parametrize(
    ("order", "shard", "steps"), crossed(["random", "grid", "block"], ["shards", "chunks"], [8, 50])
)
def test_in_a_folder(tmp_path_factory, tiny_config, order, shard, steps):
    config = config_of(
        tiny_config, tmp_path_factory.getbasetemp() / f"{shard}.zarr", None, shard, order, trial__max_steps=steps
    )
    config = config.replace({"training.max_epochs": 20})
    dataset = build(config, progress=False)
    assert counted(config, steps) == pytest.approx(predict_reading(config, dataset), rel=0.15)


LARGER = {"time": 32, "lat": 160, "lon": 160}


@pytest.mark.parametrize(("order", "shard"), crossed(["random", "grid", "block"], ["shards", "chunks"]))
def test_a_plan_expects_what_is_expected_of_the_store_that_it_gives(tmp_path, tiny_config, order, shard):
    config = config_of(tiny_config, tmp_path / "t.zarr", None, shard, order).replace({"data.arguments": LARGER})
    plan = kit.plan_chunks(config, measure=True).chosen
    [built] = price_store(config, build(config, progress=False))
    assert plan.requests_made_per_batch == pytest.approx(built.requests_made_per_batch, rel=0.02)
    assert plan.bytes_made_per_batch == pytest.approx(built.bytes_made_per_batch, rel=0.1)


def test_a_plan_of_two_variables_asks_for_both(tmp_path, tiny_config):
    config = config_of(tiny_config, tmp_path / "t.zarr", None)
    config = config.replace({"data.arguments": LARGER, "data.variables": ["sst", "wind"]})
    plan = kit.plan_chunks(config).chosen
    built = price_store(config, build(config, progress=False))  # one of each, as they are packed apart
    assert plan.requests_made_per_batch == pytest.approx(sum(one.requests_made_per_batch for one in built), rel=0.02)


def test_a_plan_counts_on_no_array_that_memory_holds(tmp_path, tiny_config):
    config = config_of(tiny_config, tmp_path / "t.zarr", None)  # each batch touches most of its chunks
    [built] = price_store(config, build(config, progress=False))
    assert kit.plan_chunks(config).chosen.requests_made_per_batch > 1.1 * built.requests_made_per_batch


def test_chunks_stay_for_later_batches_where_memory_is_spare(tmp_path, tiny_config):
    whole = {"chunking.chunk": {"time": 16, "lat": 48, "lon": 48}}
    config = config_of(tiny_config, tmp_path / "t.zarr", None, "chunks", trial__max_steps=24).replace(whole)
    dataset = build(config, progress=False)
    assert predict_reading(config, dataset)["requests_per_sample"] < 2 / (8 * 24)
    tight = config.replace({"loader.memory_bytes": 4 << 20})
    assert predict_reading(tight, dataset)["requests_per_sample"] > 6 / (8 * 24)


BUSY = 0.3
"""On a busy machine a trial of eight steps ends with one window more on its way, or one less, than at rest."""


BETWEEN = 0.6
"""Of bytes, where a read cache holds half: what a request brings beside the chunks that were wanted depends on which of
them were asked for together, and so on what came when."""


REQUEST_BYTES = 4 * 16 * 16 * 4
"""Four chunks: what a request more or less brings, where nearly everything is held and a fraction says nothing."""


def test_an_epoch_finds_nothing_of_the_one_before_on_its_way(tmp_path):
    """Two batches an epoch, each of which touches nearly every chunk: joined over the turn, half as many were told."""
    store = zarr.open_group(tmp_path / "s.zarr", mode="w")
    store.create_array("u", data=np.ones((64, 64), "f4"), chunks=(8, 8), dimension_names=("y", "x"))
    config = kit.Config.make({
        "data": {"url": str(tmp_path / "s.zarr"), "patch": {"y": 12, "x": 12}, "samples_per_epoch": 64,
                 "standardize": False},
        "loader": {"batch_size": 32, "batches_ahead": 1}, "training": {"max_epochs": 20},
        "trial": {"max_steps": 11, "warmup_steps": 0},
    })  # fmt: skip
    predicted = predict_reading(config, kit.open_dataset(config))["requests_per_sample"]
    assert predicted == pytest.approx(counted(config, 11)["requests_per_sample"], rel=0.05)
    assert predicted > 0.8 * 64 / 64  # all 64 chunks for the 64 samples of each epoch


def test_a_window_is_requested_before_its_batches_ask_for_parts_of_it(tmp_path, tiny_config, monkeypatch):
    def late(*arguments):
        time.sleep(0.05)
        return touched(*arguments)

    config = config_of(tiny_config, tmp_path / "t.zarr", None, "shards", "block", trial__max_steps=8)
    predicted = predict_reading(config, build(config, progress=False))["requests_per_sample"]
    monkeypatch.setattr("kit.data.stream.reader.touched", late)  # windows are looked up so; batches are not
    # In parts, windows took 1.4 times as many at least.
    assert counted(config, 8)["requests_per_sample"] == pytest.approx(predicted, rel=BUSY)


def test_neighbours_share_a_request_however_large_a_window_is(tmp_path, tiny_config, monkeypatch):
    config = config_of(tiny_config, tmp_path / "t.zarr", None, "shards", "block", trial__max_steps=8)
    predicted = predict_reading(config, build(config, progress=False))["requests_per_sample"]
    monkeypatch.setattr("kit.data.stream.reader._SAMPLES_AT_ONCE", 8)  # a window has more
    assert counted(config, 8)["requests_per_sample"] == pytest.approx(predicted, rel=BUSY)


@pytest.mark.parametrize(
    ("order", "shard", "steps", "filled"),
    crossed(["random", "grid", "block"], ["shards", "chunks"], [8, 50], [0.0, 0.5]),
)
def test_with_a_read_cache(cloud, tmp_path, tiny_config, order, shard, steps, filled):
    url = cloud.url(f"expected-{shard}/t.zarr")
    config = config_of(tiny_config, url, tmp_path / "c", shard, order, trial__max_steps=steps)
    gap = GAP if shard == "chunks" else {"chunking.latency_seconds": 0.0}
    config = config.replace({**gap, "training.max_epochs": 20})
    dataset = build(config, progress=False)
    if filled:
        fill(config, filled)
    predicted = predict_reading(config, dataset)
    found = counted(config, steps)
    few = 4 / (steps * config.loader.batch_size)  # requests: which neighbours are joined depends on what came when
    assert found["requests_per_sample"] == pytest.approx(predicted["requests_per_sample"], rel=BUSY, abs=few)
    tolerances = {"rel": BETWEEN, "abs": few * REQUEST_BYTES} if filled else {"rel": BUSY}
    assert found["bytes_per_sample"] == pytest.approx(predicted["bytes_per_sample"], **tolerances)


def fill(config, fraction):
    def stop(done, total, _):
        if done >= fraction * total and fraction < 1:
            raise KeyboardInterrupt

    try:
        kit.data.prefetch(config, progress=stop)
    except KeyboardInterrupt:
        assert fraction < 1


def test_a_cache_that_holds_everything_leaves_nothing_to_request(cloud, tmp_path, tiny_config):
    config = config_of(tiny_config, cloud.url("expected-shards/t.zarr"), tmp_path / "c", trial__max_steps=8)
    dataset = build(config, progress=False)
    kit.data.prefetch(config, progress=False)
    assert counted(config, 8) == predict_reading(config, dataset) == {f"{name}_per_sample": 0 for name in NAMES}


def test_two_ranks_and_decoded_chunks_kept_are_counted(tmp_path, tiny_config):
    config = config_of(tiny_config, tmp_path / "t.zarr", None, trial__max_steps=16, loader__cache_bytes=40_000)
    dataset = build(config, progress=False)
    kept, plain = (
        predict_reading(one, dataset)["requests_per_sample"]
        for one in (config, config.replace({"loader.cache_bytes": 0}))
    )
    assert kept <= plain
    # Which chunks are evicted depends on the order in which threads decode.
    assert counted(config, 16)["requests_per_sample"] == pytest.approx(kept, rel=0.3)
    two = predict_reading(config.replace({"loader.cache_bytes": 0}), dataset, 2)["requests_per_sample"]
    assert two == pytest.approx(plain, rel=0.15)


@pytest.mark.parametrize(("order", "filled"), crossed(["random", "grid", "block"], [None, 0.0, 0.5]))
def test_a_store_that_kit_did_not_build_is_looked_at(cloud, tmp_path, tiny_config, order, filled):
    """Sizes decide which neighbours share a request, and tags what a cache holds."""
    url = cloud.url(f"foreign-{order}-{filled}/t.zarr")
    folder = None if filled is None else tmp_path / "c"
    config = config_of(tiny_config, url, folder, "shards", order, trial__max_steps=8).replace(GAP)
    if filled is None:
        config = config.replace({"cache.size_bytes": 0})
    build(config, progress=False)
    sync(open_store(url, read_only=False).delete_dir(FOLDER))
    dataset = kit.open_dataset(config)
    assert dataset.manifest is None
    if filled:
        fill(config, filled)
    predicted = predict_reading(config, dataset)
    few = 4 / (8 * config.loader.batch_size)  # requests, as above
    found = counted(config, 8)
    assert found["requests_per_sample"] == pytest.approx(predicted["requests_per_sample"], rel=BUSY, abs=few)
    tolerances = {"rel": BETWEEN, "abs": few * REQUEST_BYTES} if filled else {"rel": BUSY}
    assert found["bytes_per_sample"] == pytest.approx(predicted["bytes_per_sample"], **tolerances)


@pytest.mark.filterwarnings("ignore:.*absent:kit.errors.KitWarning")
@pytest.mark.parametrize(("shards", "filled"), [*product([(16, 16), None], [None, 0.0, 1.0])])
def test_what_was_never_written_is_expected_to_be_absent(cloud, tmp_path, shards, filled):
    url = cloud.url(f"sparse-{shards is None}-{filled}/s.zarr")
    array = zarr.open_group(open_store(url, read_only=False), mode="w").create_array(
        "u", shape=(96, 96), chunks=(4, 4), shards=shards, dtype="f4", dimension_names=("y", "x")
    )
    array[:32] = np.random.default_rng(0).normal(size=(32, 96))  # two thirds are not there
    config = kit.Config.make({
        "data": {"url": url, "patch": {"y": 6, "x": 6}, "samples_per_epoch": 256, "standardize": False},
        "loader": {"batch_size": 8}, "training": {"max_epochs": 4}, "trial": {"max_steps": 16},
        "cache": {"size_bytes": 0 if filled is None else 8 << 20, "folder": str(tmp_path / "c")},
        "chunking": {"latency_seconds": 0.0},
    })  # fmt: skip
    if filled:
        kit.data.prefetch(config, progress=False)
    predicted = predict_reading(config, kit.open_dataset(config))
    assert counted(config, 16) == pytest.approx(predicted, rel=BUSY if filled is None else BETWEEN, abs=0.1)


def test_a_cache_of_stores_that_are_joined_is_known_store_by_store(cloud, tmp_path, tiny_config):
    urls = [cloud.url(f"expected-joined/{number}.zarr") for number in range(2)]
    kept = [config_of(tiny_config, url, tmp_path / "c", trial__max_steps=8) for url in urls]
    for config in kept:
        build(config, progress=False)
    patch = {"member": 1, **kept[0].data.patch}
    joined = kept[0].replace({"data.patch": patch, "data.more": (urls[1],), "data.join": "member"})
    cold = predict_reading(joined, kit.open_dataset(joined))
    kit.data.prefetch(kept[1], progress=False)
    predicted = predict_reading(joined, kit.open_dataset(joined))
    assert predicted["bytes_per_sample"] == pytest.approx(cold["bytes_per_sample"] / 2, rel=0.2)
    assert counted(joined, 8) == pytest.approx(predicted, rel=0.15)


def test_a_cache_that_was_filled_in_part_is_known_from_a_few_of_its_objects(cloud, tmp_path, tiny_config, monkeypatch):
    """It is filled in the order of the store: what lies beside objects that are held is held, mostly."""
    url = cloud.url("in-part/t.zarr")
    config = config_of(tiny_config, url, tmp_path / "c", "chunks", trial__max_steps=8)
    build(config, progress=False)
    sync(open_store(url, read_only=False).delete_dir(FOLDER))
    dataset = kit.open_dataset(config)
    cold = predict_reading(config, dataset)["bytes_per_sample"]
    fill(config.replace({"loader.requests_in_flight": 1}), 0.4)  # what is held is the same every time
    told = []
    for looked_at in (1000, 12):
        monkeypatch.setattr("kit.data.stream.expected._LOOKED_AT", looked_at)
        told.append(predict_reading(config, dataset)["bytes_per_sample"])
    assert 0.2 * cold < told[0] < 0.8 * cold
    assert told[1] == pytest.approx(told[0], rel=0.1)


def test_what_a_run_asks_for_after_its_beginning_is_told_apart(tmp_path, tiny_config):
    """Nothing is there at first: of a large chunk, the first batches ask for most that a short epoch does."""
    config = config_of(tiny_config, tmp_path / "t.zarr", None, "chunks", "grid").replace({
        "data.patch": {"time": 1, "lat": 8, "lon": 8}, "loader.batch_size": 16, "loader.batches_ahead": 8,
        "chunking.chunk": {"time": 4, "lat": 16, "lon": 16}, "training.max_epochs": 1,
    })  # fmt: skip
    dataset, left_out = build(config, progress=False), 10
    data = PatchData(config)
    loader = data.train_dataloader()
    for place, _ in enumerate(loader, 1):
        wait_until(lambda: not coming(loader))
        if place == left_out:
            before = settled(loader)["requests"]
    found = settled(loader)["requests"] - before
    data.teardown()
    samples = 16 * (len(loader) - left_out - 8)  # of batches that were begun after
    assert requests_after(config, dataset, left_out) * samples == pytest.approx(found, abs=2)
    assert requests_after(config, dataset, left_out) < 0.6 * requests_after(config, dataset, 0)
