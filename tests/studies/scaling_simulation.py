"""A pipeline of ranks played out batch by batch: loaders with jitter, one store for all, and gradients in pieces."""

import random
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """What every rank has; seconds of a batch."""

    forward: float
    backward: float
    load: float
    jitter: float
    """Standard deviation of forward, backward and load, over their means."""
    requests: float = 0.0
    """Of a batch, on one rank."""
    requests_per_second: float = 1e9
    pieces: int = 1
    ahead: int = 2


@dataclass(frozen=True, kw_only=True)
class Played:
    """Means of one rank, after the pipeline has filled."""

    seconds: float
    train: float
    backward: float
    deviation: float
    wait: float


def play(world, ranks, exchange_seconds, batches=400, seed=3):
    """Seconds of a batch on all ranks, and what the first rank saw."""
    draw = random.Random(seed)
    store = end = 0.0
    loaded = [0.0] * ranks
    started: list[float] = []
    train, waits, ends = [], [], []
    for batch in range(batches):
        freed = started[batch - world.ahead - 1] if batch > world.ahead else 0.0
        begin = []
        for rank in range(ranks):
            load = max(loaded[rank], freed)
            store = max(store, load) + world.requests / world.requests_per_second
            loaded[rank] = max(load + _drawn(draw, world.load, world.jitter), store)
            begin.append(max(end, loaded[rank]))
        parts = [(_drawn(draw, world.forward, world.jitter), _drawn(draw, world.backward, world.jitter)) for _ in begin]
        waits.append(begin[0] - end)
        train.append(sum(parts[0]))
        started.append(max(begin))
        end = _exchanged(world, begin, parts, exchange_seconds)
        ends.append(end)
    half = batches // 2
    return Played(
        seconds=(ends[-1] - ends[half - 1]) / (batches - half), train=statistics.fmean(train[half:]),
        backward=world.backward, deviation=statistics.stdev(train[half:]), wait=statistics.fmean(waits[half:]),
    )  # fmt: skip


def _exchanged(world, begin, parts, seconds):
    """When the last piece has arrived everywhere."""
    end = 0.0
    for piece in range(1, world.pieces + 1):
        ready = (start + ahead + back * piece / world.pieces for start, (ahead, back) in zip(begin, parts, strict=True))
        end = max(end, *ready) + seconds / world.pieces if len(begin) > 1 else max(end, *ready)
    return end


def _drawn(draw, mean, jitter):
    return max(0.2 * mean, draw.gauss(mean, jitter * mean))
