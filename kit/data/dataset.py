"""What a store holds, as its reader needs it: arrays with chunks, packing and statistics, and kit's manifest.

A Dataset is a description and holds no handle: it pickles, and every process opens its own store. Sizes are elements.
A store that kit is still building is refused, since a shard not yet written reads as fill values. Any other Zarr group
(version 2 or 3) opens too, without statistics and without a manifest, and so does an array that is in none.

Datasets that xarray holds, in memory or lazily: chunks are cut out of them when a batch asks for one.

The object is shown to the engine as a store of uncompressed chunks, so it is read as any other store: planned by the
batch, ahead, by threads, under the same budgets. Values are those that xarray gives, decoded; NaN is missing. Chunks
are those of dask or of the file behind a lazy object; an object in memory is cut into pieces of at most
`LARGEST_PIECE_BYTES`. Nothing is copied before it is asked for, and nothing is ever written. xarray is imported by
whoever made the object, never here.

Times: CF time coordinates, `<unit> since <date>`, as datetime64; no more of CF than a coordinate needs.

Calendars that agree with numpy's proleptic Gregorian one are decoded (`standard` ones from 1582-10-15 on, as before
they mean the Julian calendar); others stay the numbers they are. Times are rounded to microseconds.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import MemoryStore, WrapperStore

from kit.config import Config
from kit.data.stores import manifest as records
from kit.data.stores.manifest import BuildRecord, Manifest
from kit.data.stores.transfer import Counters, Octets
from kit.data.stores.url import list_objects, open_store, read_object, redact, resolve_url, store_error
from kit.errors import ConfigError, CorruptChunkError, MissingChunkError, Problem, StoreError, UnfinishedStoreError
from kit.units import format_bytes

if TYPE_CHECKING:
    import xarray

    XarrayObject = xarray.Dataset | xarray.DataArray
    import xarray
    import zarr
    from zarr.abc.store import Store

NUMBERS = "biuf"
"""Kinds of numpy type that can be a channel."""


def in_machine_order(dtype: Any) -> np.dtype[Any]:
    """The type in this machine's byte order; text of any length has none."""
    known: np.dtype[Any] = np.dtype(dtype)
    return known if known.kind == "T" else known.newbyteorder("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayInfo:
    """One array; decoded value = packed value × scale_factor + add_offset."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    """What one request reads and one decoding yields."""
    shard: tuple[int, ...] | None
    """What one object holds; None when each chunk is an object."""
    scale_factor: float = 1.0
    add_offset: float = 0.0
    missing: float | int | None = None
    """The packed value that stands for a missing one; NaN in a float array is missing besides."""
    also_missing: tuple[float | int, ...] = ()
    """Further ones: a store may name several."""
    mean: float | None = None
    """Of the decoded valid values; None when unknown."""
    deviation: float | None = None
    units: str = ""
    long_name: str = ""

    @property
    def nbytes(self) -> int:
        """Uncompressed size."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_channel(self) -> bool:
        """Whether its elements are real numbers that measure something other than a time."""
        return self.dtype.kind in NUMBERS and not is_time_unit(self.units)

    def decode(self, packed: NDArray[Any]) -> NDArray[Any]:
        """Decoded values as float64, NaN where missing; `packed` as it is where nothing is packed."""
        missing = () if self.missing is None else (self.missing, *self.also_missing)
        if not missing and (self.scale_factor, self.add_offset) == (1.0, 0.0):
            return packed
        numbers = packed.astype(self.dtype, copy=False)
        values = numbers.astype(np.float64) * self.scale_factor + self.add_offset
        return np.where(np.isin(numbers, missing), np.nan, values)

    def __str__(self) -> str:
        dims = ", ".join(f"{name} {size}" for name, size in zip(self.dims, self.shape, strict=True))
        cut = f"chunk {_by(self.chunk)}" + (f" in shards of {_by(self.shard)}" if self.shard else "")
        return f"{self.name} ({dims}) {self.dtype}, {format_bytes(self.nbytes)}, {cut}" + (
            f", {self.long_name} [{self.units}]" if self.long_name or self.units else ""
        )


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
    strict: bool = False
    """Whether a missing chunk is an error here too; in a store that kit built it always is."""

    def open_store(self) -> Store:
        """A fresh read-only handle, bound to no event loop until its first read."""
        return open_store(self.url, self.credentials)

    def open_array(self, name: str) -> zarr.Array[Any]:
        """A variable or coordinate as zarr sees it: packed values, missing objects read as fill values."""
        import zarr

        try:
            return zarr.open_array(self.open_store(), path=name, mode="r")
        except Exception as error:
            raise store_error(self.url, error) from None

    def coordinate(self, name: str) -> NDArray[Any]:
        """The decoded values of a coordinate, times as datetime64; for a dimension without one, its index.

        Times of calendars that numpy does not have, such as `360_day`, stay numbers.
        """
        if name in self.coordinates:
            array = self.open_array(name)
            stored = np.asarray(array[...])
            values = decode_times(stored, dict(array.attrs))
            return self.coordinates[name].decode(stored) if values is stored else values
        sizes = {dim: size for info in self.arrays.values() for dim, size in zip(info.dims, info.shape, strict=True)}
        if name not in sizes:
            raise KeyError(f"{name!r} is no dimension of {redact(self.url)}; it has {', '.join(sizes)}")
        return np.arange(sizes[name])

    def select(self, variables: Sequence[str] = ()) -> list[ArrayInfo]:
        """The arrays named, in that order; for no names, all that share the shape of highest rank and size.

        Raises:
            ConfigError: for a name the store does not have, or arrays of different shape or dimensions.
        """
        chosen = [self._array(name) for name in variables] or self._main_arrays()
        first = chosen[0]
        for info in chosen[1:]:
            if (info.shape, info.dims) != (first.shape, first.dims):
                raise _variables_error(
                    f"{first.name} has {dict(zip(first.dims, first.shape, strict=True))} but {info.name} has "
                    f"{dict(zip(info.dims, info.shape, strict=True))}; choose variables of one shape"
                )
        return chosen

    def _array(self, name: str) -> ArrayInfo:
        if name not in self.arrays:
            close = difflib.get_close_matches(name, self.arrays, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(self.arrays) or 'no arrays'}"
            raise _variables_error(f"no variable {name!r} in {redact(self.url)}; {hint}")
        return self.arrays[name]

    def _main_arrays(self) -> list[ArrayInfo]:
        if not self.arrays:
            raise _variables_error(f"{redact(self.url)} holds no data variables")
        numbers = [info for info in self.arrays.values() if info.is_channel]
        if not numbers:
            held = ", ".join(f"{info.name} of {info.dtype}" for info in self.arrays.values())
            raise _variables_error(f"{redact(self.url)} holds no numbers, only {held}")
        first = max(numbers, key=lambda info: (len(info.shape), prod(info.shape)))
        return [info for info in numbers if (info.shape, info.dims) == (first.shape, first.dims)]

    def __str__(self) -> str:
        return "\n".join([self._headline(), *(f"  {info}" for info in self.arrays.values())])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(f"<li>{escape(str(info))}</li>" for info in self.arrays.values())
        return f"<div><b>{escape(self._headline())}</b><ul>{rows}</ul></div>"

    def _headline(self) -> str:
        size = format_bytes(sum(info.nbytes for info in self.arrays.values()))
        stored = f", {format_bytes(self.manifest.stored_bytes)} stored" if self.manifest else ""
        return f"Dataset {redact(self.url)}: {len(self.arrays)} variables, {size}{stored}"


def _by(sizes: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in sizes)


def _variables_error(message: str) -> ConfigError:
    return ConfigError([Problem("data.variables", message)])


# -- opening


def open_dataset(
    given: Config | str | PathLike[str] | XarrayObject,
    credentials: str = "default",
    variables: Sequence[str] = (),
    *,
    strict: bool = False,
) -> Dataset:
    """What the store of a config, or at a URL or path, or an xarray Dataset or DataArray holds.

    Args:
        given: Where the data is.
        credentials: As `data.credentials`, for a URL.
        variables: Names to look for where a store lists none: plain HTTP without consolidated metadata.
        strict: As `data.strict`, for a URL.

    Raises:
        StoreError: when there is no store, or it cannot be reached or understood, or `given` is nothing of these.
        UnfinishedStoreError: when its build has not finished, with how far it got.
        CorruptChunkError: when the manifest or an array's metadata is not what was published.
    """
    if isinstance(given, Config):
        return open_dataset(given.data.url, given.data.credentials, given.data.variables, strict=given.data.strict)
    if not isinstance(given, str | PathLike):
        return open_xarray(given)
    url = resolve_url(fspath(given))
    store = open_store(url, credentials)
    found = read_manifest(store, url)
    if found is None:
        refuse_unfinished(store, url)
    else:
        _check_metadata(store, url, found)
    group = _open_group(store, url)
    if group is None:
        return _of_array(store, url, credentials, strict)
    arrays = _open_arrays(group, url, found, variables)
    infos = {name: array_info(name, array, found) for name, array in sorted(arrays.items())}
    order = [*found.arrays] if found else [*infos]
    named = _named_coordinates(group, arrays)
    coordinates = {name for name, info in infos.items() if name in named or _is_coordinate(info)}
    return Dataset(
        url=url,
        credentials=credentials,
        arrays={name: infos[name] for name in order if name not in coordinates},
        coordinates={name: info for name, info in infos.items() if name in coordinates},
        attributes=dict(group.attrs),
        manifest=found,
        strict=strict,
    )


def read_manifest(store: Store, url: str) -> Manifest | None:
    """The manifest of a finished store, else None."""
    data = read_object(store, records.MANIFEST_KEY, url)
    return None if data is None else Manifest.load(data, redact(url))


def read_build(store: Store, url: str) -> BuildRecord | None:
    """The build that a store belongs to, finished or not; None when kit did not begin it."""
    data = read_object(store, records.BUILD_KEY, url)
    return None if data is None else BuildRecord.load(data, f"{redact(url)}/{records.BUILD_KEY}")


def read_journals(store: Store, url: str) -> dict[str, records.ObjectRecord]:
    """Every shard that the journals of an unfinished build list, by key."""
    finished: dict[str, records.ObjectRecord] = {}
    for key in list_objects(store, records.FOLDER, url):
        if key.startswith(records.JOURNAL_PREFIX) and key.endswith(".jsonl"):
            data = read_object(store, key, url)
            finished |= {item.key: item for item in records.load_journal(data or b"", f"{redact(url)}/{key}")}
    return finished


def refuse_unfinished(store: Store, url: str) -> None:
    """Raises: UnfinishedStoreError: when a build has begun here and not been published."""
    build = read_build(store, url)
    if build is not None:
        done = len(read_journals(store, url))
        raise UnfinishedStoreError(
            f"{redact(url)}: {done} of {build.shards} shards are written; run kit.build(config) again to finish it"
        )


def _open_group(store: Store, url: str) -> zarr.Group | None:
    """The group at the root of a store; None for an array."""
    import zarr
    from zarr.errors import ContainsArrayError

    try:
        return zarr.open_group(store, mode="r")
    except ContainsArrayError:
        return None
    except FileNotFoundError:
        if read_object(store, ".zarray", url) is not None:  # of version 2, which zarr does not look for here
            return None
        raise StoreError(
            f"{redact(url)}: no Zarr group there; build it with kit.build(config), or correct data.url"
        ) from None
    except Exception as error:
        raise store_error(url, error) from None


def _of_array(store: Store, url: str, credentials: str, strict: bool) -> Dataset:
    """An array by its own address: of the store that kit built around it, or as if there were one."""
    import zarr

    above, _, name = url.rpartition("/")
    if "://" in url and above.endswith(":/"):
        raise StoreError(f"{redact(url)}: an array that fills the whole store cannot be read; put it into a folder")
    try:
        around = open_dataset(above or "/", credentials, strict=strict)
    except (UnfinishedStoreError, CorruptChunkError, MissingChunkError):
        raise
    except StoreError:
        around = None
    known = {} if around is None or around.manifest is None else {**around.coordinates, **around.arrays}
    if around is not None and name in known:
        return replace(around, arrays={name: known[name]}, coordinates={}, attributes={})
    info = array_info(name, zarr.open_array(store, mode="r"), None)
    return Dataset(url=above or "/", credentials=credentials, arrays={name: info}, strict=strict)


def _open_arrays(
    group: zarr.Group, url: str, found: Manifest | None, variables: Sequence[str]
) -> dict[str, zarr.Array[Any]]:
    import zarr

    try:
        if found is not None:
            names = dict.fromkeys(item.array for item in found.objects if item.array)
            return {name: group[name] for name in names}  # type: ignore[misc]
        arrays = dict(group.arrays())
        for name in () if arrays else variables:
            if isinstance(array := group.get(name), zarr.Array):
                arrays[name] = array
    except Exception as error:
        raise store_error(url, error) from None
    if not arrays and url.startswith("http"):
        raise StoreError(
            f"{redact(url)}: plain HTTP lists no variables, and the group's metadata is not consolidated; name them in "
            "data.variables, or consolidate the metadata where the group was written"
        )
    return arrays


def _check_metadata(store: Store, url: str, found: Manifest) -> None:
    """A flipped bit in metadata can change shape or fill value and still parse, so it is compared with the manifest."""
    for item in found.objects:
        if item.key.endswith("zarr.json"):
            data = read_object(store, item.key, url)
            if data is None:
                raise MissingChunkError(f"{redact(url)}: {item.key} is gone; verify, then rebuild")
            if records.crc32c(data) != item.crc32c:
                raise CorruptChunkError(f"{redact(url)}: {item.key} is not what was published; verify, then rebuild")


def _named_coordinates(group: zarr.Group, arrays: Mapping[str, zarr.Array[Any]]) -> set[str]:
    """Those along several dimensions, which variables or the group name as CF and xarray do."""
    named = [group.attrs.get("coordinates", ""), *(array.attrs.get("coordinates", "") for array in arrays.values())]
    return {name for names in named for name in str(names).split()}


def _is_coordinate(info: ArrayInfo) -> bool:
    return info.dims == (info.name,) or len(info.shape) == 0


def array_info(name: str, array: zarr.Array[Any], found: Manifest | None) -> ArrayInfo:
    """What a reader needs of one array; the manifest knows its statistics."""
    attributes = dict(array.attrs)
    statistics = found.arrays.get(name) if found else None
    dtype = _dtype(array, attributes)
    missing = _missing(array, attributes, dtype)
    return ArrayInfo(
        name=name,
        shape=array.shape,
        dims=_dims(array, attributes),
        dtype=dtype,
        chunk=array.chunks,
        shard=array.shards,
        scale_factor=float(_single(attributes.get("scale_factor", 1.0))),
        add_offset=float(_single(attributes.get("add_offset", 0.0))),
        missing=missing[0] if missing else None,
        also_missing=missing[1:],
        mean=statistics.mean if statistics else None,
        deviation=statistics.deviation if statistics else None,
        units=str(attributes.get("units", "")),
        long_name=str(attributes.get("long_name", "")),
    )


def _dims(array: zarr.Array[Any], attributes: Mapping[str, Any]) -> tuple[str, ...]:
    named = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS") or ()
    names = [*named] if len(named) == array.ndim else [None] * array.ndim
    return tuple(name or f"dim_{index}" for index, name in enumerate(names))


def _dtype(array: zarr.Array[Any], attributes: Mapping[str, Any]) -> np.dtype[Any]:
    """The stored type; NetCDF's classic files keep unsigned numbers in signed ones and say so."""
    dtype = np.dtype(array.dtype)
    unsigned = str(_single(attributes.get("_Unsigned", ""))).lower()
    swapped = {("true", "i"): "u", ("false", "u"): "i"}.get((unsigned, dtype.kind))
    return np.dtype(f"{dtype.byteorder}{swapped}{dtype.itemsize}") if swapped else dtype


def _missing(array: zarr.Array[Any], attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> tuple[float | int, ...]:
    """The packed values that are missing: attributes, and in Zarr version 2 the fill value."""
    if dtype.kind not in "iuf":
        return ()
    values = [attributes.get("_FillValue"), attributes.get("missing_value")]
    if array.metadata.zarr_format == 2 and values[0] is None:
        values[0] = array.fill_value
    numbers = (_as_stored(_single(value), dtype) for value in values if value is not None)
    return tuple(dict.fromkeys(number for number in numbers if number is not None))


def _as_stored(value: Any, dtype: np.dtype[Any]) -> float | int | None:
    """A missing value as the array holds it; None where it is NaN, or no number that the type can hold."""
    number = decode_float(value) if isinstance(value, str) else value
    if dtype.kind == "f":
        return None if np.isnan(number) else float(number)
    if not np.isfinite(number) or number != int(number):
        return None
    return int(np.array(int(number)).astype(dtype))


def _single(value: Any) -> Any:
    """An attribute that should be one value; some writers make it a list of one."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def encode_float(value: float) -> str:
    """A float `_FillValue` as xarray writes it to JSON: base64 of eight little-endian bytes."""
    return base64.standard_b64encode(struct.pack("<d", value)).decode()


def decode_float(text: str) -> float:
    """The inverse of `encode_float`; words such as `NaN` are read too."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(struct.unpack("<d", base64.standard_b64decode(text))[0])
    except (binascii.Error, struct.error):
        raise StoreError(f"_FillValue {text!r} is neither a number nor an encoded one") from None


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
    """Reads an object as threads read a store; see `kit.data.stream.fetch.Blocking`."""

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


_MICROSECONDS = {
    "microsecond": 1, "millisecond": 10**3, "second": 10**6, "minute": 60 * 10**6, "hour": 3600 * 10**6,
    "day": 86400 * 10**6,
}  # fmt: skip
_SHORT = {
    "us": "microsecond", "ms": "millisecond", "msec": "millisecond", "s": "second", "sec": "second", "min": "minute",
    "h": "hour", "hr": "hour", "d": "day",
}  # fmt: skip
_SINCE = re.compile(
    r"\s*(\w+?)s?\s+since\s+(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]+(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2}(?:\.\d*)?))?)?"
    r"\s*(?:Z|UTC|GMT|[+-]0?0:?00)?\s*", re.IGNORECASE,
)  # fmt: skip
_GREGORIAN_STARTS = np.datetime64("1582-10-15", "us")


def decode_times(numbers: NDArray[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """The numbers as datetime64 where the attributes say that they are times; else as they are."""
    calendar = str(attributes.get("calendar", "standard")).lower()
    match, unit = _parse(str(attributes.get("units", "")))
    if match is None or unit is None or numbers.dtype.kind not in "iuf" or calendar not in _CALENDARS:
        return numbers
    try:
        start = np.datetime64(f"{int(match[2]):04d}-{int(match[3]):02d}-{int(match[4]):02d}", "us")
    except ValueError:
        return numbers
    clock = [float(part or 0) for part in match.groups()[4:]]
    start += np.timedelta64(round((clock[0] * 3600 + clock[1] * 60 + clock[2]) * 10**6), "us")
    times = start + _steps(numbers, unit)
    julian = calendar != "proleptic_gregorian" and (start < _GREGORIAN_STARTS or (times < _GREGORIAN_STARTS).any())
    return numbers if julian else times


def is_time_unit(units: str) -> bool:
    """Whether numbers of these units are times, in whichever calendar."""
    return _parse(units)[1] is not None


_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")


def _parse(units: str) -> tuple[re.Match[str] | None, int | None]:
    """The parts of `<unit> since <date>`, and the unit in microseconds."""
    match = _SINCE.fullmatch(units)
    return match, _unit(match[1].lower()) if match else None


def _unit(word: str) -> int | None:
    return _MICROSECONDS.get(_SHORT.get(word, word))


def _steps(numbers: NDArray[Any], unit: int) -> NDArray[np.timedelta64]:
    """Numbers of a unit as microseconds; NaN is no time."""
    if numbers.dtype.kind != "f":
        return (numbers.astype(np.int64) * unit).astype("timedelta64[us]")
    known = np.isfinite(numbers)
    steps = np.where(known, np.round(numbers.astype(np.float64) * unit), 0).astype(np.int64).astype("timedelta64[us]")
    return np.where(known, steps, np.timedelta64("NaT"))
