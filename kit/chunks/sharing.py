"""How many chunks a reader fetches when samples share them: within a batch, and through a cache of decoded chunks.

Everything follows from one function, `distinct(m)`: the expected number of different chunks that m samples in a row
touch. A batch of n fetches each of its chunks once, `distinct(n)`. A cache that still holds the chunks of the m samples
before a batch saves those, so the batch fetches `distinct(m + n) - distinct(m)`.

- random: offsets are drawn independently; exact, `Σ 1 - (1 - p)^m` over chunks.
- shuffled grid: each position once an epoch; exact within an epoch, hypergeometric. Across the border of two epochs
  positions repeat, which is left out.
- sequential grid (not shuffled): positions in C order. A chunk's positions form a box in the grid, and two neighbours
  of it in reading order, g apart, fall into different runs of m with probability min(1, g / m). So the chunk is
  fetched by `1 + Σ min(1, g / m)` runs; exact on average over where the first run begins.

A chunk on its way for one batch is joined by those that come meanwhile, so of a chunk that a batch wants with
probability q and that stays on its way for b batches, `q / (1 + b q)` are fetched for a batch: once fetched it is free
for b batches, then it waits 1 / q for the next that wants it. Where offsets are not independent, `distinct` tells.
Where there is memory to spare it stays until the batches that waited for it are whole: if a batch is whole after c
others were planned, and the last that joined is the j-th after the first, it is free for j + c batches. Known error:
6 % of the chunks fetched.

A cache of C chunks that forgets the least recently used first holds about the chunks of the last m samples, where
`distinct(m) = C` (Che, Tung and Wang, 2002). Known error of that approximation: a few per cent, up to a tenth for
caches of almost the whole array. It is bounded: the chunks of the last `C // most chunks of a batch` batches are
surely held; and no cache serves more than its C chunks of any batch, nor, when offsets are independent, more than the
C likeliest ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from kit.chunks.geometry import Axis, touch_counts, touched_at_least_once


class ReadingOrder(ABC):
    """One order of positions over the chunks of one array."""

    axes: tuple[Axis, ...]

    @cached_property
    def positions(self) -> int:
        return math.prod(axis.positions for axis in self.axes)

    @cached_property
    def chunks(self) -> int:
        """Chunks that some position touches."""
        return round(self.distinct(1 << 200))

    @property
    def most_chunks(self) -> int:
        """Most chunks one sample touches."""
        return math.prod(axis.most for axis in self.axes)

    @abstractmethod
    def distinct(self, samples: int) -> float:
        """Expected different chunks of this many samples in a row."""

    @abstractmethod
    def joining(self, samples: int, batches: int, *, lent_for: int = 0) -> float:
        """Expected chunks fetched for a batch of `samples` while those of so many batches before are on their way.

        Args:
            lent_for: Batches that are planned before one is whole, where a chunk stays for who waited for it; 0 where
                it goes when it has come.
        """

    def _new(self, samples: int, batches: int) -> float:
        """Chunks that so many batches before did not touch; one that is fetched serves them and this one, no more."""
        new = self.distinct((batches + 1) * samples) - self.distinct(batches * samples)
        return max(new, self.distinct(samples) / (batches + 1))

    @abstractmethod
    def likeliest(self, samples: int, chunks: int) -> float:
        """Expected touches of the likeliest chunks by a batch, at most this many chunks."""


@dataclass(frozen=True)
class Shuffled(ReadingOrder):
    """Positions in random order, drawn independently (`replacement`) or each once."""

    axes: tuple[Axis, ...]
    replacement: bool

    @cached_property
    def _terms(self) -> tuple[tuple[int, int], ...]:
        return tuple(term for term in touch_counts(self.axes) if term[0])

    def distinct(self, samples: int) -> float:
        drawn = samples if self.replacement else min(samples, self.positions)
        positions, replacement = self.positions, self.replacement
        return math.fsum(
            [times * touched_at_least_once(count, positions, drawn, replacement) for count, times in self._terms]
        )

    def joining(self, samples: int, batches: int, *, lent_for: int = 0) -> float:
        if not self.replacement:  # what one batch wants the next want less, so they are not independent
            return self._new(samples, max(batches, lent_for))
        wanted = ((touched_at_least_once(count, self.positions, samples, True), times) for count, times in self._terms)
        return math.fsum(
            times * often / (1 + often * (lent_for + _last_to_join(often, batches) if lent_for else batches))
            for often, times in wanted
        )

    def likeliest(self, samples: int, chunks: int) -> float:
        if not self.replacement:
            return float(chunks)
        served, left = 0.0, chunks
        for count, times in sorted(self._terms, reverse=True):
            served += min(left, times) * touched_at_least_once(count, self.positions, samples, True)
            left -= min(left, times)
        return served


def _last_to_join(often: float, batches: int) -> float:
    """Expected place among so many batches of the last that wants a chunk, where each does with this probability."""
    return batches - (1 - often) * (1 - (1 - often) ** batches) / often if often else 0.0


@dataclass(frozen=True)
class Sequential(ReadingOrder):
    """Positions in C order, the last dimension fastest."""

    axes: tuple[Axis, ...]

    @cached_property
    def _boxes(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """`(chunks alike, ((gap, how often), ...))`: the gaps between a chunk's positions, in reading order."""
        counters = [[item for item in axis.touches().items() if item[0]] for axis in self.axes]
        return tuple(
            (math.prod(times for _, times in box), tuple(self._gaps([length for length, _ in box])))
            for box in product(*counters)
        )

    def _gaps(self, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
        stride, reach, rows = 1, 0, math.prod(lengths)
        for axis, length in zip(reversed(self.axes), reversed(lengths), strict=True):
            rows //= length
            if length > 1:
                yield stride - reach, (length - 1) * rows
            reach += (length - 1) * stride
            stride *= axis.positions

    def distinct(self, samples: int) -> float:
        drawn = min(samples, self.positions)
        total = math.fsum(
            times * (drawn + sum(often * min(drawn, gap) for gap, often in gaps)) for times, gaps in self._boxes
        )
        everything = sum(times for times, _ in self._boxes)
        return float(everything) if samples > self.positions else min(everything, total / self.positions)

    def joining(self, samples: int, batches: int, *, lent_for: int = 0) -> float:
        return self._new(samples, max(batches, lent_for))

    def likeliest(self, samples: int, chunks: int) -> float:  # noqa: ARG002 - every chunk may come next
        return float(chunks)


def reading_of(axes: Sequence[Axis], order: Literal["random", "grid"], shuffle: bool) -> ReadingOrder:
    """The order as a `ReadingOrder`; random offsets are drawn independently whether or not epochs differ."""
    if order == "grid" and not shuffle:
        return Sequential(tuple(axes))
    return Shuffled(tuple(axes), replacement=order == "random")


@dataclass(frozen=True, slots=True)
class Fetches:
    """Expected chunks fetched per batch, on average over a run that starts with an empty cache, and its bounds."""

    per_batch: float
    least: float
    most: float


def fetches(reading: ReadingOrder, batch_size: int, batches: int, cached_chunks: int) -> Fetches:
    """Chunks of one array fetched per batch in a run of so many batches, with a cache of this many chunks."""
    alone = reading.distinct(batch_size)
    if not cached_chunks or batches == 1:
        return Fetches(alone, alone, alone)
    cold = reading.distinct(batch_size * batches)
    if cached_chunks >= reading.chunks:
        return Fetches(*[cold / batches] * 3)
    held = _samples_held(reading, cached_chunks, batch_size * batches)
    largest_batch = min(reading.chunks, batch_size * reading.most_chunks)
    surely = min(batches, cached_chunks // largest_batch) * batch_size
    least = max(cold / batches, alone - reading.likeliest(batch_size, cached_chunks))
    most = _average(reading, batch_size, batches, surely)
    return Fetches(min(max(least, _average(reading, batch_size, batches, held)), most), min(least, most), most)


def _average(reading: ReadingOrder, batch_size: int, batches: int, held: int) -> float:
    """Per batch, when each batch finds the chunks of the `held` samples before it."""
    steady = reading.distinct(held + batch_size) - reading.distinct(held)
    filling = min(batches, held / batch_size)
    start = reading.distinct(min(held, batch_size * batches))
    return (start + (batches - filling) * steady) / batches


def _samples_held(reading: ReadingOrder, cached_chunks: int, samples: int) -> int:
    """The longest row of samples, at most this long, whose chunks fit the cache, to within 2 %."""
    low, high = 0, samples + 1
    while high > low + 1 + low // 50:
        middle = math.isqrt(max(1, low) * high)
        middle = middle if low < middle < high else (low + high) // 2
        low, high = (middle, high) if reading.distinct(middle) <= cached_chunks else (low, middle)
    return low
