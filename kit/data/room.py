"""Room: host memory for what has been asked for and is not decoded yet, in bytes, obeyed by every request.

The limit is asked for anew each time, since caches and batches come and go beside it. The invariant: a request that is
alone always goes ahead, so reading goes on, slowly, even where the limit is less than one chunk; whether it is, is
refused before, where a config is known (`kit.data.patches`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Room:
    """Bytes taken by requests, up to `limit()`; call from any thread."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._closed = False
        self.taken_bytes = 0
        self.most_bytes = 0
        """The most that was taken at once."""
        self.largest_bytes = 0
        """The largest that was taken in one."""

    def try_take(self, size_bytes: int) -> Claim | None:
        """So much of the room, if there is; None else."""
        with self._changed:
            self.largest_bytes = max(self.largest_bytes, size_bytes)
            return self._claim(size_bytes) if self._fits(size_bytes) else None

    def take(self, size_bytes: int) -> Claim:
        """So much of the room, as soon as there is."""
        with self._changed:
            self.largest_bytes = max(self.largest_bytes, size_bytes)
            while not self._fits(size_bytes):
                self._changed.wait()
            claim = self._claim(size_bytes)
            self._changed.notify()  # there may be room for another
            return claim

    def give(self, size_bytes: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self.taken_bytes -= size_bytes
            self._changed.notify()

    def count_down(self, claim: Claim) -> bool:
        """One part of a shared claim is done; whether it was the last."""
        with self._changed:
            claim._left -= 1
            return claim._left == 0

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, size_bytes: int) -> bool:
        return not self.taken_bytes or self._closed or self.taken_bytes + size_bytes <= self._limit()

    def _claim(self, size_bytes: int) -> Claim:
        self.taken_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)
        return Claim(self, size_bytes)


class Claim:
    """What one request has taken, given back when all that came of it is done."""

    __slots__ = ("_left", "_room", "_size_bytes")

    def __init__(self, room: Room, size_bytes: int) -> None:
        self._room, self._size_bytes, self._left = room, size_bytes, 1

    def share(self, parts: int) -> None:
        """It is done when so many parts are."""
        self._left = parts

    def correct(self, size_bytes: int) -> None:
        """The size was a guess; this is what came."""
        if size_bytes != self._size_bytes:
            self._room.give(self._size_bytes - size_bytes)
            self._size_bytes = size_bytes

    def done(self) -> None:
        """One part of it is done."""
        if self._left == 1 or self._room.count_down(self):
            self._room.give(self._size_bytes)
