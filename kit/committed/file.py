"""commit: the end of an experiment, as files that run it unchanged on the machine it is meant for.

A LightningCLI YAML with every choice settled and its reason, a job script, on request a SLURM batch file, and the
evidence. `Committed` reads such a file back, gives the lines to start it with, and starts it here when asked. Nothing
is uploaded. A file that is there with another content is replaced only when asked: what was committed once stays.

The evidence is one JSON record: what was predicted, what the trial measured and their ratios, the calibration, the
versions of the packages, the hardware, and the state of the code in git. No keys, no environment variables, no remote
addresses. What is not known is null: nothing is filled in.
"""

from __future__ import annotations

import datetime
import html
import itertools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from kit.arguments import takes_config
from kit.committed.job import make_job, write_drafts
from kit.committed.run import CommittedRun, LaunchLines
from kit.committed.yaml import Job, committed_yaml
from kit.config import Config, project_folder, project_path, resolve_path
from kit.errors import ConfigError, Problem, did_you_mean
from kit.json_text import read_json, write_whole
from kit.machine.machine import hardware
from kit.records.ratios import SPEED
from kit.records.row import PREDICTED, Row, read_whole, row_of
from kit.tables import FRAME, html_list
from kit.train.choices import asked_stages
from kit.trial.submit import versions
from kit.trial.trial import Trial
from kit.yaml_text import read_yaml

Slurm = Literal["", "torchrun", "python"]
_GIT_SECONDS = 20
_MOST_FILES = 200


@takes_config
def commit(
    config: Config, trial: Trial | str | Path | None = None, *, module: Any = None, data: Any = None,
    logger: Any = None, callbacks: Any = None, trainer: Mapping[str, Any] | None = None,
    slurm: Slurm = "", replace: bool = False,
) -> Committed:  # fmt: skip
    """Write a config as a LightningCLI file that runs without the notebook, with its evidence and a job script.

    Args:
        config: What to run. Its section `commit` says on how many nodes, and where the files go.
        trial: The trial that the config was chosen by, or its run directory. Its row becomes the evidence, and its
            devices, precision and loader settings those of the file.
        module: What is trained: a class or an import path. None takes `model.target`.
        data: A LightningDataModule class or its import path. None takes the config's own data.
        logger: As `kit.fit` takes it; None takes the trial's, and False the CSV file of a run without any.
        callbacks: As `kit.fit` takes them; None takes the trial's. What is not known to be made of plain arguments is
            given as `{"class_path": "package.Name", "init_args": {...}}`, or as a `functools.partial` of its class.
        trainer: As `kit.fit` takes it; None takes the trial's.
        slurm: `torchrun` or `python` writes a batch file too, in which srun starts torchrun on every node, or each
            rank with python.
        replace: Replace the files of an earlier commit of this config.

    Returns:
        The committed file: `launch` has the commands that start it, `run()` starts it beside the notebook.

    Raises:
        ConfigError: for what a file cannot name, and where files with other content are.
        HardwareError: for devices left open that this machine does not have.
        TargetError: for a class that no other machine could import.

    Example:
        >>> committed = kit.commit(ocean)
        >>> kit.Config.load(committed.file).model.target
        'kit.models:UNet'
    """
    asked: Any = Trial.open(trial) if isinstance(trial, str | Path) else trial  # by a user, who may give anything
    if not isinstance(asked, Trial | None):
        message = f"{type(asked).__name__} is no trial; give one or its run directory, and module= and data= by name"
        raise ConfigError([Problem("trial", message)])
    if slurm not in (known := get_args(Slurm)):
        hint = did_you_mean(slurm, known[1:])
        raise ConfigError([Problem("slurm", f"{slurm!r} is nothing that srun starts here{hint}")])
    found: Trial | None = asked
    write_drafts(module, data)
    job, notes = make_job(config, found, module, data, logger, callbacks, trainer)
    folder = project_folder() / Path(config.commit.folder).expanduser()
    file = folder / f"{job.stem}.yaml"
    launch = _launch(job, file)
    up = os.path.relpath(project_folder(), folder)
    files = {file: committed_yaml(job, commands_of(launch)), file.with_suffix(".sh"): launch.script(up)}
    files |= {file.with_suffix(".sbatch"): launch.sbatch(slurm)} if slurm else {}
    other = [path for path, text in files.items() if path.exists() and path.read_text(encoding="utf-8") != text]
    if other and not replace:
        message = f"{other[0]} is there with another content; commit(..., replace=True) writes it anew"
        raise ConfigError([Problem("commit.folder", message)])
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
    launch = _launch(job, project_folder() / Path(config.commit.folder).expanduser() / f"{job.stem}.yaml")
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
            message = f"{counts[wrong[0]]!r} is not a number from 1 on; kit.commit writes one"
            raise ConfigError([Problem(f"trainer.{wrong[0]}", message)], str(self.file))
        return LaunchLines(
            file=project_path(self.file), name=self.file.stem, nodes=counts["num_nodes"], devices=counts["devices"],
            restarts=self.config.commit.restarts, gpu=trainer.get("accelerator") == "gpu",
            stages=tuple(asked_stages(self.config)),
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
            output = str(self.values["trainer"]["default_root_dir"])
            if "://" in output:
                from kit.data.stores.url import redact

                message = f"{redact(output)} cannot be moved; give commit.output another place, or begin where it was"
                raise ConfigError([Problem("commit.output", message)])
            folder = project_folder() / output
            if folder.exists():
                names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
                folder.rename(next(name for name in names if not name.exists()))
        classes = [str(entry["class_path"]) for entry in self.values["trainer"].get("callbacks") or ()]
        bars = [name for name in classes if name.endswith("ProgressBar")]  # Lightning takes no false beside one
        return CommittedRun(self.launch, self.config, () if bars else ("--trainer.enable_progress_bar=false",))

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
        lines = [f"{project_path(self.file)}: {self._headline}"]
        lines += [f"  {command}" for command in commands_of(self.launch).values()]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  {project_path(path)}" for path in self.files[1:])])

    @property
    def _headline(self) -> str:
        launch = self.launch
        ranks = "1 rank" if launch.world_size == 1 else f"{launch.world_size} ranks"
        nodes = "" if launch.nodes == 1 else f" on {launch.nodes} nodes"
        most = self.values["trainer"].get("max_time")
        time = f", at most {most}" if most else ""
        return f"{self.config.name}, {ranks}{nodes}, {self.config.training.length}{time}"

    def _repr_html_(self) -> str:
        commands = "\n".join(commands_of(self.launch).values())
        files = ", ".join(project_path(path) for path in self.files)
        body = f"<b>{html.escape(self._headline)}</b><pre style='white-space:pre-wrap'>{html.escape(commands)}</pre>"
        notes = html_list(self.notes) if self.notes else ""
        text = html.escape(self.text)
        whole = f"<details><summary>{html.escape(files)}</summary><pre>{text}</pre></details>"
        return f"<div style='{FRAME}'>{body}{notes}{whole}</div>"


def _launch(job: Job, file: Path) -> LaunchLines:
    return LaunchLines(
        file=project_path(file), name=job.stem, nodes=job.nodes, devices=job.devices,
        restarts=job.config.commit.restarts, gpu=job.accelerator == "gpu", stages=tuple(asked_stages(job.config)),
    )  # fmt: skip


def commands_of(launch: LaunchLines) -> dict[str, str]:
    """The lines that start a file, by what starts it: those that fit its number of nodes; then what follows the fit."""
    if launch.nodes > 1:
        return {"torchrun on every node, HEAD being the name of one": launch.torchrun_nodes}
    lines = {"python": launch.python}
    lines |= {"torchrun": launch.torchrun} if launch.world_size > 1 else {}
    return lines | {f"{stage}, afterwards": launch.stage(stage) for stage in launch.stages}


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; choose another folder"
        raise ConfigError([Problem("commit.folder", message)]) from error


def evidence_record(job: Job, trial: Trial | None, notes: Sequence[str]) -> dict[str, Any]:
    """Everything, as JSON values."""
    row = None if trial is None else row_of(trial.paths)
    here = hardware()
    names = ("accelerator", "device", "world_size")
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
        **{part: _compared(row, part) for part in ("predicted", "measured", "ratio")},
        "trial": row,
        "memory_prediction": _json(trial.paths.prediction) if trial is not None else None,
        "calibration": _json(trial.paths.calibration) if trial is not None else None,
        "versions": trial.environment["versions"] if trial is not None else versions(),
        "hardware": {
            "trial": None if trial is None else {name: trial.event("fit_started", name) for name in names},
            "platform": None if trial is None else trial.environment.get("platform"),
            "cores": here.cores, "memory_bytes": here.memory_bytes,
            "gpus": [
                {"name": gpu.name, "memory_bytes": gpu.total_bytes, "capability": gpu.capability} for gpu in here.gpus
            ],
        },
        "git": git_state(project_folder()),
    }  # fmt: skip


def _compared(row: Row | None, part: str) -> dict[str, Any] | None:
    """What was predicted, or measured, or their ratio."""
    if row is None:
        return None
    speed = row.get(SPEED if part == "measured" else f"{SPEED}_{part}")
    return {SPEED: speed, **{name: row[f"{name}_{part}"] for name in PREDICTED}}


def _json(path: Path) -> Any:
    try:
        return read_json(path.read_bytes())
    except (OSError, ValueError):
        return None


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
