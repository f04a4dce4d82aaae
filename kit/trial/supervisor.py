"""The supervisor: one process between a kernel and its trials, that starts ranks, watches them and judges their end.

`python -m kit.trial.supervisor warm|cold PARENT`, in a session of its own. Warm, it first imports torch and lightning
and never touches a GPU, so that a fork of it takes its first step in a tenth of a second; cold, it imports neither and
starts fresh interpreters. One thread, one loop: commands come in on stdin, children end by SIGCHLD, clocks are looked
at ten times a second while a trial runs. When stdin closes or the parent's id changes, the kernel is gone: every trial
is ended as LOST, and then the supervisor ends.

The ranks of a trial and whatever they fork are one process group, started together and killed together. A rank that has
ended is not reaped until the whole group has been signalled for the last time: its process id, which names the group,
cannot be reused before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kit.events import SUPERVISOR, EventWriter
from kit.machine.claims import release
from kit.machine.machine import take_seat
from kit.machine.processes import adopt_orphans, identify, members_of
from kit.registry import load
from kit.train import rendezvous
from kit.train.one_lightning import drawn_later
from kit.trial import scratch
from kit.trial.directory import KILL, Control, RunPaths
from kit.trial.launch import Launch, differing_variables, fork_rank, launch_variables, spawn_rank, touched_device
from kit.trial.verdict import Killing, Limits, RankEnd, Verdict, host_out_of_memory_count, judge, said_job_ended

_BUSY_SECONDS = 0.1
_IDLE_SECONDS = 1.0
_TICK_SECONDS = 0.005
SIBLING_SECONDS = 1.0
STACK_SECONDS = 4.0
"""For ranks and their loader processes to write their stacks: on a busy machine one second was not enough."""
SILENT_SECONDS = 1.0
"""After which a process that was asked for its stack will not write it any more."""
REAP_SECONDS = 10.0
LOG_BYTES = 10_000_000
LOG_KEPT_BYTES = 1_000_000
_PRELOADED = ("torch.distributed.fsdp", "torch.utils.data", "lightning.pytorch", "ruamel.yaml", "kit.trial.launch")
_LOADED_LATER = ("matplotlib.pyplot",)
"""What no prediction waits for: loaded when nothing has run for a while, and before the first fork that trains.

All forks that train hold it (24 MiB), so that their host memory can be compared.
"""
Removed = Literal["never", "when lost", "at end"]


class Supervisor:
    """The loop."""

    def __init__(self, parent: int, cold_reason: str | None) -> None:
        self.parent = parent
        self.cold_reason = cold_reason
        self.groups: list[RankGroup] = []
        self._to_load = [] if cold_reason else [*_LOADED_LATER]
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
            if os.getppid() != self.parent:
                break
            orders = self._read_orders() if 0 in ready else []
            if orders is None:
                break
            for order in orders:
                if order.job != "predict":
                    self._load_all()
                with contextlib.suppress(OSError):  # judged and written by the group
                    self.groups.append(RankGroup(order, self._why_cold(order)))
            self.groups = [group for group in self.groups if not group.look()]
            if not ready and not self.groups:
                self._load_all()
        for group in self.groups:
            group.kill("kernel")
        for group in self.groups:
            while not group.look():
                time.sleep(_TICK_SECONDS)
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError):  # what the kernel requested last is not started, nor left lying
            while (orders := self._read_orders()) is not None:
                for order in orders:
                    order.give_back()

    def _load_all(self) -> None:
        if self._to_load:
            _import_for_forks(self._to_load)
            self._to_load = []

    def _read_orders(self) -> list[Order] | None:
        """The trials to start; None at the end of stdin."""
        data = os.read(0, 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        commands = [json.loads(line) for line in lines]
        return [Order(**command["start"]) for command in commands if "start" in command] if data else None

    def _why_cold(self, order: Order) -> str | None:
        """Why this trial cannot be forked from here; None when it can."""
        if self.cold_reason is not None:
            return order.reason or self.cold_reason
        if touched := touched_device():
            self.cold_reason = touched
            return touched
        differing = differing_variables(self._variables, order.variables)
        return f"{', '.join(differing)} changed, and is only read when libraries are loaded" if differing else None


@dataclass(frozen=True, slots=True)
class Order:
    """A trial to start, as the kernel's command describes it."""

    run_directory: str
    job: str
    """What its ranks do, by the name it is registered under."""
    world_size: int
    devices: list[str]
    claims: list[str]
    """Released when the trial ends."""
    variables: dict[str, str]
    limits: dict[str, float]
    reason: str
    """Why it is to start cold, if the kernel knows."""
    temporary: str
    """Where the kernel keeps temporary files."""
    removed: Removed
    """When the supervisor removes the run directory: never, when the kernel is lost, or at the end of the run."""

    def give_back(self) -> None:
        """Release its claims, and remove a run directory that nobody will look for."""
        release(map(Path, self.claims))
        if self.removed != "never":
            shutil.rmtree(self.run_directory, ignore_errors=True)


class RankGroup:
    """The running ranks of one trial."""

    def __init__(self, order: Order, cold_reason: str | None) -> None:
        """Start the ranks.

        Args:
            order: What to start.
            cold_reason: Why the ranks are fresh interpreters; None forks them.

        Raises:
            OSError: when they cannot be started; the end is written then.
        """
        self.order, self.paths, self.limits = order, RunPaths(Path(order.run_directory)), Limits(**order.limits)
        self.writer = EventWriter(self.paths.supervisor_events, SUPERVISOR)
        self.control = Control(self.paths.control)
        self.lifeline, self._held = os.pipe()
        self._out_of_memory_count = host_out_of_memory_count()
        self.pids: list[int] = []
        self.ends: dict[int, RankEnd] = {}
        self.killing: Killing | None = None
        self._began = self._grew = time.monotonic()
        self._event_bytes = 0
        self._due: tuple[float, Killing] | None = None
        self._scratch: Path | None = None
        self._stacks_to_come: list[int] = []
        """Processes of the ranks that are still to write where they hang, see `_look_for_stacks`."""
        self._stacks_asked = 0.0
        self._log_bytes_before = self._log_bytes = 0
        try:
            self._start(cold_reason)
        except OSError as error:
            self._kill_group()
            self._end(Verdict("FAILED", f"the ranks could not be started: {error.strerror or error}", "error"))
            raise

    def _start(self, cold_reason: str | None) -> None:
        order = self.order
        self._scratch = scratch.make(folder=order.temporary)
        start = fork_rank if cold_reason is None else spawn_rank
        with rendezvous.listen() as store:
            port = store.getsockname()[1]
            variables = launch_variables(order.variables, order.world_size, order.devices, port, self._scratch)
            launch = Launch(self.paths, order.world_size, variables, self.lifeline, store.fileno())
            for rank in range(order.world_size):
                self.pids.append(start(launch, rank, self.pids[0] if self.pids else 0))
        self.writer.write(
            "trial_started",
            processes=[identify(os.getpid()), *(identify(pid) for pid in self.pids)],
            start="warm" if cold_reason is None else "cold",
            reason=cold_reason or "",
            port=port,
        )

    # -- watching

    def look(self) -> bool:
        """Look at everything; True when the trial is over: judged, or its run directory can no longer be used."""
        try:
            return self._look()
        except OSError:  # the end can be written nowhere; no other trial ends with this one
            self._kill_group()
            self._reap()
            self._close()
            return True

    def _look(self) -> bool:
        now = time.monotonic()
        self.paths.marker.stat()
        self._find_ended(now)
        if len(self.ends) == len(self.pids):
            self._kill_group()  # whatever the ranks have left behind
            self._reap()
            self._cap_logs()
            out_of_memory = host_out_of_memory_count() > self._out_of_memory_count
            ends = [self.ends[rank] for rank in sorted(self.ends)]
            self._end(judge(self.paths, ends, self.killing, self.limits, out_of_memory))
            return True
        requested = self.control.requested
        if requested >= KILL:
            self.kill("kill")
        elif requested and self._due is None:
            self._plan(now + self.limits.grace_seconds, "stop")
        self._look_at_clock(now)
        if self._due is not None and now >= self._due[0]:
            self.kill(self._due[1])
        self._cap_logs()
        return False

    def _find_ended(self, now: float) -> None:
        for rank, pid in enumerate(self.pids):
            if rank in self.ends:
                continue
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                continue
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            ours = self.killing is not None and code == -signal.SIGKILL
            self.ends[rank] = RankEnd(rank, code, time.time(), ours)
            if code != 0 or not said_job_ended(self.paths, rank):
                self._plan(now + SIBLING_SECONDS, "sibling")

    def _plan(self, when: float, why: Killing) -> None:
        """Kill at `when`, unless something is due earlier."""
        if self._due is None or when < self._due[0]:
            self._due = (when, why)

    def _look_at_clock(self, now: float) -> None:
        size = sum(path.stat().st_size for path in self.paths.event_files())
        if size != self._event_bytes:
            self._event_bytes, self._grew = size, now
        if now - self._began > self.limits.timeout_seconds:
            self.kill("timeout")
        elif now - self._grew > self.limits.stall_seconds and self._due is None:
            self._plan(now + STACK_SECONDS, "stalled")
            self._stacks_to_come = [pid for pid in members_of(self.pids[0]) if pid not in self.pids]
            self._ask_for_stacks(self.pids, now)
        elif self._stacks_to_come and now - self._grew > self.limits.stall_seconds:
            self._look_for_stacks(now)

    def _look_for_stacks(self, now: float) -> None:
        """Ask the next process when the one before has written: two that write into a log at once spoil both stacks."""
        log_bytes = self._bytes_of_logs()
        has_written = log_bytes == self._log_bytes > self._log_bytes_before
        if self._due is not None and now > self._due[0] - STACK_SECONDS / 2:
            self._ask_for_stacks(self._stacks_to_come, now)
            self._stacks_to_come = []
        elif has_written or now - self._stacks_asked > SILENT_SECONDS:
            self._ask_for_stacks([self._stacks_to_come.pop(0)], now)
        self._log_bytes = log_bytes

    def _ask_for_stacks(self, pids: Sequence[int], now: float) -> None:
        """Have processes write the stacks of their threads to the log of their rank."""
        self._stacks_asked, self._log_bytes_before = now, self._bytes_of_logs()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)

    def _bytes_of_logs(self) -> int:
        return sum(path.stat().st_size for path in self.paths.logs())

    def _cap_logs(self) -> None:
        for path in self.paths.logs():
            size = path.stat().st_size
            if size <= LOG_BYTES:
                continue
            with path.open("r+b") as log:  # ranks append, so they go on at the new end
                log.seek(size - LOG_KEPT_BYTES)
                kept = log.read(LOG_KEPT_BYTES)
                log.truncate(0)
            with path.open("ab") as log:
                log.write(f"[kit: {size - len(kept)} bytes of log were dropped here]\n".encode() + kept)

    # -- ending

    def kill(self, why: Killing) -> None:
        """SIGKILL to the whole group; the first reason is the one that is reported."""
        self.killing = self.killing or why
        self._due = None
        self._kill_group()
        if why == "kernel" and self.order.removed != "never":  # at once: a rank of low priority may take long to die
            shutil.rmtree(self.paths.directory, ignore_errors=True)

    def _kill_group(self) -> None:
        if self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[0], signal.SIGKILL)

    def _reap(self) -> None:
        """Wait for all of the group, also what ranks have left behind: this process has adopted it."""
        deadline = time.monotonic() + REAP_SECONDS
        with contextlib.suppress(ChildProcessError):  # none is left
            while self.pids and time.monotonic() < deadline:
                if os.waitpid(-self.pids[0], os.WNOHANG)[0] == 0:
                    time.sleep(_TICK_SECONDS)

    def _end(self, verdict: Verdict) -> None:
        self._give_back()  # before anybody hears of the end, and starts the next
        exit_codes = {str(rank): end.exit_code for rank, end in sorted(self.ends.items())}
        try:
            self.writer.write("trial_ended", **asdict(verdict), exit_codes=exit_codes)
        except OSError:  # a full disk: the payload has served its purpose, and its space is enough for one line
            self.paths.payload.unlink(missing_ok=True)
            self.writer.write("trial_ended", **asdict(verdict), exit_codes=exit_codes)
        self._close()

    def _give_back(self) -> None:
        release(map(Path, self.order.claims))
        shutil.rmtree(self.paths.scratch, ignore_errors=True)
        if self._scratch is not None:
            scratch.remove(self._scratch)

    def _close(self) -> None:
        self._give_back()
        if self.order.removed == "at end":
            shutil.rmtree(self.paths.directory, ignore_errors=True)
        self.writer.close()
        self.control.close()
        os.close(self.lifeline)
        os.close(self._held)


def preload() -> str | None:
    """Import what every rank needs; why that failed, or None."""
    with drawn_later():
        error = _import_for_forks(_PRELOADED, ("job.fit", "job.predict"))
    return f"the warm process could not import torch and lightning: {error}" if error else None


def _import_for_forks(names: Sequence[str], jobs: Sequence[str] = ()) -> str:
    """Import modules and jobs before the next fork; why that failed, or nothing."""
    gc.disable()  # so that no collection moves pages that forks share
    try:
        for name in names:
            importlib.import_module(name)
        for job in jobs:
            load(job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.freeze()
        gc.enable()
    return ""


def main() -> None:
    start, parent = sys.argv[1], int(sys.argv[2])
    take_seat()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0) if os.getppid() != parent else None)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)  # imports take seconds; a kernel that ends meanwhile is noticed
    reason = "asked for by trial.start" if start == "cold" else preload()
    signal.setitimer(signal.ITIMER_REAL, 0)
    Supervisor(parent, reason).run()


if __name__ == "__main__":
    main()
