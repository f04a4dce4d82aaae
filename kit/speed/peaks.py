"""device_peaks: the most FLOP/s and bytes/s that the devices of a trial reach, from the costs of their calls.

A large product in each number format and a large copy are calls like all others of the table of this machine
(`kit.speed.measure`): they are timed in a process of its own, once, and remembered there. The peak of a format is the
best product that the table knows. For a GPU the maker's figures stand beside it. Ranks that share a CPU are asked about
as one rank with all their threads. On a device that is nearly full both are smaller, so that others keep their memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kit.arguments import takes_config
from kit.config import Config
from kit.machine.machine import hardware, resolve_devices
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.cards import card_of_gpu
from kit.speed.measure import calls_here
from kit.units import format_bytes, format_count

_DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("float32", "bfloat16", "float16")}
_SIDE = {"cpu": 1024, "gpu": 8192}
"""Of the square matrices that are multiplied, at most."""
_COPIED_ELEMENTS = {"cpu": 1 << 25, "gpu": 1 << 27}
"""At most: 1 GiB is read and written on a GPU."""
_FREE_SHARE = 1 / 8
"""Of the free memory, at most, for all tensors of a call."""
_FLOAT_BYTES, _LEAST_SIDE, _LEAST_ELEMENTS = 4, 256, 1 << 20
_SECONDS = 2.0
"""For all calls together, where none alone takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Of one device of a trial; of the CPU, of all its ranks together."""

    device: str
    flops_per_second: Mapping[str, float]
    """By number format, measured."""
    nominal_flops_per_second: Mapping[str, float | None]
    """By number format, as the maker states it; None where that is not known."""
    bytes_per_second: float
    """Read and written, measured by a copy."""

    def peak(self, dtype: str) -> float:
        """The peak in this number format: stated if known, else measured.

        One that the processor has no instructions for is multiplied slower than float32, but much of a step in it is
        computed in float32: the peak is that of whichever is faster.
        """
        in_full = self.flops_per_second["float32"]
        measured = max(in_full, self.flops_per_second.get(dtype, in_full))
        return self.nominal_flops_per_second.get(dtype) or measured

    @property
    def sentence(self) -> str:
        flops = ", ".join(f"{format_count(rate)}FLOP/s in {name}" for name, rate in self.flops_per_second.items())
        return f"{self.device} reached {flops}, and {format_bytes(self.bytes_per_second)}/s of memory traffic"


@takes_config
def device_peaks(config: Config, *, again: bool = False) -> Peaks:
    """The peak FLOP/s and bandwidth of the devices that a config trains on, measured in about two seconds.

    Args:
        config: Names the devices.
        again: Measure them even if they are known.

    Returns:
        The peaks, by a large matrix product in each number format and a large copy.

    Raises:
        HardwareError: for devices that are not there.
        TrialError: when the measuring process fails.

    Example:
        >>> peaks = kit.studies.device_peaks(config)
    """
    threads, ranks = config.hardware.threads_per_rank, config.hardware.devices
    here = hardware()
    if threads and isinstance(ranks, int) and not here.gpus:
        config = config.replace({"hardware.threads_per_rank": min(here.cores, threads * ranks)})
    one = config.replace({"hardware.strategy": "none", "hardware.devices": 1})
    resolved = resolve_devices(one, here)
    kind = resolved.accelerator
    gpu = next((gpu for gpu in here.gpus if gpu.uuid in resolved.devices), None)
    side, elements = _sizes(kind, here.memory_available_bytes if gpu is None else gpu.free_bytes)
    products = {name: _product(name, side) for name in _DTYPES[kind]}
    copy = _copy(elements)
    table = calls_here(one, (*products.values(), copy), seconds=_SECONDS, again=again).table
    card = None if gpu is None else card_of_gpu(gpu)
    return Peaks(
        device=table.name, flops_per_second={name: table.peak_flops_per_second(name) for name in products},
        nominal_flops_per_second={name: card.peak_flops_per_second(name) if card else None for name in products},
        bytes_per_second=2 * copy.outputs[0].bytes / table.measured[copy],
    )  # fmt: skip


def _sizes(kind: str, free_bytes: int) -> tuple[int, int]:
    """Side of the matrices of a product and elements of a copy: powers of two, so that what is known is found again."""
    most = free_bytes * _FREE_SHARE / _FLOAT_BYTES
    side = min(_SIDE[kind], _power_of_two(math.sqrt(most / 3)))
    return max(_LEAST_SIDE, side), max(_LEAST_ELEMENTS, min(_COPIED_ELEMENTS[kind], _power_of_two(most / 2)))


def _power_of_two(most: float) -> int:
    """The largest that is not above; 1 for less than that."""
    return 1 << max(0, int(most).bit_length() - 1)


def _product(dtype: str, side: int) -> OperatorCall:
    square = TensorSpec((side, side), dtype)
    return OperatorCall("aten::mm", (square, square), (), (square,))


def _copy(elements: int) -> OperatorCall:
    whole = TensorSpec((elements,), "float32")
    return OperatorCall("aten::copy_", (whole, whole), (), (whole,))
