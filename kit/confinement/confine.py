"""confine: a process that runs a user's code for kit's own ends, kept from everything that would outlast it.

Three layers, as many as the system has:

1. A private view of the file system (`private_files`): files can be written, and only this process sees it. Linux, for
   root or with user namespaces.
2. Landlock: writes elsewhere are refused, also to C code. Linux from 5.13.
3. Stand-ins in Python, always: for processes and connections, and for files where there is no private view (`mirror`).

An audit hook hears of what was tried and refuses what got past the stand-ins. `Refusals.notes` say what a job was kept
from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.confinement import private_files
from kit.confinement.mirror import WRITES, Mirror
from kit.confinement.private_files import PrivateFiles
from kit.confinement.stand_ins import Refusals, RefusedError, hook_asks, no_connections, no_processes
from kit.json_text import write_whole
from kit.machine.processes import LONGEST_SOCKET_FOLDER, NOTE, scratch_folder

_WAIT_SECONDS, _TICK_SECONDS = 20.0, 0.002
_LEADER = "leader"


@dataclass
class Confinement:
    """The layers that this process is confined by."""

    scratch: Path
    writable: tuple[Path, ...]
    """Folders that are written to as they are."""
    private: PrivateFiles | None
    landlocked: bool
    reads_once: bool = False
    """Whether nothing is read any more once the hooks run."""
    why_not_private: str = ""


_confinement: Confinement | None = None
_refusals: Refusals | None = None
_refuses_processes: Callable[[], bool] = bool
_mirror: Mirror | None = None
_hooked = False


def confine_process(
    scratch: Path, writable: Sequence[Path], *, may_start_programs: bool, rank: int = 0, reads_once: bool = False
) -> Confinement:
    """Keep this process, and all it starts, from changing any file, for good; to be called before it has threads.

    Args:
        scratch: A new folder of the job's, which ranks of one job have in common.
        writable: Folders that the job itself writes to.
        may_start_programs: Whether it may start others.
        rank: Rank 0 makes what the others then take.
        reads_once: Whether nothing is read any more once the hooks run, see `hooks_begin`.
    """
    global _confinement
    if _confinement is not None:
        return _confinement
    scratch.mkdir(exist_ok=True)
    private, why = None, ""
    try:
        if rank == 0:
            memory = scratch / "memory"
            memory.mkdir(exist_ok=True)
            private = private_files.enter(memory, [*writable, scratch])
        else:
            private = _follow(scratch)
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    if rank == 0:
        lines = [] if private is None else [str(os.getpid()), *map(str, private.covered)]
        write_whole(scratch / _LEADER, "\n".join(lines) or "none")
    landlocked, has_sockets = False, True
    if private is None:
        place = scratch / "temporary"
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
        has_sockets = len(os.fsencode(place)) <= LONGEST_SOCKET_FOLDER  # for those of loader processes
    if has_sockets or not may_start_programs:
        covered = private.covered if private is not None else []
        with contextlib.suppress(OSError):
            landlocked = private_files.write_only_beneath([*covered, *writable, scratch], may_start_programs)
    _confinement = Confinement(scratch, tuple(writable), private, landlocked, reads_once, why)
    sys.dont_write_bytecode = True
    return _confinement


def _follow(scratch: Path) -> PrivateFiles:
    """The view of rank 0, once it has one.

    Raises:
        OSError, ValueError: when it has none.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (scratch / _LEADER).exists() and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS)
    leader, *covered = (scratch / _LEADER).read_text().splitlines()
    private_files.enter_that_of(int(leader))
    return PrivateFiles([Path(folder) for folder in covered])


def hooks_begin() -> None:
    """Say that only hooks run from here on: where all data was read before, C code can connect to nobody either."""
    if _confinement is not None and _confinement.reads_once:
        with contextlib.suppress(OSError):
            private_files.connect_nowhere()


@contextlib.contextmanager
def confined(
    job: str, refuses_processes: Callable[[], bool] = hook_asks, refuses_connections: Callable[[], bool] = hook_asks
) -> Iterator[Refusals]:
    """Inside, this process changes no file, starts no process and connects to nobody, as far as it can be kept from it.

    In a process that `confine_process` holds, the system sees to the files; elsewhere Python's functions do.

    Args:
        job: What the notes call it, such as "the prediction".
        refuses_processes: Whether a process that is asked for now is not started.
        refuses_connections: Whether a connection that is asked for now is not made.
    """
    global _refusals, _refuses_processes, _mirror, _hooked
    refusals = Refusals(job)
    if not _hooked:  # for good, as Python has it; it does nothing outside
        _hooked = True
        sys.addaudithook(_audit)
    with contextlib.ExitStack() as undo:
        if _confinement is None or _confinement.private is None:
            _mirror = undo.enter_context(_mirrored(refusals))
        undo.enter_context(no_processes(refusals, refuses_processes))
        undo.enter_context(no_connections(refusals, refuses_connections))
        try:
            _refusals, _refuses_processes = refusals, refuses_processes
            yield refusals
        finally:
            _refusals = _mirror = None
        if _confinement is not None and _confinement.private is not None:
            for doing, path in _confinement.private.changed():  # also by C code, of which no audit hook hears
                is_note = path.parent == scratch_folder() and path.name.startswith(NOTE)  # of kit's own processes
                if not is_note and not any(part.startswith((".", "__", "torchinductor")) for part in path.parts):
                    refusals.found(doing, path)


@contextlib.contextmanager
def _mirrored(refusals: Refusals) -> Iterator[Mirror]:
    if _confinement is None:
        folder, writable = Path(tempfile.mkdtemp(prefix="kit-scratch-")), []
    else:
        folder, writable = _confinement.scratch / "mirror", [*_confinement.writable, _confinement.scratch]
        folder.mkdir(exist_ok=True)
    mirror = Mirror(folder, writable, refusals)
    try:
        with mirror.in_place():
            yield mirror
    finally:
        if _confinement is None:
            shutil.rmtree(folder, ignore_errors=True)


# -- the audit hook


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _refusals is not None:
        audited = _AUDITED.get(event)
        if audited is not None:
            audited(_refusals, arguments)


def _changes(doing: str, place: int = 0, descriptor: int | None = None) -> Callable[[Refusals, tuple[Any, ...]], None]:
    def audited(refusals: Refusals, arguments: tuple[Any, ...]) -> None:
        path = arguments[place]
        if not isinstance(path, int):
            beside = arguments[descriptor] if descriptor is not None else -1
            _changed(refusals, doing, path, beside if isinstance(beside, int) else -1)

    return audited


def _changed(refusals: Refusals, doing: str, path: Any, beside: int = -1) -> None:
    """A file is about to be changed: fine where the system keeps it private, else only where the job may."""
    text = os.fsdecode(path)
    if not text.startswith("/"):
        text = f"{_folder_of(beside)}/{text}"
    with _mirror.as_it_is() if _mirror is not None else contextlib.nullcontext():
        text = os.path.realpath(text)
    if text.startswith(("/dev/", "/proc/")):
        return
    if _mirror is None:
        writable = _confinement.writable if _confinement is not None else ()
        if not any(text == str(folder) or text.startswith(f"{folder}/") for folder in writable):
            refusals.tried(doing, text)
    elif not _mirror.is_writable(text):
        refusals.tried(doing, text)
        raise RefusedError(13, f"{refusals.job} changes no file", text)


def _folder_of(descriptor: int) -> str:
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{descriptor}")
    return os.getcwd()


def _starts(place: int) -> Callable[[Refusals, tuple[Any, ...]], None]:
    def audited(refusals: Refusals, arguments: tuple[Any, ...]) -> None:
        if _refuses_processes():
            what = os.fsdecode(arguments[place]) if arguments else "a fork of itself"
            refusals.tried("starting", what)
            raise RefusedError(13, f"{refusals.job} starts no process", what)

    return audited


_AUDITED: dict[str, Callable[[Refusals, tuple[Any, ...]], None]] = {
    "open": lambda refusals, arguments: (
        _changed(refusals, "writing", arguments[0])
        if arguments[2] & WRITES and isinstance(arguments[0], str | bytes | os.PathLike)
        else None
    ),
    "os.remove": _changes("deleting", 0, 1),
    "os.rmdir": _changes("deleting", 0, 1),
    "os.mkdir": _changes("making", 0, 2),
    "os.rename": _changes("writing", 1, 3),
    "os.truncate": _changes("changing"),
    "os.chmod": _changes("changing", 0, 2),
    "os.chown": _changes("changing", 0, 3),
    "os.utime": _changes("changing", 0, 3),
    "os.link": _changes("writing", 1, 3),
    "os.symlink": _changes("writing", 1, 2),
    "sqlite3.connect": lambda refusals, arguments: (
        None if arguments[0] == ":memory:" else _changed(refusals, "writing", arguments[0])
    ),
    "os.fork": _starts(0),
    "os.forkpty": _starts(0),
    "os.exec": _starts(0),
    "os.posix_spawn": _starts(0),
}
