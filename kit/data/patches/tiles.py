"""Statistics of tiles in one pass over a store, by the streaming engine, each chunk read and decoded once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.arguments import takes_config
from kit.data.build.build import Progress, make_progress
from kit.data.build.layout import network_of
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset
from kit.data.splits import split_of, widest_of
from kit.data.stores.disk_cache import ReadCache
from kit.data.stream.engine import Engine
from kit.data.tile_statistics import TileStatistics, files_of, find_statistics, state_of, tile_sides, with_statistics
from kit.errors import StoreError, warn_caller
from kit.json_text import write_whole

if TYPE_CHECKING:
    from kit.config import Config

_BATCH_BYTES = 16 << 20


@takes_config
def statistics(config: Config, *, progress: bool | Progress = True, again: bool = False) -> TileStatistics:
    """How many valid values each tile of the store has, and their mean and deviation, by one pass over it.

    What is found is kept in a file beside the store, or in the project's folder where the store is not on this machine
    or its folder cannot be written. Then `data.standardize` takes means and deviations of the part for training,
    also in stores that kit did not build, and `data.least_valid_fraction` and `data.weight_by` choose patches.

    Args:
        config: `data.url` and `data.variables` say of what; patches decide how fine the tiles are.
        progress: True shows a line that updates in place, False nothing; a callable is called with (chunks done, all
            chunks, bytes so far).
        again: Read even where statistics of the store as it is are kept.

    Returns:
        The statistics.

    Raises:
        StoreError: when the store cannot be read, or the statistics cannot be kept.
        ConfigError: for variables that do not go together.

    Example:
        >>> found = kit.data.statistics(ocean, progress=False)
        >>> found.variables
        ('sst', 'u', 'v')
    """
    dataset, variables = open_dataset(config), config.data.variables
    found = None if again else find_statistics(dataset, variables)
    if found is not None:
        return found
    arrays, widest = dataset.select(variables), widest_of(dataset, config)
    tile = tile_sides(widest, config.data.patch)
    counts = [len(arrays), *(-(-size // side) for size, side in zip(widest.shape, tile, strict=True))]
    valid, total, squares = (np.zeros(counts) for _ in range(3))
    centre: NDArray[np.float64] | None = None
    say, done, read = make_progress(progress, "Reading", "chunks"), 0, 0
    chunks = prod(-(-size // side) for size, side in zip(widest.shape, widest.chunk, strict=True))
    settings = config.loader
    with Engine(
        dataset, variables, requests_in_flight=settings.requests_in_flight, decode_threads=settings.decode_threads,
        memory_bytes=settings.memory_bytes, coalescing=network_of(config).coalescing,
        read_cache=ReadCache.of(config.cache),
    ) as engine:  # fmt: skip
        for patch, offsets in _boxes(widest.shape, widest.chunk):
            together = max(1, _BATCH_BYTES // (prod(patch) * len(arrays) * 5))
            batches = [offsets[first : first + together] for first in range(0, len(offsets), together)]
            for places, (values, known) in zip(batches, engine.stream(batches, patch), strict=True):
                if centre is None:
                    axes = (0, *range(2, values.ndim))
                    centre = values.sum(axes, np.float64) / np.maximum(1, known.sum(axes))
                less = np.where(known, values - centre.reshape(1, -1, *(1,) * len(patch)), 0.0)
                sums = [_by_tile(one, tile) for one in (known, less, less * less)]
                for number, offset in enumerate(places):
                    where = tuple(
                        slice(at // side, at // side + count)
                        for at, side, count in zip(offset, tile, sums[0].shape[2:], strict=True)
                    )
                    for target, one in zip((valid, total, squares), sums, strict=True):
                        target[(slice(None), *where)] = one[number]
                done, read = done + len(places), read + values.nbytes
                say(done, chunks, read)
    found = TileStatistics(
        variables=tuple(info.name for info in arrays), dims=widest.dims, shape=widest.shape, tile=tile, valid=valid,
        total=total, squares=squares, centre=np.zeros(len(arrays)) if centre is None else centre,
        state=state_of(dataset, arrays),
    )  # fmt: skip
    return _keep(found, dataset)


def _boxes(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Chunks of one size at a time: (sides, offsets (chunk, dimension)); those at the end of an array are smaller."""
    along = []
    for size, side in zip(shape, chunk, strict=True):
        whole = size // side
        parts = [(side, np.arange(whole, dtype=np.int64) * side)] if whole else []
        along.append([*parts, *([(size % side, np.array([whole * side], np.int64))] if size % side else [])])
    for combination in product(*along):
        starts = np.meshgrid(*(offsets for _, offsets in combination), indexing="ij")
        yield tuple(side for side, _ in combination), np.stack([one.reshape(-1) for one in starts], axis=1)


def _by_tile(values: NDArray[Any], tile: tuple[int, ...]) -> NDArray[np.float64]:
    """Sums `(sample, variable, *tiles)` of `(sample, variable, *dims)`."""
    for axis, side in enumerate(tile, 2):
        starts = np.arange(0, values.shape[axis], side)
        values = np.add.reduceat(values, starts, axis=axis, dtype=np.float64)
    return values


def _keep(found: TileStatistics, dataset: Dataset) -> TileStatistics:
    data, failed = found.dump(), None
    for path in files_of(dataset, dataset.select(found.variables)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return replace(found, place=str(write_whole(path, data)))
        except OSError as error:
            failed = error
    raise StoreError(f"the statistics could not be kept: {failed}")


def standardized_by(config: Config, dataset: Dataset) -> Dataset:
    """The dataset with means and deviations of the part for training, where its statistics are kept."""
    if not config.data.standardize:
        return dataset
    found = find_statistics(dataset, config.data.variables)
    widest = widest_of(dataset, config)
    parts = split_of(config, widest)
    if found is None:
        if parts is not None and all(info.mean is not None for info in dataset.select(config.data.variables)):
            message = (
                "data.standardize: means and deviations are those of the whole store, with what is kept out of "
                "training; call kit.data.statistics(config) once, and they are of the part for training"
            )
            warn_caller(message)
        return dataset
    if parts is None:
        return with_statistics(dataset, found, None)
    firsts = [np.arange(count) * side for count, side in zip(found.valid.shape[1:], found.tile, strict=True)]
    ends = [np.minimum(first + side, size) for first, side, size in zip(firsts, found.tile, found.shape, strict=True)]
    if parts.dimension:
        axis, (_, shape) = found.dims.index(parts.dimension), parts.extent("train")
        where = np.ones(found.valid.shape[1:], np.bool_)
        where &= (ends[axis] <= shape[axis]).reshape([-1 if one == axis else 1 for one in range(where.ndim)])
    else:
        where = parts.holds("train", firsts, ends)
    return with_statistics(dataset, found, where if where.any() else None)
