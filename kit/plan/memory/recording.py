"""Recording: every allocation of a few training steps, as columns of numbers, made once and replayed many times.

A block is one piece of device memory, from the operator that made it to the one after which it was freed. A recording
comes from fake tensors (nothing was allocated) or from real ones, and looks the same. It holds numbers and names only:
no tensor, no module, no torch, so that a kernel can replay it at another batch size or under another limit.

The invariants: each block is allocated once and freed at most once, events are in the order in which they happened, and
a block's bytes are as requested (an allocator rounds them up, see `kit.plan.memory.allocator`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.json_text import read_json

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",
    "autocast_cache",
    "gathered_parameters",
    "communication",
    "workspace",
    "temporaries",
)
"""What a block is for, in the order in which it is drawn. `activations` outlive the forward pass that made them,
`temporaries` do not; `workspace` is what a kernel takes for itself; `gathered_parameters` are unsharded copies."""

PHASES = ("setup", "forward", "backward", "optimizer", "other")
"""When an operator ran. Everything that was there before the first batch is `setup`."""


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
    sentences: branches taken blindly, fallbacks), `unknown` (why activations are missing; empty when they are not)."""

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
        target = Path(path)
        draft = target.with_suffix(".tmp.npz")
        meta = {name: getattr(self, name) for name in _PLAIN}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez(draft, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **arrays)
        draft.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote; no pickle is opened."""
        with np.load(Path(path)) as stored:
            meta = read_json(stored["meta"].tobytes())
            arrays = {name: stored[name] for name in _ARRAYS}
        meta["names"], meta["batch_starts"] = tuple(meta["names"]), tuple(meta["batch_starts"])
        return cls(**arrays, **meta)


_PLAIN = ("names", "batch_starts", "batch_size", "rounding_bytes", "facts")
_ARRAYS = tuple(item.name for item in fields(Recording) if item.name not in _PLAIN)
