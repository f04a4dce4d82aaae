"""Which Lightning strategy a config's `hardware.strategy` is, for one process per device that already runs.

`none` is one device. `ddp` is a whole model on each device. `fsdp` and `fsdp:R:S` are FSDP2, R replicas of a model
sharded over S devices each (`fsdp` is one replica over all); they run on the CPU too, through gloo. No strategy made
here starts a process. What does not add up is refused with its arithmetic.
"""

from __future__ import annotations

from typing import Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from kit.config import Hardware
from kit.errors import ConfigError, Problem
from kit.train.shard import SelfShardedStrategy, ShardStrategy, check_shards


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
