"""An xarray object, or a file that xarray opens, as a source.

A file is opened undecoded, so that packed numbers stay packed and times keep their units. An object in hand is taken as
it is: what is decoded stays decoded, and what Dask computes lazily is computed region by region, in the thread that
asks, since a build brings its own threads. Variables are those of one shape (the largest, or those named) and numeric;
coordinates along their dimensions come along, others do not.

A Zarr store in another layout as a source: packed values as they are stored, read by whole chunks.

Variables are those of one shape (the largest, or those named); coordinates along their dimensions come along, others do
not. The source holds no handle when it is pickled. A store that kit built must be whole; in any other an object that is
not there reads as fill values, as Zarr says. How many chunks lie in absent objects is warned of, where the store can be
listed; what a shard that is there leaves out is not looked at.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.build.rechunk import Region, read_pieces
from kit.data.build.source import VariableSpec, coordinate_attributes, json_attributes, packing_attributes
from kit.data.dataset import ArrayInfo, in_machine_order, open_dataset
from kit.data.stores.transfer import absent_chunks
from kit.data.stores.url import redact, sizes_of_objects
from kit.errors import ConfigError, KitWarning, MissingChunkError, Problem


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


class ZarrSource:
    """A source of the variables of a store.

    Args:
        url: A path or URL, as in `data.url`.
        credentials: As in `data.credentials`.
        variables: Names of the variables; empty for all of the largest shape.
        strict: Whether a chunk that another writer's store does not hold is an error.

    Raises:
        MissingChunkError: for a store that is not whole, when kit built it or it is to be `strict`.
        StoreError: when there is no store.
        ConfigError: for a variable that does not exist.
    """

    def __init__(
        self, url: str, credentials: str = "default", variables: Sequence[str] = (), strict: bool = False
    ) -> None:
        self._dataset = open_dataset(url, credentials)
        chosen = self._dataset.select(tuple(variables))
        self._refuse_incomplete(chosen)
        self._arrays: dict[str, Any] = {}
        self._say_what_is_absent([info.name for info in chosen], strict)
        self.dims, self.shape = chosen[0].dims, chosen[0].shape
        self.variables: Mapping[str, VariableSpec] = {info.name: self._spec(info) for info in chosen}
        self.chunks: Mapping[str, tuple[int, ...]] = {info.name: info.chunk for info in chosen}
        along = {dim: info for dim, info in self._dataset.coordinates.items() if self._fits(dim, info)}
        self.coordinates: Mapping[str, NDArray[Any]] = {dim: self._dataset.coordinate(dim) for dim in along}
        self.coordinate_attributes = {dim: coordinate_attributes(self._array(dim).attrs) for dim in along}
        self.attributes: Mapping[str, Any] = json_attributes(self._dataset.attributes)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Packed values of one block."""
        array, dtype = self._array(name), self.variables[name].dtype
        return read_pieces(lambda piece: np.asarray(array[piece]), region, self.chunks[name], dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._dataset.open_array(name)
        return self._arrays[name]

    def _spec(self, info: ArrayInfo) -> VariableSpec:
        dtype = in_machine_order(info.dtype)
        attributes = packing_attributes({**self._array(info.name).attrs, "_FillValue": info.missing}, dtype)
        return VariableSpec(dtype, attributes)

    def _fits(self, dim: str, info: ArrayInfo) -> bool:
        return dim in self.dims and info.shape == (self.shape[self.dims.index(dim)],) and info.dtype.kind in "iuf"

    def _say_what_is_absent(self, names: Sequence[str], strict: bool) -> None:
        """Chunks that another writer left out; nothing is said of a server that lists no objects."""
        if self._dataset.manifest is not None:
            return
        arrays = [self._array(name) for name in names]
        try:
            filled = sum(array.nchunks - array.nchunks_initialized for array in arrays)
        except (NotImplementedError, OSError):
            return
        absent = absent_chunks({"chunks_filled": filled, "chunks_decoded": sum(a.nchunks for a in arrays) - filled})
        if absent and strict:
            raise MissingChunkError(f"{redact(self._dataset.url)}: {absent}; strict: false reads it")
        if absent:
            message = f"{redact(self._dataset.url)}: {absent}; strict: true in data.arguments makes that an error"
            warnings.warn(message, KitWarning, stacklevel=3)

    def _refuse_incomplete(self, chosen: Sequence[ArrayInfo]) -> None:
        """A shard that is gone would be built as fill values; the manifest knows which there must be."""
        manifest, url = self._dataset.manifest, self._dataset.url
        if manifest is None:
            return
        names = {info.name for info in chosen}
        wanted = {item.key: item.bytes for item in manifest.objects if item.array in names}
        there = sizes_of_objects(self._dataset.open_store(), wanted, url)
        wrong = [key for key, size in wanted.items() if there.get(key) != size]
        if wrong:
            raise MissingChunkError(
                f"{redact(url)}: {wrong[0]} is missing or cut short ({len(wrong)} of {len(wanted)} objects); "
                "verify the store, then build it anew"
            )
