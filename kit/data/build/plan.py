"""What a build will do before it does it: how shards are grouped, what is read, in how much memory, by what.

The budget of a process is divided among the tasks it runs at once; where they would not fit, fewer run. What all
processes may take together is divided among them, and a Dask worker's libraries come first; where too little is left,
fewer workers run. A plan that cannot hold even one shard is refused with its arithmetic, before a byte is read or
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.config import Build, Config
from kit.data.build.layout import plan_chunks
from kit.data.build.open_source import load_source
from kit.data.build.rechunk import Grouping, Recut, TwoPasses, group_regions, intermediate_chunk, two_passes
from kit.data.build.schedulers import RUNTIME_BYTES, Slots, slots_of
from kit.data.build.shards import ArrayWriter, Blueprint, ShardGroup, make_blueprint
from kit.data.build.source import Source, chunk_of
from kit.errors import BuildError
from kit.machine.machine import share
from kit.tables import html_list
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from kit.chunks.reasons import ChunkPlan

OVERHEAD_BYTES = 48 << 20
"""What libraries load on first use, and what the allocator keeps for the threads that decode (measured: 20 to 45)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """Tasks, memory and reading of a build."""

    groupings: Mapping[str, Grouping]
    passes: Mapping[str, TwoPasses]
    """Through an intermediate copy, of every array, where that moves fewer bytes; else empty."""
    slots: Slots
    threads: int
    """Tasks each process runs at once."""
    memory_bytes: int
    """Allowed to each process, over what it holds before."""
    wanted: Slots
    """What the settings ask for; memory may allow less."""
    scheduler: str
    scratch: bool
    """Whether there is a place for an intermediate copy."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of each process, over what it holds before."""
        return OVERHEAD_BYTES + self.threads * max(grouping.task_bytes for grouping in self._used)

    @property
    def total_bytes(self) -> int:
        """Predicted peak of all processes of a build together; of one worker, where a cluster has its own number."""
        if not self._is_distributed:
            return self.peak_bytes
        return max(1, self.slots.processes) * (RUNTIME_BYTES + self.peak_bytes)

    @property
    def tasks(self) -> int:
        return sum(grouping.groups for grouping in self._used)

    @property
    def source_bytes(self) -> int:
        return sum(grouping.layout.nbytes for grouping in self.groupings.values())

    @property
    def read_bytes(self) -> int:
        """Uncompressed bytes taken from the source."""
        return sum(self._first(name).read_bytes for name in self.groupings)

    @property
    def moved_bytes(self) -> int:
        """Uncompressed bytes read from the source, and written to and read from an intermediate copy."""
        return sum(pair.moved_bytes for pair in self.passes.values()) if self.by_copy else self.read_bytes

    @property
    def read_ratio(self) -> float:
        """Bytes read from the source / bytes of the source."""
        return self.read_bytes / self.source_bytes

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._sentences())

    @property
    def by_copy(self) -> bool:
        """Whether an intermediate copy is made."""
        return self.scratch and bool(self.passes)

    @property
    def last(self) -> Mapping[str, Grouping]:
        """How each array of the store is written."""
        return {name: self._last(name) for name in self.groupings}

    @property
    def _used(self) -> list[Grouping]:
        if not self.by_copy:
            return [*self.groupings.values()]
        pairs = ((self._first(name), self._last(name)) for name in self.groupings)
        return [grouping for pair in pairs for grouping in dict.fromkeys(pair)]

    def _first(self, name: str) -> Grouping:
        return self.passes[name].first if self.by_copy else self.groupings[name]

    def _last(self, name: str) -> Grouping:
        return self.passes[name].second if self.by_copy else self.groupings[name]

    def _sentences(self) -> Iterator[str]:
        yield f"{format_count(self.tasks)} tasks, {self.threads} at once{self._where} ({self.scheduler})"
        yield (
            f"each process takes up to {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_bytes)} allowed"
            + (f"; {self.slots.threads} tasks at once would have less each" * (self.threads < self.slots.threads))
        )
        if self._is_distributed and self.slots.processes:
            together = f"{format_bytes(RUNTIME_BYTES)} each for Python and its libraries"
            few = f"; {self.wanted.processes} workers would have too little each" * self._has_fewer_workers
            yield f"all workers take up to {format_bytes(self.total_bytes)}, with {together}{few}"
        yield (
            f"reads {format_bytes(self.read_bytes)} of a source of {format_bytes(self.source_bytes)} "
            f"({self.read_ratio:.2f} ×)"
        )
        if self.by_copy:
            copied = sum(self.passes[name].first.layout.nbytes for name in self.passes)
            yield f"by way of an intermediate copy of {format_bytes(copied)}, since chunks lie across the new ones"
        elif self.passes:
            moved = sum(found.moved_bytes for found in self.passes.values())
            yield (
                f"with build.scratch it would move {format_bytes(moved)} in two passes; more build.memory_bytes helps "
                "too"
            )

    @property
    def _is_distributed(self) -> bool:
        return self.scheduler == "distributed"

    @property
    def _has_fewer_workers(self) -> bool:
        return 0 < self.slots.processes < self.wanted.processes

    @property
    def _where(self) -> str:
        if not self._is_distributed:
            return ""
        workers = self.slots.processes
        return f" in each of {workers} workers" if workers > 1 else " in 1 worker" if workers else " in each worker"

    def __str__(self) -> str:
        return "\n".join(["Build plan", *(f"- {sentence}" for sentence in self.reasons)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_list(self.reasons)


def plan_build(config: Config, plan: ChunkPlan | None = None, *, source: Any = None) -> BuildPlan:
    """Tasks, memory and reading of a build; nothing is written.

    Args:
        plan: Chunks and shards; made by `plan_chunks(config)` when left out.
        source: An xarray object, array or source in hand, in place of the one that the config names.

    Raises:
        ConfigError, PlanError: as `build` would.
        BuildError: when one shard does not fit in memory.
    """
    opened = load_source(config, source)
    chunks = plan or plan_chunks(config, source=opened)
    return plan_tasks(config, make_blueprint(config, opened, chunks), opened)


def plan_tasks(config: Config, blueprint: Blueprint, source: Source, threads: int | None = None) -> BuildPlan:
    """The plan of as many tasks at once as move the bytes soonest: fewer have more memory each and read less.

    Raises:
        BuildError: when one shard does not fit in memory, with the arithmetic.
    """
    wanted = slots_of(config.build, threads)
    layouts = {name: _layout(writer, chunk_of(source, name)) for name, writer in blueprint.arrays.items()}
    largest = max(layouts.values(), key=lambda layout: layout.least_task_bytes)
    plans = [
        _plan_of(config, wanted, processes, layouts, count)
        for processes in _process_counts(wanted, config.build)
        for count in _task_counts(wanted, _budget_bytes(config.build, processes), largest)
    ]
    if not plans:
        raise _too_large(largest, config.build)
    return min(plans, key=lambda plan: plan.moved_bytes / (plan.threads * max(1, plan.slots.processes)))


def _task_counts(wanted: Slots, budget_bytes: int, largest: Recut) -> list[int]:
    """Tasks that a process may run at once, most first; none where not even one fits."""
    most = min(wanted.threads, (budget_bytes - OVERHEAD_BYTES) // largest.least_task_bytes)
    return sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True) if most > 0 else []


def _process_counts(wanted: Slots, settings: Build) -> list[int]:
    """As many as are wanted; fewer too, where they would have more memory each."""
    if settings.address and settings.total_memory_bytes:
        most = max(1, settings.total_memory_bytes // (settings.memory_bytes + RUNTIME_BYTES))
        return [min(wanted.processes or most, most)]
    if _budget_bytes(settings, wanted.processes) >= settings.memory_bytes:
        return [wanted.processes]
    return sorted({wanted.processes, *(1 << power for power in range(wanted.processes.bit_length()))}, reverse=True)


def _budget_bytes(settings: Build, processes: int) -> int:
    """What building may add to each of so many processes; below 0 where their libraries leave nothing."""
    limits = [settings.total_memory_bytes] * bool(settings.total_memory_bytes)
    limits += [share().memory_available_bytes] * (not settings.address)
    runtime_bytes = RUNTIME_BYTES * (settings.scheduler == "distributed")
    return min([settings.memory_bytes, *(limit // max(1, processes) - runtime_bytes for limit in limits)])


def _plan_of(config: Config, wanted: Slots, processes: int, layouts: Mapping[str, Recut], threads: int) -> BuildPlan:
    budget_bytes, slots = _budget_bytes(config.build, processes), Slots(processes=processes, threads=wanted.threads)
    each_bytes = (budget_bytes - OVERHEAD_BYTES) // threads
    groupings = {name: group_regions(layout, each_bytes) for name, layout in layouts.items()}
    return BuildPlan(
        groupings=groupings, passes=_passes(layouts, groupings, each_bytes), slots=slots, threads=threads,
        memory_bytes=budget_bytes, wanted=wanted, scheduler=config.build.scheduler, scratch=bool(config.build.scratch),
    )  # fmt: skip


def _passes(layouts: Mapping[str, Recut], groupings: Mapping[str, Grouping], budget_bytes: int) -> dict[str, TwoPasses]:
    """One intermediate cut for all arrays, made for the one of the largest numbers; none unless it serves them all."""
    widest = max(layouts.values(), key=lambda layout: layout.itemsize)
    chunk = intermediate_chunk(widest, budget_bytes)
    found = {name: two_passes(layouts[name], budget_bytes, grouping, chunk) for name, grouping in groupings.items()}
    kept = {name: pair for name, pair in found.items() if pair is not None}
    return kept if len(kept) == len(found) else {}


def groups(writer: ArrayWriter, grouping: Grouping, finished: Mapping[str, Any]) -> Iterator[ShardGroup]:
    """Every group of an array with shards left to write, without those that are finished."""
    counts = [side // cut for side, cut in zip(grouping.group, writer.cut, strict=True)]
    for number, box in enumerate(grouping.boxes()):
        tasks = tuple(task for task in writer.tasks_in(box, counts) if task.key not in finished)
        if tasks:
            yield ShardGroup(array=writer.name, number=number, tasks=tasks)


def _layout(writer: ArrayWriter, chunk: tuple[int, ...] | None) -> Recut:
    return Recut(shape=writer.shape, itemsize=writer.dtype.itemsize, source_chunk=chunk, target=writer.cut)


def _too_large(layout: Recut, settings: Build) -> BuildError:
    needed_bytes, allowed_bytes = layout.least_task_bytes + OVERHEAD_BYTES, _budget_bytes(settings, 1)
    short = "memory_bytes" if allowed_bytes == settings.memory_bytes else "total_memory_bytes"
    larger = f"a larger build.{short}" if getattr(settings, short) else "free some memory"
    return BuildError(
        f"one task takes {layout.arithmetic()}, and with {format_bytes(OVERHEAD_BYTES)} for libraries and the "
        f"allocator {format_bytes(needed_bytes)} of memory, where {format_bytes(max(0, allowed_bytes))} is allowed; "
        f"set a smaller chunking.target_shard_bytes or {larger}"
    )
