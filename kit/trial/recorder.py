"""The callback that says what a fit does: one `step` event a batch, and when to leave.

On the CPU an event is written at once. On a GPU reading the loss would make the host wait for the device at every step,
so events are kept and written together every half second, with one wait for all their losses. A loss that is not finite
ends the fit at that point, with the step and the last finite loss. The parts of a step are then of the device's own
clock, read at the same moment; what the host was busy with stands beside them as `host_seconds`. Leaving on request
goes by an exception that is no `Exception`, which skips Lightning's validation at stop time (see `kit.trial.directory`
for when).

Where the seconds of a step go: waiting for data, transfer, forward, backward, optimizer, communication, validation.

Lightning tells a profiler when each of its actions begins and ends. This one keeps a stack and charges every moment to
the innermost action that has a name here, so the parts never overlap and sum to the wall time, with accumulation and
nesting included (Lightning's own `optimizer_step` contains forward and backward; here it does not). What others know to
begin and end (`kit.trial.recorder`, a validation) is entered and left, and takes whatever happens meanwhile.

Nothing is synchronised. On a GPU the host runs ahead, and its seconds say what it was busy with, not what the step
cost: there `kit.trial.recorder` marks the same turns on the device, and `take` is what the host saw.

The device's own clock: where the seconds of a step go on a GPU, without making the host wait for it.

At every turn from one part to another an event is put into the stream the device works through. When the device comes
by, it notes the time; what lies between two events is what the part before them cost *the device*, idle time included.
So a wait for data that the device never felt, because it was still busy, costs nothing here, and one that left it idle
costs what it left idle. Parts of a step add to the time from its first event to the first of the next: nothing is lost
between steps and nothing counted twice. Events are read long after, when all of them have come by.

Resolution 0.5 µs (CUDA's own). An event takes about 3 µs of the host.

What a rank waits for the others: the part of communication that training feels.

In ddp gradients travel while the backward pass still computes; what travels meanwhile costs nothing. This looks for
the rest: the backward's own work is done when autograd comes to its final callbacks, of which ours is the first (it is
queued by the first gradient, before ddp queues its wait), and the wait lasts to the end of the backward. In fsdp it is
the gathering of parameters before they are used and the scattering of gradients after, with the copies these need.

Communication that a module makes itself belongs to the part it is made in. One process alone has none.

LoaderUsed: how the loader of a fit really stood, so that the record of the trial says what ran.

A config says what kit makes a loader with; calibration, data that was given settings, and a loader of the caller's own
have others. At the first batch, rank 0 reads them off the loader that trains, writes one event, and puts them into the
config of the run directory, which every report reads. Batches of a loader that does not say how large they are count
as large as the largest so far, as they do in a prediction of memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from kit.config import Config
from kit.data.patches.module import EpochData
from kit.machine.processes import peak_rss_bytes
from kit.memory.record.batches import own_batch_size, samples_in
from kit.train.callbacks import batch_loss
from kit.trial.context import Context
from kit.trial.directory import replace_config
from kit.trial.payload import BATCH, BatchRule
from kit.trial.verdict import DivergedError
from kit.trial.what_ran import with_values

_COUNTED = ("requests", "bytes_read")
_FLUSH_SECONDS = 0.5
_PAGE_BYTES = resource.getpagesize()


class Leave(BaseException):
    """Leaves the fit because it was asked to."""


class StepRecorder(Callback):
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


PARTS = ("wait", "transfer", "forward", "backward", "optimizer", "communication", "validation")
_REST, _INHERITED = "other", "inherited"
_MARKS = {
    "train_dataloader_next": "wait",
    "batch_to_device": "transfer",
    "batch_transfer": "transfer",
    "transfer_batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "zero_grad": "optimizer",
    "gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
}


_SPANS = {"save_checkpoint": "save"}
"""Actions that are told whole, with their beginning and end."""


def part_of(action: str) -> str:
    """The part an action of Lightning belongs to; callbacks belong to whatever calls them."""
    hook = action.rpartition(".")[2]
    found = (part for mark, part in _MARKS.items() if hook.endswith(mark))
    return _INHERITED if action.startswith("[Callback]") else next(found, _INHERITED)


class StepClock(Profiler):
    """Exclusive seconds by part since `take` was last called."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: tuple[BaseException, str] | None = None
        """The last exception seen to leave an action, and the innermost action that it left."""
        self._parts: dict[str, str] = {}
        self._stack: list[tuple[str, str]] = []
        self._began: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
        self._entered: list[str] = []
        self.device: DeviceClock | None = None
        """Where set, it is told of every turn from one part to another."""
        self._seconds = dict.fromkeys((*PARTS, _REST), 0.0)
        self._since = self._taken = time.perf_counter()

    @property
    def part(self) -> str:
        """What this moment is charged to."""
        if not self._stack:
            return _REST
        return self._entered[-1] if self._entered else self._stack[-1][1]

    def enter(self, part: str) -> None:
        """Charge everything to `part`, until it is left; inside of another, to that one."""
        self._charge()
        self._entered.append(self._entered[-1] if self._entered else part)
        self._turn()

    def leave(self) -> None:
        """End what was entered last; nothing when nothing was."""
        self._charge()
        if self._entered:
            self._entered.pop()
        self._turn()

    def turn_to(self, part: str) -> None:
        """Charge the rest of the innermost action to `part`."""
        self._charge()
        if self._stack:
            self._stack[-1] = (self._stack[-1][0], part)
        self._turn()

    def _turn(self) -> None:
        if self.device is not None:
            self.device.turn(self.part)

    def start(self, action_name: str) -> None:
        self._charge()
        part = self._parts.get(action_name) or self._parts.setdefault(action_name, part_of(action_name))
        if part is _INHERITED:
            part = self._stack[-1][1] if self._stack else _REST
        self._stack.append((action_name, part))
        self._turn()
        if action_name in _SPANS:
            self._began[action_name] = time.time()

    def stop(self, action_name: str) -> None:
        self._charge()
        stack = self._stack
        if stack and stack[-1][0] == action_name:
            stack.pop()
        elif any(action == action_name for action, _ in stack):  # something inside was started and never stopped
            while stack.pop()[0] != action_name:
                continue
        self._turn()
        if action_name in self._began:
            self._spans.append((_SPANS[action_name], self._began.pop(action_name), time.time()))
        error = sys.exc_info()[1]
        if error is not None:
            self._note(error, action_name)

    def _note(self, error: BaseException, action: str) -> None:
        known = self.failed is not None and self.failed[0] is error
        if not known and not isinstance(error, StopIteration):
            self.failed = (error, action)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._entered[-1] if self._entered else self._stack[-1][1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """`{part}_seconds`, `other_seconds` and their sum, `step_seconds`: the wall time since the last call."""
        self._charge()
        wall = self._since - self._taken
        parts = {part: self._seconds[part] for part in PARTS}
        self._taken = self._since
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        other = max(0.0, wall - sum(parts.values()))
        fields = {f"{part}_seconds": seconds for part, seconds in parts.items()}
        return {**fields, "other_seconds": other, "step_seconds": wall}

    def note_span(self, name: str, began: float, ended: float) -> None:
        """Tell of something whole, in seconds since the epoch."""
        self._spans.append((name, began, ended))

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(name, beginning, end) of what was told whole since the last call, in seconds since the epoch."""
        spans, self._spans = self._spans, []
        return spans


class Mark(Protocol):
    """An event in the device's stream: `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> Any: ...
    def synchronize(self) -> Any: ...
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`."""


class DeviceStep:
    """One step's marks; `seconds` waits for the last of them."""

    def __init__(self, turns: Sequence[tuple[str, Mark]], end: Mark) -> None:
        self._turns, self._end = turns, end

    def seconds(self) -> dict[str, float]:
        """Seconds of the device by part, those that took none left out."""
        self._end.synchronize()
        found: dict[str, float] = {}
        ends = [mark for _, mark in self._turns[1:]] + [self._end]
        for (part, begin), end in zip(self._turns, ends, strict=True):
            found[part] = found.get(part, 0.0) + begin.elapsed_time(end) / 1000
        return found


class DeviceClock:
    """Puts marks into the current stream."""

    def __init__(self, make_mark: Callable[[], Mark], part: str) -> None:
        self._make = make_mark
        self._turns = [(part, self._put())]

    def _put(self) -> Mark:
        mark = self._make()
        mark.record()
        return mark

    def turn(self, part: str) -> None:
        """From here on it is `part`; nothing when it already was."""
        if part != self._turns[-1][0]:
            self._turns.append((part, self._put()))

    def take(self) -> DeviceStep:
        """What came since the last call; the part under way goes on in the next step."""
        end = self._put()
        step = DeviceStep(self._turns, end)
        self._turns = [(self._turns[-1][0], end)]
        return step


PART = "communication"
_FSDP_WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


class CommunicationTimer(Callback):
    """Tells the clock when this rank begins and ends to wait for others."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._several = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._several = trainer.world_size > 1
        if self._several:
            for group in _groups(pl_module):
                for name in _FSDP_WAITS:
                    setattr(group, name, self._timed(getattr(group, name)))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._several and loss.requires_grad:
            loss.register_hook(self._on_first_gradient)  # type: ignore[no-untyped-call]

    def _on_first_gradient(self, _: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._on_last_gradient)

    def _on_last_gradient(self) -> None:
        self._clock.turn_to(PART)

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self._clock.enter(PART)
            try:
                return wait(*args, **options)
            finally:
                self._clock.leave()

        return timed


def _groups(module: nn.Module) -> list[Any]:
    """Parameters that fsdp gathers together, of every unit of the module."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


_FIELDS = [info.path for info in Config.fields() if info.path.startswith("loader.")]


class LoaderUsed(Callback):
    """Writes `loader_used`, and again when a larger batch comes; corrects the config of the run."""

    def __init__(self, context: Context) -> None:
        self._context, self._asked = context, context.config
        self._largest = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        samples = samples_of(trainer, batch)
        if self._context.rank == 0 and samples > self._largest:
            self._largest = samples
            self._tell({BATCH: samples, **settings_of(trainer)})

    def _tell(self, settings: dict[str, Any]) -> None:
        self._warn(settings[BATCH])
        asked, used = self._asked, with_values(self._asked, settings)
        changed = asked.diff(used)
        self._context.writer.write(
            "loader_used",
            asked={path: before for path, (before, _) in changed.items()},
            used={path: now for path, (_, now) in changed.items()},
        )
        if used != self._context.config:
            self._context.config = used
            with contextlib.suppress(OSError):  # a full disk must not end a training; the event says the same
                replace_config(self._context.paths, used)

    def _warn(self, size: int) -> None:
        """Say what could not be known before the loader was made."""
        told = BatchRule.of_environment(self._context.environment)
        if told is not None and told.size != size and told.made(size).is_worth_a_warning:
            self._context.writer.write("warned", message=told.made(size).note)


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The `loader` settings that the training loader stands at, as far as it has them."""
    loader, data = _first(trainer.train_dataloader), getattr(trainer, "datamodule", None)
    if isinstance(loader, DataLoader):
        return _of_torch(loader)
    own = getattr(data, "config", None) if isinstance(data, EpochData) else None
    return {path: own.get(path) for path in _FIELDS} if isinstance(own, Config) else {}


def samples_of(trainer: Trainer, batch: Any) -> int:
    """Samples in the batch at hand: as many as its loader says, but for an epoch's last, which may be smaller."""
    loader = _first(trainer.train_dataloader)
    found, own = samples_in(batch), own_batch_size(loader)
    if own is None:
        return found or 1
    if found is None or found > own:
        return own
    return found if trainer.is_last_batch or isinstance(loader.dataset, IterableDataset) else own


def _first(loaders: Any) -> Any:
    """Of several loaders the first: its samples are those that a step is said to have."""
    if isinstance(loaders, dict) and loaders:
        return _first(next(iter(loaders.values())))
    return _first(loaders[0]) if isinstance(loaders, list | tuple) and loaders else loaders


def _of_torch(loader: DataLoader[Any]) -> dict[str, Any]:
    found = {
        "num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor, "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last if own_batch_size(loader) else None, "shuffle": _shuffles(loader.sampler),
    }  # fmt: skip
    return {f"loader.{name}": value for name, value in found.items() if value is not None}


def _shuffles(sampler: Any) -> bool | None:
    """None for a sampler whose order nobody knows."""
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    known = {RandomSampler: True, SequentialSampler: False}
    return known.get(type(sampler))
