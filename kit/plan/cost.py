"""What a layout costs: predicted seconds per batch from requests, bytes, latency and bandwidth.

A connection serves one request after another, each in `latency + chunk bytes / bandwidth`; `in flight` of them work
side by side, and together they cannot pass the total bandwidth when one is given:

    seconds per batch = max((requests × latency + bytes / bandwidth) / in flight, bytes / total bandwidth)
    in flight = min(requests in flight allowed, requests per batch × (1 + batches ahead))

requests per batch is the expected number of different chunks the whole batch touches, times the variables: each chunk
is fetched once. Bytes are whole chunks, uncompressed. This is Little's law for a closed system.

Known error: against a simulated cloud (30 ms, 80 MB/s a connection, 400 MB/s in total, 64 in flight, 64 KiB patches)
it predicts 527 and 685 samples/s for chunks of once and twice the patch's side; engines and plain GETs measured 414–514
and 624–754. Not counted: decoding, compression (fewer bytes than said), limits on the request rate (object stores start
near 5,000 reads a second and bucket), shard indexes (one more request a shard, once), neighbouring chunks read by one
request, caches, and the other ranks that share the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kit.errors import PlanError
from kit.plan.geometry import axes_of, distinct_chunks
from kit.units import format_bytes, format_seconds

Bound = Literal["latency", "bandwidth", "total bandwidth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a batch reads: `batch_size` patches of `variables` arrays of one shape. Sequences are in dimension order."""

    shape: tuple[int, ...]
    itemsize: int
    patch: tuple[int, ...]
    stride: tuple[int, ...]
    order: Literal["random", "grid"]
    batch_size: int
    variables: int

    def __post_init__(self) -> None:
        for name in ("itemsize", "batch_size", "variables"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}, but must be at least 1")

    @property
    def patch_bytes(self) -> int:
        """Bytes of the patch in one variable."""
        return math.prod(self.patch) * self.itemsize

    @property
    def free_dimensions(self) -> int:
        """Dimensions along which a patch can move."""
        return sum(size < extent for size, extent in zip(self.patch, self.shape, strict=True))

    @property
    def steps(self) -> tuple[int, ...]:
        """Distance between offsets: the stride on a grid, every element in random order."""
        return self.stride if self.order == "grid" else (1,) * len(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between the store and the reader."""

    latency_seconds: float
    """Time to the first byte of a request."""
    bandwidth_bytes_per_second: float
    """Of one connection."""
    requests_in_flight: int
    total_bandwidth_bytes_per_second: float = math.inf
    """Of all connections together."""
    batches_ahead: int = 0

    def __post_init__(self) -> None:
        if self.requests_in_flight < 1:
            raise PlanError(f"requests_in_flight is {self.requests_in_flight}, but must be at least 1")
        if self.latency_seconds < 0 or self.batches_ahead < 0:
            raise PlanError("latency_seconds and batches_ahead must be at least 0")
        for name in ("bandwidth_bytes_per_second", "total_bandwidth_bytes_per_second"):
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
class LayoutCost:
    """One size of chunk, priced. Expected values over offsets, all variables together."""

    chunk: tuple[int, ...]
    chunk_bytes: int
    requests_per_sample: float
    bytes_per_sample: float
    amplification: float
    """Bytes read per byte of patch, for one sample on its own."""
    requests_per_batch: float
    """Different chunks of the whole batch: each is fetched once."""
    bytes_per_batch: float
    seconds_per_batch: float
    samples_per_second: float
    bound: Bound
    """The larger part of the time: waiting for first bytes, transferring, or the total bandwidth."""


def price(access: Access, network: Network, chunk: Sequence[int]) -> LayoutCost:
    """The cost of reading batches with chunks of this size.

    Raises:
        PlanError: for sizes below 1 or a patch larger than its array.
    """
    axes = axes_of(access.shape, chunk, access.patch, access.steps)
    chunk_bytes = math.prod(chunk) * access.itemsize
    per_sample = math.prod(axis.mean for axis in axes) * access.variables
    union = distinct_chunks(axes, access.batch_size, replacement=access.order == "random") * access.variables
    seconds, bound = _seconds(network, union, union * chunk_bytes)
    return LayoutCost(
        chunk=tuple(chunk), chunk_bytes=chunk_bytes, requests_per_sample=per_sample,
        bytes_per_sample=per_sample * chunk_bytes,
        amplification=per_sample * chunk_bytes / (access.patch_bytes * access.variables),
        requests_per_batch=union, bytes_per_batch=union * chunk_bytes, seconds_per_batch=seconds,
        samples_per_second=access.batch_size / seconds, bound=bound,
    )  # fmt: skip


def _seconds(network: Network, requests: float, bytes_read: float) -> tuple[float, Bound]:
    """Seconds per batch and what they are mostly spent on."""
    in_flight = network.in_flight(requests)
    waiting = requests * network.latency_seconds / in_flight
    transferring = bytes_read / network.bandwidth_bytes_per_second / in_flight
    capped = bytes_read / network.total_bandwidth_bytes_per_second
    if capped > waiting + transferring:
        return capped, "total bandwidth"
    return waiting + transferring, "latency" if waiting > transferring else "bandwidth"


def balanced_ratio(access: Access, network: Network) -> float:
    """Side of the fastest chunk over the side of the patch, in random order, when one connection's terms decide.

    Minimising `(1 + S/c)^d (latency + k c^d)` over c, with d dimensions along which the patch can move and k bytes per
    c^d over the bandwidth, gives `c / S = (latency × bandwidth / patch bytes)^(1 / (d + 1))`. So chunk = patch is the
    fastest exactly when a patch holds latency × bandwidth bytes. Chunks shared within a batch and edges are left out.
    """
    return float((network.break_even_bytes / access.patch_bytes) ** (1 / (access.free_dimensions + 1)))


def describe(network: Network) -> str:
    """The network in one phrase, as reasons name it."""
    total = network.total_bandwidth_bytes_per_second
    cap = "" if math.isinf(total) else f", {format_bytes(total)}/s in total"
    return (
        f"{format_seconds(network.latency_seconds)} to the first byte, "
        f"{format_bytes(network.bandwidth_bytes_per_second)}/s a connection, "
        f"{network.requests_in_flight} in flight{cap}"
    )
