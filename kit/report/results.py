"""Results: every trial as one flat row, newest first, with what was predicted beside what was measured and their ratio.

Rows are plain dicts of text, numbers and None; bytes, seconds and fractions in base units, formatted only for display.
Averages leave the warm-up steps out. A ratio is measured / predicted: 1 is a perfect prediction, 2 is twice as much as
foreseen. Only run directories are read, and in them only YAML and JSON: no pickle is ever opened. A run that cannot be
read is a row that says so, not an error. Text that a spreadsheet would take for a formula is quoted in CSV.
"""

from __future__ import annotations

import csv
import datetime
import html
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from kit.errors import KitError
from kit.events import Event
from kit.report import results_table
from kit.report.trace import trace_of
from kit.run.memory.residuals import compared, ratio
from kit.run.paths import RunPaths, find_runs, runs_folder
from kit.run.trial import Trial
from kit.tables import FRAME

Row = dict[str, Any]
PREDICTED = ("device_allocated_bytes", "device_reserved_bytes", "requests_per_sample", "bytes_per_sample")
"""What stands as `_predicted`, `_measured` and `_ratio`. Device bytes are the peak of the rank that needed most; on the
CPU, of its first two optimizer steps."""
READ = ("requests", "retries", "bytes_read", "cache_hits", "cache_misses", "read_cache_hits", "read_cache_misses")
"""What the loaders of all ranks read, by the names of `kit.data.counters`."""
COLUMNS = (
    "run", "name", "started", "state", "cause", "message", "strategy", "accelerator", "world_size", "precision",
    "batch_size", "global_batch_size", "steps", "samples_per_second", "data_wait_fraction", "host_rss_peak_bytes",
    "device_allocated_peak_bytes", "device_reserved_peak_bytes", *READ,
    *(f"{quantity}_{part}" for quantity in PREDICTED for part in ("predicted", "measured", "ratio")),
    "fingerprint", "run_directory",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def results(folder: str | Path = "runs") -> Results:
    """One row per run directory in `folder`, newest first; a relative folder starts at the project folder."""
    rows = [row_of(paths) for paths in find_runs(folder)]
    return Results(reversed(rows), where=str(runs_folder(folder)))


class Results(Sequence[Row]):
    """Rows of trials: index or iterate them as dicts, show them as a table, write them to a file."""

    def __init__(self, rows: Iterable[Row], where: str = "") -> None:
        self._rows = tuple(rows)
        self._where = where

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Row | Results:
        return Results(self._rows[index], self._where) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    # -- files

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV; written to `path` when given."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _csv_cell(row[name]) for name in COLUMNS} for row in self)
        return _written(stream.getvalue(), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as a JSON list of objects; written to `path` when given."""
        return _written(json.dumps(list(self), indent=2, allow_nan=False, ensure_ascii=False) + "\n", path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The table shown, as Markdown; written to `path` when given."""
        return _written(results_table.as_markdown(self), path)

    # -- displays

    def __repr__(self) -> str:
        return results_table.as_text(self) if self else self._empty

    def _repr_html_(self) -> str:
        return results_table.as_html(self) if self else f'<div style="{FRAME}">{html.escape(self._empty)}</div>'

    @property
    def _empty(self) -> str:
        return f"No trials yet in {self._where or 'this selection'}; kit.fit(config) makes one."


# -- rows


def row_of(paths: RunPaths) -> Row:
    """The row of one run; a run that cannot be read is a row that says so."""
    row: Row = {**dict.fromkeys(COLUMNS), "run": paths.directory.name, "run_directory": str(paths.directory)}
    try:
        trial = Trial.open(paths.directory)
        row.update(_facts(trial))
        row.update(_measured(trial))
        row.update(_compared(trial))
    except (KitError, OSError, ValueError, KeyError, TypeError) as error:
        row.update(state="UNREADABLE", message=f"{type(error).__name__}: {error}".splitlines()[0])
    return {name: _plain(value) for name, value in row.items()}


def _facts(trial: Trial) -> Row:
    config, resolved = trial.config, trial.environment
    started = trial.event("fit_started") or {}
    world_size = int(started.get("world_size") or resolved.get("world_size") or 1)
    return {
        "name": config.name,
        "started": _local_time(trial.paths),
        "state": trial.state,
        "cause": trial.cause,
        "message": trial.message or None,
        "strategy": config.hardware.strategy,
        "accelerator": started.get("accelerator") or resolved.get("accelerator"),
        "world_size": world_size,
        "precision": started.get("precision") or resolved.get("precision") or config.hardware.precision,
        "batch_size": config.loader.batch_size,
        "global_batch_size": config.loader.batch_size * world_size * config.levers.accumulate_grad_batches,
        "fingerprint": config.fingerprint,
    }


def _measured(trial: Trial) -> Row:
    trace = trace_of([*trial.events, *trial.steps], trial.config)
    memory, throughput = trace.memory(), trace.throughput()
    return {
        "steps": trace.last_step,
        "samples_per_second": throughput.mean_samples_per_second,
        "data_wait_fraction": throughput.data_wait_fraction,
        "host_rss_peak_bytes": memory.peak("host_rss_bytes"),
        "device_allocated_peak_bytes": memory.peak("device_allocated_bytes"),
        "device_reserved_peak_bytes": memory.peak("device_reserved_bytes"),
    }


def _read(events: Iterable[Event]) -> dict[str, int]:
    """What the loaders of all ranks counted; empty when they do not count."""
    counts = [event.get("counters") or {} for event in events if event["kind"] == "fit_ended"]
    names = {name for count in counts for name in count}
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


def _per_sample(read: dict[str, int]) -> dict[str, float]:
    """Per sample that the loaders made."""
    names = {"requests_per_sample": "requests", "bytes_per_sample": "bytes_read"}
    if not read.get("samples"):
        return {}
    return {quantity: read.get(name, 0) / read["samples"] for quantity, name in names.items()}


def _compared(trial: Trial) -> Row:
    """What was predicted for the trial, beside what was measured in it."""
    read = _read(trial.events)
    measured = _per_sample(read)
    predicted = trial.environment.get("predicted") or {}
    row = {**_memory(trial.paths), **{name: read.get(name) for name in READ}}
    for quantity in ("requests_per_sample", "bytes_per_sample"):
        row |= _triple(quantity, predicted.get(quantity), measured.get(quantity))
    return row


def _memory(paths: RunPaths) -> Row:
    """A prediction without activations has no ratio: it is a lower bound."""
    run = compared(paths)
    if run is None:
        return {}
    row = _triple("device_allocated_bytes", run.predicted_allocated_bytes, run.measured_allocated_bytes)
    row |= _triple("device_reserved_bytes", run.predicted_reserved_bytes, run.measured_reserved_bytes)
    return {**row, "device_allocated_bytes_ratio": run.ratio, "device_reserved_bytes_ratio": run.reserved_ratio}


def _triple(quantity: str, predicted: float | None, measured: float | None) -> Row:
    return {
        f"{quantity}_predicted": predicted,
        f"{quantity}_measured": measured,
        f"{quantity}_ratio": ratio(predicted, measured),
    }


def _local_time(paths: RunPaths) -> str:
    created = datetime.datetime.fromtimestamp(paths.marker.stat().st_mtime).astimezone()
    return created.isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """JSON has no NaN: what was not measured is None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv_cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
