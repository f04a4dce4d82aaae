"""record: two optimizer steps of the actual Lightning Trainer on fake tensors, and what they would allocate.

Nothing of the module is materialised: weights, activations and optimizer state are shapes. The Trainer, its strategy,
precision plugin, hooks and order of operations are those of a real fit (`kit.train.trainer.make_trainer`), so what is
recorded is what would happen, not a formula about it. A CPU is predicted with the CPU's own kernels; a GPU is played by
fake CPU tensors that follow its choices (`kit.memory.emulation`).

What cannot be run dry, such as a custom kernel that does not say what shape it returns, is said in `facts["unknown"]`;
the recording then holds parameters, gradients and optimizer state, which are exact, and no activations.

What the module's hooks do beside the training (files they write, processes they start, servers they call) is kept from
everybody by `kit.confinement`, and said in the notes.

Everything replaced in torch and Lightning meanwhile is put back, so that several runs can follow each other in one
process; not at the same time in two threads.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torch._subclasses.fake_tensor import FakeTensorMode

from kit.config import Config
from kit.confinement.confine import confined
from kit.confinement.kept import Kept
from kit.errors import KitError, KitWarning
from kit.memory.eight_bit import eight_bit_on_fakes
from kit.memory.fakes import Answers, fake_values
from kit.memory.feed import Feed
from kit.memory.finite import FINITE
from kit.memory.hooks import Hooks, in_this_process
from kit.memory.known_parts import known_parts, reason
from kit.memory.marks import STEPS, Marks
from kit.memory.recorder import Recorder
from kit.memory.saving import saving_shapes
from kit.memory.workspace import Workspaces
from kit.plan.memory.recording import Recording
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
    answers: Answers
    emulation: Any
    hooks: Hooks
    kept: Kept

    def notes(self) -> list[str]:
        """What was assumed, by whom it was asked."""
        emulated = [] if self.emulation is None else self.emulation.notes
        return [*self.answers.notes, *emulated, *_strategy_notes(self.run)]


@contextlib.contextmanager
def _stage(run: DryRun, hooks: Hooks, kept: Kept) -> Iterator[_Stage]:
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
    recorder = Recorder(workspaces, FINITE)
    with recorder:
        module = make_module()
        _say_what_is_compiled(module, stage.answers)
        trainer = _trainer(run, module, Marks(recorder))
        feed = Feed(recorder, stage.answers, trainer, on_gpu=run.device_kind == "cuda")
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


def _fit(stage: _Stage, feed: Feed, module: LightningModule, data: Mapping[str, Any], batch_size: int | None) -> str:
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


def _trainer(run: DryRun, module: LightningModule, marks: Marks) -> Trainer:
    return make_trainer(
        run.config,
        accelerator="cpu",
        world_size=run.world_size,
        precision=run.precision,
        module=module,
        callbacks=[marks],
        # As in a real fit, because schedulers look at it; `Marks` ends the run sooner.
        max_steps=max(STEPS, run.config.trial.max_steps),
        stands_in=run.device_kind == "cuda",
    )


# -- what the device, the ranks and the kernels add


def _emulation(run: DryRun) -> contextlib.AbstractContextManager[Any]:
    if run.device_kind == "cpu":
        return contextlib.nullcontext()
    from kit.memory.emulation import cuda_emulation

    return cuda_emulation(run.capability or _CAPABILITY, run.config.levers.attention)


def _workspaces(run: DryRun) -> Workspaces:
    return Workspaces((run.capability or _CAPABILITY) if run.device_kind == "cuda" else None)


def _is_distributed(run: DryRun) -> bool:
    return run.world_size > 1 or run.config.hardware.strategy != "none"


def _ranks(run: DryRun) -> contextlib.AbstractContextManager[None]:
    if not _is_distributed(run):
        return contextlib.nullcontext()
    from kit.memory.ranks import fake_ranks

    return fake_ranks(run.world_size)


def _collectives(run: DryRun, recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    if not _is_distributed(run):
        return contextlib.nullcontext()
    from kit.memory.collectives import label_collectives

    return label_collectives(recorder)


def _strategy_notes(run: DryRun) -> list[str]:
    if not _is_distributed(run):
        return []
    from kit.memory.collectives import collective_notes

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


def _say_what_is_compiled(module: LightningModule, answers: Answers) -> None:
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
