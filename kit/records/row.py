"""The row of one trial: what was asked, predicted and measured, and on what, as plain values of fixed names.

Text, numbers and None; bytes, seconds and fractions in base units. `config` (dotted path -> value) and `versions`
(package -> version) are the two mappings. Averages leave the warm-up steps out. A ratio is measured / predicted: 1 is
a perfect prediction, 2 is twice as much as foreseen. `config` is what ran: its loader settings, the batch among them,
are those that the loader stood at, while `fingerprint` is of what was submitted. No secret enters a row: URLs lose
user, password and query, and arguments that are named like one lose their value.

row.json: the row of a trial that has ended, in its run directory, so that thousands are read in a second.

The file names what it was computed from, each file by its size and time: the row is taken only while all of them are
as they were. So a prediction that arrives after the end, or a file that was changed, is never hidden by an old row, and
a running trial has none. A trial whose kernel was killed has no such file; its row is computed from its events, and
kept then. Where events were deleted to save room, or files can no longer be read, the kept row is all there is, and is
shown. A row file that is damaged counts as none. A run that cannot be read has its row kept too, until one of its
files changes. Rows of another version of kit are read as far as names agree.

What a run directory holds about memory: the estimate made for the trial, and what the allocator did at its start.

Of several ranks the one that needed most is taken, as it decides whether a device suffices. Only JSON and plain arrays
are read.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kit.config import Config
from kit.errors import TrialError
from kit.events import Event
from kit.json_text import read_json
from kit.memory.replay.estimate import MeasuredMemory, MemoryEstimate
from kit.memory.residuals import compared, ratio
from kit.records.trace import trace_of
from kit.trial.directory import RunPaths
from kit.trial.submit import versions
from kit.trial.trial import ENDED, Trial

Row = dict[str, Any]
PREDICTED = ("device_allocated_bytes", "device_reserved_bytes", "requests_per_sample", "bytes_per_sample")
"""What stands as `_predicted`, `_measured` and `_ratio`. Device bytes are the peak of the rank that needed most; on the
CPU, of its first two optimizer steps."""
READ = (
    "requests", "retries", "bytes_read", "cache_hits", "cache_misses", "read_cache_hits", "read_cache_misses",
    "chunks_decoded", "chunks_filled",
)  # fmt: skip
"""What the loaders of all ranks read, by the names of `kit.data.stores.transfer`; `chunks_filled` were not in the
store.
"""
HARDWARE = ("device", "device_memory_bytes", "cpu", "cores", "host_memory_bytes", "host", "platform")
"""What it ran on; None in runs of a kit that did not write it down."""
MAPPINGS = ("versions", "config")
COLUMNS = (
    "run", "name", "started", "state", "cause", "message", "module", "data", "parameters", "strategy", "accelerator",
    "world_size", "precision", "batch_size", "global_batch_size", "steps", "samples_per_second", "data_wait_fraction",
    "host_rss_peak_bytes", "device_allocated_peak_bytes", "device_reserved_peak_bytes", *READ,
    *(f"{quantity}_{part}" for quantity in PREDICTED for part in ("predicted", "measured", "ratio")),
    *HARDWARE, "fingerprint", "run_directory", *MAPPINGS,
)  # fmt: skip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"<>]+")
_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|access_key|private_key)$", re.IGNORECASE)
_HIDDEN = "(hidden)"


def empty_row(paths: RunPaths) -> Row:
    """The row of a run of which nothing is known but where it is."""
    return {**dict.fromkeys(COLUMNS), "run": paths.directory.name, "run_directory": str(paths.directory)}


_TEXT = {
    "run", "name", "started", "state", "cause", "message", "module", "data", "strategy", "accelerator", "precision",
    "device", "cpu", "host", "platform", "fingerprint", "run_directory",
}  # fmt: skip


def is_row(row: Any) -> bool:
    """Whether every column is of the type that it is shown and computed with as."""
    return isinstance(row, dict) and all(_fits(name, row.get(name)) for name in COLUMNS)


def _fits(name: str, value: Any) -> bool:
    if value is None or isinstance(value, str):
        return value is None or name in _TEXT
    if name in MAPPINGS:
        return isinstance(value, dict)
    return name not in _TEXT and type(value) in (int, float) and math.isfinite(value)


def row_of_trial(trial: Trial) -> Row:
    """What a trial says of itself so far.

    Raises:
        OSError, ValueError, KeyError, TypeError: for files that are not as kit writes them.
    """
    row = {**_facts(trial), **_hardware(trial), **_measured(trial), **_compared(trial)}
    return {name: without_secrets(_plain(value)) for name, value in {**empty_row(trial.paths), **row}.items()}


def _facts(trial: Trial) -> Row:
    config, resolved = trial.config, trial.environment
    started = trial.event("fit_started") or {}
    world_size = int(started.get("world_size") or resolved.get("world_size") or 1)
    return {
        "name": config.name,
        "started": _started(trial),
        "state": trial.state,
        "cause": trial.cause,
        "message": trial.message or None,
        **{name: started.get(name) for name in ("module", "data", "parameters")},
        "strategy": config.hardware.strategy,
        "accelerator": started.get("accelerator") or resolved.get("accelerator"),
        "world_size": world_size,
        "precision": started.get("precision") or resolved.get("precision") or config.hardware.precision,
        "batch_size": config.loader.batch_size,
        "global_batch_size": config.loader.batch_size * world_size * config.levers.accumulate_grad_batches,
        "fingerprint": trial.asked.fingerprint,
        "versions": dict(resolved.get("versions") or {}),
        "config": flat(config.values()),
    }


def _hardware(trial: Trial) -> Row:
    known = trial.environment.get("hardware") or {}
    return {
        "device": trial.event("fit_started", "device") or known.get("device"),
        "device_memory_bytes": known.get("device_memory_bytes"),
        "cpu": known.get("cpu"),
        "cores": known.get("cores"),
        "host_memory_bytes": known.get("memory_bytes"),
        "host": (trial.environment.get("machine") or {}).get("host"),
        "platform": trial.environment.get("platform"),
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


def _started(trial: Trial) -> str:
    """When its supervisor began with it; of one that never did, when its directory was made."""
    began = trial.event("trial_started", "time") or trial.paths.marker.stat().st_mtime
    return datetime.datetime.fromtimestamp(began).astimezone().isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    """JSON has no NaN: what was not measured is None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- configs


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value for every field of a config's nested values."""
    paths = (info.path.split(".") for info in Config.fields())
    return {".".join(path): _at(values, path) for path in paths}


def _at(values: Any, path: Iterable[str]) -> Any:
    for part in path:
        values = values[part]
    return values


def config_of(row: Mapping[str, Any]) -> Config:
    """The config that a row holds, without its secrets.

    Raises:
        ConfigError: when this kit does not know it as a config.
    """
    nested: dict[str, Any] = {}
    for path, value in (row["config"] or {}).items():
        *parents, last = path.split(".")
        target = nested
        for part in parents:
            target = target.setdefault(part, {})
        target[last] = value
    return Config.make(nested, where=str(row["run"]))


# -- secrets


def without_secrets(value: Any, name: str = "") -> Any:
    """The same without what nobody else should read: see the module's first lines."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET.search(name):
        return _HIDDEN
    return _URL.sub(_redacted, value) if "://" in value else value


def _redacted(found: re.Match[str]) -> str:
    from kit.data.stores.url import redact

    return redact(found[0])


_FORMAT = 1
UNREADABLE = "UNREADABLE"
Sources = dict[str, list[int]]
"""Name of a file -> its size in bytes and its time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """What row.json holds."""

    sources: Sources
    row: Row
    current: bool
    """Whether it has every column that this kit writes."""

    def holds(self, sources: Sources) -> bool:
        """Whether these files are those that the row came from, or their events were deleted since."""
        return sources == self.sources or (_any_events(self.sources) and not _any_events(sources))


def row_of(paths: RunPaths) -> Row:
    """The row of one run; a run that cannot be read is a row that says so."""
    kept = read_row(paths)
    sources = _sources(paths)
    if kept is not None and kept.row["state"] == UNREADABLE and sources != kept.sources:
        kept = None  # something came, or was mended
    if kept is not None and kept.current and kept.holds(sources):
        return kept.row
    try:
        trial = Trial.open(paths.directory)
        row = row_of_trial(trial)
    except Exception as error:  # whatever the files of a run may say
        return _keep_unreadable(paths, sources, error) if kept is None else kept.row
    if kept is not None and kept.holds(sources) and not _any_events(sources):
        return kept.row
    if trial.ended:
        _write(paths, sources, row)
    return row


def keep_row(trial: Trial) -> None:
    """Write the row of a trial that has ended; where that cannot be done, whoever asks for it computes it."""
    sources = _sources(trial.paths)
    with contextlib.suppress(Exception):
        _write(trial.paths, sources, row_of_trial(trial))


def read_row(paths: RunPaths) -> StoredRow | None:
    """The row kept in a run directory; None when there is none that can be read."""
    try:
        found = read_json(paths.row.read_bytes())
        row, sources = found["row"], found["sources"]
        if not is_row(row) or not isinstance(sources, dict) or row["state"] not in (*ENDED, UNREADABLE):
            return None
        current = found.get("format") == _FORMAT and (*row,) == COLUMNS
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return StoredRow(sources, _tolerant(row, paths), current)


def _tolerant(row: Row, paths: RunPaths) -> Row:
    """Columns of today: those that are new are None, those that are gone are left out; it is where it is found."""
    known = {name: row.get(name) for name in COLUMNS}
    for name in MAPPINGS:
        known[name] = known[name] if isinstance(known[name], dict) else {}
    return {**known, "run": paths.directory.name, "run_directory": str(paths.directory)}


def _sources(paths: RunPaths) -> Sources:
    """The files that a row comes from, as they are now."""
    names = {paths.config.name, paths.environment.name, paths.prediction.name}
    found: Sources = {}
    with contextlib.suppress(OSError), os.scandir(paths.directory) as entries:
        for entry in entries:
            if entry.name in names or _is_events(entry.name):
                state = entry.stat()
                found[entry.name] = [state.st_size, state.st_mtime_ns]
    return found


def _is_events(name: str) -> bool:
    return name.startswith("events.") and name.endswith(".jsonl")


def _any_events(sources: Sources) -> bool:
    return any(map(_is_events, sources))


def _write(paths: RunPaths, sources: Sources, row: Row) -> None:
    """In one step, and by a name that no other process or thread writes to; a folder of others is left as it is."""
    draft = paths.row.with_name(f".row.{os.getpid()}.{threading.get_ident()}.tmp")
    whole: dict[str, Any] = {"format": _FORMAT, "kit": versions().get("kit"), "sources": sources, "row": row}
    with contextlib.suppress(OSError):
        try:
            draft.write_text(json.dumps(whole, allow_nan=False, separators=(",", ":")), encoding="utf-8")
            draft.replace(paths.row)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _keep_unreadable(paths: RunPaths, sources: Sources, error: BaseException) -> Row:
    """The row of a run that cannot be read, kept until a file changes; where rights or the disk refuse, not kept."""
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    row: Row = {**empty_row(paths), "state": UNREADABLE, "message": message, **{name: {} for name in MAPPINGS}}
    causes = (error, error.__cause__, getattr(error.__cause__, "__cause__", None))
    if all(getattr(cause, "errno", None) in (None, errno.ENOENT, errno.EISDIR) for cause in causes):
        _write(paths, sources, row)
    return row


Found = TypeVar("Found")


def predicted_of(trial: Trial) -> MemoryEstimate:
    """The estimate that was made for the trial.

    Raises:
        TrialError: when there is none, or not yet: it is made beside the trial and may take longer than that.
    """
    file = trial.paths.prediction
    if file.is_file():
        return read_whole(file, lambda path: MemoryEstimate.from_dict(read_json(path.read_bytes(), str(path))))
    if not trial.config.trial.predict_memory:
        raise TrialError(f"{trial.name} has no prediction of its memory, because trial.predict_memory is off")
    raise TrialError(
        f"{trial.name} has no prediction of its memory (yet): it is made beside the trial, at the lowest priority; "
        "try again, or call kit.predict_memory before kit.fit"
    )


def measured_of(trial: Trial) -> MeasuredMemory | None:
    """What the allocator did in the first two optimizer steps; None where that was not measured, as on a GPU."""
    ranks = range(int(trial.environment["world_size"]))
    files = [path for path in map(trial.paths.measured_memory, ranks) if path.is_file()]
    return max(
        (read_whole(file, MeasuredMemory.load) for file in files), key=lambda found: found.peak_bytes, default=None
    )


def read_whole(file: Path, load: Callable[[Path], Found]) -> Found:
    """What `load` makes of a file.

    Raises:
        TrialError: naming the file, when it is damaged.
    """
    try:
        return load(file)
    except Exception as error:  # whatever bytes may lead to
        raise TrialError(f"{file} is damaged: {type(error).__name__}: {error}; run the trial anew") from error
