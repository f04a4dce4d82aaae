"""Schedulers: what runs the tasks of a build. Each is a `concurrent.futures.Executor`, so one loop serves all.

`single-threaded` runs a task when it is handed in, `threads` in threads of this process, `distributed` on Dask workers:
a local cluster that ends with the build, or one at an address, which is left running. Dask is imported for the last
only.

A local Dask worker may hold what the plan allows it for building beside what an interpreter with its libraries takes;
one that holds more is killed by Dask and its task runs again, three times at most. Spilling and pausing are switched
off: tasks keep nothing in the cluster, so there is nothing to spill, and a paused worker would wait for ever.

Who works on what: loader processes, decoding threads and Dask sizes for so many cores, ranks and so much memory.

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

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from kit.config import Build, Config
from kit.errors import BuildError, ConfigError, PlanError, Problem
from kit.machine.machine import share
from kit.tables import html_list, html_table, html_warnings, text_table
from kit.units import format_bytes, parse_bytes

_MOST_THREADS = 8
RUNTIME_BYTES = 320 << 20
"""An interpreter with numpy, zarr, xarray and Dask, before it builds."""
_CLUSTER_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """How many tasks run at once, and where."""

    processes: int
    """0 for every worker of a running cluster."""
    threads: int
    """Tasks each process runs at once, by the settings; memory may allow fewer."""


class Scheduler:
    """An executor with room for `slots` tasks, and how an object reaches its tasks."""

    def __init__(
        self, executor: Executor, slots: int, ahead: int, link: str = "", spread: Callable[[Any], Any] | None = None
    ) -> None:
        self.executor, self.slots, self.link = executor, slots, link
        self.in_flight = slots + ahead
        """Tasks handed in at once, so that a slot that falls free finds the next one."""
        self._spread = spread

    def share(self, thing: Any) -> Any:
        """What to hand to tasks in place of `thing`, so that it travels to each worker once."""
        return thing if self._spread is None else self._spread(thing)


def slots_of(settings: Build, asked: int | None = None) -> Slots:
    """Processes and threads that the settings come to on this machine; a running cluster has its own processes."""
    cores = share().cores
    wanted = settings.threads if asked is None else max(1, asked)
    if settings.scheduler == "single-threaded":
        return Slots(processes=1, threads=1)
    if settings.scheduler == "threads":
        return Slots(processes=1, threads=wanted or min(cores, _MOST_THREADS))
    threads = wanted or 1
    if settings.address:
        return Slots(processes=settings.workers, threads=threads)
    return Slots(processes=settings.workers or max(1, cores // threads), threads=threads)


@contextlib.contextmanager
def open_scheduler(settings: Build, slots: Slots, threads: int, memory_bytes: int) -> Iterator[Scheduler]:
    """The scheduler asked for, with `threads` tasks at once in each process, ended at the end.

    Args:
        memory_bytes: What building may add to each process; workers of a running cluster have their own limit.

    Raises:
        ConfigError: when Dask is asked for and not installed.
        BuildError: when no scheduler answers at the address, or no worker is there.
    """
    if settings.scheduler == "single-threaded":
        yield Scheduler(_Here(), 1, 0)
    elif settings.scheduler == "threads":
        with ThreadPoolExecutor(threads, thread_name_prefix="kit-build") as pool:
            yield Scheduler(pool, threads, threads)
    else:
        with _dask(settings, slots, threads, memory_bytes) as scheduler:
            yield scheduler


class _Here(Executor):
    """Runs a task in the thread that hands it in; an interrupt passes through."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def explain(error: BaseException) -> BaseException:
    """What a scheduler's own error means for a build; any other error as it is."""
    if type(error).__name__ == "KilledWorker":
        return BuildError(
            "a Dask worker was lost three times while it ran one task, most likely for want of memory; set a larger "
            "build.memory_bytes, or fewer build.workers or build.threads, then build again to resume"
        )
    return error


@contextlib.contextmanager
def _dask(settings: Build, slots: Slots, threads: int, memory_bytes: int) -> Iterator[Scheduler]:
    try:
        import dask

        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        message = "distributed needs Dask, which is not installed; pip install 'kit[build]', or choose threads"
        raise ConfigError([Problem("build.scheduler", message)]) from None
    kept = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({**kept, "distributed.comm.timeouts.connect": f"{_CLUSTER_SECONDS}s"}))
        if settings.address:
            client = stack.enter_context(_connect(distributed, settings.address))
        else:
            cluster = distributed.LocalCluster(
                n_workers=slots.processes, threads_per_worker=threads, processes=True, host="127.0.0.1",
                memory_limit=memory_bytes + RUNTIME_BYTES, dashboard_address=_dashboard(), silence_logs=50,
            )  # fmt: skip
            client = stack.enter_context(distributed.Client(stack.enter_context(cluster), set_as_default=False))
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise BuildError(f"the Dask scheduler at {settings.address} has no workers; start some, then build again")
        executor = client.get_executor(pure=False, retries=0)
        room = min(workers, slots.processes or workers) * threads
        ahead = room if room == workers * threads else 0  # what waits could run on a worker that is not to be used
        spread = stack.enter_context(_spreader(client))
        yield Scheduler(executor, room, ahead, client.dashboard_link or "", spread)


def _connect(distributed: Any, address: str) -> Any:
    try:
        return distributed.Client(address, set_as_default=False, timeout=_CLUSTER_SECONDS / 4)
    except (OSError, TimeoutError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise BuildError(f"no Dask scheduler answers at {address}: {reason}; correct build.address") from None


@contextlib.contextmanager
def _spreader(client: Any) -> Iterator[Callable[[Any], Any]]:
    """Hands a thing to every worker, and to each that takes the place of a lost one; taken back at the end.

    Scattered data would be lost with the last worker that holds it.
    """
    plugins: Any = importlib.import_module("distributed.diagnostics.plugin")
    names: list[str] = []

    def spread(thing: Any) -> OnWorker:
        names.append(f"kit-{uuid.uuid4().hex}")
        plugin = plugins.WorkerPlugin()
        plugin.thing = thing
        client.register_plugin(plugin, name=names[-1])
        return OnWorker(names[-1])

    try:
        yield spread
    finally:
        for name in names:
            with contextlib.suppress(Exception):  # the cluster may be gone
                client.unregister_worker_plugin(name)


class OnWorker:
    """Stands for a thing that every worker has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, task: Any) -> Any:
        """What the thing itself makes of the task; call on a worker."""
        worker: Any = importlib.import_module("distributed").get_worker()
        return worker.plugins[self._name].thing.run(task)


def _dashboard() -> str | None:
    """A free port, where bokeh is there to serve the page."""
    from importlib.util import find_spec

    return "127.0.0.1:0" if find_spec("bokeh") else None


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
    dask, build = _dask_schedule(cores, ranks, memory_bytes), _build(cores, memory_bytes)
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
    from kit.machine.machine import hardware, resolve_devices, share

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


def _dask_schedule(cores: int, ranks: int, memory_bytes: int) -> Dask:
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
