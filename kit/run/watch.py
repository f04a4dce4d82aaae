"""Calling back when a trial has news: one daemon thread for all trials of a kernel, alive only while one runs.

It is a convenience for displays. Nothing a trial does or is depends on it: states come from files whenever asked for.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.run.trial import Trial

_TICK_SECONDS = 0.1
_watched: set[Trial] = set()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(trial: Trial) -> None:
    """Poll this trial ten times a second until it has ended, calling its callbacks when it has news."""
    global _thread
    with _lock:
        _watched.add(trial)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="kit-watch", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        with _lock:
            trials = list(_watched)
            if not trials:
                _thread = None
                return
        for trial in trials:
            if not _look_at(trial):
                with _lock:
                    _watched.discard(trial)
        time.sleep(_TICK_SECONDS)


def _look_at(trial: Trial) -> bool:
    """Whether the trial is worth another look; one that cannot be read is reported once and left alone."""
    try:
        trial.poll()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return False
    return not trial.ended and trial.has_callbacks
