"""Samples: which samples an epoch has, and which batch of which rank each belongs to. Pure numpy, no store.

A sample is the offset of a patch, in elements, one number per dimension. Nothing is kept per sample: the offsets of a
batch are computed when it is needed, so an epoch of 1e8 samples costs no memory.

The invariant: a step's global batch is a run of consecutive positions of the epoch, cut into one run per rank. So every
sample comes exactly once per epoch over all ranks, every rank takes the same number of steps, no rank ever gets an
empty batch, and 1 rank × 2B sees the same global batches as 2 ranks × B. A remainder smaller than the world size cannot
be given to every rank; it joins the last batch, which then holds one sample more on some ranks.

Random order: position i of epoch e has an offset that is a pure function of (seed, e, i), drawn from a counter-based
generator (Philox 4x64, Salmon et al. 2011), uniform over all valid offsets. The remainder of a 64-bit draw by n is
biased by less than n / 2^64. Grid order: all stride-th offsets once each; shuffled by a true permutation up to
`LARGEST_PERMUTATION` samples (8 bytes each, kept for one epoch), beyond that by a keyed bijection: a Feistel network
with cycle walking (Black and Rogaway 2002), which is not uniform over all permutations but needs no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, Self

import numpy as np
from typing_extensions import override

from kit.chunks.access import VALUE_BYTES, Blocks
from kit.chunks.geometry import axes_of
from kit.data.epochs import Offsets, Segment, Steps, Windows, cuts_of, pairs_of_one_visit, segments_after
from kit.data.places import Places, bijection, key_of, permutation, random_words
from kit.errors import ConfigError, Problem

LARGEST_PERMUTATION = 10_000_000
_PATHS = {
    "shape": "data.url", "patch": "data.patch", "order": "data.order", "stride": "data.stride",
    "samples_per_epoch": "data.samples_per_epoch", "seed": "training.seed", "shuffle": "loader.shuffle",
    "drop_last": "loader.drop_last", "places": "data.split",
}  # fmt: skip
"""The fields of a config that decide the samples and their order; blocks may change, those of a begun epoch stay."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The batches of every epoch; equal on every rank."""

    batch_size: int
    """Samples per batch on each rank."""
    world_size: int
    seed: int
    shuffle: bool
    """Whether each epoch has an order of its own; else all are like epoch 0."""
    drop_last: bool
    earlier: tuple[Segment, ...] = ()
    """How the steps of the epoch before were taken, where this plan is of the rest of one (see `resume`)."""

    @property
    def samples(self) -> int:
        """Samples that exist in an epoch; with drop_last, those past the last full global batch are not delivered."""
        raise NotImplementedError

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @cached_property
    def steps(self) -> Steps:
        """The steps of an epoch."""
        return Steps(
            samples=self.samples, batch_size=self.batch_size, world_size=self.world_size, drop_last=self.drop_last,
            earlier=self.earlier,
        )  # fmt: skip

    @property
    def batches_per_epoch(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self.steps.count

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the rest of an epoch is not as it would have been without the stop."""
        return self.steps.notes

    def identity(self) -> dict[str, Any]:
        """What decides the batches and their order, in plain values, for `resume`."""
        raise NotImplementedError

    def resume(self, other: Mapping[str, Any], step: int) -> Self:
        """This plan for the rest of an epoch, of which the plan of that identity took the first `step` steps.

        Raises:
            ConfigError: when the other plan has other samples or another order.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SamplePlan(EpochPlan):
    """The samples of every epoch and their batches."""

    shape: tuple[int, ...]
    patch: tuple[int, ...]
    order: Literal["random", "grid", "block"]
    stride: tuple[int, ...]
    """Distance between positions; unused in random order."""
    samples_per_epoch: int
    """Samples of an epoch in random and block order; grid order counts its own (see `samples`)."""
    block: tuple[int, ...] = ()
    """Block order: sides of a block."""
    samples_per_block: int = 1
    blocks_per_window: int = 1
    origin: tuple[int, ...] = ()
    """Where `shape` begins in the array; empty for its first element."""
    places: Places | None = None
    """Where patches may lie and how often, in `shape`; None where all positions are alike."""
    limit: WindowLimit | None = None
    """Block order: what a window may hold, for the blocks of an epoch that was begun with others."""

    def batch_bytes(self, variables: int) -> int:
        """Of a batch as it is handed over: values and validity."""
        return self.batch_size * prod(self.patch) * variables * VALUE_BYTES

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(problems)

    @cached_property
    def windows(self) -> Windows | None:
        """What a rank holds while it serves a run of samples; None but in block order."""
        if self.order != "block":
            return None
        return Windows(
            shape=self.shape, patch=self.patch, stride=self.stride, block=self.block, samples=self.samples,
            samples_per_block=self.samples_per_block, blocks=self.blocks_per_window, world_size=self.world_size,
            seed=self.seed, cuts=cuts_of(self.earlier, self.world_size, self.blocks_per_window)[0], places=self.places,
        )  # fmt: skip

    @property
    def spacing(self) -> tuple[int, ...]:
        """Distance between positions along each dimension: in random order every element is one."""
        return (1,) * len(self.shape) if self.order == "random" else self.stride

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of positions along each dimension."""
        sides = zip(self.shape, self.patch, self.spacing, strict=True)
        return tuple((size - patch) // stride + 1 for size, patch, stride in sides)

    @property
    @override
    def samples(self) -> int:
        if self.order != "grid":
            return self.samples_per_epoch
        return prod(self.grid) if self.places is None else self.places.count

    def positions(self, step: int, rank: int) -> range:
        """The run of positions in the epoch that `rank` reads at `step`; in block order, of the rows of all ranks."""
        run = self.steps.positions(step, rank)
        if self.windows is None:
            return run
        places, row = self._places(step, rank), self.windows.run(rank)
        first = self.samples - self.windows.size + row.start
        return range(first + places.start, first + places.stop)

    def batch(self, epoch: int, step: int, rank: int) -> Offsets:
        """Offsets `(sample, dimension)` of the batch that `rank` reads at `step` of `epoch`, in elements.

        Raises:
            IndexError: for a step or rank that the plan does not have.
        """
        offsets = self._offsets(epoch, step, rank)
        return offsets + np.array(self.origin, np.int64) if self.origin else offsets

    def _offsets(self, epoch: int, step: int, rank: int) -> Offsets:
        shown, run = epoch if self.shuffle else 0, self.positions(step, rank)
        if self.windows is not None:
            return self.windows.offsets(shown, rank, self._places(step, rank))
        stride = np.array(self.stride, np.int64)
        if self.order == "random" and self.places is not None:
            words = random_words(key_of(self.seed, shown), run, 1 + len(self.shape))
            return self.places.draw(words)
        if self.order == "random":
            choices = np.array(self.shape, np.uint64) - np.array(self.patch, np.uint64) + np.uint64(1)
            offsets: Offsets = (random_words(key_of(self.seed, shown), run, len(choices)) % choices).astype(np.int64)
            return offsets
        index = np.arange(run.start, run.stop, dtype=np.int64)
        if self.shuffle and self.samples <= LARGEST_PERMUTATION:
            index = permutation(self.samples, self.seed, shown)[index]
        elif self.shuffle:
            index = bijection(self.samples, key_of(self.seed, shown), index)
        if self.places is not None:
            return self.places.at(index) * stride
        return np.stack(np.unravel_index(index, self.grid), axis=1).astype(np.int64) * stride

    def window(self, epoch: int, step: int, rank: int) -> int:
        """The last window that the batch draws from; 0 where there are none."""
        if self.windows is None:
            return 0
        return self.windows.window_of(rank, self._places(step, rank).stop - 1, epoch if self.shuffle else 0)

    def pairs_of_one_visit(self, epoch: int, step: int, rank: int) -> tuple[int, int]:
        """(pairs of the batch drawn from one visit to a block, all its pairs); see `kit.data.epochs.mixing`."""
        places = self._places(step, rank)
        if self.windows is None:
            return 0, len(places) * (len(places) - 1) // 2
        return pairs_of_one_visit(self.windows.visits(epoch if self.shuffle else 0, rank, places))

    @override
    def identity(self) -> dict[str, Any]:
        plain = asdict(replace(self, limit=None, places=None))
        del plain["limit"]
        plain["places"] = "" if self.places is None else self.places.digest
        return {name: [*value] if isinstance(value, tuple) else value for name, value in plain.items()}

    @override
    def resume(self, other: Mapping[str, Any], step: int) -> Self:
        """This plan for the rest of an epoch, of which another plan took the first `step` steps.

        Every sample of the epoch comes exactly once, whatever the batch sizes and ranks of both; `notes` says what is
        not as it would have been. In block order the epoch keeps the blocks that it began with.

        Args:
            other: The identity of that plan.
            step: Its steps, and those that it was resumed from itself.

        Raises:
            ConfigError: when the other plan has other samples or another order, and when a block that the epoch began
                with does not fit a window.
        """
        mine = self.identity()
        problems = [
            Problem(
                path,
                f"{name} is {mine[name]}, but {other.get(name)} in the state to resume from; resume with the same data "
                "and order, or begin the epoch anew",
            )
            for name, path in _PATHS.items()
            if mine[name] != other.get(name, "")
        ]
        if problems:
            raise ConfigError(problems)
        if not step:
            return self
        begun = self if self.windows is None else self._with_blocks_of(other)
        way = (begun.batch_size, begun.world_size, begun.blocks_per_window)
        return replace(begun, earlier=segments_after(other, step, way))

    @property
    @override
    def notes(self) -> tuple[str, ...]:
        if self.windows is None or not self.windows.cuts:
            return self.steps.notes
        ranks, blocks, _ = self.windows.cuts[-1]
        return (
            *self.steps.notes,
            f"the samples that are left come in another order than without the stop: blocks are mixed "
            f"{self.blocks_per_window} at a time on each of {self.world_size} ranks, and were {blocks} on {ranks}",
        )

    def _with_blocks_of(self, other: Mapping[str, Any]) -> Self:
        """This plan with the blocks that an epoch was begun with."""
        block, each = tuple(other["block"]), int(other["samples_per_block"])
        if (block, each) == (self.block, self.samples_per_block):
            return self
        blocks = int(other["blocks_per_window"])
        if self.limit is not None:
            axes = axes_of(self.shape, self.limit.chunk, self.patch, self.stride)
            sides = zip(block, self.limit.chunk, strict=True)
            held = Blocks(axes, tuple(-(-side // chunk) for side, chunk in sides))
            fits = self.limit.chunks // held.footprint if held.everything > self.limit.chunks else self.limit.blocks
            blocks = min(self.limit.blocks, fits)
        if not blocks:
            message = (
                f"the epoch to resume was begun with blocks of {block}, and a window cannot hold one of them; take as "
                "many bytes as then until the epoch ends, or begin the epoch anew"
            )
            raise ConfigError([Problem("loader.window_bytes", message)])
        return replace(self, block=block, samples_per_block=each, blocks_per_window=blocks)

    def _places(self, step: int, rank: int) -> range:
        """The batch in the row of samples that its rank is served."""
        run = self.steps.positions(step, rank)
        if self.windows is None:
            return run
        row = self.windows.run(rank)
        served = cuts_of(self.earlier, self.world_size, self.blocks_per_window)[1]
        first = served + (step - self.steps.before) * self.batch_size
        last = step == self.batches_per_epoch - 1 and not self.drop_last
        return range(first, len(row) if last else first + self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimit:
    """What a window may hold, however its blocks are cut."""

    chunk: tuple[int, ...]
    """Sides of a chunk."""
    chunks: int
    """Chunks of each variable."""
    blocks: int
    """Blocks that are mixed, at most."""


def _problems(plan: SamplePlan) -> Iterator[Problem]:
    """Why a plan cannot hold; the fields are named as in a config."""
    if plan.world_size < 1:
        yield Problem("hardware.devices", f"{plan.world_size} ranks cannot train; use at least 1")
        return
    if any(side > size or side < 1 for side, size in zip(plan.patch, plan.shape, strict=True)):
        yield Problem("data.patch", f"a patch of {plan.patch} does not fit an array of {plan.shape}")
        return
    if any(step < 1 for step in plan.stride):
        yield Problem("data.stride", f"{plan.stride} must be at least 1 along every dimension")
        return
    if plan.order == "block" and (len(plan.block) != len(plan.shape) or min(plan.block, default=1) < 1):
        yield Problem("data.order", f"block {plan.block} must have a side of at least 1 along every dimension")
        return
    if plan.global_batch_size > plan.samples:
        most = plan.samples // plan.world_size
        more = "raise data.samples_per_epoch" if plan.order != "grid" else "take a smaller data.stride"
        less = f"use at most {most}" if most else f"use at most {plan.samples} ranks"
        yield Problem(
            "loader.batch_size",
            f"a batch that does not fit the data: {plan.batch_size} samples × {plan.world_size} ranks = "
            f"{plan.global_batch_size}, but an epoch has {plan.samples} samples; {less}, or {more}",
        )
