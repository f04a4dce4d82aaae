"""Epochs: the steps of an epoch and, in block order, its windows, also of one that was stopped and goes on with other
ranks or another batch size.

The samples of an epoch stand in one row, and a step takes the next of them: a global batch, cut into one run for each
rank. A `Segment` is a number of steps that were taken with one batch size and one number of ranks. What is left of an
epoch is a function of its samples and of the segments before, so nothing else is kept in a checkpoint, and a rest can
be resumed again in yet another way.

The invariant: whatever the segments are, every sample of the epoch comes exactly once over all of them, in the order of
the row. Every rank takes the same number of steps, and no rank gets an empty batch. A remainder smaller than the number
of ranks joins the last batch; where a rest is smaller than the ranks from its beginning there is no such batch, and
these samples (`left_out`, fewer than the ranks) are left out of the epoch.

Block order (defined, with its cost, in `kit.chunks.access`): an epoch is a row of visits to blocks of the array, and
`Windows` mixes some visits at a time, so that a chunk is read once for many samples while it is held. A window is a
pure function of (seed, epoch, rank, window), every sample of the epoch is in exactly one window of one rank, and
nothing is kept but the last few windows. Ranks then own runs of the epoch, so 2 ranks × B see the samples of
1 rank × 2B in other batches. A *place* counts samples in the row that one rank is served, a *sample* over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.places import Places, key_of, random_words

_ANCHORS, _SAMPLES, _ORDER = 1, 2, 3
Offsets = NDArray[np.int64]
"""Offsets of samples `(sample, dimension)`, in elements."""
Whole = NDArray[np.int64]


def steps_per_epoch(samples: int, batch_size: int, world_size: int, drop_last: bool) -> int:
    """Steps of an epoch, the same on every rank."""
    full, rest = divmod(samples, batch_size * world_size)
    return full + (rest >= world_size and not drop_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps of an epoch that were taken in one way."""

    steps: int
    batch_size: int
    world_size: int
    blocks_per_window: int = 1
    """In block order."""

    @property
    def way(self) -> tuple[int, int, int]:
        """All but how many."""
        return self.batch_size, self.world_size, self.blocks_per_window


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one epoch. They are counted on over all segments."""

    samples: int
    """Of the whole epoch, all ranks together."""
    batch_size: int
    world_size: int
    drop_last: bool
    earlier: tuple[Segment, ...] = ()

    @property
    def before(self) -> int:
        """Steps of the segments before."""
        return sum(segment.steps for segment in self.earlier)

    @cached_property
    def samples_before(self) -> int:
        """Samples that the segments before took, or dropped where they came to the end of the epoch."""
        seen = 0
        for segment in self.earlier:
            sizes = segment.batch_size, segment.world_size
            complete = segment.steps >= steps_per_epoch(self.samples - seen, *sizes, self.drop_last)
            seen = self.samples if complete else seen + segment.steps * segment.batch_size * segment.world_size
        return seen

    @cached_property
    def count(self) -> int:
        """Steps of the epoch, those before included."""
        left = self.samples - self.samples_before
        return self.before + steps_per_epoch(left, self.batch_size, self.world_size, self.drop_last)

    @property
    def left_out(self) -> int:
        """Samples that are left, but fewer than the ranks, so that no step can take them."""
        left = self.samples - self.samples_before
        return left if self.earlier and not self.drop_last and left < self.world_size else 0

    def positions(self, step: int, rank: int) -> range:
        """The places in the row that `rank` takes at `step`.

        Raises:
            IndexError: for a step or rank that there is not, and for a step of a segment before.
        """
        if not self.before <= step < self.count or not 0 <= rank < self.world_size:
            raise IndexError(f"step {step} of {self.count}, rank {rank} of {self.world_size}: no such batch")
        whole = self.batch_size * self.world_size
        first = self.samples_before + (step - self.before) * whole
        end = self.samples if step == self.count - 1 and not self.drop_last else first + whole
        return range(*(first + (end - first) * part // self.world_size for part in (rank, rank + 1)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the epoch cannot be as it would have been."""
        if not self.left_out:
            return ()
        return (
            f"{self.left_out} of {self.samples} samples of this epoch are left out: a step needs one for each of "
            f"{self.world_size} ranks",
        )


def segments_of(given: Iterable[Mapping[str, int]]) -> tuple[Segment, ...]:
    """Segments as a state keeps them."""
    return tuple(Segment(**segment) for segment in given)


def segments_after(other: Mapping[str, Any], step: int, way: tuple[int, int, int]) -> tuple[Segment, ...]:
    """The segments before a rest that is taken in one way, when `step` steps of another plan's epoch were taken.

    Args:
        other: The identity of that plan: `batch_size`, `world_size`, and what it was resumed from itself, `earlier`.
            States of kit 0.1 have no `earlier`.
        step: Steps of the epoch, those of `earlier` included.
        way: As `Segment.way`. Steps taken in the same way are no segment of their own: they go on.
    """
    earlier = segments_of(other.get("earlier", ()))
    taken = Segment(
        steps=step - sum(segment.steps for segment in earlier), batch_size=int(other["batch_size"]),
        world_size=int(other["world_size"]), blocks_per_window=int(other.get("blocks_per_window", 1)),
    )  # fmt: skip
    return earlier if taken.way == way or not taken.steps else (*earlier, taken)


def cuts_of(segments: Sequence[Segment], world_size: int, blocks: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """How the samples of an epoch in block order were cut among ranks before, and how far the rows of now are served.

    Every rank is served a row of its own. Another batch size takes the same rows on; another number of ranks, or of
    blocks in a window, cuts what is left anew.

    Returns:
        (ranks, blocks of a window, places served of each row) of each cut before, and the places served of this one.
    """
    cuts: list[tuple[int, int, int]] = []
    for segment in segments:
        rows, served = (segment.world_size, segment.blocks_per_window), segment.steps * segment.batch_size
        if cuts and cuts[-1][:2] == rows:
            served += cuts.pop()[2]
        cuts.append((*rows, served))
    if cuts and cuts[-1][:2] == (world_size, blocks):
        return tuple(cuts[:-1]), cuts[-1][2]
    return tuple(cuts), 0


# -- windows


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
    cuts: tuple[tuple[int, int, int], ...] = ()
    """How the epoch was cut before, and how much of that was served; see `cuts_of`."""
    places: Places | None = None
    """Where patches may lie and how often; None where all positions are alike."""

    @cached_property
    def positions(self) -> Whole:
        """Offsets that a patch may take along each dimension."""
        sides = zip(self.shape, self.patch, self.stride, strict=True)
        return np.array([(size - patch) // stride + 1 for size, patch, stride in sides], np.int64)

    @property
    def size(self) -> int:
        """Samples that the cuts before left, all ranks together."""
        return self.samples - sum(ranks * served for ranks, _, served in self.cuts)

    def run(self, rank: int) -> range:
        """The samples that a rank owns, counted among those that are left."""
        return range(*(self.size * part // self.world_size for part in (rank, rank + 1)))

    def window_of(self, rank: int, place: int, epoch: int = 0) -> int:
        """The window that serves a place of the rank's row."""
        row = _row(self, epoch, rank)
        piece = next(piece for piece in reversed(row) if piece.first_place <= place)
        return piece.first_window + piece.window_of(place - piece.first_place)

    def window(self, rank: int, window: int, epoch: int = 0) -> range | Whole:
        """The samples that a window of a rank mixes, in the order of their numbers."""
        piece = next(piece for piece in reversed(_row(self, epoch, rank)) if piece.first_window <= window)
        return piece.window(window - piece.first_window)

    def offsets(self, epoch: int, rank: int, places: range) -> Offsets:
        """Offsets of a run of places of the rank's row."""
        return np.concatenate([served[0][part] for served, part in self._parts(epoch, rank, places)])

    def visits(self, epoch: int, rank: int, places: range) -> Whole:
        """The visit that each of these places belongs to."""
        return np.concatenate([served[1][part] for served, part in self._parts(epoch, rank, places)])

    def _parts(self, epoch: int, rank: int, places: range) -> Iterator[tuple[tuple[Offsets, Whole, Whole], slice]]:
        """The windows that these places are served from, and the part of each."""
        place = places.start
        while place < places.stop:
            index = self.window_of(rank, place, epoch)
            piece = next(piece for piece in reversed(_row(self, epoch, rank)) if piece.first_place <= place)
            first = piece.first_place + piece.place_of(index - piece.first_window)
            stop = min(places.stop, first + len(self.window(rank, index, epoch)))
            yield _serve(self, epoch, rank, index), slice(place - first, stop - first)
            place = stop

    def left(self, epoch: int, rank: int, served: int) -> Iterator[range | Whole]:
        """What a rank's row holds behind its first `served` places, in pieces, each in the order of the samples."""
        for piece in _row(self, epoch, rank):
            inside = served - piece.first_place
            if inside >= len(piece.samples):
                continue
            if inside <= 0:
                yield piece.samples
                continue
            window = piece.window_of(inside)
            first = piece.place_of(window)
            end = first + len(piece.window(window))
            yield np.sort(_serve(self, epoch, rank, piece.first_window + window)[2][inside - first :])
            if end < len(piece.samples):
                yield piece.samples[end:]

    def draw(self, epoch: int, samples: range | Whole) -> tuple[Offsets, Whole]:
        """Offsets and visits of some samples that lie close together, in the order of their numbers."""
        each = self.samples_per_block
        whole = range(int(samples[0]), int(samples[-1]) + 1)
        visits = np.arange(whole.start, whole.stop) // each
        numbers = range(whole.start // each, (whole.stop - 1) // each + 1)
        if self.places is None:
            anchors = (self._words(epoch, _ANCHORS, numbers) % self.positions.astype(np.uint64)).astype(np.int64)
        else:
            anchors = self.places.draw(self._words(epoch, _ANCHORS, numbers))
        stride, side = np.array(self.stride, np.int64), np.array(self.block, np.int64)
        blocks = anchors * stride // side
        first = -(-blocks * side // stride)
        last = np.minimum(self.positions - 1, ((blocks + 1) * side - 1) // stride)
        which = visits - visits[0]
        words = self._words(epoch, _SAMPLES, whole)
        if self.places is None:
            found = first[which] + (words % (last - first + 1).astype(np.uint64)[which]).astype(np.int64)
        else:
            ends = np.searchsorted(which, np.arange(len(numbers) + 1))
            parts = [
                self.places.draw_between(first[visit], last[visit], words[ends[visit] : ends[visit + 1]])
                for visit in range(len(numbers))
            ]
            found = np.concatenate(parts)
        offsets = found * stride
        if isinstance(samples, range):
            return offsets, visits
        chosen = samples - whole.start
        return offsets[chosen], visits[chosen]

    def _words(self, epoch: int, purpose: int, numbers: range) -> NDArray[np.uint64]:
        """Pseudo-random words `(number, dimension)`, one more before them where places are drawn."""
        return random_words(key_of(self.seed, epoch, purpose), numbers, len(self.shape) + (self.places is not None))


def pairs_of_one_visit(visits: Whole) -> tuple[int, int]:
    """(pairs of a batch that are of one visit, all its pairs)."""
    _, counts = np.unique(visits, return_counts=True)
    return int((counts * (counts - 1)).sum()) // 2, len(visits) * (len(visits) - 1) // 2


def mixing(same: int, pairs: int, batch_size: int) -> float:
    """Independent samples that a batch is worth at least, over its size, when `same` of `pairs` are of one visit.

    Kish's design effect: `1 / (1 + (batch_size - 1) × same / pairs)`; 1 in random order.
    """
    return 1 / (1 + (batch_size - 1) * same / pairs) if pairs else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Samples of a rank's row that are cut into windows together: consecutive, or what one window had left."""

    samples: range | Whole
    samples_per_block: int
    blocks: int
    first_place: int
    first_window: int

    @cached_property
    def _starts(self) -> Whole | None:
        """Where each visit begins; None where samples are consecutive, so that it can be computed."""
        if isinstance(self.samples, range):
            return None
        return np.flatnonzero(np.diff(self.samples // self.samples_per_block, prepend=-1))

    @property
    def windows(self) -> int:
        return self.window_of(len(self.samples) - 1) + 1

    def window_of(self, place: int) -> int:
        first, each = self.samples[0], self.samples_per_block
        if self._starts is None:
            return int((first + place) // each - first // each) // self.blocks
        return int(np.searchsorted(self._starts, place, side="right") - 1) // self.blocks

    def place_of(self, window: int) -> int:
        """The first place of a window; the end behind the last one."""
        visit = window * self.blocks
        if self._starts is None:
            first, each = self.samples[0], self.samples_per_block
            return int(min(len(self.samples), max(0, (first // each + visit) * each - first)))
        return int(self._starts[visit]) if visit < len(self._starts) else len(self.samples)

    def window(self, window: int) -> range | Whole:
        return self.samples[self.place_of(window) : self.place_of(window + 1)]


@lru_cache(maxsize=64)
def _row(windows: Windows, epoch: int, rank: int) -> tuple[_Piece, ...]:
    """The row of samples that a rank is served, in pieces."""
    found: list[_Piece] = []
    place = window = 0
    for samples in _shares(windows, epoch)[rank] if windows.cuts else [windows.run(rank)]:
        piece = _Piece(
            samples=samples, samples_per_block=windows.samples_per_block, blocks=windows.blocks, first_place=place,
            first_window=window,
        )  # fmt: skip
        found.append(piece)
        place, window = place + len(samples), window + piece.windows
    return tuple(found)


@lru_cache(maxsize=4)
def _shares(windows: Windows, epoch: int) -> tuple[list[range | Whole], ...]:
    """What earlier cuts left, divided among the ranks."""
    *earlier, (ranks, blocks, served) = windows.cuts
    before = replace(windows, world_size=ranks, blocks=blocks, cuts=tuple(earlier))
    left = [piece for rank in range(ranks) for piece in before.left(epoch, rank, served)]
    shares: list[list[range | Whole]] = []
    for rank in range(windows.world_size):
        run, place = windows.run(rank), 0
        share = []
        for piece in left:
            part = piece[max(0, run.start - place) : max(0, run.stop - place)]
            if len(part):
                share.append(part)
            place += len(piece)
        shares.append(share)
    return tuple(shares)


@lru_cache(maxsize=4)
def _serve(windows: Windows, epoch: int, rank: int, window: int) -> tuple[Offsets, Whole, Whole]:
    """A window's offsets, visits and sample numbers, in the order they are served."""
    samples = windows.window(rank, window, epoch)
    offsets, visits = windows.draw(epoch, samples)
    again = (len(windows.cuts),) if windows.cuts else ()
    order = np.random.Generator(np.random.Philox(key=key_of(windows.seed, epoch, _ORDER, rank, window, *again)))
    shuffled = order.permutation(len(offsets))
    return offsets[shuffled], visits[shuffled], np.asarray(samples)[shuffled]
