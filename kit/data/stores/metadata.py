"""Metadata of a store, read in one round trip where that can be, and once for all who read the store.

On a network each request that waits for another costs a latency before the first batch. So everything that may say what
a store is gets asked for together: kit's records, and a group's documents in either version of Zarr. Consolidated
metadata hold the documents of the arrays as well. What has been read belongs to the dataset: its readers, in loader
processes too, ask for none of it again.

In a store that kit built, the manifest tells size and checksum of each document, and every opening reads it anew. So
one request tells whether anything has changed, and the group's document may come from a read cache, where it goes by
both: of a store that was rebuilt nothing old is found. The cache remembers too that kit built the store, so that the
manifest alone is asked for. Where the group's document is kept, those of the arrays, which it repeats, are not read;
elsewhere all of them are compared with the manifest.

The cache keeps the last manifest too, and the coordinates. They are for when there is no way to the store: then it is
read as it was, as far as the cache holds it (`metadata_from_cache`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Self

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore

from kit.data.stores import manifest as records
from kit.data.stores.disk_cache import WHOLE, Entries, name_of
from kit.data.stores.foreign import PrefixStore
from kit.data.stores.manifest import Manifest, ObjectRecord
from kit.data.stores.transfer import octets
from kit.data.stores.url import answer_seconds, redact, run_sync
from kit.errors import CorruptChunkError, MissingChunkError, UnreachableStoreError
from kit.json_text import read_json

Documents = Mapping[str, bytes]
"""Objects of metadata, by key."""
_GROUP = "zarr.json"
_CONSOLIDATED = ".zmetadata"
NAMES = (_GROUP, ".zgroup", ".zarray", ".zattrs", _CONSOLIDATED)
"""Of what may describe a group or an array, in either version of Zarr."""


def read_objects(store: Store, keys: Iterable[str], url: str) -> dict[str, bytes]:
    """Those of these objects that are there, all asked for at once.

    Raises:
        StoreError: when the store does not answer or refuses.
    """
    wanted = [*keys]

    async def read_all() -> list[Buffer | None]:
        return await asyncio.gather(*(store.get(key, default_buffer_prototype()) for key in wanted))

    if not wanted:
        return {}
    found = zip(wanted, run_sync(read_all, url, answer_seconds()), strict=True)
    return {key: one.to_bytes() for key, one in found if one is not None}


def consolidated(documents: Documents) -> dict[str, bytes]:
    """The documents of a group's members, where it holds them; none where they make no sense."""
    version_3 = _GROUP in documents
    try:
        found = read_json(documents.get(_GROUP if version_3 else _CONSOLIDATED, b"{}"))
        held = found.get("consolidated_metadata") if version_3 else found
        members = dict((held or {}).get("metadata") or {})
    except (ValueError, TypeError, AttributeError):
        return {}
    return {f"{name}/{_GROUP}" if version_3 else name: json.dumps(one).encode() for name, one in members.items()}


def published(
    store: Store, url: str, manifest: Manifest, read: Documents, kept: CachedMetadata | None
) -> dict[str, bytes]:
    """All metadata of a store that kit built, as its manifest tells it.

    A flipped bit in metadata can change shape or fill value and still parse. What has been `read` together with the
    manifest may be older than it, and is read again then.

    Raises:
        MissingChunkError: when some is not there.
        CorruptChunkError: when some differs from what was published.
    """
    listed = {item.key: item for item in manifest.objects if item.key.endswith(_GROUP)}
    group = listed.get(_GROUP)
    if kept is not None and group is not None and (data := kept.find(group)) is not None:
        found = consolidated({_GROUP: data}) | {_GROUP: data}
        if found.keys() >= listed.keys() - {records.GROUP_KEY}:
            return found
    found = {key: data for key, data in read.items() if key in listed and _is(listed[key], data)}
    found |= read_objects(store, listed.keys() - found.keys(), url)
    for key, item in listed.items():
        if key not in found:
            raise MissingChunkError(f"{redact(url)}: {key} is gone; verify, then rebuild")
        if not _is(item, found[key]):
            raise CorruptChunkError(f"{redact(url)}: {key} is not what was published; verify, then rebuild")
    if kept is not None and group is not None:
        kept.keep(group, found[_GROUP])
    return found


def _is(item: ObjectRecord, data: bytes) -> bool:
    return records.crc32c(data) == item.crc32c


def metadata_from_cache(url: str, kept: CachedMetadata, why: str) -> tuple[Manifest, DescribedStore] | None:
    """The manifest and metadata of a store that cannot be reached, as they were last read; None where none are kept.

    Raises:
        UnreachableStoreError: when some of them are not kept any more.
    """
    data = kept.manifest
    if data is None:
        return None
    manifest, store = Manifest.load(data, redact(url)), UnreachableStore(url, why)
    return manifest, DescribedStore(store, published(store, url, manifest, {}, kept))


class UnreachableStore(MemoryStore):
    """In place of a store that cannot be reached: nothing is read of it, only what a cache holds.

    Args:
        url: Where it would be.
        why: What went wrong when it was opened.
    """

    def __init__(self, url: str, why: str) -> None:
        super().__init__(read_only=True)
        self._url, self._why = url, why

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        del prototype, byte_range
        raise self._error(key)

    async def exists(self, key: str) -> bool:
        raise self._error(key)

    async def getsize(self, key: str) -> int:
        raise self._error(key)

    def _error(self, key: str) -> UnreachableStoreError:
        return UnreachableStoreError(
            f"{redact(self._url)}: {key} is not in the cache, and the store could not be reached ({self._why}); "
            "connect, or fill the cache with kit.data.prefetch(config) while there is a connection"
        )


class CachedMetadata:
    """What a read cache holds of the metadata of one store, if kit built it."""

    def __init__(self, entries: Entries, url: str) -> None:
        self._entries, self._url = entries, redact(url)
        self._mark = name_of(self._url, records.MANIFEST_KEY, "kit")
        self._last = name_of(self._url, records.MANIFEST_KEY, "last")

    @property
    def built_by_kit(self) -> bool:
        """Whether kit had built the store when its metadata were last read."""
        return self._entries.holds(self._mark, WHOLE)

    @property
    def manifest(self) -> bytes | None:
        """The last that was read; None where it is not kept, or is damaged."""
        kept = self._entries.get(self._last)
        with contextlib.suppress(zlib.error):
            return None if kept is None else zlib.decompress(kept.tobytes())
        return None

    def keep_manifest(self, data: bytes) -> None:
        """Find it from now on, in place of the one before."""
        this = (0, records.crc32c(data))
        if not self._entries.holds(self._last, this):
            self._entries.drop(self._last)
            self._entries.put(self._last, [(WHOLE, octets(zlib.compress(data, 1))), (this, octets(b""))])

    def forget_manifest(self) -> None:
        """Of a store that has none any more."""
        if self._entries.holds(self._last, WHOLE):
            self._entries.drop(self._last)

    def find(self, item: ObjectRecord) -> bytes | None:
        """An object as the manifest tells it; None where it is not kept, or is damaged."""
        kept = self._entries.get(self._name(item))
        if kept is None:
            return None
        with contextlib.suppress(zlib.error):
            data = zlib.decompress(kept.tobytes())
            return data if _is(item, data) else None
        return None

    def keep(self, item: ObjectRecord, data: bytes) -> None:
        """Find it from now on."""
        self._entries.put(self._name(item), [(WHOLE, octets(zlib.compress(data)))])  # text, of a few kilobytes
        self._entries.put(self._mark, [(WHOLE, octets(b"kit"))])

    def _name(self, item: ObjectRecord) -> str:
        return name_of(self._url, item.key, f"{item.identity}-zlib")


class DescribedStore(PrefixStore):
    """A store of whose metadata some is known; what else is read of it is remembered.

    Args:
        store: Where everything else lies.
        documents: What is known.
        folders: Groups of whose metadata all is known, beside those that documents are of.
        kept: Where objects are looked for before they are read, and kept then.
        listed: Those objects.
    """

    def __init__(
        self,
        store: Store,
        documents: Documents,
        folders: Iterable[str] = (),
        kept: CachedMetadata | None = None,
        listed: Mapping[str, ObjectRecord] | None = None,
    ) -> None:
        super().__init__(store, "")
        self._documents, self._kept, self._listed = documents, kept, listed or {}
        self._folders = {*folders, *map(_folder, documents)}
        self._met: dict[str, bytes] = {}

    def _with_store(self, store: Store) -> Self:
        other = type(self)(store, self._documents, self._folders, self._kept, self._listed)
        other._met = self._met
        return other

    def documents_of(self, names: Iterable[str]) -> dict[str, bytes]:
        """The metadata of these arrays, as far as it is known."""
        folders = {*names}
        return {key: data for key, data in {**self._met, **self._documents}.items() if _folder(key) in folders}

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if key.rpartition("/")[2] not in NAMES or byte_range is not None:
            if key in self._listed and self._kept is not None and byte_range is None:
                return await self._get_listed(self._listed[key], self._kept, prototype)
            return await super().get(key, prototype, byte_range)
        if _folder(key) in self._folders:
            known = self._documents.get(key)
            return None if known is None else prototype.buffer.from_bytes(known)
        found = await super().get(key, prototype)
        if found is not None:
            self._met[key] = found.to_bytes()
        return found

    async def _get_listed(self, item: ObjectRecord, kept: CachedMetadata, prototype: BufferPrototype) -> Buffer | None:
        data = await asyncio.to_thread(kept.find, item)
        if data is not None:
            return prototype.buffer.from_bytes(data)
        found = await super().get(item.key, prototype)
        if found is not None and _is(item, raw := found.to_bytes()):
            await asyncio.to_thread(kept.keep, item, raw)
        return found


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
