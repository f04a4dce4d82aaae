"""One array as a source: in memory, or mapped from a file of any size.

A mapped file is mapped anew for each few megabytes and let go, so that the pages read do not add up in this process's
memory. A disk gives whole pages, so a file counts as cut along its fastest dimension, a page a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.dataset import in_machine_order
from kit.data.pieces import Region
from kit.data.source import VariableSpec
from kit.errors import ConfigError, Problem
from kit.plan.rechunk import FETCH_BYTES

_PAGE_BYTES = 4096


class ArraySource:
    """A source of one variable.

    Args:
        array: Numbers in memory, or a `numpy.memmap` over a whole file.
        dims: Names of the dimensions; `dim_0`, `dim_1`, ... when left out.
        name: Of the variable.
        attributes: CF attributes of the variable.
    """

    def __init__(
        self,
        array: NDArray[Any],
        dims: Sequence[str] = (),
        name: str = "values",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self._values: NDArray[Any] | _MappedFile = _MappedFile.of(array) if _is_mapped(array) else array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dims = tuple(dims) or tuple(f"dim_{axis}" for axis in range(array.ndim))
        dtype = in_machine_order(array.dtype)
        self.variables: Mapping[str, VariableSpec] = {name: VariableSpec(dtype, dict(attributes or {}))}
        self.coordinates: Mapping[str, NDArray[Any]] = {}
        self.attributes: Mapping[str, Any] = {}
        self.chunks = {name: self._values.page} if isinstance(self._values, _MappedFile) else {}

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Values of one block."""
        dtype = self.variables[name].dtype
        if isinstance(self._values, _MappedFile):
            return self._values.read(region, dtype)
        return np.asarray(self._values[region], dtype)


def open_npy(
    path: Path, dims: Sequence[str] = (), name: str = "values", attributes: Mapping[str, Any] | None = None
) -> ArraySource:
    """The array of a `.npy` file, mapped.

    Raises:
        ConfigError: when it is not there, no `.npy` file, cut short, or holds Python objects.
    """
    try:
        return ArraySource(np.load(path, mmap_mode="r", allow_pickle=False), dims, name, attributes)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("data.source", f"{path} cannot be mapped as an array: {error}")]) from None


class _MappedFile:
    """A whole array in a file; a handle is opened for each piece."""

    def __init__(self, path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], fortran: bool) -> None:
        self._path, self._dtype, self._offset, self._fortran = path, dtype, offset, fortran
        self._shape = shape[::-1] if fortran else shape
        """In the order of the file: the last dimension is contiguous."""
        page = (*(1,) * (len(shape) - 1), min(self._shape[-1], max(1, _PAGE_BYTES // dtype.itemsize)))
        self.page = page[::-1] if fortran else page

    @classmethod
    def of(cls, array: Any) -> _MappedFile:
        fortran = not array.flags.c_contiguous
        return cls(str(array.filename), array.dtype, int(array.offset), tuple(array.shape), fortran)

    def read(self, region: Region, dtype: np.dtype[Any]) -> NDArray[Any]:
        ordered = region[::-1] if self._fortran else region
        block = np.empty([part.stop - part.start for part in ordered], dtype)
        self._fill(block, ordered, (), self._offset)
        return block.T if self._fortran else block

    def _fill(self, block: NDArray[Any], region: Region, outer: tuple[int, ...], offset: int) -> None:
        """Copy by slabs of whole rows, or row by row where one row is larger than a slab."""
        axis = len(outer)
        row_bytes = prod(self._shape[axis + 1 :]) * self._dtype.itemsize
        first, rest = region[0], region[1:]
        if row_bytes > FETCH_BYTES and rest:
            for place in range(first.start, first.stop):
                self._fill(block[place - first.start], rest, (*outer, place), offset + place * row_bytes)
            return
        step = max(1, FETCH_BYTES // row_bytes)
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            shape = (stop - start, *self._shape[axis + 1 :])
            mapped = np.memmap(self._path, self._dtype, "r", offset + start * row_bytes, shape)
            block[start - first.start : stop - first.start] = mapped[(slice(None), *rest)]
            del mapped


def _is_mapped(array: NDArray[Any]) -> bool:
    """Whether it is a whole mapped file: a view into one has lost where it begins."""
    if not isinstance(array, np.memmap) or array.filename is None or array.dtype.hasobject:
        return False
    whole = not isinstance(array.base, np.memmap)
    return whole and (array.flags.c_contiguous or array.flags.f_contiguous)
