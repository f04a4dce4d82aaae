"""How a trial ended: one state and one cause, from exit codes, the ranks' last words and what the supervisor did.

The first failure in time is the one reported, except that a rank which only lost the connection to a peer is never the
root. Exit code 0 is success only when the rank has said that its job ended.

Why a rank failed: the root cause first, in the user's own line, and its kind.

Lightning tears down after an error and often fails again while doing so, which hides the first error behind the second.
So explicit causes (`raise ... from`) are always followed, and an implicit context is followed when the outer error
comes out of a teardown or holds no line of the user's code; one raised on purpose while handling another is itself the
cause.

Where in the user's own code something happened: the innermost frame that belongs to no library.

Frames come from tracebacks or from the stacks that faulthandler writes to a log when a rank hangs or crashes. Notebook
cells are named by their number when it is known.

What helps when a device is out of memory, in the order to try it: what costs least first.

Smaller batches come first, then what stores less of the same training, then what computes some of it again, then more
devices, then a smaller model. What a config has already is left out. Words only: how much each saves is predicted by
`kit.what_if` and measured by `kit.verify_levers`.
"""

from __future__ import annotations

import errno
import functools
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kit.config import Config
from kit.errors import KitError, StoreError
from kit.events import Event, number
from kit.json_text import read_json
from kit.trial.directory import RunPaths
from kit.trial.payload import BatchRule
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kit.trial.context import Context

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


_TEARDOWN = {"_interrupt", "_teardown", "teardown", "_call_teardown_hook", "on_exception"}
_DEVICE = re.compile(r"CUDA.*out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", re.DOTALL)
_HOST = re.compile(r"can't allocate memory|Cannot allocate memory|not enough memory")
_LOST_PEER = re.compile(r"gloo|Connection (closed|reset) by (remote )?peer|Broken pipe|NCCL|TCPStore|rank \d+ .*exited")
_LOADER_WORKER = re.compile(r"DataLoader worker")
_LOADER_KILLED = re.compile(r"DataLoader worker \(pid[^)]*\)?[^)]*\) (is killed by signal|exited unexpectedly)")
_MESSAGE_LENGTH = 2_000
_TRACEBACK_LENGTH = 20_000
_LIBRARY_FRAMES = 4


class DivergedError(KitError, ArithmeticError):
    """The loss is no longer a finite number."""


def describe_failure(error: BaseException, context: Context | None) -> dict[str, Any]:
    """The fields of a `failed` event: cause, message, type, traceback, lost_peer, advice."""
    cells = context.cells if context is not None else {}
    root = root_cause(error)
    action = _action(error, context)
    cause = _cause(root, error, action)
    return {
        "cause": cause,
        "type": type(root).__name__,
        "message": _message(root, error, cells, action),
        "traceback": _own_traceback(root),
        "lost_peer": _is_lost_peer(root),
        "advice": _advice(context) if context is not None and cause == "device_oom" else [],
    }


def _advice(context: Context) -> list[str]:
    """For the batch that ran, which a loader of the caller's own may have made."""
    rule, size = BatchRule.of_environment(context.environment), context.config.loader.batch_size
    if rule is None:
        return list(advice(context.config))
    before_the_first_batch = size == rule.asked
    return list(advice(context.config, (rule.size if before_the_first_batch else size) or size, rule.whose))


def chain(error: BaseException) -> list[BaseException]:
    """The error and what led to it, outermost first."""
    found = [error]
    while (inner := _led_to(found[-1])) is not None and all(inner is not known for known in found):
        found.append(inner)
    return found


def _led_to(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    if error.__suppress_context__ or error.__context__ is None:
        return None
    frames = _frames(error)
    in_teardown = any(function in _TEARDOWN for _, _, function in frames)
    return error.__context__ if in_teardown or own_frame(frames) is None else None


def root_cause(error: BaseException) -> BaseException:
    """The error to report: the innermost, but one of kit's own before what it was raised from.

    That a loader process was killed is told by a signal, which may come after a read from it has failed and while that
    is being handled; it is the cause all the same.
    """
    killed = next((item for item in reversed(_everything(error)) if _LOADER_KILLED.search(str(item))), None)
    errors = chain(error)
    return killed or next((item for item in reversed(errors) if isinstance(item, KitError)), errors[-1])


def _everything(error: BaseException) -> list[BaseException]:
    """The error and all that it was raised from or while handling, outermost first."""
    found = [error]
    while (inner := found[-1].__cause__ or found[-1].__context__) is not None and all(
        inner is not known for known in found
    ):
        found.append(inner)
    return found


def _frames(error: BaseException) -> list[Frame]:
    return [(item.filename, item.lineno or 0, item.name) for item in traceback.extract_tb(error.__traceback__)]


def _own_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on; the log holds all of it."""
    told = traceback.TracebackException.from_exception(error)
    item: traceback.TracebackException | None = told
    while item is not None:
        own = [index for index, frame in enumerate(item.stack) if not is_library(frame.filename)]
        item.stack = traceback.StackSummary.from_list(item.stack[own[0] if own else -_LIBRARY_FRAMES :])
        item = item.__cause__
    return "".join(told.format(chain=error.__cause__ is not None))[-_TRACEBACK_LENGTH:]


def _message(root: BaseException, error: BaseException, cells: Mapping[str, tuple[str, str]], action: str) -> str:
    """`KeyError: 'x' (model.py, line 34, in training_step)`, then what it was raised again as."""
    if isinstance(root, DivergedError):
        return str(root)
    if isinstance(root, KitError):  # says itself what is wrong and where
        return _text(root)[:_MESSAGE_LENGTH]
    if _LOADER_KILLED.search(str(root)):  # wherever this process was when it heard of it
        return f"{_text(root).rstrip('.')}; look whether host memory or shared memory ran out"[:_MESSAGE_LENGTH]
    text, frames = _text(root), _frames(root)
    if _LOADER_WORKER.search(str(root)):
        frames += frames_in(str(root))
        text = _innermost_line(str(root)) or text
    frame = own_frame(frames)
    where = f" ({describe(frame, cells)})" if frame else f" (in {action})" if action else ""
    outer = next((item for item in chain(error) if item.__cause__ is root), None)
    again = f"; raised again as {_text(outer)}" if outer is not None and root is not outer else ""
    return f"{text}{where}{again}"[:_MESSAGE_LENGTH]


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    first = " ".join(lines) if isinstance(error, KitError) else lines[0] if lines else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _innermost_line(message: str) -> str:
    """The error that a loader process hit, from the traceback that torch quotes in the message."""
    lines = [line for line in message.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if len(lines) > 1 and "Traceback" in message else ""


def _cause(root: BaseException, error: BaseException, action: str) -> str:
    errors = [root, *chain(error)]
    if isinstance(root, DivergedError):
        return "diverged"
    if any(_is_device_memory(item) for item in errors):
        return "device_oom"
    if any(_is_host_memory(item) for item in errors):
        return "host_oom"
    from_data = any(isinstance(item, StoreError) or _LOADER_WORKER.search(str(item)) for item in errors)
    return "data" if from_data or action.endswith("train_dataloader_next") else "error"


def _is_device_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _DEVICE.search(str(error)) is not None


def _is_host_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and _HOST.search(str(error)) is not None


def _is_lost_peer(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    kinds = getattr(getattr(torch, "distributed", None), "DistError", ()) if torch else ()
    is_distributed = bool(kinds) and isinstance(error, kinds)
    return is_distributed or (isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None)


def _action(error: BaseException, context: Context | None) -> str:
    """The Lightning action that this very error first left, such as `[_TrainingEpochLoop].train_dataloader_next`."""
    failed = context.clock.failed if context is not None and context.clock is not None else None
    return failed[1] if failed is not None and any(failed[0] is item for item in _everything(error)) else ""


Frame = tuple[str, int, str]
"""(file, line, function)"""
_STACK_BYTES = 1 << 16
_RUNNING = ("confinement", "memory", "studies", "train", "trial")
"""Rooms of kit that run the code of users."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+)(?:,)? in (\S+)', re.MULTILINE)
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py|<ipython-input-")


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    kit = Path(__file__).parents[1]
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(f"{folder}/" for folder in [*folders, *(kit / room for room in _RUNNING)])


def is_library(file: str) -> bool:
    """Whether a file is Python's, a package's, or the part of kit that runs the user's code."""
    if _CELL.search(file):
        return False
    return file.startswith(("<", *_library_folders())) or "site-packages/" in file


def own_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code, from frames given outermost first."""
    own = [frame for frame in frames if not is_library(frame[0])]
    return own[-1] if own else None


def describe(frame: Frame, cells: Mapping[str, tuple[str, str]] | None = None) -> str:
    """`model.py, line 34, in training_step`, or `cell 5, line 3, in ...`."""
    file, line, function = frame
    unnamed = "a notebook cell" if _CELL.search(file) else Path(file).name
    where = cells[file][0] if cells and file in cells else unnamed
    return f"{where}, line {line}, in {function}"


def last_stack(log: Path) -> Frame | None:
    """The user's frame in the last stack of a log that has one, else where its rank was; None without a stack."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _STACK_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    stacks = [frames_in(stack) for stack in text.split("Current thread 0x")[1:]]
    own = [found for stack in reversed(stacks) if (found := own_frame(reversed(stack)))]
    return next(iter(own), stacks[0][0] if stacks and stacks[0] else None)


def frames_in(text: str) -> list[Frame]:
    """The frames written in a traceback or stack, in the order written."""
    return [(match[1], int(match[2]), match[3]) for match in _FRAME.finditer(text)]


def advice(config: Config, batch_size: int | None = None, whose: str = "") -> tuple[str, ...]:
    """Sentences with the settings to change, the first to try first.

    Args:
        config: What ran out of memory.
        batch_size: Samples per batch on each device; by default the config's.
        whose: Who makes the batches, where that is not the config.
    """
    size = config.loader.batch_size if batch_size is None else batch_size
    return (
        *_smaller_batch(config, size, whose),
        *_stored_less(config),
        *_computed_again(config),
        *_spread(config),
        *_MODEL,
    )


def _smaller_batch(config: Config, size: int, whose: str) -> Iterator[str]:
    if size > 1:
        half = size // 2
        raised = config.levers.accumulate_grad_batches * 2
        setting = f"batches of {half} from {whose}" if whose else f"loader.batch_size: {half}"
        yield (
            f"a smaller batch: {setting} with levers.accumulate_grad_batches: {raised} keeps the "
            "global batch; kit.find_batch_size finds the largest that fits"
        )


def _stored_less(config: Config) -> Iterator[str]:
    if config.hardware.precision == "32-true":
        yield "fewer bits: hardware.precision: bf16-mixed"
    if config.levers.optimizer in ("module", "adamw", "adamw-fused"):
        yield "less optimizer state: levers.optimizer: adamw-8bit"
    if config.levers.attention == "math":
        yield "attention that keeps no scores: levers.attention: flash"


def _computed_again(config: Config) -> Iterator[str]:
    if not config.levers.gradient_checkpointing:
        yield "activations computed again instead of kept: levers.gradient_checkpointing: true"
    if not config.levers.sequence_chunk:
        yield (
            "shorter sequences, or sequences in chunks: levers.sequence_chunk, for a module that has chunk_step; an "
            "attention window in the model"
        )


def _spread(config: Config) -> Iterator[str]:
    if not config.hardware.strategy.startswith("fsdp"):
        yield "the model sharded over more devices: hardware.strategy: fsdp with hardware.devices: 2 or more"


_MODEL = ("a smaller model: first its width (hidden_dim), then its number of layers",)


def as_details(sentences: Sequence[str]) -> str:
    """The advice as it stands below an error."""
    numbered = (f"  {place}. {sentence}" for place, sentence in enumerate(sentences, 1))
    return "\n".join(["What helps, in the order to try it:", *numbered])
