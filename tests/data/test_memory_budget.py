"""Room is never exceeded but by a request that is alone, and nobody waits for ever."""

import threading
import time

from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from waiting import PATIENCE_SECONDS

from kit.data.stream.memory import MemoryBudget


def test_what_fits_is_taken_and_what_does_not_waits_for_what_is_given_back():
    room = MemoryBudget(lambda: 10)
    first = room.try_take(6)
    assert room.try_take(5) is None
    assert room.try_take(4) is not None
    first.done()
    assert room.taken_bytes == 4
    assert room.try_take(6) is not None
    assert (room.most_bytes, room.largest_bytes) == (10, 6)


def test_a_request_that_is_alone_goes_ahead_whatever_its_size():
    room = MemoryBudget(lambda: -3)
    claim = room.try_take(100)
    assert room.try_take(1) is None
    claim.done()
    assert room.try_take(1) is not None


def test_a_claim_is_given_back_when_its_last_part_is_done():
    room = MemoryBudget(lambda: 100)
    claim = room.try_take(30)
    claim.share(3)
    claim.done()
    claim.done()
    assert room.taken_bytes == 30
    claim.done()
    assert room.taken_bytes == 0


def test_a_guess_is_corrected_by_what_came():
    room = MemoryBudget(lambda: 100)
    claim = room.try_take(30)
    claim.correct(12)
    assert room.taken_bytes == 12
    claim.correct(40)
    assert room.taken_bytes == 40
    claim.done()
    assert room.taken_bytes == 0


def test_the_limit_is_asked_for_each_time():
    limits = [10]
    room = MemoryBudget(lambda: limits[0])
    room.try_take(10)
    assert room.try_take(1) is None
    limits[0] = 11
    assert room.try_take(1) is not None


def test_closing_ends_every_wait():
    room = MemoryBudget(lambda: 1)
    room.try_take(1)
    assert room.try_take(1) is None
    room.close()
    assert room.try_take(1) is not None


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 50), st.integers(1, 6))
@examples(40)
def test_threads_never_hold_more_than_the_limit_and_all_get_through(sizes, limit, threads):
    room = MemoryBudget(lambda: limit)
    queue, through = [*sizes], []

    def work():
        while queue:
            try:
                size = queue.pop()
            except IndexError:
                return
            while (claim := room.try_take(size)) is None:
                time.sleep(0)
            through.append(size)
            claim.done()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_SECONDS)
    assert sorted(through) == sorted(sizes)
    assert room.most_bytes <= max(limit, *sizes)
    assert room.taken_bytes == 0
