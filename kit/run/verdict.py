"""How a trial ended: one state and one cause, from exit codes, the ranks' last words and what the supervisor did.

The first failure in time is the one reported, except that a rank which only lost the connection to a peer is never the
root. Exit code 0 is success only when the rank has said that its job ended.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kit.events import Event, number
from kit.json_text import read_json
from kit.run.paths import RunPaths
from kit.run.places import describe, is_library, last_stack
from kit.units import format_bytes, format_seconds

Killing = Literal["stop", "kill", "timeout", "stalled", "sibling", "kernel"]
EXIT_FAILED = 1
EXIT_CANNOT_WRITE = 74
JOB_ENDED = ("fit_ended", "prediction_ended", "calibration_ended", "peaks_measured")
"""What a rank says last, by its job."""
_TAIL_BYTES = 1 << 18
_CRASHES = {"SIGSEGV": "segmentation fault", "SIGBUS": "bus error", "SIGFPE": "arithmetic error", "SIGILL": "bad code"}


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one process ended."""

    rank: int
    exit_code: int
    """As Python gives it: negative for a signal."""
    time: float
    """Seconds since the epoch."""
    killed_by_us: bool


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_seconds: float
    stall_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `trial_ended` says."""

    state: Literal["COMPLETE", "FAILED", "STOPPED", "LOST"]
    message: str
    cause: str | None = None
    failed_rank: int | None = None


def judge(
    paths: RunPaths, ends: Sequence[RankEnd], killing: Killing | None, limits: Limits, out_of_memory: bool
) -> Verdict:
    """The verdict on ranks that have all ended; `killing` says why the supervisor killed them, if it did."""
    tails = {end.rank: _Tail.read(paths.events(end.rank)) for end in ends}
    if killing == "kernel":
        return Verdict("LOST", "the kernel went away")
    if killing in ("stop", "kill"):
        return Verdict("STOPPED", _stopped_by_force(ends, tails, killing, limits))
    if killing == "timeout":
        message = f"still running after {format_seconds(limits.timeout_seconds)} (trial.timeout_seconds)"
        return Verdict("FAILED", message, "timeout")
    if killing == "stalled":
        return _stalled(paths, tails, limits)
    return _failed(paths, ends, tails, out_of_memory) or _ended(tails)


def said_job_ended(paths: RunPaths, rank: int) -> bool:
    """Whether a rank has said that its job ended; without that, exit code 0 means nothing."""
    return _Tail.read(paths.events(rank)).ended is not None


def _ended(tails: dict[int, _Tail]) -> Verdict:
    steps = max(tail.step for tail in tails.values())
    if any(tail.ended and tail.ended.get("stopped") for tail in tails.values()):
        return Verdict("STOPPED", f"stopped after step {steps}")
    return Verdict("COMPLETE", f"{steps} steps")


def _stopped_by_force(ends: Sequence[RankEnd], tails: dict[int, _Tail], killing: Killing, limits: Limits) -> str:
    steps = max(tail.step for tail in tails.values())
    if killing == "kill":
        return f"killed after step {steps}"
    late = ", ".join(str(end.rank) for end in ends if end.killed_by_us)
    grace = format_seconds(limits.grace_seconds)
    return f"stopped after step {steps}; rank {late} did not finish its step within {grace} and was killed"


def _stalled(paths: RunPaths, tails: dict[int, _Tail], limits: Limits) -> Verdict:
    """The rank furthest behind holds up the others; among equals, one that hangs in the user's own code."""
    frames = {rank: last_stack(paths.log(rank)) for rank in tails}

    def order(rank: int) -> tuple[int, bool, int]:
        frame = frames[rank]
        return tails[rank].step, frame is None or is_library(frame[0]), rank

    rank = min(tails, key=order)
    frame = frames[rank]
    place = f": rank {rank} was at {describe(frame)}" if frame else ""
    silence = f"no sign of progress for {format_seconds(limits.stall_seconds)} after step {tails[rank].step}"
    return Verdict("FAILED", f"{silence}{place}; the stacks of all threads are in the logs", "stalled", rank)


def _failed(paths: RunPaths, ends: Sequence[RankEnd], tails: dict[int, _Tail], out_of_memory: bool) -> Verdict | None:
    """The first failure, or None when every rank ended well."""
    found: list[tuple[bool, float, Verdict]] = []
    for end in ends:
        tail = tails[end.rank]
        if tail.failed is not None:
            verdict = Verdict("FAILED", str(tail.failed["message"]), str(tail.failed["cause"]), end.rank)
            found.append((bool(tail.failed.get("lost_peer")), float(tail.failed["time"]), verdict))
        elif not end.killed_by_us and (end.exit_code != 0 or tail.ended is None):
            found.append((False, end.time, _silent_end(paths, end, tail, out_of_memory)))
    return min(found, key=lambda item: item[:2])[2] if found else None


def _silent_end(paths: RunPaths, end: RankEnd, tail: _Tail, out_of_memory: bool) -> Verdict:
    """A rank that ended without a word."""
    after = f"after step {tail.step}"
    if end.exit_code == EXIT_CANNOT_WRITE:
        message = f"rank {end.rank} could not write to {paths.directory} {after}: is the disk full?"
        return Verdict("FAILED", message, "error", end.rank)
    if end.exit_code >= 0:
        message = f"rank {end.rank} left with exit code {end.exit_code} {after}, before the fit had ended"
        return Verdict("FAILED", message, "error", end.rank)
    name = signal.Signals(-end.exit_code).name
    if name == "SIGKILL":
        return _killed(end, tail, after, out_of_memory)
    frame = last_stack(paths.log(end.rank)) if name in _CRASHES else None
    what = f"{name} ({_CRASHES[name]})" if name in _CRASHES else name
    message = f"rank {end.rank} was ended by {what} {after}" + (f", at {describe(frame)}" if frame else "")
    return Verdict("FAILED", message, "killed", end.rank)


def _killed(end: RankEnd, tail: _Tail, after: str, out_of_memory: bool) -> Verdict:
    used = f"; it used {format_bytes(tail.host_rss_bytes)}" if tail.host_rss_bytes else ""
    if out_of_memory:
        message = f"the system ran out of host memory and killed rank {end.rank} {after}{used}"
        return Verdict("FAILED", message, "host_oom", end.rank)
    return Verdict("FAILED", f"rank {end.rank} was ended by SIGKILL from outside {after}{used}", "killed", end.rank)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The last words of one rank."""

    step: int = 0
    host_rss_bytes: float = 0.0
    failed: Event | None = None
    ended: Event | None = None

    @classmethod
    def read(cls, path: Path) -> _Tail:
        events = _last_events(path)
        steps = [event for event in events if event.get("kind") == "step"]
        found: dict[str, Any] = {event["kind"]: event for event in events}
        last = steps[-1] if steps else {}
        rss = number(last.get("host_rss_bytes"))
        ended = next((found[kind] for kind in JOB_ENDED if kind in found), None)
        return cls(int(last.get("step", 0)), rss if rss == rss else 0.0, found.get("failed"), ended)


def _last_events(path: Path) -> list[Event]:
    """Whole events near the end of a file; damage is left to the reader of the whole file to report."""
    try:
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    events = []
    for line in lines[1 if start else 0 : -1]:
        try:
            event = read_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "kind" in event:
            events.append(event)
    return events


def host_out_of_memory_count() -> int:
    """How many processes the system has killed for lack of memory, in this container and on this machine."""
    total = 0
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            words = path.read_text().split()
        except OSError:
            continue
        total += int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    return total
