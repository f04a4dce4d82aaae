"""Rows as bytes: gathered from memory or a mapped file, with more or less of the page cache; and their types.

A table is the bytes of an array, `(row, byte)`, in memory or mapped from a file: one shape for every type of number,
also those that numpy does not know. `gather` copies rows out as one block, whatever their order, without a loop over
them and while other threads run.

A mapped file is read by page; a page that was read stays in memory (the page cache) until something else needs it, and
is read from there. It is no memory of any process, and is given up before any process is refused. `LimitedTable` plays
a machine with less memory: it drops the pages read longest ago once more than so many bytes of a file were read, so
that reading them again is a read of the disk. Elsewhere than on Linux nothing is known and nothing dropped.

Floats are delivered as float32 by default, whole numbers and bool as they are stored. Unsigned types that torch hardly
computes with are widened, so that no value is lost (uint16 to int32, uint32 to int64). Complex numbers, text, Python
objects and uint64 are refused, and so is a type that could not hold what is stored.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.errors import ConfigError, Problem, RowsError, did_you_mean
from kit.machine.processes import LINUX, disk_read_bytes

PAGE_BYTES = mmap.PAGESIZE
_MADV_WILLNEED = 3
_BLOCKS_FROM_MEMORY = 8


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


class MappedTable:
    """A table mapped from a file, read as if it were in memory, and prefetched where it is not.

    A row that is not in memory would be read page by page, each page with its neighbours, while everything waits. So
    the rows of a block are prefetched together (madvise), as long as anything comes from the disk; where nothing does,
    prefetching costs more than reading, and stops.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._prefetching = LINUX
        self._from_memory = 0
        """Blocks in a row for which the disk was not read."""

    def gather(self, rows: NDArray[np.int64]) -> Table:
        """The bytes of `rows`, in their order, in memory of their own."""
        if not self._prefetching:
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt  # waits for a page to come from a disk
            block = gather(self.table, rows)
            self._prefetching = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt > faults
            return block
        read = disk_read_bytes()
        runs = runs_of(np.unique(rows)) * self.table.shape[1] + self.table.ctypes.data
        runs[:, 0] -= runs[:, 0] % PAGE_BYTES
        for first, last in runs.tolist():
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_WILLNEED)
        block = gather(self.table, rows)
        self._from_memory = 0 if disk_read_bytes() > read else self._from_memory + 1
        if self._from_memory >= _BLOCKS_FROM_MEMORY:
            self._prefetching, self._from_memory = False, 0
        return block


class LimitedTable:
    """A table in a file of which the page cache keeps no more than it may: the least recently read is dropped first.

    It is read, not mapped, since the system keeps every page that a process has mapped. The rows of a block are
    prefetched together, and read run by run.

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
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._advise(0, 0, "POSIX_FADV_RANDOM")  # no read-ahead
        self._advise(0, 0, "POSIX_FADV_DONTNEED")  # what is kept is counted from here on
        self._last_read = np.full(-(-size // PAGE_BYTES), -1, np.int32)
        """Number of the block that read each page last; -1 for pages not kept."""
        self._blocks: deque[tuple[int, NDArray[np.int64]]] = deque()
        self._number = self._kept = 0
        self.missed_bytes = 0
        """Of pages that were asked for and not kept: what the machine that is played reads from its disk."""
        self._lock = threading.Lock()

    def gather(self, rows: NDArray[np.int64]) -> Table:
        """The bytes of `rows`, in their order, in memory of their own."""
        distinct, places = np.unique(rows, return_inverse=True)
        block = np.empty((len(distinct), self._row_bytes), np.uint8)
        spans = runs_of(distinct) * self._row_bytes + self._offset
        for first, last in spans.tolist():
            self._advise(first, last - first, "POSIX_FADV_WILLNEED")
        view = memoryview(block.reshape(-1).data)
        for first, last in spans.tolist():
            while first < last:
                count = os.preadv(self._descriptor, [view[: last - first]], first)
                if not count:
                    raise OSError(f"the file ends before byte {first}: it was cut short since it was opened")
                view, first = view[count:], first + count
        self._drop_others(distinct)
        return block[places]

    def _drop_others(self, rows: NDArray[np.int64]) -> None:
        """Note that these rows were read last, and drop the pages read longest ago that are too many."""
        first = (self._offset + rows * self._row_bytes) // PAGE_BYTES
        counts = (self._offset + (rows + 1) * self._row_bytes - 1) // PAGE_BYTES - first + 1
        starts = np.repeat(first - np.cumsum(counts) + counts, counts)
        pages = np.unique(starts + np.arange(int(counts.sum()), dtype=np.int64))
        with self._lock:
            missed = int((self._last_read[pages] < 0).sum())
            self._kept += missed
            self.missed_bytes += missed * PAGE_BYTES
            self._last_read[pages] = self._number
            self._blocks.append((self._number, pages))
            self._number += 1
            while self._kept > self._most_pages and len(self._blocks) > 1:
                number, old = self._blocks.popleft()
                stale = old[self._last_read[old] == number]
                self._last_read[stale] = -1
                self._kept -= len(stale)
                for begin, end in (runs_of(stale) * PAGE_BYTES).tolist():
                    self._advise(begin, end - begin, "POSIX_FADV_DONTNEED")

    def _advise(self, offset: int, length: int, what: str) -> None:
        if LINUX:
            os.posix_fadvise(self._descriptor, offset, length, getattr(os, what))


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


Table = NDArray[np.uint8]


def table_of(array: NDArray[Any]) -> Table:
    """The bytes of an array whose rows lie one after another."""
    return array.reshape(len(array), -1).view(np.uint8)


def gather(table: Table, rows: NDArray[np.int64]) -> Table:
    """The bytes of `rows`, in their order, in memory of their own."""
    count = len(rows)
    if count and rows[-1] - rows[0] == count - 1 and (count == 1 or bool((np.diff(rows) == 1).all())):
        return table[rows[0] : rows[0] + count].copy()
    block = np.empty((count, table.shape[1]), np.uint8)
    np.take(table, rows, axis=0, out=block, mode="clip")  # mode raise would copy once more
    return block


def runs_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sorted distinct numbers as runs `(run, [first, last + 1])`."""
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    ends = np.append(begins[1:], len(numbers)) - 1 if len(numbers) else begins
    return np.stack([numbers[begins], numbers[ends] + 1], axis=1)


def tensor_of(block: Table, dtype: torch.dtype, columns: tuple[int, ...]) -> Tensor:
    """The numbers in a block of bytes, `(row, *columns)`."""
    if not len(block):
        return torch.empty((0, *columns), dtype=dtype)
    return torch.from_numpy(block).view(dtype).reshape(len(block), *columns)


_WIDENED = {"uint16": "int32", "uint32": "int64"}
_PLAIN = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
DELIVERED = (*_PLAIN, "bfloat16")
"""Names of the types that rows can be delivered in."""


def plain_dtype(stored: np.dtype[np.generic], place: str) -> np.dtype[np.generic]:
    """The type of this machine, known to torch too, that holds every value of a stored one.

    Raises:
        RowsError: for what is no number, and for uint64.
    """
    name = _WIDENED.get(stored.name, stored.name)
    if name not in _PLAIN:
        why = "that torch does not compute with; store it as int64" if name == "uint64" else "which is no real number"
        raise RowsError(f"{place} holds {stored}, {why}; rows are bool, whole numbers or floats")
    return np.dtype(name)


def delivered_dtype(stored: torch.dtype, requested: str | None, place: str) -> torch.dtype:
    """What rows are delivered as.

    Raises:
        RowsError: for numbers stored as what is no real number.
        ConfigError: for a type that is unknown, or cannot hold what is stored.
    """
    if stored.is_complex or not (stored.is_floating_point or name_of(stored) in _PLAIN):
        raise RowsError(f"{place} holds {name_of(stored)}, which is no real number; rows are bool, integers or floats")
    if requested is None:
        return torch.float32 if stored.is_floating_point else stored
    if requested not in DELIVERED:
        hint = did_you_mean(requested, DELIVERED, "use one of {}")
        raise ConfigError([Problem("dtype", f"{requested!r} is no type that rows are delivered in{hint}")])
    delivered: torch.dtype = getattr(torch, requested)
    if not delivered.is_floating_point and torch.promote_types(stored, delivered) != delivered:
        message = f"{requested} cannot hold the {name_of(stored)} of {place}; use {name_of(stored)}, or a float"
        raise ConfigError([Problem("dtype", message)])
    return delivered


def name_of(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
