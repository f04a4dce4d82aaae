"""What a config says of hardware and levers: in sentences beside its controls, and as entries of a LightningCLI file.

A strategy says what each device holds, with the worked example of eight devices, and when to try which. A number of
devices says how many samples a step then sees, and what that does to the learning rate: with n times the samples,
linear scaling takes n times the rate (Goyal et al. 2017, arXiv:1706.02677), with some warm-up; it is a start to try
from.

An entry (`class_path` and `init_args`) is what LightningCLI makes one object from. A trial's Trainer and a committed
file are made from the same entries, so that both train alike. Accumulation, clipping and precision are arguments of the
Trainer itself and have no class. No torch, and no device is asked.

`trainer_flags` goes by one table of every argument of Lightning's Trainer (2.6): those that a field of the config says,
those that a trial cannot take, with the reason, and those that reach the Trainer as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kit.config import Config, paths_of
from kit.errors import ConfigError, Problem, did_you_mean
from kit.sections import Checkpoint, Hardware, Training

_MIB = 1 << 20
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


def explain_attention(accelerator: str, chosen: str) -> str:
    """Which kernels of attention a `cpu` or `gpu` has, and what becomes of the chosen one."""
    if accelerator == "gpu":
        return "a GPU has math, efficient, and where torch was built with them flash and cudnn; a trial says which ran"
    here = "the CPU has math and flash; efficient and cudnn need a GPU"
    return f"{here}, so torch chooses" if chosen in ("efficient", "cudnn") else here


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
    text = f"a step sees {size} sample{'s' * (size != 1)}: {' × '.join(parts)}"
    was = config.loader.batch_size if before is None else global_batch(*before)
    if size == was:
        return text
    factor, rate = size / was, config.model.arguments.get("learning_rate")
    scaled = f"{factor:g} times the learning rate"
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        scaled = f"a learning rate of {rate * factor:g} instead of {rate:g}"
    return f"{text}; {factor:g} times the {was} before, so linear scaling takes {scaled}"


Entry = dict[str, Any]


def entry(class_path: str, **arguments: Any) -> Entry:
    """What LightningCLI makes one object from."""
    return {"class_path": class_path, "init_args": arguments} if arguments else {"class_path": class_path}


def lever_entries(config: Config) -> list[Entry]:
    """The callbacks of the levers that `config` switches on, as `trainer.callbacks` takes them."""
    levers, chosen = config.levers, []
    if levers.gradient_checkpointing:
        chosen.append(entry("kit.train.GradientCheckpointing", blocks=list(levers.checkpoint_blocks) or None))
    if levers.optimizer != "module":
        chosen.append(entry("kit.train.OptimizerChoice", name=levers.optimizer))
    if levers.zero_grad_after_step:
        chosen.append(entry("kit.train.ZeroGradAfterStep"))
    if levers.sequence_chunk:
        chosen.append(entry("kit.train.SequenceChunks", length=levers.sequence_chunk))
    if levers.attention != "auto":
        chosen.append(entry("kit.train.AttentionKernel", name=levers.attention))
    return chosen


def upload_entries(config: Config) -> list[Entry]:
    """The callback that copies checkpoints to `checkpoint.url`, with what is off its default; none without a URL."""
    defaults = Checkpoint().model_dump()
    changed = {name: value for name, value in config.checkpoint.model_dump().items() if value != defaults[name]}
    return [entry("kit.train.CheckpointUpload", **changed)] if config.checkpoint.url else []


def monitor_entries(config: Config, folder: str = "") -> list[Entry]:
    """The callbacks that go by `training.monitor`: early stopping, and with a folder the best checkpoint in it."""
    training, found = config.training, []
    by: dict[str, Any] = {"monitor": training.monitor, "mode": training.monitor_mode}
    if training.early_stopping_patience:
        patience = training.early_stopping_patience
        found.append(entry("lightning.pytorch.callbacks.EarlyStopping", **by, patience=patience))
    if training.monitor and folder:
        best = {"dirpath": folder, "filename": "best", "enable_version_counter": False}
        found.append(entry("lightning.pytorch.callbacks.ModelCheckpoint", **by, **best))
    return found


def length_of(training: Training) -> dict[str, int]:
    """What the Trainer is told of the length of the real training."""
    if training.max_steps:
        return {"max_epochs": -1, "max_steps": training.max_steps}
    return {"max_epochs": training.max_epochs, "max_steps": -1}


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
        more: dict[str, Any] = {"static_graph": True} if hardware.ddp_static_graph else {}
        if hardware.ddp_bucket_bytes != Hardware().ddp_bucket_bytes:
            more["bucket_cap_mb"] = hardware.ddp_bucket_bytes / _MIB
        return entry(
            "lightning.pytorch.strategies.DDPStrategy", process_group_backend=backend,
            find_unused_parameters=hardware.ddp_find_unused_parameters, **more,
        )  # fmt: skip
    replicas, size = hardware.shards or (1, world_size)
    replicas *= nodes if hardware.shards else 1
    if not shards_itself:
        return entry("kit.train.ShardStrategy", replicas=replicas, shard_size=size, process_group_backend=backend)
    data, tensor = (replicas, size) if hardware.shards else (world_size, 1)
    return entry(
        "kit.train.SelfShardedStrategy",
        data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend=backend,
    )  # fmt: skip


SAID_BY_CONFIG = {
    "accelerator": "hardware.accelerator",
    "accumulate_grad_batches": "levers.accumulate_grad_batches",
    "devices": "hardware.devices",
    "gradient_clip_val": "training.gradient_clip_norm",
    "max_epochs": "training.max_epochs",
    "max_steps": "training.max_steps",
    "num_nodes": "commit.nodes",
    "precision": "hardware.precision",
    "strategy": "hardware.strategy",
}
"""Arguments of the Trainer that a config says, and where."""
REFUSED = {
    "barebones": "it switches off the hooks that a trial is measured by",
    "callbacks": "it is an argument of its own: kit.fit(config, module, data, callbacks=[...])",
    "default_root_dir": "each trial has its run directory, below trial.folder",
    "fast_dev_run": "a trial is short already, by trial.max_steps, and keeps loggers and checkpoints",
    "logger": "it is an argument of its own: kit.fit(config, module, data, logger=...)",
    "profiler": "a trial times its steps with a profiler of its own; kit.studies.profile runs the others",
}
"""Arguments of the Trainer that a trial cannot take, and why."""
_OF_OTHERS = dict.fromkeys(
    ("ckpt_path", "resume_from_checkpoint"),
    "a trial begins anew: load weights where the module is made; what kit.commit writes goes on from its last "
    "checkpoint",
)
"""The same of arguments that the Trainer does not have, or has no more."""
PASSED = (
    "benchmark", "check_val_every_n_epoch", "detect_anomaly", "deterministic", "enable_autolog_hparams",
    "enable_checkpointing", "enable_model_summary", "enable_progress_bar", "gradient_clip_algorithm", "inference_mode",
    "limit_predict_batches", "limit_test_batches", "limit_train_batches", "limit_val_batches", "log_every_n_steps",
    "max_time", "min_epochs", "min_steps", "model_registry", "num_sanity_val_steps", "overfit_batches", "plugins",
    "reload_dataloaders_every_n_epochs", "sync_batchnorm", "use_distributed_sampler", "val_check_interval",
)  # fmt: skip
"""Arguments that reach the Trainer as they are given."""
HELD = (
    "check_val_every_n_epoch", "detect_anomaly", "gradient_clip_algorithm", "gradient_clip_val", "inference_mode",
    "limit_val_batches", "num_sanity_val_steps", "sync_batchnorm", "val_check_interval",
)  # fmt: skip
"""Of these, what changes how much memory a training takes."""
VALIDATES = ("limit_val_batches", "val_check_interval", "check_val_every_n_epoch", "overfit_batches")
"""Of these, what has a trial validate."""
_PLUGINS = ("CheckpointIO", "LayerSync")


def trainer_flags(given: object, config: Config, manual: bool = False) -> dict[str, Any]:
    """What of `given` reaches the Trainer of a trial.

    An argument that says what the config says too, or nothing (None, False, auto), is passed over.

    Args:
        given: Arguments of Lightning's Trainer by name; None for none.
        config: What the trial runs by.
        manual: The module optimizes manually.

    Raises:
        ConfigError: for what is no such argument, and for one that a trial does not take, with the reason.
    """
    if given is not None and not isinstance(given, Mapping):
        message = f"{type(given).__name__} is no mapping; give arguments of the Trainer, as {{'deterministic': True}}"
        raise ConfigError([Problem("trainer", message)])
    flags, problems = dict(given or {}), []
    by_value = flags.get("gradient_clip_algorithm") == "value"
    for name, value in (given or {}).items():
        if name == "gradient_clip_val" and by_value and config.training.gradient_clip_norm is None and not manual:
            continue
        unbounded = name in ("max_epochs", "max_steps") and value == -1  # the Trainer's own word for nothing
        if unbounded or (name not in PASSED and (value is None or value is False or value == "auto")):
            del flags[name]
        elif name in SAID_BY_CONFIG:
            field = SAID_BY_CONFIG[name]
            if value != config.get(field):
                problems.append((name, f"{value!r}, but {field} says it, and is {config.get(field)!r}; set it there"))
            del flags[name]
        elif name in REFUSED or name in _OF_OTHERS:
            problems.append((name, REFUSED.get(name) or _OF_OTHERS[name]))
        elif name not in PASSED:
            known = (*PASSED, *SAID_BY_CONFIG)
            fields = paths_of(str(name))
            hint = did_you_mean(name, known, f"{' or '.join(fields)} says it" if fields else "Lightning lists its own")
            problems.append((name, f"the Trainer has no such argument{hint}"))
        elif name == "plugins":
            problems += [("plugins", reason) for reason in map(_why_no_plugin, _listed(value)) if reason]
    if not by_value or manual:  # of a norm, the config says it
        flags.pop("gradient_clip_algorithm", None)
    if problems:
        raise ConfigError([Problem(f"trainer.{name}", message) for name, message in problems])
    return flags


def validation_interval(config: Config) -> dict[str, Any]:
    """The Trainer's arguments that validate after every so many steps; none where the config says no number."""
    if not (every := config.trial.validate_every_steps):
        return {}
    return {"val_check_interval": every * config.levers.accumulate_grad_batches, "check_val_every_n_epoch": None}


def validates_by(flags: Mapping[str, Any]) -> bool:
    """Whether arguments of the Trainer have a trial validate."""
    return any(flags.get(name) for name in VALIDATES)


def held_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of the Trainer that change how much memory a training takes."""
    found = {name: value for name, value in flags.items() if name in HELD}
    return {"check_val_every_n_epoch": 1, **found} if validates_by(flags) else found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _why_no_plugin(plugin: Any) -> str:
    names = {base.__name__ for base in type(plugin).__mro__}
    if names.intersection(_PLUGINS):
        return ""
    said = "hardware.precision says it" if "Precision" in names else "kit starts the ranks and says where they are"
    return f"{type(plugin).__name__} is not taken: {said}; {' and '.join(_PLUGINS)} are"


Stage = Literal["test", "predict"]


def asked_stages(config: Config) -> dict[Stage, int]:
    """What a trial does after its fit, and on how many batches."""
    asked: dict[Stage, int] = {"test": config.trial.test_batches, "predict": config.trial.predict_batches}
    return {stage: batches for stage, batches in asked.items() if batches}
