"""Where the peak is and what it is made of: the allocated bytes of a recording, over time and by category.

Time is counted in events. Beside it runs a clock that a measured run shares: the bytes allocated since the first batch
began, however many of them were freed again. Bytes are as the device holds them (`Replay.held_bytes`), so that the
categories add up to its allocated bytes exactly, at every event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.plan.memory.recording import CATEGORIES, PHASES, Recording
from kit.plan.memory.replay import Replay, changes

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_dict`."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        plain["categories"] = {name: tuple(series) for name, series in values["categories"].items()}
        return cls(**plain)


def category_series(recording: Recording, held_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """(categories, events) bytes alive after each event, by category in the order of CATEGORIES."""
    events = len(recording.event_block)
    moves = np.zeros((len(CATEGORIES), events), dtype=np.int64)
    moves[recording.block_category[recording.event_block], np.arange(events)] = changes(recording, held_bytes)
    return np.cumsum(moves, axis=1)


def peak_of(recording: Recording, allocated_bytes: NDArray[np.int64]) -> Peak:
    """The first event at which most is allocated, and what made that block."""
    if not len(allocated_bytes):
        return Peak(event=-1, operator="", module="", phase=PHASES[0], step=-1, micro_batch=-1)
    event = int(allocated_bytes.argmax())
    block = int(recording.event_block[event])
    micro_batch = int(np.searchsorted(recording.batch_starts, recording.event_time[event], side="right")) - 1
    return Peak(
        event=event, operator=recording.names[recording.block_operator[block]],
        module=recording.names[recording.block_module[block]], phase=PHASES[recording.block_phase[block]],
        step=micro_batch // accumulation(recording), micro_batch=micro_batch,
    )  # fmt: skip


def accumulation(recording: Recording) -> int:
    """Micro-batches per optimizer step."""
    return max(1, int(recording.facts.get("accumulate_grad_batches", 1)))


def breakdown_at(recording: Recording, event: int, held_bytes: NDArray[np.int64]) -> dict[str, int]:
    """Category to bytes alive after an event, the largest first; empty categories are left out."""
    alive = _alive(recording, event)
    totals = [int(held_bytes[alive & (recording.block_category == place)].sum()) for place in range(len(CATEGORIES))]
    pairs = [(name, total) for name, total in zip(CATEGORIES, totals, strict=True) if total]
    return dict(sorted(pairs, key=lambda pair: -pair[1]))


def largest_at(
    recording: Recording, event: int, held_bytes: NDArray[np.int64], most: int = 10
) -> tuple[LargeBlock, ...]:
    """The largest blocks alive after an event, the largest first."""
    sizes = np.where(_alive(recording, event), held_bytes, 0)
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


def timeline(recording: Recording, played: Replay, most_points: int = MOST_POINTS) -> Timeline:
    """The allocated, reserved and per-category series of a replay, thinned."""
    allocated = played.allocated_bytes
    points = thin(allocated, most_points)
    series = category_series(recording, played.held_bytes)[:, points]
    times = recording.event_time[points]
    starts = np.searchsorted(times, np.array(recording.batch_starts, dtype=np.int64))
    held = [(name, line) for name, line in zip(CATEGORIES, series, strict=True) if line.any()]
    return Timeline(
        clock_bytes=_plain(_clock(recording)[points]), allocated_bytes=_plain(allocated[points]),
        reserved_bytes=_plain(played.reserved_bytes[points]),
        categories={name: _plain(line) for name, line in held},
        phases=tuple(PHASES[phase] for phase in _phases(recording, times).tolist()),
        peak=int(allocated[points].argmax()) if len(points) else -1,
        batch_starts=_plain(starts[starts < len(points)]),
    )  # fmt: skip


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


def _alive(recording: Recording, event: int) -> NDArray[np.bool_]:
    """(blocks,) which are held after an event."""
    alive = np.zeros(recording.blocks, dtype=np.bool_)
    # Of several assignments to one block the last holds: it was freed, or it was not.
    alive[recording.event_block[: event + 1]] = recording.event_allocates[: event + 1]
    return alive


def _clock(recording: Recording) -> NDArray[np.int64]:
    """(events,) bytes asked for since the first batch began."""
    begins = recording.batch_starts[0] if recording.batch_starts else 0
    counts = recording.event_allocates & (recording.event_time >= begins)
    return np.cumsum(np.where(counts, recording.block_bytes[recording.event_block], 0))


def _phases(recording: Recording, times: NDArray[np.int32]) -> NDArray[np.uint8]:
    operators = len(recording.operator_phase)
    if not operators:
        return np.zeros(len(times), dtype=np.uint8)
    return recording.operator_phase[np.clip(times, 0, operators - 1)]


def _plain(values: NDArray[Any]) -> tuple[int, ...]:
    return tuple(values.tolist())
