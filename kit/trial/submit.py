"""From what the caller gave to a run directory that a supervisor can start: every check comes before any process.

Refused here, each in one sentence: a model that cannot be found or made, devices that are not there, a store that the
ranks could not read, a batch larger than the data, an object that cannot be pickled, an argument of the Trainer that
the config says or a trial cannot take, codecarbon (an extra) where it is not installed or does not know the country.

GPUs are chosen and claimed in one step, so that two kernels never choose the same one. What kit chooses (`auto`, a
number) is never shared: when all that are left are claimed, the trial is refused. What the user names (a list, -1 for
all) is taken even so, with a warning, because two small models on one GPU may be intended. Ranks on the CPU claim
nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kit.config import Config, resolve_path
from kit.errors import ConfigError, HardwareError, Problem, warn_caller
from kit.events import SUPERVISOR, EventWriter
from kit.json_text import read_json
from kit.machine.claims import choosing, release
from kit.machine.gpus import Gpu
from kit.machine.machine import Resolved, hardware, resolve_devices, seat, with_claims
from kit.machine.processes import cpu_name, machine
from kit.memory.replay.cards import Card
from kit.targets import find_target
from kit.train.choices import trainer_flags
from kit.trial.directory import Control, RunPaths, contents_to_run, sign
from kit.trial.payload import (
    LARGE_BYTES,
    BatchRule,
    Part,
    TrainerParts,
    batch_rule,
    check_parts,
    optimizes_manually,
    pack,
    parts_of,
    unpack,
    warn_of_unused,
)
from kit.units import format_bytes

REHEARSAL = "the trial run"
"""What notes call a run that only tries something out."""
RunKind = Literal["trial", "repeat", "profile", "calibration"]
"""Why something was run: for itself; for a comparison, often several times; under a profiler; to measure a loader."""
_PACKAGES = ("kit", "torch", "lightning", "zarr", "fsspec", "gcsfs", "numpy", "pydantic", "cloudpickle")


@dataclass(frozen=True, slots=True)
class Altered:
    """In what a trial is unlike the module and data that it was given, to learn what that changes."""

    batch_size: int | None = None
    """Samples per batch on each device, instead of what data of the caller's own makes."""
    repeats_batch: bool = False
    """Whether the first batch is trained on again and again, so that nothing is read beside."""
    without_hook: str = ""
    """The hook that is left out after its first call, by the name of its action in Lightning's profilers."""

    @property
    def options(self) -> dict[str, Any]:
        """What ranks are told of it."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False, "")}


AS_GIVEN = Altered()


def prepare(
    module: object, data: object, config: object, altered: Altered = AS_GIVEN,
    profile: Mapping[str, str] | None = None, job: str | None = None, confined: str = "", kind: RunKind = "trial",
    logger: object = None, callbacks: object = (), trainer: object = None,
) -> RunPaths:  # fmt: skip
    """A complete run directory for this trial.

    Args:
        module: As `kit.fit` takes it.
        data: As `kit.fit` takes it.
        config: A Config.
        altered: In what it is unlike module and data.
        profile: Which profiler looks on (`pass`) and where it writes (`folder`); None for none.
        job: What the ranks do, by the name it is registered under; None for a fit.
        confined: What notes call a run that changes no file of the user's; empty for a run that may.
        kind: Why it is run.
        logger: As `kit.fit` takes it.
        callbacks: As `kit.fit` takes them.
        trainer: As `kit.fit` takes it.

    Its GPUs are claimed for it: whoever starts it hands them to the supervisor.

    Raises:
        ConfigError, HardwareError, StoreError: see the module's first lines.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"fit takes a Config, got {type(config).__name__}; call fit(config, module, data)")
    check_codecarbon(config)
    module_part, data_part = parts_of(module, data, config)
    check_targets(module_part, data_part, config)
    check_parts(module_part, data_part, config)
    trainer_parts = trainer_parts_of(module, config, logger, callbacks, trainer)
    rule = batch_rule(data_part, config) if altered.batch_size is None and job is None else None
    if rule is not None:
        rule.warn()
        warn_of_unused(module_part, data_part, config)
    batch = None if rule is None else asdict(rule)
    options: dict[str, Any] = {
        "profile": profile, "job": job, "batch": batch, "confined": confined or None, "kind": kind,
        "trainer": trainer_parts.summary() or None, **altered.options,
    }  # fmt: skip
    given = given_of(module_part, data_part)
    with _devices_taken(config) as taken:
        payload = pack(module_part, data_part, trainer_parts)
        paths = _fill(payload, given, config, taken, {name: it for name, it in options.items() if it is not None})
        if len(payload) > LARGE_BYTES:
            message = (
                f"module and data are {format_bytes(len(payload))} when sent to the ranks, probably weights or an "
                "array they hold; give a class or a function that makes them, so that they are made in the ranks"
            )
            _note_warning(paths, message, payload_bytes=len(payload))
            warn_caller(message)
        return paths


def trainer_parts_of(
    module: object, config: Config, logger: object, callbacks: object, trainer: object
) -> TrainerParts:
    """What of the caller's own the Trainer of a trial gets, checked.

    Raises:
        ConfigError: for what is no logger, callback or argument of the Trainer, and for what a trial does not take.
    """
    flags = trainer_flags(trainer, config, bool(trainer) and optimizes_manually(module, config))
    return TrainerParts.of(logger, callbacks, flags)


def given_of(module: Part, data: Part) -> dict[str, str]:
    """How module and data were given, and what tells them from others."""
    return {
        "module": module.kind, "data": "dataset" if data.is_dataset else data.kind,
        "module_identity": module.identity, "data_identity": data.identity,
    }  # fmt: skip


@contextlib.contextmanager
def _devices_taken(config: Config) -> Iterator[Taken]:
    """The devices of a trial, released when its run directory cannot be made."""
    taken = take_devices(config)
    try:
        yield taken
    except BaseException:
        release(taken.claims)
        raise


def _fill(payload: bytes, given: Mapping[str, str], config: Config, taken: Taken, options: dict[str, Any]) -> RunPaths:
    own = _check_own_data(config, taken.resolved.world_size) if given["data"] == "default" else {}
    paths = RunPaths.create(config)
    found = {
        "payload_bytes": len(payload),
        **own,
        "device_used_bytes": list(taken.used_bytes),
        **({"share_bytes": taken.share_bytes} if taken.share_bytes else {}),
        "claims": [str(file) for file in taken.claims],
        "hardware": dict(taken.hardware),
        "given": given,
    }
    write_run(paths, config.to_yaml(), payload, {**environment_of(taken.resolved), **found, **options})
    rule = BatchRule.of_environment(options)
    if rule is not None and rule.is_worth_a_warning:
        _note_warning(paths, rule.note)
    return paths


def again(
    earlier: RunPaths, config: Config, trust: bool = False, altered: Altered = AS_GIVEN, module: object = None,
    data: object = None,
) -> RunPaths:  # fmt: skip
    """A run directory to try out what `earlier` ran with another config: module and data are taken as they were sent.

    Args:
        earlier: What is run again.
        config: What to run it with.
        trust: Run it also when this user did not write it here.
        altered: As `prepare` takes it; a batch size that is not given stays as it was.
        module: Trained in place of what was sent.
        data: Trained on in place of what was sent.

    Raises:
        ConfigError, HardwareError, StoreError: see the module's first lines.
        ForeignRunError: when this user did not write it here.
        TrialError: when module and data are no longer there.
    """
    contents = contents_to_run(earlier, trust)
    before = contents.environment
    given = before.get("given", {"module": "path", "data": "path"})
    options: dict[str, Any] = {name: before[name] for name in ("batch_size", "trainer") if name in before}
    options |= {"confined": REHEARSAL, "kind": "repeat", **altered.options}
    rule = BatchRule.of_environment(before) if altered.batch_size is None else None
    if rule is not None:
        size = config.loader.batch_size
        options["batch"] = asdict(replace(rule, asked=size, size=size if rule.by_config else rule.size))
    payload = contents.payload
    if module is not None or data is not None:
        sent = unpack(payload)
        module_part = sent["module"] if module is None else Part.of(module)
        data_part = sent["data"] if data is None else Part.of(data)
        check_targets(module_part, data_part, config)
        check_parts(module_part, data_part, config)
        payload, given = pack(module_part, data_part, sent.get("trainer")), given_of(module_part, data_part)
        if data is not None and rule is not None:
            options["batch"] = asdict(batch_rule(data_part, config))
    with _devices_taken(config) as taken:
        return _fill(payload, given, config, taken, options)


def check_targets(module: Part, data: Part, config: Config) -> None:
    """Refuse import paths that lead nowhere.

    Raises:
        TargetError: with what is there instead.
    """
    if module.kind in ("default", "path"):
        find_target(config.model.target if module.kind == "default" else module.value)
    if data.kind == "path":
        _refuse_place(data.value)
        find_target(data.value)
    elif isinstance(data.value, os.PathLike):
        _refuse_place(os.fspath(data.value))


def _refuse_place(text: str) -> None:
    """Refuse the path or URL of data where an import path is meant, with what reads it."""
    from kit.data.stores.url import TABLES, redact

    suffix, rows = Path(text).suffix.lower(), (".npy", ".pt", ".pth")
    is_place = "://" in text or suffix in (*TABLES, *rows, ".zarr", ".nc") or resolve_path(text).exists()
    if _TARGET.search(text) or not is_place:
        return
    how = f"config.replace({{'data.url': {redact(text)!r}}}) reads a store, and data.patch says what a sample is"
    if suffix in rows:
        how = f"rows are read with data=kit.data.RowData({text!r})"
    elif suffix in TABLES:
        how = f"a table is read with data=kit.data.EventData(kit.data.open_table({text!r}, main_entity_column=...))"
    raise ConfigError([Problem("data", f"{redact(text)} is a place and no import path; {how}")])


_TARGET = re.compile(r"\w:[A-Za-z_]\w*$")


def _check_own_data(config: Config, world_size: int) -> dict[str, Any]:
    """The ranks are other processes: they must be able to open the store, and each batch must fit it.

    Returns:
        What is kept with the run: what reading should cost, before it is measured, and what is kept for validation.
    """
    from kit.data.build.layout import predict_reading
    from kit.data.open_dataset import open_dataset
    from kit.data.patches.tiles import standardized_by
    from kit.data.sampling import sample_plan
    from kit.data.splits import split_of, widest_of
    from kit.data.stores.url import is_shared
    from kit.data.stream.engine import Engine
    from kit.data.stream.memory import loader_settings, refuse_too_little_memory, refuse_too_little_shared_memory

    if not is_shared(config.data.url):
        message = f"{config.data.url} lives in this process only; a trial runs in others. Build to a folder or a bucket"
        raise ConfigError([Problem("data.url", message)])
    dataset = open_dataset(config)
    plan = sample_plan(config, dataset, world_size)
    settings, few = loader_settings(config)
    read = [(plan, settings)]
    if config.trial.validate_every_steps:
        read.append((sample_plan(config, dataset, world_size, part="validation"), few))
    if config.trial.test_batches:
        read.append((sample_plan(config, dataset, world_size, part="test"), few))
    arrays = dataset.select(config.data.variables)
    for part, how in read:
        refuse_too_little_memory(arrays, part, how, config.loader.memory_bytes)
    batch_bytes = plan.batch_bytes(len(arrays))
    refuse_too_little_shared_memory(config.loader, batch_bytes, world_size)
    # Opens nothing, and refuses what it cannot read.
    Engine(standardized_by(config, dataset), config.data.variables, standardize=config.data.standardize)
    split = split_of(config, widest_of(dataset, config))
    return {
        "predicted": predict_reading(config, dataset, world_size),
        **({} if split is None else {"split": split.sentence}),
    }


def environment_of(resolved: Resolved) -> dict[str, Any]:
    """What ranks know of the kernel and of what `auto` is."""
    names = ("world_size", "accelerator", "precision", "threads_per_rank")
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "platform": platform.platform(),
        "machine": machine(),
        "notebook": notebook_here(),
        "folder": os.getcwd(),  # noqa: PTH109 - text, as the ranks need it
        "sys_path": [os.path.abspath(entry) for entry in sys.path],  # noqa: PTH100 - an empty entry is the folder
        "devices": list(resolved.devices),
        "reasons": list(resolved.reasons),
        **{name: getattr(resolved, name) for name in names},
    }


def notebook_here() -> str:
    """What code is run from: the path of the notebook as its server says it, a script's name, else this process."""
    main = vars(sys.modules.get("__main__", sys))
    named = os.environ.get("JPY_SESSION_NAME") or main.get("__vsc_ipynb_file__") or main.get("__file__")
    return Path(named).name if named else f"process {os.getpid()}"


@functools.cache
def versions() -> dict[str, str]:
    """Of the packages that decide what a run does."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_run(paths: RunPaths, config: str, payload: bytes, environment: dict[str, Any]) -> None:
    """Fill a new run directory with what ranks read; `config` is YAML.

    Raises:
        ConfigError: when it cannot be written; the directory is gone then.
    """
    text = json.dumps(environment, indent=2)
    with paths.whole_or_gone(len(config) + len(payload) + len(text)):
        paths.config.write_text(config, encoding="utf-8")
        _write_payload(paths.payload, payload)
        paths.environment.write_text(text)
        Control.create(paths.control)
        sign(paths)


_LARGE_PAYLOAD_BYTES = 1 << 20
_payloads: dict[bytes, Path] = {}
"""Large payloads that this kernel has written, by what is in them."""


def _write_payload(file: Path, payload: bytes) -> None:
    """Write what ranks load. A large one that a run before has too, as repeats on the same data do, is one file on the
    disk with two names: nobody writes to either, and each run's signature tells if somebody does."""
    digest = hashlib.sha256(payload).digest() if len(payload) >= _LARGE_PAYLOAD_BYTES else b""
    with contextlib.suppress(OSError, KeyError):  # it is gone, or on another disk, or the file system knows no links
        os.link(_payloads[digest], file)
        if file.read_bytes() == payload:
            return
        file.unlink()
    file.write_bytes(payload)
    if digest:
        _payloads[digest] = file


def _note_warning(paths: RunPaths, message: str, **fields: Any) -> None:
    """Write a warning into the run, before any rank."""
    with paths.whole_or_gone(), contextlib.closing(EventWriter(paths.supervisor_events, SUPERVISOR)) as writer:
        writer.write("warned", message=message, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Devices that are this trial's until it ends."""

    resolved: Resolved
    used_bytes: tuple[int, ...]
    """What others hold on each of them."""
    claims: tuple[Path, ...]
    """To be handed over to the supervisor, or released."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """What the row of the trial tells of the machine."""
    share_bytes: int = 0
    """Of each device, for the allocator of a rank, where several people share this machine; 0 without a limit."""


def take_devices(config: Config) -> Taken:
    """Choose and claim.

    Raises:
        HardwareError: as `resolve_devices` does, and when kit would have to choose a claimed GPU.
    """
    machine, asked = hardware(), config.hardware.devices
    resolved = resolve_devices(config, machine)
    gpus: list[Gpu] = []
    claims: list[Path] = []
    if resolved.devices:
        with choosing() as desk:
            machine = with_claims(machine, desk.claims)
            resolved = resolve_devices(config, machine)
            gpus = [next(gpu for gpu in machine.gpus if gpu.uuid == uuid) for uuid in resolved.devices]
            shared = [machine.gpus.index(gpu) for gpu in gpus if gpu.claimed]
            claimed = "; ".join(f"GPU {index} is claimed by {machine.gpus[index].claimed}" for index in shared)
            if shared and not isinstance(asked, tuple) and asked != -1 and seat() is None:
                raise HardwareError(
                    f"hardware.devices is {asked}, but {sum(not gpu.claimed for gpu in machine.gpus)} of "
                    f"{len(machine.gpus)} GPUs are unclaimed: {claimed}; wait for that trial or stop it, or share on "
                    f"purpose with devices: [{shared[0]}]"
                )
            claims = desk.take(resolved.devices, config.name)
        if shared and seat() is None:  # who has a share of a GPU shares it on purpose
            warn_caller(f"{claimed}; the trials share it")
    facts = {
        "device": gpus[0].name if gpus else "CPU",
        "cpu": cpu_name(),
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "device_memory_bytes": min((gpu.total_bytes for gpu in gpus), default=None),
    }
    used_bytes = tuple(gpu.used_bytes for gpu in gpus)
    share_bytes = 0
    if gpus and seat() is not None:  # what a process holds outside the allocator is part of its share
        share_bytes = max(1, min(gpu.total_bytes - _most_context_bytes(gpu) for gpu in gpus))
    return Taken(
        resolved=resolved, used_bytes=used_bytes, share_bytes=share_bytes, claims=tuple(claims), hardware=facts
    )


def _most_context_bytes(gpu: Gpu) -> int:
    card = Card(name=gpu.name, memory_bytes=gpu.total_bytes, capability=gpu.capability or (8, 0))
    return card.context_bytes[1]


_FIELD = "trial.codecarbon"
_MIX = Path("data", "private_infra", "global_energy_mix.json")


def check_codecarbon(config: Config) -> None:
    """Refuse a trial that asks for what codecarbon cannot tell.

    Raises:
        ConfigError: when it is not installed, or has no grid of that country.
    """
    country = config.trial.codecarbon
    if not country:
        return
    found = importlib.util.find_spec("codecarbon")
    if found is None or found.origin is None:
        message = (
            f"{country}: codecarbon is not installed (pip install 'kit[co2]'); left empty, energy is what NVML counts "
            "or rated watts, and CO2 that of kit's table of grids"
        )
        raise ConfigError([Problem(_FIELD, message)])
    known: dict[str, Any] = read_json((Path(found.origin).parent / _MIX).read_bytes())
    if country not in known:
        names = {str(grid.get("country_name")).lower(): code for code, grid in known.items()}
        close = difflib.get_close_matches(country.lower(), [*names, *map(str.lower, known)], n=1)
        hint = f"; did you mean {names.get(close[0], close[0].upper())}?" if close else ""
        raise ConfigError([Problem(_FIELD, f"codecarbon has no grid of {country}; give a code such as DEU{hint}")])
