"""The row of one trial: what was asked, predicted and measured, and on what, as plain values of fixed names.

Text, numbers and None; bytes, seconds and fractions in base units. `config` (dotted path -> value) and `versions`
(package -> version) are the two mappings. Averages leave the warm-up steps out. A ratio is measured / predicted: 1 is
a perfect prediction, 2 is twice as much as foreseen. `config` is what ran: its loader settings, the batch among them,
are those that the loader stood at, while `fingerprint` is of what was submitted. No secret enters a row: URLs lose
user, password and query, and arguments that are named like one lose their value.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kit.config import Config
from kit.events import Event
from kit.report.trace import trace_of
from kit.run.memory.residuals import compared, ratio
from kit.run.paths import RunPaths
from kit.run.trial import Trial

Row = dict[str, Any]
PREDICTED = ("device_allocated_bytes", "device_reserved_bytes", "requests_per_sample", "bytes_per_sample")
"""What stands as `_predicted`, `_measured` and `_ratio`. Device bytes are the peak of the rank that needed most; on the
CPU, of its first two optimizer steps."""
READ = (
    "requests", "retries", "bytes_read", "cache_hits", "cache_misses", "read_cache_hits", "read_cache_misses",
    "chunks_decoded", "chunks_filled",
)  # fmt: skip
"""What the loaders of all ranks read, by the names of `kit.data.counters`; `chunks_filled` were not in the store."""
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
    from kit.data.stores import redact

    return redact(found[0])
