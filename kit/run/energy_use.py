"""EnergyUse: what a rank's own GPU took while it trained, after the warm-up steps.

One `energy_measured` event a rank, `joules` and `seconds`, from two looks at the counter that the card itself keeps, so
that no step pays for it. Joules over seconds are watts of the whole board, with whatever else runs on it. There is no
event on the CPU, without NVML, for a card without a counter, a MIG instance, and a measurement so short that the
counter moved too few times in it: watts are then the rated ones (`kit.plan.bill`).
"""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kit.nvml import read_joules
from kit.run.jobs.context import Context

LEAST_SECONDS = 1.0
"""At least ten movements of the counter."""


class EnergyUse(Callback):
    """Writes `energy_measured` when training ends, if it was measured."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._looked = False
        self._began: tuple[float, float] | None = None

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        if not self._looked and trainer.global_step >= self._context.config.trial.warmup_steps:
            self._looked = True
            self._began = self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """A fit that leaves on request leaves by an exception."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        began, self._began = self._began, None
        now = None if began is None else self._look(trainer)
        if began is None or now is None:
            return
        seconds, joules = (after - before for before, after in zip(began, now, strict=True))
        if seconds >= LEAST_SECONDS and joules > 0:
            self._context.writer.write("energy_measured", joules=joules, seconds=seconds)

    def _look(self, trainer: Trainer) -> tuple[float, float] | None:
        """(seconds, joules), both since some time."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return None
        joules = read_joules(self._context.environment["devices"][device.index or 0])
        return None if joules is None else (time.perf_counter(), joules)
