"""Entries: strategy and levers of a config as a LightningCLI file names them, `class_path` and `init_args`; no torch.

What a Trainer is given in a trial and what a committed file says are made from the same entries, so that both train
alike. Accumulation, clipping and precision are arguments of the Trainer itself and have no class.
"""

from __future__ import annotations

from typing import Any, Literal

from kit.config import Checkpoint, Config, Hardware

Entry = dict[str, Any]


def entry(class_path: str, **arguments: Any) -> Entry:
    """What LightningCLI makes one object from."""
    return {"class_path": class_path, "init_args": arguments} if arguments else {"class_path": class_path}


def lever_entries(config: Config) -> list[Entry]:
    """The callbacks of the levers that `config` switches on, as `trainer.callbacks` takes them."""
    levers = config.levers
    chosen: list[tuple[str, dict[str, Any]]] = []
    if levers.gradient_checkpointing:
        chosen.append(("GradientCheckpointing", {"blocks": list(levers.checkpoint_blocks) or None}))
    if levers.optimizer != "module":
        chosen.append(("OptimizerChoice", {"name": levers.optimizer}))
    if levers.sequence_chunk:
        chosen.append(("SequenceChunks", {"length": levers.sequence_chunk}))
    if levers.attention != "auto":
        chosen.append(("AttentionKernel", {"name": levers.attention}))
    return [entry(f"kit.train.{name}", **arguments) for name, arguments in chosen]


def upload_entries(config: Config) -> list[Entry]:
    """The callback that copies checkpoints to `checkpoint.url`, with what is off its default; none without a URL."""
    defaults = Checkpoint().model_dump()
    changed = {name: value for name, value in config.checkpoint.model_dump().items() if value != defaults[name]}
    return [entry("kit.train.CheckpointUpload", **changed)] if config.checkpoint.url else []


def strategy_entry(
    hardware: Hardware, accelerator: Literal["cpu", "gpu"], world_size: int, nodes: int = 1, shards_itself: bool = False
) -> Entry:
    """The strategy of `world_size` ranks in all, as `kit.train.make_strategy` makes it.

    Args:
        nodes: Machines that the ranks are on. Each holds the replicas that `fsdp:R:S` names, so that shards are
            gathered within a machine; `fsdp` shards over all ranks.
        shards_itself: The module does so in its `configure_model`.
    """
    backend = "nccl" if accelerator == "gpu" else "gloo"
    if hardware.strategy == "none":
        device = "cuda:0" if accelerator == "gpu" else "cpu"
        return entry("lightning.pytorch.strategies.SingleDeviceStrategy", device=device)
    if hardware.strategy == "ddp":
        return entry(
            "lightning.pytorch.strategies.DDPStrategy", process_group_backend=backend, find_unused_parameters=False
        )
    replicas, size = hardware.shards or (1, world_size)
    replicas *= nodes if hardware.shards else 1
    if not shards_itself:
        return entry("kit.train.ShardStrategy", replicas=replicas, shard_size=size, process_group_backend=backend)
    data, tensor = (replicas, size) if hardware.shards else (world_size, 1)
    return entry(
        "kit.train.SelfShardedStrategy",
        data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend=backend,
    )  # fmt: skip
