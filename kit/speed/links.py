"""links: what joins devices, and how long gradients and parameters travel over it; pure arithmetic.

A ring of n ranks on a link of B bytes a second each way and α seconds a message needs, for S bytes that all
ranks have:

    all-reduce                  2 (n - 1) / n × S / B + 2 (n - 1) α      (Patarasuk and Yuan 2009)
    all-gather, reduce-scatter    (n - 1) / n × S / B +   (n - 1) α

ddp all-reduces the gradients. fsdp gathers the parameters twice and scatters the gradients once, half as much again
(Rajbhandari et al. 2020); fsdp:R:S does so over S ranks, and all-reduces the shards of gradients over R. A ring that
crosses nodes has the speed of the network between them. Bytes travel in pieces while the backward pass computes: a
piece is sent when its part of the pass is done, pieces follow each other, and the last of them is always waited for:

    waited for = max(seconds / pieces, seconds - backward × (1 - 1 / pieces))

What arrives is written to a device's memory, and what is sent on is read from it: an all-gather writes the whole and
reads it once, a reduce-scatter reads the rank's own part too. So a hidden exchange is not free.

A link between ranks that are here is measured (`kit.speed.timing_job`), and collectives reach what was measured. So is
how much later the last of them comes to a collective.

Known error: a link never reaches the rate its maker states; a fraction of it is assumed, with a range. At hundreds of
ranks NCCL uses trees, whose latency grows with log n: there the ring is pessimistic. Other traffic is not counted.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from kit.errors import PlanError

Reached = Literal["usual", "least", "most"]
STATED_REACHED: dict[Reached, float] = {"usual": 0.7, "least": 0.4, "most": 0.95}
"""The fraction of the stated bytes per second that a collective reaches. An assumption."""
MEASURED_REACHED: dict[Reached, float] = {"usual": 1.0, "least": 0.7, "most": 1.2}
"""The same of a rate that was measured with nothing else under way."""
_USUAL_SECONDS = 0.05
PIECE_BYTES = 25 << 20
"""Gradients that ddp sends at a time (`bucket_cap_mb` of torch's DistributedDataParallel)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins two devices of a ring."""

    name: str
    bytes_per_second: float
    """Each way, as its maker states it: of one device within a node, of all adapters of a node between nodes."""
    latency_seconds: float
    """Of one message."""
    measured: bool = False
    """Whether all is what collectives reached here, and not what a maker states."""
    lateness: float = 0.0
    """Root seconds: ranks that all work for t seconds meet `lateness × √t` after they would alone. What holds a rank up
    (a turn of another at its core, pages, interrupts) adds up at random, so that it grows as the root of their time."""

    def reached_bytes_per_second(self, reached: Reached) -> float:
        """What a collective reaches."""
        return self.bytes_per_second * (MEASURED_REACHED if self.measured else STATED_REACHED)[reached]

    def late_seconds(self, work_seconds: float) -> float:
        """For which ranks that work so long wait for the last of them."""
        return self.lateness * math.sqrt(work_seconds)

    def slowed(self, factor: float) -> Link:
        """The same where all takes so many times as long."""
        return replace(
            self, bytes_per_second=self.bytes_per_second / factor, latency_seconds=self.latency_seconds * factor,
            lateness=self.lateness * math.sqrt(factor),
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not self.latency_seconds >= 0 or not self.lateness >= 0:
            raise PlanError(f"{self.name}: a link needs more than 0 bytes/s and no negative latency or lateness")


# Makers' data sheets; latencies are the order of magnitude that nccl-tests shows for small messages.
LINKS = (
    Link(name="NVLink-5", bytes_per_second=900e9, latency_seconds=5e-6),
    Link(name="NVLink-4", bytes_per_second=450e9, latency_seconds=5e-6),
    Link(name="NVLink-3", bytes_per_second=300e9, latency_seconds=5e-6),
    Link(name="NVLink-2", bytes_per_second=150e9, latency_seconds=5e-6),
    Link(name="PCIe-5", bytes_per_second=63e9, latency_seconds=10e-6),
    Link(name="PCIe-4", bytes_per_second=31.5e9, latency_seconds=10e-6),
    Link(name="PCIe-3", bytes_per_second=15.8e9, latency_seconds=10e-6),
    Link(name="network-3200G", bytes_per_second=400e9, latency_seconds=20e-6),
    Link(name="network-1600G", bytes_per_second=200e9, latency_seconds=20e-6),
    Link(name="network-400G", bytes_per_second=50e9, latency_seconds=20e-6),
    Link(name="network-100G", bytes_per_second=12.5e9, latency_seconds=30e-6),
    Link(name="network-25G", bytes_per_second=3.125e9, latency_seconds=50e-6),
    Link(name="network-10G", bytes_per_second=1.25e9, latency_seconds=50e-6),
    Link(name="loopback", bytes_per_second=2e9, latency_seconds=100e-6),
)
"""By name; `loopback` is gloo between processes of one machine."""
DEVICES_OF_NODE = 8
"""By default, as in most machines with GPUs."""
_WITHIN = {
    "B200": "NVLink-5", "H100": "NVLink-4", "H200": "NVLink-4", "A100": "NVLink-3", "V100": "NVLink-2",
    "T4": "PCIe-3", "RTX-5090": "PCIe-5",
}  # fmt: skip
_GATHERED, _SCATTERED = 2, 3
"""Accesses of a device's memory for a byte that another rank has: written and read to be sent on; and its own read."""


def find_link(name: str | Link) -> Link:
    """The link of that name.

    Raises:
        PlanError: for an unknown one, with the closest.
    """
    if isinstance(name, Link):
        return name
    known = {link.name.lower(): link for link in LINKS}
    if name.lower() in known:
        return known[name.lower()]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {known[close[0]].name!r}?" if close else f"known are {', '.join(x.name for x in LINKS)}"
    raise PlanError(f"{name!r} is no link in the table; {hint}, or give a Link of your own")


def link_within(device: str) -> Link:
    """What usually joins devices of this name in one node: `loopback` for the CPU, PCIe 4 where nothing is known."""
    if device.strip().lower() in ("cpu", ""):
        return find_link("loopback")
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    named = next((link for model, link in _WITHIN.items() if set(model.lower().split("-")) <= words), "PCIe-4")
    return find_link(named)


def all_reduce_seconds(size_bytes: float, ranks: int, link: Link, reached: Reached = "usual") -> float:
    """Until all ranks have the sum."""
    return 2 * all_gather_seconds(size_bytes, ranks, link, reached)


def meeting_seconds(link: Link, ranks: int) -> float:
    """For a bucket of gradients after a step of usual length: by this of two links one is the faster."""
    return all_reduce_seconds(PIECE_BYTES, ranks, link) + link.late_seconds(_USUAL_SECONDS)


def all_gather_seconds(size_bytes: float, ranks: int, link: Link, reached: Reached = "usual") -> float:
    """Until all ranks have the whole of which each had a part; to scatter sums takes as long."""
    hops = max(1, ranks) - 1
    return hops / (hops + 1) * size_bytes / link.reached_bytes_per_second(reached) + hops * link.latency_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that ranks exchange in one optimizer step."""

    parameter_bytes: float
    """Of the whole model, as they are gathered."""
    gradient_bytes: float
    """Of the whole model, as they are reduced."""
    strategy: str
    """ddp, fsdp or fsdp:R:S; of one device, what it would be with several."""

    @property
    def pieces(self) -> int:
        return max(1, math.ceil(self.gradient_bytes / PIECE_BYTES))

    def shards(self, ranks: int) -> int:
        """Ranks that share one copy of the model; 1 where each has its own."""
        name, *sizes = self.strategy.split(":")
        if name != "fsdp":
            return 1
        return math.gcd(ranks, int(sizes[1])) if sizes else ranks

    def memory_bytes(self, ranks: int) -> float:
        """Of a device's own memory, read and written by the exchange of an optimizer step."""
        size, replicas = self.shards(ranks), ranks // self.shards(ranks)
        lacking, others = (size - 1) / size, (replicas - 1) / replicas
        gathered = 2 * _GATHERED * self.parameter_bytes + _SCATTERED * self.gradient_bytes
        return lacking * gathered + others * (_GATHERED + _SCATTERED) * self.gradient_bytes / size

    def seconds(self, ranks: int, within: Link, between: Link | None, node: int, reached: Reached = "usual") -> float:
        """Of an optimizer step, if nothing else went on.

        Args:
            ranks: All of them.
            within: What joins the devices of a node.
            between: What joins nodes; needed for more ranks than a node has.
            node: Devices of a node.
            reached: How much of their bytes per second the links reach.
        """
        size = self.shards(ranks)
        inner = within if size <= node or between is None else between
        outer = within if ranks <= node or between is None else between
        gathered = 2 * self.parameter_bytes + self.gradient_bytes  # by two gathers and one scatter
        shared = 3 * all_gather_seconds(gathered / 3, size, inner, reached) if size > 1 else 0.0
        return shared + all_reduce_seconds(self.gradient_bytes / size, ranks // size, outer, reached)


def waited_for(seconds: float, work_seconds: float, pieces: int) -> float:
    """Of the seconds of an exchange, those that a backward pass of `work_seconds` does not hide."""
    return max(seconds / pieces, seconds - work_seconds * (1 - 1 / pieces))
