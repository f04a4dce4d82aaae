"""back_off: a trial that, when its device runs out of memory, goes again with a smaller batch, until one is too large.

The batch is cut to seven tenths the first time and halved from then on, down to 1; each try is a trial in fresh
processes, so that nothing of the failed one is left on the device. What fitted is remembered for this configuration,
and the next back-off starts no higher. With `keep_global_batch` the accumulation is raised to match, and only batches
are taken that divide the global batch exactly. When not even 1 fits it ends FAILED, with what helps in order.

Only memory is a reason to go again: any other failure ends it at once.
"""

from __future__ import annotations

from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, Problem, TrialError
from kit.run.attempts import Attempts, Looks, Task
from kit.run.batch_search import search_folder
from kit.run.out_of_memory import advice, as_details
from kit.run.safe_batches import batch_key, remember, remembered
from kit.units import format_bytes

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
