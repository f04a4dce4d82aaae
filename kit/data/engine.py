"""Engine: streams batches of patches out of a Zarr store, in order, several read ahead. No torch.

A batch is what its consumer asked for: float32 values `(sample, variable, *dims)`, decoded by the CF conventions and
standardised when asked, and a mask of the same shape; a missing element is 0 and not valid. The engine itself holds no
handle: it opens the store on first use in each process, so it pickles and may be carried through a fork, provided the
store is opened after it. Leaving the stream early cancels what was read ahead.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kit.data.counters import Counters
from kit.data.dataset import Dataset
from kit.data.packing import Packing
from kit.data.reader import Arrays, Reader, ReaderPlan

REQUEST_SECONDS = 60.0
"""How long one request may take before the store counts as out of reach; below a trial's stall limit."""
_inherited: list[Reader] = []
"""Readers of a parent process: kept, because collecting a loop that runs in another process would disturb it."""


class Engine:
    """Reads patches of some variables of one dataset.

    Args:
        dataset: What the store holds.
        variables: Names of the variables, stacked in this order; empty for all of one shape.
        requests_in_flight: Requests open at once, at most.
        decode_threads: Threads that decompress and copy.
        batches_ahead: Batches read before they are asked for.
        standardize: Shift and scale by the mean and deviation found while building.
        request_seconds: How long one request may take.

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
    ) -> None:
        arrays = tuple(dataset.select(variables))
        self._plan = ReaderPlan(
            url=dataset.url,
            open_store=dataset.open_store,
            arrays=arrays,
            packings=tuple(Packing.of(info, standardize) for info in arrays),
            strict=dataset.manifest is not None,
            requests_in_flight=requests_in_flight,
            decode_threads=decode_threads,
            request_seconds=request_seconds,
        )
        self._batches_ahead = batches_ahead
        self._counters = Counters()
        self._reader: Reader | None = None

    @property
    def counters(self) -> dict[str, int]:
        """What this process has read: requests, bytes_read, chunks_decoded, chunks_filled, samples."""
        return self._counters.values()

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables, in the order they are stacked."""
        return tuple(info.name for info in self._plan.arrays)

    def stream(self, batches: Iterable[NDArray[np.int64]], patch: Sequence[int]) -> Iterator[Arrays]:
        """Values and validity of each batch of offsets `(sample, dim)`, in order.

        Raises:
            StoreError: when the store cannot be reached.
            MissingChunkError: when a store that kit built lacks a chunk.
            CorruptChunkError: when bytes are damaged or too few.
            IndexError: for a patch that reaches outside the arrays.
        """
        reader = self._open()
        waiting: deque[Future[Arrays]] = deque()
        try:
            for offsets in batches:
                waiting.append(reader.start(offsets, patch))
                if len(waiting) > self._batches_ahead:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        finally:
            for future in waiting:
                future.cancel()

    def _open(self) -> Reader:
        """This process's reader, opened on first use."""
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


def _next(waiting: deque[Future[Arrays]]) -> Arrays:
    """The oldest batch; it leaves the queue only when it is there, so that an interrupt still cancels it."""
    arrays = waiting[0].result()
    waiting.popleft()
    return arrays
