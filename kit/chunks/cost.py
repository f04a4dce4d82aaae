"""What a layout costs: predicted seconds per batch on one rank, and the resource that they are spent on.

For each resource there is a time that a batch would take if nothing else were slow. The largest of them is the
prediction, and its resource binds:

    latency, bandwidth  (requests × latency + stored bytes / bandwidth) / in flight; the larger part gives the name
    memory              the same time, named so where memory allows fewer requests in flight than the settings do
    total bandwidth     stored bytes × ranks / total bandwidth
    request rate        requests × ranks / requests per second that the store allows, all ranks together
    CPU                 max(decoded bytes / (decode speed × threads), chunks × CPU seconds of a request + assembling)

    in flight = min(requests in flight allowed, requests of the batches read at once, what fits the memory)

The first line is Little's law. What is counted:

- chunks: the expected number of different ones that a batch fetches (`kit.chunks.sharing`, `kit.chunks.access`), times
  the arrays, less those already on their way for the batches ahead, of which the oldest counts as read;
- requests: one a chunk, and the indexes of shards; fewer where reading was played through (`asked`), as neighbours in
  a shard share them;
- stored bytes: whole chunks over the compression ratio; decoded bytes: whole chunks;
- CPU seconds of a request: for each chunk, whether it shares its request or not; decoding has threads of its own;
- assembling: what a batch of chunks that are there takes (`assembling_seconds`), in Python as requests are, of which
  one thread runs at a time. Where no batch is read ahead, decoding does not overlap with these either.

In block order nothing is served before the first window of an epoch is there, nor fetched while the last is served: of
an epoch of w windows a batch takes longer by 1 / w of what fetching and assembling take one after another beyond that.
In other orders the first batches are waited for, and count in `seconds_per_epoch` alone.

Known error: resources are taken to overlap perfectly, which is optimistic near a tie, the host's cores to be free, and
every request to take its mean. Retries are not counted. `benchmarks/layouts.py` sets predictions beside measurements.

A store that exists, and the best few layouts of a plan, are priced by what batches ask of them, played through with
their offsets (`kit.data.stream.expected`). Where these batches have few requests, a pipeline of them is played out
request by request (`kit.chunks.requests`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from kit.chunks.access import Access, Window, fit_window
from kit.chunks.geometry import Axis
from kit.chunks.requests import Pipeline, play
from kit.chunks.resources import HOLES_SHARE, KEPT_AT_ONCE, READY_TOO, TRANSIENT_SHARE, Host, Network, Prices
from kit.chunks.sharing import Fetches, ReadingOrder, fetches, reading_of

_AS_GOOD_AS_READ = 1
"""Of the batches ahead: the oldest waits for its last answers; those after it are joined."""
_IN_USE = 1 - 1 / HOLES_SHARE
"""Of the memory allowed."""
_WAITED_FOR = 1.25
"""So many times the slowest resource's seconds that a pipeline played out takes: then slow requests bind."""

Bound = Literal["latency", "bandwidth", "total bandwidth", "request rate", "CPU", "memory", "slow requests"]


@dataclass(slots=True)
class ArrayRequests:
    """What is asked of an array, in some batches, or on average for one or for a sample."""

    chunks: float = 0
    """Fetched, whoever shares their request, from the store or a read cache; without indexes of shards."""
    requests: float = 0
    indexes: float = 0
    """Of the requests, those of indexes."""
    stored_bytes: float = 0
    index_bytes: float = 0

    def __sub__(self, other: ArrayRequests) -> ArrayRequests:
        return self + other.times(-1)

    def __add__(self, other: ArrayRequests) -> ArrayRequests:
        return ArrayRequests(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> ArrayRequests:
        return ArrayRequests(*(count * factor for count in astuple(self)))


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
    requests_made_per_batch: float
    """Of those, and of indexes: without what is on its way for a batch before, or kept for one that is not whole; as
    many as were played through, where neighbours in a shard share one."""
    bytes_made_per_batch: float
    """Stored bytes that those requests ask for; played through, those of indexes and between neighbours included."""
    index_requests_per_batch: float
    """Indexes of shards, each fetched once a run, on average over its batches."""
    bytes_per_batch: float
    """Decoded."""
    stored_bytes_per_batch: float
    """What travels."""
    seconds_by_resource: tuple[tuple[Bound, float], ...]
    """What each resource alone would need for a batch, the slowest first."""
    seconds_per_batch: float
    seconds_per_epoch: float
    """Of one rank. Its first batches are waited for, which is in the seconds of each batch in block order alone."""
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
    """All ranks, as they are made: what batches in flight share is counted once, indexes are included."""
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


def slowest(costs: Sequence[LayoutCost]) -> LayoutCost:
    """Of several variables that one batch reads, the one that takes longest: what binds it binds the batch."""
    return max(costs, key=lambda cost: cost.seconds_per_batch)


def price(
    access: Access,
    network: Network,
    chunk: Sequence[int],
    host: Host | None = None,
    *,
    shard: Sequence[int] | None = None,
    prices: Prices | None = None,
    asked: ArrayRequests | None = None,
) -> LayoutCost:
    """The cost of reading batches with chunks of this size.

    Args:
        asked: What a batch asks, played through, all variables together; then the pipeline is played out too. A plan
            finds its finalists without, since it prices hundreds.

    Raises:
        PlanError: for sides below 1 or a patch larger than its array.
    """
    host, axes = host or Host(), access.axes(chunk)
    chunk_bytes = math.prod(chunk) * access.element_bytes
    each, window, kept = _fetched(access, host, axes, chunk_bytes)
    if asked is not None and window:  # which windows share chunks depends on where their blocks lie
        each = Fetches(*[asked.chunks / access.arrays] * 3)
    union = each.per_batch * access.arrays
    stored = union * chunk_bytes / access.compression_ratio
    closely = asked is not None
    per_sample = math.prod(axis.mean for axis in axes) * access.arrays
    if asked is None:
        at_once = window or network.in_folder  # a folder answers before another batch asks for the same chunk
        joined = union if at_once else min(union, _joined(access, network, host, axes, chunk_bytes) * access.arrays)
        indexes = 0.0
        if shard is not None:  # a rank fetches the index of each shard once in its whole run
            met = _reading(access, access.axes(shard)).distinct(access.batch_size * access.batches)
            indexes = met * access.arrays / access.batches
        asked = ArrayRequests(joined, joined + indexes, indexes, joined * chunk_bytes / access.compression_ratio)
    load = _Load(
        requests=asked.requests, stored_bytes=asked.stored_bytes, chunks=asked.chunks + asked.indexes,
        decoded_bytes=asked.chunks * chunk_bytes, chunk_bytes=chunk_bytes,
        fixed_bytes=_fixed_bytes(access, network, host, chunk_bytes, kept),
        at_once=asked.chunks * window.samples / access.batch_size if window else 0.0,
        assembling_seconds=assembling_seconds(access, host, per_sample * access.batch_size),
        windows=math.ceil(access.rank_samples / window.samples) if window else 0,
    )  # fmt: skip
    by_resource, waited_seconds, in_flight, most_in_flight = _time(access, network, host, load, closely)
    bound, seconds = by_resource[0]
    mixes = access.order != "block" or (window is not None and window.full)
    epoch = access.epoch_samples / access.batch_size
    return LayoutCost(
        chunk=tuple(chunk), shard=None if shard is None else tuple(shard), chunk_bytes=chunk_bytes,
        requests_per_sample=per_sample,
        least_requests_per_sample=math.prod(axis.fewest for axis in axes) * access.arrays,
        most_requests_per_sample=math.prod(axis.most for axis in axes) * access.arrays,
        bytes_per_sample=per_sample * chunk_bytes, amplification=per_sample * chunk_bytes / access.sample_bytes,
        requests_per_batch=union, least_requests_per_batch=each.least * access.arrays,
        most_requests_per_batch=each.most * access.arrays, index_requests_per_batch=asked.indexes,
        requests_made_per_batch=load.requests, bytes_made_per_batch=load.stored_bytes,
        bytes_per_batch=union * chunk_bytes, stored_bytes_per_batch=stored,
        seconds_by_resource=by_resource, seconds_per_batch=seconds,
        seconds_per_epoch=access.epoch_batches * seconds + waited_seconds,
        samples_per_second=access.batch_size / seconds,
        bound=bound, in_flight=in_flight, cache_bytes=kept, fits=most_in_flight >= 1 and mixes,
        memory_bytes=(load.fixed_bytes + in_flight * chunk_bytes / access.compression_ratio) / _IN_USE,
        object_count=access.objects(shard or chunk),
        stored_bytes=access.objects(chunk) * chunk_bytes / access.compression_ratio,
        requests_per_epoch=load.requests * epoch, stored_bytes_per_epoch=load.stored_bytes * epoch,
        price_per_epoch=(prices or Prices()).of(load.requests * epoch, load.stored_bytes * epoch), window=window,
    )  # fmt: skip


def _reading(access: Access, axes: Sequence[Axis]) -> ReadingOrder:
    """The order of positions; in block order that of random offsets, for what it takes without windows."""
    return reading_of(axes, "grid" if access.order == "grid" else "random", access.shuffle)


def _fetched(
    access: Access, host: Host, axes: tuple[Axis, ...], chunk_bytes: int
) -> tuple[Fetches, Window | None, float]:
    """Chunks of one array per batch, the window in block order, and bytes of decoded chunks kept between batches."""
    all_bytes, reading = chunk_bytes * access.arrays, _reading(access, axes)
    if access.order != "block":
        cached = host.cache_bytes // all_bytes
        kept = min(math.prod(axis.chunks for axis in axes), cached) * all_bytes
        return fetches(reading, access.batch_size, access.batches, cached), None, float(kept)
    window = fit_window(
        axes, all_bytes, window_bytes=access.window_bytes, window_blocks=access.window_blocks,
        reuse=access.block_reuse, samples=access.rank_samples,
    )  # fmt: skip
    if window is None:  # then it reads as random order does
        return fetches(reading, access.batch_size, access.batches, 0), None, 0.0
    low, high = window.least_chunks_per_sample, window.chunks_per_sample
    found = Fetches(*(access.batch_size * chunks for chunks in (high, low, high)))
    return found, window, float(window.window_bytes)


def _joined(access: Access, network: Network, host: Host, axes: tuple[Axis, ...], chunk_bytes: int) -> float:
    """Chunks of one array that a batch fetches: without those of batches ahead that are on their way or decoded."""
    ahead = min(network.batches_ahead, access.batches)
    coming, reading = max(0, ahead - _AS_GOOD_AS_READ), _reading(access, axes)
    least = reading.joining(access.batch_size, coming, kept_for=ahead)
    kept_bytes = least * access.arrays * chunk_bytes * ahead * KEPT_AT_ONCE
    coming_bytes = READY_TOO * network.requests_in_flight * chunk_bytes / access.compression_ratio
    fixed = _fixed_bytes(access, network, host, chunk_bytes, host.cache_bytes)
    spare_bytes = (host.memory_bytes * _IN_USE - fixed - coming_bytes) / TRANSIENT_SHARE
    kept = min(1.0, max(0.0, spare_bytes / kept_bytes)) if kept_bytes else 1.0
    return kept * least + (1 - kept) * reading.joining(access.batch_size, coming)


def _fixed_bytes(access: Access, network: Network, host: Host, chunk_bytes: int, kept_bytes: float) -> float:
    """Memory of one rank beside its requests: batches, what is being decoded, and what is kept."""
    return (2 + network.batches_ahead) * access.batch_bytes + kept_bytes + host.decode_threads * chunk_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a batch costs one rank, in requests, bytes and memory."""

    requests: float
    chunks: float
    """Chunks and indexes, each of which costs CPU time, whoever shares a request."""
    stored_bytes: float
    decoded_bytes: float
    chunk_bytes: int
    fixed_bytes: float
    at_once: float
    """Requests of a window, which may be read ahead as a whole."""
    assembling_seconds: float
    windows: int
    """Of an epoch, in block order."""


def _time(
    access: Access, network: Network, host: Host, load: _Load, closely: bool
) -> tuple[tuple[tuple[Bound, float], ...], float, float, float]:
    """Seconds per batch by resource, the slowest first; what an epoch takes longer than its batches; requests in
    flight; how many of them the memory allows."""
    ranks = access.ranks
    most = (host.memory_bytes * _IN_USE - load.fixed_bytes) / (load.chunk_bytes / access.compression_ratio)
    useful = max(network.in_flight(load.requests), min(network.requests_in_flight, load.at_once))
    in_flight = max(1.0, min(useful, most))
    waiting = load.requests * network.latency_seconds / in_flight
    transferring = load.stored_bytes / network.bandwidth_bytes_per_second / in_flight
    name: Bound = "latency" if waiting > transferring else "bandwidth"
    decoding = load.decoded_bytes / (host.decode_bytes_per_second * host.decode_threads)
    asking = load.chunks * host.request_cpu_seconds
    seconds: dict[Bound, float] = {
        "memory" if in_flight < useful else name: waiting + transferring,
        "total bandwidth": load.stored_bytes * ranks / network.total_bandwidth_bytes_per_second,
        "request rate": load.requests * ranks / network.requests_per_second,
    }
    fetching = max(*seconds.values(), decoding, asking)
    python = asking + load.assembling_seconds
    seconds["CPU"] = max(decoding, python) if network.batches_ahead else decoding + python
    played, waited = None, 0.0
    # In block order windows are read ahead, not batches, so there is nothing to play.
    if closely and access.order != "block" and load.requests:
        each_bytes = load.stored_bytes / load.requests
        of_each = python / load.requests, decoding / load.requests
        thread_seconds, decode_seconds = of_each if network.batches_ahead else (sum(of_each), 0.0)
        played = play(Pipeline(
            requests_per_batch=load.requests, in_flight=max(1, int(min(network.requests_in_flight, most))),
            batches_ahead=network.batches_ahead, latency=network.latency,
            transfer_seconds=each_bytes / network.bandwidth_bytes_per_second,
            line_seconds=each_bytes * ranks / network.total_bandwidth_bytes_per_second,
            admission_seconds=ranks / network.requests_per_second, thread_seconds=thread_seconds,
            decode_seconds=decode_seconds, batches=access.epoch_batches,
        ))  # fmt: skip
    slowest = max(seconds, key=lambda bound: seconds[bound])
    if played is not None:
        waited = played.waited_seconds
        if (each := played.seconds_per_batch) > seconds[slowest]:
            seconds["slow requests" if each > _WAITED_FOR * seconds[slowest] else slowest] = each
    elif load.windows:
        seconds[slowest] += max(0.0, fetching + load.assembling_seconds - seconds[slowest]) / load.windows
    elif load.requests:  # the first batch takes a request, whatever is read meanwhile
        waited = max(0.0, network.latency_seconds - seconds[slowest])
    return tuple(sorted(seconds.items(), key=lambda item: -item[1])), waited, in_flight, most


_BATCH_REQUESTS, _ARRAY_REQUESTS, _PIECE_REQUESTS = 4.5, 0.7, 0.075
_COPYING = 0.09
"""Of the seconds in which as many bytes are decoded."""


def assembling_seconds(access: Access, host: Host, pieces: float) -> float:
    """What it takes to make a batch of chunks that are there: the bound of data that memory holds.

    In CPU seconds of requests for a batch, for each array and for each piece, and in seconds of decoding for copying,
    which scale with the machine. Fitted to the seconds of 272 ways of reading: 1 to 3 arrays in batches of 4 to 64
    samples of 1 KB to 2 MB, in 1 to 34 pieces. Known error there: 0.6 to 1.5 times for nine in ten, 17 % the median.

    Args:
        pieces: Of all patches of the batch, what each has of each chunk.
    """
    requests = _BATCH_REQUESTS + _ARRAY_REQUESTS * access.arrays + _PIECE_REQUESTS * pieces
    return requests * host.request_cpu_seconds + _COPYING * access.batch_bytes / host.decode_bytes_per_second


def balanced_ratio(access: Access, network: Network) -> float:
    """Side of the fastest chunk over the side of the patch, in random order, when one connection's terms decide.

    Minimising `(1 + S/c)^d (latency + k c^d)` over c, with d dimensions along which the patch can move and k bytes per
    c^d over the bandwidth, gives `c / S = (latency × bandwidth / patch bytes)^(1 / (d + 1))`. So chunk = patch is the
    fastest exactly when a patch holds latency × bandwidth bytes. Chunks shared within a batch and edges are left out.
    """
    return float((network.break_even_bytes / access.patch_bytes) ** (1 / (access.free_dimensions + 1)))
