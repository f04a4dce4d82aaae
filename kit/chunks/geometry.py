"""How many chunks a patch touches: the least, the most, on average, and together with the rest of its batch. Exact.

A patch of `size` elements at `offset` along one dimension touches the chunks `offset // chunk` to
`(offset + size - 1) // chunk`. Dimensions are independent, so along several of them counts multiply. Offsets are the
multiples of `stride` from 0 to `extent - size`, all equally likely: stride 1 is random order, a larger one is a grid.
Everything is counted in elements and chunks; what a chunk costs is `kit.chunks.cost`. Sizes that people write by
dimension name become tuples in dimension order here, or are refused with the way out.

The one invariant: chunks alike are counted once and multiplied, so that an array of a million chunks costs no more
than an array of ten. Exact, but for one shortcut: where more than 128 chunks near an edge all differ (a patch of
thousands of chunks), unions count them in 32 steps, each as its middle, and err by less than 1 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kit.errors import PlanError, did_you_mean

_MOST_LISTED = 128
_STEPS = 32


def fewest_chunks(size: int, chunk: int) -> int:
    """Chunks a patch touches when it starts at a chunk's edge: `ceil(size / chunk)`."""
    return -(-size // chunk)


def most_chunks(size: int, chunk: int) -> int:
    """Chunks a patch touches at the worst offset: `ceil((size - 1) / chunk) + 1`."""
    return -(-(size - 1) // chunk) + 1


def mean_chunks(size: int, chunk: int) -> float:
    """Chunks touched on average when every offset within a chunk is equally likely: `1 + (size - 1) / chunk`."""
    return 1 + (size - 1) / chunk


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of an array: its extent, the patch along it, its chunk, and the distance between offsets."""

    extent: int
    size: int
    chunk: int
    stride: int = 1

    def __post_init__(self) -> None:
        for name in ("extent", "size", "chunk", "stride"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.size > self.extent:
            raise PlanError(f"a patch of {self.size} does not fit an array of {self.extent}; take a smaller patch")

    @property
    def positions(self) -> int:
        """Offsets a patch may take."""
        return (self.extent - self.size) // self.stride + 1

    @property
    def last_offset(self) -> int:
        return (self.positions - 1) * self.stride

    @property
    def chunks(self) -> int:
        """Chunks along the dimension, the last perhaps reaching over the edge."""
        return -(-self.extent // self.chunk)

    @property
    def fewest(self) -> int:
        """Fewest chunks a patch touches; offset 0 is always allowed and always best."""
        return fewest_chunks(self.size, self.chunk)

    @property
    def most(self) -> int:
        """Most chunks a patch touches at an offset that exists.

        Offsets leave the remainders 0, g, 2g, ... in a chunk, g = gcd(stride, chunk), and a larger remainder never
        touches fewer chunks; so the largest remainder that occurs decides.
        """
        common = math.gcd(self.stride, self.chunk)
        period = self.chunk // common
        if self.positions >= period:
            remainder = self.chunk - common
        elif self.last_offset < self.chunk:
            remainder = self.last_offset
        else:
            remainder = max(position * self.stride % self.chunk for position in range(self.positions))
        return (remainder + self.size - 1) // self.chunk + 1

    @property
    def mean(self) -> float:
        """Chunks a patch touches on average over all its offsets; exact."""
        first = floor_sum(self.positions, self.chunk, self.stride, 0)
        last = floor_sum(self.positions, self.chunk, self.stride, self.size - 1)
        return 1 + (last - first) / self.positions

    def touches(self) -> Counter[int]:
        """`{number of offsets that touch a chunk: number of such chunks}`."""
        return _touches(self)

    def offsets_touching(self, index: int) -> int:
        low = max(0, index * self.chunk - self.size + 1)
        high = min(self.last_offset, (index + 1) * self.chunk - 1)
        return max(0, high // self.stride - (low - 1) // self.stride)


def floor_sum(terms: int, divisor: int, step: int, start: int) -> int:
    """`Σ (step × k + start) // divisor` for k from 0 to terms - 1, in as many rounds as Euclid's algorithm takes."""
    total = 0
    while True:
        total += terms * (terms - 1) // 2 * (step // divisor) + terms * (start // divisor)
        step, start = step % divisor, start % divisor
        reach = step * terms + start
        if reach < divisor:
            return total
        terms, start, divisor, step = reach // divisor, reach % divisor, step, divisor


@lru_cache(maxsize=1 << 14)
def _touches(axis: Axis) -> Counter[int]:
    """As `Axis.touches`; kept, because candidates share sides. Nobody changes the answer.

    Away from both edges the number repeats every `stride / gcd(stride, chunk)` chunks, so one period is counted.
    """
    first = min(fewest_chunks(axis.size - 1, axis.chunk), axis.chunks)  # before it, negative offsets would touch too
    inner = max(0, axis.last_offset // axis.chunk - first)  # after these, offsets beyond the last would
    period = axis.stride // math.gcd(axis.stride, axis.chunk)
    counts: Counter[int] = Counter()
    for edge in (range(first), range(first + inner, axis.chunks)):
        for index, times in in_steps(edge):
            counts[axis.offsets_touching(index)] += times
    for step in range(min(period, inner)):
        counts[axis.offsets_touching(first + step)] += (inner - step - 1) // period + 1
    return counts


def in_steps(places: range) -> Iterator[tuple[int, int]]:
    """`(place, how many it stands for)`: every place of a short range, the middles of 32 steps of a long one."""
    if len(places) <= _MOST_LISTED:
        yield from ((place, 1) for place in places)
        return
    for step in range(_STEPS):
        low, high = (len(places) * edge // _STEPS for edge in (step, step + 1))
        yield places[(low + high) // 2], high - low


def axes_of(
    shape: Sequence[int], chunk: Sequence[int], patch: Sequence[int], stride: Sequence[int]
) -> tuple[Axis, ...]:
    """One `Axis` per dimension.

    Raises:
        PlanError: when the lengths differ, a size is below 1 or a patch is larger than its array.
    """
    if len({len(shape), len(chunk), len(patch), len(stride)}) != 1:
        raise PlanError(
            f"shape {tuple(shape)}, chunk {tuple(chunk)}, patch {tuple(patch)} and stride {tuple(stride)} differ in "
            "length; give one number per dimension to each"
        )
    return tuple(Axis(*sizes) for sizes in zip(shape, patch, chunk, stride, strict=True))


def place_of(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    """The place of that number in C order, along dimensions of these lengths."""
    place = []
    for count in reversed(counts):
        number, inside = divmod(number, count)
        place.append(inside)
    return tuple(reversed(place))


def touch_counts(axes: Sequence[Axis]) -> dict[int, int]:
    """`{offsets that touch a chunk: number of such chunks}` over all dimensions."""
    return product_of(axis.touches() for axis in axes)


def product_of(counters: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """`{product of one key from each: how often it occurs}`."""
    total = {1: 1}
    for counter in counters:
        merged: dict[int, int] = {}
        for count, times in counter.items():
            for other, other_times in total.items():
                key = count * other
                merged[key] = merged.get(key, 0) + times * other_times
        total = merged
    return total


def touched_at_least_once(count: int, positions: int, samples: int, replacement: bool) -> float:
    """Probability that one of `samples` draws from `positions` falls on one of `count`."""
    if samples == 0 or count == 0:
        return 0.0
    if count + (0 if replacement else samples - 1) >= positions:
        return 1.0
    if replacement:
        return -math.expm1(samples * math.log1p(-count / positions))
    few, many = sorted((samples, count))  # C(positions - many, few) / C(positions, few), the shorter product of the two
    drawn = in_steps(range(few))
    return -math.expm1(math.fsum(times * math.log1p(-many / (positions - step)) for step, times in drawn))


def named_shape(dims: Sequence[str], shape: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Raises: PlanError: unless every dimension has one name and one size."""
    names, extents = tuple(dims), tuple(int(extent) for extent in shape)
    if not names or len(names) != len(extents) or len(set(names)) != len(names):
        raise PlanError(f"dims {names} and shape {extents} must name each dimension once and have equal lengths")
    return names, extents


def ordered(what: str, sizes: Mapping[str, int], dims: Sequence[str], default: Sequence[int]) -> tuple[int, ...]:
    """A mapping of sizes as a tuple in dimension order.

    Raises:
        PlanError: for an unknown dimension or a size that is no whole number from 1.
    """
    for name, size in sizes.items():
        if name not in dims:
            hint = did_you_mean(name, dims, "the dimensions are {}")
            raise PlanError(f"{what}: the array has no dimension {name!r}{hint}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlanError(f"{what}.{name} is {size!r}, but must be a whole number of elements, at least 1")
    return tuple(int(sizes.get(name, size)) for name, size in zip(dims, default, strict=True))


def check_patch(what: str, dims: Sequence[str], shape: Sequence[int], patch: Sequence[int]) -> None:
    """Raises: PlanError: for a patch larger than the array."""
    for name, extent, size in zip(dims, shape, patch, strict=True):
        if size > extent:
            raise PlanError(
                f"{what}.{name} is {size}, larger than the array's {extent}; take a patch of at most {extent} along it"
            )
