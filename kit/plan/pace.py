"""Pace: seconds per batch of a pipeline that is played out request by request, where the mean of each is not enough.

`kit.plan.cost` takes every request at its mean latency. But batches are handed over in order, and one slow request
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
from dataclasses import dataclass

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
