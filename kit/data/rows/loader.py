"""RowLoader: batches of rows with the numbers of the rows, read ahead as whole blocks (see `EpochLoader`).

With `num_workers` 0 threads take the next batches while this one is trained on: taking rows runs outside Python's lock.
A batch is `(values, rows)`: what is in the rows, and which rows of the selection they are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from kit.config import Loader
from kit.data import shared_memory
from kit.data.epoch_loader import EpochLoader, EpochStream, pins, shared
from kit.data.rows.order import RowOrder
from kit.data.rows.page_cache import disk_read_bytes
from kit.data.rows.rows import Rows
from kit.data.rows.zarr_rows import ZarrRows
from kit.data.spans import Spans
from kit.errors import ConfigError, Problem
from kit.units import format_bytes

RowBatch = tuple[Tensor, Tensor]
"""Values (samples, *columns) and rows (samples,) int64."""
_MOST_THREADS = 4
_DISK_SECONDS = 0.1
"""Between two looks at how much was read from a disk."""
_COUNTED = ("samples", "bytes_read", "disk_bytes")


class RowLoader(EpochLoader[RowBatch]):
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        rows: What is read.
        order: Which rows are in which batch.
        settings: How batches are read ahead.
        rank: This process's rank in the order.

    Raises:
        ConfigError: when batches that are read ahead do not fit `loader.memory_bytes` or shared memory.
    """

    def __init__(self, rows: Rows, order: RowOrder, settings: Loader, *, rank: int = 0) -> None:
        _refuse_too_little_memory(rows, order, settings)
        shared_memory.refuse_too_little(settings, order.batch_size * rows.delivered_row_bytes)
        self.rows, self.order = rows, order
        self._blocks = _Stream(rows, order, rank, settings)
        super().__init__(order, settings, self._blocks, rank)

    def counters(self) -> dict[str, int]:
        """Since the loader was made, over all its processes: rows delivered, their bytes, and bytes from a disk.

        The last are all that the process has read, whatever for; 0 where the system does not tell.
        """
        return self._blocks.counters()


class _Stream(EpochStream[RowBatch]):
    def __init__(self, rows: Rows, order: RowOrder, rank: int, settings: Loader) -> None:
        super().__init__(order, settings.num_workers)
        self._rows, self._order, self._rank, self._settings = rows, order, rank, settings
        self._spans = Spans()
        self._counts = torch.zeros((max(1, settings.num_workers), len(_COUNTED)), dtype=torch.int64)
        if settings.num_workers:
            self._counts = shared(self._counts)
        if isinstance(rows.source, ZarrRows):
            rows.source.settings = _share_of(settings)

    @property
    def spans(self) -> Spans:
        return self._spans

    def close(self) -> None:
        self._rows.close()

    def __iter__(self) -> Iterator[RowBatch]:
        worker, steps = self.steps()
        epoch, from_disk = int(self.epoch), disk_read_bytes()
        batches = (self._read(epoch, step) for step in steps) if worker is not None else self._ahead(epoch, steps)
        counts = self._counts[worker or 0].numpy()
        looked = time.monotonic()
        try:
            for values, rows in batches:
                counts[0] += len(rows)
                counts[1] += len(rows) * self._rows.row_bytes
                if time.monotonic() - looked > _DISK_SECONDS:  # each look opens a file
                    now, looked = disk_read_bytes(), time.monotonic()
                    counts[2] += now - from_disk
                    from_disk = now
                yield values, rows
        finally:
            counts[2] += disk_read_bytes() - from_disk

    def _read(self, epoch: int, step: int) -> RowBatch:
        rows = self._order.batch(epoch, step, self._rank)
        return self._rows.take(rows), torch.from_numpy(rows)

    def _read_pinned(self, epoch: int, step: int) -> RowBatch:
        values, rows = self._read(epoch, step)
        return values.pin_memory(), rows.pin_memory()

    def _ahead(self, epoch: int, steps: range) -> Iterator[RowBatch]:
        """Batches in order, several being read before they are asked for."""
        read = self._read_pinned if pins(self._settings) else self._read
        ahead = self._settings.batches_ahead
        if not ahead:
            yield from (read(epoch, step) for step in steps)
            return
        waiting: deque[Future[RowBatch]] = deque()
        pool = ThreadPoolExecutor(min(ahead, _MOST_THREADS), "kit-rows")
        try:
            for step in steps:
                waiting.append(pool.submit(read, epoch, step))
                self._spans.follow(waiting[-1])
                if len(waiting) > ahead:
                    yield self._next(waiting)
            while waiting:
                yield self._next(waiting)
        finally:
            self._spans.forget()
            pool.shutdown(cancel_futures=True)

    def _next(self, waiting: deque[Future[RowBatch]]) -> RowBatch:
        batch = waiting.popleft().result()
        self._spans.hand_over()
        return batch

    def counters(self) -> dict[str, int]:
        totals: list[int] = self._counts.sum(0).tolist()
        return dict(zip(_COUNTED, totals, strict=True))


def _share_of(settings: Loader) -> Loader:
    """What one of the processes may use."""
    processes = max(1, settings.num_workers)
    shares = {name: getattr(settings, name) // processes for name in ("cache_bytes", "memory_bytes")}
    requests = max(1, settings.requests_in_flight // processes)
    return settings.model_copy(update={**shares, "requests_in_flight": requests})


def _refuse_too_little_memory(rows: Rows, order: RowOrder, settings: Loader) -> None:
    """Raises: ConfigError: when the batches held at once do not fit `loader.memory_bytes`."""
    processes = max(1, settings.num_workers)
    held = (settings.prefetch_factor if settings.num_workers else settings.batches_ahead) + 2
    needed = processes * held * order.batch_size * rows.delivered_row_bytes
    if needed > settings.memory_bytes:
        each = f" in each of {processes} processes" if settings.num_workers else ""
        message = (
            f"{format_bytes(settings.memory_bytes)} cannot hold {held} batches of {order.batch_size} rows of "
            f"{format_bytes(rows.delivered_row_bytes)}{each}; use at least {format_bytes(needed)}, or a smaller "
            "loader.batch_size"
        )
        raise ConfigError([Problem("loader.memory_bytes", message)])
