"""find_batch_size and back_off: which batch fits a device, by short trials in fresh processes, under any strategy.

**find_batch_size** looks for the largest batch. It starts from the predicted one, grows (or shrinks) in steps that
double until one batch fits and one does not, and then halves the gap between them. A good prediction costs three or
four trials. The answer is exact to `resolution` and is remembered as the last safe batch of this configuration. On a
CPU there is no device to fill: `hardware.device_memory_bytes` sets its size, and without that the search, which would
fill the host's memory, is refused.

**back_off** trains, and repeats the trial with a smaller batch when a device runs out of memory. The first cut is to
seven tenths, later ones halve, down to 1; each try has fresh processes, so nothing of the failed one is left on the
device. The next back-off of this configuration starts no higher than the batch that fitted. With `keep_global_batch`
the accumulation rises as the batch falls, and only batches are tried that divide the global batch. Accumulating needs
more memory: gradients stay on the device while the next micro-batch is trained on. So the largest batch that fits
without may not fit with it, and where none is known to fit with it, the prediction says where to start. When not even 1
fits, it ends FAILED with advice. Any failure other than memory ends it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.arguments import config_first
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.machine.machine import hardware, resolve_devices
from kit.memory.batch_model import MemoryModel, memory_model, search
from kit.studies.series import Attempts, SizeRule, batch_key, remember, remembered
from kit.trial.directory import RunPaths
from kit.trial.verdict import advice, as_details
from kit.units import format_bytes

STEPS = 3
"""Optimizer steps of each trial: the second holds all that any later one holds."""
MOST_SAMPLES = 1 << 16


class BatchSearch(Attempts):
    """A running or finished search; print it, or read `batch_size`, `config` and `attempts`."""

    confined = True

    def __init__(
        self, module: Any, data: Any, given: Config, start: int, most: int, resolution: float,
        predict: Callable[[int], int | None],
    ) -> None:  # fmt: skip
        folder = _series_folder(given, "largest-batch")
        short = given.replace({
            "trial.max_steps": STEPS, "trial.warmup_steps": 1, "trial.predict_memory": False,
            "trial.folder": str(folder),
        })  # fmt: skip
        super().__init__("largest batch", module, data, short, folder, predict)
        self.given, self.started_from, self.most, self.resolution = given, start, most, resolution

    def sizes(self) -> SizeRule:
        return growing(self.started_from, self.most, self.resolution)

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
        return self.given.replace({"loader.batch_size": self.batch_size})

    def conclude(self) -> None:
        if self.batch_size is None:
            sentences = advice(self.base, 1)
            message = f"not even a batch of 1 fits; the first thing to try is {sentences[0]}"
            self.error = TrialError(message, as_details(sentences))
            return
        remember(batch_key(self.module, self.data, self.given), self.given, self.batch_size)
        if any(attempt.outcome == "data ends" for attempt in self.attempts):
            self.reasons.append("the search ended where the data does: no batch holds more samples")
        elif self.batch_size >= self.most:
            self.reasons.append(f"the search ended at {self.most} samples, the most allowed")

    @property
    def answer(self) -> str:
        if self.batch_size is None:
            return "searching" if self.state == "RUNNING" else "none was found"
        found = f"{self.batch_size} samples on each device"
        return {"COMPLETE": found, "RUNNING": f"at least {found}"}.get(self.state, f"at least {found} ({self.state})")


@config_first
def find_batch_size(
    config: Any = None, module: Any = None, data: Any = None, *, start: int | None = None,
    most: int = MOST_SAMPLES, resolution: float = 0.02,
) -> BatchSearch:  # fmt: skip
    """Search for the largest batch that fits each device by trying it. Returns when the first size is predicted.

    Args:
        config: What would run; the default config when left out.
        module: What is trained, as `kit.fit` takes it.
        data: What it is trained on, as `kit.fit` takes it. A DataLoader is made anew for every size.
        start: First batch size to try. None takes the one that is predicted to fit.
        most: Largest batch size to try.
        resolution: How far the answer may lie below the first size that fails, as a fraction of it. 0 is exact.

    Returns:
        The attempts as they run. `wait()` waits for the answer, in `batch_size`.

    Raises:
        ConfigError: for what `kit.fit` refuses, bounds that leave nothing to try, and a CPU without
            `hardware.device_memory_bytes`.
        HardwareError: for devices that are not there.

    Example:
        >>> small = config.replace({"hardware.device_memory_bytes": "64 MiB"})
        >>> kit.studies.find_batch_size(small, MyModule, MyData, start=8, most=16).wait().batch_size
        16
    """
    if most < 1 or (start is not None and not 1 <= start <= most):
        raise ConfigError([Problem("start", f"{start} does not lie between 1 and {most}, the most to be tried")])
    if not 0 <= resolution < 1:
        raise ConfigError([Problem("resolution", f"{resolution} is no fraction; use 0 for exact, 0.02 for 2 %")])
    on_cpu = resolve_devices(config, hardware()).accelerator == "cpu"
    if on_cpu and not config.hardware.device_memory_bytes:
        message = "0: a CPU has no device memory to fill, and the search would fill the host's; set a size, such as "
        raise ConfigError([Problem("hardware.device_memory_bytes", message + "1 GiB, to simulate such a device")])
    first, model = config.loader.batch_size, None
    try:
        model = memory_model(config, module, data)
        predicted = search(model, most)
        if predicted.estimate.complete:
            first = max(1, predicted.batch_size)
            reason = f"started from {first}: that is predicted to fit"
        else:
            model, reason = None, f"started from {first}, the config's: activations are unknown"
    except KitError as error:
        model, reason = None, f"started from {first}, the config's: memory is not predicted ({error})"
    found = BatchSearch(module, data, config, min(start or first, most), most, resolution, _peaks(model))
    found.reasons = [f"started from {start}, as given" if start else reason]
    return found.start()


def _peaks(model: MemoryModel | None) -> Callable[[int], int | None]:
    """Predicted peak allocated bytes at a batch size, where they are known."""
    known = None if model is None or model.reason else model
    return lambda batch_size: None if known is None else known.estimate(batch_size).device_allocated_bytes


def growing(start: int, most: int, resolution: float = 0.0) -> SizeRule:
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


def _series_folder(config: Config, what: str) -> Path:
    """A new folder for a series of trials, which is not itself a run."""
    paths = RunPaths.create(config.replace({"name": f"{what}-{config.name}"[:64]}))
    paths.marker.unlink()
    return paths.directory


_FIRST_CUT, _LATER_CUT = 0.7, 0.5


class BackOff(Attempts):
    """A trial and those that took its place; print it, or read `trial`, `config` and `attempts`."""

    def __init__(
        self, module: Any, data: Any, given: Config, start: int, keep_global_batch: bool, model: MemoryModel | None
    ) -> None:  # fmt: skip
        folder = _series_folder(given, "back-off")
        base = given.replace({"trial.folder": str(folder)})
        super().__init__("back-off", module, data, base, folder, _peaks(model))
        self.given, self._start, self._keeps = given, start, keep_global_batch
        self.global_batch = given.loader.batch_size * given.levers.accumulate_grad_batches

    def sizes(self) -> SizeRule:
        return shrinking(self._start, self.global_batch if self._keeps else None)

    def adapt(self, batch_size: int) -> Config:
        changes = {"loader.batch_size": batch_size}
        if self._keeps:
            changes["levers.accumulate_grad_batches"] = self.global_batch // batch_size
        return self.base.replace(changes)

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
        return self.adapt(self.batch_size).replace({"trial.folder": self.given.trial.folder})

    def conclude(self) -> None:
        if self.batch_size is not None:
            plain, fitted = (batch_key(self.module, self.data, one) for one in (self.given, self.config))
            remember(fitted, self.given, self.batch_size)
            if remembered(plain, self.given) is None:  # what fits while gradients accumulate also fits without
                remember(plain, self.given, self.batch_size)
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


@config_first
def back_off(config: Any = None, module: Any = None, data: Any = None, *, keep_global_batch: bool = False) -> BackOff:
    """Fit, and when a device runs out of memory, fit again with a smaller batch. Returns at once.

    Args:
        config: What to run; the default config when left out.
        module: What is trained, as `kit.fit` takes it.
        data: What it is trained on, as `kit.fit` takes it. Its loader is made anew with `loader.batch_size`.
        keep_global_batch: Raise the accumulation as the batch falls, so that a step sees as many samples as before.

    Returns:
        The attempts as they run. `wait()` waits for the answer.

    Raises:
        ConfigError: for what `kit.fit` refuses.
        HardwareError: for devices that are not there.

    Example:
        >>> kit.studies.back_off(config, MyModule, MyData).wait().batch_size
        16
    """
    start, reasons, model = _start(config, module, data, keep_global_batch)
    made = BackOff(module, data, config, start, keep_global_batch, model)
    made.reasons += reasons
    first = next(made.sizes())
    if first < start:
        samples = made.global_batch
        made.reasons.append(f"{first} is the largest batch up to {start} that divides the {samples} samples of a step")
    if limit_bytes := config.hardware.device_memory_bytes:
        made.reasons.append(f"devices of {format_bytes(limit_bytes)}")
    return made.start()


def _start(
    config: Config, module: Any, data: Any, keep_global_batch: bool
) -> tuple[int, list[str], MemoryModel | None]:  # fmt: skip
    """The batch to try first, why, and the memory of each where that had to be asked for."""
    configured = config.loader.batch_size
    safe = remembered(batch_key(module, data, config), config)
    if safe is None or safe >= configured:
        return configured, [], None
    reasons = [f"started below {configured}: {safe} is the last safe batch of this configuration"]
    if not keep_global_batch or config.levers.accumulate_grad_batches > 1:
        return safe, reasons, None
    accumulating = config.replace({"levers.accumulate_grad_batches": 2})
    known = remembered(batch_key(module, data, accumulating), config)
    if known is not None:
        return min(safe, known), [*reasons, f"{known} is the last that was safe while gradients accumulate"], None
    try:
        model = memory_model(accumulating, module, data)
        predicted = search(model)
    except KitError as error:
        return safe, [*reasons, f"with accumulation memory is not predicted: {error}"], None
    if not predicted.estimate.complete or not predicted.batch_size:
        return safe, reasons, None
    held = f"gradients stay between micro-batches, and {predicted.batch_size} is predicted to fit with them"
    return min(safe, predicted.batch_size), [*reasons, held], model


def shrinking(start: int, global_batch: int | None = None) -> SizeRule:
    """Ever smaller batches until one fits; with `global_batch`, only its divisors."""

    def divisor(size: int) -> int:
        """The largest number up to `size` that divides the global batch."""
        return next(found for found in range(size, 0, -1) if global_batch is None or global_batch % found == 0)

    size, cut = divisor(start), _FIRST_CUT
    while not (yield size) and size > 1:
        size, cut = divisor(max(1, int(size * cut))), _LATER_CUT
