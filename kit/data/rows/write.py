"""write_rows: an array larger than memory, written in blocks of rows: whole or not at all.

A block is made, written and forgotten, so memory holds one block whatever the size of the array. A `.npy` file is
written beside its place under another name, and takes its place when every row of it is on disk; one that was ended is
gone on with (see `NpyDraft`). A Zarr array is built like any store of kit's: by the chunk, checksummed, resumed where
it was ended, and refused to readers until it is whole.

Rows come from a function of (start, stop), or from other rows: each once in their order, or drawn with replacement
where a shape is asked for, by a seed and independent of how the array is cut into blocks.

NpyDraft: a `.npy` file on its way, written beside its place block by block, and moved there when it is whole.

Beside the rows lies a list of the blocks that were written, each with its checksum. A write that was ended (killed,
interrupted, failed) is gone on with by one that asks for the same shape, type and blocks: blocks are kept from the
first on, as long as each is there with its checksum. The list alone is never believed, so a block that was half
written, and all that follow it, are made again. One row of the last block kept is asked for again: rows of a source
that has changed since are refused rather than mixed. At every moment the place holds what it held before, or all rows.

array_bytes: how large an array will be, told before it is made, beside the memory and the disk that are free.

Exact: rows × columns × bytes of a number, and for a file the header too. GiB are 2^30 bytes. Nothing is created.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kit.config import Config
from kit.data.build.build import Progress, build, make_progress, say
from kit.data.build.rechunk import Region
from kit.data.build.source import VariableSpec
from kit.data.rows.page_cache import DELIVERED, name_of, plain_dtype
from kit.data.rows.rows import Rows, open_rows
from kit.data.stores.lock import turn_at
from kit.data.stores.url import local_folder, resolve_url
from kit.errors import BuildError, ConfigError, Problem, RowsError
from kit.machine.machine import share
from kit.tables import html_table, text_table
from kit.targets import load_target
from kit.units import format_bytes, parse_bytes

Make = Callable[[int, int], Any]
"""Rows from start to stop, `(stop - start, *columns)`."""
VARIABLE = "values"
"""What a Zarr array that is written here is called in its store."""
_MEMORY_BYTES = 256 << 20
_COPIES = 3
"""Of a block at once: made, turned into the type asked for, and on its way to the disk."""
_WAIT_SECONDS = 0.0
_WORDS = 4
"""That one step of Philox's counter gives."""
_CHUNK_BYTES = 1 << 20
_LEAST_BUILD_BYTES = 64 << 20


def write_rows(
    path: str | PathLike[str],
    source: str | PathLike[str] | Make | Rows | Tensor | NDArray[Any],
    shape: Sequence[int] | int | None = None,
    *,
    dtype: str | None = None,
    row_block: int = 0,
    memory_bytes: int | str = _MEMORY_BYTES,
    seed: int = 13,
    progress: bool | Progress = True,
    overwrite: bool = False,
) -> Rows:
    """Write an array in blocks of rows, and open it; the same call goes on with what an ended one has left.

    Args:
        path: A `.npy` file, or a path or URL for a Zarr store.
        source: A function (start, stop) that gives those rows whenever it is asked, its import path, or what
            `kit.open_rows` takes.
        shape: (rows, *columns) of a function's array, or its rows alone where it is asked for one to see the columns.
            With rows as the source: so many rows of them, drawn with replacement by `seed`; None for each once.
        dtype: Name of the type to store; None for float32 of a function, and the type that rows are delivered in.
        row_block: Rows made and written at a time, and the most of a chunk in a Zarr store; 0 takes what `memory_bytes`
            holds.
        memory_bytes: Of all blocks at once.
        seed: Of the rows that are drawn.
        progress: True for a line that updates in place, False for none, or a callable (done, total, bytes).
        overwrite: Replace what is there, and begin again where a write was ended.

    Raises:
        ConfigError: for a shape that is missing, a block that does not fit `memory_bytes`, and rows of another shape.
        RowsError: when the place is taken.
        BuildError: when the disk has no room, and for rows other than those that an ended write has left.
        StoreError: when the place cannot be written; `StoreLockedError` when another process writes it.
    """
    url = resolve_url(fspath(path))
    table = _table(source, shape, dtype, seed)
    block = _block(table, row_block, parse_bytes(memory_bytes))
    folder = local_folder(url)
    if folder is None or folder.suffix not in (".npy", ".pt", ".pth"):
        build_bytes = max(_LEAST_BUILD_BYTES, parse_bytes(memory_bytes))
        return _write_store(url, table, min(block, row_block or block), build_bytes, progress, overwrite)
    if folder.suffix != ".npy":
        raise ConfigError([Problem("path", f"{folder.name}: a .pt file is written at once by torch; use .npy or Zarr")])
    return _write_npy(folder, table, block, progress, overwrite)


class _Table:
    """What is to be written, as any block of rows; as a source of kit's builder too."""

    coordinates: Mapping[str, NDArray[Any]] = {}
    attributes: Mapping[str, Any] = {}

    def __init__(self, make: Make, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._make = make
        self.shape, self.dtype = tuple(map(int, shape)), dtype
        self.dims = ("row", *(f"column_{axis}" for axis in range(1, len(shape) - 1)), *["column"] * (len(shape) > 1))
        self.variables = {VARIABLE: VariableSpec(dtype)}
        self.row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows `(stop - start, *columns)`.

        Raises:
            ConfigError: when the function gives others.
        """
        made = self._make(start, stop)
        given = made.numpy() if isinstance(made, Tensor) else np.asarray(made)
        wanted = (stop - start, *self.shape[1:])
        if given.shape != wanted:
            raise ConfigError([Problem("source", f"rows {start} to {stop} have shape {given.shape}, not {wanted}")])
        return given.astype(self.dtype, copy=False)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """A block of kit's builder."""
        del name
        first, *rest = region
        return self.rows(first.start, first.stop)[(slice(None), *rest)]


def _table(source: Any, shape: Sequence[int] | int | None, dtype: str | None, seed: int) -> _Table:
    if isinstance(source, str) and ":" in source and ".py" in source.partition(":")[0]:
        source = load_target(source)
    if callable(source) and not isinstance(source, Tensor):
        return _made(source, shape, dtype)
    rows = open_rows(source, dtype=dtype)
    stored = _storable(name_of(rows.dtype))
    if shape is None:
        return _Table(lambda start, stop: rows.take(range(start, stop)), rows.shape, stored)
    count, *columns = (shape,) if isinstance(shape, int) else tuple(shape)
    if columns and tuple(columns) != rows.shape[1:]:
        message = f"columns {tuple(columns)} are asked for, but rows of {rows.place} have {rows.shape[1:]}"
        raise ConfigError([Problem("shape", message)])
    return _Table(lambda start, stop: rows.take(_drawn(len(rows), start, stop, seed)), (count, *rows.shape[1:]), stored)


def _made(make: Make, shape: Sequence[int] | int | None, dtype: str | None) -> _Table:
    if shape is None:
        raise ConfigError([Problem("shape", "a function makes any number of rows; say how many, as (rows, *columns)")])
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 1 for size in sizes) or not sizes:
        raise ConfigError([Problem("shape", f"{shape} must be whole numbers of 1 or more")])
    if len(sizes) == 1:
        sizes = (*sizes, *np.shape(make(0, 1))[1:])
    return _Table(make, sizes, _storable(dtype or "float32"))


def _storable(name: str) -> np.dtype[Any]:
    try:
        return plain_dtype(np.dtype(name), "the array")
    except TypeError:
        message = f"{name!r} cannot be stored in .npy or Zarr; use a type of numpy, such as float32"
        raise ConfigError([Problem("dtype", message)]) from None


def _drawn(rows: int, start: int, stop: int, seed: int) -> NDArray[np.int64]:
    """Rows drawn with replacement for places from start to stop, each a function of (seed, place) alone."""
    generator = np.random.Philox(key=seed, counter=start // _WORDS)
    words = generator.random_raw(start % _WORDS + stop - start)[start % _WORDS :]
    drawn: NDArray[np.int64] = (words % np.uint64(rows)).astype(np.int64)
    return drawn


def _block(table: _Table, asked: int, memory_bytes: int) -> int:
    """Rows of a block.

    Raises:
        ConfigError: when memory does not hold a block, or not even a row.
    """
    most = memory_bytes // (_COPIES * table.row_bytes)
    if max(asked, 1) > most:
        what = f"blocks of {asked} rows" if asked else "a row"
        needed = format_bytes(_COPIES * max(asked, 1) * table.row_bytes)
        message = f"{format_bytes(memory_bytes)} does not hold {what} while it is made and written; allow {needed}"
        raise ConfigError([Problem("memory_bytes", message + (", or write fewer at a time" if asked else ""))])
    return min(asked or most, table.shape[0])


# -- a .npy file


def _write_npy(file: Path, table: _Table, block: int, progress: bool | Progress, overwrite: bool) -> Rows:
    if file.exists() and not overwrite:
        raise RowsError(f"{file} is there already; choose another path, or overwrite=True to replace it")
    with turn_at(file.with_name(f".{file.name}.lock"), _WAIT_SECONDS):
        draft = NpyDraft(file, table, block)
        if overwrite:
            draft.forget()
        draft.take_up()
        if draft.kept:
            say(f"{draft.kept} of {draft.blocks} row blocks of {file} are there already", progress)
        draft.write(make_progress(progress, "Writing", "row blocks"))
    return open_rows(file)


# -- a Zarr store


def _write_store(
    url: str, table: _Table, block: int, memory_bytes: int, progress: bool | Progress, overwrite: bool
) -> Rows:
    """A build like any other; chunks are small enough that a few rows cost little."""
    chunk_rows = min(block, max(1, _CHUNK_BYTES // table.row_bytes))
    sizes = dict(zip(table.dims, (min(chunk_rows, table.shape[0]), *table.shape[1:]), strict=True))
    config = Config().replace(
        {
            "data.url": url, "chunking.chunk": sizes, "chunking.shard": "none",
            "build.scheduler": "single-threaded", "build.memory_bytes": memory_bytes,
        }
    )  # fmt: skip
    build(config, source=table, overwrite=overwrite, progress=progress)
    return open_rows(url)


_READ_BYTES = 4 << 20
_SYNC_BYTES = 64 << 20
_LINE_BYTES = 9
"""Of a checksum in the list."""


class Made(Protocol):
    """Rows that can be asked for in any block, and again."""

    shape: tuple[int, ...]
    """(rows, *columns)."""
    dtype: np.dtype[Any]
    row_bytes: int

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """(stop - start, *columns), of that type."""


class NpyDraft:
    """What is there of one array, and what is still to be written.

    Args:
        file: Its place.
        made: Its rows.
        row_block: Rows made and written at a time.
    """

    def __init__(self, file: Path, made: Made, row_block: int) -> None:
        self.file, self._made, self._row_block = file, made, row_block
        self.partial = file.with_name(f".{file.name}.partial")
        self._list = file.with_name(f".{file.name}.blocks")
        asked = {"shape": made.shape, "dtype": made.dtype.str, "row_block": row_block}
        self._asked = f"{json.dumps(asked)}\n".encode()
        self._header = _header(made)
        self.blocks = -(-made.shape[0] // row_block)
        self.kept = 0
        """Blocks from the first on that are written."""

    def take_up(self) -> None:
        """Find what an ended write has left of this array; what is of another one is removed.

        Raises:
            BuildError: when the source gives other rows than it did then, or the disk has no room for the rest.
        """
        self.kept = self._whole_blocks()
        if self.kept:
            self._refuse_other_rows()
        else:
            self.forget()
        self._refuse_full()

    def forget(self) -> None:
        """Remove what is there."""
        for path in (self._list, self.partial):
            path.unlink(missing_ok=True)

    def write(self, progress: Progress) -> None:
        """Make and write every block that is not there, and move the file to its place."""
        try:
            with self._opened() as (file, listed):
                progress(self.kept, self.blocks, self._rows_of(self.kept) * self._made.row_bytes)
                self._write_blocks(file, listed, progress)
            self.partial.replace(self.file)
        except BaseException as error:
            self._leave(error)
            raise
        self._list.unlink(missing_ok=True)

    # -- writing

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """The file and the list, each at the end of what is kept."""
        with self.partial.open("ab") as file, self._list.open("ab") as listed:
            if self.kept:
                file.truncate(self._place_of(self.kept))
                listed.truncate(len(self._asked) + self.kept * _LINE_BYTES)
            else:
                file.write(self._header)
                listed.write(self._asked)
            yield file, listed

    def _write_blocks(self, file: IO[bytes], listed: IO[bytes], progress: Progress) -> None:
        """By plain writes, each block on the disk before the next but few: no mapped page adds up."""
        unsynced = 0
        for number in range(self.kept, self.blocks):
            rows = np.ascontiguousarray(self._made.rows(self._rows_of(number), self._rows_of(number + 1)))
            data = rows.reshape(-1).view(np.uint8)
            file.write(data.data)
            file.flush()
            listed.write(_line(google_crc32c.value(data)))
            listed.flush()
            self.kept, unsynced = number + 1, unsynced + rows.nbytes
            if unsynced >= _SYNC_BYTES:
                os.fsync(file.fileno())
                unsynced = 0
            progress(self.kept, self.blocks, self._rows_of(self.kept) * self._made.row_bytes)
        os.fsync(file.fileno())

    def _leave(self, error: BaseException) -> None:
        """What is written stays for the next call, and the error says so."""
        if self.kept:
            error.add_note(f"{self.kept} of {self.blocks} row blocks of {self.file} are kept; the same call goes on")
        else:
            self.forget()

    # -- what is there

    def _whole_blocks(self) -> int:
        """Blocks from the first on that are there as they were written."""
        try:
            asked, *lines = self._list.read_bytes().splitlines(keepends=True) or [b""]
            with self.partial.open("rb") as file:
                if asked != self._asked or file.read(len(self._header)) != self._header:
                    return 0
                numbered = enumerate(lines[: self.blocks])
                return sum(1 for _ in takewhile(lambda pair: self._sum(file, pair[0]) == pair[1], numbered))
        except OSError:
            return 0

    def _sum(self, file: IO[bytes], number: int) -> bytes:
        """The line that a block has in the list, from the bytes that the file has next; empty for too few."""
        left, crc32c = self._place_of(number + 1) - self._place_of(number), 0
        while left and (data := file.read(min(left, _READ_BYTES))):
            left, crc32c = left - len(data), google_crc32c.extend(crc32c, data)
        return b"" if left else _line(crc32c)

    def _refuse_other_rows(self) -> None:
        start = self._rows_of(self.kept - 1)
        made = self._made.rows(start, start + 1)
        with self.partial.open("rb") as file:
            file.seek(self._place_of(self.kept - 1))
            there = np.frombuffer(file.read(self._made.row_bytes), self._made.dtype).reshape(made.shape)
        # One row alone may be rounded otherwise than in its block.
        if not np.allclose(made, there, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise BuildError(
                f"{self.file}: row {start:,} comes out different from when this write began, {self.kept} of "
                f"{self.blocks} row blocks ago, so the source has changed; use overwrite=True to begin again"
            )

    def _refuse_full(self) -> None:
        needed_bytes = (self._made.shape[0] - self._rows_of(self.kept)) * self._made.row_bytes
        free_bytes = free_disk_bytes(self.file.parent)
        if needed_bytes > free_bytes:
            what = "the rest of the array" if self.kept else "the array"
            raise BuildError(
                f"{self.file}: {what} takes {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} is free; free "
                "some space, choose another path, or write fewer rows"
            )

    def _rows_of(self, blocks: int) -> int:
        """Rows in the first blocks."""
        return min(blocks * self._row_block, self._made.shape[0])

    def _place_of(self, block: int) -> int:
        """Where a block begins in the file."""
        return len(self._header) + self._rows_of(block) * self._made.row_bytes


def _header(made: Made) -> bytes:
    header = io.BytesIO()
    told = {"descr": made.dtype.str, "fortran_order": False, "shape": made.shape}
    np.lib.format.write_array_header_1_0(header, told)
    return header.getvalue()


def _line(crc32c: int) -> bytes:
    return f"{crc32c:08x}\n".encode()


_GIB = 1 << 30
_HEADER_BYTES = 128
_COLUMNS = ("", "needs", "free", "")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ArraySize:
    """What an array takes, and what there is."""

    shape: tuple[int, ...]
    """(rows, *columns)."""
    dtype: str
    memory_bytes: int
    """Of the numbers."""
    disk_bytes: int
    """Of a `.npy` file with them; a Zarr store that compresses them takes less."""
    free_memory_bytes: int
    """That this process could have, page cache counted as free."""
    free_disk_bytes: int | None
    """Where the file would be; None for a place that is no local disk."""
    place: str

    @property
    def gibibytes(self) -> float:
        """In memory, in units of 2^30 bytes."""
        return self.memory_bytes / _GIB

    @property
    def fits_memory(self) -> bool:
        return self.memory_bytes <= self.free_memory_bytes

    @property
    def fits_disk(self) -> bool | None:
        return None if self.free_disk_bytes is None else self.disk_bytes <= self.free_disk_bytes

    @property
    def headline(self) -> str:
        by = " × ".join(f"{size:,}" for size in self.shape)
        return f"{by} {self.dtype}: {format_bytes(self.memory_bytes)}"

    def _rows(self) -> list[list[str]]:
        rows = [["in memory", format_bytes(self.memory_bytes), format_bytes(self.free_memory_bytes)]]
        free = "unknown" if self.free_disk_bytes is None else format_bytes(self.free_disk_bytes)
        rows.append([f"on disk, {self.place}", format_bytes(self.disk_bytes), free])
        fits = {True: "fits", False: "does not fit", None: "unknown"}
        return [[*row, fits[answer]] for row, answer in zip(rows, (self.fits_memory, self.fits_disk), strict=True)]

    def __repr__(self) -> str:
        return f"{self.headline}\n{text_table(_COLUMNS, self._rows())}"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=escape(self.headline))


def array_bytes(shape: Sequence[int] | int, dtype: str = "float32", path: str | PathLike[str] = "data") -> ArraySize:
    """The size of an array of that shape, before there is one.

    Args:
        shape: (rows, *columns).
        dtype: Name of the type, as numpy knows it, or bfloat16.
        path: Where it would be written; a relative path starts at the project folder.

    Raises:
        ConfigError: for sizes below 1, and an unknown type.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError([Problem("shape", f"{shape!r} must be whole numbers of 1 or more, such as (rows, columns)")])
    memory_bytes = math.prod(sizes) * itemsize_of(dtype)
    url = resolve_url(fspath(path))
    folder = local_folder(url)
    return ArraySize(
        shape=sizes, dtype=str(dtype), memory_bytes=memory_bytes, disk_bytes=memory_bytes + _HEADER_BYTES,
        free_memory_bytes=share().memory_available_bytes,
        free_disk_bytes=None if folder is None else free_disk_bytes(folder), place=url,
    )  # fmt: skip


def itemsize_of(dtype: str) -> int:
    """Bytes of one number.

    Raises:
        ConfigError: for what is no number.
    """
    if dtype == "bfloat16":
        return 2
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biuf":
        raise ConfigError([Problem("dtype", f"{dtype!r} is no type of numbers; use one of {', '.join(DELIVERED)}")])
    return found.itemsize


def free_disk_bytes(place: Path) -> int:
    """What the disk that holds a place, or will hold it, has free."""
    return shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free
