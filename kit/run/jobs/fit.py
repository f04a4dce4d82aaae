"""The job of a trial: make module and data, fit for a few steps, say what happened."""

from __future__ import annotations

import linecache
from typing import Any

import cloudpickle
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from torch.utils.data import DataLoader, Dataset

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.run.jobs.context import Context
from kit.run.payload import Part
from kit.run.recorder import Recorder
from kit.run.timing import StepClock
from kit.targets import load_target
from kit.train.trainer import make_trainer


def fit(context: Context) -> None:
    """Fit on this rank until the trial's steps are done or it is asked to leave."""
    payload = cloudpickle.loads(context.paths.payload.read_bytes())
    context.cells = payload["cells"]
    _show_cells(context.cells)
    seed_everything(context.config.training.seed, workers=True, verbose=False)
    module = _make_module(payload["module"], context.config)
    data = _make_data(payload["data"], context.config)
    context.clock = StepClock()
    recorder = Recorder(context, context.clock)
    trainer = make_trainer(
        context.config,
        accelerator=context.environment["accelerator"],
        world_size=context.world_size,
        precision=context.environment["precision"],
        module=module,
        callbacks=[recorder],
        profiler=context.clock,
        default_root_dir=context.paths.directory,
    )
    try:
        trainer.fit(module, **data)
    except BaseException:  # a rank that has left may trip over its peers' leaving; that is no failure
        if not recorder.left:
            recorder.save()
            raise
    recorder.end(trainer.global_step)


def _show_cells(cells: dict[str, tuple[str, str]]) -> None:
    """Let tracebacks quote notebook cells, whose text is in no file."""
    for file, (_, source) in cells.items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)


def _make_module(part: Part, config: Config) -> LightningModule:
    value, arguments = part.value, config.model.arguments
    if part.kind in ("default", "path"):
        path = config.model.target if part.kind == "default" else value
        target = load_target(path)
        value = target if isinstance(target, LightningModule) else target(**arguments)
    elif part.kind == "class":
        value = value(**arguments)
    elif part.kind == "factory":
        value = value()
    if not isinstance(value, LightningModule):
        message = (
            f"{part if part.value else config.model.target} gave {type(value).__name__}, which is no LightningModule"
        )
        raise ConfigError([Problem("module", message)])
    return value


def _make_data(part: Part, config: Config) -> dict[str, Any]:
    """What `Trainer.fit` takes: a data module or a loader."""
    value = _data_object(part, config)
    if isinstance(value, LightningDataModule):
        return {"datamodule": value}
    if isinstance(value, Dataset) and not isinstance(value, DataLoader):
        value = _loader(value, config)
    if not hasattr(value, "__iter__"):
        message = f"{part} gave {type(value).__name__}; give a LightningDataModule, a DataLoader or a Dataset"
        raise ConfigError([Problem("data", message)])
    return {"train_dataloaders": value}


def _data_object(part: Part, config: Config) -> Any:
    value = load_target(part.value) if part.kind == "path" else part.value
    if part.kind == "default":
        from kit.data.module import PatchData

        return PatchData(config)
    if isinstance(value, type):
        return value(config) if _is_patch_data(value) else value()
    return value() if part.kind == "factory" or (part.kind == "path" and callable(value)) else value


def _is_patch_data(kind: type) -> bool:
    return any(base.__module__ == "kit.data.module" and base.__name__ == "PatchData" for base in kind.__mro__)


def _loader(dataset: Dataset[Any], config: Config) -> DataLoader[Any]:
    loader = config.loader
    return DataLoader(
        dataset,
        batch_size=loader.batch_size,
        shuffle=loader.shuffle and hasattr(dataset, "__getitem__"),
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
    )
