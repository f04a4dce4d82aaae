"""Blocks and pools: the pieces that CUDA's caching allocator cuts segments into, and how those that are free are found.

A segment is a chain of blocks in the order of their addresses. A pool keeps the free blocks of one stream and one kind
(small or large), sorted by size and then by address, so that the best fit is one bisection away. Bytes are multiples of
512. The rules that use these pieces are in `kit.plan.memory.allocator`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

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
