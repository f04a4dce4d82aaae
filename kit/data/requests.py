"""Requests: the seam between a reader and the store it reads, one way for each kind of store.

An object store whose address is known is read by a wire, which a thread may wait for too; a folder, and whatever is to
be cached, by threads that wait (`Blocking`); anything else by fsspec or another zarr store, on the loop that runs it
(`Requests`). All give the same: bytes, or None
where there is no such object, or a StoreError without secrets; what passes is tried again by one policy
(`kit.data.retries`) and counted, and a request without an answer is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from kit.data.addresses import address_of
from kit.data.codec import Index, StoredArray, decode_index
from kit.data.counters import Counters
from kit.data.disk_cache import CachedReads, ReadCache
from kit.data.file_system import open_file_system
from kit.data.folder import Folder
from kit.data.indexes import ShardIndexes
from kit.data.octets import Octets
from kit.data.remote import RemoteStore
from kit.data.retries import Retries
from kit.data.stores import redact, store_error
from kit.data.wire import Wire
from kit.data.xarray_dataset import XarrayStore
from kit.errors import KitError, StoreError


class Blocking(Protocol):
    """A store that threads read, each waiting for its answer."""

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object."""


def open_blocking(
    store: Store,
    url: str,
    seconds: float,
    counters: Counters,
    in_flight: int,
    cache: ReadCache | None = None,
    known: Mapping[str, str] | None = None,
) -> Blocking | None:
    """The store for threads; None when only a loop can read it.

    Args:
        in_flight: Requests sent and not answered, at most.
        cache: Keeps what an object store gives.
        known: Which objects there are, where a manifest tells; else each is asked for.
    """
    if type(store) is LocalStore:
        return Folder(store.root, counters)
    if isinstance(store, XarrayStore):
        return store.cutter.counted_by(counters)
    address = address_of(store, url)
    wire = None if address is None else Wire(address, url, in_flight, seconds, counters)
    if cache is None:
        return wire
    blocking = wire or open_file_system(store, url, seconds, counters)
    if blocking is None:
        return None
    return CachedReads(
        blocking.read, redact(url), cache.open(), blocking.identity if known is None else known.get, counters
    )


def read_index(source: Blocking, stored: StoredArray, key: str, url: str) -> Index | None:
    """The index of a shard; None when there is no such shard.

    Raises:
        CorruptChunkError: when bytes are missing or fail their checksum.
    """
    first, last = stored.index_span
    data = source.read(key, first, last)
    return None if data is None else decode_index(stored, key, data, url)


class Requests:
    """A store as seen from one event loop, at most so many requests at once; every method runs on the loop."""

    def __init__(
        self,
        store: Store,
        url: str,
        in_flight: int,
        seconds: float,
        counters: Counters,
    ) -> None:
        self._store = store
        self._url = url
        self._seconds = seconds
        self._counters = counters
        if isinstance(store, RemoteStore):
            store.retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))
        self._slots = asyncio.Semaphore(in_flight)
        self._fetching: set[asyncio.Task[None]] = set()

    async def open_arrays(self, names: Iterable[str]) -> tuple[StoredArray, ...]:
        """How each array is stored, by its metadata."""
        try:
            async with asyncio.timeout(self._seconds):
                return tuple(await asyncio.gather(*(StoredArray.open(self._store, name) for name in names)))
        except KitError:
            raise
        except TimeoutError:
            raise self._late("") from None
        except Exception as error:
            raise store_error(self._url, error) from None

    async def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """As `Blocking.read`, by one request."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._seconds):
                    data = await self._store.get(key, default_buffer_prototype(), _span(first, last))
            except TimeoutError:
                raise self._late(f" for {key}") from None
            except Exception as error:
                raise store_error(self._url, error) from None  # its text may carry a secret; this one's does not
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return None if data is None else data.as_numpy_array()

    async def index(self, indexes: ShardIndexes, stored: StoredArray, key: str) -> Index | None:
        """The index of a shard, fetched once whoever asks, and however soon who asked first gives up."""
        future, mine = indexes.claim(key)
        if mine:
            task = asyncio.create_task(self._give_index(indexes, stored, key))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def close(self) -> None:
        """Close the connections on the loop they belong to, which fsspec leaves to its user."""
        if isinstance(self._store, RemoteStore):
            await self._store.close_client()
        self._store.close()

    async def _give_index(self, indexes: ShardIndexes, stored: StoredArray, key: str) -> None:
        try:
            data = await self.read(key, *stored.index_span)
            indexes.give(key, None if data is None else decode_index(stored, key, data, self._url))
        except BaseException as error:
            indexes.give(key, error)
            if not isinstance(error, Exception):
                raise

    def _late(self, request: str) -> StoreError:
        return StoreError(f"{redact(self._url)}: no answer{request} within {self._seconds:g} s; check the network")


def _span(first: int | None, last: int | None) -> ByteRequest | None:
    if first is None:
        return None
    return SuffixByteRequest(-first) if first < 0 or last is None else RangeByteRequest(first, last)
