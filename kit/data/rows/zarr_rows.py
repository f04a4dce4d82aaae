"""ZarrRows: the rows of a Zarr array, at a path or a URL, read by kit's own engine: each chunk once for a batch.

A missing or damaged chunk of a store that kit wrote is an error that names it, never zeros; in any other store an
object that is not there reads as fill values, as Zarr says, and each process warns of it once. Numbers come as they are
stored; an array that is packed by `scale_factor` or `add_offset` is refused, since its numbers are not its values.
"""

from __future__ import annotations

import difflib
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor

from kit.config import Loader
from kit.data.counters import absent_chunks
from kit.data.dataset import ArrayInfo, Dataset, open_dataset
from kit.data.engine import Engine
from kit.data.rows.kinds import plain_dtype
from kit.data.stores import local_folder, open_store, redact, resolve_url, store_error
from kit.errors import KitWarning, MissingRowsError, RowsError, StoreError


class ZarrRows:
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

    note = ""
    file: Path | None = None

    def __init__(self, url: str, credentials: str = "default", variable: str = "", strict: bool = False) -> None:
        self._dataset, info = _find(resolve_url(url), credentials, variable, strict)
        self.place = f"{redact(self._dataset.url)}/{info.name}"
        _refuse_packed(info, self.place)
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

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        offsets = np.zeros((len(rows), len(self.shape)), np.int64)
        offsets[:, 0] = rows
        if not len(rows):
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        engine = self._open()
        values, _ = engine.read(offsets, (1, *self.shape[1:]))
        self._warn_of_absent_chunks(engine)
        numbers = values.reshape(len(rows), *self.shape[1:])
        return torch.from_numpy(np.ascontiguousarray(numbers, self._plain))

    def _warn_of_absent_chunks(self, engine: Engine) -> None:
        if not (self._warned or engine.strict) and (absent := absent_chunks(engine.counters)):
            self._warned = True
            warnings.warn(f"{self.place}: {absent}, so far; strict=True makes that an error", KitWarning, stacklevel=4)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _open(self) -> Engine:
        with self._opening:  # batches are read by several threads, which share one engine and what it keeps
            if self._engine is None:
                self._engine = self._made()
            return self._engine

    def _made(self) -> Engine:
        settings = self.settings
        return Engine(
            self._dataset, (self._name,), as_stored=True,
            requests_in_flight=settings.requests_in_flight, decode_threads=settings.decode_threads,
            batches_ahead=settings.batches_ahead, cache_bytes=settings.cache_bytes,
            memory_bytes=settings.memory_bytes,
        )  # fmt: skip

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
        raise RowsError(f"{redact(url)} holds {len(dataset.arrays)} arrays ({names}); name one of them in variable")
    return dataset, dataset.select((variable or next(iter(dataset.arrays)),))[0]


def near(missing: Path) -> str:
    """What else is there that may have been meant, as the end of a sentence; empty for nothing."""
    names = [item.name for item in missing.parent.iterdir()] if missing.parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse_packed(info: ArrayInfo, place: str) -> None:
    if not info.shape or 0 in info.shape:
        raise RowsError(f"{place} holds no rows, shape {info.shape}; there must be one number at least")
    if (info.scale_factor, info.add_offset) != (1.0, 0.0):
        raise RowsError(
            f"{place} is packed (scale_factor {info.scale_factor:g}, add_offset {info.add_offset:g}); read it as "
            "patches with kit.PatchData, or write its values with kit.write_rows"
        )
