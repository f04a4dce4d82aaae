"""Counters: what reading cost, counted by several threads at once. Counts only grow."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

NAMES = (
    "requests",
    "retries",
    "bytes_read",
    "chunks_decoded",
    "chunks_filled",
    "samples",
    "cache_hits",
    "cache_misses",
    "read_cache_hits",
    "read_cache_misses",
    "read_cache_bytes",
    "requests_saved",
    "bytes_wasted",
    "pairs",
    "pairs_of_one_visit",
)
"""Requests sent, and those of them that failed and were sent again; bytes the store gave; chunks decoded, or filled for
want of an object; samples delivered; chunks a batch wanted that were there or on their way, or had to be read; reads
that the read cache answered, or passed on to the store, and the bytes it gave; requests saved by reading neighbours in
one, and the bytes between them; pairs of samples that shared a batch, and those of them drawn from one visit to a
block."""


class Counters:
    """One reader's counts; a pickled copy starts at zero, as it counts for another process."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def values(self) -> dict[str, int]:
        """A copy of the counts by name."""
        with self._lock:
            return dict(self._counts)


def total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of the counts of several readers."""
    result = dict.fromkeys(NAMES, 0)
    for part in parts:
        for name, count in part.items():
            result[name] += count
    return result
