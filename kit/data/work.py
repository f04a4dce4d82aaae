"""The work of a build as its tasks see it: read a group once, write its shards one by one. Runs in any process.

A group is a box of shards of one array. What is written is recorded at once where the task takes long, in a journal of
the group's own, so that a kill costs no more than a few seconds of finished shards. A `Work` pickles without its
handles: each process opens the store, and makes the source, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.config import Config
from kit.data import manifest as records
from kit.data.manifest import ObjectRecord
from kit.data.open_source import load_source
from kit.data.shards import ArrayWriter, ShardTask, read_block
from kit.data.source import Source
from kit.data.stores import open_store, write_object
from kit.processes import give_memory_back

if TYPE_CHECKING:
    from zarr.abc.store import Store

JOURNAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Shards of one array that are read together."""

    array: str
    number: int
    tasks: tuple[ShardTask, ...]

    @property
    def region(self) -> ShardTask:
        """The box around the shards, as a task to read."""
        parts = zip(*(task.region for task in self.tasks), strict=True)
        box = tuple(slice(min(part.start for part in axis), max(part.stop for part in axis)) for axis in parts)
        return ShardTask(array=self.array, key="", region=box)


class Work:
    """What every task of one build needs.

    Args:
        config: Names the store, and the source where `given` is None.
        given: A source in hand; it pickles.
        threads: Tasks that run at once in a process, whatever a running cluster hands it.
    """

    def __init__(
        self, config: Config, url: str, arrays: Mapping[str, ArrayWriter], session: str, given: Source | None,
        threads: int,
    ) -> None:  # fmt: skip
        self._config, self._url, self._arrays, self._session, self._given = config, url, arrays, session, given
        self._threads = threads
        self._open()

    def _open(self) -> None:
        self._lock, self._slots = threading.Lock(), threading.Semaphore(self._threads)
        self._store: Store | None = None
        self._source: Source | None = self._given

    def use(self, store: Store, source: Source) -> None:
        """What this process has open already."""
        self._store, self._source = store, source

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_slots": None, "_store": None, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def run(self, group: Group) -> list[ObjectRecord]:
        """Read the group, write its shards, and return their records.

        Raises:
            BuildError: naming variable and region, when the source fails.
            StoreError: when the store does not take a shard.
        """
        with self._slots:
            store, source = self._handles()
            try:
                return self._write(group, store, source)
            finally:
                give_memory_back()

    def _handles(self) -> tuple[Store, Source]:
        with self._lock:
            if self._store is None:
                self._store = open_store(self._url, self._config.data.credentials, read_only=False)
            if self._source is None:
                self._source = load_source(self._config)
            return self._store, self._source

    def _write(self, group: Group, store: Store, source: Source) -> list[ObjectRecord]:
        writer, box = self._arrays[group.array], group.region
        values = read_block(source, writer, box)
        done: list[ObjectRecord] = []
        saved = time.monotonic()
        for task in group.tasks:
            parts = zip(task.region, box.region, strict=True)
            block = values[tuple(slice(part.start - all_.start, part.stop - all_.start) for part, all_ in parts)]
            data = writer.encode(task, block)
            write_object(store, task.key, data, self._url)
            done.append(writer.record(task, block, data))
            if time.monotonic() - saved >= JOURNAL_SECONDS and len(done) < len(group.tasks):
                self._save(group, store, done)
                saved = time.monotonic()
        return done

    def _save(self, group: Group, store: Store, done: Sequence[ObjectRecord]) -> None:
        key = f"{records.JOURNAL_PREFIX}{self._session}-{group.array}-{group.number}.jsonl"
        write_object(store, key, records.dump_journal(done), self._url)


def run(work: Work, group: Group) -> list[ObjectRecord]:
    """`work.run(group)`, as a function that a scheduler can send."""
    return work.run(group)
