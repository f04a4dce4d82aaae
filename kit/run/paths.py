"""The run directory: which files one trial consists of, and what they are called.

Every file name of a run is written here and nowhere else. A run directory is made in one step (`mkdir` fails when the
name is taken, then the next number is tried) and holds a marker file, so that nothing else is ever taken for a run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import Config, project_folder
from kit.errors import ConfigError, Problem, TrialError
from kit.json_text import read_json
from kit.units import format_bytes

EVENT_FILES = "events.*.jsonl"
LARGEST_WORLD = 100_000
"""Ranks that a run may name: files are looked for of each."""
_MARKER = ".kit-run"
_LOG = re.compile(r"log\.(\d+)\.txt")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run."""

    directory: Path

    @classmethod
    def create(cls, config: Config) -> RunPaths:
        """A new, empty run directory named after the experiment, the time and the fingerprint.

        Raises:
            ConfigError: when `trial.folder` cannot be written to.
        """
        folder = runs_folder(config.trial.folder)
        stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{config.fingerprint[:6]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run = cls(_new_folder(folder, stem))
        except OSError as error:
            raise cannot_write(folder, error) from error
        with run.whole_or_gone():
            run.marker.touch()
        return run

    @classmethod
    def open(cls, directory: str | Path) -> RunPaths:
        """An existing run directory.

        Raises:
            TrialError: when the directory is not there or is not a run.
        """
        run = cls(Path(directory).expanduser().absolute())
        try:
            is_run, exists = run.marker.is_file(), run.directory.exists()
        except (OSError, ValueError) as error:
            raise TrialError(f"{str(directory)[:200]!r} is no path of a run: {error}") from None
        if not is_run:
            state = "does not exist" if not exists else f"is not a run: it holds no {_MARKER}"
            raise TrialError(f"{run.directory} {state}; give the run_directory of a trial, such as one below runs/")
        return run

    @contextlib.contextmanager
    def whole_or_gone(self, needed_bytes: int = 0) -> Iterator[None]:
        """Remove the directory when what is written into it meanwhile cannot be; `needed_bytes` is how much that is.

        Raises:
            ConfigError: in place of the system's error, with what is free.
        """
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise cannot_write(self.directory.parent, error, needed_bytes) from error

    @property
    def marker(self) -> Path:
        return self.directory / _MARKER

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    @property
    def payload(self) -> Path:
        """The pickled module and data."""
        return self.directory / "payload.pkl"

    @property
    def signature(self) -> Path:
        """What proves that this user wrote the run here; see `kit.run.signing`."""
        return self.directory / "signature.txt"

    @property
    def environment(self) -> Path:
        """Versions, the machine, and what `auto` was resolved to, with reasons."""
        return self.directory / "environment.json"

    @property
    def control(self) -> Path:
        """The shared memory of the stop protocol."""
        return self.directory / "control"

    @property
    def supervisor_events(self) -> Path:
        return self.directory / "events.supervisor.jsonl"

    @property
    def prediction(self) -> Path:
        """The memory estimate of the run, as JSON."""
        return self.directory / "prediction.json"

    @property
    def calibration(self) -> Path:
        """The loader setting that was chosen, with its evidence, as JSON."""
        return self.directory / "calibration.json"

    @property
    def scratch(self) -> Path:
        """Where a job that is confined keeps what it may not write elsewhere; gone when it has ended."""
        return self.directory / "scratch"

    @property
    def row(self) -> Path:
        """The row of `kit.results`, once the trial has ended, as JSON."""
        return self.directory / "row.json"

    def read_environment(self) -> dict[str, Any]:
        """What `environment` holds.

        Raises:
            TrialError: when it cannot be read, or is not what submission wrote.
        """
        try:
            found = read_json(self.environment.read_bytes())
        except (OSError, ValueError) as error:
            raise TrialError(f"{self.environment} cannot be read: {error}") from error
        wrong = "no mapping" if not isinstance(found, dict) else next(_wrong(found), "")
        if wrong:
            raise TrialError(f"{self.environment} is damaged: {wrong}; run the trial anew")
        return dict(found)

    def write_prediction(self, estimate: Mapping[str, Any]) -> None:
        """Keep an estimate with the run, in one step."""
        draft = self.prediction.with_suffix(".tmp")
        draft.write_text(json.dumps(estimate), encoding="utf-8")
        draft.replace(self.prediction)

    def measured_memory(self, rank: int) -> Path:
        """What the rank's allocator did in the first steps."""
        return self.directory / f"memory.{rank}.npz"

    def recording(self, number: int) -> Path:
        """A recording that a prediction has made."""
        return self.directory / f"recording.{number}.npz"

    def events(self, rank: int) -> Path:
        return self.directory / f"events.{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """What the rank wrote to stdout and stderr."""
        return self.directory / f"log.{rank}.txt"

    def event_files(self) -> list[Path]:
        return sorted(self.directory.glob(EVENT_FILES))

    def logs(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("log.*.txt") if _LOG.fullmatch(path.name))


_ENVIRONMENT = {
    "world_size": int, "precision": str, "accelerator": str, "platform": str, "machine": dict, "hardware": dict,
    "given": dict, "predicted": dict, "versions": dict, "supervisor": dict, "claims": list, "devices": list,
    "reasons": list, "folder": str, "sys_path": list, "threads_per_rank": int,
}  # fmt: skip
"""Types of what is read of an environment; any of it may be left out."""


def _wrong(found: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _ENVIRONMENT.items():
        if not isinstance(found.get(name), kind | None):
            yield f"{name} is {found[name]!r:.60}"
    if not 1 <= (found.get("world_size") or 1) <= LARGEST_WORLD:
        yield f"world_size is {found['world_size']!r:.60}, not 1 to {LARGEST_WORLD:,}"
    predicted = found.get("predicted") or {}
    yield from (f"predicted is {value!r:.60}" for value in predicted.values() if not isinstance(value, int | float))


def cannot_write(folder: Path, error: OSError, needed_bytes: int = 0) -> ConfigError:
    """The error that says where a run cannot be kept, what it needs and what is free."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    free = format_bytes(shutil.disk_usage(there).free)
    room = f"{format_bytes(needed_bytes)} needed, {free} free" if needed_bytes else f"{free} free"
    reason = error.strerror or str(error)
    message = f"cannot make a run directory in {folder}: {reason} ({room}); make room, or choose another folder"
    return ConfigError([Problem("trial.folder", message)])


def _new_folder(folder: Path, stem: str) -> Path:
    for number in itertools.count(1):
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("count() ended")


def runs_folder(folder: str | Path = "runs") -> Path:
    """Where run directories are kept: as given when absolute, else below the project folder."""
    given = Path(folder).expanduser()
    return given if given.is_absolute() else project_folder() / given


def find_runs(folder: str | Path = "runs") -> Iterator[RunPaths]:
    """Every run directory in a folder, oldest first; other folders are passed over."""
    root = runs_folder(folder)
    if not root.is_dir():
        return
    marked = [path for path in root.iterdir() if (path / _MARKER).is_file()]
    yield from (RunPaths(path) for path in sorted(marked, key=lambda path: ((path / _MARKER).stat().st_mtime_ns, path)))
