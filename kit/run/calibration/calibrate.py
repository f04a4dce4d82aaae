"""calibrate: find the cheapest fast loader settings now, by measurement, in a process of its own.

What `kit.fit` does before training where `calibration.enabled` is set, without the training. The setting that is found
is that of the loader alone; give `calibration.step_seconds` to find what is enough for a step of that length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, Problem, TrialStopped
from kit.run.calibration.result import FOLDER, Calibration, saved_path
from kit.run.paths import runs_folder
from kit.run.submission import prepare
from kit.run.trial import Trial


@overload
def calibrate(config: Config, /, *, on_start: Callable[[Trial], object] | None = None) -> Calibration: ...
@overload
def calibrate(
    module: Any, data: Any, config: Config, *, on_start: Callable[[Trial], object] | None = None
) -> Calibration: ...
def calibrate(
    module: Any, data: Any = None, config: Config | None = None, *, on_start: Callable[[Trial], object] | None = None
) -> Calibration:
    """Measure loader settings, and return when there is an answer; it is kept for the next fit of this experiment.

    Args:
        module: What `kit.fit` takes as module; nothing is trained.
        data: What `kit.fit` takes as data.
        config: What would run. `calibrate(config)` alone takes module and data from it.
        on_start: Called with the running job, whose `events` tell what has been measured and which can be stopped.

    Raises:
        ConfigError: for what `kit.fit` refuses, and a loader whose settings cannot be changed.
        TrialError: when no setting could be measured.
        TrialStopped: after an interrupt, or when the job was stopped.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    if not isinstance(config, Config):
        raise ConfigError([Problem("", f"calibrate takes a Config, got {type(config).__name__}")])
    folder = runs_folder(config.trial.folder) / FOLDER
    short = config.replace({"trial.folder": str(folder), "trial.predict_memory": False})
    trial = Trial(prepare(module, data, short, job="calibrate", confined="the calibration"), short)
    trial.submit()
    if on_start is not None:
        on_start(trial)
    trial.wait()
    if trial.state == "STOPPED":
        raise TrialStopped(f"stopped; what was measured is in {trial.run_directory}")
    found = Calibration.load(trial.paths.calibration)
    found.save(saved_path(config))
    return found
