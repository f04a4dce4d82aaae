"""ReceiveQueue: from the bytes that requests bring to decoded chunks, in memory that is budgeted before each request.

A request first reserves the bytes it will bring (`budget`). Its response is cut into chunks here, and `decode_threads`
threads decode them, cache them and copy them into the batches that wait. When they fall behind, the budget is used up
and nothing more is requested.

Strict: a missing object or inner chunk is an error, never fill values, and so are bytes that are too few or fail their
checksum; the error fails the batches that wait for the chunk. Only a store that kit did not build may leave chunks out,
as Zarr allows, unless `data.strict` forbids it; they are filled and counted.

Read-ahead: in block order a window takes as long as its slowest request, so where memory allows requests are sent two
windows ahead, while only the window being served and the next one are kept decoded. Responses for the window after wait
in a `ReadAheadBuffer` as stored bytes. They count outside the budget, so nothing waits for them; a response that a
batch waits for never waits there.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.chunks.requests import Coalescing, Run, runs
from kit.chunks.resources import HOLES_SHARE, READY_TOO, TRANSIENT_SHARE
from kit.data.stores.counters import Counters
from kit.data.stores.transfer import LARGEST_BYTES, Octets
from kit.data.stores.url import redact
from kit.data.stream.chunk_cache import BatchPart, Chunk, ChunkCache, ChunkRequest, ChunkResponse
from kit.data.stream.codec import FetchOnceCache, Index, ShardIndexes, damage
from kit.data.stream.memory import MemoryBudget, ReaderPlan, Reservation, largest_chunk_bytes
from kit.data.stream.pool import JobGroup, ThreadPool
from kit.errors import MissingChunkError
from kit.machine.processes import give_memory_back, rss_bytes

Place = tuple[int, int, Chunk]
"""First byte of a chunk in its shard, one past the last, and the chunk."""
WINDOWS_DECODED = 2
"""The one being served and the next one."""
_CHUNKS_PER_JOB = 64
_TOGETHER_BYTES = 1 << 20
"""Of chunks decoded in one call: more saves little, and delays the batches that wait for the first of them."""
_TOGETHER_SHARE = 64
_INDEX_SHARE = 8
_LEAST_HOLES_BYTES = 2 << 20
"""Giving memory back to the system more often costs more than it frees."""
_UNTIDY_SHARE = 2
"""The process may grow by this part of the memory allowed before anything is given back: pages that come anew cost more
than they hold."""


class ReceiveQueue:
    """Takes responses; call from any thread.

    Args:
        coalescing: Which neighbours in a shard share a request.
        decode_at_once: Decode in the thread that has just read, as reading took hardly any time.
        decoding: Threads that decode at once, at most.
    """

    def __init__(
        self, plan: ReaderPlan, counters: Counters, coalescing: Coalescing, *, decode_at_once: bool, decoding: int
    ) -> None:
        self._plan, self._counters, self._coalescing = plan, counters, coalescing
        self._decode_at_once = decode_at_once
        self._where = redact(plan.url)
        self.cache = ChunkCache(plan.cache_bytes, self._spare_bytes)
        most_bytes = min(LARGEST_BYTES, plan.memory_bytes // _INDEX_SHARE)
        self.indexes, self.names = ShardIndexes(most_bytes), FetchOnceCache(most_bytes, plan.dataset.names)
        """Of objects that a read cache keeps, where no manifest names them."""
        self.budget = MemoryBudget(lambda: min(self._left_bytes(), self._enough_bytes()))
        self._read_ahead = ReadAheadBuffer()
        self.decoders = ThreadPool(plan.decode_threads, "kit-decode")
        self.batch_bytes = 0
        """Memory of the largest batch so far."""
        self._undecoded: deque[ChunkResponse] = deque()
        self._decode_lock = threading.Lock()
        self._decode_jobs = 0
        """Queued or running: one a thread, as a job takes all that has come meanwhile."""
        self._together_bytes = min(_TOGETHER_BYTES, plan.memory_bytes // _TOGETHER_SHARE)
        self._decoding_bytes = decoding * (self._together_bytes + largest_chunk_bytes(plan.arrays))
        self._stored_bytes: dict[str, int] = {}
        """The largest object met, for arrays whose chunks are objects of their own."""
        self._holes_bytes = plan.memory_bytes // HOLES_SHARE
        self._freed_bytes = 0
        """Read and decoded since freed memory was last given back: what came took the place of as much that went."""
        self._untidy_bytes = rss_bytes() + plan.memory_bytes // _UNTIDY_SHARE
        """Of the process, before anything is given back."""

    def close(self) -> None:
        """Nobody waits for memory, and nothing more is decoded."""
        self.budget.close()
        self.decoders.close()

    @property
    def held_bytes(self) -> int:
        """What is kept and on its way, beside batches."""
        return self.budget.taken_bytes + self._kept_bytes()

    # -- windows

    @property
    def can_read_ahead(self) -> bool:
        """Whether memory holds the stored bytes of one window more than the two that are pinned now."""
        plan, chunk = self._plan, largest_chunk_bytes(self._plan.arrays)
        found = self.indexes.nbytes + self.names.nbytes
        others = self._holes_bytes + self.cache.evictable_bytes + found + self._decoding_bytes
        requests = READY_TOO * plan.requests_in_flight * chunk + plan.batches_held * self.batch_bytes
        return others + requests + self.cache.pinned_chunks * chunk * 3 // 2 <= plan.memory_bytes

    def release(self, window: int) -> None:
        """Drop what this window and those before it pinned; decode the responses whose turn has come."""
        self.cache.release(window)
        self._decode_all(self._read_ahead.serve(window + 1))

    def decode_wanted(self) -> None:
        """Decode responses read ahead that a batch waits for by now."""
        self._decode_all(self._read_ahead.take_wanted())

    # -- before a request

    def places(self, request: ChunkRequest, index: Index | None) -> list[Place]:
        """Where chunks lie in a shard; those that it lacks are settled at once."""
        stored, places = request.stored, list[Place]()
        for chunk in request.chunks:
            span = None if index is None else stored.locate(index, chunk.coords)
            if span is None:
                self._fill(request, chunk, index)
            else:
                places.append((*span, chunk))
        return places

    def runs(self, places: Sequence[Place]) -> list[Run[Chunk]]:
        """The runs of neighbours to request from a shard."""
        found = runs(places, self._coalescing)
        self._counters.add(
            requests_saved=len(places) - len(found), bytes_wasted=sum(max(0, run.wasted_bytes) for run in found)
        )
        return found

    def response_bytes(self, request: ChunkRequest, run: Run[Chunk] | None) -> int:
        """Bytes that a request will bring; for an object of unknown size, those of the largest one like it."""
        if run is not None:
            return run.last - run.first
        return self._stored_bytes.get(request.stored.name) or request.stored.chunk_bytes

    def _spare_bytes(self) -> int:
        """For more transient chunks: of the memory left when the requests have theirs."""
        transient = self.cache.transient_bytes
        return (self._left_bytes() + transient - self._enough_bytes()) // TRANSIENT_SHARE - transient

    def _left_bytes(self) -> int:
        plan = self._plan
        others = self._kept_bytes() + self._decoding_bytes + plan.batches_held * self.batch_bytes
        return plan.memory_bytes - self._holes_bytes - others

    def _kept_bytes(self) -> int:
        chunks = self.cache.evictable_bytes + self.cache.pinned_bytes + self.cache.transient_bytes
        return chunks + self._read_ahead.nbytes + self.indexes.nbytes + self.names.nbytes

    def _enough_bytes(self) -> int:
        """What keeps the requests going."""
        return READY_TOO * self._plan.requests_in_flight * self.budget.largest_bytes

    # -- after it

    def on_response(
        self,
        request: ChunkRequest,
        run: Run[Chunk] | None,
        data: Octets | None,
        reservation: Reservation,
        at_once: bool = False,
    ) -> None:
        """Take what a request brought; `run` is None for a whole object, `data` where there is no object.

        `at_once`: reading took hardly any time, so decode in this thread.
        """
        if data is None:
            for chunk in request.chunks:
                self._fill(request, chunk, None)
            reservation.done()
            return
        stored = request.stored
        if run is None:
            self._stored_bytes[stored.name] = max(self._stored_bytes.get(stored.name, 0), len(data))
            reservation.correct(len(data))
            run = Run(0, len(data), [(0, len(data), request.chunks[0])])
        else:
            reservation.share(len(run.items))
        begins, several, responses = run.first, len(run.items) > 1, list[ChunkResponse]()
        for first, last, chunk in run.items:
            chunk.arrived = True
            part = data[first - begins : last - begins] if several else data
            response = ChunkResponse(self.cache, stored, chunk, part, last - first, several, reservation)
            if not self._read_ahead.keep(response):
                responses.append(response)
        self._decode_soon(responses, at_once)

    def scatter_soon(self, part: BatchPart, decoded: Mapping[tuple[int, ...], NDArray[Any]]) -> None:
        """Copy chunks that are decoded already, by their coordinates, in decoding threads."""

        def scatter(start: int) -> None:
            for coords in islice(decoded, start, start + _CHUNKS_PER_JOB):
                part.scatter(coords, decoded[coords])

        for start in range(0, len(decoded), _CHUNKS_PER_JOB):
            self.decoders.put(part.batch, scatter, start)

    def _decode_all(self, responses: Iterable[ChunkResponse]) -> None:
        for response in responses:
            if self.cache.still_wanted([response.chunk]):
                self._decode_soon([response])
            else:
                response.release_memory()

    def _decode_soon(self, responses: Sequence[ChunkResponse], at_once: bool = False) -> None:
        """Decode chunks of one array, here or in decoding threads."""
        if responses and responses[0].stored.in_place:
            self._decode(responses)
        elif at_once or self._decode_at_once:
            for response in responses:  # each by itself, or all would be in memory at once
                self._decode([response])
        elif responses:
            self._undecoded.extend(responses)
            with self._decode_lock:
                more = self._decode_jobs < self._plan.decode_threads
                self._decode_jobs += more
            if more:
                self.decoders.put(_Always(), self._decode_some)

    def _decode_some(self) -> None:
        """Decode the responses that have waited longest, those of one array in one call; then queue up again.

        Not where they are kept: then each would have to be copied apart, which takes as long.
        """
        taken: defaultdict[str, list[ChunkResponse]] = defaultdict(list)
        size_bytes = 0
        with contextlib.suppress(IndexError):  # there are no more
            while size_bytes < self._together_bytes:
                response = self._undecoded.popleft()
                taken[response.stored.name].append(response)
                size_bytes += response.stored.chunk_bytes
        for some in taken.values():
            found: Sequence[NDArray[Any]] = ()
            together = len(some) > 1
            for one in some:
                together = together and len(one.data) == one.size_bytes and not self.cache.would_keep(one.chunk)
            if together:
                with contextlib.suppress(Exception):  # decoded by itself, each says what is wrong with it
                    found = some[0].stored.decode_together([one.data for one in some])
            self._decode(some, found)
        with self._decode_lock:  # with this lock, whoever appends either starts a job or is seen here
            left = bool(self._undecoded)
            self._decode_jobs -= not left
        if left:
            self.decoders.put(_Always(), self._decode_some)

    def _decode(self, responses: Sequence[ChunkResponse], found: Sequence[NDArray[Any]] = ()) -> None:
        """Decode chunks of one array, unless that is done, and hand them to the batches that wait."""
        stored, ready = responses[0].stored, list[tuple[Chunk, NDArray[Any], NDArray[Any]]]()
        for response, decoded in zip_longest(responses, found):
            try:
                # A chunk that lies in bytes it shares with others would keep all of them in memory.
                shares = decoded is not None or (response.shared and stored.in_place)
                if decoded is None:
                    decoded = self._decoded(response)
                kept = stored.copy(decoded) if shares and self.cache.would_keep(response.chunk) else decoded
                ready.append((response.chunk, decoded, kept))
            except BaseException as error:
                response.fail(error)
        self._counters.add(chunks_decoded=len(ready))
        done: defaultdict[JobGroup[Any], int] = defaultdict(int)
        waiting = self.cache.settle((chunk, kept) for chunk, _, kept in ready)
        for (chunk, decoded, _), parts in zip(ready, waiting, strict=True):
            for part in parts:
                done[part.batch] += part.copy(chunk.coords, decoded)
        for batch, count in done.items():
            batch.part_done(count)
        for response in responses:
            response.release_memory()
            self._freed_bytes += response.size_bytes + stored.chunk_bytes  # without a lock: a lost count only delays it
        # Chunks come and go in an order that leaves holes: now and then what was freed goes back to the system.
        if self._freed_bytes > max(_LEAST_HOLES_BYTES, self._holes_bytes):
            self._freed_bytes = 0
            if rss_bytes() > self._untidy_bytes:
                give_memory_back()

    def _decoded(self, response: ChunkResponse) -> NDArray[Any]:
        try:
            if len(response.data) != response.size_bytes:
                raise ValueError(f"the store gave {len(response.data)} bytes instead of {response.size_bytes}")
            return response.stored.decode(response.data)
        except MemoryError:
            raise
        except Exception as error:
            where = f"{self._where}: chunk {response.chunk.coords} of {response.stored.name}"
            raise damage(where, error) from error

    def _fill(self, request: ChunkRequest, chunk: Chunk, index: Index | None) -> None:
        """A chunk that is not there: an error in a store that kit built or where strict, else Zarr's fill value."""
        stored = request.stored
        if self._plan.strict:
            dataset, key = self._plan.dataset.locate(request.key)
            reason = f"there is no object {key}"
            if index is not None:
                reason = f"the shard {key} does not hold it"
            ours = dataset.manifest is not None
            way_out = "verify the store, then build it anew" if ours else "data.strict: false reads its fill value"
            missing = MissingChunkError(
                f"{redact(dataset.url)}: chunk {chunk.coords} of {stored.name} is missing: {reason}; {way_out}"
            )
            self.cache.fail(chunk, missing)
            return
        filled = np.broadcast_to(np.asarray(stored.fill_value, stored.dtype), stored.chunk)
        self._counters.add(chunks_filled=1)
        for part in self.cache.settle([(chunk, filled)])[0]:
            self.decoders.put(part.batch, part.scatter, chunk.coords, filled)


class _Always:
    """Owns jobs that run whatever becomes of a batch; they tell their failures themselves."""

    cancelled = False

    def fail(self, error: BaseException) -> None:
        """Each response has failed by itself."""


class ReadAheadBuffer:
    """Stored bytes of chunks whose window is not decoded yet; call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: float = math.inf
        """The last window whose chunks are decoded when they come."""
        self._waiting: list[ChunkResponse] = []
        self.nbytes = 0
        """Memory of what waits."""

    def keep(self, response: ChunkResponse) -> bool:
        """Whether the response has to wait; it is kept then, and its reservation released."""
        if self._is_due(response.chunk):  # as nearly all are, which wait for no lock
            return False
        with self._lock:
            if self._is_due(response.chunk):
                return False
            if response.shared:  # else it would keep the whole of a longer response in memory
                response.data, response.shared = response.data.copy(), False
            self.nbytes += response.data.nbytes
            self._waiting.append(response)
        response.release_memory()
        return True

    def _is_due(self, chunk: Chunk) -> bool:
        return chunk.first_window <= self._last or bool(chunk.parts)

    def serve(self, window: int) -> list[ChunkResponse]:
        """This window is being served; returns the responses whose turn it is now."""
        with self._lock:
            self._last = last = window + WINDOWS_DECODED - 1
            return self._take(lambda response: response.chunk.first_window <= last)

    def take_wanted(self) -> list[ChunkResponse]:
        """Those that a batch waits for by now."""
        with self._lock:
            return self._take(lambda response: bool(response.chunk.parts))

    def _take(self, due: Callable[[ChunkResponse], bool]) -> list[ChunkResponse]:
        taken: list[ChunkResponse] = []
        kept: list[ChunkResponse] = []
        for response in self._waiting:
            (taken if due(response) else kept).append(response)
        self._waiting = kept
        self.nbytes -= sum(response.data.nbytes for response in taken)
        return taken
