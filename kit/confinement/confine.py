"""confine: a process that runs a user's code for kit's own ends, kept from everything that would outlast it.

Three layers, as many as the system has:

1. A private view of the file system (`private_files`): what is written is written, for this process alone. Linux, for
   root or with user namespaces.
2. Landlock: what would be written elsewhere is refused, also to C code. Linux from 5.13.
3. Stand-ins in Python, always: for processes and connections, and for files where there is no private view (`mirror`).

An audit hook hears of what was tried and refuses what reached it past the stand-ins. What a job was kept from is in
`Kept.notes`.
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
from kit.confinement import private_files as landlock
from kit.confinement.mirror import WRITES, Mirror
from kit.confinement.private_files import PrivateFiles
from kit.confinement.stand_ins import Refusals, RefusedError, hook_asks, no_connections, no_processes
from kit.machine.processes import LONGEST_SOCKET_FOLDER

_WAIT_SECONDS, _TICK_SECONDS = 20.0, 0.002
_LEADER = "leader"


@dataclass
class Confinement:
    """What holds this process."""

    scratch: Path
    free: tuple[Path, ...]
    """Folders that are written to as they are."""
    private: PrivateFiles | None
    landlocked: bool
    reads_once: bool = False
    """Whether nothing is read any more once the hooks run."""
    why_not_private: str = ""

    @property
    def mechanism(self) -> str:
        """What keeps files as they are, in words."""
        if self.private is not None:
            return "a private view of the file system"
        return "Landlock and Python's own functions" if self.landlocked else "Python's own functions"


_held: Confinement | None = None
_kept: Refusals | None = None
_refuses_processes: Callable[[], bool] = bool
_mirror: Mirror | None = None
_hooked = False


def confine_process(
    scratch: Path, free: Sequence[Path], *, may_start_programs: bool, rank: int = 0, reads_once: bool = False
) -> Confinement:
    """Keep this process, and all it starts, from changing any file, for good; to be called before it has threads.

    Args:
        scratch: A new folder of the job's, which ranks of one job have in common.
        free: Folders that the job itself writes to.
        may_start_programs: Whether it may start others.
        rank: Rank 0 makes what the others then take.
        reads_once: Whether nothing is read any more once the hooks run, see `hooks_begin`.
    """
    global _held
    if _held is not None:
        return _held
    scratch.mkdir(exist_ok=True)
    private, why = None, ""
    try:
        private = _enter(scratch, free) if rank == 0 else _follow(scratch)
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    if rank == 0:
        _say(scratch, private)
    landlocked = False
    if private is not None or _keep_temporary_files(_mirror_folder(scratch)) or not may_start_programs:
        covered = private.covered if private is not None else []
        with contextlib.suppress(OSError):
            landlocked = landlock.write_only_beneath([*covered, *free, scratch], may_start_programs)
    _held = Confinement(scratch, tuple(free), private, landlocked, reads_once, why)
    sys.dont_write_bytecode = True
    return _held


def _enter(scratch: Path, free: Sequence[Path]) -> PrivateFiles:
    memory = scratch / "memory"
    memory.mkdir(exist_ok=True)
    return private_files.enter(memory, [*free, scratch])


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


def _say(scratch: Path, private: PrivateFiles | None) -> None:
    lines = [] if private is None else [str(os.getpid()), *map(str, private.covered)]
    draft = scratch / f"{_LEADER}.tmp"
    draft.write_text("\n".join(lines) or "none")
    draft.rename(scratch / _LEADER)


def hooks_begin() -> None:
    """What is asked for from here on, hooks ask for: where all data was read, C code can connect to nobody either."""
    if _held is not None and _held.reads_once:
        with contextlib.suppress(OSError):
            landlock.connect_nowhere()


def _keep_temporary_files(folder: Path) -> bool:
    """Keep them beside the mirror; False where its path is too long for the sockets of loader processes."""
    place = folder.with_name("temporary")
    place.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)
    return len(os.fsencode(place)) <= LONGEST_SOCKET_FOLDER


def _mirror_folder(scratch: Path) -> Path:
    folder = scratch / "mirror"
    folder.mkdir(exist_ok=True)
    return folder


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
    global _kept, _refuses_processes, _mirror
    kept = Refusals(job)
    _install_hook()
    with contextlib.ExitStack() as undo:
        if _held is None or _held.private is None:
            _mirror = undo.enter_context(_mirrored(kept))
        undo.enter_context(no_processes(kept, refuses_processes))
        undo.enter_context(no_connections(kept, refuses_connections))
        undo.callback(_forget)
        _kept, _refuses_processes = kept, refuses_processes
        yield kept
        if _held is not None and _held.private is not None:
            _say_what_was_found(kept, _held.private)


def _forget() -> None:
    global _kept, _mirror
    _kept = _mirror = None


@contextlib.contextmanager
def _mirrored(kept: Refusals) -> Iterator[Mirror]:
    if _held is not None:
        mirror = Mirror(_mirror_folder(_held.scratch), [*_held.free, _held.scratch], kept)
        with mirror.in_place():
            yield mirror
        return
    folder = tempfile.mkdtemp(prefix="kit-scratch-")
    mirror = Mirror(Path(folder), (), kept)
    try:
        with mirror.in_place():
            yield mirror
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say_what_was_found(kept: Refusals, private: PrivateFiles) -> None:
    """What C code wrote or deleted, which no audit hook hears of."""
    for doing, path in private.changed():
        if str(path) not in kept.things and not any(
            part.startswith((".", "__", "torchinductor")) for part in path.parts
        ):
            kept.found(doing, path)


# -- the audit hook


def _install_hook() -> None:
    """For good, as Python has it; it does nothing outside `confined`."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _kept is not None:
        heard = _HEARD.get(event)
        if heard is not None:
            heard(_kept, arguments)


def _opened(kept: Refusals, arguments: tuple[Any, ...]) -> None:
    path, _, flags = arguments
    if flags & WRITES and isinstance(path, str | bytes | os.PathLike):
        _changed(kept, "writing", path)


def _changes(doing: str, place: int = 0, descriptor: int | None = None) -> Callable[[Refusals, tuple[Any, ...]], None]:
    def heard(kept: Refusals, arguments: tuple[Any, ...]) -> None:
        path = arguments[place]
        if not isinstance(path, int):
            beside = arguments[descriptor] if descriptor is not None else -1
            _changed(kept, doing, path, beside if isinstance(beside, int) else -1)

    return heard


def _changed(kept: Refusals, doing: str, path: Any, beside: int = -1) -> None:
    """A file is about to be changed: fine where the system keeps it private, else only where the job may."""
    text = os.fsdecode(path)
    if not text.startswith("/"):
        text = f"{_folder_of(beside)}/{text}"
    with _mirror.as_it_is() if _mirror is not None else contextlib.nullcontext():
        text = os.path.realpath(text)
    if text.startswith(("/dev/", "/proc/")):
        return
    if _mirror is None:
        free = _held.free if _held is not None else ()
        if not any(text == str(folder) or text.startswith(f"{folder}/") for folder in free):
            kept.tried(doing, text)
    elif not _mirror.is_free(text):
        kept.tried(doing, text)
        raise RefusedError(13, f"{kept.job} changes no file", text)


def _folder_of(descriptor: int) -> str:
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{descriptor}")
    return os.getcwd()


def _starts(place: int) -> Callable[[Refusals, tuple[Any, ...]], None]:
    def heard(kept: Refusals, arguments: tuple[Any, ...]) -> None:
        if _refuses_processes():
            what = os.fsdecode(arguments[place]) if arguments else "a fork of itself"
            kept.tried("starting", what)
            raise RefusedError(13, f"{kept.job} starts no process", what)

    return heard


_HEARD: dict[str, Callable[[Refusals, tuple[Any, ...]], None]] = {
    "open": _opened,
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
    "sqlite3.connect": lambda kept, arguments: (
        None if arguments[0] == ":memory:" else _changed(kept, "writing", arguments[0])
    ),
    "os.fork": _starts(0),
    "os.forkpty": _starts(0),
    "os.exec": _starts(0),
    "os.posix_spawn": _starts(0),
}
