"""find_batch_size: the largest batch that really fits, by short trials in fresh processes, under any strategy.

The search starts from the prediction, grows (or shrinks) in steps that double until one batch fits and one does not,
and halves the gap between them. A good prediction costs three or four trials. The answer is exact to `resolution`, is
remembered as the last safe batch of this configuration, and stands beside every attempt in the results file.

On the CPU there is no device to fill: `hardware.device_memory_bytes` makes one of that size; without it the search
would fill the host's memory and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.machine import hardware, resolve_devices
from kit.run.attempts import Attempts, Looks, Task
from kit.run.memory.largest_batch import search
from kit.run.memory.model import MemoryModel, memory_model
from kit.run.out_of_memory import advice, as_details
from kit.run.paths import RunPaths
from kit.run.safe_batches import batch_key, remember

STEPS = 3
"""Optimizer steps of each trial: the second holds all that any later one holds."""
MOST_SAMPLES = 1 << 16


class BatchSearch(Attempts):
    """A running or finished search; print it, or read `batch_size`, `config` and `attempts`."""

    confined = True

    def __init__(self, task: Task, asked: Config, start: int, most: int, resolution: float) -> None:
        super().__init__("largest batch", task)
        self._asked = asked
        self.started_from, self.most, self.resolution = start, most, resolution

    def looks(self) -> Looks:
        return looks(self.started_from, self.most, self.resolution)

    @property
    def batch_size(self) -> int | None:
        """The largest that was seen to fit; None before there is one."""
        return max((attempt.batch_size for attempt in self.attempts if attempt.outcome == "fits"), default=None)

    @property
    def config(self) -> Config:
        """The config with the batch that was found, its trial as before.

        Raises:
            ConfigError: when no batch fits, or none was tried yet.
        """
        if self.batch_size is None:
            raise ConfigError([Problem("loader.batch_size", f"no batch was found to fit: {self.answer}")])
        return self._asked.replace({"loader.batch_size": self.batch_size})

    def conclude(self) -> None:
        if self.batch_size is None:
            self.error = _nothing_fits(self.task.config)
            return
        remember(batch_key(self.task.module, self.task.data, self._asked), self._asked, self.batch_size)
        if any(attempt.outcome == "data ends" for attempt in self.attempts):
            self.reasons.append("the search ended where the data does: no batch holds more samples")
        elif self.batch_size >= self.most:
            self.reasons.append(f"the search ended at {self.most} samples, as asked")

    @property
    def answer(self) -> str:
        if self.batch_size is None:
            return "looking" if self.state == "RUNNING" else "none was found"
        found = f"{self.batch_size} samples on each device"
        return {"COMPLETE": found, "RUNNING": f"at least {found}"}.get(self.state, f"at least {found} ({self.state})")


@overload
def find_batch_size(
    config: Config, /, *, start: int | None = None, most: int = MOST_SAMPLES, resolution: float = 0.02
) -> BatchSearch: ...
@overload
def find_batch_size(
    module: Any, data: Any, config: Config, *, start: int | None = None, most: int = MOST_SAMPLES,
    resolution: float = 0.02,
) -> BatchSearch: ...  # fmt: skip
def find_batch_size(
    module: Any, data: Any = None, config: Config | None = None, *, start: int | None = None,
    most: int = MOST_SAMPLES, resolution: float = 0.02,
) -> BatchSearch:  # fmt: skip
    """Search for the largest batch that fits each device, and return at once; `wait()` for the answer.

    Args:
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data; a DataLoader is made anew at every size.
        config: What would run. `find_batch_size(config)` alone takes module and data from it.
        start: First batch to try; by default the one that is predicted to fit.
        most: Samples beyond which nothing is tried.
        resolution: How far below the first batch that fails the answer may lie, as a fraction of it; 0 for exact.

    Raises:
        ConfigError: for what `kit.fit` refuses, bounds that leave nothing to try, and a CPU without a limit.
        HardwareError: for devices that are not there.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    if not isinstance(config, Config):
        raise ConfigError(f"find_batch_size takes a Config, got {type(config).__name__}")
    check_search(config, start, most, resolution)
    folder = search_folder(config, "largest-batch")
    short = config.replace({
        "trial.max_steps": STEPS, "trial.warmup_steps": 1, "trial.predict_memory": False,
        "trial.folder": str(folder),
    })  # fmt: skip
    first, model, reasons = _predicted(module, data, config)
    task = Task(module, data, short, folder, predictor(model))
    found = BatchSearch(task, config, min(start or first, most), most, resolution)
    found.reasons = [f"started from {start}, as asked"] if start else reasons
    return found.start()


def looks(start: int, most: int, resolution: float = 0.0) -> Looks:
    """Growth from `start` in steps that double, then halving; every size is tried once, none beyond `most`."""
    fits, fails = 0, most + 1
    gap = max(1, start // 16)
    size = min(max(1, start), most)
    while fits == 0 or fails > most:
        if (yield size):
            fits = size
            following = min(size + gap, most)
        else:
            fails = size
            following = max(1, size - gap)
        if (fits and fails <= most) or following == size:
            break
        size, gap = following, 2 * gap
    while fails <= most and fails - fits > max(1, int(fails * resolution)):
        size = (fits + fails) // 2
        fits, fails = (size, fails) if (yield size) else (fits, size)


def check_search(config: Config, start: int | None, most: int, resolution: float) -> None:
    """Refuse what has no answer.

    Raises:
        ConfigError: for bounds that leave nothing to try, and a CPU without a limit.
        HardwareError: for devices that are not there.
    """
    if most < 1 or (start is not None and not 1 <= start <= most):
        raise ConfigError([Problem("start", f"{start} does not lie between 1 and {most}, the most to be tried")])
    if not 0 <= resolution < 1:
        raise ConfigError([Problem("resolution", f"{resolution} is no fraction; use 0 for exact, 0.02 for 2 %")])
    on_cpu = resolve_devices(config, hardware()).accelerator == "cpu"
    if on_cpu and not config.hardware.device_memory_bytes:
        message = "0: a CPU has no device memory to fill, and the search would fill the host's; set a size, such as "
        raise ConfigError([Problem("hardware.device_memory_bytes", message + "1 GiB, to play a device that has it")])


def search_folder(config: Config, what: str) -> Path:
    """A new folder for a series of trials, itself no run."""
    paths = RunPaths.create(config.replace({"name": f"{what}-{config.name}"[:64]}))
    paths.marker.unlink()
    return paths.directory


def predictor(model: MemoryModel | None) -> Callable[[int], int | None]:
    """Peak allocated bytes at a batch size, from what was recorded; None where nothing is known."""

    def predict(batch_size: int) -> int | None:
        if model is None or model.reason:
            return None
        return model.estimate(batch_size).device_allocated_bytes

    return predict


def _predicted(module: Any, data: Any, config: Config) -> tuple[int, MemoryModel | None, list[str]]:
    """The batch to start from, what foretold it, and why it is that one."""
    asked = config.loader.batch_size
    try:
        model = memory_model(module, data, config) if module is not None or data is not None else memory_model(config)
        found = search(model)
    except KitError as error:
        return asked, None, [f"started from {asked}, the config's: memory is not predicted ({error})"]
    if not found.estimate.complete:
        return asked, None, [f"started from {asked}, the config's: activations are unknown"]
    start = max(1, found.batch_size)
    return start, model, [f"started from {start}: that is predicted to fit"]


def _nothing_fits(config: Config) -> TrialError:
    message = "not even a batch of 1 fits; the first thing to try is "
    sentences = advice(config, 1)
    return TrialError(message + sentences[0], as_details(sentences))
