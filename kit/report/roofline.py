"""Roofline: achieved FLOP/s against the peak of the device, and what bounds the step.

    achieved  = FLOPs of a sample × samples a second
    MFU       = Σ FLOPs in a format ÷ its peak, over the time of a step: model FLOPs utilisation (Chowdhery et al.
                2022); FLOPs of recomputation, if any, are counted, as the device does them too
    roof      = min(peak, intensity × bandwidth), intensity = FLOPs ÷ bytes (Williams, Waterman, Patterson 2009)

FLOPs and bytes are counted operation by operation (`kit.run.step_work`). Bytes are an upper bound, so the intensity is
a lower one, and "memory bandwidth" is said too often rather than too seldom where caches are large enough.
Peaks are measured, or stated by the maker where known (`kit.run.peaks`). What bounds the step is the largest of waiting
for data, communication and work; work is bound by compute or memory bandwidth, whichever roof needs more time, or by
neither where both together explain less than `EXPLAINED` of it: then it is calls and Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kit.report.evidence import Evidence
from kit.units import format_bytes, format_count

Bound = Literal["data", "communication", "compute", "memory bandwidth", "calls and Python"]
EXPLAINED = 0.25
"""Of the working time, what compute or memory traffic at full speed must explain to be called the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One trial, all its devices together."""

    device: str
    dtype: str
    """The number format most FLOPs were in."""
    flops_per_second: float
    """Achieved, waits included."""
    peak_flops_per_second: float
    bytes_per_second: float
    """The memory traffic of a step over its time, at most."""
    peak_bytes_per_second: float
    mfu_fraction: float
    intensity: float
    """FLOPs for each byte moved."""
    compute_fraction: float
    """Of the step, what its FLOPs take at the peak."""
    memory_fraction: float
    """Of the step, what its bytes take at the peak; above 1 where caches served them."""
    wait_fraction: float
    communication_fraction: float
    bound: Bound

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which compute is the roof."""
        return self.peak_flops_per_second / self.peak_bytes_per_second

    @property
    def roof_flops_per_second(self) -> float:
        """What could be had at this intensity."""
        return min(self.peak_flops_per_second, self.intensity * self.peak_bytes_per_second)

    @property
    def sentence(self) -> str:
        bound = {
            "data": "the step is bound by data: faster arithmetic would not help",
            "communication": "the step is bound by communication between the ranks",
            "compute": "the step is bound by compute: what helps is less arithmetic, or a faster number format",
            "memory bandwidth": "the step is bound by memory bandwidth: what helps is smaller numbers, or fewer passes",
            "calls and Python": "neither compute nor memory explains the step: it is bound by calls and Python, and "
            "larger batches or fewer, larger operations help",
        }
        rate, peak = format_count(self.flops_per_second), format_count(self.peak_flops_per_second)
        return (
            f"{rate}FLOP/s of {peak}FLOP/s in {self.dtype}: MFU {self.mfu_fraction:.1%}, at "
            f"{self.intensity:.3g} FLOP per byte (the ridge is at {self.ridge:.3g}; memory gives "
            f"{format_bytes(self.peak_bytes_per_second)}/s); {bound[self.bound]}"
        )


def roofline_of(evidence: Evidence) -> Roofline | None:
    """Where the trial stands; None where its work was not counted, its peaks are not known or it had no FLOPs."""
    work, peaks, rate = evidence.work, evidence.peaks, evidence.samples_per_second
    if work is None or peaks is None or not rate or not sum(work.flops.values()) or not work.bytes:
        return None
    devices = evidence.world_size if evidence.on_gpu else 1
    flops = sum(work.flops.values())
    dtype = max(work.flops, key=lambda name: work.flops[name])
    step_seconds = work.samples / rate  # of one global batch
    compute_seconds = sum(count / (devices * peaks.peak(name)) for name, count in work.flops.items())
    memory_seconds = work.bytes / (devices * peaks.bytes_per_second)
    compute, memory = compute_seconds / step_seconds, memory_seconds / step_seconds
    wait, communication = evidence.shares.get("wait", 0.0), evidence.shares.get("communication", 0.0)
    return Roofline(
        device=peaks.device, dtype=dtype, flops_per_second=flops / step_seconds,
        peak_flops_per_second=devices * peaks.peak(dtype), bytes_per_second=work.bytes / step_seconds,
        peak_bytes_per_second=devices * peaks.bytes_per_second, mfu_fraction=compute, intensity=flops / work.bytes,
        compute_fraction=compute, memory_fraction=memory, wait_fraction=wait, communication_fraction=communication,
        bound=_bound(wait, communication, compute, memory),
    )  # fmt: skip


def _bound(wait: float, communication: float, compute: float, memory: float) -> Bound:
    working = max(0.0, 1 - wait - communication)
    if wait >= max(communication, working):
        return "data"
    if communication >= working:
        return "communication"
    if max(compute, memory) < EXPLAINED * working:
        return "calls and Python"
    return "compute" if compute >= memory else "memory bandwidth"
