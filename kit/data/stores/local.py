"""Folder: synchronous reads of a store on a local disk; check_names: which keys of a bucket can be files in a folder.

A file in the page cache is read in some ten microseconds; a turn of an event loop costs several times that. The same
results as of zarr's LocalStore: bytes, or None where there is no such object. Never more bytes than requested; fewer
only when the file ends, which the caller checks.

Whoever writes to a bucket chooses its keys, and a key may hold anything: `../x`, `/etc/x`, `a//b`, a letter that a file
system takes for a slash or a dot. A key that could leave the folder, hide its end, or fall on another key's file is
refused with all the keys of its download, before anything is made there.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from kit.data.stores.counters import Counters
from kit.data.stores.transfer import Octets, octets
from kit.data.stores.url import store_error
from kit.errors import StoreError


class Folder:
    """The objects below one folder; call from any thread."""

    def __init__(self, root: Path, counters: Counters) -> None:
        self._root = str(root)
        self._counters = counters

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object.

        Raises:
            StoreError: when the disk refuses.
        """
        data: Octets | None = None
        try:
            with open(f"{self._root}/{key}", "rb", buffering=0) as file:  # noqa: PTH123  pathlib costs as much again
                if first is not None:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size + first) if first < 0 else min(first, size))
                data = octets(file.read(-1 if first is None or last is None else last - first))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            pass
        except OSError as error:
            raise store_error(self._root, error) from None
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return data


_LONGEST_PART_BYTES = 255
_LONGEST_BYTES = 4000
"""Within a folder, so that the folder's own path has room too: Linux takes 4096 in all."""
_DRIVE = re.compile(r"[A-Za-z]:")
_SLASHES = frozenset("\\∕⁄⧸⧵∖﹨")
"""What is taken for a slash, by a system or by who reads it."""
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What changes the direction of text, so that a name ends otherwise than it looks."""
_UNSEEN = ("Cc", "Cs", "Zl", "Zp")
"""Kinds of characters that no name shows: control characters, halves of a pair, ends of lines."""


def check_names(keys: Iterable[str], where: str) -> None:
    """Refuse keys that cannot be files side by side within one folder.

    Args:
        keys: All of one download, relative to the folder.
        where: Of the bucket, as an error may show it.

    Raises:
        StoreError: for the first key that is none, or that stands in the way of another.
    """
    files: set[str] = set()
    for key in keys:
        reason = why_not(key)
        if key in files:
            reason = "it is there twice"
        if reason:
            raise _refused(where, key, reason)
        files.add(key)
    for key in files:
        for folder in PurePosixPath(key).parents:
            if str(folder) in files:
                raise _refused(where, key, f"{str(folder)!r} is an object too, and cannot be file and folder")


def why_not(key: str) -> str:
    """What keeps a key from being a path within a folder; empty for nothing."""
    if _DRIVE.match(key):
        return "it begins with a drive"
    if any(unicodedata.category(letter) in _UNSEEN for letter in key):
        return "it holds a control character"
    if _TURNS & set(key):
        return "it holds a character that turns the direction of text"
    plain = unicodedata.normalize("NFKC", key)
    if _SLASHES & set(key) or "\\" in plain or plain.count("/") != key.count("/"):
        return "it holds a character that is taken for a slash"
    if len(os.fsencode(key)) > _LONGEST_BYTES:
        return f"it is longer than {_LONGEST_BYTES} bytes"
    for part in key.split("/"):
        # A dot counts in any of its shapes, also with letters in between that take no room.
        seen = "".join(letter for letter in unicodedata.normalize("NFKC", part) if unicodedata.category(letter) != "Cf")
        if not seen.strip():
            return "it has an empty part"
        if seen.strip() in (".", ".."):
            return "it has a part of dots, which is this folder or the one above"
        if len(os.fsencode(part)) > _LONGEST_PART_BYTES:
            return f"it has a part longer than {_LONGEST_PART_BYTES} bytes"
    return ""


def make_file(folder: Path, name: str) -> Path:
    """An empty new file at a checked name within a folder that exists.

    Raises:
        StoreError: when another file is there, which one of its own download can be where names differ in case or
            in the way letters are composed only, or when a link leads out of the folder.
    """
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.parent.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"{file.parent} leads out of {folder} by a link; remove the link, or give another path")
    try:
        file.open("xb").close()
    except FileExistsError:
        raise StoreError(
            f"{name!r} and another object are one file here, where names that differ in upper and lower case or in "
            f"composed letters only are equal; give a path on another file system than that of {folder}"
        ) from None
    return file


def _refused(where: str, key: str, reason: str) -> StoreError:
    shown = ascii(key) if len(key) <= 200 else f"{key[:200]!a}..."
    return StoreError(
        f"{where}: the key {shown} cannot be a file within a folder: {reason}; rename or remove it. Nothing was written"
    )
