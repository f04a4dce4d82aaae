"""Datasets that xarray holds, in memory or lazily: chunks are cut out of them when a batch asks for one.

The object is shown to the engine as a store of uncompressed chunks, so it is read as any other store: planned by the
batch, ahead, by threads, under the same budgets. Values are those that xarray gives, decoded; NaN is missing. Chunks
are those of dask or of the file behind a lazy object; an object in memory is cut into pieces of at most
`LARGEST_PIECE_BYTES`. Nothing is copied before it is asked for, and nothing is ever written. xarray is imported by
whoever made the object, never here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore, WrapperStore

from kit.data.counters import Counters
from kit.data.dataset import NUMBERS, ArrayInfo, Dataset, in_machine_order
from kit.data.octets import Octets
from kit.errors import StoreError

if TYPE_CHECKING:
    import xarray

LARGEST_PIECE_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class XarrayDataset(Dataset):
    """A `Dataset` over an xarray object; it pickles with the object, all of it where that is in memory."""

    held: xarray.Dataset = field(compare=False, repr=False)

    def open_store(self) -> Store:
        return XarrayStore(_metadata(self.arrays), Cutter(self.held, self.arrays))

    def coordinate(self, name: str) -> NDArray[Any]:
        if name in self.held.coords or name not in self.held.sizes:
            return np.asarray(self.held.coords[name].values)
        return np.arange(self.held.sizes[name])


def open_xarray(given: Any) -> XarrayDataset:
    """The data variables of an xarray Dataset, or one DataArray (named `data` where it has no name).

    Raises:
        StoreError: for anything else.
    """
    kind = f"{type(given).__module__.partition('.')[0]}.{type(given).__name__}"
    if kind == "xarray.DataArray":
        given = given.to_dataset(name=given.name or "data")
    elif kind != "xarray.Dataset":
        raise StoreError(
            f"{type(given).__name__} holds no data; give a Config, a URL, or an xarray Dataset or DataArray"
        )
    numbers = {str(name): variable for name, variable in given.data_vars.items() if variable.dtype.kind in NUMBERS}
    return XarrayDataset(
        url="xarray object", credentials="default", held=given, attributes=dict(given.attrs),
        arrays={name: _info(name, variable) for name, variable in numbers.items() if variable.ndim},
        coordinates={str(name): _info(str(name), variable) for name, variable in given.coords.items()},
    )  # fmt: skip


def _info(name: str, variable: Any) -> ArrayInfo:
    return ArrayInfo(
        name=name, shape=tuple(variable.shape), dims=tuple(map(str, variable.dims)),
        dtype=in_machine_order(variable.dtype), chunk=_chunk(variable), shard=None,
        units=str(variable.attrs.get("units", "")), long_name=str(variable.attrs.get("long_name", "")),
    )  # fmt: skip


def _chunk(variable: Any) -> tuple[int, ...]:
    """Sides of what is cut out at once: dask's chunks, the file's, or pieces small enough."""
    if variable.chunks is not None:
        return tuple(max(1, *sides) for sides in variable.chunks)
    stored = variable.encoding.get("preferred_chunks", {})
    in_file = tuple(stored.get(name, size) for name, size in zip(variable.dims, variable.shape, strict=True))
    if stored and all(isinstance(side, int) for side in in_file):
        return tuple(max(1, min(side, size)) for side, size in zip(in_file, variable.shape, strict=True))
    return _pieces(tuple(variable.shape), variable.dtype.itemsize)


def _pieces(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    sides = [max(1, size) for size in shape]
    while math.prod(sides) * itemsize > LARGEST_PIECE_BYTES and max(sides) > 1:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    return tuple(sides)


class XarrayStore(WrapperStore[MemoryStore]):
    """The metadata of a Zarr group, and chunks made of the object's values."""

    def __init__(self, store: MemoryStore, cutter: Cutter) -> None:
        super().__init__(store)
        self.cutter = cutter

    def _with_store(self, store: MemoryStore) -> Self:
        return type(self)(store, self.cutter)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if "/c/" not in key:
            return await self._store.get(key, prototype, byte_range)
        return prototype.buffer.from_array_like(self.cutter.cut(key))


class Cutter:
    """Reads an object as threads read a store; see `kit.data.requests.Blocking`."""

    def __init__(self, held: xarray.Dataset, arrays: Mapping[str, ArrayInfo], counters: Counters | None = None) -> None:
        self._held, self._arrays, self._counters = held, arrays, counters

    def counted_by(self, counters: Counters) -> Cutter:
        """The same, its reads counted."""
        return Cutter(self._held, self._arrays, counters)

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:  # noqa: ARG002
        """The bytes of one chunk, which is always asked for as a whole.

        Raises:
            StoreError: when the object cannot give its values.
        """
        data = self.cut(key)
        if self._counters is not None:
            self._counters.add(requests=1, bytes_read=len(data))
        return data

    def cut(self, key: str) -> Octets:
        name, _, place = key.rpartition("/c/")
        info = self._arrays[name]
        region = tuple(_region(info, tuple(map(int, place.split("/")))))
        try:
            values = np.asarray(_computed(self._held[name].variable[region]), info.dtype)
        except MemoryError:
            raise
        except Exception as error:
            raise StoreError(f"xarray could not read {name}: {type(error).__name__}: {error}") from error
        if values.shape != info.chunk:  # at an edge: Zarr's chunks are all of one size
            whole = np.zeros(info.chunk, info.dtype)
            whole[tuple(map(slice, values.shape))] = values
            values = whole
        return np.frombuffer(np.ascontiguousarray(values).data.cast("B"), np.uint8)


def _computed(variable: Any) -> NDArray[Any]:
    """The values; dask computes them in the thread that asks, since readers are threads already."""
    return np.asarray((variable if variable.chunks is None else variable.compute(scheduler="synchronous")).values)


def _region(info: ArrayInfo, place: tuple[int, ...]) -> Iterator[slice]:
    for index, side, size in zip(place, info.chunk, info.shape, strict=True):
        yield slice(index * side, min(size, (index + 1) * side))


def _metadata(arrays: Mapping[str, ArrayInfo]) -> MemoryStore:
    import zarr

    store = MemoryStore()
    group = zarr.create_group(store)
    for name, info in arrays.items():
        group.create_array(
            name, shape=info.shape, chunks=info.chunk, dtype=info.dtype, compressors=None, filters=None, fill_value=0,
            dimension_names=info.dims,
        )  # fmt: skip
    return store
