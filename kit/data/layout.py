"""From a config to a chunk plan: the shape comes from the source, or from the store when there is no source.

Nothing is written and no data is read; the choice itself, with its arithmetic and reasons, is `kit.plan.chunks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.config import Config
from kit.data.source import Source, load_source
from kit.errors import ConfigError, Problem
from kit.plan.chunks import ChunkPlan, plan_layout

if TYPE_CHECKING:
    from kit.data.dataset import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    variables: int


def plan_chunks(config: Config) -> ChunkPlan:
    """Chunk, shard, and what a batch will cost, with reasons.

    Raises:
        PlanError: for a patch, chunk or shard that does not fit the data.
        ConfigError: for a source or variables that do not exist.
        StoreError: when there is no source and the store cannot be opened.
    """
    if config.data.source is None:
        from kit.data.dataset import open_dataset

        return _plan(config, _stored_geometry(config, open_dataset(config)))
    return _plan(config, _source_geometry(config, load_source(config)))


def _plan(config: Config, geometry: _Geometry) -> ChunkPlan:
    data, chunking = config.data, config.chunking
    return plan_layout(
        dims=geometry.dims,
        shape=geometry.shape,
        itemsize=geometry.itemsize,
        patch=data.patch,
        batch_size=config.loader.batch_size,
        variables=geometry.variables,
        order=data.order,
        stride=data.stride,
        latency_seconds=chunking.latency_seconds,
        bandwidth_bytes_per_second=chunking.bandwidth_bytes_per_second,
        total_bandwidth_bytes_per_second=chunking.total_bandwidth_bytes_per_second,
        requests_in_flight=config.loader.requests_in_flight,
        batches_ahead=config.loader.batches_ahead,
        target_shard_bytes=chunking.target_shard_bytes,
        chunk=chunking.chunk,
        shard=chunking.shard,
    )


def _source_geometry(config: Config, source: Source) -> _Geometry:
    """Raises: ConfigError: when the config names variables the source does not have."""
    chosen = config.data.variables or tuple(source.variables)
    unknown = [name for name in chosen if name not in source.variables]
    if unknown:
        message = f"the source has no {', '.join(unknown)}; it has {', '.join(source.variables)}"
        raise ConfigError([Problem("data.variables", message)])
    itemsize = max(spec.dtype.itemsize for name, spec in source.variables.items() if name in chosen)
    return _Geometry(dims=tuple(source.dims), shape=tuple(source.shape), itemsize=itemsize, variables=len(chosen))


def _stored_geometry(config: Config, dataset: Dataset) -> _Geometry:
    chosen = dataset.select(config.data.variables)
    itemsize = max(info.dtype.itemsize for info in chosen)
    return _Geometry(dims=chosen[0].dims, shape=chosen[0].shape, itemsize=itemsize, variables=len(chosen))
