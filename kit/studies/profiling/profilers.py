"""The three profilers of Lightning, with their accounting corrected; files keep the names that Lightning gives them.

As of Lightning 2.6, `SimpleProfiler` divides by the time since it was made, and its `optimizer_step` contains forward
and backward: here percentages are of the fit, and every action also has its exclusive time, which adds up.
`AdvancedProfiler` stops the outer profile when an inner action begins and never resumes it, so most of a fit is in no
profile: here the outer one is resumed. `PyTorchProfiler` is used as it is, with a schedule that leaves warm-up out.

Each writes the text file that Lightning writes, and beside it a file for programs: JSON, a `.prof` of the whole fit, or
the trace. Every rank writes its own files. `Both` also passes the same actions to the clock of a trial.
"""

from __future__ import annotations

import itertools
import pstats
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from typing_extensions import override

from kit.config import Config
from kit.json_text import write_json

_LOOKING_ON = ("kit/studies/profiling/profilers.py", "kit/trial/recorder.py", "lightning/pytorch/profilers/profiler.py")
"""Functions that are there because of the profile."""
_MOST_FUNCTIONS = 400
"""Rows kept in JSON; the `.prof` has all."""


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
            write_json(Path(self.dirpath, self._prepare_filename(extension=".json")), self.to_dict())
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
        if action_name not in self._running:  # Lightning's own raises here, as at a loader that ends twice
            return
        while (ended := self._running.pop()) != action_name:
            self.profiled_actions[ended].disable()
        self.profiled_actions[action_name].disable()
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    @override
    def summary(self) -> str:
        self._disable_all()
        for action in [name for name, profile in self.profiled_actions.items() if not profile.getstats()]:
            del self.profiled_actions[action]  # nothing ran in it, and pstats refuses it
        if self.dirpath is not None and self.profiled_actions:
            write_json(Path(self.dirpath, self._prepare_filename(extension=".json")), self.to_dict())
            whole = pstats.Stats(*self.profiled_actions.values())
            whole.dump_stats(Path(self.dirpath, self._prepare_filename(extension=".prof")))
        return super().summary()

    @override
    def teardown(self, stage: str | None) -> None:
        self._disable_all()
        super().teardown(stage)

    def _disable_all(self) -> None:
        for name in self._running:
            self.profiled_actions[name].disable()
        self._running.clear()

    def to_dict(self) -> dict[str, Any]:
        """The functions that took most time of their own, over all actions, and how much of the fit is in any."""
        whole = pstats.Stats(*self.profiled_actions.values())
        stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, Any]] = whole.stats  # type: ignore[attr-defined]
        others = [item for item in stats.items() if not item[0][0].endswith(_LOOKING_ON)]
        ordered = sorted(others, key=lambda item: item[1][2], reverse=True)
        columns = ("function", "file", "line", "calls", "own_seconds", "total_seconds")
        rows = ((name, *place, calls, own, total) for (*place, name), (_, calls, own, total, _) in ordered)
        return {
            "rank": self.local_rank, "fit_seconds": time.perf_counter() - self._began,
            "accounted_seconds": sum(own for _, _, own, _, _ in stats.values()),
            "functions": [dict(zip(columns, row, strict=True)) for row in itertools.islice(rows, _MOST_FUNCTIONS)],
        }  # fmt: skip


class Both(Profiler):
    """Passes every action to two profilers: the clock of the trial, and that of the pass."""

    def __init__(self, clock: Profiler, profiler: Profiler) -> None:
        super().__init__()
        self.clock, self.profiler = clock, profiler
        self._lightning_module: Any = None

    @override
    def start(self, action_name: str) -> None:
        self.clock.start(action_name)
        self.profiler.start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        self.profiler.stop(action_name)
        self.clock.stop(action_name)

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if isinstance(self.profiler, PyTorchProfiler):
            self.profiler._lightning_module = self._lightning_module
        self.profiler.setup(stage, local_rank, log_dir)

    @override
    def describe(self) -> None:
        self.profiler.describe()

    @override
    def teardown(self, stage: str | None) -> None:
        profiler = getattr(self, "profiler", None)
        if profiler is not None:
            profiler.teardown(stage)


def beside(clock: Profiler, which: str, folder: Path, config: Config) -> Profiler:
    """The clock of a trial, and the profiler of one pass, which writes into `folder`."""
    return Both(clock, make_profiler(which, folder, config))


def make_profiler(which: str, folder: Path, config: Config) -> Profiler:
    """The profiler of one pass, writing into `folder`."""
    name = f"{which}_profiler_output"  # Lightning adds its prefix (`fit-`) and the rank
    if which == "simple":
        return OwnTimeProfiler(folder, name)
    if which == "advanced":
        return WholeFitProfiler(folder, name)
    waiting, active = schedule(config)
    return PyTorchProfiler(
        folder, name, record_module_names=False, profile_memory=config.profiler.memory, acc_events=True,
        schedule=torch.profiler.schedule(wait=waiting, warmup=1, active=active, repeat=1),
    )  # fmt: skip


def schedule(config: Config) -> tuple[int, int]:
    """(batches left out before the profiler's own warm-up, batches kept): as many as the trial has."""
    batches = config.trial.max_steps * config.levers.accumulate_grad_batches
    active = max(1, min(config.profiler.active_steps, batches - 2))
    return max(0, min(config.trial.warmup_steps, batches - active - 2)), active
