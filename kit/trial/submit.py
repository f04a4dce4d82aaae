"""From what the caller gave to a run directory that a supervisor can start: every check comes before any process.

Refused here, each in one sentence: a model that cannot be found or made, devices that are not there, a store that the
ranks could not read, a batch larger than the data, an object that cannot be pickled.

The devices of a trial, chosen and claimed in one step, so that two kernels never choose the same GPU.

What kit chooses (`auto`, a number) is never shared: when all that are left are claimed, the trial is refused. What the
user names (a list, -1 for all) is taken even so, with a warning: two small models on one GPU may be just what is
wanted. Ranks on the CPU claim nothing.

Whether codecarbon can be asked about a trial: it is an extra, and knows the grids of most countries.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import Config
from kit.errors import ConfigError, HardwareError, KitWarning, Problem
from kit.events import SUPERVISOR, EventWriter
from kit.json_text import read_json
from kit.machine.claims import choosing, release
from kit.machine.gpus import Gpu
from kit.machine.machine import Machine, Resolved, hardware, resolve_devices, with_claims
from kit.machine.processes import cpu_name, machine
from kit.trial.directory import Control, RunPaths, contents_to_run, sign
from kit.trial.payload import LARGE_BYTES, BatchRule, Part, batch_rule, check_parts, pack
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.machine.machine import Resolved

REHEARSAL = "the trial run"
"""What notes call a run that only tries something out."""
_PACKAGES = ("kit", "torch", "lightning", "zarr", "fsspec", "gcsfs", "numpy", "pydantic", "cloudpickle")


def prepare(
    module: object, data: object, config: object, batch_size: int | None = None,
    profile: Mapping[str, str] | None = None, job: str | None = None, confined: str = "",
) -> RunPaths:  # fmt: skip
    """A complete run directory for this trial.

    Args:
        module: As `kit.fit` takes it.
        data: As `kit.fit` takes it.
        config: A Config.
        batch_size: Samples per batch on each device, instead of what data of the caller's own makes.
        profile: Which profiler looks on (`pass`) and where it writes (`folder`); None for none.
        job: What the ranks do, by the name it is registered under; None for a fit.
        confined: What notes call a run that changes no file of the user's; empty for one that trains as asked.

    Its GPUs are claimed for it: whoever starts it hands them to the supervisor.

    Raises:
        ConfigError, HardwareError, StoreError: see the module's first lines.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"fit takes a Config, got {type(config).__name__}; call fit(config) or fit(module, data, config)"
        )
    check_codecarbon(config)
    module_part, data_part = Part.of(module), Part.of(data)
    check_targets(module_part, data_part, config)
    check_parts(module_part, data_part, config)
    rule = batch_rule(data_part, config) if batch_size is None and job is None else None
    if rule is not None:
        rule.warn(stacklevel=4)
    taken = take_devices(config)
    try:
        asked = {"batch_size": batch_size, "profile": profile, "job": job, "batch": asdict(rule) if rule else None}
        given = {name: value for name, value in asked.items() if value is not None}
        given |= {"confined": confined} if confined else {}
        return _write(module_part, data_part, config, taken, given)
    except BaseException:
        release(taken.claims)
        raise


def _write(module: Part, data: Part, config: Config, taken: Taken, asked: dict[str, Any]) -> RunPaths:
    kind = "dataset" if data.is_dataset else data.kind
    given = {"module": module.kind, "data": kind, "module_identity": module.identity, "data_identity": data.identity}
    paths = _fill(pack(module, data), given, config, taken, asked)
    _warn_if_large(paths, paths.payload.stat().st_size)
    return paths


def _fill(payload: bytes, given: Mapping[str, str], config: Config, taken: Taken, asked: Mapping[str, Any]) -> RunPaths:
    predicted = _check_own_data(config, taken.resolved.world_size) if given["data"] == "default" else {}
    paths = RunPaths.create(config)
    found = {
        "payload_bytes": len(payload),
        "predicted": predicted,
        "device_used_bytes": list(taken.used_bytes),
        "claims": [str(file) for file in taken.claims],
        "hardware": dict(taken.hardware),
        "given": given,
    }
    write_run(paths, config.to_yaml(), payload, {**environment_of(taken.resolved), **found, **asked})
    rule = BatchRule.of_environment(asked)
    if rule is not None and rule.is_worth_a_warning:
        _tell(paths, rule.note)
    return paths


def again(earlier: RunPaths, config: Config, trust: bool = False) -> RunPaths:
    """A run directory to try out what `earlier` ran with another config: module and data are taken as they were sent.

    Args:
        earlier: What is run again.
        config: What to run it with.
        trust: Run it also when this user did not write it here.

    Raises:
        ConfigError, HardwareError, StoreError: see the module's first lines.
        ForeignRunError: when this user did not write it here.
        TrialError: when module and data are no longer there.
    """
    contents = contents_to_run(earlier, trust)
    payload, before = contents.payload, contents.environment
    given = before.get("given", {"module": "path", "data": "path"})
    asked = {name: before[name] for name in ("batch_size",) if name in before}
    rule = BatchRule.of_environment(before)
    if rule is not None:
        size = config.loader.batch_size
        asked["batch"] = asdict(replace(rule, asked=size, size=size if rule.by_config else rule.size))
    taken = take_devices(config)
    try:
        return _fill(payload, given, config, taken, {**asked, "confined": REHEARSAL})
    except BaseException:
        release(taken.claims)
        raise


def check_targets(module: Part, data: Part, config: Config) -> None:
    """Refuse import paths that lead nowhere.

    Raises:
        TargetError: with what is there instead.
    """
    from kit.targets import find_target

    if module.kind in ("default", "path"):
        find_target(config.model.target if module.kind == "default" else module.value)
    if data.kind == "path":
        find_target(data.value)


def _check_own_data(config: Config, world_size: int) -> dict[str, float]:
    """The ranks are other processes: they must be able to open the store, and each batch must fit it.

    Returns:
        What reading it should cost, kept with the run before it is measured.
    """
    from kit.data.build.layout import predict_reading
    from kit.data.dataset import open_dataset
    from kit.data.sampling import sample_plan
    from kit.data.stores.url import is_shared
    from kit.data.stream.engine import Engine
    from kit.data.stream.memory import refuse_too_little

    if not is_shared(config.data.url):
        message = (
            f"{config.data.url} lives in this process only, and a trial runs in others; build to a folder or a bucket"
        )
        raise ConfigError([Problem("data.url", message)])
    dataset = open_dataset(config)
    plan = sample_plan(config, dataset, world_size)
    batch_bytes = plan.batch_bytes(len(dataset.select(config.data.variables)))
    refuse_too_little(config.loader, batch_bytes, world_size)
    Engine(dataset, config.data.variables, standardize=config.data.standardize)  # opens nothing, refuses what it cannot
    return predict_reading(config, dataset)


def environment_of(resolved: Resolved) -> dict[str, Any]:
    """What ranks are told of the kernel and of what `auto` is."""
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "platform": platform.platform(),
        "machine": machine(),
        "folder": os.getcwd(),  # noqa: PTH109 - text, as the ranks need it
        "sys_path": [os.path.abspath(entry) for entry in sys.path],  # noqa: PTH100 - an empty entry is the folder
        "devices": list(resolved.devices),
        "world_size": resolved.world_size,
        "accelerator": resolved.accelerator,
        "precision": resolved.precision,
        "reasons": list(resolved.reasons),
        "threads_per_rank": resolved.threads_per_rank,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Of the packages that decide what a run does."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_run(paths: RunPaths, config: str, payload: bytes, environment: dict[str, Any]) -> None:
    """Fill a new run directory with what ranks read; `config` is YAML.

    Raises:
        ConfigError: when it cannot be written; the directory is gone then.
    """
    told = json.dumps(environment, indent=2)
    with paths.whole_or_gone(len(config) + len(payload) + len(told)):
        paths.config.write_text(config, encoding="utf-8")
        paths.payload.write_bytes(payload)
        paths.environment.write_text(told)
        Control.create(paths.control)
        sign(paths)


def _warn_if_large(paths: RunPaths, payload_bytes: int) -> None:
    if payload_bytes <= LARGE_BYTES:
        return
    message = (
        f"module and data are {format_bytes(payload_bytes)} when sent to the ranks, probably weights or an array they "
        "hold; give a class or a function that makes them, so that they are made in the ranks"
    )
    _tell(paths, message, payload_bytes=payload_bytes)
    warnings.warn(message, KitWarning, stacklevel=4)


def _tell(paths: RunPaths, message: str, **fields: Any) -> None:
    """Put a warning into the run, before any rank."""
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


def take_devices(config: Config) -> Taken:
    """Choose and claim.

    Raises:
        HardwareError: as `resolve_devices` does, and when kit would have to choose a claimed GPU.
    """
    machine = hardware()
    resolved = resolve_devices(config, machine)
    if not resolved.devices:
        return Taken(resolved=resolved, used_bytes=(), claims=(), hardware=_facts(machine, ()))
    with choosing() as desk:
        machine = with_claims(machine, desk.claims)
        resolved = resolve_devices(config, machine)
        gpus = [next(gpu for gpu in machine.gpus if gpu.uuid == uuid) for uuid in resolved.devices]
        shared = [gpu for gpu in gpus if gpu.claimed]
        if shared and _is_chosen_by_kit(config):
            raise HardwareError(_why_refused(config, machine, shared))
        claimed = desk.take(resolved.devices, config.name)
    if shared:
        warnings.warn(f"{_named(machine, shared)}; the trials share it", KitWarning, stacklevel=4)
    used_bytes = tuple(gpu.total_bytes - gpu.free_bytes for gpu in gpus)
    return Taken(resolved=resolved, used_bytes=used_bytes, claims=tuple(claimed), hardware=_facts(machine, gpus))


def _facts(machine: Machine, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """The machine and the first of these GPUs, with the memory of the smallest."""
    return {
        "device": gpus[0].name if gpus else "CPU",
        "cpu": cpu_name(),
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "device_memory_bytes": min((gpu.total_bytes for gpu in gpus), default=None),
    }


def _is_chosen_by_kit(config: Config) -> bool:
    devices = config.hardware.devices
    return not isinstance(devices, tuple) and devices != -1


def _why_refused(config: Config, machine: Machine, shared: Sequence[Gpu]) -> str:
    free = sum(not gpu.claimed for gpu in machine.gpus)
    return (
        f"hardware.devices is {config.hardware.devices}, but {free} of {len(machine.gpus)} GPUs are unclaimed: "
        f"{_named(machine, shared)}; wait for that trial or stop it, or share on purpose with devices: "
        f"[{machine.gpus.index(shared[0])}]"
    )


def _named(machine: Machine, gpus: Sequence[Gpu]) -> str:
    return "; ".join(f"GPU {machine.gpus.index(gpu)} is claimed by {gpu.claimed}" for gpu in gpus)


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
