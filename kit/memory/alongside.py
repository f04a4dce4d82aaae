"""fit: a trial, and beside it a prediction of its memory: at once when it is known, else made while the trial runs.

The prediction is kept in the run directory as JSON. One that is not known yet is made by a process of its own, which
runs at the lowest priority and which the supervisor ends and clears away whatever becomes of the kernel. A prediction
that cannot be made stops no trial: the row then has none.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kit.arguments import config_first
from kit.errors import KitError
from kit.json_text import write_whole
from kit.machine.machine import Machine, waiting_per_core
from kit.memory.prediction import device_name, estimate_here
from kit.memory.query import make_query, target_here
from kit.memory.recordings import TIMEOUT_SECONDS, cached_recording, start_prediction
from kit.memory.residual_table import residuals_here
from kit.registry import load
from kit.trial.directory import RunPaths
from kit.trial.payload import NO_PARTS, TrainerParts
from kit.trial.submit import prepare, trainer_parts_of
from kit.trial.trial import Trial

_MARGIN_SECONDS = 60.0
_predicted_beside: dict[str, RunPaths] = {}
"""Key of a query to the run beside which it is, or was, answered."""


@config_first
def fit(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    logger: Any = None,
    callbacks: Any = (),
    trainer: Mapping[str, Any] | None = None,
) -> Trial:
    """Start a trial and return at once. It runs `trial.max_steps` optimizer steps in processes of its own.

    Args:
        config: What to run; the default config when left out.
        module: What is trained: a LightningModule class (made with `model.arguments`), an import path, a function
            without arguments that makes one, or an instance. None takes `model.target`.
        data: What it is trained on: a LightningDataModule class or import path (made with `data.arguments`, unless
            these belong to a `data.source`), a function without arguments, an instance, a DataLoader or a Dataset,
            or a tuple of two: to train on and to validate on. None takes the module's own loaders, where it has a
            `train_dataloader`, else the config's own data.
        logger: A logger of lightning.pytorch, a function without arguments that makes one, or several. The trial's own
            comes beside them, so `self.logger` works without any.
        callbacks: Callbacks of lightning.pytorch, as instances, functions that make them, or as they stand in a file of
            LightningCLI (`{"class_path": ..., "init_args": {...}}`). They act in the trial and in the prediction beside
            it, which says where one cannot.
        trainer: More arguments of lightning.pytorch's Trainer by name, such as `{"deterministic": True}`.

    Returns:
        The trial, which is starting. `trial.wait()` waits for its end, `trial.stop()` ends it.

    Raises:
        ConfigError: for what cannot run as configured, before any process starts.
        HardwareError: for devices that are not there.
        StoreError: for a store that the ranks cannot read.

    Example:
        >>> kit.fit(config, MyModule, MyData).wait().state
        'COMPLETE'
    """
    paths = prepare(module, data, config, logger=logger, callbacks=callbacks, trainer=trainer)
    trial = Trial(paths, config)
    trial.submit()
    if trial.config.trial.predict_memory:
        predict_beside(module, data, trial, trainer_parts_of(module, trial.config, None, callbacks, trainer))
    return trial


def predict_beside(module: object, data: object, trial: Trial, parts: TrainerParts = NO_PARTS) -> None:
    """Give the run directory of `trial` its prediction, now or as soon as a process has made it."""
    from kit.machine.machine import hardware

    with contextlib.suppress(KitError, OSError):
        world_size = int(trial.environment["world_size"])
        target = target_here(trial.config, machine_of_trial(hardware(), trial.environment["devices"]), world_size)
        query, _ = make_query(module, data, trial.config, target, world_size, parts)
        earlier = _predicted_beside.get(query.key)
        if (recording := cached_recording(query)) is not None:
            found = estimate_here(query, recording, target)
            load("trial.speed")(found, trial.config, trial.paths)
            trial.paths.write_prediction(found.to_dict())  # last: whoever finds it finds the speed too
        elif earlier is not None and earlier.prediction.is_file():
            with contextlib.suppress(FileNotFoundError):  # its operators were never measured here
                shutil.copyfile(earlier.predicted_speed, trial.paths.predicted_speed)
            write_whole(trial.paths.prediction, earlier.prediction.read_bytes())
        else:
            residuals = residuals_here(query.config.trial.folder, device_name(target))
            beside = {
                "run_directory": str(trial.run_directory),
                "target": asdict(target),
                "residuals": asdict(residuals) if residuals else None,
            }
            patience_seconds = TIMEOUT_SECONDS * waiting_per_core()
            task = {"batch_sizes": [None], "patience_seconds": patience_seconds, "beside": beside}
            limit_seconds = trial.config.trial.timeout_seconds + patience_seconds + _MARGIN_SECONDS
            made_by = start_prediction(query, task, limit_seconds, "at end")
            trial.paths.predicting.write_text(str(made_by.run_directory), encoding="utf-8")
            _predicted_beside[query.key] = trial.paths


def is_predicting(paths: RunPaths) -> bool:
    """Whether the prediction of a run is still being made, by whatever kernel it was started."""
    if paths.prediction.is_file() or not paths.predicting.is_file():
        return False
    with contextlib.suppress(KitError, OSError, ValueError):  # the process leaves nothing behind when it ends
        return not Trial.open(paths.predicting.read_text(encoding="utf-8")).ended and not paths.prediction.is_file()
    return False


def machine_of_trial(machine: Machine, devices: Sequence[str]) -> Machine:
    """The machine as a trial sees it: `auto` would pass over the GPUs that the trial itself has claimed."""
    return replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid in devices))
