"""Calibrating the loader: as a job of its own, and before a fit.

Before a fit, rank 0 measures in a process forked for it and the other ranks wait for the file it writes: the processes
that train have opened no store, touched no device and drawn no random number for it. What cannot be calibrated trains
with the settings of the config, and a warning says why.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
import warnings
from dataclasses import replace
from typing import Any

import cloudpickle
from lightning.pytorch import seed_everything

from kit.cgroup import share
from kit.confinement.confine import confine_process, confined
from kit.errors import KitWarning, TrialError
from kit.plan.calibration import Measurement
from kit.processes import die_with_parent
from kit.run.calibration.measure import StoppedError
from kit.run.calibration.result import Calibration, changed, saved_path
from kit.run.calibration.subject import apply_setting, subject_of
from kit.run.calibration.sweep import Resources, Sweep, identity_of
from kit.run.confining import cache_folders
from kit.run.jobs.context import Context
from kit.run.jobs.parts import make_data, show_cells

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
