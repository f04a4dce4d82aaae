"""The kernel's end of the supervisors: starting them, sending commands, noticing that one is gone.

A kernel has at most two: the warm one has imported torch and forks ranks, the cold one has imported nothing and starts
fresh interpreters. A command is one line of JSON down the supervisor's stdin; nothing comes back, because everything a
trial says goes to files in its run directory. Closing the pipe (which the operating system does however the kernel
ends) ends the supervisor and every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any, Literal

from kit.errors import TrialError
from kit.machine import processes
from kit.trial import scratch
from kit.trial.launch import python_path

Start = Literal["warm", "cold"]
_CLOSING_SECONDS = 3.0


class SupervisorHandle:
    """One running supervisor process, as its kernel sees it."""

    def __init__(self, start: Start) -> None:
        if os.name != "posix":
            raise TrialError(f"trials run on Linux and macOS, not on {sys.platform}; use Linux, or WSL on Windows")
        self.start: Start = start
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kit.trial.supervisor", start, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, "PYTHONPATH": python_path(os.environ)},
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._last_words = ""
        self._owner = os.getpid()
        self.identity = processes.identify(self._process.pid)

    @property
    def alive(self) -> bool:
        if os.getpid() == self._owner:
            self._process.poll()  # so that no zombie is left
        return processes.alive(self.identity)

    def send(self, command: dict[str, Any]) -> bool:
        """Send one command; False when the supervisor has gone."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            return True
        return False

    def last_words(self) -> str:
        """How a supervisor that has ended did so: its exit code and the last line it printed."""
        if not self._output.closed:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").strip().splitlines()
            self._last_words = f"exit code {self._process.poll()}" + (f", {lines[-1]}" if lines else "")
        return self._last_words

    def close(self) -> None:
        """End the supervisor and everything it supervises."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.last_words()
        self._output.close()


_supervisors: dict[tuple[int, Start], SupervisorHandle] = {}
_starting = threading.Lock()


def supervisor(start: Start) -> SupervisorHandle:
    """This process's supervisor of that kind, started when there is none alive. Returns at once."""
    if not processes.LINUX:  # forking after imports is unsafe on macOS
        start = "cold"
    key = (os.getpid(), start)
    with _starting:
        current = _supervisors.get(key)
        if current is not None and not current.alive:
            current.close()
            current = None
        if current is None:
            scratch.sweep()
            current = _supervisors[key] = SupervisorHandle(start)
    return current


def close_supervisors() -> None:
    """End this process's supervisors, and with them every trial that still runs."""
    with _starting:
        mine = [key for key in _supervisors if key[0] == os.getpid()]
        for key in mine:
            _supervisors.pop(key).close()
    if mine:
        scratch.sweep()


atexit.register(close_supervisors)
