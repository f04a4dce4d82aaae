"""Windows: block-shuffled order, to the sample. What it is and what it costs is defined in `kit.plan.block_order`.

A chunk that was read serves many samples while it is held: an epoch is a row of visits to blocks of the array, a window
mixes some visits, and only windows are held. Offsets, strides and block sides are in elements, one number per
dimension; a *place* counts samples in the row that one rank is served, a *sample* counts them over all ranks.

The invariant: a window is a pure function of (seed, epoch, rank, window), and every sample of the epoch is in exactly
one window of one rank. Nothing is kept per sample but the last few windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
"""Offsets of samples `(sample, dimension)`, in elements."""
Whole = NDArray[np.int64]

_WORDS_PER_BLOCK = 4
_ANCHORS, _SAMPLES, _ORDER = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of every epoch and rank."""

    shape: tuple[int, ...]
    patch: tuple[int, ...]
    stride: tuple[int, ...]
    """Distance between positions; 1 allows every offset."""
    block: tuple[int, ...]
    """Sides of a block."""
    samples_per_block: int
    """Samples of a visit."""
    blocks: int
    """Visits of a window."""
    samples: int
    """Of an epoch, all ranks together."""
    world_size: int
    seed: int

    @cached_property
    def positions(self) -> Whole:
        """Offsets that a patch may take along each dimension."""
        sides = zip(self.shape, self.patch, self.stride, strict=True)
        return np.array([(size - patch) // stride + 1 for size, patch, stride in sides], np.int64)

    def run(self, rank: int) -> range:
        """The samples of an epoch that a rank owns."""
        return range(*(self.samples * part // self.world_size for part in (rank, rank + 1)))

    def window_of(self, rank: int, place: int) -> int:
        """The window that serves a place of the rank's row."""
        first = self.run(rank).start
        return ((first + place) // self.samples_per_block - first // self.samples_per_block) // self.blocks

    def window(self, rank: int, window: int) -> range:
        """The samples that a window of a rank mixes."""
        run = self.run(rank)
        visit = run.start // self.samples_per_block + window * self.blocks
        ends = (visit * self.samples_per_block, (visit + self.blocks) * self.samples_per_block)
        return range(max(run.start, ends[0]), min(run.stop, ends[1]))

    def offsets(self, epoch: int, rank: int, places: range) -> Offsets:
        """Offsets of a run of places of the rank's row."""
        return np.concatenate([served[0][part] for served, part in self._parts(epoch, rank, places)])

    def visits(self, epoch: int, rank: int, places: range) -> Whole:
        """The visit that each of these places belongs to."""
        return np.concatenate([served[1][part] for served, part in self._parts(epoch, rank, places)])

    def _parts(self, epoch: int, rank: int, places: range) -> Iterator[tuple[tuple[Offsets, Whole], slice]]:
        """The windows that these places are served from, and the part of each."""
        first = self.run(rank).start
        for index in range(self.window_of(rank, places.start), self.window_of(rank, places.stop - 1) + 1):
            held = self.window(rank, index)
            start = max(places.start, held.start - first) - (held.start - first)
            stop = min(places.stop, held.stop - first) - (held.start - first)
            yield _serve(self, epoch, rank, index), slice(start, stop)

    def draw(self, epoch: int, samples: range) -> tuple[Offsets, Whole]:
        """Offsets and visits of a run of samples, in the order of their numbers."""
        each = self.samples_per_block
        visits = np.arange(samples.start, samples.stop) // each
        anchors = self._words(epoch, _ANCHORS, range(samples.start // each, (samples.stop - 1) // each + 1))
        anchors = anchors % self.positions.astype(np.uint64)
        stride, side = np.array(self.stride, np.int64), np.array(self.block, np.int64)
        blocks = anchors.astype(np.int64) * stride // side
        first = -(-blocks * side // stride)
        last = np.minimum(self.positions - 1, ((blocks + 1) * side - 1) // stride)
        which = visits - visits[0]
        inside = self._words(epoch, _SAMPLES, samples) % (last - first + 1).astype(np.uint64)[which]
        return (first[which] + inside.astype(np.int64)) * stride, visits

    def _words(self, epoch: int, purpose: int, numbers: range) -> NDArray[np.uint64]:
        """Pseudo-random words `(number, dimension)`, a pure function of (seed, epoch, purpose, number)."""
        blocks = -(-len(self.shape) // _WORDS_PER_BLOCK)
        generator = np.random.Philox(key=_key(self.seed, epoch, purpose), counter=numbers.start * blocks)
        words = generator.random_raw(len(numbers) * blocks * _WORDS_PER_BLOCK)
        return words.reshape(len(numbers), -1)[:, : len(self.shape)]


def pairs_of_one_visit(visits: Whole) -> tuple[int, int]:
    """(pairs of a batch that are of one visit, all its pairs)."""
    _, counts = np.unique(visits, return_counts=True)
    return int((counts * (counts - 1)).sum()) // 2, len(visits) * (len(visits) - 1) // 2


def mixing(same: int, pairs: int, batch_size: int) -> float:
    """Independent samples that a batch is worth at least, over its size, when `same` of `pairs` are of one visit.

    Kish's design effect: `1 / (1 + (batch_size - 1) × same / pairs)`; 1 in random order.
    """
    return 1 / (1 + (batch_size - 1) * same / pairs) if pairs else 1.0


@lru_cache(maxsize=4)
def _serve(windows: Windows, epoch: int, rank: int, window: int) -> tuple[Offsets, Whole]:
    """A window's samples, in the order they are served."""
    offsets, visits = windows.draw(epoch, windows.window(rank, window))
    order = np.random.Generator(np.random.Philox(key=_key(windows.seed, epoch, _ORDER, rank, window)))
    shuffled = order.permutation(len(offsets))
    return offsets[shuffled], visits[shuffled]


@lru_cache(maxsize=64)
def _key(*words: int) -> int:
    """A 128-bit Philox key; numpy guarantees the words of a SeedSequence."""
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint64)
    return int(low) | int(high) << 64
