"""Ledger: blocks, the events of their lives and the operators between these, written down as they happen.

Columns of plain numbers, because a recording has thousands of rows and is made while somebody waits. Until the first
micro-batch begins only blocks are kept, no events: set-up happens on the host, and what is freed there never counted.
The invariant: a block is begun once and ended at most once, and events are in the order in which they were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kit.plan.memory.recording import CATEGORIES, PHASES, Recording

CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
PHASE = {name: index for index, name in enumerate(PHASES)}
UNNAMED = -1
"""Category of a block that nobody has named yet."""


class Ledger:
    """What a Recorder writes to."""

    def __init__(self) -> None:
        self.phase = PHASE["setup"]
        self.stream = 0
        self.bytes: list[int] = []
        self.category: list[int] = []
        self.batch_starts: list[int] = []
        self.stopped = False
        self._names = {"": 0}
        self._columns: list[tuple[int, int, int, int]] = []  # operator, module, phase, stream of each block
        self._events: list[tuple[int, bool, int]] = []  # block, allocates, time
        self._log = [(self.name("setup"), 0, self.phase)]  # operator, module, phase of each operator

    def name(self, text: str) -> int:
        """The number of a name."""
        return self._names.setdefault(text, len(self._names))

    def ran(self, operator: int, module: int) -> None:
        """An operator ran; what follows happened during or after it."""
        self._log.append((operator, module, self.phase))

    @property
    def operator(self) -> int:
        """The operator that ran last."""
        return self._log[-1][0]

    def begin(self, size: int, category: int, operator: int) -> int:
        """A block is allocated; its number."""
        block = len(self.bytes)
        self.bytes.append(size)
        self.category.append(category)
        self._columns.append((operator, self._log[-1][1], self.phase, self.stream))
        if size and self.batch_starts and not self.stopped:
            self._events.append((block, True, len(self._log) - 1))
        return block

    def end(self, block: int) -> None:
        """A block is freed."""
        if self.bytes[block] and self.batch_starts and not self.stopped:
            self._events.append((block, False, len(self._log) - 1))

    def belongs_to(self, block: int, module: int) -> None:
        """A block is of `module`, whichever made it."""
        operator, _, phase, stream = self._columns[block]
        self._columns[block] = (operator, module, phase, stream)

    def made_in(self, block: int) -> int:
        """The phase in which a block was made."""
        return self._columns[block][2]

    def begin_batch(self) -> None:
        """A micro-batch begins with the next operator."""
        self.phase = PHASE["forward"]
        self.batch_starts.append(len(self._log))

    def end_setup(self, alive: Sequence[int]) -> None:
        """Forget all blocks and operators but `alive`, which are numbered anew, in their order."""
        setup = PHASE["setup"]
        self._columns = [(*self._columns[block][:2], setup, self._columns[block][3]) for block in alive]
        self.bytes = [self.bytes[block] for block in alive]
        self.category = [self.category[block] for block in alive]
        self._events = [(block, True, 0) for block, size in enumerate(self.bytes) if size]
        del self._log[1:]

    def recording(self, batch_size: int, rounding_bytes: int, facts: Mapping[str, Any]) -> Recording:
        """What was written so far; blocks that nobody has named are temporaries.

        Raises:
            ValueError: when no batch was begun.
        """
        if not self.batch_starts:
            raise ValueError("nothing was recorded: begin_batch() was never called")
        category = np.array(self.category, dtype=np.int64)
        operator, module, phase, stream = np.array(self._columns, dtype=np.int32).reshape(-1, 4).T
        block, allocates, when = np.array(self._events, dtype=np.int32).reshape(-1, 3).T
        name, part, ran_in = np.array(self._log, dtype=np.int32).reshape(-1, 3).T
        return Recording(
            block_bytes=np.array(self.bytes, dtype=np.int64),
            block_category=np.where(category == UNNAMED, CATEGORY["temporaries"], category).astype(np.uint8),
            block_operator=operator.copy(),
            block_module=module.copy(),
            block_phase=phase.astype(np.uint8),
            block_stream=stream.astype(np.uint8),
            event_block=block.copy(),
            event_allocates=allocates.astype(np.bool_),
            event_time=when.copy(),
            operator_name=name.copy(),
            operator_module=part.copy(),
            operator_phase=ran_in.astype(np.uint8),
            names=tuple(self._names),
            batch_starts=tuple(self.batch_starts),
            batch_size=batch_size,
            rounding_bytes=rounding_bytes,
            facts=dict(facts),
        )
