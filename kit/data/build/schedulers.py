"""Schedulers: what runs the tasks of a build; and how many processes and threads to load and build with.

Each scheduler is a `concurrent.futures.Executor`, so one loop serves all. `single-threaded` runs a task when it is
submitted, `threads` in threads of this process, `distributed` on Dask workers: a local cluster that ends with the
build, or one at an address, which is left running. Dask is imported for the last only. A local worker may hold what the
plan allows for building, beside an interpreter with its libraries; Dask kills one that holds more, and its task runs
again, three times at most. Spilling and pausing are switched off: tasks keep nothing in the cluster, so there is
nothing to spill, and a paused worker would wait for ever.

`advise_schedule` follows the rules of practice with GPUs on shared nodes, for each rank's share of the cores:

- two cores of a share stay with the rank itself (one of a small share): 20 cores and 1 GPU leave 18 for loading, 160
  and 8 leave 144;
- threads come before processes: kit's engine reads and decodes without holding Python back, and a loader process pays
  only where a transform computes in Python;
- Dask inside a rank, for data read through xarray: 4 to 8 threads of a share of 8 cores or more, one worker of 2
  threads in each rank of a smaller one, none below 2 cores;
- a build has the machine to itself: threads of one process up to 8 cores, then workers of 4 threads.

Threads beyond the cores take turns: a tenth more is harmless, twice as many is slower than half. The advice is a start
to measure from, not a measurement. Counts are per rank unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from kit.arguments import checks_arguments
from kit.config import Config
from kit.errors import BuildError, ConfigError, PlanError, Problem
from kit.machine.machine import hardware, resolve_devices, share
from kit.sections import Build
from kit.tables import html_list, html_table, html_warnings, text_table
from kit.units import format_bytes, parse_bytes, plural

_MOST_THREADS = 8
RUNTIME_BYTES = 320 << 20
"""An interpreter with numpy, zarr, xarray and Dask, before it builds."""
_CLUSTER_SECONDS = 60
NO_WORKER_SECONDS = 180
"""After so long without one, nobody is waited for: Dask itself would wait for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """How many tasks run at once, and where."""

    processes: int
    """0 for every worker of a running cluster."""
    threads: int
    """Tasks each process runs at once, by the settings; memory may allow fewer."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """An executor, and how an object reaches its tasks."""

    executor: Executor
    in_flight: int
    """Tasks submitted at once: those that run, and others, so that an idle thread finds the next one."""
    link: str = ""
    """URL of a dashboard."""
    share: Callable[[Any], Any] = lambda thing: thing
    """Gives what to pass to tasks in place of a thing, so that it travels to each worker once."""
    check: Callable[[], None] = lambda: None
    """Raises BuildError when nobody has been there for long to do a task."""


def slots_of(settings: Build, threads: int | None = None) -> Slots:
    """Processes and threads that the settings come to on this machine; a running cluster has its own processes."""
    cores = share().cores
    threads = settings.threads if threads is None else max(1, threads)
    if settings.scheduler == "single-threaded":
        return Slots(processes=1, threads=1)
    if settings.scheduler == "threads":
        return Slots(processes=1, threads=threads or min(cores, _MOST_THREADS))
    threads = threads or 1
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
        yield Scheduler(_SingleThreaded(), 1)
    elif settings.scheduler == "threads":
        with ThreadPoolExecutor(threads, thread_name_prefix="kit-build") as pool:
            yield Scheduler(pool, 2 * threads)
    else:
        with _dask(settings, slots, threads, memory_bytes) as scheduler:
            yield scheduler


class _SingleThreaded(Executor):
    """Runs a task in the thread that submits it; an interrupt passes through."""

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
    options: dict[str, Any] = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause")}
    options["distributed.comm.timeouts.connect"] = f"{_CLUSTER_SECONDS}s"
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(options))
        if settings.address:
            try:
                client = distributed.Client(settings.address, set_as_default=False, timeout=_CLUSTER_SECONDS / 4)
            except (OSError, TimeoutError, ValueError) as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                message = f"no Dask scheduler answers at {settings.address}: {reason}; correct build.address"
                raise BuildError(message) from None
            stack.enter_context(client)
        else:
            cluster = distributed.LocalCluster(
                n_workers=slots.processes, threads_per_worker=threads, processes=True, host="127.0.0.1",
                memory_limit=memory_bytes + RUNTIME_BYTES, dashboard_address="127.0.0.1:0",  # a free port
                silence_logs=50,
            )  # fmt: skip
            client = stack.enter_context(distributed.Client(stack.enter_context(cluster), set_as_default=False))
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise BuildError(f"the Dask scheduler at {settings.address} has no workers; start some, then build again")
        executor = client.get_executor(pure=False, retries=0)
        used = min(workers, slots.processes or workers)
        # A task that waits could run on a worker that is not to be used.
        in_flight = used * threads * (2 if used == workers else 1)
        share_thing = stack.enter_context(_sharing(client))
        link = client.dashboard_link if find_spec("bokeh") else ""  # which serves the page
        yield Scheduler(executor, in_flight, link or "", share_thing, _WorkerWatch(client).check)


class _WorkerWatch:
    """Whether a cluster still has workers; one whose nanny could not start it anew is told by nobody."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._seen = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        if self._client.scheduler_info(n_workers=-1)["workers"]:
            self._seen = now
        elif now - self._seen > NO_WORKER_SECONDS:
            raise BuildError(
                f"no Dask worker has been there for {now - self._seen:.0f} s; see that one can start, with the memory "
                "for its task (build.memory_bytes, fewer build.workers or build.threads), then build again to resume"
            )


@contextlib.contextmanager
def _sharing(client: Any) -> Iterator[Callable[[Any], Any]]:
    """Sends a thing to every worker, and to each that replaces a lost one; removes it at the end.

    Scattered data would be lost with the last worker that holds it.
    """
    plugins: Any = importlib.import_module("distributed.diagnostics.plugin")
    names: list[str] = []

    def share_thing(thing: Any) -> OnWorker:
        names.append(f"kit-{uuid.uuid4().hex}")
        plugin = plugins.WorkerPlugin()
        plugin.thing = thing
        client.register_plugin(plugin, name=names[-1])
        return OnWorker(names[-1])

    try:
        yield share_thing
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
    def total_threads(self) -> int:
        return self.workers * self.threads

    def __str__(self) -> str:
        if self.mode == "distributed":
            threads = plural(self.threads, "thread")
            return f"distributed, {self.workers} × {threads}, {format_bytes(self.memory_bytes)} each"
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
        where = f"{self.loader_workers} a rank" if self.loader_workers else f"{self.ranks} (the ranks)"
        dask, build = self.dask, self.build
        return [
            [f"loading, {plural(self.ranks, 'rank')}", where, str(self.decode_threads), "–"],
            [f"Dask in a rank: {dask.mode}", str(dask.workers), str(dask.threads), format_bytes(dask.memory_bytes)],
            [f"building: {build.mode}", str(build.workers), str(build.threads), format_bytes(build.memory_bytes)],
        ]

    @property
    def _headline(self) -> str:
        return f"Schedule for {plural(self.ranks, 'rank')} on {self.cores} cores, {format_bytes(self.memory_bytes)}"

    def __repr__(self) -> str:
        said = (*(f"warning: {text}" for text in self.warnings), *self.reasons)
        return "\n".join([self._headline, text_table(_COLUMNS, self._rows), *(f"- {text}" for text in said)])

    def _repr_html_(self) -> str:
        table = html_table(_COLUMNS, self._rows, caption=self._headline)
        return table + html_warnings(self.warnings) + html_list(self.reasons)


@checks_arguments
def advise_schedule(
    config: Config | None = None,
    *,
    cores: int | None = None,
    ranks: int | None = None,
    memory_bytes: int | str | None = None,
    heavy_transform: bool = False,
    dask_threads: int | None = None,
) -> Schedule:
    """Sizes for loading, for Dask and for building on a machine, with reasons and warnings.

    Args:
        config: Its `loader` and `build` are checked, and its ranks are counted where `ranks` is None.
        cores: Cores of the machine. None takes those that this process may use.
        ranks: Training processes, one for each GPU. None takes the config's, or 1.
        memory_bytes: Memory of the machine, as a number or as "128 GiB". None takes what this process may use.
        heavy_transform: Whether slow Python code transforms samples, so that processes are needed.
        dask_threads: Threads that Dask already has in each process that loads.

    Returns:
        The schedule: loader processes, threads and chunks of memory for each part, with the reason of each.

    Raises:
        PlanError: for less than one core, rank or byte.
        ConfigError: for memory that is no size.

    Example:
        >>> schedule = kit.data.advise_schedule(cores=16, ranks=4, memory_bytes="128 GiB")
        >>> len(schedule.reasons) > 0
        True
    """
    memory_bytes = None if memory_bytes is None else parse_bytes(memory_bytes, "memory_bytes")
    cores = share().cores if cores is None else cores
    memory_bytes = share().memory_bytes if memory_bytes is None else memory_bytes
    if ranks is None:
        ranks = resolve_devices(config.hardware, hardware()).world_size if config is not None else 1
    for name, value in {"cores": cores, "ranks": ranks, "memory_bytes": memory_bytes}.items():
        if value < 1:
            raise PlanError(f"{name} is {value}, but must be at least 1")
    each = cores // ranks
    reserved = 2 if each >= _LARGE_SHARE else 1 if each >= 2 else 0
    spare, loading_bytes = max(1, each - reserved), int(memory_bytes * _MEMORY_FOR_LOADING)
    workers = max(1, min(spare, loading_bytes // ranks // _WORKER_BYTES)) if heavy_transform else 0
    found = Schedule(
        cores=cores, ranks=ranks, memory_bytes=memory_bytes, loader_workers=workers,
        decode_threads=1 if workers else min(spare, _MOST_DECODE_THREADS), reasons=(),
        dask=_dask_in_a_rank(cores / ranks, loading_bytes // ranks), build=_build_alone(cores, memory_bytes),
        warnings=tuple(_warnings(config, cores, ranks, memory_bytes, dask_threads)),
    )  # fmt: skip
    return replace(found, reasons=tuple(_reasons(found, reserved, spare)))


def _dask_in_a_rank(cores: float, memory_bytes: int) -> Dask:
    if cores >= _LARGE_SHARE:
        return Dask(mode="threads", workers=1, threads=min(8, max(4, int(cores * 0.4))), memory_bytes=memory_bytes)
    if cores >= 2:
        return Dask(mode="distributed", workers=1, threads=2, memory_bytes=memory_bytes)
    return Dask(mode="single-threaded", workers=1, threads=1, memory_bytes=memory_bytes)


def _build_alone(cores: int, memory_bytes: int) -> Dask:
    workers, threads = (1, cores) if cores <= 8 else (cores // 4, 4)
    mode: DaskMode = "distributed" if workers > 1 else "threads" if threads > 1 else "single-threaded"
    limit = int(memory_bytes * _MEMORY_FOR_BUILDING) // workers
    return Dask(mode=mode, workers=workers, threads=threads, memory_bytes=limit)


def _reasons(found: Schedule, reserved: int, spare: int) -> Iterator[str]:
    cores, ranks, workers, dask = found.cores, found.ranks, found.loader_workers, found.dask
    each = f"{cores} cores / {ranks} ranks = {cores // ranks} each" if ranks > 1 else f"{cores} cores"
    yield f"{each}, {reserved} kept for the rank itself: {ranks * spare} for loading in all"
    if not workers:
        yield "no loader processes: the engine has threads, and processes pay only for heavy transforms"
    elif workers < spare:
        held = format_bytes(_MEMORY_FOR_LOADING * found.memory_bytes / ranks)
        yield f"{workers}, not {spare}, loader processes a rank: half its memory, {held}, holds no more of 1 GiB each"
    else:
        yield f"{workers} loader processes a rank, one a core, each decoding in one thread"
    if dask.mode == "distributed":
        yield (
            f"Dask in a rank: one worker of {plural(dask.threads, 'thread')}, {ranks * dask.total_threads} in all; or "
            f"one cluster of {plural(max(1, cores - ranks), 'thread')} that all ranks share"
        )
    else:
        yield f"Dask in a rank: {dask}, for data read through xarray, in place of decoding threads, not beside them"
    yield f"building alone on the machine: {found.build}"
    yield "start here with workers at 0 as the baseline, change one thing at a time, and measure"


def _warnings(
    config: Config | None, cores: int, ranks: int, memory_bytes: int, dask_threads: int | None
) -> Iterator[str]:
    def too_many(processes: int, threads: int, lower: str) -> Iterator[str]:
        if processes * threads > _SLACK * cores and processes * threads > cores + 1:
            product = f"{processes} processes × {threads} threads = " * (processes > 1)
            yield f"{product}{processes * threads} threads on {cores} cores: they take turns; lower {lower}"

    processes = ranks
    if config is not None:
        build, loader, memory = config.build, config.loader, format_bytes(memory_bytes)
        processes = ranks * max(1, loader.num_workers)
        yield from too_many(processes, loader.decode_threads, "loader.num_workers or loader.decode_threads")
        if build.scheduler == "threads":
            yield from too_many(1, build.threads, "build.threads")
        elif build.scheduler == "distributed" and not build.address:
            threads = build.threads or 1
            workers = build.workers or max(1, cores // threads)
            yield from too_many(workers, threads, "build.workers or build.threads")
            if build.total_memory_bytes > memory_bytes:
                yield f"build.total_memory_bytes {format_bytes(build.total_memory_bytes)} exceeds {memory}"
            elif not build.total_memory_bytes and workers * build.memory_bytes > memory_bytes:
                yield f"{workers} workers × build.memory_bytes {format_bytes(build.memory_bytes)} exceed {memory}"
        if ranks * loader.memory_bytes > memory_bytes:
            yield f"{ranks} ranks × loader.memory_bytes {format_bytes(loader.memory_bytes)} exceed {memory}"
    if dask_threads is not None:
        yield from too_many(processes, dask_threads, "Dask's threads in each, or share one cluster")
    if ranks > cores:
        yield f"{ranks} ranks on {cores} cores: each shares its core before it loads anything"
