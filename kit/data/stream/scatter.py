"""ChunkUses: which chunks a batch of patches touches, and which elements go where; Packing: from stored to float32.

Offsets, sizes and slices are in elements; chunk coordinates count chunks. The invariant: the copies of all chunks
together write every element of every patch exactly once, and read nothing outside a chunk.

Packing follows the CF conventions, once per batch, to float32 values and a mask:

    value = packed × scale_factor + add_offset,   standardised = (value - mean) / deviation

Both together are packed × a + b, with a and b computed in float64. Types that float32 holds exactly (float32, integers
of 16 bits and less) are computed in float32: the error is at most (2·|packed·a| + |b| + |result|) × 2^-24. Wider types
are computed in float64 and rounded once. A missing element (the packed missing value; NaN in float data) is 0 and not
valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.places import Matched
from kit.data.variables import NUMBERS, ArrayInfo
from kit.errors import ConfigError, Problem

Table = NDArray[np.int64]
Matches = Sequence[Matched | None]


@dataclass(slots=True)
class ChunkUses:
    """The chunks that a batch needs of one variable, with everything it takes from each. `len` counts chunks.

    One object for all of them: what is made for each chunk costs as much time in garbage collection as its copies.
    """

    table: Table
    """A row for each patch that overlaps a chunk, those of a chunk together: sample, then first and last along each
    dimension of the patch's region, then the same of the chunk's region."""
    cuts: list[int]
    """The first row of each chunk, and the number of rows."""
    places: dict[tuple[int, ...], int]
    """Coordinates of the chunks, numbered."""
    chunk: tuple[int, ...] = ()
    matched: tuple[Matched | None, ...] = ()
    """As of `ArrayInfo`; along a matched dimension `table` holds elements of the patch's array, not of the chunk."""

    def __len__(self) -> int:
        return len(self.places)

    def scatter(self, coords: tuple[int, ...], decoded: NDArray[np.generic], batch: NDArray[np.generic]) -> None:
        """Copy what `batch` `(sample, *dims)` takes from a `decoded` chunk."""
        middle, place = 1 + 2 * len(coords), self.places[coords]
        matched = [axis for axis, one in enumerate(self.matched) if one is not None]
        lined = bool(matched) or decoded.strides[-1] == decoded.itemsize
        alike = decoded.dtype == batch.dtype and lined and batch.strides[-1] == decoded.itemsize
        for row in self.table[self.cuts[place] : self.cuts[place + 1]].tolist():
            target, source = iter(row[1:middle]), iter(row[middle:])
            to = batch[(row[0], *map(slice, target, target))]
            piece = decoded[tuple(map(slice, source, source))] if not matched else self._take(decoded, coords, source)
            if alike:
                line = _line(piece.shape[-1] * piece.itemsize)
                to, piece = to.view(line), piece.view(line)
            to[...] = piece

    def _take(
        self, decoded: NDArray[np.generic], coords: tuple[int, ...], source: Iterator[int]
    ) -> NDArray[np.generic]:
        """The region of a chunk of another resolution, as a patch has it; in lines."""
        spans = [slice(*span) for span in zip(source, source, strict=True)]
        whole = slice(None)
        piece = decoded[
            tuple(span if one is None else whole for span, one in zip(spans, self.matched, strict=True))
        ]  # first, as what is taken is copied
        for axis, (span, one) in enumerate(zip(spans, self.matched, strict=True)):
            if one is not None:
                piece = piece.take(one.index[span] - coords[axis] * self.chunk[axis], axis)
        return piece


@lru_cache(maxsize=4096)
def _line(size_bytes: int) -> np.dtype[np.void]:
    """A run along the last dimension as one element.

    numpy gives the interpreter's lock away to copy 500 elements or more, which threads that copy a few kilobytes each
    then wait for longer than they copy; as lines, only what takes long is copied without it.
    """
    return np.dtype((np.void, size_bytes))


def chunk_uses(
    offsets: NDArray[np.int64], patch: Sequence[int], chunk: Sequence[int], matched: Matches = ()
) -> ChunkUses:
    """The union of chunks that patches at `offsets` `(sample, dim)` touch, in the order of their coordinates."""
    sides, patch_sides = np.array(chunk, np.int64), np.array(patch, np.int64)
    sample, coords = _overlaps(offsets, patch_sides, sides, matched)
    rank = np.ravel_multi_index(tuple(coords.T), tuple(coords.max(axis=0) + 1))
    order = np.argsort(rank, kind="stable")
    sample, coords = sample[order], coords[order]
    origin, end = coords * sides, (coords + 1) * sides
    for axis, one in enumerate(matched):
        if one is not None:
            origin[:, axis], end[:, axis] = (ends[coords[:, axis]] for ends in one.runs(chunk[axis]))
    start = np.maximum(origin, offsets[sample])
    stop = np.minimum(end, offsets[sample] + patch_sides)
    origin[:, [axis for axis, one in enumerate(matched) if one is not None]] = 0
    bounds = [np.stack(pair, axis=2).reshape(len(sample), -1) for pair in (
        (start - offsets[sample], stop - offsets[sample]), (start - origin, stop - origin),
    )]  # fmt: skip
    table = np.concatenate([sample[:, None], *bounds], axis=1)
    cuts = [0, *(np.flatnonzero(np.diff(rank[order])) + 1).tolist(), len(table)]
    places = zip(*coords[cuts[:-1]].T.tolist(), strict=True)
    return ChunkUses(table, cuts, {place: number for number, place in enumerate(places)}, tuple(chunk), tuple(matched))


def touched(
    offsets: NDArray[np.int64], patch: Sequence[int], chunk: Sequence[int], matched: Matches = ()
) -> list[tuple[int, ...]]:
    """The chunks that patches at `offsets` `(sample, dim)` touch, each once, in the order of their first use."""
    _, coords = _overlaps(offsets, np.array(patch, np.int64), np.array(chunk, np.int64), matched)
    rank = np.ravel_multi_index(tuple(coords.T), tuple(coords.max(axis=0) + 1))
    _, first = np.unique(rank, return_index=True)
    return [*zip(*coords[np.sort(first)].T.tolist(), strict=True)]


def _overlaps(
    offsets: NDArray[np.int64], patch: NDArray[np.int64], chunk: NDArray[np.int64], matched: Matches
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Every (sample, chunk coordinates) that meet, as two arrays of equal length."""
    first, last = offsets // chunk, (offsets + patch - 1) // chunk
    for axis, one in enumerate(matched):
        if one is not None:
            met = np.stack([one.index[offsets[:, axis] + inside] // chunk[axis] for inside in (0, patch[axis] - 1)])
            first[:, axis], last[:, axis] = met.min(axis=0), met.max(axis=0)
    steps = np.indices((last - first).max(axis=0) + 1).reshape(len(chunk), -1).T
    coords = first[:, None] + steps
    sample, step = np.nonzero((coords <= last[:, None]).all(axis=2))
    coords = coords[sample, step]
    for axis, one in enumerate(matched):  # a chunk between two others may match nothing
        if one is not None:
            begins, ends = one.runs(int(chunk[axis]))
            meets = begins[coords[:, axis]] < ends[coords[:, axis]]
            sample, coords = sample[meets], coords[meets]
    return sample, coords


@dataclass(frozen=True, slots=True)
class Packing:
    """How one variable's packed numbers become values."""

    factor: float
    shift: float
    missing: tuple[float | int, ...]
    exact_in_float32: bool

    @classmethod
    def of(cls, info: ArrayInfo, standardize: bool) -> Packing:
        """The packing of a variable, with its standardisation folded in.

        Raises:
            ConfigError: when the variable is not numeric, or is to be standardised without known statistics.
        """
        if info.dtype.kind not in NUMBERS:
            raise ConfigError([Problem("data.variables", f"{info.name} holds {info.dtype}, which is no number")])
        mean, deviation = 0.0, 1.0
        if standardize:
            if info.mean is None or info.deviation is None:
                message = (
                    f"{info.name} has no known mean and deviation, which only a store that kit built tells of itself; "
                    "kit.data.statistics(config) reads them once, or set it to false"
                )
                raise ConfigError([Problem("data.standardize", message)])
            mean, deviation = info.mean, info.deviation or 1.0
        return cls(
            factor=info.scale_factor / deviation,
            shift=(info.add_offset - mean) / deviation,
            missing=() if info.missing is None else (info.missing, *info.also_missing),
            exact_in_float32=info.dtype.itemsize <= 2 or info.dtype == np.dtype(np.float32),
        )

    def unpack(self, packed: NDArray[Any], values: NDArray[np.float32], valid: NDArray[np.bool_]) -> None:
        """Write `values` and `valid`, both of the shape of `packed`; `packed` may be `values` itself."""
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = packed.dtype.kind == "f" and bool(np.isnan(packed.min()))  # the least of any is NaN where one is
            if gaps:
                np.logical_not(np.isnan(packed), out=valid)
            else:
                valid[...] = True
            for missing in self.missing:
                # A float32 array holds the missing value rounded to float32: compare with that.
                valid &= packed != (packed.dtype.type(missing) if packed.dtype.kind == "f" else missing)
            all_valid = not gaps and (not self.missing or bool(valid.all()))
            if not self.exact_in_float32:
                values[...] = packed.astype(np.float64) * self.factor + self.shift
            else:
                if self.factor != 1 or packed is not values:
                    np.multiply(packed, np.float32(self.factor), out=values, dtype=np.float32, casting="unsafe")
                if self.shift != 0:
                    values += np.float32(self.shift)
        if not all_valid:
            values[~valid] = 0
