"""Counters: what reading cost, counted by several threads at once. Counts only grow.

Each thread adds to counts of its own, so that none waits for another: a lock that hundreds of reading threads share
costs more than what they count.
"""

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
    "samples_read",
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
want of an object; samples delivered, and with the parts read of those under way; chunks a batch wanted that were there
or on their way, or had to be read; reads that the read cache answered, or passed on to the store, and the bytes it
gave; requests saved by reading neighbours in one, and the bytes between them; pairs of samples that shared a batch, and
those of them drawn from one visit to a block."""

CHUNKS = ("chunks_decoded", "chunks_filled")


def absent_chunks(counts: Mapping[str, int]) -> str:
    """How many of the chunks that were read were not in the store, in a sentence; empty for none."""
    filled, decoded = counts.get("chunks_filled", 0), counts.get("chunks_decoded", 0)
    if not filled:
        return ""
    return f"{filled:,} of the {filled + decoded:,} chunks read were absent from the store, and are its fill value"


class Counters:
    """One reader's counts; a pickled copy starts at zero, as it counts for another process."""

    def __init__(self) -> None:
        self._parts: list[dict[str, int]] = []
        self._own = threading.local()

    def add(self, **counts: int) -> None:
        try:
            mine = self._own.counts
        except AttributeError:
            mine = self._own.counts = dict.fromkeys(NAMES, 0)
            self._parts.append(mine)
        for name, count in counts.items():
            mine[name] += count

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def values(self) -> dict[str, int]:
        """The counts of all threads so far, by name."""
        return total([*self._parts])


def total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of the counts of several readers."""
    result = dict.fromkeys(NAMES, 0)
    for part in parts:
        for name, count in part.items():
            result[name] += count
    return result
