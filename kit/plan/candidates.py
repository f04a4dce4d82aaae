"""Which sizes of chunk are worth pricing, under what constraints, and the search for the best of them.

Along each dimension the sides start from the patch's times powers of two, moved to the nearest that the rules allow.
All combinations are priced, then the best is improved one dimension at a time, to the next larger and smaller side,
until nothing gains. Sizes are elements in dimension order.

The one invariant: every candidate keeps the rules; where no size does, a PlanError says which rule cannot be kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, get_args

from kit.errors import PlanError
from kit.units import format_bytes

Sizes = tuple[int, ...]
Divisibility = Literal["any", "divides", "power-of-two"]

LARGEST_OBJECT_BYTES = 5 << 40
"""What GCS and S3 allow an object to hold (2025)."""
_SHOWN_POWERS = range(-3, 6)
_MOST_STEPS = 24
"""Of the improvement: each doubles or halves one side, so it ends long before."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a chunk must keep."""

    dims: tuple[str, ...]
    shape: Sizes
    element_bytes: int
    divisibility: Divisibility = "any"
    """divides: its side divides the array's; power-of-two: its side is one."""
    multiple_of: Sizes = ()
    """Its side is a multiple of this, per dimension; empty for no such rule."""
    largest_object_bytes: int = LARGEST_OBJECT_BYTES
    """No object, uncompressed, is larger than this."""
    shard: Sizes | None = None
    """It divides this, per dimension; 0 for any."""

    def __post_init__(self) -> None:
        if self.divisibility not in get_args(Divisibility):
            known = ", ".join(get_args(Divisibility))
            raise PlanError(f"divisibility is {self.divisibility!r}, but must be one of {known}")

    @property
    def constrained(self) -> bool:
        """Whether any rule but a shard given by hand is set."""
        return (
            self.divisibility != "any"
            or any(k > 1 for k in self.multiple_of)
            or self.largest_object_bytes < LARGEST_OBJECT_BYTES
        )

    @cached_property
    def _multiples(self) -> Sizes:
        return self.multiple_of or (1,) * len(self.shape)

    @cached_property
    def _allowed(self) -> tuple[tuple[int, ...] | None, ...]:
        """All sides allowed along each dimension; None where they are too many to list."""
        return tuple(self._list_sides(place) for place in range(len(self.shape)))

    def _list_sides(self, place: int) -> tuple[int, ...] | None:
        extent, multiple = self.shape[place], self._multiples[place]
        shard = self.shard[place] if self.shard else 0
        if self.divisibility == "power-of-two":
            sides: Iterable[int] = [1 << power for power in range((extent - 1).bit_length() + 1)]
        elif self.divisibility == "divides":
            sides = _divisors(extent)
        elif shard:
            sides = _divisors(shard)
        else:
            return None
        kept = tuple(sorted(side for side in sides if side % multiple == 0 and (not shard or shard % side == 0)))
        if not kept:
            raise PlanError(f"no chunk side along {self.dims[place]} keeps the rules: {self._rules_of(place)}")
        return kept

    def _rules_of(self, place: int) -> str:
        words = {"divides": f"it divides {self.shape[place]}", "power-of-two": "it is a power of two"}
        parts = [words[self.divisibility]] if self.divisibility in words else []
        if self._multiples[place] > 1:
            parts.append(f"it is a multiple of {self._multiples[place]}")
        if self.shard and self.shard[place]:
            parts.append(f"it divides the shard's {self.shard[place]}")
        return "; ".join(parts)

    def nearest(self, place: int, side: float) -> int:
        """The allowed side closest to this one, by ratio, along one dimension."""
        extent, multiple, allowed = self.shape[place], self._multiples[place], self._allowed[place]
        if allowed is None:
            largest = extent if multiple == 1 else -(-extent // multiple) * multiple
            return min(max(multiple, round(side / multiple) * multiple), largest)
        above = min(bisect_left(allowed, side), len(allowed) - 1)
        below = max(0, above - 1)
        return min(allowed[below], allowed[above], key=lambda choice: abs(math.log(choice / side)))

    def neighbours(self, place: int, side: int) -> Iterator[int]:
        """The next sides worth trying, about half and twice this one."""
        for factor in (0.5, 2.0):
            target = max(1.0, min(float(self.shape[place]), side * factor))
            other = self.nearest(place, target)
            allowed = self._allowed[place]
            if other == side and allowed is not None:
                index = allowed.index(side) + (1 if factor > 1 else -1)
                other = allowed[index] if 0 <= index < len(allowed) else side
            if other != side:
                yield other

    def fits(self, chunk: Sizes) -> bool:
        """Whether the smallest object with such a chunk is small enough: one chunk, or the shard given by hand."""
        return self.object_bytes(chunk) <= self.largest_object_bytes

    def object_bytes(self, chunk: Sizes) -> int:
        """Uncompressed bytes of one chunk, or of the shard given by hand, its zeros filled from the chunk."""
        shard = self.shard or (0,) * len(chunk)
        return math.prod(side or inner for side, inner in zip(shard, chunk, strict=True)) * self.element_bytes

    def check(self, chunk: Sizes) -> None:
        """Raises: PlanError: for a chunk given by hand that breaks a rule."""
        if not self.fits(chunk):
            size = format_bytes(math.prod(chunk) * self.element_bytes)
            limit = format_bytes(self.largest_object_bytes)
            raise PlanError(f"the chunk holds {size}, more than the largest object allowed, {limit}; cut it smaller")
        for place, side in enumerate(chunk):
            allowed = self._allowed[place]
            if (allowed is not None and side not in allowed) or side % self._multiples[place]:
                close = self.nearest(place, side)
                raise PlanError(
                    f"chunk.{self.dims[place]} is {side}, which breaks a rule: {self._rules_of(place)}; "
                    f"the closest that keeps it is {close}"
                )


def sides_around(rules: Rules, patch: Sizes) -> list[list[int]]:
    """Sides worth pricing along each dimension for a reader of this patch.

    All of a dimension that the patch covers, else its size times powers of two, fewer the more dimensions are free.
    """
    free = sum(size < extent for size, extent in zip(patch, rules.shape, strict=True))
    powers = range(-3, 6) if free <= 2 else range(-2, 3) if free == 3 else range(-1, 2) if free <= 5 else range(2)
    return [
        sorted({rules.nearest(place, side) for side in _scaled(size, extent, powers)})
        for place, (size, extent) in enumerate(zip(patch, rules.shape, strict=True))
    ]


def _scaled(size: int, extent: int, powers: Sequence[int]) -> list[int]:
    if size >= extent:
        return [extent]
    scaled = (size << power if power >= 0 else -(-size >> -power) for power in powers)
    return [min(max(1, side), extent) for side in scaled]


def between(rules: Rules, layouts: Sequence[Sizes], most: int) -> list[list[int]]:
    """Sides from the smallest to the largest of these layouts along each dimension, about `most` combinations at most.

    All dimensions take steps of the same ratio, the finest of an octave or more that keeps to `most`.
    """
    spans = [(min(sides), max(sides)) for sides in zip(*layouts, strict=True)]
    octaves = 1.0
    while octaves < 64 and math.prod(_steps(*span, octaves) + 1 for span in spans) > most:
        octaves *= 1.25
    return [
        sorted({rules.nearest(place, side) for side in _ladder(*span, _steps(*span, octaves))})
        for place, span in enumerate(spans)
    ]


def _steps(low: int, high: int, octaves: float) -> int:
    """Steps of at most so many octaves, at least two for a span of more than one octave to have a middle."""
    span = math.log2(high / low)
    return 0 if low == high else max(1 + (span > 1), round(span / octaves))


def _ladder(low: int, high: int, steps: int) -> list[float]:
    return [low * (high / low) ** (step / max(1, steps)) for step in range(steps + 1)]


def scaled_alike(rules: Rules, patch: Sizes) -> list[Sizes]:
    """The patch's shape at every size worth showing, all dimensions scaled alike until they end."""
    return [
        tuple(rules.nearest(place, _scaled(side, rules.shape[place], [power])[0]) for place, side in enumerate(patch))
        for power in _SHOWN_POWERS
    ]


def search(
    rules: Rules, sides: Sequence[Sequence[int]], score: Callable[[Sizes], float], *, also: Sequence[Sizes] = ()
) -> dict[Sizes, float]:
    """Scores of every combination of sides that keeps the rules, of `also`, and of what improving the best tries.

    Raises:
        PlanError: when every one of them is larger than an object may be.
    """
    scores = {chunk: score(chunk) for chunk in dict.fromkeys((*product(*sides), *also)) if rules.fits(chunk)}
    if not scores:
        smallest = _smallest(rules, tuple(min(choices) for choices in sides))
        scores[smallest] = score(smallest)
    best = min(scores, key=lambda chunk: scores[chunk])
    for _ in range(_MOST_STEPS):
        for chunk in _moves(rules, best):
            if chunk not in scores and rules.fits(chunk):
                scores[chunk] = score(chunk)
        better = min(scores, key=lambda chunk: scores[chunk])
        if better == best:
            break
        best = better
    return scores


def _moves(rules: Rules, chunk: Sizes) -> Iterator[Sizes]:
    for place, side in enumerate(chunk):
        for other in rules.neighbours(place, side):
            yield (*chunk[:place], other, *chunk[place + 1 :])


def _smallest(rules: Rules, chunk: Sizes) -> Sizes:
    """A chunk small enough to be an object, the longest sides cut first."""
    while not rules.fits(chunk):
        cuts = [move for move in _moves(rules, chunk) if math.prod(move) < math.prod(chunk)]
        if not cuts:
            size, limit = format_bytes(rules.object_bytes(chunk)), format_bytes(rules.largest_object_bytes)
            raise PlanError(f"the smallest object that keeps the rules holds {size}, but none may exceed {limit}")
        chunk = min(cuts, key=math.prod)
    return chunk


def _divisors(number: int) -> list[int]:
    small = [side for side in range(1, math.isqrt(number) + 1) if number % side == 0]
    return small + [number // side for side in small]
