"""write_rows: an array larger than memory, written in blocks of rows: whole or not at all.

A block is made, written and forgotten, so memory holds one block whatever the size of the array. A `.npy` file takes
its place when every row of it is on disk; a write that was ended is resumed (see `NpyDraft`). A Zarr array is built
like any store of kit's: by the chunk, checksummed, resumed where it was ended, and refused to readers until it is
whole.

Rows come from a function of (start, stop), or from other rows: each once in their order, or drawn with replacement
where a shape is given, by a seed and independent of how the array is cut into blocks.

array_bytes: how large an array will be, before it is made, beside the memory and the disk that are free. Exact: rows ×
columns × bytes of a number, and for a file the header too. GiB are 2^30 bytes. Nothing is created.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kit.arguments import checks_arguments
from kit.config import Config, project_path
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
"""Of a block at once: made, turned into the type to store, and on its way to the disk."""
_WAIT_SECONDS = 0.0
_WORDS = 4
"""That one step of Philox's counter gives."""
_CHUNK_BYTES = 1 << 20
_LEAST_BUILD_BYTES = 64 << 20
_READ_BYTES = 4 << 20
_SYNC_BYTES = 64 << 20
_LINE_BYTES = 9
"""Of a checksum in the list."""
_GIB = 1 << 30
_HEADER_BYTES = 128
_OTHER_FILES = (
    ".pt", ".pth", ".npz", ".csv", ".tsv", ".txt", ".json", ".parquet", ".feather", ".arrow", ".h5", ".hdf5", ".nc",
    ".pkl",
)  # fmt: skip
"""Endings under which nobody looks for a folder."""
_COLUMNS = ("", "needs", "free", "")


@checks_arguments
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
    """Write an array in blocks of rows, and open it. The same call resumes a write that was interrupted.

    Args:
        path: A `.npy` file, or a path or URL for a Zarr store.
        source: A function (start, stop) that returns those rows, its import path, or what `kit.data.open_rows` takes.
        shape: (rows, *columns) of a function's array; the number of rows alone lets kit ask for one to see the columns.
            For rows as the source: how many of them, drawn with replacement by `seed`; None takes each once.
        dtype: Type to store. None stores float32 from a function, and otherwise the type that rows are delivered in.
        row_block: Rows that are made and written at a time, and the most of a chunk in a Zarr store. 0 takes as many
            as `memory_bytes` holds.
        memory_bytes: Memory of all blocks at once.
        seed: Seed of the rows that are drawn.
        progress: True shows a line that updates in place, False shows nothing, and a callable is called with (rows
            done, rows in total, bytes written).
        overwrite: Replace what is there, and begin anew after an interruption.

    Returns:
        The rows of the new array.

    Raises:
        ConfigError: for a missing shape, a block that does not fit `memory_bytes`, rows of another shape, and numbers
            that `dtype` cannot hold.
        RowsError: when something is at the path.
        BuildError: when the disk is full, and for other rows than those of the interrupted write.
        StoreError: when the place cannot be written; `StoreLockedError` when another process writes it.

    Example:
        >>> kit.data.write_rows("ones.npy", numpy.ones((10, 3)), progress=False).shape
        (10, 3)
    """
    asked: Any = path  # by a user, who may give anything
    if not isinstance(asked, str | PathLike):
        raise ConfigError([Problem("path", f"{type(asked).__name__} is no path; write such as 'data/rows.npy'")])
    if row_block < 0:
        raise ConfigError([Problem("row_block", f"{row_block} rows are no block; give 1 or more, or 0 for the most")])
    url, memory_bytes = resolve_url(fspath(path)), parse_bytes(memory_bytes, "memory_bytes")
    table, file = _table(source, shape, dtype, seed), local_folder(url)
    most = memory_bytes // (_COPIES * table.row_bytes)
    if max(row_block, 1) > most:
        what = f"blocks of {row_block} rows" if row_block else "a row"
        needed = format_bytes(_COPIES * max(row_block, 1) * table.row_bytes)
        message = f"{format_bytes(memory_bytes)} does not hold {what} while it is made and written; allow {needed}"
        raise ConfigError([Problem("memory_bytes", message + (", or write fewer at a time" if row_block else ""))])
    block = min(row_block or most, table.shape[0])
    if file is not None and file.suffix in _OTHER_FILES:
        message = f"{file.name}: rows are written to a .npy file or to a Zarr store, a folder; {file.stem}.npy is one"
        raise ConfigError([Problem("path", message)])
    if file is None or file.suffix != ".npy":
        return _write_store(url, table, block, max(_LEAST_BUILD_BYTES, memory_bytes), progress, overwrite)
    if file.exists() and not overwrite:
        raise RowsError(f"{file} is there already; choose another path, or overwrite=True to replace it")
    with turn_at(file.with_name(f".{file.name}.lock"), _WAIT_SECONDS):
        draft = NpyDraft(file, table, block)
        if overwrite:
            draft.discard()
        draft.resume()
        if draft.kept:
            say(f"{draft.kept} of {draft.blocks} row blocks of {file} are there already", progress)
        draft.write(make_progress(progress, "Writing", "row blocks"))
    return open_rows(file)


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
            ConfigError: when the function gives others, or numbers that the type to store cannot hold.
        """
        made = self._make(start, stop)
        given = made.numpy() if isinstance(made, Tensor) else np.asarray(made)
        expected = (stop - start, *self.shape[1:])
        if given.shape != expected:
            raise ConfigError([Problem("source", f"rows {start} to {stop} have shape {given.shape}, not {expected}")])
        return _as_type(given, self.dtype, start)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """A block of kit's builder."""
        del name
        first, *rest = region
        return self.rows(first.start, first.stop)[(slice(None), *rest)]


def _as_type(given: NDArray[Any], dtype: np.dtype[Any], first_row: int) -> NDArray[Any]:
    """Numbers as the type to store, which may round them and must not make others of them."""
    if np.can_cast(given.dtype, dtype):
        return given.astype(dtype, copy=False)
    if given.dtype.kind not in "biuf":
        raise ConfigError([Problem("source", f"row {first_row:,} is {given.dtype}, which is no real number")])
    with np.errstate(over="ignore", invalid="ignore"):
        stored = given.astype(dtype)
    if dtype.kind == "f" and np.isfinite([np.fmin.reduce(stored, axis=None), np.fmax.reduce(stored, axis=None)]).all():
        return stored  # without a mask, which would be memory that no budget counts
    lost = np.isinf(stored) & (given != stored) if dtype.kind == "f" else stored != given
    if lost.any():
        row, *column = map(int, np.argwhere(lost)[0])
        number, count = given[(row, *column)], int(lost.sum())
        others = f", one of {count:,} such numbers in its block" if count > 1 else ""
        message = f"{dtype} cannot hold the {number} of row {first_row + row:,}{others}; choose a type that does"
        raise ConfigError([Problem("dtype", message)])
    return stored


def _table(source: Any, shape: Sequence[int] | int | None, dtype: str | None, seed: int) -> _Table:
    if isinstance(source, str) and ":" in source and ".py" in source.partition(":")[0]:
        source = load_target(source)
    if callable(source) and not isinstance(source, Tensor):
        if shape is None:
            message = "a function makes any number of rows; say how many, as (rows, *columns)"
            raise ConfigError([Problem("shape", message)])
        sizes = _sizes(shape)
        if len(sizes) == 1:
            sizes = (*sizes, *np.shape(source(0, 1))[1:])
        return _Table(source, sizes, _storable(dtype or "float32"))
    rows = open_rows(source, dtype=dtype)
    stored = _storable(name_of(rows.dtype))
    if shape is None:
        return _Table(lambda start, stop: rows.take(range(start, stop)), rows.shape, stored)
    count, *columns = _sizes(shape)
    if columns and tuple(columns) != rows.shape[1:]:
        message = f"columns {tuple(columns)} do not fit the rows of {rows.place}, which have {rows.shape[1:]}"
        raise ConfigError([Problem("shape", message)])
    return _Table(lambda start, stop: rows.take(_drawn(len(rows), start, stop, seed)), (count, *rows.shape[1:]), stored)


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, Integral) or size < 1 for size in sizes):
        raise ConfigError([Problem("shape", f"{shape!r} must be whole numbers of 1 or more, such as (rows, columns)")])
    return tuple(map(int, sizes))  # those of numpy overflow


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


class NpyDraft:
    """A `.npy` file on its way, written beside its place block by block, and moved there when it is whole.

    Beside the rows lies a list of the blocks that were written, each with its checksum. A write that was ended (killed,
    interrupted, failed) is resumed by one of the same shape, type and blocks: blocks are kept from the first on, as
    long as each is there with its checksum. The list alone is never believed, so a block that was half written, and all
    that follow it, are made again. One row of the last block kept is made again and compared: rows of a source that has
    changed since are refused rather than mixed. At every moment the place holds what it held before, or all rows.
    """

    def __init__(self, file: Path, table: _Table, row_block: int) -> None:
        self.file, self._table, self._row_block = file, table, row_block
        self.partial = file.with_name(f".{file.name}.partial")
        self._list = file.with_name(f".{file.name}.blocks")
        blocks = {"shape": table.shape, "dtype": table.dtype.str, "row_block": row_block}
        self._first_line = f"{json.dumps(blocks)}\n".encode()
        header = io.BytesIO()
        described = {"descr": table.dtype.str, "fortran_order": False, "shape": table.shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._header = header.getvalue()
        self.blocks = -(-table.shape[0] // row_block)
        self.kept = 0
        """Blocks from the first on that are written."""

    def resume(self) -> None:
        """Find what an ended write has left of this array; what is of another one is removed.

        Raises:
            BuildError: when the source gives other rows than it did then, or the disk has no room for the rest.
        """
        table, self.kept = self._table, self._whole_blocks()
        if not self.kept:
            self.discard()
        else:
            start = self._rows_of(self.kept - 1)
            made = table.rows(start, start + 1)
            with self.partial.open("rb") as file:
                file.seek(self._place_of(self.kept - 1))
                there = np.frombuffer(file.read(table.row_bytes), table.dtype).reshape(made.shape)
            # One row alone may be rounded otherwise than in its block.
            if not np.allclose(made, there, rtol=1e-3, atol=1e-6, equal_nan=True):
                raise BuildError(
                    f"{self.file}: row {start:,} comes out different from when this write began, {self.kept} of "
                    f"{self.blocks} row blocks ago, so the source has changed; use overwrite=True to begin again"
                )
        needed_bytes = (table.shape[0] - self._rows_of(self.kept)) * table.row_bytes
        free_bytes = free_disk_bytes(self.file.parent)
        if needed_bytes > free_bytes:
            what = "the rest of the array" if self.kept else "the array"
            raise BuildError(
                f"{self.file}: {what} takes {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} is free; free "
                "some space, choose another path, or write fewer rows"
            )

    def discard(self) -> None:
        """Remove what an ended write has left."""
        for path in (self._list, self.partial):
            path.unlink(missing_ok=True)

    def write(self, progress: Progress) -> None:
        """Make and write every block that is not there, and move the file to its place.

        By plain writes, each block on the disk before the next but few: no mapped page adds up.
        """
        try:
            with self.partial.open("ab") as file, self._list.open("ab") as listed:
                if self.kept:
                    file.truncate(self._place_of(self.kept))
                    listed.truncate(len(self._first_line) + self.kept * _LINE_BYTES)
                else:
                    file.write(self._header)
                    listed.write(self._first_line)
                progress(self.kept, self.blocks, self._rows_of(self.kept) * self._table.row_bytes)
                unsynced = 0
                for number in range(self.kept, self.blocks):
                    rows = self._table.rows(self._rows_of(number), self._rows_of(number + 1))
                    data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
                    file.write(data.data)
                    file.flush()
                    listed.write(_line(google_crc32c.value(data)))
                    listed.flush()
                    self.kept, unsynced = number + 1, unsynced + data.nbytes
                    if unsynced >= _SYNC_BYTES:
                        os.fsync(file.fileno())
                        unsynced = 0
                    progress(self.kept, self.blocks, self._rows_of(self.kept) * self._table.row_bytes)
                os.fsync(file.fileno())
            self.partial.replace(self.file)
        except BaseException as error:
            if self.kept:
                done = f"{self.kept} of {self.blocks} row blocks of {self.file} are kept"
                error.add_note(f"{done}; the same call writes the rest")
            else:
                self.discard()
            raise
        self._list.unlink(missing_ok=True)

    def _whole_blocks(self) -> int:
        """Blocks from the first on that are there as they were written."""
        try:
            first_line, *lines = self._list.read_bytes().splitlines(keepends=True) or [b""]
            with self.partial.open("rb") as file:
                if first_line != self._first_line or file.read(len(self._header)) != self._header:
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

    def _rows_of(self, blocks: int) -> int:
        """Rows in the first blocks."""
        return min(blocks * self._row_block, self._table.shape[0])

    def _place_of(self, block: int) -> int:
        """Where a block begins in the file."""
        return len(self._header) + self._rows_of(block) * self._table.row_bytes


def _line(crc32c: int) -> bytes:
    return f"{crc32c:08x}\n".encode()


# -- how large an array will be


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
        folder = local_folder(self.place)
        place = self.place if folder is None else project_path(folder)
        rows.append([f"on disk, {place}", format_bytes(self.disk_bytes), free])
        fits = {True: "fits", False: "does not fit", None: "unknown"}
        return [[*row, fits[answer]] for row, answer in zip(rows, (self.fits_memory, self.fits_disk), strict=True)]

    def __repr__(self) -> str:
        return f"{self.headline}\n{text_table(_COLUMNS, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self.headline)


@checks_arguments
def array_bytes(shape: Sequence[int] | int, dtype: str = "float32", path: str | PathLike[str] = "data") -> ArraySize:
    """The size of an array in memory and on disk, before it exists.

    Args:
        shape: (rows, *columns).
        dtype: Name of a numpy type, or bfloat16.
        path: Where it would be written. A relative path starts at the project folder.

    Returns:
        The bytes, beside the free memory and the free disk.

    Raises:
        ConfigError: for sizes below 1, and an unknown type.

    Example:
        >>> kit.data.array_bytes((500_000, 100_000)).memory_bytes
        200000000000
    """
    sizes = _sizes(shape)
    try:
        stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)  # of which numpy knows only the size
    except TypeError:
        stored = np.dtype(object)
    if stored.kind not in "biuf":
        raise ConfigError([Problem("dtype", f"{dtype!r} is no type of numbers; use one of {', '.join(DELIVERED)}")])
    memory_bytes = math.prod(sizes) * stored.itemsize
    url = resolve_url(fspath(path))
    folder = local_folder(url)
    return ArraySize(
        shape=sizes, dtype=str(dtype), memory_bytes=memory_bytes, disk_bytes=memory_bytes + _HEADER_BYTES,
        free_memory_bytes=share().memory_available_bytes,
        free_disk_bytes=None if folder is None else free_disk_bytes(folder), place=url,
    )  # fmt: skip


def free_disk_bytes(place: Path) -> int:
    """What the disk that holds a place, or will hold it, has free."""
    return shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free
