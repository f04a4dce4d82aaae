"""Requests: how neighbours in an object share one, and how many requests a batch then takes. Sizes are bytes.

A gap of g bytes between two neighbours is worth reading when it takes less time than a second request would wait:

    g <= latency × bytes/s of a connection,   bytes/s = min(bandwidth, total bandwidth / requests in flight)

With all requests in flight a connection carries only its share of the total, so the gap shrinks as they grow; a gap far
larger reads far too much. One request carries no more than `LATENCIES` such amounts, so that neighbours still travel at
once; a longer run is cut between chunks.

Inner chunks lie in the order in which zarr-python writes them (Morton's: the bits of their coordinates take turns, the
first dimension's lowest first), so that neighbours along every dimension are near each other; other libraries write
them in C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

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
