"""What calls cost on this machine: a table that is measured once, remembered, and grows with what is asked of it.

It is kept below the folder of the runs, by device, threads and the versions of torch and Lightning. A table starts with
the calls of a few small modules and the cost of the host (about a minute). A step whose calls are not in it has those
timed that weigh most, among all the others, for some seconds. All of that runs in a process of its own, never in the
kernel.

Ranks that train together slow each other, so for several of them the calls are timed by as many at once (on a CPU by no
more than it has cores for, and slowed in proportion), in a table of their own. It starts as that of one rank, slowed as
some heavy calls were, until these ranks have made them, and has what joins the ranks. Where there are more ranks than
cores, that is measured among all.

What was taken while other programs or a neighbour on a shared host used the cores is not written, and says so
(`busy_cores`). Until something better is known it is what this kernel sets beside its trials, which share them too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from kit.config import Config
from kit.errors import HardwareError, KitError, TrialError
from kit.json_text import read_json, write_json
from kit.machine.claims import release
from kit.machine.machine import Resolved, hardware, resolve_devices
from kit.machine.processes import BUSY_CORES, machine
from kit.memory.replay.calls import OperatorCall
from kit.speed.cost_table import CostTable
from kit.speed.links import Link, meeting_seconds
from kit.speed.operators import StepOperators
from kit.tables import WaitingLine
from kit.trial import scratch
from kit.trial.directory import RunPaths, runs_folder
from kit.trial.submit import environment_of, take_devices, versions, write_run
from kit.trial.trial import ENDED, Trial
from kit.units import format_seconds

HOST_LIMIT_SECONDS, TICK_SECONDS = 240.0, 0.02
_LEAST_SHARE = 0.002
_HEAVY_CALLS, _HEAVY_SECONDS = 40, 4.0
_PREFIX = "kit-calls-"
_busy_tables: dict[Path, CostTable] = {}
"""What this kernel measured beside other programs, by the file that it was not written to."""


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A table, and how it was taken."""

    table: CostTable
    seconds: float
    """Spent on measuring now."""

    @property
    def quiet(self) -> bool:
        return self.table.busy_cores <= BUSY_CORES


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
    found = _grown(config, step if ranks == 1 else None, 1, ranks, seconds, again)
    together, turns = _at_once(config, ranks)
    if together > 1:
        with contextlib.suppress(HardwareError):  # fewer GPUs are here than are asked about
            found = _grown(config, step, together, ranks, seconds, again, found)
    if turns > 1:
        found = _joined(config, ranks, found.slowed(turns), again)
    return MeasuredTable(found, time.monotonic() - began)


def calls_here(config: Config, calls: Sequence[OperatorCall], *, seconds: float, again: bool = False) -> MeasuredTable:
    """The table with these calls, of one rank; what they cost the host beside them need not be known.

    Raises:
        HardwareError: for devices that are not there.
        TrialError: when the measuring process fails, or cannot make one of the calls.
    """
    began = time.monotonic()
    taken = take_devices(_of(config, 1, 1))
    try:
        path = _path(config, taken.resolved)
        known = _read(path) if again else _known(path, lambda table: not table.measured.keys() >= set(calls))
        found = known or CostTable(_name(taken.resolved), {}, host_known=False)
        missing = [call for call in calls if again or call not in found.measured]
        if missing:
            found = _measured(config, taken.resolved, found, missing, seconds, host=False, each=True)
            refused = [call.operator for call in missing if call not in found.measured]
            if refused:
                raise TrialError(f"{', '.join(refused)} could not be timed on {found.name}")
            _keep(path, found)
    finally:
        release(taken.claims)
    return MeasuredTable(found, time.monotonic() - began)


def table_known(config: Config, ranks: int = 1) -> CostTable | None:
    """What was measured here before, without a process; None where nothing was, or the devices are not here."""
    with contextlib.suppress(KitError):
        most, turns = _at_once(config, ranks)
        for together in dict.fromkeys((most, 1)):
            with contextlib.suppress(KitError):  # fewer GPUs are here than are asked about
                path = _path(config, resolve_devices(_of(config, together, ranks), hardware()))
                known = _known(path)
                if known is not None and known.host_known:
                    return known if turns == 1 else _joined_before(config, ranks, known.slowed(turns))
    return None


def _grown(
    config: Config, step: StepOperators | None, together: int, ranks: int, seconds: float, again: bool,
    alone: CostTable | None = None,
) -> CostTable:  # fmt: skip
    """The table of so many ranks at once, with a step's calls."""
    config = _of(config, together, ranks)
    taken = take_devices(config)
    try:
        resolved = taken.resolved
        path = _path(config, resolved)
        asked = step if seconds > 0 else None

        def lacks(table: CostTable) -> bool:
            return not table.host_known or (asked is not None and bool(_missing(asked, table)))

        known = None if again else _known(path, lacks)
        if alone is None and (known is None or not known.host_known):
            known = _measured(config, resolved, known or CostTable(_name(resolved), {}), (), 0.0, host=True)
        elif known is None:
            assert alone is not None
            known = _beside(config, resolved, alone)
        if asked is not None and (missing := _missing(asked, known)):
            _keep(path, known)
            quiet = dataclasses.replace(known, busy_cores=0.0)
            new = _measured(config, resolved, quiet, missing, seconds, host=False, order=asked.order)
            if new.busy_cores <= BUSY_CORES < known.busy_cores and (written := _read(path)):
                _write(path, written.with_calls({call: new.measured[call] for call in missing if call in new.measured}))
            known = dataclasses.replace(new, busy_cores=max(new.busy_cores, known.busy_cores))
        _keep(path, known)
    finally:
        release(taken.claims)
    return known


def _beside(config: Config, resolved: Resolved, alone: CostTable) -> CostTable:
    """The table of one rank as several have it: slowed as its heaviest calls are while all of them make those."""
    heavy = sorted(alone.measured, key=lambda call: -alone.measured[call])[:_HEAVY_CALLS]
    empty = dataclasses.replace(alone, measured={}, name=_name(resolved))
    found = _measured(config, resolved, empty, heavy, _HEAVY_SECONDS, host=False)
    slower = statistics.median([spent / alone.measured[call] for call, spent in found.measured.items()] or [1.0])
    slowed = alone.slowed(max(1.0, slower))
    others = dataclasses.replace(slowed, of_one_rank=frozenset(alone.measured)).with_calls(found.measured)
    return dataclasses.replace(others, name=found.name, link=found.link, busy_cores=found.busy_cores)


def _joined(config: Config, ranks: int, slowed: CostTable, again: bool) -> CostTable:
    """The table with what joins more ranks than there are cores, which no fewer of them tell."""
    config = _of(config, ranks, ranks)
    taken = take_devices(config)
    try:
        path = _path(config, taken.resolved)
        known = None if again else _known(path)
        if known is None:
            nothing = CostTable(_name(taken.resolved), {}, host_known=False)
            known = _measured(config, taken.resolved, nothing, (), 0.0, host=False)
            _keep(path, known)
    finally:
        release(taken.claims)
    return dataclasses.replace(slowed, link=known.link, busy_cores=max(slowed.busy_cores, known.busy_cores))


def _joined_before(config: Config, ranks: int, slowed: CostTable) -> CostTable:
    """The same where that was measured before; else the link is as slow as all the rest."""
    path = _path(config, resolve_devices(_of(config, ranks, ranks), hardware()))
    known = _known(path)
    return dataclasses.replace(slowed, link=known.link) if known else slowed


def _known(path: Path, lacks: Callable[[CostTable], bool] = lambda _: True) -> CostTable | None:
    """What was measured before: beside other programs only where the file lacks something."""
    written = _read(path)
    return _busy_tables.get(path, written) if written is None or lacks(written) else written


def _of(config: Config, together: int, ranks: int) -> Config:
    """The config of so many ranks at once, with the threads that each of all ranks would have."""
    threads = config.hardware.threads_per_rank or (0 if ranks == 1 else max(1, hardware().cores // ranks))
    strategy = "none" if together == 1 else "ddp"
    several = {"hardware.strategy": strategy, "hardware.devices": together, "hardware.threads_per_rank": threads}
    return config.replace(several)


def _at_once(config: Config, ranks: int) -> tuple[int, float]:
    """Ranks that time calls together, and how many times as long all takes because more take turns on a CPU's cores.

    Together are as many as a CPU has cores for, but two where there are several.
    """
    one, cores = resolve_devices(_of(config, 1, ranks), hardware()), hardware().cores
    if ranks == 1 or one.accelerator != "cpu":
        return ranks, 1.0
    threads = one.threads_per_rank
    together = max(2, min(ranks, cores // threads))
    return together, max(1.0, ranks * threads / max(cores, together * threads))


def _missing(step: StepOperators, table: CostTable) -> list[OperatorCall]:
    """Calls that were never measured, by as many ranks, and weigh something, the heaviest first."""
    costs = [table.cost(call, work) for call, work in zip(step.calls, step.call_work, strict=True)]
    spent = [cost.seconds * count for cost, count in zip(costs, step.counts.tolist(), strict=True)]
    least = _LEAST_SHARE * sum(spent)
    places = sorted(range(len(spent)), key=lambda place: -spent[place])
    return [
        step.calls[place] for place in places
        if not table.knows(step.calls[place]) and step.call_work[place].kind not in ("view", "communication")
        and spent[place] * (4.0 if costs[place].source != "near" else 1.0) > least
    ]  # fmt: skip


def _name(resolved: Resolved) -> str:
    if resolved.accelerator == "cpu":
        threads = f"{resolved.threads_per_rank} thread{'s' * (resolved.threads_per_rank > 1)}"
        beside = f" in each of {resolved.world_size} ranks" if resolved.world_size > 1 else ""
        return f"this CPU with {threads}{beside}"
    return next(gpu.name for gpu in hardware().gpus if gpu.uuid == resolved.devices[0])


def _path(config: Config, resolved: Resolved) -> Path:
    found = {name: version for name, version in versions().items() if name in ("torch", "lightning")}
    what = [_name(resolved), machine().get("host"), resolved.threads_per_rank, found, _FORMAT]
    what += [resolved.world_size] if resolved.world_size > 1 else []
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return runs_folder(config.trial.folder) / ".calls" / f"{key}.json"


_FORMAT = 7


def _read(path: Path) -> CostTable | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _parsed(path, path.stat().st_mtime_ns)
    return None


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, changed: int) -> CostTable:  # noqa: ARG001
    return CostTable.of(read_json(path.read_bytes()))


def _keep(path: Path, table: CostTable) -> None:
    """In the file; in this kernel alone where other programs may have made it too high."""
    if table.busy_cores > BUSY_CORES:
        _busy_tables[path] = table
        return
    _busy_tables.pop(path, None)
    _write(path, table)


def _write(path: Path, table: CostTable) -> None:
    with contextlib.suppress(OSError):
        write_json(path, table.to_json())


def _measured(
    config: Config, resolved: Resolved, table: CostTable, calls: Sequence[OperatorCall], seconds: float, *, host: bool,
    each: bool = False, order: Sequence[OperatorCall] = (),
) -> CostTable:  # fmt: skip
    """The table with these calls and, where asked, the cost of the host.

    They are timed among all those of a step in its `order`. With `each`, however long that takes; else the first of
    them, until the seconds are over.
    """
    limit = (HOST_LIMIT_SECONDS if host else 0.0) + 2 * seconds + 60.0
    # Page faults come and go with all that was allocated before, so a call is timed without any.
    process = {"trial.timeout_seconds": limit, "trial.stall_seconds": limit, "trial.start": "warm"}
    quick = config.replace({**process, "hardware.keep_freed_memory": True})
    paths = RunPaths(scratch.make(_PREFIX))
    try:
        paths.marker.touch()
        timing = {"seconds": seconds, "host": host, "each": each, "pace_seconds": table.pace_seconds}
        task = {"job": "time_calls", "timing": timing, "removed": "when lost"}
        numbers = {call: number for number, call in enumerate(dict.fromkeys([*order, *calls]))}
        payload = {
            "calls": [call.to_json() for call in numbers], "order": [numbers[call] for call in order or calls],
            "wanted": [numbers[call] for call in calls], "cells": {},
        }  # fmt: skip
        write_run(paths, json.dumps(quick.values()), cloudpickle.dumps(payload), {**environment_of(resolved), **task})
        trial = Trial(paths, quick)
        trial.submit()
        try:
            with WaitingLine(f"it may take {format_seconds(limit)}") as line:
                while trial.poll() not in ENDED:
                    line.show("measuring operators")
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
    slowness = max(table.slowness, float(found["slowness"]))
    table = dataclasses.replace(table, pace_seconds=float(found["pace_seconds"]), slowness=slowness)
    if found["link"]:
        ranks = resolved.world_size
        link = Link(name=f"what joins {ranks} ranks here, measured", measured=True, **found["link"])
        # The fastest counts, as of calls: a moment in which the machine stands still decides otherwise.
        known = [one for one in (link, table.link) if one is not None]
        table = dataclasses.replace(table, link=min(known, key=functools.partial(meeting_seconds, ranks=ranks)))
    if host:
        costs: dict[str, Any] = found["host"]
        table = dataclasses.replace(
            table, backward_call_seconds=costs["backward"], forward_call_seconds=costs["forward"],
            optimizer_call_seconds=costs["optimizer"], step_seconds=costs["batch"],
            checkpoint_call_seconds=costs["checkpoint call"], checkpoint_operator_seconds=costs["checkpoint operator"],
            asynchronous=resolved.accelerator == "gpu", host_known=True,
        )  # fmt: skip
    return dataclasses.replace(table, busy_cores=max(table.busy_cores, float(found["others"])))
