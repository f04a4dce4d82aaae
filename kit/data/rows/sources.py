"""Row sources: the same rows from memory, a `.npy` file, a `.pt` file or a Zarr array; as they are stored.

A source knows shape and type when it is made, and holds no handle until it is read: each process opens its own, so it
pickles. Files are mapped, never unpickled: nothing in them runs. What is not whole, of the wrong content, empty, or
stored column by column is refused when the source is made.
"""

from __future__ import annotations

import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.data.rows.gather import Table, gather, table_of, tensor_of
from kit.data.rows.kinds import name_of, plain_dtype
from kit.data.rows.page_cache import LimitedTable, MappedTable
from kit.errors import RowsError


class RowSource(Protocol):
    """Whole rows by their numbers."""

    place: str
    """Where they are, without secrets."""
    note: str
    """What a reader should know, such as that a file could not be mapped; empty for nothing."""
    shape: tuple[int, ...]
    """(rows, *columns)."""
    stored: str
    """Name of the type as it is stored."""
    dtype: torch.dtype
    """What `read` gives."""
    row_bytes: int
    """As stored."""
    file: Path | None
    """What the page cache keeps of it; None where it reads no single file."""

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """`(samples, *columns)` in the order asked, in memory of its own; rows may come twice."""

    def close(self) -> None:
        """Let go of files and connections; the next read opens them again."""


class MemoryRows:
    """A CPU tensor or an array in memory, never copied but by rows."""

    note = ""
    file: Path | None = None

    def __init__(self, given: Tensor | NDArray[Any]) -> None:
        self.place = f"{type(given).__name__} in memory"
        self._tensor = _plain_tensor(given, self.place)
        self.shape = _checked_shape(tuple(self._tensor.shape), self.place)
        self.dtype = self._tensor.dtype
        self.stored = str(given.dtype) if isinstance(given, np.ndarray) else name_of(given.dtype)
        self.row_bytes = self._tensor[0].numel() * self._tensor.element_size()

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        if not self._tensor.is_contiguous() or self._tensor.stride(-1) != 1:  # a dimension of one may have any stride
            return self._tensor[torch.from_numpy(rows)]
        table = self._tensor.reshape(len(self._tensor), -1).view(torch.uint8).numpy()
        return tensor_of(gather(table, rows), self.dtype, self.shape[1:])

    def close(self) -> None:
        """There is nothing to let go of."""


class FileRows:
    """The rows of one mapped file; a handle for each process."""

    def __init__(self, file: Path, page_cache_bytes: int = 0) -> None:
        self.file: Path | None = file
        self.place, self.note = str(file), ""
        self.page_cache_bytes = page_cache_bytes
        self._opened: tuple[int, MappedTable | LimitedTable] | None = None
        table = self._check()
        self.row_bytes = table.shape[1]

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: str

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        return self._tensor(self._open().gather(rows))

    def close(self) -> None:
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _open(self) -> MappedTable | LimitedTable:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            table = self._map()
            reader: MappedTable | LimitedTable = MappedTable(table)
            if self.page_cache_bytes and self.file is not None:
                reader = LimitedTable(self.file, table, self.page_cache_bytes)
            opened = self._opened = (os.getpid(), reader)
        return opened[1]

    def _check(self) -> Table:
        """Set shape and types, or refuse; the table is let go of again."""
        raise NotImplementedError

    def _map(self) -> Table:
        raise NotImplementedError

    def _tensor(self, block: Table) -> Tensor:
        return tensor_of(block, self.dtype, self.shape[1:])


class NpyRows(FileRows):
    """A `.npy` file."""

    def _check(self) -> Table:
        array = self._array()
        self.shape = _checked_shape(tuple(array.shape), self.place)
        plain = plain_dtype(array.dtype, self.place)
        self.stored, self._numpy, self._plain = str(array.dtype), array.dtype, plain
        self.dtype = torch.from_numpy(np.empty(0, plain)).dtype
        if not array.flags.c_contiguous:
            raise _by_columns(self.place)
        return table_of(array)

    def _map(self) -> Table:
        array = self._array()
        if (tuple(array.shape), array.dtype) != (self.shape, self._numpy):
            raise RowsError(
                f"{self.place} has changed: it held {self.shape} {self._numpy}, now {array.shape} {array.dtype}; open "
                "it anew"
            )
        return table_of(array)

    def _array(self) -> NDArray[Any]:
        assert self.file is not None
        try:
            # A plain array over the mapping: a memmap would be carried through every view of it.
            return np.asarray(np.load(self.file, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError, struct.error, SyntaxError) as error:
            raise _unreadable(self.place, "array", error, "write it with numpy.save or kit.write_rows") from None

    def _tensor(self, block: Table) -> Tensor:
        if self._numpy == self._plain:
            return tensor_of(block, self.dtype, self.shape[1:])
        numbers = block.view(self._numpy).astype(self._plain)
        return torch.from_numpy(numbers).reshape(len(block), *self.shape[1:])


class TorchRows(FileRows):
    """A `.pt` file that holds one tensor; mapped, or read whole where it cannot be."""

    def _check(self) -> Table:
        tensor = self._load()
        self.shape, self.dtype, self.stored = tuple(tensor.shape), tensor.dtype, name_of(tensor.dtype)
        return _table(tensor)

    def _map(self) -> Table:
        return _table(self._load())

    def _load(self) -> Tensor:
        mapped = self._try(mmap=True)
        loaded = self._try(mmap=False) if isinstance(mapped, Exception) else mapped
        if isinstance(loaded, Exception):
            way_out = "save one tensor with torch.save(tensor, path); nothing else is unpickled"
            raise _unreadable(self.place, "tensor", loaded, way_out)
        if isinstance(mapped, Exception):
            self.note = f"read whole into memory, as it cannot be mapped: {_first_line(mapped)}"
            self.file = None  # what is read from then on is memory
        return self._checked(loaded)

    def _try(self, *, mmap: bool) -> Any:
        """What the file holds, or why that cannot be had."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells of its own old formats
                return torch.load(self.place, map_location="cpu", weights_only=True, mmap=mmap)
        except (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as e:
            return e

    def _checked(self, loaded: Any) -> Tensor:
        if not isinstance(loaded, Tensor) or loaded.layout != torch.strided:
            kind = f"a {loaded.layout} tensor" if isinstance(loaded, Tensor) else f"a {type(loaded).__name__}"
            keys = f" with {', '.join(map(repr, list(loaded)[:4]))}" if isinstance(loaded, dict) else ""
            raise RowsError(f"{self.place} holds {kind}{keys}; it must hold a single tensor, (rows, *columns)")
        tensor = loaded.detach()
        _checked_shape(tuple(tensor.shape), self.place)
        if not tensor.is_contiguous():
            raise _by_columns(self.place)
        return tensor


def _table(tensor: Tensor) -> Table:
    return tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()


def _plain_tensor(given: Tensor | NDArray[Any], place: str) -> Tensor:
    """The same numbers as a tensor on the CPU, sharing memory wherever their type is one of torch's."""
    if isinstance(given, np.ndarray):
        plain = plain_dtype(given.dtype, place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that cannot be written: nothing here does
            forward = given if min(given.strides, default=0) >= 0 else given.copy()  # torch knows no way backwards
            return torch.from_numpy(np.asarray(forward, plain))
    if given.layout != torch.strided or given.device.type != "cpu":
        where = f"on {given.device}" if given.layout == torch.strided else f"as {given.layout}"
        raise RowsError(f"a tensor {where}: rows stay in host memory and only batches go on; give x.cpu(), dense")
    tensor = given.detach()
    widened = {"uint16": torch.int32, "uint32": torch.int64}.get(name_of(tensor.dtype))
    return tensor if widened is None else tensor.to(widened)


def _checked_shape(shape: tuple[int, ...], place: str) -> tuple[int, ...]:
    if not shape:
        raise RowsError(f"{place} holds a single number; rows need a first dimension, (rows, *columns)")
    if 0 in shape:
        what = "no rows" if shape[0] == 0 else "rows without columns"
        raise RowsError(f"{place} holds {what}, shape {shape}; there must be one number at least")
    return shape


def _by_columns(place: str) -> RowsError:
    return RowsError(
        f"{place} is stored column by column, so that one row lies all over the file; write it anew row by row: "
        "kit.write_rows(path, source) with a function (start, stop) that reads it"
    )


def _unreadable(place: str, what: str, error: Exception, way_out: str) -> RowsError:
    return RowsError(f"{place} cannot be read as one {what}: {_first_line(error)}; {way_out}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).strip()[:200]
