"""A fit, and the prediction that stands beside it: at once when it is known, else made beside the trial, never before.

It is kept in the run directory as JSON. What is not known yet is predicted by a process of its own that yields to the
trial in everything, and that the supervisor ends and clears away whatever becomes of the kernel. A prediction that
cannot be made keeps no trial from running: the row then has none.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, overload

from kit.config import Config
from kit.errors import KitError
from kit.machine.machine import Machine
from kit.memory.prediction import TIMEOUT_SECONDS, device_name, estimate_here
from kit.memory.query import MemoryQuery, here, make_query
from kit.memory.recordings import known, start_prediction
from kit.memory.replay.cards import DeviceTarget
from kit.memory.residuals import residuals_here
from kit.trial.directory import RunPaths
from kit.trial.submit import prepare
from kit.trial.trial import Trial

_MARGIN_SECONDS = 60.0
_foreseen: dict[str, RunPaths] = {}
"""The run beside which a question is, or was, answered."""


@overload
def fit(config: Config, /) -> Trial: ...
@overload
def fit(module: Any, data: Any, config: Config) -> Trial: ...
def fit(module: Any, data: Any = None, config: Config | None = None) -> Trial:
    """Start a trial and return at once.

    Args:
        module: What is trained: a LightningModule class (made with `model.arguments`), an import path, a function
            without arguments that makes one, or an instance. None takes `model.target`.
        data: What it is trained on: a LightningDataModule class or an import path (made with `data.arguments`, where
            there is no `data.source` that they belong to), a function without arguments, an instance, a DataLoader or
            a Dataset. None takes the config's own data.
        config: What to run. `fit(config)` alone takes module and data from it.

    Raises:
        ConfigError: for what cannot run as configured, found before any process is started.
        HardwareError: for devices that are not there.
        StoreError: for a store that cannot be read by the ranks.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    paths = prepare(module, data, config)
    trial = Trial(paths, config)
    trial.submit()
    if trial.config.trial.predict_memory:
        foresee(module, data, trial)
    return trial


def foresee(module: object, data: object, trial: Trial) -> None:
    """See to it that the run directory of `trial` gets its prediction."""
    from kit.machine.machine import hardware

    with contextlib.suppress(KitError, OSError):
        world_size = int(trial.environment["world_size"])
        target = here(trial.config, of_trial(hardware(), trial.environment["devices"]), world_size)
        question, _ = make_query(module, data, trial.config, target, world_size)
        recording = known(question)
        if recording is not None:
            trial.paths.write_prediction(estimate_here(question, recording, target).to_dict())
        elif not _copied(question, trial.paths):
            _predict_beside(question, target, trial)


def of_trial(machine: Machine, devices: Sequence[str]) -> Machine:
    """The machine as a trial sees it: `auto` would pass over the GPUs that the trial itself has claimed."""
    return replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid in devices))


def _copied(question: MemoryQuery, paths: RunPaths) -> bool:
    """Whether an earlier run of the same question has an answer to take."""
    earlier = _foreseen.get(question.key)
    if earlier is None or not earlier.prediction.is_file():
        return False
    draft = paths.prediction.with_suffix(".tmp")
    shutil.copyfile(earlier.prediction, draft)
    draft.replace(paths.prediction)
    return True


def _predict_beside(question: MemoryQuery, target: DeviceTarget, trial: Trial) -> None:
    residuals = residuals_here(question.config.trial.folder, device_name(target))
    beside = {
        "run_directory": str(trial.run_directory),
        "target": asdict(target),
        "residuals": asdict(residuals) if residuals else None,
    }
    task: dict[str, Any] = {"batch_sizes": [None], "patience_seconds": TIMEOUT_SECONDS, "beside": beside}
    limit_seconds = trial.config.trial.timeout_seconds + TIMEOUT_SECONDS + _MARGIN_SECONDS
    start_prediction(question, task, limit_seconds, "at end")
    _foreseen[question.key] = trial.paths
