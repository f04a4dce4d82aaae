"""The callback that says what a fit does: one `step` event a batch, and when to leave.

On the CPU an event is written at once. On a GPU reading the loss would make the host wait for the device at every step,
so events are kept and written together every half second, with one wait for all their losses. A loss that is not finite
ends the fit at that point, with the step and the last finite loss. The parts of a step are then of the device's own
clock, read at the same moment; what the host was busy with stands beside them as `host_seconds`. Leaving on request
goes by an exception that is no `Exception`, which skips Lightning's validation at stop time (see `kit.run.control` for
when).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from kit.processes import peak_rss_bytes
from kit.run.device_clock import DeviceClock, DeviceStep, Mark
from kit.run.failure import DivergedError
from kit.run.jobs.context import Context
from kit.run.jobs.loader_used import samples_of
from kit.run.timing import PARTS, StepClock
from kit.train.batch_loss import batch_loss

_COUNTED = ("requests", "bytes_read")
_FLUSH_SECONDS = 0.5
_PAGE_BYTES = resource.getpagesize()


class Leave(BaseException):
    """Leaves the fit because it was asked to."""


class Recorder(Callback):
    """Writes the events of one rank's fit."""

    def __init__(self, context: Context, clock: StepClock) -> None:
        self.context = context
        self.clock = clock
        self.left = False
        self.loader: object = None
        self._batches = self._steps_done = 0
        self._train_started = 0.0
        self._read_span: tuple[float, float] | None = None
        self._validation_started = 0.0
        self._kept: list[tuple[dict[str, Any], torch.Tensor | None, DeviceStep | None]] = []
        self._flushed = time.perf_counter()
        self._last_finite: float | None = None
        self._residence = _Residence()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loader = trainer.train_dataloader
        device = trainer.strategy.root_device
        batches = trainer.num_training_batches
        self.context.writer.write(
            "fit_started",
            strategy=self.context.config.hardware.strategy,
            strategy_class=type(trainer.strategy).__name__,
            accelerator="gpu" if device.type == "cuda" else device.type,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            precision=str(trainer.precision),
            world_size=trainer.world_size,
            batches_per_epoch=int(batches) if math.isfinite(batches) else None,
            max_steps=trainer.max_steps,
            parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
            module=_class(pl_module),
            data=_class(getattr(trainer, "datamodule", None)),
        )
        self.clock.take()
        if device.type == "cuda":
            self.clock.device = DeviceClock(_cuda_mark, self.clock.part)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._validation_started = time.time()
        self.clock.enter("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self.clock.leave()
        self.clock.note_span("validation", self._validation_started, time.time())

    def on_train_batch_start(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        self._train_started = time.time()
        self._read_span = getattr(self.loader, "last_span", None)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        seconds = self.clock.take()
        on_device = None if self.clock.device is None else self.clock.device.take()
        self._batches += 1
        done = trainer.global_step
        stepped = done > self._steps_done
        samples = samples_of(trainer, batch)
        fields = {
            "step": done if stepped else done + 1,
            "batch": self._batches,
            "epoch": trainer.current_epoch,
            "train_started": self._train_started,
            "train_ended": time.time(),
            **self._reading(),
            "loss": None,
            **seconds,
            "samples": samples,
            "samples_per_second": _rate(samples, seconds),
            "host_rss_bytes": self._residence.host_rss_bytes(),
            "host_file_bytes": self._residence.host_file_bytes,
            **_device_bytes(pl_module.device),
        }
        self._steps_done = done
        self._kept.append((fields, batch_loss(outputs, trainer), on_device))
        now = time.perf_counter()
        if pl_module.device.type != "cuda" or now - self._flushed >= _FLUSH_SECONDS:
            self.flush()
            self._flushed = now
        if stepped and self.context.control.should_leave(done, self.context.rank, self.context.world_size):
            self.left = True
            raise Leave

    def _reading(self) -> dict[str, Any]:
        """When this batch was read, and what the loader has read since it was made, as far as the loader tells."""
        counters, span = getattr(self.loader, "counters", None), self._read_span
        counts = counters() if callable(counters) else {}
        read = {} if span is None else {"read_started": span[0], "read_ended": span[1]}
        return {**read, **{name: counts[name] for name in _COUNTED if name in counts}}

    def flush(self) -> None:
        """Write what is kept, waiting once for all losses.

        Raises:
            DivergedError: at the first loss that is not finite.
        """
        kept, self._kept = self._kept, []
        tensors = [loss.float() for _, loss, _ in kept if loss is not None]
        losses = iter(torch.stack(tensors).tolist() if tensors else [])
        diverged: DivergedError | None = None
        for fields, tensor, on_device in kept:
            if on_device is not None:
                fields.update(_of_device(fields, on_device))
            if tensor is not None:
                fields["loss"] = next(losses)
                diverged = diverged or self._check(fields["loss"], int(fields["step"]))
            self.context.writer.write("step", **fields)
        if diverged is not None:
            raise diverged
        for name, started, ended in self.clock.take_spans():
            self.context.writer.write("span", name=name, started=started, ended=ended)

    def save(self) -> None:
        """Write what is kept of a fit that has failed, if the device still answers."""
        with contextlib.suppress(Exception):
            self.flush()

    def _check(self, loss: float, step: int) -> DivergedError | None:
        if math.isfinite(loss):
            self._last_finite = loss
            return None
        before = self._last_finite
        last = "there was no finite one before" if before is None else f"the last finite one was {before:.6g}"
        return DivergedError(
            f"the loss is {loss} at step {step}; {last}. Lower the learning rate or clip the gradients"
        )

    def end(self, steps: int) -> None:
        """Say that the fit has ended."""
        self.flush()
        counters = getattr(self.loader, "counters", None)
        self.context.writer.write(
            "fit_ended",
            steps=steps,
            stopped=self.left,
            validation_seconds=self.clock.take()["validation_seconds"],
            counters=counters() if callable(counters) else {},
            peak_host_rss_bytes=peak_rss_bytes(),
        )


def _class(thing: object) -> str | None:
    """What a module or data is called; None for none."""
    return None if thing is None else f"{type(thing).__module__}:{type(thing).__qualname__}"


def _cuda_mark() -> Mark:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _rate(samples: int, seconds: dict[str, float]) -> float | None:
    """Of training: a validation between two steps is none of their time."""
    training = seconds["step_seconds"] - seconds["validation_seconds"]
    return samples / training if training > 0 else None


def _of_device(fields: dict[str, Any], step: DeviceStep) -> dict[str, Any]:
    """The seconds of a step by the device's clock in place of the host's, which are kept beside them."""
    found = step.seconds()
    names = (*PARTS, "other")
    seconds = {f"{name}_seconds": found.get(name, 0.0) for name in names}
    seconds["step_seconds"] = sum(seconds.values())
    host = {name: fields[f"{name}_seconds"] for name in (*names, "step")}
    return {**seconds, "samples_per_second": _rate(fields["samples"], seconds), "host_seconds": host}


class _Residence:
    """Resident memory of this process, read at every step and so from a file kept open."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None
        self.host_file_bytes: int | None = None
        """Of what was read last, the pages of files: programs and mapped arrays; None where it is not told."""

    def host_rss_bytes(self) -> int:
        if self._statm is not None:
            _, resident, of_files, *_ = os.pread(self._statm, 128, 0).split()
            self.host_file_bytes = int(of_files) * _PAGE_BYTES
            return int(resident) * _PAGE_BYTES
        return int(psutil.Process().memory_info().rss)


def _device_bytes(device: torch.device) -> dict[str, int | None]:
    """The caching allocator's peaks so far: what the model needed, and what was taken from the device for it."""
    if device.type != "cuda":
        return {"device_allocated_bytes": None, "device_reserved_bytes": None}
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return {
        "device_allocated_bytes": int(stats["allocated_bytes"]["all"]["peak"]),
        "device_reserved_bytes": int(stats["reserved_bytes"]["all"]["peak"]),
    }
