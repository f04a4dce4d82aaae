"""The Trainer a trial runs: Lightning's own, with everything off that would write, print, validate or launch.

It runs inside a process that is already one rank of `world_size` (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are set), on one device each; it never starts another process and never asks SLURM, even inside a SLURM
allocation. What a module in manual optimization cannot have (accumulation, clipping) is left out with a `KitWarning`.

Which Lightning strategy a config's `hardware.strategy` is, for one process per device that already runs.

`none` is one device. `ddp` is a whole model on each device. `fsdp` and `fsdp:R:S` are FSDP2, R replicas of a model
sharded over S devices each (`fsdp` is one replica over all); they run on the CPU too, through gloo. No strategy made
here starts a process. What does not add up is refused with its arithmetic.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from kit.config import Config, Hardware
from kit.errors import ConfigError, HardwareError, KitWarning, Problem
from kit.train.callbacks import WholeEpochs
from kit.train.fsdp import SelfShardedStrategy, ShardStrategy, check_shards
from kit.train.levers import lever_callbacks

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
) -> Trainer:
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

    Raises:
        ConfigError: when the strategy does not fit `world_size`.
        HardwareError: when this process is not a rank of `world_size`.
    """
    strategy = make_strategy(config.hardware, accelerator, world_size, module)
    return Trainer(
        accelerator=accelerator,
        devices=world_size,
        num_nodes=1,
        strategy=strategy,
        max_steps=config.trial.max_steps if max_steps is None else max_steps,
        max_epochs=-1,
        callbacks=[*lever_callbacks(config, stands_in), WholeEpochs(), *callbacks],
        profiler=profiler,
        default_root_dir=default_root_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **_validation(config),
        **_optimization(config, module),
        **_precision(
            precision, accelerator, isinstance(strategy, ModelParallelStrategy), _environment(world_size), stands_in
        ),
    )


def _validation(config: Config) -> dict[str, Any]:
    every = config.trial.validate_every_steps
    if not every:
        return {"limit_val_batches": 0}
    return {
        "limit_val_batches": config.trial.validation_batches,
        "val_check_interval": every * config.levers.accumulate_grad_batches,
        "check_val_every_n_epoch": None,
    }


def _environment(world_size: int) -> ClusterEnvironment:
    """Where this rank finds the others; chosen outright, because Lightning would prefer SLURM when it sees it."""
    absent = [name for name in _RANK_VARIABLES if name not in os.environ]
    if not absent and int(os.environ["WORLD_SIZE"]) == world_size:
        return TorchElasticEnvironment()
    if world_size == 1 and absent:
        return LightningEnvironment()
    found = f"{', '.join(absent)} unset" if absent else f"WORLD_SIZE={os.environ['WORLD_SIZE']}"
    raise HardwareError(
        f"this process is not one of {world_size} ranks ({found}); start one process per device with "
        f"{', '.join(_RANK_VARIABLES)} set, as kit.fit and torchrun do"
    )


def _optimization(config: Config, module: LightningModule | None) -> dict[str, Any]:
    clip, accumulate = config.training.gradient_clip_norm, config.levers.accumulate_grad_batches
    if module is not None and not module.automatic_optimization:
        _warn_of_manual_optimization(type(module).__name__, clip, accumulate)
        return {}
    clipping = {} if clip is None else {"gradient_clip_val": clip, "gradient_clip_algorithm": "norm"}
    return {"accumulate_grad_batches": accumulate, **clipping}


def _warn_of_manual_optimization(name: str, clip: float | None, accumulate: int) -> None:
    left = [f"training.gradient_clip_norm: {clip}"] if clip is not None else []
    left += [f"levers.accumulate_grad_batches: {accumulate}"] if accumulate != 1 else []
    if left:
        warnings.warn(
            f"{name} optimizes manually, so {' and '.join(left)} {'is' if len(left) == 1 else 'are'} left out; do it "
            "in its training_step (self.clip_gradients, optimizer.step every n-th batch)",
            KitWarning,
            stacklevel=3,
        )


def _precision(
    precision: str, accelerator: str, sharded: bool, environment: ClusterEnvironment, stands_in: bool
) -> dict[str, Any]:
    if precision == "16-mixed" and accelerator == "cpu" and stands_in:
        return {"plugins": [environment, MixedPrecision("16-mixed", "cpu")]}
    if precision == "16-mixed" and accelerator == "cpu":
        warnings.warn("16-mixed needs a GPU; on the CPU bf16-mixed is used", KitWarning, stacklevel=3)
        precision = "bf16-mixed"
    if precision == "16-mixed" and sharded:
        # Lightning refuses the name for its model-parallel strategies; the plugin itself shards its scaler correctly.
        return {"plugins": [environment, MixedPrecision("16-mixed", "cuda")]}
    return {"precision": precision, "plugins": [environment]}


def make_strategy(
    hardware: Hardware,
    accelerator: Literal["cpu", "gpu"],
    world_size: int,
    module: LightningModule | None = None,
) -> Strategy:
    """The strategy for `world_size` processes of one device each.

    A `module` that overrides `configure_model` shards itself: it gets Lightning's mesh of R data-parallel by S
    tensor-parallel devices (`fsdp`: all of them data-parallel).

    Raises:
        ConfigError: when the strategy does not fit the number of processes.
    """
    backend = "nccl" if accelerator == "gpu" else "gloo"
    if hardware.strategy == "none":
        return _single_device(accelerator, world_size)
    if hardware.strategy == "ddp":
        return DDPStrategy(process_group_backend=backend, find_unused_parameters=False)
    replicas, shard_size = hardware.shards or (1, world_size)
    check_shards(replicas, shard_size, world_size)
    if module is None or not is_overridden("configure_model", module):
        return ShardStrategy(replicas, shard_size, process_group_backend=backend)
    data, tensor = hardware.shards or (world_size, 1)
    return SelfShardedStrategy(data, tensor, process_group_backend=backend)


def _single_device(accelerator: str, world_size: int) -> Strategy:
    if world_size != 1:
        message = f"none uses 1 device, not {world_size}; choose ddp or fsdp, or hardware.devices: 1"
        raise ConfigError([Problem("hardware.strategy", message)])
    return SingleDeviceStrategy(device=torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu"))
