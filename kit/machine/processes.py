"""Processes: which one is meant, whether it lives, and how none outlives its parent.

A process id is reused after its process ends, so a process is named by its id and its start time, and nothing is
signalled or believed alive on the id alone. On Linux both come from /proc; elsewhere from psutil.

Run as a program, this module is the guard of a command: `python -m kit.machine.processes PARENT FILE COMMAND...` starts
COMMAND in the process group that it leads itself, so that the command cannot outlive the process PARENT. When COMMAND
ends, its exit status and seconds are written to FILE; then, or when stdin closes, or when PARENT is gone, the guard
kills the whole group, and itself with it. It signals nothing but that group, whose id no other process can have got
meanwhile. It imports the standard library only, so that it is in place before the command has loaded anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import multiprocessing.process
import multiprocessing.util
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's `mallopt`."""
_TICK_SECONDS = 0.1
LONGEST_SOCKET_FOLDER = 104 - 1 - 33
SCRATCH = "KIT_SCRATCH"
"""The variable that names the scratch folder of a trial to its processes."""
NOTE = "process-"
LINUX = sys.platform == "linux"
BUSY_CORES = 0.3
"""Cores that other programs may use before what is timed beside them is told as slowed by them."""


def identify(pid: int) -> dict[str, Any]:
    """`{"pid", "started"}`; `started` is None when the process is gone (or a zombie, which only awaits its parent)."""
    return {"pid": pid, "started": _started(pid)}


def alive(identity: dict[str, Any]) -> bool:
    """Whether the process first identified so still runs; a zombie does not."""
    started = _started(int(identity["pid"]))
    return started is not None and started == identity["started"]


def _started(pid: int) -> float | None:
    if not LINUX:
        import psutil

        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
        except psutil.Error:
            return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else float(fields[19])


def members_of(group: int) -> list[int]:
    """The processes of a process group, eldest first; none where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append((float(fields[19]), int(folder.name)))
    return [pid for _, pid in sorted(found)]


def machine() -> dict[str, str]:
    """What tells this boot of this machine from others: process ids mean nothing elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return {"host": platform.node(), "boot": boot}


@functools.cache
def cpu_name() -> str:
    """The processor as its maker calls it, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def scheduled_seconds(*threads: int) -> tuple[float, float]:
    """How long threads of this process have had a core, and have waited for one; zeros where the system does not tell.

    Without any it is the sum of all threads that are alive.
    """
    on_core = waiting = 0.0
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task")
        for task in [tasks / str(thread) for thread in threads] or tasks.iterdir():
            with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
                had, waited, *_ = (task / "schedstat").read_text().split()
                on_core, waiting = on_core + int(had) / 1e9, waiting + int(waited) / 1e9
    return on_core, waiting


def slowed(slowness: float, computing_fraction: float = 1.0) -> float:
    """How many times as long work takes while the cores' pace (`kit.trial.meters.CpuPace`) is of this slowness.

    Where the product took 1.8 times as long, others took 1.55 to 1.84 times, convolutions 1.6, a softmax and calls of
    next to nothing 1.5, and adding up much memory 1.2 times as long (one host, two cores that a neighbour shared).

    Args:
        slowness: Of the product.
        computing_fraction: Of the work, what does not move memory.
    """
    felt = _FELT_COMPUTING * computing_fraction + _FELT_MOVING * (1 - computing_fraction)
    return 1 + felt * (slowness - 1)


_FELT_COMPUTING, _FELT_MOVING = 0.8, 0.2
MOST_SLOWNESS = 4.0
"""Of a product on cores that compute: where it took longer, this process or the whole machine stood still meanwhile."""


def cpu_seconds() -> tuple[float, dict[int, float]]:
    """CPU time of all programs since the machine started, and by its id of this process and of each that it started.

    A process counts with those that it has waited for, so that their sum grows by what all of them used, ended or not.
    """
    import psutil

    times = psutil.cpu_times()
    busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    this, own = psutil.Process(), {}
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            own[process.pid] = float(sum(process.cpu_times()[:4]))
    return float(busy), own


def thread_usage() -> tuple[int, float]:
    """Page faults of the calling thread that no disk answered, and its seconds in the system; zeros beside Linux."""
    if not LINUX:
        return 0, 0.0
    import resource

    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_minflt, usage.ru_stime


def rss_bytes() -> int:
    """Host memory that this process holds."""
    held_bytes = _status_bytes("VmRSS:")
    if held_bytes is None:
        import psutil

        held_bytes = int(psutil.Process().memory_info().rss)
    return held_bytes


def peak_rss_bytes() -> int:
    """The most host memory that this process has held at once.

    On Linux from /proc: `getrusage` answers for the process id, so right after an exec it still names the peak of the
    program that started this one.
    """
    most_bytes = _status_bytes("VmHWM:")
    if most_bytes is None:
        import resource

        unit_bytes = 1 if sys.platform == "darwin" else 1024
        most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return most_bytes


def children_of_multiprocessing() -> list[int]:
    """Processes that this one has started through multiprocessing, as loaders do, and not yet waited for."""
    started = getattr(multiprocessing.process, "_children", ())
    return [child.pid for child in [*started] if child.pid is not None]


def own_bytes(pid: int) -> int:
    """Memory that a process holds alone: nothing that it shares with its parent, or others; 0 where nobody tells.

    Counting pages takes the system 10 ms for each GiB or so.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(row.split()[1]) << 10 for row in rows if row.startswith(("Private_Clean:", "Private_Dirty:")))
    return 0


def anonymous_bytes(pid: int) -> int:
    """Memory of a process beside files, with what it shares since a fork; 0 where nobody tells.

    A page that is copied because one of the two has written to it changes nothing here, so growth is of new memory.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, resident, of_files, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _status_bytes(name: str) -> int | None:
    """A line of this process's status; None where the system has none."""
    if LINUX:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return None


@contextlib.contextmanager
def memory_limited(more_bytes: int) -> Iterator[None]:
    """Inside, this process can take so much more memory, and no more: then an allocation fails. On Linux."""
    taken_bytes = _status_bytes("VmData:")
    if taken_bytes is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = taken_bytes + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def give_memory_back() -> None:
    """Hand freed memory to the system; the allocator would keep it, in pieces that fit nothing else."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        if LINUX:
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the allocator keep what this process frees, from now on; only glibc can be asked."""
    with contextlib.suppress(OSError, AttributeError):
        if LINUX:
            library = ctypes.CDLL("libc.so.6")
            library.mallopt(_M_TRIM_THRESHOLD, -1)  # never
            for threshold_bytes in (1 << 30, 32 << 20):  # some versions refuse more than the second
                if library.mallopt(_M_MMAP_THRESHOLD, threshold_bytes):
                    return


def die_with_parent(parent: int) -> None:
    """Ask the operating system for SIGKILL when `parent` ends; end at once when it already has.

    Only Linux can be asked; elsewhere the lifeline (see `watch_lifeline`) does it alone. The request belongs to the
    thread that forked, so call this only in a process forked by a main thread.
    """
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(113)


def watch_lifeline(descriptor: int, whole_group: bool = True) -> None:
    """Kill this process group (or only this process) when the other end of a pipe closes, whatever Python is doing."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        if whole_group:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="kit-lifeline", daemon=True).start()


def die_with(pid: int) -> None:
    """Kill this process when another ends that did not start it; where the system has no such handle, do nothing."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(113)
    except (AttributeError, OSError):
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="kit-lifeline", daemon=True).start()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that it can be waited for; on Linux only."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def scratch_folder() -> Path:
    """Where this process may leave files that end with its trial; outside of one, among the temporary files."""
    return Path(os.environ.get(SCRATCH) or tempfile.gettempdir())


def note_process() -> None:
    """Leave word in the scratch folder that this process is one of the trial's."""
    if SCRATCH in os.environ:
        with contextlib.suppress(OSError):
            (scratch_folder() / f"{NOTE}{os.getpid()}").touch()


def shorten_socket_paths() -> None:
    """Have multiprocessing keep its sockets in `/tmp` where the folder for temporary files has too long a path.

    The address of a socket may have 108 bytes (104 on macOS), of which multiprocessing takes up to 33 for names.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER:
        return
    tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # makes it once, and removes it when this process ends
    finally:
        tempfile.tempdir = folder


def guard_forks(lifeline: int) -> None:
    """Make every process this one forks from now on (loader workers) die with it as well."""
    forking = threading.local()

    def before() -> None:
        forking.parent = os.getpid()
        forking.by_main_thread = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        note_process()
        if forking.by_main_thread:
            die_with_parent(forking.parent)
        else:  # the forking thread may end long before its process does
            watch_lifeline(lifeline, whole_group=False)

    os.register_at_fork(before=before, after_in_child=in_child)


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Inside, Python collects no cycles: in a process that holds torch, one collection takes a third of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def disk_read_bytes() -> int:
    """What this process has had read from disks so far, read-ahead too; 0 where the system does not tell."""
    return _read("read_bytes")


def file_read_bytes() -> int:
    """What this process has read so far, from memory or disks, mapped files aside; 0 where the system does not tell."""
    return _read("rchar")


def _read(name: str) -> int:
    if not LINUX:
        return 0
    try:
        lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def main() -> None:
    parent, file, *command = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    # A handler, as what is ignored would be ignored by the command too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    began = time.monotonic()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _TICK_SECONDS)
        if ready and not os.read(0, 4096):
            break
    if child.returncode is not None:
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps({"code": child.returncode, "seconds": time.monotonic() - began}))
        draft.replace(file)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
