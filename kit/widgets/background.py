"""Work that must not hold up a click: one thread, one job at a time, and only the newest of those that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Latest:
    """Runs jobs in a thread of its own; a job submitted while another runs replaces the one that waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: Callable[[], object] | None = None
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job()` soon; returns at once. The job reports its own errors."""
        with self._lock:
            self._waiting = job
            if not self._idle.is_set():
                return
            self._idle.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing runs or waits; False after `timeout` seconds."""
        return self._idle.wait(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._idle.set()
                    return
            try:
                job()
            except BaseException:
                with self._lock:
                    self._idle.set()
                raise
