"""What a layout costs: predicted seconds per batch, and which resource they are spent on.

Every resource alone would need so long for a batch on one rank; the slowest one binds:

    latency, bandwidth  (requests × latency + stored bytes / bandwidth) / in flight; the larger part gives the name
    memory              the same, where too little memory for requests in flight is what holds it up
    total bandwidth     stored bytes × ranks / total bandwidth
    request rate        requests × ranks / requests per second that the store allows, all ranks together
    CPU                 max(chunks × CPU seconds of a request, decoded bytes / (decode speed × threads))

    in flight = min(requests in flight allowed, requests of the batches read at once, what fits the memory)
    seconds per batch = the largest of them

Chunks are the expected number of different ones that the batch fetches (`kit.chunks.sharing`, `kit.chunks.access`),
times the arrays. Reading at full speed, those that are on their way for the batches before are joined; the oldest of
the batches ahead is taken to be as good as read. Requests are chunks, or in shards the runs of neighbours that one
request reads (`kit.chunks.requests`), and the indexes of shards. Stored bytes are whole chunks over the compression
ratio, with what lies between neighbours; decoded bytes whole chunks. A request's CPU seconds are spent on each chunk,
whether it shares its request or not, by one thread at a time; decoding has its own threads. The first line is Little's
law for a closed system.

Known error: the resources are taken to overlap perfectly, which is optimistic near a tie, and every request to take its
mean; a store that stands is priced `closely`, with its slow requests (`kit.chunks.cost`). The host's cores are taken to
be free. Retries are not counted. `benchmarks/layouts.py` sets predictions beside measurements.

Pace: seconds per batch of a pipeline that is played out request by request, where the mean of each is not enough.

`kit.chunks.cost` takes every request at its mean latency. But batches are handed over in order, and one slow request
holds up its batch, and with it the next to be begun; where few batches are read ahead, that is most of the time:

    a request begins when a slot is free, its batch was allowed to begin, and the store's rate admits it
    it ends after a latency of its own and its transfer, not before the line and the decoder have kept up
    a batch ends with the last of its requests, and is handed over after the one before it
    batch k begins when batch k - 1 - batches_ahead was handed over, or at once

Latencies are lognormal with the mean and standard deviation of the network (the maximum of n of them depends on both),
drawn with a fixed seed, so that the same question has the same answer. The line and the decoder are fluid: they serve
requests in the order these began. The invariant: never faster than the slowest resource alone, within the draw.

Known error: about 5 % of the seconds from the draw at the sizes played. Batches of more than a few hundred requests
are not played: their mean tells, and the answer is None.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kit.chunks.access import Access, Window, fit_window
from kit.chunks.geometry import Axis
from kit.chunks.requests import ALONE, Coalescing, Runs, expected_runs
from kit.chunks.resources import HOLES_SHARE, LENT_SHARE, READY_TOO, Host, Network, Prices
from kit.chunks.sharing import Fetches, fetches, reading_of

_AS_GOOD_AS_READ = 1
"""Of the batches ahead: the oldest waits for its last answers; those after it are joined."""
_LENT_AT_ONCE = 0.5
"""Of the chunks of the batches ahead: decoded, and kept for batches that are not whole."""
_MOST_CHUNKS_DRAWN = 2048
"""Of a batch: so many that the CPU binds, however they share requests; drawing them would take long."""
_IN_USE = 1 - 1 / HOLES_SHARE
"""Of the memory allowed."""
_WAITED_FOR = 1.25
"""So many times the slowest resource's seconds that a pipeline played out takes: then slow requests bind."""

Bound = Literal["latency", "bandwidth", "total bandwidth", "request rate", "CPU", "memory", "slow requests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """One size of chunk, priced on one rank. Expected values over offsets, all variables together."""

    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    """None: every chunk is an object of its own."""
    chunk_bytes: int
    requests_per_sample: float
    """Of a sample on its own: on average, and at its best and worst offset."""
    least_requests_per_sample: int
    most_requests_per_sample: int
    bytes_per_sample: float
    """Whole chunks of a sample on its own, decoded."""
    amplification: float
    """Bytes read per byte of patch, for one sample on its own."""
    requests_per_batch: float
    """Chunks the batch fetches, shared by its samples, its window or the cache; without indexes of shards."""
    least_requests_per_batch: float
    """A lower bound on the true expectation; `requests_per_batch` is exact where they are equal."""
    most_requests_per_batch: float
    """An upper bound on the true expectation."""
    sent_per_batch: float
    """Requests that bring those chunks: fewer where neighbours in a shard share one."""
    sent_bytes_per_batch: float
    """Stored bytes they ask for, those between neighbours included."""
    requests_made_per_batch: float
    """Of those, and of indexes: without what is on its way for a batch before, or kept for one that is not whole."""
    index_requests_per_batch: float
    """Indexes of shards, each fetched once a run, on average over its batches."""
    bytes_per_batch: float
    """Decoded."""
    stored_bytes_per_batch: float
    """What travels."""
    seconds_by_resource: tuple[tuple[Bound, float], ...]
    """What each resource alone would need for a batch, the slowest first."""
    seconds_per_batch: float
    samples_per_second: float
    """Of one rank; all ranks together read `ranks` times as many."""
    bound: Bound
    """The resource that decides: the slowest of `seconds_by_resource`."""
    in_flight: float
    """Requests really open at once."""
    memory_bytes: float
    """Of one rank: batches, chunks being read and decoded, cache or windows, and the holes they leave; a process grows
    by `OPENING_BYTES` besides, once."""
    cache_bytes: float
    """Of that, decoded chunks in the cache or the windows."""
    fits: bool
    """Whether memory allows it: one request in flight at least and, in block order, as many blocks as asked for."""
    object_count: int
    stored_bytes: float
    """Of all objects, the array's edges padded as Zarr pads them."""
    requests_per_epoch: float
    """All ranks, indexes included."""
    stored_bytes_per_epoch: float
    """All ranks."""
    price_per_epoch: float | None
    window: Window | None = None
    """In block order."""
    slowdown: float = 1.0
    """Weighted mean, over all readers, of the time with this layout over the time with the reader's own best."""

    @property
    def least_amplification(self) -> float:
        return self.amplification * self.least_requests_per_sample / self.requests_per_sample

    @property
    def most_amplification(self) -> float:
        return self.amplification * self.most_requests_per_sample / self.requests_per_sample


def price(
    access: Access,
    network: Network,
    chunk: Sequence[int],
    host: Host | None = None,
    *,
    shard: Sequence[int] | None = None,
    prices: Prices | None = None,
    closely: bool = False,
) -> LayoutCost:
    """The cost of reading batches with chunks of this size.

    Args:
        closely: Count that neighbours in a shard share requests, and play the pipeline out. A store is priced so; a
            plan ranks sizes without, since it prices hundreds, and shards can only be faster.

    Raises:
        PlanError: for sides below 1 or a patch larger than its array.
    """
    host, axes = host or Host(), access.axes(chunk)
    chunk_bytes = math.prod(chunk) * access.element_bytes
    each, window = _fetched(access, host, axes, chunk_bytes)
    union = each.per_batch * access.arrays
    indexes = 0.0 if shard is None else _indexes_per_batch(access, shard)
    stored = union * chunk_bytes / access.compression_ratio
    kept = _kept_bytes(access, host, axes, chunk_bytes, window)
    joined = union if window else min(union, _joined(access, network, host, axes, chunk_bytes) * access.arrays)
    together = thinned = ALONE
    if shard and closely:
        together, thinned = (_runs(access, network, axes, shard, chunk_bytes, part) for part in (1.0, joined / union))
    load = _Load(
        requests=joined * thinned.requests_per_chunk + indexes,
        stored_bytes=joined * chunk_bytes / access.compression_ratio * thinned.bytes_per_chunk,
        chunks=joined + indexes, decoded_bytes=joined * chunk_bytes, chunk_bytes=chunk_bytes,
        at_once=union * window.samples / access.batch_size if window else 0.0,
    )  # fmt: skip
    time = _time(access, network, host, load, kept)
    if closely:
        time = _played(access, network, host, load, time)
    mixes = access.order != "block" or (window is not None and window.full)
    per_sample = math.prod(axis.mean for axis in axes) * access.arrays
    epoch = access.epoch_samples / access.batch_size
    return LayoutCost(
        chunk=tuple(chunk), shard=None if shard is None else tuple(shard), chunk_bytes=chunk_bytes,
        requests_per_sample=per_sample,
        least_requests_per_sample=math.prod(axis.fewest for axis in axes) * access.arrays,
        most_requests_per_sample=math.prod(axis.most for axis in axes) * access.arrays,
        bytes_per_sample=per_sample * chunk_bytes, amplification=per_sample * chunk_bytes / access.sample_bytes,
        requests_per_batch=union, least_requests_per_batch=each.least * access.arrays,
        most_requests_per_batch=each.most * access.arrays, index_requests_per_batch=indexes,
        sent_per_batch=union * together.requests_per_chunk, sent_bytes_per_batch=stored * together.bytes_per_chunk,
        requests_made_per_batch=load.requests,
        bytes_per_batch=union * chunk_bytes, stored_bytes_per_batch=stored,
        seconds_by_resource=time.by_resource, seconds_per_batch=time.by_resource[0][1],
        samples_per_second=access.batch_size / time.by_resource[0][1], bound=time.by_resource[0][0],
        in_flight=time.in_flight, memory_bytes=time.memory_bytes, cache_bytes=kept, fits=time.fits and mixes,
        object_count=access.objects(shard or chunk),
        stored_bytes=access.objects(chunk) * chunk_bytes / access.compression_ratio,
        requests_per_epoch=(union + indexes) * epoch, stored_bytes_per_epoch=stored * epoch,
        price_per_epoch=(prices or Prices()).of((union + indexes) * epoch, stored * epoch), window=window,
    )  # fmt: skip


def _fetched(access: Access, host: Host, axes: tuple[Axis, ...], chunk_bytes: int) -> tuple[Fetches, Window | None]:
    """Chunks of one array per batch, and the window in block order."""
    if access.order != "block":
        cached = host.cache_bytes // (chunk_bytes * access.arrays)
        return fetches(reading_of(axes, access.order, access.shuffle), access.batch_size, access.batches, cached), None
    window = fit_window(
        axes, chunk_bytes * access.arrays, window_bytes=access.window_bytes, window_blocks=access.window_blocks,
        reuse=access.block_reuse, samples=access.rank_samples,
    )  # fmt: skip
    if window is None:  # then it reads as random order does
        return fetches(reading_of(axes, "random", True), access.batch_size, access.batches, 0), None
    low, high = window.least_chunks_per_sample, window.chunks_per_sample
    return Fetches(*(access.batch_size * chunks for chunks in (high, low, high))), window


def _joined(access: Access, network: Network, host: Host, axes: tuple[Axis, ...], chunk_bytes: int) -> float:
    """Chunks of one array that a batch fetches while those of the batches ahead are on their way or lent."""
    order: Literal["random", "grid"] = "grid" if access.order == "grid" else "random"
    ahead = min(network.batches_ahead, access.batches)
    coming, reading = max(0, ahead - _AS_GOOD_AS_READ), reading_of(axes, order, access.shuffle)
    least = reading.joining(access.batch_size, coming, lent_for=ahead)
    lent_bytes = least * access.arrays * chunk_bytes * ahead * _LENT_AT_ONCE
    room_bytes = READY_TOO * network.requests_in_flight * chunk_bytes / access.compression_ratio
    fixed = _fixed_bytes(access, network, host, chunk_bytes, host.cache_bytes)
    spare_bytes = (host.memory_bytes * _IN_USE - fixed - room_bytes) / LENT_SHARE
    lent = min(1.0, max(0.0, spare_bytes / lent_bytes)) if lent_bytes else 1.0
    return lent * least + (1 - lent) * reading.joining(access.batch_size, coming)


def _runs(
    access: Access, network: Network, axes: tuple[Axis, ...], shard: Sequence[int], chunk_bytes: int, fetched: float
) -> Runs:
    """How the chunks of a batch share requests, where this part of them is fetched for it."""
    if access.order == "block" or math.prod(axis.mean for axis in axes) * access.batch_size > _MOST_CHUNKS_DRAWN:
        return ALONE
    stored = max(1, round(chunk_bytes / access.compression_ratio))
    pays = Coalescing.of(
        network.latency_seconds, network.bandwidth_bytes_per_second, network.total_bandwidth_bytes_per_second,
        network.requests_in_flight,
    )  # fmt: skip
    return expected_runs(
        axes, tuple(shard), access.batch_size, stored, pays, access.order, access.shuffle, round(fetched, 2)
    )


def _indexes_per_batch(access: Access, shard: Sequence[int]) -> float:
    """Shards that a rank meets in its whole run, each index once, over its batches."""
    order: Literal["random", "grid"] = "grid" if access.order == "grid" else "random"
    met = reading_of(access.axes(shard), order, access.shuffle).distinct(access.batch_size * access.batches)
    return met * access.arrays / access.batches


def _kept_bytes(access: Access, host: Host, axes: Sequence[Axis], chunk_bytes: int, window: Window | None) -> float:
    """Decoded chunks kept from one batch to the next."""
    if access.order == "block":
        return float(window.window_bytes) if window else 0.0
    everything = math.prod(axis.chunks for axis in axes)
    return float(min(everything, host.cache_bytes // (chunk_bytes * access.arrays)) * chunk_bytes * access.arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a batch asks of one rank."""

    requests: float
    chunks: float
    """Chunks and indexes, each of which costs CPU time, whoever shares a request."""
    stored_bytes: float
    decoded_bytes: float
    chunk_bytes: int
    at_once: float
    """Requests of a window, which may be read ahead as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Time:
    by_resource: tuple[tuple[Bound, float], ...]
    in_flight: float
    memory_bytes: float
    room: float
    """Requests whose answers fit the memory."""

    @property
    def fits(self) -> bool:
        return self.room >= 1


def _fixed_bytes(access: Access, network: Network, host: Host, chunk_bytes: int, kept_bytes: float) -> float:
    """Memory of one rank beside its requests: batches, what is being decoded, and what is kept."""
    return (2 + network.batches_ahead) * access.batch_bytes + kept_bytes + host.decode_threads * chunk_bytes


def _time(access: Access, network: Network, host: Host, load: _Load, kept_bytes: float) -> _Time:
    """Seconds per batch by resource, the slowest first."""
    fixed = _fixed_bytes(access, network, host, load.chunk_bytes, kept_bytes)
    stored_chunk = load.chunk_bytes / access.compression_ratio
    room = (host.memory_bytes * _IN_USE - fixed) / stored_chunk
    wished = max(network.in_flight(load.requests), min(network.requests_in_flight, load.at_once))
    in_flight = max(1.0, min(wished, room))
    waiting = load.requests * network.latency_seconds / in_flight
    transferring = load.stored_bytes / network.bandwidth_bytes_per_second / in_flight
    name: Bound = "latency" if waiting > transferring else "bandwidth"
    threads = load.decoded_bytes / (host.decode_bytes_per_second * host.decode_threads)
    seconds: dict[Bound, float] = {
        "memory" if in_flight < wished else name: waiting + transferring,
        "total bandwidth": load.stored_bytes * access.ranks / network.total_bandwidth_bytes_per_second,
        "request rate": load.requests * access.ranks / network.requests_per_second,
        "CPU": max(load.chunks * host.request_cpu_seconds, threads),
    }
    slowest_first = tuple(sorted(seconds.items(), key=lambda item: -item[1]))
    memory = (fixed + in_flight * stored_chunk) / _IN_USE
    return _Time(by_resource=slowest_first, in_flight=in_flight, memory_bytes=memory, room=room)


def _played(access: Access, network: Network, host: Host, load: _Load, time: _Time) -> _Time:
    """The same, as slow as the pipeline is when played out; in block order windows are read ahead, not batches."""
    if access.order == "block" or not load.requests:
        return time
    ranks, each_bytes = access.ranks, load.stored_bytes / load.requests
    threads = load.decoded_bytes / (host.decode_bytes_per_second * host.decode_threads)
    played = seconds_per_batch(Pipeline(
        requests_per_batch=load.requests, in_flight=max(1, int(min(network.requests_in_flight, time.room))),
        batches_ahead=network.batches_ahead, latency_seconds=network.latency_seconds,
        latency_deviation_seconds=network.latency_deviation_seconds,
        transfer_seconds=each_bytes / network.bandwidth_bytes_per_second,
        line_seconds=each_bytes * ranks / network.total_bandwidth_bytes_per_second,
        admission_seconds=ranks / network.requests_per_second,
        decode_seconds=max(load.chunks * host.request_cpu_seconds, threads) / load.requests,
    ))  # fmt: skip
    slowest, seconds = time.by_resource[0]
    if played is None or played <= seconds:
        return time
    bound: Bound = "slow requests" if played > _WAITED_FOR * seconds else slowest
    rest = [item for item in time.by_resource if item[0] != bound]
    return replace(time, by_resource=((bound, played), *rest))


def balanced_ratio(access: Access, network: Network) -> float:
    """Side of the fastest chunk over the side of the patch, in random order, when one connection's terms decide.

    Minimising `(1 + S/c)^d (latency + k c^d)` over c, with d dimensions along which the patch can move and k bytes per
    c^d over the bandwidth, gives `c / S = (latency × bandwidth / patch bytes)^(1 / (d + 1))`. So chunk = patch is the
    fastest exactly when a patch holds latency × bandwidth bytes. Chunks shared within a batch and edges are left out.
    """
    return float((network.break_even_bytes / access.patch_bytes) ** (1 / (access.free_dimensions + 1)))


_MOST_REQUESTS = 4000
"""Played, which takes some 10 ms."""
_LEAST_BATCHES = 6
"""That are timed."""
_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What batches go through, on one rank; infinity stands for no limit."""

    requests_per_batch: float
    in_flight: int
    """Requests open at once, at most."""
    batches_ahead: int
    latency_seconds: float
    """Mean time to the first byte."""
    latency_deviation_seconds: float
    """Its standard deviation."""
    transfer_seconds: float
    """Of a request on its own connection."""
    line_seconds: float
    """Of a request on the line that all share."""
    admission_seconds: float
    """Between requests that the store admits."""
    decode_seconds: float
    """Of what a request brings, by all decoding threads together."""


def seconds_per_batch(pipeline: Pipeline) -> float | None:
    """Between two batches handed over, once the pipeline is full; None where the mean of a request tells enough."""
    size, ahead = max(1, round(pipeline.requests_per_batch)), pipeline.batches_ahead
    filling = 2 * (1 + ahead)
    batches = _MOST_REQUESTS // size
    if batches - filling < max(_LEAST_BATCHES, filling):
        return None
    handed = _play(pipeline, size, batches)
    timed = handed[-1] - handed[filling - 1]
    # A batch has a whole number of requests only here.
    return timed / (batches - filling) * pipeline.requests_per_batch / size


def _play(pipeline: Pipeline, size: int, batches: int) -> list[float]:
    """When each batch was handed over."""
    latencies = _latencies(pipeline, batches * size)
    slots = [0.0] * pipeline.in_flight
    handed: list[float] = []
    admitted = line = decoded = 0.0
    for batch in range(batches):
        oldest = batch - 1 - pipeline.batches_ahead
        allowed = handed[oldest] if oldest >= 0 else 0.0
        ready = handed[-1] if handed else 0.0
        for latency in latencies[batch * size : (batch + 1) * size]:
            begun = max(slots[0], allowed, admitted)
            admitted = begun + pipeline.admission_seconds
            line = max(line, begun) + pipeline.line_seconds
            arrived = max(begun + latency + pipeline.transfer_seconds, line)
            heapq.heapreplace(slots, arrived)
            decoded = max(decoded, begun) + pipeline.decode_seconds
            ready = max(ready, arrived, decoded)
        handed.append(ready)
    return handed


def _latencies(pipeline: Pipeline, count: int) -> list[float]:
    """Lognormal, with the mean and deviation of the pipeline."""
    mean, deviation = pipeline.latency_seconds, pipeline.latency_deviation_seconds
    if mean <= 0 or deviation <= 0:
        return [mean] * count
    variance = math.log1p((deviation / mean) ** 2)
    middle, spread, draw = math.log(mean) - variance / 2, math.sqrt(variance), random.Random(_SEED)
    return [draw.lognormvariate(middle, spread) for _ in range(count)]
