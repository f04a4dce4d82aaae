"""Folder: synchronous reads of a store on a local disk, for threads that decode what they read.

A file in the page cache is read in some ten microseconds; a turn of an event loop costs several times that. The same
answers as zarr's LocalStore: bytes, or None where there is no such object. Never more bytes than asked for; fewer only
when the file ends, which the caller checks. Shard indexes are read once and kept.
"""

from __future__ import annotations

import threading
from pathlib import Path

from kit.data.codec import Index, Octets, StoredArray, decode_index, octets
from kit.data.counters import Counters
from kit.data.stores import store_error

_WHENCE_END = 2


class Folder:
    """The objects below one folder."""

    def __init__(self, root: Path, counters: Counters) -> None:
        self._root = str(root)
        self._counters = counters
        self._indexes: dict[str, _Slot] = {}
        self._lock = threading.Lock()

    def read(self, key: str, first: int | None = None, count: int = -1) -> Octets | None:
        """`count` bytes from `first` on, the last `-first` bytes for a negative one, or the whole object."""
        try:
            data = self._read(key, first, count)
        except OSError as error:
            raise store_error(self._root, error) from None
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return data

    def index(self, stored: StoredArray, key: str) -> Index | None:
        """The index of a shard, read by the first thread that asks; a failure is not kept."""
        with self._lock:
            slot = self._indexes.setdefault(key, _Slot())
        with slot.lock:
            if not slot.known:
                slot.index, slot.known = self._read_index(stored, key), True
        return slot.index

    def _read(self, key: str, first: int | None, count: int) -> Octets | None:
        try:
            with open(f"{self._root}/{key}", "rb", buffering=0) as file:  # noqa: PTH123  pathlib costs as much again
                if first is not None:
                    size = file.seek(0, _WHENCE_END)
                    file.seek(max(0, size + first) if first < 0 else min(first, size))
                return octets(file.read(count))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _read_index(self, stored: StoredArray, key: str) -> Index | None:
        data = self.read(key, -stored.index_bytes if stored.index_at_end else 0, stored.index_bytes)
        return None if data is None else decode_index(stored, key, data, self._root)


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known = False
        self.index: Index | None = None
