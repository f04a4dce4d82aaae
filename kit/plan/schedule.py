"""Who works on what: loader processes, decoding threads and Dask sizes for so many cores, ranks and so much memory.

The rules, for each rank's share of the cores, are those of practice with GPUs on shared nodes:

- two cores of a share stay with the rank itself (one of a small share): 20 cores and 1 GPU leave 18 for loading, 160
  and 8 leave 144;
- threads come before processes: kit's engine reads and decodes without holding Python back, and a loader process pays
  only where a transform computes in Python;
- Dask inside a rank, for data read through xarray: 4 to 8 threads of a share of 8 cores or more, one worker of 2
  threads in each rank of a smaller one, none below 2 cores;
- a build has the machine to itself: threads of one process up to 8 cores, then workers of 4 threads.

Threads beyond the cores take turns: a tenth more is harmless, twice as many is slower than half. Pure arithmetic: what
comes out is a start to measure from, not a measurement. Counts are per rank unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kit.config import Config
from kit.errors import PlanError
from kit.tables import html_list, html_table, html_warnings, text_table
from kit.units import format_bytes, parse_bytes

DaskMode = Literal["single-threaded", "threads", "distributed"]

_MOST_DECODE_THREADS = 8
"""At 500 MB a second each they decode more than most networks bring."""
_LARGE_SHARE = 8
_WORKER_BYTES = 1 << 30
"""A loader process with its libraries, its open store and the batches it keeps ready."""
_SLACK = 1.1
_MEMORY_FOR_LOADING = 0.5
_MEMORY_FOR_BUILDING = 0.7
_COLUMNS = ("for", "processes", "threads in each", "memory of each")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dask:
    """A Dask scheduler and its size."""

    mode: DaskMode
    workers: int
    threads: int
    """Of each worker; of the process itself for `threads`."""
    memory_bytes: int
    """Limit of each worker."""

    @property
    def total(self) -> int:
        return self.workers * self.threads

    def __str__(self) -> str:
        if self.mode == "distributed":
            return f"distributed, {self.workers} × {self.threads} threads, {format_bytes(self.memory_bytes)} each"
        return self.mode if self.mode == "single-threaded" else f"threads({self.threads})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Schedule:
    """What to start from, why, and what of the present settings is too much."""

    cores: int
    ranks: int
    memory_bytes: int
    loader_workers: int
    """Loader processes of each rank."""
    decode_threads: int
    """Of each process that reads."""
    dask: Dask
    """Inside each rank, where data is read through xarray."""
    build: Dask
    """For building a store, when nothing else runs."""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def loading_threads(self) -> int:
        """Of all ranks together."""
        return self.ranks * max(1, self.loader_workers) * self.decode_threads

    def apply(self, config: Config) -> Config:
        """The config with these sizes in `loader` and `build`."""
        return config.replace({
            "loader.num_workers": self.loader_workers,
            "loader.decode_threads": self.decode_threads,
            "build.scheduler": self.build.mode,
            "build.workers": self.build.workers if self.build.mode == "distributed" else 0,
            "build.threads": self.build.threads,
            "build.memory_bytes": self.build.memory_bytes,
            "build.total_memory_bytes": self.build.workers * self.build.memory_bytes,
        })  # fmt: skip

    @property
    def _rows(self) -> list[list[str]]:
        processes = self.loader_workers or self.ranks
        kind = f"loading, {self.ranks} rank" + "s" * (self.ranks > 1)
        where = f"{processes} a rank" if self.loader_workers else f"{processes} (the ranks)"
        dask, build = self.dask, self.build
        return [
            [kind, where, str(self.decode_threads), "–"],
            [f"Dask in a rank: {dask.mode}", str(dask.workers), str(dask.threads), format_bytes(dask.memory_bytes)],
            [f"building: {build.mode}", str(build.workers), str(build.threads), format_bytes(build.memory_bytes)],
        ]

    @property
    def _headline(self) -> str:
        ranks = f"{self.ranks} rank" + "s" * (self.ranks > 1)
        return f"Schedule for {ranks} on {self.cores} cores, {format_bytes(self.memory_bytes)}"

    def __repr__(self) -> str:
        said = (*(f"warning: {text}" for text in self.warnings), *self.reasons)
        return "\n".join([self._headline, text_table(_COLUMNS, self._rows), *(f"- {text}" for text in said)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self._rows, caption=self._headline)
        return table + html_warnings(self.warnings) + html_list(self.reasons)


def advise_schedule(
    config: Config | None = None,
    *,
    cores: int | None = None,
    ranks: int | None = None,
    memory_bytes: int | str | None = None,
    heavy_transform: bool = False,
    dask_threads: int | None = None,
) -> Schedule:
    """Sizes for loading, for Dask and for building, with reasons, and warnings about what the config asks for.

    Args:
        config: Its `loader` and `build` are checked, and its ranks counted where `ranks` is left out.
        cores: Of the machine; by default those that this process may use.
        ranks: Processes that train, one a GPU; by default the config's, else 1.
        memory_bytes: Of the machine, as a number or a text such as "128 GiB"; by default what this process may use.
        heavy_transform: Samples are transformed by slow Python code, which threads cannot share.
        dask_threads: Threads that Dask already has in each process that loads, to be counted.

    Raises:
        PlanError: for less than one core, rank or byte, and a memory that is no size.
    """
    memory_bytes = _parsed(memory_bytes)
    if cores is None or memory_bytes is None or ranks is None:
        cores, memory_bytes, ranks = _look(config, cores, memory_bytes, ranks)
    for name, value in {"cores": cores, "ranks": ranks, "memory_bytes": memory_bytes}.items():
        if value < 1:
            raise PlanError(f"{name} is {value}, but must be at least 1")
    spare = _spare(cores, ranks)
    workers = _loader_workers(spare, memory_bytes // ranks) if heavy_transform else 0
    dask, build = _dask(cores, ranks, memory_bytes), _build(cores, memory_bytes)
    return Schedule(
        cores=cores, ranks=ranks, memory_bytes=memory_bytes, loader_workers=workers,
        decode_threads=1 if workers else min(spare, _MOST_DECODE_THREADS), dask=dask, build=build,
        reasons=tuple(_reasons(cores, ranks, memory_bytes, spare, workers, dask, build)),
        warnings=tuple(_warnings(config, cores, ranks, memory_bytes, dask_threads)),
    )  # fmt: skip


def _parsed(memory_bytes: int | str | None) -> int | None:
    try:
        return None if memory_bytes is None else parse_bytes(memory_bytes)
    except ValueError as error:
        raise PlanError(f"memory_bytes: {error}") from None


def _look(
    config: Config | None, cores: int | None, memory_bytes: int | None, ranks: int | None
) -> tuple[int, int, int]:
    from kit.cgroup import share
    from kit.machine import hardware, resolve_devices

    mine = share()
    if ranks is None:
        ranks = resolve_devices(config.hardware, hardware()).world_size if config is not None else 1
    return mine.cores if cores is None else cores, memory_bytes or mine.memory_bytes, ranks


def _reserved(cores: int, ranks: int) -> int:
    share = cores // ranks
    return 2 if share >= _LARGE_SHARE else 1 if share >= 2 else 0


def _spare(cores: int, ranks: int) -> int:
    """Cores of a rank's share that may load."""
    return max(1, cores // ranks - _reserved(cores, ranks))


def _loader_workers(spare: int, memory_bytes: int) -> int:
    return max(1, min(spare, int(memory_bytes * _MEMORY_FOR_LOADING) // _WORKER_BYTES))


def _dask(cores: int, ranks: int, memory_bytes: int) -> Dask:
    share = cores / ranks
    limit = int(memory_bytes * _MEMORY_FOR_LOADING) // ranks
    if share >= _LARGE_SHARE:
        return Dask(mode="threads", workers=1, threads=min(8, max(4, int(share * 0.4))), memory_bytes=limit)
    if share >= 2:
        return Dask(mode="distributed", workers=1, threads=2, memory_bytes=limit)
    return Dask(mode="single-threaded", workers=1, threads=1, memory_bytes=limit)


def _build(cores: int, memory_bytes: int) -> Dask:
    workers, threads = (1, cores) if cores <= 8 else (cores // 4, 4)
    mode: DaskMode = "distributed" if workers > 1 else "threads" if threads > 1 else "single-threaded"
    return Dask(
        mode=mode, workers=workers, threads=threads, memory_bytes=int(memory_bytes * _MEMORY_FOR_BUILDING) // workers
    )


def _reasons(
    cores: int, ranks: int, memory_bytes: int, spare: int, workers: int, dask: Dask, build: Dask
) -> Iterator[str]:
    kept = _reserved(cores, ranks)
    each = f"{cores} cores / {ranks} ranks = {cores // ranks} each" if ranks > 1 else f"{cores} cores"
    yield f"{each}, {kept} kept for the rank itself: {ranks * spare} for loading in all"
    if not workers:
        yield "no loader processes: the engine has threads, and processes pay only for heavy transforms"
    elif workers < spare:
        held = format_bytes(_MEMORY_FOR_LOADING * memory_bytes / ranks)
        yield f"{workers}, not {spare}, loader processes a rank: half its memory, {held}, holds no more of 1 GiB each"
    else:
        yield f"{workers} loader processes a rank, one a core, each decoding in one thread"
    if dask.mode == "distributed":
        yield (
            f"Dask in a rank: one worker of {dask.threads} threads, {ranks * dask.total} threads in all; or one "
            f"cluster of {max(1, cores - ranks)} threads that all ranks share"
        )
    else:
        yield f"Dask in a rank: {dask}, for data read through xarray, in place of decoding threads, not beside them"
    yield f"building alone on the machine: {build}"
    yield "start here with workers at 0 as the baseline, change one thing at a time, and measure"


def _warnings(
    config: Config | None, cores: int, ranks: int, memory_bytes: int, dask_threads: int | None
) -> Iterator[str]:
    processes, threads = ranks, 1
    if config is not None:
        processes, threads = ranks * max(1, config.loader.num_workers), config.loader.decode_threads
        yield from _too_many(processes, threads, cores, "loader.num_workers or loader.decode_threads")
        yield from _build_warnings(config, cores, memory_bytes)
        if ranks * config.loader.memory_bytes > memory_bytes:
            yield (
                f"{ranks} ranks × loader.memory_bytes {format_bytes(config.loader.memory_bytes)} exceed "
                f"{format_bytes(memory_bytes)}"
            )
    if dask_threads is not None:
        yield from _too_many(processes, dask_threads, cores, "Dask's threads in each, or share one cluster")
    if ranks > cores:
        yield f"{ranks} ranks on {cores} cores: each shares its core before it loads anything"


def _build_warnings(config: Config, cores: int, memory_bytes: int) -> Iterator[str]:
    build = config.build
    if build.scheduler == "threads":
        yield from _too_many(1, build.threads, cores, "build.threads")
    if build.scheduler != "distributed" or build.address:
        return
    threads = build.threads or 1
    workers = build.workers or max(1, cores // threads)
    yield from _too_many(workers, threads, cores, "build.workers or build.threads")
    if build.total_memory_bytes > memory_bytes:
        yield (
            f"build.total_memory_bytes {format_bytes(build.total_memory_bytes)} exceeds {format_bytes(memory_bytes)}"
        )
    elif not build.total_memory_bytes and workers * build.memory_bytes > memory_bytes:
        yield (
            f"{workers} workers × build.memory_bytes {format_bytes(build.memory_bytes)} exceed "
            f"{format_bytes(memory_bytes)}"
        )


def _too_many(processes: int, threads: int, cores: int, lower: str) -> Iterator[str]:
    if processes * threads > _SLACK * cores and processes * threads > cores + 1:
        product = f"{processes} processes × {threads} threads = " * (processes > 1)
        yield f"{product}{processes * threads} threads on {cores} cores: they take turns; lower {lower}"
