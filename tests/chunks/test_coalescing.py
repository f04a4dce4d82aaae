"""Neighbours share a request where that costs less than two, and every byte asked for comes exactly once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kit.chunks.requests import LATENCIES, Coalescing, runs


@st.composite
def spans(draw):
    """Parts of an object that do not overlap, in any order."""
    place, found = 0, []
    for item in range(draw(st.integers(0, 20))):
        place += draw(st.integers(0, 30))
        size = draw(st.integers(1, 40))
        found.append((place, place + size, item))
        place += size
    return draw(st.permutations(found))


@given(spans(), st.integers(0, 40), st.integers(1, 200))
def test_every_part_is_in_one_request_and_no_gap_or_request_is_too_long(parts, gap, longest):
    found = runs(parts, Coalescing(gap, longest))
    assert sorted(item for run in found for item in run.items) == sorted(parts)
    for run in found:
        assert (run.first, run.last) == (run.items[0][0], run.items[-1][1])
        gaps = [after[0] - before[1] for before, after in pairwise(run.items)]
        assert all(0 <= between <= gap for between in gaps)
        assert run.wasted_bytes == sum(gaps)
        assert len(run.items) == 1 or run.last - run.first <= longest


@given(spans(), st.integers(0, 40))
def test_no_two_requests_could_have_been_one(parts, gap):
    found = runs(parts, Coalescing(gap, 1 << 30))
    assert all(after.first - before.last > gap for before, after in pairwise(found))


def test_parts_that_overlap_are_read_apart():
    assert len(runs([(0, 10, "a"), (5, 15, "b")], Coalescing(100, 1000))) == 2


def test_the_gap_is_what_passes_while_a_request_would_wait():
    alone = Coalescing.of(0.03, 80e6, 400e6, 1)
    assert alone.gap_bytes == 2_400_000
    assert alone.longest_bytes == LATENCIES * 2_400_000
    crowded = Coalescing.of(0.03, 80e6, 400e6, 100)
    assert crowded.gap_bytes == 120_000
    assert Coalescing.of(0.0, 80e6, 400e6, 8).gap_bytes == 0
