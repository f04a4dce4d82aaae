"""The job of a trial: make module and data, fit for a few steps, say what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
from lightning.pytorch import seed_everything
from lightning.pytorch.profilers import Profiler

from kit.registry import load
from kit.run.carbon_use import CarbonUse
from kit.run.communication import CommunicationTimer
from kit.run.cpu_use import CpuUse
from kit.run.energy_use import EnergyUse
from kit.run.jobs.batch_size import resize
from kit.run.jobs.context import Context
from kit.run.jobs.levers_used import LeversUsed
from kit.run.jobs.loader_used import LoaderUsed
from kit.run.jobs.parts import make_data, make_module, show_cells
from kit.run.memory.meter import MemoryMeter
from kit.run.payload import Part
from kit.run.recorder import Recorder
from kit.run.rendezvous import open_store
from kit.run.step_work import StepWork
from kit.run.timing import StepClock
from kit.train.attention import AUTO, AttentionKernel
from kit.train.device_limit import DeviceLimit
from kit.train.trainer import make_trainer


def fit(context: Context) -> None:
    """Fit on this rank until the trial's steps are done or it is asked to leave."""
    context.store = open_store()
    payload = cloudpickle.loads(context.paths.payload.read_bytes())
    context.cells = payload["cells"]
    show_cells(context.cells)
    seed_everything(context.config.training.seed, workers=True, verbose=False)
    module = make_module(payload["module"], context.config)
    data = _data(payload["data"], context)
    if context.config.calibration.enabled:
        data = load("fit.calibrate")(context, data)
    context.clock = StepClock()
    recorder = Recorder(context, context.clock)
    meter = MemoryMeter(context, context.clock) if context.config.trial.measure_memory else None
    trainer = make_trainer(
        context.config,
        accelerator=context.environment["accelerator"],
        world_size=context.world_size,
        precision=context.environment["precision"],
        module=module,
        callbacks=[
            *_limit(context),
            *_counting(context),
            LoaderUsed(context),
            LeversUsed(context),
            *([StepWork(context)] if context.config.trial.count_work else []),
            CpuUse(context),
            EnergyUse(context),
            *([CarbonUse(context)] if context.config.trial.codecarbon else []),
            CommunicationTimer(context.clock),
            recorder,
            *([] if meter is None else [meter]),
        ],
        profiler=_listening(context, context.clock),
        default_root_dir=context.paths.directory,
    )
    try:
        trainer.fit(module, **data)
    except BaseException:  # a rank that has left may trip over its peers' leaving; that is no failure
        if not recorder.left:
            recorder.save()
            raise
    if meter is not None:
        meter.end(trainer)
    recorder.end(trainer.global_step)


def _data(part: Part, context: Context) -> dict[str, Any]:
    """The data in the batches it makes, or in those that the trial was asked to take."""
    data, asked = make_data(part, context.config), context.environment.get("batch_size")
    return data if asked is None or part.kind == "default" else resize(data, int(asked))


def _listening(context: Context, clock: StepClock) -> Profiler:
    """The clock, and the profiler of this pass, where the trial is one."""
    asked = context.environment.get("profile")
    if asked is None:
        return clock
    return load("fit.profile")(clock, asked["pass"], Path(asked["folder"]), context.config)  # type: ignore[no-any-return]


def _counting(context: Context) -> list[AttentionKernel]:
    """Where torch chooses the kernel of attention, what it chose is counted; a lever counts by itself."""
    return [AttentionKernel(AUTO)] if context.config.levers.attention == AUTO else []


def _limit(context: Context) -> list[DeviceLimit]:
    limit_bytes = context.config.hardware.device_memory_bytes
    return [DeviceLimit(limit_bytes)] if limit_bytes else []
