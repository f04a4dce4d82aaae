"""in_fresh_process: one call in a process of its own, so that nothing measured before changes what is measured now.

A process that has loaded for a while is another than one that begins to train: its heap has grown, so that large
batches cost no page faults any more, its data sets keep what they have read, its files are open. So the process is
forked for one call. The call runs in a new thread there, since the forking thread's own threads of OpenMP have not come
along and would be waited for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from kit.errors import TrialError
from kit.machine.processes import die_with_parent

Answer = TypeVar("Answer")
_END_SECONDS = 5.0


def in_fresh_process(call: Callable[[], Answer], seconds: float | None = None) -> Answer:
    """What `call` returns, or raises, in a process forked for it.

    Args:
        call: Its answer must pickle; an error that does not becomes a TrialError of the same words.
        seconds: How long it may take.

    Raises:
        TrialError: when it takes longer, or the process ends without an answer.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(call, sender, os.getpid()))
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TrialError(f"it took longer than {seconds:g} seconds")
        answer, error = receiver.recv()
    except EOFError:
        child.join()
        raise TrialError(f"the process that measured ended with exit code {child.exitcode}") from None
    finally:
        receiver.close()
        child.join(_END_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]


def _work(call: Callable[[], Any], sender: Connection, parent: int) -> None:
    die_with_parent(parent)
    answer: list[Any] = [None, None]

    def run() -> None:
        try:
            answer[0] = call()
        except BaseException as error:
            answer[1] = _sendable(error)

    thread = threading.Thread(target=run, name="kit-fresh")
    thread.start()
    thread.join()
    with contextlib.suppress(OSError):  # nobody waits any more
        sender.send(answer)
    os._exit(0)  # exit handlers are the parent's


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrialError(f"{type(error).__name__}: {error}")
    return error
