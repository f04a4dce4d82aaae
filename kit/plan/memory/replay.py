"""A recording played through the allocator of its device: what it reserves, and whether it runs out under a limit.

Recordings of CUDA go through `CachingAllocator`. On the CPU nothing is cached: reserved bytes are allocated bytes, and
a limit is met when these pass it. Bytes are as the device counts them: a block may hold more than was asked for.

The invariant: events are played in their order, up to the first request that cannot be met and no further.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kit.plan.memory.allocator import CachingAllocator, OutOfMemory
from kit.plan.memory.blocks import MIN_BLOCK_BYTES, Block
from kit.plan.memory.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the device held after each event."""

    allocated_bytes: NDArray[np.int64]
    """(events played,)"""
    reserved_bytes: NDArray[np.int64]
    """(events played,)"""
    held_bytes: NDArray[np.int64]
    """(blocks,) what each block took of the device; 0 for those never reached."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    """How often everything unused had to be given back to the driver."""
    out_of_memory: OutOfMemory | None
    """The request at which it ended, or None when all events were played."""


def replay(
    recording: Recording,
    *,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
    fixed_bytes: int = 0,
) -> Replay:
    """Play a recording; `capacity_bytes` is what the allocator may reserve, `fixed_bytes` are held all along."""
    if is_cached(recording):
        allocator = CachingAllocator(capacity_bytes, expandable_segments)
        return _play(recording, allocator, fixed_bytes)
    return _add_up(recording, capacity_bytes, fixed_bytes)


def is_cached(recording: Recording) -> bool:
    """Whether the device's allocator caches what is freed: CUDA's does, the CPU's does not."""
    return recording.rounding_bytes == MIN_BLOCK_BYTES


def _play(recording: Recording, allocator: CachingAllocator, fixed_bytes: int) -> Replay:
    blocks, allocates = _events(recording)
    sizes, streams = recording.block_bytes.tolist(), recording.block_stream.tolist()
    held = [0] * len(sizes)
    alive: dict[int, Block] = {}
    reserved: list[int] = []
    malloc, free, note = allocator.malloc, allocator.free, reserved.append
    started = not fixed_bytes or malloc(fixed_bytes) is not None
    base = allocator.allocated_bytes
    for block, allocate in zip(blocks, allocates, strict=True) if started else ():
        if not sizes[block]:
            pass
        elif allocate:
            place = malloc(sizes[block], streams[block])
            if place is None:
                break
            alive[block] = place
            held[block] = place.size_bytes
        else:
            free(alive.pop(block))
        note(allocator.reserved_bytes)
    held_bytes = np.array(held, dtype=np.int64)
    allocated = base + running_total(recording, held_bytes)[: len(reserved)]
    return Replay(
        allocated_bytes=allocated, reserved_bytes=np.array(reserved, dtype=np.int64), held_bytes=held_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes, peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries, out_of_memory=allocator.out_of_memory,
    )  # fmt: skip


def _events(recording: Recording) -> tuple[list[int], list[bool]]:
    return recording.event_block.tolist(), recording.event_allocates.tolist()


def _add_up(recording: Recording, capacity_bytes: int | None, fixed_bytes: int) -> Replay:
    """The CPU's case: no cache, so that sums will do."""
    held = recording.rounded_bytes
    allocated = fixed_bytes + running_total(recording, held)
    over = allocated > capacity_bytes if capacity_bytes is not None else np.zeros(len(allocated), dtype=np.bool_)
    failed = None
    if over.any():
        event = int(over.argmax())
        before = int(allocated[event - 1]) if event else fixed_bytes
        failed = OutOfMemory(int(held[recording.event_block[event]]), before, before)
        allocated = allocated[:event]
    peak = max(int(allocated.max(initial=0)), fixed_bytes)
    return Replay(
        allocated_bytes=allocated, reserved_bytes=allocated, held_bytes=held, peak_allocated_bytes=peak,
        peak_reserved_bytes=peak, retries=0, out_of_memory=failed,
    )  # fmt: skip


def running_total(recording: Recording, held_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """(events,) the sum of the blocks alive after each event."""
    return np.cumsum(changes(recording, held_bytes))


def changes(recording: Recording, held_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """(events,) what each event adds, or takes away."""
    sizes = held_bytes[recording.event_block]
    return np.where(recording.event_allocates, sizes, -sizes)
