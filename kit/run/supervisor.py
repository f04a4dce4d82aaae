"""The supervisor: one process between a kernel and its trials, that starts ranks, watches them and says how they ended.

`python -m kit.run.supervisor warm|cold PARENT`, in a session of its own. Warm, it first imports torch and lightning and
never touches a GPU, so that a fork of it takes its first step in a tenth of a second; cold, it imports neither and
starts fresh interpreters. One thread, one loop: commands come in on stdin, children end by SIGCHLD, clocks are looked
at ten times a second while a trial runs. When stdin closes or the parent's id changes, the kernel is gone: every trial
is ended as LOST, and then the supervisor ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time

from kit.processes import adopt_orphans
from kit.registry import load
from kit.run.group import Group, Order
from kit.run.launch import differing_variables, touched_device

_BUSY_SECONDS = 0.1
_IDLE_SECONDS = 1.0
_PRELOADED = (
    "torch.distributed.fsdp",
    "torch.utils.data",
    "lightning.pytorch",
    "ruamel.yaml",
    "kit.run.worker",
)


class Supervisor:
    """The loop."""

    def __init__(self, parent: int, cold_reason: str | None) -> None:
        self.parent = parent
        self.cold_reason = cold_reason
        self.groups: list[Group] = []
        self._variables = dict(os.environ)
        self._buffer = b""
        self._woken, self._wake = os.pipe()
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        adopt_orphans()

    def run(self) -> None:
        """Serve until the kernel is gone."""
        while True:
            timeout = _BUSY_SECONDS if self.groups else _IDLE_SECONDS
            ready, _, _ = select.select([0, self._woken], [], [], timeout)
            if self._woken in ready:
                os.read(self._woken, 4096)
            if os.getppid() != self.parent or (0 in ready and not self._read_commands()):
                break
            self.groups = [group for group in self.groups if not _look(group)]
        for group in self.groups:
            group.kill("kernel")
        for group in self.groups:
            _end(group)
        self._refuse_the_rest()

    def _read_commands(self) -> bool:
        """False at the end of stdin."""
        orders = self._read_orders()
        for order, reason in orders or ():
            self._start(order, reason)
        return orders is not None

    def _read_orders(self) -> list[tuple[Order, str]] | None:
        """What is asked for, and why it is to start cold; None at the end of stdin."""
        data = os.read(0, 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        commands = [json.loads(line) for line in lines]
        asked = [(Order.from_command(each), each["reason"]) for each in commands if each["command"] == "start"]
        return asked if data else None

    def _refuse_the_rest(self) -> None:
        """What a kernel asked for with its last breath is not started, and not left lying either."""
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError):
            while (orders := self._read_orders()) is not None:
                for order, _ in orders:
                    order.refuse()

    def _start(self, order: Order, reason: str) -> None:
        try:
            self.groups.append(Group(order, self._why_cold(order, reason)))
        except OSError:  # judged and written by the group
            return

    def _why_cold(self, order: Order, given: str) -> str | None:
        """Why this trial cannot be forked from here; None when it can."""
        if self.cold_reason is not None:
            return given or self.cold_reason
        if touched := touched_device():
            self.cold_reason = touched
            return touched
        differing = differing_variables(self._variables, order.variables)
        return f"{', '.join(differing)} changed, and is only read when libraries are loaded" if differing else None


def _end(group: Group) -> None:
    while not _look(group):
        time.sleep(0.005)


def _look(group: Group) -> bool:
    """Whether a trial is over; one whose run directory can no longer be used is, and takes no other with it."""
    try:
        return group.look()
    except OSError:
        group.abandon()
        return True


def preload() -> str | None:
    """Import what every rank needs; why that failed, or None."""
    gc.disable()  # so that no collection moves pages that forks share
    try:
        for name in _PRELOADED:
            importlib.import_module(name)
        for job in ("job.fit", "job.predict"):
            load(job)
    except Exception as error:
        return f"the warm process could not import torch and lightning: {type(error).__name__}: {error}"
    gc.freeze()
    gc.enable()
    return None


def main() -> None:
    start, parent = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0) if os.getppid() != parent else None)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)  # imports take seconds; a kernel that ends meanwhile is noticed
    reason = "asked for by trial.start" if start == "cold" else preload()
    signal.setitimer(signal.ITIMER_REAL, 0)
    Supervisor(parent, reason).run()


if __name__ == "__main__":
    main()
