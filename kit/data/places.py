"""Places: the positions that a patch may take where not all are alike, each with a weight; Matched: which elements of
another array belong to those of one; and the pseudo-random words that positions are drawn by. Pure numpy, no store.

Positions are counted along each dimension, in strides. They are cut into *cells*, boxes of positions that share one
weight, so that nothing is kept for each position: drawing one is a search among the cells and a draw within one. A cell
of weight 0 is never drawn.

The invariant: `draw` is a pure function of its words and gives position p with probability proportional to its cell's
weight; `at` numbers the positions of weight above 0, each once, cell after cell. Both hold for any cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MOST_CELLS = 20_000_000
"""Beyond it they would take more than a third of a gigabyte on each rank."""
_UNIT = 2.0**-64
_FEISTEL_ROUNDS = 8
_WORDS_PER_BLOCK = 4
_USUAL = 1.5
"""A step of a coordinate up to so many times the median one is usual: months are of 28 to 31 days."""
Match = Literal["equal", "last", "nearest"]
Words = NDArray[np.uint64]
Positions = NDArray[np.int64]
Weights = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Places:
    """Positions with weights.

    Args:
        starts: For each dimension the first position of each of its cells, then the end.
        weights: Of each cell (cells of dimension 0, cells of dimension 1, ...), at least 0.
    """

    starts: tuple[Positions, ...]
    weights: Weights

    @cached_property
    def digest(self) -> str:
        """Names the places and their weights."""
        parts = [*self.starts, self.weights]
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def sides(self) -> tuple[Positions, ...]:
        """Positions of each cell along each dimension."""
        return tuple(np.diff(starts) for starts in self.starts)

    @cached_property
    def _positions(self) -> Weights:
        """Positions of each cell."""
        return _outer(self.sides)

    @cached_property
    def _likelihood(self) -> Weights:
        """Of coming to a cell or one before it, in the order of cells."""
        summed = np.cumsum((self._positions * self.weights).reshape(-1))
        likelihood: Weights = summed / summed[-1]
        return likelihood

    @cached_property
    def _ends(self) -> Positions:
        """Positions of weight above 0 up to the end of each cell."""
        return np.cumsum((self._positions * (self.weights > 0)).reshape(-1)).astype(np.int64)

    @property
    def count(self) -> int:
        """Positions of weight above 0."""
        return int(self._ends[-1])

    @property
    def share(self) -> float:
        """Positions of weight above 0, over all."""
        return self.count / max(1.0, float(self._positions.sum()))

    def both(self, other: Places) -> Places:
        """The same positions, each with the product of its weights."""
        starts = tuple(np.union1d(mine, theirs) for mine, theirs in zip(self.starts, other.starts, strict=True))
        weights = np.ones([len(begins) - 1 for begins in starts])
        for one in (self, other):
            cells = zip(one.starts, starts, strict=True)
            weights *= one.weights[np.ix_(*(np.searchsorted(own, cut[:-1], "right") - 1 for own, cut in cells))]
        return Places(starts, weights)

    def draw(self, words: Words) -> Positions:
        """Positions `(sample, dimension)` for random words `(sample, 1 + dimensions)`."""
        cells = np.searchsorted(self._likelihood, words[:, 0] * _UNIT, side="right")
        cells = np.minimum(cells, np.searchsorted(self._likelihood, 1.0))  # rounding may give a word of 1.0
        return self._inside(cells, words[:, 1:])

    def at(self, numbers: Positions) -> Positions:
        """The positions `(sample, dimension)` of these numbers, from 0 to `count`."""
        cells = np.searchsorted(self._ends, numbers, side="right")
        index = np.unravel_index(cells, self.weights.shape)
        rest = numbers - np.concatenate([[0], self._ends])[cells]
        found = np.empty((len(numbers), len(self.starts)), np.int64)
        for axis in reversed(range(len(self.starts))):
            rest, inside = np.divmod(rest, self.sides[axis][index[axis]])
            found[:, axis] = self.starts[axis][index[axis]] + inside
        return found

    def draw_between(self, first: Positions, last: Positions, words: Words) -> Positions:
        """As `draw`, of the positions from `first` to `last`, `(dimension,)` each; there must be one of weight."""
        spans = [
            slice(int(np.searchsorted(starts, low, "right")) - 1, int(np.searchsorted(starts, high, "right")))
            for starts, low, high in zip(self.starts, first, last, strict=True)
        ]
        starts = tuple(
            np.clip(starts[span.start : span.stop + 1], low, high + 1)
            for starts, span, low, high in zip(self.starts, spans, first, last, strict=True)
        )
        return Places(starts, self.weights[tuple(spans)]).draw(words)

    def _inside(self, cells: Positions, words: Words) -> Positions:
        index = np.unravel_index(cells, self.weights.shape)
        return np.stack(
            [
                self.starts[axis][which] + (words[:, axis] % self.sides[axis][which].astype(np.uint64)).astype(np.int64)
                for axis, which in enumerate(index)
            ],
            axis=1,
        )


def _outer(sides: Sequence[NDArray[np.int64]]) -> Weights:
    product: Weights = np.ones(())
    for side in sides:
        product = np.multiply.outer(product, side.astype(np.float64))
    return product


def cell_starts(borders: NDArray[np.int64], stride: int, positions: int) -> Positions:
    """Where cells begin, in positions, when their offsets change at these elements; the end last."""
    inner = -(-borders // stride)
    return np.unique(np.concatenate([[0], inner[(inner > 0) & (inner < positions)], [positions]]))


def within(values: Weights, side: int, extent: int, offsets: Weights, patch: int, axis: int) -> Weights:
    """Sums of what lies within a patch at each offset along one axis.

    Args:
        values: Sums over tiles along that axis, whose elements are taken for alike.
        side: Elements of a tile; the last one ends with the array.
        extent: Elements of the array.
        offsets: Where patches begin, in elements.
        patch: Elements of a patch.
    """
    moved = np.moveaxis(values, axis, 0)
    summed = np.concatenate([np.zeros_like(moved[:1]), np.cumsum(moved, axis=0)])
    edges = np.minimum(np.arange(len(summed)) * side, extent).astype(np.float64)

    def up_to(ends: Weights) -> Weights:
        tile = np.clip(np.searchsorted(edges, ends, side="right") - 1, 0, len(moved) - 1)
        share = (ends - edges[tile]) / (edges[tile + 1] - edges[tile])
        parts = share.reshape(-1, *(1,) * (moved.ndim - 1))
        return np.asarray(summed[tile] + (summed[tile + 1] - summed[tile]) * parts)

    found: Weights = np.moveaxis(up_to(offsets + patch) - up_to(offsets), 0, axis)
    return found


@dataclass(frozen=True, eq=False)
class Matched:
    """Along one dimension, the element of another array that each element takes; it rises or falls throughout."""

    index: Positions
    size: int
    """Elements of the other array."""
    known: NDArray[np.bool_] | None
    """Which have a match, the others taking what lies near; None where all have."""
    leave_out: bool
    """Whether patches that hold one without are left out; else it is missing in them."""

    @cached_property
    def digest(self) -> str:
        """Names it."""
        known = b"" if self.known is None else self.known.tobytes()
        return hashlib.sha256(b"".join([self.index.tobytes(), known, bytes([self.leave_out])])).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Matched) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def longest_run(self) -> int:
        """Elements, at most, that take the same one."""
        return int(np.unique(self.index[self.known], return_counts=True)[1].max(initial=1))

    def runs(self, side: int) -> tuple[Positions, Positions]:
        """For each chunk of `side` elements there, the first element that takes of it and the one behind the last."""
        return _runs(self, side)

    def most_chunks(self, side: int, elements: int) -> int:
        """Chunks of `side` elements there, at most, that a chunk of so many elements here takes of."""
        changes = np.flatnonzero(np.diff(self.index // side)) + 1
        firsts = np.arange(0, len(self.index), elements)
        lasts = np.minimum(firsts + elements, len(self.index)) - 1
        found = np.searchsorted(changes, lasts, "right") - np.searchsorted(changes, firsts, "right")
        return int(found.max()) + 1


@lru_cache(maxsize=64)
def _runs(matched: Matched, side: int) -> tuple[Positions, Positions]:
    chunks = matched.index // side
    begins = np.concatenate([[0], np.flatnonzero(np.diff(chunks)) + 1])
    found = np.zeros((2, -(-matched.size // side)), np.int64)
    found[0, chunks[begins]], found[1, chunks[begins]] = begins, np.append(begins[1:], len(chunks))
    return found[0], found[1]


def match_values(mine: NDArray[Any], theirs: NDArray[Any], how: Match, *, leave_out: bool = False) -> Matched:
    """The elements of `theirs` that match `mine`, both of which rise or fall throughout.

    `equal`: of the same value. `last`: the last at or before it, less than a usual step away. `nearest`: the nearest,
    the larger of two, half a usual step away at most.
    """
    rising = theirs if theirs[0] <= theirs[-1] else theirs[::-1]
    step, after = usual_step(theirs), np.searchsorted(rising, mine, "right")
    index, later = np.maximum(after - 1, 0), np.minimum(after, len(rising) - 1)
    if how == "nearest":
        index = np.where(np.abs(rising[later] - mine) <= np.abs(mine - rising[index]), later, index)
    away = mine - rising[index]
    known = (
        away == 0 if how == "equal" else np.abs(away) * 2 <= step if how == "nearest"
        else (away == 0) | ((away > 0) & (away < step))
    )  # fmt: skip
    if rising is not theirs:
        index = len(theirs) - 1 - index
    return Matched(index.astype(np.int64), len(theirs), None if known.all() else known, leave_out)


def difference(mine: tuple[NDArray[Any], str], theirs: tuple[NDArray[Any], str]) -> str:
    """Where two coordinates, each with the kind of its values, differ, and by how much; empty where they are equal."""
    (one, kind), (other, other_kind) = mine, theirs
    if kind != other_kind:
        return f"{kind or 'other values'} and {other_kind or 'other values'}"
    numbers = one.dtype.kind in "iuf" and other.dtype.kind in "iuf"
    if numbers or one.dtype.kind == other.dtype.kind == "M":
        unlike = ~((one == other) | ((one != one) & (other != other)))
    else:
        unlike = np.array([a != b for a, b in zip(one.tolist(), other.tolist(), strict=True)])
    (places,) = np.nonzero(unlike)
    if not len(places):
        return ""
    at = int(places[0])
    apart = f", {np.abs(one.astype(float) - other.astype(float))[places].max():.2g} apart at most" if numbers else ""
    return f"{len(places):,} of {len(one):,} elements{apart}; that at {at} is {other[at]} and not {one[at]}"


def usual_step(numbers: NDArray[Any]) -> Any:
    """The longest step of a coordinate that is no gap; 0 where there is one element."""
    steps = np.abs(np.diff(numbers))
    return steps[steps <= _USUAL * np.median(steps)].max() if len(steps) else 0


# -- pseudo-random numbers


def random_words(key: int, numbers: range, count: int) -> NDArray[np.uint64]:
    """Pseudo-random words `(number, count)`, a pure function of the key and the number."""
    blocks = -(-count // _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=key, counter=numbers.start * blocks)
    return generator.random_raw(len(numbers) * blocks * _WORDS_PER_BLOCK).reshape(len(numbers), -1)[:, :count]


@lru_cache(maxsize=1)
def permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=key_of(seed, epoch))).permutation(samples)


def bijection(size: int, key: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The images of `index` under a pseudo-random bijection of `range(size)` that `key` names.

    A balanced Feistel network permutes the smallest even-bit power of two that holds `size` (less than 4 × size);
    images outside are permuted again until they fall inside, which keeps the map one-to-one.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.random.Philox(key=key).random_raw(_FEISTEL_ROUNDS)
    image = _feistel(index.astype(np.uint64), half, keys)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], half, keys)
        outside = outside[image[outside] >= size]
    return image.astype(np.int64)


def _feistel(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:  # the finaliser of SplitMix64 (Steele et al. 2014): every input bit reaches every output bit
        word = right + key
        word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((word ^ word >> np.uint64(31)) & mask)
    return left << bits | right


@lru_cache(maxsize=64)
def key_of(*words: int) -> int:
    """A 128-bit Philox key; numpy guarantees the words of a SeedSequence."""
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint64)
    return int(low) | int(high) << 64


def generator_of(*words: int) -> np.random.Generator:
    """A generator of its own; equal words give equal draws."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
