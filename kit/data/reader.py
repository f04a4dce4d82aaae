"""Reader: one process's open store with its threads; it turns batches of offsets into arrays.

A batch is planned as a whole: the union of its chunks over all variables. A chunk that the cache holds, or that is on
its way for another batch, is taken from there; the rest are read, neighbours in a shard by one request, at most
`requests_in_flight` at once. Object stores are read by a wire in one thread, folders and caches by threads that wait,
other stores on one asyncio loop.
Decoding and scattering run in `decode_threads` threads; when they fall behind, no more is asked for.

Strict: an object or inner chunk that is not there is an error, never fill values, and so are bytes that fail their
checksum or are too few. Only a store that kit did not build may leave chunks out, as Zarr allows; they are filled and
counted. A reader belongs to the process that made it.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.cache import Chunk, ChunkCache, Part
from kit.data.codec import Index, Octets, StoredArray, damage
from kit.data.counters import Counters
from kit.data.disk_cache import identities
from kit.data.folder import Folder
from kit.data.indexes import LARGEST_BYTES, ShardIndexes
from kit.data.reader_plan import Arrays, ReaderPlan, batch_bytes, largest_chunk_bytes
from kit.data.regions import chunk_uses, touched
from kit.data.requests import Requests, open_blocking, read_index
from kit.data.room import Claim, Room
from kit.data.stores import redact
from kit.data.wanted import Answer, Wanted
from kit.data.wire import Wire
from kit.data.wire_reads import WireReads
from kit.data.workers import Batch, Workers
from kit.errors import MissingChunkError, StoreError
from kit.plan.coalescing import LOCAL_GAP_BYTES, Coalescing, Run, runs
from kit.processes import give_memory_back

_LEAST_FOLDER_THREADS = 4
_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = 0.001
_PARTS_PER_JOB = 64
_INDEX_SHARE = 8
_HOLES_SHARE = 2
"""Of the memory allowed: so much decoded between two times that freed memory is handed back."""
_READY_TOO = 2
"""Bytes in flight and as many ready to be decoded; more would only wait."""


class Reader:
    """An open store. Call from any thread; `close` ends its threads and connections."""

    def __init__(self, plan: ReaderPlan, counters: Counters) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._plan = plan
        self._counters = counters
        self._where = redact(plan.url)
        self._lock = threading.RLock()
        self._active: set[Batch[Arrays]] = set()
        self._cache = ChunkCache(plan.cache_bytes)
        self._indexes = ShardIndexes(min(LARGEST_BYTES, plan.memory_bytes // _INDEX_SHARE))
        self._tasks: dict[asyncio.Task[None], Wanted] = {}
        store = plan.open_store()
        self._requests = Requests(store, plan.url, plan.requests_in_flight, plan.request_seconds, counters)
        known = identities(plan.manifest) if plan.manifest and plan.read_cache else None
        self._source = open_blocking(
            store, plan.url, plan.request_seconds, counters, plan.requests_in_flight, plan.read_cache, known
        )
        self._near = isinstance(self._source, Folder)
        self._coalescing = Coalescing(LOCAL_GAP_BYTES) if self._near else plan.coalescing
        self._wire = self._source if isinstance(self._source, Wire) else None
        fetchers = plan.requests_in_flight if self._source and not self._wire else 0
        if self._near:
            fetchers = min(fetchers, max(_LEAST_FOLDER_THREADS, 2 * plan.decode_threads))
        self._stored: tuple[StoredArray, ...] = ()
        self._fetchers = Workers(fetchers, "kit-read")
        self._decoders = Workers(plan.decode_threads, "kit-decode")
        self._room = Room(self._room_bytes)
        self._by_wire = (
            None
            if self._wire is None
            else WireReads(self._wire, plan.url, self._cache, self._indexes, self._runs, self._try_take, self._deliver)
        )
        self._batch_bytes = 0
        self._stored_bytes: dict[str, int] = {}
        """The largest object met, for arrays whose chunks are objects of their own."""
        self._scattered_bytes = 0
        """Decoded since freed memory was last handed back."""
        self._gate = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kit-loop", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def start(self, offsets: NDArray[np.int64], patch: Sequence[int]) -> Future[Arrays]:
        """Begin reading the patches at `offsets` `(sample, dim)`; cancelling the future ends the work.

        Raises:
            IndexError: for a patch that reaches outside the arrays.
            StoreError: when the reader is closed.
        """
        self._refuse_outside(offsets, patch)
        batch: Batch[Arrays] = Batch()
        self._batch_bytes = max(self._batch_bytes, batch_bytes(self._plan.arrays, len(offsets), patch))
        with self._lock:
            if self.closed:
                raise StoreError(f"{self._where}: its reader is closed")
            self._active.add(batch)
        batch.future.add_done_callback(lambda future: self._end_batch(batch, future))
        self._decoders.put(batch, self._begin, batch, offsets, tuple(patch))
        return batch.future

    def hold(self, offsets: NDArray[np.int64], patch: Sequence[int], window: int) -> None:
        """Read what these patches touch, and keep it until `window` is released.

        Raises:
            IndexError: for a patch that reaches outside the arrays.
        """
        self._refuse_outside(offsets, patch)
        self._decoders.put(Batch[None](), self._hold, offsets, tuple(patch), window)

    def release(self, window: int) -> None:
        """Drop what this window and those before it held."""
        self._cache.release(window)
        self._give_up_unwanted()

    def close(self) -> None:
        """End what is running, and the threads; safe to call twice, from any thread, and after a fork."""
        if self.pid != os.getpid():
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for batch in [*self._active]:
            batch.fail(StoreError(f"{self._where}: closed while a batch was being read"))
        self._room.close()
        self._fetchers.close()
        self._decoders.close()
        if self._wire is not None:
            self._wire.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)
        self._decoders.join(_CLOSE_SECONDS)

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

    def _refuse_outside(self, offsets: NDArray[np.int64], patch: Sequence[int]) -> None:
        shape = self._plan.arrays[0].shape
        if offsets.ndim != 2 or offsets.shape[1] != len(shape) or len(patch) != len(shape) or not len(offsets):
            raise IndexError(f"offsets {offsets.shape} and patch {tuple(patch)} do not fit an array of {shape}")
        if (offsets < 0).any() or (offsets + np.array(patch) > np.array(shape)).any() or min(patch) < 1:
            raise IndexError(f"a patch of {tuple(patch)} reaches outside an array of {shape}")

    def _begin(self, batch: Batch[Arrays], offsets: NDArray[np.int64], patch: tuple[int, ...]) -> None:
        values = self._plan.allocate((len(offsets), len(self._stored), *patch), np.float32)
        packed = [self._target(values, variable) for variable in range(len(self._stored))]
        uses = {chunk: chunk_uses(offsets, patch, chunk) for chunk in {stored.chunk for stored in self._stored}}
        batch.expect(sum(len(uses[stored.chunk]) for stored in self._stored), lambda: self._unpack(packed, values))
        for variable, stored in enumerate(self._stored):
            parts = [Part(batch, use, packed[variable]) for use in uses[stored.chunk]]
            here, new = self._cache.join(stored, variable, parts)
            self._counters.add(cache_hits=len(parts) - len(new), cache_misses=len(new))
            self._fetch(stored, new)
            for start in range(0, len(here), _PARTS_PER_JOB):
                self._decoders.put(batch, _scatter, here[start : start + _PARTS_PER_JOB])

    def _hold(self, offsets: NDArray[np.int64], patch: tuple[int, ...], window: int) -> None:
        chunks = {chunk: touched(offsets, patch, chunk) for chunk in {stored.chunk for stored in self._stored}}
        for variable, stored in enumerate(self._stored):
            new = self._cache.hold(stored, variable, chunks[stored.chunk], window)
            self._counters.add(cache_misses=len(new))
            self._fetch(stored, new)

    def _target(self, values: NDArray[np.float32], variable: int) -> NDArray[Any]:
        """Where a variable's packed numbers go: in place where they are float32 already."""
        dtype = self._plan.arrays[variable].dtype.newbyteorder("=")
        target = values[:, variable]
        return target if dtype == np.float32 else np.empty(target.shape, dtype)

    def _unpack(self, packed: list[NDArray[Any]], values: NDArray[np.float32]) -> Arrays:
        valid = self._plan.allocate(values.shape, np.bool_)
        for variable, (packing, array) in enumerate(zip(self._plan.packings, packed, strict=True)):
            in_place = np.may_share_memory(array, values)
            packing.unpack(array, array if in_place else values[:, variable], valid[:, variable])
        self._counters.add(samples=len(values))
        return values, valid

    def _end_batch(self, batch: Batch[Arrays], future: Future[Arrays]) -> None:
        self._active.discard(batch)
        if future.cancelled() or future.exception() is not None:
            self._give_up_unwanted()

    # -- reading chunks, whichever way

    def _fetch(self, stored: StoredArray, chunks: Sequence[Chunk]) -> None:
        """Ask for chunks that nobody reads yet."""
        if not chunks:
            return
        found = [*self._objects(stored, chunks)]
        if self._by_wire is not None:
            self._by_wire.ask(found)
        elif self._source is not None:
            for item in found:
                self._fetchers.put(item, self._read_object, item)
        elif not self.closed:
            self._loop.call_soon_threadsafe(self._request_objects, found)

    def _objects(self, stored: StoredArray, chunks: Sequence[Chunk]) -> Iterator[Wanted]:
        together: defaultdict[tuple[int, ...], list[Chunk]] = defaultdict(list)
        for chunk in chunks:
            together[stored.object_of(chunk.coords)].append(chunk)
        for place, inside in together.items():
            yield Wanted(self._cache, stored, stored.object_key(place), inside)

    def _runs(self, wanted: Wanted, index: Index | None) -> list[Run[Chunk]]:
        """The requests for what is wanted of a shard; chunks that it does not hold are settled at once."""
        stored, spans = wanted.stored, []
        for chunk in wanted.chunks:
            span = None if index is None else stored.locate(index, chunk.coords)
            if span is None:
                self._fill(wanted, chunk, index)
            else:
                spans.append((*span, chunk))
        found = runs(spans, self._coalescing)
        self._counters.add(
            requests_saved=len(spans) - len(found), bytes_wasted=sum(max(0, run.wasted_bytes) for run in found)
        )
        return found

    def _deliver(self, wanted: Wanted, run: Run[Chunk] | None, data: Octets | None, claim: Claim) -> None:
        """Pass on what a request gave; `run` is None for a whole object."""
        if data is None:
            for chunk in wanted.chunks:
                self._fill(wanted, chunk, None)
            claim.done()
        elif run is None:
            self._stored_bytes[wanted.stored.name] = max(self._stored_bytes.get(wanted.stored.name, 0), len(data))
            claim.correct(len(data))
            self._decode_soon(Answer(self._cache, wanted.stored, wanted.chunks[0], data, len(data), False, claim))
        else:
            claim.share(len(run.items))
            for first, last, chunk in run.items:
                part, shared = data[first - run.first : last - run.first], len(run.items) > 1
                self._decode_soon(Answer(self._cache, wanted.stored, chunk, part, last - first, shared, claim))

    def _decode_soon(self, answer: Answer) -> None:
        """In a decoding thread; of a folder in the thread that has just read it, which took no time to speak of."""
        if self._near or answer.stored.in_place:
            try:
                self._decode(answer)
            except BaseException as error:
                answer.fail(error)
        else:
            self._decoders.put(answer, self._decode, answer)

    def _decode(self, answer: Answer) -> None:
        try:
            decoded = self._decoded(answer)
            # A chunk that lies in bytes it shares with others would keep all of them in memory.
            kept = decoded.copy() if answer.shared and answer.stored.in_place else decoded
            for part in self._cache.settle(answer.chunk, kept):
                part.scatter(decoded)
        finally:
            answer.claim.done()
        self._hand_back(decoded.nbytes)

    def _hand_back(self, decoded_bytes: int) -> None:
        """Now and then return to the system what was freed: chunks come and go in an order that leaves holes."""
        self._scattered_bytes += decoded_bytes  # counted without a lock: a lost count only delays it
        if self._scattered_bytes > self._plan.memory_bytes // _HOLES_SHARE:
            self._scattered_bytes = 0
            give_memory_back()

    def _decoded(self, answer: Answer) -> NDArray[Any]:
        try:
            if len(answer.data) != answer.size_bytes:
                raise ValueError(f"the store gave {len(answer.data)} bytes instead of {answer.size_bytes}")
            decoded = answer.stored.decode(answer.data)
        except MemoryError:
            raise
        except Exception as error:
            raise damage(f"{self._where}: chunk {answer.chunk.coords} of {answer.stored.name}", error) from error
        self._counters.add(chunks_decoded=1)
        return decoded

    def _fill(self, wanted: Wanted, chunk: Chunk, index: Index | None) -> None:
        """A chunk that is not there: an error in a store that kit built, else Zarr's fill value."""
        stored = wanted.stored
        if self._plan.strict:
            reason = f"there is no object {wanted.key}" if index is None else f"the shard {wanted.key} does not hold it"
            missing = MissingChunkError(
                f"{self._where}: chunk {chunk.coords} of {stored.name} is missing: {reason}; verify the store, then "
                "build it anew"
            )
            self._cache.fail(chunk, missing)
            return
        filled = np.broadcast_to(np.asarray(stored.fill_value, stored.dtype), stored.chunk)
        self._counters.add(chunks_filled=1)
        for part in self._cache.settle(chunk, filled):
            self._decoders.put(part.batch, part.scatter, filled)

    def _room_bytes(self) -> int:
        """Memory left for what is asked for and not decoded, but no more than keeps the requests going."""
        plan, cache = self._plan, self._cache
        decoding = max(self._fetchers.most if self._near else 0, plan.decode_threads) * largest_chunk_bytes(plan.arrays)
        others = cache.free_bytes + cache.held_bytes + self._indexes.nbytes + decoding
        left = plan.memory_bytes - others - plan.batches_held * self._batch_bytes
        return min(left, _READY_TOO * plan.requests_in_flight * self._room.largest_bytes)

    def _size_of(self, wanted: Wanted, run: Run[Chunk] | None) -> int:
        """Bytes that a request will bring; of an object not known before, those of the largest one like it."""
        if run is not None:
            return run.last - run.first
        stored = wanted.stored
        return self._stored_bytes.get(stored.name) or math.prod(stored.chunk) * stored.dtype.itemsize

    def _try_take(self, wanted: Wanted, run: Run[Chunk] | None) -> Claim | None:
        return self._room.try_take(self._size_of(wanted, run))

    def _give_up_unwanted(self) -> None:
        """End requests that nobody waits for any more; a thread's own are given up when their turn comes."""
        with self._lock:
            if not self.closed and self._source is None:
                self._loop.call_soon_threadsafe(self._cancel_unwanted)

    # -- by threads that wait

    def _read_object(self, item: Wanted) -> None:
        if item.stored.per_shard is None:
            self._read_run(item, None)
            return
        wanted = item.part(self._cache.still_wanted(item.chunks))
        if not wanted.chunks:
            return
        index = self._indexes.get(wanted.key, lambda: self._read_index(wanted))
        for run in self._runs(wanted, index)[::-1]:
            part = wanted.part(chunk for _, _, chunk in run.items)
            self._fetchers.put(part, self._read_run, part, run)

    def _read_index(self, wanted: Wanted) -> Index | None:
        assert self._source is not None
        return read_index(self._source, wanted.stored, wanted.key, self._plan.url)

    def _read_run(self, wanted: Wanted, run: Run[Chunk] | None) -> None:
        assert self._source is not None
        if not self._cache.still_wanted(wanted.chunks):
            return
        claim = self._room.take(self._size_of(wanted, run))
        try:
            data = self._source.read(wanted.key, *(() if run is None else (run.first, run.last)))
        except BaseException:
            claim.done()
            raise
        self._deliver(wanted, run, data, claim)

    # -- by requests on the loop

    def _request_objects(self, found: Sequence[Wanted]) -> None:
        for item in found:
            task = self._loop.create_task(self._request_object(item))
            self._tasks[task] = item
            task.add_done_callback(self._tasks.pop)

    def _cancel_unwanted(self) -> None:
        for task, item in [*self._tasks.items()]:
            if not any(chunk.wanted for chunk in item.chunks) and not self._cache.still_wanted(item.chunks):
                task.cancel()

    async def _request_object(self, item: Wanted) -> None:
        try:
            await self._get_object(item)
        except Exception as error:
            item.fail(error)

    async def _get_object(self, wanted: Wanted) -> None:
        if wanted.stored.per_shard is None:
            await self._request_run(wanted, None)
            return
        index = await self._requests.index(self._indexes, wanted.stored, wanted.key)
        found = self._runs(wanted, index)
        parts = [wanted.part(chunk for _, _, chunk in run.items) for run in found]
        await asyncio.gather(*map(self._request_run, parts, found))

    async def _request_run(self, wanted: Wanted, run: Run[Chunk] | None) -> None:
        claim = await self._take(self._size_of(wanted, run))
        try:
            data = await self._requests.read(wanted.key, *(() if run is None else (run.first, run.last)))
        except BaseException as error:
            claim.done()
            if not isinstance(error, Exception):
                raise
            wanted.fail(error)
        else:
            self._deliver(wanted, run, data, claim)

    async def _take(self, size_bytes: int) -> Claim:
        async with self._gate:  # one task watches, the others wait for it
            while (claim := self._room.try_take(size_bytes)) is None:
                await asyncio.sleep(_PAUSE_SECONDS)
            return claim


def _scatter(here: Sequence[tuple[Part, NDArray[Any]]]) -> None:
    for part, decoded in here:
        part.scatter(decoded)
