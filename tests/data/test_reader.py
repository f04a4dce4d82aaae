"""A reader keeps to its memory while far more streams through it, with every order, cache and kind of store."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from properties import at_night, crossed
from zarr_stores import AsyncStore, seen_through, write_array

from kit.chunks.resources import OPENING_BYTES
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.patches.loader import PatchLoader
from kit.data.samples import SamplePlan
from kit.data.stream.engine import Engine
from kit.data.stream.memory import batch_bytes, largest_chunk_bytes, loader_settings, refuse_too_little_memory
from kit.errors import ConfigError
from kit.sections import Loader
from kit.units import parse_bytes

SHAPE, CHUNK, PATCH = (64, 256, 256), (1, 64, 64), (1, 32, 32)
DATA_BYTES = 64 * 256 * 256 * 4
MEMORY_BYTES = DATA_BYTES // 10


@pytest.fixture(scope="module", params=[None, (8, 256, 256)], ids=["chunks", "shards"])
def stored(request, tmp_path_factory):
    """16 MiB that do not compress."""
    folder = tmp_path_factory.mktemp("stored")
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    write_array(folder, "a", values, chunks=CHUNK, shards=request.param)
    return open_dataset(str(folder)), values


def everywhere(samples=512, seed=0):
    random = np.random.default_rng(seed)
    return np.stack([random.integers(0, size - side + 1, samples) for size, side in zip(SHAPE, PATCH, strict=True)], 1)


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "cache_bytes"), crossed([None, AsyncStore], [0, MEMORY_BYTES // 4]))
def test_what_is_read_and_kept_stays_within_the_memory_given(stored, wrap, cache_bytes):
    dataset, values = stored
    source = seen_through(dataset, wrap) if wrap else dataset
    seen = []
    with Engine(
        source, memory_bytes=MEMORY_BYTES, cache_bytes=cache_bytes, requests_in_flight=128, batches_ahead=2
    ) as engine:
        batches = np.split(everywhere(2048), 64)
        for offsets, (got, _) in zip(batches, engine.stream(batches, PATCH), strict=True):
            seen.append(engine.held_bytes)
            day, y, x = offsets[0]
            assert np.array_equal(got[0, 0, 0], values[day, y : y + 32, x : x + 32])
        most, read = engine._open()._queue.budget.most_bytes, engine.counters["bytes_read"]
    batches_bytes = 4 * batch_bytes(dataset.select(), 32, PATCH)
    assert read > 5 * MEMORY_BYTES
    assert max(seen) + batches_bytes <= MEMORY_BYTES
    assert most + batches_bytes <= MEMORY_BYTES


@pytest.mark.parametrize(("grown", "handed_back"), [(MEMORY_BYTES // 4, False), (MEMORY_BYTES, True)])
def test_freed_memory_is_handed_back_once_the_process_has_grown_by_a_good_part_of_it(
    stored, grown, handed_back, monkeypatch
):
    held, times = iter([1 << 30]), []
    monkeypatch.setattr("kit.data.stream.receive.rss_bytes", lambda: next(held, (1 << 30) + grown))
    monkeypatch.setattr("kit.data.stream.receive.give_memory_back", lambda: times.append(1))
    with Engine(stored[0], memory_bytes=MEMORY_BYTES, decode_threads=1) as engine:
        for _ in engine.stream(np.split(everywhere(2048), 64), PATCH):
            pass
        read = engine.counters["chunks_decoded"] * 2 * CHUNK[1] * CHUNK[2] * 4
    assert bool(times) == handed_back
    assert len(times) <= read // (2 << 20)


def test_too_little_for_one_chunk_is_slow_and_right(stored):
    dataset, values = stored
    with Engine(dataset, memory_bytes=1) as engine:
        ((got, _),) = engine.stream([np.zeros((1, 3), np.int64)], (3, 70, 70))
        assert engine._open()._queue.budget.most_bytes <= 3 * 70 * 70 * 4 * 4
    assert np.array_equal(got[0, 0], values[:3, :70, :70])


def loader_of(dataset, order="random", **changes):
    block = {"block": CHUNK, "samples_per_block": 8, "blocks_per_window": 8} if order == "block" else {}
    plan = SamplePlan(
        shape=SHAPE, patch=PATCH, order=order, stride=(1, 1, 1) if order == "block" else PATCH, samples_per_epoch=2048,
        batch_size=32, world_size=1, seed=0, shuffle=True, drop_last=False, **block,
    )  # fmt: skip
    settings = Loader(**{"memory_bytes": 4 << 20, "window_bytes": 1 << 20, "batch_size": 32, **changes})
    return PatchLoader(dataset, plan, settings)


@pytest.mark.parametrize(("order", "num_workers"), crossed(["random", "grid", "block"], [0, 2]))
def test_every_order_streams_within_the_memory_of_a_config(stored, order, num_workers):
    loader = loader_of(stored[0], order, num_workers=num_workers)
    samples = sum(len(batch["values"]) for batch in loader)
    loader.close()
    assert samples == loader.plan.samples


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batches_ahead": 60}, "62 batches"),
        ({"cache_bytes": 8 << 20}, r"the cache \(8 MiB\)"),
        ({"order": "block", "window_bytes": 8 << 20}, r"the window \(8 MiB\)"),
        ({"decode_threads": 64, "memory_bytes": 1 << 20}, "65 chunks"),
        ({"num_workers": 9, "batches_ahead": 4}, "in each of 9 processes"),
    ],
)
def test_a_config_that_cannot_keep_to_its_memory_is_refused_before_reading(stored, changes, named):
    with pytest.raises(ConfigError, match=rf"loader\.memory_bytes: . MiB cannot hold.*{named}.*use at least"):
        loader_of(stored[0], **changes)


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_the_memory_that_is_said_to_be_enough_is(stored, validation):
    """Validation reads with a part of it, and so does training beside it."""
    little = {"loader.memory_bytes": "1 MiB", "loader.decode_threads": 64}
    asked = Config().replace({"data.validation_fraction": validation, **little})
    plan = loader_of(stored[0]).plan
    few = loader_settings(asked)
    for place in (0, 1):
        with pytest.raises(ConfigError, match="use at least ([0-9.]+ .iB)") as refused:
            refuse_too_little_memory(stored[0].select(), plan, few[place], 1 << 20)
        enough = re.search("use at least ([0-9.]+ .iB)", str(refused.value))[1]
        settings = loader_settings(asked.replace({"loader.memory_bytes": enough}))[place]
        refuse_too_little_memory(stored[0].select(), plan, settings, parse_bytes(enough))


def test_sizes_are_those_of_the_arrays(tmp_path):
    write_array(tmp_path, "a", np.zeros((4, 6), np.int16), chunks=(2, 3))
    write_array(tmp_path, "b", np.zeros((4, 6), np.float32), chunks=(4, 6))
    arrays = open_dataset(str(tmp_path)).select()
    assert batch_bytes(arrays, 5, (2, 2)) == 5 * 4 * (2 * (4 + 1) + 2)
    assert largest_chunk_bytes(arrays) == 4 * 6 * 4


MEASURE = """
import sys
import numpy as np
from kit.data.open_dataset import open_dataset
from kit.data.stream.engine import Engine
from kit.machine.processes import peak_rss_bytes

random = np.random.default_rng(0)
dataset, budget = open_dataset(sys.argv[1]), int(sys.argv[2])
with Engine(dataset, memory_bytes=budget, cache_bytes=budget // 8, requests_in_flight=256, batches_ahead=2) as engine:
    next(engine.stream([np.zeros((1, 3), np.int64)], (1, 32, 32)))
    before = peak_rss_bytes()
    batches = (np.stack([random.integers(0, [256, 225, 225]) for _ in range(32)]) for _ in range(200))
    for values, valid in engine.stream(batches, (1, 32, 32)):
        pass
    print(peak_rss_bytes() - before, engine.counters["bytes_read"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("shards", at_night([None, (32, 256, 256)], [None]))
def test_the_memory_of_a_process_grows_by_no_more_than_what_it_was_given(tmp_path, shards):
    values = np.random.default_rng(0).normal(size=(256, 256, 256)).astype(np.float32)  # 64 MiB
    write_array(tmp_path, "a", values, chunks=(1, 128, 128), shards=shards)
    budget = 6 << 20
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=300)
    done = run([sys.executable, "-c", MEASURE, str(tmp_path), str(budget)])
    grown, read = map(int, done.stdout.split())
    assert read > 10 * budget
    assert grown < budget + (10 << 20)  # threads and the allocator have their own


FROM_A_CLOUD = """
import sys
import gcsfs
import numpy as np
from kit.data.open_dataset import open_dataset
from kit.data.stream.engine import Engine
from kit.machine.processes import peak_rss_bytes

before, budget, random = peak_rss_bytes(), int(sys.argv[2]), np.random.default_rng(0)
everywhere = (random.integers(0, [1, 1985, 1985], (16, 3)) for _ in range(10_000))
engine = Engine(open_dataset(sys.argv[1]), memory_bytes=budget, cache_bytes=budget // 4, requests_in_flight=64)
with engine:
    for values, valid in engine.stream(everywhere, (4, 64, 64)):
        if engine.counters["bytes_read"] > 10 * budget:
            break
print(peak_rss_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shards", at_night([None, (4, 1024, 1024)], [(4, 1024, 1024)]))
def test_a_process_grows_by_no_more_than_it_was_given_and_opening_takes_however_much_it_streams(
    tmp_path, cloud, shards
):
    values = np.random.default_rng(0).integers(0, 1 << 12, (4, 2048, 2048)).astype(np.float32)  # 64 MiB
    write_array(tmp_path, "a", values, chunks=(4, 128, 128), shards=shards)
    url = cloud.upload(tmp_path, f"memory/{'chunks' if shards is None else 'shards'}")
    for budget in (24 << 20, 56 << 20):
        command = [sys.executable, "-c", FROM_A_CLOUD, url, str(budget)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < budget + OPENING_BYTES
