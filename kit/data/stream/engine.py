"""Engine: streams batches of patches out of a Zarr store, in order, several read ahead. No torch.

A batch is float32 values `(sample, variable, *dims)`, decoded by the CF conventions and standardised when asked, and a
mask of the same shape; a missing element is 0 and not valid. The engine holds no handle: it opens the store on first
use in each process, so it pickles and survives a fork. Leaving a stream early cancels what was read ahead.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kit.chunks.requests import Coalescing
from kit.data.dataset import Dataset
from kit.data.stores.counters import Counters
from kit.data.stores.disk_cache import ReadCache
from kit.data.stream.memory import Allocate, Arrays, ReaderPlan
from kit.data.stream.reader import Reader
from kit.data.stream.receive import WINDOWS_DECODED
from kit.data.stream.scatter import Packing

REQUEST_SECONDS = 60.0
"""How long one request may take before the store counts as out of reach; below a trial's stall limit."""
_OPENING = threading.RLock()
_inherited: list[Reader] = []
"""Readers of a parent process: never collected, as closing their sockets would disturb the parent's event loop."""


class Engine:
    """Reads patches of some variables of one dataset.

    Args:
        dataset: What the store holds.
        variables: Names of the variables, stacked in this order; empty for all of one shape.
        requests_in_flight: Requests open at once, at most; beyond 32 no more than help (`kit.data.stores.transfer`).
        decode_threads: Threads that decompress and copy.
        batches_ahead: Batches read before they are asked for.
        standardize: Shift and scale by the mean and deviation found while building.
        request_seconds: How long one request may take.
        cache_bytes: Decoded chunks kept for later batches, the least recently used dropped first.
        coalescing: Which neighbours in a shard share a request; what pays in a folder is known without.
        memory_bytes: Host memory for batches, chunks being read and decoded, cache and windows, with the holes they
            leave; opening takes `kit.chunks.resources.OPENING_BYTES` besides, once.
        allocate: Makes the arrays of a batch; `numpy.empty` unless told otherwise.
        read_cache: Keeps what requests to an object store gave.
        as_stored: Give the numbers of one variable in their stored type, neither decoded nor masked.

    Raises:
        ConfigError: for an unknown or non-numeric variable, or one to be standardised without statistics.
    """

    def __init__(
        self,
        dataset: Dataset,
        variables: Sequence[str] = (),
        *,
        requests_in_flight: int = 32,
        decode_threads: int = 2,
        batches_ahead: int = 2,
        standardize: bool = False,
        request_seconds: float = REQUEST_SECONDS,
        cache_bytes: int = 0,
        coalescing: Coalescing | None = None,
        memory_bytes: int = 4 << 30,
        allocate: Allocate = np.empty,
        read_cache: ReadCache | None = None,
        as_stored: bool = False,
    ) -> None:
        arrays = tuple(dataset.select(variables))
        assert len(arrays) == 1 or not as_stored, "one array has one type"
        self._plan = ReaderPlan(
            url=dataset.url,
            open_store=dataset.open_store,
            arrays=arrays,
            packings=tuple(Packing.of(info, standardize) for info in arrays),
            strict=dataset.strict or dataset.manifest is not None,
            requests_in_flight=requests_in_flight,
            decode_threads=decode_threads,
            request_seconds=request_seconds,
            cache_bytes=cache_bytes,
            coalescing=coalescing or Coalescing(),
            memory_bytes=memory_bytes,
            batches_held=batches_ahead + 2,
            allocate=allocate,
            read_cache=read_cache,
            dataset=dataset,
            as_stored=as_stored,
        )
        self._batches_ahead = batches_ahead
        self._counters = Counters()
        self.spans = Spans()
        self._reader: Reader | None = None
        self._first_window = 0
        """Windows of one stream are numbered after those of the last, since the reader holds both for a while."""

    @property
    def counters(self) -> dict[str, int]:
        """What this process has read; names as in `kit.data.stores.counters`."""
        counts = self._counters.values()
        if self._reader is not None:
            counts["samples_read"] += self._reader.samples_under_way
        return counts

    @property
    def strict(self) -> bool:
        """Whether a missing chunk is an error."""
        return self._plan.strict

    @property
    def open_requests(self) -> tuple[int, str]:
        """How many requests this process may have open now, and the reason where they are fewer than allowed."""
        return (self._plan.requests_in_flight, "") if self._reader is None else self._reader.open_requests

    @property
    def held_bytes(self) -> int:
        """Memory of what this process keeps and requests, beside batches, by its own count."""
        return 0 if self._reader is None else self._reader.held_bytes

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables, in the order they are stacked."""
        return tuple(info.name for info in self._plan.arrays)

    def count(self, **counts: int) -> None:
        """Add to the counters what the engine itself cannot see."""
        self._counters.add(**counts)

    def read(self, offsets: NDArray[np.int64], patch: Sequence[int]) -> Arrays:
        """One batch by itself, from any thread; several may be read at once.

        Raises:
            As `stream`.
        """
        return self._open().start(offsets, patch).result()

    def stream(self, batches: Iterable[NDArray[np.int64]], patch: Sequence[int]) -> Iterator[Arrays]:
        """Values and validity of each batch of offsets `(sample, dim)`, in order.

        Raises:
            StoreError: when the store cannot be reached.
            MissingChunkError: when a store that kit built, or a strict dataset, lacks a chunk.
            CorruptChunkError: when bytes are damaged or too few.
            IndexError: for a patch that reaches outside the arrays.
        """
        reader = self._open()
        waiting: deque[Future[Arrays]] = deque()
        try:
            for offsets in batches:
                waiting.append(reader.start(offsets, patch, until_handed=True))
                self.spans.follow(waiting[-1])
                if len(waiting) > self._batches_ahead:
                    yield self._next(waiting)
                    reader.hand_over(waiting.popleft())
            while waiting:
                yield self._next(waiting)
                reader.hand_over(waiting.popleft())
        finally:
            self.spans.forget()
            for future in waiting:
                future.cancel()
                reader.hand_over(future)

    def stream_windows(
        self, batches: Iterable[tuple[NDArray[np.int64], int]], patch: Sequence[int]
    ) -> Iterator[Arrays]:
        """As `stream`, for batches with the number of the last window each draws from; numbers never fall.

        While a window is served its chunks are pinned, and those of the next one are read, whatever `batches_ahead` is;
        those of the one after it are requested too, where memory holds their stored bytes.

        Raises:
            As `stream`.
        """
        reader = self._open()
        windows = _Windows(reader, patch, iter(batches), self._batches_ahead, self._first_window, self.spans)
        try:
            yield from windows.serve()
        finally:
            self._first_window = windows.end()

    def _next(self, waiting: deque[Future[Arrays]]) -> Arrays:
        arrays = waiting[0].result()  # it leaves the queue only when it has been taken, so that an interrupt cancels it
        self.spans.hand_over()
        return arrays

    def _open(self) -> Reader:
        """This process's reader, opened on first use by whichever thread comes first."""
        with _OPENING:
            reader = self._reader
            if reader is not None and reader.pid != os.getpid():
                _inherited.append(reader)
                self._counters = Counters()
                reader = None
            if reader is None or reader.closed:
                reader = self._reader = Reader(self._plan, self._counters)
                weakref.finalize(self, reader.close)
            return reader

    def close(self) -> None:
        """Stop reading and let go of the store; the next stream opens it again."""
        if self._reader is not None:
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}


class _Windows:
    """One pass over batches that are drawn from windows."""

    def __init__(
        self,
        reader: Reader,
        patch: Sequence[int],
        batches: Iterator[tuple[NDArray[np.int64], int]],
        ahead: int,
        first: int,
        spans: Spans,
    ) -> None:
        self._reader, self._patch, self._batches, self._ahead = reader, patch, batches, ahead
        self._spans = spans
        self._first = self._served = self._last = first
        self._pinned: deque[tuple[NDArray[np.int64], int]] = deque()
        """Batches whose chunks are pinned, not yet begun."""
        self._begun: deque[tuple[Future[Arrays], int]] = deque()
        self._drawn: tuple[NDArray[np.int64], int] | None = None
        """The next batch, not pinned yet."""
        self._first_is_ready = False
        """Whether the first windows are decoded, so that their memory is known."""
        self._ahead_until = first
        """The last window that may be requested before its turn to be decoded."""

    def serve(self) -> Iterator[Arrays]:
        self._reader.release(self._first - 1)
        self._pin()
        while self._begin():
            future, window = self._begun[0]
            arrays = future.result()  # it leaves the queue only when it is there, so that an interrupt cancels it
            self._begun.popleft()
            self._spans.hand_over()
            self._first_is_ready = True
            if window > self._served:
                self._served = window
                self._reader.release(window - 1)
            self._pin()
            yield arrays

    def end(self) -> int:
        """Let go of everything; returns a number that no window of this pass had."""
        self._spans.forget()
        for future, _ in self._begun:
            future.cancel()
        self._reader.release(self._last)
        return self._last + 1

    def _pin(self) -> None:
        """Request all that the window being served and the next need, and the one after it where memory allows.

        Batches of one window are pinned together: a chunk that many of them share is looked up once, and neighbours
        that different ones want share a request.
        """
        together: list[NDArray[np.int64]] = []

        def pin_together() -> None:
            if together:
                self._reader.pin(together[:], self._patch, self._last)
                together.clear()

        while True:
            if self._drawn is None and (following := next(self._batches, None)) is not None:
                self._drawn = following[0], self._first + following[1]
            if self._drawn is None or (not self._may_request(self._drawn[1]) and (self._pinned or self._begun)):
                break
            offsets, window = self._drawn
            if together and window > self._last:
                pin_together()
            together.append(offsets)
            self._pinned.append(self._drawn)
            self._last, self._drawn = window, None
        pin_together()

    def _may_request(self, window: int) -> bool:
        ahead = window - self._served
        first = ahead == WINDOWS_DECODED and self._first_is_ready and window > self._ahead_until
        if first and self._reader.can_read_ahead:
            self._ahead_until = window
        return ahead < WINDOWS_DECODED or window <= self._ahead_until

    def _begin(self) -> bool:
        """Begin batches up to so many ahead, none beyond the next window while another is under way."""
        while self._pinned and len(self._begun) <= self._ahead:
            offsets, window = self._pinned[0]
            if window > self._served + 1 and self._begun:
                break
            self._pinned.popleft()
            self._begun.append((self._reader.start(offsets, self._patch), window))
            self._spans.follow(self._begun[-1][0])
        return bool(self._begun)


Span = tuple[float, float]
"""Beginning and end."""


class Spans:
    """When the batches of one stream were begun and ready, in seconds since the epoch.

    Batches are begun and handed over in the same order, so a queue of pairs is enough. A pickled copy starts empty, as
    it watches another process.
    """

    def __init__(self) -> None:
        self._begun: deque[list[float]] = deque()
        self.last: Span | None = None
        """Of the batch handed over last."""

    def follow(self, future: Future[Any]) -> None:
        """A batch is begun; `future` is done when it is ready."""
        span = [time.time(), math.nan]
        self._begun.append(span)
        future.add_done_callback(lambda _: span.__setitem__(1, time.time()))

    def hand_over(self) -> None:
        """The oldest batch has been waited for."""
        if self._begun:
            began, ready = self._begun.popleft()
            # A thread that waits for a future goes on before its callbacks are called.
            self.last = began, time.time() if math.isnan(ready) else ready

    def forget(self) -> None:
        """The stream has ended; what was read ahead is never handed over."""
        self._begun.clear()

    def __reduce__(self) -> tuple[type[Spans], tuple[()]]:
        return Spans, ()
