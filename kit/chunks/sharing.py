"""How many chunks a reader fetches when samples share them: within a batch, and through a cache of decoded chunks.

Everything follows from one function, `distinct(m)`: the expected number of different chunks that m samples in a row
touch. A batch of n samples fetches each of its chunks once: `distinct(n)`. A cache that still holds the chunks of the m
samples before a batch saves those: the batch fetches `distinct(m + n) - distinct(m)`. Three orders have a `distinct`:

- random: offsets are drawn independently; exact, `Σ 1 - (1 - p)^m` over chunks.
- shuffled grid: each position once an epoch; exact within an epoch, hypergeometric. Across the border of two epochs
  positions repeat, which is left out.
- sequential grid (not shuffled): positions in C order. A chunk's positions form a box in the grid, and two neighbours
  of it in reading order, g apart, fall into different runs of m with probability min(1, g / m). So the chunk is
  fetched by `1 + Σ min(1, g / m)` runs; exact on average over where the first run begins.

Batches read ahead share too: a chunk on its way for one batch is joined by the batches that come meanwhile. A chunk
that a batch wants with probability q and that stays on its way for b batches costs `q / (1 + b q)` fetches a batch:
after a fetch it is free for b batches, then the next batch that wants it comes after 1 / q. With memory to spare, a
chunk also stays until the batches that waited for it are whole: where a batch is whole after c others were planned and
the last to join came j batches after the first, it is free for j + c batches. Known error: 6 % of the chunks fetched.
Where offsets are not independent, the bound from `distinct` takes the place of the formula.

A cache of C chunks that drops the least recently used first holds about the chunks of the last m samples, where
`distinct(m) = C` (Che, Tung and Wang, 2002). Known error: a few per cent, up to a tenth for caches of almost the whole
array. Bounds: the chunks of the last `C // most chunks of a batch` batches are held for sure, and no cache serves more
than C chunks of a batch or, when offsets are independent, more than the C likeliest ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    def joining(self, samples: int, batches: int, *, kept_for: int = 0) -> float:
        """Expected chunks fetched for a batch of `samples` while those of so many batches before are on their way.

        By default those that the batches before did not touch; one that is fetched serves them and this one, no more.

        Args:
            kept_for: Batches planned before one is whole, where a chunk stays until then; 0 where it goes at once.
        """
        before = max(batches, kept_for)
        new = self.distinct((before + 1) * samples) - self.distinct(before * samples)
        return max(new, self.distinct(samples) / (before + 1))

    def likeliest(self, samples: int, chunks: int) -> float:  # noqa: ARG002 - every chunk may come next
        """Expected touches of the likeliest chunks by a batch, at most this many chunks."""
        return float(chunks)


@dataclass(frozen=True)
class Shuffled(ReadingOrder):
    """Positions in random order, drawn independently (`replacement`) or each once."""

    axes: tuple[Axis, ...]
    replacement: bool

    @cached_property
    def _terms(self) -> tuple[tuple[int, int], ...]:
        return tuple(term for term in touch_counts(self.axes).items() if term[0])

    def distinct(self, samples: int) -> float:
        drawn = samples if self.replacement else min(samples, self.positions)
        positions, replacement = self.positions, self.replacement
        return math.fsum(
            [times * touched_at_least_once(count, positions, drawn, replacement) for count, times in self._terms]
        )

    def joining(self, samples: int, batches: int, *, kept_for: int = 0) -> float:
        if not self.replacement:  # a chunk that one batch touches the next touch less often
            return super().joining(samples, batches, kept_for=kept_for)
        wanted = ((touched_at_least_once(count, self.positions, samples, True), times) for count, times in self._terms)

        def last_to_join(often: float) -> float:
            """Expected place among so many batches of the last that wants a chunk."""
            return batches - (1 - often) * (1 - (1 - often) ** batches) / often if often else 0.0

        return math.fsum(
            times * often / (1 + often * (kept_for + last_to_join(often) if kept_for else batches))
            for often, times in wanted
        )

    def likeliest(self, samples: int, chunks: int) -> float:
        if not self.replacement:
            return super().likeliest(samples, chunks)
        served, left = 0.0, chunks
        for count, times in sorted(self._terms, reverse=True):
            served += min(left, times) * touched_at_least_once(count, self.positions, samples, True)
            left -= min(left, times)
        return served


@dataclass(frozen=True)
class Sequential(ReadingOrder):
    """Positions in C order, the last dimension fastest."""

    axes: tuple[Axis, ...]

    @cached_property
    def _boxes(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """`(chunks alike, ((gap, how often), ...))`: the gaps between a chunk's positions, in reading order."""
        counters = [[item for item in axis.touches().items() if item[0]] for axis in self.axes]
        boxes = []
        for box in product(*counters):
            stride, reach, rows, gaps = 1, 0, math.prod(length for length, _ in box), []
            for axis, (length, _) in zip(reversed(self.axes), reversed(box), strict=True):
                rows //= length
                if length > 1:
                    gaps.append((stride - reach, (length - 1) * rows))
                reach += (length - 1) * stride
                stride *= axis.positions
            boxes.append((math.prod(times for _, times in box), tuple(gaps)))
        return tuple(boxes)

    def distinct(self, samples: int) -> float:
        drawn = min(samples, self.positions)
        total = math.fsum(
            times * (drawn + sum(often * min(drawn, gap) for gap, often in gaps)) for times, gaps in self._boxes
        )
        everything = sum(times for times, _ in self._boxes)
        return float(everything) if samples > self.positions else min(everything, total / self.positions)


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

    def average(held: int) -> float:
        """Per batch, when each batch finds the chunks of the `held` samples before it."""
        steady = reading.distinct(held + batch_size) - reading.distinct(held)
        start = reading.distinct(min(held, batch_size * batches))
        return (start + (batches - min(batches, held / batch_size)) * steady) / batches

    held, too_many = 0, batch_size * batches + 1
    while too_many > held + 1 + held // 50:  # the longest row of samples whose chunks fit the cache, to within 2 %
        middle = math.isqrt(max(1, held) * too_many)
        middle = middle if held < middle < too_many else (held + too_many) // 2
        fits = reading.distinct(middle) <= cached_chunks
        held, too_many = (middle, too_many) if fits else (held, middle)
    largest_batch = min(reading.chunks, batch_size * reading.most_chunks)
    surely = min(batches, cached_chunks // largest_batch) * batch_size
    least = max(cold / batches, alone - reading.likeliest(batch_size, cached_chunks))
    most = average(surely)
    return Fetches(min(max(least, average(held)), most), min(least, most), most)
