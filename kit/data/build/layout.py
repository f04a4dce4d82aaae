"""From a config to a chunk plan, to the size of the store that it gives, and to the price of reading a store.

- `plan_chunks`: the shape comes from the source, or from the store when there is no source; the choice itself is
  `kit.chunks.reasons`. No data is read unless compression is to be measured. What filters, weights and gaps leave out
  of an epoch is not counted.
- `expected_bytes`: exact counts, and compressed bytes estimated from chunks spread evenly over each variable, encoded
  as they will be stored. Known error: that of a small sample, a few per cent for fields alike everywhere, more when a
  few regions differ from the rest.
- `predict_reading` and `price_store`: requests and stored bytes of a sample, as a trial counts them, and their cost.
  All three play the run through (`kit.data.stream.expected`): what is predicted before a trial is what the trial
  expects. A plan does so as of an array that memory does not hold, so that its choice holds for a longer one too; of a
  store so small that each batch touches most of its chunks, fewer requests are expected than were planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from kit.arguments import takes_config
from kit.chunks.access import Access, Order
from kit.chunks.cost import ArrayRequests, LayoutCost, price
from kit.chunks.reasons import plan_layout
from kit.chunks.resources import Host, Network, Prices
from kit.chunks.search import ChunkPlan, Sizes
from kit.config import Config
from kit.data.build.open_source import load_source
from kit.data.build.shards import ArrayWriter, Blueprint, make_blueprint
from kit.data.build.source import Region, Source, remarks, source_error
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset
from kit.data.samples import SamplePlan
from kit.data.sampling import plan_samples, sample_plan
from kit.data.stores.disk_cache import Entries, MemoryCache, ReadCache
from kit.data.stores.url import local_folder
from kit.data.stream.expected import Expected, Reading, expect
from kit.data.variables import ArrayInfo
from kit.errors import ConfigError, PlanError, Problem
from kit.tables import html_table
from kit.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    variables: int
    compression_ratio: float = 1.0
    """Decoded bytes per stored byte, as far as known."""


@takes_config
def plan_chunks(config: Config, *, order: Order | None = None, measure: bool = False, source: Any = None) -> ChunkPlan:
    """Choose the chunk and the shard of a store for what its readers read, with the cost of a batch and the reasons.

    Args:
        config: The shape comes from its source or store, patch and order from `data`, reading from `loader`, network,
            rules and other readers from `chunking`, and the ranks from `hardware.devices` (1 where that is no number).
        order: Another order than the config's, such as "block", to see what it would cost.
        measure: Encode a few chunks of the source first, and plan with the compression ratio that they have.
        source: An xarray object, an array or a source in memory, instead of the one that the config names.

    Returns:
        The plan: `chunk` and `shard` by dimension, the ranked candidates, and `reasons`.

    Raises:
        PlanError: for a patch, chunk or shard that does not fit the data, and to measure without a source.
        ConfigError: for a source or variables that do not exist.
        StoreError: when there is no source and the store cannot be opened.

    Example:
        >>> plan = kit.plan_chunks(ocean)
        >>> len(plan.chunk)  # time, lat and lon
        3
        >>> len(plan.reasons) > 0
        True
    """
    if config.data.source is None and source is None:
        if measure:
            raise PlanError("measure needs data.source to take samples from; set chunking.compression_ratio instead")
        return _plan(config, _stored_geometry(config, open_dataset(config)), order)
    source = load_source(config, source)
    geometry = _source_geometry(config, source)
    plan = _plan(config, geometry, order)
    if measure:
        ratio = estimate(source, make_blueprint(config, source, plan)).ratio
        plan = _plan(config, replace(geometry, compression_ratio=ratio), order)
    return replace(plan, reasons=(*plan.reasons, *remarks(config, source)))


_FOR_A_BUCKET = (
    "data.url is a folder, which is read faster than this: a plan counts the network of `chunking`, as of the bucket "
    "where the store will lie"
)


def _plan(config: Config, geometry: _Geometry, order: Order | None) -> ChunkPlan:
    data, chunking = config.data, config.chunking
    plan = plan_layout(
        dims=geometry.dims, shape=geometry.shape, itemsize=geometry.itemsize, patch=data.patch,
        batch_size=config.loader.batch_size, variables=geometry.variables, order=order or data.order,
        stride=data.stride, network=network_of(config), host=host_of(config),
        prices=Prices(per_thousand_reads=chunking.price_per_thousand_reads, per_gigabyte=chunking.price_per_gigabyte),
        pattern=pattern_of(config) | {"compression_ratio": chunking.compression_ratio or geometry.compression_ratio},
        target_shard_bytes=chunking.target_shard_bytes, chunk=chunking.chunk, shard=chunking.shard,
        divisibility=chunking.divisibility, multiple_of=chunking.multiple_of,
        largest_object_bytes=chunking.largest_object_bytes, readers=chunking.readers,
        play=cache(partial(_played_layout, config, geometry)),
    )  # fmt: skip
    return replace(plan, reasons=(*plan.reasons, _FOR_A_BUCKET)) if in_folders(config) else plan


def _played_layout(
    config: Config, geometry: _Geometry, access: Access, chunk: Sizes, shard: Sizes | None
) -> ArrayRequests | None:
    """What a batch asks of a store that would be cut so; None where no batch can be drawn, or one is too large."""
    at_first = access.batch_size * (1 + config.loader.batches_ahead)
    if at_first * math.prod(axis.mean for axis in access.axes(chunk)) > _MOST_TOUCHED:
        return None
    arrays = access.arrays
    info = ArrayInfo(
        name="", shape=geometry.shape, dims=geometry.dims, dtype=np.dtype((np.void, access.element_bytes)),
        chunk=chunk, shard=shard,
    )  # fmt: skip
    patch, stride = (dict(zip(geometry.dims, sides, strict=True)) for sides in (access.patch, access.stride))
    try:
        asking = config.replace({
            "data.patch": patch, "data.stride": stride, "data.order": access.order,
            "data.samples_per_epoch": access.epoch_samples, "loader.batch_size": access.batch_size,
            "loader.shuffle": access.shuffle, "training.max_epochs": access.epochs,
        })  # fmt: skip
        plan = plan_samples(asking, info, access.ranks, info.chunk_bytes * arrays)
    except ConfigError:
        return None
    padded = access.objects(chunk) / arrays * info.chunk_bytes / info.nbytes  # which takes no room once compressed
    reading = _reading(
        asking, plan, arrays=arrays, compression_ratio=access.compression_ratio * padded, most_touched=_PLAN_TOUCHED,
        is_planned=True,
    )  # fmt: skip
    found = expect(Dataset(url="", credentials="", arrays={}), [info], plan, reading)
    return found.arrays[0].times(arrays * access.batch_size)


def network_of(config: Config) -> Network:
    """What the config says lies between store and reader."""
    loader, chunking = config.loader, config.chunking
    return Network(
        latency_seconds=chunking.latency_seconds, latency_deviation_seconds=chunking.latency_deviation_seconds,
        latency_slow_fraction=chunking.latency_slow_fraction, latency_slow_factor=chunking.latency_slow_factor,
        bandwidth_bytes_per_second=chunking.bandwidth_bytes_per_second,
        total_bandwidth_bytes_per_second=chunking.total_bandwidth_bytes_per_second,
        requests_per_second=chunking.requests_per_second or math.inf,
        requests_in_flight=loader.requests_in_flight, batches_ahead=loader.batches_ahead,
    )  # fmt: skip


def host_of(config: Config) -> Host:
    """What the config says one rank decodes and keeps chunks with."""
    loader, chunking = config.loader, config.chunking
    return Host(
        decode_bytes_per_second=chunking.decode_bytes_per_second, decode_threads=loader.decode_threads,
        request_cpu_seconds=chunking.request_cpu_seconds, memory_bytes=loader.memory_bytes,
        cache_bytes=loader.cache_bytes,
    )  # fmt: skip


def pattern_of(config: Config) -> dict[str, Any]:
    """What the config says of an epoch and its order, as `kit.chunks.cost.Access` takes it."""
    loader, hardware = config.loader, config.hardware
    ranks = 1  # what `auto` and -1 come to is known only on the machine
    if hardware.shards:
        ranks = math.prod(hardware.shards)
    elif isinstance(hardware.devices, tuple):
        ranks = len(hardware.devices)
    elif isinstance(hardware.devices, int) and hardware.devices > 0:
        ranks = hardware.devices
    return {
        "ranks": ranks, "epochs": config.training.max_epochs, "samples_per_epoch": config.data.samples_per_epoch,
        "shuffle": loader.shuffle, "window_bytes": loader.window_bytes, "window_blocks": loader.window_blocks,
        "block_reuse": loader.block_reuse,
    }  # fmt: skip


def _source_geometry(config: Config, source: Source) -> _Geometry:
    """Raises: ConfigError: when the config names variables the source does not have."""
    chosen = config.data.variables or tuple(source.variables)
    unknown = [name for name in chosen if name not in source.variables]
    if unknown:
        known = ", ".join(source.variables)
        raise source_error("variables", f"the source has no {', '.join(unknown)}; it has {known}")
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
        row = [
            format_bytes(self.raw_bytes), format_bytes(self.compressed_bytes),
            f"{self.ratio:.2f} from {self.samples} sample chunks", f"{self.objects:,}", f"{self.chunks:,}",
        ]  # fmt: skip
        return html_table(("data", "stored (estimated)", "ratio", "objects", "chunks"), [row])


def refuse_no_plan(given: object) -> None:
    """Refuse what is no plan of chunks.

    Raises:
        ConfigError: with what makes one.
    """
    if not isinstance(given, ChunkPlan | None):
        message = f"{type(given).__name__} is no plan; give what kit.plan_chunks(config) answers, or leave it out"
        raise ConfigError([Problem("plan", message)])


@takes_config
def expected_bytes(config: Config, plan: ChunkPlan | None = None, *, source: Any = None) -> SizeEstimate:
    """How many bytes a build will write. Nothing is created.

    Args:
        config: What would be built.
        plan: Chunks and shards; `plan_chunks(config)` when left out.
        source: An xarray object, an array or a source in memory, instead of the one that the config names.

    Returns:
        The bytes, as decoded values and as stored.

    Raises:
        ConfigError, PlanError: as `kit.build` raises before its first byte.

    Example:
        >>> kit.data.expected_bytes(ocean).raw_bytes > 0
        True
    """
    refuse_no_plan(plan)
    opened = load_source(config, source)
    return estimate(opened, make_blueprint(config, opened, plan or plan_chunks(config, source=opened)))


def estimate(source: Source, blueprint: Blueprint) -> SizeEstimate:
    """The estimate for a blueprint; encodes up to twelve chunks of each variable."""
    from numcodecs.zstd import Zstd

    compressed, samples = 0.0, 0
    for name, writer in blueprint.arrays.items():
        raw, stored = 0, 0
        codec = Zstd(level=writer.compression_level, checksum=True)
        for region in _sample_chunks(writer):
            block = np.ascontiguousarray(source.read(name, region))
            raw += block.nbytes
            stored += len(codec.encode(block))
            samples += 1
        compressed += writer.nbytes * stored / raw + (_INDEX_BYTES * writer.chunk_count if writer.shard else 0)
    compressed += sum(len(data) for _, data in blueprint.documents)
    return SizeEstimate(
        raw_bytes=blueprint.raw_bytes, compressed_bytes=round(compressed), ratio=blueprint.raw_bytes / compressed,
        objects=blueprint.build.shards + len(blueprint.documents) + 1,
        chunks=sum(writer.chunk_count for writer in blueprint.arrays.values()), samples=samples,
    )  # fmt: skip


def _sample_chunks(writer: ArrayWriter) -> list[Region]:
    """Chunks spread evenly along every dimension at once, by an additive recurrence; fewer when chunks are large."""
    dimensions, chunk_bytes = len(writer.shape), math.prod(writer.chunk) * writer.dtype.itemsize
    root = 2.0
    for _ in range(40):  # to the root of x^(d+1) = x + 1, whose powers fill d dimensions most evenly (Roberts, 2018)
        root = (1 + root) ** (1 / (dimensions + 1))
    found = {}
    for sample in range(max(1, min(_SAMPLES, _LARGEST_SAMPLE_BYTES // chunk_bytes))):
        index, region = [], []
        for axis, (size, side) in enumerate(zip(writer.shape, writer.chunk, strict=True)):
            place = int((0.5 + sample * root ** -(axis + 1)) % 1 * -(-size // side))
            index.append(place)
            region.append(slice(place * side, min((place + 1) * side, size)))
        found[tuple(index)] = tuple(region)
    return [*found.values()]


def predict_reading(config: Config, dataset: Dataset, world_size: int = 1) -> dict[str, float]:
    """`requests_per_sample` and, where the store tells, `bytes_per_sample`, of a trial of `trial.max_steps`.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    batches = config.trial.max_steps * config.levers.accumulate_grad_batches
    held = 1  # by the loop of a Trainer, which asks for a batch before it knows that the last was the last
    played = _played(config, dataset, world_size, batches + held)
    answer = {"requests_per_sample": sum(one.requests for one in played.arrays)}
    if played.tells_sizes:
        answer["bytes_per_sample"] = sum(one.stored_bytes for one in played.arrays)
    return answer


def _played(config: Config, dataset: Dataset, world_size: int, batches: int | None = None, **how: Any) -> Expected:
    """What is asked for a sample in the first batches of a run on each rank, or in all of its epochs."""
    plan, kept = sample_plan(config, dataset, world_size), ReadCache.of(config.cache)
    how = {"compression_ratio": config.chunking.compression_ratio or 1.0} | how
    reading = _reading(
        config, plan, batches, entries=None if kept is None or in_folders(config) else _current_entries(kept),
        shared=kept is not None and bool(kept.folder), **how,
    )  # fmt: skip
    return expect(dataset, dataset.select(config.data.variables), plan, reading)


def _reading(config: Config, plan: SamplePlan, batches: int | None = None, arrays: int = 1, **how: Any) -> Reading:
    """How a run of so many batches reads, or of all epochs: one of so many arrays that share what a process may use."""
    loader, processes = config.loader, max(1, config.loader.num_workers)
    most, each = plan.batches_per_epoch * config.training.max_epochs, processes * arrays
    return Reading(
        batches=most if batches is None else min(batches, most),
        ahead=loader.batches_ahead + (loader.prefetch_factor if loader.num_workers else 0), processes=processes,
        coalescing=replace(network_of(config), in_folder=in_folders(config)).coalescing,
        joins=loader.batches_ahead,
        cache_bytes=loader.cache_bytes // each,
        memory_bytes=loader.memory_bytes // each,
        requests_in_flight=max(1, loader.requests_in_flight // each), **how,
    )  # fmt: skip


def in_folders(config: Config) -> bool:
    """Whether all that a config names lies on this machine."""
    return all(local_folder(url) is not None for url in (config.data.url, *config.data.more))


def _current_entries(cache: ReadCache) -> Entries:
    """What a trial finds: what is in the folder, or nothing in the memory of its new processes."""
    return cache.open() if cache.folder else MemoryCache(cache.size_bytes, cache.eviction)


_MOST_TOUCHED = 20_000
"""Chunks of batches: played in a fraction of a second, as a slider wants it."""
_PLAN_TOUCHED = 2_000
"""Of each of a plan's finalists."""


def price_store(
    config: Config,
    dataset: Dataset,
    plan: ChunkPlan | None = None,
    *,
    with_network: bool = False,
    is_planned: bool = False,
) -> tuple[LayoutCost, ...]:
    """The store as it is cut and where it lies, priced with the config's host: one cost for all variables cut alike.

    What a batch asks of it is what a trial of all epochs expects (`kit.data.stream.expected`). Most stores give one
    cost. Of several, requests, bytes and seconds add up: each is priced as if it had the host alone.

    Args:
        plan: Price the store as it would be if it were built again so. Statistics and coordinates lie in the store as
            it is, so what filters, weights and gaps leave out is not counted then.
        with_network: Price a folder with the network of `chunking` too, as a plan does: as if it lay where it will
            lie. Other stores always have that network before them.
        is_planned: As of an array that memory does not hold, as a plan counts: a layout that is better only while the
            store is small is not.

    Raises:
        PlanError: for a patch that does not fit the data.
        ConfigError: for variables that do not exist.
    """
    stored = stored_fraction(dataset)
    ratio = 1 / stored if stored else config.chunking.compression_ratio or 1.0
    if plan is not None:
        cut_again = {name: _cut_again(info, plan) for name, info in dataset.arrays.items()}
        dataset, config = replace(dataset, url="", manifest=None, arrays=cut_again), without_filters(config)
    arrays, pattern = dataset.select(config.data.variables), pattern_of(config)
    played = _played(
        config, dataset, pattern["ranks"], most_touched=_MOST_TOUCHED, compression_ratio=ratio, is_planned=is_planned
    )
    alike: dict[Any, list[tuple[ArrayInfo, ArrayRequests]]] = {}
    for chosen, asked in zip(arrays, played.arrays, strict=True):
        info = dataset.arrays[chosen.name]  # one that is repeated along a dimension is read as it is stored
        cut = (info.chunk, info.shard or (), info.dtype.itemsize, info.stored_shape)
        alike.setdefault(cut, []).append((info, asked))
    network = replace(network_of(config), in_folder=in_folders(config))
    if network.in_folder and not with_network:
        network = Network(
            latency_seconds=0.0, bandwidth_bytes_per_second=math.inf, requests_in_flight=network.requests_in_flight,
            batches_ahead=network.batches_ahead, in_folder=True,
        )  # fmt: skip
    pattern |= {"compression_ratio": ratio}
    return tuple(_price(config, network, alike[cut], pattern) for cut in sorted(alike))


def without_filters(config: Config) -> Config:
    """The config with every patch of an epoch, each as likely as the others."""
    return config.replace({"data.least_valid_fraction": 0.0, "data.weight_by": "nothing", "data.gap_dimension": ""})


def _cut_again(info: ArrayInfo, plan: ChunkPlan) -> ArrayInfo:
    if len(info.shape) != len(plan.chunk):
        return info
    chunk = tuple(min(side, size) for side, size in zip(plan.chunk, info.stored_shape, strict=True))
    return replace(info, chunk=chunk, shard=plan.shard if chunk == plan.chunk else None)


def requests_after(config: Config, dataset: Dataset, left_out: int) -> float:
    """Requests of a sample in a trial of all epochs but for the batches at its beginning, when nothing is there yet.

    Raises:
        As `price_store`.
    """
    ranks = pattern_of(config)["ranks"]
    played = _played(config, dataset, ranks, most_touched=_MOST_TOUCHED, left_out=left_out)
    return sum(one.requests for one in played.arrays)


def _price(
    config: Config, network: Network, found: list[tuple[ArrayInfo, ArrayRequests]], pattern: dict[str, Any]
) -> LayoutCost:
    """Of variables cut alike, with what is asked of each for a sample."""
    data, info, batch_size = config.data, found[0][0], config.loader.batch_size
    sizes = zip(info.dims, info.stored_shape, info.shape, strict=True)
    # Of a coarser store as many elements as the patch reaches over there.
    patch = tuple(-(-data.patch.get(name, 1) * stored // size) for name, stored, size in sizes)
    default = patch if data.order == "grid" else (1,) * len(patch)
    access = Access(
        shape=info.stored_shape, itemsize=info.dtype.itemsize, patch=patch, order=data.order, variables=len(found),
        stride=tuple(data.stride.get(name, side) for name, side in zip(info.dims, default, strict=True)),
        batch_size=batch_size, **pattern,
    )  # fmt: skip
    asked = sum((one for _, one in found), ArrayRequests()).times(batch_size)
    return price(access, network, info.chunk, host_of(config), shard=info.shard, asked=asked)
