"""ThreadPool: threads that run jobs in the order given, some before others; and JobGroup, what a job belongs to.

A chunk takes tens of microseconds to decode, so a job has no future of its own: its group counts jobs down and settles
one future, with the result of the last job or the first failure. The invariant: every group settles exactly once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result")


class Owner(Protocol):
    """What a job belongs to."""

    @property
    def cancelled(self) -> bool:
        """Whether its queued jobs need not run any more."""

    def fail(self, error: BaseException) -> None:
        """One of its jobs has failed."""


class _Droppable(Future[Result]):
    """A future that is asked whether it was cancelled several times a chunk, which takes no lock."""

    dropped = False

    def cancel(self) -> bool:
        self.dropped = super().cancel() or self.dropped
        return self.dropped


class JobGroup(Generic[Result]):
    """Work in parts: `finish` is called after the last part, and gives the result."""

    def __init__(self) -> None:
        self.future: _Droppable[Result] = _Droppable()
        self._lock = threading.Lock()
        self._settled = False
        self._left = self.parts = 0
        self._finish: Callable[[], Result] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the future is settled or cancelled, so that queued jobs need not run."""
        return self._settled or self.future.dropped

    def expect(self, parts: int, finish: Callable[[], Result]) -> None:
        """Say how many parts there are, before the first of them can end."""
        self._left, self.parts, self._finish = parts, parts, finish

    def part_done(self, count: int = 1) -> None:
        """So many parts have ended well; the thread that ends the last one calls `finish`."""
        with self._lock:
            self._left -= count
            last = self._left == 0
        if last and not self.cancelled and self._finish is not None:
            try:
                result = self._finish()
            except BaseException as error:
                self.fail(error)
                return
            if self._claim():
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Settle the future with an error; the first one counts."""
        if self._claim():
            self.future.set_exception(error)

    def _claim(self) -> bool:
        """Whether this call may settle the future: once, and not after a cancel."""
        with self._lock:
            first, self._settled = not self._settled, True
        return first and self.future.set_running_or_notify_cancel()


_Job = tuple[Owner, Callable[..., None], tuple[Any, ...]]


class ThreadPool:
    """At most `most` daemon threads on one queue, started as jobs come; a job that raises fails its owner."""

    def __init__(self, most: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._first: deque[_Job] = deque()
        self._most, self._name = most, name
        self._closed = False
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def put(self, owner: Owner, job: Callable[..., None], *arguments: Any) -> None:
        """Queue a job; it is skipped if its owner is cancelled by then."""
        self._put((owner, job, arguments))

    def put_first(self, owner: Owner, job: Callable[..., None], *arguments: Any) -> None:
        """Queue a job before those of `put`, in the order of these calls."""
        self._first.append((owner, job, arguments))
        self._put((owner, lambda: None, ()))  # wakes an idle thread; a busy one looks by itself

    def close(self) -> None:
        """End the threads after the jobs they are at; what is queued is dropped."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the threads to end, each at most this long."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _put(self, job: _Job) -> None:
        self._jobs.put(job)
        if len(self._threads) < self._most and self._jobs.qsize() > self._idle:
            with self._lock:
                if not self._closed and len(self._threads) < self._most:
                    name = f"{self._name}-{len(self._threads)}"
                    self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                    self._threads[-1].start()

    def _run(self) -> None:
        while True:
            # Counted without a lock: a lost count starts a thread too early or too late, never loses a job.
            self._idle += 1
            item = self._jobs.get()
            self._idle -= 1
            if item is None:
                return
            while self._first:
                try:
                    self._do(self._first.popleft())
                except IndexError:  # another thread was faster
                    break
            self._do(item)
            del item  # an idle thread must not keep a batch alive

    def _do(self, item: _Job) -> None:
        owner, job, arguments = item
        if self._closed or owner.cancelled:
            return
        try:
            job(*arguments)
        except BaseException as error:
            owner.fail(error)
