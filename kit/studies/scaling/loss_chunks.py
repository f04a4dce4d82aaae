"""What a loss over many classes holds, and what it would hold in chunks of the positions: on paper, as advice.

A language model's logits have positions × classes elements. They, their logarithms of probabilities and the gradients
of both often are the peak. A loss that takes a chunk of the positions at a time, and computes its logits again in the
backward pass, holds those of one chunk. What multiplies by the head is the user's own code, so kit does not do it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.replay import NO_CALL, PHASES, Recording, replay
from kit.units import format_bytes, format_seconds

CHUNKS = 8
"""Of the positions, in the advice."""
_LEAST_SHARE = 0.05
"""Of the peak, below which it is no advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChunks:
    """A step's largest loss over classes, whole and in `CHUNKS` parts."""

    positions: int
    """Of a micro-batch, all sequences together."""
    classes: int
    peak_bytes: int
    """As it is."""
    chunked_peak_bytes: int
    again: NDArray[np.bool_]
    """(operators,) of the recording that chunks run twice."""

    @property
    def saved_bytes(self) -> int:
        return self.peak_bytes - self.chunked_peak_bytes

    def advice(self, seconds: float) -> str:
        """A sentence, with what it costs a step."""
        return (
            f"advice, not applied: logits of {self.positions:,} positions × {self.classes:,} classes are held at the "
            f"peak; a loss in {CHUNKS} chunks of the positions, each computed again in the backward pass, would save "
            f"{format_bytes(self.saved_bytes)} for {format_seconds(seconds)} a step"
        )


def loss_chunks(recording: Recording) -> LossChunks | None:
    """The loss that has the largest logits, and what chunks of it would save; None where that is next to nothing."""
    calls = [OperatorCall.of(call) for call in recording.calls]
    logits = [call.outputs[0] for call in calls if call.name == "_log_softmax" and len(call.outputs[0].shape) > 1]
    if not logits:
        return None
    largest = max(logits, key=lambda spec: spec.elements)

    def is_logits(spec: TensorSpec) -> bool:
        return spec.elements == largest.elements and spec.shape[-1:] == largest.shape[-1:]

    shaped = [any(map(is_logits, call.outputs)) for call in calls]
    made_by = np.append(np.array(shaped, dtype=np.bool_), False)  # the last is that of no call
    numbers = np.where(recording.operator_call == NO_CALL, len(calls), recording.operator_call)
    makes = made_by[numbers]
    begins = recording.event_allocates
    makers = np.zeros(recording.blocks, dtype=np.int64)
    makers[recording.event_block[begins]] = recording.event_time[begins]
    # Beside logits an operator may make something small, such as the mask of a dropout.
    held = makes[makers] & (recording.block_bytes >= largest.elements)
    chunked = replace(recording, block_bytes=np.where(held, -(-recording.block_bytes // CHUNKS), recording.block_bytes))
    before, after = (replay(one).peak_allocated_bytes for one in (recording, chunked))
    if before - after < _LEAST_SHARE * before:
        return None
    return LossChunks(
        positions=largest.elements // largest.shape[-1], classes=largest.shape[-1], peak_bytes=before,
        chunked_peak_bytes=after, again=makes & (recording.operator_phase == PHASES.index("forward")),
    )  # fmt: skip
