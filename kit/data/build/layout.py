"""From a config to a chunk plan: the shape comes from the source, or from the store when there is no source.

Nothing is written, and no data is read unless compression is to be measured; the choice itself, with its arithmetic and
reasons, is `kit.chunks.reasons`.

How large a store will be, before it is created: exact counts, and compressed bytes estimated from encoded samples.

The ratio comes from chunks spread evenly over each variable, encoded as they will be stored; its known error is that of
a small sample: a few per cent for fields alike everywhere, more when a few regions differ from the rest.

What reading one sample of a store should cost, to stand beside what it did.

Requests are those that bring the expected chunks of a batch over all variables, divided by its samples
(`kit.chunks.cost`): each chunk of a batch is fetched once, and neighbours in a shard share a request where that pays.
Bytes are what those requests ask for, by the store's own ratio of stored to uncompressed bytes, known only for a store
that kit built. Not counted in either: the index of each shard (one request a shard, once), that batches on their way at
the same time share chunks, and that chunks of smooth fields compress better than those of rough ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.chunks.access import Access, Order
from kit.chunks.cost import LayoutCost, price
from kit.chunks.reasons import ChunkPlan, plan_layout
from kit.chunks.resources import Host, Network, Prices
from kit.config import Config
from kit.data.build.open_source import load_source
from kit.data.build.shards import ArrayWriter, Blueprint, ShardTask, make_blueprint
from kit.data.build.source import Source
from kit.data.dataset import ArrayInfo, Dataset
from kit.errors import ConfigError, PlanError, Problem
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from kit.chunks.reasons import ChunkPlan
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
    from kit.data.build.shards import make_blueprint

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
    """What the config says of an epoch and its order, as `kit.chunks.cost.Access` takes it."""
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


_SAMPLES = 12
_LARGEST_SAMPLE_BYTES = 1 << 26
_INDEX_BYTES = 16
"""Of the shard index, per chunk: offset and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """What a build will write."""

    raw_bytes: int
    """Exact: all variables in their stored dtype, before compression."""
    compressed_bytes: int
    """Estimated."""
    ratio: float
    """raw_bytes / compressed_bytes."""
    objects: int
    """Exact: data objects, metadata and coordinates."""
    chunks: int
    """Exact: what readers can ask for one by one."""
    samples: int
    """Chunks encoded for the estimate."""

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.raw_bytes)} of data, about {format_bytes(self.compressed_bytes)} stored "
            f"(ratio {self.ratio:.2f} from {self.samples} sample chunks), "
            f"{format_count(self.objects)} objects, {format_count(self.chunks)} chunks"
        )

    def __repr__(self) -> str:
        return f"SizeEstimate: {self}"

    def _repr_html_(self) -> str:
        rows = {
            "data": format_bytes(self.raw_bytes),
            "stored (estimated)": format_bytes(self.compressed_bytes),
            "ratio": f"{self.ratio:.2f} from {self.samples} sample chunks",
            "objects": f"{self.objects:,}",
            "chunks": f"{self.chunks:,}",
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{key}</th><td>{value}</td></tr>" for key, value in rows.items()
        )
        return f"<table>{cells}</table>"


def expected_bytes(config: Config, plan: ChunkPlan | None = None, *, source: Any = None) -> SizeEstimate:
    """What building `config` will write; nothing is created.

    Args:
        source: An xarray object, array or source in hand, in place of the one that the config names.

    Raises:
        ConfigError, PlanError: as `build` would, before its first byte.
    """
    opened = load_source(config, source)
    return estimate(opened, make_blueprint(config, opened, plan or plan_chunks(config, source=opened)))


def estimate(source: Source, blueprint: Blueprint) -> SizeEstimate:
    """The estimate for a blueprint; encodes up to twelve chunks of each variable."""
    from numcodecs.zstd import Zstd

    compressed, samples = 0.0, 0
    for name, writer in blueprint.arrays.items():
        raw, stored = 0, 0
        codec = Zstd(level=writer.compression_level, checksum=True)
        for task in _sample_tasks(writer):
            block = np.ascontiguousarray(source.read(name, task.region))
            raw += block.nbytes
            stored += len(codec.encode(block))
            samples += 1
        compressed += writer.nbytes * stored / raw + (_INDEX_BYTES * writer.chunk_count if writer.shard else 0)
    compressed += sum(len(data) for _, data in blueprint.documents)
    return SizeEstimate(
        raw_bytes=blueprint.raw_bytes,
        compressed_bytes=round(compressed),
        ratio=blueprint.raw_bytes / compressed,
        objects=blueprint.build.shards + len(blueprint.documents) + 1,
        chunks=sum(writer.chunk_count for writer in blueprint.arrays.values()),
        samples=samples,
    )


def _sample_tasks(writer: ArrayWriter) -> list[ShardTask]:
    """Chunks spread evenly along every dimension at once, by an additive recurrence; fewer when chunks are large."""
    counts = [-(-size // side) for size, side in zip(writer.shape, writer.chunk, strict=True)]
    chunk_bytes = prod(writer.chunk) * writer.dtype.itemsize
    wanted = max(1, min(_SAMPLES, _LARGEST_SAMPLE_BYTES // chunk_bytes))
    steps = [_golden(len(counts)) ** -(axis + 1) for axis in range(len(counts))]
    indices = [
        tuple(int((0.5 + place * step) % 1 * count) for step, count in zip(steps, counts, strict=True))
        for place in range(wanted)
    ]
    return [_chunk_task(writer, index) for index in dict.fromkeys(indices)]


def _golden(dimensions: int) -> float:
    """The root of x^(d+1) = x + 1, whose powers fill d dimensions most evenly (Roberts, 2018)."""
    root = 2.0
    for _ in range(40):
        root = (1 + root) ** (1 / (dimensions + 1))
    return root


def _chunk_task(writer: ArrayWriter, index: tuple[int, ...]) -> ShardTask:
    bounds = zip(index, writer.chunk, writer.shape, strict=True)
    region = tuple(slice(i * side, min((i + 1) * side, size)) for i, side, size in bounds)
    return ShardTask(array=writer.name, key="", region=region)


def predict_reading(config: Config, dataset: Dataset) -> dict[str, float]:
    """`requests_per_sample` and, where the store tells, `bytes_per_sample`.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    costs, samples = price_store(config, dataset), config.loader.batch_size
    answer = {"requests_per_sample": sum(cost.sent_per_batch for cost in costs) / samples}
    if stored_fraction(dataset) is not None:
        answer["bytes_per_sample"] = sum(cost.sent_bytes_per_batch for cost in costs) / samples
    return answer


def price_store(config: Config, dataset: Dataset) -> tuple[LayoutCost, ...]:
    """The store as it is cut, priced with the config's network and host: one cost for all variables cut alike.

    Most stores give one. Of several, requests, bytes and seconds add up: each is priced as if it had the host alone.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    arrays = sorted(dataset.select(config.data.variables), key=_cut)
    groups = [list(alike) for _, alike in groupby(arrays, key=_cut)]
    stored = stored_fraction(dataset)
    ratio = 1 / stored if stored else config.chunking.compression_ratio or 1.0
    return tuple(_price(config, alike[0], len(alike), ratio) for alike in groups)


def _cut(info: ArrayInfo) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return info.chunk, info.shard or (), info.dtype.itemsize


def _price(config: Config, info: ArrayInfo, variables: int, compression_ratio: float) -> LayoutCost:
    data = config.data
    patch = tuple(data.patch.get(name, 1) for name in info.dims)
    default = patch if data.order == "grid" else (1,) * len(patch)
    access = Access(
        shape=info.shape, itemsize=info.dtype.itemsize, patch=patch, order=data.order, variables=variables,
        stride=tuple(data.stride.get(name, side) for name, side in zip(info.dims, default, strict=True)),
        batch_size=config.loader.batch_size, compression_ratio=compression_ratio, **pattern_of(config),
    )  # fmt: skip
    return price(access, network_of(config), info.chunk, host_of(config), shard=info.shard, closely=True)
