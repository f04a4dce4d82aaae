"""Recording: every allocation of a few training steps, as columns of numbers; `replay` plays it through an allocator.

A block is one piece of device memory, from the operator that allocates it to the one after which it is freed. A
recording comes from fake tensors (nothing was allocated) or from real ones, and looks the same. It holds numbers and
names only, no tensor and no module, so that a kernel without torch can replay it at another batch size or limit.

Invariants: each block is allocated once and freed at most once, events are in the order in which they happened, and a
block's bytes are as requested. A replay rounds them as the device's allocator does, and stops at the first request that
cannot be met. CUDA's allocator caches what is freed (`kit.memory.replay.allocator`); the CPU's does not, so there
reserved bytes are allocated bytes.

A fake tensor has no value to branch on, so `kit.memory.record.fakes` guesses, and `facts["guesses"]` of a recording
says where. `settle` has it recorded again with one guess at a time turned, as long as that is cheap, and leaves in the
facts

    conditions       guesses that the memory depends on, or that were not tried; a verdict holds only if they do
    bounds           selections that were taken whole: fewer elements need less
    least_fraction   of the peak, with one element selected instead of all, the smallest that was seen
    selected         operators that are called with other sizes when one element is selected instead of all; None where
                     others run then, or where that was not tried
    otherwise        the guess that is turned in the recording, if any

Of a condition's two answers the one that needs more is kept, so that it is no condition any more; an answer at which
the training raises an error of its own ends the training, and is none either. What an optimizer asks stays a condition
where it matters, as its answers change from step to step. What waits longer than was followed stays one too
(`facts["waits"]`). Where the step breaks with all guesses as they are, the first turned one with which it does not is a
condition. Known limit: guesses are turned one at a time, so two that only matter together pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.json_text import read_json
from kit.machine.processes import garbage_collection_paused
from kit.memory.replay.allocator import MIN_BLOCK_BYTES, Block, CachingAllocator, OutOfMemory
from kit.units import format_bytes

CATEGORIES = (
    "parameters", "buffers", "gradients", "optimizer_state", "inputs", "activations", "autocast_cache",
    "gathered_parameters", "communication", "workspace", "temporaries", "last_gradients",
)  # fmt: skip
"""What a block is for, in the order in which it is drawn. `activations` outlive the forward pass that made them,
`temporaries` do not; `workspace` is what a kernel takes for itself; `gathered_parameters` are unsharded copies;
`gradients` count as `last_gradients` from the begin of the next step until they are freed. Kept by number."""

EVALUATIONS = ("validation", "test", "predict")
"""Phases of no step."""
PHASES = ("setup", "forward", "backward", "optimizer", "other", *EVALUATIONS)
"""When an operator ran. Everything that was there before the first batch is `setup`. Kept by number: add at the end."""


@dataclass(frozen=True)
class Recording:
    """Blocks, the events of their lives, and the operators between which these happened.

    Arrays are of shape (blocks,), (events,) or (operators,). Names are kept once, in `names`, and referred to by index.
    """

    block_bytes: NDArray[np.int64]
    """(blocks,) as requested."""
    block_category: NDArray[np.uint8]
    """(blocks,) index into CATEGORIES."""
    block_operator: NDArray[np.int32]
    """(blocks,) index into names: the operator that made it."""
    block_module: NDArray[np.int32]
    """(blocks,) index into names: the module it was made in."""
    block_phase: NDArray[np.uint8]
    """(blocks,) index into PHASES."""
    block_stream: NDArray[np.uint8]
    """(blocks,) CUDA stream it was made on: 0 computes, others communicate."""
    event_block: NDArray[np.int32]
    """(events,) the block that is allocated or freed."""
    event_allocates: NDArray[np.bool_]
    """(events,) True when it is allocated, False when it is freed."""
    event_time: NDArray[np.int32]
    """(events,) index of the operator during which, or after which, it happened; never falls."""
    operator_name: NDArray[np.int32]
    """(operators,) index into names."""
    operator_module: NDArray[np.int32]
    """(operators,) index into names."""
    operator_phase: NDArray[np.uint8]
    """(operators,) index into PHASES."""
    names: tuple[str, ...]
    batch_starts: tuple[int, ...]
    """Index of the first operator of each micro-batch."""
    batch_size: int
    """Samples per micro-batch on this device."""
    rounding_bytes: int
    """What the device's allocator rounds blocks up to: 512 for CUDA, 1 on the CPU."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What goes with the numbers, as JSON values: `parameters`, `trainable_parameters`, `world_size`, `strategy`,
    `precision`, `device_kind` ("cuda" or "cpu"), `accumulate_grad_batches`, `seconds` (to record), `notes` (list of
    sentences: branches taken blindly, fallbacks), `unknown` (why activations are missing; empty when they are not); of
    one device `units` (what fsdp would gather at a time: name, elements of parameters with and without a gradient) and
    `buffers` (elements of each, by format); `asks_devices` (a line that asks how many devices there are, if any)."""
    block_line: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """(blocks,) index into names: the line that asked for it, or what did (`snapshot.owner_here`); 0 where unknown."""
    operator_call: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """(operators,) index into calls, or `NO_CALL`; empty in recordings of before 0.2."""
    calls: tuple[Any, ...] = ()
    """Distinct calls of operators as JSON values (`kit.memory.replay.calls`)."""
    operator_recomputes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """(operators,) number of the checkpointed call, from 1 on, that a backward pass runs again with it; 0 for all
    others. Empty where an earlier kit recorded."""

    @property
    def blocks(self) -> int:
        return len(self.block_bytes)

    @property
    def rounded_bytes(self) -> NDArray[np.int64]:
        """(blocks,) as the device's allocator counts them."""
        unit = self.rounding_bytes
        return -(-self.block_bytes // unit) * unit

    def save(self, path: str | Path) -> None:
        """Write it to a `.npz` file, in one step: a reader sees all of it or nothing."""
        meta = {name: getattr(self, name) for name in _PLAIN}
        save_arrays(path, meta, {name: getattr(self, name) for name in _ARRAYS}, np.savez)

    @classmethod
    @garbage_collection_paused()
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote; no pickle is opened."""
        meta, arrays = load_arrays(path)
        meta |= {name: tuple(meta.get(name, ())) for name in ("names", "batch_starts", "calls")}
        return cls(**arrays, **meta)


NO_CALL = -1
"""In place of a call: an operator of set-up."""
GUESSED_CONDITION = "the condition at"
"""What a guessed branch of the step begins with among `facts["guesses"]`."""
UPPER_BOUND = ", an upper bound"
"""How a guess ends that can only be too high."""
STEPS = 2
"""Optimizer steps recorded: the first makes the state that the second steps with."""
NOTHING_TRAINED = "nothing is trained: "
"""What a note begins with that says why no weight changes."""
DIFFERING = ("samples differ in size: ", "batches differ in size: ")
"""What a note begins with that says how large a batch was taken to be: most batches are smaller."""
MASKED = "a mask is taken to hide "
"""What a note begins with where a step holds more or less with another mask than the one it was predicted with."""
ON_AVERAGE = "; on average a batch is {:.2f} of that"
"""How such a note ends where the sizes of others are known."""
_PLAIN = ("names", "batch_starts", "batch_size", "rounding_bytes", "facts", "calls")
_ARRAYS = tuple(item.name for item in fields(Recording) if item.name not in _PLAIN)


def save_arrays(
    path: str | Path, meta: dict[str, Any], arrays: dict[str, NDArray[Any]], write: Callable[..., None]
) -> None:
    """Write arrays, and JSON values beside them, to a `.npz` file, in one step; `write` is numpy's writer."""
    target = Path(path)
    draft = target.with_suffix(".tmp.npz")
    write(draft, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **arrays)
    draft.replace(target)


def load_arrays(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON values and arrays that `save_arrays` wrote; no pickle is opened."""
    with np.load(Path(path)) as stored:
        arrays = dict(stored)
    return read_json(arrays.pop("meta").tobytes()), arrays


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


def replay(recording: Recording, *, capacity_bytes: int | None = None, expandable_segments: bool = False) -> Replay:
    """Play a recording; `capacity_bytes` is what the allocator may reserve."""
    if is_cached(recording):
        return _play_cached(recording, capacity_bytes, expandable_segments)
    return _play_uncached(recording, capacity_bytes)


def is_cached(recording: Recording) -> bool:
    """Whether the device's allocator caches what is freed: CUDA's does, the CPU's does not."""
    return recording.rounding_bytes == MIN_BLOCK_BYTES


def _play_cached(recording: Recording, capacity_bytes: int | None, expandable: bool) -> Replay:
    allocator = CachingAllocator(capacity_bytes, expandable)
    blocks, allocates = recording.event_block.tolist(), recording.event_allocates.tolist()
    sizes, streams = recording.block_bytes.tolist(), recording.block_stream.tolist()
    held = [0] * len(sizes)
    alive: dict[int, Block] = {}
    reserved: list[int] = []
    malloc, free, note = allocator.malloc, allocator.free, reserved.append
    for block, allocate in zip(blocks, allocates, strict=True):
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
    allocated = np.cumsum(changes(recording, held_bytes))[: len(reserved)]
    return Replay(
        allocated_bytes=allocated, reserved_bytes=np.array(reserved, dtype=np.int64), held_bytes=held_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes, peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries, out_of_memory=allocator.out_of_memory,
    )  # fmt: skip


def _play_uncached(recording: Recording, capacity_bytes: int | None) -> Replay:
    held = recording.rounded_bytes
    allocated = np.cumsum(changes(recording, held))
    over = np.flatnonzero(allocated > (np.inf if capacity_bytes is None else capacity_bytes))
    failed = None
    if len(over):
        event = int(over[0])
        before = int(allocated[event - 1]) if event else 0
        failed = OutOfMemory(int(held[recording.event_block[event]]), before, before)
        allocated = allocated[:event]
    peak = int(allocated.max(initial=0))
    return Replay(
        allocated_bytes=allocated, reserved_bytes=allocated, held_bytes=held, peak_allocated_bytes=peak,
        peak_reserved_bytes=peak, retries=0, out_of_memory=failed,
    )  # fmt: skip


def changes(recording: Recording, held_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """(events,) what each event adds, or takes away."""
    sizes = held_bytes[recording.event_block]
    return np.where(recording.event_allocates, sizes, -sizes)


OPERATOR = "cublas_workspace"
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "linear_backward"})


def with_cublas_workspaces(recording: Recording, workspace_bytes: int) -> Recording:
    """The recording with the workspace that cuBLAS keeps for each thread, from its first matrix product on.

    It comes from the caching allocator, but no operator returns it and its size depends on the card, so it is added
    when a recording meets a card. Forward pass and optimizer run on one thread, backward passes on another. A product
    allocates its result first, and the workspace after it.
    """
    names = [place for place, name in enumerate(recording.names) if name.partition(".")[0] in _PRODUCTS]
    products = np.isin(recording.operator_name, names)
    backward = recording.operator_phase == PHASES.index("backward")
    threads = [np.flatnonzero(products & on_thread) for on_thread in (~backward, backward)]
    operators = np.array(sorted(int(found[0]) for found in threads if len(found)))
    count = len(operators)
    if not count or not workspace_bytes:
        return recording
    places = []
    for operator in operators:
        place = int(np.searchsorted(recording.event_time, operator))
        own = place < len(recording.event_time) and recording.event_time[place] == operator
        places.append(place + int(own and recording.event_allocates[place]))

    def longer(values: NDArray[np.generic], more: object) -> NDArray[np.generic]:
        return np.append(values, np.full(count, more, dtype=values.dtype))

    changed = {
        "block_bytes": longer(recording.block_bytes, workspace_bytes),
        "block_category": longer(recording.block_category, CATEGORIES.index("workspace")),
        "block_operator": longer(recording.block_operator, len(recording.names)),
        "block_module": np.append(recording.block_module, recording.operator_module[operators]),
        "block_phase": np.append(recording.block_phase, recording.operator_phase[operators]),
        "block_stream": longer(recording.block_stream, 0),
        "block_line": longer(recording.block_line, 0) if len(recording.block_line) else recording.block_line,
        "event_block": np.insert(recording.event_block, places, recording.blocks + np.arange(count)),
        "event_allocates": np.insert(recording.event_allocates, places, np.ones(count, dtype=np.bool_)),
        "event_time": np.insert(recording.event_time, places, operators),
    }
    return replace(recording, names=(*recording.names, OPERATOR), **changed)  # type: ignore[arg-type]


# -- guesses

OF_OPTIMIZERS = "the optimizer"
"""How a condition begins whose answer changes from step to step."""
MOST_TRIED = 8
MOST_OPERATORS = 100_000
"""How many operators all second answers may record together: 30 seconds or so, and the same guesses on any machine."""


def settle(first: Recording, record_otherwise: Callable[[str], Recording]) -> Recording:
    """The recording that needs most of those with one guess answered the other way, its facts as described above.

    Args:
        first: What was recorded with all guesses as they are.
        record_otherwise: Records once more with this guess answered the other way.
    """
    if first.facts["unknown"]:
        return _answered_otherwise(first, record_otherwise)
    highest, peak, turned = first, _peak(first), ""
    conditions, bounds, least = dict.fromkeys(first.facts["guesses"]), [], 1.0
    selected = None if first.facts.get("silent") else set[int]()
    for guess in _tried(first):
        other = record_otherwise(guess)
        if other.facts["unknown"]:
            if other.facts["refused"]:
                del conditions[guess]
            continue
        needed = _peak(other)
        if guess.endswith(UPPER_BOUND):
            sized = _sized_otherwise(first, other)
            selected = None if selected is None or sized is None else selected | sized
        if guess.endswith(UPPER_BOUND) and needed < peak:
            bounds.append(guess)
            least = min(least, needed / peak)
        if needed == _peak(first) or guess.endswith(UPPER_BOUND) or guess.startswith(GUESSED_CONDITION):
            del conditions[guess]
        if needed > peak:
            highest, peak, turned = other, needed, guess
    for guess in [guess for guess in conditions if guess.endswith(UPPER_BOUND)]:
        del conditions[guess]
        bounds.append(guess)
        selected = None
    new = [guess for guess in highest.facts["guesses"] if guess not in first.facts["guesses"]]
    held = [guess.replace(_IS_FALSE, _IS_TRUE) if guess == turned else guess for guess in conditions]
    facts = {
        "conditions": [*held, *new, *highest.facts.get("waits", ()), *_growth(highest)], "bounds": bounds,
        "least_fraction": least, "otherwise": turned,
        "selected": None if turned or selected is None else sorted(selected),
    }  # fmt: skip
    return replace(highest, facts=highest.facts | facts)


def _sized_otherwise(first: Recording, other: Recording) -> set[int] | None:
    """Operators that are called with other sizes in another recording; None where others run there."""
    ran, ran_then = (np.array(one.names)[one.operator_name] for one in (first, other))
    if not len(first.operator_call) or not np.array_equal(ran, ran_then):
        return None
    calls = [np.array([*map(str, one.calls), ""])[one.operator_call] for one in (first, other)]
    return set(np.flatnonzero(calls[0] != calls[1]).tolist())


def _answered_otherwise(first: Recording, record_otherwise: Callable[[str], Recording]) -> Recording:
    """The first recording that a turned guess makes whole, where the step broke with all as they are: an adapter that a
    random number switches off leaves nothing to train. It holds only if the guess, so turned, does."""
    for guess in first.facts["guesses"][:MOST_TRIED]:
        if guess.endswith(_IS_FALSE):
            other = record_otherwise(guess)
            if not other.facts["unknown"]:
                held = [] if first.facts["refused"] else [guess.replace(_IS_FALSE, _IS_TRUE)]
                more = [condition for condition in other.facts["conditions"] if condition != guess]
                facts = {"conditions": [*held, *more, *_growth(other)], "least_fraction": 1.0, "otherwise": guess}
                return replace(other, facts=other.facts | facts)
    return replace(first, facts=first.facts | {"least_fraction": 1.0, "otherwise": ""})


_IS_FALSE, _IS_TRUE = " is False", " is True"


def is_open(recording: Recording) -> bool:
    """Whether the memory depends on guesses, other than how much an optimizer keeps after many steps."""
    return any(not condition.startswith(_KEEPS) for condition in recording.facts["conditions"])


def settled_like(recording: Recording, settled: Recording) -> Recording:
    """A recording at another batch size with the same guess turned, and what was found about the guesses."""
    found = {name: settled.facts[name] for name in ("conditions", "bounds", "least_fraction", "otherwise")}
    same_operators = len(recording.operator_name) == len(settled.operator_name)
    found["selected"] = settled.facts.get("selected") if same_operators else None
    return replace(recording, facts=recording.facts | found)


def _tried(first: Recording) -> list[str]:
    return list(first.facts["guesses"][: min(MOST_TRIED, MOST_OPERATORS // len(first.operator_name))])


def _peak(recording: Recording) -> int:
    return replay(recording).peak_allocated_bytes


def _growth(recording: Recording) -> list[str]:
    """What an optimizer that keeps more with every step, such as LBFGS its history, leaves open."""
    if not recording.batch_starts or recording.facts["unknown"]:
        return []
    is_state = recording.block_category[recording.event_block] == CATEGORIES.index("optimizer_state")
    sizes = recording.block_bytes[recording.event_block] * is_state
    moves = np.where(recording.event_allocates, sizes, -sizes)
    grown_bytes = int(moves[recording.event_time >= recording.batch_starts[-1]].sum())
    if grown_bytes <= _LEAST_GROWTH_BYTES:
        return []
    return [f"{_KEEPS} no more than after step 2, in which it kept {format_bytes(grown_bytes)} more"]


_KEEPS = f"{OF_OPTIMIZERS} keeps"
_LEAST_GROWTH_BYTES = 1 << 16
