"""Evidence: everything a trial tells about where its time and memory went, as one flat record that rules read.

Seconds, bytes, fractions and counts of one trial, after its warm-up steps; None where the trial does not tell. Times
are means over all ranks; memory is of the fullest rank, or of all ranks together, as the field says. A finished profile
adds its trace and functions. Nothing is judged here.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kit.config import Config
from kit.errors import KitError
from kit.events import Event, number
from kit.machine.machine import hardware
from kit.machine.processes import machine
from kit.records.trace import BESIDE_TRAINING, merged
from kit.studies.diagnosis.peaks import Peaks
from kit.studies.profiling.profile import Profile
from kit.studies.profiling.trace import TraceInfo
from kit.studies.series import measured_bytes, samples_per_second
from kit.trial.trial import Trial

_SUFFIX = "_seconds"
_NO_PART = ("step_seconds", "cpu_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """How the store is cut, beside how it would be cut for this reading."""

    seconds_per_batch: float
    """Predicted for the store as it is, by `kit.chunks.cost`."""
    planned_seconds_per_batch: float
    """Predicted for the chunks that `kit.plan_chunks` chooses."""
    chunk: tuple[int, ...]
    planned_chunk: tuple[int, ...]
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedWork:
    """The work of one step, of all ranks together (see `kit.trial.meters`)."""

    samples: int
    flops: Mapping[str, float]
    """By number format."""
    bytes: float
    calls: int
    """Operations of one rank."""
    own_syncs: int
    """Of one rank, in the user's own code."""
    batch_norms_again: int
    """Batch statistics taken a second time while gradients were computed."""
    lines: tuple[Mapping[str, Any], ...]
    """`place`, `calls` and `syncs` of the user's lines that called most, of one rank."""

    def most(self, name: str) -> Mapping[str, Any] | None:
        """The line with most `calls` or `syncs`, if any has some."""
        line = max(self.lines, key=lambda line: line[name], default=None)
        return line if line is not None and line[name] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one trial."""

    config: Config
    accelerator: str
    world_size: int
    own_loader: bool
    """Whether kit's streaming engine read the data, so that its settings apply."""
    given_loader: bool
    """Whether the caller's own data made the loader, so that the config's `loader` section may not reach it."""
    cores: int | None
    """Of the machine, when the trial ran on this one."""
    batches: int
    """Measured ones, of all ranks."""
    samples_per_second: float | None
    step_seconds: float
    """Of one batch on one rank."""
    shares: Mapping[str, float]
    """Fraction of the time of all ranks, by part; they add to one."""
    rank_seconds: Mapping[int, float]
    """Seconds a batch that each rank spent on its own: neither in backward, communication nor validation."""
    start_up_seconds: float | None
    """From the request for the first batch to its arrival, of the slowest rank."""
    total_seconds: float | None
    """From the request for the first batch to the end of the last step."""
    read_seconds: float | None
    """Time a batch during which batches were being read, several at once counted once."""
    requests_per_sample: float | None
    bytes_per_request: float | None
    layout: StoreLayout | None
    thread_cores: float | None
    """Cores that the training thread of a rank used or queued for: 1 is one core at 100 %; the busiest rank."""
    queued_fraction: float | None = None
    """Of the time, what the training thread of a rank was ready and had no core; the worst rank."""
    process_cores: float | None
    """Cores used by all ranks and their loader processes."""
    workers: int | None
    """Loader processes of a rank, as they were."""
    device_allocated_bytes: float | None
    device_reserved_bytes: float | None
    device_limit_bytes: float | None
    host_bytes: float | None
    """Peak resident memory of all ranks together."""
    host_limit_bytes: float | None
    work: CountedWork | None
    peaks: Peaks | None
    warnings: tuple[str, ...] = ()
    trace: TraceInfo | None = None
    """Of the first rank, where a profile was given."""
    functions: tuple[Mapping[str, Any], ...] | None = None
    """Rows of `Profile.functions`, where a profile was given with the advanced pass."""
    notes: tuple[str, ...] = field(default=())
    """What could not be learned, and why."""

    @property
    def user_loader(self) -> bool:
        """Whether the caller's data makes its loader without kit's engine, so that only calibrating reaches it."""
        return self.given_loader and not self.own_loader

    @property
    def wait_fraction(self) -> float | None:
        return self.shares.get("wait")

    @property
    def wait_seconds(self) -> float:
        """A batch, on one rank."""
        return self.shares.get("wait", math.nan) * self.step_seconds

    @property
    def train_seconds(self) -> float:
        """A batch on one rank, from having the batch to requesting the next, without validation."""
        beside = math.fsum(self.shares.get(phase, 0.0) for phase in BESIDE_TRAINING)
        return self.step_seconds * (1 - self.shares.get("wait", math.nan) - beside)

    @property
    def on_gpu(self) -> bool:
        return self.accelerator == "gpu"

    @property
    def busy_wait_fraction(self) -> float | None:
        """Of the wait for data, the part in which the training thread itself computed (a bound from its CPU time)."""
        if self.thread_cores is None or not self.wait_seconds > 0:
            return None
        idle = max(0.0, 1 - self.thread_cores)
        return max(0.0, 1 - idle / self.shares["wait"])


def evidence_of(trial: Trial, peaks: Peaks | None = None, profile: Profile | None = None) -> Evidence:
    """What `trial` tells, and a profile of the same.

    Raises:
        ValueError: when no step was measured after the warm-up.
    """
    config, warm = trial.config, trial.config.trial.warmup_steps
    steps = [event for event in trial.steps if int(event["step"]) > warm]
    if not steps:
        raise ValueError(f"no step was measured: all {len(trial.steps)} were warm-up (trial.warmup_steps is {warm})")
    started = trial.event("fit_started") or {}
    here = trial.environment.get("machine") == machine()
    own = any(event.get("counters") for event in trial.events if event["kind"] == "fit_ended")
    layout, notes = None, list[str]()
    try:
        layout = store_layout(config) if own else None
    except KitError as error:
        notes.append(f"the layout of the store was not judged: {error}")
    given = trial.environment.get("given", {}).get("data", "default") not in ("default", "dataset")
    profiled: dict[str, Any] = {}
    if profile is not None:
        functions = tuple(profile.functions) if "advanced" in profile.passes else None
        profiled = {"trace": profile.trace, "functions": functions}
    return Evidence(
        config=config, accelerator=str(started.get("accelerator", "cpu")), world_size=int(started.get("world_size", 1)),
        own_loader=own, given_loader=given, cores=hardware().cores if here else None, batches=len(steps),
        samples_per_second=samples_per_second(trial), warnings=tuple(trial.warnings), peaks=peaks, layout=layout,
        notes=tuple(notes), work=_work(trial), read_seconds=_read_seconds(steps), **_times(steps), **_start_up(trial),
        **_reading(trial), **_cpu(trial), **_memory(trial, here), **profiled,
    )  # fmt: skip


def _times(steps: Sequence[Event]) -> dict[str, Any]:
    parts = sorted({name for step in steps for name in step if name.endswith(_SUFFIX) and name not in _NO_PART})
    seconds = {name.removesuffix(_SUFFIX): sum(_finite(step.get(name)) for step in steps) for name in parts}
    total = sum(seconds.values()) or math.nan
    alone = [name for name in parts if name.split("_")[0] not in _SHARED]
    ranks: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        ranks[int(step["rank"])].append(sum(_finite(step.get(part)) for part in alone))
    return {
        "step_seconds": sum(_finite(step["step_seconds"]) for step in steps) / len(steps),
        "shares": {part: value / total for part, value in seconds.items()},
        "rank_seconds": {rank: statistics.fmean(values) for rank, values in sorted(ranks.items())},
    }


_SHARED = ("backward", "communication", *BESIDE_TRAINING, "other")
"""Parts in which a rank may wait for the others."""


def _start_up(trial: Trial) -> dict[str, Any]:
    started = {event["rank"]: event["time"] for event in trial.events if event["kind"] == "fit_started"}
    first: dict[int, float] = {}
    last = -math.inf
    for event in trial.steps:
        if "train_started" in event:
            first.setdefault(event["rank"], event["train_started"])
            last = max(last, event["train_ended"])
    waits = [first[rank] - started[rank] for rank in first.keys() & started.keys()]
    if not waits:
        return {"start_up_seconds": None, "total_seconds": None}
    return {"start_up_seconds": max(waits), "total_seconds": last - min(started.values())}


def _read_seconds(steps: Sequence[Event]) -> float | None:
    if not all("read_started" in step for step in steps):
        return None
    ranks: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        ranks[int(step["rank"])].append((step["read_started"], step["read_ended"]))
    busy = [sum(end - begin for begin, end in merged(tuple(spans), 0.0)) for spans in ranks.values()]
    return sum(busy) / len(steps)


def _reading(trial: Trial) -> dict[str, Any]:
    """From what the loaders counted between the first step and the last."""
    requests = size = samples = 0.0
    for rank in {event["rank"] for event in trial.steps}:
        counted = [event for event in trial.steps if event["rank"] == rank and "requests" in event]
        for before, after in pairwise(counted[:: max(1, len(counted) - 1)]):
            requests += number(after["requests"]) - number(before["requests"])
            size += number(after["bytes_read"]) - number(before["bytes_read"])
        samples += sum(int(event["samples"]) for event in counted[1:])
    return {
        "requests_per_sample": requests / samples if samples and requests else None,
        "bytes_per_request": size / requests if requests else None,
    }


def store_layout(config: Config) -> StoreLayout:
    """How the store is cut, beside the chunks that `kit.plan_chunks` would choose.

    Raises:
        KitError: when the store does not open, or its costs cannot be predicted.
    """
    from kit.data.build.layout import plan_chunks, price_store
    from kit.data.dataset import open_dataset

    stored = price_store(config, open_dataset(config))
    plan = plan_chunks(config.replace({"chunking.chunk": "auto", "chunking.shard": "auto", "data.source": None}))
    return StoreLayout(
        seconds_per_batch=sum(cost.seconds_per_batch for cost in stored),
        planned_seconds_per_batch=plan.seconds_per_batch, chunk=stored[0].chunk, planned_chunk=plan.chunk,
        dims=plan.dims,
    )  # fmt: skip


def _cpu(trial: Trial) -> dict[str, Any]:
    found = [event for event in trial.events if event["kind"] == "cpu_used" and event["wall_seconds"] > 0]
    if not found:
        return {"thread_cores": None, "process_cores": None, "workers": None, "queued_fraction": None}

    def cores(event: Event, *names: str) -> float:
        return float(sum(event[f"{name}_seconds"] for name in names) / event["wall_seconds"])

    return {
        "thread_cores": max(cores(event, "thread", "queued") for event in found),
        "queued_fraction": max(cores(event, "queued") for event in found),
        "process_cores": sum(cores(event, "process", "workers") for event in found),
        "workers": max(int(event["workers"]) for event in found),
    }


def _memory(trial: Trial, here: bool) -> dict[str, Any]:
    devices = set(trial.environment.get("devices", ()))
    gpus = [gpu.total_bytes for gpu in hardware().gpus if gpu.uuid in devices] if here else []
    given = trial.config.hardware.device_memory_bytes
    host: dict[int, float] = {}
    for event in trial.steps:
        host[event["rank"]] = max(host.get(event["rank"], 0.0), _finite(event.get("host_rss_bytes")))

    def most(name: str) -> float | None:
        return max((_finite(step.get(name)) for step in trial.steps), default=0.0) or None

    return {
        "device_allocated_bytes": most("device_allocated_bytes") or measured_bytes(trial),
        "device_reserved_bytes": most("device_reserved_bytes"),
        "device_limit_bytes": given or min(gpus, default=None),
        "host_bytes": sum(host.values()) or None,
        "host_limit_bytes": hardware().memory_bytes if here else None,
    }


def _work(trial: Trial) -> CountedWork | None:
    found = [event for event in trial.events if event["kind"] == "work_counted"]
    if not found:
        return None
    flops: defaultdict[str, float] = defaultdict(float)
    for event in found:
        for name, count in event["flops"].items():
            flops[name] += count
    first = min(found, key=lambda event: int(event["rank"]))
    return CountedWork(
        samples=sum(int(event["samples"]) for event in found), flops=dict(flops),
        bytes=sum(event["bytes"] for event in found), calls=first["calls"], own_syncs=first["own_syncs"],
        batch_norms_again=max(event["batch_norms_again"] for event in found), lines=tuple(first["lines"]),
    )  # fmt: skip


def _finite(value: Any) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0
