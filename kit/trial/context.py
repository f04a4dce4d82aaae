"""What a rank knows about its trial, and how a job that is not the user's own training is confined.

Trials of a batch search, of repeats, of a diagnosis and of profiles train on the user's behalf, predictions run the
module's hooks and calibrations the data's: nobody wants what that code leaves behind. A prediction starts no programs;
the others need the processes of their loaders, and compilers. What times calls on the device runs no code of the
user's, and is not confined.
"""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from kit.config import Config, resolve_path
from kit.confinement.confine import confine_process, confined
from kit.events import EventWriter
from kit.json_text import read_json
from kit.machine.processes import SCRATCH, scratch_folder
from kit.trial.directory import Control, RunPaths

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from kit.trial.recorder import StepClock


@dataclass(slots=True)
class Context:
    """One rank of one trial."""

    paths: RunPaths
    config: Config
    environment: dict[str, Any]
    """What submission wrote: world size, accelerator, precision, threads, versions."""
    rank: int
    writer: EventWriter
    control: Control
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Notebook cells by file name: (name, source)."""
    clock: StepClock | None = None
    store: TCPStore | None = None
    """In which the ranks find each other; rank 0 serves it as long as it is held here."""

    @property
    def world_size(self) -> int:
        return int(self.environment["world_size"])

    def load_payload(self) -> dict[str, Any]:
        """What was sent to the ranks; from then on tracebacks quote its notebook cells, whose text is in no file."""
        payload: dict[str, Any] = cloudpickle.loads(self.paths.payload.read_bytes())
        self.cells = payload.get("cells", {})
        for file, (_, source) in self.cells.items():
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        return payload


def confine_rank(paths: RunPaths, rank: int) -> None:
    """Confine this process where its job asks for it; to be called before it has threads."""
    try:
        environment = read_json(paths.environment.read_bytes())
        writable = _writable_folders(paths, environment) if environment.get("confined") else None
    except (OSError, ValueError):  # reported by the job, which reads them too
        return
    if writable is not None:
        prediction = environment.get("prediction")
        confine_process(
            paths.scratch, writable, may_start_programs=prediction is None, rank=rank,
            reads_once=prediction is not None and len(prediction["batch_sizes"]) == 1,
        )  # fmt: skip


def _writable_folders(paths: RunPaths, environment: dict[str, Any]) -> list[Path]:
    """Where the job itself writes: its run directory, its sockets, the trial it predicts, the profile it is part of."""
    found = [paths.directory, *([scratch_folder()] if SCRATCH in os.environ else [])]
    if "prediction" in environment:
        beside = environment["prediction"]["beside"]
        return [*found, Path(beside["run_directory"])] if beside else found
    if "profile" in environment:
        found.append(Path(environment["profile"]["folder"]))
    return [*found, *cache_folders(Config.load(paths.config))]


def cache_folders(config: Config) -> list[Path]:
    """Where kit keeps what it has read, for whoever reads it next."""
    folders = (config.cache.folder, config.queries.cache_path)
    return [resolve_path(folder) for folder in folders if folder and "://" not in folder]


@contextlib.contextmanager
def confined_job(context: Context) -> Iterator[None]:
    """Confine the job meanwhile, where it is confined, and write what it was kept from; a prediction does so itself."""
    if not context.environment.get("confined") or "prediction" in context.environment:
        yield
        return
    with confined(context.environment["confined"]) as kept:
        yield
    for note in kept.notes:
        context.writer.write("warned", message=note)
