"""From a config to a chunk plan: the shape comes from the source, or from the store when there is no source.

Nothing is written, and no data is read unless compression is to be measured; the choice itself, with its arithmetic and
reasons, is `kit.plan.chunks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kit.config import Config
from kit.data.open_source import load_source
from kit.data.source import Source
from kit.errors import ConfigError, PlanError, Problem
from kit.plan.access import Order
from kit.plan.chunks import ChunkPlan, plan_layout
from kit.plan.resources import Host, Network, Prices

if TYPE_CHECKING:
    from kit.data.dataset import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    variables: int
    compression_ratio: float = 1.0
    """Decoded bytes per stored byte, as far as known."""


def plan_chunks(config: Config, *, order: Order | None = None, measure: bool = False, source: Any = None) -> ChunkPlan:
    """Chunk, shard, and what a batch will cost, with reasons.

    Args:
        config: shape from its source or store, patch and order from `data`, reading from `loader`, the network, the
            rules and the other readers from `chunking`, ranks from `hardware.devices` (1 where they are not a number).
        order: another order than the config's, such as "block", to see what it would cost.
        source: an xarray object, array or source in hand, in place of the one that the config names.
        measure: encode a few chunks of the source first, and plan with the compression found.

    Raises:
        PlanError: for a patch, chunk or shard that does not fit the data; to measure without a source.
        ConfigError: for a source or variables that do not exist.
        StoreError: when there is no source and the store cannot be opened.
    """
    if config.data.source is None and source is None:
        from kit.data.dataset import open_dataset

        if measure:
            raise PlanError("measure needs data.source to take samples from; set chunking.compression_ratio instead")
        return _plan(config, _stored_geometry(config, open_dataset(config)), order)
    source = load_source(config, source)
    geometry = _source_geometry(config, source)
    plan = _plan(config, geometry, order)
    return (
        _plan(config, replace(geometry, compression_ratio=_measured(config, source, plan)), order) if measure else plan
    )


def _measured(config: Config, source: Source, plan: ChunkPlan) -> float:
    from kit.data.blueprint import make_blueprint
    from kit.data.size import estimate

    return estimate(source, make_blueprint(config, source, plan)).ratio


def _plan(config: Config, geometry: _Geometry, order: Order | None) -> ChunkPlan:
    data, loader, chunking = config.data, config.loader, config.chunking
    network = network_of(config)
    return plan_layout(
        dims=geometry.dims,
        shape=geometry.shape,
        itemsize=geometry.itemsize,
        patch=data.patch,
        batch_size=loader.batch_size,
        variables=geometry.variables,
        order=order or data.order,
        stride=data.stride,
        latency_seconds=network.latency_seconds,
        bandwidth_bytes_per_second=network.bandwidth_bytes_per_second,
        total_bandwidth_bytes_per_second=network.total_bandwidth_bytes_per_second,
        requests_per_second=network.requests_per_second,
        requests_in_flight=network.requests_in_flight,
        batches_ahead=network.batches_ahead,
        target_shard_bytes=chunking.target_shard_bytes,
        chunk=chunking.chunk,
        shard=chunking.shard,
        host=host_of(config),
        prices=Prices(per_thousand_reads=chunking.price_per_thousand_reads, per_gigabyte=chunking.price_per_gigabyte),
        pattern=pattern_of(config) | {"compression_ratio": chunking.compression_ratio or geometry.compression_ratio},
        divisibility=chunking.divisibility,
        multiple_of=chunking.multiple_of,
        largest_object_bytes=chunking.largest_object_bytes,
        readers=chunking.readers,
    )


def network_of(config: Config) -> Network:
    """What the config says lies between store and reader."""
    loader, chunking = config.loader, config.chunking
    return Network(
        latency_seconds=chunking.latency_seconds,
        latency_deviation_seconds=chunking.latency_deviation_seconds,
        bandwidth_bytes_per_second=chunking.bandwidth_bytes_per_second,
        total_bandwidth_bytes_per_second=chunking.total_bandwidth_bytes_per_second,
        requests_per_second=chunking.requests_per_second or math.inf,
        requests_in_flight=loader.requests_in_flight,
        batches_ahead=loader.batches_ahead,
    )


def host_of(config: Config) -> Host:
    """What the config says one rank decodes and keeps chunks with."""
    loader, chunking = config.loader, config.chunking
    return Host(
        decode_bytes_per_second=chunking.decode_bytes_per_second,
        decode_threads=loader.decode_threads,
        request_cpu_seconds=chunking.request_cpu_seconds,
        memory_bytes=loader.memory_bytes,
        cache_bytes=loader.cache_bytes,
    )


def pattern_of(config: Config) -> dict[str, Any]:
    """What the config says of an epoch and its order, as `kit.plan.cost.Access` takes it."""
    return {
        "ranks": _ranks(config),
        "epochs": config.training.max_epochs,
        "samples_per_epoch": config.data.samples_per_epoch,
        "shuffle": config.loader.shuffle,
        "window_bytes": config.loader.window_bytes,
        "window_blocks": config.loader.window_blocks,
        "block_reuse": config.loader.block_reuse,
    }


def _ranks(config: Config) -> int:
    """Ranks that the config names by number; what `auto` and -1 come to is known only on the machine."""
    devices = config.hardware.devices
    if config.hardware.shards:
        return math.prod(config.hardware.shards)
    if isinstance(devices, tuple):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else 1


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
    return _Geometry(
        dims=chosen[0].dims, shape=chosen[0].shape, itemsize=itemsize, variables=len(chosen),
        compression_ratio=1 / (stored_fraction(dataset) or 1.0),
    )  # fmt: skip


def stored_fraction(dataset: Dataset) -> float | None:
    """Stored bytes per decoded byte of a store that kit built; None for others."""
    whole = sum(info.nbytes for info in dataset.arrays.values())
    return dataset.manifest.stored_bytes / whole if dataset.manifest and whole else None
