"""CachedRequests: the requests of a reader to a remote store, of which a cache answers those for what it holds.

What is looked up is a chunk or the index of a shard, never a request: so it is found in whatever order and company it
is wanted again. Chunks that are not there are requested as ever, neighbours together; what such a request brings, also
between the chunks that were wanted, is kept chunk by chunk before any of it is decoded. So whoever has had a batch
finds its chunks kept. Reading the cache takes hardly any time: the threads that do it decode as well.

Threads that look up and keep wait for no memory, and those that read kept chunks wait for no other thread, so none
waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from kit.chunks.requests import Run
from kit.data.dataset import Dataset
from kit.data.stores.counters import Counters
from kit.data.stores.disk_cache import WHOLE, Entries, Part, name_of
from kit.data.stores.http import Client, Get
from kit.data.stores.manifest import ObjectRecord
from kit.data.stores.transfer import Octets
from kit.data.stores.url import redact
from kit.data.stream.chunk_cache import Chunk, ChunkRequest
from kit.data.stream.codec import ABSENT, FetchOnceCache, Index, ResolvedFuture
from kit.data.stream.fetch import GetChunks, GetIndex, Requests, ThreadClient, size_in
from kit.data.stream.pool import ThreadPool
from kit.data.stream.receive import ReceiveQueue
from kit.errors import CorruptChunkError, warn_caller

_LOOKING_UP = 4
"""Threads that look up and keep."""


class CachedRequests(Requests):
    """The requests of one reader to its client or its cache; call from any thread.

    Args:
        names: Under which each object is kept.
        threads: Read kept chunks, and decode them.
    """

    def __init__(
        self,
        client: Client,
        url: str,
        queue: ReceiveQueue,
        entries: Entries,
        names: ObjectNames,
        counters: Counters,
        threads: int,
    ) -> None:
        super().__init__(client, url, queue)
        self.entries, self.counters = entries, counters
        self.threads = ThreadPool(_LOOKING_UP, "kit-cache")
        self._kept = ThreadClient(entries.get, threads)
        self._names = names

    def submit(self, requests: Iterable[ChunkRequest]) -> None:
        for request in requests:
            self._names.claim(request.key).add_done_callback(partial(self._named, request))

    def close(self) -> None:
        self.threads.close()
        super().close()
        self._kept.close()

    def _named(self, request: ChunkRequest, found: Future[str | None] | ResolvedFuture[str | None]) -> None:
        try:
            name = found.result()
            if name is None:
                self._queue.places(request, None)
            elif not name:  # nothing to keep it under
                super().submit([request])
            else:
                self.threads.put(request, self._look_up, request, name)
        except BaseException as error:
            request.fail(error)

    def _look_up(self, request: ChunkRequest, name: str) -> None:
        stored, key = request.stored, request.key
        if stored.per_shard is None:
            held = self.entries.holds(name, WHOLE)
            self.counters.add(read_cache_misses=not held)
            if held:
                request.chunks[0].arrived = True
                self._kept.submit([_GetKept(self, name, request, None, None)])
            else:
                self.request(name, request, None, None)
            return
        index, mine = self._queue.indexes.claim(key)
        if mine:
            self._find_index(request, name)
        index.add_done_callback(lambda index: self.threads.put(request, self._look_up_chunks, request, name, index))

    def _find_index(self, request: ChunkRequest, name: str) -> None:
        """Take a shard's index from the cache, or request it."""
        get, kept = _GetAndKeepIndex(self, name, request, self._url), None
        try:
            kept = self.entries.get(name, *request.stored.index_span)
            if kept is not None:
                GetIndex.done(get, kept)
                self.counters.add(read_cache_hits=1, read_cache_bytes=len(kept))
        except CorruptChunkError:
            kept = None
        except BaseException as error:
            get.fail(error)
            return
        if kept is None:
            self.counters.add(read_cache_misses=1)
            self._client.submit([get], urgent=True)

    def _look_up_chunks(self, request: ChunkRequest, name: str, found: Future[Index | None]) -> None:
        wanted, index = request.part(self._queue.cache.still_wanted(request.chunks)), found.result()
        places = self._queue.places(wanted, index)
        held = [place for place in places if self.entries.holds(name, (place[0], place[1]))]
        there = {id(place[2]) for place in held}
        for _, _, chunk in held:
            chunk.arrived = True
        missing = [place for place in places if id(place[2]) not in there]
        self.counters.add(read_cache_misses=len(missing))
        for run in self._queue.runs(missing):
            self.request(name, request.part(chunk for _, _, chunk in run.items), run, index)
        self._kept.submit(
            _GetKept(self, name, request.part([place[2]]), Run(place[0], place[1], [place]), index) for place in held
        )

    def request(self, name: str, request: ChunkRequest, run: Run[Chunk] | None, index: Index | None) -> None:
        """Request an object or a run of chunks, to be kept."""
        self._client.submit([_GetAndKeep(self, name, request, run, index)])


class _GetAndKeep(GetChunks):
    """Get of what is kept before it is decoded."""

    __slots__ = ("_index", "_name", "_requests")

    def __init__(
        self, requests: CachedRequests, name: str, request: ChunkRequest, run: Run[Chunk] | None, index: Index | None
    ) -> None:
        super().__init__(requests._queue, request, run)
        self._requests, self._name, self._index = requests, name, index

    def done(self, data: Octets | None) -> None:
        if data is None:
            super().done(None)
        else:
            self._requests.threads.put(self._request, self._keep, data)

    def _keep(self, data: Octets) -> None:
        self._requests.entries.put(self._name, [*self._parts(data)])
        super().done(data)

    def _parts(self, data: Octets) -> Iterable[Part]:
        """What of the response is worth keeping: whole chunks, wanted or not."""
        run = self._run
        if run is None:
            return [(WHOLE, data)]
        if len(data) != run.last - run.first:
            return []
        spans: Iterable[Any] = ((first, last) for first, last, _ in run.items)
        if run.wasted_bytes > 0 and self._index is not None:
            all_of_them = self._index.reshape(-1, 2)
            firsts, counts = all_of_them[:, 0], all_of_them[:, 1]
            inside = all_of_them[(counts != ABSENT) & (firsts >= run.first) & (firsts < run.last)].astype(np.int64)
            spans = ((first, first + count) for first, count in inside.tolist() if first + count <= run.last)
        return [((first, last), data[first - run.first : last - run.first]) for first, last in spans]


class _GetKept(_GetAndKeep):
    """Get of a chunk from the cache; from the store, where it is not there any more."""

    __slots__ = ()
    at_once = True

    def __init__(
        self, requests: CachedRequests, name: str, request: ChunkRequest, run: Run[Chunk] | None, index: Index | None
    ) -> None:
        super().__init__(requests, name, request, run, index)
        self.key = name

    def done(self, data: Octets | None) -> None:
        if data is None:
            self._requests.counters.add(read_cache_misses=1)
            reservation, self._reservation = self._reservation, None
            assert reservation is not None
            reservation.done()
            self._requests.request(self._name, self._request, self._run, self._index)
            return
        self._requests.counters.add(read_cache_hits=1, read_cache_bytes=len(data))
        GetChunks.done(self, data)


class _GetAndKeepIndex(GetIndex):
    """Get of a shard's index, which is kept where it is whole."""

    __slots__ = ("_name", "_requests")

    def __init__(self, requests: CachedRequests, name: str, request: ChunkRequest, url: str) -> None:
        super().__init__(requests._queue.indexes, request, url)
        self._requests, self._name = requests, name

    def done(self, data: Octets | None) -> None:
        if data is None:
            super().done(None)
        else:
            self._requests.threads.put(self, self._keep, data)

    def _keep(self, data: Octets) -> None:
        self._request.stored.decode_index(data, self.key)
        self._requests.entries.put(self._name, [(self._request.stored.index_span, data)])
        super().done(data)


class KnownObjects:
    """What the manifests of a dataset, or of those that it joins, tell of its objects."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._stores: dict[int, tuple[str, dict[str, ObjectRecord] | None]] = {}
        """URL and objects of each store, by the dataset of it."""

    def find(self, key: str) -> tuple[str, str, Mapping[str, ObjectRecord] | None]:
        """The URL of the store that holds an object, its key there, and what that has; None where nothing tells."""
        dataset, there = self._dataset.locate(key)
        known = self._stores.get(id(dataset))
        if known is None:
            objects = None if dataset.manifest is None else {item.key: item for item in dataset.manifest.objects}
            known = self._stores[id(dataset)] = redact(dataset.url), objects
        return known[0], there, known[1]

    def name(self, key: str) -> str | None:
        """Under which a listed object is kept; None for any other."""
        url, there, records = self.find(key)
        if records is None or there not in records:
            return None
        return name_of(url, there, records[there].identity)


class ObjectNames:
    """Under which name each object is kept: that of the store that it lies in, joined with others or not.

    Call from any thread. Where no manifest tells which object a key names now, the store is asked, once for each of
    the last that `names` keeps; so is one that is not there. A store that gives no tag by which a new object would show
    is read without a cache, and a warning says so once.

    Args:
        is_kept: Whether an object is to be kept at all: one that lies on this machine is not.
    """

    def __init__(
        self, client: Client, dataset: Dataset, names: FetchOnceCache[str], is_kept: Callable[[str], bool]
    ) -> None:
        self._client, self._known, self._names, self._is_kept = client, KnownObjects(dataset), names, is_kept
        self._lock = threading.Lock()
        self._untagged: set[str] = set()
        self.sizes: dict[str, int] = {}
        """Bytes of the objects that the store was asked of, as far as it told."""

    def claim(self, key: str) -> Future[str | None] | ResolvedFuture[str | None]:
        """The name that is or will be known; None where there is no such object, "" where nothing names it."""
        url, _, listed = self._known.find(key)
        if listed is not None:
            return ResolvedFuture(self._known.name(key) or "")
        if url in self._untagged or not self._is_kept(key):
            return ResolvedFuture("")
        found, mine = self._names.claim(key)
        if mine:
            self._client.submit([_Identify(self, key)])
        return found

    def give(self, key: str, identity: str | BaseException | None) -> None:
        """Set the result for all that claimed the key: None for no such object, "" for one without a tag."""
        if isinstance(identity, BaseException) or not identity:
            self._names.give(key, identity, keep=identity is None)
            return
        url, there, _ = self._known.find(key)
        if (size := size_in(identity)) is not None:
            self.sizes[key] = size
        self._names.give(key, name_of(url, there, identity))

    def look_for(self, key: str) -> None:
        """Ask for a byte of what the store says is not there: some say so to every question for tags."""
        self._client.submit([_LookFor(self, key)])

    def warn_untagged(self, key: str) -> None:
        """Say, once of each store, that nothing is kept."""
        url, _, _ = self._known.find(key)
        with self._lock:
            first = url not in self._untagged
            self._untagged.add(url)
        if first:
            message = (
                f"cache.size_bytes: {url} answers with neither tag nor time, so that old bytes could be served "
                "for new ones; it is read without a cache"
            )
            warn_caller(message)


class _Identify(Get):
    """Get of what tells an object from another under the same key."""

    __slots__ = ("_names",)

    def __init__(self, names: ObjectNames, key: str) -> None:
        super().__init__(key, head=True)
        self._names = names

    def done(self, data: Octets | None) -> None:
        if data is None:
            self._names.look_for(self.key)
            return
        if not len(data):
            self._names.warn_untagged(self.key)
        self._names.give(self.key, data.tobytes().decode())

    def fail(self, error: BaseException) -> None:
        self._names.give(self.key, error)


class _LookFor(_Identify):
    """Get of the first byte of an object that may not be there."""

    __slots__ = ()

    def __init__(self, names: ObjectNames, key: str) -> None:
        Get.__init__(self, key, 0, 1)
        self._names = names

    def done(self, data: Octets | None) -> None:
        self._names.give(self.key, None if data is None else "")

    def fail(self, error: BaseException) -> None:  # noqa: ARG002 - the request for the object itself will say so
        self._names.give(self.key, "")
