"""What is measured in a process of its own, so that nothing measured before changes what is measured now.

A process that has loaded for a while is another than one that begins to train: its heap has grown, so that large
batches cost no page faults any more, its data sets keep what they have read, its files are open. So `in_fresh_process`
forks one for one call. The call runs in a new thread there, since the forking thread's own threads of OpenMP have not
come along and would be waited for.

`step_seconds` is what a training step takes when nothing is waited for: one rank trains on its device, with the
optimizer, precision and levers of the config, on two batches that were loaded before. The fastest of a few runs of
steps counts, each by its median: what else runs on the machine takes cores for some of them. What the ranks exchange is
left out, so with several of them a step takes longer than this, and a loader that keeps up with it is fast enough for
them too. A module that one device cannot train (sharded parameters) cannot be timed so, and the calibration then looks
for the fastest loader and says why.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from kit.errors import TrialError
from kit.machine.processes import die_with_parent
from kit.studies.calibration.measure import Subject, apply_batches
from kit.train.trainer import RANK_VARIABLES, make_trainer
from kit.trial.context import Context
from kit.trial.fit_job import make_module
from kit.trial.payload import Part

Answer = TypeVar("Answer")
_END_SECONDS = 5.0
BATCHES, WARMUP_STEPS, STEPS, MOST_SECONDS, TIMEOUT_SECONDS = 2, 3, 24, 5.0, 120.0
RUN_STEPS = 2 * BATCHES
"""Of each run; every batch is in it as often as any other."""


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


def step_seconds(context: Context, module: Part, data: dict[str, Any], subject: Subject) -> float:
    """Seconds between the ends of two batches' steps: the median of the fastest run of `RUN_STEPS`.

    Raises:
        Exception: whatever the module raises; TrialError when it takes too long.
    """
    return in_fresh_process(lambda: _timed(context, module, data, subject), TIMEOUT_SECONDS)


def _timed(context: Context, part: Part, data: dict[str, Any], subject: Subject) -> float:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    with subject.loader(subject.present(), 0) as loader:
        batches = list(itertools.islice(loader, BATCHES))
    config, timer = context.config.replace({"hardware.strategy": "none", "hardware.devices": "auto"}), _Timer()
    module = make_module(part, config)
    trainer = make_trainer(
        config, accelerator=context.environment["accelerator"], world_size=1,
        precision=context.environment["precision"], module=module, callbacks=[timer], max_steps=WARMUP_STEPS + STEPS,
        default_root_dir=context.paths.directory,
    )  # fmt: skip
    trainer.fit(module, **apply_batches(data, _Again(batches)))
    return timer.seconds


def fastest_run(seconds: Sequence[float]) -> float:
    """The least median of whole runs of `RUN_STEPS` that follow one another; of fewer steps the median of all."""
    starts = range(0, len(seconds) - RUN_STEPS + 1, RUN_STEPS) or range(1)
    size = RUN_STEPS if len(seconds) >= RUN_STEPS else len(seconds)
    return min(statistics.median(seconds[start : start + size]) for start in starts)


class _Again:
    """Batches in memory, over and over."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 1 << 20

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self._batches), len(self))


class _Timer(Callback):
    """Notes when each batch's step ends on the device."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    @property
    def seconds(self) -> float:
        least = min(WARMUP_STEPS, len(self._ends) - 2)
        return fastest_run([after - before for before, after in itertools.pairwise(self._ends[least:])])

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._ends.append(time.perf_counter())
        if len(self._ends) > 2 and self._ends[-1] - self._ends[0] > MOST_SECONDS:
            trainer.should_stop = True
