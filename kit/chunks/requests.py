"""Requests: how neighbours in an object share one, and how fast a pipeline of them hands batches over. Sizes are bytes.

A gap of g bytes between two neighbours is worth reading when it takes less time than a second request would wait:

    g <= latency × bytes/s of a connection,   bytes/s = min(bandwidth, total bandwidth / requests in flight)

With all requests in flight a connection carries only its share of the total, so the gap shrinks as they grow; a gap far
larger reads far too much. One request carries no more than `LATENCIES` such amounts, so that neighbours still travel at
once; a longer run is cut between chunks.

Inner chunks lie in the order in which zarr-python writes them (Morton's: the bits of their coordinates take turns, the
first dimension's lowest first), so that neighbours along every dimension are near each other; other libraries write
them in C order.

A batch of few requests is played out by a pipeline, because batches are handed over in order and one slow request
delays its batch and the start of a later one:

    a request begins when a slot is free, its batch was allowed to begin, and the store's rate admits it
    it ends after a latency of its own and its transfer, not before the line and the decoder have kept up
    a batch ends with the last of its requests, and is handed over after the one before it
    batch k begins when batch k - 1 - batches_ahead was handed over, or at once

Latencies are lognormal with the mean and standard deviation of the network (the maximum of n of them depends on both),
drawn with a fixed seed, so that the same arguments give the same answer. Line and decoder serve requests in the order
in which these began. The pipeline is never faster than the slowest resource alone, but for an error of about 5 % from
the draw. It begins empty, as an epoch does; a batch's seconds are those once it is full.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Item = TypeVar("Item")

LATENCIES = 8
LOCAL_GAP_BYTES = 16 << 10
"""Reading this much more from a file in memory takes as long as another read of it."""
_LEAST_LONGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Coalescing:
    """Which neighbours share a request."""

    gap_bytes: int = 0
    longest_bytes: int = _LEAST_LONGEST_BYTES

    @classmethod
    def of(
        cls,
        latency_seconds: float,
        bandwidth_bytes_per_second: float,
        total_bandwidth_bytes_per_second: float,
        requests_in_flight: int,
    ) -> Coalescing:
        """What pays on a network."""
        each = min(bandwidth_bytes_per_second, total_bandwidth_bytes_per_second / requests_in_flight)
        gap = int(latency_seconds * each)
        return cls(gap, max(_LEAST_LONGEST_BYTES, LATENCIES * gap))


@dataclass(slots=True)
class Run(Generic[Item]):
    """One request: bytes `first` to `last` of an object, and where in the object each item lies."""

    first: int
    last: int
    items: list[tuple[int, int, Item]]

    @property
    def wasted_bytes(self) -> int:
        """Bytes between the items."""
        if len(self.items) == 1:
            return 0
        return self.last - self.first - sum(last - first for first, last, _ in self.items)


def runs(spans: Iterable[tuple[int, int, Item]], how: Coalescing) -> list[Run[Item]]:
    """The requests that read all `(first, last, item)`, in the order of the bytes."""
    found: list[Run[Item]] = []
    for first, last, item in sorted(spans, key=lambda span: span[:2]):
        run = found[-1] if found else None
        if run and 0 <= first - run.last <= how.gap_bytes and last - run.first <= how.longest_bytes:
            run.last = last
            run.items.append((first, last, item))
        else:
            found.append(Run(first, last, [(first, last, item)]))
    return found


Place = tuple[int, ...]


@lru_cache(maxsize=64)
def morton_numbers(per_shard: Place, limits: Place) -> NDArray[np.int64]:
    """Where each inner chunk lies in a shard, counted in chunks; those from `limits` on are not stored.

    Morton's number of a place is made of the bits of its coordinates in turn, as many as each dimension has.
    """
    import numpy as np

    bits = [(count - 1).bit_length() for count in per_shard]
    turns = [(bit, axis) for bit in range(max(bits)) for axis in range(len(bits)) if bit < bits[axis]]
    codes = np.zeros(limits, np.int64)
    for position, (bit, axis) in enumerate(turns):
        along = np.arange(limits[axis]).reshape([-1 if one == axis else 1 for one in range(len(limits))])
        codes += (along >> bit & 1) << position
    numbers = np.empty(codes.size, np.int64)
    numbers[np.argsort(codes, axis=None)] = np.arange(codes.size)
    return numbers.reshape(limits)


@lru_cache(maxsize=64)
def c_numbers(limits: Place) -> NDArray[np.int64]:
    """The same where chunks lie in C order, the last dimension fastest."""
    import numpy as np

    return np.arange(math.prod(limits)).reshape(limits)


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
    batches: int
    """Of an epoch."""


@cache
def _normals() -> tuple[float, ...]:
    """As many as are played, always the same."""
    draw = random.Random(_SEED)
    return tuple(draw.normalvariate(0, 1) for _ in range(_MOST_REQUESTS))


class Played(NamedTuple):
    """How fast a pipeline hands batches over."""

    seconds_per_batch: float
    """Between two of them, once it is full."""
    waited_seconds: float
    """That an epoch takes longer than as many of them, since it begins with an empty pipeline."""


def play(pipeline: Pipeline) -> Played | None:
    """The pipeline from its first request on; None where a batch has too many requests to play."""
    size, ahead = max(1, round(pipeline.requests_per_batch)), pipeline.batches_ahead
    filled = 2 * (1 + ahead)  # so many batches after the first
    batches = _MOST_REQUESTS // size
    if batches - filled < max(_LEAST_BATCHES, filled):
        return None
    mean, deviation = pipeline.latency_seconds, pipeline.latency_deviation_seconds
    latencies: Iterator[float] = itertools.repeat(mean)
    if mean > 0 and deviation > 0:
        variance = math.log1p((deviation / mean) ** 2)
        middle, spread = math.log(mean) - variance / 2, math.sqrt(variance)
        latencies = (math.exp(middle + spread * drawn) for drawn in _normals())
    slots = [0.0] * pipeline.in_flight
    handed: list[float] = []
    admitted = line = decoded = 0.0
    for batch in range(batches):
        oldest = batch - 1 - ahead
        allowed = handed[oldest] if oldest >= 0 else 0.0
        ready = handed[-1] if handed else 0.0
        for latency in itertools.islice(latencies, size):
            begun = max(slots[0], allowed, admitted)
            admitted = begun + pipeline.admission_seconds
            line = max(line, begun) + pipeline.line_seconds
            arrived = max(begun + latency + pipeline.transfer_seconds, line)
            heapq.heapreplace(slots, arrived)
            decoded = max(decoded, begun) + pipeline.decode_seconds
            ready = max(ready, arrived, decoded)
        handed.append(ready)
    each, count = (handed[-1] - handed[filled - 1]) / (batches - filled), min(batches, pipeline.batches)
    # A batch has a whole number of requests only here.
    return Played(each * pipeline.requests_per_batch / size, max(0.0, handed[count - 1] - count * each))
