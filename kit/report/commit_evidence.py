"""Evidence: what a committed run was chosen on, as one JSON record beside its file.

What was predicted, what the trial measured and their ratios, the calibration, the versions of the packages, the
hardware, and the state of the code in git. No keys, no environment variables, no remote addresses. What is not known is
null: nothing is filled in.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.config import project_folder
from kit.json_text import read_json
from kit.machine import hardware
from kit.report.committed_yaml import Job
from kit.report.row import PREDICTED, Row
from kit.report.row_file import row_of
from kit.run.submission import versions
from kit.run.trial import Trial

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
