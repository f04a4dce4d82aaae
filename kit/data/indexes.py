"""Indexes: those of shards, each fetched once whoever asks, the least recently used dropped beyond a fixed memory.

An index holds 16 bytes an inner chunk. A failure is forgotten, so that the next ask tries again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from kit.data.codec import Index

LARGEST_BYTES = 64 << 20


class ShardIndexes:
    """Indexes by the keys of their shards; None stands for a shard that is not there. Call from any thread."""

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self._largest_bytes = largest_bytes
        self._lock = threading.Lock()
        self._futures: OrderedDict[str, Future[Index | None]] = OrderedDict()
        self.nbytes = 0
        """Memory of all of them."""

    def claim(self, key: str) -> tuple[Future[Index | None], bool]:
        """The index that is or will be there, and whether the caller is the one to fetch it and `give` it."""
        with self._lock:
            future = self._futures.get(key)
            if future is not None:
                self._futures.move_to_end(key)
                return future, False
            future = self._futures[key] = Future()
            return future, True

    def give(self, key: str, fetched: Index | BaseException | None) -> None:
        """Answer all who claimed the key."""
        with self._lock:
            future = self._futures[key]
            if isinstance(fetched, BaseException):
                del self._futures[key]
            else:
                self.nbytes += 0 if fetched is None else fetched.nbytes
                self._shrink(key)
        if isinstance(fetched, BaseException):
            future.set_exception(fetched)
        else:
            future.set_result(fetched)

    def get(self, key: str, fetch: Callable[[], Index | None]) -> Index | None:
        """The index, fetched by the first thread that asks while the others wait."""
        future, mine = self.claim(key)
        if mine:
            try:
                self.give(key, fetch())
            except BaseException as error:
                self.give(key, error)
        return future.result()

    def _shrink(self, newest: str) -> None:
        for key in [*self._futures]:
            if self.nbytes <= self._largest_bytes:
                return
            future = self._futures[key]
            if key != newest and future.done() and not future.cancelled():
                index = future.result()
                self.nbytes -= 0 if index is None else index.nbytes
                del self._futures[key]
