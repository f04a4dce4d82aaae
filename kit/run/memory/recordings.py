"""Recordings of questions: from the cache at once, else made in processes of their own, two at a time.

The cache lives in this process and holds the last ones used. A dry run that was broken off because it took too long is
not kept, because the next attempt may find a quieter machine.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kit.errors import KitError
from kit.plan.memory.recording import Recording
from kit.run.memory.job import PredictionJob
from kit.run.memory.question import Question

AT_ONCE = 2
NEXT = -1
"""As a batch size: one sample more than the recording before."""
_KEPT = 128
_TICK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Wanted:
    """A question, and the batch sizes to record it at; None is that of the data, `NEXT` one more than before."""

    question: Question
    batch_sizes: tuple[int | None, ...] = (None,)


class _Cache:
    """The recordings used last, by question and batch size."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int | None], Recording] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, batch_size: int | None) -> Recording | None:
        with self._lock:
            found = self._kept.get((key, batch_size))
            if found is not None:
                self._kept.move_to_end((key, batch_size))
            return found

    def put(self, key: str, batch_size: int | None, recording: Recording) -> None:
        with self._lock:
            self._kept[key, batch_size] = recording
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


cache = _Cache()


def known(question: Question, batch_size: int | None = None) -> Recording | None:
    """What was recorded before, or None."""
    found = cache.get(question.key, batch_size)
    return None if found is None else as_asked(question, found)


def recordings(wanted: Wanted, timeout_seconds: float) -> list[Recording]:
    """One recording for each batch size.

    Raises:
        KitError: why there is none.
    """
    (found,) = all_recordings([wanted], timeout_seconds)
    if isinstance(found, KitError):
        raise found
    return found


def all_recordings(wanted: Sequence[Wanted], timeout_seconds: float) -> list[list[Recording] | KitError]:
    """The recordings of several questions, in their order; a question that fails gives its error and hurts no other.

    Equal questions are asked once. An interrupt ends everything that runs.
    """
    answers: dict[tuple[str, tuple[int | None, ...]], list[Recording] | KitError] = {}
    waiting = {(item.question.key, item.batch_sizes): item for item in wanted}
    running: dict[tuple[str, tuple[int | None, ...]], _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name, item = next(iter(waiting.items()))
                del waiting[name]
                running[name] = _Running(item, name[0], timeout_seconds)
            for name in [name for name, run in running.items() if run.look()]:
                answers[name] = running.pop(name).answer
            if running:
                time.sleep(_TICK_SECONDS)
    finally:
        for run in running.values():
            run.close()
    return [_answered(item, answers[item.question.key, item.batch_sizes]) for item in wanted]


class _Running:
    """One question on its way: from the cache, or from a process."""

    def __init__(self, wanted: Wanted, key: str, timeout_seconds: float) -> None:
        self.answer: list[Recording] | KitError = []
        self._wanted, self._key = wanted, key
        self._missing = [size for size in wanted.batch_sizes if cache.get(key, size) is None]
        self._job: PredictionJob | None = None
        try:
            if self._missing:
                self._job = PredictionJob(wanted.question, [*map(self._number, self._missing)], timeout_seconds)
            else:
                self._take([])
        except KitError as error:
            self.answer = error

    def look(self) -> bool:
        """Whether `answer` is there."""
        if self._job is not None and self._job.ended:
            job, self._job = self._job, None
            try:
                self._take(job.recordings())
            except KitError as error:
                self.answer = error
            finally:
                job.close()
        return self._job is None

    def close(self) -> None:
        if self._job is not None:
            self._job.close()

    def _number(self, size: int | None) -> int | None:
        """`NEXT` as a number where the recording before it is known and not made again."""
        before = cache.get(self._key, None) if size == NEXT else None
        return size if before is None else before.batch_size + 1

    def _take(self, found: list[Recording]) -> None:
        made = dict(zip(self._missing, found, strict=True))
        for size, recording in made.items():
            if not recording.facts.get("late"):
                cache.put(self._key, size, recording)
        answers = [made.get(size) or cache.get(self._key, size) for size in self._wanted.batch_sizes]
        self.answer = [recording for recording in answers if recording is not None]


def _answered(wanted: Wanted, answer: list[Recording] | KitError) -> list[Recording] | KitError:
    return answer if isinstance(answer, KitError) else [as_asked(wanted.question, recording) for recording in answer]


def as_asked(question: Question, recording: Recording) -> Recording:
    """The recording with the number of ranks and micro-batches that were asked for, where fewer were recorded."""
    return dataclasses.replace(recording, facts={**recording.facts, **question.facts})
