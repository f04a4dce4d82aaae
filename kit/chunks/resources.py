"""Resources: the network between store and readers, the host that decodes, what the store charges, and the page cache.

Seconds, bytes and bytes per second throughout; infinity stands for no limit. The one invariant: no resource is negative
or empty, so that a price can always be divided by it.

A `WorkingSet` is an array of rows that a machine reads epoch after epoch. It fits the device, or the free memory (the
first epoch reads the disk, later ones do not), or neither (every epoch reads the disk again). Only batches are moved to
the device, so its peak is that of the model and one batch in all three cases. The share of an epoch that the page cache
answers, for a cache of the fraction c of the array that drops what was read longest ago, after the first epoch:

    rows in order         1 if c >= 1, else 0            the next row was always dropped just before
    rows at random        c + (1 - c) ln(1 - c)          each once an epoch, in an order drawn anew

The second: a row read at the fraction u of one epoch and v of the next has 1 - u (1 - v) of all rows read in between,
and is still there when that is at most c; u and v are independent and uniform. A block of rows counts as one row. The
system keeps part of what is read in order too, so a cache that shrinks by itself answers more than this, at most c.

Seconds of an epoch are its steps, each as long as the longer of computing and reading the next batch, since reading
goes on meanwhile: where both want the same cores or the same disk, that is too little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kit.chunks.requests import LOCAL_GAP_BYTES, Coalescing, Latency
from kit.errors import PlanError
from kit.units import format_bytes, format_count, format_seconds

HOLES_SHARE = 8
"""This part of a loader's memory is left for what the allocator holds and nobody uses, between two times that it is
handed back."""
READY_TOO = 2
"""Bytes in flight and as many ready to be decoded; more would only wait."""
TRANSIENT_SHARE = 2
"""This part of the memory that is left then may hold transient chunks, kept until their batches are whole: a chunk may
lie in one piece of memory with others that came or were decoded together, and keeps it until all of them have gone."""
KEPT_AT_ONCE = 0.5
"""Of the chunks of the batches ahead: decoded, and kept for batches that are not whole."""
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
    latency_slow_fraction: float = 0.0
    """Of the requests, those whose time to the first byte is longer by `latency_slow_factor`."""
    latency_slow_factor: float = 5.0
    in_folder: bool = False
    """Whether the store is a folder, where neighbours share a request across `LOCAL_GAP_BYTES` only."""

    def __post_init__(self) -> None:
        if self.requests_in_flight < 1:
            raise PlanError(f"requests_in_flight is {self.requests_in_flight}, but must be at least 1")
        if min(self.latency_seconds, self.latency_deviation_seconds, self.batches_ahead) < 0:
            raise PlanError("latency_seconds, latency_deviation_seconds and batches_ahead must be at least 0")
        if not (0 <= self.latency_slow_fraction <= 1 <= self.latency_slow_factor):
            given = f"{self.latency_slow_fraction} of requests slower by {self.latency_slow_factor}"
            raise PlanError(f"{given}: the fraction must be between 0 and 1, the factor at least 1")
        for name in ("bandwidth_bytes_per_second", "total_bandwidth_bytes_per_second", "requests_per_second"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be above 0")

    @property
    def latency(self) -> Latency:
        """How the times to the first byte are distributed."""
        return Latency(
            mean_seconds=self.latency_seconds, deviation_seconds=self.latency_deviation_seconds,
            slow_fraction=self.latency_slow_fraction, slow_factor=self.latency_slow_factor,
        )  # fmt: skip

    @property
    def coalescing(self) -> Coalescing:
        """Which neighbours in a shard are worth one request on it."""
        if self.in_folder:
            return Coalescing(LOCAL_GAP_BYTES)
        return Coalescing.of(
            self.latency_seconds, self.bandwidth_bytes_per_second, self.total_bandwidth_bytes_per_second,
            self.requests_in_flight,
        )  # fmt: skip

    @property
    def break_even_bytes(self) -> float:
        """Latency × bandwidth: a request of this size waits as long as it transfers."""
        return self.latency_seconds * self.bandwidth_bytes_per_second

    def in_flight(self, requests: float) -> float:
        """Requests really open at once when a batch has this many."""
        return min(self.requests_in_flight, max(1.0, requests * (1 + self.batches_ahead)))

    def __str__(self) -> str:
        total, rate = self.total_bandwidth_bytes_per_second, self.requests_per_second
        cap = "" if math.isinf(total) else f", {format_bytes(total)}/s in total"
        limit = "" if math.isinf(rate) else f", {format_count(rate)} requests/s allowed"
        return (
            f"{format_seconds(self.latency_seconds)} to the first byte, "
            f"{format_bytes(self.bandwidth_bytes_per_second)}/s a connection, {self.requests_in_flight} in flight"
            f"{cap}{limit}"
        )


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


Case = Literal["fits the device", "fits memory", "fits neither"]
Order = Literal["in order", "at random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """What reading costs on a machine, as measured."""

    memory_bytes_per_second: float
    """Rows at random that the page cache holds."""
    random_bytes_per_second: float
    """Rows at random from the disk, a batch asked for at once."""
    ordered_bytes_per_second: float
    """From the disk, in order."""

    def __post_init__(self) -> None:
        for name in ("memory", "random", "ordered"):
            if not getattr(self, f"{name}_bytes_per_second") > 0:
                raise PlanError(f"{name}_bytes_per_second must be above 0; measure it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """One array, one machine and one way of reading.

    Raises:
        PlanError: for an array of no bytes, and batches of no rows.
    """

    rows: int
    row_bytes: int
    """As stored."""
    batch_size: int
    """Rows of a step, on all ranks of the machine together."""
    step_seconds: float
    """Of computing, with a batch at hand."""
    free_memory_bytes: int
    """What the page cache may grow to."""
    device_bytes: int
    """What the device has beside the model."""
    order: Order = "at random"

    def __post_init__(self) -> None:
        if min(self.rows, self.row_bytes, self.batch_size) < 1:
            raise PlanError(f"{self.rows} rows of {self.row_bytes} bytes by {self.batch_size}: all must be at least 1")

    @property
    def data_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return math.ceil(self.rows / self.batch_size)

    @property
    def case(self) -> Case:
        if self.data_bytes <= self.device_bytes:
            return "fits the device"
        return "fits memory" if self.data_bytes <= self.free_memory_bytes else "fits neither"

    @property
    def cached_fraction(self) -> float:
        """Of the array, kept when an epoch ends."""
        return min(1.0, self.free_memory_bytes / self.data_bytes)

    @property
    def hit_fraction(self) -> float:
        """Of an epoch's rows, found in the cache; the first epoch after a cold start finds none."""
        return hit_fraction(self.cached_fraction, self.order)

    def read_seconds(self, rates: DiskRates) -> float:
        """Of one batch, being read alone."""
        hits, batch_bytes = self.hit_fraction, self.data_bytes / self.steps
        disk = rates.ordered_bytes_per_second if self.order == "in order" else rates.random_bytes_per_second
        return batch_bytes * (hits / rates.memory_bytes_per_second + (1 - hits) / disk)

    def epoch_seconds(self, rates: DiskRates) -> float:
        """Of an epoch, the next batch being read while one is trained on."""
        reading = self.read_seconds(rates)
        return self.steps * max(self.step_seconds, reading) + min(self.step_seconds, reading)

    def disk_bytes(self) -> float:
        """Read from the disk in an epoch."""
        return (1 - self.hit_fraction) * self.data_bytes

    def sentence(self, rates: DiskRates) -> str:
        """The prediction in words."""
        read = f"{self.hit_fraction:.0%} of it is in memory when it is asked for"
        seconds = format_seconds(self.epoch_seconds(rates))
        return f"{format_bytes(self.data_bytes)} {self.case}: {read}, an epoch takes about {seconds}"


def hit_fraction(cached_fraction: float, order: Order = "at random") -> float:
    """Of an epoch's rows, those that a cache still holds which drops what was read longest ago.

    Args:
        cached_fraction: Of the array, that the cache holds.
        order: Rows in order, or each once in an order drawn anew for every epoch.

    Raises:
        PlanError: for a fraction below 0.
    """
    if not cached_fraction >= 0:
        raise PlanError(f"{cached_fraction} of an array cannot be in the cache; give 0 or more")
    if cached_fraction >= 1:
        return 1.0
    if order == "in order":
        return 0.0
    return max(0.0, cached_fraction + (1 - cached_fraction) * math.log1p(-cached_fraction))
