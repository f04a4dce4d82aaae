"""Scaling: seconds per batch on many devices, predicted from the steps of a few, and the limit that decides.

The batch of a device stays the same, so n devices take n batches at once (weak scaling). Each limit alone needs:

    training           compute(n) + the part of the exchange that the backward pass does not hide + the slowest rank
    loading            seconds a rank's loader needs for a batch, from the measured wait
    store requests/s   n × requests of a batch / requests per second of the store
    store bandwidth    n × stored bytes of a batch / bytes per second of the store
    loader CPU         loading's CPU seconds × devices of a node / free cores of the node

    seconds per batch = the largest of them where batches are read ahead, else training + the largest of the others

On a CPU the ranks of a node share its cores: compute(n) = measured × cores that a rank used / cores it gets. The
slowest of n ranks is `deviation × E[largest of n normals]` behind the mean (Blom 1958). A count that was measured where
it will run takes what it took. For others, measurements at several counts correct two things: compute, by a factor for
each doubling of the ranks of a node, and exchange, by its place between what the backward pass leaves of it and the
whole: of an exchange that is nearly hidden, a factor would say nothing of another. The difference that both leave
unexplained widens the range.

The range is physical, not statistical. Low: the exchange hidden as well as possible on a link at its best, and all
ranks equally fast. High: nothing hidden on a link at its worst, the full spread of steps, ranks of a node that slow
each other where that was not measured, and a tenth more where two limits are close. The invariant: low <= seconds <=
high. `benchmarks/scaling.py` compares predictions with real ranks, `tests/studies` with a simulated pipeline.

The exchange is that of `kit.speed.links`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kit.chunks.requests import largest_normal
from kit.errors import PlanError
from kit.records.ratios import TRIAL_DEVIATION
from kit.speed.links import Link, Reached, Traffic, waited_for

Bound = Literal[
    "compute", "cores", "communication", "loading", "store requests/s", "store bandwidth", "loader CPU", "memory"
]
MOST_DEVICES = 4096
_NEAR_A_TIE = 0.1
"""The extra time of two limits that need equally long, from simulation."""
_UNMEASURED_CONTENTION = {"cpu": 0.3, "gpu": 0.05}
"""At most, for each doubling: ranks on a CPU share its caches and memory bus, GPUs their host and power. Assumptions;
on two cores a small GPT lost 18 % (`benchmarks/scaling.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch on each of `devices`, as measured: means over batches and ranks."""

    devices: int
    train_seconds: float
    """Forward, backward, optimizer, transfer and the rest, on one rank."""
    backward_seconds: float
    communication_seconds: float
    """That a rank waited for the others."""
    wait_seconds: float
    """That a rank waited for data."""
    deviation_seconds: float
    """Of the time to train one batch, robust: the middle half over 1.349."""
    most_deviation_seconds: float
    """The standard deviation of the same."""
    error_fraction: float
    """Standard error of the mean, over it."""

    @property
    def seconds(self) -> float:
        return self.train_seconds + self.communication_seconds + self.wait_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that run it."""

    on_cpu: bool
    devices_per_node: int
    cores_per_node: float
    within: Link
    between: Link | None
    threads_per_rank: int = 0
    """On the CPU; 0 shares the cores among the ranks."""

    def ranks(self, devices: int) -> int:
        """Of the fullest node."""
        return min(devices, self.devices_per_node)

    def at_once(self, devices: int) -> float:
        """Ranks of a node that compute at the same time: no more than it has cores, on the CPU."""
        ranks = self.ranks(devices)
        return max(1.0, min(ranks, self.cores_per_node)) if self.on_cpu else float(ranks)

    def cores_used(self, devices: int) -> float:
        """By each rank on the CPU."""
        ranks = self.ranks(devices)
        threads = self.threads_per_rank or max(1, int(self.cores_per_node // ranks))
        return min(float(threads), self.cores_per_node / ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How batches come, on one rank; the store's limits are those of all ranks together."""

    ahead: bool
    """Whether batches are read while others are trained."""
    seconds: float | None = None
    """Of one batch, where it is known: then the loader was what a step waited for."""
    cpu_seconds: float = 0.0
    """CPU seconds of one batch."""
    cores: float | None = None
    """That it keeps busy for these seconds; None where that is not known, so that it may want all that the rank has."""
    requests: float = 0.0
    """Of one batch."""
    stored_bytes: float = 0.0
    """Of one batch."""
    requests_per_second: float = math.inf
    bytes_per_second: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The prediction for one number of devices."""

    devices: int
    seconds_per_batch: float
    low_seconds: float
    high_seconds: float
    seconds_by_limit: tuple[tuple[Bound, float], ...]
    """Seconds each limit alone would need, the slowest first; compute and communication, which add up, apart."""
    bound: Bound

    def samples_per_second(self, batch_size: float) -> float:
        return self.devices * batch_size / self.seconds_per_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """The number of devices from which on this limit decides."""

    devices: int
    bound: Bound


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The measurements, and the prediction for any number of devices."""

    steps: tuple[Step, ...]
    """By rising number of devices."""
    traffic: Traffic
    cluster: Cluster
    loading: Loading
    steps_per_exchange: int = 1
    """Batches between two exchanges: gradients are accumulated meanwhile."""
    as_measured: bool = False
    """Whether the cluster is where the steps were measured: then a count that was measured takes what it took."""

    def __post_init__(self) -> None:
        counts = [step.devices for step in self.steps]
        if not counts or sorted(set(counts)) != counts or counts[0] < 1:
            raise PlanError(f"measurements at {counts} devices; each count once, rising, from 1")

    @property
    def base(self) -> Step:
        return self.steps[0]

    @property
    def fitted(self) -> bool:
        """Whether several counts were measured."""
        return len(self.steps) > 1

    # -- the prediction

    def at(self, devices: int) -> Point:
        """The prediction for so many devices.

        Raises:
            PlanError: for fewer than 1 or more than `MOST_DEVICES`.
        """
        if not 1 <= devices <= MOST_DEVICES:
            raise PlanError(f"{devices} devices; predictions go from 1 to {MOST_DEVICES}")
        compute, exchange, limits = self._compute(devices), self._exchange(devices), self._data_limits(devices)
        data, ahead = max(limits.values(), default=0.0), self.loading.ahead
        uncertain = self.base.error_fraction + self.unexplained_fraction

        def together(train: float) -> float:
            return max(train, data) if ahead else train + data

        seconds = together(compute + exchange)
        # A doubt is a factor either way: before any trial it may be more than a half, and a time is never nothing.
        low = together(self._compute(devices) + self._ring(devices, "most")) / (1 + uncertain)
        # With one count measured it is not known how much ranks slow each other.
        assumed = None if self.fitted else _UNMEASURED_CONTENTION["cpu" if self.cluster.on_cpu else "gpu"]
        straggling = self.base.most_deviation_seconds * largest_normal(devices)
        worst = max(exchange, self._full_ring(devices, "least") + straggling)
        train = self._compute(devices, assumed) + worst
        high = (together(train) + (_NEAR_A_TIE * min(train, data) if ahead else 0.0)) * (1 + uncertain)
        work: Bound = "cores" if self.cluster.on_cpu else "compute"
        each: dict[Bound, float] = {work: compute, "communication": exchange, **limits}
        known = next((step for step in self.steps if step.devices == devices), None) if self.as_measured else None
        if known is not None:
            seconds, doubt = known.seconds, 1 + known.error_fraction + TRIAL_DEVIATION
            low, high = seconds / doubt, seconds * doubt
        return Point(
            devices=devices, seconds_per_batch=seconds, low_seconds=min(seconds, low), high_seconds=max(seconds, high),
            seconds_by_limit=tuple(sorted(each.items(), key=lambda item: -item[1])),
            bound=self._bound(devices, compute, exchange, limits),
        )  # fmt: skip

    def caps(self, most: int) -> tuple[Cap, ...]:
        """The limit at one device, and every change of it up to `most`."""
        found: list[Cap] = []
        for devices in range(1, most + 1):
            bound = self.at(devices).bound
            if not found or found[-1].bound != bound:
                found.append(Cap(devices=devices, bound=bound))
        return tuple(found)

    def _bound(self, devices: int, compute: float, exchange: float, limits: dict[Bound, float]) -> Bound:
        slowest = max(limits, key=lambda name: limits[name], default=None)
        if slowest is not None and limits[slowest] > compute + exchange:
            return slowest
        if exchange > compute:
            return "communication"
        crowded = self.cluster.on_cpu and self.cluster.cores_used(devices) < self.cluster.cores_used(1)
        return "cores" if crowded else "compute"

    # -- its parts

    def _compute(self, devices: int, contention: float | None = None) -> float:
        """Of one batch on one rank."""
        seconds = self.base.train_seconds
        if self.cluster.on_cpu:
            seconds *= self.cluster.cores_used(self.base.devices) / self.cluster.cores_used(devices)
        rate = self.contention if contention is None else contention
        return seconds * math.pow(1 + rate, self._doublings(devices))

    def _doublings(self, devices: int) -> float:
        """Of the ranks of a node that compute at once, from the fewest measured."""
        return math.log2(self.cluster.at_once(devices) / self.cluster.at_once(self.base.devices))

    def _exchange(self, devices: int) -> float:
        """Seconds a rank waits for the others, each batch."""
        hidden, whole = self._exchange_bounds(devices)
        place = self.exchange_place
        if place <= 1:
            return hidden * place
        return hidden + (place - 1) * (whole - hidden) if place <= 2 else whole * (place - 1)

    def _exchange_bounds(self, devices: int) -> tuple[float, float]:
        """With the backward pass hiding what it can, and nothing; the slowest rank in both."""
        if devices == 1:
            return 0.0, 0.0
        straggling = self.base.deviation_seconds * largest_normal(devices)
        return self._ring(devices, "usual") + straggling, self._full_ring(devices, "usual") + straggling

    def _ring(self, devices: int, reached: Reached) -> float:
        """The part of an exchange that the backward pass does not hide, spread over the batches between two."""
        seconds = self._full_ring(devices, reached) * self.steps_per_exchange
        hiding = self.base.backward_seconds * self._compute(devices) / max(self.base.train_seconds, 1e-12)
        hidden = waited_for(seconds, hiding, self.traffic.pieces) if devices > 1 else 0.0
        return hidden / self.steps_per_exchange

    def _full_ring(self, devices: int, reached: Reached) -> float:
        cluster = self.cluster
        seconds = self.traffic.seconds(devices, cluster.within, cluster.between, cluster.devices_per_node, reached)
        return seconds / self.steps_per_exchange

    def _data_limits(self, devices: int) -> dict[Bound, float]:
        """Seconds that each limit of the data alone would need for a batch on every rank."""
        loading, cluster = self.loading, self.cluster
        found: dict[Bound, float] = {}
        if loading.seconds is not None:
            found["loading"] = loading.seconds * (self._loaders_slowed(devices) if cluster.on_cpu else 1.0)
        if loading.requests and math.isfinite(loading.requests_per_second):
            found["store requests/s"] = devices * loading.requests / loading.requests_per_second
        if loading.stored_bytes and math.isfinite(loading.bytes_per_second):
            found["store bandwidth"] = devices * loading.stored_bytes / loading.bytes_per_second
        if loading.cpu_seconds:
            ranks = cluster.ranks(devices)
            left = max(cluster.cores_per_node - ranks, cluster.cores_per_node / 2)
            found["loader CPU"] = loading.cpu_seconds * ranks / left
        return found

    def _loaders_slowed(self, devices: int) -> float:
        """How many times as long a loader takes as in the measurement, where ranks share the cores."""
        cluster, base, cores = self.cluster, self.base.devices, self.loading.cores
        if cores is None:
            return max(1.0, cluster.cores_used(base) / cluster.cores_used(devices))
        now, before = (max(1.0, cluster.ranks(many) * cores / cluster.cores_per_node) for many in (devices, base))
        return max(1.0, now / before)

    # -- fitted to several measurements

    @cached_property
    def contention(self) -> float:
        """How much slower compute is for each doubling of the ranks of a node: 0.1 is a tenth.

        Least squares through the first measurement, in logarithms; never negative.
        """
        doublings = [self._doublings(step.devices) for step in self.steps[1:]]
        slowdowns = [math.log(x.train_seconds / self._compute(x.devices, contention=0.0)) for x in self.steps[1:]]
        across = sum(x * x for x in doublings)
        slope = sum(x * y for x, y in zip(doublings, slowdowns, strict=True)) / across if across else 0.0
        return max(0.0, math.exp(slope) - 1)

    @cached_property
    def exchange_place(self) -> float:
        """Where measured exchanges lie, the median: 1 as the formulas say, 2 where nothing of them is hidden.

        Below 1 it is their factor, above 2 one more than that of the whole; 1 where no count above one was measured.
        """
        found = []
        for step in self.steps:
            (hidden, whole), spent = self._exchange_bounds(step.devices), step.communication_seconds
            if whole <= 0:
                continue
            if spent <= hidden:
                found.append(spent / hidden if hidden else 0.0)
            else:
                found.append(1 + (spent / whole if spent > whole else (spent - hidden) / (whole - hidden)))
        return statistics.median(found or [1.0])

    @property
    def exchange_words(self) -> str:
        """How the exchanges that were measured stand to the formulas."""
        place = self.exchange_place
        if place <= 1:
            return f"exchange takes {place:.2f} of the formulas"
        if place <= 2:
            return f"{place - 1:.0%} of the exchange that the backward pass could hide is waited for"
        return f"exchange takes {place - 1:.2f} of the formulas, with nothing of it hidden"

    @cached_property
    def unexplained_fraction(self) -> float:
        """Largest difference between a measurement and the fit; 0 for a single measurement."""
        if not self.fitted:
            return 0.0
        predicted = (self._compute(step.devices) + self._exchange(step.devices) for step in self.steps)
        measured = (step.train_seconds + step.communication_seconds for step in self.steps)
        return max(abs(theirs / mine - 1) for mine, theirs in zip(predicted, measured, strict=True))


def counts_up_to(most: int) -> Sequence[int]:
    """Powers of two, and the number itself."""
    powers = [1 << place for place in range(most.bit_length()) if 1 << place <= most]
    return powers if powers[-1] == most else [*powers, most]
