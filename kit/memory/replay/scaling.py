"""Recordings at two batch sizes, and from them the recording at any other: every block is affine in the batch.

    bytes(batch) = bytes(first) + (bytes(second) - bytes(first)) / (second - first) × (batch - first)

Bytes are as requested; the allocator rounds them later. It holds where both recordings show the same operators in the
same order, and the same blocks allocated and freed at the same operators. Blocks are matched by the order of their
creation; frees at one operator may come in another order, as those of the autocast cache do.

A block that is not, because it grows by a fraction of a byte per sample or faster than the batch, follows a curve
through a third recording, far from the other two: a parabola, exact for a similarity of all pairs, and for workspaces,
which are the larger of several terms, two lines, which may be off by some percent beyond it. `facts["notes"]` says so.

Refused, with the reason: recordings that differ otherwise, and without a third recording each block that is not affine:
one that would be negative at batch size 0; what a kernel takes for itself may be less than nothing there, but not at 1.
Known limit: what grows in stairs looks flat or steep between two points; `differs_from` another recording shows it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kit.errors import PlanError
from kit.memory.replay.replay import CATEGORIES, PHASES, Recording

_UNSURE = "unsure_workspace_bytes"


class ScalingError(PlanError):
    """Two recordings from which no third follows; record anew at the batch size wanted."""


class BatchScaling:
    """The recording of one configuration at any batch size.

    Args:
        first: At one batch size.
        second: At another.
        third: At a third, where the other two are refused.

    Raises:
        ScalingError: when the recordings differ in more than the bytes of their blocks, or grow otherwise than in
            proportion to the batch; the message names the first difference.
    """

    def __init__(self, first: Recording, second: Recording, third: Recording | None = None) -> None:
        if first.batch_size == second.batch_size:
            raise ScalingError(f"both recordings are of batch size {first.batch_size}; two sizes are needed")
        reason = difference(first, second) or (difference(first, third) if third is not None else "")
        if reason:
            raise ScalingError(reason)
        self._first = first
        self._second = second
        if third is None:
            self._bytes_per_sample = _slopes(first, second)
            self._curves: _Curves | None = None
        else:
            self._curves = _Curves(first, second, third)
            self._bytes_per_sample = self._curves.bytes_per_sample

    def at(self, batch_size: int) -> Recording:
        """The recording at another number of samples per micro-batch.

        Raises:
            ScalingError: when the batch size is below 1.
        """
        if batch_size < 1:
            raise ScalingError(f"batch_size is {batch_size}, but must be at least 1")
        first = self._first
        sizes = first.block_bytes + self._bytes_per_sample * (batch_size - first.batch_size)
        facts = first.facts | _unsure_at(batch_size, first, self._second)
        if self._curves is not None:
            sizes = self._curves.at(batch_size, sizes)
            note = [self._curves.note] if len(self._curves.blocks) else []
            facts |= {"notes": [*first.facts.get("notes", ()), *note]}
        return replace(first, block_bytes=sizes, batch_size=batch_size, facts=facts)

    def differs_from(self, recording: Recording) -> str:
        """The first difference between a third recording and the predicted one; empty when there is none."""
        reason = difference(self._first, recording)
        if reason:
            return reason
        predicted = self.at(recording.batch_size)
        block = _first_unequal(predicted.block_bytes, recording.block_bytes)
        if block is None:
            return ""
        return (
            f"{_block(predicted, block)} was predicted to take {predicted.block_bytes[block]} bytes at batch size "
            f"{recording.batch_size}, but takes {recording.block_bytes[block]}"
        )


def _unsure_at(batch_size: int, *recordings: Recording) -> dict[str, int]:
    """The fact `unsure_workspace_bytes` at a batch size, where the recordings have one.

    It is the largest share of many operators, each of which grows at most in proportion to the batch and never shrinks.
    So the recording at the next larger batch bounds it from above, or the largest one scaled up.
    """
    known = {recording.batch_size: int(recording.facts.get(_UNSURE, 0)) for recording in recordings}
    if not any(known.values()):
        return {}
    if above := [batch for batch in known if batch >= batch_size]:
        return {_UNSURE: known[min(above)]}
    largest = max(known)
    return {_UNSURE: -(-known[largest] * batch_size // largest)}


def _slopes(first: Recording, second: Recording) -> NDArray[np.int64]:
    """(blocks,) bytes per sample."""
    samples = second.batch_size - first.batch_size
    slopes, rest = np.divmod(second.block_bytes - first.block_bytes, samples)
    at_zero = first.block_bytes - slopes * first.batch_size
    # What a kernel takes for itself is counted beyond its results, of which a bias's gradient does not grow.
    least = at_zero + np.where(first.block_category == CATEGORIES.index("workspace"), slopes, 0)
    for wrong, why in (
        (rest != 0, "does not grow by whole bytes per sample"),
        (slopes < 0, "shrinks as the batch grows"),
        (least < 0, "grows faster than the batch"),
    ):
        if wrong.any():
            block = int(wrong.argmax())
            sizes = f"{first.block_bytes[block]} bytes at {first.batch_size}, {second.block_bytes[block]} at"
            raise ScalingError(f"{_block(first, block)} {why} ({sizes} {second.batch_size}); record each batch size")
    return slopes


class _Curves:
    """Blocks that are not affine in the batch: parabolas through three recordings (Newton's divided differences).

    A workspace is the larger of several terms, each a line: two lines through the three.
    """

    def __init__(self, *recordings: Recording) -> None:
        first = recordings[0]
        self.batches = x0, x1, x2 = [recording.batch_size for recording in recordings]
        y0, y1, y2 = (recording.block_bytes for recording in recordings)
        slopes, rest = np.divmod(y1 - y0, x1 - x0)
        straight = (rest == 0) & (slopes >= 0) & (y0 + slopes * (x2 - x0) == y2)
        self.bytes_per_sample = np.where(straight, slopes, 0)
        self.blocks = np.flatnonzero(~straight)
        self.workspace = first.block_category[self.blocks] == CATEGORIES.index("workspace")
        self.middle = y1[self.blocks]
        self.slopes = (y1 - y0)[self.blocks] / (x1 - x0), (y2 - y1)[self.blocks] / (x2 - x1)
        self.bend = (self.slopes[1] - self.slopes[0]) / (x2 - x0)
        wrong = ~self.workspace & ((self.bend < 0) | (self._values(1) < 0))
        if wrong.any():
            block = int(self.blocks[wrong.argmax()])
            found = ", ".join(f"{y[block]} at {x}" for x, y in zip(self.batches, (y0, y1, y2), strict=True))
            raise ScalingError(f"{_block(first, block)} follows no parabola ({found}); record each batch size")

    def _values(self, batch_size: int) -> NDArray[np.float64]:
        from_first, from_second = batch_size - self.batches[0], batch_size - self.batches[1]
        lines = self.middle + self.slopes[from_second > 0] * from_second
        parabolas = self.middle + self.slopes[0] * from_second + self.bend * from_first * from_second
        values: NDArray[np.float64] = np.where(self.workspace, lines, parabolas)
        return values

    def at(self, batch_size: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """`sizes` with those of the curves put right."""
        sizes = np.maximum(sizes, 0)
        sizes[self.blocks] = np.rint(np.maximum(self._values(batch_size), 0)).astype(np.int64)
        return sizes

    @property
    def note(self) -> str:
        sizes = ", ".join(map(str, self.batches[:2])) + f" and {self.batches[2]}"
        return f"{len(self.blocks)} blocks are not in proportion to the batch: a curve through batches of {sizes}"


def difference(first: Recording, second: Recording) -> str:
    """The first difference between two recordings apart from the bytes of their blocks; empty when there is none."""
    for what, one, other in (
        ("rounding", first.rounding_bytes, second.rounding_bytes),
        ("number of operators", len(first.operator_name), len(second.operator_name)),
        ("number of blocks", first.blocks, second.blocks),
        ("number of events", len(first.event_block), len(second.event_block)),
        ("start of batches", first.batch_starts, second.batch_starts),
    ):
        if one != other:
            return f"the recordings differ in the {what}: {one} and {other}"
    same = _renamed(second, first)
    for column in ("operator_name", "operator_module"):
        at = _first_unequal(getattr(first, column), same[getattr(second, column)])
        if at is not None:
            one, other = (recording.names[getattr(recording, column)[at]] for recording in (first, second))
            return f"operator {at} differs: {one!r} and {other!r}"
    at = _first_unequal(first.operator_phase, second.operator_phase)
    if at is not None:
        return f"operator {at} runs in another phase"
    for what, mine, theirs in (
        ("operator", first.block_operator, same[second.block_operator]),
        ("module", first.block_module, same[second.block_module]),
        ("phase", first.block_phase, second.block_phase),
        ("category", first.block_category, second.block_category),
        ("stream", first.block_stream, second.block_stream),
    ):
        at = _first_unequal(mine, theirs)
        if at is not None:
            return f"{_block(first, at)} and {_block(second, at)} differ in their {what}"
    created, created_too = (recording.event_block[recording.event_allocates] for recording in (first, second))
    at = _first_unequal(created, created_too)
    if at is not None:
        return f"{_block(first, int(created[at]))} is allocated in another order"
    for what, allocates in (("allocated", True), ("freed", False)):
        at = _first_unequal(_times(first, allocates), _times(second, allocates))
        if at is not None:
            return f"{_block(first, at)} is {what} at another operator"
    return ""


def _times(recording: Recording, allocates: bool) -> NDArray[np.int64]:
    """(blocks,) the operator at which each is allocated, or freed; -1 for never."""
    chosen = recording.event_allocates == allocates
    times = np.full(recording.blocks, -1, dtype=np.int64)
    times[recording.event_block[chosen]] = recording.event_time[chosen]
    return times


def _renamed(recording: Recording, like: Recording) -> NDArray[np.int64]:
    """(names,) where each name of a recording stands in another's; -1 for those it lacks."""
    places = {name: place for place, name in enumerate(like.names)}
    return np.array([places.get(name, -1) for name in recording.names], dtype=np.int64)


def _first_unequal(one: NDArray[np.generic], other: NDArray[np.generic]) -> int | None:
    if len(one) != len(other):
        return min(len(one), len(other))
    unequal = one != other
    return int(unequal.argmax()) if unequal.any() else None


def _block(recording: Recording, block: int) -> str:
    """A block in words."""
    operator = recording.names[recording.block_operator[block]]
    module = recording.names[recording.block_module[block]]
    category, phase = CATEGORIES[recording.block_category[block]], PHASES[recording.block_phase[block]]
    where = f" in {module}" if module else ""
    return f"block {block} ({category}, {operator}{where}, {phase})"
