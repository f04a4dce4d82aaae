"""The cache against a plain model: a chunk is waited for or decoded, kept within its bytes; nobody waits in vain."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.data.stream.chunk_cache import BatchPart, ChunkCache
from kit.data.stream.pool import JobGroup
from kit.data.stream.scatter import ChunkUses

STORED = SimpleNamespace(name="a", chunk=(4,))
CHUNK = np.arange(4, dtype=np.float32)
"""16 bytes."""


def part_of(place):
    batch = JobGroup()
    target = np.zeros((1, 4), np.float32)
    batch.expect(1, lambda: target)
    table = np.array([[0, 0, 4, 0, 4]])
    return BatchPart(batch, ChunkUses(table, [0, 1], {(place,): 0}), target)


def arrive(cache, chunk):
    """The chunk has been read and decoded."""
    for part in cache.settle([(chunk, CHUNK)])[0]:
        part.scatter(chunk.coords, CHUNK)


def ask(cache, *places):
    """(parts, those served from the cache, chunks to read)."""
    parts = [part_of(place) for place in places]
    served, new = [], []
    for part in parts:
        here, unread = cache.join(STORED, 0, part)
        new += unread
        for coords, decoded in here.items():
            part.scatter(coords, decoded)
            served.append(part)
    return parts, served, new


def test_a_chunk_on_its_way_is_joined_and_serves_all():
    cache = ChunkCache()
    (first,), _, (chunk,) = ask(cache, 1)
    (second,), here, new = ask(cache, 1)
    assert (here, new) == ([], [])
    arrive(cache, chunk)
    for part in (first, second):
        assert np.array_equal(part.batch.future.result(0)[0], CHUNK)
    assert ask(cache, 1)[2]  # without a budget nothing is kept


def test_variables_do_not_share_chunks():
    cache = ChunkCache()
    assert len(cache.join(STORED, 0, part_of(1))[1]) == 1
    assert len(cache.join(STORED, 1, part_of(1))[1]) == 1


def test_the_least_recently_used_chunk_goes_first():
    cache = ChunkCache(budget_bytes=2 * 16)
    for place in (1, 2):
        arrive(cache, ask(cache, place)[2][0])
    ask(cache, 1)
    arrive(cache, ask(cache, 3)[2][0])
    assert cache.evictable_bytes == 2 * 16
    assert not ask(cache, 1)[2]
    assert not ask(cache, 3)[2]
    assert ask(cache, 2)[2]


def test_a_chunk_larger_than_the_budget_is_not_kept():
    cache = ChunkCache(budget_bytes=15)
    arrive(cache, ask(cache, 1)[2][0])
    assert cache.evictable_bytes == 0
    assert ask(cache, 1)[2]


def test_a_filled_chunk_costs_one_element():
    cache = ChunkCache(budget_bytes=8)
    (chunk,) = ask(cache, 1)[2]
    cache.settle([(chunk, np.broadcast_to(np.float32(3), (1000,)))])
    assert cache.evictable_bytes == 4


def test_a_window_keeps_its_chunks_until_it_is_released():
    cache = ChunkCache()
    first = cache.pin(STORED, 0, [(1,), (2,)], window=1)
    second = cache.pin(STORED, 0, [(2,), (3,)], window=2)
    assert ([chunk.coords for chunk in first], [chunk.coords for chunk in second]) == ([(1,), (2,)], [(3,)])
    for chunk in (*first, *second):
        arrive(cache, chunk)
    assert cache.pinned_bytes == 3 * 16
    cache.release(1)
    assert cache.pinned_bytes == 2 * 16
    assert not ask(cache, 2)[2]
    cache.release(2)
    assert cache.pinned_bytes == 0
    assert ask(cache, 2)[2]


def test_whoever_knows_a_chunk_that_was_dropped_does_not_keep_what_was_decoded():
    cache = ChunkCache(budget_bytes=16)
    (held,) = cache.pin(STORED, 0, [(1,)], window=1)
    old, new = (ask(cache, place)[2][0] for place in (2, 3))
    for chunk in (held, old, new):
        arrive(cache, chunk)
    assert held.decoded is not None
    cache.release(1)
    assert held.decoded is None
    assert old.decoded is None
    assert new.decoded is not None


def test_spare_memory_keeps_a_chunk_until_the_batches_that_waited_for_it_are_whole():
    cache = ChunkCache(spare_bytes=lambda: 16)
    (first, second), _, (chunk,) = ask(cache, 1, 1)
    arrive(cache, chunk)
    assert cache.transient_bytes == 16
    cache.end_batch(first.batch)
    (third,), served, new = ask(cache, 1)
    assert (served, new) == ([third], [])
    cache.end_batch(third.batch)  # it was served by what others keep
    assert cache.transient_bytes == 16
    cache.end_batch(second.batch)
    assert cache.transient_bytes == 0
    assert chunk.decoded is None
    assert ask(cache, 1)[2]


def test_nothing_is_lent_without_spare_memory_nor_to_batches_that_are_over():
    for spare, cancelled in ((15, False), (16, True)):
        cache = ChunkCache(spare_bytes=lambda: spare)  # noqa: B023 - asked in this turn
        (part,), _, (chunk,) = ask(cache, 1)
        if cancelled:
            part.batch.future.cancel()
        cache.settle([(chunk, CHUNK)])
        assert (cache.transient_bytes, chunk.decoded) == (0, None)
        assert ask(cache, 1)[2]


def test_of_chunks_that_come_together_as_many_are_kept_as_there_is_spare_memory_for():
    cache = ChunkCache(spare_bytes=lambda: 40 - cache.transient_bytes)
    parts, _, chunks = ask(cache, 1, 2, 3)
    assert cache.settle((chunk, CHUNK) for chunk in chunks) == [[part] for part in parts]
    assert cache.transient_bytes == 32
    assert [chunk.decoded is None for chunk in chunks] == [False, False, True]


def test_a_window_may_hold_what_is_lent_and_keeps_it_for_longer():
    cache = ChunkCache(spare_bytes=lambda: 16)
    (part,), _, (chunk,) = ask(cache, 1)
    arrive(cache, chunk)
    assert cache.pin(STORED, 0, [(1,)], window=1) == []
    assert (cache.transient_bytes, cache.pinned_bytes) == (0, 16)
    cache.end_batch(part.batch)
    assert not ask(cache, 1)[2]
    cache.release(1)
    assert (cache.transient_bytes, cache.pinned_bytes, chunk.decoded) == (0, 0, None)


def test_what_a_window_released_before_it_came_is_only_given_to_who_waits():
    cache = ChunkCache()
    (chunk,) = cache.pin(STORED, 0, [(1,)], window=1)
    (part,), _, _ = ask(cache, 1)
    cache.release(1)
    arrive(cache, chunk)
    assert part.batch.future.done()
    assert cache.pinned_bytes == 0
    assert cache.pin(STORED, 0, [(1,)], window=1) == []  # too late: that window is over


def test_a_failure_reaches_who_waits_and_the_next_ask_tries_again():
    cache = ChunkCache(100)
    (part,), _, (chunk,) = ask(cache, 1)
    cache.fail(chunk, OSError("gone"))
    assert isinstance(part.batch.future.exception(0), OSError)
    assert ask(cache, 1)[2]


def test_a_chunk_that_nobody_wants_any_more_is_forgotten_before_its_request():
    cache = ChunkCache(100)
    (part,), _, (chunk,) = ask(cache, 1)
    part.batch.future.cancel()
    assert cache.still_wanted([chunk]) == []
    assert ask(cache, 1)[2]


@given(
    st.integers(0, 5),
    st.integers(0, 3),
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(0, 7)),
            st.tuples(st.just("pin"), st.integers(0, 7)),
            st.tuples(st.just("arrive"), st.integers(0, 20)),
            st.tuples(st.just("fail"), st.integers(0, 20)),
            st.tuples(st.just("end"), st.integers(0, 20)),
            st.tuples(st.just("release"), st.just(0)),
        ),
        max_size=60,
    ),
)
@examples(200)
def test_whatever_happens_budgets_hold_and_everybody_is_told(budget, spare, steps):
    cache = ChunkCache(budget * 16, lambda: spare * 16 - cache.transient_bytes)
    coming, waiting, window, held = [], [], 1, set()
    for step, number in steps:
        if step == "ask":
            parts, _, new = ask(cache, number)
            waiting += parts
            coming += new
        elif step == "pin":
            coming += cache.pin(STORED, 0, [(number,)], window)
            held.add(number)
        elif step == "release":
            cache.release(window)
            window, held = window + 1, set()
        elif step == "end":
            if waiting:
                waiting[number % len(waiting)].batch.future.cancel()
                cache.end_batch(waiting[number % len(waiting)].batch)
        elif coming:
            chunk = coming.pop(number % len(coming))
            arrive(cache, chunk) if step == "arrive" else cache.fail(chunk, OSError())
        assert cache.evictable_bytes <= budget * 16
        assert cache.pinned_bytes <= len(held) * 16
        assert 0 <= cache.transient_bytes <= spare * 16
    for chunk in coming:
        arrive(cache, chunk)
    assert all(part.batch.future.done() for part in waiting)
    cache.release(window)
    for part in waiting:
        cache.end_batch(part.batch)
    assert (cache.pinned_bytes, cache.transient_bytes) == (0, 0)
    assert cache.evictable_bytes == 16 * sum(chunk.decoded is not None for chunk in cache._chunks.values())
