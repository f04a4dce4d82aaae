"""Measured: what an allocator did during a few real training steps, in bytes by event, kept with the run.

It stands beside a prediction. Both share one clock, the bytes allocated so far as a fraction of all that were, because
predicted and real steps run at different speeds but ask for memory in the same order. The invariant: `allocated_bytes`
is what was held after each event, and its largest value is `peak_bytes`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.json_text import read_json


@dataclass(frozen=True)
class Measured:
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
        target = Path(path)
        draft = target.with_suffix(".tmp.npz")
        meta = {"seconds": self.seconds, "optimizer_steps": self.optimizer_steps, "facts": self.facts}
        np.savez_compressed(
            draft,
            meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8),
            allocated_bytes=self.allocated_bytes,
            requested_bytes=self.requested_bytes,
        )
        draft.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Measured:
        """Read what `save` wrote; no pickle is opened."""
        with np.load(Path(path)) as stored:
            meta = read_json(stored["meta"].tobytes())
            return cls(stored["allocated_bytes"], stored["requested_bytes"], **meta)
