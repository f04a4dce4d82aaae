"""Calibrating the loader in a worker process: as a job, and before a fit.

`kit.studies.calibration.search` decides which settings are measured; this measures them on the data of one rank, on its
share of the cores, and chooses. Reads of the other ranks at the same time are not seen. A candidate that cannot run is
left out with its reason; the first one must run. Each is measured in a process forked for it
(`kit.studies.calibration.fresh`).

What is enough is decided by the step. Where the config does not say how long it takes, it is timed first
(`step_seconds` there). The setting as it is comes first: where it keeps up with the step, the loader is not
what holds the training, and nothing is changed.

Before a fit, rank 0 measures in a process forked for it, and the other ranks wait for the file that it writes. So the
processes that train have opened no store, touched no device and drawn no random number. Where calibration fails, the
fit uses the settings of the config, with a warning.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from kit.config import Config
from kit.confinement.confine import confine_process, confined
from kit.errors import ConfigError, Problem, TrialError, first_line, warn_caller
from kit.machine.machine import Share, share
from kit.machine.processes import BUSY_CORES, cpu_seconds, die_with_parent
from kit.studies.calibration.fresh import in_fresh_process, step_seconds
from kit.studies.calibration.measure import (
    MeasurementLimits,
    Observed,
    OwnSubject,
    StoppedError,
    Subject,
    apply_setting,
    measure,
    subject_of,
)
from kit.studies.calibration.result import NOT_THE_LOADER, Calibration, changed, saved_path
from kit.studies.calibration.rules import (
    GAIN,
    LOOK_FRACTION,
    PARAMETERS,
    LoaderSetting,
    Measurement,
    MemoryCap,
    choose,
    cpu_cap,
    why_chosen,
)
from kit.studies.calibration.search import (
    Bounds,
    Measure,
    MeasurementRequest,
    search,
    sweep_engine,
    sweep_workers,
    worker_counts,
)
from kit.trial.context import Context, cache_folders
from kit.trial.fit_job import make_data
from kit.trial.payload import Part
from kit.units import format_bytes, format_count, format_seconds

_LOOK_SECONDS, _HANGING_SECONDS = 0.05, 600.0
_LEAST_STEPS = 10
"""In which the loader as it is must keep up with them."""


def calibrate(context: Context) -> None:
    """Measure on rank 0 and leave the result in the run directory."""
    stopped = False
    if context.rank == 0:
        payload = context.load_payload()
        seed_everything(context.config.training.seed, workers=True, verbose=False)
        try:
            data = make_data(payload["data"], context.config)
            _measured(context, payload["module"], data, reuse=False).save(context.paths.calibration)
        except StoppedError:
            stopped = True
    context.writer.write("calibration_ended", stopped=stopped)


def calibrated(context: Context, data: dict[str, Any]) -> dict[str, Any]:
    """The data of a fit, read at the setting that was measured now or in an earlier run."""
    path = context.paths.calibration
    if context.rank == 0:
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(context, data))
        child.start()
        child.join()
        if not path.exists():
            why = f"the measuring process ended with exit code {child.exitcode}"
            Calibration(chosen=None, error=why).save(path)
    while not path.exists():  # rank 0 writes it whatever its measuring ends with
        time.sleep(_LOOK_SECONDS)
    found = Calibration.load(path)
    if context.rank == 0:
        changes = found.chosen.changes if found.chosen else {}
        context.writer.write("calibrated", headline=found.headline, changes=changes, reasons=list(found.reasons))
    if found.chosen is None:
        message = f"the loader was not calibrated: {found.error}; it reads with the settings it was given"
        warn_caller(message)
        return data
    return apply_setting(data, found.chosen)


def _in_child(context: Context, data: dict[str, Any]) -> None:
    module = context.load_payload()["module"]
    saved_path(context.config).parent.mkdir(parents=True, exist_ok=True)
    own = [context.paths.directory, saved_path(context.config).parent, *cache_folders(context.config)]
    confine_process(context.paths.scratch, own, may_start_programs=True)
    die_with_parent(os.getppid())  # a new user namespace forgets it
    try:
        with confined("the calibration") as kept:
            found = _measured(context, module, data, reuse=True)
        for note in kept.notes:
            context.writer.write("warned", message=note)
        if found.chosen is not None:
            found.save(saved_path(context.config))
    except StoppedError:
        found = Calibration(chosen=None, error="the trial was stopped")
    except BaseException as error:
        traceback.print_exc()
        found = Calibration(chosen=None, error=first_line(error))
    found.save(context.paths.calibration)


def _measured(context: Context, module: Part, data: dict[str, Any], reuse: bool) -> Calibration:
    """A new result, or that of an earlier run where it still holds and may be reused."""
    config, control = context.config, context.control
    mine = share()  # of the machine: from here on this process uses only its part of the cores
    resources = Resources.of(mine, context.world_size)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: resources.cores])
    subject = subject_of(data)
    identity = json.loads(json.dumps(identity_of(subject, config, context.world_size, mine)))  # as it will be read back
    again, path = "", saved_path(config)
    if reuse and path.exists():
        try:
            earlier = Calibration.load(path)
            news = changed(earlier.identity, identity)
            if not news:
                return replace(earlier, reloaded=True)
            again = news[0] + (f", and {len(news) - 1} more" if len(news) > 1 else "")
        except TrialError as error:
            again = str(error)

    def report(item: Measurement) -> None:
        context.writer.write(
            "calibration_step", setting=str(item.setting), batches_per_second=item.batches_per_second,
            again=item.turns > 0,
        )  # fmt: skip

    began, before = time.perf_counter(), cpu_seconds()
    step, reasons = _step(context, module, data, subject)
    on_cpu = context.environment["accelerator"] == "cpu"
    sweep = Sweep(subject, config, resources, report, lambda: control.requested > 0, step, step_computes=on_cpu)
    found = sweep.run()
    reasons += busy_reasons(before, cpu_seconds(), time.perf_counter() - began)
    return replace(found, identity=identity, again=again, reasons=(*found.reasons, *reasons))


Used = tuple[float, dict[int, float]]
"""As `kit.machine.processes.cpu_seconds` tells."""


def busy_reasons(before: Used, now: Used, seconds: float) -> list[str]:
    """That other programs used the machine meanwhile, if they did."""
    (machine, own), (machine_now, own_now) = before, now
    others = (machine_now - machine - (sum(own_now.values()) - sum(own.values()))) / seconds
    if others <= BUSY_CORES:
        return []
    return [
        f"the machine was busy: other programs used {others:.1f} cores while loaders were measured; speeds are of that "
        "time, so calibrate again when less else runs"
    ]


def _step(context: Context, module: Part, data: dict[str, Any], subject: Subject) -> tuple[float, list[str]]:
    """Seconds of a training step, 0 where they cannot be known, and how they are known."""
    asked = context.config.calibration.step_seconds
    if asked is not None:
        return asked, []
    try:
        found = step_seconds(context, module, data, subject)
    except ConfigError:
        raise
    except Exception as error:
        why = first_line(error)
        return 0.0, [f"the fastest loader was looked for, since a step of the module could not be timed: {why}"]
    return found, [f"a step of the module takes {format_seconds(found)}, measured on batches in memory"]


_SHARED_MEMORY = Path("/dev/shm")
_PROBE_BATCHES = 4


@dataclass(slots=True)
class Resources:
    """What one rank may use."""

    cores: int
    free_bytes: int
    shared_bytes: int
    """Of shared memory, where batches lie on their way from a loader process."""

    @classmethod
    def of(cls, mine: Share, ranks: int) -> Resources:
        free = mine.memory_available_bytes // ranks
        shared = shutil.disk_usage(_SHARED_MEMORY).free // ranks if _SHARED_MEMORY.is_dir() else free
        return cls(max(1, mine.cores // ranks), free, shared)


class Sweep:
    """One calibration; `run` it once.

    Args:
        subject: The data of this rank.
        config: Its `calibration` section says what to try.
        resources: What this rank may use.
        report: Called with each measurement; one that was repeated in turn counts a turn.
        stopping: Whether to end early.
        step: Seconds of a training step; 0 looks for the fastest setting.
        step_computes: Whether a step keeps this process busy, as on the CPU.
    """

    def __init__(
        self, subject: Subject, config: Config, resources: Resources,
        report: Callable[[Measurement], None] = lambda _: None, stopping: Callable[[], bool] = lambda: False,
        step: float = 0.0, *, step_computes: bool = False,
    ) -> None:  # fmt: skip
        self._subject, self._config, self._resources, self._report = subject, config, resources, report
        asked = config.calibration
        self._limits = MeasurementLimits(
            timeout_seconds=asked.timeout_seconds, most_batches=asked.max_measure_batches,
            step_seconds=step, step_computes=step_computes, stopping=stopping,
        )  # fmt: skip
        self._bounds = Bounds(timeout_seconds=asked.timeout_seconds, most_batches=asked.max_measure_batches)
        self._observed = Observed()
        self._memory: MemoryCap | None = None
        self._cpu_workers = 0
        self._turn = 0
        self._base: LoaderSetting | None = None
        self._reasons: dict[str, None] = {}
        self._dropped: dict[str, str] = {}
        self._figures: dict[LoaderSetting, Measurement] = {}

    def run(self) -> Calibration:
        """Sweep and choose.

        Raises:
            ConfigError: when there is nothing to measure.
            StoppedError: when `stopping` says so.
        """
        began = time.perf_counter()
        observed = self._observed
        if (enough := self._enough()) is not None:
            return self._result(enough.setting, [self._why_enough(enough)], began)
        found = search(self._rule, self._try, self._bounds, self._figures, self._eligible, lambda: observed.batch_bytes)
        candidates = [item for item in self._figures.values() if self._eligible(item.setting)]
        if not candidates:
            raise self._nothing()
        chosen = choose(candidates, observed.batch_bytes)
        return self._result(chosen.setting, [why_chosen(chosen, candidates), *found, *self._reasons], began)

    def _enough(self) -> Measurement | None:
        """The setting as it is, where it keeps up with the step."""
        if not self._limits.step_seconds:
            return None
        setting = self._subject.present()
        several = _LEAST_STEPS * self._limits.step_seconds / self._limits.timeout_seconds
        found = self._try(MeasurementRequest(setting=setting, fraction=min(1.0, max(LOOK_FRACTION, several))))
        if found is None:
            return None
        self._figures[setting] = found
        return found if GAIN * found.batches_per_second * self._limits.step_seconds >= 1 else None

    def _why_enough(self, found: Measurement) -> str:
        step = self._limits.step_seconds
        return (
            f"{NOT_THE_LOADER}: as it is ({found.setting}) it gives {format_count(found.batches_per_second)} "
            f"batches/s, and steps of {format_seconds(step)} take {format_count(1 / step)} at most"
        )

    def _result(self, chosen: LoaderSetting, reasons: list[str], began: float) -> Calibration:
        observed = self._observed
        return Calibration(
            chosen=chosen, measured=tuple(self._figures.values()), dropped=tuple(self._dropped.items()),
            reasons=tuple(reasons), seconds=time.perf_counter() - began,
            limits={
                "cores": self._resources.cores, "busy": observed.busy, "cpu_workers": self._cpu_workers,
                "free_bytes": self._resources.free_bytes, "shared_bytes": self._resources.shared_bytes,
                "worker_bytes": observed.worker_bytes, "batch_bytes": observed.batch_bytes,
            },
        )  # fmt: skip

    def _eligible(self, setting: LoaderSetting) -> bool:
        named = self._config.calibration.candidate_workers
        return not named or setting.num_workers in named

    # -- what to try

    def _rule(self, measure_setting: Measure) -> list[str]:
        """The engine's parameters, then processes."""
        step, prefetch = self._limits.step_seconds, self._config.calibration.candidate_prefetch
        ceiling, best, reasons = 1 / step if step else math.inf, 0.0, list[str]()
        base = self._subject.present()
        if isinstance(self._subject, OwnSubject):
            own, data = self._subject.config, self._subject.dataset
            largest = min(sum(info.nbytes for info in data.select(own.data.variables)), own.loader.memory_bytes // 2)
            caches = [] if own.data.order == "block" else [largest]  # in blocks each chunk is read once an epoch
            reasons += sweep_engine(measure_setting, base, caches, lambda _: "", ceiling)
            alone = [item for item in self._figures.values() if not item.setting.num_workers]
            if not alone:
                raise self._nothing()
            best = max(item.batches_per_second for item in alone)
            self._base = self._base or choose(alone, self._observed.batch_bytes).setting
            base = self._base
        counts = self._counts()
        return reasons + sweep_workers(measure_setting, base, counts, prefetch, self._why_not, best, ceiling)

    def _counts(self) -> Iterator[int]:
        named = self._config.calibration.candidate_workers
        if not named and not self._subject.workers_change_nothing:
            self._say(
                "an iterable data set keeps its number of processes: others may repeat its samples; where it shares "
                "them out, name numbers in calibration.candidate_workers"
            )
            yield self._subject.present().num_workers
            return
        needless = {0} if self._subject.own else set[int]()  # the engine sweep has measured it
        if not named and not self._limits.step_seconds:
            needless.add(1)  # where no step runs beside it, one process is as fast as none
        yield from (count for count in worker_counts(named, self._cpu_cap) if count not in needless)

    def _nothing(self) -> ConfigError:
        why = "; ".join(f"{text}: {reason}" for text, reason in self._dropped.items())
        return ConfigError([Problem("calibration.candidate_workers", f"no candidate could be measured ({why})")])

    # -- measuring

    def _try(self, request: MeasurementRequest) -> Measurement | None:
        again, most = request.again, request.fraction * self._limits.most_batches
        limits = replace(
            self._limits, rival=request.rival, timeout_seconds=request.fraction * self._limits.timeout_seconds,
            most_batches=round(most) if again else math.ceil(most), growth=1 / request.fraction,
            slow_start_seconds=math.inf if again else self._bounds.slow_start_seconds,
        )  # fmt: skip
        try:
            found = self._measure(request.setting, limits, replace(self._observed) if again else self._observed)
        except StoppedError:
            raise
        except Exception as error:
            if not self._figures and not isinstance(error, ConfigError):
                raise
            self._dropped[str(request.setting)] = first_line(error)
            return None
        self._report(replace(found, turns=int(again)))
        return found

    def _measure(self, setting: LoaderSetting, limits: MeasurementLimits, observed: Observed) -> Measurement:
        filling = 2 * (setting.cache_bytes or 0) // max(1, observed.batch_bytes)
        self._turn += 1

        def alone() -> tuple[Measurement, Observed]:
            with warnings.catch_warnings():  # processes beyond the cores are tried on purpose
                warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
                with self._subject.loader(setting, self._turn) as loader:
                    return measure(loader, setting, limits, observed, filling), observed

        found, seen = in_fresh_process(alone, limits.timeout_seconds + _HANGING_SECONDS)
        observed.batch_bytes, observed.busy, observed.worker_bytes = seen.batch_bytes, seen.busy, seen.worker_bytes
        return found

    # -- caps

    def _cpu_cap(self) -> int:
        if not self._cpu_workers:
            busy = self._observed.busy or 1.0
            self._cpu_workers = cpu_cap(self._resources.cores, busy)
            cores = f"{self._resources.cores} core" + "s" * (self._resources.cores > 1)
            self._say(
                f"at most {self._cpu_workers} processes for {cores}: loading keeps a core {min(1.0, busy):.0%} busy"
            )
        return self._cpu_workers

    def _say(self, reason: str) -> None:
        """Once, however often a sweep is repeated."""
        self._reasons[reason] = None

    def _why_not(self, setting: LoaderSetting) -> str:
        """Memory is measured with one process, which is never left out; more of them must fit."""
        if not self._config.calibration.cap_workers_by_ram or setting.num_workers < 2:
            return ""
        reason = self._memory_cap(setting).why_not(setting)
        if reason:
            self._dropped[str(setting)] = reason
        return reason

    def _memory_cap(self, setting: LoaderSetting) -> MemoryCap:
        if self._memory is None:
            if not self._observed.worker_bytes:
                probe = replace(setting, num_workers=1)
                self._measure(probe, replace(self._limits, most_batches=_PROBE_BATCHES), self._observed)
            self._memory = MemoryCap(
                free_bytes=self._resources.free_bytes, shared_bytes=self._resources.shared_bytes,
                margin=self._config.calibration.ram_safety_margin, worker_bytes=self._observed.worker_bytes,
                batch_bytes=self._observed.batch_bytes,
            )  # fmt: skip
            cap = self._memory
            self._say(
                f"a process takes {format_bytes(cap.worker_bytes)} for itself and a batch "
                f"{format_bytes(cap.batch_bytes)}: {format_bytes(cap.free_bytes * (1 - cap.margin))} of memory are "
                f"enough for {cap.most(2)} processes of two batches"
            )
        return self._memory


def identity_of(subject: Subject, config: Config, ranks: int, mine: Share | None = None) -> dict[str, Any]:
    """What a result holds for: the machine, the data, and the settings that change how fast it is read."""
    mine = mine or share()
    values = config.values()
    loader = {name: value for name, value in values["loader"].items() if name not in PARAMETERS}
    calibration = {name: value for name, value in values["calibration"].items() if name != "enabled"}
    settings = {"loader": loader, "calibration": calibration, "ranks": ranks}
    if subject.own:
        settings |= {"data": values["data"], "chunking": values["chunking"], "cache": values["cache"]}
    else:
        settings["data.arguments"] = values["data"]["arguments"]
    return {
        "machine": {"cores": mine.cores, "memory_bytes": mine.memory_bytes, "system": platform.platform()},
        "data": subject.identity(), "config": settings,
    }  # fmt: skip
