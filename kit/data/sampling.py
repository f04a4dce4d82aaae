"""Sampling: which samples an epoch has, and which batch of which rank each belongs to. Pure numpy, no store.

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

Block order (defined, with its cost, in `kit.chunks.access`): an epoch is a row of visits to blocks of the array, and
`Windows` mixes some visits at a time, so that a chunk is read once for many samples while it is held. A window is a
pure function of (seed, epoch, rank, window), every sample of the epoch is in exactly one window of one rank, and
nothing is kept but the last few windows. Ranks then own runs of the epoch, so 2 ranks × B see the samples of
1 rank × 2B in other batches. A *place* counts samples in the row that one rank is served, a *sample* over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.chunks.access import VALUE_BYTES, Blocks, fit_window
from kit.chunks.geometry import axes_of, most_chunks
from kit.data.elastic import Segment, Steps, cuts_of, segments_after
from kit.data.places import MOST_CELLS, Places, cell_starts
from kit.data.splits import Part, Split, split_of, widest_of
from kit.data.tile_statistics import TileStatistics, need_statistics
from kit.errors import ConfigError, Problem, did_you_mean
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.config import Config, Data
    from kit.data.dataset import Dataset
    from kit.data.variables import ArrayInfo

LARGEST_PERMUTATION = 10_000_000
_PATHS = {
    "shape": "data.url", "patch": "data.patch", "order": "data.order", "stride": "data.stride",
    "samples_per_epoch": "data.samples_per_epoch", "seed": "training.seed", "shuffle": "loader.shuffle",
    "drop_last": "loader.drop_last", "places": "data.split",
}  # fmt: skip
"""The fields of a config that decide the samples and their order; blocks may change, those of a begun epoch stay."""
_FEISTEL_ROUNDS = 8
_WORDS_PER_BLOCK = 4
_LONGER = 1.5
"""A step of a coordinate over the usual one, from which on it is a gap."""
_ANCHORS, _SAMPLES, _ORDER = 1, 2, 3
Offsets = NDArray[np.int64]
"""Offsets of samples `(sample, dimension)`, in elements."""
Whole = NDArray[np.int64]


class Barrier(NamedTuple):
    """What no patch may hold along one dimension."""

    axis: int
    elements: NDArray[np.bool_]
    from_second: bool
    """Whether a patch may begin with such an element: behind a gap it may."""
    path: str
    """The field that asks for it."""


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """The samples of every epoch and their batches; equal on every rank."""

    shape: tuple[int, ...]
    patch: tuple[int, ...]
    order: Literal["random", "grid", "block"]
    stride: tuple[int, ...]
    """Distance between positions; unused in random order."""
    samples_per_epoch: int
    """Samples of an epoch in random and block order; grid order counts its own (see `samples`)."""
    batch_size: int
    """Samples per batch on each rank."""
    world_size: int
    seed: int
    shuffle: bool
    """Whether each epoch has its own order (grid) or its own offsets (random); else all are like epoch 0."""
    drop_last: bool
    block: tuple[int, ...] = ()
    """Block order: sides of a block."""
    samples_per_block: int = 1
    blocks_per_window: int = 1
    origin: tuple[int, ...] = ()
    """Where `shape` begins in the array; empty for its first element."""
    earlier: tuple[Segment, ...] = ()
    """How the steps of the epoch before were taken, where this plan is of the rest of one (see `resume`)."""
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

    @cached_property
    def steps(self) -> Steps:
        """The steps of an epoch."""
        return Steps(
            samples=self.samples, batch_size=self.batch_size, world_size=self.world_size, drop_last=self.drop_last,
            earlier=self.earlier,
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
    def samples(self) -> int:
        """Samples that exist in an epoch; with drop_last, those past the last full global batch are not delivered."""
        if self.order != "grid":
            return self.samples_per_epoch
        return prod(self.grid) if self.places is None else self.places.count

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @property
    def batches_per_epoch(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self.steps.count

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
            words = _words(_key(self.seed, shown), run, 1 + len(self.shape))
            return self.places.draw(words)
        if self.order == "random":
            choices = np.array(self.shape, np.uint64) - np.array(self.patch, np.uint64) + np.uint64(1)
            offsets: Offsets = (_words(_key(self.seed, shown), run, len(choices)) % choices).astype(np.int64)
            return offsets
        index = np.arange(run.start, run.stop, dtype=np.int64)
        if self.shuffle and self.samples <= LARGEST_PERMUTATION:
            index = _permutation(self.samples, self.seed, shown)[index]
        elif self.shuffle:
            index = bijection(self.samples, _key(self.seed, shown), index)
        if self.places is not None:
            return self.places.at(index) * stride
        return np.stack(np.unravel_index(index, self.grid), axis=1).astype(np.int64) * stride

    def window(self, epoch: int, step: int, rank: int) -> int:
        """The last window that the batch draws from; 0 where there are none."""
        if self.windows is None:
            return 0
        return self.windows.window_of(rank, self._places(step, rank).stop - 1, epoch if self.shuffle else 0)

    def pairs_of_one_visit(self, epoch: int, step: int, rank: int) -> tuple[int, int]:
        """(pairs of the batch drawn from one visit to a block, all its pairs); see `kit.data.sampling.mixing`."""
        places = self._places(step, rank)
        if self.windows is None:
            return 0, len(places) * (len(places) - 1) // 2
        return pairs_of_one_visit(self.windows.visits(epoch if self.shuffle else 0, rank, places))

    def identity(self) -> dict[str, Any]:
        """What decides the samples and their order, in plain values, for `resume`."""
        plain = asdict(replace(self, limit=None, places=None))
        del plain["limit"]
        plain["places"] = "" if self.places is None else self.places.digest
        return {name: [*value] if isinstance(value, tuple) else value for name, value in plain.items()}

    def resume(self, other: Mapping[str, Any], step: int) -> SamplePlan:
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
    def notes(self) -> tuple[str, ...]:
        """What of the rest of an epoch is not as it would have been without the stop."""
        if self.windows is None or not self.windows.cuts:
            return self.steps.notes
        ranks, blocks, _ = self.windows.cuts[-1]
        return (
            *self.steps.notes,
            f"the samples that are left come in another order than without the stop: blocks are mixed "
            f"{self.blocks_per_window} at a time on each of {self.world_size} ranks, and were {blocks} on {ranks}",
        )

    def _with_blocks_of(self, other: Mapping[str, Any]) -> SamplePlan:
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


def sample_plan(config: Config, dataset: Dataset, world_size: int, *, part: Part = "train") -> SamplePlan:
    """The samples that `config` asks of `dataset`, for `world_size` ranks. Reads nothing but kept statistics.

    Args:
        part: Those that are trained on, or kept for validation or a test. Kept ones are the same at each pass: in grid
            order all, else as many as their share of an epoch, and not weighted.

    Raises:
        ConfigError: for an unknown variable or dimension, a patch larger than its array, a global batch larger than an
            epoch, a window too small for two blocks, a part that is not kept or holds no patch, and statistics that are
            not there, each under the dotted path of its field.
    """
    data, arrays = config.data, dataset.select(config.data.variables)
    widest = widest_of(dataset, config)
    chunk_bytes = 0
    for info in arrays:  # decoded bytes of the chunks that one chunk of the widest touches
        chunk_bytes += prod(_chunks_within(widest, info, axis) for axis in info.stored_axes) * info.chunk_bytes
    tiles = None
    if data.least_valid_fraction or (data.weight_by != "nothing" and part == "train"):
        path = "data.least_valid_fraction" if data.least_valid_fraction else "data.weight_by"
        tiles = need_statistics(dataset, data.variables, path)
    barriers = [*_unmatched(arrays), *([_gaps(dataset, widest, data.gap_dimension)] if data.gap_dimension else [])]
    train = plan_samples(config, widest, world_size, chunk_bytes, tiles, barriers)
    if part == "train":
        return train
    fraction = data.validation_fraction if part == "validation" else data.test_fraction
    split = split_of(config, widest)
    if split is None or not fraction:
        raise ConfigError([Problem(f"data.{part}_fraction", f"0 keeps nothing for {part}; give it a part")])
    whole = _of_part(
        replace(
            train, order="grid" if train.order == "grid" else "random", block=(), samples_per_block=1,
            blocks_per_window=1, limit=None, shuffle=False, drop_last=False, batch_size=1, world_size=1,
            samples_per_epoch=max(world_size, round(train.samples_per_epoch * fraction)), places=None,
            shape=widest.shape, origin=(),
        ),
        config, split, part, tiles, barriers,
    )  # fmt: skip
    return replace(whole, batch_size=max(1, min(train.batch_size, whole.samples // world_size)), world_size=world_size)


def _chunks_within(widest: ArrayInfo, info: ArrayInfo, axis: int) -> int:
    """Chunks of an array along a dimension, at most, that one of the widest touches."""
    whole, part = widest.chunk[axis], info.chunk[axis]
    matched = info.matched[axis] if info.matched else None
    if matched is not None:
        return matched.most_chunks(part, whole)
    return whole // part if whole % part == 0 else most_chunks(whole, part)


def _unmatched(arrays: Sequence[ArrayInfo]) -> Iterator[Barrier]:
    """What has no match in another store, where patches that hold it are left out."""
    found = {(axis, one) for info in arrays for axis, one in enumerate(info.matched) if one is not None}
    for axis, one in sorted(found, key=lambda pair: (pair[0], pair[1].digest)):
        if one.known is not None and one.leave_out:
            yield Barrier(axis, ~one.known, False, "data.unmatched")


def _gaps(dataset: Dataset, array: ArrayInfo, dimension: str) -> Barrier:
    """The elements before which the coordinate of a dimension leaves something out: a step longer than usual.

    Raises:
        ConfigError: for a dimension that there is not.
    """
    if dimension not in array.dims:
        hint = did_you_mean(dimension, array.dims, "the array has {}")
        raise ConfigError([Problem("data.gap_dimension", f"unknown dimension {dimension!r}{hint}")])
    axis = array.dims.index(dimension)
    steps = np.diff(dataset.coordinate(dimension)).astype(np.float64)
    usual = np.median(steps) if len(steps) else 0.0
    behind = np.zeros(array.shape[axis], np.bool_)
    # Months are of 28 to 31 days; a missing one makes at least 59.
    behind[1:] = np.abs(steps) > _LONGER * abs(usual)
    return Barrier(axis, behind, True, "data.gap_dimension")


def _clear_of(plan: SamplePlan, barrier: Barrier) -> Places | None:
    """The places whose patches hold nothing of it; None where all are such."""
    axis, side = barrier.axis, plan.patch[barrier.axis]
    begins = np.arange(plan.grid[axis]) * plan.spacing[axis] + (plan.origin[axis] if plan.origin else 0)
    before = np.concatenate([[0], np.cumsum(barrier.elements)])
    clear = before[begins + side] == before[begins + barrier.from_second]
    if clear.all():
        return None
    if not clear.any():
        message = f"no patch of {side} elements fits between what it leaves out; use a smaller one"
        raise ConfigError([Problem(barrier.path, message)])
    starts = [np.array([0, count], np.int64) for count in plan.grid]
    starts[axis] = np.concatenate([[0], np.flatnonzero(np.diff(clear)) + 1, [len(clear)]])
    weights = clear[starts[axis][:-1]].astype(np.float64)
    return Places(tuple(starts), weights.reshape([-1 if one == axis else 1 for one in range(len(starts))]))


def _of_part(
    plan: SamplePlan,
    config: Config,
    split: Split | None,
    part: Part,
    tiles: TileStatistics | None,
    barriers: Sequence[Barrier],
) -> SamplePlan:
    """The plan, restricted to the patches of a part and to those that the config keeps."""
    if split is not None:
        origin, shape = split.extent(part)
        plan = replace(plan, shape=shape, origin=origin if any(origin) else ())
    places = None if split is None else split.allowed(part, plan.patch, plan.spacing)
    for barrier in barriers:
        whole = _clear_of(plan, barrier)
        places = whole if places is None else places if whole is None else places.both(whole)
    if tiles is not None:
        places = _weighted(plan, config.data, places, tiles, weigh=part == "train")
    return replace(plan, places=places)


def _weighted(plan: SamplePlan, data: Data, places: Places | None, tiles: TileStatistics, *, weigh: bool) -> Places:
    """The places, weighted by what patches hold there; each cell by the patch in its middle."""
    origin = plan.origin or (0,) * len(plan.shape)
    cuts = zip(plan.grid, plan.spacing, origin, tiles.tile, plan.shape, strict=True)
    starts = [
        cell_starts(np.arange(-first % side, size, side, dtype=np.int64), stride, positions)
        for positions, stride, first, side, size in cuts
    ]
    if (cells := prod(len(begins) for begins in starts)) > MOST_CELLS:
        message = f"{cells:,} cells are too many to plan with; use a larger data.stride"
        raise ConfigError([Problem("data.least_valid_fraction", message)])
    cut = Places(tuple(starts), np.ones([len(begins) - 1 for begins in starts]))
    cut = cut if places is None else cut.both(places)
    starts, allowed = [*cut.starts], cut.weights
    middles = tuple(
        (begins[:-1] + begins[1:] - 1) / 2.0 * stride + first
        for begins, stride, first in zip(starts, plan.spacing, origin, strict=True)
    )
    held = tiles.of_patches(plan.patch, middles)
    weights = allowed * (held["valid"] >= data.least_valid_fraction)
    if not weights.any():
        most = float((held["valid"] * (allowed > 0)).max())
        message = f"{data.least_valid_fraction} leaves no patch: the fullest has {most:.2f} of its values; use less"
        raise ConfigError([Problem("data.least_valid_fraction", message)])
    if weigh and data.weight_by != "nothing":
        weights = weights * np.maximum(0.0, held[data.weight_by])
        if not weights.any():
            message = f"{data.weight_by} of every patch is 0 or less, so that none would be drawn; weigh by another"
            raise ConfigError([Problem("data.weight_by", message)])
    return Places(tuple(starts), weights)


def plan_samples(
    config: Config,
    array: ArrayInfo,
    world_size: int,
    chunk_bytes: int | None = None,
    tiles: TileStatistics | None = None,
    barriers: Sequence[Barrier] = (),
) -> SamplePlan:
    """As `sample_plan`, for an array whose shape and dimension names are known.

    Args:
        chunk_bytes: Decoded bytes of one chunk of every variable; this array's own without it. For block order.
        tiles: What patches hold, where the config filters or weighs them.
        barriers: What no patch may hold: gaps of a coordinate, elements without a match.

    Raises:
        ConfigError: see `sample_plan`.
    """
    data, loader = config.data, config.loader
    problems = [
        Problem(path, f"unknown dimension {name!r}{did_you_mean(name, array.dims, 'the array has {}', cutoff=0.5)}")
        for path, sizes in (("data.patch", data.patch), ("data.stride", data.stride))
        for name in sizes
        if name not in array.dims
    ]
    if problems:
        raise ConfigError(problems)
    patch = tuple(data.patch.get(name, 1) for name in array.dims)
    for name, side, size in zip(array.dims, patch, array.shape, strict=True):
        if size == 0:
            message = f"{array.name} is empty: it has no elements along {name!r}"
            problems.append(Problem("data.variables", message))
        elif side > size:
            message = f"{side} elements along {name!r}, but {array.name} has {size}; use at most {size}"
            problems.append(Problem("data.patch", message))
    if problems:
        raise ConfigError(problems)
    in_blocks = data.order == "block"
    ones = (1,) * len(patch)
    spacing = zip(array.dims, ones if in_blocks else patch, strict=True)
    plan = SamplePlan(
        shape=tuple(array.shape), patch=patch, order=data.order,
        stride=tuple(data.stride.get(name, side) for name, side in spacing),
        samples_per_epoch=data.samples_per_epoch, batch_size=loader.batch_size, world_size=world_size,
        seed=config.training.seed, shuffle=loader.shuffle, drop_last=loader.drop_last, block=ones if in_blocks else (),
    )  # fmt: skip
    plan = _of_part(plan, config, split_of(config, array), "train", tiles, barriers)
    if not in_blocks:
        return plan
    axes = axes_of(plan.shape, array.chunk, plan.patch, plan.stride)
    chunk_bytes = chunk_bytes or array.chunk_bytes
    window = fit_window(
        axes, chunk_bytes, window_bytes=loader.window_bytes, window_blocks=loader.window_blocks,
        reuse=loader.block_reuse, samples=-(-plan.samples // plan.world_size),
    )  # fmt: skip
    if window is None:
        least = 2 * Blocks(axes, ones).footprint * chunk_bytes
        message = (
            f"{format_bytes(loader.window_bytes)} cannot hold two blocks of one chunk with what their patches reach; "
            f"use at least {format_bytes(least)}, a smaller patch, or order random"
        )
        raise ConfigError([Problem("loader.window_bytes", message)])
    limit = WindowLimit(
        chunk=tuple(array.chunk), chunks=loader.window_bytes // 2 // chunk_bytes, blocks=loader.window_blocks
    )
    return replace(
        plan, block=window.block, samples_per_block=window.samples_per_block, blocks_per_window=window.blocks,
        limit=limit,
    )  # fmt: skip


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


# -- pseudo-random numbers


def _words(key: int, numbers: range, count: int) -> NDArray[np.uint64]:
    """Pseudo-random words `(number, count)`, a pure function of the key and the number."""
    blocks = -(-count // _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=key, counter=numbers.start * blocks)
    return generator.random_raw(len(numbers) * blocks * _WORDS_PER_BLOCK).reshape(len(numbers), -1)[:, :count]


@lru_cache(maxsize=1)
def _permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=_key(seed, epoch))).permutation(samples)


def bijection(size: int, key: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The images of `index` under a pseudo-random bijection of `range(size)` that `key` names.

    A balanced Feistel network permutes the smallest even-bit power of two that holds `size` (less than 4 × size);
    images outside are permuted again until they fall inside, which keeps the map one-to-one.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.random.Philox(key=key).random_raw(_FEISTEL_ROUNDS)
    image = _feistel(index.astype(np.uint64), half, keys)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], half, keys)
        outside = outside[image[outside] >= size]
    return image.astype(np.int64)


def _feistel(value: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for key in keys:  # the finaliser of SplitMix64 (Steele et al. 2014): every input bit reaches every output bit
        word = right + key
        word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((word ^ word >> np.uint64(31)) & mask)
    return left << bits | right


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
    """How the epoch was cut before, and how much of that was served; see `kit.data.elastic.cuts_of`."""
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
        return _words(_key(self.seed, epoch, purpose), numbers, len(self.shape) + (self.places is not None))


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
    order = np.random.Generator(np.random.Philox(key=_key(windows.seed, epoch, _ORDER, rank, window, *again)))
    shuffled = order.permutation(len(offsets))
    return offsets[shuffled], visits[shuffled], np.asarray(samples)[shuffled]


@lru_cache(maxsize=64)
def _key(*words: int) -> int:
    """A 128-bit Philox key; numpy guarantees the words of a SeedSequence."""
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint64)
    return int(low) | int(high) << 64
