"""Requests: the seam between a reader and the store it reads, one way for each kind of store.

An object store whose address is known is read by a wire, which a thread may wait for too; a folder, and whatever is to
be cached, by threads that wait (`Blocking`); anything else by fsspec or another zarr store, on the loop that runs it
(`Requests`). All give the same: bytes, or None
where there is no such object, or a StoreError without secrets; what passes is tried again by one policy
(`kit.data.stores.retry`) and counted, and a request without an answer is given up.

How a reader asks a wire for chunks: without a thread that waits, each told of its bytes where they arrive.

The index of a shard is fetched once whoever asks, before the chunks that wait already; what it says then becomes one
request for each run of neighbours. A request whose chunks nobody wants any more is dropped when its turn comes, and one
for which there is no room in memory holds up those behind it.

How a reader asks a folder, a cache or a file system for chunks: by threads, each waiting for its answer.

How a reader asks any other store for chunks: by tasks of the event loop that the store belongs to.

FileSystem: synchronous reads of any fsspec file system, for threads, so that what they gave can be cached.

It serves the schemes that a wire does not (`kit.data.stores.http`), and only where a cache is asked for: without one
the loop reads them. Which object a path names is told by what the file system itself says of it: an entity tag,
generation, version or checksum, else the time it was changed, with size and number. One that says none of these could
serve old bytes for new ones, so a cache for it is refused by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from kit.chunks.requests import Run
from kit.data.dataset import XarrayStore
from kit.data.stores.auth import address_of
from kit.data.stores.disk_cache import CachedReads, ReadCache
from kit.data.stores.fsspec import RemoteStore
from kit.data.stores.http import Get, HttpClient
from kit.data.stores.local import Folder
from kit.data.stores.retry import Retries
from kit.data.stores.transfer import Counters, Octets, octets
from kit.data.stores.url import redact, store_error
from kit.data.stream.chunk_cache import Chunk, ChunkRequest
from kit.data.stream.codec import Index, ShardIndexes, StoredArray, decode_index
from kit.data.stream.memory import Reservation
from kit.data.stream.pool import ThreadPool
from kit.data.stream.receive import ReceiveQueue
from kit.errors import ConfigError, KitError, Problem, StoreError


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
    wire = None if address is None else HttpClient(address, url, in_flight, seconds, counters)
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


class WireReads:
    """The requests of one reader."""

    def __init__(self, wire: HttpClient, url: str, intake: ReceiveQueue) -> None:
        self._wire, self._url, self._intake = wire, url, intake

    def ask(self, found: Iterable[ChunkRequest]) -> None:
        """Ask for objects, or for what is wanted of shards.

        Raises:
            StoreError: when the wire is closed.
        """
        whole: list[Get] = []
        for item in found:
            if item.stored.per_shard is None:
                whole.append(_Bytes(self._intake, item, None))
                continue
            future, mine = self._intake.indexes.claim(item.key)
            if mine:
                self._wire.ask([_IndexBytes(self._intake.indexes, item, self._url)], soon=True)
            future.add_done_callback(partial(self._ask_runs, item))
        self._wire.ask(whole)

    def give_up_unwanted(self) -> None:
        """Nothing to do: what nobody wants any more is left out when its turn comes."""

    def close(self) -> None:
        """End the connections."""
        self._wire.close()

    def _ask_runs(self, item: ChunkRequest, index: Future[Index | None]) -> None:
        wanted = item.part(self._intake.cache.still_wanted(item.chunks))
        try:
            found = self._intake.runs(wanted, index.result()) if wanted.chunks else []
            self._wire.ask([_Bytes(self._intake, item.part(chunk for _, _, chunk in run.items), run) for run in found])
        except BaseException as error:
            item.fail(error)


class _Bytes(Get):
    """One object, or neighbours in a shard."""

    __slots__ = ("_claim", "_intake", "_run", "_wanted")

    def __init__(self, intake: ReceiveQueue, wanted: ChunkRequest, run: Run[Chunk] | None) -> None:
        super().__init__(wanted.key, *(() if run is None else (run.first, run.last)))
        self._intake, self._wanted, self._run = intake, wanted, run
        self._claim: Reservation | None = None

    def begin(self) -> bool | None:
        if self._claim is None:  # else it has been sent before
            if not self._intake.cache.still_wanted(self._wanted.chunks):
                return False
            self._claim = self._intake.room.try_take(self._intake.size_of(self._wanted, self._run))
        return True if self._claim is not None else None

    def done(self, data: Octets | None) -> None:
        claim, self._claim = self._claim, None  # from here on it is the answer's
        assert claim is not None
        self._intake.deliver(self._wanted, self._run, data, claim)

    def fail(self, error: BaseException) -> None:
        if self._claim is not None:
            self._claim.done()
        self._wanted.fail(error)


class _IndexBytes(Get):
    """The index of a shard."""

    __slots__ = ("_indexes", "_url", "_wanted")

    def __init__(self, indexes: ShardIndexes, wanted: ChunkRequest, url: str) -> None:
        super().__init__(wanted.key, *wanted.stored.index_span)
        self._indexes, self._wanted, self._url = indexes, wanted, url

    def done(self, data: Octets | None) -> None:
        index = None if data is None else decode_index(self._wanted.stored, self.key, data, self._url)
        self._indexes.give(self.key, index)

    def fail(self, error: BaseException) -> None:
        self._indexes.give(self.key, error)


class ThreadReads:
    """The requests of one reader, `threads` of them at once."""

    def __init__(self, source: Blocking, url: str, intake: ReceiveQueue, threads: int) -> None:
        self._source, self._url, self._intake = source, url, intake
        self._threads = ThreadPool(threads, "kit-read")

    def ask(self, found: Iterable[ChunkRequest]) -> None:
        """Ask for objects, or for what is wanted of shards."""
        for item in found:
            self._threads.put(item, self._read_object, item)

    def give_up_unwanted(self) -> None:
        """Nothing to do: what nobody wants any more is left out when its turn comes."""

    def close(self) -> None:
        """End the threads after the requests they are at."""
        self._threads.close()

    def _read_object(self, item: ChunkRequest) -> None:
        if item.stored.per_shard is None:
            self._read_run(item, None)
            return
        wanted = item.part(self._intake.cache.still_wanted(item.chunks))
        if not wanted.chunks:
            return
        index = self._intake.indexes.get(wanted.key, lambda: self._read_index(wanted))
        for run in self._intake.runs(wanted, index)[::-1]:
            part = wanted.part(chunk for _, _, chunk in run.items)
            self._threads.put(part, self._read_run, part, run)

    def _read_index(self, wanted: ChunkRequest) -> Index | None:
        return read_index(self._source, wanted.stored, wanted.key, self._url)

    def _read_run(self, wanted: ChunkRequest, run: Run[Chunk] | None) -> None:
        if not self._intake.cache.still_wanted(wanted.chunks):
            return
        claim = self._intake.room.take(self._intake.size_of(wanted, run))
        try:
            data = self._source.read(wanted.key, *(() if run is None else (run.first, run.last)))
        except BaseException:
            claim.done()
            raise
        self._intake.deliver(wanted, run, data, claim)


_PAUSE_SECONDS = 0.001


class LoopReads:
    """The requests of one reader, on a loop that runs in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Requests, intake: ReceiveQueue) -> None:
        self._loop, self._requests, self._intake = loop, requests, intake
        self._gate = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], ChunkRequest] = {}
        self._closed = False

    def ask(self, found: Iterable[ChunkRequest]) -> None:
        """Ask for objects, or for what is wanted of shards."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._request_objects, [*found])

    def give_up_unwanted(self) -> None:
        """End requests that nobody waits for any more."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._cancel_unwanted)

    def close(self) -> None:
        """Ask for nothing more; before the loop ends."""
        self._closed = True

    def _request_objects(self, found: Sequence[ChunkRequest]) -> None:
        for item in found:
            task = self._loop.create_task(self._request_object(item))
            self._tasks[task] = item
            task.add_done_callback(self._tasks.pop)

    def _cancel_unwanted(self) -> None:
        cache = self._intake.cache
        for task, item in [*self._tasks.items()]:
            if not any(chunk.wanted for chunk in item.chunks) and not cache.still_wanted(item.chunks):
                task.cancel()

    async def _request_object(self, item: ChunkRequest) -> None:
        try:
            await self._get_object(item)
        except Exception as error:
            item.fail(error)

    async def _get_object(self, wanted: ChunkRequest) -> None:
        if wanted.stored.per_shard is None:
            await self._request_run(wanted, None)
            return
        index = await self._requests.index(self._intake.indexes, wanted.stored, wanted.key)
        found = self._intake.runs(wanted, index)
        parts = [wanted.part(chunk for _, _, chunk in run.items) for run in found]
        await asyncio.gather(*map(self._request_run, parts, found))

    async def _request_run(self, wanted: ChunkRequest, run: Run[Chunk] | None) -> None:
        claim = await self._take(self._intake.size_of(wanted, run))
        try:
            data = await self._requests.read(wanted.key, *(() if run is None else (run.first, run.last)))
        except BaseException as error:
            claim.done()
            if not isinstance(error, Exception):
                raise
            wanted.fail(error)
        else:
            self._intake.deliver(wanted, run, data, claim)

    async def _take(self, size_bytes: int) -> Reservation:
        async with self._gate:  # one task watches, the others wait for it
            while (claim := self._intake.room.try_take(size_bytes)) is None:
                await asyncio.sleep(_PAUSE_SECONDS)
            return claim


_TAGS = (
    "etag", "e_tag", "generation", "version_id", "versionid", "checksum", "crc32c", "md5", "md5hash", "content_md5",
    "sha", "sha256",
)  # fmt: skip
_TIMES = ("mtime", "last_modified", "lastmodified", "updated", "modified", "modify", "modificationtime", "created")
_MORE = ("size", "ino", "inode", "uid")
"""What tells one object from another beside its time."""


class FileSystem:
    """The objects below one folder; call from any thread."""

    def __init__(self, fs: Any, folder: str, url: str, seconds: float, counters: Counters) -> None:
        self._fs, self._folder, self._url, self._counters = fs, folder.rstrip("/"), url, counters
        self._retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        path = self._path(key)
        data = self._ask(lambda: self._fs.cat_file(path, start=first, end=last))
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return None if data is None else octets(memoryview(data))

    def identity(self, key: str) -> str | None:
        """Which object the key names now, in the file system's own words; None when there is none.

        Raises:
            ConfigError: when it says nothing that tells a new object from an old one.
            StoreError: when the store does not answer or refuses.
        """
        path = self._path(key)
        info = self._ask(lambda: self._fs.info(path))
        self._counters.add(requests=1)
        if info is None:
            return None
        identity = identity_of(info)
        if identity is None:
            raise self._no_identity(path)
        return identity

    def _no_identity(self, path: str) -> ConfigError:
        scheme, where = self._url.partition("://")[0], redact(self._url)
        message = (
            f"is set, but {scheme}:// says neither tag nor time of {path} in {where}, so that old bytes could be "
            "served for new ones; set it to 0"
        )
        return ConfigError([Problem("cache.size_bytes", message)])

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _ask(self, question: Any) -> Any:
        try:
            return self._retries.run(question)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise store_error(self._url, error) from None  # its text may carry a secret; this one's does not


def identity_of(info: Mapping[str, Any]) -> str | None:
    """What of an fsspec `info` changes when the object does; None when nothing does for certain."""
    told = {str(name).lower(): value for name, value in info.items() if value not in (None, "")}
    sure = [name for name in (*_TAGS, *_TIMES) if name in told]
    return repr([(name, str(told[name])) for name in (*sure, *_MORE) if name in told]) if sure else None


def open_file_system(store: Store, url: str, seconds: float, counters: Counters) -> FileSystem | None:
    """The store by its file system's own blocking calls; None for one that is not behind fsspec."""
    if not isinstance(store, RemoteStore):
        return None
    fs = getattr(store.fs, "sync_fs", None)  # an fsspec file system that is blocking at heart
    if fs is None:
        options = {**store.fs.storage_options, "asynchronous": False, "skip_instance_cache": True}
        fs = type(store.fs)(*store.fs.storage_args, **options)
        if hasattr(fs, "retries"):  # s3fs would try again by itself, uncounted
            fs.retries = store.fs.retries
    return FileSystem(fs, store.path, url, seconds, counters)
