"""Faults given as data: a tiny model that goes wrong at a step of a rank."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping

import torch

from kit.testing import Batch, TinyModule

_FOREVER_SECONDS = 3600.0


class FaultyModule(TinyModule):
    """A TinyModule that goes wrong where told: `faults` maps (rank, step) to the name of a fault.

    Steps count from 1, as in events. Faults: raise, nan, hang, kill, segfault, exit0, oom (host memory), device_oom
    (the error a GPU raises), noisy (a hundred megabytes on stdout), collective (waits for a message that the next rank
    never sends), disk_full (nothing can be written any more).
    """

    def __init__(self, faults: Mapping[tuple[int, int], str], seconds: float = 0.0) -> None:
        super().__init__(seconds=seconds)
        unknown = set(faults.values()) - FAULTS.keys() - {"nan"}
        if unknown:
            raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are nan, {', '.join(FAULTS)}")
        self.faults = dict(faults)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        fault = self.faults.get((self.global_rank, self.global_step + 1))
        loss = super().training_step(batch, batch_idx)
        if fault == "nan":
            return loss * torch.nan
        if fault is not None:
            FAULTS[fault]()
        return loss


def _raise() -> None:
    raise ValueError("a scripted fault")


def _hang() -> None:
    time.sleep(_FOREVER_SECONDS)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault() -> None:
    ctypes.string_at(0)


def _exit0() -> None:
    os._exit(0)


def _oom() -> None:
    torch.empty(1 << 45)


def _device_oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _noisy() -> None:
    line = "x" * 999 + "\n"
    for _ in range(100_000):
        sys.stdout.write(line)


def _collective() -> None:
    world_size = torch.distributed.get_world_size()
    torch.distributed.recv(torch.zeros(1), src=(torch.distributed.get_rank() + 1) % world_size)


def _disk_full() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "hang": _hang,
    "kill": _kill,
    "segfault": _segfault,
    "exit0": _exit0,
    "oom": _oom,
    "device_oom": _device_oom,
    "noisy": _noisy,
    "collective": _collective,
    "disk_full": _disk_full,
}
