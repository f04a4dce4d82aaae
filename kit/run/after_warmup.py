"""AfterWarmup: a callback that looks twice, after the warm-up steps and at the end, and writes what lies between.

The end counts however it comes: a fit that leaves on request leaves by an exception. The invariant: one first look, and
at most one event.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from kit.run.jobs.context import Context

Look = TypeVar("Look")


class AfterWarmup(Callback, Generic[Look]):
    """What is to be looked at, and written, is its subclass's."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._looked = False
        self._began: Look | None = None

    def look(self, trainer: Trainer) -> Look | None:
        """What there is to see now; None when there is nothing."""
        raise NotImplementedError

    def write(self, trainer: Trainer, began: Look) -> None:
        """What has come since the first look."""
        raise NotImplementedError

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        if not self._looked and trainer.global_step >= self._context.config.trial.warmup_steps:
            self._looked = True
            self._began = self.look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        began, self._began = self._began, None
        if began is not None:
            self.write(trainer, began)
