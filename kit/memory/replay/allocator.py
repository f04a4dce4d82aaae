"""CUDA's caching allocator as arithmetic: how many bytes a stream of requests reserves, and when memory runs out.

The driver gives memory in segments; the allocator cuts a segment into blocks and keeps freed blocks for later requests.
The constants are those of torch 2.13 (c10/core/AllocatorConfig.h), the rules those of
c10/cuda/CUDACachingAllocator.cpp as of 2025, with default settings:

1. A request is rounded up to a multiple of 512 bytes. Up to 1 MiB it is small, above it is large.
2. It takes the smallest free block of its stream and kind that is large enough; among equals, the lowest address.
3. If there is none, the driver gives a new segment: 2 MiB for a small request, 20 MiB for one below 10 MiB, otherwise
   the request itself rounded up to 2 MiB.
4. What is left of the block is split off as a free block: from 512 bytes (small) or above 1 MiB (large). A large block
   may therefore hold up to 1 MiB more than was requested.
5. A freed block merges with free neighbours.
6. When the limit is reached, every wholly free segment goes back to the driver and the request is tried once more; if
   it still fails, it is out of memory.

With expandable segments each stream has one range of addresses for small and one for large blocks, which grows by pages
of 2 MiB and 20 MiB; the rest is split off from 512 bytes, and at the limit every wholly free page is unmapped.

Not modelled: garbage collection, `max_split_size_mb` and rounding to powers of two (all off by default), CUDA graphs,
and blocks that wait for another stream. Addresses of segments only grow here; CUDA may give lower ones.

Invariants: the blocks of a segment form a chain by address, without gap or overlap; two free neighbours are always
merged; all sizes are multiples of 512 bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kit.errors import PlanError
from kit.units import format_bytes

MIN_BLOCK_BYTES: Final = 512
SMALL_BYTES: Final = 1 << 20
SMALL_SEGMENT_BYTES: Final = 2 << 20
LARGE_SEGMENT_BYTES: Final = 20 << 20
MIN_LARGE_BYTES: Final = 10 << 20
LARGE_ROUNDING_BYTES: Final = 2 << 20

ACTIVE: Final = 0
FREE: Final = 1
UNMAPPED: Final = 2

# A free block's place in its pool: by size, then by address, as one number, because numbers compare fast.
ADDRESS_BITS: Final = 50
_UNLIMITED: Final = 1 << 62
# Segments start on multiples of the larger page, so that pages of either size can be counted from address 0.
_FIRST_ADDRESS: Final = LARGE_SEGMENT_BYTES << 20
_ADDRESS_SPACE_BYTES: Final = 1 << 42


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use, free or not backed by memory; `malloc` gives it and `free` takes it."""

    address: int
    size_bytes: int
    pool: Pool
    state: int = ACTIVE
    previous: Block | None = None
    following: Block | None = None


class Pool:
    """The free blocks of one stream and one kind, small or large, sorted by size and address."""

    __slots__ = ("free", "is_small", "keys", "page_bytes", "split_bytes", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool) -> None:
        self.stream, self.is_small = stream, small
        self.keys: list[int] = []
        self.free: dict[int, Block] = {}
        self.unmapped: list[Block] = []
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.split_bytes = MIN_BLOCK_BYTES if small or expandable else SMALL_BYTES + 1

    def add(self, block: Block) -> None:
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.free[key] = block

    def remove(self, block: Block) -> None:
        key = block.size_bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.free[key]


def split(block: Block, size: int) -> Block:
    """Keep the first `size` bytes; the rest is returned, in its place between the neighbours."""
    rest = Block(block.address + size, block.size_bytes - size, block.pool, block.state)
    rest.previous, rest.following = block, block.following
    if block.following is not None:
        block.following.previous = rest
    block.following, block.size_bytes = rest, size
    return rest


def absorb(block: Block, following: Block) -> None:
    """Make one block of two neighbours."""
    block.size_bytes += following.size_bytes
    block.following = following.following
    if following.following is not None:
        following.following.previous = block


Watch = Callable[[int, int, int], None]
"""Called with (address, bytes, stream) when the driver gives memory (positive bytes) or gets it back (negative)."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that could not be met, and what was held then."""

    size_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    def __str__(self) -> str:
        held = f"{format_bytes(self.allocated_bytes)} allocated and {format_bytes(self.reserved_bytes)} reserved"
        return f"out of memory: {format_bytes(self.size_bytes)} asked for with {held}"


class CachingAllocator:
    """One device's allocator; all bytes are as `torch.cuda.memory_allocated` and `memory_reserved` count them."""

    def __init__(
        self, capacity_bytes: int | None = None, expandable_segments: bool = False, watch: Watch | None = None
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise PlanError(f"capacity_bytes is {capacity_bytes}, but must be at least 0")
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        """How often every unused segment was given back to the driver, and the request tried again."""
        self.out_of_memory: OutOfMemory | None = None
        """The first request that could not be met."""
        self._limit = _UNLIMITED if capacity_bytes is None else capacity_bytes
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._segments: dict[int, Block] = {}
        self._next_address = _FIRST_ADDRESS
        self._watch = watch

    def malloc(self, size_bytes: int, stream: int = 0) -> Block | None:
        """A block of at least `size_bytes`, or None when memory has run out (see `out_of_memory`)."""
        size = (size_bytes + 511) & -512 or MIN_BLOCK_BYTES
        small = size <= SMALL_BYTES
        pools = self._small if small else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = Pool(stream, small, self.expandable_segments)
        keys = pool.keys
        place = bisect_left(keys, size << ADDRESS_BITS)
        if place < len(keys):
            if self.expandable_segments:
                place = self._least_expandable(pool, place)
            block = pool.free.pop(keys.pop(place))
        else:
            # Memory from the driver; at the limit, once more after giving back all that is unused.
            obtain = self._expand if self.expandable_segments else self._new_segment
            found = obtain(pool, size)
            if found is None:
                self.retries += 1
                self.empty_cache()
                found = obtain(pool, size)
            if found is None:
                self.out_of_memory = self.out_of_memory or OutOfMemory(size, self.allocated_bytes, self.reserved_bytes)
                return None
            block = found
        block.state = ACTIVE
        if block.size_bytes - size >= pool.split_bytes:
            # Written out, as a replay spends most of its time here.
            rest = Block(block.address + size, block.size_bytes - size, pool, FREE)
            following = block.following
            rest.previous, rest.following = block, following
            if following is not None:
                following.previous = rest
            block.following = rest
            block.size_bytes = size
            key = rest.size_bytes << ADDRESS_BITS | rest.address
            insort(keys, key)
            pool.free[key] = rest
        self.allocated_bytes = allocated = self.allocated_bytes + block.size_bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it may serve the next request of its stream.

        Raises:
            PlanError: when the block is not in use.
        """
        if block.state != ACTIVE:
            raise PlanError(f"the block at address {block.address:#x} is freed twice; a block is freed at most once")
        pool = block.pool
        self.allocated_bytes -= block.size_bytes
        before, after = block.previous, block.following
        if before is not None and before.state == FREE:
            pool.remove(before)
            absorb(before, block)
            block.state, block = FREE, before
        if after is not None and after.state == FREE:
            pool.remove(after)
            absorb(block, after)
        block.state = FREE
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(pool.keys, key)
        pool.free[key] = block

    def segments(self) -> Iterator[list[Block]]:
        """Each segment that holds memory, as its blocks in order; of expandable ones each range without a hole."""
        for head in self._segments.values():
            run: list[Block] = []
            block: Block | None = head
            while block is not None:
                if block.state != UNMAPPED:
                    run.append(block)
                elif run:
                    yield run
                    run = []
                block = block.following
            if run:
                yield run

    def empty_cache(self) -> None:
        """Give back to the driver every segment, or page of an expandable one, that is wholly free."""
        give_back = self._unmap_free if self.expandable_segments else self._release_free
        # The order of release_cached_blocks: large before small.
        for pools in (self._large, self._small):
            for pool in pools.values():
                give_back(pool)

    # -- new memory

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment_bytes = pool.page_bytes
        if size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
        if not self._reserve(segment_bytes):
            return None
        block = self._place_segment(pool, segment_bytes, ACTIVE)
        if self._watch is not None:
            self._watch(block.address, segment_bytes, pool.stream)
        return block

    def _place_segment(self, pool: Pool, size: int, state: int) -> Block:
        """A block of its own, with a gap after it, at higher addresses than all before."""
        block = Block(self._next_address, size, pool, state)
        self._next_address += (size // LARGE_SEGMENT_BYTES + 2) * LARGE_SEGMENT_BYTES
        self._segments[block.address] = block
        return block

    def _reserve(self, size: int) -> bool:
        """Take bytes from the driver; False when that would pass the limit."""
        reserved = self.reserved_bytes + size
        if reserved > self._limit:
            return False
        self.reserved_bytes = reserved
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        return True

    def _release_free(self, pool: Pool) -> None:
        for key in tuple(pool.keys):
            block = pool.free[key]
            if block.previous is None and block.following is None:
                pool.remove(block)
                del self._segments[block.address]
                self._give_back(block)

    def _give_back(self, block: Block) -> None:
        self.reserved_bytes -= block.size_bytes
        if self._watch is not None:
            self._watch(block.address, -block.size_bytes, block.pool.stream)

    # -- expandable segments

    def _least_expandable(self, pool: Pool, place: int) -> int:
        """From the best fit on, step on while the next free block could grow to less than this one."""

        def could_grow_to(place: int) -> int:
            block = pool.free[pool.keys[place]]
            hole = block.following
            return block.size_bytes + (hole.size_bytes if hole is not None and hole.state == UNMAPPED else 0)

        while place + 1 < len(pool.keys) and could_grow_to(place + 1) < could_grow_to(place):
            place += 1
        return place

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A free block of `size`, at the lowest address where one can be mapped together; None at the limit."""
        block = self._expandable_place(pool, size)
        if block.state == UNMAPPED:
            mapped = self._map(pool, block, min(block.size_bytes, size))
            if mapped is None:
                return None
            block = mapped
        while block.size_bytes < size:
            hole = block.following
            if hole is None:
                raise PlanError(
                    f"a request of {format_bytes(size)} has no room left in the address space of its stream; no device "
                    "holds as much, so predict a smaller batch or model"
                )
            mapped = self._map(pool, hole, min(size - block.size_bytes, hole.size_bytes))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _expandable_place(self, pool: Pool, size: int) -> Block:
        """The first hole, or free block before it, that with its neighbours has addresses for `size`."""
        for hole in pool.unmapped:
            before = hole.previous
            start = before if before is not None and before.state == FREE else hole
            room = 0
            block: Block | None = start
            while room < size and block is not None and block.state != ACTIVE:
                room, block = room + block.size_bytes, block.following
            if room >= size:
                return start
        # A new segment has addresses for 1 1/8 of the device's memory, in whole pages.
        known = self.capacity_bytes
        space = _ADDRESS_SPACE_BYTES if known is None else max(known + known // 8, size)
        segment = self._place_segment(pool, -(-space // pool.page_bytes) * pool.page_bytes, UNMAPPED)
        pool.unmapped.append(segment)
        return segment

    def _map(self, pool: Pool, hole: Block, size: int) -> Block | None:
        """Back the start of a hole with pages; returns the free block it is now part of."""
        size = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(size):
            return None
        pool.unmapped.remove(hole)
        if size < hole.size_bytes:
            rest = split(hole, size)
            rest.state = UNMAPPED
            insort(pool.unmapped, rest, key=_address)
        hole.state = FREE
        if self._watch is not None:
            self._watch(hole.address, size, pool.stream)
        block = self._merged(hole)
        pool.add(block)
        return block

    def _merged(self, block: Block) -> Block:
        """One block of this one and its neighbours in the same state, which leave their lists."""
        pool, before, after = block.pool, block.previous, block.following
        leave = pool.remove if block.state == FREE else pool.unmapped.remove
        if before is not None and before.state == block.state:
            leave(before)
            absorb(before, block)
            block = before
        if after is not None and after.state == block.state:
            leave(after)
            absorb(block, after)
        return block

    def _unmap_free(self, pool: Pool) -> None:
        for key in tuple(pool.keys):
            block = pool.free[key]
            page = pool.page_bytes
            start = -(-block.address // page) * page
            end = (block.address + block.size_bytes) // page * page
            if start >= end:
                continue
            pool.remove(block)
            if start > block.address:
                before, block = block, split(block, start - block.address)
                pool.add(before)
            if end < block.address + block.size_bytes:
                pool.add(split(block, end - block.address))
            block.state = UNMAPPED
            self._give_back(block)
            insort(pool.unmapped, self._merged(block), key=_address)


def _address(block: Block) -> int:
    return block.address
