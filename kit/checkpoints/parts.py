"""Bundles: how a checkpoint, a file or a folder, lies in a store: cut into parts, and visible only when complete.

A bundle `name` below a URL is `name/parts/<sha256>`, one object per part, and `name/kit-parcel.json`, its list of
parts, which is written last: without the list there is no bundle, and the list of an earlier bundle of that name holds
until it is replaced. A part is named after its content, so a part that is there with its size need not be sent again,
and a reader can tell that it has read the right bytes. Joined in the order of the list, the parts of a file are the
file.

Sizes are bytes; `saved` is when the newest file was last changed, in seconds since the epoch, and orders bundles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kit.data.stores.local import check_names, why_not
from kit.errors import StoreError
from kit.json_text import read_json

LIST_NAME = "kit-parcel.json"
_FORMAT = "kit parcel 1"

Signature = tuple[tuple[str, int, int], ...]
"""(path within, bytes, time of change in nanoseconds) of every file: what changes when the content does."""


def _plain_name(name: str) -> str:
    if name.startswith(".") or "/" in name or why_not(name):
        raise ValueError(f"{name!r} cannot name a checkpoint")
    return name


@dataclass(frozen=True, slots=True)
class BundlePart:
    """Some bytes of a file."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file: its path within the bundle (empty when the bundle is a file) and its parts in order."""

    path: str
    parts: tuple[BundlePart, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is in one bundle."""

    name: Annotated[str, AfterValidator(_plain_name)]
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
        """The bundle of a stored list.

        Raises:
            StoreError: when it is none, or would write outside its folder.
        """
        try:
            values = read_json(data)
            if not isinstance(values, dict) or values.get("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            bundle = TypeAdapter(cls).validate_python(values)
        except ValueError as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise StoreError(
                f"{where}/{LIST_NAME} is not a list of parts ({reason}); it was edited, or is newer"
            ) from None
        if bundle.is_folder:
            check_names((file.path for file in bundle.files), where)
        return bundle


def part_key(name: str, sha256: str) -> str:
    return f"{name}/parts/{sha256}"


def list_key(name: str) -> str:
    return f"{name}/{LIST_NAME}"


def check_name(name: str) -> str:
    """The name, when a bundle can have it.

    Raises:
        StoreError: when it is no plain name.
    """
    try:
        return _plain_name(name)
    except ValueError as error:
        raise StoreError(f"{error}; give a plain name such as step-1000.ckpt") from None


def signature(source: Path) -> Signature:
    """What a file, or all files of a folder, look like now.

    Raises:
        OSError: when it is not there, or changes while it is looked at.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    stats = [(file, os.stat(file)) for file in files]  # noqa: PTH116 - through links, as it will be read
    return tuple(
        ("" if file is source else file.relative_to(source).as_posix(), found.st_size, found.st_mtime_ns)
        for file, found in stats
    )


def saved_at(seen: Signature) -> float:
    """When the newest of these files was changed."""
    return max((changed for _, _, changed in seen), default=0) / 1e9


def spans(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """(first byte, one past the last) of each part; an empty file has none."""
    return [(first, min(first + part_bytes, size_bytes)) for first in range(0, size_bytes, part_bytes)]
