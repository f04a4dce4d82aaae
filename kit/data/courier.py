"""Courier: one thread that delivers, while another goes on; at most one delivery waits, and it is the newest.

What is offered while one is under way takes the place of what waits, so a slow network never builds up a queue. Nothing
is raised in the thread that offers: it asks for outcomes. The thread dies with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Item, Result]):
    """How one delivery went."""

    item: Item
    result: Result | None = None
    error: BaseException | None = None


class Courier(Generic[Item, Result]):
    """Delivers items by `deliver(item, cancelled)`, which gives up when `cancelled` is set."""

    def __init__(self, deliver: Callable[[Item, threading.Event], Result]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: list[Item] = []
        self._busy = False
        self._over = threading.Event()
        self._outcomes: list[Outcome[Item, Result]] = []
        self._thread = threading.Thread(target=self._run, name="kit-courier", daemon=True)
        self._thread.start()

    def offer(self, item: Item) -> Item | None:
        """Deliver this next; what waited instead, which will not be delivered."""
        with self._changed:
            replaced = self._waiting.pop() if self._waiting else None
            self._waiting = [item]
            self._changed.notify_all()
            return replaced

    def finish(self, seconds: float) -> bool:
        """Wait until nothing waits or is under way; whether that came within `seconds`."""
        give_up = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout=max(0.0, give_up - time.monotonic()))

    def stop(self, seconds: float = 5.0) -> None:
        """Give up what waits and what is under way."""
        with self._changed:
            self._waiting.clear()
            self._over.set()
            self._changed.notify_all()
        self._thread.join(seconds)

    def take_outcomes(self) -> list[Outcome[Item, Result]]:
        """Those not taken yet, in order."""
        with self._changed:
            taken, self._outcomes = self._outcomes, []
            return taken

    def _is_idle(self) -> bool:
        return not self._waiting and not self._busy

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                outcome = Outcome(item, result=self._deliver(item, self._over))
            except BaseException as error:
                outcome = Outcome(item, error=error)
            with self._changed:
                self._busy = False
                self._outcomes.append(outcome)
                self._changed.notify_all()

    def _next(self) -> Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over.is_set())
            if self._over.is_set():
                return None
            self._busy = True
            return self._waiting.pop()
