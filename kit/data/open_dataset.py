"""From a config, path, URL or object to the Dataset that describes it; nothing but metadata is read.

A store that kit is still building is refused, since a shard not yet written reads as fill values. Any other Zarr group
(version 2 or 3) opens too, without statistics and without a manifest, and so does an array that is in none. Of a
pyramid of resolutions, the finest is read; each of the others has a path of its own. Icechunk repositories, references
of kerchunk, and what VirtualiZarr holds are read through the store of their library (`kit.data.stores.foreign`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from zarr.abc.store import Store
from zarr.storage import LocalStore

from kit.config import Config
from kit.data.dataset import MOST_GROUPS_SHOWN, Dataset, StoreDataset, open_xarray, warn_unreachable
from kit.data.files import open_file, split_group
from kit.data.stores import manifest as records
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.foreign import (
    REFERENCES,
    PrefixStore,
    find_repository,
    open_references,
    open_repository,
    references_as_store,
)
from kit.data.stores.manifest import BuildRecord, Manifest
from kit.data.stores.metadata import (
    NAMES,
    CachedMetadata,
    DescribedStore,
    consolidated,
    metadata_from_cache,
    published,
    read_objects,
)
from kit.data.stores.url import (
    list_objects,
    local_folder,
    near_url,
    open_store,
    read_object,
    redact,
    resolve_url,
    store_error,
)
from kit.data.variables import array_info, asides
from kit.errors import CorruptChunkError, MissingChunkError, StoreError, UnfinishedStoreError, UnreachableStoreError
from kit.registry import load

if TYPE_CHECKING:
    import zarr

    from kit.data.dataset import XarrayObject

_DEEPEST_GROUP = 2


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
        return _from_object(given, credentials, strict)
    return _from_url(fspath(given), credentials, variables, strict)


def open_url(config: Config, url: str) -> Dataset:
    """The store at one of the URLs of a config, whose cache may keep its metadata.

    Raises:
        As `open_dataset`.
    """
    data = config.data
    return _from_url(url, data.credentials, data.variables, data.strict, ReadCache.of(config.cache))


def _from_url(
    text: str, credentials: str, variables: Sequence[str], strict: bool, cache: ReadCache | None = None, *,
    hints: bool = True,
) -> Dataset:  # fmt: skip
    if (place := split_group(text)) is not None:
        return replace(open_xarray(open_file(*place, credentials)), url=text, reopened=(*place, credentials))
    if text.rstrip("/").lower().endswith(REFERENCES):
        return _from_group(
            text.rstrip("/"), credentials, variables, strict, partial(open_references, text, credentials)
        )
    url = resolve_url(text)
    try:
        if "://" in url or (repository := find_repository(url, credentials)) is None:
            return _from_group(url, credentials, variables, strict, cache=cache)
    except NoGroupError as error:
        repository = find_repository(url, credentials)
        if repository is None:
            raise NoGroupError(f"{error}{near_url(url, credentials) if hints else ''}") from None
    root, inside = repository
    opener: Callable[[], Store] = partial(open_repository, root, credentials)
    return _from_group(url, credentials, variables, strict, partial(_open_at, opener, inside) if inside else opener)


def _open_at(opener: Callable[[], Store], group: str, shown: str = "") -> Store:
    return PrefixStore(opener(), f"{group}/" if group else "", shown)


def _return_store(store: Store) -> Store:
    return store


class NoGroupError(StoreError):
    """There is no Zarr group, and no array either."""


def _from_object(given: Any, credentials: str, strict: bool) -> Dataset:
    """What an object holds that is neither a URL nor a config."""
    if _is_virtual(given):
        references = (given.vz if hasattr(given, "vz") else given.virtualize).to_kerchunk(format="dict")
        opener: Callable[[], Store] = partial(references_as_store, references, credentials)
        return _from_group("virtual dataset", credentials, (), strict, opener)
    if hasattr(given, "readonly_session"):
        given = given.readonly_session("main")
    store = given if isinstance(given, Store) else getattr(given, "store", None)
    if not isinstance(store, Store):
        return open_xarray(given)
    path = "" if given is store else str(getattr(given, "path", "")).strip("/")  # of a group or an array
    if type(store) is LocalStore:
        return open_dataset(store.root / path, credentials, strict=strict)
    opener = partial(_return_store, store)
    opener = partial(_open_at, opener, path) if path else opener
    return _from_group(type(store).__name__, credentials, (), strict, opener)


def _is_virtual(given: Any) -> bool:
    """Whether an xarray Dataset holds VirtualiZarr's places of chunks, which are no values."""
    variables = getattr(given, "variables", None)
    held = variables.values() if isinstance(variables, Mapping) else ()
    return any(type(getattr(one, "_data", None)).__name__ == "ManifestArray" for one in held)


def _from_group(
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
        kept = CachedMetadata(cache.open(warns=False), url)
    try:
        bare = open_store(url, credentials) if opener is None else opener()
        found, store = _read_metadata(bare, url, kept, of_others=opener is not None)
    except UnreachableStoreError as error:
        known = None if kept is None else metadata_from_cache(url, kept, str(error))
        if known is None or cache is None:
            raise
        (found, store), unreachable = known, str(error)
        warn_unreachable(cache, error)
    group = _open_group(store, url)
    if group is None:
        return _from_array(store, url, credentials, strict, opener)
    if found is None and (levels := pyramid_levels(group)):
        return _from_pyramid(group, levels, store, url, credentials, strict, opener)
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


def _read_metadata(
    store: Store, url: str, kept: CachedMetadata | None, *, of_others: bool
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
            f"{redact(url)}: {done} of {build.shards} objects are written; run kit.build(config) again to finish it"
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
        folder = local_folder(url)
        there = folder is not None and folder.is_dir() and any(folder.iterdir())
        hint = "; other files there are built from where data.source names them" if there else ""
        raise NoGroupError(
            f"{redact(url)}: no Zarr group there; correct the address, or build it with kit.build(config){hint}"
        ) from None
    except Exception as error:
        raise store_error(url, error) from None


def _from_array(store: Store, url: str, credentials: str, strict: bool, opener: Callable[[], Store] | None) -> Dataset:
    """An array by its own address: of the store that kit built around it, or as if there were one."""
    import zarr

    above, _, name = url.rpartition("/")
    if opener is not None or ("://" in url and above.endswith(":/")):  # it fills the whole store
        opener = partial(_open_at, opener or partial(open_store, url, credentials), "", "data/")
        info = array_info("data", zarr.open_array(store, mode="r"), None)
        return StoreDataset(url=url, credentials=credentials, arrays={"data": info}, strict=strict, opener=opener)
    try:
        around = _from_url(above or "/", credentials, (), strict, hints=False)
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


def _from_pyramid(
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
        return replace(_from_group(f"{url}/{levels[0]}", credentials, (), strict, inner), levels=tuple(levels))
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
        wells = ", ".join(f"{well['path']}/0" for well in plate.get("wells", ())[:MOST_GROUPS_SHOWN])
        raise StoreError(f"{redact(url)} is a plate of images; add a well and a field of it to the path: {wells}")
    inner = group.members(max_depth=_DEEPEST_GROUP)
    paths = dict.fromkeys(path.rpartition("/")[0] for path, node in inner if isinstance(node, zarr.Array))
    if paths:
        shown = ", ".join([*paths][:MOST_GROUPS_SHOWN]) + (", ..." if len(paths) > MOST_GROUPS_SHOWN else "")
        raise StoreError(f"{redact(url)}: its variables are in groups; add one of them to the path: {shown}")
