"""An xarray object, or a file that xarray opens, as a source.

A file is opened undecoded, so that packed numbers stay packed and times keep their units. An object in hand is taken as
it is: what is decoded stays decoded, and what Dask computes lazily is computed region by region, in the thread that
asks, since a build brings its own threads. Variables are those of one shape (the largest, or those named) and numeric;
coordinates along their dimensions come along, others do not.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.attributes import coordinate_attributes, json_attributes, packing_attributes
from kit.data.dataset import in_machine_order
from kit.data.pieces import Region, read_pieces
from kit.data.source import VariableSpec
from kit.errors import ConfigError, Problem


def open_file(path: Path, variables: Sequence[str] = (), engine: str | None = None) -> XarraySource:
    """The variables of a NetCDF, HDF5 or GRIB file.

    Raises:
        ConfigError: when xarray is not installed, or cannot open the file.
    """
    try:
        import xarray
    except ImportError:
        raise _error("source", f"{path} is read by xarray, which is not installed; pip install 'kit[build]'") from None
    if not path.exists():
        raise _error("source", f"there is no file {path}")
    try:
        opened = xarray.open_dataset(path, engine=engine, decode_cf=False, cache=False)
    except (ValueError, OSError, ImportError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise _error("source", f"xarray cannot open {path}: {reason}") from None
    return XarraySource(opened, variables)


class XarraySource:
    """A source of the variables of a Dataset, or of a DataArray.

    Raises:
        ConfigError: for a variable that does not exist, is not numeric, or has other dimensions than the rest.
    """

    def __init__(self, data: Any, variables: Sequence[str] = ()) -> None:
        dataset = data.to_dataset(name=data.name or "values") if hasattr(data, "to_dataset") else data
        self._dataset = dataset
        names = _chosen(dataset, variables)
        first = dataset[names[0]]
        self.dims, self.shape = tuple(map(str, first.dims)), tuple(map(int, first.shape))
        self.variables: Mapping[str, VariableSpec] = {name: _spec(dataset[name]) for name in names}
        self.chunks = {name: chunk for name in names if (chunk := _chunk(dataset[name].variable)) is not None}
        along = [dim for dim in self.dims if dim in dataset.coords and dataset[dim].dtype.kind in "iufM"]
        self.coordinates: Mapping[str, NDArray[Any]] = {dim: np.asarray(dataset[dim].values) for dim in along}
        self.coordinate_attributes = {dim: coordinate_attributes(dataset[dim].attrs) for dim in along}
        self.attributes: Mapping[str, Any] = json_attributes(dataset.attrs)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Values of one block as they are in the dataset, in this machine's byte order."""
        variable, dtype = self._dataset.variables[name], self.variables[name].dtype
        if name not in self.chunks:
            return np.asarray(_values(variable[region]), dtype)
        return read_pieces(lambda piece: _values(variable[piece]), region, self.chunks[name], dtype)


def _values(variable: Any) -> NDArray[Any]:
    if hasattr(variable.data, "dask"):
        return np.asarray(variable.data.compute(scheduler="synchronous"))
    return np.asarray(variable.values)


def _chosen(dataset: Any, variables: Sequence[str]) -> list[str]:
    known = [str(name) for name in dataset.data_vars]
    for name in variables:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known) or 'none'}"
            raise _error("arguments", f"the source has no variable {name!r}; {hint}")
    if variables:
        return [*variables]
    numeric = [name for name in known if dataset[name].dtype.kind in "iuf" and dataset[name].ndim]
    if not numeric:
        raise _error("source", f"no numeric variable with dimensions; there are {', '.join(known) or 'none'}")
    largest = max(numeric, key=lambda name: (dataset[name].ndim, prod(dataset[name].shape)))
    return [name for name in numeric if dataset[name].sizes == dataset[largest].sizes]


def _spec(array: Any) -> VariableSpec:
    dtype = in_machine_order(array.dtype)
    return VariableSpec(dtype, packing_attributes(array.attrs, dtype))


def _chunk(variable: Any) -> tuple[int, ...] | None:
    """How it lies in its file or in Dask's graph; None for what is in memory."""
    chunks = variable.chunks
    if chunks is not None:
        return tuple(max(sides) for sides in chunks)
    if variable._in_memory:
        return None
    preferred: Mapping[Hashable, Any] = variable.encoding.get("preferred_chunks") or {}
    sides = variable.encoding.get("chunksizes") or tuple(preferred.get(dim, 0) for dim in variable.dims)
    return tuple(map(int, sides)) if sides and all(sides) else None


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"data.{field}", message)])
