"""Rechunking within a budget: how many target regions one task reads together, and what that costs.

A source that is cut into chunks gives whole chunks only. A target region that lies across them reads far more than it
keeps, and its neighbours read the same chunks again. So a task reads a *group*, a box of target regions, as large as
pays within its memory. What all groups read is a product over the dimensions, since boxes and chunks both are:

    bytes read = itemsize × Π_d Σ_groups (elements along d of the source chunks that the group touches)

A task holds the group's values, what the source needs while it reads (`fetch_bytes`), and the pieces of one region
while it is encoded and sent. Where no group is large enough, an intermediate copy is cheaper: cut so that pass one
writes whole pieces from few source chunks and pass two reads whole pieces into few regions (the scheme of rechunker).

Sizes are elements, `_bytes` are uncompressed. The one invariant: groups tile the array exactly once, and no task's
bytes exceed the budget that its plan was made for. A region of a cut source is read in pieces of whole chunks, as many
as `FETCH_BYTES` holds and one at least, so that memory does not grow with the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import PlanError
from kit.units import format_bytes

Sizes = tuple[int, ...]

ENCODE_COPIES = 3
"""Region-sized pieces held while one region is encoded: its chunks, the object joined from them, and what the allocator
keeps for a while (measured: up to 2.9 for numbers that do not compress)."""
CHUNK_BYTES = 2560
"""Held for each chunk of a region while it is encoded, whatever the chunk's size (measured: 2,540 to 2,610)."""
FETCH_COPIES = 3
"""Piece-sized pieces held while a cut source reads: stored bytes, decoded chunks, and the block made of them."""
FETCH_BYTES = 8 << 20
"""What a cut source reads at once; a larger chunk is read alone."""
_GOOD_ENOUGH = 1.05
_MOST_CANDIDATES = 20_000
_SCRATCH_PAYS = 1.5
"""Bytes moved by one pass over those moved by two, from which the second pass is worth its trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """One array: how the source is cut, and how the target will be."""

    shape: Sizes
    itemsize: int
    source_chunk: Sizes | None
    """None for a source that computes or maps any region alone."""
    target: Sizes
    """What one object of the target holds."""
    chunk: Sizes | None = None
    """How that is cut within; None where it is not."""

    def __post_init__(self) -> None:
        sizes = (self.shape, self.target, *((self.source_chunk,) if self.source_chunk else ()))
        if any(len(part) != len(self.shape) or any(side < 1 for side in part) for part in sizes):
            raise PlanError(f"shape, chunks and regions must have one size, at least 1, per dimension, not {sizes}")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def region_bytes(self) -> int:
        """Of one whole target region, as it is encoded (the edge of an array is padded)."""
        return prod(self.target) * self.itemsize

    @property
    def chunks_bytes(self) -> int:
        """Of the chunks within a region, beside their numbers."""
        inside = zip(self.target, self.chunk or self.target, strict=True)
        return CHUNK_BYTES * prod(-(-side // part) for side, part in inside)

    def fetch_bytes(self, group: Sizes) -> int:
        """What the source needs to read a group, beside the group's values."""
        group_bytes = prod(_clip(group, self.shape)) * self.itemsize
        if self.source_chunk is None:
            return group_bytes
        chunk_bytes = prod(_clip(self.source_chunk, self.shape)) * self.itemsize
        return FETCH_COPIES * max(chunk_bytes, min(FETCH_BYTES, group_bytes + chunk_bytes))

    def task_bytes(self, group: Sizes) -> int:
        """Memory of the task that reads this group and writes its regions one by one."""
        values_bytes = prod(_clip(group, self.shape)) * self.itemsize
        return values_bytes + self.fetch_bytes(group) + ENCODE_COPIES * self.region_bytes + self.chunks_bytes

    @property
    def least_task_bytes(self) -> int:
        return self.task_bytes(self.target)

    def read_bytes(self, group: Sizes) -> int:
        """What all groups together take from the source."""
        chunk = self.source_chunk or (1,) * len(self.shape)
        return self.itemsize * prod(map(_covered, self.shape, group, chunk))

    def arithmetic(self) -> str:
        """The least task, term by term, as a refusal shows it."""
        values_bytes = prod(_clip(self.target, self.shape)) * self.itemsize
        encoding = f"{ENCODE_COPIES} × {format_bytes(self.region_bytes)} to encode"
        return (
            f"{format_bytes(values_bytes)} of values + {format_bytes(self.fetch_bytes(self.target))} to read them + "
            f"{encoding} + {format_bytes(self.chunks_bytes)} of chunks = {format_bytes(self.least_task_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How one array is read and written."""

    layout: Recut
    group: Sizes
    """A multiple of the target region along every dimension; the last group along each may be cut off."""

    @property
    def groups(self) -> int:
        return prod(-(-size // side) for size, side in zip(self.layout.shape, self.group, strict=True))

    @property
    def task_bytes(self) -> int:
        return self.layout.task_bytes(self.group)

    @property
    def read_bytes(self) -> int:
        return self.layout.read_bytes(self.group)

    @property
    def read_ratio(self) -> float:
        """Bytes read / bytes of the source: 1 when every source chunk is read once."""
        return self.read_bytes / self.layout.nbytes

    def boxes(self) -> Iterator[tuple[slice, ...]]:
        """The region of every group, last dimension fastest."""
        counts = [range(0, size, side) for size, side in zip(self.layout.shape, self.group, strict=True)]
        for starts in product(*counts):
            bounds = zip(starts, self.group, self.layout.shape, strict=True)
            yield tuple(slice(start, min(start + side, size)) for start, side, size in bounds)


def group_regions(layout: Recut, budget_bytes: int) -> Grouping:
    """The group that reads least within the budget; of those nearly as good, the one that holds least.

    Raises:
        PlanError: when not even one region fits, with the arithmetic.
    """
    if layout.least_task_bytes > budget_bytes:
        raise PlanError(f"one task takes {layout.arithmetic()} of memory, and {format_bytes(budget_bytes)} is allowed")
    if layout.source_chunk is None or layout.read_bytes(layout.target) <= layout.nbytes * _GOOD_ENOUGH:
        return Grouping(layout=layout, group=layout.target)
    fitting = [
        (layout.read_bytes(group), group) for group in _candidates(layout) if layout.task_bytes(group) <= budget_bytes
    ]
    least = min(read for read, _ in fitting)
    near = [group for read, group in fitting if read <= least * _GOOD_ENOUGH]
    return Grouping(layout=layout, group=min(near, key=lambda group: (layout.task_bytes(group), group)))


def intermediate_chunk(layout: Recut, budget_bytes: int) -> Sizes | None:
    """How an intermediate copy would be cut: overlaps of what can be read at once with what can be written at once."""
    if layout.source_chunk is None:
        return None
    values_bytes = budget_bytes // 2
    read = _grow(_clip(layout.source_chunk, layout.shape), layout.target, layout, values_bytes)
    write = _grow(_clip(layout.target, layout.shape), layout.source_chunk, layout, values_bytes)
    return tuple(map(min, read, write))


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPasses:
    """Reading through an intermediate copy."""

    first: Grouping
    """Source to copy."""
    second: Grouping
    """Copy to target."""

    @property
    def moved_bytes(self) -> int:
        """Read from the source, written to the copy, read from it."""
        return self.first.read_bytes + self.first.layout.nbytes + self.second.read_bytes


def two_passes(layout: Recut, budget_bytes: int, once: Grouping, chunk: Sizes | None) -> TwoPasses | None:
    """The plan through a copy cut into `chunk`; None where reading once moves no more bytes, or it does not fit."""
    if chunk is None or chunk == layout.source_chunk or once.read_ratio <= _SCRATCH_PAYS:
        return None
    first = Recut(shape=layout.shape, itemsize=layout.itemsize, source_chunk=layout.source_chunk, target=chunk)
    second = Recut(shape=layout.shape, itemsize=layout.itemsize, source_chunk=chunk, target=layout.target)
    if first.least_task_bytes > budget_bytes or second.least_task_bytes > budget_bytes:
        return None
    plan = TwoPasses(first=group_regions(first, budget_bytes), second=group_regions(second, budget_bytes))
    return plan if once.read_bytes > _SCRATCH_PAYS * plan.moved_bytes else None


def _clip(sizes: Sequence[int], shape: Sequence[int]) -> Sizes:
    return tuple(map(min, sizes, shape))


@cache
def _covered(size: int, side: int, chunk: int) -> int:
    """Elements of the chunks that each interval of `side` touches, summed over the intervals of a line of `size`."""
    if chunk == 1 or side % chunk == 0 or side >= size:
        return size
    spans = ((start, min(start + side, size)) for start in range(0, size, side))
    return sum(min(-(-stop // chunk) * chunk, size) - start // chunk * chunk for start, stop in spans)


def _candidates(layout: Recut) -> Iterator[Sizes]:
    """Multiples of the region: doublings, those that cover whole source chunks, and the whole line."""
    assert layout.source_chunk is not None
    sides = []
    for size, side, chunk in zip(layout.shape, layout.target, layout.source_chunk, strict=True):
        count, whole = -(-size // side), -(-chunk // side)
        numbers = {1, count, *(min(count, 1 << power) for power in range(count.bit_length()))}
        numbers |= {min(count, whole * factor) for factor in range(1, 9)}
        numbers |= {-(-count // parts) for parts in range(2, 9)}
        sides.append([number * side for number in sorted(numbers)])
    while prod(map(len, sides)) > _MOST_CANDIDATES:
        longest = max(sides, key=len)
        longest[1:-1] = longest[1:-1:2]
    return product(*sides)


def _grow(start: Sizes, toward: Sequence[int], layout: Recut, values_bytes: int) -> Sizes:
    """Double the dimension that lags furthest behind `toward`, while the values fit."""
    sides = list(start)
    goal = _clip(toward, layout.shape)
    while True:
        lagging = [axis for axis, side in enumerate(sides) if side < goal[axis]]
        if not lagging:
            return tuple(sides)
        axis = max(lagging, key=lambda place: goal[place] / sides[place])
        grown = [*sides]
        grown[axis] = min(2 * sides[axis], layout.shape[axis])
        if prod(grown) * layout.itemsize > values_bytes:
            return tuple(sides)
        sides = grown


Region = tuple[slice, ...]


def read_pieces(
    read: Callable[[Region], NDArray[Any]], region: Region, chunk: Sequence[int], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """The values of `region`, read by `read` from an array that is cut into `chunk`."""
    found = [*pieces(region, chunk, dtype.itemsize)]
    if len(found) == 1:
        return np.asarray(read(region), dtype)
    block = np.empty([part.stop - part.start for part in region], dtype)
    for piece in found:
        inside = tuple(
            slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(piece, region, strict=True)
        )
        block[inside] = read(piece)
    return block


def pieces(region: Region, chunk: Sequence[int], itemsize: int) -> Iterator[Region]:
    """The region cut along source chunks into pieces of about `FETCH_BYTES`, in C order."""
    sides = [*map(int, chunk)]
    for axis in reversed(range(len(sides))):
        span = region[axis].stop - region[axis].start // sides[axis] * sides[axis]
        fitting = FETCH_BYTES // (prod(sides) * itemsize)
        if fitting > 1:
            sides[axis] *= min(fitting, -(-span // sides[axis]))
    cuts = []
    for part, side in zip(region, sides, strict=True):
        edges = [part.start, *range(part.start // side * side + side, part.stop, side), part.stop]
        cuts.append([slice(start, stop) for start, stop in pairwise(edges)])
    return product(*cuts)
