"""Requests: how neighbours in an object share one, and how fast a pipeline of them hands batches over. Sizes are bytes.

A gap of g bytes between two neighbours is worth reading when it takes less time than a second request would wait:

    g <= latency × bytes/s of a connection,   bytes/s = min(bandwidth, total bandwidth / requests in flight)

With all requests in flight a connection carries only its share of the total, so the gap shrinks as they grow; a gap far
larger reads far too much. One request carries no more than `LATENCIES` such amounts, so that neighbours still travel at
once; a longer run is cut between chunks.

Inner chunks lie in the order in which zarr-python writes them (Morton's: the bits of their coordinates take turns, the
first dimension's lowest first), so that neighbours along every dimension are near each other; other libraries write
them in C order.

Batches of few requests are played out as a pipeline, event by event, because batches are handed over in order and one
slow request delays its batch and the start of a later one:

    a request begins when a slot is free, its batch was allowed to begin, and the store's rate admits it
    its bytes come after a latency of its own, by its connection and by the line that all share
    one thread sends it and receives it, and assembles batches meanwhile; others decode what it brought
    a batch ends with the last of its requests, and is handed over after the one before it
    batch k begins when batch k - 1 - batches_ahead was handed over, or at once

A latency is lognormal, and a fraction of them is longer by a factor (`Latency`): the maximum of n of them depends on
all of that. They are drawn with a fixed seed, so that the same arguments give the same answer. The pipeline is never
faster than the slowest resource alone, but for an error of about 5 % from the draw. It begins empty, as an epoch does;
a batch's seconds are those once it is full.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times to the first byte: lognormal, those of a few requests longer by a factor."""

    mean_seconds: float
    """Of all requests."""
    deviation_seconds: float = 0.0
    """Standard deviation, of all requests."""
    slow_fraction: float = 0.0
    """Of the requests, those that take longer than the others by `slow_factor`."""
    slow_factor: float = 1.0

    def draw(self, count: int) -> list[float]:
        """So many, always the same, and as evenly spread over the distribution as so many can be."""
        slow, factor = self.slow_fraction, self.slow_factor
        mean = self.mean_seconds / (1 + slow * (factor - 1))
        square = (self.mean_seconds**2 + self.deviation_seconds**2) / (1 + slow * (factor**2 - 1))
        spread = math.sqrt(math.log(max(1.0, square / mean**2))) if mean > 0 else 0.0
        normals, ranks = _draws(count)
        usual = [mean * math.exp(spread * (drawn - spread / 2)) for drawn in normals]
        return [
            seconds * factor if rank < slow * count else seconds for seconds, rank in zip(usual, ranks, strict=True)
        ]


_MOST_REQUESTS = 4000
"""Played, which takes some 15 ms."""
_LEAST_BATCHES = 6
"""That are timed."""
_SEED = 20


def largest_normal(count: int) -> float:
    """Expected largest of so many standard normal numbers (Blom 1958); 0 of one."""
    return NormalDist().inv_cdf((max(1, count) - 0.375) / (max(1, count) + 0.25))


@lru_cache(maxsize=16)
def _draws(count: int) -> tuple[list[float], list[int]]:
    """So many normal numbers and ranks, each in an order of its own that is always the same."""
    shuffle, normal = random.Random(_SEED).shuffle, NormalDist()
    normals, ranks = [normal.inv_cdf((place + 0.5) / count) for place in range(count)], [*range(count)]
    shuffle(normals)
    shuffle(ranks)
    return normals, ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What batches go through, on one rank; infinity stands for no limit."""

    requests_per_batch: float
    in_flight: int
    """Requests open at once, at most."""
    batches_ahead: int
    latency: Latency
    transfer_seconds: float
    """Of a request on its own connection."""
    line_seconds: float
    """Of a request on the line that all share."""
    admission_seconds: float
    """Between requests that the store admits."""
    thread_seconds: float
    """Of a request, and of its part of assembling a batch, in Python, of which one thread runs at a time."""
    decode_seconds: float
    """Of what a request brings, by all decoding threads together."""
    batches: int
    """Of an epoch."""


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
    handed = _handed(pipeline, size, batches)
    each, count = (handed[-1] - handed[filled - 1]) / (batches - filled), min(batches, pipeline.batches)
    # A batch has a whole number of requests only here.
    return Played(each * pipeline.requests_per_batch / size, max(0.0, handed[count - 1] - count * each))


_BEGINS, _ANSWERS, _ARRIVES = range(3)
"""Events of a batch, of a request's first byte and of its last."""


def _handed(pipeline: Pipeline, size: int, batches: int) -> list[float]:
    """When each of so many batches of `size` requests is handed over."""
    latencies = iter(pipeline.latency.draw(_MOST_REQUESTS))
    events = [(0.0, _BEGINS, batch) for batch in range(min(batches, 1 + pipeline.batches_ahead))]
    waiting, free, half = deque[int](), pipeline.in_flight, pipeline.thread_seconds / 2
    coming, ready, handed = [size] * batches, [0.0] * batches, list[float]()
    thread = admitted = line = decoded = 0.0
    while len(handed) < batches:
        now, event, batch = heapq.heappop(events)
        if event == _BEGINS:
            thread = max(thread, now)
            waiting.extend([batch] * size)
        elif event == _ANSWERS:
            line = max(line, now) + pipeline.line_seconds
            heapq.heappush(events, (max(line, now + pipeline.transfer_seconds), _ARRIVES, batch))
        else:
            thread = max(thread, now) + half
            free += 1
            decoded = max(decoded, thread) + pipeline.decode_seconds
            ready[batch] = max(ready[batch], decoded)
            coming[batch] -= 1
        while len(handed) < batches and not coming[len(handed)]:
            handed.append(max(ready[len(handed)], handed[-1] if handed else 0.0))
            if len(handed) + pipeline.batches_ahead < batches:
                heapq.heappush(events, (handed[-1], _BEGINS, len(handed) + pipeline.batches_ahead))
        while waiting and free:
            thread += half
            free -= 1
            begun = max(thread, admitted)
            admitted = begun + pipeline.admission_seconds
            heapq.heappush(events, (begun + next(latencies), _ANSWERS, waiting.popleft()))
    return handed
