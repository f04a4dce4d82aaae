"""The page cache: how much of a file the system keeps in memory, and a way to keep less of it.

A mapped file is read by page; a page that was read stays in memory until something else needs it, and is read from
there. What is kept is no memory of any process, and is given up before any process is refused. `LimitedTable` plays a
machine with less memory: it drops the pages read longest ago once more than so many bytes of a file were read, so that
reading them again is a read of the disk. Elsewhere than on Linux nothing is known and nothing dropped.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.rows.gather import Table, gather, runs_of
from kit.processes import LINUX

PAGE_BYTES = mmap.PAGESIZE
_MADV_WILLNEED = 3
_QUIET_BLOCKS = 8
_READ_AT_ONCE_BYTES = 1 << 22


def cached_bytes(file: Path) -> int | None:
    """Bytes of a file that are in memory now; None where the system does not tell."""
    size = file.stat().st_size
    if not LINUX or not size:
        return None if size else 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.empty(-(-size // PAGE_BYTES), np.uint8)
        done = _libc().mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    return None if done else min(size, int((pages & 1).sum()) * PAGE_BYTES)


def drop_cached(file: Path) -> None:
    """Ask the system to keep nothing of a file in memory; pages that a process has mapped stay."""
    if LINUX:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # what is not yet on disk cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(file: Path) -> None:
    """Read a file once, so that the system keeps what it has room for."""
    with file.open("rb", buffering=0) as opened:
        block = bytearray(_READ_AT_ONCE_BYTES)
        while opened.readinto(block):
            pass


def disk_read_bytes() -> int:
    """What this process has had read from disks so far, ahead of its wishes too; 0 where the system does not tell."""
    if not LINUX:
        return 0
    try:
        lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


class MappedTable:
    """A table mapped from a file, read as if it were in memory, and asked for in time where it is not.

    A row that is not in memory would be read page by page, each page with its neighbours, while everything waits. So
    the rows of a block are asked for together first, as long as anything comes from the disk; asking costs more than
    reading where nothing does, and stops then.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._asking = LINUX
        self._quiet = 0
        """Blocks in a row for which the disk was not read."""

    def gather(self, rows: NDArray[np.int64]) -> Table:
        """The bytes of `rows`, in their order, in memory of their own."""
        if not self._asking:
            before = _waits()
            block = gather(self.table, rows)
            self._asking = _waits() > before
            return block
        read = disk_read_bytes()
        self._ask(rows)
        block = gather(self.table, rows)
        self._quiet = 0 if disk_read_bytes() > read else self._quiet + 1
        if self._quiet >= _QUIET_BLOCKS:
            self._asking, self._quiet = False, 0
        return block

    def _ask(self, rows: NDArray[np.int64]) -> None:
        base, row_bytes = self.table.ctypes.data, self.table.shape[1]
        runs = runs_of(np.unique(rows)) * row_bytes + base
        runs[:, 0] -= runs[:, 0] % PAGE_BYTES
        advise = _libc().madvise
        for first, last in runs.tolist():
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_WILLNEED)


def _waits() -> int:
    """Times that this thread has waited for a page to come from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class LimitedTable:
    """A table in a file of which the page cache keeps no more than it may: the least recently read is dropped first.

    It is read, not mapped, since the system keeps every page that a process has mapped. The rows of a block are asked
    for together, and read run by run.

    Args:
        file: The file that the table lies in.
        table: Its rows, mapped; they only tell where the rows begin.
        limit_bytes: In whole pages, and never less than the rows read last.
    """

    def __init__(self, file: Path, table: Table, limit_bytes: int) -> None:
        size = file.stat().st_size
        self._row_bytes = table.shape[1]
        self._offset = size - table.nbytes if file.suffix == ".npy" else _offset_of(table.ctypes.data)
        self._most_pages = max(1, limit_bytes // PAGE_BYTES)
        self._descriptor = _Descriptor(file)
        self._advise(0, 0, "POSIX_FADV_RANDOM")  # nothing but what is asked for
        self._advise(0, 0, "POSIX_FADV_DONTNEED")  # what is kept is counted from here on
        self._last_read = np.full(-(-size // PAGE_BYTES), -1, np.int32)
        """Number of the block that read each page last; -1 for pages not kept."""
        self._blocks: deque[tuple[int, NDArray[np.int64]]] = deque()
        self._number = self._kept = 0
        self._lock = threading.Lock()

    def gather(self, rows: NDArray[np.int64]) -> Table:
        """The bytes of `rows`, in their order, in memory of their own."""
        distinct, places = np.unique(rows, return_inverse=True)
        block, done = np.empty((len(distinct), self._row_bytes), np.uint8), 0
        runs = runs_of(distinct).tolist()
        for first, last in runs:
            self._advise(
                self._offset + first * self._row_bytes, (last - first) * self._row_bytes, "POSIX_FADV_WILLNEED"
            )
        for first, last in runs:
            part = block[done : done + last - first]
            self._read(part, self._offset + first * self._row_bytes)
            done += last - first
        self._touched(distinct)
        return block[places]

    def _read(self, part: Table, offset: int) -> None:
        view = memoryview(part.reshape(-1).data)
        while len(view):
            count = os.preadv(self._descriptor.number, [view], offset)
            if not count:
                raise OSError(f"the file ends before byte {offset}: it was cut short since it was opened")
            view, offset = view[count:], offset + count

    def _touched(self, rows: NDArray[np.int64]) -> None:
        """These rows were read; what is too much is dropped."""
        pages = self._pages(rows)
        with self._lock:
            self._kept += int((self._last_read[pages] < 0).sum())
            self._last_read[pages] = self._number
            self._blocks.append((self._number, pages))
            self._number += 1
            while self._kept > self._most_pages and len(self._blocks) > 1:
                number, old = self._blocks.popleft()
                stale = old[self._last_read[old] == number]
                self._last_read[stale] = -1
                self._kept -= len(stale)
                for first, last in (runs_of(stale) * PAGE_BYTES).tolist():
                    self._advise(first, last - first, "POSIX_FADV_DONTNEED")

    def _pages(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Every page of the file that the rows lie on, sorted."""
        first = (self._offset + rows * self._row_bytes) // PAGE_BYTES
        last = (self._offset + (rows + 1) * self._row_bytes - 1) // PAGE_BYTES
        spans = last - first + 1
        starts = np.repeat(first - np.cumsum(spans) + spans, spans)
        return np.unique(starts + np.arange(int(spans.sum()), dtype=np.int64))

    def _advise(self, offset: int, length: int, what: str) -> None:
        if LINUX:
            os.posix_fadvise(self._descriptor.number, offset, length, getattr(os, what))


class _Descriptor:
    """An open file that is closed with its owner."""

    def __init__(self, file: Path) -> None:
        self.number = os.open(file, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


def _offset_of(address: int) -> int:
    """Where in its file a mapped address lies.

    Raises:
        OSError: when it is not mapped from a file.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last and name:
            return address - first + int(offset, 16)
    raise OSError("the rows are not mapped from a file, so their pages cannot be dropped")


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
