"""Reading a region of a cut source piece by piece, so that memory does not grow with the region.

A piece is whole source chunks, as many as `kit.plan.rechunk.FETCH_BYTES` holds and one at least. The one invariant:
every element of the region is read exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.plan.rechunk import FETCH_BYTES

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
        room = FETCH_BYTES // (prod(sides) * itemsize)
        if room > 1:
            sides[axis] *= min(room, -(-span // sides[axis]))
    return (tuple(parts) for parts in product(*map(_cuts, region, sides)))


def _cuts(part: slice, side: int) -> list[slice]:
    edges = [part.start, *range(part.start // side * side + side, part.stop, side), part.stop]
    return [slice(start, stop) for start, stop in pairwise(edges)]
