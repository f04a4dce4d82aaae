"""record: two optimizer steps of the actual Lightning Trainer on fake tensors, and what they would allocate.

Nothing of the module is materialised: weights, activations and optimizer state are shapes. The Trainer, its strategy,
precision plugin, hooks and order of operations are those of a real fit (`kit.train.trainer.make_trainer`), so what is
recorded is what would happen, not a formula about it. A CPU is predicted with the CPU's own kernels; a GPU is played by
fake CPU tensors that follow its choices (`kit.memory.record.cuda`).

What cannot be run dry, such as a custom kernel that does not say what shape it returns, is said in `facts["unknown"]`;
the recording then holds parameters, gradients and optimizer state, which are exact, and no activations.

What the module's hooks do beside the training (files they write, processes they start, servers they call) is kept from
everybody by `kit.confinement`, and said in the notes.

Everything replaced in torch and Lightning meanwhile is put back, so that several runs can follow each other in one
process; not at the same time in two threads.

StepMarker: tells a recorder what only Lightning knows, and ends a dry run after two optimizer steps.

known_parts: what a step holds without its forward pass, when that cannot be run dry.

Parameters, buffers and gradients are exact, and so is optimizer state, because the optimizers step on fake gradients.
Activations are missing, so a recording made here is a lower bound and never a reason to say that something fits.
`reason` names what stopped the dry run, and the line of the user's code it came from.

FINITE: every number is finite, and so is whatever is asked about that.

A module that stops at a loss which is not finite must not stop in a dry run, where no loss is a number. A condition
that follows from "no NaN, no infinity" alone is known without numbers; it is written on the fake tensor as `kit_truth`,
passed on by not, and, or, all and any, and read by `kit.memory.record.fakes`. Conditions that depend on anything else
are not known.

FakeBatches: gives a dry run its batches, counted where a real run would count them.

On the CPU the loader's own batch is what the step reads. On a GPU the batch on the host does not count, pinned or not;
its copy on the device does, from the transfer on, whoever asks for it: Lightning, a batch class, or the module itself.
The invariant: the user's loaders are read outside the recording and are as they were afterwards.

Hooks: the module's and its callbacks' own, while a dry run has them called.

A hook that trips over what it was kept from (an empty answer, a library in C that may write no file) ends there, and
the steps go on: it would not have changed them. What the step itself needs, such as `training_step`, is not passed
over.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.trainer import call
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from typing_extensions import override

from kit.config import Config
from kit.confinement.confine import confined, hooks_begin
from kit.confinement.stand_ins import Refusals, overridden, replaced
from kit.errors import KitError, KitWarning
from kit.memory.record.batches import Batches, fake_loaders, loaders_of
from kit.memory.record.fakes import FakeValues, fake_values, saving_shapes
from kit.memory.record.recorder import BlockRecorder, Observer
from kit.memory.record.workspace import Workspaces, eight_bit_on_fakes
from kit.memory.replay.replay import Recording
from kit.train.trainer import make_trainer

JOB = "the prediction"
"""As notes call it."""
_CAPABILITY = (8, 0)
"""Of a GPU that nobody named."""
_ROUNDING_BYTES = {"cpu": 1, "cuda": 512}
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


@dataclass(frozen=True)
class DryRun:
    """What is to be predicted: a config, with what `auto` became for the device."""

    config: Config
    precision: str
    world_size: int = 1
    device_kind: Literal["cpu", "cuda"] = "cpu"
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU, such as (9, 0)."""


def record(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Mapping[str, Any]],
    run: DryRun,
    batch_size: int | None = None,
) -> Recording:
    """What two optimizer steps allocate on one device.

    Args:
        make_module: Makes the module; its tensors are fake.
        make_data: Makes what `Trainer.fit` takes: `datamodule` or `train_dataloaders`; its tensors are real.
        run: What is to be predicted.
        batch_size: Samples per micro-batch on the device; by default the loader's own.

    Raises:
        ConfigError: for what a real fit would refuse too.
        Exception: what `make_module` or `make_data` raises.
    """
    began = time.perf_counter()
    hooks = Hooks()
    with confined(JOB, lambda: True, lambda: hooks.run) as kept, in_this_process(), saving_shapes():
        data = make_data()
        with _quiet() as warned, _stage(run, hooks, kept) as stage:
            recording = _recorded(stage, make_module, data, batch_size)
    notes = [*_said(warned), *recording.facts["notes"], *stage.notes(), *hooks.notes, *kept.notes]
    recording.facts.update(notes=list(dict.fromkeys(notes)), seconds=time.perf_counter() - began)
    return recording


@dataclass
class _Stage:
    """Where fake tensors, fake ranks and the device's choices are in place."""

    run: DryRun
    answers: FakeValues
    emulation: Any
    hooks: Hooks
    kept: Refusals

    def notes(self) -> list[str]:
        """What was assumed, by whom it was asked."""
        emulated = [] if self.emulation is None else self.emulation.notes
        return [*self.answers.notes, *emulated, *_strategy_notes(self.run)]


@contextlib.contextmanager
def _stage(run: DryRun, hooks: Hooks, kept: Refusals) -> Iterator[_Stage]:
    with contextlib.ExitStack() as entered:
        entered.enter_context(_no_collection())
        entered.enter_context(eight_bit_on_fakes(run.config.levers.optimizer == "adamw-8bit"))
        answers = entered.enter_context(fake_values())
        emulation = entered.enter_context(_emulation(run))
        entered.enter_context(_ranks(run))
        entered.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield _Stage(run, answers, emulation, hooks, kept)


def _recorded(
    stage: _Stage, make_module: Callable[[], LightningModule], data: Mapping[str, Any], batch_size: int | None
) -> Recording:
    run = stage.run
    workspaces = _workspaces(run)
    recorder = BlockRecorder(workspaces, FINITE)
    with recorder:
        module = make_module()
        _say_what_is_compiled(module, stage.answers)
        trainer = _trainer(run, module, StepMarker(recorder))
        feed = FakeBatches(recorder, stage.answers, trainer, on_gpu=run.device_kind == "cuda")
        unknown = _fit(stage, feed, module, data, batch_size)
    size, rounding_bytes = (
        feed.batch_size or batch_size or run.config.loader.batch_size,
        _ROUNDING_BYTES[run.device_kind],
    )
    if unknown:
        recording = known_parts(module, trainer, size, rounding_bytes)
    else:
        recording = recorder.recording(size, rounding_bytes)
    recording.facts.update(_facts(run, module, trainer, unknown), unsure_workspace_bytes=workspaces.unsure_bytes)
    recording.facts["notes"] = [*recording.facts["notes"], *feed.notes]
    return recording


def _fit(
    stage: _Stage, feed: FakeBatches, module: LightningModule, data: Mapping[str, Any], batch_size: int | None
) -> str:
    """Fit; empty, or the reason why that does not work dry."""
    try:
        with (
            feed.taken(data, batch_size) as arguments,
            _collectives(stage.run, feed.recorder),
            stage.hooks.running(stage.kept),
        ):
            feed.trainer.fit(module, **arguments)
    except KitError:
        raise
    except Exception as error:
        if feed.recorder.stopped:
            stage.hooks.notes.append(f"the training ended with {reason(error, feed.recorder)}, after what was recorded")
            return ""
        return reason(error, feed.recorder)
    return ""


def _trainer(run: DryRun, module: LightningModule, marks: StepMarker) -> Trainer:
    return make_trainer(
        run.config,
        accelerator="cpu",
        world_size=run.world_size,
        precision=run.precision,
        module=module,
        callbacks=[marks],
        # As in a real fit, because schedulers look at it; `StepMarker` ends the run sooner.
        max_steps=max(STEPS, run.config.trial.max_steps),
        stands_in=run.device_kind == "cuda",
    )


# -- what the device, the ranks and the kernels add


def _emulation(run: DryRun) -> contextlib.AbstractContextManager[Any]:
    if run.device_kind == "cpu":
        return contextlib.nullcontext()
    from kit.memory.record.cuda import cuda_emulation

    return cuda_emulation(run.capability or _CAPABILITY, run.config.levers.attention)


def _workspaces(run: DryRun) -> Workspaces:
    return Workspaces((run.capability or _CAPABILITY) if run.device_kind == "cuda" else None)


def _is_distributed(run: DryRun) -> bool:
    return run.world_size > 1 or run.config.hardware.strategy != "none"


def _ranks(run: DryRun) -> contextlib.AbstractContextManager[None]:
    if not _is_distributed(run):
        return contextlib.nullcontext()
    from kit.memory.record.ranks import fake_ranks

    return fake_ranks(run.world_size)


def _collectives(run: DryRun, recorder: BlockRecorder) -> contextlib.AbstractContextManager[None]:
    if not _is_distributed(run):
        return contextlib.nullcontext()
    from kit.memory.record.ranks import label_collectives

    return label_collectives(recorder)


def _strategy_notes(run: DryRun) -> list[str]:
    if not _is_distributed(run):
        return []
    from kit.memory.record.ranks import collective_notes

    return collective_notes(run.config.hardware.strategy, run.device_kind)


# -- what goes with the numbers


def _facts(run: DryRun, module: LightningModule, trainer: Trainer, unknown: str) -> dict[str, Any]:
    parameters = list(module.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "module": type(module).__name__,
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "world_size": run.world_size,
        "strategy": run.config.hardware.strategy,
        "precision": run.precision,
        "device_kind": run.device_kind,
        "capability": run.capability,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "unknown": unknown,
    }


def _say_what_is_compiled(module: LightningModule, answers: FakeValues) -> None:
    """What was compiled before runs as it was written: torch leaves compiled code out under a recorder."""
    if any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl for part in module.modules()):
        answers.compiled()


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Lightning's greetings are for a fit; warnings are kept."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield warned
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _said(warned: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in warned if issubclass(item.category, KitWarning)]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Cycles are collected between batches only, so that equal runs free equal blocks at equal times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


STEPS = 2
"""Optimizer steps recorded: the first makes the state that the second steps with."""
MOST_BATCHES = 16
"""Micro-batches, per accumulated one, after which a module in manual optimization has stepped, or does not."""


class StepMarker(Callback):
    """Tells the recorder what only Lightning knows, and ends the run after two optimizer steps."""

    def __init__(self, recorder: BlockRecorder) -> None:
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


_MEMORY = str(Path(__file__).parent)


def reason(error: Exception, recorder: BlockRecorder) -> str:
    """What stopped the dry run, and the line of the user's code it came from."""
    operator = getattr(error, "func", None)
    if operator is None and recorder.failed is not None and recorder.failed[0] is error:
        # Torch's own operators all have fake implementations; what they raise is about their arguments.
        operator = recorder.failed[1] if recorder.failed[1].namespace not in ("aten", "prims") else None
    what = f"operator {operator} does not say what shape it returns" if operator is not None else _first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not _is_library(frame.filename)]
    return f"{what} at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else what


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    return "torch" in parts or "lightning" in parts or file.startswith((_MEMORY, "<"))


def known_parts(module: LightningModule, trainer: Trainer, batch_size: int, rounding_bytes: int) -> Recording:
    """Parameters, gradients and optimizer state of two steps without forward and backward passes."""
    recorder = BlockRecorder()
    notes: list[str] = []
    with recorder:
        recorder.track(module)
        for step in range(STEPS):
            recorder.begin_batch()
            recorder.phase = "backward"
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.grad = None
                    parameter.grad = torch.empty_like(parameter)
            recorder.mark_gradients()
            if step == 0:
                optimizers = _optimizers(module, trainer, notes)
            _step(optimizers, recorder, notes)
    return recorder.recording(batch_size, rounding_bytes, {"notes": list(dict.fromkeys(notes))})


def _optimizers(module: LightningModule, trainer: Trainer, notes: list[str]) -> list[Any]:
    if trainer.optimizers:
        return list(trainer.optimizers)
    try:
        return list(_init_optimizers_and_lr_schedulers(module)[0])
    except Exception as error:
        notes.append(f"optimizer state is left out: configure_optimizers stopped with {_first_line(error)}")
        return []


def _step(optimizers: list[Any], recorder: BlockRecorder, notes: list[str]) -> None:
    for optimizer in optimizers:
        recorder.begin_optimizer()
        try:
            optimizer.step(_no_loss)  # as Lightning does, which hands every optimizer a closure
        except Exception as error:
            notes.append(f"state of {type(optimizer).__name__} is left out: {_first_line(error)}")


def _no_loss() -> float:
    return 0.0


aten = torch.ops.aten


def _know(out: Any, truth: bool | None) -> None:
    if truth is not None and isinstance(out, FakeTensor):
        out.kit_truth = truth  # type: ignore[attr-defined]


def _always(truth: bool) -> Observer:
    return lambda _args, out: _know(out, truth)


def _same(truth: bool) -> Observer:
    """A number equals itself, since it is not NaN."""
    return lambda args, out: _know(out, truth if args[0] is args[1] else None)


def _infinite(truth: bool) -> Observer:
    return lambda args, out: _know(out, truth if isinstance(args[1], float) and math.isinf(args[1]) else None)


def _both(args: tuple[Any, ...], out: Any) -> None:
    first, second = (getattr(arg, "kit_truth", None) for arg in args[:2])
    _know(out, None if first is None or second is None else first and second)


def _either(args: tuple[Any, ...], out: Any) -> None:
    first, second = (getattr(arg, "kit_truth", None) for arg in args[:2])
    _know(out, None if first is None or second is None else first or second)


def _not(args: tuple[Any, ...], out: Any) -> None:
    truth = getattr(args[0], "kit_truth", None)
    _know(out, None if truth is None else not truth)


def _pass_on(args: tuple[Any, ...], out: Any) -> None:
    _know(out, getattr(args[0], "kit_truth", None))


FINITE: dict[Any, Observer] = {
    aten.eq.Tensor: _same(True),
    aten.ne.Tensor: _same(False),
    aten.eq.Scalar: _infinite(False),
    aten.ne.Scalar: _infinite(True),
    aten.isnan.default: _always(False),
    aten.isinf.default: _always(False),
    aten.mul.Tensor: _both,
    aten.bitwise_and.Tensor: _both,
    aten.logical_and.default: _both,
    aten.bitwise_or.Tensor: _either,
    aten.logical_or.default: _either,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.all.default: _pass_on,
    aten.any.default: _pass_on,
    aten.clone.default: _pass_on,
    aten.detach.default: _pass_on,
}
"""Operators that decide whether all numbers are finite, for a Recorder to observe: they are."""


class FakeBatches:
    """Gives a Trainer fake batches, and knows when they reach the device."""

    def __init__(self, recorder: BlockRecorder, answers: FakeValues, trainer: Trainer, on_gpu: bool) -> None:
        self.recorder, self.answers, self.trainer, self.on_gpu = recorder, answers, trainer, on_gpu
        self.batch_size = 0
        """Samples per micro-batch of the first loader, once the data were looked at."""
        self.notes: list[str] = []
        self._looked: list[Batches] = []

    @contextlib.contextmanager
    def taken(self, data: Mapping[str, Any], batch_size: int | None) -> Iterator[dict[str, Any]]:
        """Arguments of `Trainer.fit` that read nothing; a data module keeps its own hooks."""
        loaders = self._loaders(data, batch_size)
        self.batch_size = self._looked[0].batch_size
        self.notes = [note for batches in self._looked for note in batches.notes]
        strategy = self.trainer.strategy
        if self.on_gpu:
            self.answers.arrive = self._arrive
        with overridden(strategy, "batch_to_device", partial(self._to_device, strategy.batch_to_device)):
            module = data.get("datamodule")
            if module is None:
                yield {"train_dataloaders": loaders}
                return
            with _reading_nothing(module, loaders):
                yield {"datamodule": module}

    def _loaders(self, data: Mapping[str, Any], batch_size: int | None) -> Any:
        module = data.get("datamodule")
        if module is not None:
            module.trainer = self.trainer
        fewest = MOST_BATCHES * self.trainer.accumulate_grad_batches
        with self.recorder.paused(), unset_fake_temporarily():
            return fake_loaders(loaders_of(data, batch_size), batch_size, self._make, fewest, self._looked)

    @property
    def _has_an_end(self) -> bool:
        """Without one, Lightning keeps the next batch in hand while it trains on this one."""
        return all(batches.length is not None for batches in self._looked)

    def _make(self, batches: Batches) -> Any:
        """The next batch, as the loader hands it over."""
        if self.on_gpu:
            with self.recorder.paused():
                batch, tensors = batches.make()
            for tensor in tensors:
                self.recorder.ignore(tensor)
            return batch
        if batches is self._looked[0] and self._has_an_end:
            self._begin()
        with self.recorder.labelled("inputs"):
            return batches.make()[0]

    def _begin(self) -> None:
        gc.collect(0)  # cycles made by the last step go before the next, at the same place in every run
        self.recorder.begin_batch()

    def _to_device(self, move: Callable[..., Any], batch: Any, *args: Any, **options: Any) -> Any:
        if self.on_gpu or not self._has_an_end:
            self._begin()
        batch = move(batch, *args, **options)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and self.recorder.knows(tensor):
                self.recorder.note(tensor, "inputs")
        return batch

    def _arrive(self, tensor: Tensor) -> Tensor:
        """A tensor moved to the GPU: a copy there of what is on the host, itself when it is there."""
        if self.recorder.knows(tensor):
            return tensor
        with self.recorder.labelled("inputs"):
            copy = tensor.clone()
        copy.constant = getattr(tensor, "constant", None)  # type: ignore[attr-defined]
        return copy


@contextlib.contextmanager
def _reading_nothing(module: Any, loaders: Any) -> Iterator[None]:
    """A data module that was set up already, and hands out `loaders`; the hooks around a batch stay its own."""
    with contextlib.ExitStack() as undo:
        for name in ("prepare_data", "setup", "teardown"):
            # Lightning's own empty method: then it does not even gather the ranks around it.
            undo.enter_context(overridden(module, name, getattr(LightningDataModule, name).__get__(module)))
        undo.enter_context(overridden(module, "train_dataloader", lambda: loaders))
        yield


_CALLS = ("_call_lightning_module_hook", "_call_callback_hooks")


class Hooks:
    """What became of the hooks of one dry run."""

    def __init__(self) -> None:
        self.run = False
        """Whether the training runs now: everything is asked for by a hook then."""
        self.notes: list[str] = []

    @contextlib.contextmanager
    def running(self, kept: Refusals) -> Iterator[None]:
        """Inside, the Trainer calls them."""
        with contextlib.ExitStack() as undo:
            for name in _CALLS:
                undo.enter_context(replaced(call, name, self._passing_over(getattr(call, name), kept)))
            self.run = True
            hooks_begin()
            try:
                yield
            finally:
                self.run = False

    def _passing_over(self, function: Callable[..., Any], kept: Refusals) -> Callable[..., Any]:
        def _call_lightning_module_hook(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
            before, module = kept.count, trainer.lightning_module
            name = getattr(module, "_current_fx_name", None)
            try:
                return function(trainer, hook_name, *args, **options)
            except Exception as error:
                if kept.count == before or not (hook_name.startswith("on_") or hook_name in ("setup", "teardown")):
                    raise
                module._current_fx_name = name
                self.notes.append(f"{hook_name} ended early, with {type(error).__name__}: {_line(error)}")
                return None

        return _call_lightning_module_hook


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Inside, DataLoaders start no processes."""
    with replaced(DataLoader, "_get_iterator", _iterator):
        yield


def _iterator(loader: DataLoader[Any]) -> Any:
    alone = copy.copy(loader)
    vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
    return _SingleProcessDataLoaderIter(alone)
