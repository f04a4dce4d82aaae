"""LeversUsed: what the levers of a fit really did, read back after its first batch and written as one event.

A config says what is wanted; the optimizer may have become another, a kernel may have been ruled out, blocks may have
been left alone. `kit.run.what_ran` makes sentences of the event.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.run.jobs.context import Context
from kit.train.attention import AttentionKernel, available_kernels
from kit.train.levers import GradientCheckpointing
from kit.train.sequence_chunks import SequenceChunks


class LeversUsed(Callback):
    """Writes `levers_used` once; to be placed after the levers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._written = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._written:
            self._written = True
            self._context.writer.write("levers_used", **self._found(trainer))

    @staticmethod
    def _found(trainer: Trainer) -> dict[str, Any]:
        levers: list[Any] = list(getattr(trainer, "callbacks"))  # noqa: B009
        missing = available_kernels(trainer.strategy.root_device.type)
        return {
            "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
            "checkpointed_blocks": sum(lever.count for lever in levers if isinstance(lever, GradientCheckpointing)),
            "sequence_chunks": next((lever.count for lever in levers if isinstance(lever, SequenceChunks)), 0),
            "attention": next((dict(lever.ran) for lever in levers if isinstance(lever, AttentionKernel)), {}),
            "attention_here": [name for name, reason in missing.items() if not reason],
            "attention_missing": {name: reason for name, reason in missing.items() if reason},
        }
