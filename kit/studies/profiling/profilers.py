"""The three profilers of Lightning, under the names it gives their files, with their accounting put right.

Lightning's own, as of 2.6, say three things that are not so. `SimpleProfiler` divides by the time since it was made,
and its `optimizer_step` contains forward and backward: here percentages are of the fit, and every action has the time
of its own as well, which adds up. `AdvancedProfiler` stops the outer profile when an inner action begins and never
resumes it, so that most of a fit is in none: here the outer one goes on. `PyTorchProfiler` is used as it is, with a
schedule that leaves warm-up out.

Each writes the text file that Lightning writes, and beside it what a program can read: a JSON file, a `.prof` of the
whole fit, or the trace. Every rank writes its own files. `Both` lets the clock of a trial listen to the same actions.
"""

from __future__ import annotations

import json
import os
import pstats
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from typing_extensions import override

from kit.config import Config

PASSES = ("simple", "advanced", "pytorch")
_LOOKING_ON = ("kit/studies/profiling/profilers.py", "kit/trial/recorder.py", "lightning/pytorch/profilers/profiler.py")
"""Functions that are there because of the profile."""
_MOST_FUNCTIONS = 400
"""Rows kept in JSON; the `.prof` has all."""


def file_name(which: str) -> str:
    """What Lightning puts its prefix (`fit-`) and the rank around."""
    return f"{which}_profiler_output"


class OwnTimeProfiler(SimpleProfiler):
    """SimpleProfiler, of the fit alone, with the time of each action that none inside of it has."""

    def __init__(self, dirpath: str | Path, filename: str) -> None:
        super().__init__(dirpath, filename)
        self.own_seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = self.start_time

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.start_time = self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.own_seconds[self._running[-1]] = self.own_seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now

    @override
    def start(self, action_name: str) -> None:
        self._charge()
        self._running.append(action_name)
        self.current_actions.setdefault(action_name, time.perf_counter())

    @override
    def stop(self, action_name: str) -> None:
        if action_name not in self.current_actions:
            return
        self._charge()
        while self._running and self._running.pop() != action_name:
            continue
        super().stop(action_name)

    @override
    def summary(self) -> str:
        if self.dirpath is not None and self.recorded_durations:
            _write(Path(self.dirpath, self._prepare_filename(extension=".json")), self.to_dict())
        return super().summary()

    def to_dict(self) -> dict[str, Any]:
        """Seconds of every action, and of the whole fit."""
        actions = [
            {
                "action": action, "calls": len(durations), "total_seconds": sum(durations),
                "own_seconds": self.own_seconds.get(action, 0.0),
            }
            for action, durations in self.recorded_durations.items()
        ]  # fmt: skip
        return {"rank": self.local_rank, "fit_seconds": time.perf_counter() - self.start_time, "actions": actions}


class WholeFitProfiler(AdvancedProfiler):
    """AdvancedProfiler whose outer actions go on when the inner ones have ended: exclusive times that add up."""

    def __init__(self, dirpath: str | Path, filename: str) -> None:
        super().__init__(dirpath, filename)
        self._running: list[str] = []
        self._began = time.perf_counter()

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._began = time.perf_counter()

    @override
    def start(self, action_name: str) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions[action_name].enable()

    @override
    def stop(self, action_name: str) -> None:
        if action_name not in self._running:  # Lightning's own raises here, as where a loader's end is told twice
            return
        while (ended := self._running.pop()) != action_name:
            self.profiled_actions[ended].disable()
        self.profiled_actions[action_name].disable()
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    @override
    def summary(self) -> str:
        for name in (*self._running,):
            self.profiled_actions[name].disable()
        self._running.clear()
        for action in [name for name, profile in self.profiled_actions.items() if not profile.getstats()]:
            del self.profiled_actions[action]  # nothing ran in it, and pstats refuses it
        if self.dirpath is not None and self.profiled_actions:
            _write(Path(self.dirpath, self._prepare_filename(extension=".json")), self.to_dict())
            whole = pstats.Stats(*self.profiled_actions.values())
            whole.dump_stats(Path(self.dirpath, self._prepare_filename(extension=".prof")))
        return super().summary()

    @override
    def teardown(self, stage: str | None) -> None:
        for name in self._running:
            self.profiled_actions[name].disable()
        self._running.clear()
        super().teardown(stage)

    def to_dict(self) -> dict[str, Any]:
        """The functions that took most time of their own, over all actions, and how much of the fit is in any."""
        whole = pstats.Stats(*self.profiled_actions.values())
        stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, Any]] = whole.stats  # type: ignore[attr-defined]
        others = [item for item in stats.items() if not item[0][0].endswith(_LOOKING_ON)]
        ordered = sorted(others, key=lambda item: item[1][2], reverse=True)
        return {
            "rank": self.local_rank,
            "fit_seconds": time.perf_counter() - self._began,
            "accounted_seconds": sum(own for _, _, own, _, _ in stats.values()),
            "functions": [
                {
                    "function": name,
                    "file": file,
                    "line": line,
                    "calls": calls,
                    "own_seconds": own,
                    "total_seconds": all_,
                }
                for (file, line, name), (_, calls, own, all_, _) in ordered[:_MOST_FUNCTIONS]
            ],
        }


class Both(Profiler):
    """Tells two profilers the same: the clock of the trial, and the one that was asked for."""

    def __init__(self, clock: Profiler, asked: Profiler) -> None:
        super().__init__()
        self.clock, self.asked = clock, asked
        self._lightning_module: Any = None

    @override
    def start(self, action_name: str) -> None:
        self.clock.start(action_name)
        self.asked.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        self.asked.stop(action_name)
        self.clock.stop(action_name)

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if isinstance(self.asked, PyTorchProfiler):
            self.asked._lightning_module = self._lightning_module
        self.asked.setup(stage, local_rank, log_dir)

    @override
    def describe(self) -> None:
        self.asked.describe()

    @override
    def teardown(self, stage: str | None) -> None:
        asked = getattr(self, "asked", None)
        if asked is not None:
            asked.teardown(stage)


def beside(clock: Profiler, which: str, folder: Path, config: Config) -> Profiler:
    """The clock of a trial, and the profiler of one pass, which writes into `folder`."""
    return Both(clock, make_profiler(which, folder, config))


def make_profiler(which: str, folder: Path, config: Config) -> Profiler:
    """The profiler of one pass, writing into `folder`."""
    if which == "simple":
        return OwnTimeProfiler(folder, file_name(which))
    if which == "advanced":
        return WholeFitProfiler(folder, file_name(which))
    waiting, active = schedule(config)
    return PyTorchProfiler(
        folder,
        file_name(which),
        record_module_names=False,
        schedule=torch.profiler.schedule(wait=waiting, warmup=1, active=active, repeat=1),
        profile_memory=config.profiler.memory,
        acc_events=True,
    )


def schedule(config: Config) -> tuple[int, int]:
    """(batches left out before the profiler's own warm-up, batches kept): as many as the trial has."""
    batches = config.trial.max_steps * config.levers.accumulate_grad_batches
    active = max(1, min(config.profiler.active_steps, batches - 2))
    return max(0, min(config.trial.warmup_steps, batches - active - 2)), active


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(values), encoding="utf-8")
    draft.replace(path)
