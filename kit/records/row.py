"""The row of one trial: submitted, predicted and measured values, and the machine, as plain values of fixed names.

Text, numbers and None; bytes, seconds and fractions in base units. `versions` (package -> version), `metrics` and
`config` (dotted path -> value) are the mappings. `metrics` has the last value of what the module logged, and its range
as NAME.lowest and NAME.highest; `monitor` is the metric that `training.monitor` names. Averages leave the warm-up steps
out. A ratio is measured / predicted: 1 is a perfect prediction, 2 is twice as much as predicted; where too little was
measured for one it is None. `config` is what ran: its loader settings, the batch among them, are those of the loader
that trained, while `fingerprint` is of the submitted config. No secret enters a row: URLs lose user, password and
query, and arguments that are named like one lose their value.

The row of a trial that has ended is kept in its directory as row.json, so that thousands are read in a second. The file
names the files that it was computed from, each by size and time, and is taken only while all of them are as they were:
no prediction that arrives after the end, and no file that was changed, is hidden by an old row, and a running trial has
none. Where events were deleted to save space, or files can no longer be read, the kept row is all there is and is
shown. A damaged row.json counts as none. A run that cannot be read has its row kept too, until one of its files
changes. Rows of another version of kit are read as far as names agree.

`predicted_of` and `measured_of` read what a run directory holds about memory, JSON and plain arrays only. Of several
ranks the one that needed most is taken, as it decides whether a device suffices.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import json
import math
import operator
import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kit.config import Config
from kit.errors import TrialError
from kit.json_text import read_json, write_whole
from kit.machine.processes import slowed
from kit.memory.replay.estimate import MeasuredMemory, MemoryEstimate
from kit.memory.residual_table import compared, ratio
from kit.records.ratios import SPEED, SpeedRange, doubt, speed_key
from kit.records.trace import BESIDE_TRAINING, metrics_of, trace_of
from kit.trial.directory import RunPaths
from kit.trial.submit import RunKind, versions
from kit.trial.trial import ENDED, Trial

Row = dict[str, Any]
PREDICTED = ("device_allocated_bytes", "device_reserved_bytes", "requests_per_sample", "bytes_per_sample")
"""What stands as `_predicted`, `_measured` and `_ratio`. Device bytes are the peak of the rank that needed most; on the
CPU, of its first two optimizer steps."""
READ = (
    "requests", "retries", "bytes_read", "cache_hits", "cache_misses", "read_cache_hits", "read_cache_misses",
    "chunks_decoded", "chunks_filled",
)  # fmt: skip
"""What the loaders of all ranks read, by the names of `kit.data.stores.counters`; `chunks_filled` were not in the
store.
"""
HARDWARE = ("device", "device_memory_bytes", "cpu", "cores", "host_memory_bytes", "host", "platform")
"""What it ran on; None in runs of a kit that did not write it down."""
MAPPINGS = ("versions", "metrics", "config")
BESIDE_FRACTIONS = tuple(f"{phase}_fraction" for phase in BESIDE_TRAINING)
"""Of the time, what was not training."""
BESIDE = ("ratio_notes", "prediction")
"""What depends on more than the files of a run, and like the prediction of its speed is added by `kit.results`: why its
ratios are far from 1, and whether its prediction is still being made."""
COLUMNS = (
    "run", "name", "notebook", "kind", "started", "state", "cause", "message", "profiler", "module", "data",
    "parameters", "strategy", "accelerator", "world_size", "precision", "batch_size", "global_batch_size", "steps",
    "epochs", "measured_batches", "batches_read", "samples_per_second", "samples_per_second_error_fraction",
    "samples_per_second_predicted", "samples_per_second_low", "samples_per_second_high", "samples_per_second_ratio",
    "data_wait_fraction", *BESIDE_FRACTIONS, "other_cores", "other_cores_when_predicted", "slowdown",
    "monitor", "monitor_last", "monitor_best", "host_rss_peak_bytes", "workers_peak_bytes",
    "device_allocated_peak_bytes", "device_reserved_peak_bytes", *READ,
    *(f"{quantity}_{part}" for quantity in PREDICTED for part in ("predicted", "measured", "ratio")),
    *BESIDE, *HARDWARE, "fingerprint", "speed_key", "run_directory", *MAPPINGS,
)  # fmt: skip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"<>]+")
_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|access_key|private_key)$", re.IGNORECASE)
_HIDDEN = "(hidden)"


def empty_row(paths: RunPaths) -> Row:
    """The row of a run of which nothing is known but where it is."""
    return {**dict.fromkeys(COLUMNS), "run": paths.directory.name, "run_directory": str(paths.directory)}


_TEXT = {
    "run", "name", "notebook", "kind", "started", "state", "cause", "message", "profiler", "module", "data", "strategy",
    "accelerator", "precision", "device", "cpu", "host", "platform", "fingerprint", "speed_key", "run_directory",
    "monitor", *BESIDE,
}  # fmt: skip


def is_row(row: Any) -> bool:
    """Whether every column is of the type that it is shown and computed with as."""

    def fits(name: str, value: Any) -> bool:
        if value is None or isinstance(value, str):
            return value is None or name in _TEXT
        if name in MAPPINGS:
            return isinstance(value, dict)
        return name not in _TEXT and type(value) in (int, float) and math.isfinite(value)

    return isinstance(row, dict) and all(fits(name, row.get(name)) for name in COLUMNS)


def row_of_trial(trial: Trial) -> Row:
    """What the files of a trial say so far.

    Raises:
        OSError, ValueError, KeyError, TypeError: for files that are not as kit writes them.
    """
    config, environment, fit_started = trial.config, trial.environment, trial.event("fit_started") or {}
    known = environment.get("hardware") or {}
    # a trial that never began has the time at which its directory was made
    began = trial.event("trial_started", "time") or trial.paths.marker.stat().st_mtime
    world_size = int(fit_started.get("world_size") or environment.get("world_size") or 1)
    row = {
        **empty_row(trial.paths),
        "name": config.name,
        "notebook": environment.get("notebook"),
        "kind": kind_of(environment),
        "started": datetime.datetime.fromtimestamp(began).astimezone().isoformat(timespec="seconds"),
        "state": trial.state,
        "cause": trial.cause,
        "message": trial.message or None,
        "profiler": (environment.get("profile") or {}).get("pass"),  # it slows the trial that it watches
        **{name: fit_started.get(name) for name in ("module", "data")},
        "parameters": parameters_of(trial),
        "strategy": config.hardware.strategy,
        "accelerator": fit_started.get("accelerator") or environment.get("accelerator"),
        "world_size": world_size,
        "precision": fit_started.get("precision") or environment.get("precision") or config.hardware.precision,
        "batch_size": config.loader.batch_size,
        "global_batch_size": config.loader.batch_size * world_size * config.levers.accumulate_grad_batches,
        "fingerprint": trial.asked.fingerprint,
        "speed_key": speed_key(trial.asked, environment),
        "versions": dict(environment.get("versions") or {}),
        "config": flat(config.values()),
        "device": fit_started.get("device") or known.get("device"),
        "device_memory_bytes": known.get("device_memory_bytes"),
        "cpu": known.get("cpu"),
        "cores": known.get("cores"),
        "host_memory_bytes": known.get("memory_bytes"),
        "host": (environment.get("machine") or {}).get("host"),
        "platform": environment.get("platform"),
        **_measured(trial),
    }
    # JSON has no NaN: what was not measured is None
    row = {name: None if isinstance(it, float) and not math.isfinite(it) else it for name, it in row.items()}
    return {name: without_secrets(value) for name, value in row.items()}


def parameters_of(trial: Trial) -> int | None:
    """As the fit ended, where layers got their shape with the first batch, else as it began; None before."""
    found: int | None = trial.event("fit_ended", "parameters") or trial.event("fit_started", "parameters")
    return found


def _measured(trial: Trial) -> Row:
    """What was measured in the trial, and what was predicted for it."""
    trace = trace_of([*trial.events, *trial.steps], trial.config)
    memory, throughput = trace.memory(), trace.throughput()
    counts = trial.counters
    read = {name: sum(count.get(name, 0) for count in counts) for name in {name for count in counts for name in count}}
    predicted, samples = trial.environment.get("predicted") or {}, read.get("samples")
    asked_for = read.get("samples_read") or samples  # an older trial has not counted parts of batches
    row = {
        "steps": trace.last_step,
        "epochs": 1 + max((int(event.get("epoch") or 0) for event in trial.steps), default=0) if trial.steps else None,
        "measured_batches": throughput.measured_steps,
        "batches_read": samples / trial.config.loader.batch_size if samples else None,
        "samples_per_second_error_fraction": throughput.error_fraction,
        "samples_per_second": throughput.mean_samples_per_second,
        "data_wait_fraction": throughput.data_wait_fraction,
        **{name: throughput.mean_shares[phase] for name, phase in zip(BESIDE_FRACTIONS, BESIDE_TRAINING, strict=True)},
        **_metrics(trial),
        "host_rss_peak_bytes": memory.peak("host_rss_bytes"),
        "workers_peak_bytes": memory.workers_peak_bytes,
        "device_allocated_peak_bytes": memory.peak("device_allocated_bytes"),
        "device_reserved_peak_bytes": memory.peak("device_reserved_bytes"),
        **{name: read.get(name) for name in READ},
    }
    if (others := other_cores(trial)) is not None:
        row["other_cores"] = others
    if speed := speed_of_operators(trial.paths):
        found = {"predicted": speed.samples_per_second, "low": speed.low, "high": speed.high}
        row |= {f"{SPEED}_{name}": value for name, value in found.items()}
        row["other_cores_when_predicted"] = speed.busy_cores
        used = (event for event in trial.events if event["kind"] == "cpu_used")
        paces = [event["pace_seconds"] for event in used if event.get("pace_seconds")]
        if paces and speed.pace_seconds:
            slowness = max(1.0, statistics.fmean(paces) / speed.pace_seconds)
            row["slowdown"] = slowed(slowness, speed.computing_fraction)
    for quantity, name in (("requests_per_sample", "requests"), ("bytes_per_sample", "bytes_read")):
        row |= _triple(quantity, predicted.get(quantity), read.get(name, 0) / asked_for if samples else None)
        if doubt(row, quantity):
            row[f"{quantity}_ratio"] = None
    if run := compared(trial.paths):  # its ratios are None for a prediction without activations, a lower bound
        row |= _triple("device_allocated_bytes", run.predicted_allocated_bytes, run.measured_allocated_bytes)
        row |= _triple("device_reserved_bytes", run.predicted_reserved_bytes, run.measured_reserved_bytes)
        row |= {"device_allocated_bytes_ratio": run.ratio, "device_reserved_bytes_ratio": run.reserved_ratio}
    return row


def other_cores(trial: Trial) -> float | None:
    """Cores that all else on the machine used meanwhile; None where a rank did not tell."""
    used = [event for event in trial.events if event["kind"] == "cpu_used" and event.get("machine_seconds")]
    if not used or len(used) != int(trial.environment.get("world_size") or 1):
        return None
    ranks = sum(event["family_seconds"] / event["wall_seconds"] for event in used)
    others: float = statistics.fmean(event["machine_seconds"] / event["wall_seconds"] for event in used) - ranks
    return max(0.0, others)


def speed_of_operators(paths: RunPaths) -> SpeedRange | None:
    """What the operators of the step said about its speed; None where they were never measured here."""
    try:
        found = read_json(paths.predicted_speed.read_bytes())
        speed, low, high = (float(found[field]) for field in ("samples_per_second", "low", "high"))
        source, fields = "the operators of the step", ("busy_cores", "pace_seconds", "computing_fraction")
        known = {name: float(found[name]) for name in fields if name in found}
        return SpeedRange(samples_per_second=speed, low=low, high=high, source=source, **known)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _metrics(trial: Trial) -> Row:
    """What was logged, and of it the monitored one."""
    found: dict[str, float] = {}
    for name, (_, values) in metrics_of([*trial.steps, *trial.events]).items():
        if known := [value for value in values if math.isfinite(value)]:
            found |= {name: known[-1], f"{name}.lowest": min(known), f"{name}.highest": max(known)}
    training = trial.config.training
    best = "lowest" if training.monitor_mode == "min" else "highest"
    return {
        "metrics": found,
        "monitor": training.monitor or None,
        "monitor_last": found.get(training.monitor),
        "monitor_best": found.get(f"{training.monitor}.{best}"),
    }


def _triple(quantity: str, predicted: float | None, measured: float | None) -> Row:
    return {
        f"{quantity}_predicted": predicted,
        f"{quantity}_measured": measured,
        f"{quantity}_ratio": ratio(predicted, measured),
    }


def kind_of(environment: Mapping[str, Any]) -> RunKind:
    """Why a run was made; of a kit that did not write it down, as far as the rest tells."""
    if environment.get("job") == "calibrate":
        return "calibration"
    known: RunKind = "profile" if environment.get("profile") else "repeat" if environment.get("confined") else "trial"
    kind: RunKind = environment.get("kind", known)
    return kind


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value for every field of a config's nested values."""
    paths = (info.path for info in Config.fields())
    return {path: functools.reduce(operator.getitem, path.split("."), values) for path in paths}


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


def without_secrets(value: Any, name: str = "") -> Any:
    """The same without what nobody else should read: see the module's first lines."""
    from kit.data.stores.url import redact

    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if not isinstance(value, str):
        return value
    return _HIDDEN if value and _SECRET.search(name) else _URL.sub(lambda found: redact(found[0]), value)


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
        if kept is not None:
            return kept.row
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        row = {**empty_row(paths), "state": UNREADABLE, "message": message, **{name: {} for name in MAPPINGS}}
        causes = (error, error.__cause__, getattr(error.__cause__, "__cause__", None))
        if all(getattr(cause, "errno", None) in (None, errno.ENOENT, errno.EISDIR) for cause in causes):
            _keep(paths, sources, row)  # but not where rights or the disk refuse
        return row
    if kept is not None and kept.holds(sources) and not _any_events(sources):
        return kept.row
    if trial.ended:
        _keep(paths, sources, row)
    return row


def keep_row(trial: Trial) -> None:
    """Write the row of a trial that has ended; where that cannot be done, it is computed whenever it is needed."""
    sources = _sources(trial.paths)
    with contextlib.suppress(Exception):
        _keep(trial.paths, sources, row_of_trial(trial))


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
    known = {name: row.get(name) for name in COLUMNS}  # new columns are None, and those that are gone are left out
    known["kind"] = known["kind"] or ("profile" if known["profiler"] else "trial")
    mappings = {name: known[name] if isinstance(known[name], dict) else {} for name in MAPPINGS}
    here = {"run": paths.directory.name, "run_directory": str(paths.directory)}
    return StoredRow(sources, {**known, **mappings, **here}, current)


def _sources(paths: RunPaths) -> Sources:
    """The files that a row comes from, as they are now."""
    names = {paths.config.name, paths.environment.name, paths.prediction.name, paths.predicted_speed.name}
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


def _keep(paths: RunPaths, sources: Sources, row: Row) -> None:
    """In one step; a folder of others is left as it is."""
    whole = {"format": _FORMAT, "kit": versions().get("kit"), "sources": sources, "row": row}
    with contextlib.suppress(OSError):
        write_whole(paths.row, json.dumps(whole, allow_nan=False, separators=(",", ":")))


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
