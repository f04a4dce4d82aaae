"""What one rank's fit does: an event per step, where the seconds of a step go, and how its loader really stood.

`StepRecorder` writes one `step` event per batch, with what the module logged in it. On a GPU reading a loss would make
the host wait for the device, so there the events of half a second are written together, with one wait for all their
numbers. A loss that is not finite ends the fit. When a stop was requested (`kit.trial.directory`) the fit is left by an
exception that is no `Exception`, so that Lightning skips its validation.

`StepClock` is the Trainer's profiler. It keeps a stack of Lightning's actions and charges every moment to the innermost
one that has a part in `PARTS`: parts never overlap, and they add to the wall time, also with accumulation and nesting
(Lightning's own `optimizer_step` contains forward and backward, here it does not). It synchronises nothing, so on a GPU
its seconds tell what the host was busy with, not what the step cost; they are kept as `host_seconds`.

Of a manual optimization Lightning tells its profiler of optimizer steps alone, and the recorder adds `manual_backward`.

`DeviceClock` gives the seconds on a GPU. At every change of part it puts a CUDA event into the stream (3 µs of the
host); the time between two events, read long after, is what the part cost the device, idle time included (to 0.5 µs).
So a wait for data costs nothing while the device is still busy. The parts add to the time between the first events of
two steps.

`CommunicationTimer` tells the clock when this rank waits for others. In ddp, gradients travel while the backward pass
computes; that costs nothing. The wait begins when the pass has done its own work: autograd then runs its final
callbacks, and the first gradient has queued ours before ddp queues its own. In fsdp it is the gathering of parameters
and the scattering of gradients, with their copies. What a module communicates itself belongs to the part it does it in.

`WorkersMemory` counts memory of loader processes, which is no rank's own: pages that a process holds alone, as what it
shares with the rank that forked it is counted there.

`LoaderUsed` keeps the record true: calibration, data that was given settings, and the caller's own loaders differ from
the config. At the first batch rank 0 reads the settings off the loader that trains, writes them as an event and puts
them into the config of the run directory. Batches of a loader that does not tell their size count as the largest so
far, as they do in a prediction of memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from kit.config import Config
from kit.data.patches.module import EpochData
from kit.errors import ConfigError, Problem, warn_caller
from kit.machine.processes import anonymous_bytes, children_of_multiprocessing, own_bytes, peak_rss_bytes
from kit.memory.record.batches import own_batch_size, samples_in
from kit.train.callbacks import batch_loss, why_nothing_trains
from kit.trial.context import Context
from kit.trial.directory import replace_config
from kit.trial.payload import BATCH, BatchRule
from kit.trial.settings_used import with_values
from kit.trial.verdict import DivergedError

_FLUSH_SECONDS = 0.5
_PAGE_BYTES = resource.getpagesize()

PARTS = (
    "wait", "transfer", "forward", "backward", "optimizer", "communication", "validation", "checkpoint", "logging",
)  # fmt: skip
BESIDE = ("validation", "checkpoint", "logging")
"""Parts that are no training, and that also come after the last step."""
_REST, _INHERITED = "other", "inherited"
_PART_OF_HOOK = {
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
    "save_checkpoint": "checkpoint",
}
_SAVE, _LOSS = "save_checkpoint", ""
_BACKWARD = torch.autograd.backward
_AFTERWARDS = ".on_exception"
"""The end of actions that are done because of an error, and raise none."""
_FSDP_WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
_LOADER_FIELDS = [info.path for info in Config.fields() if info.path.startswith("loader.")]


class StopRequested(BaseException):
    """Leaves the fit."""


class WorkersMemory:
    """What the loader's processes of this rank hold, asked after a step, for a hundredth of the time at most."""

    def __init__(self) -> None:
        self._due = dict.fromkeys(("workers_bytes", "workers_anonymous_bytes"), 0.0)
        self._asked = 0

    def fields(self, is_last: bool) -> dict[str, int]:
        """Of all processes together: what each holds alone, and all beside files, of those that are due."""
        processes, found = children_of_multiprocessing(), {}
        is_first = self._asked < _ASKED_ALWAYS
        self._asked += bool(processes)
        for name, ask in (("workers_bytes", own_bytes), ("workers_anonymous_bytes", anonymous_bytes)):
            began, used = time.perf_counter(), time.thread_time()
            is_due = is_last or began >= self._due[name] or (is_first and ask is anonymous_bytes)
            if processes and is_due:
                found[name] = sum(map(ask, processes))
                self._due[name] = began + (time.thread_time() - used) / _ASKING_FRACTION
        return {name: held for name, held in found.items() if held}


_ASKING_FRACTION = 0.01
_ASKED_ALWAYS = 64
"""Steps, after which the cheap of the two (20 us a process) is always asked: a short trial has no others."""


class StepRecorder(Callback):
    """Writes the events of one rank's fit."""

    def __init__(self, context: Context, clock: StepClock) -> None:
        self.context = context
        self.clock = clock
        self.stopped = False
        self.loader: object = None
        self._batches = self._steps_done = 0
        self._has_loss = False
        self._lazy = False
        """Whether layers get their shape with the first batch."""
        self._train_started = self._validation_started = 0.0
        self._read_span: tuple[float, float] | None = None
        self._kept: list[tuple[dict[str, Any], dict[str, torch.Tensor], DeviceStep | None]] = []
        self._flushed = time.perf_counter()
        self._last_finite: float | None = None
        self._workers = WorkersMemory()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loader = trainer.train_dataloader
        device = trainer.strategy.root_device
        on_gpu = device.type == "cuda"
        batches = trainer.num_training_batches
        data = getattr(trainer, "datamodule", None)
        self.context.writer.write(
            "fit_started",
            strategy=self.context.config.hardware.strategy,
            strategy_class=type(trainer.strategy).__name__,
            accelerator="gpu" if on_gpu else device.type,
            device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
            precision=str(trainer.precision),
            world_size=trainer.world_size,
            batches_per_epoch=int(batches) if math.isfinite(batches) else None,
            max_steps=getattr(trainer, "trial_steps", trainer.max_steps),
            max_epochs=trainer.max_epochs,
            parameters=_numbers_of(pl_module),
            left_out_validation=not trainer.limit_val_batches and _validates(trainer, pl_module),
            module=_class_name(pl_module),
            data=None if data is None else _data_words(data),
        )
        self._lazy = any(map(is_lazy, pl_module.parameters()))
        connector = trainer._logger_connector
        vars(connector)["log_metrics"] = self.clock.timed("logging", connector.log_metrics)
        if not pl_module.automatic_optimization:  # then Lightning tells its profiler of steps alone
            profiler = getattr(trainer, "profiler")  # noqa: B009 - of no type in Lightning
            action = f"[Strategy]{type(trainer.strategy).__name__}.backward"
            vars(torch.autograd)["backward"] = as_action(profiler, action, _BACKWARD)  # `loss.backward()` calls it too
        self.clock.take()
        if on_gpu:
            make_event = lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # noqa: E731
            self.clock.device = DeviceClock(make_event, self.clock.part)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_started = time.time()
        self.clock.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.leave()
        if not trainer.sanity_checking:
            self.clock.note_span("validation", self._validation_started, time.time())

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._train_started = time.time()
        self._read_span = getattr(self.loader, "last_span", None)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = self.clock.take()
        on_device = None if self.clock.device is None else self.clock.device.take()
        self._batches += 1
        done = trainer.global_step
        stepped = done > self._steps_done
        samples, span, counts = samples_of(trainer, batch), self._read_span, self._counters()
        fields: dict[str, Any] = {
            "step": done if stepped else done + 1,
            "batch": self._batches,
            "epoch": trainer.current_epoch,
            "train_started": self._train_started,
            "train_ended": time.time(),
            **({} if span is None else {"read_started": span[0], "read_ended": span[1]}),
            **{name: counts[name] for name in ("requests", "bytes_read") if name in counts},
            "loss": None,
            **seconds,
            "samples": samples,
            "elements": _elements(batch),
            "samples_per_second": _rate(samples, seconds["step_seconds"]),
            **self._memory(pl_module.device),
            **self._workers.fields(stepped and done >= getattr(trainer, "trial_steps", math.inf)),
        }
        self._steps_done = done
        self._kept.append((fields, self._logged(trainer, outputs), on_device))
        now = time.perf_counter()
        if pl_module.device.type != "cuda" or now - self._flushed >= _FLUSH_SECONDS:
            self.flush()
            self._flushed = now
        if stepped and self.context.control.should_leave(done, self.context.rank, self.context.world_size):
            self.stopped = True
            raise StopRequested

    def _logged(self, trainer: Trainer, outputs: Any) -> dict[str, torch.Tensor]:
        """The loss, under an empty name, and on rank 0 what the module logged in this batch, still on their device."""
        loss = batch_loss(outputs, trainer)
        logged = trainer._logger_connector.metrics["callback"] if self.context.rank == 0 else {}
        named = {name: value for name, value in logged.items() if f"{name}_step" not in logged}  # as loggers name them
        found = {name: value.detach() for name, value in named.items() if value.numel() == 1}
        self._has_loss |= loss is not None
        return found if loss is None else {_LOSS: loss, **found}

    def _counters(self) -> dict[str, int]:
        """What the loader has read since it was made, as far as it tells."""
        counters = getattr(self.loader, "counters", None)
        return counters() if callable(counters) else {}

    def _memory(self, device: torch.device) -> dict[str, int | None]:
        """Resident memory, the pages of files in it, and the peaks of the caching allocator; None where unknown."""
        found: dict[str, int | None] = {"host_rss_bytes": None, "host_file_bytes": None}
        if self._statm is None:
            found["host_rss_bytes"] = int(psutil.Process().memory_info().rss)
        else:
            _, resident, of_files, *_ = os.pread(self._statm, 128, 0).split()
            found = {"host_rss_bytes": int(resident) * _PAGE_BYTES, "host_file_bytes": int(of_files) * _PAGE_BYTES}
        stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else None
        for kind in ("allocated", "reserved"):
            found[f"device_{kind}_bytes"] = None if stats is None else int(stats[f"{kind}_bytes"]["all"]["peak"])
        return found

    def flush(self) -> None:
        """Write what is kept, waiting once for all losses.

        Raises:
            DivergedError: at the first loss that is not finite.
        """
        kept, self._kept = self._kept, []
        numbers = iter(_numbers([value for _, logged, _ in kept for value in logged.values()]))
        diverged: DivergedError | None = None
        for fields, logged, on_device in kept:
            if on_device is not None:
                fields.update(with_device_seconds(fields, on_device))
            metrics = {name: next(numbers) for name in logged}
            if _LOSS in metrics:
                fields["loss"] = loss = metrics.pop(_LOSS)
                if math.isfinite(loss):
                    self._last_finite = loss
                elif diverged is None:
                    before = self._last_finite
                    last = "no loss was finite" if before is None else f"the last finite loss was {before:.6g}"
                    message = f"the loss is {loss} at step {fields['step']}; {last}. {self._way_out(before)}"
                    diverged = DivergedError(message)
            self.context.writer.write("step", **fields, **({"metrics": metrics} if metrics else {}))
        if diverged is not None:
            raise diverged
        for name, started, ended in self.clock.take_spans():
            self.context.writer.write("span", name=name, started=started, ended=ended)

    def _way_out(self, before: float | None) -> str:
        if before is None:  # no optimizer has stepped with a loss that was a number
            return "Look at the inputs, the loss and the first weights: no learning rate helps here"
        clips = self.context.config.training.gradient_clip_norm is not None
        return "Lower the learning rate" + ("" if clips else " or clip the gradients (training.gradient_clip_norm)")

    def end(self, trainer: Trainer) -> None:
        """Write that the fit has ended, and which callback asked for it.

        Raises:
            ConfigError: when it has ended without a batch, which nobody asked for.
        """
        self.flush()
        if self._batches == 0 and not self.stopped and trainer.limit_train_batches:
            raise ConfigError([Problem("data", f"nothing was trained: {_why_no_batch(trainer)}")])
        why = why_nothing_trains(trainer, self._has_loss) if self._batches else ""
        if why and trainer.is_global_zero:
            warn_caller(f"nothing was trained: {why}")
        callbacks = getattr(trainer, "callbacks")  # noqa: B009
        reasons = (getattr(callback, "stopping_reason_message", None) for callback in callbacks)
        after = self.clock.take()
        self.context.writer.write(
            "fit_ended",
            steps=trainer.global_step,
            stopped=self.stopped,
            early=next(filter(None, reasons), None),
            **{f"{part}_seconds": after[f"{part}_seconds"] for part in BESIDE},
            counters=self._counters(),
            peak_host_rss_bytes=peak_rss_bytes(),
            **({"parameters": _numbers_of(trainer.lightning_module)} if self._lazy else {}),
        )


def _numbers_of(module: LightningModule) -> int:
    """Of all parameters that have a shape by now."""
    return sum(one.numel() for one in module.parameters() if not is_lazy(one))


def _why_no_batch(trainer: Trainer) -> str:
    loader: Any = trainer.train_dataloader
    with contextlib.suppress(Exception):  # a loader of the user's own may have neither
        samples, size = len(loader.sampler), loader.batch_size  # of this rank
        if samples == 0:
            return "the dataset is empty"
        if size and loader.drop_last:
            return f"{samples} samples are less than a batch of {size}, and drop_last leaves that out"
    return "the loader gave no batch"


def _validates(trainer: Trainer, module: LightningModule) -> bool:
    """Whether module and data would validate, if they were let."""
    own = trainer.fit_loop.epoch_loop.val_loop._data_source
    return is_overridden("validation_step", module) and own.is_defined()


def _numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Their values, waiting once for each device."""
    devices = {tensor.device for tensor in tensors}
    values = {
        device: iter(torch.stack([t.reshape(()).float() for t in tensors if t.device == device]).tolist())
        for device in devices
    }
    return [next(values[tensor.device]) for tensor in tensors]


def _elements(batch: Any) -> int:
    """Numbers in the tensors of a batch: what differs between ranks or steps where samples are of several lengths."""
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _data_words(data: object) -> str:
    """Its class, and which data it is where it says so."""
    description = getattr(data, "description", "")
    return f"{_class_name(data)}, {description}" if description and isinstance(description, str) else _class_name(data)


def _class_name(thing: object) -> str:
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def _rate(samples: int, seconds: float) -> float | None:
    """Samples per second of the clock on the wall."""
    return samples / seconds if seconds > 0 else None


def with_device_seconds(fields: dict[str, Any], step: DeviceStep) -> dict[str, Any]:
    """The seconds of a step by the device's clock in place of the host's, which become `host_seconds`."""
    found = step.seconds()
    names = (*PARTS, _REST)
    seconds = {f"{name}_seconds": found.get(name, 0.0) for name in names}
    seconds["step_seconds"] = sum(seconds.values())
    host = {name: fields[f"{name}_seconds"] for name in (*names, "step")}
    return {**seconds, "samples_per_second": _rate(fields["samples"], seconds["step_seconds"]), "host_seconds": host}


@functools.cache
def _part_of(action: str) -> str:
    """The part that an action of Lightning belongs to; a callback's hook belongs to whatever calls it."""
    if action.startswith("[Callback]"):
        return _INHERITED
    hook = action.rpartition(".")[2]
    return next((part for ending, part in _PART_OF_HOOK.items() if hook.endswith(ending)), _INHERITED)


def as_action(profiler: Profiler, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, told to a profiler as an action of Lightning."""

    @functools.wraps(call)
    def told(*args: Any, **options: Any) -> Any:
        with profiler.profile(name):
            return call(*args, **options)

    return told


class StepClock(Profiler):
    """Exclusive seconds by part since `take` was last called."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: tuple[BaseException, str] | None = None
        """The last exception seen to leave an action, and the innermost action that it left."""
        self.device: DeviceClock | None = None
        """Where set, it is told of every change of part."""
        self.actions: dict[str, float] = {}
        """Seconds of each action of Lightning, without those inside of it, since this was last cleared."""
        self._stack: list[tuple[str, str]] = []
        self._entered: list[str] = []
        self._save_started = 0.0
        self._spans: list[tuple[str, float, float]] = []
        self._seconds = dict.fromkeys((*PARTS, _REST), 0.0)
        self._since = self._taken = time.perf_counter()

    @property
    def part(self) -> str:
        """The part that this moment is charged to."""
        if not self._stack:
            return _REST
        return self._entered[-1] if self._entered else self._stack[-1][1]

    @property
    def action(self) -> str:
        """The innermost action of Lightning; empty outside of one."""
        return self._stack[-1][0] if self._stack else ""

    def enter(self, part: str) -> None:
        """Charge everything to `part` until `leave`; inside of another entered part, to that one."""
        self._charge()
        self._entered.append(self._entered[-1] if self._entered else part)
        self._tell_device()

    def leave(self) -> None:
        """Leave the part that was entered last, if any was."""
        self._charge()
        if self._entered:
            self._entered.pop()
        self._tell_device()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, charged to `part`."""

        def timed(*args: Any, **options: Any) -> Any:
            self.enter(part)
            try:
                return call(*args, **options)
            finally:
                self.leave()

        return timed

    def turn_to(self, part: str) -> None:
        """Charge the rest of the innermost action to `part`."""
        self._charge()
        if self._stack:
            self._stack[-1] = (self._stack[-1][0], part)
        self._tell_device()

    @override
    def start(self, action_name: str) -> None:
        self._charge()
        part = _part_of(action_name)
        if part is _INHERITED:
            part = self._stack[-1][1] if self._stack else _REST
        self._stack.append((action_name, part))
        self._tell_device()
        if action_name == _SAVE:
            self._save_started = time.time()

    @override
    def stop(self, action_name: str) -> None:
        self._charge()
        if any(action == action_name for action, _ in self._stack):
            while self._stack.pop()[0] != action_name:  # started inside and never stopped
                continue
            if action_name == _SAVE:
                self.note_span("save", self._save_started, time.time())
        self._tell_device()
        error = sys.exc_info()[1]
        known = self.failed is not None and self.failed[0] is error
        if (
            error is not None
            and not known
            and not isinstance(error, StopIteration)
            and not action_name.endswith(_AFTERWARDS)
        ):
            self.failed = (error, action_name)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            spent, action = now - self._since, self._stack[-1][0]
            self._seconds[self.part] += spent
            self.actions[action] = self.actions.get(action, 0.0) + spent
        self._since = now

    def _tell_device(self) -> None:
        if self.device is not None:
            self.device.turn(self.part)

    def take(self) -> dict[str, float]:
        """`{part}_seconds`, `other_seconds` and their sum, `step_seconds`: the wall time since the last call."""
        self._charge()
        wall = self._since - self._taken
        fields = {f"{part}_seconds": self._seconds[part] for part in PARTS}
        self._taken = self._since
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return {**fields, "other_seconds": max(0.0, wall - sum(fields.values())), "step_seconds": wall}

    def note_span(self, name: str, started: float, ended: float) -> None:
        """Keep something that is reported as a whole, with its start and end in seconds since the epoch."""
        self._spans.append((name, started, ended))

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of what was kept since the last call."""
        spans, self._spans = self._spans, []
        return spans


class DeviceStep:
    """The CUDA events of one step; `seconds` waits for the last of them."""

    def __init__(self, turns: Sequence[tuple[str, Any]], end: Any) -> None:
        self._turns, self._end = turns, end

    def seconds(self) -> dict[str, float]:
        """Seconds of the device by part, without those that took none."""
        self._end.synchronize()
        found: dict[str, float] = {}
        for (part, begin), (_, end) in itertools.pairwise([*self._turns, ("", self._end)]):
            found[part] = found.get(part, 0.0) + begin.elapsed_time(end) / 1000  # from milliseconds
        return found


class DeviceClock:
    """Puts CUDA events into the current stream, each made by `make_event`, where one part ends and the next begins."""

    def __init__(self, make_event: Callable[[], Any], part: str) -> None:
        self._make_event = make_event
        self._turns = [(part, self._put())]

    def _put(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def turn(self, part: str) -> None:
        """Charge what follows to `part`."""
        if part != self._turns[-1][0]:
            self._turns.append((part, self._put()))

    def take(self) -> DeviceStep:
        """The step since the last call; the part under way goes on in the next step."""
        end = self._put()
        step = DeviceStep(self._turns, end)
        self._turns = [(self._turns[-1][0], end)]
        return step


class CommunicationTimer(Callback):
    """Tells the clock when this rank begins and ends to wait for others."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._several = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._several = trainer.world_size > 1
        units = [unit for unit in pl_module.modules() if self._several and isinstance(unit, FSDPModule)]
        for group in (group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups):
            for name in _FSDP_WAITS:
                setattr(group, name, self._clock.timed("communication", getattr(group, name)))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        def on_first_gradient(_: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._clock.turn_to("communication"))

        if self._several and loss.requires_grad:
            loss.register_hook(on_first_gradient)  # type: ignore[no-untyped-call]


class LoaderUsed(Callback):
    """Writes `loader_used`, and again when a larger batch comes; corrects the config of the run."""

    def __init__(self, context: Context) -> None:
        self._context, self._submitted = context, context.config
        self._largest = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        context, size = self._context, samples_of(trainer, batch)
        if context.rank != 0 or size <= self._largest:
            return
        self._largest = size
        settings = {BATCH: size, **_settings_of(trainer)}
        used, size = with_values(self._submitted, settings), settings[BATCH]
        rule = BatchRule.of_environment(context.environment)
        if rule is not None and rule.size != size and rule.made(size).is_worth_a_warning:  # not known before
            context.writer.write("warned", message=rule.made(size).note)
        changed = self._submitted.diff(used)
        context.writer.write(
            "loader_used",
            asked={path: before for path, (before, _) in changed.items()},
            used={path: now for path, (_, now) in changed.items()},
        )
        if used != context.config:
            context.config = used
            with contextlib.suppress(OSError):  # a full disk must not end a training; the event says the same
                replace_config(context.paths, used)


def _settings_of(trainer: Trainer) -> dict[str, Any]:
    """The `loader` settings that the training loader has, as far as it tells."""
    loader = _first(trainer.train_dataloader)
    if not isinstance(loader, DataLoader):
        data = getattr(trainer, "datamodule", None)
        own = getattr(data, "config", None) if isinstance(data, EpochData) else None
        return {path: own.get(path) for path in _LOADER_FIELDS} if isinstance(own, Config) else {}
    known = {RandomSampler: True, SequentialSampler: False}  # of any other sampler nobody knows the order
    sampler = loader.sampler
    found = {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last if own_batch_size(loader) else None,
        "shuffle": bool(sampler.shuffle) if isinstance(sampler, DistributedSampler) else known.get(type(sampler)),
    }
    return {f"loader.{name}": value for name, value in found.items() if value is not None}


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
    """Of several loaders the first, whose samples are those of the step."""
    if isinstance(loaders, dict) and loaders:
        return _first(next(iter(loaders.values())))
    return _first(loaders[0]) if isinstance(loaders, list | tuple) and loaders else loaders
