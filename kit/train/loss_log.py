"""LossLog: the loss of every batch in a file, and a line now and then, for whoever looks on from outside.

Rank 0 writes one `step` event a batch (`kit.events`: JSON lines, readable while they are written and after a kill)
between a `fit_started` and a `fit_ended`. Losses are read from the device together, every so often, so that a GPU is
not waited for at each step. It changes nothing in a fit, and needs nothing of the module.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.events import EventWriter
from kit.train.batch_loss import batch_loss


class LossLog(Callback):
    """Writes the losses of rank 0.

    Args:
        file: The file they are appended to.
        every_seconds: Between two writes, each with a line on stdout.
    """

    def __init__(self, file: str, every_seconds: float = 1.0) -> None:
        self.file, self.every_seconds = file, every_seconds
        self._writer: EventWriter | None = None
        self._kept: list[tuple[dict[str, Any], torch.Tensor | None]] = []
        self._written = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._writer = EventWriter(self.file, 0)
            done = {"step": trainer.global_step, "batches": trainer.fit_loop.epoch_loop.batch_progress.total.ready}
            self._writer.write("fit_started", world_size=trainer.world_size, **done)
            self._written = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._writer is None:
            return
        place = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch_idx}
        self._kept.append((place, batch_loss(outputs, trainer)))
        if time.monotonic() - self._written >= self.every_seconds:
            self._write()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def _write(self) -> None:
        """What is kept, waiting once for all losses; then where the fit is."""
        kept, self._kept, self._written = self._kept, [], time.monotonic()
        if self._writer is None or not kept:
            return
        tensors = [loss.float() for _, loss in kept if loss is not None]
        losses = iter(torch.stack(tensors).tolist() if tensors else [])
        for place, loss in kept:
            place["loss"] = None if loss is None else next(losses)
            self._writer.write("step", **place)
        last = kept[-1][0]
        said = "" if last["loss"] is None else f", loss {last['loss']:.4g}"
        print(f"epoch {last['epoch'] + 1}, step {last['step']}{said}", flush=True)  # noqa: T201 - it is for a log

    def _end(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._write()
            self._writer.write("fit_ended", step=trainer.global_step)
            self._writer.close()
            self._writer = None
