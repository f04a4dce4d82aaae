"""The measurements that the model of scaling (`kit.studies.scaling.model`) starts from: steps, loading, gradient size.

They are means over the batches after warm-up and over all ranks, in seconds. Trials belong to one run when their
configs differ in devices only; several at one count are averaged. A loader that reads ahead hides its time: it is known
only where a step waits more than `WAITED` of its time for data, and is then the whole step. The requests of kit's own
loader are counted in the trial; the limits of the store are those of the config (`kit.data.probe(url).apply(config)`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.data.build.layout import network_of
from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.events import number
from kit.machine.processes import BUSY_CORES
from kit.memory.replay.replay import PHASES
from kit.records.row import other_cores, parameters_of
from kit.records.timing import timing_of
from kit.records.trace import BESIDE_TRAINING, PHASE_LABELS
from kit.speed.links import Link, Traffic
from kit.speed.prediction import SpeedEstimate
from kit.studies.comparison import DEVICES, NO_DIFFERENCE
from kit.studies.diagnosis.evidence import Evidence, NoStepError, evidence_of
from kit.studies.scaling.model import Loading, Step
from kit.trial.trial import Trial
from kit.units import format_seconds

WAITED = 0.05
"""Of a step: less than this is the jitter of a queue that is full."""
_QUARTILES = 1.349
"""Middle half of a normal distribution, in standard deviations."""
_PARTS = ("transfer", "forward", "backward", "optimizer", "other")
_FULL_BYTES, _HALF_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredScaling:
    """Trials of one run, by rising number of devices."""

    config: Config
    """Of the smallest."""
    trials: tuple[Trial, ...]
    on_gpu: bool
    cores: int | None
    """Of the machine of the smallest, where it is this one."""
    steps: tuple[Step, ...]
    loading: Loading
    traffic: Traffic
    batch_size: float
    """Samples of a batch on a device."""
    samples_per_epoch: int | None
    device: str
    """A GPU as the driver names it, or CPU."""
    watts: float | None
    """Of one device, where it was measured."""
    reasons: tuple[str, ...]
    link: Link | None = None
    """What joins devices of a node, where that is known."""
    why_single_device: str = ""
    """Why several devices cannot train it; empty where they can, or a trial did."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Seconds a batch of what comes beside training, by part, at the intervals of the trials."""
    priced: bool = False
    """Whether each count asked about was predicted by itself, from one dry run."""


def predicted(speeds: Sequence[SpeedEstimate], counts: Sequence[int] = ()) -> MeasuredScaling:
    """The same before any trial: what `kit.predict_speed` said, for one or several numbers of devices.

    Of a single one, what it says of the other `counts` too.

    Raises:
        ConfigError: for estimates of a recording alone, and for those that differ in more than devices.
    """
    speeds = sorted(speeds, key=lambda speed: speed.devices)
    first, config = speeds[0], speeds[0].config
    if config is None:
        raise ConfigError([Problem("runs", "a speed of no config; give what kit.predict_speed answers")])
    if len(cards := sorted({speed.one_device for speed in speeds})) > 1:
        message = f"predicted speeds of {' and '.join(cards)}; kit.studies.compare_cards sets cards beside one another"
        raise ConfigError([Problem("runs", message)])
    for other in speeds[1:]:
        if other.config is None or {*config.diff(other.config)} - {*NO_DIFFERENCE, *DEVICES}:
            raise ConfigError([Problem("runs", "predicted speeds that differ in more than devices")])
    reasons = [*filter(None, [first.misfit]), *first.reasons]
    reasons.append("predicted before any trial: what many devices ask of the store is not among the limits")
    reasons.append("validation and checkpoints are not counted: how long they take is not known before a trial")
    if first.bound in ("host", "memory bandwidth"):
        reasons.append(f"what counts as compute is bound by {first.bound}, as kit.predict_speed says")
    samples = first.epoch_samples
    if samples is None and config.training.max_steps:
        samples = round(config.training.max_steps * first.samples)
        reasons.append("the length of an epoch is not known before a trial: it is taken as the steps of the run")
    loader = first.time.loader_seconds
    others = _on_devices(first, counts) if len(speeds) == 1 and not first.why_single_device else []
    steps = sorted(map(_predicted_step, [*speeds, *others]), key=lambda step: step.devices)
    return MeasuredScaling(
        config=config, trials=(), why_single_device=first.why_single_device, on_gpu=first.on_gpu, cores=None,
        steps=tuple(steps),
        priced=bool(others) or bool(first.why_single_device) or {*counts} == {first.devices},
        loading=Loading(ahead=True, seconds=None if loader is None else loader / first.accumulate), link=first.link,
        traffic=first.traffic, batch_size=first.mean_batch_size or first.batch_size, samples_per_epoch=samples,
        watts=None, device=first.one_device if first.on_gpu else "CPU", reasons=tuple(reasons),
    )  # fmt: skip


def _on_devices(speed: SpeedEstimate, counts: Sequence[int]) -> list[SpeedEstimate]:
    """The same on all other counts; none where one of them is not told by its dry run."""
    if speed.on_devices is None or speed.correction != 1:
        return []
    strategy = speed.traffic.strategy
    found = [speed.on_devices(count, strategy_for(strategy, count)) for count in counts if count != speed.devices]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def strategy_for(strategy: str, devices: int) -> str:
    """The same idea on another number of devices: none for one; shards stay as large where they divide the number."""
    if devices == 1:
        return "none"
    name, *sizes = strategy.split(":")
    if name == "fsdp" and sizes:
        size = int(sizes[1])
        return f"fsdp:{devices // size}:{size}" if devices % size == 0 else "fsdp"
    return "ddp" if name == "none" else name


def _predicted_step(speed: SpeedEstimate) -> Step:
    time, factor = speed.time, speed.correction / speed.accumulate
    backward = float(time.operator_seconds[time.step.phase == PHASES.index("backward")].sum())
    return Step(
        devices=speed.devices, train_seconds=time.work_seconds * factor, backward_seconds=backward * factor,
        communication_seconds=time.exchange_seconds * factor, wait_seconds=time.waits["loader"] * factor,
        deviation_seconds=0.0, most_deviation_seconds=0.0, error_fraction=speed.high_seconds / speed.step_seconds - 1,
    )  # fmt: skip


def _no_runs(given: Any) -> ConfigError:
    shown = "a Config" if isinstance(given, Config) else "None" if given is None else f"a {type(given).__name__}"
    way_out = "give a trial of kit.fit, its run directory, a row of kit.results() or what kit.predict_speed answers"
    return ConfigError([Problem("runs", f"{shown} tells no times; {way_out}")])


def measure(runs: Any, counts: Sequence[int] = ()) -> MeasuredScaling:
    """What these trials tell.

    Args:
        runs: A trial, run directory or row of `kit.results`, or an answer of `kit.predict_speed`; or several.
        counts: Numbers of devices that a predicted speed is to be told for too.

    Raises:
        ConfigError: for no trials, and for trials that differ in more than devices.
        TrialError: for a trial without a step after its warm-up.
    """
    single = isinstance(runs, Trial | str | Path | dict | SpeedEstimate)
    if not single and (isinstance(runs, Config) or not isinstance(runs, Iterable)):
        raise _no_runs(runs)
    listed: list[Any] = [runs] if single else list(runs)
    for one in listed:
        is_row = isinstance(one, dict) and "run_directory" in one
        if not is_row and not isinstance(one, Trial | str | Path | SpeedEstimate):
            raise _no_runs(one)
    if listed and all(isinstance(one, SpeedEstimate) for one in listed):
        return predicted(listed, counts)
    if any(isinstance(one, SpeedEstimate) for one in listed):
        raise ConfigError([Problem("runs", "trials and predicted speeds together; give either")])
    paths = [run["run_directory"] if isinstance(run, dict) else run for run in listed]
    trials = [run if isinstance(run, Trial) else Trial.open(run) for run in paths]
    if not trials:
        raise ConfigError([Problem("trials", "none to predict from; run one with kit.fit(config) first")])
    for trial in trials:
        trial.poll()
    trials.sort(key=_world)
    first, allowed = trials[0], {*NO_DIFFERENCE, *DEVICES, "trial.max_steps", "trial.warmup_steps"}
    for other in trials[1:]:
        # One may say "auto" where the other names what that came to.
        alike = {"hardware.accelerator"} if first.environment["accelerator"] == other.environment["accelerator"] else ()
        differing = [path for path in first.config.diff(other.config) if path not in allowed.union(alike)]
        if differing:
            message = f"{first.name} and {other.name} differ in {', '.join(differing)}, not in devices only"
            raise ConfigError([Problem("trials", message)])
    try:
        found = evidence_of(first)
    except NoStepError as error:
        raise TrialError(f"{first.name}: {error}; give it more steps") from None
    batch = statistics.fmean(float(event["samples"]) for event in _after_warmup(first))
    loading, reasons = _loading(first, found)
    energies = [event for trial in trials for event in trial.events if event["kind"] == "energy_measured"]
    watts = statistics.fmean(event["joules"] / event["seconds"] for event in energies) if energies else None
    beside = _beside(trials)
    return MeasuredScaling(
        config=first.config, trials=tuple(trials), on_gpu=found.on_gpu, cores=found.cores,
        steps=tuple(_steps(trials)), loading=loading,
        traffic=_traffic(first), batch_size=batch, samples_per_epoch=_epoch(first, batch), watts=watts,
        device=str(first.event("fit_started", "device") or "CPU"), beside=beside,
        reasons=(*reasons, *_beside_reasons(first, beside), *_busy(trials)),
    )  # fmt: skip


def _beside(trials: Sequence[Trial]) -> dict[str, float]:
    """`MeasuredScaling.beside`, of those parts that take any time."""
    timings = [timing_of([*trial.events, *trial.steps], trial.config).together for trial in trials]
    found = {part: statistics.fmean(one.seconds[part] / one.steps for one in timings) for part in BESIDE_TRAINING}
    return {part: seconds for part, seconds in found.items() if seconds > 0}


def _beside_reasons(trial: Trial, beside: Mapping[str, float]) -> list[str]:
    """What is counted beside training, and that a validation which the trial left out is not."""
    shown = {part: seconds for part, seconds in beside.items() if seconds >= _LEAST_BESIDE * sum(beside.values())}
    found = []
    if shown:
        parts = " and ".join(f"{format_seconds(seconds)} of {PHASE_LABELS[part]}" for part, seconds in shown.items())
        trial_of = trial.config.trial
        how = (
            f", {trial_of.validation_batches} batches every {trial_of.validate_every_steps} steps"
            if "validation" in shown and trial_of.validate_every_steps
            else ""
        )
        found.append(f"each batch comes with {parts}, as often as in the trial{how}")
    if "validation" not in beside and trial.event("fit_started", "left_out_validation"):
        found.append("validation is not counted: the trial left it out (trial.validate_every_steps)")
    return found


_LEAST_BESIDE = 0.05
"""Of the time beside training, to be told."""


def _busy(trials: Iterable[Trial]) -> list[str]:
    """What is to be said of trials on a machine that others used too."""
    return [
        f"other programs used {cores:.1f} cores while {trial.name} ran: a step of it may take less without them"
        for trial in trials if (cores := other_cores(trial) or 0.0) > BUSY_CORES
    ]  # fmt: skip


def _world(trial: Trial) -> int:
    return int(trial.event("fit_started", "world_size") or 1)


def _steps(trials: Sequence[Trial]) -> list[Step]:
    """One for each number of devices: the mean of its trials."""
    found: list[Step] = []
    names = [name for name in Step.__slots__ if name != "devices"]
    for _, alike in groupby(trials, key=_world):
        steps = [_step(trial) for trial in alike]
        means: dict[str, Any] = {name: statistics.fmean(getattr(step, name) for step in steps) for name in names}
        found.append(replace(steps[0], **means))
    return found


def _after_warmup(trial: Trial) -> list[dict[str, Any]]:
    found = [event for event in trial.steps if int(event["step"]) > trial.config.trial.warmup_steps]
    if not found:
        raise TrialError(f"{trial.name}: all {len(trial.steps)} steps were warm-up; give it more")
    return found


def _step(trial: Trial) -> Step:
    events = _after_warmup(trial)
    train = [_seconds(event, *_PARTS) for event in events]
    mean = statistics.fmean(train)
    deviation = statistics.stdev(train) if len(train) > 1 else 0.0
    quarters = statistics.quantiles(train) if len(train) > 1 else [mean] * 3
    return Step(
        devices=_world(trial), train_seconds=mean,
        backward_seconds=statistics.fmean(_seconds(event, "backward") for event in events),
        communication_seconds=statistics.fmean(_seconds(event, "communication") for event in events),
        wait_seconds=statistics.fmean(_seconds(event, "wait") for event in events),
        deviation_seconds=min(deviation, (quarters[2] - quarters[0]) / _QUARTILES), most_deviation_seconds=deviation,
        error_fraction=2 * deviation / math.sqrt(len(train)) / mean if mean else 0.0,
    )  # fmt: skip


def _seconds(event: dict[str, Any], *parts: str) -> float:
    values = [number(event.get(f"{part}_seconds", 0.0)) for part in parts]
    return math.fsum(value for value in values if math.isfinite(value))


def _loading(trial: Trial, found: Evidence) -> tuple[Loading, list[str]]:
    ahead = found.own_loader or bool(found.workers)
    waited = found.shares.get("wait", 0.0)
    cores = None if ahead else found.busy_wait_fraction  # one that waits itself leaves its core to others
    if not ahead:
        seconds: float | None = found.wait_seconds
        reasons = [f"batches are made between two steps: {waited:.0%} of a step, on every rank alike"]
    elif waited > WAITED:
        seconds = found.step_seconds
        reasons = [f"a step waited {waited:.0%} of its time for data: the loader determines its length"]
    else:
        seconds = None
        reasons = [f"a step waited {waited:.1%} of its time for data: how fast a rank's loader could be is not known"]
    # CPU seconds of loader processes for each batch of a rank.
    used = sum(float(event["workers_seconds"]) for event in trial.events if event["kind"] == "cpu_used")
    cpu_seconds = used / len(_after_warmup(trial))
    if not found.own_loader or not found.requests_per_sample:
        reasons.append("the loader does not count its requests, so the store is not among the limits")
        return Loading(ahead=ahead, seconds=seconds, cpu_seconds=cpu_seconds, cores=cores), reasons
    network, batch = network_of(trial.config), statistics.fmean(int(e["samples"]) for e in trial.steps)
    requests = found.requests_per_sample * batch
    reasons.append(
        f"the store allows {network.requests_per_second:,.0f} requests/s, as chunking says; "
        f"{found.requests_per_sample:.3g} a sample were counted"
    )
    return Loading(
        ahead=True, seconds=seconds, cpu_seconds=cpu_seconds or _engine_cpu(trial.config), requests=requests,
        stored_bytes=requests * (found.bytes_per_request or 0.0), requests_per_second=network.requests_per_second,
        bytes_per_second=network.total_bandwidth_bytes_per_second,
    ), reasons  # fmt: skip


def _engine_cpu(config: Config) -> float:
    """Of a batch of kit's own loader, as the config prices requests and decoding; 0 where the store does not open."""
    from kit.data.build.layout import price_store
    from kit.data.open_dataset import open_dataset

    try:
        costs = price_store(config, open_dataset(config))
    except KitError:
        return 0.0
    chunking = config.chunking
    return sum(
        cost.requests_per_batch * chunking.request_cpu_seconds + cost.bytes_per_batch / chunking.decode_bytes_per_second
        for cost in costs
    )


def _traffic(trial: Trial) -> Traffic:
    parameters = parameters_of(trial) or 0
    element = _HALF_BYTES if str(trial.event("fit_started", "precision")) == "bf16-true" else _FULL_BYTES
    named = trial.config.hardware.strategy
    size = float(parameters * element)
    return Traffic(parameter_bytes=size, gradient_bytes=size, strategy="ddp" if named == "none" else named)


def _epoch(trial: Trial, batch_size: float) -> int | None:
    """Samples of an epoch, all ranks together; None where neither the config nor the loader tells."""
    data = trial.config.data
    if trial.environment.get("given", {}).get("data") == "default" and data.order == "random":
        return data.samples_per_epoch
    batches = trial.event("fit_started", "batches_per_epoch")
    return round(int(batches) * batch_size * _world(trial)) if batches else None
