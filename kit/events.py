"""What a job says while it runs: append-only JSON lines, one file per rank, read tolerantly.

A file never blocks the writer when the reader is busy (a pipe does, after 64 KiB), and it outlives SIGKILL. A torn last
line is what a kill leaves and is dropped; a damaged line in the middle is damage and raises. Non-finite numbers are
written as text, so that every line stays JSON.

Kinds: `rank_started`, `fit_started`, `loader_used`, `levers_used`, `work_counted`, `host_watched`, `cpu_used`,
`energy_measured`, `carbon_estimated`, `step`, `logged`, `span`, `memory_measured`, `warned`, `fit_ended`, `failed` come
from ranks of a fit, `recorded`, `refused`, `prediction_ended` from that of a prediction, `calls_timed` from one that
measures its device, `calibration_step`, `calibrated`, `calibration_ended` from one that measures its loader;
`trial_started`, `trial_ended` from the supervisor.
Every event has `kind`, `time` (seconds since the epoch) and `rank` (-1: supervisor).
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from kit.errors import EventLogError
from kit.json_text import read_json

Event = dict[str, Any]
SUPERVISOR = -1
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(event: Event) -> bytes:
    """One line of JSON; `nan` and `inf` become text."""
    try:
        text = json.dumps(event, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_worded(event), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _worded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def number(value: Any) -> float:
    """A number from an event, with `"nan"` and `"inf"` read back; NaN when there is none."""
    if isinstance(value, str):
        return _WORDS.get(value, math.nan)
    return math.nan if value is None else float(value)


class EventWriter:
    """Appends events to one file; each line is one `write`, so that lines of several threads do not mix."""

    def __init__(self, path: str | Path, rank: int) -> None:
        self.rank = rank
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()

    def write(self, kind: str, **fields: Any) -> None:
        line = encode({"kind": kind, "time": time.time(), "rank": self.rank, **fields})
        with self._lock:
            while line:
                line = line[os.write(self._file, line) :]

    def close(self) -> None:
        os.close(self._file)


class EventReader:
    """Reads what has been appended since the last call, from any number of files of one run."""

    def __init__(self, folder: str | Path, pattern: str = "events.*.jsonl") -> None:
        self.folder = Path(folder)
        self.pattern = pattern
        self._offset: dict[Path, int] = {}
        self._line: dict[Path, int] = {}
        self._latest: dict[Path, float] = {}

    def read(self) -> list[Event]:
        """New whole events in order of time; a torn last line waits for its rest.

        Those of one file keep their order when the clock was set back between them: an end must not come before its
        beginning.

        Raises:
            EventLogError: naming file and line, when a whole line is not an event; or a file that cannot be read.
        """
        found: list[tuple[float, Event]] = []
        try:
            for path in self._longer():
                for event in self._read_file(path):
                    self._latest[path] = max(event["time"], self._latest.get(path, 0.0))
                    found.append((self._latest[path], event))
        except OSError as error:
            raise EventLogError(f"{self.folder}: events cannot be read: {error}") from error
        return [event for _, event in sorted(found, key=lambda item: item[0])]

    def _longer(self) -> list[Path]:
        """Files with something new, by name; whoever waits asks many times a second, so the others are not opened."""
        try:
            entries = os.scandir(self.folder)
        except FileNotFoundError:
            return []
        with entries:
            ours = [entry for entry in entries if fnmatch.fnmatchcase(entry.name, self.pattern)]
        sizes = {Path(entry): entry.stat().st_size for entry in ours}
        return sorted(path for path, size in sizes.items() if size != self._offset.get(path))

    def _read_file(self, path: Path) -> list[Event]:
        with path.open("rb") as file:
            file.seek(self._offset.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset[path] = self._offset.get(path, 0) + len(whole)
        events = []
        for line in whole.splitlines():
            self._line[path] = self._line.get(path, 0) + 1
            events.append(_decode(line, path, self._line[path]))
        return events


_NEEDED = {"step": {"step"}, "logged": {"step", "metrics"}, "trial_ended": {"state", "message"}, "warned": {"message"}}
"""Fields that an event of a kind is read for, beside those that every event has."""
_TEXT = {"kind", "state", "cause", "message", "traceback", "precision", "module", "headline"}
_NUMBERS = re.compile(r"time|rank|steps?|batch|epoch|samples|loss|world_size|parameters|.*_(bytes|seconds|per_second)")
_OTHERS = {
    "counters": dict, "host_seconds": dict, "processes": list, "optimizers": list, "advice": list, "metrics": dict,
}  # fmt: skip
_MOST = {
    "rank": 10**6, "world_size": 10**6, "step": 2**53, "steps": 2**53, "batch": 2**53, "epoch": 2**53, "time": 1e11,
}  # fmt: skip
"""What is counted to, or made a date of."""
_PLACES = ("time", "rank", "step")
"""What events are sorted and counted by."""


def _is_event(event: Event) -> bool:
    """Whether the fields that are computed with are of the types that they are written in."""
    if not {"kind", "time", "rank"} <= event.keys():
        return False
    if not all(_fits(name, value) for name, value in event.items()):
        return False
    counts = (event.get("counters") or {}).values()
    needed = _NEEDED.get(event["kind"], set())
    return needed <= event.keys() and all(isinstance(count, int) for count in counts)


def _fits(name: str, value: Any) -> bool:
    if value is None:
        return name != "kind" and name not in _PLACES
    expected = _expected(name)
    if expected is float:
        if isinstance(value, str):
            return value in _WORDS and name not in _PLACES
        return type(value) in (int, float) and abs(value) <= _MOST.get(name, math.inf) and math.isfinite(value)
    return expected is None or isinstance(value, expected)


@functools.lru_cache(maxsize=1024)
def _expected(name: str) -> type | None:
    if name in _TEXT:
        return str
    return _OTHERS.get(name) or (float if _NUMBERS.fullmatch(name) else None)


def _decode(line: bytes, path: Path, line_number: int) -> Event:
    try:
        event = read_json(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not _is_event(event):
        raise EventLogError(
            f"{path}, line {line_number}: not an event ({line[:60]!r}); the file was edited or the disk is damaged. "
            "Delete the line to read the rest."
        )
    return event
