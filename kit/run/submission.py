"""From what the caller gave to a run directory that a supervisor can start: every check comes before any process.

Refused here, each in one sentence: a model that cannot be found or made, devices that are not there, a store that the
ranks could not read, a batch larger than the data, an object that cannot be pickled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kit.claims import release
from kit.config import Config
from kit.errors import ConfigError, KitWarning, Problem
from kit.events import SUPERVISOR, EventWriter
from kit.processes import machine
from kit.run.batch_rule import BatchRule, batch_rule
from kit.run.carbon_check import check_codecarbon
from kit.run.control import Control
from kit.run.devices import Taken, take_devices
from kit.run.paths import RunPaths
from kit.run.payload import LARGE_BYTES, Part, check_parts, pack
from kit.run.signing import contents_to_run, sign
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.machine import Resolved

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
    from kit.data.dataset import open_dataset
    from kit.data.engine import Engine
    from kit.data.reading import predict_reading
    from kit.data.sampling import sample_plan
    from kit.data.shared_memory import refuse_too_little
    from kit.data.stores import is_shared

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
