"""A predicted run in the form in which torch keeps a real one, so that its memory viewer draws it.

The dictionary is that of `torch.cuda.memory._snapshot()`: segments with their blocks as they stand at the end, and the
trace of everything that happened before. Where a real snapshot has a stack, this has two frames: the operator with its
category, and the module with its phase. Load the file at pytorch.org/memory_viz or with torch.cuda._memory_viz.

Times count operators, not microseconds. Files are written, never read: they are pickles.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from kit.memory.replay.allocator import ACTIVE, Block, CachingAllocator
from kit.memory.replay.replay import CATEGORIES, PHASES, Recording

Entry = dict[str, Any]


def write_snapshot(
    path: str | Path,
    recording: Recording,
    *,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
) -> Path:
    """Write `to_snapshot` to a file, in one step, and return its path."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    snapshot = to_snapshot(recording, capacity_bytes=capacity_bytes, expandable_segments=expandable_segments)
    try:
        draft.write_bytes(pickle.dumps(snapshot))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def to_snapshot(
    recording: Recording, *, capacity_bytes: int | None = None, expandable_segments: bool = False
) -> dict[str, Any]:
    """The recording as torch's memory viewer takes it, ending where memory runs out if it does.

    A recording of the CPU is drawn too, in the segments that CUDA would have used for it.
    """
    writer = _Writer(recording, capacity_bytes, expandable_segments)
    for block, allocates, time in zip(
        recording.event_block.tolist(), recording.event_allocates.tolist(), recording.event_time.tolist(), strict=True
    ):
        if recording.block_bytes[block] and not writer.play(block, allocates, time):
            break
    owners = {id(place): block for block, place in writer.alive.items()}
    return {
        "segments": [writer.segment_entry(places, owners) for places in writer.allocator.segments()],
        "device_traces": [writer.trace], "allocator_settings": {"expandable_segments": expandable_segments},
        "external_annotations": [],
    }  # fmt: skip


class _Writer:
    """The trace of a replay: an entry for each event, and for what the driver gave or got back meanwhile."""

    def __init__(self, recording: Recording, capacity_bytes: int | None, expandable_segments: bool) -> None:
        self.allocator = CachingAllocator(capacity_bytes, expandable_segments, self._driver)
        self.trace: list[Entry] = []
        self.alive: dict[int, Block] = {}
        self._sizes, self._streams = recording.block_bytes.tolist(), recording.block_stream.tolist()
        self._frames = _frames(recording)
        self._now = self._block = 0

    def play(self, block: int, allocates: bool, time: int) -> bool:
        """Play one event; False when memory runs out."""
        self._block, self._now = block, time
        size, stream = self._sizes[block], self._streams[block]
        if not allocates:
            place = self.alive.pop(block)
            address = place.address
            self.allocator.free(place)
            for action in ("free_requested", "free_completed"):
                self._note(action, address, size, stream)
            return True
        found = self.allocator.malloc(size, stream)
        if found is None:
            free = (self.allocator.capacity_bytes or 0) - self.allocator.reserved_bytes
            self._note("oom", free, size, stream, device_free=free)
            return False
        self.alive[block] = found
        self._note("alloc", found.address, size, stream)
        return True

    def _driver(self, address: int, size: int, stream: int) -> None:
        given, taken = ("map", "unmap") if self.allocator.expandable_segments else ("alloc", "free")
        self._note(f"segment_{given if size > 0 else taken}", address, abs(size), stream)

    def _note(self, action: str, address: int, size: int, stream: int, **more: int) -> None:
        frames = self._frames[self._block]
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames}
        self.trace.append({**entry, "time_us": self._now, **more})

    def segment_entry(self, places: list[Block], owners: dict[int, int]) -> Entry:
        pool = places[0].pool
        blocks: list[Entry] = []
        for place in places:
            entry: Entry = {
                "address": place.address, "size": place.size_bytes, "requested_size": 0, "state": "inactive",
                "frames": [],
            }  # fmt: skip
            if (block := owners.get(id(place))) is not None:
                requested = self._sizes[block]
                entry |= {"requested_size": requested, "state": "active_allocated", "frames": self._frames[block]}
            blocks.append(entry)
        active = sum(place.size_bytes for place in places if place.state == ACTIVE)
        return {
            "device": 0, "address": places[0].address, "total_size": sum(place.size_bytes for place in places),
            "allocated_size": active, "active_size": active,
            "requested_size": sum(entry["requested_size"] for entry in blocks), "stream": pool.stream,
            "segment_type": "small" if pool.is_small else "large", "segment_pool_id": (0, 0),
            "is_expandable": self.allocator.expandable_segments, "frames": [], "blocks": blocks,
        }  # fmt: skip


def _frames(recording: Recording) -> list[list[Entry]]:
    """Per block, what stands for a stack."""
    names = recording.names
    columns = (recording.block_operator, recording.block_category, recording.block_module, recording.block_phase)
    return [
        [
            {"name": names[operator] or "-", "filename": CATEGORIES[category], "line": 0},
            {"name": names[module] or "-", "filename": PHASES[phase], "line": 0},
        ]
        for operator, category, module, phase in zip(*(column.tolist() for column in columns), strict=True)
    ]
