"""Building a store: one shard, one object, written once; resumable after any kill, published only when whole.

Order of writing is the guarantee: `.kit/build.json` (which build this is), metadata, shards with a journal every few
seconds, `.kit/manifest.json` last, then the journals go. At every moment the store is empty, unfinished (and refused by
`open_dataset`) or finished. Shards in a journal are not written again; a shard finished after the last journal is, with
the same bytes. Tasks are groups of shards, planned so that memory stays within `build.memory_bytes` whatever the size
of the array, and run by whichever scheduler; the bytes are the same. One builder writes a store at a time. Sources that
give other values than before, and stores that belong to another build, are refused rather than mixed.

A progress is any callable taking (done, total, bytes so far); raising from it stops the job like an interrupt would.
Its methods `begin(verb, noun)` and `link(url)`, where it has them, are called with what begins and with the URL of a
dashboard. The default is one line that updates in place, in a notebook or a terminal, and nothing where nobody looks.
"""

from __future__ import annotations

import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.arguments import takes_config
from kit.chunks.search import ChunkPlan
from kit.config import Config
from kit.data.build.grids import ZarrSource
from kit.data.build.layout import plan_chunks, refuse_no_plan
from kit.data.build.open_source import load_source
from kit.data.build.plan import BuildPlan, groups, plan_tasks
from kit.data.build.rechunk import Grouping
from kit.data.build.resume import check_room, clear, finished_with, prepare, refuse_foreign, remove_journals
from kit.data.build.schedulers import Scheduler, explain, open_scheduler
from kit.data.build.shards import JOURNAL_SECONDS, ArrayWriter, Blueprint, BuildWork, Cut, ShardGroup, make_blueprint
from kit.data.build.source import Source
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset, read_build
from kit.data.stores import manifest as records
from kit.data.stores.lock import write_lock
from kit.data.stores.manifest import ArrayRecord, Manifest, ObjectRecord
from kit.data.stores.url import is_shared, local_folder, open_store, redact, resolve_url, write_object
from kit.errors import BuildError, StoreError, warn_caller
from kit.tables import find_display
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zarr.abc.store import Store

_JOURNAL_FRACTION = 0.01
_NOTEWORTHY_RATIO = 1.1


@takes_config
def build(
    config: Config,
    plan: ChunkPlan | None = None,
    *,
    source: Any = None,
    overwrite: bool = False,
    progress: bool | Progress = True,
    threads: int | None = None,
) -> Dataset:
    """Write the store that a config describes, and open it. A store that is finished is only opened.

    So is one of the same data in other chunks, where the config leaves chunk and shard to kit, and no plan is given but
    the one that kit would choose.

    Args:
        config: Names the source, the variables and the URL of the store.
        plan: Chunks and shards; `plan_chunks(config)` when left out.
        source: An xarray object, an array or a source in memory, instead of the one that the config names.
        overwrite: Replace another build at the same URL. Data that kit did not write is never overwritten.
        progress: True shows a line that updates in place, False shows nothing, and a callable is called with (tasks
            done, tasks in total, bytes written).
        threads: Tasks that each process runs at once, instead of `build.threads`. Fewer run when memory is short.

    Returns:
        The dataset, ready to read. A build that was interrupted is resumed to the same bytes.

    Raises:
        ConfigError, PlanError: before anything is written.
        BuildError: when the source fails, the store belongs to another build, or disk or memory is too small.
        StoreLockedError: when another process is writing the store.
        StoreError: when the store cannot be written.
        KeyboardInterrupt: after the running shards are finished and recorded.

    Example:
        >>> dataset = kit.build(ocean, progress=False)
        >>> {array.shape for array in dataset.arrays.values()}
        {(4, 96, 96)}
    """
    refuse_no_plan(plan)
    opened = load_source(config, source)
    chosen = plan_chunks(config, source=opened)
    asked = plan is not None and (plan.chunk, plan.shard) != (chosen.chunk, chosen.shard)
    blueprint = make_blueprint(config, opened, plan or chosen)
    tasks = plan_tasks(config, blueprint, opened, threads)
    url = resolve_url(config.data.url)
    _refuse_unshared(config, url)
    store = open_store(url, config.data.credentials, read_only=False)
    refuse_foreign(store, url)
    differing = None if overwrite else finished_with(store, url, blueprint)
    if differing is not None and all(name.startswith(_chosen(config, asked)) for name in differing):
        dataset = open_dataset(url, config.data.credentials)
        how = _beside_the_best(dataset, chosen) if differing else "with these settings; nothing to do"
        say(f"{redact(config.data.url)} is already built {how}", progress)
        return dataset
    with write_lock(store, url):
        finished = prepare(store, url, blueprint, opened, overwrite=overwrite)
        if finished is not None:
            check_room(url, opened, blueprint, finished)
            job = _Job(config, store, url, opened, source is not None, blueprint, finished)
            _run(job, tasks, progress)
    return open_dataset(url, config.data.credentials)


def _beside_the_best(dataset: Dataset, best: ChunkPlan) -> str:
    """In which chunks a store is, and how fast these are read, where the plan has priced them."""
    chunks = {array.chunk for array in dataset.arrays.values()}
    priced = [cost.samples_per_second for cost in best.candidates if {cost.chunk} == chunks]
    speed = f", {priced[0] / best.samples_per_second:.2f} × as fast by prediction" if priced else ""
    return f"in chunks chosen for another config{speed}; build(config, overwrite=True) writes it in those best for this"


def _chosen(config: Config, asked: bool) -> tuple[str, ...]:
    """What begins the names of the fields that nobody asked for, so that a store with others is as good."""
    settings = () if asked else ("chunk", "shard")
    return tuple(f"{name}." for name in settings if getattr(config.chunking, name) == "auto")


def _refuse_unshared(config: Config, url: str) -> None:
    if config.build.scheduler == "distributed" and not (is_shared(url) and is_shared(config.build.scratch)):
        raise BuildError("memory:// lives in this process only, so Dask workers cannot write it; choose threads")


def _run(job: _Job, plan: BuildPlan, progress: bool | Progress) -> None:
    """State what is left out and the price, where there is any, then write what is not finished."""
    _tell_first(job.source, progress)
    for text in plan.remarks:
        say(text, progress)
    if plan.read_ratio > _NOTEWORTHY_RATIO or plan.by_copy:
        say(str(replace(plan, remarks=())), progress)
    with open_scheduler(job.config.build, plan.slots, plan.threads, plan.memory_bytes) as scheduler:
        if scheduler.link:
            if hasattr(progress, "link"):
                progress.link(scheduler.link)
            else:
                say(f"Dask dashboard: {scheduler.link}", progress)
        if plan.by_copy and len(job.finished or {}) < job.blueprint.build.shards:
            _run_by_copy(job, plan, scheduler, progress)
        else:
            _Builder(job, plan.last, plan.threads, make_progress(progress, "Building")).run(scheduler)


_NEVER_DATA = ("bounds", "grid mapping", "coordinate")


def _tell_first(source: Any, progress: bool | Progress) -> None:
    """What is not stored, or not as it was: a line, and a warning where no line is shown and data may be lost."""
    left_out, notes = getattr(source, "left_out", {}), getattr(source, "notes", ())
    if all(say(text, progress) for text in (*_left_out(left_out), *notes)) or callable(progress):
        return
    for text in [*_left_out({name: why for name, why in left_out.items() if not why.startswith(_NEVER_DATA)}), *notes]:
        warn_caller(text)


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    return [f"Left out: {', '.join(f'{name} ({why})' for name, why in reasons.items())}"] if reasons else []


def _run_by_copy(job: _Job, plan: BuildPlan, scheduler: Scheduler, progress: bool | Progress) -> None:
    """Pass one into an intermediate store, which is a build itself and resumed like any; pass two out of it.

    The copy's URL is named after the build, so that only this build finds it again.
    """
    name = f"{records.crc32c(job.blueprint.build.dump()):08x}"
    url = resolve_url(f"{job.config.build.scratch.rstrip('/')}/{name}.zarr")
    config = job.config.replace({"data.url": url, "chunking.compression_level": 1})
    chunk = next(iter(plan.passes.values())).first.layout.target
    cut = Cut(dims=tuple(job.source.dims), shape=tuple(job.source.shape), chunk=chunk)
    blueprint = make_blueprint(config, job.source, cut)
    store = open_store(url, config.data.credentials, read_only=False)
    refuse_foreign(store, url)
    existing = read_build(store, url)
    stale = existing is not None and bool(existing.diff(blueprint.build))
    finished = prepare(store, url, blueprint, job.source, overwrite=stale)
    if finished is not None:
        copy = _Job(config, store, url, job.source, job.given, blueprint, finished)
        _Builder(copy, plan.first, plan.threads, make_progress(progress, "Copying", "pieces")).run(scheduler)
    job.source, job.given = ZarrSource(url, job.config.data.credentials), True
    _Builder(job, plan.last, plan.threads, make_progress(progress, "Building")).run(scheduler)
    clear(store, url)
    folder = local_folder(url)
    if folder is not None:
        shutil.rmtree(folder)


@dataclass
class _Job:
    """One store to write: its contents, their source, and the shards that are finished."""

    config: Config
    store: Store
    url: str
    source: Source
    given: bool
    blueprint: Blueprint
    finished: dict[str, ObjectRecord] | None


class _Builder:
    """One session of building: what is finished, what is left, and the journal of this session."""

    def __init__(self, job: _Job, groupings: Mapping[str, Grouping], threads: int, progress: Progress) -> None:
        self.store, self.url, self.blueprint, self.progress = job.store, job.url, job.blueprint, progress
        self.finished = dict(job.finished or {})
        self._groupings = groupings
        self._stored_bytes = sum(item.bytes for item in self.finished.values())
        self._unsaved: list[ObjectRecord] = []
        self._session, self._journals = uuid.uuid4().hex[:8], 0
        self._began = self._saved = time.monotonic()
        given = job.source if job.given else None
        self._work = BuildWork(job.config, job.url, job.blueprint.arrays, self._session, given, threads)
        self._work.use(job.store, job.source)

    def run(self, scheduler: Scheduler) -> None:
        for item, data in self.blueprint.documents:
            write_object(self.store, item.key, data, self.url)
        self._report()
        before, arrays = frozenset(self.finished), self.blueprint.arrays.items()
        left = (groups(writer, self._groupings[name], before) for name, writer in arrays)
        self._run_tasks(itertools.chain.from_iterable(left), scheduler)
        self._publish()

    def _run_tasks(self, tasks: Iterator[ShardGroup], scheduler: Scheduler) -> None:
        """All tasks, never more than `in_flight` handed out; what finished is journalled however this ends."""
        # In the order of the tasks: of two that fail, the first is reported.
        running: list[Future[list[ObjectRecord]]] = []
        work = scheduler.share(self._work)
        try:
            while True:
                while len(running) < scheduler.in_flight and (task := next(tasks, None)) is not None:
                    running.append(scheduler.executor.submit(work.run, task))
                if not running:
                    break
                done = wait(running, timeout=JOURNAL_SECONDS, return_when=FIRST_COMPLETED).done
                ended, running = [one for one in running if one in done], [one for one in running if one not in done]
                self._take(ended)
                if not ended:
                    scheduler.check()
            self._save()
        except BaseException as error:  # running shards finish and are recorded, waiting ones are dropped
            # Dask never wakes who waits for a future that was cancelled while its task ended.
            left = [future for future in running if not future.cancel()]
            for future in wait(left).done:
                if not future.exception():
                    self._unsaved += future.result()
            with suppress(StoreError):
                self._save()
            if isinstance(error, KeyboardInterrupt):
                error.add_note(f"kit.build: {len(self.finished)} objects are kept; the same call goes on from there")
            raise

    def _take(self, ended: list[Future[list[ObjectRecord]]]) -> None:
        failed: BaseException | None = None
        for future in ended:
            if error := future.exception():
                failed = failed or explain(error)
                continue
            self._unsaved += future.result()
        now = time.monotonic()  # later every hundredth of the time taken, so that long builds leave few journals
        if now - self._saved >= max(JOURNAL_SECONDS, _JOURNAL_FRACTION * (now - self._began)):
            self._save()
        self._report()
        if failed is not None:
            raise failed

    def _report(self) -> None:
        done = len(self.finished) + len(self._unsaved)
        stored_bytes = self._stored_bytes + sum(item.bytes for item in self._unsaved)
        self.progress(done, self.blueprint.build.shards, stored_bytes)

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
            versions={name: version(name) for name in ("zarr", "numcodecs", "numpy")},
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


Progress = Callable[[int, int, int], None]
_SECONDS_BETWEEN = 0.25


def make_progress(progress: bool | Progress, verb: str, noun: str = "objects") -> Progress:
    """The callable asked for: the caller's own, a line (True), or nothing (False)."""
    if callable(progress):
        if hasattr(progress, "begin"):
            progress.begin(verb, noun)
        return progress
    return ProgressLine(verb, noun) if progress else lambda *_: None


class ProgressLine:
    """`Building 12 of 64 objects, 31.5 MiB, 40 s left`; the first call sets where the rate is counted from."""

    def __init__(self, verb: str, noun: str) -> None:
        self.verb, self.noun = verb, noun
        self._display = find_display()
        self._first: tuple[float, int] | None = None
        self._shown_seconds = float("-inf")

    def __call__(self, done: int, total: int, number_of_bytes: int) -> None:
        now = time.monotonic()
        self._first = self._first or (now, done)
        if done < total and now - self._shown_seconds < _SECONDS_BETWEEN:
            return
        self._shown_seconds = now
        if self._display is not None:
            self._display(self.text(done, total, number_of_bytes, now), done >= total)

    def text(self, done: int, total: int, number_of_bytes: int, now: float) -> str:
        """The line, with the time left once there is a rate, or the time taken at the end."""
        start, before = self._first or (now, done)
        elapsed = now - start
        note = ""
        if done >= total:
            note = f", {format_seconds(elapsed)}" if elapsed > 0 else ""
        elif done > before and elapsed > 1:
            note = f", {format_seconds(elapsed * (total - done) / (done - before))} left"
        return f"{self.verb} {done} of {total} {self.noun}, {format_bytes(number_of_bytes)}{note}"


def say(text: str, progress: bool | Progress) -> bool:
    """One line where a progress line would have been; whether it was shown."""
    display = find_display() if progress is True else None
    if display is not None:
        display(text, True)
    return display is not None
