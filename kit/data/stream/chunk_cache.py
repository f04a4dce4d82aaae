"""Cache: every chunk that is wanted, being read, or decoded and kept, each once, shared by all batches of one reader.

A chunk that several batches want is read for the first and joined by the others. What is kept when it is decoded: in
block order the chunks of the windows being served, until they are released; else the most recently used, within
`budget_bytes`. Of memory that nothing else needs, a chunk is lent to the batches that waited for it until they are
whole: those planned meanwhile take it too. Sizes are decoded bytes.

The invariant: under one lock a chunk is either waited for, by batches that will all be told, or decoded. So no batch
waits for a chunk that nobody reads: one that is not wanted any more is forgotten before its request is given up.

ChunkRequest: what a reader asks a store for, and what it gets, as jobs of its threads.

A `ChunkRequest` holds chunks that lie in one object, a `ChunkResponse` the bytes of one chunk. Both are owners of jobs
that fail by telling the cache, which tells every batch that waits; so no batch waits for a job that died.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from kit.data.stores.transfer import Octets
from kit.data.stream.codec import StoredArray
from kit.data.stream.memory import Reservation
from kit.data.stream.pool import JobGroup
from kit.data.stream.scatter import ChunkUses

Key = tuple[int, tuple[int, ...]]
"""(variable, chunk coordinates)."""
_FREE = -1
_CHUNKS_A_TURN = 16
"""Under one hold of the lock, which every thread that reads needs as well."""


@dataclass(slots=True)
class BatchPart:
    """What one batch takes from the chunks of one variable."""

    batch: JobGroup[Any]
    uses: ChunkUses
    target: NDArray[Any]

    def scatter(self, coords: tuple[int, ...], decoded: NDArray[Any]) -> None:
        """Copy what it takes from this chunk, and let the batch know."""
        if not self.batch.over:
            try:
                self.uses.scatter(coords, decoded, self.target)
                self.batch.part_done()
            except BaseException as error:
                self.batch.fail(error)


class Chunk:
    """One chunk of one variable: waited for, being read, or decoded."""

    __slots__ = ("coords", "decoded", "key", "lent_to", "parts", "since", "stored", "window")

    def __init__(self, stored: StoredArray, key: Key) -> None:
        self.stored, self.key, self.coords = stored, key, key[1]
        self.decoded: NDArray[Any] | None = None
        self.parts: list[BatchPart] = []
        """Who waits for it."""
        self.lent_to = 0
        """Batches it is kept for, where that is the only reason."""
        self.window = _FREE
        """The last window that holds it."""
        self.since = _FREE
        """The first one, where a window is why it was asked for."""

    @property
    def wanted(self) -> bool:
        return self.window != _FREE or any(not part.batch.over for part in self.parts)


class ChunkCache:
    """The chunks of one reader; call from any thread.

    Args:
        budget_bytes: Of the chunks used last that are kept for later batches.
        spare_bytes: Memory that nothing else needs at the moment, for chunks that are lent.
    """

    def __init__(self, budget_bytes: int = 0, spare_bytes: Callable[[], int] = lambda: 0) -> None:
        self._budget_bytes, self._spare_bytes = budget_bytes, spare_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()
        self._held: defaultdict[int, list[Chunk]] = defaultdict(list)
        self.free_bytes = 0
        """Decoded chunks kept for later batches, without those that a window holds."""
        self.held_bytes = 0
        """Decoded chunks that a window holds."""
        self._lent: defaultdict[JobGroup[Any], list[Chunk]] = defaultdict(list)
        self.lent_bytes = 0
        """Decoded chunks kept until the batches that waited for them are whole."""
        self._released = _FREE

    @property
    def held_chunks(self) -> int:
        """Chunks that windows hold, decoded or not."""
        with self._lock:
            return sum(len(chunks) for chunks in self._held.values())

    def join(
        self, stored: StoredArray, variable: int, part: BatchPart
    ) -> tuple[dict[tuple[int, ...], NDArray[Any]], list[Chunk]]:
        """The chunks of a part that are decoded, by coordinates; and those nobody reads yet, for the caller to read."""
        here: dict[tuple[int, ...], NDArray[Any]] = {}
        new: list[Chunk] = []
        places = iter(part.uses.places)
        for _ in range(0, len(part.uses), _CHUNKS_A_TURN):
            with self._lock:
                for coords in islice(places, _CHUNKS_A_TURN):
                    chunk = self._find(stored, (variable, coords), new)
                    if chunk.decoded is None:
                        chunk.parts.append(part)
                    else:
                        here[coords] = chunk.decoded
        return here, new

    def hold(self, stored: StoredArray, variable: int, coords: Iterable[tuple[int, ...]], window: int) -> list[Chunk]:
        """Keep these chunks until `window` is released; returns those nobody reads yet, for the caller to read."""
        new: list[Chunk] = []
        with self._lock:
            for place in coords if window > self._released else ():
                known = len(new)
                chunk = self._find(stored, (variable, place), new)
                if chunk.window >= window:
                    continue
                if len(new) > known:
                    chunk.since = window
                if chunk.window == _FREE and chunk.decoded is not None:
                    self._uncount(chunk, chunk.decoded)
                    self.held_bytes += _bytes(chunk.decoded)
                chunk.window = window
                self._held[window].append(chunk)
        return new

    def release(self, window: int) -> None:
        """Drop what no window after this one holds."""
        with self._lock:
            self._released = max(self._released, window)
            for done in [known for known in self._held if known <= window]:
                for chunk in self._held.pop(done):
                    if chunk.window == done:
                        chunk.window = _FREE
                        self._drop(chunk)

    def end_batch(self, batch: JobGroup[Any]) -> None:
        """Drop what was lent to this batch alone; it is whole, or given up."""
        with self._lock:
            for chunk in self._lent.pop(batch, ()):
                if chunk.lent_to > 1:
                    chunk.lent_to -= 1
                elif chunk.lent_to and chunk.decoded is not None:  # else a window holds it, or did
                    self._uncount(chunk, chunk.decoded)
                    self._forget(chunk)
                    chunk.decoded = None

    def still_wanted(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those that somebody waits for; the others are forgotten, so that whoever wants them next reads them."""
        with self._lock:
            kept = []
            for chunk in chunks:
                if chunk.wanted:
                    kept.append(chunk)
                else:
                    self._forget(chunk)
            return kept

    def would_keep(self, chunk: Chunk) -> bool:
        """Whether the chunk stays here when it is decoded; a window may still change that."""
        return chunk.window != _FREE or self._budget_bytes > 0

    def settle(self, chunk: Chunk, decoded: NDArray[Any]) -> list[BatchPart]:
        """The chunk is there: keep it if there is reason to, and return who waits for it."""
        with self._lock:
            parts, chunk.parts = chunk.parts, []
            if self._chunks.get(chunk.key) is not chunk:
                return parts
            size = _bytes(decoded)
            if chunk.window != _FREE:
                chunk.decoded = decoded
                self.held_bytes += size
            elif size <= self._budget_bytes:
                chunk.decoded = decoded
                self.free_bytes += size
                self._evict()
            elif not self._lend(chunk, parts, decoded):
                del self._chunks[chunk.key]
            return parts

    def fail(self, chunk: Chunk, error: BaseException) -> None:
        """The chunk cannot be had: tell who waits, and forget it, so that the next ask tries again."""
        with self._lock:
            parts, chunk.parts = chunk.parts, []
            self._forget(chunk)
        for part in parts:
            part.batch.fail(error)

    def _find(self, stored: StoredArray, key: Key, new: list[Chunk]) -> Chunk:
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = Chunk(stored, key)
            new.append(chunk)
        elif chunk.window == _FREE and chunk.decoded is not None:
            self._chunks.move_to_end(key)
        return chunk

    def _lend(self, chunk: Chunk, parts: Iterable[BatchPart], decoded: NDArray[Any]) -> bool:
        size, batches = _bytes(decoded), [part.batch for part in parts if not part.batch.over]
        if not batches or size > self._spare_bytes():
            return False
        chunk.decoded, chunk.lent_to = decoded, len(batches)
        self.lent_bytes += size
        for batch in batches:
            self._lent[batch].append(chunk)
        return True

    def _uncount(self, chunk: Chunk, decoded: NDArray[Any]) -> None:
        """A decoded chunk that no window holds is kept for another reason now, or not at all."""
        if chunk.lent_to:
            self.lent_bytes -= _bytes(decoded)
            chunk.lent_to = 0
        else:
            self.free_bytes -= _bytes(decoded)

    def _drop(self, chunk: Chunk) -> None:
        """A chunk that no window holds any more; one still on its way goes to those who wait for it."""
        if chunk.decoded is not None and self._forget(chunk):
            self.held_bytes -= _bytes(chunk.decoded)
            chunk.decoded = None  # whoever asked for it may know it for long

    def _forget(self, chunk: Chunk) -> bool:
        if self._chunks.get(chunk.key) is not chunk:
            return False
        del self._chunks[chunk.key]
        return True

    def _evict(self) -> None:
        for key in [*self._chunks] if self.free_bytes > self._budget_bytes else ():
            chunk = self._chunks[key]
            if chunk.decoded is not None and chunk.window == _FREE and not chunk.lent_to:
                del self._chunks[key]
                self.free_bytes -= _bytes(chunk.decoded)
                chunk.decoded = None
                if self.free_bytes <= self._budget_bytes:
                    return


def _bytes(decoded: NDArray[Any]) -> int:
    """Memory of a decoded chunk; one of fill values repeats a single element."""
    return decoded.nbytes if any(decoded.strides) else decoded.itemsize


@dataclass(slots=True)
class ChunkRequest:
    """Chunks to read from one object: all of a shard, or the one that the object is."""

    cache: ChunkCache
    stored: StoredArray
    key: str
    chunks: list[Chunk]

    @property
    def over(self) -> bool:
        """Never: a chunk that nobody wants any more is forgotten when its turn comes, not skipped."""
        return False

    def fail(self, error: BaseException) -> None:
        """Tell all who wait for these chunks."""
        for chunk in self.chunks:
            self.cache.fail(chunk, error)

    def part(self, chunks: Iterable[Chunk]) -> ChunkRequest:
        """Some of the chunks."""
        return ChunkRequest(self.cache, self.stored, self.key, [*chunks])


@dataclass(slots=True)
class ChunkResponse:
    """The bytes of one chunk."""

    cache: ChunkCache
    stored: StoredArray
    chunk: Chunk
    data: Octets
    size_bytes: int
    shared: bool
    """Whether they are part of a longer answer."""
    claim: Reservation | None
    """The memory of that answer."""

    @property
    def complete(self) -> bool:
        """Whether the store gave all of it."""
        return len(self.data) == self.size_bytes

    @property
    def over(self) -> bool:
        """Never: it has been read, and is soon decoded."""
        return False

    def fail(self, error: BaseException) -> None:
        """Tell all who wait for this chunk."""
        self.cache.fail(self.chunk, error)

    def give_room_back(self) -> None:
        """It needs no room of requests any more; safe to call twice."""
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.done()
