"""Several traces beside each other: the ranks of one training, or one training before and after a change.

Ranks: a collective ends on all ranks at nearly the same time, so the rank that comes last is in it for the shortest
time. What the others take longer than that is waiting for it, the rest is the exchange itself. Calls are matched by
their order among those of the same name, which all ranks make alike; where their numbers differ, waiting is not known.

Before and after: seconds of a step, so that traces of different lengths compare.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kit.studies.profiling.trace import Kernel, Operation, TraceInfo
from kit.units import format_seconds

_NOTABLE_FRACTION = 0.05
"""Of a step: less waiting than that is not told."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where a step of one rank goes; seconds a step that add to its length."""

    rank: int
    computing: float
    """Also while something was exchanged."""
    exchanging: float
    """With nothing else to compute, and with every rank there."""
    waiting: float
    """In a collective for ranks that came later, with nothing else to compute; NaN where calls do not match."""
    copying: float
    """Copies and fills beside no kernel."""
    idle: float
    hidden: float
    """Of the exchange, in which something was computed too."""

    @property
    def step(self) -> float:
        waiting = 0.0 if math.isnan(self.waiting) else self.waiting
        return math.fsum((self.computing, self.exchanging, waiting, self.copying, self.idle))


def rank_times(traces: Sequence[TraceInfo]) -> list[RankTime]:
    """Each rank's step, in the order of the ranks."""
    waited = _waited(traces)
    found = []
    for trace in sorted(traces, key=lambda one: one.rank):
        open_ = max(0.0, trace.communicating_seconds - trace.hidden_seconds)
        in_calls = math.fsum(call.seconds for call in trace.collectives)
        waiting = open_ * (waited.get(trace.rank, math.nan) / in_calls if in_calls else 0.0)
        copying = max(0.0, trace.busy_seconds - trace.computing_seconds - open_)
        idle = trace.window_seconds - trace.computing_seconds - open_ - copying
        exchanging = open_ if math.isnan(waiting) else open_ - waiting
        values = (trace.computing_seconds, exchanging, waiting, copying, max(0.0, idle), trace.hidden_seconds)
        found.append(RankTime(trace.rank, *(value / trace.steps for value in values)))
    return found


def _waited(traces: Sequence[TraceInfo]) -> dict[int, float]:
    """Seconds by rank in collectives beyond those of the rank that came last; empty where calls do not match."""
    by_name: defaultdict[str, list[list[float]]] = defaultdict(list)
    for trace in traces:
        mine: defaultdict[str, list[float]] = defaultdict(list)
        for call in trace.collectives:
            mine[call.name].append(call.seconds)
        for name, seconds in mine.items():
            by_name[name].append(seconds)
    if len(traces) < 2 or any(
        len(ranks) != len(traces) or len({len(seconds) for seconds in ranks}) > 1 for ranks in by_name.values()
    ):
        return {}
    waited = dict.fromkeys((trace.rank for trace in traces), 0.0)
    for ranks in by_name.values():
        for together in zip(*ranks, strict=True):
            for trace, seconds in zip(traces, together, strict=True):
                waited[trace.rank] += seconds - min(together)
    return waited


def rank_finding(times: Sequence[RankTime]) -> str:
    """In one sentence, which rank the others wait for, or that none does."""
    if len(times) < 2:
        return "One rank alone: nothing is exchanged."
    if any(math.isnan(time.waiting) for time in times):
        return "The traces do not hold the same collectives, so who waits for whom is not known."
    last = min(times, key=lambda time: time.waiting)
    others = [time.waiting for time in times if time is not last]
    lost = max(others) - last.waiting
    if lost < _NOTABLE_FRACTION * last.step:
        return f"No rank makes the others wait: at most {format_seconds(max(others))} of a step."
    computing = last.computing / max(min(time.computing for time in times), 1e-12)
    cause = f"it computes {computing:.2f} × as long" if computing > 1.05 else "it begins later, not by computing longer"
    return f"Rank {last.rank} makes the others wait, up to {format_seconds(lost)} a step: {cause}."


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of a step under one name, before and after."""

    name: str
    before: float
    after: float
    calls_before: float
    """A step."""
    calls_after: float

    @property
    def seconds(self) -> float:
        return self.after - self.before


def compare_operations(before: TraceInfo, after: TraceInfo) -> list[Difference]:
    """Operations by how much their step changed; seconds of the GPU where both have one, else of the host."""
    on_gpu = before.device == after.device == "gpu"

    def seconds(operation: Operation) -> float:
        return operation.device_seconds if on_gpu else operation.own_seconds

    return _differences(
        {one.name: (seconds(one) / before.steps, one.calls / before.steps) for one in before.operations},
        {one.name: (seconds(one) / after.steps, one.calls / after.steps) for one in after.operations},
    )


def compare_kernels(before: TraceInfo, after: TraceInfo) -> list[Difference]:
    """Kernels by how much their step changed."""

    def of(kernels: Sequence[Kernel], steps: int) -> dict[str, tuple[float, float]]:
        return {one.name: (one.seconds / steps, one.calls / steps) for one in kernels}

    return _differences(of(before.kernels, before.steps), of(after.kernels, after.steps))


def _differences(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> list[Difference]:
    nothing = (0.0, 0.0)
    found = [
        Difference(name, was[0], now[0], was[1], now[1])
        for name in {**before, **after}
        for was, now in ((before.get(name, nothing), after.get(name, nothing)),)
    ]
    return sorted(found, key=lambda one: -abs(one.seconds))
