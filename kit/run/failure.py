"""Why a rank failed: the root cause first, in the user's own line, and its kind.

Lightning tears down after an error and often fails again while doing so, which hides the first error behind the second.
So explicit causes (`raise ... from`) are always followed, and an implicit context is followed when the outer error
comes out of a teardown or holds no line of the user's code; one raised on purpose while handling another is itself the
cause.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.errors import KitError, StoreError
from kit.run.batch_rule import BatchRule
from kit.run.out_of_memory import advice
from kit.run.places import Frame, describe, frames_in, is_library, own_frame

if TYPE_CHECKING:
    from kit.run.jobs.context import Context

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
