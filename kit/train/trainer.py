"""The Trainer a trial runs: Lightning's own, with all off that would write, print or launch unless it is asked for.

It runs inside a process that is already one rank of `world_size` (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are set), on one device each; it never starts another process and never asks SLURM, even inside a SLURM
allocation. What a module in manual optimization cannot have (accumulation, clipping) is left out with a `KitWarning`.

A trial is the beginning of the real training, not a short training: `max_epochs` and `estimated_stepping_batches` are
those of `training.max_epochs` or `training.max_steps`, so that a schedule is as far as it would be. `TrialTrainer`
leaves the fit after the steps of the trial. A training with fewer steps than that is taken as long as the trial.

`EventLogger` is the logger of every trial, beside the user's or alone: `self.logger` is never None, whatever is called
on `self.logger.experiment` works, and the numbers among it become `logged` events.

Strategies: `none` is one device. `ddp` is a whole model on each device. `fsdp` and `fsdp:R:S` are FSDP2, R replicas of
a model sharded over S devices each (`fsdp` is one replica over all); they run on the CPU too, through gloo. What does
not add up is refused with its arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoints, distributions
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.fabric.loggers.tensorboard import _TENSORBOARD_AVAILABLE, _TENSORBOARDX_AVAILABLE
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from kit.config import Config
from kit.errors import ConfigError, HardwareError, Problem, warn_caller
from kit.events import EventWriter
from kit.sections import Hardware
from kit.targets import tells_of_sharding
from kit.train.callbacks import WholeEpochs
from kit.train.choices import Stage, asked_stages, length_of, strategy_entry, validates_by, validation_interval
from kit.train.fsdp import check_shards
from kit.train.levers import instantiate, lever_callbacks

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOGGED_TIMES, _LIGHTNINGS_LOG_EVERY = 10, 50


class TrialTrainer(Trainer):
    """A Trainer that leaves the fit after `trial_steps` optimizer steps, whatever the training that it is set up for.

    Args:
        trial_steps: Optimizer steps of the fit.
        arguments: The Trainer's own.
    """

    def __init__(self, *, trial_steps: int, callbacks: Sequence[Callback], **arguments: Any) -> None:
        with _packages_read_once():
            super().__init__(callbacks=[*callbacks, _TrialEnd()], **arguments)
        self.trial_steps = trial_steps

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the real training; those of the trial where nobody knows how long an epoch is."""
        self.fit_loop.setup_data()
        if not self.global_step:  # the length of a training is settled before its first step
            self.last_as_long()
        known = self.max_steps > 0 or math.isfinite(self.num_training_batches)
        return super().estimated_stepping_batches if known else self.trial_steps

    def last_as_long(self) -> None:
        """Take a training that would be over before the trial for one of more steps or epochs."""
        if self.max_steps > 0:
            self.fit_loop.epoch_loop.max_steps = max(self.max_steps, self.trial_steps)
            return
        batches = self.num_training_batches if math.isfinite(self.num_training_batches) else 1
        steps = max(1, math.ceil(batches / self.accumulate_grad_batches))
        left = math.ceil((self.trial_steps - self.global_step) / steps) + (self.global_step > 0)
        self.fit_loop.max_epochs = max(self.max_epochs or 1, self.current_epoch + left)


@contextlib.contextmanager
def _packages_read_once() -> Iterator[None]:
    """Let Lightning look for callbacks of installed packages without reading all of them for each Trainer."""
    names = vars(registry)
    asked, names["entry_points"] = names["entry_points"], callback_factories
    try:
        yield
    finally:
        names["entry_points"] = asked


def callback_factories(*, group: str) -> EntryPoints:
    """Entry points of a group. A folder of packages is read again only when it changed.

    That is a small file of each of some hundred packages, which took most of a Trainer's start.
    """
    found: dict[str, EntryPoints] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            changed = Path(folder).stat().st_mtime_ns
            found = {**dict(_factories_in(folder, changed, group)), **found}  # the first on the path counts
    return EntryPoints(point for points in found.values() for point in points)


@functools.lru_cache(maxsize=64)
def _factories_in(folder: str, _changed: int, group: str) -> list[tuple[str, EntryPoints]]:
    each = ((package, package.entry_points.select(group=group)) for package in distributions(path=[folder]))
    return [(package.name, points) for package, points in each if points]


callback_factories(group="lightning.pytorch.callbacks_factory")  # forks of a warm process have them


class _TrialEnd(Callback):
    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if isinstance(trainer, TrialTrainer) and trainer.max_epochs != -1:
            # The checkpoint may hold all epochs, but never all steps.
            trainer.fit_loop.max_epochs = max(trainer.max_epochs or 1, trainer.trial_steps)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer, TrialTrainer):
            trainer.last_as_long()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if isinstance(trainer, TrialTrainer) and trainer.global_step >= trainer.trial_steps:
            loop = trainer.fit_loop
            loop.min_epochs, loop.epoch_loop.min_steps = None, None  # those of the real training hold nothing up here
            trainer.should_stop = True


def default_logger() -> Logger:
    """What `logger=True` means to a Trainer: TensorBoard in the working folder, CSV where it is not installed."""
    available = _TENSORBOARD_AVAILABLE or _TENSORBOARDX_AVAILABLE
    return TensorBoardLogger(Path.cwd()) if available else CSVLogger(Path.cwd())


class EventLogger(DummyLogger):
    """Writes the numbers that it is given as events, and takes everything else in silence.

    Args:
        writer: Where events go.
        steps_done: Tells the optimizer steps that are done.
        folder: Where a ModelCheckpoint without a folder keeps its files.
    """

    def __init__(self, writer: EventWriter, steps_done: Callable[[], int], folder: str | Path) -> None:
        super().__init__()
        self._writer, self._steps_done, self._folder = writer, steps_done, str(folder)
        self._experiment = _Experiment(self.log_metrics)

    @property
    @override
    def save_dir(self) -> str:
        return self._folder

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        found = {str(name): _number(value) for name, value in metrics.items() if name != "epoch"}
        found = {name: value for name, value in found.items() if value is not None}
        if found:
            self._writer.write("logged", step=self._steps_done(), metrics=found)


class _Experiment(_DummyExperiment):
    """Knows how TensorBoard, W&B and MLflow are given numbers; any other call does nothing."""

    def __init__(self, log_metrics: Callable[[Mapping[str, Any]], None]) -> None:
        self._log_metrics = log_metrics

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        self._log_metrics({tag: scalar_value})

    def log_metric(self, *arguments: Any, key: str = "", value: Any = None, **_: Any) -> None:
        """MLflow's client names the run first."""
        pairs = itertools.pairwise([*arguments, key, value])
        self._log_metrics({name: number for name, number in pairs if isinstance(name, str)})

    def log(self, data: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(data, Mapping):
            self._log_metrics(data)


def _number(value: Any) -> float | None:
    if isinstance(value, bool | str | bytes) or getattr(value, "ndim", 0) > 0:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def make_trainer(
    config: Config,
    *,
    accelerator: Literal["cpu", "gpu"],
    world_size: int,
    precision: str,
    module: LightningModule | None = None,
    callbacks: Sequence[Callback] = (),
    profiler: Profiler | None = None,
    max_steps: int | None = None,
    default_root_dir: str | Path | None = None,
    stands_in: bool = False,
    logger: bool | Sequence[Logger] = False,
    flags: Mapping[str, Any] | None = None,
) -> TrialTrainer:
    """The Trainer of this rank.

    Args:
        config: Strategy, accumulation, clipping, levers and `trial.max_steps` are taken from it.
        accelerator: What `auto` was resolved to.
        world_size: Processes of the run, each with one device.
        precision: What `auto` was resolved to; `16-mixed` on the CPU becomes `bf16-mixed`, with a warning.
        module: The module to be trained, when it is at hand: one in manual optimization, or one that shards itself in
            `configure_model`, is given what it can have.
        callbacks: Run after those of the levers and `WholeEpochs`.
        profiler: Lightning profiler, or none.
        max_steps: Optimizer steps, instead of `trial.max_steps`.
        default_root_dir: Where Lightning or the user's own callbacks write; the current folder by default.
        stands_in: The CPU plays the part of a GPU (a dry run): `16-mixed` stays, with its gradient scaler.
        logger: As the Trainer takes it.
        flags: More of the Trainer's arguments, as `kit.train.choices.trainer_flags` lets them pass.

    Raises:
        ConfigError: when the strategy does not fit `world_size`.
        HardwareError: when this process is not a rank of `world_size`.
    """
    strategy = make_strategy(config.hardware, accelerator, world_size, module)
    steps = config.trial.max_steps if max_steps is None else max_steps
    sharded, given = isinstance(strategy, ModelParallelStrategy), dict(flags or {})
    arguments = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "log_every_n_steps": min(_LIGHTNINGS_LOG_EVERY, max(1, steps // _LOGGED_TIMES)),
        **_validation(config, given),
        **_optimization(config, module),
        **_precision(precision, accelerator, sharded, _environment(world_size), stands_in),
    }
    plugins = given.pop("plugins", None) or []
    arguments["plugins"] += plugins if isinstance(plugins, list) else [plugins]
    return TrialTrainer(
        trial_steps=steps,
        accelerator=accelerator,
        devices=world_size,
        num_nodes=1,
        strategy=strategy,
        **length_of(config.training),
        callbacks=[*lever_callbacks(config, stands_in), WholeEpochs(), *callbacks],
        profiler=profiler,
        default_root_dir=default_root_dir,
        logger=logger,
        **{**arguments, **given},
    )


def _validation(config: Config, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing is validated unless the config or a flag says when."""
    sanity, interval = config.trial.sanity_batches, validation_interval(config)
    if not interval and not validates_by(flags):
        return {"limit_val_batches": 0}
    return {"limit_val_batches": config.trial.validation_batches, "num_sanity_val_steps": sanity, **interval}


def _environment(world_size: int) -> ClusterEnvironment:
    """Where this rank finds the others; chosen outright, because Lightning would prefer SLURM when it sees it."""
    absent = [name for name in RANK_VARIABLES if name not in os.environ]
    if not absent and int(os.environ["WORLD_SIZE"]) == world_size:
        return TorchElasticEnvironment()
    if world_size == 1 and absent:
        return LightningEnvironment()
    found = f"{', '.join(absent)} unset" if absent else f"WORLD_SIZE={os.environ['WORLD_SIZE']}"
    raise HardwareError(
        f"this process is not one of {world_size} ranks ({found}); start one process per device with "
        f"{', '.join(RANK_VARIABLES)} set, as kit.fit and torchrun do"
    )


def _optimization(config: Config, module: LightningModule | None) -> dict[str, Any]:
    clip, accumulate = config.training.gradient_clip_norm, config.levers.accumulate_grad_batches
    if module is None or module.automatic_optimization:
        clipping = {} if clip is None else {"gradient_clip_val": clip, "gradient_clip_algorithm": "norm"}
        return {"accumulate_grad_batches": accumulate, **clipping}
    left = [f"training.gradient_clip_norm: {clip}"] if clip is not None else []
    left += [f"levers.accumulate_grad_batches: {accumulate}"] if accumulate != 1 else []
    if left:
        warn_caller(
            f"{type(module).__name__} optimizes manually, so {' and '.join(left)} {'is' if len(left) == 1 else 'are'} "
            "left out; do it in its training_step (self.clip_gradients, optimizer.step every n-th batch)"
        )
    return {}


def _precision(
    precision: str, accelerator: str, sharded: bool, environment: ClusterEnvironment, stands_in: bool
) -> dict[str, Any]:
    if precision == "16-mixed" and accelerator == "cpu" and stands_in:
        return {"plugins": [environment, MixedPrecision("16-mixed", "cpu")]}
    if precision == "16-mixed" and accelerator == "cpu":
        warn_caller("16-mixed needs a GPU; on the CPU bf16-mixed is used")
        precision = "bf16-mixed"
    if precision == "16-mixed" and sharded:
        # Lightning refuses the name for its model-parallel strategies; the plugin itself shards its scaler correctly.
        return {"plugins": [environment, MixedPrecision("16-mixed", "cuda")]}
    return {"precision": precision, "plugins": [environment]}


def make_strategy(
    hardware: Hardware, accelerator: Literal["cpu", "gpu"], world_size: int, module: LightningModule | None = None
) -> Strategy:
    """The strategy for `world_size` processes of one device each.

    A `module` that shards itself in `configure_model` gets Lightning's mesh of R data-parallel by S tensor-parallel
    devices (`fsdp`: all of them data-parallel). What it only makes there is sharded as any other is.

    Raises:
        ConfigError: when the strategy does not fit the number of processes.
    """
    if hardware.strategy == "none" and world_size != 1:
        message = f"none uses 1 device, not {world_size}; choose ddp or fsdp, or hardware.devices: 1"
        raise ConfigError([Problem("hardware.strategy", message)])
    if hardware.strategy.startswith("fsdp"):
        check_shards(*(hardware.shards or (1, world_size)), world_size)
    shards_itself = module is not None and _shards_itself(module)
    made: Strategy = instantiate(strategy_entry(hardware, accelerator, world_size, shards_itself=shards_itself))
    return made


def _shards_itself(module: LightningModule) -> bool:
    """Whether `configure_model` shards what it makes, as far as its source tells; where none is at hand, it does."""
    if not is_overridden("configure_model", module):
        return False
    kinds = itertools.takewhile(lambda kind: kind is not LightningModule, type(module).__mro__)
    makers = (vars(kind).get("configure_model") for kind in kinds)
    try:
        return any(tells_of_sharding(inspect.getsource(maker)) for maker in makers if maker is not None)
    except (OSError, TypeError):
        return True


def stages_after(config: Config, module: LightningModule, datamodule: LightningDataModule | None) -> list[Stage]:
    """The stages that follow a fit.

    Raises:
        ConfigError: for one that module and data have no step or no loader for.
    """
    asked = asked_stages(config)
    for stage, batches in asked.items():
        loader, holders = f"{stage}_dataloader", [module, *filter(None, [datamodule])]
        parts = [] if stage == "predict" or is_overridden("test_step", module) else ["test_step on the module"]
        parts += [] if any(is_overridden(loader, one) for one in holders) else [f"{loader} on the data or the module"]
        if parts:
            message = f"{batches}, but there is no {' and no '.join(parts)}; add it, or set 0"
            raise ConfigError([Problem(f"trial.{stage}_batches", message)])
    return [*asked]


def run_stage(
    stage: Stage, trainer: Trainer, config: Config, module: LightningModule, datamodule: LightningDataModule | None
) -> None:
    """Test or predict with the weights that the fit ended with; what the module logs becomes events as in the fit."""
    setattr(trainer, f"limit_{stage}_batches", asked_stages(config)[stage])
    if stage == "test":
        trainer.test(module, datamodule=datamodule, verbose=False)
    else:
        trainer.predict(module, datamodule=datamodule, return_predictions=False)
