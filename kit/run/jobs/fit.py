"""The job of a trial: make module and data, fit for a few steps, say what happened."""

from __future__ import annotations

import cloudpickle
from lightning.pytorch import seed_everything

from kit.run.jobs.context import Context
from kit.run.jobs.parts import make_data, make_module, show_cells
from kit.run.memory.meter import MemoryMeter
from kit.run.recorder import Recorder
from kit.run.timing import StepClock
from kit.train.trainer import make_trainer


def fit(context: Context) -> None:
    """Fit on this rank until the trial's steps are done or it is asked to leave."""
    payload = cloudpickle.loads(context.paths.payload.read_bytes())
    context.cells = payload["cells"]
    show_cells(context.cells)
    seed_everything(context.config.training.seed, workers=True, verbose=False)
    module = make_module(payload["module"], context.config)
    data = make_data(payload["data"], context.config)
    context.clock = StepClock()
    recorder = Recorder(context, context.clock)
    meter = MemoryMeter(context, context.clock) if context.config.trial.measure_memory else None
    trainer = make_trainer(
        context.config,
        accelerator=context.environment["accelerator"],
        world_size=context.world_size,
        precision=context.environment["precision"],
        module=module,
        callbacks=[recorder] if meter is None else [recorder, meter],
        profiler=context.clock,
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
