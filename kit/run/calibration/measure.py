"""How fast a loader gives batches, what the processor does meanwhile, and what each of its processes holds.

The consumer takes a batch, spends the time of a training step that is to be simulated, and asks for the next. Pass
follows pass: what the start of a later pass costs counts, as it does in training. A batch under way is waited for, so
the time allowed is overrun by one batch at most.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.errors import ConfigError, Problem
from kit.plan.calibration import LoaderSetting, Measurement
from kit.plan.loader_pace import SLOW_SECONDS, block_size, long_enough, standard_error, together


class StoppedError(Exception):
    """The trial was asked to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the measurement of one candidate."""

    timeout_seconds: float
    most_batches: int
    step_seconds: float = 0.0
    slow_start_seconds: float = math.inf
    growth: float = 1.0
    """Times as many batches and as much time for what takes longer than that to its first batch."""
    to_the_end: bool = False
    """Whether time and batches are used up, whatever is known before."""
    rival: float = 0.0
    """Batches per second that it is compared with; 0 for nothing."""
    stopping: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Observed:
    """What is learned beside the speed."""

    batch_bytes: int = 0
    busy: float = 0.0
    """CPU seconds of this process a second, the simulated steps left out."""
    worker_bytes: int = 0
    """Memory that the largest process of the loader shares with nobody; 0 for none."""


@dataclass(slots=True)
class _Clock:
    """Times blocks of batches after the warm-up."""

    setting: LoaderSetting
    limits: Limits
    warmup_batches: int
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    seen: int = 0
    skipped: int = 0
    """Batches of the warm-up; 0 while it lasts."""
    marks: list[tuple[int, float]] = field(default_factory=list)
    """Batches seen, and when: the end of the warm-up, then the ends of blocks."""
    cpu: float = 0.0
    last: float = 0.0

    def tick(self) -> bool:
        """One more batch has been used; whether that is enough."""
        self.last, self.seen = time.perf_counter(), self.seen + 1
        passed = self.last - self.first
        growth = self.limits.growth if self.first - self.began > self.limits.slow_start_seconds else 1.0
        timeout_seconds, most_batches = growth * self.limits.timeout_seconds, growth * self.limits.most_batches
        if not self.skipped:
            if self.seen >= self.warmup_batches or (self.seen > 1 and passed > timeout_seconds / 2):
                self.skipped, self.cpu, self.marks = self.seen, time.process_time(), [(self.seen, self.last)]
        elif self._block_is_full:
            self.marks.append((self.seen, self.last))
        most = self.skipped > 0 and self.seen - self.skipped >= most_batches
        return passed >= timeout_seconds or most or self._enough

    @property
    def _block_is_full(self) -> bool:
        batches, seconds = self.seen - self.marks[-1][0], self.last - self.marks[-1][1]
        return batches >= block_size(self.setting) or (batches >= together(self.setting) and seconds >= SLOW_SECONDS)

    @property
    def _enough(self) -> bool:
        if self.limits.to_the_end or len(self.marks) < 2:
            return False
        return long_enough(self.paces, self.marks[-1][1] - self.marks[0][1], self.limits.rival)

    @property
    def paces(self) -> tuple[float, ...]:
        """Seconds a batch of each block."""
        pairs = itertools.pairwise(self.marks)
        return tuple((after - before) / (last - first) for (first, before), (last, after) in pairs)

    @property
    def busy(self) -> float:
        """CPU seconds of this process a second since the warm-up, simulated steps left out; 0 for not known."""
        idle = self.limits.step_seconds * (self.seen - self.skipped)
        seconds = self.last - self.marks[0][1] - idle if self.marks else 0.0
        return (time.process_time() - self.cpu) / seconds if seconds > 0 else 0.0

    def result(self) -> Measurement:
        """Too short for the warm-up, everything after the first batch counts, and the error says so."""
        since, batches = self.marks[0][1] if self.marks else 0.0, self.seen - self.skipped
        if not self.skipped or not batches:
            since, batches = (self.first, self.seen - 1) if self.seen > 1 else (self.began, self.seen)
        seconds = max(1e-9, self.last - since)
        return Measurement(
            setting=self.setting, batches_per_second=batches / seconds, batches=batches, seconds=seconds,
            error=standard_error(self.paces), first_batch_seconds=self.first - self.began,
            whole_seconds=time.perf_counter() - self.began, paces=self.paces,
        )  # fmt: skip


def measure(
    loader: Iterable[Any], setting: LoaderSetting, limits: Limits, observed: Observed, filling: int = 0
) -> Measurement:
    """Batches per second of a loader that stands at `setting`; what else is seen is put into `observed`.

    Args:
        loader: What gives the batches, pass after pass.
        setting: Where it stands.
        limits: When to end.
        observed: Added to.
        filling: Batches that fill a cache first. The warm-up takes half of the time at most.

    Raises:
        ConfigError: when the loader gives no batch.
        StoppedError: when `limits.stopping` says so.
    """
    clock = _Clock(setting, limits, max(setting.warmup_batches, filling))
    while not _pass(loader, clock, limits, observed):
        continue
    if not setting.num_workers:
        observed.busy = clock.busy or observed.busy
    return clock.result()


def _pass(loader: Iterable[Any], clock: _Clock, limits: Limits, observed: Observed) -> bool:
    """One pass over the loader; whether that was enough."""
    before, batches = clock.seen, iter(loader)
    try:
        for batch in batches:
            if not clock.seen:
                clock.first = time.perf_counter()
                observed.batch_bytes = max(observed.batch_bytes, batch_bytes(batch))
            del batch
            if limits.stopping():
                raise StoppedError
            if limits.step_seconds:
                time.sleep(limits.step_seconds)
            if clock.tick():
                observed.worker_bytes = max(observed.worker_bytes, worker_bytes() if clock.setting.num_workers else 0)
                return True
    finally:
        _end(batches)
    if clock.seen == before:
        raise ConfigError([Problem("data", "the loader gives no batch, so there is nothing to calibrate")])
    return False


def _end(batches: Any) -> None:
    """End the processes of a pass that was left early, before the next candidate starts its own."""
    for name in ("_shutdown_workers", "close"):
        if hasattr(batches, name):
            getattr(batches, name)()


def batch_bytes(batch: Any) -> int:
    """Of the tensors and arrays in a batch, however deep."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if isinstance(batch, Mapping):
        return sum(map(batch_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(batch_bytes, batch))
    return 0


def worker_bytes() -> int:
    """Memory that the largest descendant of this process shares with no other."""
    import psutil

    most = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            most = max(most, int(child.memory_full_info().uss))
    return most
