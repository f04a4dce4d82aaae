"""Preflight: everything that can be known to be wrong with a committed run before it starts, each as one error.

`check_files` reads the files as they are written: broken YAML, a damaged config, a class that is not there, an argument
it does not take. `check_run` takes what files and options came to: ranks that are not as many as were started, devices
that are not here, a store that cannot be read, a checkpoint folder that cannot be written to. Nothing is trained,
nothing is joined; the only thing written is an empty object beside the checkpoints, which is removed again.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.config import COMMITTED, Config, committed_text, read_yaml
from kit.errors import ConfigError, HardwareError, Problem, StoreError, TargetError
from kit.signatures import signature_of
from kit.targets import find_target

_KEYS = ("seed_everything", "trainer", "model", "data", "ckpt_path", "optimizer", "lr_scheduler", "weights_only")
_DATA = "kit.train.CommittedData"
_PROBE = ".kit-write-test"
Values = Mapping[str, Any]


def check_files(arguments: Sequence[str]) -> None:
    """Look at the files that a command line names.

    Raises:
        ConfigError: with the file and what is wrong in it; a TargetError for a class that is not there.
    """
    for path in _files(arguments):
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        check_values(read_yaml(text, path), path)


def _files(arguments: Sequence[str]) -> Iterator[str]:
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-c") and not equals and place + 1 < len(arguments):
            yield arguments[place + 1]
        elif name in ("--config", "-c") and equals:
            yield value


def check_values(values: Values, where: str) -> Config | None:
    """Look at one file; the config it carries, when it is a whole committed file and not a few settings.

    Raises:
        ConfigError: as `check_files` does.
    """
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _KEYS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(_KEYS[:5])}"
        raise ConfigError([Problem(unknown[0], f"no part of a committed file{hint}")], where)
    for name in ("trainer", "model", "data"):
        if name in values and not isinstance(values[name], Mapping):
            raise ConfigError([Problem(name, f"has to hold settings, not {values[name]!r}")], where)
    for path, found in _classes(values, ""):
        _check_class(path, found, where)
    if not _carries(values):
        return None
    return Config.from_yaml(committed_text(values, where), f"{where}, config of {COMMITTED}")


def _carries(values: Values) -> bool:
    return _own_data(values) or any(found.get("class_path") == COMMITTED for _, found in _classes(values, ""))


def _own_data(values: Values) -> bool:
    return isinstance(values.get("data"), Mapping) and values["data"].get("class_path") == _DATA


def _classes(value: Any, path: str) -> Iterator[tuple[str, Values]]:
    """Every class that is named, with its place."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            yield path, value
        for key, inner in value.items():
            yield from _classes(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _classes(inner, f"{path}[{place}]")


def _check_class(path: str, found: Values, where: str) -> None:
    name = found["class_path"]
    if not isinstance(name, str) or "." not in name:
        message = f"{name!r} is no class with its module; write package.module.Name"
        raise ConfigError([Problem(f"{path}.class_path", message)], where)
    target = ":".join(name.rsplit(".", 1))
    try:
        find_target(target)
        known = signature_of(target)
    except TargetError as error:
        raise TargetError([Problem(f"{path}.class_path", str(error))], where) from None
    given = found.get("init_args")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError([Problem(f"{path}.init_args", f"has to hold arguments, not {given!r}")], where)
    if path in ("model", "data"):
        _check_arguments(path, given or {}, known, name, where)


def _check_arguments(path: str, given: Values, known: Mapping[str, Any] | None, name: str, where: str) -> None:
    """Against what the source tells; a class that takes any argument tells nothing."""
    if not known:
        return
    for argument in given:
        if argument not in known:
            close = difflib.get_close_matches(str(argument), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(known)}"
            raise ConfigError([Problem(f"{path}.init_args.{argument}", f"{name} takes no such argument{hint}")], where)


# -- the run


def check_run(values: Values, environment: Mapping[str, str] | None = None) -> None:
    """Look at what files and options came to, on the rank that is to run it.

    Args:
        values: As LightningCLI has parsed them.
        environment: Of this process, by default.

    Raises:
        HardwareError: for ranks or devices that are not as the file has them.
        StoreError: for data that cannot be read or checkpoints that cannot be written.
        ConfigError: for data that do not fit the config.
    """
    variables = os.environ if environment is None else environment
    trainer = values.get("trainer") or {}
    devices, nodes = _count(trainer, "devices"), _count(trainer, "num_nodes")
    if devices is not None and nodes is not None:
        _check_ranks(devices, nodes, variables)
        _check_strategy(trainer, devices * nodes)
        _check_devices(trainer, devices)
    if _own_data(values):
        _check_store(Config.from_yaml(committed_text(plain(values))), (devices or 1) * (nodes or 1))
    if int(variables.get("RANK", variables.get("SLURM_PROCID", 0))) == 0:
        for folder in _checkpoint_folders(trainer):
            _check_writable(folder)


def plain(value: Any) -> Any:
    """The same with mappings of the parser's own kind as dicts."""
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _count(trainer: Values, name: str) -> int | None:
    value = trainer.get(name)
    try:
        count = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if count < 1 and not (name == "devices" and count == -1):
        raise ConfigError([Problem(f"trainer.{name}", f"{value} are none; use 1 or more")])
    return count if count > 0 else None


def _check_ranks(devices: int, nodes: int, variables: Mapping[str, str]) -> None:
    mine = f"{devices * nodes} ranks, " + (f"{devices} on each of {nodes} nodes" if nodes > 1 else "all on one node")
    if "TORCHELASTIC_RUN_ID" in variables:
        world, here = int(variables["WORLD_SIZE"]), int(variables.get("LOCAL_WORLD_SIZE", devices))
        if (world, here) == (devices * nodes, devices):
            return
        way = f"--nproc-per-node {devices}" + (f" --nnodes {nodes}" if nodes > 1 else "")
        other = f"--trainer.num_nodes={max(1, world // here)} --trainer.devices={here}"
        raise HardwareError(
            f"this run is for {mine}, but torchrun started {world}, {here} on this node; start it with {way}, or "
            f"give the job {other} (another number of ranks is another global batch)"
        )
    if _under_slurm(variables):
        tasks, each = int(variables["SLURM_NTASKS"]), variables.get("SLURM_NTASKS_PER_NODE", "")
        if tasks != devices * nodes or (each.isdigit() and int(each) != devices):
            raise HardwareError(
                f"this run is for {mine}, but SLURM gives this job {tasks} tasks; ask for --nodes={nodes} "
                f"--ntasks-per-node={devices} and start it with srun, or with torchrun, which does not count tasks"
            )
        return
    if nodes > 1 and "NODE_RANK" not in variables and "GROUP_RANK" not in variables:
        raise HardwareError(
            f"this run is for {mine}, and python alone starts those of one; start it on every node with torchrun "
            f"--nnodes {nodes} --nproc-per-node {devices}, or give the job --trainer.num_nodes=1"
        )


def _under_slurm(variables: Mapping[str, str]) -> bool:
    """As Lightning sees it: a job that is not a shell of its user."""
    return "SLURM_NTASKS" in variables and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def _check_strategy(trainer: Values, world_size: int) -> None:
    strategy = plain(trainer.get("strategy"))
    if not isinstance(strategy, Mapping):
        return
    name = str(strategy.get("class_path", "")).rpartition(".")[2]
    arguments = strategy.get("init_args") or {}
    if name == "SingleDeviceStrategy" and world_size > 1:
        raise HardwareError(f"this run has {world_size} ranks, but its strategy is for one device; use DDPStrategy")
    if name == "ShardStrategy" and arguments.get("shard_size") is not None:
        from kit.train.shard import check_shards

        check_shards(int(arguments.get("replicas", 1)), int(arguments["shard_size"]), world_size)


def _check_devices(trainer: Values, devices: int) -> None:
    if trainer.get("accelerator") not in ("gpu", "cuda"):
        return
    from kit.machine import hardware

    here = hardware()
    if len(here.gpus) < devices:
        found = here.gpu_source if not here.gpus else f"{len(here.gpus)} can be used"
        raise HardwareError(f"this run needs {devices} GPUs on this machine: {found}")


def _check_store(config: Config, world_size: int) -> None:
    from kit.data.dataset import open_dataset
    from kit.data.sampling import sample_plan

    sample_plan(config, open_dataset(config), world_size)


def _checkpoint_folders(trainer: Values) -> Iterator[str]:
    for _, found in _classes(plain(trainer.get("callbacks") or []), ""):
        arguments = found.get("init_args") or {}
        if str(found["class_path"]).endswith("ModelCheckpoint") and arguments.get("dirpath"):
            yield str(arguments["dirpath"])


def _check_writable(folder: str) -> None:
    """Write an empty object and remove it, as the checkpoints will be written."""
    from lightning.fabric.utilities.cloud_io import get_filesystem

    path = f"{folder.rstrip('/')}/{_PROBE}"
    try:
        files: Any = get_filesystem(folder)
        files.makedirs(folder, exist_ok=True)
        with files.open(path, "wb") as probe:
            probe.write(b"")
        files.rm(path)
    except (OSError, ValueError, ImportError) as error:
        from kit.data.stores import redact

        reason = getattr(error, "strerror", None) or str(error)
        raise StoreError(
            f"no checkpoint can be written to {redact(folder)}: {reason}; choose another dirpath"
        ) from None
