"""Reader: one process's open store with its threads; it turns a batch of offsets into arrays.

A batch is planned as a whole: the union of its chunks over all variables is read once, one request a chunk, at most
`requests_in_flight` at once. Requests run on one asyncio loop in one thread; a local folder is read by threads instead.
Decoding and scattering run in `decode_threads` threads.

Strict: an object or inner chunk that is not there is an error, never fill values, and so are bytes that fail their
checksum or are too few. Only a store that kit did not build may leave chunks out, as Zarr allows; they are filled and
counted. A reader belongs to the process that made it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from kit.data.codec import Damage, Index, Octets, StoredArray
from kit.data.counters import Counters
from kit.data.dataset import ArrayInfo
from kit.data.folder import Folder
from kit.data.packing import Packing
from kit.data.regions import ChunkUse, chunk_uses
from kit.data.requests import Requests
from kit.data.stores import redact
from kit.data.workers import Batch, Workers
from kit.errors import MissingChunkError, StoreError

Arrays = tuple[NDArray[np.float32], NDArray[np.bool_]]
"""Values and validity, both `(sample, variable, *dims)`."""

_MOST_FOLDER_THREADS = 32
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class ReaderPlan:
    """What to read, and with how much at once; holds no handle, so it pickles."""

    url: str
    open_store: Callable[[], Store]
    arrays: tuple[ArrayInfo, ...]
    packings: tuple[Packing, ...]
    strict: bool
    """Whether a chunk that is not there is an error; else it reads as the array's fill value, counted."""
    requests_in_flight: int
    decode_threads: int
    request_seconds: float


@dataclass(frozen=True, slots=True)
class _Part:
    """One chunk of one variable in one batch."""

    stored: StoredArray
    use: ChunkUse
    target: NDArray[Any]


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
        store = plan.open_store()
        self._requests = Requests(store, plan.url, plan.requests_in_flight, plan.request_seconds, counters)
        self._folder = Folder(store.root, counters) if type(store) is LocalStore else None
        self._stored: tuple[StoredArray, ...] = ()
        threads = min(plan.requests_in_flight, _MOST_FOLDER_THREADS) if self._folder else 0
        self._readers = Workers(threads, "kit-read")
        self._decoders = Workers(plan.decode_threads, "kit-decode")
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
        with self._lock:
            if self.closed:
                raise StoreError(f"{self._where}: its reader is closed")
            self._active.add(batch)
        batch.future.add_done_callback(lambda _: self._active.discard(batch))
        self._decoders.put(batch, self._begin, batch, offsets, tuple(patch))
        return batch.future

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
        self._readers.close()
        self._decoders.close()
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
        packed = [np.empty((len(offsets), *patch), info.dtype.newbyteorder("=")) for info in self._plan.arrays]
        uses = {chunk: chunk_uses(offsets, patch, chunk) for chunk in {stored.chunk for stored in self._stored}}
        parts = [
            _Part(stored, use, target)
            for stored, target in zip(self._stored, packed, strict=True)
            for use in uses[stored.chunk]
        ]
        batch.expect(len(parts), lambda: self._unpack(packed))
        near = [part for part in parts if self._folder and part.stored.steps is not None]
        far = [part for part in parts if not self._folder or part.stored.steps is None]
        for part in near:
            self._readers.put(batch, self._read_part, batch, part)
        if far and not self.closed:
            self._loop.call_soon_threadsafe(self._request_parts, batch, far)

    def _unpack(self, packed: list[NDArray[Any]]) -> Arrays:
        samples, *patch = packed[0].shape
        values = np.empty((samples, len(packed), *patch), np.float32)
        valid = np.empty(values.shape, np.bool_)
        for variable, (packing, array) in enumerate(zip(self._plan.packings, packed, strict=True)):
            packing.unpack(array, values[:, variable], valid[:, variable])
        self._counters.add(samples=samples)
        return values, valid

    def _decode_part(self, batch: Batch[Arrays], part: _Part, data: Octets) -> None:
        with self._damage(part):
            decoded = part.stored.decode(data)
        self._scatter_part(batch, part, decoded)

    def _scatter_part(self, batch: Batch[Arrays], part: _Part, decoded: NDArray[Any]) -> None:
        part.use.scatter(decoded, part.target)
        self._counters.add(chunks_decoded=1)
        batch.part_done()

    def _fill_part(self, batch: Batch[Arrays], part: _Part, key: str, index: Index | None) -> None:
        """A chunk that is not there: an error in a store that kit built, else Zarr's fill value."""
        if self._plan.strict:
            reason = f"there is no object {key}" if index is None else f"the shard {key} does not hold it"
            raise MissingChunkError(
                f"{self._where}: chunk {part.use.coords} of {part.stored.name} is missing: {reason}; verify the store, "
                "then build it anew"
            )
        part.use.fill(part.stored.fill_value, part.target)
        self._counters.add(chunks_filled=1)
        batch.part_done()

    def _refuse_short(self, part: _Part, data: Buffer | Octets | None, span: tuple[int, int]) -> None:
        if data is not None and len(data) != span[1] - span[0]:
            with self._damage(part):
                raise ValueError(f"the store gave {len(data)} bytes instead of {span[1] - span[0]}")

    def _damage(self, part: _Part) -> Damage:
        return Damage(f"{self._where}: chunk {part.use.coords} of {part.stored.name}")

    # -- from a folder, in reading threads

    def _read_part(self, batch: Batch[Arrays], part: _Part) -> None:
        assert self._folder is not None
        stored, coords = part.stored, part.use.coords
        key = stored.object_key(stored.object_of(coords))
        index, data = None, None
        if stored.per_shard is None:
            data = self._folder.read(key)
        else:
            index = self._folder.index(stored, key)
            span = None if index is None else stored.locate(index, coords)
            if span is not None:
                data = self._folder.read(key, span[0], span[1] - span[0])
                self._refuse_short(part, data, span)
        if data is None:
            self._fill_part(batch, part, key, index)
        else:
            self._decoders.put(batch, self._decode_part, batch, part, data)

    # -- from anywhere else, on the loop

    def _request_parts(self, batch: Batch[Arrays], parts: list[_Part]) -> None:
        if batch.over:
            return
        tasks = {self._loop.create_task(self._request_part(batch, part)) for part in parts}
        batch.future.add_done_callback(lambda _: self._cancel(tasks))

    def _cancel(self, tasks: set[asyncio.Task[None]]) -> None:
        def cancel() -> None:
            for task in tasks:
                task.cancel()

        with self._lock:
            if not self.closed:
                self._loop.call_soon_threadsafe(cancel)

    async def _request_part(self, batch: Batch[Arrays], part: _Part) -> None:
        try:
            await self._get_part(batch, part)
        except Exception as error:
            batch.fail(error)

    async def _get_part(self, batch: Batch[Arrays], part: _Part) -> None:
        stored, coords = part.stored, part.use.coords
        key = stored.object_key(stored.object_of(coords))
        index, data = None, None
        if stored.per_shard is None:
            data = await self._requests.get(key)
        else:
            index = await self._requests.index(stored, key)
            span = None if index is None else stored.locate(index, coords)
            if span is not None:
                data = await self._requests.get(key, RangeByteRequest(*span))
                self._refuse_short(part, data, span)
        if data is None:
            self._decoders.put(batch, self._fill_part, batch, part, key, index)
        elif stored.steps is not None:
            self._decoders.put(batch, self._decode_part, batch, part, data.as_numpy_array())
        else:
            with self._damage(part):
                decoded = await stored.decode_by_zarr(data)
            self._decoders.put(batch, self._scatter_part, batch, part, decoded)
