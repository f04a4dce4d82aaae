"""What the choices of hardware mean, in sentences beside their controls; no torch, no device is asked.

A strategy says what each device holds, with the worked example of eight devices, and which one to try when. A number of
devices says what a step then sees, and what that does to the learning rate: with n times the samples in a step, linear
scaling takes n times the rate (Goyal et al. 2017, arXiv:1706.02677), with some warm-up; it is a start to try from.

Entries: strategy and levers of a config as a LightningCLI file names them, `class_path` and `init_args`; no torch.

What a Trainer is given in a trial and what a committed file says are made from the same entries, so that both train
alike. Accumulation, clipping and precision are arguments of the Trainer itself and have no class.
"""

from __future__ import annotations

from typing import Any, Literal

from kit.config import Checkpoint, Config, Hardware

ESCALATION = (
    "Begin with none on one device; take ddp when it is too slow, after a look whether the device waits for data; take "
    "fsdp when it runs out of memory."
)
EXAMPLE = "fsdp:2:4 on 8 devices is 2 replicas, each sharded over 4 devices: each device holds a quarter of a model"


def explain_strategy(strategy: str) -> str:
    """What each device holds under `strategy`, and when to take another."""
    if strategy == "none":
        return f"One device holds the whole model. {ESCALATION}"
    if strategy == "ddp":
        return (
            "A full copy of the model on every device, each with its own slice of the data; gradients are averaged. "
            "Faster, not smaller: out of memory on one device is out of memory on all; then fsdp."
        )
    if strategy == "fsdp":
        return (
            "The model is sharded: each device holds its share of parameters, gradients and optimizer state, and "
            f"gathers a block at a time. {EXAMPLE}."
        )
    replicas, size = (int(part) for part in strategy.split(":")[1:])
    held = "a whole model" if size == 1 else f"1/{size} of a model"
    worked = "" if strategy == "fsdp:2:4" else f" ({EXAMPLE})"
    return (
        f"{replicas} replica{'s' * (replicas > 1)} × {size} device{'s' * (size > 1)} each = {replicas * size} devices; "
        f"each holds {held}, and gradients are averaged over the replicas{worked}."
    )


def explain_attention(accelerator: str, wanted: str) -> str:
    """Which kernels of attention a `cpu` or `gpu` has, and what becomes of the one that is wanted."""
    if accelerator == "gpu":
        return "a GPU has math, efficient, and where torch was built with them flash and cudnn; a trial says which ran"
    here = "the CPU has math and flash; efficient and cudnn need a GPU"
    return f"{here}, so torch chooses" if wanted in ("efficient", "cudnn") else here


def global_batch(config: Config, world_size: int) -> int:
    """Samples of one optimizer step: batch × devices × accumulation."""
    return config.loader.batch_size * world_size * config.levers.accumulate_grad_batches


def explain_batch(config: Config, world_size: int, before: tuple[Config, int] | None = None) -> str:
    """What a step sees, and what linear scaling makes of the learning rate.

    Args:
        config: What would run.
        world_size: Its ranks.
        before: The config and ranks that the learning rate was chosen for; by default one device without accumulation.
    """
    size = global_batch(config, world_size)
    accumulate = config.levers.accumulate_grad_batches
    parts = [f"{config.loader.batch_size} a device", f"{world_size} device{'s' * (world_size > 1)}"]
    parts += [f"{accumulate} accumulated"] if accumulate > 1 else []
    text = f"a step sees {size} samples: {' × '.join(parts)}"
    was = config.loader.batch_size if before is None else global_batch(*before)
    if size == was:
        return text
    return f"{text}; {size / was:g} times the {was} before, so linear scaling takes {_rate(config, size / was)}"


def _rate(config: Config, factor: float) -> str:
    rate = config.model.arguments.get("learning_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return f"{factor:g} times the learning rate"
    return f"a learning rate of {rate * factor:g} instead of {rate:g}"


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
