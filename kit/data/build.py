"""Building a store: one shard, one task, one object; resumable after any kill, published only when whole.

Order of writing is the guarantee: `.kit/build.json` (which build this is), metadata, shards with a journal every few
seconds, `.kit/manifest.json` last, then the journals go. At every moment the store is empty, unfinished (and refused by
`open_dataset`) or finished. Shards in a journal are not written again; a shard finished after the last journal is, with
the same bytes. Memory is bounded by threads × shard, whatever the size of the array. Sources that give other values
than before, and stores that belong to another build, are refused rather than mixed.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from kit.config import Config
from kit.data import manifest as records
from kit.data.blueprint import Blueprint, make_blueprint
from kit.data.dataset import Dataset, open_dataset
from kit.data.layout import plan_chunks
from kit.data.manifest import ArrayRecord, Manifest, ObjectRecord
from kit.data.progress import Progress, make_progress, say
from kit.data.session import check_room, prepare, remove_journals
from kit.data.shards import ArrayWriter, ShardTask, read_block
from kit.data.source import Source, load_source
from kit.data.stores import open_store, redact, resolve_url, write_object
from kit.errors import BuildError, StoreError
from kit.units import format_bytes

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from kit.plan.chunks import ChunkPlan

JOURNAL_SECONDS = 2.0
_JOURNAL_FRACTION = 0.01
_MOST_THREADS = 8
_COPIES = 4
"""Shard-sized pieces of memory a task may hold at once: values, the encoder's copy, encoded bytes, the source's own."""


def build(
    config: Config,
    plan: ChunkPlan | None = None,
    *,
    overwrite: bool = False,
    progress: bool | Progress = True,
    threads: int | None = None,
) -> Dataset:
    """Write the store a config describes, or finish it, or find it finished; and open it.

    Args:
        plan: Chunks and shards; made by `plan_chunks(config)` when left out.
        overwrite: Replace another build in the same place. Other data is never overwritten.
        progress: True for a line that updates in place, False for none, or a callable (done, total, bytes).
        threads: Shards written at once; by default one per core, fewer when memory is short.

    Raises:
        ConfigError, PlanError: before anything is written.
        BuildError: when the source fails, the store belongs to another build, or there is no room.
        StoreError: when the store cannot be written.
        KeyboardInterrupt: after the running shards are finished and recorded; building again resumes.
    """
    source = load_source(config)
    blueprint = make_blueprint(config, source, plan or plan_chunks(config))
    threads = _threads(blueprint, threads)
    url = resolve_url(config.data.url)
    store = open_store(url, config.data.credentials, read_only=False)
    finished = prepare(store, url, blueprint, source, overwrite=overwrite)
    if finished is None:
        say(f"{redact(url)} is already built with these settings; nothing to do", progress)
    else:
        check_room(url, source, blueprint, finished)
        _Builder(store, url, source, blueprint, finished, make_progress(progress, "Building")).run(threads)
    return open_dataset(url, config.data.credentials)


class _Builder:
    """One session of building: what is finished, what is left, and the journal of this session."""

    def __init__(
        self,
        store: Store,
        url: str,
        source: Source,
        blueprint: Blueprint,
        finished: dict[str, ObjectRecord],
        progress: Progress,
    ) -> None:
        self.store, self.url, self.source, self.blueprint = store, url, source, blueprint
        self.finished, self.progress = finished, progress
        self._stored_bytes = sum(item.bytes for item in finished.values())
        self._unsaved: list[ObjectRecord] = []
        self._session, self._journals = uuid.uuid4().hex[:8], 0
        self._began = self._saved = time.monotonic()

    def run(self, threads: int) -> None:
        for item, data in self.blueprint.documents:
            write_object(self.store, item.key, data, self.url)
        self._report()
        tasks = (task for task in self.blueprint.tasks() if task.key not in self.finished)
        with ThreadPoolExecutor(threads, thread_name_prefix="kit-build") as pool:
            self._run_tasks(tasks, pool, in_flight=2 * threads)
        self._publish()

    def _run_tasks(self, tasks: Iterator[ShardTask], pool: ThreadPoolExecutor, in_flight: int) -> None:
        """All tasks, never more than `in_flight` handed out; what finished is journalled however this ends."""
        running: set[Future[ObjectRecord]] = set()
        try:
            while True:
                while len(running) < in_flight and (task := next(tasks, None)) is not None:
                    running.add(pool.submit(self._write, task))
                if not running:
                    break
                done, running = wait(running, timeout=JOURNAL_SECONDS, return_when=FIRST_COMPLETED)
                self._take(done)
            self._save()
        except BaseException:
            self._wind_down(running)
            raise

    def _wind_down(self, running: set[Future[ObjectRecord]]) -> None:
        """Let running shards finish, drop the waiting ones, and record what is done."""
        for future in running:
            future.cancel()
        done = wait(running).done
        self._unsaved += [future.result() for future in done if not future.cancelled() and not future.exception()]
        with suppress(StoreError):
            self._save()

    def _write(self, task: ShardTask) -> ObjectRecord:
        writer = self.blueprint.arrays[task.array]
        block = read_block(self.source, writer, task)
        data = writer.encode(task, block)
        write_object(self.store, task.key, data, self.url)
        return writer.record(task, block, data)

    def _take(self, done: set[Future[ObjectRecord]]) -> None:
        failed: BaseException | None = None
        for future in done:
            if error := future.exception():
                failed = error
                continue
            self._unsaved.append(future.result())
        self._save_when_due()
        self._report()
        if failed is not None:
            raise failed

    def _report(self) -> None:
        done = len(self.finished) + len(self._unsaved)
        stored_bytes = self._stored_bytes + sum(item.bytes for item in self._unsaved)
        self.progress(done, self.blueprint.build.shards, stored_bytes)

    def _save_when_due(self) -> None:
        """Every two seconds, later every hundredth of the time taken, so that long builds leave few journals."""
        now = time.monotonic()
        if now - self._saved >= max(JOURNAL_SECONDS, _JOURNAL_FRACTION * (now - self._began)):
            self._save()

    def _save(self) -> None:
        if self._unsaved:
            key = f"{records.JOURNAL_PREFIX}{self._session}-{self._journals}.jsonl"
            write_object(self.store, key, records.dump_journal(self._unsaved), self.url)
            self._journals += 1
            self.finished |= {item.key: item for item in self._unsaved}
            self._stored_bytes += sum(item.bytes for item in self._unsaved)
            self._unsaved = []
        self._saved = time.monotonic()

    def _publish(self) -> None:
        objects = [item for item, _ in self.blueprint.documents]
        objects += [self.finished[task.key] for task in self.blueprint.tasks()]
        manifest = Manifest(
            build=self.blueprint.build,
            arrays={name: self._array_record(writer) for name, writer in self.blueprint.arrays.items()},
            objects=tuple(objects),
            raw_bytes=self.blueprint.raw_bytes,
            versions=_versions(),
        )
        write_object(self.store, records.MANIFEST_KEY, manifest.dump(), self.url)
        remove_journals(self.store, self.url)

    def _array_record(self, writer: ArrayWriter) -> ArrayRecord:
        """Mean and deviation of the decoded valid values, from the packed sums in the order of the shards."""
        items = [self.finished[task.key] for task in writer.tasks()]
        valid = sum(item.valid for item in items)
        elements = int(np.prod(writer.shape, dtype=object))
        if valid == 0:
            return ArrayRecord(mean=None, deviation=None, valid=0, elements=elements)
        mean = sum(item.total for item in items) / valid
        variance = max(0.0, sum(item.squares for item in items) / valid - mean * mean)
        scale, offset = writer.spec.scale_factor, writer.spec.add_offset
        return ArrayRecord(
            mean=mean * scale + offset, deviation=abs(scale) * sqrt(variance), valid=valid, elements=elements
        )


def _threads(blueprint: Blueprint, asked: int | None) -> int:
    """As many as asked for or as there are cores, fewer when their shards would not fit in memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shard_bytes = _COPIES * blueprint.largest_shard_bytes
    free_bytes = psutil.virtual_memory().available
    if shard_bytes > free_bytes:
        raise BuildError(
            f"writing one shard takes about {format_bytes(shard_bytes)} of memory and {format_bytes(free_bytes)} is "
            "free; set a smaller chunking.target_shard_bytes"
        )
    wanted = min(cores, _MOST_THREADS) if asked is None else max(1, asked)
    return max(1, min(wanted, free_bytes // 2 // shard_bytes))


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("zarr", "numcodecs", "numpy")}
