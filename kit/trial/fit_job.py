"""The job of a trial: make module and data, fit for a few steps, say what happened.

From a payload to what is trained: the module and the data, made inside the process that uses them.

Every job makes them the same way, so that what is predicted is what is fitted.

resize: the caller's own data in batches of another size, for a search that tries several.

A DataLoader is made anew around the same data set, sampler and collation; everything else about it stays. A data module
keeps its class and answers `train_dataloader` with loaders made anew; kit's own takes the size. A loader that makes its
batches by itself cannot be asked for others, and is refused.

LeversUsed: what the levers of a fit really did, read back after its first batch and written as one event.

A config says what is wanted; the optimizer may have become another, a kernel may have been ruled out, blocks may have
been left alone. `kit.trial.what_ran` makes sentences of the event.
"""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import cloudpickle
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.profilers import Profiler
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from typing_extensions import override

from kit.config import Config
from kit.data.rows.loader import RowData
from kit.errors import ConfigError, Problem
from kit.registry import load
from kit.targets import load_target
from kit.train.callbacks import DeviceLimit
from kit.train.levers import GradientCheckpointing
from kit.train.sequences import AUTO, AttentionKernel, SequenceChunks, available_kernels
from kit.train.trainer import make_trainer
from kit.trial.context import Context
from kit.trial.meters import CarbonUse, CpuUse, EnergyUse, MemoryMeter, StepWork
from kit.trial.payload import Part, is_patch_data, own_arguments
from kit.trial.recorder import CommunicationTimer, LoaderUsed, StepClock, StepRecorder
from kit.trial.scratch import open_store


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
    recorder = StepRecorder(context, context.clock)
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


def show_cells(cells: dict[str, tuple[str, str]]) -> None:
    """Let tracebacks quote notebook cells, whose text is in no file."""
    for file, (_, source) in cells.items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)


def make_module(part: Part, config: Config) -> LightningModule:
    """The module that `part` names, holds or makes.

    Raises:
        ConfigError: when it is no LightningModule.
    """
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


def load_part(part: Part, config: Config) -> None:
    """Import what `make_module` will need, without making anything.

    Raises:
        TargetError: when it cannot be found or imported.
    """
    if part.kind in ("default", "path"):
        load_target(config.model.target if part.kind == "default" else part.value)


def make_data(part: Part, config: Config) -> dict[str, Any]:
    """What `Trainer.fit` takes: a data module or a loader.

    Raises:
        ConfigError: when it is neither, nor a data set.
    """
    value = _data_object(part, config)
    if isinstance(value, LightningDataModule):
        use_config = getattr(value, "use_config", None)
        if use_config is not None:  # one of kit's own, which leaves the rest to the config
            use_config(config)
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
        from kit.data.patches.module import PatchData

        return PatchData(config)
    if isinstance(value, type):
        return value(config) if is_patch_data(value) else value(**own_arguments(config))
    if part.kind == "path" and callable(value):
        return value(**own_arguments(config))
    return value() if part.kind == "factory" else value


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


_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip


def resize(data: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """What `Trainer.fit` takes, with `batch_size` samples in each batch of each device.

    Raises:
        ConfigError: when a loader makes its batches by itself; for a data module, once its loader is asked for.
    """
    module = data.get("datamodule")
    if isinstance(module, RowData):
        module.take_batches_of(batch_size)
        return data
    if not isinstance(module, LightningDataModule):
        return {"train_dataloaders": _resized(data["train_dataloaders"], batch_size)}
    own = module.train_dataloader
    vars(module)["train_dataloader"] = lambda: _resized(own(), batch_size)
    return {"datamodule": module}


def _resized(loader: Any, batch_size: int) -> Any:
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        message = f"the batches of {type(loader).__name__} cannot be made larger or smaller; give a DataLoader whose "
        raise ConfigError([Problem("data", message + "batch_size is a number, or a Dataset")])
    if loader.batch_size is None:
        raise ConfigError([Problem("data", "the loader has no batch_size: its data set makes the batches itself")])
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, **kept)


class LeversUsed(Callback):
    """Writes `levers_used` once; to be placed after the levers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._written = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._written:
            self._written = True
            self._context.writer.write("levers_used", **self._found(trainer))

    @staticmethod
    def _found(trainer: Trainer) -> dict[str, Any]:
        levers: list[Any] = list(getattr(trainer, "callbacks"))  # noqa: B009
        missing = available_kernels(trainer.strategy.root_device.type)
        return {
            "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
            "checkpointed_blocks": sum(lever.count for lever in levers if isinstance(lever, GradientCheckpointing)),
            "sequence_chunks": next((lever.count for lever in levers if isinstance(lever, SequenceChunks)), 0),
            "attention": next((dict(lever.ran) for lever in levers if isinstance(lever, AttentionKernel)), {}),
            "attention_here": [name for name, reason in missing.items() if not reason],
            "attention_missing": {name: reason for name, reason in missing.items() if reason},
        }
