"""What a build will do before it does it: how shards are grouped, what is read, in how much memory, by what.

The budget of a process is divided among the tasks it runs at once; where they would not fit, fewer run. What all
processes may take together is divided among them, and a Dask worker's libraries come first; where too little is left,
fewer workers run. A plan that cannot hold even one shard is refused with its arithmetic, before a byte is read or
written.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.arguments import takes_config
from kit.config import Config
from kit.data.build.layout import plan_chunks, refuse_no_plan
from kit.data.build.open_source import load_source
from kit.data.build.rechunk import Grouping, Recut, TwoPasses, group_regions, intermediate_chunk, two_passes
from kit.data.build.schedulers import RUNTIME_BYTES, Slots, slots_of
from kit.data.build.shards import ArrayWriter, Blueprint, ShardGroup, make_blueprint
from kit.data.build.source import Source, chunk_of, remarks
from kit.errors import BuildError
from kit.machine.machine import share
from kit.sections import Build
from kit.tables import html_list
from kit.units import format_bytes, plural

if TYPE_CHECKING:
    from kit.chunks.search import ChunkPlan

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
    requested: Slots
    """By the settings; memory may allow less."""
    scheduler: str
    scratch: bool
    """Whether there is a place for an intermediate copy."""
    objects: int = 0
    """That the store will have, of data."""
    remarks: tuple[str, ...] = ()
    """What may surprise of the data as they will be stored, in sentences."""

    @property
    def by_copy(self) -> bool:
        """Whether an intermediate copy is made."""
        return self.scratch and bool(self.passes)

    @property
    def first(self) -> Mapping[str, Grouping]:
        """How each array of the source is read."""
        return {name: pair.first for name, pair in self.passes.items()} if self.by_copy else self.groupings

    @property
    def last(self) -> Mapping[str, Grouping]:
        """How each array of the store is written; the same, but for an intermediate copy."""
        return {name: pair.second for name, pair in self.passes.items()} if self.by_copy else self.groupings

    @property
    def _used(self) -> list[Grouping]:
        return [*self.first.values(), *self.last.values()] if self.by_copy else [*self.groupings.values()]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of each process, over what it holds before."""
        at_once = min(self.threads, self.tasks)
        return OVERHEAD_BYTES + at_once * max(grouping.task_bytes for grouping in self._used)

    @property
    def total_bytes(self) -> int:
        """Predicted peak of all processes of a build together; of one worker, where a cluster has its own number."""
        if self.scheduler != "distributed":
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
        return sum(grouping.read_bytes for grouping in self.first.values())

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

    def _sentences(self) -> Iterator[str]:
        workers, distributed = self.slots.processes, self.scheduler == "distributed"
        number = f"of {workers} workers" if workers > 1 else "worker"
        where = (" in 1 worker" if workers == 1 else f" in each {number}") * distributed
        yield f"{plural(self.tasks, 'task')}, {self.threads} at once{where} ({self.scheduler})"
        yield (
            f"each process takes up to {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_bytes)} allowed"
            + (f"; {self.slots.threads} tasks at once would have less each" * (self.threads < self.slots.threads))
        )
        if distributed and workers:
            together = f"{format_bytes(RUNTIME_BYTES)} each for Python and its libraries"
            most = self.requested.processes
            few = f"; {most} workers would have too little each" * (workers < most)
            yield f"all workers take up to {format_bytes(self.total_bytes)}, with {together}{few}"
        yield (
            f"reads {format_bytes(self.read_bytes)} of a source of {format_bytes(self.source_bytes)} "
            f"({self.read_ratio:.2f} ×)"
        )
        written = sum(grouping.layout.nbytes for grouping in self.last.values())
        yield (
            f"writes {format_bytes(written)} in {plural(self.objects, 'object')}, less what compression saves "
            "(kit.data.expected_bytes tries it)"
        )
        yield from self.remarks
        if self.by_copy:
            yield (
                f"by way of an intermediate copy of {format_bytes(self.source_bytes)}, since chunks lie across the new "
                "ones"
            )
        elif self.passes:
            moved = sum(found.moved_bytes for found in self.passes.values())
            yield (
                f"with build.scratch it would move {format_bytes(moved)} in two passes; more build.memory_bytes helps "
                "too"
            )

    def __repr__(self) -> str:
        return "\n".join(["Build plan", *(f"- {sentence}" for sentence in self.reasons)])

    def _repr_html_(self) -> str:
        return html_list(self.reasons)


@takes_config
def plan_build(config: Config, plan: ChunkPlan | None = None, *, source: Any = None) -> BuildPlan:
    """Plan a build: its tasks, its memory and what it will read. Nothing is written.

    Args:
        config: What would be built.
        plan: Chunks and shards; `plan_chunks(config)` when left out.
        source: An xarray object, an array or a source in memory, instead of the one that the config names.

    Returns:
        The plan of the build.

    Raises:
        ConfigError, PlanError: as `kit.build` raises.
        BuildError: when one shard does not fit in memory.

    Example:
        >>> kit.data.plan_build(ocean).tasks >= 1
        True
    """
    refuse_no_plan(plan)
    opened = load_source(config, source)
    chunks = plan or plan_chunks(config, source=opened)
    return plan_tasks(config, make_blueprint(config, opened, chunks), opened)


def plan_tasks(config: Config, blueprint: Blueprint, source: Source, threads: int | None = None) -> BuildPlan:
    """The plan of as many tasks at once as move the bytes soonest: fewer have more memory each and read less.

    Raises:
        BuildError: when one shard does not fit in memory, with the arithmetic.
    """
    requested = slots_of(config.build, threads)
    layouts = {
        name: Recut(
            shape=writer.shape,
            itemsize=writer.dtype.itemsize,
            source_chunk=chunk_of(source, name),
            target=writer.cut,
            chunk=writer.chunk,
        )
        for name, writer in blueprint.arrays.items()
    }
    largest = max(layouts.values(), key=lambda layout: layout.least_task_bytes)
    plans = []
    for processes in _process_counts(requested, config.build):
        budget_bytes = _budget_bytes(config.build, processes)
        most = min(requested.threads, (budget_bytes - OVERHEAD_BYTES) // largest.least_task_bytes)
        slots = Slots(processes=processes, threads=requested.threads)
        for count in _counts_to_try(most):
            each_bytes = (budget_bytes - OVERHEAD_BYTES) // count
            groupings = {name: group_regions(layout, each_bytes) for name, layout in layouts.items()}
            plans.append(BuildPlan(
                groupings=groupings, passes=_passes(layouts, groupings, each_bytes), slots=slots, threads=count,
                memory_bytes=budget_bytes, requested=requested, scheduler=config.build.scheduler,
                scratch=bool(config.build.scratch), objects=blueprint.build.shards,
                remarks=tuple(remarks(config, source)),
            ))  # fmt: skip
    if not plans:
        raise _too_large(largest, config.build)
    return min(plans, key=lambda plan: plan.moved_bytes / (plan.threads * max(1, plan.slots.processes)))


def _counts_to_try(most: int) -> list[int]:
    """That many and the powers of two below, most first; none below one."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True) if most > 0 else []


def _process_counts(requested: Slots, settings: Build) -> list[int]:
    """As many as are requested; fewer too, where they would have more memory each."""
    if settings.address and settings.total_memory_bytes:
        most = max(1, settings.total_memory_bytes // (settings.memory_bytes + RUNTIME_BYTES))
        return [min(requested.processes or most, most)]
    if _budget_bytes(settings, requested.processes) >= settings.memory_bytes:
        return [requested.processes]
    return _counts_to_try(requested.processes)


def _budget_bytes(settings: Build, processes: int) -> int:
    """What building may add to each of so many processes; below 0 where their libraries leave nothing."""
    limits = [settings.total_memory_bytes] * bool(settings.total_memory_bytes)
    limits += [share().memory_available_bytes] * (not settings.address)
    runtime_bytes = RUNTIME_BYTES * (settings.scheduler == "distributed")
    return min([settings.memory_bytes, *(limit // max(1, processes) - runtime_bytes for limit in limits)])


def _passes(layouts: Mapping[str, Recut], groupings: Mapping[str, Grouping], budget_bytes: int) -> dict[str, TwoPasses]:
    """One intermediate cut for all arrays, made for the one of the largest numbers; none unless it serves them all."""
    widest = max(layouts.values(), key=lambda layout: layout.itemsize)
    chunk = intermediate_chunk(widest, budget_bytes)
    found = {name: two_passes(layouts[name], budget_bytes, grouping, chunk) for name, grouping in groupings.items()}
    kept = {name: pair for name, pair in found.items() if pair is not None}
    return kept if len(kept) == len(found) else {}


def groups(writer: ArrayWriter, grouping: Grouping, finished: Container[str]) -> Iterator[ShardGroup]:
    """Every group of an array with shards left to write, without those that are finished."""
    counts = [side // cut for side, cut in zip(grouping.group, writer.cut, strict=True)]
    for number, box in enumerate(grouping.boxes()):
        tasks = tuple(task for task in writer.tasks_in(box, counts) if task.key not in finished)
        if tasks:
            yield ShardGroup(array=writer.name, number=number, tasks=tasks)


def _too_large(layout: Recut, settings: Build) -> BuildError:
    needed_bytes, allowed_bytes = layout.least_task_bytes + OVERHEAD_BYTES, _budget_bytes(settings, 1)
    short = "memory_bytes" if allowed_bytes == settings.memory_bytes else "total_memory_bytes"
    larger = f"a larger build.{short}" if getattr(settings, short) else "free some memory"
    return BuildError(
        f"one task takes {layout.arithmetic()}, and with {format_bytes(OVERHEAD_BYTES)} for libraries and the "
        f"allocator {format_bytes(needed_bytes)} of memory, where {format_bytes(max(0, allowed_bytes))} is allowed; "
        f"set a smaller chunking.target_shard_bytes or {larger}"
    )
