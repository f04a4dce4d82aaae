"""ReaderPlan: what one process reads, with how much at once, in how much memory. Holds no handle, so it pickles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import Store

from kit.data.dataset import ArrayInfo
from kit.data.disk_cache import ReadCache
from kit.data.manifest import Manifest
from kit.data.packing import Packing
from kit.plan.access import VALUE_BYTES
from kit.plan.coalescing import Coalescing

Arrays = tuple[NDArray[Any], NDArray[np.bool_]]
"""Values (float32, unless asked for as stored) and validity, both `(sample, variable, *dims)`."""
Allocate = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""An array of a shape and type for a batch, such as `numpy.empty`; another may give pinned memory."""


@dataclass(frozen=True, kw_only=True)
class ReaderPlan:
    """Everything a `kit.data.reader.Reader` is made from."""

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
    manifest: Manifest | None = None
    as_stored: bool = False
    """Give the numbers of the one array as they are stored; all of them count as valid."""


def batch_bytes(arrays: Sequence[ArrayInfo], samples: int, patch: Sequence[int]) -> int:
    """Memory of one batch: values, validity, and the packed numbers of variables that are no float32."""
    packed = sum(info.dtype.itemsize for info in arrays if info.dtype != np.float32)
    return samples * math.prod(patch) * (VALUE_BYTES * len(arrays) + packed)


def largest_chunk_bytes(arrays: Sequence[ArrayInfo]) -> int:
    """Decoded bytes of the largest chunk."""
    return max(math.prod(info.chunk) * info.dtype.itemsize for info in arrays)
