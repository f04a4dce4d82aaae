"""Rows: one array as rows that can be taken in any order, wherever they are kept and however large they are.

`open_rows` finds out what is given: a `.npy` or `.pt` file, a Zarr array, or numbers in memory. Rows are counted by
their position in the selection, from 0, so that what a model keeps for each row has one place for it; `indices` tells
which row of the array that is. A description holds no handle: it pickles, and every process opens the file for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.arguments import checks_arguments
from kit.config import near, project_path
from kit.data.rows.page_cache import delivered_dtype, name_of
from kit.data.rows.sources import MemoryRows, NpyRows, RowSource, TorchRows, ZarrRows
from kit.data.stores.url import local_folder, redact, resolve_url
from kit.errors import ConfigError, MissingRowsError, Problem, RowsError
from kit.machine.machine import share
from kit.units import format_bytes, parse_bytes

Which = Sequence[int] | NDArray[Any] | Tensor | range | slice
"""Row numbers, in any order; some may come twice."""
_FILES: dict[str, type[NpyRows] | type[TorchRows]] = {".npy": NpyRows, ".pt": TorchRows, ".pth": TorchRows}


class Rows:
    """Rows of numbers, `(rows, *columns)`, read when they are taken.

    Args:
        source: Where they are.
        indices: Rows of the array, in the order in which they count; None for all.
        dtype: Name of the type they are delivered in; None for float32 of floats, and whole numbers as they are.

    Raises:
        ConfigError: for no index at all, one outside the array, and a type that cannot hold the numbers.
    """

    def __init__(self, source: RowSource, indices: Which | None = None, dtype: str | None = None) -> None:
        self.source = source
        self.dtype: torch.dtype = delivered_dtype(source.dtype, dtype, source.place)
        self.indices: NDArray[np.int64] | None = None
        """Row of the array at each position; None where all rows count in their order."""
        if indices is not None:
            self.indices = positions_of(indices, source.shape[0], source.place)
            if not len(self.indices):
                raise ConfigError([Problem("indices", "an empty selection holds no rows; leave it out to take all")])

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *columns), of the selection."""
        return (self.source.shape[0] if self.indices is None else len(self.indices), *self.source.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def place(self) -> str:
        return self.source.place

    @property
    def note(self) -> str:
        """What a reader should know of how they are read; empty for nothing."""
        return self.source.note

    @property
    def stored_dtype(self) -> str:
        return self.source.stored

    @property
    def row_bytes(self) -> int:
        """Of one row, as stored."""
        return self.source.row_bytes

    @property
    def nbytes(self) -> int:
        """Of the selection, as stored."""
        return len(self) * self.row_bytes

    @property
    def delivered_row_bytes(self) -> int:
        """Of one row, as it is delivered."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def file(self) -> Path | None:
        """The one file that is mapped; None for memory, stores, and what could not be mapped."""
        return self.source.file

    def take(self, rows: Which) -> Tensor:
        """These rows, `(samples, *columns)`, in the order given, as a new block on the CPU.

        Raises:
            IndexError: for a row that there is not.
            StoreError: when a store cannot be reached, or what it holds is damaged.
        """
        positions = positions_of(rows, len(self), self.place, IndexError)
        stored = positions if self.indices is None else self.indices[positions]
        return self.source.read(stored).to(self.dtype)

    def __getitem__(self, rows: int | Which) -> Tensor:
        """One row for a number, `(*columns)`; for several, what `take` gives. So a DataLoader takes rows as a Dataset.

        Raises:
            IndexError: for a row that there is not, and for columns.
            StoreError: as `take`.
        """
        if isinstance(rows, tuple):
            raise IndexError(f"{self.place}: whole rows are read; take rows{list(rows[:1])} first, then its columns")
        several = isinstance(rows, slice) or np.ndim(rows) > 0
        return self.take(cast("Which", rows)) if several else self.take(np.asarray(rows).reshape(1))[0]

    def subset(self, indices: Which) -> Rows:
        """Some of these rows, counted anew.

        Raises:
            ConfigError: for no index at all, and one that there is not.
        """
        chosen = positions_of(indices, len(self), self.place)
        inner = chosen if self.indices is None else self.indices[chosen]
        return Rows(self.source, inner, name_of(self.dtype))

    def in_memory(self) -> Rows:
        """The same rows, read whole into memory, as they are delivered.

        Raises:
            RowsError: when the memory that is free cannot hold them.
        """
        needed_bytes, free_bytes = len(self) * self.delivered_row_bytes, share().memory_available_bytes
        if needed_bytes > free_bytes:
            raise RowsError(
                f"{self.place} takes {format_bytes(needed_bytes)} of memory and {format_bytes(free_bytes)} is free; "
                "leave it on disk, or take fewer rows by indices"
            )
        return Rows(MemoryRows(self.take(slice(None))), None, name_of(self.dtype))

    def close(self) -> None:
        """Let go of files and connections; the next `take` opens them again."""
        self.source.close()

    def __repr__(self) -> str:
        by = " × ".join(f"{size:,}" for size in self.shape)
        chosen = "" if self.indices is None else f" of {self.source.shape[0]:,} rows"
        given = "" if self.stored_dtype == name_of(self.dtype) else f" given as {name_of(self.dtype)}"
        note = f"; {self.note}" if self.note else ""
        place = self.place if self.file is None else project_path(self.file)
        return f"Rows {by}{chosen} {self.stored_dtype}{given}, {format_bytes(self.nbytes)}, {place}{note}"

    def _repr_html_(self) -> str:
        return f"<div>{escape(str(self))}</div>"


def positions_of(rows: Which, count: int, place: str, kind: type[Exception] = ConfigError) -> NDArray[np.int64]:
    """Row numbers as an array, each checked.

    Raises:
        kind: for what is no row number, or none of `count` rows.
    """
    if isinstance(rows, slice):
        return np.arange(*rows.indices(count), dtype=np.int64)
    given = rows.numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    found = given.reshape(-1) if given.ndim <= 1 else given
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise kind(f"{place}: rows are chosen by whole numbers in one dimension, not by {given.dtype} {given.shape}")
    numbers = np.ascontiguousarray(found, np.int64)
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        wrong = int(numbers[(numbers < 0) | (numbers >= count)][0])
        raise kind(f"{place}: there is no row {wrong}; its {count:,} rows are numbered from 0 to {count - 1:,}")
    return numbers


@checks_arguments
def open_rows(
    place: str | PathLike[str] | Tensor | NDArray[Any] | Rows,
    indices: Which | None = None,
    *,
    dtype: str | None = None,
    variable: str = "",
    credentials: str = "default",
    page_cache_bytes: int | str = 0,
    strict: bool = False,
) -> Rows:
    """Open an array as rows, without reading one.

    Args:
        place: A `.npy` file, a `.pt` or `.pth` file with one tensor, a Zarr array or its group (path or URL), an array
            in memory, or rows already open. A relative path starts at the project folder.
        indices: Rows to take, in this order. None takes all.
        dtype: Type that rows are delivered in, such as "float64". None delivers floats as float32 and whole numbers
            as they are.
        variable: Name of the array in a Zarr group of several.
        credentials: As `data.credentials`, for a URL.
        page_cache_bytes: How much of a mapped file the page cache may keep, so that this machine stands in for one
            with less memory. 0 does not limit it.
        strict: As `data.strict`, for a Zarr array.

    Returns:
        The rows: `shape` is (rows, *columns), and indexing reads.

    Raises:
        MissingRowsError: when there is nothing at the place.
        RowsError: for what is no array of numbers, truncated, empty, or stored column by column.
        ConfigError: for no index at all, one outside the array, and a type that cannot hold the numbers.
        StoreError: when a store cannot be reached.

    Example:
        >>> rows = kit.data.open_rows(numpy.ones((10, 3)))
        >>> rows.shape
        (10, 3)
    """
    if isinstance(place, Rows):
        chosen = place if indices is None else place.subset(indices)
        return chosen if dtype is None else Rows(chosen.source, chosen.indices, dtype)
    if isinstance(place, Tensor | np.ndarray):
        return Rows(MemoryRows(place), indices, dtype)
    given: object = place
    if not isinstance(given, str | PathLike):
        message = f"{type(place).__name__} is no place; give a path, a URL, a tensor or an array"
        if hasattr(place, "to_numpy") or isinstance(place, list | tuple):
            message += ", as " + ("frame.to_numpy()" if hasattr(place, "to_numpy") else "numpy.asarray(values)")
        raise ConfigError([Problem("source", message)])
    url = resolve_url(fspath(given))
    file = local_folder(url)
    if file is not None and (file.suffix in _FILES or file.is_file()):
        if not file.exists():
            raise MissingRowsError(f"{file} does not exist{near(file) or '; write it with kit.data.write_rows'}")
        if file.suffix not in _FILES:
            raise RowsError(
                f"{file} is no .npy, .pt or .pth file; those are mapped, and a Zarr array is a folder; of any other "
                "give the array itself, or write it once with kit.data.write_rows"
            )
        return Rows(_FILES[file.suffix](file, parse_bytes(page_cache_bytes, "page_cache_bytes")), indices, dtype)
    if file is None and Path(url).suffix in _FILES:
        raise RowsError(
            f"{redact(url)}: files are mapped from a disk; bring it there with kit.data.download_once(url, path), "
            "or write its rows to a Zarr store with kit.data.write_rows, which is read where it is"
        )
    return Rows(ZarrRows(url, credentials, variable, strict), indices, dtype)
