"""ReadCache: responses of a remote store, kept in memory, or in a folder that all processes of a machine share.

It lies beneath the cache of decoded chunks and keeps stored bytes as requests gave them. An entry is named after the
URL, the object's key, the range, and the object's identity. In a store that kit built the identity is size and checksum
from the manifest, which every opening reads anew, so a rebuilt store finds no old entry. In any other store it is what
the store says of the object (entity tag or generation, else size and time), requested once per object and reader; a
store that says neither is refused by name. A reader that stays open while its store is rebuilt may get either.

In a folder an entry is written under another name and moved into place, with its length and CRC-32C: one cut short,
flipped or foreign is a miss and is removed, never an error and never served. The invariant: the entries never exceed
the folder's size, whoever writes and whoever is killed. So a file keeps their total, which grows before an entry
appears, under the lock under which entries are moved into place; making room counts the files again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import google_crc32c

from kit.config import Cache, resolve_path
from kit.data.stores.manifest import Manifest, crc32c
from kit.data.stores.transfer import Counters, Octets, octets
from kit.errors import ConfigError, Problem

Eviction = Literal["lru", "none"]
Read = Callable[[str, int | None, int | None], Octets | None]

_HEAD = struct.Struct("<4sQI")
_MARK = b"kit1"
_ENTRY, _DRAFT = ".entry", ".partial"
_TOTAL_BYTES = 8
_ROOM_FRACTION = 0.9
"""How full a cache is after room has been made in it."""
_TOUCH_SECONDS = 60.0
"""An entry's time of use is not written more often than this."""
_DRAFT_SECONDS = 60.0


class Entries(Protocol):
    """Bytes by name, within a size."""

    def get(self, name: str) -> Octets | None: ...

    def put(self, name: str, data: Octets) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCache:
    """What one reader caches with; holds no handle, so it pickles."""

    size_bytes: int
    folder: str
    eviction: Eviction

    @classmethod
    def of(cls, settings: Cache) -> ReadCache | None:
        """None where nothing is to be kept."""
        if not settings.size_bytes:
            return None
        return cls(size_bytes=settings.size_bytes, folder=settings.folder, eviction=settings.eviction)

    def open(self) -> Entries:
        """The cache in the folder, or this process's in memory.

        Raises:
            ConfigError: when the folder cannot be written.
        """
        if not self.folder:
            return _in_memory(self.size_bytes, self.eviction)
        folder = resolve_path(self.folder)
        try:
            return SharedFolder(folder, self.size_bytes, self.eviction)
        except OSError as error:
            raise ConfigError([Problem("cache.folder", f"{folder} cannot be written: {error.strerror}")]) from None

    def forget(self) -> None:
        """Empty what this process keeps in memory; a folder, which others may use, stays as it is."""
        if not self.folder:
            _in_memory(self.size_bytes, self.eviction).clear()


class CachedReads:
    """A store read through a cache; call from any thread.

    Args:
        read: Reads the store.
        identify: Which object a key names now; None when that cannot be told.
    """

    def __init__(
        self, read: Read, url: str, entries: Entries, identify: Callable[[str], str | None], counters: Counters
    ) -> None:
        self._read, self._url, self._entries = read, url, entries
        self._identify, self._counters = identify, counters
        self._known: dict[str, str | None] = {}

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """As the store's own `read`; an object that is not there is asked for again each time."""
        if key not in self._known:
            self._known[key] = self._identify(key)
        identity = self._known[key]
        if identity is None:
            return self._read(key, first, last)
        name = hashlib.sha256(repr((self._url, key, first, last, identity)).encode()).hexdigest()
        data = self._entries.get(name)
        if data is not None:
            self._counters.add(read_cache_hits=1, read_cache_bytes=len(data))
            return data
        self._counters.add(read_cache_misses=1)
        data = self._read(key, first, last)
        if data is not None:
            self._entries.put(name, data)
        return data


def identities(manifest: Manifest) -> Mapping[str, str]:
    """Which objects a store that kit built holds, by key."""
    return {item.key: f"{item.bytes}-{item.crc32c}" for item in manifest.objects}


# -- in memory


class MemoryCache:
    """Entries of this process; call from any thread."""

    def __init__(self, size_bytes: int, eviction: Eviction) -> None:
        self._size_bytes, self._eviction = size_bytes, eviction
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Octets] = OrderedDict()
        self.held_bytes = 0

    def get(self, name: str) -> Octets | None:
        with self._lock:
            data = self._entries.get(name)
            if data is not None:
                self._entries.move_to_end(name)
            return data

    def put(self, name: str, data: Octets) -> None:
        size = len(data)
        with self._lock:
            full = self.held_bytes + size > self._size_bytes
            if name in self._entries or size > self._size_bytes or (full and self._eviction == "none"):
                return
            self._entries[name] = data if data.base is None else data.copy()
            self.held_bytes += size
            while self.held_bytes > self._size_bytes:
                self.held_bytes -= len(self._entries.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.held_bytes = 0


@cache
def _in_memory(size_bytes: int, eviction: Eviction) -> MemoryCache:
    """Shared by the readers of a process, so that a loader made anew finds what the last one read."""
    return MemoryCache(size_bytes, eviction)


# -- in a folder


class SharedFolder:
    """Entries of a folder; call from any thread of any process."""

    def __init__(self, folder: Path, size_bytes: int, eviction: Eviction) -> None:
        self._folder, self._size_bytes, self._eviction = folder, size_bytes, eviction
        folder.mkdir(parents=True, exist_ok=True)
        with self._total():
            pass

    def get(self, name: str) -> Octets | None:
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                data = file.read(stat.st_size)
        except OSError:
            return None
        mark, length, checksum = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (b"", 0, 0)
        body = octets(data)[_HEAD.size :]
        if mark != _MARK or len(body) != length or google_crc32c.value(body) != checksum:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        if self._eviction == "lru" and time.time() - stat.st_mtime > _TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(path)
        return body

    def put(self, name: str, data: Octets) -> None:
        """Keep it if there is room, or room can be made; a disk that refuses is no error of the reader's."""
        body = data.tobytes()
        size = _HEAD.size + len(body)
        path = self._path(name)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{_DRAFT}")
        if size > self._size_bytes or path.exists():
            return
        with contextlib.suppress(OSError):
            try:
                path.parent.mkdir(exist_ok=True)
                draft.write_bytes(_HEAD.pack(_MARK, len(body), crc32c(body)) + body)
                with self._total() as total:
                    if total.value + size > self._size_bytes:
                        total.save(sum(size for _, _, size in self._files()))
                        if total.value + size > self._size_bytes and self._eviction == "lru":
                            total.save(self._make_room(int(self._size_bytes * _ROOM_FRACTION) - size))
                    if total.value + size <= self._size_bytes and not path.exists():
                        total.save(total.value + size)
                        draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}{_ENTRY}"

    def _make_room(self, target_bytes: int) -> int:
        """Remove what was used longest ago until no more than this is held, which is returned."""
        found = sorted(self._files(), key=lambda item: item[1])
        held = sum(size for _, _, size in found)
        for path, _, size in found:
            if held <= target_bytes:
                break
            path.unlink(missing_ok=True)
            held -= size
        return held

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Every entry with its time of use and size; drafts that a killed process left are removed on the way."""
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                if path.suffix == _ENTRY:
                    yield path, stat.st_mtime, stat.st_size
                elif path.suffix == _DRAFT and time.time() - stat.st_mtime > _DRAFT_SECONDS:
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _total(self) -> Iterator[_Total]:
        """The total, under a lock that the kernel drops with its process; counted where it is not known."""
        import fcntl

        descriptor = os.open(self._folder / "total", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, _TOTAL_BYTES, 0)
            total = _Total(descriptor, int.from_bytes(text, "little"))
            if len(text) < _TOTAL_BYTES:
                total.save(sum(size for _, _, size in self._files()))
            yield total
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class _Total:
    """Bytes of all entries, as the file says; held under the lock."""

    descriptor: int
    value: int

    def save(self, value: int) -> None:
        self.value = value
        os.pwrite(self.descriptor, value.to_bytes(_TOTAL_BYTES, "little"), 0)
