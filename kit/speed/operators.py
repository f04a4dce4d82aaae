"""StepOperators: the operators of one optimizer step, in order: how often each runs, where, and what it is called with.

The step is the second that was recorded: the first also makes the optimizer's state. What ddp does in the second step
alone, the new layout of its buckets, is left out. Of accumulated micro-batches two are recorded: the first of a step
writes gradients, and all that follow add to them and are alike, but for the last one's exchange. Validation, and what
ran before the first batch, is no part of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import PlanError
from kit.memory.replay.calls import OperatorCall
from kit.memory.replay.replay import EVALUATIONS, PHASES, Recording
from kit.speed.work import KINDS, Work, work_of

_BACKWARD = PHASES.index("backward")


@dataclass(frozen=True)
class StepOperators:
    """Columns are of shape (operators,)."""

    calls: tuple[OperatorCall, ...]
    call: NDArray[np.int32]
    """Index into calls."""
    phase: NDArray[np.uint8]
    """Index into PHASES."""
    module: NDArray[np.int32]
    """Index into names."""
    line: NDArray[np.int32]
    """Index into names: the line that called it, as far as memory tells; 0 where unknown."""
    repeats: NDArray[np.int32]
    """How often in a step: micro-batches beyond the second are all alike."""
    names: tuple[str, ...]
    batch_size: int
    """Samples per micro-batch on each device."""
    accumulate: int
    """Micro-batches in a step."""
    facts: Mapping[str, Any]
    """Those of the recording: precision, strategy, world_size, parameters and the like."""
    place: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Index among the operators of the recording."""
    recomputes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Number of the checkpointed call that runs again with it, 0 for none; empty where that was not recorded."""

    @cached_property
    def call_work(self) -> tuple[Work, ...]:
        """(calls,) what each call does."""
        return tuple(map(work_of, self.calls))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """(calls,) how often each is made in a step."""
        return np.bincount(self.call, weights=self.repeats, minlength=len(self.calls)).astype(np.int64)

    def column(self, name: str) -> NDArray[np.int64]:
        """(operators,) of one execution: `flops`, `read_bytes` or `written_bytes`."""
        return np.array([getattr(work, name) for work in self.call_work], dtype=np.int64)[self.call]

    @cached_property
    def kind(self) -> NDArray[np.int64]:
        """(operators,) index into KINDS."""
        return np.array([KINDS.index(work.kind) for work in self.call_work], dtype=np.int64)[self.call]

    @cached_property
    def flops(self) -> int:
        """Of the whole step on one device."""
        return int((self.column("flops") * self.repeats).sum())

    @property
    def samples(self) -> int:
        """Of a step on one device."""
        return self.batch_size * self.accumulate


def step_of(recording: Recording) -> StepOperators:
    """The operators of one optimizer step.

    Raises:
        PlanError: for a recording without calls: its step was not recorded, or by an earlier kit.
    """
    unknown = recording.facts.get("unknown")
    if unknown or not len(recording.operator_call) or not recording.batch_starts:
        raise PlanError(f"the operators of this step are not known: {unknown or 'they were not recorded; record anew'}")
    starts, count = recording.batch_starts, len(recording.operator_name)
    begin = starts[len(starts) // 2]
    recorded = len(starts) - len(starts) // 2
    accumulate = int(recording.facts.get("accumulate_grad_batches") or 1)
    chosen = np.arange(begin, count)
    outside = [PHASES.index(name) for name in ("setup", *EVALUATIONS)]
    chosen = chosen[~np.isin(recording.operator_phase[chosen], outside) & (recording.operator_call[chosen] >= 0)]
    chosen = chosen[~_lays_buckets(recording, chosen)]
    repeats = np.ones(len(chosen), dtype=np.int32)
    if accumulate > recorded > 1:
        alike = (chosen >= starts[-1]) & (recording.operator_phase[chosen] != PHASES.index("optimizer"))
        repeats[alike & ~_fills_buckets(recording, chosen)] = accumulate - recorded + 1
    used, call = np.unique(recording.operator_call[chosen], return_inverse=True)
    phase, module = recording.operator_phase[chosen], recording.operator_module[chosen]
    return StepOperators(
        calls=tuple(OperatorCall.of(recording.calls[number]) for number in used.tolist()), call=call.astype(np.int32),
        phase=phase, module=module,
        line=_lines(recording, chosen), repeats=repeats, names=recording.names, batch_size=recording.batch_size,
        accumulate=max(accumulate, 1), facts=recording.facts, place=chosen,
        recomputes=recording.operator_recomputes[chosen[: len(recording.operator_recomputes)]],
    )  # fmt: skip


def _lays_buckets(recording: Recording, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(chosen,) whether ddp lays its buckets anew with it, which it does in the second step alone."""
    if recording.facts.get("strategy") != "ddp":
        return np.zeros(len(chosen), dtype=np.bool_)
    names = [place for place, name in enumerate(recording.names) if name in ("empty.memory_format", "as_strided")]
    before = np.logical_and.accumulate(recording.operator_module[chosen] == 0)
    laid: NDArray[np.bool_] = before & np.isin(recording.operator_name[chosen], names)
    return laid


def _fills_buckets(recording: Recording, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(chosen,) whether ddp copies gradients with it, which it does in the last micro-batch alone: a backward pass of
    another has fewer of the same calls."""
    found = np.zeros(len(chosen), dtype=np.bool_)
    if recording.facts.get("strategy") != "ddp":
        return found
    names = [place for place, name in enumerate(recording.names) if name in ("copy_", "as_strided")]
    copies = (recording.operator_phase[chosen] == _BACKWARD) & np.isin(recording.operator_name[chosen], names)
    calls, in_last = recording.operator_call[chosen], chosen >= recording.batch_starts[-1]
    for number in np.unique(calls[copies]).tolist():
        mine = copies & (calls == number)
        more = 2 * np.count_nonzero(mine & in_last) - np.count_nonzero(mine)
        found[np.flatnonzero(mine & in_last)[-more:] if more > 0 else []] = True
    return found


def _lines(recording: Recording, chosen: NDArray[np.int64]) -> NDArray[np.int32]:
    """(chosen,) the line of what each allocates; of those that allocate nothing, that of the operator before.

    A backward pass runs no line of its own: its operators have the line that the same module ran most in forward.
    """
    lines = np.zeros(len(recording.operator_name), dtype=np.int32)
    if not len(recording.block_line):
        return lines[chosen]
    made = recording.event_allocates
    lines[recording.event_time[made]] = recording.block_line[recording.event_block[made]]
    known = np.where(lines > 0, np.arange(len(lines)), 0)
    lines = lines[np.maximum.accumulate(known)][chosen]
    phase, module = recording.operator_phase[chosen], recording.operator_module[chosen]
    is_line = np.array([", line " in name for name in recording.names])[lines]
    ran = (phase == PHASES.index("forward")) & is_line
    backward = phase == PHASES.index("backward")
    for one in np.unique(module[backward]).tolist():
        mine = lines[ran & (module == one)]
        if len(mine):
            lines[backward & (module == one)] = np.bincount(mine).argmax()
    return lines
