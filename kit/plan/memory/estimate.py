"""What a training step needs of a device, and whether it has it: the answer that a recording and a target give.

Allocated and reserved bytes are as `torch.cuda.max_memory_allocated` and `max_memory_reserved` count them; beside them
stands a range for what the process holds outside the allocator. The verdict comes from playing the recording through
the allocator, never from comparing sums alone:

    fits            reserved + the high end of outside bytes <= capacity
    tight           only with the low end, or only after the allocator gave its unused segments back to the driver
    does not fit    a request cannot be met even then
    unknown         activations are unknown, and what is known would fit

Known error: not compared with a GPU yet. Fragmentation depends on addresses that CUDA chooses; kernels may take scratch
memory that nobody records. The invariant: the breakdown adds up to the allocated bytes, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from kit.errors import PlanError
from kit.plan.memory.cards import Target
from kit.plan.memory.recording import Recording
from kit.plan.memory.replay import Replay, replay
from kit.plan.memory.timeline import LargeBlock, Peak, Timeline, breakdown_at, largest_at, peak_of, timeline
from kit.plan.memory.workspaces import with_cublas_workspaces
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes

Verdict = Literal["fits", "tight", "does not fit", "unknown"]

_MIB = 1 << 20
# NCCL's buffers per communicator: 544 to 688 MB on four A100 (nccl#964), 1.6 GB at worst (nccl#864).
_COMMUNICATOR_BYTES = (512 * _MIB, 1600 * _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """What measurements on a machine say about predictions for it."""

    count: int
    """Runs measured."""
    outside_bytes: tuple[int, int] | None = None
    """(lowest, highest) measured outside the allocator; None where it could not be measured."""
    highest_ratio: float = 1.0
    """The largest measured / predicted allocated bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryEstimate:
    """Peak memory of one rank on one device. Print it, show it, or read its fields."""

    device: str
    device_kind: str
    """`cuda` or `cpu`."""
    capacity_bytes: int
    """What the rank may use of the device, allocator and all else together."""
    device_allocated_bytes: int
    """Peak of what blocks hold."""
    device_reserved_bytes: int
    """Peak of what the allocator takes from the driver; allocated bytes on the CPU."""
    device_reserved_expandable_bytes: int
    """The same with PYTORCH_ALLOC_CONF=expandable_segments:True."""
    outside_bytes: tuple[int, int]
    """(low, high) outside the allocator: context, kernels, NCCL, and the error seen in measurements."""
    verdict: Verdict
    breakdown: Mapping[str, int]
    """Category to bytes at the peak, the largest first; adds up to `device_allocated_bytes`."""
    peak: Peak
    largest: tuple[LargeBlock, ...]
    """The largest blocks at the peak, the largest first."""
    timeline: Timeline
    reasons: tuple[str, ...]
    complete: bool
    """False when activations are unknown; all bytes are then a lower bound."""
    batch_size: int
    """Samples per micro-batch on this device."""
    world_size: int
    strategy: str
    precision: str
    accumulate_grad_batches: int
    parameters: int
    trainable_parameters: int
    notes: tuple[str, ...] = ()
    """What the dry run had to assume."""
    record_seconds: float = 0.0
    """What the recording took."""
    recording: Recording | None = field(default=None, compare=False)
    """What it was made from; not kept in `to_dict`."""

    @property
    def fits(self) -> bool:
        """Whether the verdict is `fits`: a tight run may slow down, or run out after all."""
        return self.verdict == "fits"

    @property
    def total_bytes(self) -> tuple[int, int]:
        """(low, high) of the device in all: reserved and outside bytes."""
        low, high = self.outside_bytes
        return self.device_reserved_bytes + low, self.device_reserved_bytes + high

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the recording."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "recording"}
        values |= {"peak": asdict(self.peak), "timeline": self.timeline.to_dict()}
        values |= {"largest": [asdict(block) for block in self.largest], "breakdown": dict(self.breakdown)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemoryEstimate:
        """The inverse of `to_dict`; the recording is None."""
        known = {item.name for item in fields(cls)}
        plain = {name: value for name, value in values.items() if name in known}
        plain |= {name: tuple(plain[name]) for name in ("outside_bytes", "reasons", "notes")}
        plain["largest"] = tuple(LargeBlock(**block) for block in values["largest"])
        plain |= {"peak": Peak(**values["peak"]), "timeline": Timeline.from_dict(values["timeline"])}
        if plain["verdict"] not in get_args(Verdict):
            raise PlanError(f"verdict {plain['verdict']!r} is none of {', '.join(get_args(Verdict))}")
        return cls(**plain)

    def __str__(self) -> str:
        lines = [self._headline, text_table(_COLUMNS, self._rows), *(f"- {sentence}" for sentence in self.reasons)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows, caption=self._headline) + html_list(self.reasons)

    @property
    def _headline(self) -> str:
        least = "" if self.complete else "at least "
        return (
            f"{self.verdict}: {least}{format_bytes(self.device_allocated_bytes)} allocated, "
            f"{format_bytes(self.device_reserved_bytes)} reserved, on {self._place}"
        )

    @property
    def _place(self) -> str:
        size = format_bytes(self.capacity_bytes)
        return self.device if size in self.device else f"{self.device} ({size})"

    @property
    def _rows(self) -> list[list[str]]:
        total = max(1, self.device_allocated_bytes)
        rows = [[name, format_bytes(size), f"{size / total:.1%}"] for name, size in self.breakdown.items()]
        return [*rows, ["allocated at the peak", format_bytes(self.device_allocated_bytes), "100.0%"]]


_COLUMNS = ("at the peak", "bytes", "share")


def estimate(recording: Recording, target: Target, *, residuals: Residuals | None = None) -> MemoryEstimate:
    """What the recorded steps need of the target, and whether it has it.

    Raises:
        PlanError: when the recording was made for another kind of device.
    """
    _check_kind(recording, target)
    facts = recording.facts
    played_from = with_cublas_workspaces(recording, target.cublas_workspace_bytes)
    played = replay(played_from)
    expandable = replay(played_from, expandable_segments=True)
    outside, why_outside = outside_bytes(recording, target, played.peak_allocated_bytes, residuals)
    complete = not facts.get("unknown")
    verdict, why = _judge(played_from, played, expandable, target, outside, complete)
    peak = peak_of(played_from, played.allocated_bytes)
    return MemoryEstimate(
        device=target.name, device_kind=target.device_kind, capacity_bytes=target.capacity_bytes,
        device_allocated_bytes=played.peak_allocated_bytes, device_reserved_bytes=played.peak_reserved_bytes,
        device_reserved_expandable_bytes=expandable.peak_reserved_bytes, outside_bytes=outside, verdict=verdict,
        breakdown=breakdown_at(played_from, peak.event, played.held_bytes), peak=peak,
        largest=largest_at(played_from, peak.event, played.held_bytes), timeline=timeline(played_from, played),
        reasons=(why, f"the peak is at {peak}", *why_outside, *target.reasons, *_unknown(facts)), complete=complete,
        batch_size=recording.batch_size, world_size=int(facts.get("world_size", 1)),
        strategy=str(facts.get("strategy", "none")), precision=str(facts.get("precision", "32-true")),
        accumulate_grad_batches=int(facts.get("accumulate_grad_batches", 1)),
        parameters=int(facts.get("parameters", 0)), trainable_parameters=int(facts.get("trainable_parameters", 0)),
        notes=tuple(facts.get("notes", ())), record_seconds=float(facts.get("seconds", 0.0)), recording=recording,
    )  # fmt: skip


def outside_bytes(
    recording: Recording, target: Target, allocated_bytes: int, residuals: Residuals | None
) -> tuple[tuple[int, int], list[str]]:
    """(low, high) outside the allocator, and why: measured where there are measurements, else by rule."""
    low, high = target.outside_bytes
    reasons = []
    if residuals is not None and residuals.outside_bytes is not None:
        low, high = residuals.outside_bytes
        reasons.append(f"{_range(low, high)} outside the allocator, as measured in {residuals.count} runs here")
    else:
        groups = communicators(recording) if target.device_kind == "cuda" else 0
        low, high = low + groups * _COMMUNICATOR_BYTES[0], high + groups * _COMMUNICATOR_BYTES[1]
        what = _OUTSIDE[target.device_kind] + (" and NCCL" if groups else "")
        reasons.append(f"{_range(low, high)} outside the allocator for {what}, by rule and not measured here")
        unsure = int(recording.facts.get("unsure_workspace_bytes", 0))
        if unsure:
            high += unsure
            reasons.append(f"up to {format_bytes(unsure)} are added for what cuDNN may take inside a convolution")
    if residuals is not None and residuals.highest_ratio > 1:
        above = residuals.highest_ratio - 1
        margin = round(above * allocated_bytes)
        high += margin
        more = f"{above:.1%}" if above >= 0.001 else "less than 0.1%"
        reasons.append(f"{format_bytes(margin)} are added: a measured peak was {more} above its prediction")
    return (low, high), reasons


_OUTSIDE = {"cuda": "CUDA's context and kernels", "cpu": "Python, torch and lightning"}


def communicators(recording: Recording) -> int:
    """NCCL communicators of a rank: none alone, two where replicas and shards are both more than one."""
    if int(recording.facts.get("world_size", 1)) < 2:
        return 0
    name, *sizes = str(recording.facts.get("strategy", "")).split(":")
    return 2 if name == "fsdp" and len(sizes) == 2 and "1" not in sizes else 1


def _judge(
    recording: Recording, played: Replay, expandable: Replay, target: Target, outside: tuple[int, int], complete: bool
) -> tuple[Verdict, str]:
    verdict, why = _judge_known(recording, played, expandable, target, outside)
    if complete or verdict == "does not fit":
        return verdict, why
    return "unknown", f"activations are unknown; of what is known, {why}"


def _judge_known(
    recording: Recording, played: Replay, expandable: Replay, target: Target, outside: tuple[int, int]
) -> tuple[Verdict, str]:
    """The verdict on what was recorded; a limited replay is needed only where the unlimited one passes the limit."""
    low, high = outside
    reserved = format_bytes(played.peak_reserved_bytes)
    if played.peak_reserved_bytes + high <= target.capacity_bytes:
        return "fits", f"{reserved} reserved and {format_bytes(high)} outside the allocator are within {target}"
    if played.peak_reserved_bytes + low <= target.capacity_bytes:
        return "tight", f"{reserved} reserved are within {target} only if little is held outside the allocator"
    limit = max(0, target.capacity_bytes - low)
    limited = replay(recording, capacity_bytes=limit)
    way_out = _way_out(expandable, limit)
    if limited.out_of_memory is not None:
        return "does not fit", f"{limited.out_of_memory}, of {format_bytes(limit)} that are left of {target}{way_out}"
    times = "once" if limited.retries == 1 else f"{limited.retries} times"
    return "tight", (
        f"{reserved} reserved are more than {target} has left, but it runs when unused segments are given back to the "
        f"driver {times}, which costs time{way_out}"
    )


def _way_out(expandable: Replay, limit: int) -> str:
    if expandable.peak_reserved_bytes > limit:
        return ""
    needs = format_bytes(expandable.peak_reserved_bytes)
    return f"; with PYTORCH_ALLOC_CONF=expandable_segments:True it needs {needs}, which would do"


def _check_kind(recording: Recording, target: Target) -> None:
    if recording.rounding_bytes != target.rounding_bytes:
        made_for = "CUDA" if recording.rounding_bytes > 1 else "the CPU"
        raise PlanError(
            f"the recording was made for {made_for}, but {target.name} is a {target.device_kind} device with other "
            "kernels; record it anew for that device"
        )


def _range(low: int, high: int) -> str:
    return f"{format_bytes(low)} to {format_bytes(high)}"


def _unknown(facts: Mapping[str, Any]) -> list[str]:
    unknown = facts.get("unknown")
    return [f"activations unknown: {unknown}; all bytes are a lower bound"] if unknown else []
