"""write_rows: an array larger than memory, written in blocks of rows: whole or not at all.

A block is made, written and forgotten, so memory holds one block whatever the size of the array. A `.npy` file is
written beside its place under another name, and takes its place when every row of it is on disk; one that was ended is
gone on with (see `NpyDraft`). A Zarr array is built like any store of kit's: by the chunk, checksummed, resumed where
it was ended, and refused to readers until it is whole.

Rows come from a function of (start, stop), or from other rows: each once in their order, or drawn with replacement
where a shape is asked for, by a seed and independent of how the array is cut into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kit.config import Config
from kit.data.build import build
from kit.data.lock import turn_at
from kit.data.pieces import Region
from kit.data.progress import Progress, make_progress, say
from kit.data.rows.kinds import name_of, plain_dtype
from kit.data.rows.npy_draft import NpyDraft
from kit.data.rows.rows import Rows, open_rows
from kit.data.source import VariableSpec
from kit.data.stores import local_folder, resolve_url
from kit.errors import ConfigError, Problem, RowsError
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
