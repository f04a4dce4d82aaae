"""Shared memory that loader processes hand batches over in: enough of it, before any of them is started.

torch puts every batch of a loader process into /dev/shm, which a container may have 64 MiB of whatever the machine
has. Where it is full a process ends by a bus error, or waits, and what is then seen is a trainer without batches.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from kit.config import Loader
from kit.errors import ConfigError, Problem
from kit.units import format_bytes

FOLDER = Path("/dev/shm")
_PAGE_BYTES = 4096


def free_bytes() -> float:
    """What is left of it; no limit where there is no such folder."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return math.inf
    return found.f_bavail * found.f_frsize


def needed_bytes(settings: Loader, batch_bytes: int, ranks: int = 1) -> int:
    """What the batches that loader processes keep ready take, with the one that is trained on; two tensors each."""
    if not settings.num_workers:
        return 0
    held = settings.num_workers * settings.prefetch_factor + 1
    return ranks * held * (batch_bytes + 2 * _PAGE_BYTES)


def refuse_too_little(settings: Loader, batch_bytes: int, ranks: int = 1) -> None:
    """Raises: ConfigError: when /dev/shm is too small for the batches of `ranks` ranks, with the size it needs."""
    needed, free = needed_bytes(settings, batch_bytes, ranks), free_bytes()
    if needed > free:
        each = f" in each of {ranks} ranks" if ranks > 1 else ""
        batches = f"{settings.prefetch_factor} batches of {format_bytes(batch_bytes)}{each}"
        message = (
            f"{settings.num_workers} processes × {batches} need {format_bytes(needed)} of shared memory, and {FOLDER} "
            f"has {format_bytes(free)} free; give it more (docker run --shm-size={-(-needed // (1 << 20))}m), or take "
            "fewer loader.num_workers or loader.prefetch_factor; 0 processes need none"
        )
        raise ConfigError([Problem("loader.num_workers", message)])
