"""The chunk table: what a sample costs to read for each size of chunk, before any latency or bandwidth is known.

Per dimension a sample of side S on chunks of side c touches at least `ceil(S / c)`, at most `ceil((S - 1) / c) + 1` and
on average `1 + (S - 1) / c` chunks; dimensions multiply, and bytes are chunks × chunk volume × item size, uncompressed.
With an array shape the offsets that exist are counted instead, edges included; a chunk at the edge counts in full,
because Zarr stores it in full. Minimal and maximal columns are the table of "Training at Larger Scale"; the expected
ones are added, because at random offsets its minimum is met once in c offsets per dimension.

The best row has the smallest expected chunks × expected bytes: one per cent fewer requests is worth one per cent more
bytes. That puts the chunk near the sample's own size; which of the two counts more is known to `plan_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from kit.arguments import checks_arguments
from kit.chunks.geometry import axes_of, fewest_chunks, mean_chunks, most_chunks
from kit.errors import PlanError
from kit.registry import Drawable
from kit.tables import html_table, text_table
from kit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """One size of chunk: chunks touched and bytes read per sample."""

    chunk_size: str
    """The sides as text, such as `64x64`."""
    chunk: tuple[int, ...]
    minimal_chunks: int
    maximal_chunks: int
    expected_chunks: float
    minimal_bytes: int
    maximal_bytes: int
    expected_bytes: float

    @property
    def chunk_bytes(self) -> int:
        return self.minimal_bytes // self.minimal_chunks


_COLUMNS = (
    "chunk_size", "minimal_chunks", "expected_chunks", "maximal_chunks", "minimal_bytes", "expected_bytes",
    "maximal_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable(Drawable):
    """Rows by size of chunk, in the order asked for. Iterate it, index it, print it, or take `rows()` as dicts."""

    sample: tuple[int, ...]
    itemsize: int
    entries: tuple[ChunkRow, ...]

    def __iter__(self) -> Iterator[ChunkRow]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> ChunkRow:
        return self.entries[index]

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.sample) * self.itemsize

    @property
    def best(self) -> ChunkRow:
        """The row with the smallest expected chunks × expected bytes."""
        return min(self.entries, key=lambda row: row.expected_chunks * row.expected_bytes)

    def rows(self) -> list[dict[str, Any]]:
        """Plain dicts, one a row, as a data frame takes them."""
        return [asdict(row) for row in self.entries]

    def __repr__(self) -> str:
        return f"{self._title}\n{text_table(_COLUMNS, *self._cells())}"

    def _repr_html_(self) -> str:
        columns, (cells, marked) = [name.replace("_", " ") for name in _COLUMNS], self._cells()
        return html_table(columns, cells, caption=self._title, marked=marked, mark="best balance")

    @property
    def _title(self) -> str:
        sides = " × ".join(map(str, self.sample))
        return f"A sample of {sides} elements, {format_bytes(self.sample_bytes)}: chunks touched and bytes read"

    def _cells(self) -> tuple[list[list[str]], int]:
        """The rows as text, and the place of the best."""
        return [[_cell(getattr(row, name)) for name in _COLUMNS] for row in self], self.entries.index(self.best)


@checks_arguments
def chunk_table(
    sample: Sequence[int],
    chunk_sides: Sequence[int | Sequence[int]],
    itemsize: int = 1,
    shape: Sequence[int] | None = None,
) -> ChunkTable:
    """What it costs to read one sample for each of several chunk sizes.

    Args:
        sample: Sides of the sample in elements, in any number of dimensions.
        chunk_sides: Chunk sizes to compare. A number is that side in every dimension.
        itemsize: Bytes of one element.
        shape: Sides of the array. When given, only offsets inside it count.

    Returns:
        A table with the chunks touched and the bytes read, least, mean and most.

    Raises:
        PlanError: for sides below 1, lengths that differ, and a sample larger than the array.

    Example:
        >>> table = kit.data.chunk_table(sample=(64, 64), chunk_sides=[32, 64, 128], itemsize=4)
        >>> len(table)
        3
    """
    if not isinstance(sample, Iterable) or not isinstance(chunk_sides, Iterable):
        raise PlanError(
            f"chunk_table({sample}, {chunk_sides}): give all sides of the sample and several sizes of chunk, such as "
            "chunk_table((64, 64), [32, 64])"
        )
    sample = tuple(sample)  # one of numpy is neither true nor false
    for side in (*sample, *chain.from_iterable(one if isinstance(one, Iterable) else [one] for one in chunk_sides)):
        if not hasattr(side, "__index__"):
            raise PlanError(f"{side!r} is no side of a sample or chunk; give whole numbers of elements, such as 64")
    chunks = [tuple(side) if isinstance(side, Iterable) else (int(side),) * len(sample) for side in chunk_sides]
    if not chunks or not sample:
        raise PlanError(
            "a chunk table needs at least one dimension and one size of chunk, such as chunk_sides=[32, 64]"
        )
    if itemsize < 1:
        raise PlanError(f"itemsize is {itemsize}, but an element has at least 1 byte")
    rows = tuple(_row(sample, chunk, itemsize, shape) for chunk in chunks)
    return ChunkTable(sample=sample, itemsize=itemsize, entries=rows)


def _row(sample: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, shape: Sequence[int] | None) -> ChunkRow:
    axes = axes_of(sample if shape is None else shape, chunk, sample, [1] * len(sample))
    if shape is None:
        fewest, most = (math.prod(map(count, sample, chunk)) for count in (fewest_chunks, most_chunks))
        mean = math.prod(map(mean_chunks, sample, chunk))
    else:
        fewest, most = math.prod(axis.fewest for axis in axes), math.prod(axis.most for axis in axes)
        mean = math.prod(axis.mean for axis in axes)
    chunk_bytes = math.prod(chunk) * itemsize
    return ChunkRow(
        chunk_size="x".join(map(str, chunk)), chunk=chunk, minimal_chunks=fewest, maximal_chunks=most,
        expected_chunks=mean, minimal_bytes=fewest * chunk_bytes, maximal_bytes=most * chunk_bytes,
        expected_bytes=mean * chunk_bytes,
    )  # fmt: skip


def _cell(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 1000 else f"{value:.0f}"
    return str(value)
