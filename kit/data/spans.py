"""Spans: when the reading of each batch began and when the batch was ready, in seconds since the epoch.

Batches are begun and handed over in the same order, so a queue of pairs is enough; a batch costs two looks at the
clock. A pickled copy starts empty, as it watches another process.
"""

from __future__ import annotations

import math
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

Span = tuple[float, float]
"""Beginning and end."""


class Spans:
    """Follows the batches of one stream from their first request to their last byte decoded."""

    def __init__(self) -> None:
        self._begun: deque[list[float]] = deque()
        self.last: Span | None = None
        """Of the batch handed over last."""

    def follow(self, future: Future[Any]) -> None:
        """A batch is begun; `future` is done when it is ready."""
        span = [time.time(), math.nan]
        self._begun.append(span)
        future.add_done_callback(lambda _: span.__setitem__(1, time.time()))

    def hand_over(self) -> None:
        """The oldest batch has been waited for."""
        if self._begun:
            began, ready = self._begun.popleft()
            # Who waits for a future is told before its callbacks are called.
            self.last = began, time.time() if math.isnan(ready) else ready

    def forget(self) -> None:
        """The stream has ended; what was read ahead is never handed over."""
        self._begun.clear()

    def __reduce__(self) -> tuple[type[Spans], tuple[()]]:
        return Spans, ()
