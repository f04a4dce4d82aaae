"""The job of a committed file: `python -m kit.train.cli fit --config committed/name.yaml`, on every rank.

It is Lightning's own command line, with its files and options unchanged; any other LightningCLI runs the same file. Two
things are added. Everything that can be known to be wrong is looked for before a process joins the others and before a
model is made, and each error is one sentence with the way out, instead of a traceback from inside a library. And a run
whose machine is lost goes on from the copy of its last checkpoint.

`check_files` reads the files as they are written: broken YAML, a damaged config, a class that is not there, an argument
that it does not take. `check_run` takes what files and options came to: another number of ranks than was started,
devices that are not here, a store that cannot be read, a checkpoint folder that cannot be written to. Nothing is
trained and nothing is joined; the only thing written is an empty object beside the checkpoints, which is removed again.

`newest_checkpoint` decides where a run goes on. A file says `ckpt_path: last`, which Lightning takes for the last
checkpoint in its own folder. After the machine is lost that folder is empty, and `kit.train.CheckpointUpload` in the
same file says where the copies are: the newest whole one is fetched, once for all ranks of a machine. Every rank
decides alone and before it joins the others, by what all of them see. On one machine that is the newer of both, by when
it was saved. On several machines the folder may be another on each, so there the copies decide, where there is one. A
URL may also be given outright: `--ckpt_path gs://bucket/run`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a rank, however it was started
    gc.disable()  # until all is imported: collections among a million new objects take a fifth of that time

import torch
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

from kit.checkpoints.downloading import fetch_checkpoint
from kit.checkpoints.parts import saved_at, signature
from kit.checkpoints.uploading import latest_bundle
from kit.config import Config, project_folder
from kit.errors import ConfigError, HardwareError, KitError, Problem, StoreError, TargetError, did_you_mean, first_line
from kit.targets import find_target, signature_of
from kit.train.callbacks import CommittedConfig
from kit.train.choices import Entry
from kit.train.one_lightning import use_one_lightning
from kit.train.rendezvous import meet_here
from kit.yaml_text import COMMITTED, committed_text, read_yaml

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
        self._files = check_files(sys.argv[1:] if not isinstance(arguments, list) else arguments)
        strict = {**_STRICT, **{name: dict(_STRICT) for name in self.subcommands()}}
        with warnings.catch_warnings():
            # Lightning's own call of a name that jsonargparse has since changed.
            warnings.filterwarnings("ignore", module="lightning.pytorch.cli")
            warnings.filterwarnings("ignore", message=".*jsonargparse.*")
            # What begins is not expected to find what a restart would.
            warnings.filterwarnings("ignore", message=".*there is no last checkpoint available")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            # jsonargparse looks for the shortest path to a class, old names included.
            warnings.filterwarnings("ignore", message="kit[.].* is a name of kit 0.1")
            super().__init__(**{"save_config_callback": None, "parser_kwargs": strict, **options})

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        """As LightningCLI does; what it refuses is a ConfigError."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:  # without its list of everything else
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ConfigError("; ".join(lines[:3]), "command line") from None

    @override
    def instantiate_classes(self) -> None:
        """As LightningCLI does; what a class of kit's refuses comes as it was said."""
        try:
            super().instantiate_classes()
        except Exception as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, KitError):
                found = found.__cause__ or found.__context__
            if found is None:
                raise
            raise found from None
        trainer: Any = self.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, CommittedConfig):
                settings = plain(self.config.get(self.subcommand, self.config))
                callback.started = started_with(self._files, settings)

    @override
    def before_instantiate_classes(self) -> None:
        """Look at the run as files and options together have it, and where it is to go on."""
        settings = self.config.get(self.subcommand, self.config)
        values = plain(settings)
        check_run(values)
        trainer = values.get("trainer") or {}
        strategy = plain(trainer.get("strategy"))
        alone = isinstance(strategy, Mapping) and str(strategy.get("class_path", "")).endswith("SingleDeviceStrategy")
        if trainer.get("num_nodes") == 1 and not alone and not _under_slurm(os.environ):
            ranks = int(trainer.get("devices") or 1)
            self._store = meet_here(os.environ, ranks)  # held as long as this rank runs
        check_checkpoint(values)
        found = newest_checkpoint(values)
        if found is not None:
            settings.ckpt_path = found
        elif self.subcommand in ("test", "predict", "validate"):
            check_trained(values)


def main() -> None:
    """Run the command line; what is wrong with it is one line on stderr."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: "Tip: For seamless" not in record.getMessage())  # of a product, not of the run
    warnings.formatwarning = format_warning
    use_one_lightning()
    gc.freeze()  # else each full collection looks at all that imports have made, and stops threads that read meanwhile
    gc.enable()
    try:
        CommittedCLI()
    except KitError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except RuntimeError as error:
        if (unfit := unfit_checkpoint(error)) is None:
            raise
        sys.exit(f"{type(unfit).__name__}: {unfit}")


def format_warning(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001
    filename: str,
    lineno: int,
    line: str | None = None,  # noqa: ARG001
) -> str:
    """One line of a log, with the place of a warning where that is a file of the project, and without it elsewhere."""
    file, project = Path(filename), Path.cwd()
    own = file.is_relative_to(project) and "site-packages" not in file.parts
    place = f"{file.relative_to(project)}:{lineno}: " if own else ""
    return f"{place}{message}\n"


def unfit_checkpoint(error: RuntimeError) -> ConfigError | None:
    """What torch said where the weights of a checkpoint are not those of the module; None of any other error."""
    begun, _, rest = str(error).partition("loading state_dict for ")
    if not rest or not begun.startswith("Error"):
        return None
    name, *differences = (line.strip() for line in rest.splitlines())
    said = differences[0][:_LONGEST] + (f", and {len(differences) - 1} more lines" if len(differences) > 1 else "")
    message = f"holds the weights of another module than {name.rstrip(':')} as it is set up here: {said}"
    return ConfigError([Problem("ckpt_path", message)])


_KEYS = ("seed_everything", "trainer", "model", "data", "ckpt_path", "optimizer", "lr_scheduler", "weights_only")
_DATA = "kit.train.CommittedData"
_PROBE = ".kit-write-test"
_LONGEST = 300
Values = Mapping[str, Any]


def started_with(files: Sequence[str], values: Values) -> dict[str, str]:
    """What a checkpoint keeps of its run, in words: the files, and the arguments that decide what is trained."""
    found = {"the file": ", ".join(Path(file).name for file in files)}
    for part in ("model", "optimizer", "lr_scheduler"):
        found |= {path: str(value) for path, value in _leaves(values.get(part), part)}
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}")


def check_files(arguments: Sequence[str]) -> list[str]:
    """Look at the files that a command line names, and name them.

    Raises:
        ConfigError: with the file and what is wrong in it; a TargetError for a class that is not there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", nargs="?", default=[])
    paths = list(filter(None, parser.parse_known_args(list(arguments))[0].config))
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            elsewhere = (project := project_folder()) != Path.cwd() and (project / path).exists()
            hint = f"; it lies in the project folder: start this in {project}" if elsewhere else ""
            raise ConfigError(f"cannot read {path}: {error}{hint}") from None
        check_values(read_yaml(text, path), path)
    return paths


def check_values(values: Values, where: str) -> Config | None:
    """Look at one file; the config it carries, when it is a whole committed file and not a few settings.

    Raises:
        ConfigError: as `check_files` does.
    """
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        hint = did_you_mean(unknown[0], _KEYS, f"there are {', '.join(_KEYS[:5])}")
        raise ConfigError([Problem(unknown[0], f"no part of a committed file{hint}")], where)
    for name in ("trainer", "model", "data"):
        if name in values and not isinstance(values[name], Mapping):
            raise ConfigError([Problem(name, f"has to hold settings, not {values[name]!r}")], where)
    classes = list(_classes(values, ""))
    for path, found in classes:
        _check_class(path, found, where)
    if not _is_own_data(values) and all(found.get("class_path") != COMMITTED for _, found in classes):
        return None
    return Config.from_yaml(committed_text(values, where), f"{where}, config of {COMMITTED}")


def _is_own_data(values: Values) -> bool:
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
        message = f"{name!r} does not name a class with its module; write package.module.Name"
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
    if not known or path not in ("model", "data"):  # a class that takes any argument tells nothing
        return
    for argument in given or {}:
        if argument not in known:
            hint = did_you_mean(argument, known, "it takes {}")
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
        if trainer.get("accelerator") in ("gpu", "cuda"):
            from kit.machine.machine import hardware

            here = hardware()
            if len(here.gpus) < devices:
                found = here.gpu_source if not here.gpus else f"{len(here.gpus)} can be used"
                raise HardwareError(f"this run needs {devices} GPUs on this machine: {found}")
    if _is_own_data(values):
        from kit.data.open_dataset import open_dataset
        from kit.data.sampling import sample_plan

        config = Config.from_yaml(committed_text(plain(values)))
        sample_plan(config, open_dataset(config), (devices or 1) * (nodes or 1))
    if int(variables.get("RANK", variables.get("SLURM_PROCID", 0))) == 0:
        for _, callback in _classes(plain(trainer.get("callbacks") or []), ""):
            folder = (callback.get("init_args") or {}).get("dirpath")
            if folder and str(callback["class_path"]).endswith("ModelCheckpoint"):
                _check_writable(str(folder))


_SAID = ("last", "best", "hpc", "registry")
"""What Lightning takes for a checkpoint that it looks for itself."""


def check_checkpoint(values: Values) -> None:
    """Look at the file that `ckpt_path` names, whoever wrote it.

    Raises:
        ConfigError: for one that is not there, or that no training can go on from, with what to do instead.
    """
    given = str(values.get("ckpt_path") or "")
    searched = "://" in given or given.partition(":")[0] in _SAID
    if not given or searched or values.get("weights_only") is False or Path(given).is_dir():
        return
    load = "load such weights in the module, by an argument of it"
    try:
        found: Any = torch.load(given, "cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        beside = [file.name for file in Path(given).parent.glob("*")]
        message = "is not there" + did_you_mean(Path(given).name, beside, otherwise="")
    except Exception as error:  # whatever reading a file of another kind comes to
        named = re.search(r"GLOBAL (\S+)", str(error))
        message = f"is no checkpoint that can be read ({first_line(error)}); give one that a Trainer saved"
        if named:
            message = f"holds {named[1]}, which is more than numbers; if you trust it, add --weights_only=false"
    else:
        if isinstance(found, dict) and {"pytorch-lightning_version", "optimizer_states"} <= {*found}:
            return
        message = f"was not saved by a Trainer; {load}"
        if isinstance(found, dict) and "pytorch-lightning_version" in found:
            message = f"holds the weights alone (save_weights_only), and no training goes on from them; {load}"
    raise ConfigError([Problem("ckpt_path", f"{given} {message}")])


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
        raise ConfigError([Problem(f"trainer.{name}", f"is {value}, but must be at least 1")])
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
    """As Lightning sees it: a job of SLURM that is not a shell of its user, nor one in which torchrun starts ranks."""
    started = "TORCHELASTIC_RUN_ID" not in variables and "SLURM_NTASKS" in variables
    return started and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive")


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


def newest_checkpoint(values: Values) -> str | None:
    """What to put in the place of `ckpt_path`; None where it stays as it is.

    Args:
        values: What files and options came to, as LightningCLI parsed them.

    Raises:
        StoreError: when the copies cannot be read.
    """
    trainer, given = values.get("trainer") or {}, str(values.get("ckpt_path") or "")
    uploads = [entry["init_args"] for entry in _entries(trainer, "CheckpointUpload")]
    credentials = str(next((upload["credentials"] for upload in uploads if upload.get("credentials")), "default"))
    url = given
    if "://" not in given:
        if given != "last" or not uploads:
            return None
        url = str(uploads[0]["url"])
        copy, several = latest_bundle(url, credentials), int(trainer.get("num_nodes") or 1) > 1
        saved_here = max((saved_at(signature(file)) for file in _kept_here(trainer)), default=0.0)
        if copy is None or (not several and copy[1].saved <= saved_here):
            return None
    root = str(trainer.get("default_root_dir") or "")
    folder = Path("" if "://" in root else root).absolute() / "fetched"
    found = fetch_checkpoint(url, folder, credentials=credentials)
    return None if found is None else str(found)


def check_trained(values: Values) -> None:
    """Look for the last checkpoint, where one is asked for; Lightning would take weights that nothing was trained with.

    Raises:
        ConfigError: where there is none.
    """
    trainer = values.get("trainer") or {}
    known = "://" not in str(trainer.get("default_root_dir"))
    if values.get("ckpt_path") == "last" and known and not any(_kept_here(trainer)):
        message = "last: this run has left no checkpoint; train first, with fit, or give the path of one"
        raise ConfigError([Problem("ckpt_path", message)])


def _kept_here(trainer: Values) -> Iterator[Path]:
    """The last checkpoints in folders of this machine."""
    for saves in (*_entries(trainer, "ModelCheckpoint"), *_entries(trainer, "LastModelCheckpoint")):
        folder = str(saves["init_args"].get("dirpath") or "")
        if folder and "://" not in folder:
            yield from Path(folder).glob("last*.ckpt")


def _entries(trainer: Values, name: str) -> Iterator[Entry]:
    """The callbacks of that class."""
    for entry in trainer.get("callbacks") or []:
        if str(entry.get("class_path", "")).rpartition(".")[2] == name and entry.get("init_args"):
            yield entry


if __name__ == "__main__":
    main()
