"""EnergyUse: what a rank's own GPU took while it trained, after the warm-up steps.

One `energy_measured` event a rank, `joules` and `seconds`, from two looks at the counter that the card itself keeps, so
that no step pays for it. Joules over seconds are watts of the whole board, with whatever else runs on it. There is no
event on the CPU, without NVML, for a card without a counter, a MIG instance, and a measurement so short that the
counter moved too few times in it: watts are then the rated ones (`kit.plan.bill`).
"""

from __future__ import annotations

import time

from lightning.pytorch import Trainer

from kit.nvml import read_joules
from kit.run.after_warmup import AfterWarmup

LEAST_SECONDS = 1.0
"""At least ten movements of the counter."""


class EnergyUse(AfterWarmup[tuple[float, float]]):
    """Writes `energy_measured` when training ends, if it was measured."""

    def look(self, trainer: Trainer) -> tuple[float, float] | None:
        """(seconds, joules), both since some time."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return None
        joules = read_joules(self._context.environment["devices"][device.index or 0])
        return None if joules is None else (time.perf_counter(), joules)

    def write(self, trainer: Trainer, began: tuple[float, float]) -> None:
        now = self.look(trainer)
        if now is None:
            return
        seconds, joules = (after - before for before, after in zip(began, now, strict=True))
        if seconds >= LEAST_SECONDS and joules > 0:
            self._context.writer.write("energy_measured", joules=joules, seconds=seconds)
