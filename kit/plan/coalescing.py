"""Coalescing: neighbours in an object are read by one request where that costs less than two. Sizes are bytes.

A gap of g bytes between two neighbours is worth reading when it takes less time than a second request would wait:

    g <= latency × bytes/s of a connection,   bytes/s = min(bandwidth, total bandwidth / requests in flight)

With all requests in flight a connection carries only its share of the total, so the gap shrinks as they grow; a gap far
larger reads far too much. One request carries no more than `LATENCIES` such amounts, so that neighbours still travel at
once; a longer run is cut between chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
