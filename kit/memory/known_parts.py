"""known_parts: what a step holds without its forward pass, when that cannot be run dry.

Parameters, buffers and gradients are exact, and so is optimizer state, because the optimizers step on fake gradients.
Activations are missing, so a recording made here is a lower bound and never a reason to say that something fits.
`reason` names what stopped the dry run, and the line of the user's code it came from.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers

from kit.memory.marks import STEPS
from kit.memory.recorder import Recorder
from kit.plan.memory.recording import Recording

_MEMORY = str(Path(__file__).parent)


def reason(error: Exception, recorder: Recorder) -> str:
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
    recorder = Recorder()
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


def _step(optimizers: list[Any], recorder: Recorder, notes: list[str]) -> None:
    for optimizer in optimizers:
        recorder.begin_optimizer()
        try:
            optimizer.step(_no_loss)  # as Lightning does, which hands every optimizer a closure
        except Exception as error:
            notes.append(f"state of {type(optimizer).__name__} is left out: {_first_line(error)}")


def _no_loss() -> float:
    return 0.0
