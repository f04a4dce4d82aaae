"""step_seconds: what a training step takes when nothing is waited for: some steps of the module on batches in memory.

One rank trains on its device in a fresh process, with the optimizer, precision and levers of the config, on two batches
that were loaded before. What the ranks exchange is left out, so with several of them a step takes longer than this, and
a loader that keeps up with it is fast enough for them too. A module that one device cannot train (sharded parameters)
cannot be timed so, and the calibration then looks for the fastest loader and says why.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.studies.calibration.fresh import in_fresh_process
from kit.studies.calibration.measure import Subject, apply_batches
from kit.train.trainer import RANK_VARIABLES, make_trainer
from kit.trial.context import Context
from kit.trial.fit_job import make_module
from kit.trial.payload import Part

BATCHES, WARMUP_STEPS, STEPS, MOST_SECONDS, TIMEOUT_SECONDS = 2, 3, 12, 5.0, 120.0


def step_seconds(context: Context, module: Part, data: dict[str, Any], subject: Subject) -> float:
    """Median seconds between the ends of two batches' steps.

    Raises:
        Exception: whatever the module raises; TrialError when it takes too long.
    """
    return in_fresh_process(lambda: _timed(context, module, data, subject), TIMEOUT_SECONDS)


def _timed(context: Context, part: Part, data: dict[str, Any], subject: Subject) -> float:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    with subject.loader(subject.present(), 0) as loader:
        batches = list(itertools.islice(loader, BATCHES))
    config, timer = context.config.replace({"hardware.strategy": "none", "hardware.devices": "auto"}), _Timer()
    module = make_module(part, config)
    trainer = make_trainer(
        config, accelerator=context.environment["accelerator"], world_size=1,
        precision=context.environment["precision"], module=module, callbacks=[timer], max_steps=WARMUP_STEPS + STEPS,
        default_root_dir=context.paths.directory,
    )  # fmt: skip
    trainer.fit(module, **apply_batches(data, _Again(batches)))
    return timer.seconds


class _Again:
    """Batches in memory, over and over."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 1 << 20

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._batches), len(self))


class _Timer(Callback):
    """Notes when each batch's step ends on the device."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    @property
    def seconds(self) -> float:
        least = min(WARMUP_STEPS, len(self._ends) - 2)
        return statistics.median(after - before for before, after in itertools.pairwise(self._ends[least:]))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._ends.append(time.perf_counter())
        if len(self._ends) > 2 and self._ends[-1] - self._ends[0] > MOST_SECONDS:
            trainer.should_stop = True
