"""record: two optimizer steps of the real Lightning Trainer on fake tensors, and what they would allocate.

Where the config or an argument of the Trainer has the trial validate, so does the dry run: the sanity batches, two
steps, a validation. Where the trial tests or predicts afterwards, that follows. Their batches are those of the module's
or data module's own loaders, at their own size, and end with the second unless what is held grows with each.

Nothing of the module is materialised: weights, activations and optimizer state are shapes. The Trainer, its strategy,
precision plugin, hooks and order of operations are those of a real fit (`kit.train.trainer.make_trainer`). A CPU is
predicted with the CPU's own kernels; a GPU is played by fake CPU tensors that allocate as its kernels do
(`kit.memory.record.cuda`).

When the training step cannot run on fake tensors, for example because a custom kernel does not say what shape it
returns, `facts["unknown"]` gives the reason and the line of the user's code (`reason`). The recording then holds
parameters, buffers, gradients and optimizer state, which are exact, and no activations: it is a lower bound and never a
reason to say that something fits (`known_parts`).

What the module's hooks do beside training (write files, start processes, call servers) is prevented by
`kit.confinement` and noted. A hook that fails because of that ends there, and the steps go on: it would not have
changed them. What the step itself needs, such as `training_step`, may not fail (`Hooks`).

The user's loaders are read outside the recording and are as they were afterwards. On the CPU the loader's own batch is
what the step reads. On a GPU the batch on the host does not count, pinned or not; its copy on the device does, from the
transfer on, whoever asks for it: Lightning, a batch class or the module itself (`FakeBatches`). What the step moves to
the host, by `cpu()`, the name "cpu" or a variable that the file sets to nothing else, leaves the device, with what is
computed from it there; where to another variable moves it is not known, and it stays. The same
holds from when the module itself is moved there, for what the `_apply` of its parts does.

With `DryRun.for_real` all of that happens with real tensors on the CPU, and nothing is assumed of values: for a step
that fake tensors cannot follow, with a small batch. A GPU's autocast lists and dropout are played then, its attention
and recurrent kernels are not.

Whatever is replaced in torch and Lightning meanwhile is restored, so that several runs can follow each other in one
process; not at the same time in two threads.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import save_on_cpu
from torch.distributed import distributed_c10d
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from typing_extensions import override

from kit.config import Config
from kit.confinement.confine import confined, hooks_begin
from kit.confinement.stand_ins import Refusals, overridden, replaced
from kit.errors import ConfigError, KitError, KitWarning, Problem, first_line
from kit.machine.processes import garbage_collection_paused
from kit.memory.record.batches import Batches, evaluation_loaders_of, fake_loaders, loaders_of, look_at, look_for_real
from kit.memory.record.fake_mode import FakeMode, imports_with_numbers, rules_found_once
from kit.memory.record.fakes import FakeValues, fake_values, not_traced, saving_shapes
from kit.memory.record.recorder import BlockRecorder, Observer
from kit.memory.record.value_sizes import BOUNDED, WRITTEN, note_bounds, same_number
from kit.memory.record.workspace import Workspaces, eight_bit_on_fakes
from kit.memory.replay.replay import DIFFERING, NOTHING_TRAINED, STEPS, UPPER_BOUND, Recording, replay
from kit.memory.replay.snapshot import line_of
from kit.train.callbacks import (
    UnusedParameters,
    loss_in,
    refused_strategies,
    sparse_tables,
    why_nothing_trains,
    why_undivided,
)
from kit.train.choices import Stage
from kit.train.fsdp import unit_sizes
from kit.train.levers import blocks_by_label
from kit.train.trainer import make_trainer, run_stage, stages_after
from kit.units import format_bytes

JOB = "the prediction"
"""As notes call it."""
_CAPABILITY = (8, 0)
"""Of a GPU that nobody named."""
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
    make_callbacks: Callable[[], list[Callback]] = list
    """Makes those of the caller's own."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer, beside those that the config says."""
    for_real: bool = False
    """Whether real tensors are computed with, on the CPU."""


class NotRunError(Exception):
    """A step that was run for real stopped; the message says why and where."""

    held_bytes = 0
    """The most that it had held until then."""


def record(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Mapping[str, Any]],
    run: DryRun,
    batch_size: int | None = None,
    otherwise: str = "",
    check: Callable[[], None] | None = None,
    tells_of_card: bool = True,
) -> Recording:
    """What two optimizer steps allocate on one device.

    Args:
        make_module: Makes the module; its tensors are fake.
        make_data: Makes what `Trainer.fit` takes: `datamodule` or `train_dataloaders`; its tensors are real.
        run: What is to be predicted.
        batch_size: Samples per micro-batch on the device; by default the loader's own.
        otherwise: One of `facts["guesses"]` of a recording before, to be answered the other way.
        check: Called before each operator; what it raises ends the steps.
        tells_of_card: Whether code that asks if a tensor is on the CPU is answered as on a GPU that is played. Where
            what it does then needs the GPU itself, the steps are recorded once more without.

    Raises:
        ConfigError: for what a real fit would refuse too.
        NotRunError: when a step that is run for real stops.
        Exception: what `make_module` or `make_data` raises.
    """
    began = time.perf_counter()
    hooks = Hooks()
    with confined(JOB, lambda: True, lambda: hooks.run) as kept, in_this_process(), saving_shapes():
        data = make_data()
        with _quiet() as warned, contextlib.ExitStack() as entered:
            enter = entered.enter_context
            enter(garbage_collection_paused())  # cycles go between batches: equal runs free equal blocks at equal times
            if run.for_real:
                answers = FakeValues()
                enter(answers.compiling_left_out())
            else:
                enter(eight_bit_on_fakes(run.config.levers.optimizer == "adamw-8bit"))
                answers = enter(fake_values(otherwise))
            if run.device_kind == "cuda":
                from kit.memory.record.cuda import cuda_emulation

                attention, compiled = run.config.levers.attention, answers.is_compiled
                emulation = enter(cuda_emulation(run.capability or _CAPABILITY, attention, compiled, run.for_real))
            if _is_distributed(run):
                from kit.memory.record.ranks import collective_notes, fake_ranks

                enter(fake_ranks(run.world_size))
            if not run.for_real:
                enter(rules_found_once())
                enter(imports_with_numbers())
                enter(FakeMode(run.device_kind == "cuda"))
            asked = enter(_devices_asked_for())
            answers.tells_of_card = tells_of_card
            recording = _recorded(run, answers, hooks, kept, make_module, data, batch_size, check)
    if recording.facts["unknown"] and answers.told_of_card:
        return record(make_module, make_data, run, batch_size, otherwise, check, tells_of_card=False)
    capabilities = {run.capability}
    if run.device_kind == "cuda" and not recording.facts["unknown"]:  # else a card may have refused a call
        capabilities |= emulation.capabilities
    notes = [str(item.message) for item in warned if issubclass(item.category, KitWarning)]
    notes += [*recording.facts["notes"], *answers.guesses, *answers.notes]
    if run.device_kind == "cuda":
        notes += emulation.notes
    if _is_distributed(run):
        notes += collective_notes(run.config.hardware.strategy, run.device_kind)
    notes += [*hooks.notes, *kept.notes]
    recording.facts.update(
        notes=list(dict.fromkeys(notes)),
        guesses=list(answers.guesses),
        conditions=[*(guess for guess in answers.guesses if not guess.endswith(UPPER_BOUND)), *answers.waits],
        waits=list(answers.waits),
        silent=answers.silent,
        bounds=[guess for guess in answers.guesses if guess.endswith(UPPER_BOUND)],
        capabilities=sorted(capabilities, key=str),
        asks_devices=asked[0] if asked else "",
        seconds=time.perf_counter() - began,
    )
    return recording


def _sizes(tensors: Iterable[Tensor]) -> dict[str, list[int]]:
    """Elements of each, by number format."""
    found: dict[str, list[int]] = {}
    for tensor in tensors:
        found.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor.numel())
    return found


_OF_LAUNCHERS = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"}
"""Variables by which a launcher says how many devices there are, or that there are several."""
_PASSES_ON = re.compile(r"/torch/distributed/|\bos(\.py)?>?$|_collections_abc")
"""Files whose code asks for somebody else."""


@contextlib.contextmanager
def _devices_asked_for() -> Iterator[list[str]]:
    """Inside, the lines of users and packages that ask how many devices there are, as far as torch, Lightning or the
    variables of a launcher say it: what they do then may differ on more. Whoever asks torch looks at its process
    group. A filter or handler of `logging` that asks decides what is printed, and nothing else."""
    asked: list[str] = []

    def note(frame: FrameType | None) -> None:
        while frame is not None and _PASSES_ON.search(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and (line := line_of(frame)) and not _is_logging(frame):
            asked.append(Path(line).name)

    def noting(answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            note(sys._getframe(1))
            return answer(*args, **options)

        return ask

    read = type(os.environ).__getitem__

    def read_variable(variables: Any, name: str) -> str:
        if name in _OF_LAUNCHERS and variables is os.environ:
            note(sys._getframe(1))
        return read(variables, name)

    group: Any = type(distributed_c10d.GroupMember)
    with contextlib.ExitStack() as undo:
        for owner, name in ((Trainer, "world_size"), (Trainer, "num_devices"), (group, "WORLD")):
            known = vars(owner)[name]
            undo.enter_context(replaced(owner, name, property(noting(known.fget), known.fset)))
        undo.enter_context(replaced(LightningModule, "all_gather", noting(LightningModule.all_gather)))
        undo.enter_context(replaced(type(os.environ), "__getitem__", read_variable))
        yield asked


def _is_logging(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != logging.__file__:
        frame = frame.f_back
    return frame is not None


def _is_distributed(run: DryRun) -> bool:
    return run.world_size > 1 or run.config.hardware.strategy != "none"


def _recorded(
    run: DryRun, answers: FakeValues, hooks: Hooks, kept: Refusals,
    make_module: Callable[[], LightningModule], data: Mapping[str, Any], batch_size: int | None,
    check: Callable[[], None] | None,
) -> Recording:  # fmt: skip
    on_gpu = run.device_kind == "cuda"
    workspaces = Workspaces((run.capability or _CAPABILITY) if on_gpu else None)
    recorder = BlockRecorder(workspaces, VALUE_CHECKS, check)
    with recorder:
        answers.progress = recorder.progress
        module = make_module()
        if any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl for part in module.modules()):
            answers.compiled(module)
        marker = StepMarker(recorder, stages_after(run.config, module, data.get("datamodule")))
        trainer = make_trainer(
            run.config,
            accelerator="cpu",
            world_size=run.world_size,
            precision=run.precision,
            module=module,
            callbacks=[*run.make_callbacks(), UnusedParameters(), marker],
            # As in a real fit, because schedulers look at it; `StepMarker` ends the run sooner.
            max_steps=max(STEPS, run.config.trial.max_steps),
            stands_in=on_gpu,
            logger=[DummyLogger()],
            flags=run.flags,
        )
        _validate_at_the_end(trainer)
        vars(trainer._logger_connector)["log_metrics"] = _log_nothing  # no fake tensor is a number
        look = look_for_real if run.for_real else look_at
        fake_batches = FakeBatches(recorder, answers, trainer, on_gpu and not run.for_real, look)
        unknown, refused, stopped = "", False, None
        refused_by_torch = refused_strategies(module, on_gpu)
        try:
            with contextlib.ExitStack() as entered:
                entered.enter_context(not_traced(answers))
                arguments = entered.enter_context(fake_batches.taken(module, data, batch_size, marker.stages))
                if _is_distributed(run):
                    if message := refused_by_torch.get(run.config.hardware.strategy.partition(":")[0]):
                        raise ConfigError([Problem("hardware.strategy", message)])
                    from kit.memory.record.ranks import label_collectives

                    entered.enter_context(label_collectives(recorder))
                if trainer.limit_val_batches or marker.stages:
                    hooks.notes += entered.enter_context(_able_to_validate(module))
                entered.enter_context(hooks.running(kept))
                trainer.fit(module, **arguments)
                for stage in marker.stages:
                    run_stage(stage, trainer, run.config, module, arguments.get("datamodule"))
                if marker.batches and (why := why_nothing_trains(trainer, marker.has_loss)):
                    hooks.notes.append(NOTHING_TRAINED + why)
                recorder.stop()
        except KitError:
            raise
        except Exception as error:
            unknown, refused, stopped = reason(error, recorder), _is_refusal(error), error
            if recorder.stopped:
                hooks.notes.append(f"the training ended with {unknown}, after what was recorded")
                unknown = ""
    if unknown and run.for_real:
        failed = NotRunError(unknown)
        with contextlib.suppress(ValueError):  # it stopped before a step began
            failed.held_bytes = replay(recorder.recording(1, 1)).peak_allocated_bytes
        raise failed from stopped
    size = fake_batches.batch_size or batch_size or run.config.loader.batch_size
    rounding_bytes = 512 if on_gpu else 1
    if unknown:
        recording = known_parts(module, trainer, size, rounding_bytes)
    else:
        recording = recorder.recording(size, rounding_bytes)
        if not _is_distributed(run):
            recording.facts.update(units=marker.units, buffers=_sizes(module.buffers()))
    recording.facts.update(_facts(run, module, trainer, unknown), unsure_workspace_bytes=workspaces.unsure_bytes)
    recording.facts["may_be_low"] = _may_be_low(run, module, workspaces)
    recording.facts.update(refused=refused, refused_strategies=refused_by_torch)
    if trainer._accelerator_connector.use_distributed_sampler:
        recording.facts["undivided"] = why_undivided(fake_batches.given)
    recording.facts["epoch_samples"] = fake_batches.epoch_samples
    if fake_batches.mean_samples is not None:
        recording.facts["mean_samples"] = fake_batches.mean_samples
    recording.facts["notes"] = [*recording.facts["notes"], *fake_batches.notes]
    return recording


def _validate_at_the_end(trainer: Trainer) -> None:
    """A Trainer that validates does so when it stops; without sanity batches after each step, as what a validation
    leaves behind is there in the next."""
    every_step = trainer.accumulate_grad_batches
    trainer.val_check_interval = _NEVER if trainer.num_sanity_val_steps else every_step
    trainer.check_val_every_n_epoch = None


@contextlib.contextmanager
def _able_to_validate(module: LightningModule) -> Iterator[list[str]]:
    """Inside, a validation can be recorded; gives what to note.

    Metrics check labels, of which there are none here. Where no gradient is needed torch runs a whole transformer layer
    as one operator, and says nothing of what that holds meanwhile: less than its parts one by one.
    """
    for part in module.modules():
        if hasattr(part, "validate_args"):
            vars(part)["validate_args"] = False
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        found = any(isinstance(part, nn.TransformerEncoderLayer | nn.MultiheadAttention) for part in module.modules())
        yield ["torch's fast path of transformer layers is not followed in validation: an upper bound"] * found
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _log_nothing(metrics: Any, step: int | None = None) -> None:
    """In place of the numbers that a logger gets."""


_OF_SPARSE = (
    "optimizers sort and copy sparse gradients: SGD was seen to hold once, with momentum four times and SparseAdam "
    "seven times the bytes of these gradients more than is known"
)


def _may_be_low(run: DryRun, module: LightningModule, workspaces: Workspaces) -> list[str]:
    """What may be held beyond what is recorded, in sentences."""
    found = []
    if _is_distributed(run) and run.device_kind == "cpu":
        from kit.memory.record.ranks import LATE_COPY

        found.append(LATE_COPY)
    if sparse_tables(module):
        found.append(_OF_SPARSE)
    if workspaces.of_sparse:
        names = ", ".join(workspaces.of_sparse)
        found.append(f"operators on sparse tensors may hold more than is known: {names}")
    if workspaces.of_solvers:
        taken = ", ".join(f"{name} {format_bytes(size)}" for name, size in workspaces.of_solvers.items())
        found.append(
            f"what cuSOLVER asks for is not known without a GPU and is left out; on a CPU LAPACK takes: {taken}"
        )
    return found


def _facts(run: DryRun, module: LightningModule, trainer: Trainer, unknown: str) -> dict[str, Any]:
    parameters = [one for one in module.parameters() if not is_lazy(one)]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "sparse_parameters": sum(weight.numel() for weight in sparse_tables(module).values()),
        "module": type(module).__name__,
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "blocks": blocks_by_label(module),
        "world_size": run.world_size,
        "strategy": run.config.hardware.strategy,
        "precision": run.precision,
        "device_kind": run.device_kind,
        "capability": run.capability,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "manual": not module.automatic_optimization,
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "unknown": unknown,
    }


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


_NEVER = 1 << 40
MOST_VALIDATED = 64
"""Batches of one validation, test or prediction that are recorded where each leaves something behind."""
MOST_BATCHES = 16
"""Micro-batches, per accumulated one, after which a module in manual optimization has stepped, or does not."""


class StepMarker(Callback):
    """Tells the recorder what only Lightning knows, and ends the run after two optimizer steps."""

    def __init__(self, recorder: BlockRecorder, stages: Sequence[Stage] = ()) -> None:
        self.recorder = recorder
        self.stages = stages
        """What follows the fit, and is recorded too."""
        self.batches = 0
        self.has_loss = False
        """Whether `training_step` gave one."""
        self.units: list[tuple[str, list[int], list[int]]] = []
        """What fsdp would gather at a time (`kit.train.fsdp.unit_sizes`), once gradients are there."""

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.track(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.track(pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.phase = "validation"

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.phase = "test"

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.phase = "predict"

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            self.recorder.phase = "other"

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.recorder.begin_optimizer()
        if not self.units and not isinstance(trainer.strategy, ParallelStrategy):
            self.units = unit_sizes(pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_args: Any) -> None:
        self.batches += 1
        self.has_loss |= loss_in(outputs) is not None
        # A scheduler steps later, and the next batch begins; the run ends before that.
        steps = [self.recorder.optimizer_steps[id(optimizer)] for optimizer in trainer.optimizers]
        stepped = self.batches >= STEPS * trainer.accumulate_grad_batches and all(count >= STEPS for count in steps)
        if stepped or self.batches >= MOST_BATCHES * trainer.accumulate_grad_batches:
            trainer.should_stop = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.stages:
            self.recorder.stop()


_MEMORY = str(Path(__file__).parent)


def reason(error: Exception, recorder: BlockRecorder) -> str:
    """What stopped the dry run, and the line of the user's code it came from."""
    operator = getattr(error, "func", None)
    if operator is None and recorder.failed is not None and recorder.failed[0] is error:
        # Torch's own operators all have fake implementations; what they raise is about their arguments.
        operator = recorder.failed[1] if recorder.failed[1].namespace not in ("aten", "prims") else None
    what = f"operator {operator} does not say what shape it returns" if operator is not None else _first_line(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not {"torch", "lightning"}.intersection(file.parts) and not frame.filename.startswith((_MEMORY, "<")):
            return f"{what} at {file.name}:{frame.lineno}"
    return what


def _is_refusal(error: Exception) -> bool:
    """Whether code outside torch ended the training on purpose: by `raise` or `assert`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    own = "torch" not in Path(frame.filename).parts or frame.name == "_assert"
    return own and (frame.line or "").lstrip().startswith(("raise", "assert"))


def _first_line(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind


def known_parts(module: LightningModule, trainer: Trainer, batch_size: int, rounding_bytes: int) -> Recording:
    """Parameters, gradients and optimizer state of two steps without forward and backward passes.

    Sparse gradients, which may be as small as nothing, are left out: all of it is a lower bound.
    """
    recorder = BlockRecorder()
    notes: dict[str, None] = {}
    optimizers = list(trainer.optimizers)
    sparse = set(map(id, sparse_tables(module).values()))
    with recorder:
        recorder.track(module)
        for step in range(STEPS):
            recorder.begin_batch()
            recorder.phase = "backward"
            for parameter in module.parameters():
                parameter.grad = None
                if parameter.requires_grad and id(parameter) not in sparse:
                    parameter.grad = torch.empty_like(parameter)
            recorder.mark_gradients()
            if step == 0 and not optimizers:
                try:
                    optimizers = list(_init_optimizers_and_lr_schedulers(module)[0])
                except Exception as error:
                    notes[f"optimizer state is left out: configure_optimizers stopped with {_first_line(error)}"] = None
            for optimizer in optimizers:
                recorder.begin_optimizer()
                try:
                    optimizer.step(lambda: 0.0)  # as Lightning does, which hands every optimizer a closure
                except Exception as error:
                    notes[f"state of {type(optimizer).__name__} is left out: {_first_line(error)}"] = None
    return recorder.recording(batch_size, rounding_bytes, {"notes": list(notes)})


aten = torch.ops.aten


def _concluding(truth_of: Callable[[tuple[Any, ...]], bool | None]) -> Observer:
    """Write what follows from an operator's arguments on its result, where anything does."""

    def observe(args: tuple[Any, ...], out: Any) -> None:
        truth = truth_of(args)
        if truth is not None and getattr(out, "dtype", None) is torch.bool:  # the bits of a number are no truth
            note_bounds(out, truth, truth)

    return observe


def _truth(value: Any) -> bool | None:
    number = same_number(value)
    return None if number is None else bool(number)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _both(args: tuple[Any, ...]) -> bool | None:
    first, second = map(_truth, args[:2])
    return None if first is None or second is None else first and second


def _either(args: tuple[Any, ...]) -> bool | None:
    first, second = map(_truth, args[:2])
    return None if first is None or second is None else first or second


def _not(args: tuple[Any, ...]) -> bool | None:
    truth = _truth(args[0])
    return None if truth is None else not truth


FINITE_CHECKS: dict[Any, Observer] = {
    # A number equals itself, since it is not NaN.
    aten.eq.Tensor: _concluding(lambda args: True if args[0] is args[1] else None),
    aten.ne.Tensor: _concluding(lambda args: False if args[0] is args[1] else None),
    aten.eq.Scalar: _concluding(lambda args: False if _is_infinite(args[1]) else None),
    aten.ne.Scalar: _concluding(lambda args: True if _is_infinite(args[1]) else None),
    **dict.fromkeys((aten.isnan.default, aten.isinf.default), _concluding(lambda _: False)),
    **dict.fromkeys((aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _concluding(_both)),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), _concluding(_either)),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _concluding(_not)),
}
"""Operators that check whether numbers are finite, for a recorder to observe: in a dry run all numbers are.

A module that stops at a loss that is not finite must not stop where no loss is a number. A condition that follows from
"no NaN, no infinity" alone is known without numbers: it is written on the fake tensor as its bounds, passed on by not,
and, or, all and any, and read by `kit.memory.record.fakes`. Of other conditions, those are known that hold for all
numbers within their bounds (`BOUNDED`).
"""


def _one_after_another(*observers: Observer) -> Observer:
    def observe(args: tuple[Any, ...], out: Any) -> None:
        for each in observers:
            each(args, out)

    return observe


_CHECKS = (FINITE_CHECKS, WRITTEN, BOUNDED)
VALUE_CHECKS: dict[Any, Observer] = {
    operator: _one_after_another(*(checks[operator] for checks in _CHECKS if operator in checks))
    for operator in set().union(*_CHECKS)
}
"""What is known of numbers that are not there: whether they are finite, how many are not 0, and where they lie."""


class FakeBatches:
    """Gives a Trainer fake batches, and knows when they reach the device."""

    def __init__(
        self, recorder: BlockRecorder, answers: FakeValues, trainer: Trainer, on_gpu: bool,
        look: Callable[[Any, int | None], Batches] = look_at,
    ) -> None:  # fmt: skip
        self.recorder, self.answers, self.trainer, self.on_gpu = recorder, answers, trainer, on_gpu
        self.look = look
        self.batch_size = 0
        """Samples per micro-batch of the first loader, once the data were looked at."""
        self.epoch_samples: int | None = None
        self.mean_samples: float | None = None
        """Of all ranks, where the first loader or the config says so."""
        self.given: Any = None
        """The training loaders, or batches that are known without."""
        self.notes: list[str] = []
        self._looked: list[Batches] = []
        self._evaluated: dict[str, list[Batches]] = {}

    @contextlib.contextmanager
    def taken(
        self, trained: LightningModule, data: Mapping[str, Any], batch_size: int | None, stages: Sequence[Stage] = ()
    ) -> Iterator[dict[str, Any]]:
        """Arguments of `Trainer.fit` that read nothing; a data module keeps its own hooks."""
        module = data.get("datamodule")
        if module is not None:
            module.trainer = self.trainer
        fewest = MOST_BATCHES * self.trainer.accumulate_grad_batches
        with self.recorder.paused(), unset_fake_temporarily():
            self.given = loaders_of(data, batch_size)
            loaders = fake_loaders(self.given, batch_size, self._make, fewest, self._looked, look=self.look)
        first = self._looked[0]
        self.batch_size, self.epoch_samples, self.mean_samples = (
            first.batch_size, first.epoch_samples, first.mean_samples
        )  # fmt: skip
        self.notes = [note for batches in self._looked for note in batches.notes]
        self.answers.sizes_differ = any(note.startswith(DIFFERING) for note in self.notes)
        strategy = self.trainer.strategy
        if self.on_gpu:
            self.answers.arrive, self.answers.leave = self.recorder.arrive, self.recorder.leave
            self.answers.is_on_card = self.recorder.holds
        with contextlib.ExitStack() as undo:
            enter = undo.enter_context
            if self.on_gpu:
                # To pinned memory it writes tensors made on the host, which nothing shows to be there.
                make = save_on_cpu.__init__
                enter(overridden(save_on_cpu, "__init__", lambda saving, *_, **__: make(saving)))
                enter(overridden(strategy, "model_to_device", partial(self._placed, strategy.model_to_device)))
            enter(overridden(strategy, "batch_to_device", partial(self._to_device, strategy.batch_to_device)))
            source = trained if module is None else module  # as Lightning has it
            if self.trainer.limit_val_batches and is_overridden("val_dataloader", source):
                # Kit's own data has a property there, which gives this method.
                is_property = isinstance(getattr(type(source), "val_dataloader", None), property)
                hook = "_validation_batches" if is_property else "val_dataloader"
                enter(overridden(source, hook, self._loaders("validation", source, source.val_dataloader, batch_size)))
            for stage in stages:
                hook = f"{stage}_dataloader"
                holder = module if module is not None and is_overridden(hook, module) else trained
                enter(overridden(holder, hook, self._loaders(stage, holder, getattr(holder, hook), batch_size)))
            if module is None:
                yield {"train_dataloaders": loaders}
                return
            # The data module was set up already and hands out `loaders`; the hooks around a batch stay its own.
            for name in ("prepare_data", "setup", "teardown"):
                # Lightning's own empty method: then it does not even gather the ranks around it.
                enter(overridden(module, name, getattr(LightningDataModule, name).__get__(module)))
            enter(overridden(module, "train_dataloader", lambda: loaders))
            yield {"datamodule": module}

    def _loaders(self, what: str, source: Any, make: Callable[[], Any], batch_size: int | None) -> Callable[[], Any]:
        """Makes those of a validation, test or prediction when Lightning asks, after the `setup` of a module."""

        def loaders() -> Any:
            looked = self._evaluated[what] = []
            with self.recorder.paused(), unset_fake_temporarily():
                if what != "validation" and isinstance(source, LightningDataModule):  # was set up to fit only
                    type(source).setup(source, what)
                found = evaluation_loaders_of(what, source, make, batch_size)
                made = fake_loaders(found, None, self._make, 0, looked, partial(self._ends, what), self.look)
            sizes = dict.fromkeys(batches.batch_size for batches in looked)
            if any(size != self.batch_size for size in sizes):
                said = " and ".join(map(str, sizes))
                self.notes.append(f"{what} takes batches of its own, of {said}, whatever the batch size of training")
            self.notes += [note for batches in looked for note in batches.notes]
            return made

        return loaders

    def _ends(self, what: str, held_bytes: list[int]) -> bool:
        """Whether a loader has shown all: two batches, or more where each leaves something behind."""
        gc.collect(0)
        held_bytes.append(self.recorder.held_bytes)
        grown_bytes = held_bytes[-1] - held_bytes[-2] if len(held_bytes) > 2 else 1
        if len(held_bytes) == 4 and grown_bytes > 0:
            self.notes.append(
                f"{what} keeps {format_bytes(grown_bytes)} of each batch: a trial takes at most "
                f"trial.{what}_batches of them, and {MOST_VALIDATED} are counted; a whole {what} keeps more"
            )
        return grown_bytes <= 0 or len(held_bytes) > MOST_VALIDATED

    @property
    def _evaluates(self) -> str:
        """Which of EVALUATIONS runs now; empty while the steps do."""
        trainer = self.trainer
        validates = trainer.validating or trainer.sanity_checking
        return "validation" if validates else "test" if trainer.testing else "predict" if trainer.predicting else ""

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
        if self._evaluates or (batches is self._looked[0] and self._has_an_end):
            self._begin()
        with self.recorder.labelled("inputs"):
            return batches.make()[0]

    def _begin(self) -> None:
        gc.collect(0)  # cycles made by the last step go before the next, at the same place in every run
        self.recorder.begin_batch(self._evaluates or "forward")

    def _placed(self, move: Callable[[], None]) -> None:
        """What is trained goes to the device: a part that does not stay there, as one that offloads its weight, leaves
        while the others come."""
        self.recorder.placed = True
        move()

    def _to_device(self, move: Callable[..., Any], batch: Any, *args: Any, **options: Any) -> Any:
        if self.on_gpu or not (self._evaluates or self._has_an_end):
            self._begin()
        batch = move(batch, *args, **options)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and self.recorder.knows(tensor):
                self.recorder.note(tensor, "inputs")
        return batch


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
            for name in ("_call_lightning_module_hook", "_call_callback_hooks"):
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
                line = next(iter(str(error).splitlines()), "")
                self.notes.append(f"{hook_name} ended early, with {type(error).__name__}: {line}")
                return None

        return _call_lightning_module_hook


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Inside, DataLoaders start no processes."""

    def iterator(loader: DataLoader[Any]) -> Any:
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        return _SingleProcessDataLoaderIter(alone)

    with replaced(DataLoader, "_get_iterator", iterator):
        yield
