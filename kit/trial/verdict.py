"""How a trial ended: one state, one cause and one message with the root first, and the user's own line where it failed.

`judge` decides from exit codes, the ranks' last events and what the supervisor did. The first failure in time is
reported, but a rank that only lost the connection to a peer is never the root. Exit code 0 is success only when the
rank has written that its job ended.

`describe_failure` finds why a rank failed. Lightning tears down after an error and often fails again meanwhile, which
hides the first error behind the second. So an explicit cause (`raise ... from`) is always followed, and an implicit
context only when the outer error comes out of a teardown or has no line of the user's code: an error raised on purpose
while another was handled is itself the cause. A loader process that is being killed closes its connections before it
can be seen dead, so torch may raise the connection's error instead of its own message; `describe_failure` waits for it.

The user's line is the innermost frame that belongs to no library, from tracebacks or from the stacks that faulthandler
writes to a log when a rank hangs or crashes. Notebook cells go by their number when it is known.

`advice` lists what helps when a device is out of memory, what costs least first: smaller batches, storing less of the
same training, computing some of it again, more devices, a smaller model. How much each saves is predicted by
`kit.memory.what_if` and measured by `kit.studies.verify_levers`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kit.config import Config
from kit.errors import KitError, StoreError, first_line
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
JOB_ENDED = ("fit_ended", "prediction_ended", "calibration_ended")
"""The last event of a rank, by its job."""
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
    steps = max((tail.step for tail in tails.values()), default=0)
    match killing:
        case "kernel":
            return Verdict("LOST", "the kernel went away")
        case "kill":
            return Verdict("STOPPED", f"killed after step {steps}")
        case "stop":
            late = (
                f"rank {', '.join(str(end.rank) for end in ends if end.killed_by_us)} did not finish its step within "
            )
            late += f"{format_seconds(limits.grace_seconds)} and was killed"
            return Verdict("STOPPED", f"stopped after step {steps}; {late}")
        case "timeout":
            message = f"still running after {format_seconds(limits.timeout_seconds)} (trial.timeout_seconds)"
            return Verdict("FAILED", message, "timeout")
        case "stalled":
            return _stalled(paths, tails, limits)
    failures: list[tuple[bool, float, Verdict]] = []
    for end in ends:
        tail = tails[end.rank]
        if tail.failed is not None:
            verdict = Verdict("FAILED", str(tail.failed["message"]), str(tail.failed["cause"]), end.rank)
            failures.append((bool(tail.failed.get("lost_peer")), float(tail.failed["time"]), verdict))
        elif not end.killed_by_us and (end.exit_code != 0 or tail.ended is None):
            failures.append((False, end.time, _silent_end(paths, end, tail, out_of_memory)))
    if failures:
        return min(failures, key=lambda item: item[:2])[2]
    if any(tail.ended and tail.ended.get("stopped") for tail in tails.values()):
        return Verdict("STOPPED", f"stopped after step {steps}")
    early = next((str(tail.ended["early"]) for tail in tails.values() if tail.ended and tail.ended.get("early")), "")
    return Verdict("COMPLETE", f"{steps} steps" + (f": {early}" if early else ""))


def said_job_ended(paths: RunPaths, rank: int) -> bool:
    """Whether a rank has written that its job ended; without that, exit code 0 means nothing."""
    return _Tail.read(paths.events(rank)).ended is not None


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


def _silent_end(paths: RunPaths, end: RankEnd, tail: _Tail, out_of_memory: bool) -> Verdict:
    """The verdict on a rank that ended without an event that says why."""
    rank, after, cause = f"rank {end.rank}", f"after step {tail.step}", "error"
    used = f", when it used {format_bytes(tail.host_rss_bytes)}" if tail.host_rss_bytes else ""
    name = signal.Signals(-end.exit_code).name if end.exit_code < 0 else ""
    if end.exit_code == EXIT_CANNOT_WRITE:
        message = f"{rank} could not write to {paths.directory} {after}: is the disk full?"
    elif not name:
        message = f"{rank} left with exit code {end.exit_code} {after}, before the fit had ended"
    elif name == "SIGKILL" and out_of_memory:
        cause, message = "host_oom", f"the system ran out of host memory and killed {rank} {after}{used}"
    elif name == "SIGKILL":
        cause, message = "killed", f"{rank} was ended by SIGKILL from outside {after}{used}"
    else:
        crash = _CRASHES.get(name)
        frame = last_stack(paths.log(end.rank)) if crash else None
        message = f"{rank} was ended by {name}{f' ({crash})' if crash else ''} {after}"
        cause, message = "killed", message + (f", at {describe(frame)}" if frame else "")
    return Verdict("FAILED", message, cause, end.rank)


@dataclass(frozen=True, slots=True)
class _Tail:
    """What one rank wrote last."""

    step: int = 0
    host_rss_bytes: float = 0.0
    failed: Event | None = None
    ended: Event | None = None

    @classmethod
    def read(cls, path: Path) -> _Tail:
        """From the whole events near the end of a file; damage is left to the reader of the whole file to report."""
        try:
            with path.open("rb") as file:
                start = max(0, path.stat().st_size - _TAIL_BYTES)
                file.seek(start)
                lines = file.read().split(b"\n")[1 if start else 0 : -1]
        except OSError:
            return cls()
        found: dict[str, Any] = {}
        for line in lines:
            with contextlib.suppress(ValueError):
                event = read_json(line)
                if isinstance(event, dict) and "kind" in event:
                    found[event["kind"]] = event
        step = found.get("step", {})
        rss = number(step.get("host_rss_bytes"))
        ended = next((found[kind] for kind in JOB_ENDED if kind in found), None)
        return cls(int(step.get("step", 0)), rss if rss == rss else 0.0, found.get("failed"), ended)


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
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(: |$)")
_DYING_SECONDS = 1.0
_MESSAGE_LENGTH = 2_000
_TRACEBACK_LENGTH = 20_000
_LIBRARY_FRAMES = 4


class DivergedError(KitError, ArithmeticError):
    """The loss is no longer a finite number."""


def describe_failure(error: BaseException, context: Context | None) -> dict[str, Any]:
    """The fields of a `failed` event: cause, message, type, traceback, lost_peer, advice."""
    cells = context.cells if context is not None else {}
    error = _with_killed_loader(error)
    root = root_cause(error)
    failed = context.clock.failed if context is not None and context.clock is not None else None
    known = failed is not None and any(failed[0] is item for item in _chain(error, _any_inner))
    action = failed[1] if known and failed is not None else ""  # such as [_TrainingEpochLoop].train_dataloader_next
    cause = _cause(root, error, action)
    snapshot = _snapshot(context) if cause == "device_oom" else ""
    log = None if context is None else context.paths.log(context.rank)
    report = f"; trial.memory_report() shows what held it (from {snapshot})" if snapshot else ""
    said = _message(root, error, cells, action, log)
    report += _of_chosen_precision(said, context)
    return {
        "cause": cause,
        "type": type(root).__name__,
        "message": said[: _MESSAGE_LENGTH - len(report)] + report,
        "traceback": _own_traceback(root),
        "lost_peer": _is_lost_peer(root),
        "advice": _advice(context) if context is not None and cause == "device_oom" else [],
        **({"memory_snapshot": snapshot} if snapshot else {}),
    }


_HALF = re.compile(r"bfloat16|float16|half", re.IGNORECASE)


def _of_chosen_precision(message: str, context: Context | None) -> str:
    """What to set where an error is about a number format that kit has chosen."""
    if context is None or context.config.hardware.precision != "auto" or not _HALF.search(message):
        return ""
    precision = (context.environment.get("prediction") or context.environment).get("precision")
    if precision in (None, "32-true"):
        return ""
    return f"; hardware.precision is auto, which chose {precision} here: set 32-true where an operator has no such type"


def _snapshot(context: Context | None) -> str:
    """The name of the file in which `kit.trial.meters.MemoryHistory` kept what the device held."""
    file = None if context is None else context.paths.memory_snapshot(context.rank)
    return file.name if file is not None and file.exists() else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory, whatever was raised because of it."""
    return any(_memory_cause(item) == "device_oom" for item in _chain(error, _any_inner))


def _advice(context: Context) -> list[str]:
    """For the batch that ran, which a loader of the caller's own may have made."""
    rule, size = BatchRule.of_environment(context.environment), context.config.loader.batch_size
    if rule is None:
        return list(advice(context.config))
    before_the_first_batch = size == rule.asked
    return list(advice(context.config, (rule.size if before_the_first_batch else size) or size, rule.whose))


def _chain(error: BaseException, inner_of: Callable[[BaseException], BaseException | None]) -> list[BaseException]:
    """The error and what led to it, outermost first; it ends where it would repeat."""
    found = [error]
    while (inner := inner_of(found[-1])) is not None and all(inner is not known for known in found):
        found.append(inner)
    return found


def _any_inner(error: BaseException) -> BaseException | None:
    return error.__cause__ or error.__context__


def _led_to(error: BaseException) -> BaseException | None:
    """What the error was raised from or, as the module's docstring says, while handling what."""
    if error.__cause__ is not None or error.__suppress_context__ or error.__context__ is None:
        return error.__cause__
    frames = _frames(error)
    in_teardown = any(function in _TEARDOWN for _, _, function in frames)
    return error.__context__ if in_teardown or own_frame(frames) is None else None


def root_cause(error: BaseException) -> BaseException:
    """The error to report: the innermost, but one of kit's own before what it was raised from.

    A signal tells that a loader process was killed. It may come while a failed read from that process is handled; it is
    the cause all the same.
    """
    everything, errors = _chain(error, _any_inner), _chain(error, _led_to)
    killed = next((item for item in reversed(everything) if _LOADER_KILLED.search(str(item))), None)
    return killed or next((item for item in reversed(errors) if isinstance(item, KitError)), errors[-1])


def _with_killed_loader(error: BaseException) -> BaseException:
    """`error`, or that a loader process was killed, which broke the connection that `error` is about."""
    broken = root_cause(error)
    if not isinstance(broken, ConnectionError | EOFError):
        return error
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(broken.__traceback__)]
    found = dict.fromkeys(worker for owner in owners for worker in getattr(owner, "_workers", ()))
    workers = [worker for worker in found if isinstance(worker, BaseProcess)]
    try:
        ended = wait([worker.sentinel for worker in workers], _DYING_SECONDS) if workers else []
        for worker in workers:  # the sentinel is closed a moment before the exit code is there
            worker.join(_DYING_SECONDS if worker.sentinel in ended else 0)
        pids = ", ".join(str(worker.pid) for worker in workers if worker.exitcode)
    except RuntimeError as told:  # torch's handler of SIGCHLD
        return told
    if not pids:
        return error
    killed = RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")
    killed.__cause__ = error
    return killed


def _frames(error: BaseException) -> list[Frame]:
    return [(item.filename, item.lineno or 0, item.name) for item in traceback.extract_tb(error.__traceback__)]


def _own_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on; the log holds all of it."""
    report = traceback.TracebackException.from_exception(error)
    item: traceback.TracebackException | None = report
    while item is not None:
        own = [index for index, frame in enumerate(item.stack) if not is_library(frame.filename)]
        item.stack = traceback.StackSummary.from_list(item.stack[own[0] if own else -_LIBRARY_FRAMES :])
        item = item.__cause__
    return "".join(report.format(chain=error.__cause__ is not None))[-_TRACEBACK_LENGTH:]


def _message(
    root: BaseException, error: BaseException, cells: Mapping[str, tuple[str, str]], action: str, log: Path | None
) -> str:
    """`KeyError: 'x' (model.py, line 34, in training_step)`, then what it was raised again as."""
    text = _text(root)
    if isinstance(root, DivergedError):
        return str(root)
    if isinstance(root, KitError):  # says itself what is wrong and where
        return text
    if _LOADER_KILLED.search(str(root)):  # wherever this process was when it heard of it
        own = last_error(log) if log is not None and "exit code" in text else ""
        if own:  # a signal ends a process without a word
            return f"{own} (the last error of the log, which has its traceback: a loader process ended with one)"
        return f"{text.rstrip('.')}; look whether host memory or shared memory ran out"
    frames = _frames(root)
    if _LOADER_WORKER.search(str(root)):  # torch quotes the traceback of the loader process
        frames += frames_in(str(root))
        lines = [line for line in str(root).strip().splitlines() if line and not line.startswith(" ")]
        text = lines[-1] if len(lines) > 1 and "Traceback" in str(root) else text
    frame = own_frame(frames)
    where = f" ({describe(frame, cells)})" if frame else f" (in {action})" if action else ""
    outer = next((item for item in _chain(error, _led_to) if item.__cause__ is root), None)
    again = f"; raised again as {_text(outer)}" if outer is not None and root is not outer else ""
    way_out = next((f"; {told}" for known, told in _WAYS_OUT.items() if known in text), "")
    return f"{text}{where}{way_out}{again}"


_OF_VALIDATION = (
    "a trial validates only where trial.validate_every_steps says when (0 is never), and has no metrics of it otherwise"
)
_WAYS_OUT = {
    "grad can be implicitly created only for scalar outputs":
        "training_step must return one number, such as loss.mean()",
    "does not require grad and does not have a grad_fn":
        "the loss depends on no parameter that is trained: look for detach, no_grad and requires_grad_(False)",
    "argument after ** must be a mapping":
        "a batch is no dict: let the samples be dicts, or give the DataLoader a collate_fn that makes one",
    "Early stopping conditioned on metric": _OF_VALIDATION, "could not find the monitored key": _OF_VALIDATION,
}  # fmt: skip
"""Words of torch and Lightning for mistakes that they find where no line of the user's runs."""


def _text(error: BaseException) -> str:
    if not (whole := str(error).strip()):
        return type(error).__name__
    first = " ".join(line.strip() for line in whole.splitlines()) if isinstance(error, KitError) else first_line(error)
    return f"{type(error).__name__}: {first}"


def _cause(root: BaseException, error: BaseException, action: str) -> str:
    errors = [root, *_chain(error, _led_to)]
    if isinstance(root, DivergedError):
        return "diverged"
    of_memory = {_memory_cause(item) for item in errors}
    for cause in ("device_oom", "host_oom"):
        if cause in of_memory:
            return cause
    from_data = any(isinstance(item, StoreError) or _LOADER_WORKER.search(str(item)) for item in errors)
    return "data" if from_data or action.endswith("train_dataloader_next") else "error"


def _memory_cause(error: BaseException) -> str:
    torch, is_runtime_error = sys.modules.get("torch"), isinstance(error, RuntimeError)
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "device_oom"
    if is_runtime_error and _DEVICE.search(str(error)):
        return "device_oom"
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return "host_oom" if no_memory or (is_runtime_error and _HOST.search(str(error))) else ""


def _is_lost_peer(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    kinds = getattr(getattr(torch, "distributed", None), "DistError", ()) if torch else ()
    is_distributed = bool(kinds) and isinstance(error, kinds)
    return is_distributed or (isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None)


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
    stacks = [frames_in(stack) for stack in _end_of(log).split("Current thread 0x")[1:]]
    own = [found for stack in reversed(stacks) if (found := own_frame(reversed(stack)))]
    return next(iter(own), stacks[0][0] if stacks and stacks[0] else None)


def last_error(log: Path) -> str:
    """The error of the last traceback in a log that is no rank's word on a loader process; empty without one."""
    for report in reversed(_end_of(log).split("Traceback (most recent call last):")[1:]):
        line = next((line for line in report.splitlines()[1:] if _ERROR_LINE.match(line)), "")
        if line and not _LOADER_WORKER.search(line):
            return line
    return ""


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _STACK_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def frames_in(text: str) -> list[Frame]:
    """The frames written in a traceback or stack, in the order written."""
    return [(match[1], int(match[2]), match[3]) for match in _FRAME.finditer(text)]


def advice(config: Config, batch_size: int | None = None, whose: str = "") -> tuple[str, ...]:
    """Sentences with the settings to change, the first to try first; without those that the config has already.

    Args:
        config: What ran out of memory.
        batch_size: Samples per batch on each device; by default the config's.
        whose: Who makes the batches, where that is not the config.
    """
    size, levers, hardware = batch_size or config.loader.batch_size, config.levers, config.hardware
    half, raised = size // 2, levers.accumulate_grad_batches * 2
    setting = f"batches of {half} from {whose}" if whose else f"loader.batch_size: {half}"
    helps = {
        "gradients freed before the next forward pass: levers.zero_grad_after_step: true costs no time": (
            not levers.zero_grad_after_step
        ),
        f"a smaller batch: {setting} with levers.accumulate_grad_batches: {raised} keeps the global batch; "
        "kit.studies.find_batch_size finds the largest that fits": size > 1,
        "fewer bits: hardware.precision: bf16-mixed": hardware.precision == "32-true",
        "less optimizer state: levers.optimizer: adamw-8bit": levers.optimizer in ("module", "adamw", "adamw-fused"),
        "attention that keeps no scores: levers.attention: flash": levers.attention == "math",
        "activations computed again instead of kept: levers.gradient_checkpointing: true": (
            not levers.gradient_checkpointing
        ),
        "shorter sequences, or sequences in chunks: levers.sequence_chunk, for a module that has chunk_step; an "
        "attention window in the model": not levers.sequence_chunk,
        "the model sharded over more devices: hardware.strategy: fsdp with hardware.devices: 2 or more": (
            not hardware.strategy.startswith("fsdp")
        ),
        "a smaller model: first its width (hidden_dim), then its number of layers": True,
    }
    return tuple(sentence for sentence, applies in helps.items() if applies)


def as_details(sentences: Sequence[str]) -> str:
    """The advice as it stands below an error."""
    numbered = (f"  {number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    return "\n".join(["What helps, in the order to try it:", *numbered])
