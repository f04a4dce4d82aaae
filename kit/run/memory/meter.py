"""MemoryMeter: the callback that measures the peak of a fit, in the same bytes that a prediction names.

On the CPU the allocator is traced from the strategy's set-up to the end of the second optimizer step, and the time it
takes to add up counts in no step. A GPU counts by itself, over the whole fit: allocated, reserved, and what the process
holds outside the allocator (what the GPU gave away since the submission, which is wrong while others come and go). A
fit that ends before its second optimizer step has not seen its peak, because optimizer state is made in the first one,
and is not measured.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from kit.errors import KitWarning
from kit.memory.truth import AllocatorTrace
from kit.run.jobs.context import Context
from kit.run.timing import StepClock

STEPS = 2


class MemoryMeter(Callback):
    """Writes one `memory_measured` event, and on the CPU what the allocator did."""

    def __init__(self, context: Context, clock: StepClock) -> None:
        self.context, self.clock = context, clock
        self._trace = AllocatorTrace() if context.environment["accelerator"] == "cpu" else None
        self._batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        self._look()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if self._trace is not None:
            self._trace.pause()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(pl_module, *trainer.optimizers)

    def on_train_batch_start(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        if self._trace is not None:
            self._trace.note(batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        self._batches += 1
        if self._trace is not None and min(self._batches, trainer.global_step) >= STEPS:
            self._write_trace(self._trace, trainer.global_step)
            self._trace = None
            self.clock.take()

    def end(self, trainer: Trainer) -> None:
        """The fit has ended: ask the GPU."""
        device = trainer.strategy.root_device
        if device.type == "cuda" and trainer.global_step >= STEPS:
            self._write_device(device)

    def _look(self, *held: Any) -> None:
        if self._trace is None:
            return
        try:
            self._trace.resume(*held)
        except RuntimeError as error:
            self._trace = None
            _warn(error)

    def _write_trace(self, trace: AllocatorTrace, steps: int) -> None:
        try:
            measured = trace.stop(steps, batches=self._batches)
        except RuntimeError as error:
            _warn(error)
            return
        measured.save(self.context.paths.measured_memory(self.context.rank))
        self.context.writer.write(
            "memory_measured",
            device_allocated_bytes=measured.peak_bytes,
            device_reserved_bytes=None,
            outside_bytes=None,
            optimizer_steps=steps,
        )

    def _write_device(self, device: torch.device) -> None:
        reserved = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        before = self.context.environment["device_used_bytes"][self.context.rank]
        self.context.writer.write(
            "memory_measured",
            device_allocated_bytes=torch.cuda.max_memory_allocated(device),
            device_reserved_bytes=torch.cuda.max_memory_reserved(device),
            outside_bytes=max(0, total - free - reserved - before),
            optimizer_steps=STEPS,
        )


def _warn(error: RuntimeError) -> None:
    reason = str(error).splitlines()[0]
    warnings.warn(f"memory is not measured: {reason}; see trial.measure_memory", KitWarning, stacklevel=3)
