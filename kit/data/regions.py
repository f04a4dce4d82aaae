"""Regions: which chunks a batch of patches touches, each once, and which elements go where. Pure numpy arithmetic.

Offsets, sizes and slices are in elements; chunk coordinates count chunks. The invariant: the copies of all chunks
together write every element of every patch exactly once, and read nothing outside a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """One chunk that a batch needs, with everything the batch takes from it."""

    coords: tuple[int, ...]
    copies: list[tuple[int, Region, Region]]
    """(sample, region of its patch, region of the chunk), one for each patch that overlaps the chunk."""

    def scatter(self, decoded: NDArray[np.generic], batch: NDArray[np.generic]) -> None:
        """Copy what `batch` `(sample, *dims)` takes from the `decoded` chunk."""
        for sample, target, source in self.copies:
            batch[sample][target] = decoded[source]

    def fill(self, value: object, batch: NDArray[np.generic]) -> None:
        """Set the chunk's share of `batch` `(sample, *dims)` to one value."""
        for sample, target, _ in self.copies:
            batch[sample][target] = value


def chunk_uses(offsets: NDArray[np.int64], patch: Sequence[int], chunk: Sequence[int]) -> list[ChunkUse]:
    """The union of chunks that patches at `offsets` `(sample, dim)` touch, in the order of their coordinates."""
    sides, patch_sides = np.array(chunk, np.int64), np.array(patch, np.int64)
    sample, coords = _overlaps(offsets, patch_sides, sides)
    origin = coords * sides
    start = np.maximum(origin, offsets[sample])
    stop = np.minimum(origin + sides, offsets[sample] + patch_sides)
    rank = np.ravel_multi_index(tuple(coords.T), tuple(coords.max(axis=0) + 1))
    order = np.argsort(rank, kind="stable")
    cuts = np.flatnonzero(np.diff(rank[order])) + 1
    targets = _slices(start - offsets[sample], stop - offsets[sample])
    sources = _slices(start - origin, stop - origin)
    samples = sample.tolist()
    return [
        ChunkUse(tuple(coords[rows[0]].tolist()), [(samples[row], targets[row], sources[row]) for row in rows.tolist()])
        for rows in np.split(order, cuts)
    ]


def _overlaps(
    offsets: NDArray[np.int64], patch: NDArray[np.int64], chunk: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Every (sample, chunk coordinates) that meet, as two arrays of equal length."""
    first, last = offsets // chunk, (offsets + patch - 1) // chunk
    steps = np.indices((last - first).max(axis=0) + 1).reshape(len(chunk), -1).T
    coords = first[:, None] + steps
    sample, step = np.nonzero((coords <= last[:, None]).all(axis=2))
    return sample, coords[sample, step]


def _slices(start: NDArray[np.int64], stop: NDArray[np.int64]) -> list[Region]:
    def regions() -> Iterator[Region]:
        for low, high in zip(start.tolist(), stop.tolist(), strict=True):
            yield tuple(map(slice, low, high))

    return list(regions())
