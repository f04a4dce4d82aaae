"""What a store holds, as its reader needs it: arrays with chunks, packing and statistics, and kit's manifest.

A Dataset is a description and holds no handle: it pickles, and every process opens its own store. Sizes are elements.

An xarray Dataset or DataArray, in memory or lazy, is shown to the engine as a store of uncompressed chunks, so it is
read as any other store: planned by the batch, ahead, by threads, under the same budgets. Values are those that xarray
gives, decoded; NaN is missing. Chunks are those of dask or of the file behind a lazy object; an object in memory is cut
into pieces of at most `LARGEST_PIECE_BYTES`. Nothing is copied before it is read, and nothing is ever written. xarray
is imported by whoever made the object, never here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore, WrapperStore

from kit.data.files import open_file
from kit.data.stores.counters import Counters
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.manifest import Manifest
from kit.data.stores.metadata import CachedMetadata, DescribedStore, Documents, UnreachableStore
from kit.data.stores.transfer import BoundedCache, Octets
from kit.data.stores.url import open_store, redact, store_error
from kit.data.variables import NUMBERS, ArrayInfo, asides, decode_times, in_machine_order
from kit.errors import ConfigError, Problem, StoreError, UnreachableStoreError, did_you_mean, warn_caller
from kit.units import format_bytes

if TYPE_CHECKING:
    import xarray
    import zarr

    XarrayObject = xarray.Dataset | xarray.DataArray

LARGEST_PIECE_BYTES = 256 << 10
MOST_GROUPS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A store that can be read; `arrays` are the data variables, without the coordinates."""

    url: str
    credentials: str
    arrays: Mapping[str, ArrayInfo]
    coordinates: Mapping[str, ArrayInfo] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    """None for a Zarr store that kit did not build."""
    asides: Mapping[str, str] = field(default_factory=dict)
    """Those of `arrays` that are not data, with what they are: `bounds of lon`. They are read only by name."""
    levels: tuple[str, ...] = ()
    """Paths of the resolutions of a pyramid, the one that is read first."""
    strict: bool = False
    """Whether a missing chunk is an error here too; in a store that kit built it always is."""
    metadata: Documents = field(default_factory=dict, compare=False, repr=False)
    """Of the arrays, as they were when this was opened: its readers ask for them no more."""
    read_cache: ReadCache | None = field(default=None, compare=False, repr=False)
    """Where coordinates are kept, of a store that kit built."""
    names: BoundedCache[str] = field(default_factory=BoundedCache, compare=False, repr=False)
    """Under which a read cache keeps objects that no manifest lists, as the store told once of each; None for one that
    is not there. All readers in this process go by them until the store is opened anew."""
    unreachable: str = field(default="", compare=False)
    """Why there was no way to the store when this was opened, so that only what a cache holds is read."""

    def locate(self, key: str) -> tuple[Dataset, str]:
        """The dataset in whose store an object lies, and its key there: this one, unless it is joined of several."""
        return self, key

    def open_store(self) -> Store:
        """A fresh read-only handle, bound to no event loop until its first read."""
        if self.unreachable:
            return self._with_known_metadata(UnreachableStore(self.url, self.unreachable))
        try:
            return self._with_known_metadata(open_store(self.url, self.credentials))
        except UnreachableStoreError as error:
            if self.read_cache is None or self.manifest is None:
                raise
            warn_unreachable(self.read_cache, error)
            return self._with_known_metadata(UnreachableStore(self.url, str(error)))

    def _with_known_metadata(self, store: Store) -> Store:
        """Metadata in a folder are read anew: that costs nothing, and what is gone meanwhile is noticed."""
        if not self.metadata or "://" not in self.url:
            return store
        if self.read_cache is None or self.manifest is None:
            return DescribedStore(store, self.metadata)
        listed = {item.key: item for item in self.manifest.objects if item.array in self.coordinates}
        kept = CachedMetadata(self.read_cache.open(warns=False), self.url)
        return DescribedStore(store, self.metadata, kept=kept, listed=listed)

    def open_array(self, name: str) -> zarr.Array[Any]:
        """A variable or coordinate as zarr sees it: packed values, missing objects read as fill values."""
        import zarr

        try:
            return zarr.open_array(self.open_store(), path=name, mode="r")
        except Exception as error:
            raise store_error(self.url, error) from None

    def coordinate(self, name: str, *, ends: bool = False) -> NDArray[Any]:
        """The decoded values of a coordinate, times as datetime64; for a dimension without one, its index.

        Times of calendars that numpy does not have, such as `360_day`, stay numbers. `ends` reads the first and the
        last value alone: others may lie in thousands of chunks.
        """
        if name in self.coordinates:
            array = self.open_array(name)
            stored = np.concatenate([array[:1], array[-1:]]) if ends else np.asarray(array[...])
            values = decode_times(stored, dict(array.attrs))
            return self.coordinates[name].decode(stored) if values is stored else values
        sizes = {dim: size for info in self.arrays.values() for dim, size in zip(info.dims, info.shape, strict=True)}
        if name not in sizes:
            raise KeyError(f"{name!r} is no dimension of {redact(self.url)}; it has {', '.join(sizes)}")
        return np.array([0, sizes[name] - 1]) if ends else np.arange(sizes[name])

    def select(self, variables: Sequence[str] = ()) -> list[ArrayInfo]:
        """The arrays named, in that order; for no names, the data that share the shape of highest rank and size.

        An array that lacks some dimensions of the others is repeated along them.

        Raises:
            ConfigError: for a name the store does not have, or arrays whose dimensions do not go together.
        """
        unknown = next((name for name in variables if name not in self.arrays), None)
        if unknown is not None:
            hint = did_you_mean(unknown, self.arrays or ["no arrays"])
            if unknown in self.levels:
                hint = f", which is of resolution {self.levels[0]}; {redact(self.url)}/{unknown} opens the other"
            raise _variables_error(f"no variable {unknown!r} in {redact(self.url)}{hint}")
        chosen = [self.arrays[name] for name in variables] or self._main_arrays()
        first = max(chosen, key=lambda info: len(info.shape))
        found = []
        for info in chosen:
            alike = info.repeat_along(first)
            if alike is None:
                raise _variables_error(
                    f"{first.name} has {dict(zip(first.dims, first.shape, strict=True))} but {info.name} has "
                    f"{dict(zip(info.dims, info.shape, strict=True))}; choose variables of one shape, or those that "
                    "have some of its dimensions in their order"
                )
            found.append(alike)
        if all(any(info.matched) for info in found):
            message = (
                f"{', '.join(info.name for info in found)} of another resolution cannot be read alone; name a variable "
                "of the first store too, or open their own"
            )
            raise _variables_error(message)
        return found

    @property
    def left_out(self) -> dict[str, str]:
        """The arrays that are not read unless they are named, each with the reason."""
        chosen = {info.name: info for info in self._main_arrays()}
        first = next(iter(chosen.values()))
        others = (info for name, info in self.arrays.items() if name not in chosen)
        return {info.name: self.asides.get(info.name) or _why_not(info, first) for info in others}

    def _main_arrays(self) -> list[ArrayInfo]:
        if not self.arrays:
            raise _variables_error(f"{redact(self.url)} holds no data variables")
        numbers = [info for info in self.arrays.values() if info.is_channel]
        if not numbers:
            others = ", ".join(f"{info.name} of {info.dtype}" for info in self.arrays.values())
            raise _variables_error(f"{redact(self.url)} holds no numbers, only {others}")
        data = [info for info in numbers if info.name not in self.asides] or numbers
        first = max(data, key=lambda info: (len(info.shape), prod(info.shape)))
        return [info for info in data if (info.shape, info.dims) == (first.shape, first.dims)]

    def __str__(self) -> str:
        return "\n".join([self._headline(), *(f"  {info}" for info in self._lines())])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = "".join(f"<li>{escape(line)}</li>" for line in self._lines())
        return f"<div><b>{escape(self._headline())}</b><ul>{rows}</ul></div>"

    def _lines(self) -> list[str]:
        """One for each array, with why it is left out unless it is named."""
        left_out = self.left_out if any(info.is_channel for info in self.arrays.values()) else {}
        reasons = {name: f"; only by name: {reason}" for name, reason in left_out.items()}
        return [f"{info}{reasons.get(info.name, '')}" for info in self.arrays.values()]

    def _headline(self) -> str:
        size = format_bytes(sum(info.nbytes for info in self.arrays.values()))
        stored = f", {format_bytes(self.manifest.stored_bytes)} stored" if self.manifest else ""
        level = ""
        if self.levels:
            level = (
                f", resolution {self.levels[0]}, the finest; the others by their paths: {', '.join(self.levels[1:])}"
            )
        cached = ", from the cache alone, as there was no way to it" if self.unreachable else ""
        return f"Dataset {redact(self.url)}: {len(self.arrays)} variables, {size}{stored}{level}{cached}"


@dataclass(frozen=True, kw_only=True, repr=False)
class StoreDataset(Dataset):
    """A `Dataset` whose store no URL alone leads to; it pickles with what opens it."""

    opener: Callable[[], Store] = field(compare=False, repr=False)

    def open_store(self) -> Store:
        return self._with_known_metadata(self.opener())

    def _headline(self) -> str:
        return (
            f"{super()._headline()}, read through {type(self.opener()).__name__}: measure its speed before a long run"
        )


def _why_not(info: ArrayInfo, chosen: ArrayInfo) -> str:
    """Why an array is not read beside the one that is."""
    if info.dtype.kind not in NUMBERS:
        return f"{info.dtype} is no number"
    if not info.is_channel:
        return "times"
    return f"not of the shape of {chosen.name}"


def _variables_error(message: str) -> ConfigError:
    return ConfigError([Problem("data.variables", message)])


def warn_unreachable(cache: ReadCache, error: UnreachableStoreError) -> None:
    message = f"{error}. It is read from {cache.where} instead, as it was when kit last opened it; what is not there "
    warn_caller(f"{message}cannot be read")


@dataclass(frozen=True, kw_only=True, repr=False)
class XarrayDataset(Dataset):
    """A `Dataset` over an xarray object; it pickles with the object, all of it where that is in memory."""

    xarray_object: xarray.Dataset = field(compare=False, repr=False)
    reopened: tuple[str, str, str] | None = None
    """File, group and credentials of what is read from a file, which another process opens again."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self.reopened is None else self.__dict__ | {"xarray_object": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        again = {} if state["reopened"] is None else {"xarray_object": open_file(*state["reopened"])}
        self.__dict__.update(state | again)

    def open_store(self) -> Store:
        import zarr

        store = MemoryStore()
        group = zarr.create_group(store)
        for name, info in self.arrays.items():
            if info.dtype.kind not in NUMBERS:
                continue
            group.create_array(
                name, shape=info.shape, chunks=info.chunk, dtype=info.dtype, compressors=None, filters=None,
                fill_value=0, dimension_names=info.dims,
            )  # fmt: skip
        return XarrayStore(store, Cutter(self.xarray_object, self.arrays))

    def coordinate(self, name: str, *, ends: bool = False) -> NDArray[Any]:
        known = name in self.xarray_object.coords or name not in self.xarray_object.sizes
        values = np.asarray(self.xarray_object.coords[name]) if known else np.arange(self.xarray_object.sizes[name])
        return values[[0, -1]] if ends else values


def open_xarray(given: Any) -> XarrayDataset:
    """The data variables of an xarray Dataset, or one DataArray (named `data` where it has no name).

    Of a DataTree, those of the one node that has any, or of the finest resolution of a pyramid.

    Raises:
        StoreError: for anything else.
    """
    kind = f"{type(given).__module__.partition('.')[0]}.{type(given).__name__}"
    if kind == "xarray.DataTree":
        given, levels = _node_of(given)
        return replace(open_xarray(given), levels=levels)
    if kind == "xarray.DataArray":
        given = given.to_dataset(name=given.name or "data")
    elif kind != "xarray.Dataset":
        raise StoreError(
            f"{type(given).__name__} holds no data; give a Config, a path or URL, an xarray object or a Zarr store"
        )
    return XarrayDataset(
        url="xarray object", credentials="default", xarray_object=given, attributes=dict(given.attrs),
        arrays={str(name): _info(str(name), variable) for name, variable in given.data_vars.items() if variable.ndim},
        coordinates={str(name): _info(str(name), variable) for name, variable in given.coords.items()},
        asides=asides({str(name): variable.attrs for name, variable in given.variables.items()}),
    )  # fmt: skip


def _node_of(tree: Any) -> tuple[xarray.Dataset, tuple[str, ...]]:
    """The Dataset of the node that holds the data, and the paths of the resolutions of a pyramid."""
    nodes = {node.relative_to(tree): node for node in tree.subtree if node.data_vars}
    paths = sorted(nodes, key=lambda path: max(one.size for one in nodes[path].data_vars.values()), reverse=True)
    if not paths or (len(paths) > 1 and "multiscales" not in tree.attrs):
        shown = ", ".join(paths[:MOST_GROUPS_SHOWN]) or "none"
        raise StoreError(f"nodes with variables: {shown}; pass one of them, such as tree['{(paths or ['path'])[0]}']")
    return nodes[paths[0]].to_dataset(), tuple(paths) if len(paths) > 1 else ()


def _info(name: str, variable: Any) -> ArrayInfo:
    return ArrayInfo(
        name=name, shape=tuple(variable.shape), dims=tuple(map(str, variable.dims)),
        dtype=in_machine_order(variable.dtype if isinstance(variable.dtype, np.dtype) else object),
        chunk=_chunk(variable), shard=None,
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
    sides = [max(1, size) for size in variable.shape]
    while prod(sides) * variable.dtype.itemsize > LARGEST_PIECE_BYTES and max(sides) > 1:
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
    """Reads an xarray object as a store of chunks, for `kit.data.stream.fetch.ThreadClient`."""

    def __init__(
        self, xarray_object: xarray.Dataset, arrays: Mapping[str, ArrayInfo], counters: Counters | None = None
    ) -> None:
        self._object, self._arrays, self._counters = xarray_object, arrays, counters

    def counted_by(self, counters: Counters) -> Cutter:
        """The same, its reads counted."""
        return Cutter(self._object, self._arrays, counters)

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:  # noqa: ARG002
        """The bytes of one chunk, which is always read as a whole.

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
        starts = (int(index) * side for index, side in zip(place.split("/"), info.chunk, strict=True))
        sides = zip(starts, info.chunk, info.shape, strict=True)
        region = tuple(slice(start, min(size, start + side)) for start, side, size in sides)
        try:
            variable = self._object[name].variable[region]
            if variable.chunks is not None:  # dask computes in the thread that reads, since readers are threads already
                variable = variable.compute(scheduler="synchronous")
            values = np.asarray(variable.values, info.dtype)
        except MemoryError:
            raise
        except Exception as error:
            raise StoreError(f"xarray could not read {name}: {type(error).__name__}: {error}") from error
        if values.shape != info.chunk:  # at an edge: Zarr's chunks are all of one size
            whole = np.zeros(info.chunk, info.dtype)
            whole[tuple(map(slice, values.shape))] = values
            values = whole
        return np.frombuffer(np.ascontiguousarray(values).data.cast("B"), np.uint8)
