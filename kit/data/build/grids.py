"""Sources of named variables: an xarray object, a file that xarray opens, a Zarr store in another layout.

Variables are the data of one shape (the largest, as `Dataset.select` finds them, or those named) and those wanted
beside them; coordinates along their dimensions come with them, others do not. A variable that lacks a dimension is
repeated along it.

A file is opened undecoded, so that packed numbers stay packed and times keep their units. An xarray object is taken as
it is: decoded values stay decoded, and lazy Dask arrays are computed region by region in the calling thread, since a
build brings its own threads.

A Zarr store gives packed values as they are stored, read by whole chunks, and holds no handle when it is pickled. A
store that kit built must be whole; in any other an object that is not there reads as fill values, as Zarr says. A
warning counts the chunks in absent objects, where the store can be listed; chunks that a present shard leaves out are
not counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from operator import floordiv
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.data.build.rechunk import Region, read_pieces
from kit.data.build.source import (
    VariableSpec,
    coordinate_attributes,
    coordinate_notes,
    json_attributes,
    read_repeated,
    source_error,
    spec_of,
)
from kit.data.dataset import Dataset, StoreDataset, open_xarray
from kit.data.files import open_file
from kit.data.open_dataset import open_dataset
from kit.data.stores.counters import absent_chunks
from kit.data.stores.url import redact, sizes_of_objects
from kit.data.variables import ArrayInfo, in_machine_order
from kit.errors import ConfigError, MissingChunkError, warn_caller

if TYPE_CHECKING:
    import zarr


def open_file_source(
    place: str,
    group: str,
    variables: Sequence[str] = (),
    credentials: str = "default",
    engine: str | None = None,
    wanted: Sequence[str] = (),
) -> XarraySource:
    """The variables of a NetCDF, HDF5, GRIB or `.npz` file, packed as they are.

    Raises:
        StoreError: when xarray is not installed, or cannot open the file.
        ConfigError: for a variable that does not exist.
    """
    return XarraySource(open_file(place, group, credentials, engine=engine, decode=False), variables, wanted)


class XarraySource:
    """A source of the variables of a Dataset, or of a DataArray.

    Args:
        data: What xarray holds.
        variables: Their names; empty for the data of the largest shape.
        wanted: Names that are to be among them; they are all, where none of the others is wanted.

    Raises:
        ConfigError: for a variable that does not exist, is not numeric, or has other dimensions than the rest.
    """

    def __init__(self, data: Any, variables: Sequence[str] = (), wanted: Sequence[str] = ()) -> None:
        dataset = data.to_dataset(name=data.name or "values") if hasattr(data, "to_dataset") else data
        self._dataset = dataset
        known = open_xarray(dataset)
        chosen = _select(known, variables, wanted)
        self.left_out = {} if variables or wanted else known.left_out
        self.dims, self.shape = chosen[0].dims, chosen[0].shape
        self._axes = {info.name: info.stored_axes for info in chosen}
        self.variables: Mapping[str, VariableSpec] = {
            info.name: spec_of(info.dtype, dataset[info.name].attrs) for info in chosen
        }
        cut = {info: _chunk(dataset[info.name].variable) for info in chosen}
        self._chunks = {info.name: chunk for info, chunk in cut.items() if chunk is not None}
        self.chunks: Mapping[str, tuple[int, ...]] = {
            info.name: info.chunk if info.repeated else chunk for info, chunk in cut.items() if chunk is not None
        }
        along = [dim for dim in self.dims if dim in dataset.coords and dataset[dim].dtype.kind in "iufM"]
        self.coordinates: Mapping[str, NDArray[Any]] = {dim: np.asarray(dataset[dim].values) for dim in along}
        self.coordinate_attributes = {dim: coordinate_attributes(dataset[dim].attrs) for dim in along}
        names = [dim for dim in self.dims if dim in dataset.coords and dim not in along]
        self.notes = [*_unpacked(dataset, chosen)]
        self.notes += coordinate_notes(self.coordinates, self.coordinate_attributes, names)
        self.repeated = _lacking(chosen)
        self.attributes: Mapping[str, Any] = json_attributes(dataset.attrs)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Values of one block as they are in the dataset, in this machine's byte order."""
        variable, dtype = self._dataset.variables[name], self.variables[name].dtype

        def read(part: Region) -> NDArray[Any]:
            if name not in self._chunks:
                return np.asarray(_values(variable[part]), dtype)
            return read_pieces(lambda piece: _values(variable[piece]), part, self._chunks[name], dtype)

        return read_repeated(read, region, self._axes[name])


def _lacking(chosen: Sequence[ArrayInfo]) -> dict[str, tuple[str, ...]]:
    """The dimensions that a variable is repeated along, by its name."""
    return {info.name: tuple(info.dims[axis] for axis in info.repeated) for info in chosen if info.repeated}


def _unpacked(dataset: Any, chosen: Sequence[ArrayInfo]) -> Iterator[str]:
    """What takes more bytes than in the file that xarray decoded it from."""
    for info in chosen:
        packing = dataset[info.name].encoding
        packed = np.dtype(packing.get("dtype") or info.dtype)
        if "scale_factor" in packing and packed.itemsize < info.dtype.itemsize:
            yield (
                f"{info.name} is stored as {info.dtype}, {info.dtype.itemsize / packed.itemsize:g} × the bytes of the "
                f"{packed} that xarray unpacked; kit stores packed values where the file itself is the source"
            )


def _values(variable: Any) -> NDArray[Any]:
    if hasattr(variable.data, "dask"):
        return np.asarray(variable.data.compute(scheduler="synchronous"))
    return np.asarray(variable.values)


def _select(dataset: Dataset, variables: Sequence[str], wanted: Sequence[str]) -> list[ArrayInfo]:
    field = "arguments" if variables else "variables" if wanted else "source"
    try:
        if variables or not set(wanted) - set(names := [info.name for info in dataset.select()]):
            return dataset.select(variables)
        return dataset.select(wanted if set(names).isdisjoint(wanted) else [*dict.fromkeys([*names, *wanted])])
    except ConfigError as error:
        raise source_error(field, error.problems[0].message) from None


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


def _chunks_absent(array: zarr.Array[Any]) -> int:
    """Those of absent objects; zarr counts the places in a shard beyond the array's edge as chunks that are there."""
    if array.shards is None:
        return int(array.nchunks - array.nchunks_initialized)
    in_shard: int = prod(map(floordiv, array.shards, array.chunks))
    shards = prod(-(-size // side) for size, side in zip(array.shape, array.shards, strict=True))
    return min(int(array.nchunks), (shards - int(array.nchunks_initialized) // in_shard) * in_shard)


class ZarrSource:
    """A source of the variables of a store.

    Args:
        url: A path or URL, as in `data.url`, or a dataset that is open.
        credentials: As in `data.credentials`.
        variables: Names of the variables; empty for the data of the largest shape.
        wanted: Names that are to be among them; they are all, where none of the others is wanted.
        strict: Whether a chunk that another writer's store does not hold is an error.

    Raises:
        MissingChunkError: for a store that is not whole, when kit built it or it is to be `strict`.
        StoreError: when there is no store.
        ConfigError: for a variable that does not exist.
    """

    def __init__(
        self,
        url: str | Dataset,
        credentials: str = "default",
        variables: Sequence[str] = (),
        strict: bool = False,
        wanted: Sequence[str] = (),
    ) -> None:
        self._dataset = url if isinstance(url, Dataset) else open_dataset(url, credentials)
        chosen = _select(self._dataset, variables, wanted)
        self.left_out = {} if variables or wanted else self._dataset.left_out
        self._refuse_incomplete(chosen)
        self._arrays: dict[str, Any] = {}
        self._warn_of_absent_chunks([info.name for info in chosen], strict)
        self.dims, self.shape = chosen[0].dims, chosen[0].shape
        self.variables: Mapping[str, VariableSpec] = {info.name: self._spec(info) for info in chosen}
        self.chunks: Mapping[str, tuple[int, ...]] = {info.name: info.chunk for info in chosen}
        self._chosen = {info.name: info for info in chosen}
        sizes = {dim: (size,) for dim, size in zip(self.dims, self.shape, strict=True)}
        coordinates = self._dataset.coordinates.items()
        along = [dim for dim, info in coordinates if info.shape == sizes.get(dim) and info.dtype.kind in "iuf"]
        self.coordinates: Mapping[str, NDArray[Any]] = {dim: self._dataset.coordinate(dim) for dim in along}
        self.coordinate_attributes = {dim: coordinate_attributes(self._array(dim).attrs) for dim in along}
        names = [dim for dim, info in coordinates if info.shape == sizes.get(dim) and dim not in along]
        self.notes = [*coordinate_notes(self.coordinates, self.coordinate_attributes, names)]
        self.repeated = _lacking(chosen)
        self.attributes: Mapping[str, Any] = json_attributes(self._dataset.attributes)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Packed values of one block."""
        array, dtype, info = self._array(name), self.variables[name].dtype, self._chosen[name]

        def read(part: Region) -> NDArray[Any]:
            chunk = tuple(info.chunk[axis] for axis in info.stored_axes)
            return read_pieces(lambda piece: np.asarray(array[piece]), part, chunk, dtype)

        return read_repeated(read, region, info.stored_axes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._dataset.open_array(name)
        return self._arrays[name]

    def _spec(self, info: ArrayInfo) -> VariableSpec:
        dtype = in_machine_order(info.dtype)
        return spec_of(dtype, {**self._array(info.name).attrs, "_FillValue": info.missing})

    def _warn_of_absent_chunks(self, names: Sequence[str], strict: bool) -> None:
        """Chunks that another writer left out; nothing is said of a server that lists no objects."""
        if self._dataset.manifest is not None or isinstance(self._dataset, StoreDataset):
            return
        arrays = [self._array(name) for name in names]
        try:
            filled = sum(map(_chunks_absent, arrays))
        except (NotImplementedError, OSError):
            return
        absent = absent_chunks({"chunks_filled": filled, "chunks_decoded": sum(a.nchunks for a in arrays) - filled})
        if absent and strict:
            raise MissingChunkError(f"{redact(self._dataset.url)}: {absent}; strict: false reads it")
        if absent:
            message = f"{redact(self._dataset.url)}: {absent}; strict: true in data.arguments makes that an error"
            warn_caller(message)

    def _refuse_incomplete(self, chosen: Sequence[ArrayInfo]) -> None:
        """A shard that is gone would be built as fill values; the manifest knows which there must be."""
        manifest, url = self._dataset.manifest, self._dataset.url
        if manifest is None:
            return
        names = {info.name for info in chosen}
        published = {item.key: item.bytes for item in manifest.objects if item.array in names}
        there = sizes_of_objects(self._dataset.open_store(), published, url)
        wrong = [key for key, size in published.items() if there.get(key) != size]
        if wrong:
            raise MissingChunkError(
                f"{redact(url)}: {wrong[0]} is missing or cut short ({len(wrong)} of {len(published)} objects); "
                "verify the store, then build it anew"
            )
