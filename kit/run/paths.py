"""The run directory: which files one trial consists of, and what they are called.

Every file name of a run is written here and nowhere else. A run directory is made in one step (`mkdir` fails when the
name is taken, then the next number is tried) and holds a marker file, so that nothing else is ever taken for a run.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import Config, project_folder
from kit.errors import ConfigError, Problem, TrialError

EVENT_FILES = "events.*.jsonl"
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
            run.marker.touch()
        except OSError as error:
            message = f"cannot make a run directory in {folder}: {error.strerror or error}; choose another folder"
            raise ConfigError([Problem("trial.folder", message)]) from error
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
    def row(self) -> Path:
        """The row of `kit.results`, once the trial has ended, as JSON."""
        return self.directory / "row.json"

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
