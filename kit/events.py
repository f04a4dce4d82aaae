"""What a job says while it runs: append-only JSON lines, one file per rank, read tolerantly.

A file never blocks the writer when the reader is busy (a pipe does, after 64 KiB), and it outlives SIGKILL. A torn last
line is what a kill leaves and is dropped; a damaged line in the middle is damage and raises. Non-finite numbers are
written as text, so that every line stays JSON.

Kinds: `rank_started`, `fit_started`, `levers_used`, `work_counted`, `cpu_used`, `energy_measured`, `carbon_estimated`,
`step`, `span`, `memory_measured`, `warned`, `fit_ended`, `failed` come from ranks of a fit, `recorded`, `refused`,
`prediction_ended` from that of a prediction, `peaks_measured` from one that measures its device, `calibration_step`,
`calibrated`, `calibration_ended` from one that measures its loader; `trial_started`, `trial_ended` from the supervisor.
Every event has `kind`, `time` (seconds since the epoch) and `rank` (-1: supervisor).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from kit.errors import EventLogError

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

    def read(self) -> list[Event]:
        """New whole events in order of time; a torn last line waits for its rest.

        Raises:
            EventLogError: naming file and line, when a whole line is not an event.
        """
        events = [event for path in sorted(self.folder.glob(self.pattern)) for event in self._read_file(path)]
        return sorted(events, key=lambda event: event["time"])

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


def _decode(line: bytes, path: Path, line_number: int) -> Event:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not {"kind", "time", "rank"} <= event.keys():
        raise EventLogError(
            f"{path}, line {line_number}: not an event ({line[:60]!r}); the file was edited or the disk is damaged. "
            "Delete the line to read the rest."
        )
    return event
