"""ChunkCache: every chunk of one reader that is wanted, requested or decoded, each once, shared by all its batches.

A chunk that several batches want is requested for the first and joined by the others. A decoded chunk is kept for one
of three reasons, and counted in decoded bytes under that one:

- pinned: a window of block order needs it, until the window is released;
- evictable: used recently, within `budget_bytes`, the least recently used dropped first;
- transient: memory is spare, so the batches planned before those that used it are handed over may use it too: so what
  is requested does not depend on whether reading or training is the slower.

The invariant: under one lock a chunk is either waited for, by batches that will all hear of it, or decoded. No batch
waits for a chunk that nobody reads: one no longer wanted is forgotten before its request is dropped.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, ClassVar

from numpy.typing import NDArray

from kit.data.stores.transfer import Octets
from kit.data.stream.codec import StoredArray
from kit.data.stream.memory import Reservation
from kit.data.stream.pool import JobGroup
from kit.data.stream.scatter import ChunkUses

Key = tuple[int, tuple[int, ...]]
"""(variable, chunk coordinates)."""
_NO_WINDOW = -1
_CHUNKS_PER_LOCK = 16
"""Looked up under one hold of the lock, which every reading thread needs as well."""


@dataclass(slots=True)
class BatchPart:
    """What one batch takes from the chunks of one variable."""

    batch: JobGroup[Any]
    uses: ChunkUses
    target: NDArray[Any]

    def scatter(self, coords: tuple[int, ...], decoded: NDArray[Any]) -> None:
        """Copy what the batch takes from this chunk, and count it as done."""
        if self.copy(coords, decoded):
            self.batch.part_done()

    def copy(self, coords: tuple[int, ...], decoded: NDArray[Any]) -> bool:
        """Copy what the batch takes from this chunk; whether that is to be counted as done."""
        if self.batch.cancelled:
            return False
        try:
            self.uses.scatter(coords, decoded, self.target)
        except BaseException as error:
            self.batch.fail(error)
            return False
        return True


class Chunk:
    """One chunk of one variable: requested, or decoded."""

    __slots__ = (
        "arrived", "coords", "decoded", "first_window", "key", "parts", "stored", "transient_batches", "window",
    )  # fmt: skip

    def __init__(self, stored: StoredArray, key: Key) -> None:
        self.stored, self.key, self.coords = stored, key, key[1]
        self.decoded: NDArray[Any] | None = None
        self.arrived = False
        """Whether its stored bytes are here; whoever takes them says so."""
        self.parts: list[BatchPart] = []
        """Of the batches that wait for it."""
        self.transient_batches = 0
        """Batches it is kept for, where it is transient."""
        self.window = _NO_WINDOW
        """The last window that pins it."""
        self.first_window = _NO_WINDOW
        """The first window that wanted it, where a window is why it was requested."""

    @property
    def wanted(self) -> bool:
        if self.window != _NO_WINDOW:
            return True
        for part in self.parts:  # noqa: SIM110  `any` takes three times as long, several times a chunk
            if not part.batch.cancelled:
                return True
        return False


class ChunkCache:
    """The chunks of one reader; call from any thread.

    Args:
        budget_bytes: For evictable chunks.
        spare_bytes: Memory that nothing else needs at the moment, for more transient chunks.
    """

    def __init__(self, budget_bytes: int = 0, spare_bytes: Callable[[], int] = lambda: 0) -> None:
        self._budget_bytes, self._spare_bytes = budget_bytes, spare_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()
        self._pinned: defaultdict[int, list[Chunk]] = defaultdict(list)
        self._transient: defaultdict[JobGroup[Any], list[Chunk]] = defaultdict(list)
        self.pinned_bytes = self.evictable_bytes = self.transient_bytes = 0
        self._released = _NO_WINDOW

    @property
    def pinned_chunks(self) -> int:
        """Chunks that windows pin, decoded or not."""
        with self._lock:
            return sum(len(chunks) for chunks in self._pinned.values())

    def join(
        self, stored: StoredArray, variable: int, part: BatchPart
    ) -> tuple[dict[tuple[int, ...], NDArray[Any]], list[Chunk]]:
        """The chunks of a part that are decoded, by coordinates; and those not requested yet, for the caller to do."""
        here: dict[tuple[int, ...], NDArray[Any]] = {}
        new: list[Chunk] = []
        places = iter(part.uses.places)
        for _ in range(0, len(part.uses), _CHUNKS_PER_LOCK):
            with self._lock:
                for coords in islice(places, _CHUNKS_PER_LOCK):
                    chunk = self._find(stored, (variable, coords), new)
                    if chunk.decoded is None:
                        chunk.parts.append(part)
                    else:
                        here[coords] = chunk.decoded
                        if chunk.transient_batches:
                            chunk.transient_batches += 1
                            self._transient[part.batch].append(chunk)
        return here, new

    def pin(self, stored: StoredArray, variable: int, coords: Iterable[tuple[int, ...]], window: int) -> list[Chunk]:
        """Keep these chunks until `window` is released; returns those not requested yet, for the caller to do."""
        new: list[Chunk] = []
        with self._lock:
            for place in coords if window > self._released else ():
                known = len(new)
                chunk = self._find(stored, (variable, place), new)
                if chunk.window >= window:
                    continue
                if len(new) > known:
                    chunk.first_window = window
                if chunk.window == _NO_WINDOW and chunk.decoded is not None:
                    self._uncount(chunk, chunk.decoded)
                    self.pinned_bytes += _bytes(chunk.decoded)
                chunk.window = window
                self._pinned[window].append(chunk)
        return new

    def release(self, window: int) -> None:
        """Drop what no window after this one pins."""
        with self._lock:
            self._released = max(self._released, window)
            for done in [known for known in self._pinned if known <= window]:
                for chunk in self._pinned.pop(done):
                    if chunk.window != done:
                        continue
                    chunk.window = _NO_WINDOW
                    # One still on its way goes to the batches that wait for it.
                    if chunk.decoded is not None and self._forget(chunk):
                        self.pinned_bytes -= _bytes(chunk.decoded)
                        chunk.decoded = None  # whoever requested it may keep the chunk for long

    def end_batch(self, batch: JobGroup[Any]) -> None:
        """Drop the transient chunks of this batch alone; it is handed over, or cancelled."""
        with self._lock:
            for chunk in self._transient.pop(batch, ()):
                if chunk.transient_batches > 1:
                    chunk.transient_batches -= 1
                elif chunk.transient_batches and chunk.decoded is not None:  # else a window pins it, or did
                    self._uncount(chunk, chunk.decoded)
                    self._forget(chunk)
                    chunk.decoded = None

    def still_to_come(self) -> Counter[JobGroup[Any]]:
        """Chunks that each batch waits for and whose stored bytes are not here."""
        with self._lock:
            coming = [chunk for chunk in self._chunks.values() if not chunk.arrived and chunk.decoded is None]
            return Counter(part.batch for chunk in coming for part in chunk.parts)

    def still_wanted(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those that a batch or window waits for; the others are forgotten, so that who wants them next reads them."""
        with self._lock:
            kept = []
            for chunk in chunks:
                if chunk.wanted:
                    kept.append(chunk)
                else:
                    self._forget(chunk)
            return kept

    def would_keep(self, chunk: Chunk) -> bool:
        """Whether the chunk will be pinned or evictable when it is decoded; a window may still change that."""
        return chunk.window != _NO_WINDOW or self._budget_bytes > 0

    def settle(self, chunks: Iterable[tuple[Chunk, NDArray[Any]]]) -> list[list[BatchPart]]:
        """Chunks are decoded: keep those that there is reason to; returns the parts that wait for each."""
        found: list[list[BatchPart]] = []
        spare: int | None = None
        with self._lock:
            for chunk, decoded in chunks:
                parts, chunk.parts = chunk.parts, []
                found.append(parts)
                if self._chunks.get(chunk.key) is not chunk:
                    continue
                size = _bytes(decoded)
                if chunk.window != _NO_WINDOW:
                    chunk.decoded, spare = decoded, None
                    self.pinned_bytes += size
                elif size <= self._budget_bytes:
                    chunk.decoded, spare = decoded, None
                    self.evictable_bytes += size
                    self._evict()
                else:
                    batches = [part.batch for part in parts if not part.batch.cancelled]
                    spare = self._spare_bytes() if spare is None else spare
                    if batches and size <= spare:
                        chunk.decoded, chunk.transient_batches = decoded, len(batches)
                        self.transient_bytes += size
                        spare -= size
                        for batch in batches:
                            self._transient[batch].append(chunk)
                    else:
                        del self._chunks[chunk.key]
        return found

    def fail(self, chunk: Chunk, error: BaseException) -> None:
        """The chunk cannot be read: fail the batches that wait, and forget it, so that the next request tries again."""
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
        elif chunk.window == _NO_WINDOW and chunk.decoded is not None:
            self._chunks.move_to_end(key)
        return chunk

    def _uncount(self, chunk: Chunk, decoded: NDArray[Any]) -> None:
        """A transient or evictable chunk is kept for another reason now, or not at all."""
        if chunk.transient_batches:
            self.transient_bytes -= _bytes(decoded)
            chunk.transient_batches = 0
        else:
            self.evictable_bytes -= _bytes(decoded)

    def _forget(self, chunk: Chunk) -> bool:
        if self._chunks.get(chunk.key) is not chunk:
            return False
        del self._chunks[chunk.key]
        return True

    def _evict(self) -> None:
        for key in [*self._chunks] if self.evictable_bytes > self._budget_bytes else ():
            chunk = self._chunks[key]
            if chunk.decoded is not None and chunk.window == _NO_WINDOW and not chunk.transient_batches:
                del self._chunks[key]
                self.evictable_bytes -= _bytes(chunk.decoded)
                chunk.decoded = None
                if self.evictable_bytes <= self._budget_bytes:
                    return


def _bytes(decoded: NDArray[Any]) -> int:
    """Memory of a decoded chunk; one of fill values, or of an array that lacks a dimension, repeats what is there."""
    if 0 not in decoded.strides:
        return decoded.nbytes
    sides = zip(decoded.shape, decoded.strides, strict=True)
    return int(prod(side for side, stride in sides if stride)) * decoded.itemsize


@dataclass(slots=True)
class ChunkRequest:
    """Chunks to read from one object, a shard or the chunk itself; owns jobs, and fails by telling the cache."""

    cache: ChunkCache
    stored: StoredArray
    key: str
    chunks: list[Chunk]
    cancelled: ClassVar[bool] = False
    """Never: chunks that nobody wants any more are forgotten when the request's turn comes, not skipped."""

    def fail(self, error: BaseException) -> None:
        for chunk in self.chunks:
            self.cache.fail(chunk, error)

    def part(self, chunks: Iterable[Chunk]) -> ChunkRequest:
        """Some of the chunks."""
        return ChunkRequest(self.cache, self.stored, self.key, [*chunks])


@dataclass(slots=True)
class ChunkResponse:
    """The stored bytes of one chunk; owns the job that decodes them, and fails by telling the cache."""

    cache: ChunkCache
    stored: StoredArray
    chunk: Chunk
    data: Octets
    size_bytes: int
    """What was requested; `data` has fewer bytes where the object ends early."""
    shared: bool
    """Whether they are part of a longer response."""
    reservation: Reservation | None
    """The memory of that response."""
    cancelled: ClassVar[bool] = False

    def fail(self, error: BaseException) -> None:
        self.cache.fail(self.chunk, error)

    def release_memory(self) -> None:
        """Its bytes do not count as those of requests any more; safe to call twice."""
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            reservation.done()
