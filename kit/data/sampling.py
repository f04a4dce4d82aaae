"""Sampling: the samples that a config asks of a dataset: which part of it, without gaps and what has no match, filtered
and weighted by what patches hold. Nothing is read but statistics that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.chunks.access import Blocks, fit_window
from kit.chunks.geometry import axes_of, most_chunks
from kit.data.joined import comparable
from kit.data.places import MOST_CELLS, Places, cell_starts
from kit.data.samples import SamplePlan, WindowLimit
from kit.data.splits import Part, Split, split_of, widest_of
from kit.data.stores.url import redact
from kit.data.tile_statistics import TileStatistics, need_statistics
from kit.data.variables import NUMBERS, breaks
from kit.errors import ConfigError, Problem, did_you_mean
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.config import Config
    from kit.data.dataset import Dataset
    from kit.data.variables import ArrayInfo
    from kit.sections import Data


class Barrier(NamedTuple):
    """What no patch may hold along one dimension."""

    axis: int
    elements: NDArray[np.bool_]
    from_second: bool
    """Whether a patch may begin with such an element: behind a gap it may."""
    path: str
    """The field that asks for it."""


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
    """The elements before which the coordinate of a dimension leaves something out, or turns back.

    Raises:
        ConfigError: for a dimension that there is not, and one whose coordinate has no steps.
    """
    if dimension not in array.dims:
        hint = did_you_mean(dimension, array.dims, "the array has {}")
        raise ConfigError([Problem("data.gap_dimension", f"unknown dimension {dimension!r}{hint}")])
    axis = array.dims.index(dimension)
    numbers = comparable(dataset, dimension)[0] if dimension in dataset.coordinates else np.array([], np.str_)
    if numbers.dtype.kind not in NUMBERS:
        has = f"has names, such as {numbers[0]}" if len(numbers) else f"has no coordinate in {redact(dataset.url)}"
        message = f"{dimension!r} {has}, so that no gap can be seen; take another, or none"
        raise ConfigError([Problem("data.gap_dimension", message)])
    return Barrier(axis, breaks(numbers), True, "data.gap_dimension")


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
            f"use at least {format_bytes(least, up=True)}, a smaller patch, or order random"
        )
        raise ConfigError([Problem("loader.window_bytes", message)])
    limit = WindowLimit(
        chunk=tuple(array.chunk), chunks=loader.window_bytes // 2 // chunk_bytes, blocks=loader.window_blocks
    )
    return replace(
        plan, block=window.block, samples_per_block=window.samples_per_block, blocks_per_window=window.blocks,
        limit=limit,
    )  # fmt: skip
