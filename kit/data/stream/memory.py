"""Host memory of a reader: MemoryBudget for requests and undecoded responses, ReaderPlan for all of it.

The budget's limit is evaluated at each request, since caches and batches come and go beside it. The invariant: a
request that is alone always goes ahead, so reading goes on, slowly, even where the limit is less than one chunk; a
config that allows so little is refused before (`refuse_too_little_memory`).

What a config allows is shared: where there is validation, it reads with a quarter (`loader_settings`).

Loader processes hand batches over in /dev/shm, of which a container may have 64 MiB, whatever the machine has. Where it
is full a process dies of a bus error or waits for ever, so `refuse_too_little_shared_memory` compares before any is
started.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import Store

from kit.chunks.access import VALUE_BYTES
from kit.chunks.requests import Coalescing
from kit.chunks.resources import HOLES_SHARE
from kit.config import Config
from kit.data.dataset import Dataset
from kit.data.samples import SamplePlan
from kit.data.stores.disk_cache import ReadCache
from kit.data.stream.scatter import Packing
from kit.data.variables import ArrayInfo
from kit.errors import ConfigError, Problem
from kit.sections import Loader
from kit.units import format_bytes


class MemoryBudget:
    """Bytes taken by requests, up to `limit()`; call from any thread."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._closed = False
        self.taken_bytes = 0
        self.most_bytes = 0
        """The most that was taken at once."""
        self.largest_bytes = 0
        """The largest that was taken in one."""

    def try_take(self, size_bytes: int) -> Reservation | None:
        """Reserve so many bytes now; None where they exceed the limit."""
        with self._lock:
            if size_bytes > self.largest_bytes:
                self.largest_bytes = size_bytes
            taken_bytes = self.taken_bytes + size_bytes
            if taken_bytes > size_bytes and not self._closed and taken_bytes > self._limit():
                return None
            self.taken_bytes = taken_bytes
            if taken_bytes > self.most_bytes:
                self.most_bytes = taken_bytes
            return Reservation(self, size_bytes)

    def give(self, size_bytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.taken_bytes -= size_bytes

    def count_down(self, reservation: Reservation) -> bool:
        """One part of a reservation is done; whether it was the last."""
        with self._lock:
            reservation._left -= 1
            return reservation._left == 0

    def close(self) -> None:
        """From here on everything fits, so that nobody waits any more."""
        self._closed = True


class Reservation:
    """What one request has taken, given back when all chunks of its response are decoded."""

    __slots__ = ("_budget", "_left", "_size_bytes")

    def __init__(self, budget: MemoryBudget, size_bytes: int) -> None:
        self._budget, self._size_bytes, self._left = budget, size_bytes, 1

    def share(self, parts: int) -> None:
        """It is done when so many parts are."""
        self._left = parts

    def correct(self, size_bytes: int) -> None:
        """The size was a guess; this is what came."""
        if size_bytes != self._size_bytes:
            self._budget.give(self._size_bytes - size_bytes)
            self._size_bytes = size_bytes

    def done(self) -> None:
        """One part of it is done."""
        if self._left == 1 or self._budget.count_down(self):
            self._budget.give(self._size_bytes)


Arrays = tuple[NDArray[Any], NDArray[np.bool_]]
"""Values (float32, unless asked for as stored) and validity, both `(sample, variable, *dims)`."""
Allocate = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""An array of a shape and type for a batch, such as `numpy.empty`; another may give pinned memory."""


@dataclass(frozen=True, kw_only=True)
class ReaderPlan:
    """Everything a `kit.data.stream.reader.Reader` is made from."""

    url: str
    open_store: Callable[[], Store]
    arrays: tuple[ArrayInfo, ...]
    packings: tuple[Packing, ...]
    strict: bool
    """Whether a chunk that is not there is an error; else it reads as the array's fill value, counted."""
    requests_in_flight: int
    decode_threads: int
    request_seconds: float
    cache_bytes: int = 0
    """Decoded chunks kept for later batches, beside those that a window holds."""
    coalescing: Coalescing = Coalescing()  # noqa: RUF009 - frozen
    memory_bytes: int
    """Of everything here: batches, what is asked for and not decoded, cache, windows and indexes."""
    batches_held: int
    """Batches in memory at once: being filled, ready, and with the consumer."""
    allocate: Allocate = np.empty
    read_cache: ReadCache | None = None
    """What keeps the answers of a remote store."""
    dataset: Dataset
    as_stored: bool = False
    """Give the numbers of the one array as they are stored; all of them count as valid."""


def batch_bytes(arrays: Sequence[ArrayInfo], samples: int, patch: Sequence[int]) -> int:
    """Memory of one batch: values, validity, and the packed numbers of variables that are no float32."""
    packed = sum(info.dtype.itemsize for info in arrays if info.dtype != np.float32)
    return samples * math.prod(patch) * (VALUE_BYTES * len(arrays) + packed)


def largest_chunk_bytes(arrays: Sequence[ArrayInfo]) -> int:
    """Decoded bytes of the largest chunk."""
    return max(info.chunk_bytes for info in arrays)


def loader_settings(config: Config) -> tuple[Loader, Loader]:
    """How training and validation read, within one budget of memory: validation gets a quarter of it, and threads."""
    whole = config.loader
    if not config.data.validation_fraction:
        return whole, whole
    quarter = whole.memory_bytes // 4
    few = {"num_workers": 0, "batches_ahead": min(1, whole.batches_ahead), "cache_bytes": 0, "memory_bytes": quarter}
    return whole.model_copy(update={"memory_bytes": whole.memory_bytes - quarter}), whole.model_copy(update=few)


def refuse_too_little_memory(
    arrays: Sequence[ArrayInfo], plan: SamplePlan, settings: Loader, whole_bytes: int | None = None
) -> None:
    """Refuse what can never be read within `loader.memory_bytes`.

    Args:
        arrays: What is read.
        plan: In which batches.
        settings: How, with this reader's part of the memory.
        whole_bytes: What the config allows all readers together; None where this one has it all.

    Raises:
        ConfigError: when batches, kept chunks and one request at a time do not fit.
    """
    processes = max(1, settings.num_workers)
    everything = sum(info.nbytes for info in arrays)
    kept = settings.window_bytes if plan.windows else settings.cache_bytes // processes
    batches = (settings.batches_ahead + 2) * batch_bytes(arrays, plan.batch_size, plan.patch)
    chunks = (settings.decode_threads + 1) * largest_chunk_bytes(arrays)
    needed = processes * math.ceil((batches + min(kept, everything) + chunks) * HOLES_SHARE / (HOLES_SHARE - 1))
    if needed > settings.memory_bytes:
        name = "window" if plan.windows else "cache"
        where = f" in each of {processes} processes" if settings.num_workers else ""
        message = (
            f"{allowed_text(settings, whole_bytes)} cannot hold {settings.batches_ahead + 2} batches "
            f"({format_bytes(batches)}), the {name} ({format_bytes(min(kept, everything))}) and "
            f"{settings.decode_threads + 1} chunks ({format_bytes(chunks)}), with one part in {HOLES_SHARE} for "
            f"fragmentation{where}; use at least {enough_text(needed, settings, whole_bytes)}, or less of "
            f"loader.batches_ahead, batch_size or {name}_bytes"
        )
        raise ConfigError([Problem("loader.memory_bytes", message)])


def allowed_text(settings: Loader, whole_bytes: int | None) -> str:
    """What a reader may use, and of how much where others have a part too."""
    own = format_bytes(settings.memory_bytes)
    if whole_bytes is None or whole_bytes == settings.memory_bytes:
        return own
    return f"{format_bytes(whole_bytes)}, of which this reader has {own} beside validation or training,"


def enough_text(needed_bytes: int, settings: Loader, whole_bytes: int | None) -> str:
    """What `loader.memory_bytes` has to be, so that this reader's part of it is enough."""
    share = 1.0 if whole_bytes is None else settings.memory_bytes / whole_bytes
    return format_bytes(math.ceil(needed_bytes / share) + 1 if share < 1 else needed_bytes, up=True)


FOLDER = Path("/dev/shm")
_PAGE_BYTES = 4096


def free_bytes() -> float:
    """What is left of it; no limit where there is no such folder."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize


def needed_bytes(settings: Loader, batch_bytes: int, ranks: int = 1) -> int:
    """What the batches that loader processes keep ready take, with the one that is trained on; two tensors each."""
    if not settings.num_workers:
        return 0
    held = settings.num_workers * settings.prefetch_factor + 1
    return ranks * held * (batch_bytes + 2 * _PAGE_BYTES)


def refuse_too_little_shared_memory(settings: Loader, batch_bytes: int, ranks: int = 1) -> None:
    """Raises: ConfigError: when /dev/shm is too small for the batches of `ranks` ranks, with the size it needs."""
    needed, free = needed_bytes(settings, batch_bytes, ranks), free_bytes()
    if needed > free:
        each = f" in each of {ranks} ranks" if ranks > 1 else ""
        batches = f"{settings.prefetch_factor} batches of {format_bytes(batch_bytes)}{each}"
        message = (
            f"{settings.num_workers} processes × {batches} need {format_bytes(needed)} of shared memory, and {FOLDER} "
            f"has {format_bytes(free)} free; give it more (docker run --shm-size={-(-needed // (1 << 20))}m), or take "
            "fewer loader.num_workers or loader.prefetch_factor; 0 processes need none"
        )
        raise ConfigError([Problem("loader.num_workers", message)])
