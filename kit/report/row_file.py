"""row.json: the row of a trial that has ended, in its run directory, so that thousands are read in a second.

The file names what it was computed from, each file by its size and time: the row is taken only while all of them are
as they were. So a prediction that arrives after the end, or a file that was changed, is never hidden by an old row, and
a running trial has none. A trial whose kernel was killed has no such file; its row is computed from its events, and
kept then. Where events were deleted to save room, or files can no longer be read, the kept row is all there is, and is
shown. A row file that is damaged counts as none. A run that cannot be read has its row kept too, until one of its
files changes. Rows of another version of kit are read as far as names agree.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from dataclasses import dataclass
from typing import Any

from kit.json_text import read_json
from kit.report.row import COLUMNS, MAPPINGS, Row, empty_row, is_row, row_of_trial
from kit.run.paths import RunPaths
from kit.run.submission import versions
from kit.run.trial import ENDED, Trial

_FORMAT = 1
UNREADABLE = "UNREADABLE"
Sources = dict[str, list[int]]
"""Name of a file -> its size in bytes and its time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Kept:
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


def read_row(paths: RunPaths) -> Kept | None:
    """The row kept in a run directory; None when there is none that can be read."""
    try:
        found = read_json(paths.row.read_bytes())
        row, sources = found["row"], found["sources"]
        if not is_row(row) or not isinstance(sources, dict) or row["state"] not in (*ENDED, UNREADABLE):
            return None
        current = found.get("format") == _FORMAT and (*row,) == COLUMNS
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Kept(sources, _tolerant(row, paths), current)


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
