"""Schedulers: what runs the tasks of a build. Each is a `concurrent.futures.Executor`, so one loop serves all.

`single-threaded` runs a task when it is handed in, `threads` in threads of this process, `distributed` on Dask workers:
a local cluster that ends with the build, or one at an address, which is left running. Dask is imported for the last
only.

A local Dask worker may hold what the plan allows it for building beside what an interpreter with its libraries takes;
one that holds more is killed by Dask and its task runs again, three times at most. Spilling and pausing are switched
off: tasks keep nothing in the cluster, so there is nothing to spill, and a paused worker would wait for ever.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kit.cgroup import share
from kit.config import Build
from kit.errors import BuildError, ConfigError, Problem

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
