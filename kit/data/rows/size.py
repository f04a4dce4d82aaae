"""array_bytes: how large an array will be, told before it is made, beside the memory and the disk that are free.

Exact: rows × columns × bytes of a number, and for a file the header too. GiB are 2^30 bytes. Nothing is created.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike, fspath
from pathlib import Path

import numpy as np

from kit.cgroup import share
from kit.data.rows.kinds import DELIVERED
from kit.data.stores import local_folder, resolve_url
from kit.errors import ConfigError, Problem
from kit.tables import html_table, text_table
from kit.units import format_bytes

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
