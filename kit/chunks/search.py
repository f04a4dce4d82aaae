"""Which layout of chunks and shards is best: candidates that keep the rules, priced for one reader or for several.

The sides of candidates start at the patch's size times powers of two, moved to the nearest side that the rules allow.
All combinations are priced (`kit.chunks.cost`); then the best one is improved along one dimension at a time, to the
next larger and smaller side, until nothing gains. Who can play reading through (`Play`) then has the best of each size
played, whose neighbours in a shard share requests: the choice is made among these finalists. One reader wants few
seconds per batch. Several readers want a small mean slowdown, each measured against its own best layout under the same
rules and weighted by the share of all reading time it would take with that layout; the plan's own reader weighs 1. All
readers have the same network and host.

Invariants: every candidate keeps the rules, and where no size does, a PlanError names the rule; a layout that does not
fit the memory is chosen only where none fits. The answer is a frozen `ChunkPlan` with the candidates it beat and its
reasons. Sizes are elements in the order of `dims`; predictions are expected values over offsets on one rank.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

from kit.chunks.access import Access, Order
from kit.chunks.cost import ArrayRequests, Bound, LayoutCost, price
from kit.chunks.geometry import check_patch, ordered
from kit.chunks.resources import OPENING_BYTES, Host, Network, Prices
from kit.errors import PlanError, did_you_mean
from kit.registry import Drawable
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_price

Sizes = tuple[int, ...]
Divisibility = Literal["any", "divides", "power-of-two"]
Play = Callable[[Access, Sizes, Sizes | None], ArrayRequests | None]
"""What a batch asks of a chunk and a shard, all variables together; None where it cannot be played through."""

LARGEST_OBJECT_BYTES = 5 << 40
"""What GCS and S3 allow an object to hold (2025)."""
LEAST_CHUNK_BYTES = 4 << 10
"""Of an automatic chunk, unless the array or a rule asks for less: below it a chunk costs more to name, find and write
than it saves to read. An index takes 16 bytes of each."""
CLOSE = 1.10
"""Predictions closer than this count as equal."""
OWN = "this plan"
"""Name of the plan's own pattern among the readers."""
_AS_FAST = 1.01
"""What is slower than the fastest by less is as fast."""
_SHARED_CANDIDATES = 100
"""Layouts priced for several readers before the best is improved."""
_SHOWN_ROWS = 9
"""Sizes that are compared at last, an octave apart, and shown."""
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
        elif self.divisibility == "divides" or shard:
            whole = extent if self.divisibility == "divides" else shard
            small = [side for side in range(1, math.isqrt(whole) + 1) if whole % side == 0]
            sides = {*small, *(whole // side for side in small)}
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

    def neighbours(self, chunk: Sizes) -> Iterator[Sizes]:
        """The chunk with one side about half and twice as long, or the next that the rules allow."""
        for place, side in enumerate(chunk):
            for factor, step in ((0.5, -1), (2.0, 1)):
                other = self.nearest(place, max(1.0, min(float(self.shape[place]), side * factor)))
                allowed = self._allowed[place]
                if other == side and allowed is not None:
                    index = allowed.index(side) + step
                    other = allowed[index] if 0 <= index < len(allowed) else side
                if other != side:
                    yield (*chunk[:place], other, *chunk[place + 1 :])

    def object_bytes(self, chunk: Sizes) -> int:
        """Uncompressed bytes of the smallest object with such a chunk: one chunk, or the shard given by hand."""
        shard = self.shard or (0,) * len(chunk)
        return math.prod(side or inner for side, inner in zip(shard, chunk, strict=True)) * self.element_bytes

    def fits(self, chunk: Sizes) -> bool:
        """Whether that object is small enough."""
        return self.object_bytes(chunk) <= self.largest_object_bytes

    @cached_property
    def least_elements(self) -> int:
        """Of an automatic chunk: what `LEAST_CHUNK_BYTES` hold, or all that the array, a shard or an object does."""
        shard = self.shard or self.shape
        whole = math.prod(min(side or extent, extent) for side, extent in zip(shard, self.shape, strict=True))
        return max(
            1, min(LEAST_CHUNK_BYTES // self.element_bytes, whole, self.largest_object_bytes // self.element_bytes)
        )

    def grown(self, patch: Sizes) -> Sizes:
        """The patch, or what has its shape and the least elements of a chunk: its shortest sides doubled."""
        sides = [*patch]
        while math.prod(sides) < self.least_elements:
            free = [place for place, extent in enumerate(self.shape) if sides[place] < extent]
            place = min(free, key=lambda place: (sides[place] / patch[place], sides[place] / self.shape[place]))
            sides[place] = min(2 * sides[place], self.shape[place])
        return tuple(sides)

    def check(self, chunk: Sizes) -> None:
        """Raises: PlanError: for a chunk given by hand that breaks a rule."""
        if not self.fits(chunk):
            size = format_bytes(math.prod(chunk) * self.element_bytes)
            limit = format_bytes(self.largest_object_bytes)
            raise PlanError(f"the chunk holds {size}, more than the largest object allowed, {limit}; cut it smaller")
        for place, side in enumerate(chunk):
            allowed = self._allowed[place]
            if (allowed is not None and side not in allowed) or side % self._multiples[place]:
                raise PlanError(
                    f"chunk.{self.dims[place]} is {side}, which breaks a rule: {self._rules_of(place)}; "
                    f"the closest that keeps it is {self.nearest(place, side)}"
                )


def sides_around(rules: Rules, patch: Sizes) -> list[list[int]]:
    """Sides worth pricing along each dimension for a reader of this patch.

    All of a dimension that the patch covers, else its size times powers of two, fewer the more dimensions are free.
    """
    free = sum(size < extent for size, extent in zip(patch, rules.shape, strict=True))
    powers = range(-3, 6) if free <= 2 else range(-2, 3) if free == 3 else range(-1, 2) if free <= 5 else range(2)
    sizes = enumerate(zip(patch, rules.shape, strict=True))
    return [
        sorted({rules.nearest(place, _scaled(size, extent, power)) for power in powers})
        for place, (size, extent) in sizes
    ]


def _scaled(size: int, extent: int, power: int) -> int:
    """The size times a power of two; all of the dimension where it covers that."""
    scaled = size << power if power >= 0 else -(-size >> -power)
    return extent if size >= extent else min(max(1, scaled), extent)


def between(rules: Rules, layouts: Sequence[Sizes], most: int) -> list[list[int]]:
    """Sides from the smallest to the largest of these layouts along each dimension, about `most` combinations at most.

    All dimensions take steps of the same ratio, the finest of an octave or more that keeps to `most`.
    """
    spans = [(min(sides), max(sides)) for sides in zip(*layouts, strict=True)]

    def steps(low: int, high: int) -> int:
        """Steps of at most so many octaves, at least two for a span of more than one octave to have a middle."""
        span = math.log2(high / low)
        return 0 if low == high else max(1 + (span > 1), round(span / octaves))

    octaves = 1.0
    while octaves < 64 and math.prod(steps(*span) + 1 for span in spans) > most:
        octaves *= 1.25
    sides = []
    for place, (low, high) in enumerate(spans):
        count = steps(low, high)
        ratios = [step / max(1, count) for step in range(count + 1)]
        sides.append(sorted({rules.nearest(place, low * (high / low) ** ratio) for ratio in ratios}))
    return sides


def search(
    rules: Rules, sides: Sequence[Sequence[int]], score: Callable[[Sizes], float], *, also: Sequence[Sizes] = ()
) -> None:
    """Score every combination of sides that keeps the rules, `also`, and what improving the best of them tries.

    Raises:
        PlanError: when no object that keeps the rules is small enough.
    """
    fitting = {chunk: math.prod(chunk) for chunk in (*itertools.product(*sides), *also) if rules.fits(chunk)}
    least = rules.least_elements if any(size >= rules.least_elements for size in fitting.values()) else 0
    scores = {chunk: score(chunk) for chunk, size in fitting.items() if size >= least}
    if not scores:  # the smallest sides, the longest of them cut until an object is small enough
        chunk = tuple(map(min, sides))
        while not rules.fits(chunk):
            cuts = [other for other in rules.neighbours(chunk) if math.prod(other) < math.prod(chunk)]
            if not cuts:
                size, limit = format_bytes(rules.object_bytes(chunk)), format_bytes(rules.largest_object_bytes)
                raise PlanError(f"the smallest object that keeps the rules holds {size}, but none may exceed {limit}")
            chunk = min(cuts, key=math.prod)
        scores[chunk] = score(chunk)
    best = min(scores, key=lambda chunk: scores[chunk])
    for _ in range(_MOST_STEPS):
        for chunk in rules.neighbours(best):
            if chunk not in scores and math.prod(chunk) >= least and rules.fits(chunk):
                scores[chunk] = score(chunk)
        better = min(scores, key=lambda chunk: scores[chunk])
        if better == best:
            break
        best = better


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen and everything it was chosen from."""

    chosen: LayoutCost
    best: LayoutCost
    """What automatic planning chooses."""
    candidates: tuple[LayoutCost, ...]
    """The finalists, the best first and a chunk given by hand among them, then the others."""
    finalists: int
    """So many of the candidates were compared at last: those played through, or all."""
    readers: tuple[ReaderCost, ...]
    """Every reader under the chosen layout, the plan's own first."""
    unruled: LayoutCost
    """What automatic planning would choose without the rules; the same as `best` where there are none."""


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Prices layouts for all readers under one set of rules."""

    network: Network
    host: Host
    prices: Prices
    rules: Rules
    sharded: bool
    """False: every chunk is an object, unless `rules` name a shard."""
    target_shard_bytes: int
    readers: tuple[WeightedPattern, ...]
    """The plan's own pattern first."""
    play: Play | None = None

    def choose(self, by_hand: Sizes | None) -> Choice:
        """The automatic choice, or the chunk given by hand, priced beside it.

        Raises:
            PlanError: for a chunk that breaks a rule, or that a shard given by hand cuts through.
        """
        if by_hand is not None:
            self.shard(by_hand)
            replace(self.rules, shard=None).check(by_hand)
        alone = [self._alone(reader.access) for reader in self.readers]
        finals = [
            self._finals(own, _seconds, partial(self.played, reader.access))
            for reader, own in zip(self.readers, alone, strict=True)
        ]
        costs, finalists, bests = alone[0], finals[0], [_plainest(own) for own in finals]
        if len(self.readers) > 1:
            costs = self._shared([_plainest(own) for own in alone])
            finalists = self._finals(costs, _slowdown, partial(self._judged, bests=bests, priced=self.played))
        best = chosen = self._lightest(finalists)
        if by_hand is not None:
            chosen = self._judged(by_hand, bests, self.played)
            finalists = sorted([chosen, *(cost for cost in finalists if cost.chunk != by_hand)], key=self._order)
        compared = {cost.chunk for cost in finalists}
        others = sorted((cost for cost in costs if cost.chunk not in compared), key=self._order)
        readers = tuple(
            ReaderCost(
                name=reader.name, patch=reader.access.patch, weight=reader.weight,
                cost=self.played(reader.access, chosen.chunk), best=own,
            )
            for reader, own in zip(self.readers, bests, strict=True)
        )  # fmt: skip
        free = replace(
            self.rules, divisibility="any", multiple_of=(1,) * len(self.rules.shape),
            largest_object_bytes=LARGEST_OBJECT_BYTES,
        )  # fmt: skip
        unruled = best if free == self.rules else replace(self, rules=free).choose(None).best
        return Choice(
            chosen=chosen, best=best, candidates=(*finalists, *others), finalists=len(finalists), readers=readers,
            unruled=unruled,
        )  # fmt: skip

    def _alone(self, access: Access) -> list[LayoutCost]:
        """Every candidate for one reader: sides around its patch, and the patch's shape scaled as a whole."""
        patch = self.rules.grown(access.patch)
        alike = [
            tuple(
                self.rules.nearest(place, _scaled(size, self.rules.shape[place], power))
                for place, size in enumerate(patch)
            )
            for power in range(-3, 6)
        ]
        return self._searched(
            sides_around(self.rules, patch), lambda chunk: self.price(access, chunk),
            lambda cost: cost.seconds_per_batch, alike,
        )  # fmt: skip

    def _finals(
        self, costs: Iterable[LayoutCost], order: Ranked, make: Callable[[Sizes], LayoutCost]
    ) -> list[LayoutCost]:
        """The best of each size around the best, played through; all as they are where nothing can be. Best first."""
        found = sorted(costs, key=order)
        if self.play is None:
            return found
        by_size = best_of_sizes(found)
        first = next(iter(by_size))
        near = (cost for size, cost in by_size.items() if abs(size - first) <= _SHOWN_ROWS // 2)
        return sorted((make(cost.chunk) for cost in near), key=order)

    def _shared(self, bests: Sequence[LayoutCost]) -> list[LayoutCost]:
        """Candidates between the readers' own best ones, judged by all."""
        patches = [tuple(map(self.rules.nearest, itertools.count(), reader.access.patch)) for reader in self.readers]
        sides = between(self.rules, [*(best.chunk for best in bests), *patches], _SHARED_CANDIDATES)
        return self._searched(sides, partial(self._judged, bests=bests, priced=self.price), lambda cost: cost.slowdown)

    def _searched(
        self,
        sides: Sequence[Sequence[int]],
        make: Callable[[Sizes], LayoutCost],
        score: Callable[[LayoutCost], float],
        also: Sequence[Sizes] = (),
    ) -> list[LayoutCost]:
        costs: dict[Sizes, LayoutCost] = {}

        def priced(chunk: Sizes) -> float:
            cost = costs[chunk] = make(chunk)
            return score(cost) if cost.fits else math.inf

        search(self.rules, sides, priced, also=also)
        return [*costs.values()]

    def _judged(
        self, chunk: Sizes, bests: Sequence[LayoutCost], priced: Callable[[Access, Sizes], LayoutCost]
    ) -> LayoutCost:
        """A layout priced for the plan's own reader, with the mean slowdown of all."""
        costs = [priced(reader.access, chunk) for reader in self.readers]
        ratios = (
            reader.weight * cost.seconds_per_batch / best.seconds_per_batch
            for reader, cost, best in zip(self.readers, costs, bests, strict=True)
        )
        return replace(costs[0], slowdown=math.fsum(ratios) / math.fsum(reader.weight for reader in self.readers))

    @property
    def _order(self) -> Ranked:
        return _seconds if len(self.readers) == 1 else _slowdown

    def _lightest(self, finalists: Sequence[LayoutCost]) -> LayoutCost:
        """Of those about as good as the best, the one that reads the fewest bytes, then has fewest requests."""
        unfit, score, _ = self._order(finalists[0])
        close = (cost for cost in finalists if self._order(cost)[0] == unfit and self._order(cost)[1] <= score * CLOSE)
        return min(close, key=lambda cost: (cost.bytes_per_batch, *reversed(self._order(cost))))

    def price(self, access: Access, chunk: Sizes) -> LayoutCost:
        """One layout for one reader, with the shard its chunk would get, each chunk a request."""
        return price(access, self.network, chunk, self.host, shard=self.shard(chunk), prices=self.prices)

    def played(self, access: Access, chunk: Sizes) -> LayoutCost:
        """The same, played through where that can be."""
        shard = self.shard(chunk)
        asked = self.play(access, chunk, shard) if self.play else None
        return price(access, self.network, chunk, self.host, shard=shard, prices=self.prices, asked=asked)

    def shard(self, chunk: Sizes) -> Sizes | None:
        """The shard a chunk gets; None when it would be the chunk itself.

        Raises:
            PlanError: for a shard given by hand that cuts through the chunk or is larger than an object may be.
        """
        rules = self.rules
        if rules.shard is not None:
            shard = checked_shard(rules.shard, chunk, rules.dims)
            if not rules.fits(shard):
                size, limit = format_bytes(rules.object_bytes(shard)), format_bytes(rules.largest_object_bytes)
                raise PlanError(f"the shard holds {size}, more than the largest object allowed, {limit}")
            return shard
        if not self.sharded:
            return None
        shard = fill_shard(rules.shape, chunk, math.prod(chunk) * rules.element_bytes, self.target_shard_bytes)
        return None if shard == chunk else shard


Ranked = Callable[[LayoutCost], tuple[bool, float, float]]
"""Whether it does not fit, what is made small, then what decides between equals."""


def _seconds(cost: LayoutCost) -> tuple[bool, float, float]:
    return not cost.fits, cost.seconds_per_batch, cost.requests_per_batch


def _slowdown(cost: LayoutCost) -> tuple[bool, float, float]:
    return not cost.fits, cost.slowdown, cost.requests_per_batch


def best_of_sizes(costs: Iterable[LayoutCost]) -> dict[int, LayoutCost]:
    """The first of each size, by its octave in bytes."""
    best: dict[int, LayoutCost] = {}
    for cost in costs:
        best.setdefault(round(math.log2(cost.chunk_bytes)), cost)
    return best


def _plainest(costs: Sequence[LayoutCost]) -> LayoutCost:
    """Of those as fast as the fastest, the one with the fewest requests: more at once may make up for more of them."""
    first = min(costs, key=_seconds)
    limit = first.seconds_per_batch * _AS_FAST
    close = (cost for cost in costs if cost.fits == first.fits and cost.seconds_per_batch <= limit)
    return min(close, key=lambda cost: (cost.requests_per_batch, cost.seconds_per_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedPattern:
    """One pattern and how much it counts."""

    name: str
    access: Access
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderCost:
    """What the chosen layout costs one reader, beside its own best."""

    name: str
    patch: tuple[int, ...]
    weight: float
    cost: LayoutCost
    """With the chosen layout."""
    best: LayoutCost
    """With the layout that is best for this reader alone, under the same rules."""

    @property
    def slowdown(self) -> float:
        """Seconds with the chosen layout over seconds with the reader's own."""
        return self.cost.seconds_per_batch / self.best.seconds_per_batch


_READER_FIELDS = ("patch", "order", "stride", "batch_size", "shuffle", "weight")


def reader_of(name: str, entry: Mapping[str, Any], own: Access, dims: Sequence[str]) -> WeightedPattern:
    """The reader described by `{patch: {...}, weight: ..., order: ..., stride: {...}, batch_size: ..., shuffle: ...}`.

    Raises:
        PlanError: for an unknown field, a weight or patch that cannot be, under `readers.<name>`.
    """
    where = f"readers.{name}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("patch"), Mapping):
        raise PlanError(f"{where} needs a patch, such as {{patch: {{{dims[0]}: 1}}, weight: 1}}")
    for key in entry:
        if key not in _READER_FIELDS:
            raise PlanError(f"{where} has no field {key!r}{did_you_mean(key, _READER_FIELDS, 'it takes {}')}")
    weight, order = entry.get("weight", 1.0), entry.get("order", "random")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise PlanError(f"{where}.weight is {weight!r}, but must be a number above 0")
    patch = ordered(f"{where}.patch", entry["patch"], dims, [1] * len(dims))
    check_patch(f"{where}.patch", dims, own.shape, patch)
    steps = patch if order == "grid" else [1] * len(dims)
    stride = ordered(f"{where}.stride", entry.get("stride", {}), dims, steps)
    try:
        access = replace(
            own, patch=patch, stride=stride, order=order, batch_size=entry.get("batch_size", 1),
            shuffle=entry.get("shuffle", True), samples_per_epoch=None, epochs=1, ranks=1,
        )  # fmt: skip
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    return WeightedPattern(name=name, access=access, weight=float(weight))


def fill_shard(shape: Sequence[int], chunk: Sequence[int], chunk_bytes: int, target_bytes: int) -> tuple[int, ...]:
    """Chunks packed into a shard of at most `target_bytes`, whole rows first, in C order.

    A row that does not fit is cut into parts as equal as they can be; a shard never passes the last chunk of the array.
    A chunk above the target is a shard by itself.
    """
    left, sides = max(1, target_bytes // chunk_bytes), []
    for extent, side in reversed(list(zip(shape, chunk, strict=True))):
        available = -(-extent // side)
        parts = -(-available // min(available, left))
        take = -(-available // parts)
        sides.append(take * side)
        left = left // take if parts == 1 else 1
    return tuple(reversed(sides))


def checked_shard(shard: Sequence[int], chunk: Sequence[int], dims: Sequence[str]) -> tuple[int, ...]:
    """A shard given by hand, its zeros filled from the chunk.

    Raises:
        PlanError: when it cuts through a chunk.
    """
    filled = tuple(side or inner for side, inner in zip(shard, chunk, strict=True))
    for name, side, inner in zip(dims, filled, chunk, strict=True):
        if side % inner:
            near = sorted({max(1, side // inner) * inner, -(-side // inner) * inner})
            raise PlanError(
                f"shard.{name} is {side}, which cuts through a chunk of {inner}; a shard is a multiple of the chunk, "
                f"such as {' or '.join(map(str, near))}"
            )
    return filled


_READER_COLUMNS = ("reader", "weight", "samples/s", "bound by", "at its best", "with chunk", "price of sharing")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChunkPlan(Drawable):
    """Chunks and shards of a dataset and what reading it will cost."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    variables: int
    together: bool
    """Whether the variables lie in one array, so that a chunk holds all of them."""
    patch: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    """None: every chunk is an object of its own."""
    order: Order
    batch_size: int
    """Samples of a batch on each rank."""
    ranks: int
    requests_per_sample: float
    """Expected, all variables, for a sample on its own; each request reads one chunk."""
    bytes_per_sample: float
    """Whole chunks of a sample on its own, decoded."""
    requests_per_batch: float
    """Expected chunks a batch fetches, all variables: shared by its samples, its window or the cache."""
    seconds_per_batch: float
    samples_per_second: float
    """Of one rank."""
    amplification: float
    """Bytes read per byte of patch, for a sample on its own."""
    bound: Bound
    """The resource that decides."""
    object_count: int
    """Objects in the store that hold data, all variables."""
    candidates: tuple[LayoutCost, ...]
    """Every layout considered: the finalists and a chunk given by hand, the best first, then the others."""
    finalists: int
    """So many of them were played through, so that what neighbours in a shard share counts; all where nothing was."""
    readers: tuple[ReaderCost, ...]
    """Every pattern the layout serves, this plan's own first."""
    reasons: tuple[str, ...]

    @property
    def chosen(self) -> LayoutCost:
        """All that is predicted of the chosen layout."""
        return next(cost for cost in self.candidates if cost.chunk == self.chunk)

    @property
    def chunk_bytes(self) -> int:
        return self.chosen.chunk_bytes

    @property
    def shard_bytes(self) -> int | None:
        return None if self.shard is None else math.prod(self.shard) * self.chunk_bytes // math.prod(self.chunk)

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch in one variable."""
        return math.prod(self.patch) * self.itemsize

    @property
    def best_by_size(self) -> tuple[LayoutCost, ...]:
        """The best candidate of each size, sizes apart by a factor of two or so, smallest first, with the choice."""
        best = best_of_sizes(self.candidates[: self.finalists])
        best[round(math.log2(self.chunk_bytes))] = self.chosen
        return tuple(best[size] for size in sorted(best))

    def rows(self) -> list[dict[str, Any]]:
        """Every candidate as a plain dict, the best first, as a data frame takes them."""
        plain = [field.name for field in fields(LayoutCost) if field.name not in ("window", "seconds_by_resource")]
        return [
            {name: getattr(cost, name) for name in plain}
            | {"mixing": cost.window.mixing(self.batch_size) if cost.window else None}
            for cost in self.candidates
        ]

    def __repr__(self) -> str:
        parts = [self._headline, text_table(*self._table()), self._key]
        if len(self.readers) > 1:
            parts.append(text_table(_READER_COLUMNS, self._reader_rows()))
        return "\n".join([*parts, *(f"- {reason}" for reason in self.reasons)])

    def _repr_html_(self) -> str:
        columns, rows, marked = self._table()
        shown = html_table(columns, rows, caption=self._headline, marked=marked, dense=True)
        shown += f'<div style="opacity: 0.75; max-width: 60em">{self._key}</div>'
        if len(self.readers) > 1:
            shown += html_table(_READER_COLUMNS, self._reader_rows(), caption="readers", dense=True)
        return f'<div style="overflow-x: auto">{shown}</div>{html_list(self.reasons)}'

    @property
    def _key(self) -> str:
        ratio = self.chosen.bytes_per_batch / self.chosen.stored_bytes_per_batch
        stored = "as if nothing were compressed" if ratio == 1 else f"compressed {ratio:.3g} times"
        shared = f"{'neighbours in a shard, ' * bool(self.shard)}a batch, its window or the cache"
        return (
            f"requests/sample and × patch: least · mean · most of a sample alone; as read: shared by {shared}, fewer "
            f"still where memory holds most of the array; read/sample: bytes of that, {stored}; × patch counts whole "
            f"chunks; memory: of one rank, beside {format_bytes(OPENING_BYTES)} once"
        )

    def _reader_rows(self) -> list[list[str]]:
        return [
            [
                reader.name, f"{reader.weight:g}", format_count(reader.cost.samples_per_second), reader.cost.bound,
                f"{format_count(reader.best.samples_per_second)} samples/s", "×".join(map(str, reader.best.chunk)),
                f"{reader.slowdown:.3g} × the time",
            ]
            for reader in self.readers
        ]  # fmt: skip

    @property
    def _headline(self) -> str:
        shard = "no shards" if self.shard is None else f"shard {named(self.dims, self.shard)}"
        rate = f"{format_count(self.samples_per_second)} samples/s"
        rate += f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{rate} predicted: chunk {named(self.dims, self.chunk)}, {shard}, "
            f"{format_count(self.object_count)} object{'' if self.object_count == 1 else 's'}"
        )

    def _table(self) -> tuple[list[str], list[list[str]], int]:
        """Columns, the best of each size around the choice as rows, and the row of the choice."""
        best = self.best_by_size
        place = best.index(self.chosen)
        start = max(0, min(place - _SHOWN_ROWS // 2, len(best) - _SHOWN_ROWS))
        rows = [self._row(cost) for cost in best[start : start + _SHOWN_ROWS]]
        return [*rows[0]], [[*row.values()] for row in rows], place - start

    def _row(self, cost: LayoutCost) -> dict[str, str]:
        """One layout as text, by column."""
        amplification = (cost.least_amplification, cost.amplification, cost.most_amplification)
        requests = (cost.least_requests_per_sample, cost.requests_per_sample, cost.most_requests_per_sample)
        row = {
            "chunk": "×".join(map(str, cost.chunk)),
            "size": format_bytes(cost.chunk_bytes),
            "rank": str(self.candidates.index(cost) + 1),
            "requests/sample": _triple(requests),
            "as read": f"{cost.requests_made_per_batch / self.batch_size:.3g}",
            "× patch": _triple(amplification),
            "read/sample": format_bytes(cost.bytes_made_per_batch / self.batch_size),
            "samples/s": format_count(cost.samples_per_second),
            "bound by": cost.bound if cost.fits else "does not fit",
            "objects": format_count(cost.object_count),
            "memory": format_bytes(cost.memory_bytes),
        }
        if self.order == "block":
            row["mixing"] = f"{cost.window.mixing(self.batch_size):.0%}" if cost.window else "too little memory"
        if len(self.readers) > 1:
            row["slowdown"] = f"{cost.slowdown:.3g}"
        if cost.price_per_epoch is not None:
            row["price/epoch"] = format_price(cost.price_per_epoch)
        return row


def named(dims: Sequence[str], sizes: Sequence[int]) -> str:
    """Sizes with their dimensions: `time 3 × lat 64 × lon 64`."""
    return " × ".join(f"{name} {size}" for name, size in zip(dims, sizes, strict=True))


def _triple(values: Sequence[float]) -> str:
    return "\u00a0·\u00a0".join(format_count(float(f"{value:.3g}")) for value in values)  # never broken over lines
