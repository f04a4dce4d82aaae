"""Recordings of questions: from the cache at once, else made in processes of their own, two at a time.

The cache lives in this process and holds the last ones used. A dry run that was broken off because it took too long is
not kept, because the next attempt may find a quieter machine.

One question put to a process of its own, and the recordings that come back.

The process is a rank of the same supervisor that runs trials, in a temporary directory that is removed whatever
happens: by the kernel when it has the answer, an error, or an interrupt, and by the supervisor when the kernel is lost.
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
from kit.errors import ConfigError, KitError, Problem
from kit.machine.machine import Resolved
from kit.memory.query import MemoryQuery, plain
from kit.memory.replay.replay import Recording
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
_KEPT = 128
_TICK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """A question, and the batch sizes to record it at; None is that of the data, `NEXT` one more than before."""

    question: MemoryQuery
    batch_sizes: tuple[int | None, ...] = (None,)


class _Cache:
    """The recordings used last, by question and batch size."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int | None], Recording] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, batch_size: int | None) -> Recording | None:
        with self._lock:
            found = self._kept.get((key, batch_size))
            if found is not None:
                self._kept.move_to_end((key, batch_size))
            return found

    def put(self, key: str, batch_size: int | None, recording: Recording) -> None:
        with self._lock:
            self._kept[key, batch_size] = recording
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


cache = _Cache()


def known(question: MemoryQuery, batch_size: int | None = None) -> Recording | None:
    """What was recorded before, or None."""
    found = cache.get(question.key, batch_size)
    return None if found is None else as_asked(question, found)


def recordings(wanted: RecordingRequest, timeout_seconds: float) -> list[Recording]:
    """One recording for each batch size.

    Raises:
        KitError: why there is none.
    """
    (found,) = all_recordings([wanted], timeout_seconds)
    if isinstance(found, KitError):
        raise found
    return found


def all_recordings(wanted: Sequence[RecordingRequest], timeout_seconds: float) -> list[list[Recording] | KitError]:
    """The recordings of several questions, in their order; a question that fails gives its error and hurts no other.

    Equal questions are asked once. An interrupt ends everything that runs.
    """
    answers: dict[tuple[str, tuple[int | None, ...]], list[Recording] | KitError] = {}
    waiting = {(item.question.key, item.batch_sizes): item for item in wanted}
    running: dict[tuple[str, tuple[int | None, ...]], _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name, item = next(iter(waiting.items()))
                del waiting[name]
                running[name] = _Running(item, name[0], timeout_seconds)
            for name in [name for name, run in running.items() if run.look()]:
                answers[name] = running.pop(name).answer
            if running:
                time.sleep(_TICK_SECONDS)
    finally:
        for run in running.values():
            run.close()
    return [_answered(item, answers[item.question.key, item.batch_sizes]) for item in wanted]


class _Running:
    """One question on its way: from the cache, or from a process."""

    def __init__(self, wanted: RecordingRequest, key: str, timeout_seconds: float) -> None:
        self.answer: list[Recording] | KitError = []
        self._wanted, self._key = wanted, key
        self._missing = [size for size in wanted.batch_sizes if cache.get(key, size) is None]
        self._job: PredictionJob | None = None
        try:
            if self._missing:
                self._job = PredictionJob(wanted.question, [*map(self._number, self._missing)], timeout_seconds)
            else:
                self._take([])
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

    def _number(self, size: int | None) -> int | None:
        """`NEXT` as a number where the recording before it is known and not made again."""
        before = cache.get(self._key, None) if size == NEXT else None
        return size if before is None else before.batch_size + 1

    def _take(self, found: list[Recording]) -> None:
        made = dict(zip(self._missing, found, strict=True))
        for size, recording in made.items():
            if not recording.facts.get("late"):
                cache.put(self._key, size, recording)
        answers = [made.get(size) or cache.get(self._key, size) for size in self._wanted.batch_sizes]
        self.answer = [recording for recording in answers if recording is not None]


def _answered(wanted: RecordingRequest, answer: list[Recording] | KitError) -> list[Recording] | KitError:
    return answer if isinstance(answer, KitError) else [as_asked(wanted.question, recording) for recording in answer]


def as_asked(question: MemoryQuery, recording: Recording) -> Recording:
    """The recording with the number of ranks and micro-batches that were asked for, where fewer were recorded."""
    return dataclasses.replace(recording, facts={**recording.facts, **question.facts})


_ANSWER_FRACTION, _STACK_FRACTION = 0.8, 0.95
"""Parts of the time allowed after which a step is broken off, so that there is an answer without it, and after which a
process that does not let itself be broken off writes down where it hangs and is ended."""
_KILLING_SECONDS = 3.0
_START_SECONDS = 60.0
_ENDING_SECONDS = 5.0
JOB = {"job": "predict", "confined": "the prediction"}
_PREFIX = "kit-prediction-"


class UnansweredError(KitError, TimeoutError):
    """A dry run that did not end in time; the message says where it was."""


class PredictionJob:
    """A running prediction. Always `close` it."""

    def __init__(self, question: MemoryQuery, batch_sizes: Sequence[int | None], timeout_seconds: float) -> None:
        """Start it.

        Args:
            question: What to record.
            batch_sizes: One recording is made for each; None is the batch size of the data, -1 one more than before.
            timeout_seconds: How long the process may take.

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
        self._trial = start_prediction(question, task, timeout_seconds, "when lost")

    @property
    def ended(self) -> bool:
        """Whether `recordings` has an answer now."""
        return self._trial.poll() in ENDED or time.monotonic() > self._deadline

    def recordings(self) -> list[Recording]:
        """What was recorded.

        Raises:
            KitError: what the process refused, as it was raised there.
            UnansweredError: when it took too long.
            TrialError: when the module cannot be made, or the process died.
        """
        if self._trial.state == "COMPLETE":
            paths = self._trial.paths
            return [Recording.load(paths.recording(number)) for number in range(self._count)]
        if (refused := self._trial.event("refused")) is not None:
            raise _raised_there(refused)
        if self._trial.cause in ("timeout", "stalled") or self._trial.state not in ENDED:
            raise UnansweredError(self._why_unanswered())
        raise self._trial.failure()

    def _why_unanswered(self) -> str:
        _, _, place = self._trial.message.partition(": rank 0 was at ")
        where = f", at {place.partition(';')[0]}" if place else ""
        return f"the dry run was still going after {format_seconds(self.timeout_seconds)}{where}"

    def close(self) -> None:
        """End the process if it runs, and remove its directory."""
        try:
            self._end()
        finally:
            scratch.remove_folder(self._trial.run_directory)

    def _end(self) -> None:
        if self._trial.poll() in ENDED:
            return
        self._trial.kill()
        deadline = time.monotonic() + _ENDING_SECONDS
        while self._trial.poll() not in ENDED and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)


def start_prediction(question: MemoryQuery, task: dict[str, Any], timeout_seconds: float, removed: Removed) -> Trial:
    """Start a process that answers `question`, in a run directory among the system's temporary files.

    Raises:
        TrialError: when no process can be started; nothing is left behind.
    """
    limits = {
        "trial.timeout_seconds": timeout_seconds + _KILLING_SECONDS,
        "trial.stall_seconds": timeout_seconds * _STACK_FRACTION,
    }
    config = question.config.replace({**limits, "levers.accumulate_grad_batches": question.accumulation})
    paths = RunPaths(scratch.make(_PREFIX))
    try:
        paths.marker.touch()
        environment = {"prediction": {**plain(question), **task}, **JOB, "removed": removed}
        # JSON is YAML, and written much faster.
        write_run(paths, json.dumps(config.values()), _payload(question), {**_environment(question), **environment})
        trial = Trial(paths, config)
        trial.submit()
    except BaseException:
        scratch.remove_folder(paths.directory)
        raise
    return trial


def _payload(question: MemoryQuery) -> bytes:
    parcel = question.parcel
    packed = {"module": parcel.module, "data": parcel.data, "notes": parcel.notes, "cells": cells()}
    return cloudpickle.dumps(packed)  # type: ignore[no-any-return]


def _environment(question: MemoryQuery) -> dict[str, Any]:
    resolved = Resolved(
        devices=(),
        world_size=1,
        accelerator="cpu",
        precision=question.precision,
        threads_per_rank=question.threads,
        reasons=(),
    )
    return environment_of(resolved)


def _raised_there(event: dict[str, Any]) -> KitError:
    """The error of a `refused` event, as an object of its class."""
    kind = getattr(kit.errors, event["type"], KitError)
    if issubclass(kind, ConfigError):
        return kind([Problem(path, message) for path, message in event["problems"]])
    error: KitError = kind(event["message"])
    return error
