"""Requests for chunks: which client reads which store, and how a reader sends its requests.

An object store at a known address is read by libcurl (`HttpClient`); a local folder by threads that each wait for a
response (`ThreadClient`); any other store on its event loop (`AsyncClient`). All
give bytes, or None where there is no such object, or a StoreError without secrets; all retry by one policy
(`kit.data.stores.retry`), count every request, and give up one that has no response in time.

A shard's index is fetched once, whoever needs it, and before the chunks that wait already; then each run of neighbours
is one request. A request whose chunks nobody wants any more is dropped when its turn comes; one that finds no memory
holds up those behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import _get_loop
from zarr.storage import LocalStore

from kit.chunks.requests import Run
from kit.data.dataset import XarrayStore
from kit.data.joined import JoinedStore
from kit.data.stores.auth import address_of
from kit.data.stores.fsspec import RemoteStore
from kit.data.stores.http import Client, Get, HttpClient
from kit.data.stores.local import Folder
from kit.data.stores.retry import Retries
from kit.data.stores.transfer import Counters, Octets, octets
from kit.data.stores.url import redact, store_error
from kit.data.stream.chunk_cache import Chunk, ChunkRequest
from kit.data.stream.codec import Index, ResolvedFuture, ShardIndexes, StoredArray
from kit.data.stream.memory import Reservation
from kit.data.stream.pool import ThreadPool
from kit.data.stream.receive import ReceiveQueue
from kit.errors import ConfigError, Problem, StoreError

Read = Callable[[str, int | None, int | None], Octets | None]

_CLOSE_SECONDS = 5.0
_MEMORY_PAUSE_SECONDS = 0.001
_TAGS = (
    "etag", "e_tag", "generation", "version_id", "versionid", "checksum", "crc32c", "md5", "md5hash", "content_md5",
    "sha", "sha256",
)  # fmt: skip
_TIMES = ("mtime", "last_modified", "lastmodified", "updated", "modified", "modify", "modificationtime", "created")
_MORE = ("size", "ino", "inode", "uid")
"""What tells one object from another beside its time."""


def open_client(
    store: Store,
    url: str,
    seconds: float,
    counters: Counters,
    in_flight: int,
) -> Client:
    """What reads a store.

    Args:
        seconds: How long one request may take.
        in_flight: Requests sent and not answered, at most.
    """
    if type(store) is LocalStore:
        return ThreadClient(Folder(store.root, counters).read, in_flight)
    if isinstance(store, XarrayStore):
        return ThreadClient(store.cutter.counted_by(counters).read, in_flight)
    address = address_of(store, url)
    if address is None:
        return AsyncClient(store, url, in_flight, seconds, counters)
    return HttpClient(address, url, in_flight, seconds, counters)


def is_remote(store: Store) -> bool:
    """Whether all chunks lie where fsspec reads them, so that they can be cached here."""
    return store.all_remote if isinstance(store, JoinedStore) else isinstance(store, RemoteStore)


def read_index(client: Client, stored: StoredArray, key: str, url: str) -> Index | None:
    """The index of a shard; None when there is no such shard.

    Raises:
        CorruptChunkError: when bytes are missing or fail their checksum.
    """
    data = client.read(key, *stored.index_span)
    return None if data is None else stored.decode_index(data, f"{redact(url)}: shard {key} of {stored.name}")


class ThreadClient(Client):
    """The objects that `read` gives, by threads that each wait for one; call from any thread."""

    def __init__(self, read: Read, threads: int) -> None:
        self._read = read
        self._threads = ThreadPool(threads, "kit-read")
        self._turn = threading.Lock()

    def submit(self, gets: Iterable[Get], urgent: bool = False) -> None:
        put = self._threads.put_first if urgent else self._threads.put
        for get in gets:
            put(get, self._run, get)

    def close(self) -> None:
        self._threads.close()

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        return self._read(key, first, last)

    def _run(self, get: Get) -> None:
        with self._turn:  # one thread looks for memory, the others wait for it
            while (begun := get.begin()) is None:
                time.sleep(_MEMORY_PAUSE_SECONDS)
        if begun:
            get.done(self._read(get.key, get.first, get.last))


class AsyncClient(Client):
    """The objects of any zarr store, read by tasks of the event loop that zarr's stores share; call from any thread."""

    def __init__(self, store: Store, url: str, in_flight: int, seconds: float, counters: Counters) -> None:
        self._store, self._url, self._in_flight = store, url, in_flight
        self._seconds, self._counters = seconds, counters
        remote = store.remote if isinstance(store, JoinedStore) else (store,)
        for one in remote:
            if isinstance(one, RemoteStore):
                one.retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))
        self._loop = _get_loop()
        self._closed = False
        self._waiting: deque[Get] = deque()
        self._running: dict[asyncio.Task[None], Get] = {}
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, gets: Iterable[Get], urgent: bool = False) -> None:
        if self._closed:
            raise StoreError(f"{redact(self._url)}: its reader is closed")
        (self._waiting.extendleft if urgent else self._waiting.extend)(gets)
        self._loop.call_soon_threadsafe(self._start)

    def cancel_unwanted(self) -> None:
        def cancel() -> None:
            for task, get in [*self._running.items()]:
                if not get.wanted:
                    task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def close(self) -> None:
        self._closed = True
        if self._loop.is_closed():  # with the process
            return

        async def cancel() -> None:
            tasks = [*self._running]
            for task in tasks:
                task.cancel()
            while self._waiting:
                get = self._waiting.popleft()
                self._fail(get, StoreError(f"{redact(self._url)}: closed before {get.key} was read"))
            await asyncio.gather(*tasks, return_exceptions=True)

        cancelled = asyncio.run_coroutine_threadsafe(cancel(), self._loop)
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:  # collected on the loop itself, which must not wait
                return
        with contextlib.suppress(TimeoutError):
            cancelled.result(_CLOSE_SECONDS)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._running) < self._in_flight:
            get = self._waiting.popleft()
            try:
                begun = get.begin()
            except BaseException as error:
                self._fail(get, error)
                continue
            if begun is None:
                self._waiting.appendleft(get)
                self._timer = self._loop.call_later(_MEMORY_PAUSE_SECONDS, self._start)
                return
            if begun:
                task = self._loop.create_task(self._respond(get))
                self._running[task] = get
                task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        get = self._running.pop(task)
        if task.cancelled():  # before it began
            self._fail(get, StoreError(f"{redact(self._url)}: cancelled before {get.key} was read"))
        self._start()

    async def _respond(self, get: Get) -> None:
        try:
            data = await self._get(get)
        except TimeoutError:
            late = f"no answer for {get.key} within {self._seconds:g} s; check the network"
            self._fail(get, StoreError(f"{redact(self._url)}: {late}"))
        except ConfigError as error:
            self._fail(get, error)
        except BaseException as error:
            self._fail(get, store_error(self._url, error))  # the text of the library may carry a secret
        else:
            self._pass_on(get, data)

    async def _get(self, get: Get) -> Octets | None:
        async with asyncio.timeout(self._seconds):
            if get.head:
                return await self._identity(get.key)
            span: ByteRequest | None = None
            if get.first is not None:
                span = SuffixByteRequest(-get.first) if get.last is None else RangeByteRequest(get.first, get.last)
            data = await self._store.get(get.key, default_buffer_prototype(), span)
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return None if data is None else data.as_numpy_array()

    async def _identity(self, key: str) -> Octets | None:
        assert isinstance(self._store, RemoteStore | JoinedStore), "only what fsspec reads is cached"
        self._counters.add(requests=1)
        info = await self._store.info(key)
        if info is None:
            return None
        identity = identity_of(info)
        if identity is None:
            scheme, where = self._url.partition("://")[0], redact(self._url)
            message = (
                f"is set, but {scheme}:// gives neither tag nor time of {key} in {where}, so that old bytes could be "
                "served for new ones; set it to 0"
            )
            raise ConfigError([Problem("cache.size_bytes", message)])
        return octets(identity.encode())


def identity_of(info: Mapping[str, Any]) -> str | None:
    """What of an fsspec `info` changes when the object does; None when nothing does for certain."""
    given = {str(name).lower(): value for name, value in info.items() if value not in (None, "")}
    sure = [name for name in (*_TAGS, *_TIMES) if name in given]
    return repr([(name, str(given[name])) for name in (*sure, *_MORE) if name in given]) if sure else None


class Requests:
    """The requests of one reader to its client."""

    def __init__(self, client: Client, url: str, queue: ReceiveQueue) -> None:
        self._client, self._url, self._queue = client, url, queue

    def submit(self, requests: Iterable[ChunkRequest]) -> None:
        """Request objects, or the runs of chunks in shards.

        Raises:
            StoreError: when the client is closed.
        """
        whole: list[Get] = []
        for request in requests:
            if request.stored.per_shard is None:
                whole.append(GetChunks(self._queue, request, None))
                continue
            future, mine = self._queue.indexes.claim(request.key)
            if mine:
                self._client.submit([GetIndex(self._queue.indexes, request, self._url)], urgent=True)
            future.add_done_callback(partial(self._submit_runs, request))
        self._client.submit(whole)

    def cancel_unwanted(self) -> None:
        """Cancel requests whose chunks nobody wants any more, where the client can."""
        self._client.cancel_unwanted()

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def _submit_runs(self, request: ChunkRequest, index: Future[Index | None] | ResolvedFuture[Index | None]) -> None:
        wanted = request.part(self._queue.cache.still_wanted(request.chunks))
        try:
            runs = self._queue.runs(self._queue.places(wanted, index.result()))
            parts = [request.part(chunk for _, _, chunk in run.items) for run in runs]
            self._client.submit(map(partial(GetChunks, self._queue), parts, runs))
        except BaseException as error:
            request.fail(error)


class GetChunks(Get):
    """Get of one object, or of neighbours in a shard."""

    __slots__ = ("_queue", "_request", "_reservation", "_run")
    at_once = False
    """Whether the thread that has read decodes too."""

    def __init__(self, queue: ReceiveQueue, request: ChunkRequest, run: Run[Chunk] | None) -> None:
        super().__init__(request.key, *((None, None) if run is None else (run.first, run.last)))
        self._queue, self._request, self._run = queue, request, run
        self._reservation: Reservation | None = None

    @property
    def wanted(self) -> bool:
        chunks = self._request.chunks
        return any(chunk.wanted for chunk in chunks) or bool(self._queue.cache.still_wanted(chunks))

    def begin(self) -> bool | None:
        if self._reservation is None:  # else this is a retry
            if not self._queue.cache.still_wanted(self._request.chunks):
                return False
            self._reservation = self._queue.budget.try_take(self._queue.response_bytes(self._request, self._run))
        return True if self._reservation is not None else None

    def done(self, data: Octets | None) -> None:
        reservation, self._reservation = self._reservation, None  # from here on it belongs to the response
        assert reservation is not None
        self._queue.on_response(self._request, self._run, data, reservation, self.at_once)

    def fail(self, error: BaseException) -> None:
        if self._reservation is not None:
            self._reservation.done()
            self._reservation = None
        self._request.fail(error)


class GetIndex(Get):
    """Get of the index of a shard."""

    __slots__ = ("_indexes", "_request", "_url")

    def __init__(self, indexes: ShardIndexes, request: ChunkRequest, url: str) -> None:
        super().__init__(request.key, *request.stored.index_span)
        self._indexes, self._request, self._url = indexes, request, url

    def done(self, data: Octets | None) -> None:
        stored, where = self._request.stored, f"{redact(self._url)}: shard {self.key} of {self._request.stored.name}"
        self._indexes.give(self.key, None if data is None else stored.decode_index(data, where))

    def fail(self, error: BaseException) -> None:
        self._indexes.give(self.key, error)
