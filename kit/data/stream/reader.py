"""Reader: one process's open store with its threads; it turns batches of offsets into arrays.

A batch is planned as a whole: the union of its chunks over all variables. A chunk that the cache holds, or that is on
its way for another batch, is taken from there; the rest are read, neighbours in a shard by one request, at most
`requests_in_flight` at once. Object stores are read by a wire in one thread (`kit.data.stream.fetch`), folders and
caches by threads that wait (`kit.data.stream.fetch`), other stores on one asyncio loop (`kit.data.stream.fetch`); what
they give is decoded and kept by `kit.data.stream.receive`. A reader belongs to the process that made it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kit.chunks.requests import LOCAL_GAP_BYTES, Coalescing
from kit.data.stores.disk_cache import identities
from kit.data.stores.http import HttpClient
from kit.data.stores.local import Folder
from kit.data.stores.transfer import Counters
from kit.data.stores.url import redact
from kit.data.stream.chunk_cache import BatchPart, Chunk, ChunkRequest
from kit.data.stream.codec import StoredArray
from kit.data.stream.fetch import LoopReads, Requests, ThreadReads, WireReads, open_blocking
from kit.data.stream.memory import Arrays, ReaderPlan, batch_bytes
from kit.data.stream.pool import JobGroup
from kit.data.stream.receive import ReceiveQueue
from kit.data.stream.scatter import chunk_uses, touched
from kit.errors import StoreError

_LEAST_FOLDER_THREADS = 4
_CLOSE_SECONDS = 5.0
_AMPLE_BYTES = 256 << 20
"""Memory from which on batches are planned before what waits is decoded. That keeps all of it in use, which with less
would leave nothing for what the allocator holds: of 24 MiB allowed, 26 are taken else and up to 37 so."""


class Reads(Protocol):
    """One way to ask a store; what it gives goes to the intake."""

    def ask(self, found: Iterable[ChunkRequest]) -> None:
        """Ask for objects, or for what is wanted of shards."""

    def give_up_unwanted(self) -> None:
        """End requests that nobody waits for any more."""

    def close(self) -> None:
        """Ask for nothing more."""


class Reader:
    """An open store. Call from any thread; `close` ends its threads and connections."""

    def __init__(self, plan: ReaderPlan, counters: Counters) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._plan = plan
        self._counters = counters
        self._where = redact(plan.url)
        self._lock = threading.RLock()
        self._active: dict[Future[Arrays], JobGroup[Arrays]] = {}
        self._stored: tuple[StoredArray, ...] = ()
        self._number = plan.arrays[0].dtype.newbyteorder("=") if plan.as_stored else np.dtype(np.float32)
        store = plan.open_store()
        self._requests = Requests(store, plan.url, plan.requests_in_flight, plan.request_seconds, counters)
        known = identities(plan.manifest) if plan.manifest and plan.read_cache else None
        self._source = open_blocking(
            store, plan.url, plan.request_seconds, counters, plan.requests_in_flight, plan.read_cache, known
        )
        near = isinstance(self._source, Folder)
        threads = plan.requests_in_flight
        if near:
            threads = min(threads, max(_LEAST_FOLDER_THREADS, 2 * plan.decode_threads))
        self._intake = ReceiveQueue(
            plan, counters, Coalescing(LOCAL_GAP_BYTES) if near else plan.coalescing, decode_at_once=near,
            decoding=max(threads if near else 0, plan.decode_threads),
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._reads = self._ways(threads)
        self._thread = threading.Thread(target=self._run, name="kit-loop", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def _ways(self, threads: int) -> Reads:
        """How this store is read."""
        if isinstance(self._source, HttpClient):
            return WireReads(self._source, self._plan.url, self._intake)
        if self._source is not None:
            return ThreadReads(self._source, self._plan.url, self._intake, threads)
        return LoopReads(self._loop, self._requests, self._intake)

    @property
    def open_requests(self) -> tuple[int, str]:
        """How many requests may be open now, and the reason where they are fewer than allowed."""
        if isinstance(self._source, HttpClient):
            return self._source.limit.now, self._source.limit.reason
        return self._plan.requests_in_flight, ""

    def start(self, offsets: NDArray[np.int64], patch: Sequence[int]) -> Future[Arrays]:
        """Begin reading the patches at `offsets` `(sample, dim)`; cancelling the future ends the work.

        Raises:
            IndexError: for a patch that reaches outside the arrays.
            StoreError: when the reader is closed.
        """
        self._refuse_outside(offsets, patch)
        batch: JobGroup[Arrays] = JobGroup()
        self._intake.batch_bytes = max(self._intake.batch_bytes, batch_bytes(self._plan.arrays, len(offsets), patch))
        with self._lock:
            if self.closed:
                raise StoreError(f"{self._where}: its reader is closed")
            self._active[batch.future] = batch
        batch.future.add_done_callback(self._end_batch)  # not one that knows the batch: a cycle would keep its arrays
        self._plan_soon(batch, self._begin, batch, offsets, tuple(patch))
        return batch.future

    def hold(self, offsets: NDArray[np.int64], patch: Sequence[int], window: int) -> None:
        """Read what these patches touch, and keep it until `window` is released.

        Raises:
            IndexError: for a patch that reaches outside the arrays.
        """
        self._refuse_outside(offsets, patch)
        self._plan_soon(JobGroup[None](), self._hold, offsets, tuple(patch), window)

    @property
    def has_room_for_early_answers(self) -> bool:
        """Whether a window may be asked for before its turn to be decoded."""
        return self._intake.has_room_for_early_answers

    def release(self, window: int) -> None:
        """Drop what this window and those before it held; of the two after it, chunks are decoded as they come."""
        self._intake.release(window)
        self._give_up_unwanted()

    def close(self) -> None:
        """End what is running, and the threads; safe to call twice, from any thread, and after a fork."""
        if self.pid != os.getpid():
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for batch in [*self._active.values()]:
            batch.fail(StoreError(f"{self._where}: closed while a batch was being read"))
        self._intake.close()
        self._reads.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)
        self._intake.decoders.join(_CLOSE_SECONDS)

    # -- the loop's life

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._requests.close()

    async def _open(self) -> None:
        self._stored = await self._requests.open_arrays(info.name for info in self._plan.arrays)

    # -- one batch

    def _plan_soon(self, owner: JobGroup[Any], job: Callable[..., None], *arguments: Any) -> None:
        """Requests come of it: behind chunks that wait to be decoded it would leave the network idle."""
        decoders = self._intake.decoders
        put = decoders.put_first if self._plan.memory_bytes >= _AMPLE_BYTES else decoders.put
        put(owner, job, *arguments)

    def _refuse_outside(self, offsets: NDArray[np.int64], patch: Sequence[int]) -> None:
        shape = self._plan.arrays[0].shape
        if offsets.ndim != 2 or offsets.shape[1] != len(shape) or len(patch) != len(shape) or not len(offsets):
            raise IndexError(f"offsets {offsets.shape} and patch {tuple(patch)} do not fit an array of {shape}")
        if (offsets < 0).any() or (offsets + np.array(patch) > np.array(shape)).any() or min(patch) < 1:
            raise IndexError(f"a patch of {tuple(patch)} reaches outside an array of {shape}")

    def _begin(self, batch: JobGroup[Arrays], offsets: NDArray[np.int64], patch: tuple[int, ...]) -> None:
        values = self._plan.allocate((len(offsets), len(self._stored), *patch), self._number)
        packed = [self._target(values, variable) for variable in range(len(self._stored))]
        uses = {chunk: chunk_uses(offsets, patch, chunk) for chunk in {stored.chunk for stored in self._stored}}
        batch.expect(sum(len(uses[stored.chunk]) for stored in self._stored), lambda: self._unpack(packed, values))
        for variable, stored in enumerate(self._stored):
            part = BatchPart(batch, uses[stored.chunk], packed[variable])
            here, new = self._intake.cache.join(stored, variable, part)
            self._counters.add(cache_hits=len(part.uses) - len(new), cache_misses=len(new))
            self._intake.decode_wanted()
            self._fetch(stored, new)
            self._intake.scatter_soon(part, here)

    def _hold(self, offsets: NDArray[np.int64], patch: tuple[int, ...], window: int) -> None:
        chunks = {chunk: touched(offsets, patch, chunk) for chunk in {stored.chunk for stored in self._stored}}
        for variable, stored in enumerate(self._stored):
            new = self._intake.cache.hold(stored, variable, chunks[stored.chunk], window)
            self._counters.add(cache_misses=len(new))
            self._fetch(stored, new)

    def _target(self, values: NDArray[Any], variable: int) -> NDArray[Any]:
        """Where a variable's packed numbers go: in place where they are of the batch's type already."""
        dtype = self._plan.arrays[variable].dtype.newbyteorder("=")
        target = values[:, variable]
        return target if dtype == values.dtype else np.empty(target.shape, dtype)

    def _unpack(self, packed: list[NDArray[Any]], values: NDArray[Any]) -> Arrays:
        if self._plan.as_stored:
            self._counters.add(samples=len(values))
            return values, np.broadcast_to(np.True_, values.shape)
        valid = self._plan.allocate(values.shape, np.bool_)
        for variable, (packing, array) in enumerate(zip(self._plan.packings, packed, strict=True)):
            in_place = np.may_share_memory(array, values)
            packing.unpack(array, array if in_place else values[:, variable], valid[:, variable])
        self._counters.add(samples=len(values))
        return values, valid

    def _end_batch(self, future: Future[Arrays]) -> None:
        batch = self._active.pop(future, None)
        if batch is not None:
            self._intake.cache.end_batch(batch)
        if future.cancelled() or future.exception() is not None:
            self._give_up_unwanted()

    # -- reading chunks, whichever way

    def _fetch(self, stored: StoredArray, chunks: Sequence[Chunk]) -> None:
        """Ask for chunks that nobody reads yet."""
        if chunks:
            self._reads.ask([*self._objects(stored, chunks)])

    def _objects(self, stored: StoredArray, chunks: Sequence[Chunk]) -> Iterator[ChunkRequest]:
        together: defaultdict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            together[stored.object_of(chunk.coords)].append(chunk)
        for place, inside in together.items():
            yield ChunkRequest(self._intake.cache, stored, stored.object_key(place), inside)

    def _give_up_unwanted(self) -> None:
        with self._lock:
            if not self.closed:
                self._reads.give_up_unwanted()
