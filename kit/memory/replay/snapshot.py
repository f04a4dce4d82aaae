"""A run in the form in which torch keeps one: a prediction written so, and a real one read.

The dictionary is that of `torch.cuda.memory._snapshot()`: segments with their blocks as they stand at the end, and the
trace of everything that happened before. Where a real snapshot has a stack, a predicted one has the operator with its
category, the module with its phase, and the line of code where it is known. Load the file at pytorch.org/memory_viz or
with torch.cuda._memory_viz.

Times of a prediction count operators, not microseconds. `user_metadata` says the micro-batch, as `batch 3`, from 0.

What is read is what was held when memory ran out, or else at the end, by who asked for it (`owner_here`): the innermost
line outside Python, torch, Lightning and kit, or what those do without such a line. It is found from the segments, with
what came after undone, so it holds also where the trace has lost its beginning. Files are pickles; they are read by an
unpickler that makes plain values only.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kit.errors import TrialError
from kit.json_text import write_whole
from kit.memory.replay.allocator import ACTIVE, MIN_BLOCK_BYTES, Block, CachingAllocator
from kit.memory.replay.estimate import alive_after
from kit.memory.replay.replay import CATEGORIES, PHASES, Recording

Entry = dict[str, Any]


MOST_BYTES = 64 << 20
"""Of a file."""
NO_LINE = {
    "parameters": "parameters and buffers", "inputs": "the batch", "gradients": "the backward pass, gradients included",
    "optimizer_state": "the optimizer, its state included", "elsewhere": "torch and Lightning elsewhere",
}  # fmt: skip
"""Owners that are no line of code, in words."""


def save_snapshot(path: str | Path, snapshot: Mapping[str, Any], most_bytes: int | None = None) -> Path:
    """Write a snapshot to a file, in one step; of a trace that is too long for `most_bytes` the end is kept."""
    stacks: dict[str, Any] = {}
    kept = {**snapshot, "device_traces": [[_slim(entry, stacks) for entry in one] for one in snapshot["device_traces"]]}
    kept["segments"] = [
        {**one, "blocks": [_slim(block, stacks) for block in one["blocks"]]} for one in snapshot["segments"]
    ]
    data = pickle.dumps(kept)
    while most_bytes is not None and len(data) > most_bytes and any(kept["device_traces"]):
        kept["device_traces"] = [one[len(one) - len(one) // 2 :] for one in kept["device_traces"]]
        data = pickle.dumps(kept)
    return write_whole(Path(path), data)


def _slim(entry: Entry, stacks: dict[str, Any]) -> Entry:
    """The entry with a stack that it shares with all that have an equal one: a pickle holds that once."""
    frames = entry.get("frames") or []
    return {**entry, "frames": stacks.setdefault(repr(frames), frames)}


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
        self._frames, self._starts = _frames(recording), recording.batch_starts
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
        micro_batch = bisect_right(self._starts, self._now) - 1
        batch = {"user_metadata": batch_words(micro_batch)} if micro_batch >= 0 else {}
        self.trace.append({**entry, "time_us": self._now, **batch, **more})

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
    names, blocks = recording.names, recording.blocks
    lines = recording.block_line.tolist() or [0] * blocks
    columns = (recording.block_operator, recording.block_category, recording.block_module, recording.block_phase)
    return [
        [
            {"name": names[operator] or "-", "filename": CATEGORIES[category], "line": 0},
            {"name": names[module] or "-", "filename": PHASES[phase], "line": 0},
            *_frame_of(names[line] if line else ""),
        ]
        for operator, category, module, phase, line in zip(*(it.tolist() for it in columns), lines, strict=True)
    ]


def _frame_of(owner: str) -> list[Entry]:
    match = _LINE.fullmatch(owner)
    return [{"name": match[3], "filename": match[1], "line": int(match[2])}] if match else []


def snapshot_of(
    trace: Iterable[tuple[str, int, int, str, int]], held: Iterable[tuple[int, int, str]]
) -> dict[str, Any]:
    """A snapshot of a device without segments.

    Args:
        trace: (action, address, bytes, owner, micro-batch) of each event.
        held: (address, bytes, owner) of what is there at the end.
    """
    stack = functools.cache(lambda owner: _frame_of(owner) or [{"name": "-", "filename": owner, "line": 0}])
    blocks: list[Entry] = [
        {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": stack(owner)}
        for address, size, owner in held
    ]
    total = sum(block["size"] for block in blocks)
    segment = {
        "device": 0, "address": 0, "total_size": total, "allocated_size": total, "active_size": total, "stream": 0,
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
    entries = [
        {
            "action": action, "addr": address, "size": size, "stream": 0, "frames": stack(owner), "time_us": time,
            "user_metadata": batch_words(batch) if batch >= 0 else "",
        }
        for time, (action, address, size, owner, batch) in enumerate(trace)
    ]  # fmt: skip
    return {
        "segments": [segment], "device_traces": [entries], "allocator_settings": {"rounding_bytes": 1},
        "external_annotations": [],
    }  # fmt: skip


def batch_words(micro_batch: int) -> str:
    """What `user_metadata` says."""
    return f"batch {micro_batch}"


# -- who asked for it

_LINE = re.compile(r"(.+), line (\d+), in (.+)")
_KIT = Path(__file__).parents[2].as_posix()
_USERS = (f"{_KIT}/models/", f"{_KIT}/testing.py")
"""Parts of kit that count as code of users."""
_MACHINERY = re.compile(
    r"<|.*/(site|dist)-packages/(torch|torchgen|functorch|lightning|pytorch_lightning|lightning_fabric|kit)/(?!.*/demos/)"
    r"|.*/lib(64)?/python3[^/]*/(?!site-packages|dist-packages)"
)
_LOOKED = 200
"""Frames that are looked at."""


def owner_here() -> str:
    """Who asks for memory now: `/path/model.py, line 34, in forward`, or a key of `NO_LINE`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LOOKED):
        if frame is None:
            break
        kind = _kind(frame.f_code.co_filename, frame.f_code.co_name)
        if kind:
            return kind if kind in NO_LINE else _place(frame)
        frame = frame.f_back
    return "elsewhere"


def line_of(frame: FrameType) -> str:
    """`/path/model.py, line 34, in forward` for code of users and packages; empty for that of torch and Lightning."""
    return _place(frame) if _kind(frame.f_code.co_filename, frame.f_code.co_name) == "line" else ""


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


@functools.lru_cache(maxsize=4096)
def _kind(file: str, function: str) -> str:
    """`line` for code of users and of packages; else a key of `NO_LINE`, or empty where the caller decides."""
    path = file.replace("\\", "/")
    if path.endswith("torch/autograd/graph.py") and function == "_engine_run_backward":
        return "gradients"
    if "/torch/optim/" in path:
        return "optimizer_state"
    if path.endswith("torch/nn/modules/module.py") and function == "_apply":
        return "parameters"
    if function == "move_data_to_device" and "lightning" in path:
        return "inputs"
    in_kit = path.startswith(f"{_KIT}/") and not path.startswith(_USERS)
    return "" if in_kit or _MACHINERY.match(path) else "line"


def _owner(frames: Iterable[Mapping[str, Any]]) -> str:
    """Who asked, by a stack, innermost first. Autograd's own thread on a GPU has none."""
    found = list(frames)
    if not found:
        return "gradients"
    if found[0]["line"] == 0 and found[0]["filename"] in (*CATEGORIES, *NO_LINE):  # written by kit
        line = "".join(f"{one['filename']}, line {one['line']}, in {one['name']}" for one in found[2:3])
        return _owner_of(found[0]["filename"], found[1]["filename"] if len(found) > 1 else "", line)
    for one in found:
        kind = _kind(one["filename"], one["name"])
        if kind:
            return kind if kind in NO_LINE else f"{one['filename']}, line {one['line']}, in {one['name']}"
    return "elsewhere"


def _owner_of(category: str, phase: str, line: str) -> str:
    """Who asked for a block of a prediction."""
    if category in ("parameters", "gradients", "optimizer_state", "inputs"):
        return category
    if phase == "setup":
        return "parameters"
    if line:
        return line
    return {"backward": "gradients", "optimizer": "optimizer_state"}.get(phase, "elsewhere")


def owners_of(recording: Recording) -> list[str]:
    """Who asked for each block."""
    names, lines = recording.names, recording.block_line.tolist() or [0] * recording.blocks
    columns = zip(recording.block_category.tolist(), recording.block_phase.tolist(), lines, strict=True)
    words = [(CATEGORIES[category], PHASES[phase], names[line] if line else "") for category, phase, line in columns]
    return [_owner_of(*one) for one in words]


# -- reading


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner holds."""

    owner: str
    """A line, as `owner_here` writes it, or a key of `NO_LINE`."""
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What a device held when memory ran out, and how it came to that."""

    holdings: tuple[Holding, ...]
    """The largest first; they add up to `allocated_bytes`."""
    allocated_bytes: int
    reserved_bytes: int
    asked_bytes: int
    """The request that could not be met; 0 where memory did not run out."""
    asked_by: str
    """As `owner_here` writes it; empty where memory did not run out."""
    series: NDArray[np.int64]
    """(events,) allocated after each request or release of the trace."""
    requested: NDArray[np.int64]
    """(events,) bytes asked for, 0 for a release."""
    batch: NDArray[np.int64]
    """(events,) the micro-batch, from 0; -1 where none had begun or nobody told."""
    owners: tuple[str, ...]
    """(events,) who asked; empty for a release."""


def load_snapshot(path: str | Path) -> DeviceMemory:
    """Read a file that torch or kit wrote; only plain values are made of it.

    Raises:
        TrialError: when it is no snapshot.
    """
    try:
        return read_snapshot(_Plain(io.BytesIO(Path(path).read_bytes())).load())
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise TrialError(f"{path} is no snapshot of memory: {type(error).__name__}: {error}") from error


class _Plain(pickle.Unpickler):
    """Makes no object but Python's own containers, numbers and texts."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no snapshot holds")


_GIVEN, _TAKEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


def read_snapshot(snapshot: Mapping[str, Any], device: int | None = None) -> DeviceMemory:
    """What a snapshot says of a device, by default of the one that ran out of memory, or that did most."""
    traces = snapshot["device_traces"]
    ends = [next((at for at in reversed(range(len(one))) if one[at]["action"] == "oom"), None) for one in traces]
    failed = [place for place, end in enumerate(ends) if end is not None]
    busiest = max(range(len(traces)), key=lambda place: len(traces[place]), default=0)
    place = device if device is not None else (failed or [busiest])[0]
    end = ends[place]
    trace = traces[place] if end is None else traces[place][:end]
    after = [] if end is None else traces[place][end + 1 :]
    asked = None if end is None else traces[place][end]
    unit = int((snapshot.get("allocator_settings") or {}).get("rounding_bytes", MIN_BLOCK_BYTES))
    segments = [one for one in snapshot["segments"] if one.get("device", 0) == place]
    alive = _alive(segments, trace, after, unit)
    totals, counts = defaultdict[str, int](int), Counter[str]()
    for size, frames in alive.values():
        totals[_owner(frames)] += size
        counts[_owner(frames)] += 1
    holdings = [Holding(owner, size, counts[owner]) for owner, size in totals.items()]
    allocated = sum(totals.values())
    moved = [one for one in trace if one["action"] in ("alloc", "free_requested") and one["size"]]
    signed = [_rounded(one["size"], unit) * (1 if one["action"] == "alloc" else -1) for one in moved]
    steps = np.array(signed, dtype=np.int64)
    given = sum(one["size"] * ((one["action"] in _TAKEN) - (one["action"] in _GIVEN)) for one in after)
    return DeviceMemory(
        holdings=tuple(sorted(holdings, key=lambda one: -one.bytes)), allocated_bytes=allocated,
        reserved_bytes=sum(one["total_size"] for one in segments) + given,
        asked_bytes=0 if asked is None else int(asked["size"]),
        asked_by="" if asked is None else _owner(asked.get("frames") or []),
        series=allocated - steps.sum() + np.cumsum(steps),
        requested=np.array([one["size"] * (one["action"] == "alloc") for one in moved], dtype=np.int64),
        batch=np.array([_batch(one) for one in moved], dtype=np.int64),
        owners=tuple(_owner(one.get("frames") or []) if one["action"] == "alloc" else "" for one in moved),
    )  # fmt: skip


def _alive(segments: list[Entry], trace: list[Entry], after: list[Entry], unit: int) -> dict[int, tuple[int, Any]]:
    """Address to (bytes, stack) of what was held at the end of `trace`."""
    alive = {
        block["address"]: (int(block["size"]), block.get("frames") or [])
        for segment in segments
        for block in _placed(segment)
        if block["state"] == "active_allocated"
    }
    made = {one["addr"]: one.get("frames") or [] for one in trace if one["action"] == "alloc"} if after else {}
    for one in reversed(after):
        if one["action"] == "alloc":
            alive.pop(one["addr"], None)
        elif one["action"] == "free_requested":
            alive[one["addr"]] = (_rounded(one["size"], unit), made.get(one["addr"], []))
    return alive


def _placed(segment: Entry) -> Iterable[Entry]:
    """The blocks of a segment with their addresses, which older versions of torch leave out."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += block["size"]


def _rounded(size: int, unit: int) -> int:
    return -(-int(size) // unit) * unit


def _batch(entry: Entry) -> int:
    match = re.fullmatch(r"batch (\d+)", entry.get("user_metadata") or "")
    return int(match[1]) if match else -1


# -- beside a prediction


def moment_of(recording: Recording, memory: DeviceMemory) -> int:
    """The event of a prediction up to which it has asked for what was asked for when memory ran out.

    It is found by the last request that both know, by owner and bytes, and how often it came before in its micro-batch;
    so what only one of them knows moves nothing. Where they share none, it is found by the bytes asked for.
    """
    micro_batch = max(0, int(memory.batch[-1])) if len(memory.batch) else 0
    starts = [*np.searchsorted(recording.event_time, recording.batch_starts).tolist(), len(recording.event_block)]
    here = min(micro_batch, len(starts) - 2)
    first, end = starts[here], starts[here + 1]
    owners, blocks = owners_of(recording), recording.event_block.tolist()
    allocates, sizes = recording.event_allocates.tolist(), recording.block_bytes.tolist()
    asked = [event for event in range(first, end) if allocates[event]]
    wanted = [(owners[blocks[event]], sizes[blocks[event]]) for event in asked]
    known = dict(zip(_counted(wanted), asked, strict=True))
    mine = [at for at in np.flatnonzero(memory.batch == micro_batch).tolist() if memory.requested[at]]
    keys = _counted([(memory.owners[at], int(memory.requested[at])) for at in mine])
    shared = next((known[key] for key in reversed(keys) if key in known), None)
    if shared is None:
        asked_bytes = np.cumsum([sizes[blocks[event]] for event in asked])
        so_far = int(memory.requested[mine].sum())
        after = int(np.searchsorted(asked_bytes, so_far, side="right"))
        return (asked[after] if after < len(asked) else end) - 1
    return next((event for event in asked if event > shared), end) - 1


def _counted(keys: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Each with how often it came before."""
    seen = Counter[tuple[str, int]]()
    found = []
    for key in keys:
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def predicted_holdings(recording: Recording, event: int, held_bytes: NDArray[np.int64]) -> dict[str, int]:
    """Owner to bytes held after an event of a prediction."""
    alive = alive_after(recording, event)
    owners, totals = owners_of(recording), defaultdict[str, int](int)
    for block in np.flatnonzero(alive & (held_bytes > 0)).tolist():
        totals[owners[block]] += int(held_bytes[block])
    return dict(totals)
