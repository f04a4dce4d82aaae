"""The job of a committed file: `python -m kit.train.cli fit --config committed/name.yaml`, on every rank.

Lightning's own command line, which takes its files and options unchanged; any other LightningCLI runs the same file.
What is added is a look at everything that can be wrong, before a process joins the others and before a model is made
(`kit.train.cli`): errors are one sentence with the way out, instead of a traceback from inside a library. And a
run whose machine is lost goes on from the copy of its last checkpoint (`kit.train.cli`).

Preflight: everything that can be known to be wrong with a committed run before it starts, each as one error.

`check_files` reads the files as they are written: broken YAML, a damaged config, a class that is not there, an argument
it does not take. `check_run` takes what files and options came to: ranks that are not as many as were started, devices
that are not here, a store that cannot be read, a checkpoint folder that cannot be written to. Nothing is trained,
nothing is joined; the only thing written is an empty object beside the checkpoints, which is removed again.

Where a committed run goes on: from the last checkpoint here, or from the copy of it in the cloud.

A file says `ckpt_path: last`, which Lightning takes for the last checkpoint in its own folder. After the machine is
lost that folder is empty, and `kit.train.CheckpointUpload` in the same file says where copies are: the newest whole one
is fetched, once for all ranks of a machine. Every rank decides alone and before it joins the others, by what all of
them see. On one machine that is the newer of both, by when it was saved. On several machines the folder may be another
on each, so there the copies decide, where there is one. A URL may also be given outright: `--ckpt_path
gs://bucket/run`.
"""

from __future__ import annotations

import difflib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from kit.checkpoints.downloading import fetch_checkpoint
from kit.checkpoints.parts import saved_at, signature
from kit.checkpoints.uploading import last_parcel
from kit.config import COMMITTED, Config, committed_text, read_yaml
from kit.errors import ConfigError, HardwareError, KitError, Problem, StoreError, TargetError
from kit.targets import find_target, signature_of
from kit.train.choices import Entry

_STRICT = {"exit_on_error": False}


class CommittedCLI(LightningCLI):
    """LightningCLI that refuses what cannot run.

    Args:
        options: As LightningCLI takes them.

    Raises:
        KitError: for a file, an environment or a store that training could not start with.
    """

    def __init__(self, **options: Any) -> None:
        arguments = options.get("args")
        check_files(sys.argv[1:] if not isinstance(arguments, list) else arguments)
        strict = {**_STRICT, **{name: dict(_STRICT) for name in self.subcommands()}}
        with warnings.catch_warnings():
            # Lightning's own call of a name that jsonargparse has since changed.
            warnings.filterwarnings("ignore", module="lightning.pytorch.cli")
            warnings.filterwarnings("ignore", message=".*jsonargparse.*")
            # What begins is not expected to find what a restart would.
            warnings.filterwarnings("ignore", message=".*there is no last checkpoint available")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            super().__init__(**{"save_config_callback": None, "parser_kwargs": strict, **options})

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        """As LightningCLI does; what it refuses is a ConfigError."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise ConfigError(_first_lines(str(error)), "command line") from None

    @override
    def instantiate_classes(self) -> None:
        """As LightningCLI does; what a class of kit's refuses comes as it was said."""
        try:
            super().instantiate_classes()
        except Exception as error:
            found = _said_by_kit(error)
            if found is None:
                raise
            raise found from None

    @override
    def before_instantiate_classes(self) -> None:
        """Look at the run as files and options together have it, and where it is to go on."""
        settings = self.config.get(self.subcommand, self.config)
        values = plain(settings)
        check_run(values)
        found = newest_checkpoint(values)
        if found is not None:
            settings.ckpt_path = found


def _first_lines(text: str) -> str:
    """What jsonargparse says, without its list of everything else."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return "; ".join(lines[:3])


def _said_by_kit(error: BaseException | None) -> KitError | None:
    """The error of kit's that another one was made of; None where there is none."""
    while error is not None and not isinstance(error, KitError):
        error = error.__cause__ or error.__context__
    return error


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Whether it tells of the run, and not of a product."""
    return "Tip: For seamless" not in record.getMessage()


def main() -> None:
    """Run the command line; what is wrong with it is one line on stderr."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    gc.freeze()  # else each full collection looks at all that imports have made, and stops threads that read meanwhile
    try:
        CommittedCLI()
    except KitError as error:
        sys.exit(f"{type(error).__name__}: {error}")


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
        from kit.train.fsdp import check_shards

        check_shards(int(arguments.get("replicas", 1)), int(arguments["shard_size"]), world_size)


def _check_devices(trainer: Values, devices: int) -> None:
    if trainer.get("accelerator") not in ("gpu", "cuda"):
        return
    from kit.machine.machine import hardware

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
        from kit.data.stores.url import redact

        reason = getattr(error, "strerror", None) or str(error)
        raise StoreError(
            f"no checkpoint can be written to {redact(folder)}: {reason}; choose another dirpath"
        ) from None


_UPLOAD = "CheckpointUpload"
_SAVES = "ModelCheckpoint"
_FETCHED = "fetched"


def newest_checkpoint(values: Values) -> str | None:
    """What to put in the place of `ckpt_path`; None where it stays as it is.

    Args:
        values: What files and options came to, as LightningCLI parsed them.

    Raises:
        StoreError: when the copies cannot be read.
    """
    trainer, asked = values.get("trainer") or {}, str(values.get("ckpt_path") or "")
    root = str(trainer.get("default_root_dir") or "")
    folder = Path("" if "://" in root else root).absolute() / _FETCHED
    if "://" in asked:
        return _fetched(asked, folder, _credentials(trainer))
    uploads = [entry["init_args"] for entry in _entries(trainer, _UPLOAD)]
    if asked != "last" or not uploads:
        return None
    url, credentials = str(uploads[0]["url"]), _credentials(trainer)
    copy = last_parcel(url, credentials)
    several = int(trainer.get("num_nodes") or 1) > 1
    if copy is None or (not several and copy[1].saved <= _saved_here(trainer)):
        return None
    return _fetched(url, folder, credentials)


def _fetched(url: str, folder: Path, credentials: str) -> str | None:
    found = fetch_checkpoint(url, folder, credentials=credentials)
    return None if found is None else str(found)


def _credentials(trainer: Values) -> str:
    given = (entry["init_args"].get("credentials") for entry in _entries(trainer, _UPLOAD))
    return str(next(filter(None, given), "default"))


def _saved_here(trainer: Values) -> float:
    """When the newest last checkpoint of this machine was saved; 0 where there is none."""
    folders = {str(entry["init_args"].get("dirpath") or "") for entry in _entries(trainer, _SAVES)}
    local = (Path(folder) for folder in folders if folder and "://" not in folder)
    return max((saved_at(signature(file)) for folder in local for file in folder.glob("last*.ckpt")), default=0.0)


def _entries(trainer: Values, name: str) -> Iterator[Entry]:
    """The callbacks of that class."""
    for entry in trainer.get("callbacks") or []:
        if str(entry.get("class_path", "")).rpartition(".")[2] == name and entry.get("init_args"):
            yield entry


if __name__ == "__main__":
    main()
