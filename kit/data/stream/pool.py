"""ThreadPool: threads that run jobs in the order given, some before others, and the batch that each job belongs to.

A chunk costs tens of microseconds to decode, so a job carries no future of its own: its batch counts jobs down and
settles once, with the result of the last one or the first failure. The invariant: every batch settles exactly once.
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
    def over(self) -> bool:
        """Whether its jobs need not run any more."""

    def fail(self, error: BaseException) -> None:
        """One of its jobs has failed."""


class JobGroup(Generic[Result]):
    """Work in parts: `finish` is called after the last part, and gives the result."""

    def __init__(self) -> None:
        self.future: Future[Result] = Future()
        self._lock = threading.Lock()
        self._settled = False
        self._left = 0
        self._finish: Callable[[], Result] | None = None

    @property
    def over(self) -> bool:
        """Settled or cancelled: jobs still queued for it need not run."""
        return self._settled or self.future.cancelled()

    def expect(self, parts: int, finish: Callable[[], Result]) -> None:
        """Say how many parts there are, before the first of them can end."""
        self._left, self._finish = parts, finish

    def part_done(self) -> None:
        """One part has ended well; the thread that ends the last one finishes the batch."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and not self.over and self._finish is not None:
            result = self._finish()
            if self._claim():
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End the batch with an error; the first one counts."""
        if self._claim():
            self.future.set_exception(error)

    def _claim(self) -> bool:
        """Whether this call may settle the future: once, and not after a cancel."""
        with self._lock:
            first, self._settled = not self._settled, True
        return first and self.future.set_running_or_notify_cancel()


_Job = tuple[Owner, Callable[..., None], tuple[Any, ...]]


class ThreadPool:
    """Up to so many daemon threads on one queue, started as jobs come; a job that raises fails its owner."""

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._first: deque[_Job] = deque()
        self.most, self._name = threads, name
        self._closed = False
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def put(self, owner: Owner, job: Callable[..., None], *arguments: Any) -> None:
        """Queue a job; it is skipped if its owner is over by then."""
        self._put((owner, job, arguments))

    def put_first(self, owner: Owner, job: Callable[..., None], *arguments: Any) -> None:
        """Queue a job before those of `put`, in the order of these calls."""
        self._first.append((owner, job, arguments))
        self._put((owner, _nothing, ()))  # for a thread that waits; who is at work will look

    def _put(self, job: _Job) -> None:
        self._jobs.put(job)
        if len(self._threads) < self.most and self._jobs.qsize() > self._idle:
            self._start_thread()

    def close(self) -> None:
        """End the threads after the jobs they are at; what is queued is dropped."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _start_thread(self) -> None:
        with self._lock:
            if self._closed or len(self._threads) >= self.most:
                return
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the threads to end, each at most this long."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self) -> None:
        while (item := self._take()) is not None:
            while self._first:
                self._do_first()
            self._do(item)
            del item  # an idle thread must not keep a batch alive

    def _do_first(self) -> None:
        try:
            item = self._first.popleft()
        except IndexError:  # another thread was faster
            return
        self._do(item)

    def _do(self, item: _Job) -> None:
        owner, job, arguments = item
        if self._closed or owner.over:
            return
        try:
            job(*arguments)
        except BaseException as error:
            owner.fail(error)

    def _take(self) -> _Job | None:
        # Counted without a lock: a lost count starts a thread too early or too late, never a job twice or not at all.
        self._idle += 1
        try:
            return self._jobs.get()
        finally:
            self._idle -= 1


def _nothing() -> None:
    pass
