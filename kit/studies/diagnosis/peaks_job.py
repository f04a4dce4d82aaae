"""The job that measures what a device can do at most: a large matrix product and a large copy, best of many.

The best, not the mean: a peak is a bound, and everything else on the machine can only lower it. The share of the time
for which this process had to queue for a core is told: peaks of a busy machine are not kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kit.trial.context import Context

_REPEATS, _LEAST_SECONDS = 5, 0.3
_CPU_SIDE, _GPU_SIDE = 1024, 8192
_CPU_COPY_BYTES, _GPU_COPY_BYTES = 1 << 27, 1 << 30
_LEAST_COPY_BYTES = 1 << 22
_PATIENCE_SECONDS = 2.0


def peaks(context: Context) -> None:
    """Write one `peaks_measured` event."""
    device = torch.device("cuda", 0) if context.environment["accelerator"] == "gpu" else torch.device("cpu")
    side = _CPU_SIDE if device.type == "cpu" else _GPU_SIDE
    flops: dict[str, float] = {}
    began, queued = time.perf_counter(), _queued_seconds()
    for name in context.environment["peaks"]["dtypes"]:
        factor = torch.ones(side, side, device=device, dtype=getattr(torch, name))
        flops[name] = 2 * side**3 / _best_seconds(factor.matmul, torch.ones_like(factor))
    size = _CPU_COPY_BYTES
    if device.type == "cuda":
        size = max(_LEAST_COPY_BYTES, min(_GPU_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 8))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copied = 2 * size / _best_seconds(torch.empty_like(source).copy_, source)  # bytes read and written
    busy = (_queued_seconds() - queued) / max(1e-9, time.perf_counter() - began)
    nominal = {name: _nominal(device, getattr(torch, name)) for name in flops}
    context.writer.write(
        "peaks_measured", flops_per_second=flops, bytes_per_second=copied, nominal_flops_per_second=nominal,
        queued_fraction=busy,
    )  # fmt: skip


def _queued_seconds() -> float:
    """How long this thread has waited for a core; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _best_seconds(work: Callable[[torch.Tensor], object], argument: torch.Tensor) -> float:
    """Of several calls, the first left out: more where they are short, as one of them must find its core free."""

    def timed() -> float:
        began = time.perf_counter()
        work(argument)
        if argument.is_cuda:
            torch.cuda.synchronize(argument.device)
        return time.perf_counter() - began

    timed()
    began, spent, best, count = time.perf_counter(), 0.0, float("inf"), 0
    while spent < _PATIENCE_SECONDS and (count < _REPEATS or spent < _LEAST_SECONDS):
        best, count = min(best, timed()), count + 1
        spent = time.perf_counter() - began
    return best


def _nominal(device: torch.device, dtype: torch.dtype) -> float | None:
    """What the maker of a GPU states, as far as Lightning's table knows it."""
    if device.type != "cuda":
        return None
    from lightning.fabric.utilities.throughput import get_available_flops

    try:
        found = get_available_flops(device, dtype)
    except (RuntimeError, ValueError, TypeError):
        return None
    return None if found is None else float(found)
