"""Requests: how neighbours in an object share one, and how many requests a batch then takes. Sizes are bytes.

A gap of g bytes between two neighbours is worth reading when it takes less time than a second request would wait:

    g <= latency × bytes/s of a connection,   bytes/s = min(bandwidth, total bandwidth / requests in flight)

With all requests in flight a connection carries only its share of the total, so the gap shrinks as they grow; a gap far
larger reads far too much. One request carries no more than `LATENCIES` such amounts, so that neighbours still travel at
once; a longer run is cut between chunks.

Which chunks of a shard a batch reads is drawn, not derived: some batches of offsets from a generator with a fixed seed,
so that the same arguments give the same answer. Inner chunks lie in the order in which zarr-python writes them
(Morton's: the bits of their coordinates take turns, the first dimension's lowest first), so that neighbours along every
dimension are near each other, and are taken to be of one size. Known error: some per cent by chance; a shard that
another library wrote may lie in C order, which takes up to half as many requests again. In block order nothing is taken
to be shared, which is an upper bound; chunks outside shards have no neighbours.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Generic, Literal, TypeVar

from kit.chunks.geometry import Axis, place_of

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


_CHUNKS_DRAWN = 512
_MOST_BATCHES = 64
_MOST_RANKED = 1 << 16
"""Inner chunks of a shard; of more, those that a shape of powers of two would have between them count as there."""
Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Runs:
    """Of the chunks of one array, on average."""

    requests_per_chunk: float
    bytes_per_chunk: float
    """Bytes asked for, those between neighbours included, over the bytes of the chunks."""


ALONE = Runs(1.0, 1.0)
"""Each chunk by a request of its own."""


@lru_cache(maxsize=512)
def expected_runs(
    axes: tuple[Axis, ...],
    shard: Place,
    batch_size: int,
    stored_chunk_bytes: int,
    coalescing: Coalescing,
    order: Literal["random", "grid"],
    shuffle: bool,
    fetched: float = 1.0,
) -> Runs:
    """What a batch asks of shards with these sides.

    Args:
        fetched: Fraction of its chunks that are fetched for it; the others, any of them, are there or on their way.
    """
    per_shard = tuple(max(1, side // axis.chunk) for side, axis in zip(shard, axes, strict=True))
    counts = [axis.positions for axis in axes]
    everything = math.prod(counts)
    chunks = asked = requests = 0
    generator, chance = random.Random(0), random.Random(1)
    for _ in range(_MOST_BATCHES):
        if order == "random" or shuffle:
            batch = [tuple(generator.randrange(count) for count in counts) for _ in range(batch_size)]
        else:
            first = generator.randrange(everything)
            batch = [place_of((first + k) % everything, counts) for k in range(min(batch_size, everything))]
        for numbers in _chunks_of_shards(axes, per_shard, batch):
            left = [number for number in numbers if fetched == 1 or chance.random() < fetched]
            spans = [(number * stored_chunk_bytes, (number + 1) * stored_chunk_bytes, None) for number in left]
            found = runs(spans, coalescing)
            chunks, requests = chunks + len(spans), requests + len(found)
            asked += sum(run.last - run.first for run in found)
        if chunks >= _CHUNKS_DRAWN:
            break
    return Runs(requests / chunks, asked / (chunks * stored_chunk_bytes)) if chunks else ALONE


def _chunks_of_shards(axes: Sequence[Axis], per_shard: Place, positions: Sequence[Place]) -> Iterable[set[int]]:
    """Numbers of the inner chunks of each shard that patches at these positions, counted in strides, touch."""
    shards: defaultdict[Place, set[int]] = defaultdict(set)
    ranks = morton_numbers(per_shard, per_shard) if math.prod(per_shard) <= _MOST_RANKED else None
    for position in positions:
        offsets = [place * axis.stride for place, axis in zip(position, axes, strict=True)]
        touched = (
            range(first // axis.chunk, (first + axis.size - 1) // axis.chunk + 1)
            for first, axis in zip(offsets, axes, strict=True)
        )
        for chunk in product(*touched):
            inside = tuple(place % count for place, count in zip(chunk, per_shard, strict=True))
            number = ranks[inside] if ranks else _code(inside, per_shard)
            shards[tuple(place // count for place, count in zip(chunk, per_shard, strict=True))].add(number)
    return shards.values()


@lru_cache(maxsize=64)
def morton_numbers(per_shard: Place, limits: Place) -> dict[Place, int]:
    """Where each inner chunk lies in a shard, counted in chunks; those from `limits` on are not stored."""
    places = sorted(product(*map(range, limits)), key=lambda place: _code(place, per_shard))
    return {place: rank for rank, place in enumerate(places)}


@lru_cache(maxsize=64)
def c_numbers(limits: Place) -> dict[Place, int]:
    """The same where chunks lie in C order, the last dimension fastest."""
    return {place: rank for rank, place in enumerate(product(*map(range, limits)))}


def _code(place: Place, per_shard: Place) -> int:
    """Morton's number of a place: the bits of its coordinates in turn, as many as each dimension has."""
    bits = [(count - 1).bit_length() for count in per_shard]
    turns = ((bit, axis) for bit in range(max(bits)) for axis in range(len(bits)) if bit < bits[axis])
    return sum((place[axis] >> bit & 1) << position for position, (bit, axis) in enumerate(turns))
