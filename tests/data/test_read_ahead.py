"""Chunks of the window after the next are on their way before their turn, and are decoded when it comes."""

import numpy as np
import pytest
from waiting import PATIENCE_SECONDS, wait_until
from zarr_stores import write_array

from kit.data.open_dataset import open_dataset
from kit.data.stream.engine import Engine
from kit.data.stream.reader import Reader

SIDE, ROWS = 16, 5
PATCH = (SIDE, SIDE)
CHUNK_BYTES = SIDE * SIDE * 4


@pytest.fixture(scope="module", params=[None, (SIDE, 4 * SIDE)], ids=["chunks", "shards"])
def dataset(request, tmp_path_factory):
    """A row of four chunks for each window."""
    folder = tmp_path_factory.mktemp("rows")
    values = np.random.default_rng(0).normal(size=(ROWS * SIDE, 4 * SIDE)).astype(np.float32)
    write_array(folder, "a", values, chunks=PATCH, shards=request.param)
    return open_dataset(str(folder))


def row(window):
    return np.array([(window * SIDE, column * SIDE) for column in range(4)])


@pytest.fixture
def reader(dataset):
    engine = Engine(dataset)
    reader: Reader = engine._open()
    yield reader
    engine.close()


def test_a_window_before_its_turn_is_read_and_not_decoded(reader):
    queue = reader._queue
    reader.release(-1)
    for window in range(3):
        reader.pin([row(window)], PATCH, window)
    wait_until(lambda: queue._read_ahead.nbytes > 0 and queue.cache.pinned_bytes == 8 * CHUNK_BYTES)
    wait_until(lambda: queue.budget.taken_bytes == 0)  # what waits takes no room of requests
    reader.release(0)
    wait_until(lambda: queue.cache.pinned_bytes == 8 * CHUNK_BYTES and queue._read_ahead.nbytes == 0)
    assert reader._counters.values()["chunks_decoded"] == 12


def test_what_a_batch_waits_for_is_decoded_before_its_turn(reader):
    reader.release(-1)
    reader.pin([row(4)], PATCH, 4)
    wait_until(lambda: reader._queue._read_ahead.nbytes > 0)
    values, _ = reader.start(row(4), PATCH).result(PATIENCE_SECONDS)
    assert values.shape == (4, 1, SIDE, SIDE)
    wait_until(lambda: reader._queue._read_ahead.nbytes == 0)


def test_an_answer_whose_window_was_given_up_is_dropped(reader):
    reader.release(-1)
    reader.pin([row(2)], PATCH, 2)
    wait_until(lambda: reader._queue._read_ahead.nbytes > 0)
    reader.release(2)
    wait_until(lambda: reader._queue._read_ahead.nbytes == reader._queue.cache.pinned_bytes == 0)
    assert reader._counters.values()["chunks_decoded"] == 0


@pytest.mark.parametrize(("memory_bytes", "windows"), [(1 << 30, 3), (80 * CHUNK_BYTES, 2)])
def test_a_stream_asks_for_the_window_after_the_next_where_there_is_memory(dataset, memory_bytes, windows):
    with Engine(dataset, memory_bytes=memory_bytes, batches_ahead=0) as engine:
        batches = ((row(window), window) for window in range(ROWS))
        stream = engine.stream_windows(batches, PATCH)
        next(stream)
        wait_until(lambda: engine.counters["cache_misses"] == 4 * windows)
        assert [values.shape for values, _ in stream] == [(4, 1, SIDE, SIDE)] * (ROWS - 1)
