"""private_files: a view of the file system in which this process reads everything and changes nothing for anybody.

Every folder of the machine gets an overlay whose upper layer is memory that goes with the process: what is written,
moved or deleted is so for this process and for those it starts, whatever language they are written in, and for nobody
else. It takes a mount namespace, which Linux gives to root and, where its administrator allows it, inside a user
namespace to everybody.

What is refused: a process with several threads, which cannot enter a user namespace.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kit.confinement.system_calls import (
    BIND,
    NEW_FILE_SYSTEM,
    NEW_USER,
    PRIVATE,
    RECURSIVE,
    SET_DUMPABLE,
    control,
    join,
    mount,
    unshare,
)

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
    kept = [(folder, os.open(folder, os.O_PATH | os.O_CLOEXEC)) for folder in _outermost(shared)]
    memory = f"size={_most_bytes()},mode=700"
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    mount("tmpfs", str(scratch), "tmpfs", options=memory)
    upper = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
    made = PrivateFiles()
    own = _IN_USER_NAMESPACE if in_user_namespace else "index=off"
    mounted = [path for path in _mounted() if path != str(scratch)]
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
        join(descriptor, kind)
        os.close(descriptor)
    os.chdir(here)
    control(SET_DUMPABLE, 1)


def _leave_the_machines_mounts() -> bool:
    """Whether that took a user namespace."""
    try:
        unshare(NEW_FILE_SYSTEM)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        unshare(NEW_USER | NEW_FILE_SYSTEM)
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
    if own == _IN_USER_NAMESPACE:
        for place in {Path.cwd(), Path.home()}:
            _own_the_way(upper, folder, place)
    options = f"lowerdir={_escaped(folder)},upperdir={below}/upper{number},workdir={below}/work{number},{own}"
    mount("overlay", str(folder), "overlay", options=options)
    made.covered.append(folder)
    made.uppers.append((folder, upper))


def _own_the_way(upper: int, folder: Path, place: Path) -> None:
    """Have this user's own folders in the layer down to `place`: those of others cannot be copied up."""
    if folder in place.parents:
        here = f"/proc/self/fd/{upper}"
        for name in place.relative_to(folder).parts:
            here = f"{here}/{name}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(here)


def _escaped(path: Path) -> str:
    return "".join(f"\\{letter}" if letter in "\\:," else letter for letter in str(path))


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


def _mounted() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].replace("\\040", " ") for line in lines]


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Those that exist and do not lie in another of them."""
    there = sorted({folder.resolve() for folder in folders if folder.is_dir()})
    return [folder for folder in there if not any(other in folder.parents for other in there)]


def _most_bytes() -> int:
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1 << 24, min(_MOST_BYTES, free_bytes // 4))
