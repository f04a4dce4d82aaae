"""Calibrating the loader: as a job of its own, and before a fit.

Before a fit, rank 0 measures in a process forked for it and the other ranks wait for the file it writes: the processes
that train have opened no store, touched no device and drawn no random number for it. What cannot be calibrated trains
with the settings of the config, and a warning says why.

The sweep: measures what the rules of `kit.studies.calibration.rules` ask for, on one rank's data, and says what it
chose.

`kit.studies.calibration.search` asks, this measures. One rank does, on its share of the cores: what the other ranks
read at the same time is not seen. A candidate that cannot run is left out with its reason; the first one must run.
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
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
from lightning.pytorch import seed_everything

from kit.config import Config
from kit.confinement.confine import confine_process, confined
from kit.errors import ConfigError, KitWarning, Problem, TrialError
from kit.machine.machine import Share, share
from kit.machine.processes import die_with_parent
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
from kit.studies.calibration.result import Calibration, changed, saved_path
from kit.studies.calibration.rules import LoaderSetting, Measurement, MemoryCap, choose, cpu_cap, why_chosen
from kit.studies.calibration.search import (
    Bounds,
    Looks,
    MeasurementRequest,
    search,
    sweep_engine,
    sweep_workers,
    worker_counts,
)
from kit.trial.context import Context, cache_folders
from kit.trial.fit_job import make_data, show_cells
from kit.units import format_bytes

_LOOK_SECONDS = 0.05


def calibrate(context: Context) -> None:
    """Measure on rank 0 and leave the result in the run directory."""
    stopped = False
    if context.rank == 0:
        payload = cloudpickle.loads(context.paths.payload.read_bytes())
        context.cells = payload["cells"]
        show_cells(context.cells)
        seed_everything(context.config.training.seed, workers=True, verbose=False)
        try:
            measuring = _Measuring(context, make_data(payload["data"], context.config))
            measuring.sweep().save(context.paths.calibration)
        except StoppedError:
            stopped = True
    context.writer.write("calibration_ended", stopped=stopped)


def calibrated(context: Context, data: dict[str, Any]) -> dict[str, Any]:
    """The data of a fit, read at the setting that was measured or taken up again."""
    if context.rank == 0:
        _measure_apart(context, data)
    found = _result(context)
    if context.rank == 0:
        changes = found.chosen.changes if found.chosen else {}
        context.writer.write("calibrated", headline=found.headline, changes=changes, reasons=list(found.reasons))
    if found.chosen is None:
        message = f"the loader was not calibrated: {found.error}; it reads with the settings it was given"
        warnings.warn(message, KitWarning, stacklevel=2)
        return data
    return apply_setting(data, found.chosen)


def _result(context: Context) -> Calibration:
    while not context.paths.calibration.exists():  # rank 0 writes it however its measuring ends
        time.sleep(_LOOK_SECONDS)
    return Calibration.load(context.paths.calibration)


def _measure_apart(context: Context, data: dict[str, Any]) -> None:
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(context, data))
    child.start()
    child.join()
    if not context.paths.calibration.exists():
        _failed(f"the measuring process ended with exit code {child.exitcode}").save(context.paths.calibration)


def _in_child(context: Context, data: dict[str, Any]) -> None:
    saved_path(context.config).parent.mkdir(parents=True, exist_ok=True)
    own = [context.paths.directory, saved_path(context.config).parent, *cache_folders(context.config)]
    confine_process(context.paths.scratch, own, may_start_programs=True)
    die_with_parent(os.getppid())  # a new user namespace forgets it
    try:
        with confined("the calibration") as kept:
            found = _Measuring(context, data).found()
        for note in kept.notes:
            context.writer.write("warned", message=note)
        if found.chosen is not None:
            found.save(saved_path(context.config))
    except StoppedError:
        found = _failed("the trial was stopped")
    except BaseException as error:
        traceback.print_exc()
        found = _failed((str(error).splitlines() or [type(error).__name__])[0])
    found.save(context.paths.calibration)


def _failed(why: str) -> Calibration:
    return Calibration(chosen=None, error=why)


class _Measuring:
    """The data of this process, on its share of the machine."""

    def __init__(self, context: Context, data: dict[str, Any]) -> None:
        mine = share()  # of the machine: from here on this process keeps to its part of it
        self._context, self._config = context, context.config
        self._resources = Resources.of(mine, context.world_size)
        _stay_on(self._resources.cores)
        self._subject = subject_of(data)
        identity = identity_of(self._subject, self._config, context.world_size, mine)
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))  # as it will be read back

    def found(self) -> Calibration:
        """The result of an earlier run where it still holds, else a new one that says why."""
        path = saved_path(self._config)
        if not path.exists():
            return self.sweep()
        try:
            earlier = Calibration.load(path)
        except TrialError as error:
            return self.sweep(str(error))
        news = changed(earlier.identity, self._identity)
        if news:
            more = f", and {len(news) - 1} more" if len(news) > 1 else ""
            return self.sweep(f"{news[0]}{more}")
        return replace(earlier, reloaded=True)

    def sweep(self, again: str = "") -> Calibration:
        """A new result; `again` says why there had to be one, where there was another."""
        stopping = self._context.control
        sweep = Sweep(self._subject, self._config, self._resources, self._tell, lambda: stopping.requested > 0)
        found = sweep.run()
        return replace(found, identity=self._identity, again=again)

    def _tell(self, item: Measurement) -> None:
        self._context.writer.write(
            "calibration_step", setting=str(item.setting), batches_per_second=item.batches_per_second,
            again=item.turns > 0,
        )  # fmt: skip


def _stay_on(cores: int) -> None:
    """Keep to a share of the cores, where the system lets a process do so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


_SHARED_MEMORY = Path("/dev/shm")
_PROBE_BATCHES = 4
_DIALS = ("num_workers", "prefetch_factor", "requests_in_flight", "batches_ahead", "cache_bytes")


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
        config: What asks for it.
        resources: What this rank may use.
        tell: Hears each measurement; one that was taken again in turn counts a turn.
        stopping: Whether to leave.
    """

    def __init__(
        self, subject: Subject, config: Config, resources: Resources,
        tell: Callable[[Measurement], None] = lambda _: None, stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._subject, self._config, self._resources, self._tell = subject, config, resources, tell
        asked = config.calibration
        self._limits = MeasurementLimits(
            timeout_seconds=asked.timeout_seconds, most_batches=asked.max_measure_batches,
            step_seconds=asked.step_seconds, stopping=stopping,
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
            StoppedError: when asked to leave.
        """
        began = time.perf_counter()
        bounds = Bounds(timeout_seconds=self._limits.timeout_seconds, most_batches=self._limits.most_batches)
        found = self._answer(
            search(self._rule, bounds, self._figures, self._eligible, lambda: self._observed.batch_bytes)
        )
        candidates = [item for item in self._figures.values() if self._eligible(item.setting)]
        if not candidates:
            raise self._nothing()
        chosen = choose(candidates, self._observed.batch_bytes)
        return Calibration(
            chosen=chosen.setting, measured=tuple(self._figures.values()), dropped=tuple(self._dropped.items()),
            reasons=(why_chosen(chosen, candidates), *found, *self._reasons), limits=self._facts(),
            seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _eligible(self, setting: LoaderSetting) -> bool:
        named = self._config.calibration.candidate_workers
        return not named or setting.num_workers in named

    # -- what to try

    def _rule(self) -> Looks:
        """The engine's dials, then processes."""
        step, prefetch = self._limits.step_seconds, self._config.calibration.candidate_prefetch
        ceiling, best, reasons = 1 / step if step else math.inf, 0.0, list[str]()
        base = self._subject.present()
        if isinstance(self._subject, OwnSubject):
            reasons += yield from sweep_engine(base, self._caches(self._subject), lambda _: "", ceiling)
            alone = [item for item in self._figures.values() if not item.setting.num_workers]
            if not alone:
                raise self._nothing()
            best = max(item.batches_per_second for item in alone)
            self._base = self._base or choose(alone, self._observed.batch_bytes).setting
            base = self._base
        reasons += yield from sweep_workers(base, self._counts(), prefetch, self._why_not, best, ceiling)
        return reasons

    @staticmethod
    def _caches(subject: OwnSubject) -> list[int]:
        """Sizes to try: none where each chunk is read once an epoch."""
        config, arrays = subject.config, subject.dataset.select(subject.config.data.variables)
        largest = min(sum(info.nbytes for info in arrays), config.loader.memory_bytes // 2)
        return [] if config.data.order == "block" else [largest]

    def _counts(self) -> Iterator[int]:
        named = self._config.calibration.candidate_workers
        if not named and not self._subject.workers_change_nothing:
            self._say(
                "an iterable data set keeps its number of processes: others may repeat its samples; where it shares "
                "them out, name numbers in calibration.candidate_workers"
            )
            yield self._subject.present().num_workers
            return
        counts = worker_counts(named, self._cpu_cap)
        yield from (count for count in counts if count or not self._subject.own)  # 0 was measured with the dials

    def _nothing(self) -> ConfigError:
        why = "; ".join(f"{text}: {reason}" for text, reason in self._dropped.items())
        return ConfigError([Problem("calibration.candidate_workers", f"no candidate could be measured ({why})")])

    # -- measuring

    def _answer(self, asks: Generator[MeasurementRequest, Measurement | None, list[str]]) -> list[str]:
        try:
            ask = next(asks)
            while True:
                ask = asks.send(self._try(ask))
        except StopIteration as end:
            return list(end.value)

    def _try(self, ask: MeasurementRequest) -> Measurement | None:
        most = ask.fraction * self._limits.most_batches
        limits = replace(
            self._limits, rival=ask.rival, timeout_seconds=ask.fraction * self._limits.timeout_seconds,
            most_batches=round(most) if ask.again else math.ceil(most),
            slow_start_seconds=math.inf if ask.again else self._bounds.slow_start_seconds, growth=1 / ask.fraction,
        )  # fmt: skip
        try:
            found = self._measure(ask.setting, limits, replace(self._observed) if ask.again else self._observed)
        except StoppedError:
            raise
        except Exception as error:
            if not self._figures and not isinstance(error, ConfigError):
                raise
            self._dropped[str(ask.setting)] = (str(error).splitlines() or [type(error).__name__])[0]
            return None
        self._tell(replace(found, turns=int(ask.again)))
        return found

    def _measure(self, setting: LoaderSetting, limits: MeasurementLimits, observed: Observed) -> Measurement:
        filling = 2 * (setting.cache_bytes or 0) // max(1, observed.batch_bytes)
        self._turn += 1
        with warnings.catch_warnings():  # processes beyond the cores are tried on purpose
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            with self._subject.loader(setting, self._turn) as loader:
                return measure(loader, setting, limits, observed, filling)

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
        """Once, however often a sweep is gone through."""
        self._reasons[reason] = None

    def _why_not(self, setting: LoaderSetting) -> str:
        """One process is what memory is measured on; more of them must fit."""
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
            self._say(self._told(self._memory))
        return self._memory

    @staticmethod
    def _told(cap: MemoryCap) -> str:
        return (
            f"a process holds {format_bytes(cap.worker_bytes)} for itself and a batch is "
            f"{format_bytes(cap.batch_bytes)}: {format_bytes(cap.free_bytes * (1 - cap.margin))} of memory hold "
            f"{cap.most(2)} processes of two batches"
        )

    def _facts(self) -> dict[str, float]:
        return {
            "cores": self._resources.cores, "busy": self._observed.busy, "cpu_workers": self._cpu_workers,
            "free_bytes": self._resources.free_bytes, "shared_bytes": self._resources.shared_bytes,
            "worker_bytes": self._observed.worker_bytes, "batch_bytes": self._observed.batch_bytes,
        }  # fmt: skip


def identity_of(subject: Subject, config: Config, ranks: int, mine: Share | None = None) -> dict[str, Any]:
    """What a result holds for: the machine, the data, and the settings that change how fast it is read."""
    mine = mine or share()
    values = config.values()
    loader = {name: value for name, value in values["loader"].items() if name not in _DIALS}
    calibration = {name: value for name, value in values["calibration"].items() if name != "enabled"}
    wanted = {"loader": loader, "calibration": calibration, "ranks": ranks}
    if subject.own:
        wanted |= {"data": values["data"], "chunking": values["chunking"], "cache": values["cache"]}
    else:
        wanted["data.arguments"] = values["data"]["arguments"]
    return {
        "machine": {"cores": mine.cores, "memory_bytes": mine.memory_bytes, "system": platform.platform()},
        "data": subject.identity(),
        "config": wanted,
    }
