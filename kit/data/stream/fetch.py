"""Requests for chunks: which client reads which store, and how a reader sends its requests.

An object store at a known address is read by libcurl (`HttpClient`); a local folder by threads that each wait for a
response (`ThreadClient`); any other store on its event loop (`AsyncClient`). Of stores that are joined, all those of a
kind have one client, and so one queue; that over HTTP has a queue and a limit for each host. All give bytes, or None
where there is no such object, or a StoreError without secrets; all retry by one policy (`kit.data.stores.transfer`),
count every request, and give up one that has no response in time.

A shard's index is fetched once, whoever needs it, and before the chunks that wait already; then each run of neighbours
is one request. A request whose chunks nobody wants any more is dropped when its turn comes; one that finds no memory
holds up those behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from kit.data.stores.auth import Address, address_of
from kit.data.stores.counters import Counters
from kit.data.stores.foreign import PrefixStore
from kit.data.stores.fsspec import RemoteStore
from kit.data.stores.http import Client, Get, HttpClient
from kit.data.stores.local import Folder
from kit.data.stores.metadata import DescribedStore, UnreachableStore
from kit.data.stores.transfer import Octets, Retries, octets
from kit.data.stores.url import redact, store_error
from kit.data.stream.chunk_cache import Chunk, ChunkRequest
from kit.data.stream.codec import Index, ResolvedFuture, ShardIndexes, StoredArray
from kit.data.stream.memory import Reservation
from kit.data.stream.pool import ThreadPool
from kit.data.stream.receive import ReceiveQueue
from kit.errors import ConfigError, Problem, StoreError

Read = Callable[[str, int | None, int | None], Octets | None]

_CLOSE_SECONDS = 5.0
_THREADS_BESIDE = 8
"""That read what lies on this machine, where other stores are read beside it."""
_MEMORY_PAUSE_SECONDS = 0.001
_TAGS = (
    "etag", "e_tag", "generation", "version_id", "versionid", "checksum", "crc32c", "md5", "md5hash", "content_md5",
    "sha", "sha256",
)  # fmt: skip
_TIMES = ("mtime", "last_modified", "lastmodified", "updated", "modified", "modify", "modificationtime", "created")
_MORE = ("size", "ino", "inode", "uid")
"""What tells one object from another beside its time."""


def open_client(store: Store, url: str, seconds: float, counters: Counters, in_flight: int) -> Client:
    """What reads a store.

    Args:
        seconds: How long one request may take.
        in_flight: Requests sent and not answered, at most.
    """
    while type(store) is DescribedStore:  # whose chunks have the same keys
        store = store.behind("")[0]
    reads: dict[int, Read] = {}
    addresses: dict[int, Address] = {}
    others = False
    for one, there in leaves(store, url):
        address = address_of(one, there)
        if type(one) is LocalStore:
            reads[id(one)] = Folder(one.root, counters).read
        elif isinstance(one, XarrayStore):
            reads[id(one)] = one.cutter.counted_by(counters).read
        elif address is not None:
            addresses[id(one)] = address
        else:
            others = True

    def read(key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        one, there = leaf(store, key)
        return reads[id(one)](there, first, last)

    def find(key: str) -> tuple[Address, str]:
        one, there = leaf(store, key)
        return addresses[id(one)], there

    kinds = bool(reads) + bool(addresses) + others
    remote = in_flight if kinds == 1 else max(1, in_flight // (bool(addresses) + others or 1))
    made: list[tuple[Iterable[int], Client]] = []
    if reads:
        one_read = reads.get(id(store), read)
        made.append((reads, ThreadClient(one_read, in_flight if kinds == 1 else min(in_flight, _THREADS_BESIDE))))
    if addresses:
        made.append((addresses, HttpClient(addresses.get(id(store), find), url, remote, seconds, counters)))
    if others:
        made.append(((), AsyncClient(store, url, remote, seconds, counters)))
    return made[0][1] if kinds == 1 else EachItsOwn(store, made)


def leaf(store: Store, key: str) -> tuple[Store, str]:
    """The store that holds an object itself, behind those that show others; and its key there."""
    while isinstance(store, JoinedStore | PrefixStore):
        found = store.behind(key)
        if found is None:
            break
        store, key = found[0], found[-1]
    return store, key


def leaves(store: Store, url: str) -> list[tuple[Store, str]]:
    """The stores that hold objects themselves, with their URLs."""
    if isinstance(store, JoinedStore):
        return [one for held in store.held for one in leaves(*held)]
    return leaves(store.behind("")[0], url) if isinstance(store, PrefixStore) else [(store, url)]


def is_local(store: Store) -> bool:
    """Whether all objects lie in folders of this machine."""
    return all(type(one) is LocalStore for one, _ in leaves(store, ""))


def is_remote(store: Store, key: str | None = None) -> bool:
    """Whether an object, or any, lies where fsspec reads it, so that it can be cached here."""
    held = [one for one, _ in leaves(store, "")] if key is None else [leaf(store, key)[0]]
    return any(isinstance(one, RemoteStore | UnreachableStore) for one in held)


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


class EachItsOwn(Client):
    """The objects of stores of several kinds, each by a client for its kind; call from any thread.

    Args:
        store: That joins them.
        clients: Each with the stores that it reads, by `id`; the last one reads the rest.
    """

    def __init__(self, store: Store, clients: Sequence[tuple[Iterable[int], Client]]) -> None:
        self._store, self._clients = store, [client for _, client in clients]
        self._of_store = {one: client for stores, client in clients for one in stores}

    def submit(self, gets: Iterable[Get], urgent: bool = False) -> None:
        each: defaultdict[Client, list[Get]] = defaultdict(list)
        for get in gets:
            each[self._of(get.key)].append(get)
        for client, some in each.items():
            client.submit(some, urgent)

    def cancel_unwanted(self) -> None:
        for client in self._clients:
            client.cancel_unwanted()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        return self._of(key).read(key, first, last)

    @property
    def open_requests(self) -> tuple[int, str] | None:
        """Of the client over HTTP, where there is one."""
        return next((client.open_requests for client in self._clients if isinstance(client, HttpClient)), None)

    def _of(self, key: str) -> Client:
        return self._of_store.get(id(leaf(self._store, key)[0]), self._clients[-1])


class AsyncClient(Client):
    """The objects of any zarr store, read by tasks of the event loop that zarr's stores share; call from any thread."""

    def __init__(self, store: Store, url: str, in_flight: int, seconds: float, counters: Counters) -> None:
        self._store, self._url, self._in_flight = store, url, in_flight
        self._seconds, self._counters = seconds, counters
        for one, _ in leaves(store, url):
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
        store, there = leaf(self._store, key)
        assert isinstance(store, RemoteStore), "only what fsspec reads is cached"
        self._counters.add(requests=1)
        info = await store.info(there)
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


def size_in(identity: str) -> int | None:
    """The size of an object, where its identity tells it."""
    found = re.search(r"\('size', '(\d+)'\)|'(\d+)'\]$", identity)
    return None if found is None else int(found[1] or found[2])


class Requests:
    """The requests of one reader to its client."""

    def __init__(self, client: Client, url: str, queue: ReceiveQueue) -> None:
        self._client, self._url, self._queue = client, url, queue

    def submit(self, requests: Iterable[ChunkRequest]) -> None:
        """Request objects, or the runs of chunks in shards.

        Raises:
            StoreError: when the client is closed.
        """
        gets: list[Get] = []
        for request in requests:
            if request.stored.per_shard is None:
                gets.append(GetChunks(self._queue, request, None))
                continue
            future, mine = self._queue.indexes.claim(request.key)
            if mine:
                self._client.submit([GetIndex(self._queue.indexes, request, self._url)], urgent=True)
            if isinstance(future, ResolvedFuture):
                gets += self._runs(request, future)
            else:
                future.add_done_callback(partial(self._submit_late, request))
        if gets:
            self._client.submit(gets)

    def cancel_unwanted(self) -> None:
        """Cancel requests whose chunks nobody wants any more, where the client can."""
        self._client.cancel_unwanted()

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def _submit_late(self, request: ChunkRequest, index: Future[Index | None]) -> None:
        """The index has come, and some chunks may not be wanted any more."""
        wanted = request.part(self._queue.cache.still_wanted(request.chunks))
        try:
            self._client.submit(self._runs(wanted, index))
        except StoreError as error:
            wanted.fail(error)

    def _runs(self, request: ChunkRequest, index: Future[Index | None] | ResolvedFuture[Index | None]) -> list[Get]:
        """A request for each run of neighbours; none, where the index could not be read."""
        try:
            runs = self._queue.runs(self._queue.places(request, index.result()))
            return [GetChunks(self._queue, request.part(chunk for _, _, chunk in run.items), run) for run in runs]
        except BaseException as error:
            request.fail(error)
            return []


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
            for chunk in self._request.chunks:
                if chunk.wanted:
                    break
            else:
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
