"""An index is fetched once whoever asks, its failure forgotten, and old ones dropped beyond a fixed memory."""

import threading
import tracemalloc

import numpy as np
import pytest
from waiting import PATIENCE_SECONDS

from kit.data.stream.codec import ShardIndexes

INDEX = np.zeros((4, 2), np.uint64)


def test_many_threads_fetch_once():
    indexes, gate, fetched = ShardIndexes(), threading.Event(), []

    def fetch():
        gate.wait(PATIENCE_SECONDS)
        fetched.append(1)
        return INDEX

    got = []
    threads = [threading.Thread(target=lambda: got.append(indexes.get("a", fetch))) for _ in range(6)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert fetched == [1]
    assert all(index is INDEX for index in got)
    assert len(got) == 6


def test_a_failure_reaches_who_waits_and_is_tried_again():
    indexes = ShardIndexes()

    def fails():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        indexes.get("a", fails)
    assert indexes.get("a", lambda: INDEX) is INDEX


def test_a_shard_that_is_not_there_is_remembered_as_such():
    indexes = ShardIndexes()
    assert indexes.get("a", lambda: None) is None
    assert indexes.get("a", lambda: INDEX) is None
    assert 0 < indexes.nbytes < INDEX.nbytes + 256, "only that it is known takes memory"


def test_the_least_recently_used_goes_first():
    one = ShardIndexes()
    one.get("a", lambda: INDEX)
    indexes, fetched = ShardIndexes(2 * one.nbytes), []

    def get(key):
        return indexes.get(key, lambda: fetched.append(key) or INDEX)

    for key in "ab":
        get(key)
    get("a")
    get("c")
    assert indexes.nbytes == 2 * one.nbytes
    get("a")
    assert fetched == ["a", "b", "c"]
    get("b")
    assert fetched == ["a", "b", "c", "b"]


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 4, 4, 2), (16, 16, 2)])
def test_indexes_count_as_what_python_allocates_for_them(shape):
    indexes = ShardIndexes()
    indexes.get("warm", lambda: np.zeros(shape, np.uint64))
    tracemalloc.start()
    try:
        for number in range(2000):
            indexes.get(f"x/c/{number}/0/0", lambda: np.zeros(shape, np.uint64))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * indexes.nbytes < taken < indexes.nbytes


def test_one_larger_than_the_memory_is_still_given():
    assert ShardIndexes(1).get("a", lambda: INDEX) is INDEX
