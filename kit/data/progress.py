"""How far a long job is: one line that updates in place, in a notebook or a terminal, and nothing where nobody looks.

A progress is any callable taking (done, total, bytes so far); raising from it stops the job like an interrupt would.
One that has them is also told what begins, `begin(verb, noun)`, and where workers can be watched, `link(url)`.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from kit.units import format_bytes, format_seconds

Progress = Callable[[int, int, int], None]
_SECONDS_BETWEEN = 0.25


def make_progress(progress: bool | Progress, verb: str, noun: str = "shards") -> Progress:
    """The callable asked for: the caller's own, a line (True), or nothing (False)."""
    if callable(progress):
        if hasattr(progress, "begin"):
            progress.begin(verb, noun)
        return progress
    return ProgressLine(verb, noun) if progress else _silent


def _silent(done: int, total: int, number_of_bytes: int) -> None:
    del done, total, number_of_bytes


class ProgressLine:
    """`Building 12 of 64 shards, 31.5 MiB, 40 s left`; the first call sets where the rate is counted from."""

    def __init__(self, verb: str, noun: str) -> None:
        self.verb, self.noun = verb, noun
        self._display = _notebook_display() or _terminal_display()
        self._first: tuple[float, int] | None = None
        self._shown_seconds = float("-inf")

    def __call__(self, done: int, total: int, number_of_bytes: int) -> None:
        now = time.monotonic()
        self._first = self._first or (now, done)
        if done < total and now - self._shown_seconds < _SECONDS_BETWEEN:
            return
        self._shown_seconds = now
        if self._display is not None:
            self._display(self.text(done, total, number_of_bytes, now), done >= total)

    def text(self, done: int, total: int, number_of_bytes: int, now: float) -> str:
        """The line, with the time left once there is a rate, or the time taken at the end."""
        start, before = self._first or (now, done)
        elapsed = now - start
        note = ""
        if done >= total:
            note = f", {format_seconds(elapsed)}" if elapsed > 0 else ""
        elif done > before and elapsed > 1:
            note = f", {format_seconds(elapsed * (total - done) / (done - before))} left"
        return f"{self.verb} {done} of {total} {self.noun}, {format_bytes(number_of_bytes)}{note}"


def say(text: str, progress: bool | Progress) -> None:
    """One line of its own, where a progress line would have been."""
    display = (_notebook_display() or _terminal_display()) if progress is True else None
    if display is not None:
        display(text, True)


def show_link(url: str, progress: bool | Progress) -> None:
    """Where the workers of a job can be watched."""
    if hasattr(progress, "link"):
        progress.link(url)
    else:
        say(f"Dask dashboard: {url}", progress)


def _notebook_display() -> Callable[[str, bool], None] | None:
    """Shows text in one output of the cell and replaces it; None outside a notebook."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    display_id = uuid.uuid4().hex
    shown = False

    def show(text: str, last: bool) -> None:
        nonlocal shown
        del last
        bundle = {"text/plain": text}
        display(bundle, raw=True, display_id=display_id, update=shown)  # type: ignore[no-untyped-call]
        shown = True

    return show


def _terminal_display() -> Callable[[str, bool], None] | None:
    if not sys.stderr or not sys.stderr.isatty():
        return None

    def show(text: str, last: bool) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if last else ""))
        sys.stderr.flush()

    return show
