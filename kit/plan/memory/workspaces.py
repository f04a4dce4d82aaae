"""What cuBLAS takes for itself: one buffer per thread that multiplies matrices, kept from the first product on.

It comes from the caching allocator, but no operator returns it, so a recording cannot hold it, and its size is the
card's: it is added when a recording meets a card. Forward pass and optimizer run on one thread, backward passes on
another; each has its own handle. The invariant: everything else of the recording stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kit.plan.memory.recording import CATEGORIES, PHASES, Recording

OPERATOR = "cublas_workspace"

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "linear_backward"})
_BACKWARD = PHASES.index("backward")


def with_cublas_workspaces(recording: Recording, workspace_bytes: int) -> Recording:
    """The recording with a block of `workspace_bytes` before each thread's first product of matrices is done."""
    firsts = _first_products(recording) if workspace_bytes else []
    if not firsts:
        return recording
    count = len(firsts)
    places = [_after_output(recording, operator) for operator in firsts]
    names = (*recording.names, OPERATOR)
    operators = np.array(firsts)

    def longer(values: NDArray[np.generic], more: object) -> NDArray[np.generic]:
        return np.append(values, np.full(count, more, dtype=values.dtype))

    changed = {
        "block_bytes": longer(recording.block_bytes, workspace_bytes),
        "block_category": longer(recording.block_category, CATEGORIES.index("workspace")),
        "block_operator": longer(recording.block_operator, len(names) - 1),
        "block_module": np.append(recording.block_module, recording.operator_module[operators]),
        "block_phase": np.append(recording.block_phase, recording.operator_phase[operators]),
        "block_stream": longer(recording.block_stream, 0),
        "event_block": np.insert(recording.event_block, places, recording.blocks + np.arange(count)),
        "event_allocates": np.insert(recording.event_allocates, places, np.ones(count, dtype=np.bool_)),
        "event_time": np.insert(recording.event_time, places, operators),
    }
    return replace(recording, names=names, **changed)  # type: ignore[arg-type]


def _first_products(recording: Recording) -> list[int]:
    """The first product on the main thread and the first in a backward pass, where there are any; in that order."""
    names = [place for place, name in enumerate(recording.names) if name.partition(".")[0] in _PRODUCTS]
    products = np.isin(recording.operator_name, names)
    backward = recording.operator_phase == _BACKWARD
    found = [np.flatnonzero(products & on_thread) for on_thread in (~backward, backward)]
    return sorted(int(operators[0]) for operators in found if len(operators))


def _after_output(recording: Recording, operator: int) -> int:
    """Where in the events: a product first allocates what it returns, then asks for its handle."""
    place = int(np.searchsorted(recording.event_time, operator))
    own = place < len(recording.event_time) and recording.event_time[place] == operator
    return place + int(own and recording.event_allocates[place])
