"""From a config (and the trial that won) to a Job: everything left open is settled here, each with its reason.

A trial's own answers count where it ran with the same `hardware`: what a file runs with is what the trial ran with.
Else this machine is asked, as `kit.fit` would. A config that leaves nothing open about its devices needs no such
machine. Chunks are those of the store as it is, or of its plan while it is not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kit.config import Config
from kit.errors import ConfigError, HardwareError, KitError, Problem
from kit.machine import hardware, resolve_devices
from kit.report.commit_parts import data_entry, module_entry, module_target
from kit.report.committed_yaml import Job
from kit.run.batch_rule import batch_rule
from kit.run.calibration.result import Calibration, saved_path
from kit.run.payload import Part
from kit.run.source_traits import is_manual, shards_itself, takes_config
from kit.run.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

_OF_NO_RUN = ("trial.", "commit.", "checkpoint.", "profiler.", "name")
"""Settings that may differ from the trial's without another number coming out."""


def make_job(config: Config, trial: Trial | None = None, module: Any = None, data: Any = None) -> tuple[Job, list[str]]:
    """The job, and what its user should know.

    Raises:
        ConfigError: for what a file cannot say, each under its field.
        HardwareError: for devices left open that are not here.
    """
    _check_given(trial, module, data)
    target = module_target(module, config)
    model, source = module_entry(target, config), data_entry(data, config)
    accelerator, devices, precision, reasons = _devices(config, trial)
    _check_nodes(config)
    resolved, notes = _settings_of(source["class_path"], config, trial, reasons)
    job = Job(
        config=config, accelerator=accelerator, devices=devices, precision=precision, model=model, data=source,
        shards_itself=shards_itself(target), manual=is_manual(target), resolved=resolved, reasons=reasons,
        batch_size=_batch_size(config, trial, data),
    )  # fmt: skip
    return job, [*_differences(config, trial), *notes]


def _batch_size(config: Config, trial: Trial | None, data: Any) -> int | None:
    """What a trial was given, else what is known of the data; None where only its loader knows."""
    rule = batch_rule(Part.of(data), config)
    return rule.size if rule.by_config or trial is None else trial.config.loader.batch_size


def _check_given(trial: Trial | None, module: Any, data: Any) -> None:
    """A trial of the caller's own parts does not tell which they were."""
    given = trial.environment.get("given", {}) if trial is not None else {}
    for name, part in (("module", module), ("data", data)):
        if given.get(name, "default") != "default" and part is None:
            message = f"the trial was given a {name} of its own; give the same: kit.commit(config, trial, {name}=...)"
            raise ConfigError([Problem(name, message)])


def _check_nodes(config: Config) -> None:
    if config.commit.nodes > 1 and config.hardware.strategy == "none":
        message = f"{config.commit.nodes} nodes are more than one device; set hardware.strategy to ddp or fsdp"
        raise ConfigError([Problem("commit.nodes", message)])


def _devices(config: Config, trial: Trial | None) -> tuple[Literal["cpu", "gpu"], int, str, dict[str, str]]:
    """Accelerator, devices of a node, precision, and reasons."""
    if trial is not None and trial.config.hardware == config.hardware:
        known = trial.environment
        found = _sorted_reasons(known["reasons"], known["precision"])
        return known["accelerator"], int(known["world_size"]), str(known["precision"]), found
    try:
        here = resolve_devices(config, hardware())
    except HardwareError as error:
        return _as_asked(config, error)
    return here.accelerator, here.world_size, here.precision, _sorted_reasons(here.reasons, here.precision)


def _as_asked(config: Config, error: HardwareError) -> tuple[Literal["cpu", "gpu"], int, str, dict[str, str]]:
    """What a config says outright, for a machine that is not this one."""
    asked = config.hardware
    count = len(asked.devices) if isinstance(asked.devices, tuple) else asked.devices
    if asked.accelerator == "auto" or not isinstance(count, int) or count < 1 or asked.precision == "auto":
        raise HardwareError(
            f"{error}; to commit for another machine, say what it has: hardware.accelerator, a number of "
            "hardware.devices and hardware.precision"
        ) from None
    reason = "as the config says; this machine was not asked"
    return asked.accelerator, count, asked.precision, {"hardware.devices": reason}


def _sorted_reasons(reasons: Sequence[str], precision: str) -> dict[str, str]:
    of_precision = [reason for reason in reasons if reason.startswith(precision)]
    rest = [reason for reason in reasons if reason not in of_precision]
    return {"hardware.precision": "; ".join(of_precision), "hardware.devices": "; ".join(rest)}


# -- what the data left open


def _settings_of(
    data: str, config: Config, trial: Trial | None, reasons: dict[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """What was open of the data of that class, and what its user should know."""
    if data == "kit.train.CommittedData":
        return _open_settings(config, trial, reasons)
    changes, headline = _of_trial(config, trial)
    if takes_config(":".join(data.rsplit(".", 1))):
        reasons.update(dict.fromkeys(list(changes)[:1], headline))
        return changes, []
    return {}, _foreign_notes(changes)


def _open_settings(config: Config, trial: Trial | None, reasons: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    changes, reason, notes = _calibrated(config, trial)
    reasons.update(dict.fromkeys(list(changes)[:1], reason))
    try:
        layout, why = _layout(config)
    except KitError as error:
        return changes, [*notes, f"the layout of the store was left open: {error}"]
    reasons.update(dict.fromkeys(list(layout)[:1], why))
    return {**changes, **layout}, notes


def _calibrated(config: Config, trial: Trial | None) -> tuple[dict[str, Any], str, list[str]]:
    """The changes of the loader that were measured, with the reason; and what is missing."""
    if not config.calibration.enabled:
        return {}, "", []
    changes, headline = _of_trial(config, trial)
    if headline:
        return changes, headline, []
    try:
        found = Calibration.load(saved_path(config))
    except KitError:
        found = None
    if found is None or found.chosen is None:
        return {}, "", ["the loader was not calibrated: its settings are those of the config (kit.calibrate measures)"]
    return dict(found.chosen.changes), found.headline, []


def _of_trial(config: Config, trial: Trial | None) -> tuple[dict[str, Any], str]:
    """The changes of the loader that a trial ran with, and how they were found; empty where there were none."""
    event = trial.event("calibrated") if trial is not None and config.calibration.enabled else None
    return ({}, "") if event is None else (dict(event["changes"]), str(event["headline"]))


def _layout(config: Config) -> tuple[dict[str, Any], str]:
    """Chunk and shard where they are open: of the store, or of the plan for it."""
    from kit.data.dataset import open_dataset
    from kit.data.layout import plan_chunks
    from kit.data.stores import redact

    open_fields = [name for name in ("chunk", "shard") if getattr(config.chunking, name) == "auto"]
    if not open_fields:
        return {}, ""
    try:
        array = open_dataset(config).select(config.data.variables)[0]
        dims, chunk, shard, why = array.dims, array.chunk, array.shard, f"as {redact(config.data.url)} is cut"
    except KitError:
        if config.data.source is None:
            raise
        plan = plan_chunks(config)
        dims, chunk, shard, why = plan.dims, plan.chunk, plan.shard, "; ".join(plan.reasons)
    sizes = {
        "chunk": dict(zip(dims, chunk, strict=True)),
        "shard": dict(zip(dims, shard, strict=True)) if shard else "none",
    }
    return {f"chunking.{name}": sizes[name] for name in open_fields}, why


# -- what to know


def _foreign_notes(changes: dict[str, Any]) -> list[str]:
    """Data of the user's own is made as its class makes it, without the settings that a trial gave its loader."""
    found = ", ".join(f"{path.partition('.')[2]}={value}" for path, value in changes.items())
    return [f"the trial's loader ran with {found}; set them in your data module"] if found else []


def _differences(config: Config, trial: Trial | None) -> list[str]:
    if trial is None:
        return ["no trial was given: nothing in this file was measured"]
    ended = [] if trial.state == "COMPLETE" else [f"the trial is {trial.state}: {trial.message}"]
    changed = [
        f"{path} was {before!r} in the trial and is {now!r} here"
        for path, (before, now) in trial.config.diff(config).items()
        if not path.startswith(_OF_NO_RUN) and now != trial.asked.get(path)  # asked again, it comes out the same again
    ]
    return [*ended, *changed]
