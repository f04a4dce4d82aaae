"""How many cores and how much memory this process may use, which in a container is less than the machine has.

Cores are the smaller of the CPU affinity and the cgroup's quota, rounded down to whole cores and never below one.
Memory is the smaller of the cgroup's limit and what is installed; available memory is what can be had without swapping
or being killed, page cache counted as free. Both cgroup versions are read, from the process's own group up to the root,
because the tightest of them counts. Where there is no cgroup (another system), the machine's own numbers stand.

Paths start at `root`, so that a folder can stand in for the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number about this large."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this process may use."""

    cores: int
    cores_installed: int
    memory_bytes: int
    memory_available_bytes: int
    memory_installed_bytes: int


def share(root: Path = Path("/")) -> Share:
    """Cores and memory this process may use now."""
    import psutil

    memory = psutil.virtual_memory()
    limit, available = memory_limit(root, memory.total, memory.available)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    cores = allowed if quota is None else min(allowed, max(1, int(quota)))
    return Share(cores, os.cpu_count() or cores, limit, available, memory.total)


def core_quota(root: Path) -> float | None:
    """Cores' worth of time the cgroup grants, such as 1.5; None when it sets no limit."""
    quotas = []
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path, installed_bytes: int, available_bytes: int) -> tuple[int, int]:
    """(limit, available) bytes: the tightest of the machine's own and every cgroup's."""
    limit, available = installed_bytes, available_bytes
    for folder in _folders(root, "memory"):
        bound = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if bound is None or bound >= _UNLIMITED_BYTES:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        limit = min(limit, bound)
        available = min(available, max(0, bound - used + _cache_bytes(folder)))
    return limit, available


def _cache_bytes(folder: Path) -> int:
    """Page cache that the kernel gives back before it refuses memory."""
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    text = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
    return int(text) if text.strip().isdigit() else 0


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group for a controller, in both versions: innermost first, the mount itself last."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = mount / path.strip().lstrip("/")
        # A container may see the host's path here and only its own group below the mount: missing folders are skipped.
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount) and folder.is_dir())


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
