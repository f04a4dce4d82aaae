"""The choice of one layout: candidates priced for one reader or several, the lightest of the best, and what it beat.

One reader: few seconds per batch are good. Several: a small mean slowdown, each measured against the reader's own best
under the same rules. Layouts that do not fit the memory are chosen only when none fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kit.errors import PlanError
from kit.plan.access import Access
from kit.plan.candidates import Rules, Sizes, between, scaled_alike, search, sides_around
from kit.plan.cost import LayoutCost, price
from kit.plan.readers import Reader, ReaderCost
from kit.plan.resources import Host, Network, Prices
from kit.plan.shards import checked_shard, fill_shard
from kit.units import format_bytes

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
    readers: tuple[Reader, ...]
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

    def _reader_cost(self, reader: Reader, own: LayoutCost, chosen: LayoutCost) -> ReaderCost:
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
