"""One question put to a process of its own, and the recordings that come back.

The process is a rank of the same supervisor that runs trials, in a temporary directory that is removed whatever
happens: by the kernel when it has the answer, an error, or an interrupt, and by the supervisor when the kernel is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import cloudpickle

import kit.errors
from kit.errors import ConfigError, KitError, Problem
from kit.machine import Resolved
from kit.plan.memory.recording import Recording
from kit.run import scratch
from kit.run.group import Removed
from kit.run.memory.question import Question, plain
from kit.run.paths import RunPaths
from kit.run.payload import cells
from kit.run.submission import environment_of, write_run
from kit.run.trial import ENDED, Trial
from kit.units import format_seconds

_ANSWER_FRACTION, _STACK_FRACTION = 0.8, 0.95
"""Parts of the time allowed after which a step is broken off, so that there is an answer without it, and after which a
process that does not let itself be broken off writes down where it hangs and is ended."""
_KILLING_SECONDS = 3.0
_START_SECONDS = 60.0
_ENDING_SECONDS = 5.0
_TICK_SECONDS = 0.005
JOB = {"job": "predict", "confined": "the prediction"}
_PREFIX = "kit-prediction-"


class UnansweredError(KitError, TimeoutError):
    """A dry run that did not end in time; the message says where it was."""


class PredictionJob:
    """A running prediction. Always `close` it."""

    def __init__(self, question: Question, batch_sizes: Sequence[int | None], timeout_seconds: float) -> None:
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


def start_prediction(question: Question, task: dict[str, Any], timeout_seconds: float, removed: Removed) -> Trial:
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


def _payload(question: Question) -> bytes:
    parcel = question.parcel
    packed = {"module": parcel.module, "data": parcel.data, "notes": parcel.notes, "cells": cells()}
    return cloudpickle.dumps(packed)  # type: ignore[no-any-return]


def _environment(question: Question) -> dict[str, Any]:
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
