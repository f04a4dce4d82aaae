"""Series: several trials one after another, in a thread of this kernel, never two at once.

A call that starts one returns at once. `stop()` ends the trial that runs and asks for no other, and what was found
until then is kept. A thread has nobody to raise to: what went wrong is kept, and `wait()` raises it.

Attempts: one trial after another, each in fresh processes, until a rule has its answer.

A search and a back-off are both a rule that names batch sizes and hears whether each fitted. The trials run in a thread
of this kernel, so a call returns at once; `stop()` ends the trial that runs and asks for no other, and what was found
until then is kept. Every attempt is written to the results file when it is over, the file replaced in one move.

Out of memory is what the trial says it died of, on the device or on the host. Any other failure is no answer: it ends
the series, and `wait()` raises it.

The last safe batch of a configuration, remembered below the folder of its runs.

A configuration is all that decides what a step allocates, but the batch itself: model, data, levers, strategy, kind of
device and its memory. One small file each, replaced in one move, so that two kernels can remember at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import html
import json
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from typing_extensions import override

from kit.config import Config
from kit.errors import ConfigError, KitError, TrialError, TrialStopped
from kit.json_text import read_json
from kit.memory.query import Payload, hollow, make_query
from kit.memory.replay.cards import THIS_MACHINE
from kit.registry import load
from kit.tables import html_list, html_table, text_table
from kit.trial.directory import runs_folder
from kit.trial.payload import Part
from kit.trial.submit import REHEARSAL, prepare
from kit.trial.trial import Trial
from kit.units import format_bytes

State = Literal["RUNNING", "COMPLETE", "STOPPED", "FAILED"]
_TICK_SECONDS = 0.02
_ENDING_SECONDS = 10


class Series:
    """The thread, and how it is waited for, stopped and watched; `work` is what it does."""

    def __init__(self, title: str, grace_seconds: float) -> None:
        self.title = title
        self.state: State = "RUNNING"
        self.trial: Trial | None = None
        """The trial that runs, or the last one."""
        self.error: KitError | None = None
        self._grace_seconds = grace_seconds
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []
        self._lock = threading.Lock()

    # -- to be said by those who inherit

    def work(self) -> None:
        """Everything, in the thread; may set `error`, or raise it."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is done at the end, however it came."""

    @property
    def kept(self) -> str:
        """What an interrupt says of what was found."""
        return "interrupted"

    # -- running

    def start(self) -> Self:
        threading.Thread(target=self._run, name=self.title, daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self.work()
            self.state = "STOPPED" if self._stopping.is_set() else "COMPLETE" if self.error is None else "FAILED"
        except KitError as error:
            self.error, self.state = error, "FAILED"
        except Exception as error:
            self.error, self.state = TrialError(f"{type(error).__name__}: {error}"), "FAILED"
        finally:
            self.finish()
            self._ended.set()
            self._tell()

    def follow(self, trial: Trial) -> None:
        """Return when it has ended; stop it when the series is stopped."""
        self.trial = trial
        self._tell()
        while trial.poll() not in ("COMPLETE", "FAILED", "STOPPED", "LOST"):
            if self._stopping.is_set():
                trial.stop()
            time.sleep(_TICK_SECONDS)

    # -- ending it

    def stop(self) -> None:
        """End the trial that runs and ask for no other. Returns at once."""
        self._stopping.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Self:
        """Return when there is an answer, or it was stopped. An interrupt stops it and keeps what it found.

        Raises:
            KitError: when it FAILED.
            TrialStopped: after an interrupt.
            TimeoutError: after `timeout` seconds; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._ended.wait(_TICK_SECONDS):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self.title} is still running after {timeout} s; it goes on")
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait(self._grace_seconds + _ENDING_SECONDS)
            raise TrialStopped(self.kept) from None
        if self.error is not None:
            raise self.error
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Self:
        try:
            while not self.ended:
                await asyncio.sleep(_TICK_SECONDS)
        except asyncio.CancelledError:
            self.stop()
            raise
        return self.wait()

    # -- telling

    def on_change(self, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call `callback(self)` after every trial, from a background thread; the function returned ends that."""
        with self._lock:
            self._callbacks.append(callback)
        if self.ended:
            callback(self)
        return lambda: self._callbacks.remove(callback)

    def _tell(self) -> None:
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def _ipython_display_(self) -> None:
        """Live and with a button where widgets are installed, else the text."""
        try:
            load("attempts.display")(self)
        except ImportError:
            sys.stdout.write(f"{self!r}\n")


Outcome = Literal["fits", "out of memory", "data ends"]
Looks = Generator[int, bool, None]
"""A rule: yields the batch size to try, hears whether it fitted."""

_COLUMNS = ("batch", "outcome", "predicted", "measured", "ratio", "samples/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One trial at one batch size."""

    batch_size: int
    """Samples per batch on each device."""
    accumulate_grad_batches: int
    outcome: Outcome
    predicted_bytes: int | None
    """Peak allocated on each device, before it ran; None where it is not known."""
    measured_bytes: int | None
    """Peak allocated on the fullest device; None where the trial did not get so far."""
    samples_per_second: float | None
    """Of all devices together, without the first step."""
    message: str
    """How the trial ended."""
    run_directory: str

    @property
    def ratio(self) -> float | None:
        """measured / predicted."""
        predicted, measured = self.predicted_bytes, self.measured_bytes
        return measured / predicted if predicted and measured else None


@dataclass(frozen=True, slots=True)
class Task:
    """What is tried: as `kit.fit` takes it."""

    module: Any
    data: Any
    config: Config
    folder: Path
    """Where run directories and the results file go."""
    predict: Callable[[int], int | None]
    """Peak allocated bytes at a batch size."""

    @property
    def own_data(self) -> bool:
        return self.data is None


class Attempts(Series):
    """A series of trials in a thread; `looks` is the rule, `adapt` makes the config of a batch size."""

    def __init__(self, title: str, task: Task) -> None:
        super().__init__(title, task.config.trial.grace_seconds)
        self.task = task
        self.attempts: list[Attempt] = []
        self.reasons: list[str] = []
        self.path = task.folder / "attempts.json"
        """The results file."""

    # -- to be said by those who inherit

    confined = False
    """Whether its trials only try sizes out, and what they write is kept from everybody."""

    def looks(self) -> Looks:
        raise NotImplementedError

    def adapt(self, batch_size: int) -> Config:
        """The config that tries `batch_size`."""
        return self.task.config.replace({"loader.batch_size": batch_size})

    def conclude(self) -> None:
        """What follows from the attempts, when the rule has ended and nobody has stopped it."""

    @property
    def answer(self) -> str:
        raise NotImplementedError

    # -- running

    @override
    def start(self) -> Self:
        self.task.folder.mkdir(parents=True, exist_ok=True)
        return super().start()

    @override
    def work(self) -> None:
        self._follow(self.looks())
        if not self._stopping.is_set():
            self.conclude()

    @override
    def finish(self) -> None:
        self._write()

    @property
    @override
    def kept(self) -> str:
        return f"interrupted after {len(self.attempts)} trials; they are kept in {self.path}"

    def _follow(self, looks: Looks) -> None:
        try:
            batch_size = next(looks)
            while not self._stopping.is_set():
                attempt = self._try(batch_size)
                if attempt is None:
                    return
                self.attempts.append(attempt)
                self._write()
                self._tell()
                batch_size = looks.send(attempt.outcome == "fits")
        except StopIteration:
            return

    def _try(self, batch_size: int) -> Attempt | None:
        """One trial; None when it was stopped."""
        config = self.adapt(batch_size)
        predicted = self.task.predict(batch_size)
        try:
            self.trial = self._submit(config, batch_size)
        except ConfigError as error:
            if not self._is_too_large_for_data(error):
                raise
            return _attempt(config, batch_size, "data ends", predicted, None, str(error))
        self.follow(self.trial)
        return self._judged(self.trial, config, batch_size, predicted)

    def _submit(self, config: Config, batch_size: int) -> Trial:
        task = self.task
        asked = None if task.own_data else batch_size
        confined = REHEARSAL if self.confined else ""
        trial = Trial(prepare(task.module, task.data, config, asked, confined=confined), config)
        trial.submit()
        return trial

    @staticmethod
    def _is_too_large_for_data(error: ConfigError) -> bool:
        return any(problem.path == "loader.batch_size" for problem in error.problems)

    def _judged(self, trial: Trial, config: Config, batch_size: int, predicted: int | None) -> Attempt | None:
        if trial.state == "STOPPED":
            self._stopping.set()
            return None
        if trial.state == "FAILED" and trial.cause in ("device_oom", "host_oom"):
            return _attempt(config, batch_size, "out of memory", predicted, trial, trial.message)
        if trial.state != "COMPLETE":
            raise trial.failure()
        most = max((int(event["samples"]) for event in trial.steps), default=batch_size)
        if most < batch_size:
            return _attempt(config, batch_size, "data ends", predicted, trial, f"a batch holds {most} samples at most")
        return _attempt(config, batch_size, "fits", predicted, trial, trial.message)

    # -- telling

    def _write(self) -> None:
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.to_dict(), indent=2), encoding="utf-8")
        draft.replace(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        attempts = [{**asdict(attempt), "ratio": attempt.ratio} for attempt in self.attempts]
        error = None if self.error is None else str(self.error)
        return {
            "title": self.title, "state": self.state, "answer": self.answer, "reasons": self.reasons, "error": error,
            "attempts": attempts, "config": self.task.config.values(),
        }  # fmt: skip

    @property
    def rows(self) -> list[list[str]]:
        return [_row(attempt) for attempt in self.attempts]

    @property
    def sentences(self) -> list[str]:
        return [*self.reasons, *([str(self.error)] if self.error is not None else []), f"results file: {self.path}"]

    def __repr__(self) -> str:
        table = [text_table(_COLUMNS, self.rows)] if self.attempts else []
        return "\n".join([f"{self.title}: {self.answer}", *table, *(f"- {text}" for text in self.sentences)])

    @override
    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self.rows, caption=f"{self.title}: {self.answer}")
        return table + html_list(self.sentences)


def _attempt(
    config: Config, batch_size: int, outcome: Outcome, predicted: int | None, trial: Trial | None, message: str
) -> Attempt:
    return Attempt(
        batch_size=batch_size, accumulate_grad_batches=config.levers.accumulate_grad_batches, outcome=outcome,
        predicted_bytes=predicted, measured_bytes=None if trial is None else measured_bytes(trial),
        samples_per_second=None if trial is None else samples_per_second(trial), message=message,
        run_directory="" if trial is None else str(trial.run_directory),
    )  # fmt: skip


def measured_bytes(trial: Trial) -> int | None:
    """Peak allocated bytes of the fullest device; None where they were not measured."""
    found = [event["device_allocated_bytes"] for event in trial.events if event["kind"] == "memory_measured"]
    return max((int(value) for value in found if value is not None), default=None)


def samples_per_second(trial: Trial) -> float | None:
    """Of all devices together, after the warm-up steps; None before there is one."""
    warmup = trial.config.trial.warmup_steps
    steps = [event for event in trial.steps if int(event["step"]) > warmup]
    seconds: dict[int, float] = {}
    samples: dict[int, int] = {}
    for event in steps:
        rank = int(event["rank"])
        seconds[rank] = seconds.get(rank, 0.0) + float(event["step_seconds"])
        samples[rank] = samples.get(rank, 0) + int(event["samples"])
    return sum(samples[rank] / seconds[rank] for rank in seconds if seconds[rank] > 0) or None


def _row(attempt: Attempt) -> list[str]:
    sizes = [
        "–" if value is None else format_bytes(value) for value in (attempt.predicted_bytes, attempt.measured_bytes)
    ]
    ratio = "–" if attempt.ratio is None else f"{attempt.ratio:.2f}"
    speed = "–" if attempt.samples_per_second is None else f"{attempt.samples_per_second:,.0f}"
    accumulated = f" × {attempt.accumulate_grad_batches}" if attempt.accumulate_grad_batches > 1 else ""
    return [f"{attempt.batch_size}{accumulated}", attempt.outcome, *sizes, ratio, speed]


_FOLDER = ".safe-batches"


def batch_key(module: Any, data: Any, config: Config) -> str:
    """Hexadecimal digits, the same for configurations that differ in their batch only.

    Raises:
        KitError: what `predict_memory` refuses.
    """
    plain = config.replace({"loader.batch_size": 1, "levers.accumulate_grad_batches": 1})
    question, target = make_query(module, data, plain, THIS_MACHINE)
    # Loaders that were made twice pickle differently; without the numbers in them they do not.
    shapes = hollow(question.data, Part("default")).module
    question = dataclasses.replace(question, parcel=Payload(question.parcel.module, shapes))
    device = [target.device_kind, target.capability, config.hardware.device_memory_bytes]
    return hashlib.sha256(json.dumps([question.key, device]).encode()).hexdigest()[:16]


def remember(key: str, config: Config, batch_size: int) -> Path:
    """Keep `batch_size` as the last that was safe."""
    folder = runs_folder(config.trial.folder) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"batch_size": batch_size, "name": config.name}), encoding="utf-8")
    return draft.replace(path)


def remembered(key: str, config: Config) -> int | None:
    """The last safe batch, or None when there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json((runs_folder(config.trial.folder) / _FOLDER / f"{key}.json").read_text())["batch_size"]
        return int(found) if int(found) > 0 else None
    return None
