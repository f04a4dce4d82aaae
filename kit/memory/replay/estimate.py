"""What a training step needs of a device, and whether it fits: the answer that a recording and a target give.

Allocated and reserved bytes are as `torch.cuda.max_memory_allocated` and `max_memory_reserved` count them; beside them
stands a range for what the process holds outside the allocator. The verdict comes from playing the recording through
the allocator, never from comparing sums alone:

    fits            reserved + the high end of outside bytes <= capacity, also where fragmentation takes as much again
    fits if         the same, under the `conditions` that a dry run had to guess and no real run has settled
    tight           only with the low end, only as fragmented as played, or only after the allocator gave its unused
                    segments back to the driver
    does not fit    a request cannot be met even then
    unknown         activations are unknown, and what is known would fit; or an upper bound does not fit

A timeline counts time in events. Its clock is the bytes allocated since the first batch began, freed or not, because a
predicted and a measured run (`MeasuredMemory`) differ in speed but request memory in the same order.

Invariant: the categories add up to the allocated bytes, exactly and at every event. Known error: fragmentation depends
on addresses that CUDA chooses, and kernels may take scratch memory that nobody records. What cuDNN may take inside a
convolution is named where it would not find room, and never turns a verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kit.errors import PlanError
from kit.machine.processes import garbage_collection_paused
from kit.memory.replay.cards import DeviceTarget, emulated
from kit.memory.replay.loop_order import BEFORE_BACKWARD, LoopOrder, loop_order, saved_bytes
from kit.memory.replay.replay import (
    CATEGORIES,
    DIFFERING,
    EVALUATIONS,
    MASKED,
    NOTHING_TRAINED,
    PHASES,
    STEPS,
    Recording,
    Replay,
    changes,
    load_arrays,
    replay,
    save_arrays,
    with_cublas_workspaces,
)
from kit.registry import Drawable
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, plural

Verdict = Literal["fits", "fits if", "tight", "does not fit", "unknown"]

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
    highest: Sequence[tuple[str, str, float, str]] = ()
    """(class of the module, strategy, the largest measured / predicted allocated bytes, the run of that)."""

    def highest_for(self, module: str, strategy: str) -> tuple[float, str]:
        """(ratio, whose peak that is): of the module's own runs, else the median of other modules'.

        What one module was off by says little about another, and less about one that is shared otherwise.
        """
        alike = [(name, ratio, run) for name, kind, ratio, run in self.highest if kind == strategy]
        for name, ratio, run in alike:
            if name == module:
                return ratio, f"the measured peak of {run}"
        if not alike:
            return 1.0, ""
        return statistics.median_low(ratio for _, ratio, _ in alike), "the measured peak of other modules here"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryEstimate(Drawable):
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
    conditions: tuple[str, ...] = ()
    """Guesses on which the bytes depend, with file and line: `fits if` holds when these do."""
    source: str = ""
    """How the bytes are known where a dry run alone could not tell, such as `run for real on the CPU with batch 2`."""
    gradients_freed: str = ""
    """When, such as `between forward and backward pass`, as Lightning does; empty where it is not known."""
    zero_grad_saves_bytes: int = 0
    """How much lower the peak is with gradients freed after the step (`levers.zero_grad_after_step`)."""
    record_seconds: float = 0.0
    """What the recording took."""
    recording: Recording | None = field(default=None, compare=False)
    """What it was made from; not kept in `to_dict`."""

    @property
    def fits(self) -> bool:
        """Whether the verdict is `fits`: a tight run may slow down, or run out after all."""
        return self.verdict == "fits"

    @property
    def lacks_bytes(self) -> int:
        """That the device has too little memory by, at least; 0 where it may fit, or memory is only too fragmented."""
        return max(0, self.total_bytes[0] - self.capacity_bytes) if self.verdict == "does not fit" else 0

    @property
    def may_fit(self) -> bool:
        """Whether the verdict is `fits` or `fits if`."""
        return self.verdict in ("fits", "fits if")

    @property
    def total_bytes(self) -> tuple[int, int]:
        """(low, high) of the device in all: reserved and outside bytes."""
        low, high = self.outside_bytes
        return self.device_reserved_bytes + low, self.device_reserved_bytes + high

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the recording."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "recording"}
        values |= {"peak": asdict(self.peak), "timeline": asdict(self.timeline), "breakdown": dict(self.breakdown)}
        values["largest"] = [asdict(block) for block in self.largest]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemoryEstimate:
        """The inverse of `to_dict`; the recording is None."""
        known = {item.name for item in fields(cls)}
        plain = {name: value for name, value in values.items() if name in known}
        plain |= {name: tuple(plain.get(name, ())) for name in ("outside_bytes", "reasons", "notes", "conditions")}
        plain["largest"] = tuple(LargeBlock(**block) for block in values["largest"])
        plain |= {"peak": Peak(**values["peak"]), "timeline": Timeline.from_dict(values["timeline"])}
        if plain["verdict"] not in get_args(Verdict):
            raise PlanError(f"verdict {plain['verdict']!r} is none of {', '.join(get_args(Verdict))}")
        return cls(**plain)

    def __repr__(self) -> str:
        lines = [self._headline, text_table(_COLUMNS, self._rows), *(f"- {sentence}" for sentence in self._sentences)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows, caption=self._headline) + html_list(self._sentences)

    @property
    def _sentences(self) -> list[str]:
        asked = asked_words(
            self.batch_size, self.precision, self.accumulate_grad_batches, self.strategy, self.world_size
        )
        return [asked, *self.reasons]

    @property
    def _headline(self) -> str:
        size = format_bytes(self.capacity_bytes)
        place = self.device if size in self.device else f"{self.device} ({size})"
        least = "" if self.complete else "at least "
        return (
            f"{self.verdict_in_words}: {least}{format_bytes(self.device_allocated_bytes)} allocated, "
            f"{format_bytes(self.device_reserved_bytes)} reserved, on {place}"
        )

    @property
    def verdict_in_words(self) -> str:
        """The verdict, of `fits if` with the first condition, and the source of what no dry run told."""
        source = f" ({self.source})" if self.source else ""
        if self.verdict != "fits if":
            return f"{self.verdict}{source}"
        more = f" (and {len(self.conditions) - 1} more)" if len(self.conditions) > 1 else ""
        return f"{self.verdict} {self.conditions[0]}{more}{source}"

    @property
    def _rows(self) -> list[list[str]]:
        total = max(1, self.device_allocated_bytes)
        rows = [[name, format_bytes(size), f"{size / total:.1%}"] for name, size in self.breakdown.items()]
        return [*rows, ["allocated at the peak", format_bytes(self.device_allocated_bytes), "100.0%"]]


_COLUMNS = ("at the peak", "bytes", "share")


def asked_words(batch_size: int, precision: str, accumulate: int, strategy: str, devices: int) -> str:
    """What was asked about, so that two answers can be told apart: `batches of 64 in bf16-mixed, ddp on 8 devices`."""
    accumulated = f", {accumulate} of them a step" if accumulate > 1 else ""
    shared = f", {strategy} on {plural(devices, 'device')}" if devices > 1 else ""
    return f"batches of {batch_size} in {precision}{accumulated}{shared}"


@garbage_collection_paused()
def estimate(recording: Recording, target: DeviceTarget, *, residuals: Residuals | None = None) -> MemoryEstimate:
    """What the recorded steps need of the target, and whether it has it.

    Raises:
        PlanError: when the recording was made for another kind of device.
    """
    if recording.rounding_bytes != target.rounding_bytes:
        made_for = "CUDA" if recording.rounding_bytes > 1 else "the CPU"
        raise PlanError(
            f"the recording was made for {made_for}, but {target.name} is a {target.device_kind} device with other "
            "kernels; record it anew for that device"
        )
    facts = recording.facts
    played_from = with_cublas_workspaces(recording, target.cublas_workspace_bytes)
    played = replay(played_from)
    expandable = replay(played_from, expandable_segments=True)
    outside, why_outside = outside_bytes(recording, target, played.peak_allocated_bytes, residuals)
    verdict, why = _judge(played_from, played, expandable, target, outside)
    unknown = facts.get("unknown")
    emulation = emulated(str(facts.get("precision", "")), target)
    reasons = [*emulation, *why_outside, *target.reasons, *_workspace_lost(recording, target, played, outside)]
    if facts.get("undivided") and facts.get("strategy", "none") != "none":
        reasons.append(facts["undivided"])
    reasons += [facts["why_for_real"]] if "why_for_real" in facts else []
    reasons += [note for note in facts.get("notes", ()) if note.startswith((*DIFFERING, MASKED, NOTHING_TRAINED))]
    reasons += [short] if (short := short_epoch(recording)) else []
    reasons += [f"may be low: {what}" for what in facts.get("may_be_low", ())]
    if unknown:
        reasons.append(f"activations unknown: {unknown}; all bytes are a lower bound")
        if verdict != "does not fit":
            verdict, why = "unknown", f"activations are unknown; of what is known, {why}"
    left_out = facts.get("left_out", {})
    reasons += [f"{what} is no part of this: {reason}" for what, reason in left_out.items()]
    evaluates = next((what for what in left_out if what.startswith(EVALUATIONS)), "")
    if evaluates and verdict == "fits":
        verdict, why = "unknown", f"{evaluates} is unknown; without it, {why}"
    conditions = tuple(facts.get("conditions", ()))
    reasons += [f"guessed, and the memory may depend on it: {condition}" for condition in conditions]
    if conditions and verdict == "fits":
        verdict = "fits if"
    fewest, bounded = _with_fewest_selected(facts, target, played, outside)
    reasons += bounded
    if fewest and verdict in ("tight", "does not fit"):
        verdict, why = "unknown", f"it would fit with fewer elements selected; with all of them, {why}"
    peak, order = peak_of(played_from, played.allocated_bytes), loop_order(played_from)
    saves = 0 if unknown else saved_bytes(played_from, order, played.peak_allocated_bytes)
    reasons += _order_told(recording, order, saves)
    return MemoryEstimate(
        device=target.name, device_kind=target.device_kind, capacity_bytes=target.capacity_bytes,
        device_allocated_bytes=played.peak_allocated_bytes, device_reserved_bytes=played.peak_reserved_bytes,
        device_reserved_expandable_bytes=expandable.peak_reserved_bytes, outside_bytes=outside, verdict=verdict,
        breakdown=breakdown_at(played_from, peak.event, played.held_bytes, order), peak=peak,
        largest=largest_at(played_from, peak.event, played.held_bytes),
        timeline=timeline(played_from, played, order), gradients_freed=order.gradients_freed,
        zero_grad_saves_bytes=saves,
        reasons=(why, f"the peak is at {peak}", *reasons), complete=not unknown,
        batch_size=recording.batch_size, world_size=int(facts.get("world_size", 1)),
        strategy=str(facts.get("strategy", "none")), precision=str(facts.get("precision", "32-true")),
        accumulate_grad_batches=int(facts.get("accumulate_grad_batches", 1)),
        parameters=int(facts.get("parameters", 0)), trainable_parameters=int(facts.get("trainable_parameters", 0)),
        notes=tuple(facts.get("notes", ())), conditions=conditions, source=str(facts.get("source", "")),
        record_seconds=float(facts.get("seconds", 0.0)), recording=recording,
    )  # fmt: skip


def short_epoch(recording: Recording) -> str:
    """That an epoch ends before as many micro-batches are accumulated as a step is to have; empty where it does not."""
    facts = recording.facts
    samples, accumulate = facts.get("epoch_samples"), int(facts.get("accumulate_grad_batches", 1))
    batches = (samples or math.inf) / max(1, recording.batch_size) / max(1, int(facts.get("world_size", 1)))
    if accumulate <= math.ceil(min(batches, accumulate)):
        return ""
    return f"an epoch has {math.ceil(batches)} batches: Lightning steps at its end, before {accumulate} are accumulated"


def outside_bytes(
    recording: Recording, target: DeviceTarget, allocated_bytes: int, residuals: Residuals | None
) -> tuple[tuple[int, int], list[str]]:
    """(low, high) outside the allocator, and why: measured where there are measurements, else by rule."""
    low, high = target.outside_bytes
    reasons = []
    if residuals is not None and residuals.outside_bytes is not None:
        low, high = residuals.outside_bytes
        why = f", as measured in {residuals.count} runs here"
    elif target.device_kind == "cpu":
        why = " for Python, torch and lightning, by rule and not measured here"
    else:
        groups = communicators(recording)
        low, high = low + groups * _COMMUNICATOR_BYTES[0], high + groups * _COMMUNICATOR_BYTES[1]
        why = f" for CUDA's context and kernels{' and NCCL' if groups else ''}, by rule and not measured here"
    reasons.append(f"{format_bytes(low)} to {format_bytes(high)} outside the allocator{why}")
    ratio, whose = 1.0, ""
    if residuals is not None:
        facts = recording.facts
        ratio, whose = residuals.highest_for(str(facts.get("module", "")), str(facts.get("strategy", "none")))
    if (above := ratio - 1) > 0:
        margin = round(above * allocated_bytes)
        high += margin
        more = f"{above:.1%}" if above >= 0.001 else "less than 0.1%"
        reasons.append(f"{format_bytes(margin)} are added to that: {whose} was {more} above its prediction")
    return (low, high), reasons


def _workspace_lost(recording: Recording, target: DeviceTarget, played: Replay, outside: tuple[int, int]) -> list[str]:
    """What a convolution loses where cuDNN finds no room for its largest workspace: time, never the run.

    torch tries the next algorithm when the workspace of one cannot be allocated, down to some that need none
    (`native/cudnn/Conv_v8.cpp`), so the workspace is no part of any verdict.
    """
    wanted = int(recording.facts.get("unsure_workspace_bytes", 0))
    left = max(0, target.capacity_bytes - played.peak_reserved_bytes - outside[1])
    if wanted <= left:
        return []
    return [
        f"cuDNN may want up to {format_bytes(wanted)} inside a convolution, and {format_bytes(left)} are left: it then "
        "takes an algorithm that needs less and may be slower"
    ]


def _with_fewest_selected(
    facts: Mapping[str, Any], target: DeviceTarget, played: Replay, outside: tuple[int, int]
) -> tuple[bool, list[str]]:
    """Whether it would fit if hardly anything were selected where all was, and how far below that the peak may lie."""
    least = float(facts.get("least_fraction", 1.0))
    if least == 1:
        return False, []
    fits = round(least * played.peak_reserved_bytes) + outside[1] <= target.capacity_bytes
    bounds, share = facts.get("bounds", ()), f"the peak would be {least:.0%} of this"
    return fits, [f"{one}; {'with one element' if 'selected' in one else 'where not'}, {share}" for one in bounds]


def _order_told(recording: Recording, order: LoopOrder, saves_bytes: int) -> list[str]:
    """When gradients are freed, where that raises the peak, and the way out."""
    if not saves_bytes:
        return []
    way = "levers.zero_grad_after_step: true"
    if recording.facts.get("manual"):
        way = "optimizer.zero_grad() right after optimizer.step()"
    as_lightning = ", as Lightning does" if order.gradients_freed == BEFORE_BACKWARD and "levers" in way else ""
    return [
        f"gradients are freed {order.gradients_freed}{as_lightning}; with {way} the peak is "
        f"{format_bytes(saves_bytes)} lower"
    ]


def communicators(recording: Recording) -> int:
    """NCCL communicators of a rank: none alone, two where replicas and shards are both more than one."""
    if int(recording.facts.get("world_size", 1)) < 2:
        return 0
    name, *sizes = str(recording.facts.get("strategy", "")).split(":")
    return 2 if name == "fsdp" and len(sizes) == 2 and "1" not in sizes else 1


def _judge(
    recording: Recording, played: Replay, expandable: Replay, target: DeviceTarget, outside: tuple[int, int]
) -> tuple[Verdict, str]:
    """The verdict on what was recorded; a limited replay is needed only where the unlimited one passes the limit."""
    low, high = outside
    reserved = format_bytes(played.peak_reserved_bytes)
    if played.peak_reserved_bytes + high <= target.capacity_bytes:
        short = _lacking(recording, played, expandable, target.capacity_bytes - high)
        if not short:
            return "fits", f"{reserved} reserved and {format_bytes(high)} outside the allocator are within {target}"
        return "tight", f"{reserved} reserved are within {target} only if fragmentation takes no more: {short}"
    if played.peak_reserved_bytes + low <= target.capacity_bytes:
        outside_words = f"less than the {format_bytes(high)} that may be held outside the allocator"
        return "tight", f"{reserved} reserved are within {target} only with {outside_words}"
    limit = max(0, target.capacity_bytes - low)
    limited = replay(recording, capacity_bytes=limit)
    way_out = ""
    if expandable.peak_reserved_bytes <= limit:
        needs = format_bytes(expandable.peak_reserved_bytes)
        way_out = f"; with PYTORCH_ALLOC_CONF=expandable_segments:True it needs {needs}, which would do"
    if limited.out_of_memory is not None:
        return "does not fit", f"{limited.out_of_memory}, of {format_bytes(limit)} that are left of {target}{way_out}"
    times = "once" if limited.retries == 1 else f"{limited.retries} times"
    return "tight", (
        f"{reserved} reserved are more than {target} has left, but it runs when unused segments are given back to the "
        f"driver {times}, which costs time{way_out}"
    )


def _lacking(recording: Recording, played: Replay, expandable: Replay, room_bytes: int) -> str:
    """What would be lacking if fragmentation took as much again as it does here; empty where it runs even then.

    How blocks fall into segments depends on what this model does not know: where the driver puts these, scratch memory
    that nobody records, the order in which a graph is freed. The difference to segments that grow is what they cost as
    played, and the one measure of it that there is.
    """
    lost_bytes = played.peak_reserved_bytes - expandable.peak_reserved_bytes
    if played.peak_reserved_bytes + lost_bytes <= room_bytes:
        return ""
    limited = replay(recording, capacity_bytes=room_bytes - lost_bytes)
    return f"with {format_bytes(lost_bytes)} less it is {limited.out_of_memory}" if limited.out_of_memory else ""


MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which most is allocated, and what runs then."""

    event: int
    """Index of the event, -1 when there is none."""
    operator: str
    module: str
    phase: str
    step: int
    """Optimizer step, from 0; -1 before the first batch."""
    micro_batch: int
    """Counted over all steps, from 0; -1 before the first batch."""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        when = f" of step {self.step + 1}" if self.step >= 0 else ""
        return f"{self.operator or 'nothing'}{where} ({self.phase}{when})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeBlock:
    """A block that is alive at the peak."""

    bytes: int
    category: str
    operator: str
    module: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Device memory over the steps recorded, thinned to at most 2,000 points, the peak among them."""

    clock_bytes: tuple[int, ...]
    """(points,) allocated since the first batch began, freed or not; what a measured run is laid beside."""
    allocated_bytes: tuple[int, ...]
    """(points,)"""
    reserved_bytes: tuple[int, ...]
    """(points,)"""
    categories: Mapping[str, tuple[int, ...]]
    """Category to (points,); at every point they add up to `allocated_bytes`. Only those that are ever held."""
    phases: tuple[str, ...]
    """(points,)"""
    peak: int
    """Index of the point at the peak; -1 when there are no points."""
    batch_starts: tuple[int, ...]
    """Index of the first point of each micro-batch."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_dict`."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        plain["categories"] = {name: tuple(series) for name, series in values["categories"].items()}
        return cls(**plain)


def category_series(
    recording: Recording, held_bytes: NDArray[np.int64], order: LoopOrder | None = None
) -> NDArray[np.int64]:
    """(categories, events) bytes alive after each event, by category in the order of CATEGORIES."""
    order = order or loop_order(recording)
    events = len(recording.event_block)
    moves = np.zeros((len(CATEGORIES), events), dtype=np.int64)
    moves[recording.block_category[recording.event_block], np.arange(events)] = changes(recording, held_bytes)
    for row, sign in ((CATEGORIES.index("gradients"), -1), (CATEGORIES.index("last_gradients"), 1)):
        np.add.at(moves[row], order.begins, sign * held_bytes[order.blocks])
        np.add.at(moves[row], order.ends, -sign * held_bytes[order.blocks])
    return np.cumsum(moves, axis=1)


def peak_of(recording: Recording, allocated_bytes: NDArray[np.int64]) -> Peak:
    """The first event at which most is allocated, and what made that block."""
    if not len(allocated_bytes):
        return Peak(event=-1, operator="", module="", phase=PHASES[0], step=-1, micro_batch=-1)
    event = int(allocated_bytes.argmax())
    block = int(recording.event_block[event])
    micro_batch = int(np.searchsorted(recording.batch_starts, recording.event_time[event], side="right")) - 1
    # Of many micro-batches a step, the first two are recorded: from the second on they are alike.
    recorded = len(recording.batch_starts) // STEPS
    of_a_step = max(1, min(int(recording.facts.get("accumulate_grad_batches", 1)), recorded))
    return Peak(
        event=event, operator=recording.names[recording.block_operator[block]],
        module=recording.names[recording.block_module[block]], phase=PHASES[recording.block_phase[block]],
        step=micro_batch // of_a_step, micro_batch=micro_batch,
    )  # fmt: skip


def breakdown_at(
    recording: Recording, event: int, held_bytes: NDArray[np.int64], order: LoopOrder | None = None
) -> dict[str, int]:
    """Category to bytes alive after an event, the largest first; empty categories are left out."""
    order = order or loop_order(recording)
    alive, category = alive_after(recording, event), recording.block_category.copy()
    category[order.blocks[(order.begins <= event) & (event < order.ends)]] = CATEGORIES.index("last_gradients")
    totals = [int(held_bytes[alive & (category == place)].sum()) for place in range(len(CATEGORIES))]
    pairs = [(name, total) for name, total in zip(CATEGORIES, totals, strict=True) if total]
    return dict(sorted(pairs, key=lambda pair: -pair[1]))


def largest_at(
    recording: Recording, event: int, held_bytes: NDArray[np.int64], most: int = 10
) -> tuple[LargeBlock, ...]:
    """The largest blocks alive after an event, the largest first."""
    sizes = np.where(alive_after(recording, event), held_bytes, 0)
    names = recording.names
    return tuple(
        LargeBlock(
            bytes=int(sizes[block]), category=CATEGORIES[recording.block_category[block]],
            operator=names[recording.block_operator[block]], module=names[recording.block_module[block]],
            phase=PHASES[recording.block_phase[block]],
        )
        for block in np.argsort(-sizes, kind="stable")[:most]
        if sizes[block]
    )  # fmt: skip


def timeline(
    recording: Recording, played: Replay, order: LoopOrder | None = None, most_points: int = MOST_POINTS
) -> Timeline:
    """The allocated, reserved and per-category series of a replay, thinned."""
    allocated = played.allocated_bytes
    points = thin(allocated, most_points)
    series = category_series(recording, played.held_bytes, order)[:, points]
    clock = clock_of(recording)
    times = recording.event_time[points]
    starts = np.searchsorted(times, np.array(recording.batch_starts, dtype=np.int64))
    operators = len(recording.operator_phase)
    phases = recording.operator_phase[np.clip(times, 0, operators - 1)].tolist() if operators else [0] * len(times)
    return Timeline(
        clock_bytes=tuple(clock[points].tolist()), allocated_bytes=tuple(allocated[points].tolist()),
        reserved_bytes=tuple(played.reserved_bytes[points].tolist()),
        categories={
            name: tuple(line.tolist()) for name, line in zip(CATEGORIES, series, strict=True) if line.any()
        },
        phases=tuple(PHASES[phase] for phase in phases),
        peak=int(allocated[points].argmax()) if len(points) else -1,
        batch_starts=tuple(starts[starts < len(points)].tolist()),
    )  # fmt: skip


def clock_of(recording: Recording) -> NDArray[np.int64]:
    """(events,) bytes allocated since the first batch began, freed or not."""
    begins = recording.batch_starts[0] if recording.batch_starts else 0
    counts = recording.event_allocates & (recording.event_time >= begins)
    return np.cumsum(np.where(counts, recording.block_bytes[recording.event_block], 0))


def thin(values: NDArray[np.int64], most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Indices of at most `most` values: the highest of each stretch, so that the highest of all is among them."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    length = -(-count // most)
    stretches = -(-count // length)
    padded = np.full(stretches * length, np.iinfo(np.int64).min)
    padded[:count] = values
    highest: NDArray[np.int64] = padded.reshape(stretches, length).argmax(axis=1)
    return np.arange(stretches) * length + highest


def alive_after(recording: Recording, event: int) -> NDArray[np.bool_]:
    """(blocks,) which are held after an event."""
    alive = np.zeros(recording.blocks, dtype=np.bool_)
    # Of several assignments to one block the last holds: it was freed, or it was not.
    alive[recording.event_block[: event + 1]] = recording.event_allocates[: event + 1]
    return alive


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes held by a training process, from its first batch on."""

    allocated_bytes: NDArray[np.int64]
    """(events,) held after each allocation or release; the first entry is what was there at the first batch."""
    requested_bytes: NDArray[np.int64]
    """(events,) allocated so far since the first batch, releases not subtracted: the clock."""
    seconds: float
    """From the first event to the last."""
    optimizer_steps: int = 0
    """Whole optimizer steps seen; before the second one optimizer state has not been there from the start."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What goes with the numbers, as JSON values."""

    @property
    def peak_bytes(self) -> int:
        """The most held at any time."""
        return int(self.allocated_bytes.max())

    @property
    def clock(self) -> NDArray[np.float64]:
        """(events,) bytes allocated so far as a fraction of all, 0 to 1."""
        return self.requested_bytes / max(1, int(self.requested_bytes[-1]))

    def save(self, path: str | Path) -> None:
        """Write it to a `.npz` file, in one step: a reader sees all of it or nothing."""
        meta = {"seconds": self.seconds, "optimizer_steps": self.optimizer_steps, "facts": self.facts}
        arrays = {"allocated_bytes": self.allocated_bytes, "requested_bytes": self.requested_bytes}
        save_arrays(path, meta, arrays, np.savez_compressed)

    @classmethod
    def load(cls, path: str | Path) -> MeasuredMemory:
        """Read what `save` wrote; no pickle is opened."""
        meta, arrays = load_arrays(path)
        return cls(**arrays, **meta)
