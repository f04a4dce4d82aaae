"""Resources: the network between store and readers, the host that decodes, and what the store charges.

Seconds, bytes and bytes per second throughout; infinity stands for no limit. The one invariant: no resource is negative
or empty, so that a price can always be divided by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kit.errors import PlanError
from kit.units import format_bytes, format_count, format_seconds

HOLES_SHARE = 8
"""This part of a loader's memory is left for what the allocator holds and nobody uses, between two times that it is
handed back."""
READY_TOO = 2
"""Bytes in flight and as many ready to be decoded; more would only wait."""
LENT_SHARE = 2
"""This part of the memory that is left then may hold chunks that are lent: a chunk may lie in one piece of memory with
others that came or were decoded together, and keeps it until all of them have gone."""
OPENING_BYTES = 12 << 20
"""What a process grows by when it opens a store, beside a loader's memory, once and whatever it reads: code that runs
for the first time, threads and connections. Measured up to this with 256 requests in flight."""
_BYTES_PER_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between the store and the readers."""

    latency_seconds: float
    """Mean time to the first byte of a request."""
    bandwidth_bytes_per_second: float
    """Of one connection."""
    requests_in_flight: int
    """Of one rank."""
    total_bandwidth_bytes_per_second: float = math.inf
    """Of all connections of all ranks together."""
    requests_per_second: float = math.inf
    """What the store answers, all ranks together."""
    batches_ahead: int = 0
    latency_deviation_seconds: float = 0.0
    """Standard deviation of the time to the first byte: batches wait for their slowest request."""

    def __post_init__(self) -> None:
        if self.requests_in_flight < 1:
            raise PlanError(f"requests_in_flight is {self.requests_in_flight}, but must be at least 1")
        if min(self.latency_seconds, self.latency_deviation_seconds, self.batches_ahead) < 0:
            raise PlanError("latency_seconds, latency_deviation_seconds and batches_ahead must be at least 0")
        for name in ("bandwidth_bytes_per_second", "total_bandwidth_bytes_per_second", "requests_per_second"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be above 0")

    @property
    def break_even_bytes(self) -> float:
        """Latency × bandwidth: a request of this size waits as long as it transfers."""
        return self.latency_seconds * self.bandwidth_bytes_per_second

    def in_flight(self, requests: float) -> float:
        """Requests really open at once when a batch has this many."""
        return min(self.requests_in_flight, max(1.0, requests * (1 + self.batches_ahead)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What one rank decodes and keeps chunks with."""

    decode_bytes_per_second: float = math.inf
    """Decoded and copied into place by one thread."""
    decode_threads: int = 1
    request_cpu_seconds: float = 0.0
    """Of one request, in the one thread that makes them."""
    memory_bytes: float = math.inf
    """For batches, chunks being read and decoded, cache, windows, and the holes that they leave."""
    cache_bytes: int = 0
    """For decoded chunks kept for later batches; unused in block order."""

    def __post_init__(self) -> None:
        for name in ("decode_bytes_per_second", "decode_threads", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be above 0")
        if self.request_cpu_seconds < 0 or self.cache_bytes < 0:
            raise PlanError("request_cpu_seconds and cache_bytes must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the store charges, in the user's currency; None where unknown."""

    per_thousand_reads: float | None = None
    per_gigabyte: float | None = None
    """Of 10^9 bytes that leave the store."""

    def of(self, requests: float, stored_bytes: float) -> float | None:
        """The price of so many requests and bytes; None when no price is known."""
        if self.per_thousand_reads is None and self.per_gigabyte is None:
            return None
        reads = requests / 1000 * (self.per_thousand_reads or 0.0)
        return reads + stored_bytes / _BYTES_PER_GIGABYTE * (self.per_gigabyte or 0.0)


def describe(network: Network) -> str:
    """The network in one phrase, as reasons name it."""
    total, rate = network.total_bandwidth_bytes_per_second, network.requests_per_second
    cap = "" if math.isinf(total) else f", {format_bytes(total)}/s in total"
    limit = "" if math.isinf(rate) else f", {format_count(rate)} requests/s allowed"
    return (
        f"{format_seconds(network.latency_seconds)} to the first byte, "
        f"{format_bytes(network.bandwidth_bytes_per_second)}/s a connection, "
        f"{network.requests_in_flight} in flight{cap}{limit}"
    )
