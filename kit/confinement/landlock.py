"""landlock: rights that a Linux process takes from itself, and from all that it starts, for good.

Landlock (Linux 5.13) needs no privileges. What is handled and not granted is refused with EACCES whoever asks, C code
and programs started later included. It holds for the thread that asks and for those it starts afterwards, so it is
asked for before there are any others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from kit.confinement.system_calls import SET_NO_NEW_PRIVILEGES, call, control

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
    rules = _made(handled, 0)
    try:
        for path in (*folders, *_devices()):
            _grant(rules, path, rights, file_rights)
        _restrict(rules)
    finally:
        os.close(rules)
    return True


def connect_nowhere() -> bool:
    """From here on this thread, and those it starts, can open no TCP connection; False where that cannot be done."""
    if version() < 4:
        return False
    rules = _made(0, _CONNECT)
    try:
        _restrict(rules)
    finally:
        os.close(rules)
    return True


def _made(files: int, network: int) -> int:
    rules = _Rules(files, network)
    size = ctypes.sizeof(rules) if network else 8  # the first version knows files only
    return call(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))


def _grant(rules: int, path: Path, rights: int, file_rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else file_rights
        beneath = _Beneath(allowed, descriptor)
        call(_ADD, ctypes.c_int(rules), ctypes.c_int(1), ctypes.byref(beneath), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _restrict(rules: int) -> None:
    control(SET_NO_NEW_PRIVILEGES, 1)
    call(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))


def _devices() -> list[Path]:
    """Everything in /dev but disks; /dev/shm is how loader processes hand over their batches."""
    found = []
    for path in Path(_ALWAYS_WRITABLE).iterdir():
        with contextlib.suppress(OSError):
            mode = path.stat().st_mode
            if stat.S_ISCHR(mode) or path.name in ("pts", "dri", "nvidia-caps", "shm"):
                found.append(path)
    return found
