"""Where a committed run goes on: from the last checkpoint here, or from the copy of it in the cloud.

A file says `ckpt_path: last`, which Lightning takes for the last checkpoint in its own folder. After the machine is
lost that folder is empty, and `kit.train.CheckpointUpload` in the same file says where copies are: the newest whole
one is fetched, once for all ranks of a machine. Every rank decides alone and before it joins the others, by what all of
them see. On one machine that is the newer of both, by when it was saved. On several machines the folder may be another
on each, so there the copies decide, where there is one. A URL may also be given outright: `--ckpt_path gs://bucket/run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.data.downloads import fetch_checkpoint
from kit.data.parcels import saved_at, signature
from kit.data.uploads import last_parcel
from kit.train.entries import Entry

Values = Mapping[str, Any]
_UPLOAD = "CheckpointUpload"
_SAVES = "ModelCheckpoint"
_FETCHED = "fetched"


def newest_checkpoint(values: Values) -> str | None:
    """What to put in the place of `ckpt_path`; None where it stays as it is.

    Args:
        values: What files and options came to, as LightningCLI parsed them.

    Raises:
        StoreError: when the copies cannot be read.
    """
    trainer, asked = values.get("trainer") or {}, str(values.get("ckpt_path") or "")
    root = str(trainer.get("default_root_dir") or "")
    folder = Path("" if "://" in root else root).absolute() / _FETCHED
    if "://" in asked:
        return _fetched(asked, folder, _credentials(trainer))
    uploads = [entry["init_args"] for entry in _entries(trainer, _UPLOAD)]
    if asked != "last" or not uploads:
        return None
    url, credentials = str(uploads[0]["url"]), _credentials(trainer)
    copy = last_parcel(url, credentials)
    several = int(trainer.get("num_nodes") or 1) > 1
    if copy is None or (not several and copy[1].saved <= _saved_here(trainer)):
        return None
    return _fetched(url, folder, credentials)


def _fetched(url: str, folder: Path, credentials: str) -> str | None:
    found = fetch_checkpoint(url, folder, credentials=credentials)
    return None if found is None else str(found)


def _credentials(trainer: Values) -> str:
    given = (entry["init_args"].get("credentials") for entry in _entries(trainer, _UPLOAD))
    return str(next(filter(None, given), "default"))


def _saved_here(trainer: Values) -> float:
    """When the newest last checkpoint of this machine was saved; 0 where there is none."""
    folders = {str(entry["init_args"].get("dirpath") or "") for entry in _entries(trainer, _SAVES)}
    local = (Path(folder) for folder in folders if folder and "://" not in folder)
    return max((saved_at(signature(file)) for folder in local for file in folder.glob("last*.ckpt")), default=0.0)


def _entries(trainer: Values, name: str) -> Iterator[Entry]:
    """The callbacks of that class."""
    for entry in trainer.get("callbacks") or []:
        if str(entry.get("class_path", "")).rpartition(".")[2] == name and entry.get("init_args"):
            yield entry
