"""Scratch: a folder per trial for what its processes make to talk to each other, and how all of it is removed.

Ranks leave by `os._exit` or are killed as a group, and what would tidy up after them with them, so nothing that Python
does at exit can be relied on. Whatever a trial makes outside its run directory is therefore found by one name: sockets
and spilled queries lie in its scratch folder, its semaphores bear the folder's last letters, and the processes that
share tensors are noted there. The supervisor removes all of it when the last process of the group is gone; where the
supervisor was killed, the next kernel that loses or starts one does. A folder's name holds its owner (this system,
process id, start time), so it has one at every moment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from kit.json_text import read_json
from kit.machine.processes import LONGEST_SOCKET_FOLDER, NOTE, alive, identify, machine

_TRIAL = "kit-trial-"
_SHARED_MEMORY = Path("/dev/shm")
_OWNED = re.compile(r"kit-[a-z]+-(?P<owner>(?P<system>[0-9a-f]+)-(?P<pid>[0-9a-f]+)-[0-9a-f]+)-\w{8}")
_TICK_SECONDS = 0.005


def make(prefix: str = _TRIAL, folder: str | None = None) -> Path:
    """A new folder among temporary files (by default this process's) that `sweep` removes once this process is gone."""
    name = f"{prefix}{_owner(os.getpid())}-"
    parent = Path(folder or tempfile.gettempdir())
    if prefix == _TRIAL and len(os.fsencode(parent / name)) + 8 > LONGEST_SOCKET_FOLDER:
        parent = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=name, dir=parent))


def take(folder: Path) -> None:
    """Have this process, and all that it starts, put sockets and semaphores where `remove` finds them."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings.update(tempdir=str(folder), semprefix=f"/{_semaphores(folder)}")


def remove(folder: Path) -> None:
    """Remove a scratch folder and what belongs to it; the folder last, so that half of it is found again."""
    pids = [file.name.removeprefix(NOTE) for file in folder.glob(f"{NOTE}*")]
    for pattern in (f"sem.{_semaphores(folder)}-*", *(f"torch_{pid}_*" for pid in pids)):
        for file in _SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):
                file.unlink()
    remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder of temporary files."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a process that was just killed had still been writing
        time.sleep(_TICK_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of this user whose owners are gone; those of other machines and containers are not judged."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in [entry for entry in entries if entry.name.startswith("kit-")]:
                if _is_lost(entry):
                    remove(Path(entry.path))


def _is_lost(entry: os.DirEntry[str]) -> bool:
    """Whether its owner is gone, or the supervisor of a run that it would have removed at the end."""
    named = _OWNED.fullmatch(entry.name)
    if named is None or named["system"] != _system():
        return False
    with contextlib.suppress(OSError, ValueError):
        if entry.is_symlink() or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        if _owner(int(named["pid"], 16)) != named["owner"]:
            return True
        found = read_json(Path(entry.path, "environment.json").read_bytes())
        return found.get("removed") == "at end" and "supervisor" in found and not alive(found["supervisor"])
    return False


def _owner(pid: int) -> str:
    """Names a process of this system as long as it lives."""
    return f"{_system()}-{pid:x}-{int(identify(pid)['started'] or 0):x}"


@functools.cache
def _system() -> str:
    """Where process ids mean the same as here: this boot, host and container."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        namespace = 0
    return hashlib.sha256(json.dumps([machine(), namespace]).encode()).hexdigest()[:6]


def _semaphores(folder: Path) -> str:
    return f"kit-{folder.name[-8:]}"
