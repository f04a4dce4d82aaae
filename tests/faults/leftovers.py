"""Processes, threads and locks of this process, without those that last as long as it does."""

import os
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
from trial_fixtures import is_alive

from kit.trial import client

LOCKS = Path("/proc/locks")
LASTING = ("zarr_io", "fsspecIO", "asyncio_", "IPythonHistorySavingThread")
"""Threads that a library keeps once it has been used; zarr's loop hands its files to those of asyncio."""


def children_here():
    """Living processes below this one, but for supervisors and for helpers of Python's own."""
    lasting = {supervisor.identity["pid"] for supervisor in client._supervisors.values()}
    lasting |= {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return {child.pid for child in psutil.Process().children(recursive=True) if is_alive(child)} - lasting


def threads_beyond(before):
    new = set(threading.enumerate()) - before
    return [thread.name for thread in new if thread.is_alive() and not thread.name.startswith(LASTING)]


def locks_here():
    """Locks on files that this process holds, as the system counts them."""
    lines = LOCKS.read_text().splitlines() if LOCKS.exists() else []
    return {line.partition(":")[2] for line in lines if line.split()[4] == str(os.getpid())}
