"""When a training loop frees its gradients, what those of the last step hold meanwhile, and what freeing them saves.

That decides the peak (see `kit.train.levers`); most loops written by hand clear them before the forward pass. The order
is read from a recording of two steps. `freed_after_step` is the same recording with these gradients freed as soon as
the optimizer has stepped, as `levers.zero_grad_after_step` does it; its peak is exact, since nothing else moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kit.memory.replay.replay import CATEGORIES, PHASES, Recording, changes, replay

AFTER_STEP, BEFORE_FORWARD, BEFORE_BACKWARD, NEVER = (
    "after the step", "before the forward pass", "between forward and backward pass", "never"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoopOrder:
    """When gradients are freed, and which are kept into the next step."""

    gradients_freed: str
    """One of the four above, of most bytes; empty where no step follows one with gradients."""
    blocks: NDArray[np.int64]
    """(kept,) the blocks that are kept."""
    begins: NDArray[np.int64]
    """(kept,) the event at which the next step has begun."""
    ends: NDArray[np.int64]
    """(kept,) the event at which each is freed."""


def loop_order(recording: Recording) -> LoopOrder:
    """The order of the loop that was recorded."""
    steps = recording.batch_starts[:: max(1, int(recording.facts.get("accumulate_grad_batches", 1)))]
    kept: list[tuple[int, int, int]] = []
    freed_bytes = dict.fromkeys((AFTER_STEP, BEFORE_FORWARD, BEFORE_BACKWARD, NEVER), 0)
    is_gradient = recording.block_category == CATEGORIES.index("gradients")
    made, freed = _lives(recording)
    backward = recording.operator_phase == PHASES.index("backward")
    outside = [place for place, name in enumerate(recording.names) if not name]  # the empty name: no part of the module
    forward = recording.operator_phase == PHASES.index("forward")
    forward &= ~np.isin(recording.operator_module, outside)
    activations = made[(recording.block_category == CATEGORIES.index("activations")) & (made >= 0)]
    kept_times = recording.event_time[activations]
    for start, following in pairwise(steps):
        after = np.flatnonzero(backward[following:])
        if not len(after):
            continue
        begins, turns = int(np.searchsorted(recording.event_time, following)), following + int(after[0])
        computes = following + int(np.argmax(forward[following:turns])) if forward[following:turns].any() else turns
        in_between = (kept_times >= following) & (kept_times < turns)
        computes = min(computes, int(kept_times[in_between].min(initial=turns)))  # by code of no part, too
        for block in np.flatnonzero(is_gradient & (made >= 0)).tolist():
            if not start <= recording.event_time[made[block]] < following:
                continue
            end, size = int(freed[block]), int(recording.block_bytes[block])
            time = int(recording.event_time[end]) if end >= 0 else len(recording.operator_name)
            if time >= turns:
                freed_bytes[NEVER] += size
            elif time < following:
                freed_bytes[AFTER_STEP] += size
            else:
                freed_bytes[BEFORE_FORWARD if time < computes else BEFORE_BACKWARD] += size
                kept.append((block, begins, end))
    most = max(freed_bytes, key=lambda name: freed_bytes[name])
    columns = np.array(kept, dtype=np.int64).reshape(-1, 3).T
    return LoopOrder(most if freed_bytes[most] else "", *columns)


def _lives(recording: Recording) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(blocks,) the event at which each is made, and that at which it is freed; -1 for neither."""
    made, freed = np.full((2, recording.blocks), -1, dtype=np.int64)
    events = np.arange(len(recording.event_block))
    made[recording.event_block[recording.event_allocates]] = events[recording.event_allocates]
    freed[recording.event_block[~recording.event_allocates]] = events[~recording.event_allocates]
    return made, freed


def freed_after_step(recording: Recording, order: LoopOrder) -> Recording:
    """The recording with the kept gradients freed before the next step begins."""
    if not len(order.blocks):
        return recording
    events = np.arange(len(recording.event_block), dtype=np.float64)
    events[order.ends] = order.begins - 0.5
    places = np.argsort(events, kind="stable")
    times = recording.event_time.copy()
    times[order.ends] = recording.event_time[np.maximum(order.begins - 1, 0)]
    return replace(
        recording, event_block=recording.event_block[places], event_allocates=recording.event_allocates[places],
        event_time=times[places],
    )  # fmt: skip


def saved_bytes(recording: Recording, order: LoopOrder, peak_bytes: int) -> int:
    """How much lower than `peak_bytes` the allocated peak is when the kept gradients are freed after the step."""
    if not len(order.blocks):
        return 0
    sooner, sizes = freed_after_step(recording, order), recording.rounded_bytes
    if not _peak(recording, sizes) > _peak(sooner, sizes):
        return 0
    return max(0, peak_bytes - replay(sooner).peak_allocated_bytes)


def _peak(recording: Recording, sizes: NDArray[np.int64]) -> int:
    return int(np.cumsum(changes(recording, sizes)).max(initial=0))
