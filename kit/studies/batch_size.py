"""find_batch_size: the largest batch that really fits, by short trials in fresh processes, under any strategy.

The search starts from the prediction, grows (or shrinks) in steps that double until one batch fits and one does not,
and halves the gap between them. A good prediction costs three or four trials. The answer is exact to `resolution`, is
remembered as the last safe batch of this configuration, and stands beside every attempt in the results file.

On the CPU there is no device to fill: `hardware.device_memory_bytes` makes one of that size; without it the search
would fill the host's memory and is refused.

back_off: a trial that, when its device runs out of memory, goes again with a smaller batch, until one is too large.

The batch is cut to seven tenths the first time and halved from then on, down to 1; each try is a trial in fresh
processes, so that nothing of the failed one is left on the device. What fitted is remembered for this configuration,
and the next back-off starts no higher. With `keep_global_batch` the accumulation is raised to match, and only batches
are taken that divide the global batch exactly. When not even 1 fits it ends FAILED, with what helps in order.

Only memory is a reason to go again: any other failure ends it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.machine.machine import hardware, resolve_devices
from kit.memory.batch_model import MemoryModel, memory_model, search
from kit.studies.series import Attempts, Looks, Task, batch_key, remember, remembered
from kit.trial.directory import RunPaths
from kit.trial.verdict import advice, as_details
from kit.units import format_bytes

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


_FIRST_CUT, _LATER_CUT = 0.7, 0.5


class BackOff(Attempts):
    """A trial and those that took its place; print it, or read `trial`, `config` and `attempts`."""

    def __init__(self, task: Task, asked: Config, start: int, keep_global_batch: bool, key: str) -> None:
        super().__init__("back-off", task)
        self._asked = asked
        self._start, self._keeps, self._key = start, keep_global_batch, key
        self._global = task.config.loader.batch_size * task.config.levers.accumulate_grad_batches

    def looks(self) -> Looks:
        return shrinking(self._start, self._global if self._keeps else None)

    def adapt(self, batch_size: int) -> Config:
        changes = {"loader.batch_size": batch_size}
        if self._keeps:
            changes["levers.accumulate_grad_batches"] = self._global // batch_size
        return self.task.config.replace(changes)

    @property
    def batch_size(self) -> int | None:
        """The batch that fitted; None before it has."""
        return next((attempt.batch_size for attempt in self.attempts if attempt.outcome != "out of memory"), None)

    @property
    def config(self) -> Config:
        """The config that fitted.

        Raises:
            ConfigError: when none has.
        """
        if self.batch_size is None:
            raise ConfigError([Problem("loader.batch_size", f"no batch has fitted: {self.answer}")])
        return self.adapt(self.batch_size).replace({"trial.folder": self._asked.trial.folder})

    def conclude(self) -> None:
        if self.batch_size is not None:
            remember(self._key, self._asked, self.batch_size)
            return
        last = self.attempts[-1]
        sentences = advice(self.adapt(last.batch_size), 1)
        message = f"out of memory even with a batch of {last.batch_size}; the first thing to try is {sentences[0]}"
        self.error = TrialError(message, as_details(sentences))

    @property
    def answer(self) -> str:
        if self.batch_size is None:
            return f"{len(self.attempts)} out of memory so far" if self.state == "RUNNING" else "no batch has fitted"
        cuts = sum(attempt.outcome == "out of memory" for attempt in self.attempts)
        return f"a batch of {self.batch_size} fits" + (f" after {cuts} out of memory" if cuts else "")


@overload
def back_off(config: Config, /, *, keep_global_batch: bool = False) -> BackOff: ...
@overload
def back_off(module: Any, data: Any, config: Config, *, keep_global_batch: bool = False) -> BackOff: ...
def back_off(
    module: Any, data: Any = None, config: Config | None = None, *, keep_global_batch: bool = False
) -> BackOff:
    """Fit, and when a device runs out of memory fit again with a smaller batch; returns at once.

    Args:
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data; `loader.batch_size` is then what its loader is made anew with.
        config: What would run. `back_off(config)` alone takes module and data from it.
        keep_global_batch: Raise the accumulation as the batch falls, so that a step sees as many samples as before.

    Raises:
        ConfigError: for what `kit.fit` refuses.
        HardwareError: for devices that are not there.
    """
    if config is None and isinstance(module, Config):
        module, config = None, module
    if not isinstance(config, Config):
        raise ConfigError(f"back_off takes a Config, got {type(config).__name__}")
    key = batch_key(module, data, config)
    asked, known = config.loader.batch_size, remembered(key, config)
    start = asked if known is None else min(asked, known)
    folder = search_folder(config, "back-off")
    task = Task(module, data, config.replace({"trial.folder": str(folder)}), folder, lambda _: None)
    made = BackOff(task, config, start, keep_global_batch, key)
    made.reasons = _said(config, start)
    return made.start()


def _said(config: Config, start: int) -> list[str]:
    asked, limit_bytes = config.loader.batch_size, config.hardware.device_memory_bytes
    reasons = [f"started from {start}, the last safe batch of this configuration, not {asked}"] if start < asked else []
    return [*reasons, *([f"devices of {format_bytes(limit_bytes)}"] if limit_bytes else [])]


def shrinking(start: int, global_batch: int | None = None) -> Looks:
    """Ever smaller batches until one fits; with `global_batch`, only its divisors."""
    size, cut = _divisor(start, global_batch), _FIRST_CUT
    while not (yield size) and size > 1:
        size, cut = _divisor(max(1, int(size * cut)), global_batch), _LATER_CUT


def _divisor(size: int, global_batch: int | None) -> int:
    """The largest number up to `size` that divides the global batch."""
    return size if global_batch is None else next(found for found in range(size, 0, -1) if global_batch % found == 0)
