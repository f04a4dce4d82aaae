"""Elastic: the steps of an epoch, also of one that was stopped and goes on with other ranks or another batch size.

The samples of an epoch stand in one row, and a step takes the next of them: a global batch, cut into one run for each
rank. A `Segment` is a number of steps that were taken with one batch size and one number of ranks. What is left of an
epoch is a function of its samples and of the segments before, so nothing else is kept in a checkpoint, and a rest can
be resumed again in yet another way.

The invariant: whatever the segments are, every sample of the epoch comes exactly once over all of them, in the order of
the row. Every rank takes the same number of steps, and no rank gets an empty batch. A remainder smaller than the number
of ranks joins the last batch; where a rest is smaller than the ranks from its beginning there is no such batch, and
these samples (`left_out`, fewer than the ranks) are left out of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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
    def seen(self) -> int:
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
        return self.before + steps_per_epoch(self.samples - self.seen, self.batch_size, self.world_size, self.drop_last)

    @property
    def left_out(self) -> int:
        """Samples that are left, but fewer than the ranks, so that no step can take them."""
        left = self.samples - self.seen
        return left if self.earlier and not self.drop_last and left < self.world_size else 0

    def positions(self, step: int, rank: int) -> range:
        """The places in the row that `rank` takes at `step`.

        Raises:
            IndexError: for a step or rank that there is not, and for a step of a segment before.
        """
        if not self.before <= step < self.count or not 0 <= rank < self.world_size:
            raise IndexError(f"step {step} of {self.count}, rank {rank} of {self.world_size}: no such batch")
        whole = self.batch_size * self.world_size
        first = self.seen + (step - self.before) * whole
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
