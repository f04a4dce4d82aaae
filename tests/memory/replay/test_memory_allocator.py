"""The caching allocator: cases worked out by hand from torch's rules, and two plain models that must agree always."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.errors import PlanError
from kit.memory.replay.allocator import ACTIVE, FREE, UNMAPPED, CachingAllocator

KIB, MIB = 1 << 10, 1 << 20
PAGES = {True: 2 * MIB, False: 20 * MIB}


def allocator_with(*sizes, **options):
    allocator = CachingAllocator(**options)
    return allocator, [allocator.malloc(size) for size in sizes]


def held(allocator):
    return allocator.allocated_bytes, allocator.reserved_bytes


# -- by hand: sizes of segments


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        # 12 MiB hold 11 MiB: what is left is not above 1 MiB, so that the block keeps it.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)
def test_a_first_request_holds_and_reserves_what_the_rules_say(size, allocated, reserved):
    allocator, _ = allocator_with(size)
    assert held(allocator) == (allocated, reserved)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (20 * MIB, 20 * MIB), (20 * MIB + 1, 40 * MIB)],
)
def test_expandable_segments_grow_by_whole_pages_and_waste_nothing(size, reserved):
    allocator, _ = allocator_with(size, expandable_segments=True)
    assert held(allocator) == (-(-size // 512) * 512, reserved)


def test_small_blocks_share_a_segment_of_two_mebibytes():
    allocator, _ = allocator_with(MIB, MIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_thirteen_blocks_of_one_and_a_half_mebibytes_fill_a_segment_and_the_last_keeps_the_rest():
    allocator, _ = allocator_with(*[3 * MIB // 2] * 13)
    assert held(allocator) == (20 * MIB, 20 * MIB)


# -- by hand: which block is taken


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator, blocks = allocator_with(30 * MIB, 14 * MIB, 20 * MIB)
    for block in blocks:
        allocator.free(block)
    taken = allocator.malloc(13 * MIB)
    assert (taken.address, taken.size_bytes) == (blocks[1].address, 14 * MIB)


def test_of_equal_blocks_the_lowest_address_is_taken():
    allocator, blocks = allocator_with(12 * MIB, 12 * MIB)
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(12 * MIB).address == blocks[0].address


def test_streams_do_not_share_what_is_free():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB, stream=0))
    allocator.malloc(12 * MIB, stream=1)
    assert held(allocator) == (12 * MIB, 24 * MIB)


def test_small_requests_do_not_take_large_blocks():
    allocator, (block,) = allocator_with(12 * MIB)
    allocator.free(block)
    allocator.malloc(512)
    assert allocator.reserved_bytes == 14 * MIB


def test_freed_neighbours_become_one_block_from_either_side():
    allocator, (first, second, third, fourth) = allocator_with(*[5 * MIB] * 4)
    assert allocator.reserved_bytes == 20 * MIB
    for block in (first, third, second):
        allocator.free(block)
    assert allocator.malloc(15 * MIB).address == first.address
    assert held(allocator) == (20 * MIB, 20 * MIB)
    assert fourth.state == ACTIVE


def test_a_block_cannot_be_freed_twice():
    allocator, (block,) = allocator_with(512)
    allocator.free(block)
    with pytest.raises(PlanError, match="freed twice"):
        allocator.free(block)


# -- by hand: at the limit


def test_unused_segments_are_given_back_before_memory_runs_out():
    allocator, blocks = allocator_with(16 * MIB, 16 * MIB, capacity_bytes=40 * MIB)
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(30 * MIB) is not None
    assert (allocator.retries, held(allocator)) == (1, (30 * MIB, 30 * MIB))
    assert allocator.peak_reserved_bytes == 32 * MIB


def test_a_segment_in_use_by_one_small_part_of_it_cannot_be_given_back():
    allocator, (first, second) = allocator_with(16 * MIB, 2 * MIB, capacity_bytes=40 * MIB)
    allocator.free(first)
    assert second.size_bytes == 2 * MIB
    assert allocator.malloc(30 * MIB) is None
    failed = allocator.out_of_memory
    assert (failed.size_bytes, failed.allocated_bytes, failed.reserved_bytes) == (30 * MIB, 2 * MIB, 20 * MIB)
    assert "30 MiB" in str(failed)


def test_a_segment_whose_start_or_end_is_free_is_kept():
    allocator, (first, _second, third) = allocator_with(5 * MIB, 5 * MIB, 10 * MIB - 512, capacity_bytes=39 * MIB)
    allocator.free(first)
    allocator.free(third)
    assert allocator.malloc(20 * MIB) is None
    assert held(allocator) == (5 * MIB, 20 * MIB)


def test_giving_back_reaches_every_stream_and_the_small_segments():
    allocator = CachingAllocator(capacity_bytes=24 * MIB)
    for size, stream in ((512, 0), (512, 1), (20 * MIB, 2)):
        allocator.free(allocator.malloc(size, stream))
    assert allocator.reserved_bytes == 24 * MIB
    assert allocator.malloc(24 * MIB, 3) is not None
    assert allocator.reserved_bytes == 24 * MIB


def test_after_running_out_smaller_requests_are_still_met_and_the_first_failure_is_kept():
    allocator, _ = allocator_with(20 * MIB, capacity_bytes=30 * MIB)
    assert allocator.malloc(16 * MIB) is None
    assert allocator.malloc(10 * MIB) is not None
    assert allocator.malloc(512) is None
    assert allocator.out_of_memory.size_bytes == 16 * MIB


def test_no_capacity_at_all_is_out_of_memory_at_once_and_less_is_refused():
    _, blocks = allocator_with(1, capacity_bytes=0)
    assert blocks == [None]
    with pytest.raises(PlanError, match="at least 0"):
        CachingAllocator(capacity_bytes=-1)


def test_growing_batches_fragment_segments_but_not_expandable_ones():
    """The case expandable segments were made for: each round asks for a little more than was freed."""
    peaks = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=expandable)
        for size in (40 * MIB, 44 * MIB, 48 * MIB):
            for block in [allocator.malloc(size), allocator.malloc(size)]:
                allocator.free(block)
        peaks.append(allocator.peak_reserved_bytes)
    assert peaks == [(80 + 88 + 96) * MIB, 100 * MIB]


def test_free_pages_are_unmapped_at_the_limit_and_partly_used_ones_are_kept():
    allocator = CachingAllocator(capacity_bytes=80 * MIB, expandable_segments=True)
    first, second = allocator.malloc(50 * MIB), allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(first)
    # 50 of 60 MiB are free: the first two pages wholly, the third in part. 40 MiB need two pages of another stream.
    assert allocator.malloc(40 * MIB, stream=1) is not None
    assert (allocator.retries, held(allocator)) == (1, (50 * MIB, 60 * MIB))
    # One page of the hole at the start is mapped again; two would be too many, although 10 MiB after it are free.
    assert allocator.malloc(20 * MIB).address == first.address
    assert (second.state, allocator.reserved_bytes) == (ACTIVE, 80 * MIB)
    assert allocator.malloc(25 * MIB) is None


def test_a_hole_of_just_the_right_size_is_filled_again():
    allocator = CachingAllocator(capacity_bytes=60 * MIB, expandable_segments=True)
    first, _second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.free(allocator.malloc(40 * MIB, stream=1))
    assert allocator.malloc(20 * MIB).address == first.address


def test_an_expandable_block_that_can_grow_is_kept_for_larger_requests():
    allocator = CachingAllocator(expandable_segments=True)
    first, _second, _third = (allocator.malloc(size) for size in (18 * MIB, 2 * MIB, 4 * MIB))
    allocator.free(first)
    # Free are 18 MiB at the start and 16 MiB at the end. The end would be the better fit, but it can still grow.
    assert allocator.malloc(15 * MIB).address == first.address
    # The rest of the start is too small now.
    assert allocator.malloc(14 * MIB).address == first.address + 24 * MIB


def test_what_the_driver_gives_and_gets_back_can_be_watched():
    seen = []
    allocator = CachingAllocator(40 * MIB, watch=lambda address, size, stream: seen.append((size, stream)))
    allocator.free(allocator.malloc(30 * MIB, 1))
    allocator.malloc(20 * MIB, 2)
    assert seen == [(30 * MIB, 1), (-30 * MIB, 1), (20 * MIB, 2)]


# -- plain models, slow and simple


class PlainSegments:
    """Segments as lists of [size, used]; everything is found by looking at all of it."""

    def __init__(self, capacity):
        self.capacity = float("inf") if capacity is None else capacity
        self.segments = []
        self.count = 0

    @property
    def reserved(self):
        return sum(size for segment in self.segments for size, _ in segment["blocks"])

    @property
    def allocated(self):
        return sum(size for segment in self.segments for size, owner in segment["blocks"] if owner)

    def malloc(self, owner, size, stream):
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        found = self._best(size, stream, small) or self._new(size, stream, small)
        if found is None:
            self.segments = [s for s in self.segments if any(owner for _, owner in s["blocks"])]
            found = self._new(size, stream, small)
        if found is None:
            return False
        segment, place = found
        rest = segment["blocks"][place][0] - size
        if rest >= 512 if small else rest > MIB:
            segment["blocks"][place : place + 1] = [[size, owner], [rest, None]]
        else:
            segment["blocks"][place][1] = owner
        return True

    def _best(self, size, stream, small):
        free = [
            (block, number, place)
            for number, segment in enumerate(self.segments)
            for place, (block, owner) in enumerate(segment["blocks"])
            if owner is None and block >= size and (segment["stream"], segment["small"]) == (stream, small)
        ]
        if not free:
            return None
        _, number, place = min(free)
        return self.segments[number], place

    def _new(self, size, stream, small):
        total = PAGES[small] if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + total > self.capacity:
            return None
        self.segments.append({"stream": stream, "small": small, "blocks": [[total, None]]})
        return self.segments[-1], 0

    def free(self, owner):
        for segment in self.segments:
            merged = []
            for size, holder in segment["blocks"]:
                holder = None if holder == owner else holder
                if merged and merged[-1][1] is None and holder is None:
                    merged[-1][0] += size
                else:
                    merged.append([size, holder])
            segment["blocks"] = merged


class PlainPages:
    """One endless range of addresses per stream and kind: pages that are mapped, and spans that are used."""

    def __init__(self, capacity):
        self.capacity = float("inf") if capacity is None else capacity
        self.spaces = {}

    @property
    def reserved(self):
        return sum(len(space["pages"]) * PAGES[small] for (_, small), space in self.spaces.items())

    @property
    def allocated(self):
        return sum(end - start for space in self.spaces.values() for start, end in space["used"].values())

    def malloc(self, owner, size, stream):
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        page, space = PAGES[small], self.spaces.setdefault((stream, small), {"pages": set(), "used": {}})
        start = self._best(space, page, size)
        if start is None:
            start = self._expand(space, page, size)
        if start is None:
            self._unmap_all()
            start = self._expand(space, page, size)
        if start is None:
            return False
        space["used"][owner] = (start, start + size)
        return True

    def free(self, owner):
        for space in self.spaces.values():
            space["used"].pop(owner, None)

    @staticmethod
    def _gaps(space):
        """Spans between the used ones, the last without end."""
        ends = [0]
        for start, end in sorted(space["used"].values()):
            if start > ends[-1]:
                yield ends[-1], start
            ends.append(end)
        yield ends[-1], 1 << 60

    def _spans(self, space, page):
        """Per gap: (start, end, mapped), in turn what is free and a hole; the last gap ends in a hole."""
        for low, high in self._gaps(space):
            spans = []
            edges = {edge * page for number in space["pages"] for edge in (number, number + 1)}
            marks = sorted({low, high, *(edge for edge in edges if low < edge < high)})
            for start, end in pairwise(marks):
                mapped = start // page in space["pages"]
                if spans and spans[-1][2] == mapped:
                    spans[-1] = (spans[-1][0], end, mapped)
                else:
                    spans.append((start, end, mapped))
            yield spans

    def _best(self, space, page, size):
        """The smallest that is free; but while the next could grow to less than this one, the next."""
        free = []
        for spans in self._spans(space, page):
            for place, (start, end, mapped) in enumerate(spans):
                if mapped and end - start >= size:
                    grown = spans[place + 1][1] if place + 1 < len(spans) else end
                    free.append((end - start, start, grown - start))
        free.sort()
        place = 0
        while place + 1 < len(free) and free[place + 1][2] < free[place][2]:
            place += 1
        return free[place][1] if free else None

    def _expand(self, space, page, size):
        """From the first hole with room, or what is free before it, map hole after hole until it is enough."""
        for spans in self._spans(space, page):
            for place, (start, _, mapped) in enumerate(spans):
                begin = spans[place - 1][0] if place else start
                if mapped or spans[-1][1] - begin < size:
                    continue
                for hole, end, backed in spans[place:]:
                    if backed or hole >= begin + size:
                        continue
                    pages = set(range(hole // page, -(-min(end, begin + size) // page)))
                    if self.reserved + len(pages) * page > self.capacity:
                        return None
                    space["pages"] |= pages
                return begin
        raise AssertionError("the last hole has no end")

    def _unmap_all(self):
        for (_, small), space in self.spaces.items():
            page = PAGES[small]
            for start, end, mapped in [span for spans in self._spans(space, page) for span in spans]:
                if mapped:
                    space["pages"] -= set(range(-(-start // page), end // page))


SIZES = st.one_of(
    st.integers(1, 2 * MIB),
    st.integers(1, 40).map(lambda size: size * MIB),
    st.integers(1, 30 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 11 * MIB]),
)
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 0, 1])),
        st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
    ),
    min_size=8,
    max_size=60,
)
LIMITS = st.one_of(st.none(), st.integers(10, 60).map(lambda size: size * 2 * MIB), st.integers(0, 100 * MIB))


def play(requests, *allocators):
    """Ask every allocator the same; yields what each says after every request."""
    ours, *plain = allocators
    alive, asked = {}, 0
    for kind, number, stream in requests:
        if kind == "malloc":
            asked += 1
            block = ours.malloc(number, stream)
            answers = [block is not None, *(other.malloc(asked, number, stream) for other in plain)]
            if block is not None:
                alive[asked] = block
        elif alive:
            owner = sorted(alive)[number % len(alive)]
            ours.free(alive.pop(owner))
            answers = [None, *(other.free(owner) for other in plain)]
        else:
            continue
        yield alive, answers


@examples(300)
@given(REQUESTS, LIMITS)
def test_segments_agree_with_a_plain_model_at_every_request(requests, limit):
    ours, plain = CachingAllocator(limit), PlainSegments(limit)
    for _, answers in play(requests, ours, plain):
        assert answers[0] == answers[1]
        assert held(ours) == (plain.allocated, plain.reserved)


@examples(300)
@given(REQUESTS, LIMITS)
def test_expandable_segments_agree_with_a_plain_model_at_every_request(requests, limit):
    ours, plain = CachingAllocator(limit, expandable_segments=True), PlainPages(limit)
    for _, answers in play(requests, ours, plain):
        assert answers[0] == answers[1]
        assert held(ours) == (plain.allocated, plain.reserved)


@examples(200)
@given(REQUESTS, LIMITS, st.booleans())
def test_blocks_never_overlap_and_nothing_is_lost(requests, limit, expandable):
    allocator = CachingAllocator(limit, expandable_segments=expandable)
    blocks = {}
    for blocks, _ in play(requests, allocator):
        spans = sorted((block.address, block.address + block.size_bytes) for block in blocks.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(end - start for start, end in spans) <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert limit is None or allocator.peak_reserved_bytes <= limit
        check_chains(allocator)
    for block in blocks.values():
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def check_chains(allocator):
    total = 0
    for run in allocator.segments():
        for block, following in pairwise(run):
            assert block.following is following
            assert following.previous is block
            assert block.address + block.size_bytes == following.address
            assert not (block.state == following.state == FREE)
        assert UNMAPPED not in {block.state for block in run}
        total += sum(block.size_bytes for block in run)
    assert total == allocator.reserved_bytes


@examples(50)
@given(REQUESTS, LIMITS, st.booleans())
def test_the_same_requests_give_the_same_addresses(requests, limit, expandable):
    def addresses():
        allocator = CachingAllocator(limit, expandable_segments=expandable)
        return [[block.address for block in alive.values()] for alive, _ in play(requests, allocator)]

    assert addresses() == addresses()
