"""ReadCache: parts of a remote store's objects, kept in memory, or in a folder that all processes of a machine share.

It lies beneath the cache of decoded chunks and keeps stored bytes: whole objects, and of shards their indexes and their
inner chunks, each under its own range, however many a request brought. So what is kept answers every later order and
batch. An object goes by the URL, its key and its identity. In a store that kit built the identity is size and checksum
from the manifest, which every opening reads anew, so a rebuilt store finds nothing old. In any other store it is what
the store says of the object (entity tag or generation, else size and time), requested once per object and opening; a
store that says neither is refused by name. A dataset that stays open while its store is rebuilt may get either.

In a folder the parts of an object, or of a stretch of a long one, are appended to one file: so a cache of small chunks
is hardly larger than they are. A record tells which parts follow and their CRC-32C: a part cut short, flipped or
foreign is a miss, never an error and never served. Whoever appends holds the folder's lock, and first cuts off what a
killed process left half written. The invariant: the files never exceed the folder's size, whoever writes and whoever is
killed. So a file keeps their total, which grows before they do; making room counts the files again.

Nobody needs the folder to read: one that cannot be written is used for what is in it, and a disk that refuses keeps
nothing more, each with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from kit.config import resolve_path
from kit.data.stores.manifest import crc32c
from kit.data.stores.transfer import Octets, octets
from kit.errors import warn_caller
from kit.sections import Cache

Eviction = Literal["lru", "none"]
Span = tuple[int | None, int | None]
"""First byte and one past the last; the last `-first` bytes for a negative one; (None, None) for a whole object."""
WHOLE: Span = (None, None)
Part = tuple[Span, Octets]

_SUFFIX = ".parts"
_OLD = ("*.entry", "*.entry.*.partial")
"""Files of an earlier version, which no reader finds."""
_HEAD = struct.Struct("<4sII")
"""Mark, number of parts and CRC-32C of the table that follows."""
_MARK = b"kit2"
_ROW = np.dtype([("first", "<i8"), ("last", "<i8"), ("bytes", "<i8"), ("crc32c", "<u4")])
_PLACE = np.dtype([("first", "<i8"), ("last", "<i8"), ("position", "<i8"), ("bytes", "<i8"), ("crc32c", "<u4")])
_TOTAL_BYTES = 8
_STRETCH_BYTES = 16 << 20
"""Of an object, whose parts share a file, which making room removes as a whole."""
_MOST_PLACES_BYTES = 4 << 20
"""Memory for where the parts of recently read objects lie."""
_LEAST_PLACES_BYTES = 1024
_ROOM_FRACTION = 0.9
"""How full a cache is after room has been made in it."""
_TOUCH_SECONDS = 60.0
"""A file's time of use is not written more often than this."""
_READ_BYTES = 4096


class Entries(Protocol):
    """Parts of objects by the object's name and their spans, within a size; call from any thread."""

    def holds(self, name: str, span: Span) -> bool:
        """Whether `get` would very likely find it."""

    def get(self, name: str, first: int | None = None, last: int | None = None) -> Octets | None: ...

    def put(self, name: str, parts: Sequence[Part]) -> None: ...

    def drop(self, name: str) -> None:
        """Hold nothing of a short object any more."""


def name_of(url: str, key: str, identity: str) -> str:
    """Under which an object is kept."""
    return hashlib.sha256(repr((url, key, identity)).encode()).hexdigest()


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

    def open(self, *, warns: bool = True) -> Entries:
        """The cache in the folder, or this process's in memory; a folder that cannot be written is warned of."""
        if not self.folder:
            return _in_memory(self.size_bytes, self.eviction)
        return SharedFolder(resolve_path(self.folder), self.size_bytes, self.eviction, warns=warns)

    @property
    def where(self) -> str:
        """In words."""
        return f"cache.folder {resolve_path(self.folder)}" if self.folder else "the cache of this process"

    def forget(self) -> None:
        """Empty what this process keeps in memory; a folder, which others may use, stays as it is."""
        if not self.folder:
            _in_memory(self.size_bytes, self.eviction).clear()


# -- in memory


class MemoryCache:
    """Parts kept by this process; call from any thread."""

    def __init__(self, size_bytes: int, eviction: Eviction) -> None:
        self._size_bytes, self._eviction = size_bytes, eviction
        self._lock = threading.Lock()
        self._parts: OrderedDict[tuple[str, Span], Octets] = OrderedDict()
        self.held_bytes = 0

    def holds(self, name: str, span: Span) -> bool:
        return (name, span) in self._parts

    def get(self, name: str, first: int | None = None, last: int | None = None) -> Octets | None:
        key = (name, (first, last))
        with self._lock:
            data = self._parts.get(key)
            if data is not None:
                self._parts.move_to_end(key)
            return data

    def put(self, name: str, parts: Sequence[Part]) -> None:
        for span, data in parts:
            self._put((name, span), data)

    def drop(self, name: str) -> None:
        with self._lock:
            for key in [key for key in self._parts if key[0] == name]:
                self.held_bytes -= len(self._parts.pop(key))

    def _put(self, key: tuple[str, Span], data: Octets) -> None:
        size = len(data)
        with self._lock:
            full = self.held_bytes + size > self._size_bytes
            if key in self._parts or size > self._size_bytes or (full and self._eviction == "none"):
                return
            self._parts[key] = data if data.base is None else data.copy()
            self.held_bytes += size
            while self.held_bytes > self._size_bytes:
                self.held_bytes -= len(self._parts.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._parts.clear()
            self.held_bytes = 0


@cache
def _in_memory(size_bytes: int, eviction: Eviction) -> MemoryCache:
    """Shared by the readers of a process, so that a loader made anew finds what the last one read."""
    return MemoryCache(size_bytes, eviction)


# -- in a folder


class SharedFolder:
    """Parts in the files of a folder; call from any thread of any process."""

    def __init__(self, folder: Path, size_bytes: int, eviction: Eviction, *, warns: bool = True) -> None:
        self._folder, self._size_bytes, self._eviction, self._warns = folder, size_bytes, eviction, warns
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _PartsFile] = OrderedDict()
        self._places_bytes = 0
        self.refused = ""
        """Why it keeps nothing more, with the way out; empty while it does."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._total():
                pass
            if (old := folder / "total").exists():
                for pattern in _OLD:
                    for path in folder.glob(f"*/{pattern}"):
                        path.unlink(missing_ok=True)
                old.unlink(missing_ok=True)
        except OSError as error:
            self._refuse(error)

    def holds(self, name: str, span: Span) -> bool:
        file = self._file(name, span)
        with file.lock:
            return file.look_up(span) is not None

    def get(self, name: str, first: int | None = None, last: int | None = None) -> Octets | None:
        file = self._file(name, (first, last))
        data = file.read((first, last))
        if data is not None and self._eviction == "lru" and time.time() - file.used > _TOUCH_SECONDS:
            file.used = time.time()
            with contextlib.suppress(OSError):
                os.utime(file.path)
        return data

    def put(self, name: str, parts: Sequence[Part]) -> None:
        """Keep them if there is room, or room can be made; a disk that refuses is no error of the reader's."""
        if self.refused:
            return
        by_file: dict[str, tuple[_PartsFile, list[Part]]] = {}
        for span, data in parts:
            file = self._file(name, span)
            by_file.setdefault(file.path, (file, []))[1].append((span, data))
        try:
            with self._total() as total:
                for file, some in by_file.values():
                    with file.lock:
                        self._append(total, file, some)
        except OSError as error:
            self._refuse(error)

    def drop(self, name: str) -> None:
        file = self._file(name, WHOLE)
        if self.refused:
            return
        try:
            with self._total() as total, contextlib.suppress(FileNotFoundError):
                size = os.stat(file.path).st_size  # noqa: PTH116
                os.unlink(file.path)  # noqa: PTH108
                total.save(max(0, total.value - size))
        except OSError as error:
            self._refuse(error)
        file.forget()

    def _append(self, total: _Total, file: _PartsFile, parts: Sequence[Part]) -> None:
        """Append what the file does not hold; under the folder's lock and the file's."""
        file.refresh()
        new = {span: data for span, data in parts if file.find(span) is None}
        record = _record([*new.items()])
        size = len(record) + sum(map(len, new.values()))
        if not new or size > self._size_bytes:
            return
        if total.value + size > self._size_bytes:
            total.save(sum(size for _, _, size in self._sizes()))
            if total.value + size > self._size_bytes and self._eviction == "lru":
                total.save(self._make_room(int(self._size_bytes * _ROOM_FRACTION) - size))
                file.refresh()
        if total.value + size <= self._size_bytes:
            total.save(total.value + size)
            try:
                file.append(record, [*new.values()])
            except OSError:
                total.save(total.value - size)
                raise

    def _file(self, name: str, span: Span) -> _PartsFile:
        """The file of a part, with what this process knows of it."""
        stretch = max(0, span[0] or 0) // _STRETCH_BYTES
        path = f"{self._folder}/{name[:2]}/{name}-{stretch}{_SUFFIX}"  # pathlib costs as much as the rest
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _PartsFile(path)
            else:
                self._files.move_to_end(path)
            self._places_bytes += file.nbytes - file.counted_bytes
            file.counted_bytes = file.nbytes
            while self._places_bytes > _MOST_PLACES_BYTES and len(self._files) > 1:
                self._places_bytes -= self._files.popitem(last=False)[1].counted_bytes
            return file

    def _make_room(self, target_bytes: int) -> int:
        """Remove what was used longest ago until no more than this is held, which is returned."""
        found = sorted(self._sizes(), key=lambda item: item[1])
        held = sum(size for _, _, size in found)
        for path, _, size in found:
            if held <= target_bytes:
                break
            path.unlink(missing_ok=True)
            held -= size
        return held

    def _sizes(self) -> Iterator[tuple[Path, float, int]]:
        """Every file with its time of use and size."""
        for path in self._folder.glob(f"*/*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield path, stat.st_mtime, stat.st_size

    def _refuse(self, error: OSError) -> None:
        """Keep nothing more in this process, and say so once; what is there is still read."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "is full: make room" if full else f"cannot be written ({error.strerror}): choose another cache.folder"
        with self._lock:
            first, self.refused = self._warns and not self.refused, why
        if first:
            message = f"cache.folder: what is not in {self._folder} is read from the store, and not kept, as it {why}"
            warn_caller(message)

    @contextlib.contextmanager
    def _total(self) -> Iterator[_Total]:
        """The total, under a lock that the kernel drops with its process; counted where it is not known."""
        import fcntl

        descriptor = os.open(self._folder / "total_bytes", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, _TOTAL_BYTES, 0)
            total = _Total(descriptor, int.from_bytes(text, "little"))
            if len(text) < _TOTAL_BYTES:
                total.save(sum(size for _, _, size in self._sizes()))
            yield total
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class _Total:
    """Bytes of all files, as the file says; held under the lock."""

    descriptor: int
    value: int

    def save(self, value: int) -> None:
        self.value = value
        os.pwrite(self.descriptor, value.to_bytes(_TOTAL_BYTES, "little"), 0)


@dataclass(slots=True)
class _PartsFile:
    """One file of parts, and what has been read of where they lie; all but `read` under its lock."""

    path: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    places: NDArray[np.void] = field(default_factory=lambda: np.empty(0, _PLACE))
    """Where each part lies, by its first byte."""
    inode: int = 0
    end: int = 0
    """Where the last whole record ends."""
    last: tuple[int, bytes] = 0, b""
    """Where that record begins, and its head: another file may have got the same inode."""
    used: float = 0.0
    """When its time of use was last written."""
    counted_bytes: int = 0
    """Of its memory, those that its folder has counted."""

    @property
    def nbytes(self) -> int:
        """Memory of it."""
        return _LEAST_PLACES_BYTES + self.places.nbytes

    def find(self, span: Span) -> NDArray[np.void] | None:
        """Where a part lies."""
        first, last = _numbers(span)
        place = int(np.searchsorted(self.places["first"], first))
        while place < len(self.places) and self.places["first"][place] == first:
            if self.places["last"][place] == last:
                return np.asarray(self.places[place])
            place += 1
        return None

    def look_up(self, span: Span) -> NDArray[np.void] | None:
        """As `find`, also among what was appended since."""
        place = self.find(span)
        return self.find(span) if place is None and self.refresh() else place

    def refresh(self) -> bool:
        """Read what was appended since; whether there is anything new."""
        try:
            stat = os.stat(self.path)  # noqa: PTH116  pathlib costs as much again
        except OSError:
            stat = None
        if stat is None or stat.st_ino != self.inode or stat.st_size < self.end:
            self.places, self.end, self.inode = np.empty(0, _PLACE), 0, stat.st_ino if stat else 0
        if stat is None or stat.st_size <= self.end:
            return False
        before = self.end
        with contextlib.suppress(OSError), open(self.path, "rb", buffering=0) as file:  # noqa: PTH123
            self._read_records(file.fileno(), stat.st_size)
        return self.end > before

    def _read_records(self, descriptor: int, size: int) -> None:
        """Records from the end of what is known to the first that is not whole."""
        if self.end and os.pread(descriptor, _HEAD.size, self.last[0]) != self.last[1]:
            self.places, self.end = np.empty(0, _PLACE), 0
        found = [self.places]
        while True:
            head = os.pread(descriptor, _READ_BYTES, self.end)
            if len(head) < _HEAD.size:
                break
            mark, count, checksum = _HEAD.unpack_from(head)
            table_bytes = count * _ROW.itemsize
            begin = self.end + _HEAD.size + table_bytes
            if mark != _MARK or not count or begin > size:
                break
            table = head[_HEAD.size : _HEAD.size + table_bytes]
            if len(table) < table_bytes:
                table = os.pread(descriptor, table_bytes, self.end + _HEAD.size)
            if crc32c(table) != checksum:
                break
            rows = np.frombuffer(table, _ROW)
            ends = begin + np.cumsum(rows["bytes"], dtype=np.int64)
            if ends[-1] > size:
                break
            found.append(_places(rows, ends))
            self.last = self.end, head[: _HEAD.size]
            self.end = int(ends[-1])
        if len(found) > 1:
            self._know(found)

    def _know(self, found: Sequence[NDArray[np.void]]) -> None:
        together = np.concatenate(found)
        self.places = together[np.argsort(together["first"], kind="stable")]

    def append(self, record: bytes, bodies: Sequence[Octets]) -> None:
        """Write a record behind the last whole one; under the folder's lock.

        Raises:
            OSError: when the disk refuses; then nothing is left of it.
        """
        Path(self.path).parent.mkdir(exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size > self.end:
                os.ftruncate(descriptor, self.end)
            try:
                _write_all(descriptor, [record, *bodies], self.end)
            except OSError:
                os.ftruncate(descriptor, self.end)
                raise
            self.inode = os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)
        rows = np.frombuffer(record[_HEAD.size :], _ROW)
        ends = self.end + len(record) + np.cumsum(rows["bytes"], dtype=np.int64)
        self._know([self.places, _places(rows, ends)])
        self.last = self.end, record[: _HEAD.size]
        self.end = int(ends[-1])

    def read(self, span: Span) -> Octets | None:
        """The bytes of a part; None, and nothing known any more, where they are not there."""
        with self.lock:
            place = self.look_up(span)
        if place is None:
            return None
        count, position = int(place["bytes"]), int(place["position"])
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            self.forget()
            return None
        try:
            data = octets(os.pread(descriptor, count, position))
        except OSError:
            data = octets(b"")
        finally:
            os.close(descriptor)
        if len(data) == count and google_crc32c.value(data) == int(place["crc32c"]):
            return data
        self.forget()
        with self.lock:
            again = self.look_up(span)
        if again is not None and again == place:  # nobody has replaced the file meanwhile: it is damaged
            with contextlib.suppress(OSError):
                os.unlink(self.path)  # noqa: PTH108
            self.forget()
        return None

    def forget(self) -> None:
        with self.lock:
            self.places, self.end, self.inode = np.empty(0, _PLACE), 0, 0


def _numbers(span: Span) -> tuple[int, int]:
    first, last = span
    return 0 if first is None else first, -1 if last is None else last


def _record(parts: Sequence[Part]) -> bytes:
    """What stands before the bytes of the parts."""
    rows = [(*_numbers(span), len(data), google_crc32c.value(data)) for span, data in parts]
    table = np.array(rows, _ROW).tobytes()
    return _HEAD.pack(_MARK, len(parts), crc32c(table)) + table


def _places(rows: NDArray[np.void], ends: NDArray[np.int64]) -> NDArray[np.void]:
    found = np.empty(len(rows), _PLACE)
    for name in ("first", "last", "bytes", "crc32c"):
        found[name] = rows[name]
    found["position"] = ends - rows["bytes"]
    return found


def _write_all(descriptor: int, parts: Sequence[bytes | Octets], position: int) -> None:
    """Write them one after another; many in one call."""
    left = [memoryview(part) for part in parts if len(part)]  # type: ignore[arg-type]  # arrays are buffers
    while left:
        written = os.pwritev(descriptor, left[: os.sysconf("SC_IOV_MAX")], position)
        position += written
        ends = [*accumulate(map(len, left))]
        done = sum(end <= written for end in ends)
        begun = written - (ends[done - 1] if done else 0)
        left = left[done:]
        if begun:
            left[0] = left[0][begun:]
