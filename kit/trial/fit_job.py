"""The job of a trial: make module and data, fit for a few steps, write what happened.

Module and data are made inside the process that uses them, by every job in the same way, so that what is predicted is
what is fitted.

`resize` gives the caller's own data in batches of another size, for a search that tries several. A DataLoader is made
anew around the same data set, sampler and collation. A data module keeps its class, and its `train_dataloader` gives
loaders made anew; kit's own takes the size. A loader that makes its batches by itself is refused.

`LeversUsed` writes what the levers of a fit really did, once its first batch is done: the optimizer may have become
another, a kernel may have been ruled out, blocks may have been left alone. `kit.trial.settings_used` tells it.

`BatchRepeated` makes a fit one of the first batch alone, for the time that a step takes where nothing is read beside.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from kit.config import Config
from kit.data.rows.loader import RowData
from kit.errors import ConfigError, Problem, first_line, warn_caller
from kit.registry import load
from kit.targets import load_target
from kit.train.callbacks import UnusedParameters
from kit.train.choices import monitor_entries
from kit.train.device_limit import DeviceLimit
from kit.train.levers import GradientCheckpointing, instantiate
from kit.train.made import GivenData, ModuleData, loader_of, no_module, pair_of
from kit.train.rendezvous import open_store
from kit.train.sequences import AUTO, AttentionKernel, SequenceChunks, available_kernels
from kit.train.trainer import EventLogger, make_trainer, run_stage, stages_after
from kit.trial.context import Context
from kit.trial.meters import CarbonUse, CpuUse, EnergyUse, MemoryHistory, MemoryMeter, StepWork
from kit.trial.payload import CALL, WHOLE, Part, TrainerParts, is_patch_data, own_arguments
from kit.trial.recorder import CommunicationTimer, LoaderUsed, StepClock, StepRecorder

Made = TypeVar("Made")


def fit(context: Context) -> None:
    """Fit on this rank until the trial's steps are done or a stop was requested."""
    config, environment = context.config, context.environment
    context.store = open_store()
    payload = context.load_payload()
    seed_everything(config.training.seed, workers=True, verbose=False)
    module = make_module(payload["module"], config)
    data, batch_size = make_data(payload["data"], config), environment.get("batch_size")
    if isinstance(data.get("datamodule"), ModuleData):
        data["datamodule"].module = module
    if batch_size is not None and payload["data"].kind != "default":
        data = resize(data, int(batch_size))
    if config.calibration.enabled:
        data = load("fit.calibrate")(context, data)
        config = context.config  # with the loader that was chosen
    clock = context.clock = StepClock()
    recorder = StepRecorder(context, clock)
    setattr(rank_zero_only, "rank", context.rank)  # noqa: B010 - what loggers go by, also before there is a Trainer
    best = context.paths.checkpoints
    parts: TrainerParts = payload.get("trainer") or TrainerParts()  # earlier versions sent none
    quiet = EventLogger(context.writer, lambda: trainer.global_step, context.paths.directory)
    loggers = [] if environment.get("confined") else make_parts(parts.loggers, Logger, "logger")  # type: ignore[type-abstract]
    meter = MemoryMeter(context, clock) if config.trial.measure_memory else None
    profile = environment.get("profile")
    profiler = clock
    if profile is not None:
        profiler = load("fit.profile")(clock, profile["pass"], Path(profile["folder"]), config)
    limits = (config.hardware.device_memory_bytes, environment.get("share_bytes", 0))
    limit_bytes = min(filter(None, limits), default=0)
    trainer = make_trainer(
        config,
        accelerator=environment["accelerator"],
        world_size=context.world_size,
        precision=environment["precision"],
        module=module,
        logger=[*loggers, quiet],
        flags=parts.flags,
        callbacks=[
            *make_parts(parts.callbacks, Callback, "callbacks"),
            *map(instantiate, monitor_entries(config, str(best) if config.trial.keep_best else "")),
            *([DeviceLimit(limit_bytes)] if limit_bytes else []),
            *([AttentionKernel(AUTO)] if config.levers.attention == AUTO else []),  # a lever counts by itself
            UnusedParameters(),
            *([BatchRepeated()] if environment.get("repeats_batch") else []),
            *([HookLeftOut(environment["without_hook"])] if "without_hook" in environment else []),
            LoaderUsed(context),
            LeversUsed(context),
            *([StepWork(context), load("fit.host")(context, clock)] if config.trial.count_work else []),
            CpuUse(context),
            EnergyUse(context),
            *([CarbonUse(context)] if config.trial.codecarbon else []),
            CommunicationTimer(clock),
            recorder,
            *([] if meter is None else [meter]),
            *([] if environment.get("confined") else [MemoryHistory(context)]),
        ],
        profiler=profiler,
        default_root_dir=context.paths.directory,
    )
    after = stages_after(config, module, data.get("datamodule"))
    with contextlib.ExitStack() as ends:
        ends.callback(end_runs, loggers)
        try:
            trainer.fit(module, **data)
        except BaseException:  # a rank that has left may trip over its peers' leaving; that is no failure
            if not recorder.stopped:
                with contextlib.suppress(Exception):  # what is kept is written, if the device still answers
                    recorder.flush()
                raise
        if meter is not None:
            meter.end(trainer)
        recorder.end(trainer)
        if config.trial.keep_best and context.rank == 0 and config.training.monitor not in trainer.callback_metrics:
            context.writer.write("warned", message=_nothing_kept(config, trainer.callback_metrics))
        for stage in () if recorder.stopped else after:
            started = time.time()
            run_stage(stage, trainer, config, module, data.get("datamodule"))
            context.writer.write("span", name=stage, started=started, ended=time.time())
            if meter is not None:
                meter.end(trainer)


def _nothing_kept(config: Config, logged: Iterable[str]) -> str:
    """Why a trial that was to keep its best checkpoint has none."""
    known = ", ".join(logged) or "nothing"
    validates = "" if config.trial.validate_every_steps else "; a trial validates where trial.validate_every_steps says"
    return f"trial.keep_best kept nothing: {config.training.monitor} was never logged, but {known}{validates}"


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
    if made := getattr(part, "compiled", b""):  # a run directory of an earlier version knows none
        value = compile_again(value, made)
    if type(value).__name__ == "OptimizedModule" and isinstance(value._orig_mod, LightningModule):
        from lightning.pytorch.utilities.compile import from_compiled

        value = from_compiled(value)
    if not isinstance(value, LightningModule):
        given = part if part.value else config.model.target
        raise no_module(given, value)
    return value


def compile_again(module: LightningModule, made: bytes) -> Any:
    """A module as `torch.compile` had it where it came from."""
    contexts = cloudpickle.loads(made)
    if CALL in contexts:
        module._compiled_call_impl = contexts[CALL](module._call_impl)
    return contexts[WHOLE](module) if WHOLE in contexts else module


def make_parts(parts: Iterable[Part], kind: type[Made], path: str) -> list[Made]:
    """The loggers or callbacks that `parts` name, hold or make.

    Raises:
        ConfigError: naming `path`, when one of them is something else.
    """
    found: list[Made] = []
    for part in parts:
        value = load_target(part.value) if part.kind == "path" else part.value
        if part.kind == "entry":
            value = load_target(":".join(value["class_path"].rsplit(".", 1)))(**value.get("init_args") or {})
        value = value if part.kind == "instance" or isinstance(value, kind) else value()
        for one in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(one, kind):
                message = f"{part} gave {type(one).__name__}, which is no {kind.__name__} of lightning.pytorch"
                raise ConfigError([Problem(path, message)])
            found.append(one)
    return found


def end_runs(loggers: Iterable[Logger]) -> None:
    """Have W&B and its like send what is left: a rank ends without the exit handlers in which they would."""
    for logger in loggers:
        try:
            finish = getattr(getattr(logger, "experiment", None), "finish", None)
            if callable(finish):
                finish()
        except Exception as error:  # what the training ended with counts
            message = f"{type(logger).__name__} could not finish its run: {type(error).__name__}: {first_line(error)}"
            warn_caller(message)


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
    value = load_target(part.value) if part.kind == "path" else part.value
    if part.kind == "module":
        return {"datamodule": ModuleData(lambda: make_module(value, config))}
    if part.kind == "default":
        from kit.data.patches.module import PatchData

        value = PatchData(config)
    elif isinstance(value, type):
        value = value(config) if is_patch_data(value) else value(**own_arguments(config))
    elif part.kind == "path" and callable(value):
        value = value(**own_arguments(config))
    elif part.kind == "factory":
        value = value()
    if isinstance(value, LightningDataModule):
        use_config = getattr(value, "use_config", None)
        if use_config is not None:  # one of kit's own, which leaves the rest to the config
            use_config(config)
        return {"datamodule": value}
    parts = pair_of(value, str(part))
    if len(parts) == 2:
        pair = GivenData(*parts)
        pair.use_config(config)
        return {"datamodule": pair}
    return {"train_dataloaders": loader_of(parts[0], config.loader)}


_LOADER_OPTIONS = (
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
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, **kept)


class LeversUsed(Callback):
    """Writes `levers_used` once; to be placed after the levers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._written = False

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._written:
            return
        self._written = True
        levers: list[Any] = list(getattr(trainer, "callbacks"))  # noqa: B009
        missing = available_kernels(trainer.strategy.root_device.type)
        self._context.writer.write(
            "levers_used",
            optimizers=[type(optimizer).__name__ for optimizer in trainer.optimizers],
            checkpointed_blocks=sum(lever.count for lever in levers if isinstance(lever, GradientCheckpointing)),
            sequence_chunks=next((lever.count for lever in levers if isinstance(lever, SequenceChunks)), 0),
            attention=next((dict(lever.ran) for lever in levers if isinstance(lever, AttentionKernel)), {}),
            attention_here=[name for name, reason in missing.items() if not reason],
            attention_missing={name: reason for name, reason in missing.items() if reason},
        )


class OneBatch(_DataFetcher):
    """Hands the first batch of another fetcher again and again, whose loader and its processes have ended by then."""

    def __init__(self, given: _DataFetcher, is_copied: bool) -> None:
        super().__init__()
        self._given, self._is_copied = given, is_copied
        self.iterator = self._repeated()

    def _repeated(self) -> Iterator[Any]:
        held = next(self._given)
        self._given.combined_loader.reset()
        while True:
            yield copy.deepcopy(held) if self._is_copied else held

    @override
    def __iter__(self) -> OneBatch:
        return self  # an epoch that begins reads nothing anew

    @override
    def teardown(self) -> None:
        self._given.combined_loader.reset()


class HookLeftOut(Callback):
    """Leaves out one hook of a callback, the module or its data, by the name of its action in Lightning's profilers.

    It is called once, as one that is called rarely is, too: what it sets up is there, and glibc has seen its arrays,
    which decides what later ones cost.
    """

    def __init__(self, action: str) -> None:
        self._owner, _, self._hook = action.rpartition(".")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        owners: dict[str, Any] = {
            **{f"[Callback]{callback.state_key}": callback for callback in getattr(trainer, "callbacks")},  # noqa: B009
            f"[LightningModule]{type(pl_module).__name__}": pl_module,
            f"[LightningDataModule]{type(data).__name__}": data,
        }
        if owners.get(self._owner) is None:
            raise ConfigError([Problem("module", f"nothing here has the hook {self._owner}.{self._hook}")])
        hook, calls = getattr(owners[self._owner], self._hook), itertools.count()
        is_of_batch = self._hook.endswith("batch_transfer")  # it hands on what it was given

        def once(*given: Any, **named: Any) -> Any:
            return hook(*given, **named) if next(calls) == 0 else given[0] if is_of_batch else None

        setattr(owners[self._owner], self._hook, once)


class BatchRepeated(Callback):
    """Trains on the first batch again and again."""

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if isinstance(loop._data_fetcher, OneBatch):
            return
        if not isinstance(loop._data_fetcher, _PrefetchDataFetcher):
            raise ConfigError([Problem("module", "its training_step takes the loader, so no batch can be repeated")])
        # A module may change its batch in place; one that goes to a device is another each time.
        loop._data_fetcher = OneBatch(loop._data_fetcher, is_copied=trainer.strategy.root_device.type == "cpu")
