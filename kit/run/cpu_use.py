"""CpuUse: how many CPU seconds a rank and its loader processes used while it trained, after the warm-up steps.

One `cpu_used` event a rank, from two looks at the clocks of the system, so that no step pays for it. CPU seconds over
wall seconds are cores: 1.0 of the training thread is one core at 100 %. The clock of a process counts all its threads;
loader processes are counted as far as they live at both looks. A thread that is ready but has no core, because others
have them all, is *queued* (Linux tells): it was not idle.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from lightning.pytorch import Trainer

from kit.run.after_warmup import AfterWarmup

_SCHEDULE = Path("/proc/thread-self/schedstat")


class CpuUse(AfterWarmup["_Look"]):
    """Writes `cpu_used` when training ends, if a step was measured."""

    def look(self, trainer: Trainer) -> _Look:  # noqa: ARG002
        return _look()

    def write(self, trainer: Trainer, began: _Look) -> None:
        now = _look()
        common = began.workers.keys() & now.workers.keys()
        self._context.writer.write(
            "cpu_used",
            wall_seconds=now.wall_seconds - began.wall_seconds,
            process_seconds=now.process_seconds - began.process_seconds,
            thread_seconds=now.thread_seconds - began.thread_seconds,
            queued_seconds=now.queued_seconds - began.queued_seconds,
            workers_seconds=sum(now.workers[pid] - began.workers[pid] for pid in common),
            workers=getattr(trainer.train_dataloader, "num_workers", 0),
        )


@dataclass(frozen=True, slots=True)
class _Look:
    wall_seconds: float
    process_seconds: float
    thread_seconds: float
    queued_seconds: float
    workers: dict[int, float]
    """CPU seconds by process id."""


def _look() -> _Look:
    workers = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            workers[process.pid] = used.user + used.system
    return _Look(time.perf_counter(), time.process_time(), time.thread_time(), _queued_seconds(), workers)


def _queued_seconds() -> float:
    """How long this thread has waited for a core; 0 where the system does not tell."""
    try:
        return int(_SCHEDULE.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
