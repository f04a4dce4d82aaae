"""Counters: what reading cost, counted by several threads at once. Counts only grow."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

NAMES = ("requests", "bytes_read", "chunks_decoded", "chunks_filled", "samples")
"""Requests sent; bytes the store gave; chunks decoded, or filled for want of an object; samples delivered."""


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
