"""read_rates: how fast rows come, from the page cache, at random from the disk, and in order.

Measured on the rows themselves, by the loader that will read them, each way for a fraction of a second. What the page
cache holds of the file is dropped first and filled as far as was read. Rows in memory and stores have one rate: what is
cached of a store is the engine's own matter, so it is measured as it is found.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from kit.config import Loader
from kit.data.rows.loader import RowLoader
from kit.data.rows.order import RowOrder
from kit.data.rows.page_cache import drop_cached
from kit.data.rows.rows import Rows
from kit.plan.working_set import DiskRates

_SECONDS = 0.5
_LEAST_BATCHES = 4
_READ_BYTES = 1 << 22


def read_rates(rows: Rows, order: RowOrder, settings: Loader) -> DiskRates:
    """Bytes per second, as stored, of the batches of one rank.

    Raises:
        StoreError: when the rows cannot be read.
    """
    loader = RowLoader(rows, order, settings)
    try:
        if rows.file is None:
            _rate(loader, _LEAST_BATCHES)
            rate, _ = _rate(loader)
            return DiskRates(memory_bytes_per_second=rate, random_bytes_per_second=rate, ordered_bytes_per_second=rate)
        rows.close()
        drop_cached(rows.file)
        cold, batches = _rate(loader)
        warm, _ = _rate(loader, batches)
        rows.close()
        drop_cached(rows.file)
        ordered = _in_order(rows.file)
    finally:
        loader.close()
    return DiskRates(memory_bytes_per_second=warm, random_bytes_per_second=cold, ordered_bytes_per_second=ordered)


def _rate(loader: RowLoader, batches: int = 0) -> tuple[float, int]:
    """Bytes per second of the first batches of an epoch, so many or as long as is needed, and how many they were."""
    loader.set_epoch(0)
    taken = number = 0
    began = time.perf_counter()
    for number, (_, rows) in enumerate(itertools.islice(loader, batches or None), 1):
        taken += len(rows) * loader.rows.row_bytes
        if not batches and number >= _LEAST_BATCHES and time.perf_counter() - began > _SECONDS:
            break
    return taken / max(time.perf_counter() - began, 1e-9), number


def _in_order(file: Path) -> float:
    """Bytes per second of reading a file from its beginning."""
    done, began = 0, time.perf_counter()
    block = bytearray(_READ_BYTES)
    with file.open("rb", buffering=0) as opened:
        while (count := opened.readinto(block)) and time.perf_counter() - began < _SECONDS:
            done += count
    return max(done, 1) / max(time.perf_counter() - began, 1e-9)
