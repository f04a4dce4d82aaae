"""CUDA's caching allocator as arithmetic: which bytes a stream of requests holds, and when it runs out.

The constants are those of torch 2.13 (c10/core/AllocatorConfig.h), the rules those of c10/cuda/CUDACachingAllocator.cpp
as it was in 2025, with default settings: a request is rounded up to 512 bytes; up to 1 MiB it comes from segments of
2 MiB, below 10 MiB from 20 MiB segments, else from one of its own, rounded up to 2 MiB. The smallest free block of the
same stream that is large enough is taken, the lowest address among equals; the rest is split off from 512 bytes (small)
or above 1 MiB (large), so a large block may hold up to 1 MiB more than it was asked for. Freed neighbours merge. At the
limit every segment that is wholly free goes back to the driver, and the request is tried once more; then it is out of
memory.

With expandable segments each stream has one range of addresses for small and one for large blocks, backed by pages of
2 MiB and 20 MiB as it grows; the rest is split off from 512 bytes, and at the limit every page that is wholly free is
unmapped.

Not modelled: garbage collection, `max_split_size_mb` and rounding to powers of two (all off by default), CUDA graphs,
and blocks held back because another stream still uses them. Addresses of segments grow; CUDA may give lower ones.

The invariant: blocks of a segment follow each other without gap or overlap, and two free neighbours are always one.

Blocks and pools: the pieces that CUDA's caching allocator cuts segments into, and how those that are free are found.

A segment is a chain of blocks in the order of their addresses. A pool keeps the free blocks of one stream and one kind
(small or large), sorted by size and then by address, so that the best fit is one bisection away. Bytes are multiples of
512. The rules that use these pieces are in `kit.memory.replay.allocator`.
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

ACTIVE: Final = 0
FREE: Final = 1
UNMAPPED: Final = 2

# A free block's place in its pool: by size, then by address, as one number, because numbers compare fast.
ADDRESS_BITS: Final = 50


class Block:
    """A piece of a segment, in use, free or not backed by memory; `malloc` gives it and `free` takes it."""

    __slots__ = ("address", "following", "pool", "previous", "size_bytes", "state")

    def __init__(self, address: int, size_bytes: int, pool: Pool, state: int = ACTIVE) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.state = state
        self.previous: Block | None = None
        self.following: Block | None = None


class Pool:
    """The free blocks of one stream and one kind, small or large, sorted by size and address."""

    __slots__ = ("free", "keys", "page_bytes", "split_bytes", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool) -> None:
        self.stream = stream
        self.keys: list[int] = []
        self.free: dict[int, Block] = {}
        self.unmapped: list[Block] = []
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.split_bytes = MIN_BLOCK_BYTES if small or expandable else SMALL_BYTES + 1

    @property
    def is_small(self) -> bool:
        return self.page_bytes == SMALL_SEGMENT_BYTES

    def add(self, block: Block) -> None:
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.free[key] = block

    def remove(self, block: Block) -> None:
        key = block.size_bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.free[key]


def expandable_bytes(block: Block) -> int:
    """What a free block can grow to."""
    hole = block.following
    return block.size_bytes + (hole.size_bytes if hole is not None and hole.state == UNMAPPED else 0)


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


def insert_by_address(blocks: list[Block], block: Block) -> None:
    insort(blocks, block, key=lambda other: other.address)


MIN_LARGE_BYTES: Final = 10 << 20
LARGE_ROUNDING_BYTES: Final = 2 << 20

_UNLIMITED: Final = 1 << 62
# Segments start on multiples of the larger page, so that pages of either size can be counted from address 0.
_FIRST_ADDRESS: Final = LARGE_SEGMENT_BYTES << 20
_ADDRESS_SPACE_BYTES: Final = 1 << 42

Watch = Callable[[int, int, int], None]
"""Told of what the driver gives (positive bytes) and gets back (negative): address, bytes and stream."""


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
        pools = self._small if size <= SMALL_BYTES else self._large
        pool = pools.get(stream) or self._add_pool(pools, stream)
        keys = pool.keys
        place = bisect_left(keys, size << ADDRESS_BITS)
        if place < len(keys):
            if self.expandable_segments:
                place = self._least_expandable(pool, place)
            block = pool.free.pop(keys.pop(place))
        else:
            found = self._new_block(pool, size)
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

    def _add_pool(self, pools: dict[int, Pool], stream: int) -> Pool:
        pools[stream] = pool = Pool(stream, pools is self._small, self.expandable_segments)
        return pool

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Memory from the driver; at the limit, once more after giving back all that is unused."""
        obtain = self._expand if self.expandable_segments else self._new_segment
        block = obtain(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = obtain(pool, size)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment_bytes = pool.page_bytes
        if size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
        if not self._reserve(segment_bytes):
            return None
        block = self._place_segment(pool, segment_bytes, ACTIVE)
        self._tell(block.address, segment_bytes, pool)
        return block

    def _tell(self, address: int, size: int, pool: Pool) -> None:
        if self._watch is not None:
            self._watch(address, size, pool.stream)

    def _place_segment(self, pool: Pool, size: int, state: int) -> Block:
        """A block of its own, with a gap after it, at higher addresses than all before."""
        block = Block(self._next_address, size, pool, state)
        self._next_address += (size // LARGE_SEGMENT_BYTES + 2) * LARGE_SEGMENT_BYTES
        self._segments[block.address] = block
        return block

    def _reserve(self, size: int) -> bool:
        """Take bytes from the driver when there are as many."""
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
                self.reserved_bytes -= block.size_bytes
                self._tell(block.address, -block.size_bytes, pool)

    # -- expandable segments

    def _least_expandable(self, pool: Pool, place: int) -> int:
        """From the best fit on, step on while the next free block could grow to less than this one."""
        keys, free = pool.keys, pool.free
        size = expandable_bytes(free[keys[place]])
        while place + 1 < len(keys):
            larger = expandable_bytes(free[keys[place + 1]])
            if larger >= size:
                break
            place, size = place + 1, larger
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
        segment = self._place_segment(pool, self._address_space(pool, size), UNMAPPED)
        pool.unmapped.append(segment)
        return segment

    def _address_space(self, pool: Pool, size: int) -> int:
        """Addresses of a new segment: 1 1/8 of the device's memory, in whole pages."""
        known = self.capacity_bytes
        space = _ADDRESS_SPACE_BYTES if known is None else max(known + known // 8, size)
        return -(-space // pool.page_bytes) * pool.page_bytes

    def _map(self, pool: Pool, hole: Block, size: int) -> Block | None:
        """Back the start of a hole with pages; returns the free block it is now part of."""
        size = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(size):
            return None
        pool.unmapped.remove(hole)
        if size < hole.size_bytes:
            rest = split(hole, size)
            rest.state = UNMAPPED
            insert_by_address(pool.unmapped, rest)
        hole.state = FREE
        self._tell(hole.address, size, pool)
        block = self._merged(hole)
        pool.add(block)
        return block

    def _merged(self, block: Block) -> Block:
        """One block of this one and its neighbours in the same state, which leave their lists."""
        before, after = block.previous, block.following
        if before is not None and before.state == block.state:
            self._delist(before)
            absorb(before, block)
            block = before
        if after is not None and after.state == block.state:
            self._delist(after)
            absorb(block, after)
        return block

    def _delist(self, block: Block) -> None:
        if block.state == FREE:
            block.pool.remove(block)
        else:
            block.pool.unmapped.remove(block)

    def _unmap_free(self, pool: Pool) -> None:
        for key in tuple(pool.keys):
            block = pool.free[key]
            page = pool.page_bytes
            start = -(-block.address // page) * page
            end = (block.address + block.size_bytes) // page * page
            if start < end:
                self._unmap(pool, block, start, end)

    def _unmap(self, pool: Pool, block: Block, start: int, end: int) -> None:
        pool.remove(block)
        if start > block.address:
            whole, block = block, split(block, start - block.address)
            pool.add(whole)
        if end < block.address + block.size_bytes:
            rest = split(block, end - block.address)
            rest.state = FREE
            pool.add(rest)
        block.state = UNMAPPED
        self.reserved_bytes -= block.size_bytes
        self._tell(block.address, -block.size_bytes, pool)
        insert_by_address(pool.unmapped, self._merged(block))
