"""Callbacks that measure what a fit takes: CPU seconds, energy, carbon, the work of a step, and peak memory.

Each writes one event per rank, at most, and none costs a measured step anything, but `CpuPace` a fraction of a percent.

- `CpuUse`, `cpu_used`: CPU seconds of a rank and its loader processes after the warm-up steps, from two readings of the
  system's clocks. CPU seconds over wall seconds are cores. A process's clock counts all its threads; loader processes
  count as far as they live at both readings. A thread that is ready but has no core is *queued* (on Linux), not idle.
  What all programs of the machine used, less the ranks and all that they started, is what others used meanwhile.
  How fast a CPU is between steps, `CpuPace`, is asked four times a second, for half a millisecond.
- `EnergyUse`, `energy_measured`: joules and seconds of the rank's own GPU after the warm-up steps, from two readings of
  the card's own counter; joules over seconds are watts of the whole board, with whatever else runs on it. No event on
  the CPU, without NVML, for a card without a counter, a MIG instance, and when the counter moved too few times; watts
  are then the rated ones (`kit.studies.scaling.bill`).
- `CarbonUse`, `carbon_estimated`: codecarbon's estimate for the whole machine, by rank 0, from the first batch to the
  last: joules by part, grams of CO2-equivalent of the country's grid. It uses no network. Where it cannot read a
  processor's power it takes the rated one, and memory is an assumption. It takes seconds to start, before the first
  batch, and is an extra (`kit.trial.submit`).
- `StepWork`, `work_counted`: arithmetic, memory traffic, calls and host syncs of one batch after the first two
  optimizer steps and within the warm-up; with less warm-up nothing is counted. FLOPs follow torch's formulas (a
  multiply and an add are two) for matrix products, convolutions and attention, forward, backward and recomputation
  alike; other operations count none. Bytes are those of every operation's inputs and outputs, views none: an upper
  bound, as kernels fuse and caches hit. A sync is where the host must know a value that a device computes (`.item()`,
  `bool(tensor)`, `.cpu()`); on the CPU it stops nothing, but would on a GPU. What cannot be counted is left out. A step
  of tens of thousands of small operations, as of a recurrent net, takes many times as long while it is counted: after
  `MOST_COUNTING_SECONDS` the rest passes uncounted, its backward pass not even seen, and FLOPs and places are not told.
- `MemoryMeter`, `memory_measured`: the peak of the fit, in the bytes that a prediction names. On the CPU the allocator
  is traced from the strategy's set-up to the end of the second optimizer step, and again in the first validation after
  it, in the test and in the prediction, each of which writes another event; adding it up counts in no step. A GPU
  counts by itself, over the whole fit and what follows it: allocated, reserved, and what the process holds outside the
  allocator (what the GPU gave away since the submission, which is wrong while others come and go). Before its second
  optimizer step a fit has not seen its peak, because optimizer state is made in the first, and is not measured.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from kit.errors import warn_caller
from kit.machine.gpus import read_joules
from kit.machine.processes import MOST_SLOWNESS, cpu_seconds, scheduled_seconds
from kit.memory.record.truth import AllocatorTrace
from kit.memory.replay.snapshot import MOST_BYTES, batch_words, read_snapshot, save_snapshot
from kit.train.device_limit import DeviceLimit
from kit.trial.context import Context
from kit.trial.recorder import StepClock, samples_of
from kit.trial.verdict import describe, is_library, is_out_of_memory

_JOULES_PER_KILOWATT_HOUR = 3.6e6
_GRAMS_PER_KILOGRAM = 1000.0


class CarbonUse(Callback):
    """Writes `carbon_estimated` when training ends."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tracker: Any = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        from codecarbon import OfflineEmissionsTracker

        self._tracker = OfflineEmissionsTracker(
            country_iso_code=self._context.config.trial.codecarbon, save_to_file=False, log_level=logging.CRITICAL,
            measure_power_secs=1, tracking_mode="machine", allow_multiple_runs=True,
        )  # fmt: skip
        self._tracker.start()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
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

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


Reading = TypeVar("Reading")


class AfterWarmup(Callback, Generic[Reading]):
    """Reads twice, after the warm-up steps and at the end, however the fit ends, and writes the difference once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._has_begun = False
        self._first: Reading | None = None

    def read(self, trainer: Trainer) -> Reading | None:
        """The counters now; None when there are none."""
        raise NotImplementedError

    def write(self, trainer: Trainer, first: Reading) -> None:
        """Write what was counted since the first reading."""
        raise NotImplementedError

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._has_begun and trainer.global_step >= self._context.config.trial.warmup_steps:
            self._has_begun = True
            self._first = self.read(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first, self._first = self._first, None
        if first is not None:
            self.write(trainer, first)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


class CpuPace:
    """How fast a CPU is at a moment, as the seconds of a small product; not asked of a GPU or among several ranks.

    Neighbours on the cores of a shared host, and clocks, change it to and fro within seconds: on one by 2 times, while
    memory stayed as fast. No counter of the system tells.

    Args:
        device: What computes.
        ranks: That compute together; what they do to one another is no pace.
        fastest_seconds: Seen before on this machine; 0 where nothing was.
    """

    def __init__(self, device: torch.device, ranks: int = 1, fastest_seconds: float = 0.0) -> None:
        self.is_known = device.type == "cpu" and ranks == 1
        self.fastest_seconds = fastest_seconds or (math.inf if self.is_known else 0.0)
        self._factor = torch.full((_PACE_SIDE, _PACE_SIDE), 0.5, dtype=torch.float32, device="cpu")
        self._product = torch.empty_like(self._factor)  # asking allocates nothing, as a fit's memory may be counted

    def seconds(self, repeats: int = 4) -> float:
        """Now: the lower median of a few, as some may wait for a core; 0 where it is not asked."""
        if not self.is_known:
            return 0.0
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            torch.mm(self._factor, self._factor, out=self._product)
            found.append(time.perf_counter() - began)
        now = statistics.median_low(found)
        self.fastest_seconds = min(self.fastest_seconds, now)
        return now

    def slowness(self, seconds: float) -> float:
        """How many times as long as at its fastest the product took; 1 where it is not asked."""
        return max(1.0, seconds / self.fastest_seconds) if self.is_known else 1.0


def mean_pace(seconds: Sequence[float]) -> float | None:
    """Of several moments; none in which the process or the machine stood still counts for more than a slow one."""
    return statistics.fmean(min(one, MOST_SLOWNESS * min(seconds)) for one in seconds) if seconds else None


_PACE_SIDE, _PACE_EVERY_SECONDS, _PACE_REPEATS = 256, 0.25, 3


class _CpuSeconds(NamedTuple):
    wall: float
    machine: float
    """Of all programs."""
    process: float
    thread: float
    queued: float
    """How long this thread has waited for a core; 0 where the system does not tell."""
    family: dict[int, float]
    """Of this process and those that it started, by their ids."""


class CpuUse(AfterWarmup[_CpuSeconds]):
    """Writes `cpu_used` when training ends, if a step was measured."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        device = torch.device("cpu" if context.environment.get("accelerator") == "cpu" else "cuda")
        self._pace = CpuPace(device, context.world_size)
        self._paces: list[float] = []
        self._asked = 0.0

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        due = self._pace.is_known and time.perf_counter() - self._asked >= _PACE_EVERY_SECONDS
        if self._has_begun and due and not torch.autograd.profiler._is_profiler_enabled:  # a trace is of the training
            self._paces.append(self._pace.seconds(_PACE_REPEATS))
            self._asked = time.perf_counter()

    @override
    def read(self, trainer: Trainer) -> _CpuSeconds:
        own, (_, queued) = (time.process_time(), time.thread_time()), scheduled_seconds(threading.get_native_id())
        machine, family = cpu_seconds()
        return _CpuSeconds(time.perf_counter(), machine, *own, queued, family)

    @override
    def write(self, trainer: Trainer, first: _CpuSeconds) -> None:
        now = self.read(trainer)
        workers = first.family.keys() & now.family.keys() - {os.getpid()}
        self._context.writer.write(
            "cpu_used",
            wall_seconds=now.wall - first.wall,
            machine_seconds=now.machine - first.machine,
            family_seconds=sum(now.family.values()) - sum(first.family.values()),
            process_seconds=now.process - first.process,
            thread_seconds=now.thread - first.thread,
            queued_seconds=now.queued - first.queued,
            workers_seconds=sum(now.family[pid] - first.family[pid] for pid in workers),
            workers=getattr(trainer.train_dataloader, "num_workers", 0),
            pace_seconds=mean_pace(self._paces),
        )


LEAST_SECONDS = 1.0
"""Of an energy measurement: at least ten movements of the counter."""


class EnergyUse(AfterWarmup[tuple[float, float]]):
    """Writes `energy_measured` when training ends, if it was measured."""

    @override
    def read(self, trainer: Trainer) -> tuple[float, float] | None:
        """(seconds, joules), both since some time."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            return None
        joules = read_joules(self._context.environment["devices"][device.index or 0])
        return None if joules is None else (time.perf_counter(), joules)

    @override
    def write(self, trainer: Trainer, first: tuple[float, float]) -> None:
        now = self.read(trainer)
        if now is None:
            return
        seconds, joules = (after - before for before, after in zip(first, now, strict=True))
        if seconds >= LEAST_SECONDS and joules > 0:
            self._context.writer.write("energy_measured", joules=joules, seconds=seconds)


_gpu_memory: Any = torch.cuda.memory
_note_metadata = getattr(_gpu_memory, "_set_memory_metadata", None)
_MOST_LINES, _MOST_PLACES = 5, 200
_TORCH = f"{torch.__path__[0]}/"
_MOVE_NOTHING = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}
_READ_A_VALUE = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
_COPIES = {"_to_copy", "copy_"}
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update")
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_Line = tuple[str, int, str]
_UNKNOWN: _Line = ("Lightning", 0, "")
STEPS = 2
"""Optimizer steps until a fit has seen its peak of memory."""


class StepWork(Callback):
    """Writes `work_counted` once; to be placed before the callback that ends the step's time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first = STEPS if context.config.trial.measure_memory else 1
        self._mode: WorkMode | None = None
        self._counted: WorkMode | None = None
        """One that was left before the step had ended."""
        self._done = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._done and self._first <= trainer.global_step < self._context.config.trial.warmup_steps:
            self._mode = WorkMode(pl_module.device)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._mode is None:
            return
        self._mode.backward = True
        if self._mode.is_enough and self._counted is None:  # what is not counted costs as much to see
            self._counted = self._leave()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._mode is not None:
            self._mode.backward = False

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        mode, self._counted = self._leave() or self._counted, None
        if mode is not None:
            found = mode.found(self._context.cells)
            self._context.writer.write("work_counted", samples=samples_of(trainer, batch), **found)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> WorkMode | None:
        mode, self._mode = self._mode, None
        if mode is not None:
            self._done = True
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return mode


MOST_COUNTING_SECONDS, _MOST_COUNTING_FRACTION = 1.0, 0.2
"""Counting goes on as long as it is less than this share of the step's time; seeing operations takes as long again."""


class WorkMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that is run while it is entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

        self.backward = False
        """Whether gradients are being computed now."""
        self.is_enough = False
        """Whether counting has taken so long that it has ended."""
        self._began, self._spent_seconds = time.perf_counter(), 0.0
        self._on_cpu = device.type == "cpu"
        self._formulas: Mapping[Any, Callable[..., int]] = flop_registry
        self._attention: tuple[Callable[..., int], ...] = (sdpa_flop_count, sdpa_backward_flop_count)
        self._flops: Counter[str] = Counter()
        self._bytes = self._calls = self._syncs = self._norms_again = 0
        self._collectives: Counter[_Line] = Counter()
        self._collective_bytes = self._rows = self._rows_used = 0
        self._line_calls: Counter[_Line] = Counter()
        self._line_syncs: Counter[_Line] = Counter()
        self._places: dict[_Line, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.is_enough:
            self._calls += 1
            return out
        done = time.perf_counter()
        with contextlib.suppress(Exception):  # counting must never end a step
            self._count(func, args, kwargs, out)
        now = time.perf_counter()
        self._spent_seconds += now - done
        most = max(MOST_COUNTING_SECONDS, _MOST_COUNTING_FRACTION * (now - self._began))
        self.is_enough = self._spent_seconds > most
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name, line = func._opname, _own_line()
        beyond = line or _own_line(beyond_libraries=True)
        self._calls += 1
        if beyond is not None and len(self._places) < _MOST_PLACES:
            self._places[beyond] = None
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collectives[beyond or _UNKNOWN] += 1
            self._collective_bytes += sum(map(_held_bytes, _tensors(args)))
        if name in ("embedding", "_embedding_bag"):
            self._rows += args[0].shape[0]
            self._rows_used += min(args[0].shape[0], args[1].numel())
        if line is not None:
            self._line_calls[line] += 1
        tensors = _tensors(args)
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        copied_back = name in _COPIES and isinstance(out, torch.Tensor) and out.device.type == "cpu" and on_device
        if copied_back or (name in _READ_A_VALUE and (self._on_cpu or on_device)):
            self._syncs += 1
            if line is not None:
                self._line_syncs[line] += 1
        self._norms_again += self.backward and name.startswith(_NORMS) and not name.endswith("_backward")
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if name not in _MOVE_NOTHING and not is_view:
            self._bytes += sum(map(_held_bytes, [*_tensors((args, kwargs)), *_tensors(out)]))
        flops = self._flops_of(func, name, args, kwargs, out)
        if flops:
            self._flops[str(tensors[0].dtype).removeprefix("torch.")] += flops

    def _flops_of(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        if name == _CPU_ATTENTION:
            return int(self._attention[0](*(tensor.shape for tensor in args[:3])))
        if name == f"{_CPU_ATTENTION}_backward":
            return int(self._attention[1](*(tensor.shape for tensor in args[:4])))
        formula = self._formulas.get(func._overloadpacket)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))

    def found(self, cells: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """The fields of the event.

        `lines` are those of the user's code that made most calls, and that had syncs; `places` all that called,
        themselves or through a library. Of a step that was counted in part FLOPs are empty and there are no `places`;
        the rest is at least so much.
        """
        most = [line for counts in (self._line_calls, self._line_syncs) for line, _ in counts.most_common(_MOST_LINES)]
        return {
            "flops": {} if self.is_enough else dict(self._flops),
            **({"counted_seconds": self._spent_seconds} if self.is_enough else {}),
            "bytes": self._bytes,
            "calls": self._calls,
            "syncs": self._syncs,
            "own_syncs": sum(self._line_syncs.values()),
            "batch_norms_again": self._norms_again,
            "collectives": sum(self._collectives.values()),
            "collective_bytes": self._collective_bytes,
            "collective_places": [[describe(line, cells), count] for line, count in self._collectives.most_common(3)],
            "rows": self._rows,
            "rows_used": self._rows_used,
            "lines": [
                {"place": describe(line, cells), "calls": self._line_calls[line], "syncs": self._line_syncs[line]}
                for line in dict.fromkeys(most)
            ],
            **({} if self.is_enough else {"places": [describe(line, cells) for line in self._places]}),
        }


def _own_line(beyond_libraries: bool = False) -> _Line | None:
    """The line of the user's code that called torch; None where Lightning or another library did, unless asked for."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_TORCH):
            if not is_library(file):
                return file, frame.f_lineno, frame.f_code.co_name
            if not beyond_libraries:
                return None
        frame = frame.f_back
    return None


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Of what an operation takes or gives: tensors in tuples, lists and keywords."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


def _held_bytes(tensor: torch.Tensor) -> int:
    """What a rank holds of a tensor; an expanded one is no larger than what it repeats."""
    local = getattr(tensor, "_local_tensor", tensor)
    return min(int(local.nbytes), int(local.untyped_storage().nbytes()))


class MemoryMeter(Callback):
    """Writes `memory_measured` events, on the CPU one for each kind of stage, and a file of what the allocator did."""

    def __init__(self, context: Context, clock: StepClock) -> None:
        self.context, self.clock = context, clock
        self._trace = AllocatorTrace() if context.environment["accelerator"] == "cpu" else None
        self._evaluation = AllocatorTrace() if self._trace is not None else None
        self._evaluated: set[str] = set()
        self._batches = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._resume()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trace is not None:
            self._trace.pause()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resume(*_holders(trainer))

    def _resume(self, *holders: Any) -> None:
        if self._trace is not None:
            try:
                self._trace.resume(*holders)
            except RuntimeError as error:
                self._trace = None
                _warn(error)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._trace is not None:
            self._trace.note(batch)

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._batches += 1
        steps = trainer.global_step
        if self._trace is None or min(self._batches, steps) < STEPS:
            return
        try:
            measured = self._trace.stop(steps, batches=self._batches)
        except RuntimeError as error:
            _warn(error)
        else:
            measured.save(self.context.paths.measured_memory(self.context.rank))
            self._write(measured.peak_bytes, None, None, steps)
        self._trace = None
        self.clock.take()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin("validation", trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("test", trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("predict", trainer)

    def _begin(self, what: str, trainer: Trainer) -> None:
        # What runs between the first steps is traced with them.
        if self._evaluation is None or self._trace is not None or what in self._evaluated:
            return
        self._evaluated.add(what)
        try:
            self._evaluation.start(*_holders(trainer))
        except RuntimeError as error:
            _warn(error)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._evaluation is not None and self._evaluation.running:
            self._evaluation.note(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._evaluation is None or not self._evaluation.running:
            return
        try:
            self._write(self._evaluation.stop().peak_bytes, None, None, trainer.global_step)
        except RuntimeError as error:
            _warn(error)

    on_test_end = on_predict_end = on_validation_end

    def end(self, trainer: Trainer) -> None:
        """Ask the GPU, once the fit has ended, and after each stage that follows it."""
        device = trainer.strategy.root_device
        if device.type == "cuda" and trainer.global_step >= STEPS:
            free, total = torch.cuda.mem_get_info(device)
            before = self.context.environment["device_used_bytes"][self.context.rank]
            outside = max(0, total - free - torch.cuda.memory_reserved(device) - before)
            allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            self._write(allocated, reserved, outside, STEPS)

    def _write(self, allocated: int, reserved: int | None, outside: int | None, steps: int) -> None:
        self.context.writer.write(
            "memory_measured", device_allocated_bytes=allocated, device_reserved_bytes=reserved, outside_bytes=outside,
            optimizer_steps=steps,
        )  # fmt: skip


def _holders(trainer: Trainer) -> list[Any]:
    """What holds tensors before the first step: the module, its optimizers, and models that callbacks average."""
    callbacks: list[Callback] = getattr(trainer, "callbacks")  # noqa: B009 - of no type in Lightning
    kept = [item for callback in callbacks for item in vars(callback).values()]
    own = [item for item in kept if isinstance(item, torch.nn.Module | torch.Tensor)]
    return [trainer.lightning_module, *trainer.optimizers, *own]


MOST_ENTRIES = 100_000
"""Requests and releases that are kept of a device, of the last steps: tens of steps of most models."""


class MemoryHistory(Callback):
    """Keeps what a device held when it ran out of memory, with the stacks of who asked, in the run directory.

    A GPU's allocator notes each request with its Python stack (2 µs), from before the module is moved there. On the CPU
    memory runs out only under `hardware.device_memory_bytes`, which notes the same. Written by the first hook after the
    error: the frames that failed still hold their tensors, and what was freed meanwhile is in the trace.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = -1
        self._on_gpu = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._on_gpu = trainer.strategy.root_device.type == "cuda"
        if self._on_gpu:
            with contextlib.suppress(RuntimeError):  # an allocator that keeps no history, such as cudaMallocAsync
                _gpu_memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_ENTRIES)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch += 1
        if self._on_gpu and _note_metadata is not None:
            _note_metadata(batch_words(self._batch))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_out_of_memory(exception):
            with contextlib.suppress(Exception):  # a full disk must not hide that memory ran out
                self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        limits = [it for it in getattr(trainer, "callbacks") if isinstance(it, DeviceLimit)]  # noqa: B009
        for snapshot in [_gpu_memory._snapshot()] if self._on_gpu else [it.snapshot for it in limits if it.snapshot]:
            found = read_snapshot(snapshot)
            save_snapshot(self._context.paths.memory_snapshot(self._context.rank), snapshot, MOST_BYTES)
            self._context.writer.write(
                "out_of_memory", device_allocated_bytes=found.allocated_bytes, asked_bytes=found.asked_bytes,
                device_reserved_bytes=found.reserved_bytes,
            )  # fmt: skip


def _warn(error: RuntimeError) -> None:
    reason = str(error).splitlines()[0]
    warn_caller(f"memory is not measured: {reason}; see trial.measure_memory")
