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
    return _Writer(recording, capacity_bytes, expandable_segments).written()


class _Writer:
    def __init__(self, recording: Recording, capacity_bytes: int | None, expandable_segments: bool) -> None:
        self.recording = recording
        self.allocator = CachingAllocator(capacity_bytes, expandable_segments, self._segment)
        self.trace: list[Entry] = []
        self.alive: dict[int, Block] = {}
        self.frames = _frames(recording)
        self.now = self.block = 0

    def written(self) -> dict[str, Any]:
        events = self.recording
        for block, allocates, time in zip(
            events.event_block.tolist(), events.event_allocates.tolist(), events.event_time.tolist(), strict=True
        ):
            self.block, self.now = block, time
            if not events.block_bytes[block]:
                continue
            if not allocates:
                self._free()
            elif not self._allocate():
                break
        settings = {"expandable_segments": self.allocator.expandable_segments}
        return {
            "segments": self._segments(), "device_traces": [self.trace], "allocator_settings": settings,
            "external_annotations": [],
        }  # fmt: skip

    def _allocate(self) -> bool:
        size, stream = self._size(), self._stream()
        place = self.allocator.malloc(size, stream)
        if place is None:
            free = (self.allocator.capacity_bytes or 0) - self.allocator.reserved_bytes
            self._note("oom", free, size, stream, device_free=free)
            return False
        self.alive[self.block] = place
        self._note("alloc", place.address, size, stream)
        return True

    def _free(self) -> None:
        place = self.alive.pop(self.block)
        address = place.address
        self.allocator.free(place)
        for action in ("free_requested", "free_completed"):
            self._note(action, address, self._size(), self._stream())

    def _segment(self, address: int, size: int, stream: int) -> None:
        """The driver gave memory, or got it back."""
        given, taken = (
            ("segment_map", "segment_unmap")
            if self.allocator.expandable_segments
            else ("segment_alloc", "segment_free")
        )
        self._note(given if size > 0 else taken, address, abs(size), stream)

    def _note(self, action: str, address: int, size: int, stream: int, **more: int) -> None:
        frames = self.frames[self.block]
        self.trace.append(
            {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames, "time_us": self.now}
            | more
        )

    def _size(self) -> int:
        return int(self.recording.block_bytes[self.block])

    def _stream(self) -> int:
        return int(self.recording.block_stream[self.block])

    def _segments(self) -> list[Entry]:
        owners = {id(place): block for block, place in self.alive.items()}
        return [self._segment_entry(blocks, owners) for blocks in self.allocator.segments()]

    def _segment_entry(self, blocks: list[Block], owners: dict[int, int]) -> Entry:
        pool = blocks[0].pool
        entries = [self._block_entry(block, owners.get(id(block))) for block in blocks]
        active = sum(block.size_bytes for block in blocks if block.state == ACTIVE)
        requested = sum(entry["requested_size"] for entry in entries if entry["state"] == "active_allocated")
        return {
            "device": 0, "address": blocks[0].address, "total_size": sum(block.size_bytes for block in blocks),
            "allocated_size": active, "active_size": active, "requested_size": requested, "stream": pool.stream,
            "segment_type": "small" if pool.is_small else "large", "segment_pool_id": (0, 0),
            "is_expandable": self.allocator.expandable_segments, "frames": [], "blocks": entries,
        }  # fmt: skip

    def _block_entry(self, place: Block, block: int | None) -> Entry:
        if block is None:
            return {
                "address": place.address, "size": place.size_bytes, "requested_size": 0, "state": "inactive",
                "frames": [],
            }  # fmt: skip
        return {
            "address": place.address, "size": place.size_bytes,
            "requested_size": int(self.recording.block_bytes[block]), "state": "active_allocated",
            "frames": self.frames[block],
        }  # fmt: skip


def _frames(recording: Recording) -> list[list[Entry]]:
    """Per block, what stands for a stack."""
    names = recording.names
    return [
        [
            {"name": names[operator] or "-", "filename": CATEGORIES[category], "line": 0},
            {"name": names[module] or "-", "filename": PHASES[phase], "line": 0},
        ]
        for operator, category, module, phase in zip(
            recording.block_operator.tolist(), recording.block_category.tolist(), recording.block_module.tolist(),
            recording.block_phase.tolist(), strict=True,
        )
    ]  # fmt: skip
