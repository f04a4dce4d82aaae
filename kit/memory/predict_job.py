"""The job of a prediction: dry-run the module on fake tensors and leave the recordings in the run directory.

An error of kit comes back as it was raised, in a `refused` event. A step that does not end is interrupted while there
is still time to answer without it: then activations are unknown, and the rest is not. Beside a trial, the job waits
until the trial has taken its first step, works at the lowest priority, and writes the estimate to the trial's folder.

Where a dry run ends without an answer, because an operator has no fake implementation, a shape depends on numbers, or C
code insists on real tensors, `RealSteps` runs the same two steps for real on this CPU: on two and on three samples,
from which the batch asked for follows as from two dry runs, else on that batch itself; in the time that is left, of
which a dry run that took all of its own leaves a little. Where guesses stay open (`settle` of
`kit.memory.replay.replay`) it runs them beside the dry run, in half of the time that is left and first on the batch
asked for, and what needs more counts. The memory that this process may take is limited to half of what is free, what
needs more is not begun, and what is known before is on disk by then. It tells of itself in `facts["source"]`. Not
beside a trial, which it would disturb, and not for several ranks. Where these steps stop as the dry run did, a fit
would stop too, and that error is the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import cloudpickle
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from kit.config import Config
from kit.confinement.confine import confined
from kit.errors import ConfigError, KitError, TrialError
from kit.machine.machine import share
from kit.machine.processes import memory_limited
from kit.memory.query import with_numbers, without_memory
from kit.memory.record.dry_run import JOB, DryRun, NotRunError, record
from kit.memory.recordings import NEXT, UNSETTLED, UnansweredError
from kit.memory.replay.cards import DeviceTarget
from kit.memory.replay.estimate import Residuals, estimate
from kit.memory.replay.replay import EVALUATIONS, OF_OPTIMIZERS, Recording, is_open, replay, settle, settled_like
from kit.memory.replay.scaling import BatchScaling, ScalingError, in_proportion
from kit.registry import load
from kit.train.choices import asked_stages, validates_by
from kit.trial.context import Context
from kit.trial.directory import RunPaths
from kit.trial.fit_job import load_part, make_data, make_module, make_parts
from kit.trial.payload import NO_PARTS, Part, TrainerParts
from kit.trial.verdict import describe, describe_failure, own_frame
from kit.units import format_bytes, format_seconds

_LOOK_SECONDS = 0.2
_LOWEST_PRIORITY = 19
_WITHOUT_OPERATORS_SECONDS = 1.0
"""After the end of patience, what runs no operator for so long is broken off wherever it is."""


def predict(context: Context) -> None:
    """Record what was asked, one recording for each batch size."""
    task = context.environment["prediction"]
    beside = RunPaths(Path(task["beside"]["run_directory"])) if task["beside"] else None
    if beside is not None and not _wait_for_turn(beside):
        context.writer.write("prediction_ended")
        return
    payload = context.load_payload()
    patience = Patience(task["patience_seconds"], context.cells)
    found: list[Recording] = []
    real = None if beside is not None else RealSteps(context, payload, patience)
    try:
        # Load the user's code before the dry run: tensors that a file makes when imported belong to no module.
        with patience, confined(JOB, lambda: True, bool) as kept, without_memory():
            load_part(cloudpickle.loads(payload["module"]), context.config)
        for place, wanted in enumerate(task["batch_sizes"]):
            batch_size = found[-1].batch_size + 1 if wanted == NEXT else wanted
            if real is not None and real.dry is not None and not real.failed:
                recording = real.instead_of(dataclasses.replace(real.dry, batch_size=batch_size))
            elif found and found[0].facts.get("late"):
                recording = found[0]
            else:
                recording = _record(context, payload, batch_size, patience, kept.notes, found[:1])
                if real is not None and recording.facts["unknown"]:
                    recording.save(context.paths.recording(place))  # what is known, whatever becomes of this process
                    recording = real.instead_of(recording)
            found.append(recording)
            found[-1].save(context.paths.recording(place))
            context.writer.write("recorded", batch_size=found[-1].batch_size, seconds=found[-1].facts["seconds"])
        if real is not None and real.dry is None and is_open(found[0]):
            for place, recording in enumerate(real.beside(found)):
                recording.save(context.paths.recording(place))
    except KitError as error:
        problems = error.problems if isinstance(error, ConfigError) else ()
        fields = [[problem.path, problem.message] for problem in problems]
        details = error.details if isinstance(error, TrialError) else ""
        context.writer.write("refused", type=type(error).__name__, message=str(error), problems=fields, details=details)
        raise
    if beside is not None:
        _leave_estimate(found[0], task["beside"], beside, context.config)
    context.writer.write("prediction_ended")


def _record(
    context: Context, payload: dict[str, Any], batch_size: int | None, patience: Patience, said: list[str],
    settled: Sequence[Recording],
) -> Recording:  # fmt: skip
    """A recording; its guesses are settled, or answered as in one that is `settled`."""
    task = context.environment["prediction"]
    trainer = _trainer_parts(payload)
    run = _run_of(context, payload, trainer)
    left_out: dict[str, str] = {}
    without: dict[str, Any] = {}
    otherwise = settled[0].facts["otherwise"] if settled else ""
    recording = _recorded(run, payload, batch_size, patience, otherwise)
    for what, less in _with_less(run, trainer):
        # What else runs beside the steps must not hide what is known of these.
        if not recording.facts["unknown"] or patience.message:
            break
        try:
            again = _recorded(less, payload, batch_size, patience, otherwise)
        except UnansweredError:
            break
        left_out[what] = recording.facts["unknown"]
        if not again.facts["unknown"]:
            run, recording, without = less, again, {"left_out": left_out}
    if settled:
        recording = settled_like(recording, settled[0])
    else:
        found = recording

        def otherwise_answered(guess: str) -> Recording:
            try:
                return _recorded(run, payload, batch_size, patience, guess)
            except UnansweredError:
                return dataclasses.replace(found, facts=found.facts | {"unknown": patience.message, "refused": False})
            except Exception as error:  # the module cannot be made so
                return dataclasses.replace(found, facts=found.facts | {"unknown": str(error) or "?", "refused": True})

        recording = settle(recording, otherwise_answered)
    notes = [*said, *recording.facts.get("notes", ()), *payload["notes"]]
    facts = {**recording.facts, **task["facts"], **without, "notes": notes}
    if patience.message and facts["unknown"]:
        facts |= {"unknown": patience.message, "late": True}
    return dataclasses.replace(recording, facts=facts)


def _run_of(context: Context, payload: dict[str, Any], trainer: TrainerParts) -> DryRun:
    task = context.environment["prediction"]
    return DryRun(
        config=context.config, precision=task["precision"], world_size=task["world_size"],
        device_kind=task["device_kind"], capability=tuple(task["capability"]) if task["capability"] else None,
        make_callbacks=lambda: _callbacks(payload["trainer"]), flags=trainer.flags,
    )  # fmt: skip


def _trainer_parts(payload: dict[str, Any]) -> TrainerParts:
    parts: TrainerParts = cloudpickle.loads(payload["trainer"]).value if payload["trainer"] else NO_PARTS
    return parts


def _recorded(
    run: DryRun, payload: dict[str, Any], batch_size: int | None, patience: Patience, otherwise: str
) -> Recording:
    seed_everything(run.config.training.seed, workers=True, verbose=False)
    with patience:
        return record(
            lambda: make_to_record(payload, run.config),
            lambda: make_data(cloudpickle.loads(payload["data"]), run.config),
            run, batch_size, otherwise, patience.check,
        )  # fmt: skip


def make_to_record(payload: dict[str, Any], config: Config) -> LightningModule:
    """The module, of which a dry run notes only that it is compiled."""
    part: Part = cloudpickle.loads(payload["module"])
    module = make_module(dataclasses.replace(part, compiled=b""), config)
    return cast("LightningModule", torch.compile(module)) if part.compiled else module


def _with_less(run: DryRun, trainer: TrainerParts) -> Iterator[tuple[str, DryRun]]:
    """What a dry run can do without, and the dry run without it, and without what came before."""
    if trainer.callbacks:
        run = dataclasses.replace(run, make_callbacks=list)
        yield ", ".join(map(str, trainer.callbacks)), run
    trial = run.config.trial
    validates = trial.validate_every_steps > 0 or validates_by(trainer.flags)
    evaluates = ", ".join([*(EVALUATIONS[:1] if validates else ()), *asked_stages(run.config)])
    if trainer.flags or evaluates:
        settings = ("trial.validate_every_steps", "trial.test_batches", "trial.predict_batches")
        config = run.config.replace(dict.fromkeys(settings, 0))
        what = evaluates or f"trainer= with {', '.join(trainer.flags)}"
        yield what, dataclasses.replace(run, config=config, flags={})


def _callbacks(sent: bytes) -> list[Callback]:
    """The caller's own, but for those that write files or lines and hold nothing."""
    made = make_parts(cloudpickle.loads(sent).value.callbacks, Callback, "callbacks") if sent else []
    return [callback for callback in made if not isinstance(callback, Checkpoint | ProgressBar)]


class Patience:
    """Breaks off what it guards when the time of all that it guarded is used up.

    An alarm may ring anywhere: in a finalizer, which loses errors; while a fake mode is entered, which leaves it half
    entered; in a call from C++ that no error may leave, which ends the process. So it only says that time is up, and
    `check` raises before the next operator, and again if that is caught. Where there is none for a while (a wait, a
    loop of Python alone) the alarm raises after all. What then comes out of the guard is told as `UnansweredError`.
    """

    def __init__(self, seconds: float, cells: dict[str, tuple[str, str]]) -> None:
        self.seconds, self.cells = seconds, cells
        self.message = ""
        """Where it was broken off; empty until then."""
        self._began = time.monotonic()
        self._rang = self._raised = False

    @property
    def left_seconds(self) -> float:
        return self.seconds - (time.monotonic() - self._began)

    def __enter__(self) -> None:
        self._rang = self._raised = False
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, max(self.left_seconds, 0.001))

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._raised and isinstance(error, Exception):
            raise UnansweredError(f"the dry run was {self.message}") from error

    def check(self) -> None:
        """Raise TimeoutError when the time is up."""
        if self._rang:
            self._raised = True
            raise TimeoutError(self.message)

    def _ring(self, _: int, stack: FrameType | None) -> None:
        if self._rang:
            if not self._raised:
                self.check()
            return
        if not self.message:
            frame = own_frame((item.filename, item.lineno or 0, item.name) for item in traceback.extract_stack(stack))
            where = f" at {describe(frame, self.cells)}" if frame else ""
            self.message = f"still running after {format_seconds(self.seconds)}{where}"
        self._rang = True
        signal.setitimer(signal.ITIMER_REAL, _WITHOUT_OPERATORS_SECONDS)


# -- for real

_OF_DEVICES = re.compile(r"cuda|gpu|nvidia|rocm|triton|alloc|memory", re.IGNORECASE)
_LINE = re.compile(r" at \S+:\d+$")
_OF_NUMBERS = ("IndexError: Target ", "IndexError: index out of range in self")
"""How torch begins where a label is no class, or a number no row of an embedding."""
SMALL_BATCHES = (2, 3)
"""Samples that steps are run for real with."""
_FREE_FRACTION = 0.5
_LAST_FRACTION = 0.15
"""Of the time of a dry run, what they have where it took all."""
_BESIDE_FRACTION = 0.5
"""Of the time that a dry run left, what they have to settle its guesses."""


class RealSteps:
    """Two steps run for real on this CPU where a dry run cannot follow them, and what is known from them."""

    def __init__(self, context: Context, payload: dict[str, Any], patience: Patience) -> None:
        self._context, self._payload, self._dry_patience, self._patience = context, payload, patience, patience
        self._first: Recording | None = None
        self._scaling: BatchScaling | None = None
        self._run_for: tuple[int, ...] = ()
        """The batch sizes that `_scaling` was run for."""
        self.dry: Recording | None = None
        """What was known without them."""
        self.failed = False
        """Whether the steps did not run."""

    @functools.cached_property
    def _run(self) -> DryRun:
        """On one device, whatever was asked: what several hold is not known from it, but a user's error is."""
        run = _run_of(self._context, self._payload, _trainer_parts(self._payload))
        alone = run.config.replace({"hardware.strategy": "none", "hardware.devices": 1})
        return dataclasses.replace(run, config=alone, world_size=1, for_real=True)

    @property
    def _is_alone(self) -> bool:
        config: Config = self._context.config
        return self._context.environment["prediction"]["world_size"] == 1 and config.hardware.strategy == "none"

    def instead_of(self, dry: Recording) -> Recording:
        """The recording at the batch size of `dry`, or `dry` where several devices are asked or they do not run either.

        Raises:
            TrialError: where they stop as the dry run did, so that a fit would: the user's error, with its line.
        """
        stopped = dry.facts["unknown"]
        least_seconds = _LAST_FRACTION * self._dry_patience.seconds if self.dry is None else 0.0
        self._patience = Patience(max(least_seconds, self._dry_patience.left_seconds), self._dry_patience.cells)
        self.dry, self.failed = dry, True
        try:
            found, source = self._ran(dry)
        except NotRunError as error:
            if error.__cause__ is not None and self._is_users(dry, str(error)):
                told = describe_failure(error.__cause__, self._context)
                raise TrialError(told["message"], told["traceback"]) from None
            if not self._is_alone:
                return dry
            other = f"; two steps did not run to an end for real on the CPU either: {error}"
            also = "; so it did when run for real on the CPU" if str(error) == stopped else other
            facts = {"unknown": stopped + also, "late": bool(self._patience.message or dry.facts.get("late"))}
            return dataclasses.replace(dry, facts=dry.facts | facts)
        if not self._is_alone:
            return dry
        self.failed = False
        why = f"a dry run stopped with {stopped}, so two steps were {source}"
        return self._combined(dry, found, {"source": source, "why_for_real": why, "late": False})

    def _is_users(self, dry: Recording, stopped: str) -> bool:
        """Whether steps that stopped on the CPU too would stop wherever they run: with an error of the same type at the
        same line that is not about a device or its memory, and that no code raises which looks at weights not sent; or
        with one that says of the numbers of real samples what a dry run, which has none, cannot."""
        if stopped.startswith(_OF_NUMBERS):
            return True
        errors = dry.facts["unknown"], stopped
        types, lines = {one.partition(":")[0] for one in errors}, {tuple(_LINE.findall(one)) for one in errors}
        is_guard = self._is_instance and dry.facts["refused"]
        return len(types) == len(lines) == 1 and not is_guard and not any(map(_OF_DEVICES.search, errors))

    def beside(self, dry: Sequence[Recording]) -> list[Recording]:
        """In place of dry runs of which guesses are open: they or the steps run for real, whichever need more.

        What the numbers decided is then known as it was in two steps, so that no condition is left but an optimizer's.
        The weights of an instance are not sent: then all are left. So they are where the steps do not run for real.
        """
        if not self._is_alone:
            return list(dry)
        before = self._dry_patience
        seconds = max(_BESIDE_FRACTION * before.left_seconds, _LAST_FRACTION * before.seconds)
        self._patience = Patience(seconds, before.cells)
        try:
            real = [self._ran(one) for one in dry]
        except NotRunError as error:
            more = {"why_for_real": f"{UNSETTLED}: {error}", "late": bool(self._patience.message)}
            return [dataclasses.replace(one, facts=one.facts | more) for one in dry]
        needed_bytes, dry_bytes = (replay(one).peak_allocated_bytes for one in (real[0][0], dry[0]))
        first, *others = dry[0].facts["conditions"]
        why = (
            f"the memory depends on numbers ({first}{' and others' if others else ''}), so two steps were also "
            f"{real[0][1]}: they need {format_bytes(needed_bytes)}, a dry run {format_bytes(dry_bytes)}, and the "
            "larger counts"
        )
        found = []
        for (recording, source), one in zip(real, dry, strict=True):
            own: dict[str, Any] = {"source": source, "why_for_real": why}
            if needed_bytes > dry_bytes:
                recording = self._combined(one, recording, own)
            else:
                own["source"] = f"no less than {source}"
                own["conditions"] = recording.facts["conditions"]
                recording = dataclasses.replace(one, facts=one.facts | own)
            left = [each for each in one.facts["conditions"] if self._is_instance or each.startswith(OF_OPTIMIZERS)]
            conditions = list(dict.fromkeys([*left, *recording.facts["conditions"]]))
            facts = recording.facts | {"conditions": conditions, "guesses": one.facts["guesses"]}
            found.append(dataclasses.replace(recording, facts=facts))
        return found

    @functools.cached_property
    def _is_instance(self) -> bool:
        part: Part = cloudpickle.loads(self._payload["module"])
        return part.kind == "instance"

    def _combined(self, dry: Recording, found: Recording, own: dict[str, Any]) -> Recording:
        """What was found, with what it has of its own to tell beside what is known from a dry run."""
        if self._run.device_kind == "cuda":
            own["why_for_real"] += "; attention and recurrent layers hold what they hold on a CPU"
        said = [note for note in dry.facts["notes"] if note not in dry.facts["guesses"]]
        own["notes"] = list(dict.fromkeys([*said, *found.facts["notes"]]))
        settled = settle(dataclasses.replace(found, facts={**dry.facts, **found.facts, **own}), lambda _: found)
        conditions = [*found.facts["conditions"], *settled.facts["conditions"]]
        return dataclasses.replace(settled, facts=settled.facts | {"conditions": conditions})

    def _ran(self, dry: Recording) -> tuple[Recording, str]:
        """The steps at the batch size of `dry`, and how they were run.

        Raises:
            NotRunError: why they do not run.
        """
        free_bytes = int(_FREE_FRACTION * share().memory_available_bytes)
        if (needed_bytes := replay(dry).peak_allocated_bytes) > free_bytes:
            raise NotRunError(f"more than {format_bytes(needed_bytes)} are needed, {format_bytes(free_bytes)} allowed")
        with memory_limited(free_bytes):
            found, batches = self._at(dry, free_bytes)
        return found, f"run for real on the CPU with batch {' and '.join(map(str, batches))}"

    def _at(self, dry: Recording, free_bytes: int) -> tuple[Recording, tuple[int, ...]]:
        """A recording, and the batch sizes that were run for it.

        The second batch is the next one, or where guesses are open the one asked for, as the numbers of other samples
        decide otherwise; and where the one does not do, the other.
        """
        batch_size = dry.batch_size
        if self._scaling is not None:
            return self._scaling.at(batch_size), self._run_for
        if batch_size <= max(SMALL_BATCHES):
            return self._recorded(batch_size), (batch_size,)
        first = self._first
        try:
            first = self._first = first or self._recorded(SMALL_BATCHES[0])
        except NotRunError as error:
            if self._patience.message or str(error) == dry.facts["unknown"]:
                raise
        if first is None:  # some steps need more samples; an error of these has nothing to do with the one before
            return self._recorded(batch_size), (batch_size,)
        seconds = [SMALL_BATCHES[1], batch_size]
        for second in seconds if dry.facts["unknown"] else reversed(seconds):
            if second == batch_size and not self._has_room(first, dry, free_bytes):
                continue
            with contextlib.suppress(NotRunError):
                other = self._recorded(second)
                with contextlib.suppress(ScalingError):
                    self._scaling, self._run_for = BatchScaling(first, other), (first.batch_size, second)
                    return self._scaling.at(batch_size), self._run_for
                if second == batch_size:
                    return other, (second,)
        return in_proportion(first, batch_size), (first.batch_size,)

    def _has_room(self, first: Recording, dry: Recording, free_bytes: int) -> bool:
        """Whether there is room and time for the batch asked for; what a dry run takes does not grow with it."""
        least_seconds = min(dry.facts["seconds"], first.facts["seconds"])
        grown_seconds = (first.facts["seconds"] - least_seconds) * dry.batch_size / first.batch_size
        is_soon = least_seconds + grown_seconds < self._patience.left_seconds
        return is_soon and replay(in_proportion(first, dry.batch_size)).peak_allocated_bytes < free_bytes

    def _recorded(self, batch_size: int) -> Recording:
        try:
            with with_numbers():
                return _recorded(self._run, self._payload, batch_size, self._patience, "")
        except NotRunError:
            raise
        except UnansweredError as error:
            held_bytes = getattr(error.__cause__, "held_bytes", 0)
            held = f", when batch {batch_size} had held {format_bytes(held_bytes)}" if held_bytes else ""
            raise NotRunError(f"{self._patience.message}{held}") from error
        except Exception as error:  # a dry run has refused what a fit would refuse
            raise NotRunError(f"{type(error).__name__}: {error}") from error


# -- beside a trial


def _wait_for_turn(beside: RunPaths) -> bool:
    """Wait until the trial has taken a step or ended, then step back behind everything else; False when it is gone."""
    while not any(_has_stepped_or_ended(path) for path in beside.event_files()):
        if not beside.marker.exists():
            return False
        time.sleep(_LOOK_SECONDS)
    os.nice(_LOWEST_PRIORITY)
    return True


def _has_stepped_or_ended(events: Path) -> bool:
    with events.open("rb") as file:
        file.seek(max(0, events.stat().st_size - 4096))
        tail = file.read()
    return b'"kind":"step"' in tail or b'"kind":"trial_ended"' in tail


def _leave_estimate(recording: Recording, task: dict[str, Any], beside: RunPaths, config: Config) -> None:
    target, residuals = map(_with_tuples, (task["target"], task["residuals"]))
    found = estimate(recording, DeviceTarget(**target), residuals=Residuals(**residuals) if residuals else None)
    if beside.marker.exists():
        load("trial.speed")(found, config, beside)
        beside.write_prediction(found.to_dict())


def _with_tuples(values: dict[str, Any] | None) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in (values or {}).items()}
