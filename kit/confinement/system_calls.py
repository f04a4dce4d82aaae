"""The few system calls of Linux that Python has no function for, each raising OSError as its own functions do."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

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


def unshare(flags: int) -> None:
    """Take this process out of the namespaces named."""
    _checked(_library().unshare(flags), "unshare")


def join(descriptor: int, kind: int) -> None:
    """Enter the namespace behind a descriptor of `/proc/PID/ns`."""
    _checked(_library().setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    _checked(_library().mount(*words, ctypes.c_ulong(flags), options.encode() or None), target)


def control(option: int, value: int) -> None:
    """prctl of one value."""
    _checked(_library().prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def call(number: int, *arguments: Any) -> int:
    """A system call by its number."""
    return _checked(_library().syscall(ctypes.c_long(number), *arguments), f"system call {number}")
