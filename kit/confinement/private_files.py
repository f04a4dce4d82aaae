"""private_files: a view of the file system in which this process reads everything and changes nothing for anybody else.

Every folder of the machine gets an overlay whose upper layer is memory that goes with the process. What is written,
moved or deleted is so for this process and for those it starts, whatever language they are written in, and for nobody
else. It takes a mount namespace, which Linux gives to root and, where its administrator allows it, inside a user
namespace to everybody; a process with several threads cannot enter one.

Landlock (Linux 5.13) is a set of rights that a process takes from itself, and from all that it starts, for good. It
needs no privileges. A right that is handled and not granted is refused with EACCES whoever asks, C code and programs
started later included. It holds for the thread that asks and for those it starts afterwards, so it is set up before
there are any others.

Below are the few system calls of Linux that Python has no function for, each raising OSError as its own functions do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_AS_IT_IS = {"/proc", "/sys", "/dev"}
_SHARED_MEMORY = Path("/dev/shm")
_IN_USER_NAMESPACE = "userxattr"
_MOST_BYTES = 1 << 30
"""Of what may be written in private; beyond it the disk is full."""


@dataclass
class PrivateFiles:
    """The view that this process has."""

    covered: list[Path] = field(default_factory=list)
    """Folders under an overlay: all that is written beneath them is private."""
    uppers: list[tuple[Path, int]] = field(default_factory=list)
    """Each covered folder, with a descriptor of what was written beneath it."""

    def changed(self) -> Iterator[tuple[str, Path]]:
        """What was done to which file since, as a verb and a path."""
        for folder, upper in self.uppers:
            for place, _, files, descriptor in os.fwalk(".", dir_fd=upper):
                here = folder / place
                for name in files:
                    mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    deleted = stat.S_ISCHR(mode.st_mode) and mode.st_rdev == 0
                    yield "deleting" if deleted else "writing", here / name


def enter(scratch: Path, shared: Sequence[Path]) -> PrivateFiles:
    """Take such a view, for good.

    Args:
        scratch: An empty folder of the caller's, for the memory that holds what is written.
        shared: Folders that stay what they are for everybody.

    Raises:
        OSError: where the system gives no such view; nothing has changed then, but for namespaces nobody sees.
    """
    in_user_namespace = _leave_the_machines_mounts()
    there = {folder.resolve() for folder in shared if folder.is_dir()}
    outermost = sorted(folder for folder in there if not there.intersection(folder.parents))
    kept = [(folder, os.open(folder, os.O_PATH | os.O_CLOEXEC)) for folder in outermost]
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most_bytes = max(1 << 24, min(_MOST_BYTES, free_bytes // 4))
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    mount("tmpfs", str(scratch), "tmpfs", options=f"size={most_bytes},mode=700")
    upper = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
    made = PrivateFiles()
    own = _IN_USER_NAMESPACE if in_user_namespace else "index=off"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = (line.split()[4].replace("\\040", " ") for line in lines)
    mounted = [place for place in places if place != str(scratch)]
    for folder in list(_folders_to_cover(Path("/"), mounted)):
        _cover(made, folder, upper, own)
    if _SHARED_MEMORY.is_dir():
        found = os.statvfs(_SHARED_MEMORY)
        mount("tmpfs", str(_SHARED_MEMORY), "tmpfs", options=f"size={found.f_blocks * found.f_frsize},mode=1777")
        made.covered.append(_SHARED_MEMORY)
    for folder, descriptor in kept:
        mount(f"/proc/self/fd/{descriptor}", str(folder), flags=BIND | RECURSIVE)
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.chdir(Path.cwd())  # through the overlay
    return made


def enter_that_of(process: int) -> None:
    """Take the view that another process of this user has taken.

    Raises:
        OSError: when it cannot be entered.
    """
    folder = Path(f"/proc/{process}/ns")
    mine = Path("/proc/self/ns")
    here = Path.cwd()
    kinds = [("user", NEW_USER), ("mnt", NEW_FILE_SYSTEM)]
    opened = [
        (os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC), kind)
        for name, kind in kinds
        if os.stat(folder / name).st_ino != os.stat(mine / name).st_ino
    ]
    for descriptor, kind in opened:
        _checked(_library().setns(descriptor, kind), "setns")
        os.close(descriptor)
    os.chdir(here)
    control(SET_DUMPABLE, 1)


def _leave_the_machines_mounts() -> bool:
    """Whether that took a user namespace."""
    try:
        _checked(_library().unshare(NEW_FILE_SYSTEM), "unshare")
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        _checked(_library().unshare(NEW_USER | NEW_FILE_SYSTEM), "unshare")
        control(SET_DUMPABLE, 1)  # else /proc/self is root's; its peers enter by it too
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        return True
    return False


def _cover(made: PrivateFiles, folder: Path, memory: int, own: str) -> None:
    number = len(made.uppers)
    for part in ("upper", "work"):
        os.mkdir(f"{part}{number}", 0o755, dir_fd=memory)
    found = folder.stat()
    below = f"/proc/self/fd/{memory}"
    upper = os.open(f"upper{number}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=memory)
    with contextlib.suppress(OSError):
        os.fchmod(upper, stat.S_IMODE(found.st_mode))
        os.fchown(upper, found.st_uid, found.st_gid)
    if own == _IN_USER_NAMESPACE:  # folders of others cannot be copied up: make this user's own down to these places
        for place in {Path.cwd(), Path.home()}:
            here = f"/proc/self/fd/{upper}"
            for name in place.relative_to(folder).parts if folder in place.parents else ():
                here = f"{here}/{name}"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(here)
    escaped = re.sub(r"([\\:,])", r"\\\1", str(folder))
    options = f"lowerdir={escaped},upperdir={below}/upper{number},workdir={below}/work{number},{own}"
    mount("overlay", str(folder), "overlay", options=options)
    made.covered.append(folder)
    made.uppers.append((folder, upper))


def _folders_to_cover(folder: Path, mounted: Sequence[str]) -> Iterator[Path]:
    """The folders that have no other mount beneath them, and those mounts themselves; /proc, /sys and /dev stay."""
    name = str(folder)
    if name in _AS_IT_IS or folder.is_symlink():
        return
    if any(item.startswith(name.rstrip("/") + "/") for item in mounted):
        for child in sorted(folder.iterdir()):
            if child.is_dir():
                yield from _folders_to_cover(child, mounted)
    elif os.access(folder, os.R_OK | os.X_OK):
        yield folder


_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_EXECUTE, _WRITE_FILE = 1, 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_CONNECT = 1 << 1
_ALWAYS_WRITABLE = "/dev"


class _Rules(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def version() -> int:
    """Of Landlock; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError):
        return call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return 0


def write_only_beneath(folders: Iterable[Path], may_start_programs: bool) -> bool:
    """From here on nothing else can be created, changed or deleted; False where the system cannot do that.

    Args:
        folders: Where everything stays allowed; devices are too.
        may_start_programs: Whether a program can be started.
    """
    known = version()
    if not known:
        return False
    file_rights = _WRITE_FILE | (_TRUNCATE if known >= 3 else 0)
    rights = file_rights | _REMOVE_AND_MAKE | (_MOVE if known >= 2 else 0)
    handled = rights if may_start_programs else rights | _EXECUTE
    _restrict(_Rules(handled, 0), [*folders, *_devices()], rights, file_rights)
    return True


def connect_nowhere() -> bool:
    """From here on this thread, and those it starts, can open no TCP connection; False where that cannot be done."""
    if version() < 4:
        return False
    _restrict(_Rules(0, _CONNECT))
    return True


def _restrict(rules: _Rules, paths: Iterable[Path] = (), rights: int = 0, file_rights: int = 0) -> None:
    """Take the rights of `rules` from this thread; beneath the folders, and of the files, those given stay."""
    size = ctypes.sizeof(rules) if rules.network else 8  # the first version knows files only
    handle = call(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                allowed = rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else file_rights
                beneath = ctypes.byref(_Beneath(allowed, descriptor))
                call(_ADD, ctypes.c_int(handle), ctypes.c_int(1), beneath, ctypes.c_uint32(0))
            finally:
                os.close(descriptor)
        control(SET_NO_NEW_PRIVILEGES, 1)
        call(_RESTRICT, ctypes.c_int(handle), ctypes.c_uint32(0))
    finally:
        os.close(handle)


def _devices() -> list[Path]:
    """Everything in /dev but disks; /dev/shm is how loader processes hand over their batches."""
    found = []
    for path in Path(_ALWAYS_WRITABLE).iterdir():
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
            if stat.S_ISCHR(mode) or path.name in ("pts", "dri", "nvidia-caps", "shm"):
                found.append(path)
    return found


NEW_FILE_SYSTEM, NEW_USER = 0x0002_0000, 0x1000_0000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x4_0000
SET_DUMPABLE, SET_NO_NEW_PRIVILEGES = 4, 38


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    _checked(_library().mount(*words, ctypes.c_ulong(flags), options.encode() or None), target)


def control(option: int, value: int) -> None:
    """prctl of one value."""
    _checked(_library().prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def call(number: int, *arguments: Any) -> int:
    """A system call by its number."""
    return _checked(_library().syscall(ctypes.c_long(number), *arguments), f"system call {number}")
