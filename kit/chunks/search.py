"""Which sizes of chunk are worth pricing, under what constraints, and the search for the best of them.

Along each dimension the sides start from the patch's times powers of two, moved to the nearest that the rules allow.
All combinations are priced, then the best is improved one dimension at a time, to the next larger and smaller side,
until nothing gains. Sizes are elements in dimension order.

The one invariant: every candidate keeps the rules; where no size does, a PlanError says which rule cannot be kept.

The choice of one layout: candidates priced for one reader or several, the lightest of the best, and what it beat.

One reader: few seconds per batch are good. Several: a small mean slowdown, each measured against the reader's own best
under the same rules. Layouts that do not fit the memory are chosen only when none fits.

Other readers of the same data: named patterns with weights, and what one layout costs each beside its own best.

A store that trains a model is also read for maps, or for time series at one place. Each reader is a pattern (patch,
order, stride, batch size) and a weight: the share of all reading time it would take if every reader had its own best
layout, relative to the plan's own pattern, which weighs 1. So the time of everything with one layout, over the time
with a layout for each, is the weighted mean of the readers' slowdowns; planning makes that smallest. All readers have
the same network and host, and nothing is shared between them.

Shards: how many chunks go into one object, and what is refused. A shard is what a writer writes.

ChunkPlan: a layout, its predicted cost, the candidates it beat, and the reasons, in one frozen answer.

Tuples of sizes are elements in the order of `dims`. Predictions are expected values over random offsets on one rank
(see `kit.chunks.cost` for the formula and its known error).
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, get_args

from kit.chunks.access import Access, Order
from kit.chunks.cost import Bound, LayoutCost, price
from kit.chunks.geometry import check_patch, ordered
from kit.chunks.resources import OPENING_BYTES, Host, Network, Prices
from kit.errors import PlanError
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count

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


CLOSE = 1.10
"""Predictions closer than this count as equal."""
_AS_FAST = 1.01
"""What is slower than the fastest by less is as fast."""
_SHARED_CANDIDATES = 100
"""Layouts priced for several readers before the best is improved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen and everything it was chosen from."""

    chosen: LayoutCost
    best: LayoutCost
    """What automatic planning chooses."""
    candidates: tuple[LayoutCost, ...]
    """The best first."""
    readers: tuple[ReaderCost, ...]
    """Every reader under the chosen layout, the plan's own first."""
    unruled: LayoutCost
    """What automatic planning would choose without the rules; the same as `best` where there are none."""

    @property
    def considered(self) -> tuple[LayoutCost, ...]:
        """The candidates, and last a chunk given by hand that is none of them."""
        listed = any(cost.chunk == self.chosen.chunk for cost in self.candidates)
        return self.candidates if listed else (*self.candidates, self.chosen)


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

    def choose(self, by_hand: Sizes | None) -> Choice:
        """The automatic choice, or the chunk given by hand, priced beside it."""
        if by_hand is not None:
            self._check(by_hand)
        bests, costs = self._candidates()
        candidates = tuple(sorted(costs.values(), key=lambda cost: (not cost.fits, *self._order(cost))))
        best = self._lightest(candidates)
        chosen = best if by_hand is None else self._judged(by_hand, bests)
        readers = tuple(self._reader_cost(reader, own, chosen) for reader, own in zip(self.readers, bests, strict=True))
        return Choice(
            chosen=chosen, best=best, candidates=candidates, readers=readers,
            unruled=self._without_rules() if self.rules.constrained else best,
        )  # fmt: skip

    def _candidates(self) -> tuple[list[LayoutCost], dict[Sizes, LayoutCost]]:
        """Each reader's own best, and the candidates for all of them."""
        alone = [self._alone(reader.access) for reader in self.readers]
        bests = [_plainest([*costs.values()]) for costs in alone]
        if len(self.readers) == 1:
            return bests, alone[0]
        return bests, self._shared(bests)

    def _alone(self, access: Access) -> dict[Sizes, LayoutCost]:
        """Every candidate for one reader on its own."""
        sides, also = sides_around(self.rules, access.patch), scaled_alike(self.rules, access.patch)
        return self._searched(
            sides, lambda chunk: self.price(access, chunk), lambda cost: cost.seconds_per_batch, also=also
        )

    def _shared(self, bests: Sequence[LayoutCost]) -> dict[Sizes, LayoutCost]:
        """Candidates between the readers' own best ones, judged by all."""
        ends = [best.chunk for best in bests] + [self._legal(reader.access.patch) for reader in self.readers]
        sides = between(self.rules, ends, _SHARED_CANDIDATES)
        return self._searched(sides, lambda chunk: self._judged(chunk, bests), lambda cost: cost.slowdown)

    def _legal(self, patch: Sizes) -> Sizes:
        return tuple(self.rules.nearest(place, side) for place, side in enumerate(patch))

    def _searched(
        self,
        sides: Sequence[Sequence[int]],
        make: Callable[[Sizes], LayoutCost],
        score: Callable[[LayoutCost], float],
        also: Sequence[Sizes] = (),
    ) -> dict[Sizes, LayoutCost]:
        costs: dict[Sizes, LayoutCost] = {}

        def priced(chunk: Sizes) -> float:
            cost = costs[chunk] = make(chunk)
            return score(cost) if cost.fits else math.inf

        search(self.rules, sides, priced, also=also)
        return costs

    def _judged(self, chunk: Sizes, bests: Sequence[LayoutCost]) -> LayoutCost:
        """A layout priced for the plan's own reader, with the mean slowdown of all."""
        costs = [self.price(reader.access, chunk) for reader in self.readers]
        ratios = (
            reader.weight * cost.seconds_per_batch / best.seconds_per_batch
            for reader, cost, best in zip(self.readers, costs, bests, strict=True)
        )
        return replace(costs[0], slowdown=math.fsum(ratios) / math.fsum(reader.weight for reader in self.readers))

    def _order(self, cost: LayoutCost) -> tuple[float, float]:
        """What is made small, then what decides between equals."""
        score = cost.seconds_per_batch if len(self.readers) == 1 else cost.slowdown
        return score, cost.requests_per_batch

    def _lightest(self, candidates: Sequence[LayoutCost]) -> LayoutCost:
        """Of candidates about as good as the best, the one that reads the fewest bytes, then has fewest requests."""
        first = candidates[0]
        limit = self._order(first)[0] * CLOSE
        close = (cost for cost in candidates if cost.fits == first.fits and self._order(cost)[0] <= limit)
        return min(close, key=lambda cost: (cost.bytes_per_batch, *reversed(self._order(cost))))

    def _check(self, by_hand: Sizes) -> None:
        """Raises: PlanError: for a chunk that breaks a rule, or that a shard given by hand cuts through."""
        self.shard(by_hand)
        replace(self.rules, shard=None).check(by_hand)

    def _reader_cost(self, reader: WeightedPattern, own: LayoutCost, chosen: LayoutCost) -> ReaderCost:
        return ReaderCost(
            name=reader.name, patch=reader.access.patch, weight=reader.weight,
            cost=self.price(reader.access, chosen.chunk), best=own,
        )  # fmt: skip

    def _without_rules(self) -> LayoutCost:
        free = Rules(
            dims=self.rules.dims, shape=self.rules.shape, element_bytes=self.rules.element_bytes, shard=self.rules.shard
        )
        return replace(self, rules=free).choose(None).best

    # -- one layout

    def price(self, access: Access, chunk: Sizes) -> LayoutCost:
        """One layout for one reader, with the shard its chunk would get."""
        return price(access, self.network, chunk, self.host, shard=self.shard(chunk), prices=self.prices)

    def shard(self, chunk: Sizes) -> Sizes | None:
        """The shard a chunk gets; None when it would be the chunk itself.

        Raises:
            PlanError: for a shard given by hand that cuts through the chunk or is larger than an object may be.
        """
        if self.rules.shard is not None:
            return self._small_enough(checked_shard(self.rules.shard, chunk, self.rules.dims))
        if not self.sharded:
            return None
        chunk_bytes = math.prod(chunk) * self.rules.element_bytes
        shard = fill_shard(self.rules.shape, chunk, chunk_bytes, self.target_shard_bytes)
        return None if shard == chunk else shard

    def _small_enough(self, shard: Sizes) -> Sizes:
        if not self.rules.fits(shard):
            size = format_bytes(math.prod(shard) * self.rules.element_bytes)
            limit = format_bytes(self.rules.largest_object_bytes)
            raise PlanError(f"the shard holds {size}, more than the largest object allowed, {limit}")
        return shard


def _plainest(costs: Sequence[LayoutCost]) -> LayoutCost:
    """Of those as fast as the fastest, the one with the fewest requests: more at once may make up for more of them."""
    first = min(costs, key=lambda cost: (not cost.fits, cost.seconds_per_batch))
    limit = first.seconds_per_batch * _AS_FAST
    close = (cost for cost in costs if cost.fits == first.fits and cost.seconds_per_batch <= limit)
    return min(close, key=lambda cost: (cost.requests_per_batch, cost.seconds_per_batch))


OWN = "this plan's"
"""Name of the plan's own pattern among the readers."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """What a reader is described by; the fields of a `readers` entry."""

    patch: Mapping[str, int]
    order: Order = "random"
    stride: Mapping[str, int]
    batch_size: int = 1
    shuffle: bool = True
    weight: float = 1.0


def readers_of(given: Mapping[str, Mapping[str, Any]], own: Access, dims: Sequence[str]) -> tuple[WeightedPattern, ...]:
    """The readers described by `{name: {patch: {...}, weight: ..., order: ..., stride: {...}, batch_size: ...}}`.

    Raises:
        PlanError: for an unknown field, a weight or patch that cannot be, under `readers.<name>`.
    """
    return tuple(_reader(name, entry, own, dims) for name, entry in given.items())


def _reader(name: str, entry: Mapping[str, Any], own: Access, dims: Sequence[str]) -> WeightedPattern:
    where = f"readers.{name}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("patch"), Mapping):
        raise PlanError(f"{where} needs a patch, such as {{patch: {{{dims[0]}: 1}}, weight: 1}}")
    known = [field.name for field in fields(_Fields)]
    for key in entry:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise PlanError(f"{where} has no field {key!r}; {hint}")
    values = _Fields(**{"stride": {}, **entry})
    if isinstance(values.weight, bool) or not isinstance(values.weight, int | float) or not values.weight > 0:
        raise PlanError(f"{where}.weight is {values.weight!r}, but must be a number above 0")
    patch = ordered(f"{where}.patch", values.patch, dims, [1] * len(dims))
    check_patch(f"{where}.patch", dims, own.shape, patch)
    stride = ordered(f"{where}.stride", values.stride, dims, patch if values.order == "grid" else [1] * len(dims))
    try:
        access = replace(
            own, patch=patch, stride=stride, order=values.order, batch_size=values.batch_size, shuffle=values.shuffle,
            samples_per_epoch=None, epochs=1, ranks=1,
        )  # fmt: skip
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    return WeightedPattern(name=name, access=access, weight=float(values.weight))


def fill_shard(shape: Sequence[int], chunk: Sequence[int], chunk_bytes: int, target_bytes: int) -> tuple[int, ...]:
    """Chunks packed into a shard of at most `target_bytes`, whole rows first, in C order.

    A row that does not fit is cut into parts as equal as they can be; a shard never passes the last chunk of the array.
    A chunk above the target is a shard by itself.
    """
    room, sides = max(1, target_bytes // chunk_bytes), []
    for extent, side in reversed(list(zip(shape, chunk, strict=True))):
        available = -(-extent // side)
        parts = -(-available // min(available, room))
        take = -(-available // parts)
        sides.append(take * side)
        room = room // take if parts == 1 else 1
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


_COLUMNS = (
    "chunk", "size", "rank", "requests/sample", "as read", "× patch", "read/sample", "samples/s", "bound by", "objects",
    "memory",
)  # fmt: skip
_READER_COLUMNS = ("reader", "weight", "samples/s", "bound by", "at its best", "with chunk", "price of sharing")
_KEY = (
    "requests/sample and × patch: least · mean · most of a sample alone; as read: shared by a batch, its window or the "
    "cache; read/sample: stored bytes as read; × patch counts whole chunks; memory: of one rank, "
    f"beside {format_bytes(OPENING_BYTES)} once"
)
_SHOWN_ROWS = 9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChunkPlan:
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
    """Every layout considered, the best first; a chunk given by hand that is none of them comes last."""
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
    def ladder(self) -> tuple[LayoutCost, ...]:
        """The best candidate of each size, sizes apart by a factor of two or so, smallest first, with the choice."""
        best: dict[int, LayoutCost] = {}
        for cost in self.candidates:
            best.setdefault(round(math.log2(cost.chunk_bytes)), cost)
        best[round(math.log2(self.chunk_bytes))] = self.chosen
        return tuple(best[size] for size in sorted(best))

    def rows(self) -> list[dict[str, Any]]:
        """Every candidate as a plain dict, the best first, as a data frame takes them."""
        return [
            {field.name: getattr(cost, field.name) for field in fields(cost) if field.name not in _NESTED}
            | {"mixing": cost.window.mixing(self.batch_size) if cost.window else None}
            for cost in self.candidates
        ]

    def __str__(self) -> str:
        rows, marked = self._rows
        parts = [self._headline, text_table(self._columns, rows, marked), _KEY]
        if len(self.readers) > 1:
            parts.append(text_table(_READER_COLUMNS, [_reader_row(reader) for reader in self.readers]))
        return "\n".join([*parts, *(f"- {reason}" for reason in self.reasons)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows, marked = self._rows
        shown = html_table(self._columns, rows, caption=self._headline, marked=marked, dense=True)
        shown += f'<div style="opacity: 0.75; max-width: 60em">{_KEY}</div>'
        if len(self.readers) > 1:
            readers = [_reader_row(reader) for reader in self.readers]
            shown += html_table(_READER_COLUMNS, readers, caption="readers", dense=True)
        return f'<div style="overflow-x: auto">{shown}</div>{html_list(self.reasons)}'

    @property
    def _headline(self) -> str:
        shard = "no shards" if self.shard is None else f"shard {named(self.dims, self.shard)}"
        rate = f"{format_count(self.samples_per_second)} samples/s"
        rate += f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{rate} predicted: chunk {named(self.dims, self.chunk)}, {shard}, "
            f"{format_count(self.object_count)} object{'' if self.object_count == 1 else 's'}"
        )

    @property
    def _columns(self) -> tuple[str, ...]:
        mixing = ("mixing",) if self.order == "block" else ()
        slowdown = ("slowdown",) if len(self.readers) > 1 else ()
        price = ("price/epoch",) if self.chosen.price_per_epoch is not None else ()
        return (*_COLUMNS, *mixing, *slowdown, *price)

    @property
    def _rows(self) -> tuple[list[list[str]], int]:
        """The ladder around the choice as text, and where in it the choice stands."""
        ladder = self.ladder
        place = ladder.index(self.chosen)
        start = max(0, min(place - _SHOWN_ROWS // 2, len(ladder) - _SHOWN_ROWS))
        return [self._row(cost) for cost in ladder[start : start + _SHOWN_ROWS]], place - start

    def _row(self, cost: LayoutCost) -> list[str]:
        amplification = (cost.least_amplification, cost.amplification, cost.most_amplification)
        requests = (cost.least_requests_per_sample, cost.requests_per_sample, cost.most_requests_per_sample)
        extra = []
        if self.order == "block":
            extra.append(f"{cost.window.mixing(self.batch_size):.0%}" if cost.window else "no room")
        if len(self.readers) > 1:
            extra.append(f"{cost.slowdown:.3g}")
        if self.chosen.price_per_epoch is not None:
            extra.append(f"{cost.price_per_epoch:.3g}")
        return [
            "×".join(map(str, cost.chunk)), format_bytes(cost.chunk_bytes), str(self.candidates.index(cost) + 1),
            _triple(requests), f"{cost.requests_per_batch / self.batch_size:.3g}", _triple(amplification),
            format_bytes(cost.stored_bytes_per_batch / self.batch_size), format_count(cost.samples_per_second),
            cost.bound if cost.fits else "does not fit", format_count(cost.object_count),
            format_bytes(cost.memory_bytes), *extra,
        ]  # fmt: skip


_NESTED = ("window", "seconds_by_resource")


def named(dims: Sequence[str], sizes: Sequence[int]) -> str:
    """Sizes with their dimensions: `time 3 × lat 64 × lon 64`."""
    return " × ".join(f"{name} {size}" for name, size in zip(dims, sizes, strict=True))


def _triple(values: Sequence[float]) -> str:
    return "\u00a0·\u00a0".join(format_count(float(f"{value:.3g}")) for value in values)  # never broken over lines


def _reader_row(reader: ReaderCost) -> list[str]:
    return [
        reader.name, f"{reader.weight:g}", format_count(reader.cost.samples_per_second), reader.cost.bound,
        f"{format_count(reader.best.samples_per_second)} samples/s", "×".join(map(str, reader.best.chunk)),
        f"{reader.slowdown:.3g} × the time",
    ]  # fmt: skip
