"""commit: the end of an experiment, as files that run it unchanged on the real machine.

A LightningCLI YAML with every choice settled and its reason, the evidence it was chosen on, a job script, and on choice
a SLURM batch file; `Committed` gives the lines to start it with, and starts it here when asked. Nothing is uploaded. A
file that is there with another content is not replaced unless asked: what was committed once stays what it was.

Evidence: what a committed run was chosen on, as one JSON record beside its file.

What was predicted, what the trial measured and their ratios, the calibration, the versions of the packages, the
hardware, and the state of the code in git. No keys, no environment variables, no remote addresses. What is not known is
null: nothing is filled in.
"""

from __future__ import annotations

import datetime
import html
import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from kit.committed.job import make_job, write_drafts
from kit.committed.run import CommittedRun, LaunchLines
from kit.committed.yaml import Job, committed_yaml
from kit.config import Config, project_folder, read_yaml, resolve_path
from kit.errors import ConfigError, Problem
from kit.json_text import read_json
from kit.machine.machine import hardware
from kit.records.row import PREDICTED, Row, read_whole, row_of
from kit.tables import FRAME, html_list
from kit.trial.submit import versions
from kit.trial.trial import Trial

Slurm = Literal["", "torchrun", "python"]


def commit(
    config: Config, trial: Trial | str | Path | None = None, *, module: Any = None, data: Any = None,
    slurm: Slurm = "", replace: bool = False,
) -> Committed:  # fmt: skip
    """Write the files of a run that is to be kept, into `commit.folder`.

    Args:
        config: What to run; `commit` says on how many nodes, and where the files go.
        trial: The trial that it was chosen by, or its run directory: its row is the evidence, its devices, precision
            and loader settings are those of the file.
        module: What is trained, as `kit.fit` was given it: a class or an import path. None takes `model.target`.
        data: A LightningDataModule class or its import path, as `kit.fit` was given it. None takes the config's own.
        slurm: Write a batch file too, in which srun starts `torchrun` on every node, or each rank with `python`.
        replace: Replace the files of an earlier commit of this config.

    Raises:
        ConfigError: for what a file cannot name, and for files that are there with another content.
        HardwareError: for devices left open that this machine does not have.
        TargetError: for a class that no other machine could import.
    """
    found = Trial.open(trial) if isinstance(trial, str | Path) else trial
    write_drafts(module, data)
    job, notes = make_job(config, found, module, data)
    folder = resolve_folder(config)
    file = folder / f"{job.stem}.yaml"
    launch = launch_of(job, file)
    files = {file: committed_yaml(job, commands_of(launch)), file.with_suffix(".sh"): launch.script(_up(folder))}
    files |= {file.with_suffix(".sbatch"): launch.sbatch(slurm)} if slurm else {}
    _refuse_other(files, replace)
    evidence = json.dumps(evidence_record(job, found, notes), indent=2, ensure_ascii=False) + "\n"
    for path, text in {**files, file.with_suffix(".evidence.json"): evidence}.items():
        _write(path, text)
    file.with_suffix(".sh").chmod(0o755)
    return Committed(file)


def preview(
    config: Config, module: Any = None, data: Any = None, trial: Trial | None = None
) -> tuple[str, LaunchLines]:
    """The text of the file as it would be, and how it would be started; nothing is written.

    Raises:
        KitError: as `commit` does.
    """
    job, _ = make_job(config, trial, module, data)
    launch = launch_of(job, resolve_folder(config) / f"{job.stem}.yaml")
    return committed_yaml(job, commands_of(launch)), launch


@dataclass(frozen=True)
class Committed:
    """A committed file, read back."""

    file: Path

    @classmethod
    def open(cls, file: str | Path) -> Self:
        """A committed file by its path, relative to the project folder.

        Raises:
            ConfigError: when it cannot be read, or is no file that `kit.commit` wrote.
        """
        found = cls(resolve_path(file))
        _ = found.config, found.launch
        return found

    @cached_property
    def config(self) -> Config:
        """The Config that was committed."""
        return Config.load(self.file)

    @property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def values(self) -> dict[str, Any]:
        """What LightningCLI reads."""
        return read_yaml(self.text, str(self.file))

    @property
    def evidence(self) -> dict[str, Any]:
        """What it was chosen on; empty when the file beside it is not there."""
        path = self.file.with_suffix(".evidence.json")
        return read_whole(path, lambda file: dict(read_json(file.read_bytes()))) if path.is_file() else {}

    @cached_property
    def launch(self) -> LaunchLines:
        """How to start it; `launch.spread(nodes)` for other machines.

        Raises:
            ConfigError: when the file does not say for how many devices it is.
        """
        trainer = self.values["trainer"]
        counts = {name: trainer.get(name) for name in ("num_nodes", "devices")}
        wrong = [name for name, count in counts.items() if not isinstance(count, int) or count < 1]
        if wrong:
            message = f"{counts[wrong[0]]!r} is no number of them; kit.commit writes one"
            raise ConfigError([Problem(f"trainer.{wrong[0]}", message)], str(self.file))
        return LaunchLines(
            file=_called(self.file), name=self.file.stem, nodes=counts["num_nodes"], devices=counts["devices"],
            restarts=self.config.commit.restarts, gpu=trainer.get("accelerator") == "gpu",
        )  # fmt: skip

    def run(self, *, anew: bool = False) -> CommittedRun:
        """Start it on this machine, as its launch line does, and return at once; `.wait()` follows it.

        Args:
            anew: Begin at the first step. What an earlier run has left in its output folder, from whose last
                checkpoint it would go on, is moved beside it.

        Raises:
            HardwareError: for a file of several nodes, and for GPUs that are not here or are another trial's.
            ConfigError: when there is no place for its log, or an output folder that cannot be moved.
        """
        if anew:
            self._move_output()
        return CommittedRun(self.launch, self.config)

    def _move_output(self) -> None:
        output = str(self.values["trainer"]["default_root_dir"])
        if "://" in output:
            from kit.data.stores.url import redact

            message = f"{redact(output)} cannot be moved; give commit.output another place, or begin where it was"
            raise ConfigError([Problem("commit.output", message)])
        folder = project_folder() / output
        if folder.exists():
            names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
            folder.rename(next(name for name in names if not name.exists()))

    @property
    def files(self) -> list[Path]:
        """Everything that belongs to it, the file itself first."""
        suffixes = (".yaml", ".evidence.json", ".sh", ".sbatch")
        paths = [self.file, *(self.file.with_suffix(suffix) for suffix in suffixes)]
        return [path for path in dict.fromkeys(paths) if path.is_file()]

    @property
    def notes(self) -> list[str]:
        """What its user should know."""
        return [str(note) for note in self.evidence.get("notes", ())]

    def __repr__(self) -> str:
        lines = [f"{_called(self.file)}: {self._headline}"]
        lines += [f"  {command}" for command in commands_of(self.launch).values()]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  {_called(path)}" for path in self.files[1:])])

    @property
    def _headline(self) -> str:
        launch = self.launch
        ranks = "1 rank" if launch.world_size == 1 else f"{launch.world_size} ranks"
        epochs = "1 epoch" if self.config.training.max_epochs == 1 else f"{self.config.training.max_epochs} epochs"
        nodes = "" if launch.nodes == 1 else f" on {launch.nodes} nodes"
        return f"{self.config.name}, {ranks}{nodes}, {epochs}"

    def _repr_html_(self) -> str:
        commands = "\n".join(commands_of(self.launch).values())
        files = ", ".join(_called(path) for path in self.files)
        body = f"<b>{html.escape(self._headline)}</b><pre style='white-space:pre-wrap'>{html.escape(commands)}</pre>"
        notes = html_list(self.notes) if self.notes else ""
        text = html.escape(self.text)
        whole = f"<details><summary>{html.escape(files)}</summary><pre>{text}</pre></details>"
        return f"<div style='{FRAME}'>{body}{notes}{whole}</div>"


def launch_of(job: Job, file: Path) -> LaunchLines:
    """How the file of a job is started."""
    return LaunchLines(
        file=_called(file), name=job.stem, nodes=job.nodes, devices=job.devices,
        restarts=job.config.commit.restarts, gpu=job.accelerator == "gpu",
    )  # fmt: skip


def commands_of(launch: LaunchLines) -> dict[str, str]:
    """The lines that start a file, by what starts it: those that fit its number of nodes."""
    if launch.nodes > 1:
        return {"torchrun on every node, HEAD being the name of one": launch.torchrun_nodes}
    lines = {"python": launch.python}
    return lines | ({"torchrun": launch.torchrun} if launch.world_size > 1 else {})


def resolve_folder(config: Config) -> Path:
    """Where the files of a commit go."""
    given = Path(config.commit.folder).expanduser()
    return given if given.is_absolute() else project_folder() / given


def _called(path: Path) -> str:
    """As it is called from the project folder."""
    root = project_folder()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _up(folder: Path) -> str:
    return os.path.relpath(project_folder(), folder)


def _refuse_other(files: dict[Path, str], replace: bool) -> None:
    other = [path for path, text in files.items() if path.exists() and path.read_text(encoding="utf-8") != text]
    if other and not replace:
        message = f"{other[0]} is there with another content; commit(..., replace=True) writes it anew"
        raise ConfigError([Problem("commit.folder", message)])


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; choose another folder"
        raise ConfigError([Problem("commit.folder", message)]) from error


_GIT_SECONDS = 20
_MOST_FILES = 200


def evidence_record(job: Job, trial: Trial | None, notes: Sequence[str]) -> dict[str, Any]:
    """Everything, as JSON values."""
    row = None if trial is None else row_of(trial.paths)
    return {
        "committed": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "fingerprint": job.config.fingerprint,
        "config": job.config.values(),
        "resolved": {
            "accelerator": job.accelerator, "nodes": job.nodes, "devices": job.devices, "precision": job.precision,
            "global_batch_size": job.global_batch_size, **job.resolved,
        },
        "reasons": {path: reason for path, reason in job.reasons.items() if reason},
        "notes": list(notes),
        "predicted": _of(row, "predicted"),
        "measured": _of(row, "measured"),
        "ratio": _of(row, "ratio"),
        "trial": row,
        "memory_prediction": _json(trial.paths.prediction) if trial is not None else None,
        "calibration": _json(trial.paths.calibration) if trial is not None else None,
        "versions": trial.environment["versions"] if trial is not None else versions(),
        "hardware": _hardware(trial),
        "git": git_state(project_folder()),
    }  # fmt: skip


def _of(row: Row | None, part: str) -> dict[str, Any] | None:
    return None if row is None else {name: row[f"{name}_{part}"] for name in PREDICTED}


def _json(path: Path) -> Any:
    try:
        return read_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _hardware(trial: Trial | None) -> dict[str, Any]:
    """Of this machine, and what the trial was on."""
    here = hardware()
    names = ("accelerator", "device", "world_size")
    ran = {} if trial is None else {name: trial.event("fit_started", name) for name in names}
    gpus = [{"name": gpu.name, "memory_bytes": gpu.total_bytes, "capability": gpu.capability} for gpu in here.gpus]
    return {
        "trial": ran or None,
        "platform": None if trial is None else trial.environment.get("platform"),
        "cores": here.cores, "memory_bytes": here.memory_bytes,
        "gpus": gpus,
    }  # fmt: skip


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and changed files of the code; None where there is no git or no commit."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = (_git(folder, "status", "--porcelain") or "").splitlines()
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(changed),
        "changed": [line[3:] for line in changed[:_MOST_FILES]],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments], capture_output=True, text=True,
            timeout=_GIT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None
