"""How far predictions of memory were from what was measured, by machine and device.

A ratio is measured / predicted. Only JSON is read. A run that cannot be read is skipped here and shown as such by
`kit.results()`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.arguments import checks_arguments
from kit.json_text import read_json
from kit.machine.processes import machine
from kit.memory.replay.estimate import Residuals
from kit.tables import ResultRows, html_table, text_table
from kit.trial.directory import RunPaths, find_runs
from kit.units import format_bytes

MEASURED = "memory_measured"
_COLUMNS = ("machine", "device", "runs", "median ratio", "worst ratio", "outside the allocator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run: what was predicted for a rank and what the rank that needed most has measured. None is not known."""

    run: str
    machine: str
    device: str
    """The GPU's name, or `CPU`."""
    predicted_allocated_bytes: int | None
    predicted_reserved_bytes: int | None
    measured_allocated_bytes: int | None
    measured_reserved_bytes: int | None
    outside_bytes: int | None
    """Measured outside the allocator."""
    module: str
    """The name of its class."""
    strategy: str
    complete: bool
    """False when the prediction lacks the activations."""

    @property
    def ratio(self) -> float | None:
        """measured / predicted allocated bytes."""
        return ratio(self.predicted_allocated_bytes, self.measured_allocated_bytes) if self.complete else None

    @property
    def reserved_ratio(self) -> float | None:
        """measured / predicted reserved bytes."""
        return ratio(self.predicted_reserved_bytes, self.measured_reserved_bytes) if self.complete else None


def ratio(predicted: float | None, measured: float | None) -> float | None:
    """measured / predicted; None where either is missing."""
    return measured / predicted if predicted and measured is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """All runs of one device on one machine."""

    machine: str
    device: str
    count: int
    median_ratio: float
    worst_ratio: float
    """The ratio furthest from 1."""
    highest_ratio: float
    outside_bytes: tuple[int, int] | None
    """(lowest, highest) measured outside the allocator; None where it could not be measured."""
    highest: tuple[tuple[str, str, float, str], ...]
    """As `Residuals` has it."""

    @classmethod
    def of(cls, runs: Sequence[Compared]) -> Residual:
        known = [(run.ratio, run) for run in runs if run.ratio is not None]
        ratios = [found for found, _ in known]
        highest = {(run.module, run.strategy): (found, run.run) for found, run in sorted(known, key=lambda one: one[0])}
        outside = [run.outside_bytes for run in runs if run.outside_bytes is not None]
        return cls(
            machine=runs[0].machine, device=runs[0].device, count=len(ratios), median_ratio=statistics.median(ratios),
            worst_ratio=max(ratios, key=lambda found: abs(found - 1)), highest_ratio=max(ratios),
            outside_bytes=(min(outside), max(outside)) if outside else None,
            highest=tuple((*alike, *found) for alike, found in highest.items()),
        )  # fmt: skip

    @property
    def for_estimates(self) -> Residuals:
        """What an estimate takes from it."""
        return Residuals(count=self.count, outside_bytes=self.outside_bytes, highest=self.highest)


class ResidualTable(ResultRows[Residual]):
    """One row per device of each machine."""

    def __repr__(self) -> str:
        return text_table(_COLUMNS, self._cells) if self else _EMPTY

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._cells, caption="measured / predicted allocated bytes")

    @property
    def _cells(self) -> list[list[str]]:
        return [
            [row.machine, row.device, str(row.count), f"{row.median_ratio:.3f}", f"{row.worst_ratio:.3f}",
             " to ".join(map(format_bytes, row.outside_bytes)) if row.outside_bytes else "–"]
            for row in self
        ]  # fmt: skip


_EMPTY = "No run holds both a prediction and a measurement of memory yet; kit.fit(config) makes one."


@checks_arguments
def residuals(folder: str | Path = "runs") -> ResidualTable:
    """How far memory predictions were from measurements so far, by machine and device.

    Every run directory counts that has a measurement and a complete prediction, one with activations. Of several
    ranks the one with the highest peak is compared, since it decides whether a device suffices.

    Args:
        folder: The folder of run directories. A relative one starts at the project folder.

    Returns:
        A table with the number of runs, and mean and spread of measured / predicted.

    Raises:
        ConfigError: when the folder cannot be read. A run that cannot be read is left out.

    Example:
        >>> table = kit.memory.residuals()
    """
    groups: dict[tuple[str, str], list[Compared]] = {}
    for run in _compared_runs(folder):
        groups.setdefault((run.machine, run.device), []).append(run)
    return ResidualTable(Residual.of(runs) for _, runs in sorted(groups.items()))


def residuals_here(folder: str | Path, device: str) -> Residuals | None:
    """What was measured on this machine with that device; None before the first measurement."""
    runs = [run for run in _compared_runs(folder) if (run.machine, run.device) == (machine()["host"], device)]
    return Residual.of(runs).for_estimates if runs else None


def _compared_runs(folder: str | Path) -> Iterator[Compared]:
    for paths in find_runs(folder):
        try:
            run = compared(paths)
        except Exception:  # whatever the files of a run may say: it is no comparison
            continue
        if run is not None and run.ratio is not None:
            yield run


def compared(paths: RunPaths) -> Compared | None:
    """What a run holds of prediction and measurement; None when it holds neither.

    Raises:
        OSError, ValueError, KeyError, TypeError: for files that are not as kit writes them.
    """
    files = [path for path in (paths.prediction, *paths.event_files()) if path.is_file()]
    return _compared(paths, tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@functools.lru_cache(maxsize=512)
def _compared(paths: RunPaths, state: tuple[tuple[int, int], ...]) -> Compared | None:  # noqa: ARG001 - the cache's key
    predicted = read_json(paths.prediction.read_bytes()) if paths.prediction.is_file() else {}
    marks = (b'"kind":"memory_measured"', b'"kind":"fit_started"')
    lines = [line for path in paths.event_files() for line in path.read_bytes().split(b"\n")[:-1]]
    events = [read_json(line) for line in lines if any(mark in line for mark in marks)]
    measured = [event for event in events if event["kind"] == MEASURED]
    if not predicted and not measured:
        return None
    environment = paths.read_environment()
    started: dict[str, Any] = next((event for event in events if event["kind"] == "fit_started"), {})
    return Compared(
        run=paths.directory.name,
        machine=str(environment.get("machine", {}).get("host", "")),
        device=str(started.get("device", "")),
        predicted_allocated_bytes=_number(predicted, "device_allocated_bytes"),
        predicted_reserved_bytes=_number(predicted, "device_reserved_bytes"),
        measured_allocated_bytes=_largest(measured, "device_allocated_bytes"),
        measured_reserved_bytes=_largest(measured, "device_reserved_bytes"),
        outside_bytes=_largest(measured, "outside_bytes"),
        module=str(started.get("module") or "").rpartition(":")[2],
        strategy=str(predicted.get("strategy", "none")),
        complete=bool(predicted.get("complete", False)),
    )


def _number(predicted: dict[str, Any], name: str) -> int | None:
    value = predicted.get(name)
    if value is not None and not isinstance(value, int):
        raise ValueError(f"{name} is {value!r:.60}, no number of bytes; predict it anew")
    return value


def _largest(events: Iterable[dict[str, Any]], field: str) -> int | None:
    return max((int(event[field]) for event in events if event.get(field) is not None), default=None)
