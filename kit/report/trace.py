"""Trace: the step events of one trial as plain numbers: memory per rank, throughput of all ranks, where time went.

Bytes, seconds, samples per second and fractions; nothing is drawn here and no file is read. A trace takes events one by
one, so that a live chart pays only for what is new. A step counts towards throughput once every rank has reported it,
and it lasts as long as its slowest rank, a validation before it left out (in the shares it is not). The first
`warmup_steps` steps are kept in every series and left out of every average. A series of more than `LARGEST_SERIES`
points is binned: memory keeps the largest value of a bin, because a peak must not be averaged away; throughput keeps
samples over seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.config import Config
from kit.events import Event, number
from kit.units import format_bytes, format_count

LARGEST_SERIES = 400
"""More than one point a pixel of a chart column cannot be seen, and makes a live chart slow."""
PHASES = ("wait", "transfer", "forward", "backward", "optimizer", "communication", "validation", "other")
PHASE_LABELS = {"wait": "data wait", **{phase: phase for phase in PHASES[1:]}}
MEMORY_KINDS = ("host_rss_bytes", "device_allocated_bytes", "device_reserved_bytes")

Series = tuple[tuple[float, ...], tuple[float, ...]]
"""Steps and values, each `(point,)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """What each rank held after each step, in bytes."""

    ranks: tuple[int, ...]
    host_rss_bytes: dict[int, Series]
    device_allocated_bytes: dict[int, Series]
    """Empty on the CPU."""
    device_reserved_bytes: dict[int, Series]
    warmup_steps: int
    max_steps: int
    reported_host_rss_bytes: float = 0.0
    """The largest that a rank reported at its end: what lay between two steps is in it too."""

    def largest(self, kind: str) -> float:
        """The largest value of one kind after any step, over all ranks; NaN when there is none."""
        series: dict[int, Series] = getattr(self, kind)
        return max((value for _, values in series.values() for value in values), default=math.nan)

    def peak(self, kind: str) -> float:
        """The largest value of one kind that is known of, over all ranks; NaN when there is none."""
        seen, reported = self.largest(kind), self.reported_host_rss_bytes if kind == "host_rss_bytes" else 0.0
        return reported if reported and not seen >= reported else seen

    @property
    def has_device(self) -> bool:
        return bool(self.device_allocated_bytes)

    @property
    def sentence(self) -> str:
        """What the panel shows, for those who do not see it."""
        if not self.ranks:
            return "Memory per rank by step: nothing measured yet."
        text = f"Memory per rank by step, {_count(len(self.ranks), 'rank')}: "
        text += f"peak host RSS {format_bytes(self.peak('host_rss_bytes'))}"
        if self.has_device:
            text += f", peak device memory allocated {format_bytes(self.peak('device_allocated_bytes'))}"
            text += f" and reserved {format_bytes(self.peak('device_reserved_bytes'))}"
        return text + "."


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputInfo:
    """How fast all ranks together went, and on what their time was spent."""

    steps: tuple[float, ...]
    samples_per_second: tuple[float, ...]
    """Samples of all ranks over the seconds of the slowest, per step `(point,)`."""
    shares: dict[str, tuple[float, ...]]
    """For each of `PHASES` the fraction of the time of all ranks `(point,)`; a point's fractions add to 1."""
    mean_samples_per_second: float
    """Over the steps after warm-up; NaN before there is one."""
    data_wait_fraction: float
    mean_shares: dict[str, float]
    measured_steps: int
    warmup_steps: int
    max_steps: int

    @property
    def sentence(self) -> str:
        """What the panel shows, for those who do not see it."""
        if not self.measured_steps:
            return f"Throughput: nothing measured yet after {_count(self.warmup_steps, 'warm-up step')}."
        return (
            f"Throughput over {_count(self.measured_steps, 'step')} after warm-up: "
            f"{format_count(self.mean_samples_per_second)} samples/s, "
            f"{self.data_wait_fraction:.0%} of the time spent waiting for data."
        )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(slots=True)
class _Step:
    """One optimizer step, summed over the ranks that have reported it."""

    ranks: int = 0
    samples: float = 0.0
    slowest_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class Trace:
    """Everything the charts need of one trial, kept up to date by `add`."""

    def __init__(self, warmup_steps: int, max_steps: int, world_size: int | None = None) -> None:
        self.warmup_steps, self.max_steps = warmup_steps, max_steps
        self.world_size = world_size
        self._memory: dict[str, dict[int, tuple[list[float], list[float]]]] = {kind: {} for kind in MEMORY_KINDS}
        self._reported_host_rss_bytes = 0.0
        self._open: dict[int, _Step] = {}
        self._closed: list[tuple[int, _Step]] = []

    def add(self, events: Iterable[Event]) -> Trace:
        """Take in new events; any kind but `step`, `fit_started` and `fit_ended` is passed over."""
        for event in events:
            if event["kind"] == "fit_started":
                self.world_size = int(event.get("world_size") or 1)
                self.max_steps = int(event.get("max_steps") or self.max_steps)
            elif event["kind"] == "fit_ended":
                reported = _finite(event.get("peak_host_rss_bytes"))
                self._reported_host_rss_bytes = max(self._reported_host_rss_bytes, reported)
            elif event["kind"] == "step":
                self._remember_memory(event)
                self._remember_step(event)
        return self

    def _remember_memory(self, event: Event) -> None:
        for kind in MEMORY_KINDS:
            value = number(event.get(kind))
            if math.isfinite(value):
                steps, values = self._memory[kind].setdefault(event["rank"], ([], []))
                steps.append(event["step"])
                values.append(value)

    def _remember_step(self, event: Event) -> None:
        step = self._open.setdefault(event["step"], _Step())
        step.ranks += 1
        step.samples += _finite(event.get("samples"))
        training = _finite(event.get("step_seconds")) - _finite(event.get("validation_seconds"))
        step.slowest_seconds = max(step.slowest_seconds, training)
        for phase in PHASES:
            step.phase_seconds[phase] += _finite(event.get(f"{phase}_seconds"))
        if step.ranks >= (self.world_size or 1):
            self._closed.append((event["step"], self._open.pop(event["step"])))

    @property
    def last_step(self) -> int:
        """The last step every rank has reported; 0 before the first."""
        return self._closed[-1][0] if self._closed else 0

    def memory(self) -> MemoryInfo:
        """Memory per rank; a long series keeps the largest value of each bin."""
        binned = {
            kind: {rank: _bin_largest(*series) for rank, series in sorted(ranks.items())}
            for kind, ranks in self._memory.items()
        }
        ranks = tuple(sorted({rank for series in self._memory.values() for rank in series}))
        return MemoryInfo(
            ranks=ranks,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
            reported_host_rss_bytes=self._reported_host_rss_bytes,
            **binned,
        )

    def throughput(self) -> ThroughputInfo:
        """Throughput and shares; averages leave the warm-up steps out."""
        bins = [_merge(part) for part in _bins(self._closed)]
        warm = [step for number_, step in self._closed if number_ > self.warmup_steps]
        _, mean = _merge([(0, step) for step in warm])
        return ThroughputInfo(
            steps=tuple(last for last, _ in bins),
            samples_per_second=tuple(_rate(step) for _, step in bins),
            shares={phase: tuple(_share(step, phase) for _, step in bins) for phase in PHASES},
            mean_samples_per_second=_rate(mean),
            data_wait_fraction=_share(mean, "wait"),
            mean_shares={phase: _share(mean, phase) for phase in PHASES},
            measured_steps=len(warm),
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
        )


def trace_of(events: Iterable[Event], config: Config) -> Trace:
    """The trace of events already read, such as those of a run directory."""
    events = list(events)
    ranks = {event["rank"] for event in events if event["kind"] == "step"}
    return Trace(config.trial.warmup_steps, config.trial.max_steps, len(ranks) or None).add(events)


def memory_info(events: Iterable[Event], config: Config) -> MemoryInfo:
    """Memory per rank over the steps of these events."""
    return trace_of(events, config).memory()


def throughput_info(events: Iterable[Event], config: Config) -> ThroughputInfo:
    """Throughput over all ranks, and where the time went, over the steps of these events."""
    return trace_of(events, config).throughput()


def _finite(value: Any) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0


def _rate(step: _Step) -> float:
    return step.samples / step.slowest_seconds if step.slowest_seconds else math.nan


def _share(step: _Step, phase: str) -> float:
    total = sum(step.phase_seconds.values())
    return step.phase_seconds[phase] / total if total else math.nan


def _merge(part: Sequence[tuple[int, _Step]]) -> tuple[int, _Step]:
    """Consecutive steps as one, under the number of the last."""
    if len(part) == 1:
        return part[0]
    merged = _Step(
        samples=sum(step.samples for _, step in part),
        slowest_seconds=sum(step.slowest_seconds for _, step in part),
        phase_seconds={phase: sum(step.phase_seconds[phase] for _, step in part) for phase in PHASES},
    )
    return (part[-1][0] if part else 0), merged


def _bins(items: Sequence[Any]) -> list[Sequence[Any]]:
    width = max(1, math.ceil(len(items) / LARGEST_SERIES))
    return [items[start : start + width] for start in range(0, len(items), width)]


def _bin_largest(steps: Sequence[float], values: Sequence[float]) -> Series:
    if len(values) <= LARGEST_SERIES:
        return tuple(steps), tuple(values)
    return tuple(part[-1] for part in _bins(steps)), tuple(max(part) for part in _bins(values))
