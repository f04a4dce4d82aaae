"""Series: several trials one after another, in a thread of this kernel, never two at once.

A call that starts one returns at once. `stop()` ends the trial that runs and asks for no other, and what was found
until then is kept. A thread has nobody to raise to: what went wrong is kept, and `wait()` raises it.
"""

from __future__ import annotations

import asyncio
import html
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Literal, Self

from kit.errors import KitError, TrialError, TrialStopped
from kit.registry import load
from kit.run.trial import Trial

State = Literal["RUNNING", "COMPLETE", "STOPPED", "FAILED"]
_TICK_SECONDS = 0.02
_ENDING_SECONDS = 10


class Series:
    """The thread, and how it is waited for, stopped and watched; `work` is what it does."""

    def __init__(self, title: str, grace_seconds: float) -> None:
        self.title = title
        self.state: State = "RUNNING"
        self.trial: Trial | None = None
        """The trial that runs, or the last one."""
        self.error: KitError | None = None
        self._grace_seconds = grace_seconds
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []
        self._lock = threading.Lock()

    # -- to be said by those who inherit

    def work(self) -> None:
        """Everything, in the thread; may set `error`, or raise it."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is done at the end, however it came."""

    @property
    def kept(self) -> str:
        """What an interrupt says of what was found."""
        return "interrupted"

    # -- running

    def start(self) -> Self:
        threading.Thread(target=self._run, name=self.title, daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self.work()
            self.state = "STOPPED" if self._stopping.is_set() else "COMPLETE" if self.error is None else "FAILED"
        except KitError as error:
            self.error, self.state = error, "FAILED"
        except Exception as error:
            self.error, self.state = TrialError(f"{type(error).__name__}: {error}"), "FAILED"
        finally:
            self.finish()
            self._ended.set()
            self._tell()

    def follow(self, trial: Trial) -> None:
        """Return when it has ended; stop it when the series is stopped."""
        self.trial = trial
        self._tell()
        while trial.poll() not in ("COMPLETE", "FAILED", "STOPPED", "LOST"):
            if self._stopping.is_set():
                trial.stop()
            time.sleep(_TICK_SECONDS)

    # -- ending it

    def stop(self) -> None:
        """End the trial that runs and ask for no other. Returns at once."""
        self._stopping.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Self:
        """Return when there is an answer, or it was stopped. An interrupt stops it and keeps what it found.

        Raises:
            KitError: when it FAILED.
            TrialStopped: after an interrupt.
            TimeoutError: after `timeout` seconds; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._ended.wait(_TICK_SECONDS):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self.title} is still running after {timeout} s; it goes on")
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait(self._grace_seconds + _ENDING_SECONDS)
            raise TrialStopped(self.kept) from None
        if self.error is not None:
            raise self.error
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Self:
        try:
            while not self.ended:
                await asyncio.sleep(_TICK_SECONDS)
        except asyncio.CancelledError:
            self.stop()
            raise
        return self.wait()

    # -- telling

    def on_change(self, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call `callback(self)` after every trial, from a background thread; the function returned ends that."""
        with self._lock:
            self._callbacks.append(callback)
        if self.ended:
            callback(self)
        return lambda: self._callbacks.remove(callback)

    def _tell(self) -> None:
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def _ipython_display_(self) -> None:
        """Live and with a button where widgets are installed, else the text."""
        try:
            load("attempts.display")(self)
        except ImportError:
            sys.stdout.write(f"{self!r}\n")
