"""Marks: tells a recorder what only Lightning knows, and ends a dry run after two optimizer steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.memory.recorder import Recorder

STEPS = 2
"""Optimizer steps recorded: the first makes the state that the second steps with."""
MOST_BATCHES = 16
"""Micro-batches, per accumulated one, after which a module in manual optimization has stepped, or does not."""


class Marks(Callback):
    """Tells the recorder what only Lightning knows, and ends the run after two optimizer steps."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.batches = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.track(pl_module)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            self.recorder.phase = "other"

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.recorder.begin_optimizer()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        self.batches += 1
        # A scheduler steps later, and the next batch begins; the run ends before that.
        if self.batches >= MOST_BATCHES * trainer.accumulate_grad_batches or self._has_stepped(trainer):
            trainer.should_stop = True

    def _has_stepped(self, trainer: Trainer) -> bool:
        enough = self.batches >= STEPS * trainer.accumulate_grad_batches
        steps = [self.recorder.optimizer_steps[id(optimizer)] for optimizer in trainer.optimizers]
        return enough and all(count >= STEPS for count in steps)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.stop()
