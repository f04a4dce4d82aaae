"""Early: answers for a window after the next one, kept as they came until its turn to be decoded.

Requests for a window take as long as the slowest of them, so they are sent two windows ahead where memory allows;
decoded chunks are held for the window being served and the next one only. In between the stored bytes wait here. They
take no room of requests, so nothing waits for them; an answer that somebody waits for is never kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from kit.data.wanted import Answer

WINDOWS_DECODED = 2
"""The one being served and the next one."""


class EarlyAnswers:
    """Answers by the first window that wants them; call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: float = math.inf
        """The last window whose chunks are decoded when they come."""
        self._waiting: list[Answer] = []
        self.nbytes = 0
        """Memory of what waits."""

    def keep(self, answer: Answer) -> bool:
        """Whether the answer has to wait; it is kept then, and its room given back."""
        with self._lock:
            if answer.chunk.since <= self._last or answer.chunk.parts:
                return False
            if answer.shared:  # else it would keep the whole of a longer answer in memory
                answer.data, answer.shared = answer.data.copy(), False
            self.nbytes += answer.data.nbytes
            self._waiting.append(answer)
        answer.give_room_back()
        return True

    def serve(self, window: int) -> list[Answer]:
        """This window is being served; returns the answers whose turn it is now."""
        with self._lock:
            self._last = last = window + WINDOWS_DECODED - 1
            return self._take(lambda answer: answer.chunk.since <= last)

    def wanted(self) -> list[Answer]:
        """Those that a batch waits for by now."""
        with self._lock:
            return self._take(lambda answer: bool(answer.chunk.parts))

    def _take(self, due: Callable[[Answer], bool]) -> list[Answer]:
        if not self._waiting:
            return []
        taken: list[Answer] = []
        kept: list[Answer] = []
        for answer in self._waiting:
            (taken if due(answer) else kept).append(answer)
        self._waiting = kept
        self.nbytes -= sum(answer.data.nbytes for answer in taken)
        return taken
