"""Reader: an open store in one process, which turns batches of offsets into arrays.

A batch is planned as a whole: the union of the chunks that its patches touch, over all variables. A chunk in the cache,
or already requested for another batch, is taken from there. The rest is requested (`kit.data.stream.fetch`), at most
`requests_in_flight` at once; the responses are decoded, cached and copied into the batches by a `ReceiveQueue`. A
reader belongs to the process that made it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.chunks.requests import LOCAL_GAP_BYTES, Coalescing
from kit.data.stores.counters import Counters
from kit.data.stores.http import HttpClient
from kit.data.stores.url import redact, run_sync
from kit.data.stream.cached import CachedRequests, ObjectNames
from kit.data.stream.chunk_cache import BatchPart, Chunk, ChunkRequest
from kit.data.stream.codec import StoredArray
from kit.data.stream.fetch import EachItsOwn, Requests, is_local, is_remote, open_client
from kit.data.stream.memory import Arrays, ReaderPlan, batch_bytes
from kit.data.stream.pool import JobGroup
from kit.data.stream.receive import ReceiveQueue
from kit.data.stream.scatter import chunk_uses, touched
from kit.errors import StoreError

_LEAST_FOLDER_THREADS = 4
_SAMPLES_AT_ONCE = 2048
"""Whose chunks are looked up together; more would need memory that nobody counts."""
_CLOSE_SECONDS = 5.0
_AMPLE_BYTES = 256 << 20
"""From this much memory on, batches are planned before waiting chunks are decoded, so that the network never idles.
With less, the requests so made would fill all of it and leave nothing for the allocator's holes: of 24 MiB allowed, 37
were used instead of 26."""


class Reader:
    """An open store. Call from any thread; `close` ends its threads and connections."""

    def __init__(self, plan: ReaderPlan, counters: Counters) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._plan = plan
        self._counters = counters
        self._where = redact(plan.url)
        self._lock = threading.RLock()
        self._active: dict[Future[Arrays], tuple[JobGroup[Arrays], int]] = {}
        """Batches that are not complete, with their samples."""
        self._whole: dict[Future[Arrays], JobGroup[Arrays]] = {}
        """Batches of a stream that are not handed over."""
        self._unplanned: set[JobGroup[Arrays]] = set()
        self._pins_unplanned = 0
        self._after_pins: list[Callable[[], None]] = []
        """What begins batches once windows are planned: chunks that a batch asked for would come without neighbours."""
        self._over: list[tuple[JobGroup[Arrays], set[JobGroup[Arrays]]]] = []
        """Batches handed over before some that were begun by then were planned, and those: they may use its chunks."""
        self._dtype = plan.arrays[0].dtype.newbyteorder("=") if plan.as_stored else np.dtype(np.float32)
        self._store = plan.open_store()
        in_folders, in_flight = is_local(self._store), plan.requests_in_flight
        folder_threads = min(in_flight, max(_LEAST_FOLDER_THREADS, 2 * plan.decode_threads))
        if in_folders:
            in_flight = folder_threads
        self._client = open_client(self._store, plan.url, plan.request_seconds, counters, in_flight)
        kept = plan.read_cache if is_remote(self._store) else None
        decoding = folder_threads if in_folders or kept else 0  # threads that read a disk, and decode at once
        self._queue = ReceiveQueue(
            plan, counters, Coalescing(LOCAL_GAP_BYTES) if in_folders else plan.coalescing, decode_at_once=in_folders,
            decoding=max(decoding, plan.decode_threads) if in_folders else plan.decode_threads + decoding,
        )  # fmt: skip
        self._requests = Requests(self._client, plan.url, self._queue)
        if kept is not None:
            names = ObjectNames(self._client, plan.dataset, self._queue.names, partial(is_remote, self._store))
            self._requests = CachedRequests(
                self._client, plan.url, self._queue, kept.open(), names, counters, folder_threads
            )

        async def open_arrays() -> tuple[StoredArray, ...]:
            return tuple(await asyncio.gather(*(StoredArray.open(self._store, info) for info in plan.arrays)))

        try:
            self._stored = run_sync(open_arrays, plan.url, plan.request_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def open_requests(self) -> tuple[int, str]:
        """How many requests may be open now, and the reason where they are fewer than allowed."""
        found = self._client.open_requests if isinstance(self._client, HttpClient | EachItsOwn) else None
        return (self._plan.requests_in_flight, "") if found is None else found

    @property
    def held_bytes(self) -> int:
        """Memory of what is kept and on its way, beside batches."""
        return self._queue.held_bytes

    @property
    def samples_under_way(self) -> int:
        """Of batches that are not complete, as many samples as the part of their chunks whose bytes are there.

        Their requests are counted by then, while decoding may take long: a trial that ends meanwhile would divide the
        requests of several batches by the samples of fewer.
        """
        with self._lock:
            coming = self._queue.cache.still_to_come()
            return round(sum(size * _part_read(batch, coming[batch]) for batch, size in self._active.values()))

    def start(self, offsets: NDArray[np.int64], patch: Sequence[int], *, until_handed: bool = False) -> Future[Arrays]:
        """Begin reading the patches at `offsets` `(sample, dim)`; cancelling the future ends the work.

        Args:
            until_handed: Others may use its chunks until `hand_over`, where memory allows; else until it is complete.

        Raises:
            IndexError: for a patch that reaches outside the arrays.
            StoreError: when the reader is closed.
        """
        self._refuse_outside(offsets, patch)
        batch: JobGroup[Arrays] = JobGroup()
        self._queue.batch_bytes = max(self._queue.batch_bytes, batch_bytes(self._plan.arrays, len(offsets), patch))
        with self._lock:
            if self.closed:
                raise StoreError(f"{self._where}: its reader is closed")
            self._active[batch.future] = batch, len(offsets)
            if until_handed:
                self._whole[batch.future] = batch
                self._unplanned.add(batch)
        batch.future.add_done_callback(self._end_batch)  # not one that knows the batch: a cycle would keep its arrays
        begin = partial(self._plan_soon, batch, self._begin, batch, offsets, tuple(patch))
        with self._lock:
            waits = self._pins_unplanned > 0
            if waits:
                self._after_pins.append(begin)
        if not waits:
            begin()
        return batch.future

    def pin(self, batches: Sequence[NDArray[np.int64]], patch: Sequence[int], window: int) -> None:
        """Read the chunks that these patches touch, and keep them until `window` is released.

        Raises:
            IndexError: for a patch that reaches outside the arrays.
        """
        for offsets in batches:
            self._refuse_outside(offsets, patch)
        with self._lock:
            self._pins_unplanned += 1
        self._plan_soon(JobGroup[None](), self._pin, batches, tuple(patch), window)

    @property
    def can_read_ahead(self) -> bool:
        """Whether memory allows a window's chunks to be requested before its turn to be decoded."""
        return self._queue.can_read_ahead

    def release(self, window: int) -> None:
        """Drop what this window and those before it pinned; decode responses for the two after it as they come."""
        self._queue.release(window)
        self._cancel_unwanted()

    def close(self) -> None:
        """End what is running, and the threads; safe to call twice, from any thread, and after a fork."""
        if self.pid != os.getpid():
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for batch, _ in [*self._active.values()]:
            batch.fail(StoreError(f"{self._where}: closed while a batch was being read"))
        self._queue.close()
        self._requests.close()
        self._store.close()
        self._queue.decoders.join(_CLOSE_SECONDS)

    # -- one batch

    def _plan_soon(self, batch: JobGroup[Any], job: Callable[..., None], *arguments: Any) -> None:
        """Plan in a decoding thread: first of all jobs, where memory is ample."""
        decoders = self._queue.decoders
        put = decoders.put_first if self._plan.memory_bytes >= _AMPLE_BYTES else decoders.put
        put(batch, job, *arguments)

    def _refuse_outside(self, offsets: NDArray[np.int64], patch: Sequence[int]) -> None:
        shape = self._plan.arrays[0].shape
        if offsets.ndim != 2 or offsets.shape[1] != len(shape) or len(patch) != len(shape) or not len(offsets):
            raise IndexError(f"offsets {offsets.shape} and patch {tuple(patch)} do not fit an array of {shape}")
        if (offsets < 0).any() or (offsets + np.array(patch) > np.array(shape)).any() or min(patch) < 1:
            raise IndexError(f"a patch of {tuple(patch)} reaches outside an array of {shape}")

    def _begin(self, batch: JobGroup[Arrays], offsets: NDArray[np.int64], patch: tuple[int, ...]) -> None:
        try:
            self._plan_batch(batch, offsets, patch)
        finally:
            self._end_planning(batch)

    def _plan_batch(self, batch: JobGroup[Arrays], offsets: NDArray[np.int64], patch: tuple[int, ...]) -> None:
        values = self._plan.allocate((len(offsets), len(self._stored), *patch), self._dtype)
        packed = []
        for variable, info in enumerate(self._plan.arrays):  # in place, where they are of the batch's type already
            target, dtype = values[:, variable], info.dtype.newbyteorder("=")
            packed.append(target if dtype == values.dtype else np.empty(target.shape, dtype))
        cuts = [(stored.chunk, stored.matched) for stored in self._stored]
        uses = {cut: chunk_uses(offsets, patch, *cut) for cut in {*cuts}}
        batch.expect(sum(len(uses[cut]) for cut in cuts), lambda: self._unpack(packed, values, offsets))
        for variable, stored in enumerate(self._stored):
            part = BatchPart(batch, uses[cuts[variable]], packed[variable])
            decoded, new = self._queue.cache.join(stored, variable, part)
            self._counters.add(cache_hits=len(part.uses) - len(new), cache_misses=len(new))
            self._queue.decode_wanted()
            self._fetch(stored, new)
            self._queue.scatter_soon(part, decoded)

    def _pin(self, batches: Sequence[NDArray[np.int64]], patch: tuple[int, ...], window: int) -> None:
        try:
            self._plan_window(np.concatenate(batches), patch, window)
        finally:
            self._end_pinning()

    def _plan_window(self, offsets: NDArray[np.int64], patch: tuple[int, ...], window: int) -> None:
        """Request what a window needs once all of it is known: neighbours that were asked for in turn come apart."""
        cuts = [(stored.chunk, stored.matched) for stored in self._stored]
        new: list[list[Chunk]] = [[] for _ in self._stored]
        try:
            for first in range(0, len(offsets), _SAMPLES_AT_ONCE):
                some = offsets[first : first + _SAMPLES_AT_ONCE]
                chunks = {cut: touched(some, patch, *cut) for cut in {*cuts}}
                for variable, stored in enumerate(self._stored):
                    new[variable] += self._queue.cache.pin(stored, variable, chunks[cuts[variable]], window)
        finally:  # whoever joins a chunk relies on its request
            for stored, found in zip(self._stored, new, strict=True):
                self._counters.add(cache_misses=len(found))
                self._fetch(stored, found)

    def _end_pinning(self) -> None:
        waiting: list[Callable[[], None]] = []
        with self._lock:
            self._pins_unplanned -= 1
            if not self._pins_unplanned:
                waiting, self._after_pins = self._after_pins, []
        for begin in waiting:
            begin()

    def _fetch(self, stored: StoredArray, chunks: Sequence[Chunk]) -> None:
        """Request chunks that nobody has requested yet, those of one object together."""
        together: defaultdict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            together[stored.object_of(chunk.coords)].append(chunk)
        if together:
            cache = self._queue.cache
            self._requests.submit(
                [ChunkRequest(cache, stored, stored.object_key(place), inside) for place, inside in together.items()]
            )

    def _unpack(self, packed: list[NDArray[Any]], values: NDArray[Any], offsets: NDArray[np.int64]) -> Arrays:
        if self._plan.as_stored:
            valid = np.broadcast_to(np.True_, values.shape)
        else:
            valid = self._plan.allocate(values.shape, np.bool_)
            for variable, (packing, array) in enumerate(zip(self._plan.packings, packed, strict=True)):
                in_place = np.may_share_memory(array, values)
                packing.unpack(array, array if in_place else values[:, variable], valid[:, variable])
            for variable, stored in enumerate(self._stored):
                for axis, one in enumerate(stored.matched):
                    if one is not None and one.known is not None:
                        _forget_unmatched(one.known, offsets[:, axis], axis, values[:, variable], valid[:, variable])
        self._counters.add(samples=len(values))
        return values, valid

    def hand_over(self, future: Future[Arrays]) -> None:
        """A batch that was to be kept until now has been taken, or is not wanted any more."""
        with self._lock:
            batch = self._whole.pop(future, None)
            if batch is None or future in self._active:
                return
            if self._unplanned:
                self._over.append((batch, {*self._unplanned}))
                return
        self._queue.cache.end_batch(batch)

    def _end_planning(self, batch: JobGroup[Arrays]) -> None:
        with self._lock:
            self._unplanned.discard(batch)
            for _, others in self._over:
                others.discard(batch)
            over = [done for done, others in self._over if not others]
            self._over = [item for item in self._over if item[1]]
        for done in over:
            self._queue.cache.end_batch(done)

    def _end_batch(self, future: Future[Arrays]) -> None:
        failed = future.cancelled() or future.exception() is not None
        with self._lock:
            batch, size = self._active.pop(future, (None, 0))
            if batch is not None:
                coming = self._queue.cache.still_to_come()[batch] if failed else 0
                self._counters.add(samples_read=round(size * _part_read(batch, coming)))
            over = batch is not None and (failed or future not in self._whole)
            if failed:
                self._whole.pop(future, None)
        if batch is not None and failed:
            self._end_planning(batch)  # it may never be planned
        if batch is not None and over:
            self._queue.cache.end_batch(batch)
        if failed:
            self._cancel_unwanted()

    def _cancel_unwanted(self) -> None:
        with self._lock:
            if not self.closed:
                self._requests.cancel_unwanted()


def _part_read(batch: JobGroup[Arrays], coming: int) -> float:
    """Of a batch that waits for so many of its chunks; one that is not planned yet has asked for nothing."""
    return 1 - coming / batch.parts if batch.parts else 0.0


def _forget_unmatched(
    known: NDArray[np.bool_], offsets: NDArray[np.int64], axis: int, values: NDArray[Any], valid: NDArray[np.bool_]
) -> None:
    """Make missing, in `(sample, *dims)`, what has no match along a dimension."""
    places = offsets[:, None] + np.arange(valid.shape[1 + axis])
    lost = ~known[places].reshape(len(offsets), *(-1 if one == axis else 1 for one in range(valid.ndim - 1)))
    if lost.any():
        valid &= ~lost
        np.copyto(values, 0, where=lost)
