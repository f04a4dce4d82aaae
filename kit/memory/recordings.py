"""Recordings of queries: from the cache at once, else made in processes, two at a time.

The cache lives in this process and keeps the recordings used last, except those of dry runs that were broken off
because they took too long: the next attempt may find a quieter machine. A recording says of which cards it is, so that
many cards are asked about and few recorded.

Each process is a rank of the same supervisor that runs trials, in a temporary directory that is removed whatever
happens: by the kernel when it has the answer, an error or an interrupt, and by the supervisor when the kernel is lost.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

import kit.errors
from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.machine.machine import Resolved, people_per_core, waiting_per_core
from kit.memory.query import MemoryQuery
from kit.memory.replay.replay import Recording
from kit.tables import WaitingLine
from kit.trial import scratch
from kit.trial.directory import RunPaths
from kit.trial.payload import cells
from kit.trial.submit import environment_of, write_run
from kit.trial.supervisor import Removed
from kit.trial.trial import ENDED, Trial
from kit.units import format_seconds

AT_ONCE = 2
NEXT = -1
"""As a batch size: one sample more than the recording before."""
UNSETTLED = "two steps that would settle it did not run to an end for real on the CPU"
"""What is told of guesses that stay open, before the reason."""
_KEPT = 128
_TICK_SECONDS, _LONGEST_TICK_SECONDS, _TICK_FRACTION = 0.005, 0.1, 0.02
"""An answer is looked for again after this part of the time since the last one, within these bounds."""


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """A query, and the batch sizes to record it at; None is that of the data, `NEXT` one more than before."""

    query: MemoryQuery
    batch_sizes: tuple[int | None, ...] = (None,)


TIMEOUT_SECONDS = 60.0
"""Of a dry run on a machine that others leave alone."""


class _Cache:
    """The recordings used last, by what was asked of any card, batch size and the capability that was recorded."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int | None, tuple[int, int] | None], Recording] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, query: MemoryQuery, batch_size: int | None) -> Recording | None:
        asked = query.any_card_key, batch_size
        with self._lock:
            for name, recording in self._kept.items():
                if name[:2] == asked and (name[2] == query.capability or _serves(recording, query.capability)):
                    self._kept.move_to_end(name)
                    return recording
        return None

    def put(self, query: MemoryQuery, batch_size: int | None, recording: Recording) -> None:
        with self._lock:
            self._kept[query.any_card_key, batch_size, query.capability] = recording
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def _serves(recording: Recording, capability: tuple[int, int] | None) -> bool:
    """Whether it says that a card of this capability records the same."""
    return any(tuple(one) == capability for one in recording.facts["capabilities"])


cache = _Cache()


def cached_recording(query: MemoryQuery) -> Recording | None:
    """What was recorded before, or None."""
    found = cache.get(query, None)
    return None if found is None else with_query_facts(query, found)


def recordings_of(request: RecordingRequest, timeout_seconds: float | None = None) -> list[Recording]:
    """One recording for each batch size.

    Raises:
        KitError: why there is none.
    """
    (found,) = record_all([request], timeout_seconds)
    if isinstance(found, KitError):
        raise found
    return found


def record_all(
    requests: Sequence[RecordingRequest], timeout_seconds: float | None = None
) -> list[list[Recording] | KitError]:
    """The recordings of several queries, in their order; a query that fails gives its error and hurts no other.

    Equal queries are asked once. An interrupt ends everything that runs. Each may take `TIMEOUT_SECONDS` where no limit
    is given, and as many times as long as processes wait for each core. In a room whose people share cores, a limit
    that is given is as many times as long.
    """
    if timeout_seconds is None:
        timeout_seconds = TIMEOUT_SECONDS * waiting_per_core()
    else:
        timeout_seconds *= people_per_core()
    answers: dict[tuple[str, tuple[int | None, ...]], list[Recording] | KitError] = {}
    waiting = {(item.query.key, item.batch_sizes): item for item in requests}
    running: dict[tuple[str, tuple[int | None, ...]], _Running] = {}
    answered = time.monotonic()
    total = len(waiting)
    with WaitingLine(f"{'each' if total > 1 else 'it'} may take {format_seconds(timeout_seconds)}") as line:
        try:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    name, item = next(iter(waiting.items()))
                    del waiting[name]
                    running[name] = _Running(item, timeout_seconds)
                for name in [name for name, run in running.items() if run.look()]:
                    answers[name], answered = running.pop(name).answer, time.monotonic()
                line.show("dry run" if total == 1 else f"{len(answers)} of {total} dry runs done")
                if running:
                    tick = _TICK_FRACTION * (time.monotonic() - answered)
                    time.sleep(min(max(_TICK_SECONDS, tick), _LONGEST_TICK_SECONDS))
        finally:
            for run in running.values():
                run.close()
    found = [(item.query, answers[item.query.key, item.batch_sizes]) for item in requests]
    return [
        answer if isinstance(answer, KitError) else [with_query_facts(query, recording) for recording in answer]
        for query, answer in found
    ]


class _Running:
    """One query on its way: from the cache, or from a process."""

    def __init__(self, request: RecordingRequest, timeout_seconds: float) -> None:
        self.answer: list[Recording] | KitError = []
        self._sizes, self._query = request.batch_sizes, request.query
        self._missing = [size for size in self._sizes if cache.get(self._query, size) is None]
        self._job: PredictionJob | None = None
        if not self._missing:
            self._take([])
            return
        # `NEXT` as a number where the recording before it is known and not made again.
        before = cache.get(self._query, None)
        sizes = [before.batch_size + 1 if size == NEXT and before else size for size in self._missing]
        try:
            self._job = PredictionJob(request.query, sizes, timeout_seconds)
        except KitError as error:
            self.answer = error

    def look(self) -> bool:
        """Whether `answer` is there."""
        if self._job is not None and self._job.ended:
            job, self._job = self._job, None
            try:
                self._take(job.recordings())
            except KitError as error:
                self.answer = error
            finally:
                job.close()
        return self._job is None

    def close(self) -> None:
        if self._job is not None:
            self._job.close()

    def _take(self, found: list[Recording]) -> None:
        made = dict(zip(self._missing, found, strict=True))
        for size, recording in made.items():
            if not recording.facts.get("late"):
                cache.put(self._query, size, recording)
        answers = [made.get(size) or cache.get(self._query, size) for size in self._sizes]
        self.answer = [recording for recording in answers if recording is not None]


def with_query_facts(query: MemoryQuery, recording: Recording) -> Recording:
    """The recording with the card and the number of ranks and micro-batches that were asked for."""
    return dataclasses.replace(recording, facts={**recording.facts, **query.facts})


_ANSWER_FRACTION, _STACK_FRACTION = 0.8, 0.95
"""Parts of the time allowed after which a step is broken off, so that there is an answer without it, and after which a
process that does not let itself be broken off writes down where it hangs and is ended."""
_STACK_SIGNAL = "SIGUSR1"
"""It asks for the stack when the time is up, and ends a process in which LLVM, which numba has, has taken it over."""
_KILLING_SECONDS = 3.0
_START_SECONDS = 60.0
_ENDING_SECONDS = 5.0
JOB = {"job": "predict", "confined": "the prediction"}
_PREFIX = "kit-prediction-"


class UnansweredError(KitError, TimeoutError):
    """A dry run that did not end in time; the message says where it was."""


class PredictionJob:
    """A running prediction. Always `close` it."""

    def __init__(self, query: MemoryQuery, batch_sizes: Sequence[int | None], timeout_seconds: float) -> None:
        """Start it: one recording is made for each batch size, and the process may take `timeout_seconds`.

        Raises:
            ConfigError: for a timeout that is not positive.
            TrialError: when no process can be started.
        """
        if timeout_seconds <= 0:
            raise ConfigError([Problem("timeout_seconds", f"{timeout_seconds} is no time; give a positive number")])
        self.timeout_seconds = timeout_seconds
        self._count = len(batch_sizes)
        self._deadline = time.monotonic() + timeout_seconds + _START_SECONDS
        patience_seconds = timeout_seconds * _ANSWER_FRACTION
        task = {"batch_sizes": list(batch_sizes), "patience_seconds": patience_seconds, "beside": None}
        self._trial = start_prediction(query, task, timeout_seconds, "when lost")

    @property
    def ended(self) -> bool:
        """Whether `recordings` has an answer now."""
        return self._trial.poll() in ENDED or time.monotonic() > self._deadline

    def recordings(self) -> list[Recording]:
        """What was recorded.

        Raises:
            KitError: what the process refused, as it was raised there.
            UnansweredError: when it took too long.
            TrialError: when the module cannot be made, its steps stop with an error of its own, or the process died.
        """
        if self._trial.state == "COMPLETE":
            paths = self._trial.paths
            return [Recording.load(paths.recording(number)) for number in range(self._count)]
        refused = self._trial.event("refused")
        if refused is not None and refused["type"] == UnansweredError.__name__:
            if known := self._known_before():
                return known
            raise UnansweredError(refused["message"])
        if refused is not None:
            kind = getattr(kit.errors, refused["type"], KitError)
            if issubclass(kind, ConfigError):
                raise kind([Problem(path, message) for path, message in refused["problems"]])
            raise kind(refused["message"], *([refused["details"]] if kind is TrialError else []))
        if known := self._known_before():
            return known
        timed_out = self._trial.cause in ("timeout", "stalled") or self._trial.state not in ENDED
        if timed_out or _STACK_SIGNAL in self._trial.message:
            _, _, place = self._trial.message.partition(": rank 0 was at ")
            where = f", at {place.partition(';')[0]}" if place else ""
            after = format_seconds(self.timeout_seconds)
            raise UnansweredError(f"the dry run was still going after {after}{where}; timeout_seconds= gives it longer")
        raise self._trial.failure()

    def _known_before(self) -> list[Recording]:
        """What dry runs had found, as often as asked for, where steps then run for real ended the process."""
        paths = [self._trial.paths.recording(number) for number in range(self._count)]
        known = [Recording.load(path) for path in paths if path.exists()]
        stopped = known[0].facts["unknown"] if known else ""
        if len(known) < self._count and not stopped:
            return []
        ended = self._trial.message if self._trial.state in ENDED else "it took too long"
        more = {"why_for_real": f"{UNSETTLED}: {ended}"}
        if stopped:
            more = {"unknown": f"{stopped}; run for real on the CPU, {ended}"}
        known = [dataclasses.replace(one, facts=one.facts | more | {"late": True}) for one in known]
        return known if len(known) == self._count else known[:1] * self._count

    def close(self) -> None:
        """End the process if it runs, and remove its directory."""
        try:
            if self._trial.poll() not in ENDED:
                self._trial.kill()
            deadline = time.monotonic() + _ENDING_SECONDS
            while self._trial.poll() not in ENDED and time.monotonic() < deadline:
                time.sleep(_TICK_SECONDS)
        finally:
            scratch.remove_folder(self._trial.run_directory)


def start_prediction(query: MemoryQuery, task: dict[str, Any], timeout_seconds: float, removed: Removed) -> Trial:
    """Start a process that answers `query`, in a run directory among the system's temporary files.

    Raises:
        TrialError: when no process can be started; nothing is left behind.
    """
    limits = {
        "trial.timeout_seconds": timeout_seconds + _KILLING_SECONDS,
        "trial.stall_seconds": timeout_seconds * _STACK_FRACTION,
    }
    config = query.config.replace({**limits, "levers.accumulate_grad_batches": query.accumulation})
    resolved = Resolved(
        devices=(), world_size=1, accelerator="cpu", precision=query.precision,
        threads_per_rank=query.threads, reasons=(),
    )  # fmt: skip
    asked = {
        "precision": query.precision, "world_size": query.ranks, "device_kind": query.device_kind,
        "capability": query.capability, "facts": query.facts,
    }  # fmt: skip
    environment = {**environment_of(resolved), "prediction": {**asked, **task}, **JOB, "removed": removed}
    sent = query.payload
    payload = {"module": sent.module, "data": sent.data, "trainer": sent.trainer, "notes": sent.notes, "cells": cells()}
    paths = RunPaths(scratch.make(_PREFIX))
    try:
        paths.marker.touch()
        # JSON is YAML, and written much faster.
        write_run(paths, json.dumps(config.values()), cloudpickle.dumps(payload), environment)
        trial = Trial(paths, config)
        trial.submit()
    except BaseException:
        scratch.remove_folder(paths.directory)
        raise
    return trial
