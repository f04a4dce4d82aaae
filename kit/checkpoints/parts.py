"""Parcels: a file or folder in a store, cut into parts, seen only when whole.

A parcel `name` below a URL is `name/parts/<sha256>`, one object per part, and `name/kit-parcel.json`, its list, which
is written last: without the list there is no parcel, and the list of an earlier one of that name holds until it is
replaced. A part is named after its content, so a part that is there with its size need not be sent again, and a reader
can tell that it has read the right bytes. Joined in the order of the list, the parts of a file are the file.

Sizes are bytes; `saved` is when the newest file was last changed, in seconds since the epoch, and orders parcels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.data.stores.local import check_names, why_not
from kit.errors import StoreError
from kit.json_text import read_json

LIST_NAME = "kit-parcel.json"
_FORMAT = "kit parcel 1"
_SHA256 = re.compile(r"[0-9a-f]{64}")

Signature = tuple[tuple[str, int, int], ...]
"""(path within, bytes, time of change in nanoseconds) of every file: what changes when the content does."""


@dataclass(frozen=True, slots=True)
class BundlePart:
    """Some bytes of a file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file: its path within the parcel (empty when the parcel is a file) and its parts in order."""

    path: str
    parts: tuple[BundlePart, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is in one parcel."""

    name: str
    saved: float
    files: tuple[PackedFile, ...]

    @property
    def is_folder(self) -> bool:
        return [file.path for file in self.files] != [""]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def parts(self) -> Iterator[BundlePart]:
        for file in self.files:
            yield from file.parts

    def dump(self) -> bytes:
        """The list, as it is stored."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def load(cls, data: bytes, where: str) -> Bundle:
        """The parcel of a stored list.

        Raises:
            StoreError: when it is none, or would write outside its folder.
        """
        try:
            values = read_json(data)
            if values["format"] != _FORMAT:
                raise ValueError(values["format"])
            files = tuple(_file(item) for item in values["files"])
            parcel = cls(_name(values["name"]), float(values["saved"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"{where}/{LIST_NAME} is not a list of parts ({reason}); it was edited, or is newer"
            ) from None
        if parcel.is_folder:
            check_names((file.path for file in files), where)
        return parcel


def part_key(name: str, sha256: str) -> str:
    return f"{name}/parts/{sha256}"


def list_key(name: str) -> str:
    return f"{name}/{LIST_NAME}"


def check_name(name: str) -> str:
    """The name, when a parcel can bear it.

    Raises:
        StoreError: when it is no plain name.
    """
    try:
        return _name(name)
    except ValueError as error:
        raise StoreError(f"{error}; give a plain name such as step-1000.ckpt") from None


def signature(source: Path) -> Signature:
    """What a file, or all files of a folder, look like now.

    Raises:
        OSError: when it is not there, or changes while it is looked at.
    """
    if not source.is_dir():
        return (_seen("", source),)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return tuple(_seen(path.relative_to(source).as_posix(), path) for path in files)


def saved_at(seen: Signature) -> float:
    """When the newest of these files was changed."""
    return max((changed for _, _, changed in seen), default=0) / 1e9


def spans(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """(first byte, one past the last) of each part; an empty file has none."""
    return [(first, min(first + part_bytes, size_bytes)) for first in range(0, size_bytes, part_bytes)]


def _seen(path: str, file: Path) -> tuple[str, int, int]:
    found = os.stat(file)  # noqa: PTH116 - through links, as it will be read
    return path, found.st_size, found.st_mtime_ns


def _file(values: Any) -> PackedFile:
    if not isinstance(values["path"], str):
        raise TypeError(f"{values['path']!r} is no path")
    return PackedFile(values["path"], tuple(_part(item) for item in values["parts"]))


def _part(values: Any) -> BundlePart:
    if not _SHA256.fullmatch(values["sha256"]) or not isinstance(values["size_bytes"], int) or values["size_bytes"] < 1:
        raise ValueError(f"{values} is no part")
    return BundlePart(values["sha256"], values["size_bytes"])


def _name(name: str) -> str:
    if not isinstance(name, str) or name.startswith(".") or "/" in name or why_not(name):
        raise ValueError(f"{name!r} cannot name a parcel")
    return name
