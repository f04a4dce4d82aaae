"""What calls cost on this machine: a table that is measured once, remembered, and grows with what is asked of it.

It is kept below the folder of the runs, by device, threads and the versions of torch and Lightning. A table starts with
the calls of a few small modules and the cost of the host (about a minute). A step whose calls are not in it has those
timed that weigh most, for some seconds. All of that runs in a process of its own, never in the kernel.

What was taken while other programs used the cores is not kept, and says so (`busy_cores`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from kit.config import Config
from kit.errors import KitError
from kit.json_text import read_json, write_json
from kit.machine.claims import release
from kit.machine.machine import Resolved, hardware
from kit.machine.processes import machine
from kit.memory.replay.calls import OperatorCall
from kit.speed.cost_table import CostTable
from kit.speed.operators import StepOperators
from kit.trial import scratch
from kit.trial.directory import RunPaths, runs_folder
from kit.trial.submit import environment_of, take_devices, versions, write_run
from kit.trial.trial import ENDED, Trial

BUSY_CORES = 0.3
"""Cores that others may use before a measurement is not kept."""
HOST_LIMIT_SECONDS, TICK_SECONDS = 240.0, 0.02
_LEAST_SHARE = 0.002
_PREFIX = "kit-calls-"


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A table, and how it was taken."""

    table: CostTable
    seconds: float
    """Spent on measuring now."""
    busy_cores: float
    """That others used meanwhile."""

    @property
    def quiet(self) -> bool:
        return self.busy_cores <= BUSY_CORES


def table_here(
    config: Config, step: StepOperators | None = None, *, ranks: int = 1, seconds: float = 10.0, again: bool = False
) -> MeasuredTable:
    """The costs on this machine's device, with those of a step's calls that weigh most.

    Args:
        config: Names the device and its threads.
        step: The step that is asked about.
        ranks: That share the cores of a CPU.
        seconds: To spend on its calls; 0 measures nothing that is not known.
        again: Measure all anew.

    Raises:
        HardwareError: for devices that are not there.
        TrialError: when the measuring process fails.
    """
    began = time.monotonic()
    taken = take_devices(_of_one(config, ranks))
    try:
        resolved = taken.resolved
        path = _path(config, resolved)
        known = None if again else _read(path)
        busy = 0.0
        if known is None:
            known, busy = _measured(config, resolved, CostTable(_name(resolved), {}), (), 0.0, host=True)
            if busy <= BUSY_CORES:
                _write(path, known)
        missing = [] if step is None or seconds <= 0 else _missing(step, known)
        if missing:
            known, others = _measured(config, resolved, known, missing, seconds, host=False)
            busy = max(busy, others)
            if busy <= BUSY_CORES:
                _write(path, known)
    finally:
        release(taken.claims)
    return MeasuredTable(known, time.monotonic() - began, busy)


def table_known(config: Config, ranks: int = 1) -> CostTable | None:
    """What was measured here before, without a process; None where nothing was, or the devices are not here."""
    from kit.machine.machine import resolve_devices

    with contextlib.suppress(KitError):
        return _read(_path(config, resolve_devices(_of_one(config, ranks), hardware())))
    return None


def _of_one(config: Config, ranks: int) -> Config:
    """The config of one device, with the threads that a rank of several would have."""
    threads = config.hardware.threads_per_rank or (0 if ranks == 1 else max(1, hardware().cores // ranks))
    one = {"hardware.strategy": "none", "hardware.devices": 1, "hardware.threads_per_rank": threads}
    return config.replace(one)


def _missing(step: StepOperators, table: CostTable) -> list[OperatorCall]:
    """Calls that were never measured and weigh something, the heaviest first."""
    costs = [table.cost(call, work) for call, work in zip(step.calls, step.call_work, strict=True)]
    spent = [cost.seconds * count for cost, count in zip(costs, step.counts.tolist(), strict=True)]
    least = _LEAST_SHARE * sum(spent)
    places = sorted(range(len(spent)), key=lambda place: -spent[place])
    return [
        step.calls[place] for place in places
        if step.calls[place] not in table.measured and step.call_work[place].kind not in ("view", "communication")
        and spent[place] * (4.0 if costs[place].source != "near" else 1.0) > least
    ]  # fmt: skip


def _name(resolved: Resolved) -> str:
    if resolved.accelerator == "cpu":
        return f"this CPU with {resolved.threads_per_rank} thread{'s' * (resolved.threads_per_rank > 1)}"
    return next(gpu.name for gpu in hardware().gpus if gpu.uuid == resolved.devices[0])


def _path(config: Config, resolved: Resolved) -> Path:
    found = {name: version for name, version in versions().items() if name in ("torch", "lightning")}
    what = [_name(resolved), machine().get("host"), resolved.threads_per_rank, found, _FORMAT]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return runs_folder(config.trial.folder) / ".calls" / f"{key}.json"


_FORMAT = 1


def _read(path: Path) -> CostTable | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _parsed(path, path.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, changed: int) -> CostTable:  # noqa: ARG001
    return CostTable.of(read_json(path.read_bytes()))


def _write(path: Path, table: CostTable) -> None:
    with contextlib.suppress(OSError):
        write_json(path, table.to_json())


def _measured(
    config: Config, resolved: Resolved, table: CostTable, calls: Sequence[OperatorCall], seconds: float, *, host: bool
) -> tuple[CostTable, float]:
    """The table with these calls and, where asked, the cost of the host; and the cores that others used."""
    limit = (HOST_LIMIT_SECONDS if host else 0.0) + 2 * seconds + 60.0
    quick = config.replace({"trial.timeout_seconds": limit, "trial.stall_seconds": limit, "trial.start": "warm"})
    paths = RunPaths(scratch.make(_PREFIX))
    try:
        paths.marker.touch()
        task = {"job": "time_calls", "timing": {"seconds": seconds, "host": host}, "removed": "when lost"}
        payload = {"calls": [call.to_json() for call in calls], "cells": {}}
        write_run(paths, json.dumps(quick.values()), cloudpickle.dumps(payload), {**environment_of(resolved), **task})
        trial = Trial(paths, quick)
        trial.submit()
        try:
            while trial.poll() not in ENDED:
                time.sleep(TICK_SECONDS)
        except BaseException:
            trial.kill()
            raise
        if trial.event("calls_timed") is None:
            raise trial.failure()
        found = read_json((paths.directory / "calls.json").read_bytes())
    finally:
        scratch.remove_folder(paths.directory)
    table = table.with_calls({OperatorCall.of(call): float(spent) for call, spent in found["calls"]})
    if host:
        costs: dict[str, Any] = found["host"]
        table = dataclasses.replace(
            table, call_seconds=costs["call"], byte_seconds=costs["byte"], step_seconds=costs["batch"],
            asynchronous=resolved.accelerator == "gpu",
        )  # fmt: skip
    return table, float(found["others"])
