"""What a store holds, as its reader needs it: arrays with chunks, packing and statistics, and kit's manifest.

A Dataset is a description and holds no handle: it pickles, and every process opens its own store. Sizes are elements.
A store that kit is still building is refused, since a shard not yet written reads as fill values. Any other Zarr group
(version 2 or 3) opens too, without statistics and without a manifest, and so does an array that is in none. Of a
pyramid of resolutions, the finest is read; each of the others has a path of its own. Icechunk repositories, references
of kerchunk, and what VirtualiZarr holds are read through the store of their library (`kit.data.stores.foreign`).

An xarray Dataset or DataArray, in memory or lazy, is shown to the engine as a store of uncompressed chunks, so it is
read as any other store: planned by the batch, ahead, by threads, under the same budgets. Values are those that xarray
gives, decoded; NaN is missing. Chunks are those of dask or of the file behind a lazy object; an object in memory is cut
into pieces of at most `LARGEST_PIECE_BYTES`. Nothing is copied before it is read, and nothing is ever written. xarray
is imported by whoever made the object, never here.

CF time coordinates, `<unit> since <date>`, are decoded as datetime64; no more of CF than a coordinate needs. That holds
for calendars that agree with numpy's proleptic Gregorian one (`standard` ones from 1582-10-15 on, as before they mean
the Julian calendar); others stay the numbers they are. Times are rounded to microseconds.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from math import prod
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from kit.config import Config
from kit.data.files import open_file, split_group
from kit.data.places import Matched
from kit.data.stores import manifest as records
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.foreign import (
    REFERENCES,
    At,
    find_repository,
    open_references,
    open_repository,
    references_as_store,
)
from kit.data.stores.manifest import BuildRecord, Manifest
from kit.data.stores.metadata import (
    NAMES,
    DescribedStore,
    Documents,
    KeptMetadata,
    UnreachableStore,
    consolidated,
    published,
    read_objects,
    without_store,
)
from kit.data.stores.transfer import Counters, Octets
from kit.data.stores.url import list_objects, local_folder, open_store, read_object, redact, resolve_url, store_error
from kit.data.variables import asides
from kit.errors import (
    ConfigError,
    CorruptChunkError,
    KitWarning,
    MissingChunkError,
    Problem,
    StoreError,
    UnfinishedStoreError,
    UnreachableStoreError,
    did_you_mean,
)
from kit.registry import load
from kit.units import format_bytes

if TYPE_CHECKING:
    import xarray
    import zarr

    XarrayObject = xarray.Dataset | xarray.DataArray

NUMBERS = "biuf"
"""Kinds of numpy type that can be a channel."""
LARGEST_PIECE_BYTES = 256 << 10
_DEEPEST_GROUP = 2
_MOST_GROUPS = 8


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
    repeated: tuple[int, ...] = ()
    """Dimensions that the stored array lacks: it has the same values all along them."""
    matched: tuple[Matched | None, ...] = ()
    """Along each dimension the stored elements that those of `shape` take, in a store of another resolution; `chunk`
    and `shard` count stored ones. None where they are the same, empty where they are along all dimensions."""
    together: tuple[int, ...] = ()
    """Elements along each dimension, at most, that take the same one of an array matched to this one; empty for 1."""

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """The other ones, in their order."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.repeated)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Elements of the stored array along its own dimensions, `stored_axes`."""
        matched = self.matched or (None,) * len(self.shape)
        sizes = [size if one is None else one.size for size, one in zip(self.shape, matched, strict=True)]
        return tuple(sizes[axis] for axis in self.stored_axes)

    @property
    def nbytes(self) -> int:
        """Uncompressed size."""
        return prod(self.stored_shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Uncompressed size of a chunk."""
        return prod(self.chunk[axis] for axis in self.stored_axes) * self.dtype.itemsize

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

    def repeat_along(self, other: ArrayInfo) -> ArrayInfo | None:
        """This array with all dimensions of another, in their order; None where they do not go together."""
        axes = {name: axis for axis, name in enumerate(self.dims)}
        shared = [name for name in other.dims if name in axes]
        sizes = dict(zip(other.dims, other.shape, strict=True))
        if (*shared,) != self.dims or any(sizes[name] != self.shape[axes[name]] for name in shared):
            return None

        def widen(sides: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sides[axes[name]] if name in axes else sizes[name] for name in other.dims)

        return replace(
            self, shape=other.shape, dims=other.dims, chunk=widen(self.chunk), shard=self.shard and widen(self.shard),
            matched=self.matched and tuple(self.matched[axes[n]] if n in axes else None for n in other.dims),
            repeated=tuple(axis for axis, name in enumerate(other.dims) if name not in axes),
        )  # fmt: skip

    def __str__(self) -> str:
        dims = ", ".join(f"{name} {size}" for name, size in zip(self.dims, self.shape, strict=True))
        chunk, shard = (" × ".join(map(str, sides)) for sides in (self.chunk, self.shard or ()))
        cut = f"chunk {chunk}" + (f" in shards of {shard}" if self.shard else "")
        meaning = f", {self.long_name} [{self.units}]" if self.long_name or self.units else ""
        for name, one in zip(self.dims, self.matched, strict=False):
            meaning += "" if one is None else f", {one.size} along {name} matched"
        return f"{self.name} ({dims}) {self.dtype}, {format_bytes(self.nbytes)}, {cut}{meaning}"


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
    unreachable: str = field(default="", compare=False)
    """Why there was no way to the store when this was opened, so that only what a cache holds is read."""

    def locate(self, key: str) -> tuple[Dataset, str]:
        """The dataset in whose store an object lies, and its key there: this one, unless it is joined of several."""
        return self, key

    def open_store(self) -> Store:
        """A fresh read-only handle, bound to no event loop until its first read."""
        if self.unreachable:
            return self._described(UnreachableStore(self.url, self.unreachable))
        try:
            return self._described(open_store(self.url, self.credentials))
        except UnreachableStoreError as error:
            if self.read_cache is None or self.manifest is None:
                raise
            _warn_unreachable(self.read_cache, error)
            return self._described(UnreachableStore(self.url, str(error)))

    def _described(self, store: Store) -> Store:
        """Metadata in a folder are read anew: that costs nothing, and what is gone meanwhile is noticed."""
        if not self.metadata or "://" not in self.url:
            return store
        if self.read_cache is None or self.manifest is None:
            return DescribedStore(store, self.metadata)
        listed = {item.key: item for item in self.manifest.objects if item.array in self.coordinates}
        kept = KeptMetadata(self.read_cache.open(warns=False), self.url)
        return DescribedStore(store, self.metadata, kept=kept, listed=listed)

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
        """The arrays named, in that order; for no names, the data that share the shape of highest rank and size.

        An array that lacks some dimensions of the others is repeated along them.

        Raises:
            ConfigError: for a name the store does not have, or arrays whose dimensions do not go together.
        """
        unknown = next((name for name in variables if name not in self.arrays), None)
        if unknown is not None:
            hint = did_you_mean(unknown, self.arrays or ["no arrays"])
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


@dataclass(frozen=True, kw_only=True)
class StoreDataset(Dataset):
    """A `Dataset` whose store no URL alone leads to; it pickles with what opens it."""

    opener: Callable[[], Store] = field(compare=False, repr=False)

    def open_store(self) -> Store:
        return self._described(self.opener())

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


# -- opening


def open_dataset(
    given: Config | str | PathLike[str] | XarrayObject,
    credentials: str = "default",
    variables: Sequence[str] = (),
    *,
    strict: bool = False,
) -> Dataset:
    """Open a store, a file of arrays, or an object that holds data, and read nothing but its metadata.

    Args:
        given: A config; the path or URL of a Zarr store, an Icechunk repository, references of kerchunk (`.json`,
            `.parquet`) or a NetCDF, HDF5, GRIB, `.npz` or `.npy` file, each with the path of a group in it behind; an
            xarray Dataset, DataArray or DataTree, also of VirtualiZarr; a Zarr store, group or array; an Icechunk
            session or repository.
        credentials: As `data.credentials`, for a URL.
        variables: Names to look for where a store lists none: plain HTTP without consolidated metadata.
        strict: As `data.strict`, for a URL.

    Returns:
        The dataset: its arrays by name, each with shape, dimension names, chunk and shard.

    Raises:
        StoreError: when there is no store, it cannot be reached or understood, or `given` is none of these.
        UnfinishedStoreError: when its build has not finished, with how far it got.
        CorruptChunkError: when the manifest or an array's metadata differs from what was published.

    Example:
        >>> {array.dims for array in kit.open_dataset(store).arrays.values()}
        {('time', 'lat', 'lon')}
    """
    if isinstance(given, Config) and given.data.more:
        joined: Dataset = load("dataset.join")(given)
        return joined
    if isinstance(given, Config):
        return open_url(given, given.data.url)
    if not isinstance(given, str | PathLike):
        return _of_object(given, credentials, strict)
    return _of_url(fspath(given), credentials, variables, strict)


def open_url(config: Config, url: str) -> Dataset:
    """The store at one of the URLs of a config, whose cache may keep its metadata.

    Raises:
        As `open_dataset`.
    """
    data = config.data
    variables = data.variables if url == data.url else ()
    return _of_url(url, data.credentials, variables, data.strict, ReadCache.of(config.cache))


def _of_url(
    text: str, credentials: str, variables: Sequence[str], strict: bool, cache: ReadCache | None = None
) -> Dataset:
    if (place := split_group(text)) is not None:
        return replace(open_xarray(open_file(*place, credentials)), url=text, reopened=(*place, credentials))
    if text.rstrip("/").lower().endswith(REFERENCES):
        return _of_group(text.rstrip("/"), credentials, variables, strict, partial(open_references, text, credentials))
    url = resolve_url(text)
    try:
        if "://" in url or (repository := find_repository(url, credentials)) is None:
            return _of_group(url, credentials, variables, strict, cache=cache)
    except NoGroupError:
        repository = find_repository(url, credentials)
        if repository is None:
            raise
    root, inside = repository
    opener: Callable[[], Store] = partial(open_repository, root, credentials)
    return _of_group(url, credentials, variables, strict, partial(_open_at, opener, inside) if inside else opener)


def _open_at(opener: Callable[[], Store], group: str, shown: str = "") -> Store:
    return At(opener(), f"{group}/" if group else "", shown)


def _itself(store: Store) -> Store:
    return store


class NoGroupError(StoreError):
    """There is no Zarr group, and no array either."""


def _of_object(given: Any, credentials: str, strict: bool) -> Dataset:
    """What an object holds that is neither a URL nor a config."""
    if _is_virtual(given):
        references = (given.vz if hasattr(given, "vz") else given.virtualize).to_kerchunk(format="dict")
        opener: Callable[[], Store] = partial(references_as_store, references, credentials)
        return _of_group("virtual dataset", credentials, (), strict, opener)
    if hasattr(given, "readonly_session"):
        given = given.readonly_session("main")
    store = given if isinstance(given, Store) else getattr(given, "store", None)
    if not isinstance(store, Store):
        return open_xarray(given)
    path = "" if given is store else str(getattr(given, "path", "")).strip("/")  # of a group or an array
    if type(store) is LocalStore:
        return open_dataset(store.root / path, credentials, strict=strict)
    opener = partial(_itself, store)
    opener = partial(_open_at, opener, path) if path else opener
    return _of_group(type(store).__name__, credentials, (), strict, opener)


def _is_virtual(given: Any) -> bool:
    """Whether an xarray Dataset holds VirtualiZarr's places of chunks, which are no values."""
    variables = getattr(given, "variables", None)
    held = variables.values() if isinstance(variables, Mapping) else ()
    return any(type(getattr(one, "_data", None)).__name__ == "ManifestArray" for one in held)


def _of_group(
    url: str,
    credentials: str,
    variables: Sequence[str],
    strict: bool,
    opener: Callable[[], Store] | None = None,
    cache: ReadCache | None = None,
) -> Dataset:
    """The group, array or pyramid at a URL, or in the store that `opener` opens."""
    make: Callable[..., Dataset] = Dataset if opener is None else partial(StoreDataset, opener=opener)
    kept, unreachable = None, ""
    if cache is not None and opener is None and local_folder(url) is None:
        kept = KeptMetadata(cache.open(warns=False), url)
    try:
        bare = open_store(url, credentials) if opener is None else opener()
        found, store = _described(bare, url, kept, of_others=opener is not None)
    except UnreachableStoreError as error:
        known = None if kept is None else without_store(url, kept, str(error))
        if known is None or cache is None:
            raise
        (found, store), unreachable = known, str(error)
        _warn_unreachable(cache, error)
    group = _open_group(store, url)
    if group is None:
        return _of_array(store, url, credentials, strict, opener)
    if found is None and (levels := pyramid_levels(group)):
        return _of_pyramid(group, levels, store, url, credentials, strict, opener)
    arrays = _open_arrays(group, url, found, variables)
    infos = {name: array_info(name, array, found) for name, array in sorted(arrays.items())}
    # Coordinates along several dimensions are named by variables or the group, as CF and xarray do.
    holders: list[Any] = [group, *arrays.values()]
    named = " ".join(str(holder.attrs.get("coordinates", "")) for holder in holders).split()
    coordinates = {n: info for n, info in infos.items() if n in named or info.dims == (n,) or not info.shape}
    described = {name: dict(array.attrs) for name, array in arrays.items()}
    return make(
        url=url, credentials=credentials, coordinates=coordinates,
        arrays={name: infos[name] for name in (found.arrays if found else infos) if name not in coordinates},
        attributes=dict(group.attrs), manifest=found, strict=strict, asides={} if found else asides(described),
        metadata=store.documents_of(infos), read_cache=cache, unreachable=unreachable,
    )  # fmt: skip


def _warn_unreachable(cache: ReadCache, error: UnreachableStoreError) -> None:
    message = f"{error}. It is read from {cache.where} instead, as it was when kit last opened it; what is not there "
    warnings.warn(f"{message}cannot be read", KitWarning, stacklevel=4)


def _described(
    store: Store, url: str, kept: KeptMetadata | None, *, of_others: bool
) -> tuple[Manifest | None, DescribedStore]:
    """The manifest of a store that kit built, and the store with what metadata are known after a round trip or two.

    Another library's store may refuse to look for a manifest, and is asked for nothing else.

    Raises:
        UnfinishedStoreError: when its build has not finished.
        MissingChunkError, CorruptChunkError: when metadata are not what was published.
    """
    key, found = records.MANIFEST_KEY, dict[str, bytes]()
    try:
        if kept is not None and kept.built_by_kit:
            found = read_objects(store, [key], url)
        if key not in found:
            found = read_objects(store, [key, records.BUILD_KEY, *(() if of_others else NAMES)], url)
        if key in found:
            data = found.pop(key)
            manifest = Manifest.load(data, redact(url))
            documents = published(store, url, manifest, found, kept)
            if kept is not None:
                kept.keep_manifest(data)
            return manifest, DescribedStore(store, documents)
        if kept is not None:
            kept.forget_manifest()
        if found.pop(records.BUILD_KEY, None) is not None:
            refuse_unfinished(store, url)
    except StoreError as error:
        if not of_others or type(error) not in (StoreError, UnreachableStoreError):
            raise
        return None, DescribedStore(store, {})
    return None, DescribedStore(store, consolidated(found) | found, () if of_others else ("",))


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
        raise NoGroupError(
            f"{redact(url)}: no Zarr group there; correct the address, or build it with kit.build(config)"
        ) from None
    except Exception as error:
        raise store_error(url, error) from None


def _of_array(store: Store, url: str, credentials: str, strict: bool, opener: Callable[[], Store] | None) -> Dataset:
    """An array by its own address: of the store that kit built around it, or as if there were one."""
    import zarr

    above, _, name = url.rpartition("/")
    if opener is not None or ("://" in url and above.endswith(":/")):  # it fills the whole store
        opener = partial(_open_at, opener or partial(open_store, url, credentials), "", "data/")
        info = array_info("data", zarr.open_array(store, mode="r"), None)
        return StoreDataset(url=url, credentials=credentials, arrays={"data": info}, strict=strict, opener=opener)
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
    if around is not None and name in around.levels:
        finest = next(iter(around.arrays.values()))
        info = replace(info, dims=finest.dims, missing=finest.missing)
    return Dataset(url=above or "/", credentials=credentials, arrays={name: info}, strict=strict)


def pyramid_levels(group: zarr.Group) -> list[str]:
    """Paths of the resolutions of a pyramid (OME-Zarr, or a tree as ndpyramid makes it), the finest first."""
    import zarr

    def elements(path: str) -> int:
        node = group[path]
        return max(prod(one.shape) for one in ([node] if isinstance(node, zarr.Array) else node.array_values()))

    paths = [str(level.get("path")) for level in _multiscales(group).get("datasets", ())]
    return sorted((path for path in paths if path in group), key=elements, reverse=True)


def _multiscales(group: zarr.Group) -> Mapping[str, Any]:
    attributes: Any = group.attrs.get("ome", group.attrs)
    scales = attributes.get("multiscales")
    return scales[0] if isinstance(scales, list) and scales and isinstance(scales[0], Mapping) else {}


def _of_pyramid(
    group: zarr.Group,
    levels: list[str],
    store: DescribedStore,
    url: str,
    credentials: str,
    strict: bool,
    opener: Callable[[], Store] | None,
) -> Dataset:
    """The finest resolution of a pyramid."""
    import zarr

    node = group[levels[0]]
    if not isinstance(node, zarr.Array):
        inner = None if opener is None else partial(_open_at, opener, levels[0])
        return replace(_of_group(f"{url}/{levels[0]}", credentials, (), strict, inner), levels=tuple(levels))
    info = array_info(levels[0], node, None)
    axes = [axis["name"] if isinstance(axis, Mapping) else axis for axis in _multiscales(group).get("axes", "tczyx")]
    if len(axes) == len(info.shape):
        info = replace(info, dims=tuple(map(str, axes)))
    if "_FillValue" not in node.attrs:  # black is a colour
        info = replace(info, missing=None)
    make: Callable[..., Dataset] = Dataset if opener is None else partial(StoreDataset, opener=opener)
    attributes = {name: value for name, value in group.attrs.items() if name not in ("ome", "multiscales")}
    return make(
        url=url, credentials=credentials, arrays={info.name: info}, attributes=attributes, strict=strict,
        levels=tuple(levels), metadata=store.documents_of([info.name]),
    )  # fmt: skip


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
    if not arrays and not url.startswith("http"):
        _refuse_groups(group, url)
    if not arrays and url.startswith("http"):
        raise StoreError(
            f"{redact(url)}: plain HTTP lists no variables, and the group's metadata is not consolidated; name them in "
            "data.variables, or consolidate the metadata where the group was written"
        )
    return arrays


def _refuse_groups(group: zarr.Group, url: str) -> None:
    """Raises: StoreError: when a group holds only groups that hold variables, with the paths of some."""
    import zarr

    attributes: Any = group.attrs.get("ome", group.attrs)
    if isinstance(plate := attributes.get("plate"), Mapping):
        wells = ", ".join(f"{well['path']}/0" for well in plate.get("wells", ())[:_MOST_GROUPS])
        raise StoreError(f"{redact(url)} is a plate of images; add a well and a field of it to the path: {wells}")
    inner = group.members(max_depth=_DEEPEST_GROUP)
    paths = dict.fromkeys(path.rpartition("/")[0] for path, node in inner if isinstance(node, zarr.Array))
    if paths:
        shown = ", ".join([*paths][:_MOST_GROUPS]) + (", ..." if len(paths) > _MOST_GROUPS else "")
        raise StoreError(f"{redact(url)}: its variables are in groups; add one of them to the path: {shown}")


def array_info(name: str, array: zarr.Array[Any], found: Manifest | None) -> ArrayInfo:
    """What a reader needs of one array; the manifest knows its statistics."""
    attributes = dict(array.attrs)
    statistics = found.arrays.get(name) if found else None
    dtype = np.dtype(array.dtype)
    # NetCDF's classic files keep unsigned numbers in signed ones and say so.
    unsigned = str(_single(attributes.get("_Unsigned", ""))).lower()
    if swapped := {("true", "i"): "u", ("false", "u"): "i"}.get((unsigned, dtype.kind)):
        dtype = np.dtype(f"{dtype.byteorder}{swapped}{dtype.itemsize}")
    named: Any = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS") or ()
    names = [*named] if len(named) == array.ndim else [None] * array.ndim
    missing = _missing(array, attributes, dtype)
    return ArrayInfo(
        name=name, shape=array.shape, dims=tuple(name or f"dim_{index}" for index, name in enumerate(names)),
        dtype=dtype, chunk=array.chunks, shard=array.shards,
        scale_factor=float(_single(attributes.get("scale_factor", 1.0))),
        add_offset=float(_single(attributes.get("add_offset", 0.0))),
        missing=missing[0] if missing else None, also_missing=missing[1:],
        mean=statistics.mean if statistics else None, deviation=statistics.deviation if statistics else None,
        units=str(attributes.get("units", "")), long_name=str(attributes.get("long_name", "")),
    )  # fmt: skip


def _missing(array: zarr.Array[Any], attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> tuple[float | int, ...]:
    """The packed values that are missing: attributes, and in Zarr version 2 the fill value.

    NaN is none of them, and neither is a number that the type cannot hold.
    """
    if dtype.kind not in "iuf":
        return ()
    values = [attributes.get("_FillValue"), attributes.get("missing_value")]
    if array.metadata.zarr_format == 2 and values[0] is None:
        values[0] = array.fill_value
    found: dict[float | int, None] = {}
    for value in (_single(value) for value in values if value is not None):
        number = decode_float(value) if isinstance(value, str) else value
        if dtype.kind == "f" and not np.isnan(number):
            found[float(number)] = None
        elif dtype.kind != "f" and np.isfinite(number) and number == int(number):
            found[int(np.array(int(number)).astype(dtype))] = None
    return tuple(found)


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


@dataclass(frozen=True, kw_only=True)
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

    def coordinate(self, name: str) -> NDArray[Any]:
        if name in self.xarray_object.coords or name not in self.xarray_object.sizes:
            return np.asarray(self.xarray_object.coords[name].values)
        return np.arange(self.xarray_object.sizes[name])


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
        shown = ", ".join(paths[:_MOST_GROUPS]) or "none"
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
CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
GREGORIAN_STARTS = np.datetime64("1582-10-15", "us")


def decode_times(numbers: NDArray[Any], attributes: Mapping[str, Any]) -> NDArray[Any]:
    """The numbers as datetime64 where the attributes say that they are times; else as they are."""
    calendar = str(attributes.get("calendar", "standard")).lower()
    match, unit = _parse_units(str(attributes.get("units", "")))
    if match is None or unit is None or numbers.dtype.kind not in "iuf" or calendar not in CALENDARS:
        return numbers
    try:
        start = np.datetime64(f"{int(match[2]):04d}-{int(match[3]):02d}-{int(match[4]):02d}", "us")
    except ValueError:
        return numbers
    clock = [float(part or 0) for part in match.groups()[4:]]
    start += np.timedelta64(round((clock[0] * 3600 + clock[1] * 60 + clock[2]) * 10**6), "us")
    if numbers.dtype.kind == "f":  # NaN is no time
        known = np.isfinite(numbers)
        steps = np.where(known, np.round(numbers.astype(np.float64) * unit), 0).astype(np.int64)
        times = start + np.where(known, steps.astype("timedelta64[us]"), np.timedelta64("NaT"))
    else:
        times = start + (numbers.astype(np.int64) * unit).astype("timedelta64[us]")
    julian = calendar != "proleptic_gregorian" and (start < GREGORIAN_STARTS or (times < GREGORIAN_STARTS).any())
    return numbers if julian else times


def is_time_unit(units: str) -> bool:
    """Whether numbers of these units are times, in whichever calendar."""
    return _parse_units(units)[1] is not None


def _parse_units(units: str) -> tuple[re.Match[str] | None, int | None]:
    """The parts of `<unit> since <date>`, and the unit in microseconds."""
    match = _SINCE.fullmatch(units)
    word = match[1].lower() if match else ""
    return match, _MICROSECONDS.get(_SHORT.get(word, word))
