"""CarbonUse: what codecarbon says that a trial took, beside what NVML counts and what `kit.plan.bill` assumes.

One `carbon_estimated` event of rank 0, for the whole machine from the first batch to the last: joules by part, grams of
CO2-equivalent of the country's grid, seconds. codecarbon asks nobody over the network here; of a processor that does
not tell its power it knows the rated one, and of memory an assumption, so that its figures are estimates too. Starting
it takes some seconds, before the first batch. It is an extra: see `kit.run.carbon_check`.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kit.run.jobs.context import Context

_JOULES_PER_KILOWATT_HOUR = 3.6e6
_GRAMS_PER_KILOGRAM = 1000.0


class CarbonUse(Callback):
    """Writes `carbon_estimated` when training ends."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tracker: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if not trainer.is_global_zero:
            return
        from codecarbon import OfflineEmissionsTracker

        self._tracker = OfflineEmissionsTracker(
            country_iso_code=self._context.config.trial.codecarbon, save_to_file=False, log_level=logging.CRITICAL,
            measure_power_secs=1, tracking_mode="machine", allow_multiple_runs=True,
        )  # fmt: skip
        self._tracker.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        self._end()

    def _end(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        tracker.stop()
        found = tracker.final_emissions_data
        joules = {name: getattr(found, f"{name}_energy") * _JOULES_PER_KILOWATT_HOUR for name in ("cpu", "gpu", "ram")}
        self._context.writer.write(
            "carbon_estimated", seconds=found.duration, grams=found.emissions * _GRAMS_PER_KILOGRAM,
            joules=found.energy_consumed * _JOULES_PER_KILOWATT_HOUR, country=found.country_name,
            version=found.codecarbon_version, **{f"{name}_joules": value for name, value in joules.items()},
        )  # fmt: skip
