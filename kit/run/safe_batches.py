"""The last safe batch of a configuration, remembered below the folder of its runs.

A configuration is all that decides what a step allocates, but the batch itself: model, data, levers, strategy, kind of
device and its memory. One small file each, replaced in one move, so that two kernels can remember at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.json_text import read_json
from kit.plan.memory.cards import THIS_MACHINE
from kit.run.memory.hollow import Parcel, hollow
from kit.run.memory.question import ask
from kit.run.paths import runs_folder
from kit.run.payload import Part

_FOLDER = ".safe-batches"


def batch_key(module: Any, data: Any, config: Config) -> str:
    """Hexadecimal digits, the same for configurations that differ in their batch only.

    Raises:
        KitError: what `predict_memory` refuses.
    """
    plain = config.replace({"loader.batch_size": 1, "levers.accumulate_grad_batches": 1})
    question, target = ask(module, data, plain, THIS_MACHINE)
    # Loaders that were made twice pickle differently; without the numbers in them they do not.
    shapes = hollow(question.data, Part("default")).module
    question = dataclasses.replace(question, parcel=Parcel(question.parcel.module, shapes))
    device = [target.device_kind, target.capability, config.hardware.device_memory_bytes]
    return hashlib.sha256(json.dumps([question.key, device]).encode()).hexdigest()[:16]


def remember(key: str, config: Config, batch_size: int) -> Path:
    """Keep `batch_size` as the last that was safe."""
    folder = runs_folder(config.trial.folder) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"batch_size": batch_size, "name": config.name}), encoding="utf-8")
    return draft.replace(path)


def remembered(key: str, config: Config) -> int | None:
    """The last safe batch, or None when there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json((runs_folder(config.trial.folder) / _FOLDER / f"{key}.json").read_text())["batch_size"]
        return int(found) if int(found) > 0 else None
    return None
