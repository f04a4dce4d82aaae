"""The job of a prediction: dry-run the module on fake tensors and leave the recordings in the run directory.

What kit refuses comes back as it was raised, in a `refused` event. A step that does not end is broken off while there
is time to answer without it, so that activations are unknown and the rest is not. Beside a trial, the job waits until
that has taken its first step, works at the lowest priority, and leaves the finished estimate with the trial.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
from lightning.pytorch import LightningModule, seed_everything

from kit.config import Config
from kit.confinement.confine import confined
from kit.errors import ConfigError, KitError
from kit.memory.query import without_memory
from kit.memory.record.dry_run import JOB, DryRun, record
from kit.memory.recordings import NEXT
from kit.memory.replay.cards import DeviceTarget
from kit.memory.replay.estimate import Residuals, estimate
from kit.memory.replay.replay import Recording
from kit.trial.context import Context
from kit.trial.directory import RunPaths
from kit.trial.fit_job import load_part, make_data, make_module, show_cells
from kit.trial.verdict import describe, own_frame
from kit.units import format_seconds

_LOOK_SECONDS = 0.2
_LOWEST_PRIORITY = 19
_STEPPED, _ENDED = b'"kind":"step"', b'"kind":"trial_ended"'


def predict(context: Context) -> None:
    """Record what was asked, one recording for each batch size."""
    task = context.environment["prediction"]
    beside = RunPaths(Path(task["beside"]["run_directory"])) if task["beside"] else None
    if beside is not None and not _wait_for_turn(beside):
        context.writer.write("prediction_ended")
        return
    parcel = cloudpickle.loads(context.paths.payload.read_bytes())
    context.cells = parcel["cells"]
    show_cells(context.cells)
    patience = Patience(task["patience_seconds"], context.cells)
    found: list[Recording] = []
    try:
        with patience, confined(JOB, lambda: True, bool) as kept:
            _import_everything(parcel["module"], context.config)
        for place, wanted in enumerate(task["batch_sizes"]):
            batch_size = found[-1].batch_size + 1 if wanted == NEXT else wanted
            late = bool(found) and found[0].facts.get("late")
            found.append(found[0] if late else _record(context, parcel, batch_size, patience, kept.notes))
            found[-1].save(context.paths.recording(place))
            context.writer.write("recorded", batch_size=found[-1].batch_size, seconds=found[-1].facts["seconds"])
    except KitError as error:
        context.writer.write("refused", **_described(error))
        raise
    if beside is not None:
        _leave_estimate(found[0], task["beside"], beside)
    context.writer.write("prediction_ended")


def _import_everything(module: bytes, config: Config) -> None:
    """Load the user's code before the dry run: tensors that a file makes when it is imported belong to no module."""
    with without_memory():
        load_part(cloudpickle.loads(module), config)


def _record(
    context: Context, parcel: dict[str, Any], batch_size: int | None, patience: Patience, said: list[str]
) -> Recording:
    task, config = context.environment["prediction"], context.config
    run = DryRun(
        config=config, precision=task["precision"], world_size=task["world_size"], device_kind=task["device_kind"],
        capability=tuple(task["capability"]) if task["capability"] else None,
    )  # fmt: skip

    def module() -> LightningModule:
        return make_module(cloudpickle.loads(parcel["module"]), config)

    def data() -> dict[str, Any]:
        return make_data(cloudpickle.loads(parcel["data"]), config)

    seed_everything(config.training.seed, workers=True, verbose=False)
    with patience:
        recording = record(module, data, run, batch_size)
    notes = [*said, *recording.facts.get("notes", ()), *parcel["notes"]]
    facts = {**recording.facts, **task["facts"], "notes": notes}
    if patience.message and facts["unknown"]:
        facts |= {"unknown": patience.message, "late": True}
    return dataclasses.replace(recording, facts=facts)


class Patience:
    """Raises TimeoutError in what it guards, once, when the time of all that it guarded is used up."""

    def __init__(self, seconds: float, cells: dict[str, tuple[str, str]]) -> None:
        self.seconds, self.cells = seconds, cells
        self.message = ""
        """Where it was broken off; empty until then."""
        self._began = time.monotonic()
        signal.signal(signal.SIGALRM, self._raise)

    def __enter__(self) -> None:
        left = self.seconds - (time.monotonic() - self._began)
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, _: int, stack: FrameType | None) -> None:
        frame = own_frame((item.filename, item.lineno or 0, item.name) for item in traceback.extract_stack(stack))
        where = f" at {describe(frame, self.cells)}" if frame else ""
        self.message = f"still running after {format_seconds(self.seconds)}{where}"
        raise TimeoutError(self.message)


def _described(error: KitError) -> dict[str, Any]:
    """The fields of a `refused` event, from which the kernel makes the same error."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    return {
        "type": type(error).__name__,
        "message": str(error),
        "problems": [[problem.path, problem.message] for problem in problems],
    }


# -- beside a trial


def _wait_for_turn(beside: RunPaths) -> bool:
    """Wait until the trial has taken a step or ended, then step back behind everything else; False when it is gone."""
    while not any(mark in _tail(path) for mark in (_STEPPED, _ENDED) for path in beside.event_files()):
        if not beside.marker.exists():
            return False
        time.sleep(_LOOK_SECONDS)
    os.nice(_LOWEST_PRIORITY)
    return True


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read()


def _leave_estimate(recording: Recording, task: dict[str, Any], beside: RunPaths) -> None:
    target = dict(task["target"])
    for name in ("capability", "outside_bytes", "reasons"):
        target[name] = None if target[name] is None else tuple(target[name])
    residuals = dict(task["residuals"]) if task["residuals"] else None
    if residuals is not None and residuals["outside_bytes"] is not None:
        residuals["outside_bytes"] = tuple(residuals["outside_bytes"])
    found = estimate(recording, DeviceTarget(**target), residuals=Residuals(**residuals) if residuals else None)
    if beside.marker.exists():
        beside.write_prediction(found.to_dict())
