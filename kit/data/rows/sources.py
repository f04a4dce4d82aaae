"""Row sources: the same rows from memory, a `.npy` file, a `.pt` file or a Zarr array; as they are stored.

A source knows shape and type when it is made, and holds no handle until it is read: each process opens its own, so it
pickles. Files are mapped, never unpickled: nothing in them runs. What is not whole, of the wrong content, empty, or
stored column by column is refused when the source is made.

A Zarr array is read by kit's own engine, each chunk once for a batch. A missing or damaged chunk of a store that kit
wrote is an error that names it, never zeros; in any other store an object that is not there reads as fill values, as
Zarr says, and each process warns of it once. An array that is packed by `scale_factor` or `add_offset` is refused,
since its numbers are not its values.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
import threading
import warnings
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from kit.config import near
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset
from kit.data.rows.page_cache import LimitedTable, MappedTable, Table, gather, name_of, plain_dtype, table_of, tensor_of
from kit.data.stores.counters import absent_chunks
from kit.data.stores.url import local_folder, open_store, redact, resolve_url, store_error
from kit.data.stream.engine import Engine
from kit.data.variables import ArrayInfo
from kit.errors import MissingRowsError, RowsError, StoreError, first_line, warn_caller
from kit.sections import Loader


class RowSource(ABC):
    """Whole rows by their numbers."""

    place: str
    """Where they are, without secrets."""
    note: str = ""
    """What a reader should know, such as that a file could not be mapped; empty for nothing."""
    shape: tuple[int, ...]
    """(rows, *columns)."""
    stored: str
    """Name of the type as it is stored."""
    dtype: torch.dtype
    """What `read` gives."""
    row_bytes: int
    """As stored."""
    file: Path | None = None
    """What the page cache keeps of it; None where it reads no single file."""

    @property
    def missed_bytes(self) -> int | None:
        """What this process had to read from the disk that is played; None where none is."""
        return None

    @abstractmethod
    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """`(samples, *columns)` in the order given, in memory of its own; rows may come twice."""

    def close(self) -> None:  # noqa: B027 - memory has nothing to close
        """Let go of files and connections; the next read opens them again."""


class MemoryRows(RowSource):
    """A CPU tensor or an array in memory, never copied but by rows."""

    def __init__(self, given: Tensor | NDArray[Any]) -> None:
        self.place = f"{type(given).__name__} in memory"
        self._tensor = _plain_tensor(given, self.place)
        self.shape = _checked_shape(tuple(self._tensor.shape), self.place)
        self.dtype = self._tensor.dtype
        self.stored = str(given.dtype) if isinstance(given, np.ndarray) else name_of(given.dtype)
        self.row_bytes = self._tensor[0].numel() * self._tensor.element_size()

    @override
    def read(self, rows: NDArray[np.int64]) -> Tensor:
        if not self._tensor.is_contiguous() or self._tensor.stride(-1) != 1:  # a dimension of one may have any stride
            return self._tensor[torch.from_numpy(rows)]
        table = self._tensor.reshape(len(self._tensor), -1).view(torch.uint8).numpy()
        return tensor_of(gather(table, rows), self.dtype, self.shape[1:])


class FileRows(RowSource):
    """The rows of one mapped file; a handle for each process."""

    def __init__(self, file: Path, page_cache_bytes: int = 0) -> None:
        self.file, self.place = file, str(file)
        self.page_cache_bytes = page_cache_bytes
        self._opened: tuple[int, MappedTable | LimitedTable] | None = None
        self.row_bytes = self._check().shape[1]

    @override
    def read(self, rows: NDArray[np.int64]) -> Tensor:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            table = self._map()
            reader: MappedTable | LimitedTable = MappedTable(table)
            if self.page_cache_bytes and self.file is not None:
                reader = LimitedTable(self.file, table, self.page_cache_bytes)
            opened = self._opened = (os.getpid(), reader)
        return self._tensor(opened[1].gather(rows))

    @property
    @override
    def missed_bytes(self) -> int | None:
        if not self.page_cache_bytes:
            return None
        reader = None if self._opened is None else self._opened[1]
        return reader.missed_bytes if isinstance(reader, LimitedTable) else 0

    @override
    def close(self) -> None:
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @abstractmethod
    def _check(self) -> Table:
        """Set shape and types, or refuse; the table is let go of again."""

    @abstractmethod
    def _map(self) -> Table:
        """The rows, mapped."""

    def _tensor(self, block: Table) -> Tensor:
        return tensor_of(block, self.dtype, self.shape[1:])


class NpyRows(FileRows):
    """A `.npy` file."""

    @override
    def _check(self) -> Table:
        array = self._array()
        self.shape = _checked_shape(tuple(array.shape), self.place)
        plain = plain_dtype(array.dtype, self.place)
        self.stored, self._numpy, self._plain = str(array.dtype), array.dtype, plain
        self.dtype = torch.from_numpy(np.empty(0, plain)).dtype
        if not array.flags.c_contiguous:
            raise _by_columns(self.place)
        return table_of(array)

    @override
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
            raise _unreadable(self.place, "array", error, "write it with numpy.save or kit.data.write_rows") from None

    @override
    def _tensor(self, block: Table) -> Tensor:
        if self._numpy == self._plain:
            return super()._tensor(block)
        numbers = block.view(self._numpy).astype(self._plain)
        return torch.from_numpy(numbers).reshape(len(block), *self.shape[1:])


class TorchRows(FileRows):
    """A `.pt` file that holds one tensor; mapped, or read whole where it cannot be."""

    @override
    def _check(self) -> Table:
        tensor = self._load()
        self.shape, self.dtype, self.stored = tuple(tensor.shape), tensor.dtype, name_of(tensor.dtype)
        return _bytes_of(tensor)

    @override
    def _map(self) -> Table:
        return _bytes_of(self._load())

    def _load(self) -> Tensor:
        loaded = self._try(mmap=True)
        if isinstance(loaded, Exception):
            mapped, loaded = loaded, self._try(mmap=False)
            if isinstance(loaded, Exception):
                way_out = "save one tensor with torch.save(tensor, path); nothing else is unpickled"
                raise _unreadable(self.place, "tensor", loaded, way_out)
            self.note = f"read whole into memory, as it cannot be mapped: {first_line(mapped)[:200]}"
            self.file = None  # what is read from then on is memory
        if not isinstance(loaded, Tensor) or loaded.layout != torch.strided:
            kind = f"a {loaded.layout} tensor" if isinstance(loaded, Tensor) else f"a {type(loaded).__name__}"
            keys = f" with {', '.join(map(repr, list(loaded)[:4]))}" if isinstance(loaded, dict) else ""
            raise RowsError(f"{self.place} holds {kind}{keys}; it must hold a single tensor, (rows, *columns)")
        _checked_shape(tuple(loaded.shape), self.place)
        if not loaded.is_contiguous():
            raise _by_columns(self.place)
        return loaded.detach()

    def _try(self, *, mmap: bool) -> Any:
        """What the file holds, or why it cannot be loaded."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of its own old formats
                return torch.load(self.place, map_location="cpu", weights_only=True, mmap=mmap)
        except (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as e:
            return e


def _bytes_of(tensor: Tensor) -> Table:
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
        "kit.data.write_rows(path, source) with a function (start, stop) that reads it"
    )


def _unreadable(place: str, what: str, error: Exception, way_out: str) -> RowsError:
    return RowsError(f"{place} cannot be read as one {what}: {first_line(error)[:200]}; {way_out}")


class ZarrRows(RowSource):
    """The rows of one Zarr array.

    Args:
        url: Of the array, or of the group that it is in.
        credentials: As `data.credentials`.
        variable: Name of the array in a group; empty where there is only one.
        strict: As `data.strict`.

    Raises:
        RowsError: for a group of several arrays, and an array that holds no rows of numbers.
        StoreError: when there is no store, or it cannot be reached.
    """

    def __init__(self, url: str, credentials: str = "default", variable: str = "", strict: bool = False) -> None:
        self._dataset, info = _find(resolve_url(url), credentials, variable, strict)
        self.place = f"{redact(self._dataset.url)}/{info.name}"
        if not info.shape or 0 in info.shape:
            raise RowsError(f"{self.place} holds no rows, shape {info.shape}; there must be one number at least")
        if (info.scale_factor, info.add_offset) != (1.0, 0.0):
            raise RowsError(
                f"{self.place} is packed (scale_factor {info.scale_factor:g}, add_offset {info.add_offset:g}); read it "
                "as patches with kit.data.PatchData, or give kit.data.write_rows a function (start, stop) of its values"
            )
        self.shape, self.stored = info.shape, str(info.dtype)
        self.row_bytes = math.prod(info.shape[1:]) * info.dtype.itemsize
        self._plain = plain_dtype(info.dtype, self.place)
        self.dtype = torch.from_numpy(np.empty(0, self._plain)).dtype
        self._name = info.name
        self.chunk = info.chunk
        self._engine: Engine | None = None
        self._warned = False
        self._opening = threading.Lock()
        self.settings = Loader()
        """How the engine reads; what is set here holds from its first read on."""

    @override
    def read(self, rows: NDArray[np.int64]) -> Tensor:
        offsets = np.zeros((len(rows), len(self.shape)), np.int64)
        offsets[:, 0] = rows
        if not len(rows):
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        with self._opening:  # batches are read by several threads, which share one engine and what it keeps
            if self._engine is None:
                names = ("requests_in_flight", "decode_threads", "batches_ahead", "cache_bytes", "memory_bytes")
                settings = {name: getattr(self.settings, name) for name in names}
                self._engine = Engine(self._dataset, (self._name,), as_stored=True, **settings)
            engine = self._engine
        values, _ = engine.read(offsets, (1, *self.shape[1:]))
        if not (self._warned or engine.strict) and (absent := absent_chunks(engine.counters)):
            self._warned = True
            warn_caller(f"{self.place}: {absent}, so far; strict=True makes that an error")
        numbers = values.reshape(len(rows), *self.shape[1:])
        return torch.from_numpy(np.ascontiguousarray(numbers, self._plain))

    @override
    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_engine", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _engine=None, _opening=threading.Lock())


def _find(url: str, credentials: str, variable: str, strict: bool) -> tuple[Dataset, ArrayInfo]:
    """The array, and the store that it is in."""
    folder = local_folder(url)
    if folder is not None and not folder.exists():
        raise MissingRowsError(f"{folder} does not exist; give a Zarr array, a .npy or a .pt file{near(folder)}")
    try:
        node = zarr.open(open_store(url, credentials), mode="r")
    except FileNotFoundError:
        raise RowsError(f"{redact(url)} holds no Zarr array; give the path or URL of one") from None
    except StoreError:
        raise
    except Exception as error:
        raise store_error(url, error) from None
    dataset = open_dataset(url, credentials, (variable,) if variable else (), strict=strict)
    if isinstance(node, zarr.Array):
        variable = ""
    if not variable and len(dataset.arrays) != 1:
        names = ", ".join(dataset.arrays) or "none"
        raise RowsError(
            f"{redact(url)} holds {len(dataset.arrays)} arrays ({names}); name one of them in variable, or behind the "
            "place, as place/name"
        )
    return dataset, dataset.select((variable or next(iter(dataset.arrays)),))[0]
