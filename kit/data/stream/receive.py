"""ReceiveQueue: what becomes of the bytes that requests give: room for them, decoded chunks, and batches that are told.

Whichever way a store is read, a request takes room for its answer first, and gives the answer here. Decoding and
scattering run in `decode_threads` threads; when they fall behind, there is no room and no more is asked for. A chunk
that cannot be had fails the batches that wait for it.

Strict: an object or inner chunk that is not there is an error, never fill values, and so are bytes that fail their
checksum or are too few. Only a store that kit did not build may leave chunks out, as Zarr allows, unless `data.strict`
forbids it; they are filled and counted.

Early: answers for a window after the next one, kept as they came until its turn to be decoded.

Requests for a window take as long as the slowest of them, so they are sent two windows ahead where memory allows;
decoded chunks are held for the window being served and the next one only. In between the stored bytes wait here. They
take no room of requests, so nothing waits for them; an answer that somebody waits for is never kept.
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
from kit.chunks.resources import HOLES_SHARE, LENT_SHARE, READY_TOO
from kit.data.stores.transfer import Counters, Octets
from kit.data.stores.url import redact
from kit.data.stream.chunk_cache import BatchPart, Chunk, ChunkCache, ChunkRequest, ChunkResponse
from kit.data.stream.codec import LARGEST_BYTES, Index, ShardIndexes, damage
from kit.data.stream.memory import MemoryBudget, ReaderPlan, Reservation, largest_chunk_bytes
from kit.data.stream.pool import ThreadPool
from kit.errors import MissingChunkError
from kit.machine.processes import give_memory_back, rss_bytes

_CHUNKS_PER_JOB = 64
_TOGETHER_BYTES = 1 << 20
"""Of chunks decoded in one call: more saves little, and keeps those who wait for the first of them waiting."""
_TOGETHER_SHARE = 64
_INDEX_SHARE = 8
_LEAST_HOLES_BYTES = 2 << 20
"""Handing memory back more often would cost more than it gives."""
_UNTIDY_SHARE = 2
"""The process may grow by this part of the memory allowed before anything is handed back: pages that come anew cost
more than they hold."""


class ReceiveQueue:
    """Takes answers; call from any thread.

    Args:
        coalescing: Which neighbours in a shard share a request.
        decode_at_once: Decode in the thread that has just read, which took no time to speak of.
        decoding: Threads that decode at once, at most.
    """

    def __init__(
        self, plan: ReaderPlan, counters: Counters, coalescing: Coalescing, *, decode_at_once: bool, decoding: int
    ) -> None:
        self._plan, self._counters, self._coalescing = plan, counters, coalescing
        self._decode_at_once = decode_at_once
        self._where = redact(plan.url)
        self.cache = ChunkCache(plan.cache_bytes, self._spare_bytes)
        self.indexes = ShardIndexes(min(LARGEST_BYTES, plan.memory_bytes // _INDEX_SHARE))
        self.room = MemoryBudget(self._room_bytes)
        self._early = ReadAheadBuffer()
        self.decoders = ThreadPool(plan.decode_threads, "kit-decode")
        self.batch_bytes = 0
        """Memory of the largest batch so far."""
        self._undecoded: deque[ChunkResponse] = deque()
        self._together_bytes = min(_TOGETHER_BYTES, plan.memory_bytes // _TOGETHER_SHARE)
        self._decoding_bytes = decoding * (self._together_bytes + largest_chunk_bytes(plan.arrays))
        self._stored_bytes: dict[str, int] = {}
        """The largest object met, for arrays whose chunks are objects of their own."""
        self._holes_bytes = plan.memory_bytes // HOLES_SHARE
        self._freed_bytes = 0
        """Read and decoded since freed memory was last handed back: what came took the place of as much that went."""
        self._untidy_bytes = rss_bytes() + plan.memory_bytes // _UNTIDY_SHARE
        """Of the process, before anything is handed back."""

    def close(self) -> None:
        """Nobody waits for room, and nothing more is decoded."""
        self.room.close()
        self.decoders.close()

    # -- windows

    @property
    def has_room_for_early_answers(self) -> bool:
        """Whether memory holds the stored bytes of one window more than the two that are held now."""
        plan, chunk = self._plan, largest_chunk_bytes(self._plan.arrays)
        others = self._holes_bytes + self.cache.free_bytes + self.indexes.nbytes + self._decoding_bytes
        requests = READY_TOO * plan.requests_in_flight * chunk + plan.batches_held * self.batch_bytes
        return others + requests + self.cache.held_chunks * chunk * 3 // 2 <= plan.memory_bytes

    def release(self, window: int) -> None:
        """Drop what this window and those before it held; answers whose turn has come are decoded."""
        self.cache.release(window)
        self._decode_all(self._early.serve(window + 1))

    def decode_wanted(self) -> None:
        """Decode early answers that a batch waits for by now."""
        self._decode_all(self._early.wanted())

    # -- before a request

    def runs(self, wanted: ChunkRequest, index: Index | None) -> list[Run[Chunk]]:
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

    def size_of(self, wanted: ChunkRequest, run: Run[Chunk] | None) -> int:
        """Bytes that a request will bring; of an object not known before, those of the largest one like it."""
        if run is not None:
            return run.last - run.first
        stored = wanted.stored
        return self._stored_bytes.get(stored.name) or stored.chunk_bytes

    def _room_bytes(self) -> int:
        """Memory left for what is asked for and not decoded, but no more than keeps the requests going."""
        return min(self._left_bytes(), self._enough_bytes())

    def _spare_bytes(self) -> int:
        """For more chunks to be lent: of the memory left when the requests have theirs."""
        lent = self.cache.lent_bytes
        return (self._left_bytes() + lent - self._enough_bytes()) // LENT_SHARE - lent

    def _left_bytes(self) -> int:
        plan, cache = self._plan, self.cache
        kept = cache.free_bytes + cache.held_bytes + cache.lent_bytes + self._early.nbytes + self.indexes.nbytes
        others = kept + self._decoding_bytes + plan.batches_held * self.batch_bytes
        return plan.memory_bytes - self._holes_bytes - others

    def _enough_bytes(self) -> int:
        """What keeps the requests going."""
        return READY_TOO * self._plan.requests_in_flight * self.room.largest_bytes

    # -- after it

    def deliver(self, wanted: ChunkRequest, run: Run[Chunk] | None, data: Octets | None, claim: Reservation) -> None:
        """Pass on what a request gave; `run` is None for a whole object."""
        if data is None:
            for chunk in wanted.chunks:
                self._fill(wanted, chunk, None)
            claim.done()
        elif run is None:
            self._stored_bytes[wanted.stored.name] = max(self._stored_bytes.get(wanted.stored.name, 0), len(data))
            claim.correct(len(data))
            self._decode_soon(ChunkResponse(self.cache, wanted.stored, wanted.chunks[0], data, len(data), False, claim))
        else:
            claim.share(len(run.items))
            for first, last, chunk in run.items:
                part, shared = data[first - run.first : last - run.first], len(run.items) > 1
                self._decode_soon(ChunkResponse(self.cache, wanted.stored, chunk, part, last - first, shared, claim))

    def scatter_soon(self, part: BatchPart, here: Mapping[tuple[int, ...], NDArray[Any]]) -> None:
        """Copy what is decoded already, by its coordinates, in decoding threads."""
        for start in range(0, len(here), _CHUNKS_PER_JOB):
            self.decoders.put(part.batch, _scatter, part, here, start)

    def _decode_soon(self, answer: ChunkResponse) -> None:
        """When the turn of its window has come."""
        if not self._early.keep(answer):
            self._decode_now_or_soon(answer)

    def _decode_all(self, answers: Iterable[ChunkResponse]) -> None:
        for answer in answers:
            if self.cache.still_wanted([answer.chunk]):
                self._decode_now_or_soon(answer)
            else:
                answer.give_room_back()

    def _decode_now_or_soon(self, answer: ChunkResponse) -> None:
        if self._decode_at_once or answer.stored.in_place:
            self._decode(answer)
        else:
            self._undecoded.append(answer)
            self.decoders.put(answer, self._decode_some)  # one job each, so none is left: some will find nothing

    def _decode_some(self) -> None:
        """Decode the answers that have waited longest, those of one array in one call."""
        taken: defaultdict[str, list[ChunkResponse]] = defaultdict(list)
        size_bytes = 0
        with contextlib.suppress(IndexError):  # there are no more
            while size_bytes < self._together_bytes:
                answer = self._undecoded.popleft()
                taken[answer.stored.name].append(answer)
                size_bytes += answer.stored.chunk_bytes
        for answers in taken.values():
            self._decode_together(answers)

    def _decode_together(self, answers: Sequence[ChunkResponse]) -> None:
        """In one call where they are not kept: those that are would have to be copied apart, which takes as long."""
        found: Sequence[NDArray[Any]] = ()
        if len(answers) > 1 and all(answer.complete and not self.cache.would_keep(answer.chunk) for answer in answers):
            with contextlib.suppress(Exception):  # by itself, each says what is wrong with it
                found = answers[0].stored.decode_together([answer.data for answer in answers])
        for answer, decoded in zip_longest(answers, found):
            self._decode(answer, decoded)

    def _decode(self, answer: ChunkResponse, decoded: NDArray[Any] | None = None) -> None:
        """Decode it, unless that is `decoded` already together with others, and tell who waits."""
        together = decoded is not None
        try:
            if decoded is None:
                decoded = self._decoded(answer)
            self._counters.add(chunks_decoded=1)
            # A chunk that lies in bytes it shares with others would keep all of them in memory.
            shares = together or (answer.shared and answer.stored.in_place)
            kept = decoded.copy() if shares and self.cache.would_keep(answer.chunk) else decoded
            for part in self.cache.settle(answer.chunk, kept):
                part.scatter(answer.chunk.coords, decoded)
        except BaseException as error:
            answer.fail(error)
            return
        finally:
            answer.give_room_back()
        self._hand_back(answer.size_bytes + decoded.nbytes)

    def _decoded(self, answer: ChunkResponse) -> NDArray[Any]:
        try:
            if not answer.complete:
                raise ValueError(f"the store gave {len(answer.data)} bytes instead of {answer.size_bytes}")
            return answer.stored.decode(answer.data)
        except MemoryError:
            raise
        except Exception as error:
            raise damage(f"{self._where}: chunk {answer.chunk.coords} of {answer.stored.name}", error) from error

    def _fill(self, wanted: ChunkRequest, chunk: Chunk, index: Index | None) -> None:
        """A chunk that is not there: an error in a store that kit built or where strict, else Zarr's fill value."""
        stored = wanted.stored
        if self._plan.strict:
            reason = f"there is no object {wanted.key}" if index is None else f"the shard {wanted.key} does not hold it"
            ours = self._plan.manifest is not None
            way_out = "verify the store, then build it anew" if ours else "data.strict: false reads its fill value"
            missing = MissingChunkError(
                f"{self._where}: chunk {chunk.coords} of {stored.name} is missing: {reason}; {way_out}"
            )
            self.cache.fail(chunk, missing)
            return
        filled = np.broadcast_to(np.asarray(stored.fill_value, stored.dtype), stored.chunk)
        self._counters.add(chunks_filled=1)
        for part in self.cache.settle(chunk, filled):
            self.decoders.put(part.batch, part.scatter, chunk.coords, filled)

    def _hand_back(self, freed_bytes: int) -> None:
        """Now and then return to the system what was freed: chunks come and go in an order that leaves holes."""
        self._freed_bytes += freed_bytes  # counted without a lock: a lost count only delays it
        if self._freed_bytes > max(_LEAST_HOLES_BYTES, self._holes_bytes):
            self._freed_bytes = 0
            if rss_bytes() > self._untidy_bytes:
                give_memory_back()


def _scatter(part: BatchPart, here: Mapping[tuple[int, ...], NDArray[Any]], start: int) -> None:
    for coords in islice(here, start, start + _CHUNKS_PER_JOB):
        part.scatter(coords, here[coords])


WINDOWS_DECODED = 2
"""The one being served and the next one."""


class ReadAheadBuffer:
    """Answers by the first window that wants them; call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: float = math.inf
        """The last window whose chunks are decoded when they come."""
        self._waiting: list[ChunkResponse] = []
        self.nbytes = 0
        """Memory of what waits."""

    def keep(self, answer: ChunkResponse) -> bool:
        """Whether the answer has to wait; it is kept then, and its room given back."""
        with self._lock:
            if answer.chunk.since <= self._last or answer.chunk.parts:
                return False
            if answer.shared:  # else it would keep the whole of a longer answer in memory
                answer.data, answer.shared = answer.data.copy(), False
            self.nbytes += answer.data.nbytes
            self._waiting.append(answer)
        answer.give_room_back()
        return True

    def serve(self, window: int) -> list[ChunkResponse]:
        """This window is being served; returns the answers whose turn it is now."""
        with self._lock:
            self._last = last = window + WINDOWS_DECODED - 1
            return self._take(lambda answer: answer.chunk.since <= last)

    def wanted(self) -> list[ChunkResponse]:
        """Those that a batch waits for by now."""
        with self._lock:
            return self._take(lambda answer: bool(answer.chunk.parts))

    def _take(self, due: Callable[[ChunkResponse], bool]) -> list[ChunkResponse]:
        if not self._waiting:
            return []
        taken: list[ChunkResponse] = []
        kept: list[ChunkResponse] = []
        for answer in self._waiting:
            (taken if due(answer) else kept).append(answer)
        self._waiting = kept
        self.nbytes -= sum(answer.data.nbytes for answer in taken)
        return taken
