"""Folder: synchronous reads of a store on a local disk.

A file in the page cache is read in some ten microseconds; a turn of an event loop costs several times that. The same
answers as zarr's LocalStore: bytes, or None where there is no such object. Never more bytes than asked for; fewer only
when the file ends, which the caller checks.
"""

from __future__ import annotations

from pathlib import Path

from kit.data.counters import Counters
from kit.data.octets import Octets, octets
from kit.data.stores import store_error

_WHENCE_END = 2


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
        try:
            data = self._read(key, first, -1 if first is None or last is None else last - first)
        except OSError as error:
            raise store_error(self._root, error) from None
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return data

    def _read(self, key: str, first: int | None, count: int) -> Octets | None:
        try:
            with open(f"{self._root}/{key}", "rb", buffering=0) as file:  # noqa: PTH123  pathlib costs as much again
                if first is not None:
                    size = file.seek(0, _WHENCE_END)
                    file.seek(max(0, size + first) if first < 0 else min(first, size))
                return octets(file.read(count))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
