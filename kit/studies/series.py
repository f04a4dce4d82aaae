"""Series of trials: one after another, each in fresh processes, in a thread of this kernel.

Starting one returns at once, and no two of its trials run at the same time. `stop()` ends the running trial and starts
no other; what was found until then is kept. A thread has nobody to raise to: its error is kept, and `wait()` raises it.

`Attempts` is a series that tries batch sizes. A rule (a generator) yields each size and is sent whether it fitted;
`kit.studies.find_batch_size` and `kit.studies.back_off` are two such rules. Only running out of memory, on the device
or the host, says that a size does not fit: any other failure ends the series. After every attempt the results file is
replaced in one move.

The largest batch that fitted is remembered below the folder of the runs, in a file for each configuration. All that
decides what a step allocates counts as the configuration (model, data, levers, strategy, kind and memory of the
device, and whether gradients accumulate, since they are then held through the whole step), except the batch itself and
the number of micro-batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import html
import json
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from typing_extensions import override

from kit.config import Config
from kit.errors import ConfigError, KitError, TrialError, TrialStopped
from kit.json_text import read_json, write_json
from kit.memory.query import Payload, make_query, strip_weights
from kit.memory.replay.cards import THIS_MACHINE
from kit.registry import display
from kit.tables import WaitingLine, cell, html_list, html_table, text_table
from kit.trial.directory import runs_folder
from kit.trial.payload import Part
from kit.trial.submit import REHEARSAL, Altered, prepare
from kit.trial.trial import Trial

State = Literal["RUNNING", "COMPLETE", "STOPPED", "FAILED"]
_TICK_SECONDS = 0.02
_ENDING_SECONDS = 10


class Series:
    """The thread that runs `work`, and how it is waited for, stopped and watched."""

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

    # -- what a subclass defines

    def work(self) -> None:
        """Run all trials, in the thread; may set `error`, or raise it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called at the end, after success and after failure."""

    @property
    def kept(self) -> str:
        """The message of an interrupt: where the results so far are kept."""
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
            self._notify()

    def follow(self, trial: Trial) -> None:
        """Return when the trial has ended; stop it when the series is stopped."""
        self.trial = trial
        self._notify()
        while trial.poll() not in ("COMPLETE", "FAILED", "STOPPED", "LOST"):
            if self._stopping.is_set():
                trial.stop()
            time.sleep(_TICK_SECONDS)

    def stop(self) -> None:
        """End the trial that runs and start no other. Returns at once."""
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
            with WaitingLine() as line:
                while not self._ended.wait(_TICK_SECONDS):
                    line.show(self.title, "" if self.trial is None else self.trial.progress)
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

    # -- display

    def on_change(self, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call `callback(self)` after every trial, from a background thread; the function returned ends that."""
        with self._lock:
            self._callbacks.append(callback)
        if self.ended:
            callback(self)
        return lambda: self._callbacks.remove(callback)

    def _notify(self) -> None:
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def _ipython_display_(self) -> None:
        display("attempts.display", self)


Outcome = Literal["fits", "out of memory", "data ends"]
SizeRule = Generator[int, bool, None]
"""Yields the batch size to try and is sent whether it fitted."""

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

    @property
    def cells(self) -> list[str]:
        accumulated = f" × {self.accumulate_grad_batches}" if self.accumulate_grad_batches > 1 else ""
        return [
            f"{self.batch_size}{accumulated}", self.outcome, cell(self.predicted_bytes), cell(self.measured_bytes),
            cell(self.ratio, "{:.2f}".format), cell(self.samples_per_second, "{:,.0f}".format),
        ]  # fmt: skip


class Attempts(Series):
    """A series of trials of batch sizes."""

    confined = False
    """Whether its trials only try sizes out: then what they write is discarded."""

    def __init__(
        self, title: str, module: Any, data: Any, base: Config, folder: Path,
        predict: Callable[[int], int | None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Module and data as `kit.fit` takes them; `predict` gives peak allocated bytes at a batch size."""
        super().__init__(title, base.trial.grace_seconds)
        self.module, self.data, self.base, self.predict = module, data, base, predict
        self.attempts: list[Attempt] = []
        self.reasons: list[str] = []
        self.path = folder / "attempts.json"
        """The results file."""

    # -- what a subclass defines

    def sizes(self) -> SizeRule:
        raise NotImplementedError

    def adapt(self, batch_size: int) -> Config:
        """The config that tries `batch_size`."""
        return self.base.replace({"loader.batch_size": batch_size})

    def conclude(self) -> None:
        """Called when the rule has ended, unless the series was stopped."""

    @property
    def answer(self) -> str:
        raise NotImplementedError

    # -- running

    @override
    def start(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return super().start()

    @override
    def work(self) -> None:
        rule = self.sizes()
        with contextlib.suppress(StopIteration):
            batch_size = next(rule)
            while not self._stopping.is_set() and (attempt := self._try(batch_size)) is not None:
                self.attempts.append(attempt)
                self.finish()
                self._notify()
                batch_size = rule.send(attempt.outcome == "fits")
        if not self._stopping.is_set():
            self.conclude()

    @override
    def finish(self) -> None:
        write_json(self.path, self.to_dict(), indent=2)

    @property
    @override
    def kept(self) -> str:
        return f"interrupted after {len(self.attempts)} trials; they are kept in {self.path}"

    def _try(self, batch_size: int) -> Attempt | None:
        """One trial; None when it was stopped."""
        config, predicted = self.adapt(batch_size), self.predict(batch_size)

        def attempt(outcome: Outcome, message: str, trial: Trial | None = None) -> Attempt:
            return Attempt(
                batch_size=batch_size, accumulate_grad_batches=config.levers.accumulate_grad_batches, outcome=outcome,
                predicted_bytes=predicted, measured_bytes=None if trial is None else measured_bytes(trial),
                samples_per_second=None if trial is None else samples_per_second(trial), message=message,
                run_directory="" if trial is None else str(trial.run_directory),
            )  # fmt: skip

        given_size, confined = None if self.data is None else batch_size, REHEARSAL if self.confined else ""
        try:
            trial = Trial(prepare(self.module, self.data, config, Altered(given_size), confined=confined), config)
            trial.submit()
        except ConfigError as error:
            if any(problem.path == "loader.batch_size" for problem in error.problems):
                return attempt("data ends", str(error))
            raise
        self.follow(trial)
        if trial.state == "STOPPED":
            self._stopping.set()
            return None
        if trial.state == "FAILED" and trial.cause in ("device_oom", "host_oom"):
            return attempt("out of memory", trial.message, trial)
        if trial.state != "COMPLETE":
            raise trial.failure()
        most = max((int(event["samples"]) for event in trial.steps), default=batch_size)
        if most < batch_size:
            return attempt("data ends", f"a batch holds {most} samples at most", trial)
        return attempt("fits", trial.message, trial)

    # -- display

    def to_dict(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        attempts = [{**asdict(attempt), "ratio": attempt.ratio} for attempt in self.attempts]
        error = None if self.error is None else str(self.error)
        return {
            "title": self.title, "state": self.state, "answer": self.answer, "reasons": self.reasons, "error": error,
            "attempts": attempts, "config": self.base.values(),
        }  # fmt: skip

    @property
    def rows(self) -> list[list[str]]:
        return [attempt.cells for attempt in self.attempts]

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


def measured_bytes(trial: Trial) -> int | None:
    """Peak allocated bytes of the fullest device; None where they were not measured."""
    found = [event["device_allocated_bytes"] for event in trial.events if event["kind"] == "memory_measured"]
    return max((int(value) for value in found if value is not None), default=None)


def samples_per_second(trial: Trial) -> float | None:
    """Of all devices together, after the warm-up steps; None before there is one."""
    seconds: dict[int, float] = {}
    samples: dict[int, int] = {}
    for event in trial.steps:
        if int(event["step"]) > trial.config.trial.warmup_steps:
            rank = int(event["rank"])
            seconds[rank] = seconds.get(rank, 0.0) + float(event["step_seconds"])
            samples[rank] = samples.get(rank, 0) + int(event["samples"])
    return sum(samples[rank] / seconds[rank] for rank in seconds if seconds[rank] > 0) or None


def batch_key(module: Any, data: Any, config: Config) -> str:
    """Hexadecimal digits, the same for configurations that differ in batch or number of micro-batches only.

    Raises:
        KitError: what `predict_memory` refuses.
    """
    micro_batches = min(2, config.levers.accumulate_grad_batches)
    plain = config.replace({"loader.batch_size": 1, "levers.accumulate_grad_batches": micro_batches})
    query, target = make_query(module, data, plain, THIS_MACHINE)
    # Loaders that were made twice pickle differently; without the numbers in them they do not.
    shapes = strip_weights(query.data, Part("default")).module
    query = dataclasses.replace(query, payload=Payload(query.payload.module, shapes))
    device = [target.device_kind, target.capability, config.hardware.device_memory_bytes]
    return hashlib.sha256(json.dumps([query.key, device]).encode()).hexdigest()[:16]


def _safe_batch_file(key: str, config: Config) -> Path:
    return runs_folder(config.trial.folder) / ".safe-batches" / f"{key}.json"


def remember(key: str, config: Config, batch_size: int) -> Path:
    """Keep `batch_size` as the last that was safe."""
    return write_json(_safe_batch_file(key, config), {"batch_size": batch_size, "name": config.name})


def remembered(key: str, config: Config) -> int | None:
    """The last safe batch, or None when there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(_safe_batch_file(key, config).read_text())["batch_size"]
        return int(found) if int(found) > 0 else None
    return None
