"""CpuUse: how many CPU seconds a rank and its loader processes used while it trained, after the warm-up steps.

One `cpu_used` event a rank, from two looks at the clocks of the system, so that no step pays for it. CPU seconds over
wall seconds are cores: 1.0 of the training thread is one core at 100 %. The clock of a process counts all its threads;
loader processes are counted as far as they live at both looks. A thread that is ready but has no core, because others
have them all, is *queued* (Linux tells): it was not idle.

EnergyUse: what a rank's own GPU took while it trained, after the warm-up steps.

One `energy_measured` event a rank, `joules` and `seconds`, from two looks at the counter that the card itself keeps, so
that no step pays for it. Joules over seconds are watts of the whole board, with whatever else runs on it. There is no
event on the CPU, without NVML, for a card without a counter, a MIG instance, and a measurement so short that the
counter moved too few times in it: watts are then the rated ones (`kit.studies.scaling.bill`).

CarbonUse: what codecarbon says that a trial took, beside what NVML counts and what `kit.studies.scaling.bill` assumes.

One `carbon_estimated` event of rank 0, for the whole machine from the first batch to the last: joules by part, grams of
CO2-equivalent of the country's grid, seconds. codecarbon asks nobody over the network here; of a processor that does
not tell its power it knows the rated one, and of memory an assumption, so that its figures are estimates too. Starting
it takes some seconds, before the first batch. It is an extra: see `kit.trial.submit`.

AfterWarmup: a callback that looks twice, after the warm-up steps and at the end, and writes what lies between.

The end counts however it comes: a fit that leaves on request leaves by an exception. The invariant: one first look, and
at most one event.

StepWork: what one step asks of the machine: arithmetic, memory traffic, calls, and waits of the host.

One batch after the first two optimizer steps and within the warm-up is watched operation by operation, on every rank,
and written as one `work_counted` event, so that no step that is measured pays for it; with less warm-up nothing is
counted. FLOPs follow torch's own formulas (a multiply and an add are two) for matrix products, convolutions and
attention, forward, backward and recomputation alike; everything else counts as none. Bytes are what would move if each
operation read its inputs and wrote its outputs once, views moving nothing: fused kernels and caches move less, so this
is an upper bound. A sync is where the host must know a value that a device computes: `.item()`, `bool(tensor)`,
`.cpu()`; on the CPU it stops nothing, but would on a GPU.

Watching changes no result, and what it fails to count it leaves out.

MemoryMeter: the callback that measures the peak of a fit, in the same bytes that a prediction names.

On the CPU the allocator is traced from the strategy's set-up to the end of the second optimizer step, and the time it
takes to add up counts in no step. A GPU counts by itself, over the whole fit: allocated, reserved, and what the process
holds outside the allocator (what the GPU gave away since the submission, which is wrong while others come and go). A
fit that ends before its second optimizer step has not seen its peak, because optimizer state is made in the first one,
and is not measured.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.errors import KitWarning
from kit.machine.gpus import read_joules
from kit.memory.record.truth import AllocatorTrace
from kit.trial.context import Context
from kit.trial.recorder import StepClock, samples_of
from kit.trial.verdict import describe, is_library

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


_SCHEDULE = Path("/proc/thread-self/schedstat")


class CpuUse(AfterWarmup["_Look"]):
    """Writes `cpu_used` when training ends, if a step was measured."""

    def look(self, trainer: Trainer) -> _Look:  # noqa: ARG002
        return _look()

    def write(self, trainer: Trainer, began: _Look) -> None:
        now = _look()
        common = began.workers.keys() & now.workers.keys()
        self._context.writer.write(
            "cpu_used",
            wall_seconds=now.wall_seconds - began.wall_seconds,
            process_seconds=now.process_seconds - began.process_seconds,
            thread_seconds=now.thread_seconds - began.thread_seconds,
            queued_seconds=now.queued_seconds - began.queued_seconds,
            workers_seconds=sum(now.workers[pid] - began.workers[pid] for pid in common),
            workers=getattr(trainer.train_dataloader, "num_workers", 0),
        )


@dataclass(frozen=True, slots=True)
class _Look:
    wall_seconds: float
    process_seconds: float
    thread_seconds: float
    queued_seconds: float
    workers: dict[int, float]
    """CPU seconds by process id."""


def _look() -> _Look:
    workers = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            workers[process.pid] = used.user + used.system
    return _Look(time.perf_counter(), time.process_time(), time.thread_time(), _queued_seconds(), workers)


def _queued_seconds() -> float:
    """How long this thread has waited for a core; 0 where the system does not tell."""
    try:
        return int(_SCHEDULE.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


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


_LINES = 5
_TORCH = f"{torch.__path__[0]}/"
_FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}
_ASKING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
_COPIES = {"_to_copy", "copy_"}
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
_Line = tuple[str, int, str]


class StepWork(Callback):
    """Writes `work_counted` once; to be placed before the callback that ends the step's time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first = STEPS if context.config.trial.measure_memory else 1
        self._mode: WorkMode | None = None
        self._done = False

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        if not self._done and self._first <= trainer.global_step < self._context.config.trial.warmup_steps:
            self._mode = WorkMode(pl_module.device)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:  # noqa: ARG002
        if self._mode is not None:
            self._mode.backward = True

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if self._mode is not None:
            self._mode.backward = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        mode = self._leave()
        if mode is not None:
            found = mode.found(self._context.cells)
            self._context.writer.write("work_counted", samples=samples_of(trainer, batch), **found)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        self._leave()

    def _leave(self) -> WorkMode | None:
        mode, self._mode = self._mode, None
        if mode is not None:
            self._done = True
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return mode


class WorkMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that is run while it is entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

        self.backward = False
        """Whether gradients are being computed now."""
        self._on_cpu = device.type == "cpu"
        self._formulas: Mapping[Any, Callable[..., int]] = flop_registry
        self._attention: tuple[Callable[..., int], ...] = (sdpa_flop_count, sdpa_backward_flop_count)
        self._flops: Counter[str] = Counter()
        self._bytes = self._calls = self._syncs = self._norms_again = 0
        self._line_calls: Counter[_Line] = Counter()
        self._line_syncs: Counter[_Line] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with contextlib.suppress(Exception):  # counting must never end a step
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func._opname
        self._calls += 1
        line = _own_line()
        if line is not None:
            self._line_calls[line] += 1
        if self._is_sync(name, args, out):
            self._syncs += 1
            if line is not None:
                self._line_syncs[line] += 1
        self._norms_again += self.backward and name.startswith(_NORMS) and not name.endswith("_backward")
        if name not in _FREE and not _is_view(func):
            self._bytes += _moved_bytes((args, kwargs), out)
        flops = self._flops_of(func, name, args, kwargs, out)
        if flops:
            self._flops[_dtype(args)] += flops

    def _flops_of(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            return int(self._attention[0](*(tensor.shape for tensor in args[:3])))
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            return int(self._attention[1](*(tensor.shape for tensor in args[:4])))
        formula = self._formulas.get(func._overloadpacket)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))

    def _is_sync(self, name: str, args: tuple[Any, ...], out: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if name in _ASKING:
            return self._on_cpu or any(tensor.device.type != "cpu" for tensor in tensors)
        if name not in _COPIES or not isinstance(out, torch.Tensor):
            return False
        return out.device.type == "cpu" and any(tensor.device.type != "cpu" for tensor in tensors)

    def found(self, cells: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """The fields of the event. `lines` are those of the user's code that made most calls, and that had syncs."""
        most = [line for line, _ in self._line_calls.most_common(_LINES)]
        lines = dict.fromkeys([*most, *(line for line, _ in self._line_syncs.most_common(_LINES))])
        return {
            "flops": dict(self._flops),
            "bytes": self._bytes,
            "calls": self._calls,
            "syncs": self._syncs,
            "own_syncs": sum(self._line_syncs.values()),
            "batch_norms_again": self._norms_again,
            "lines": [
                {
                    "place": describe(line, cells),
                    "calls": self._line_calls[line],
                    "syncs": self._line_syncs[line],
                }
                for line in lines
            ],
        }


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _own_line() -> _Line | None:
    """The line of the user's code that called torch; None where Lightning or another library did."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file == __file__ or file.startswith(_TORCH):
            continue
        return None if is_library(file) else (file, frame.f_lineno, frame.f_code.co_name)
    return None


def _is_view(func: Any) -> bool:
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _moved_bytes(inputs: Any, out: Any) -> int:
    read = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    return sum(map(_bytes, read)) + sum(map(_bytes, written))


def _bytes(tensor: torch.Tensor) -> int:
    """What a rank holds of it; an expanded tensor is no larger than what it repeats."""
    local = getattr(tensor, "_local_tensor", tensor)
    return min(int(local.nbytes), int(local.untyped_storage().nbytes()))


def _dtype(args: tuple[Any, ...]) -> str:
    tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    return str(next(tensors).dtype).removeprefix("torch.")


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
