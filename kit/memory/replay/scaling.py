"""Recordings at two batch sizes, and from them the recording at any other: every block is affine in the batch.

    bytes(batch) = bytes(first) + (bytes(second) - bytes(first)) / (second - first) × (batch - first)

Bytes are as requested; the allocator rounds them later. It holds where both recordings show the same operators in the
same order, and the same blocks allocated and freed at the same operators. Blocks are matched by the order of their
creation; frees at one operator may come in another order, as those of the autocast cache do.

Refused, with the reason: recordings that differ otherwise, a block that grows by a fraction of a byte per sample, and a
block that would be negative at batch size 0 because it grows faster than the batch (a similarity of all pairs); what a
kernel takes for itself may be less than nothing there, but not at 1.
Known limit: what grows in stairs looks flat or steep between two points; `differs_from` a third recording shows it.

Further recordings answer for blocks that are not affine (`_Bends`). A similarity of all pairs is a parabola, which must
be exact at each of them. The workspace of a convolution on the CPU is the largest of several terms, each a line: two
neighbouring batches show the line that leads there, and the largest of the lines of all pairs is the workspace, exactly
where no term leads only between two pairs. It is too low where one does, so whoever asks compares one more recording.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import PlanError
from kit.memory.replay.calls import calls_at
from kit.memory.replay.replay import CATEGORIES, NO_CALL, PHASES, Recording

_UNSURE = "unsure_workspace_bytes"
_WEIGHTS = [CATEGORIES.index(name) for name in ("parameters", "buffers", "gradients", "optimizer_state")]


class ScalingError(PlanError):
    """Two recordings from which no third follows; record anew at the batch size wanted."""


class BatchScaling:
    """The recording of one configuration at any batch size.

    Args:
        first: At one batch size.
        second: At another, the next one where there are further recordings.
        further: At other sizes, where the first two do not do: in pairs of neighbours, and any number of single ones,
            at which parabolas are checked.

    Raises:
        ScalingError: when the recordings differ in more than the bytes of their blocks, or grow otherwise than in
            proportion to the batch; the message names the first difference.
    """

    def __init__(self, first: Recording, second: Recording, *further: Recording) -> None:
        if first.batch_size == second.batch_size:
            raise ScalingError(f"both recordings are of batch size {first.batch_size}; two sizes are needed")
        for other in (second, *further):
            if reason := difference(first, other):
                raise ScalingError(reason)
        self._first = first
        self._second = second
        self._bends = _Bends(first, second, *further) if further else None
        self._bytes_per_sample = _slopes(first, second) if self._bends is None else self._bends.bytes_per_sample
        self._call_pairs: Any = None

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
        if self._bends is not None:
            sizes = self._bends.put_right(sizes, batch_size)
            facts |= {"notes": [*first.facts.get("notes", ()), self._bends.note]}
        calls = {} if batch_size == first.batch_size else self._calls_at(batch_size)
        return replace(first, block_bytes=sizes, batch_size=batch_size, facts=facts, **calls)

    def _calls_at(self, batch_size: int) -> dict[str, Any]:
        """Every operator's call at a batch size; none where the calls of the two recordings differ otherwise."""
        first, second = self._first, self._second
        if not len(first.operator_call) or len(first.operator_call) != len(second.operator_call):
            return {"calls": (), "operator_call": np.zeros(0, dtype=np.int32)}
        if self._call_pairs is None:
            columns = np.stack([first.operator_call, second.operator_call], axis=1)
            self._call_pairs = np.unique(columns, axis=0, return_inverse=True)
        pairs, places = self._call_pairs
        samples = (batch_size - first.batch_size) / (second.batch_size - first.batch_size)
        known = [(one, other) for one, other in pairs.tolist() if one != NO_CALL]
        try:
            calls = calls_at([(first.calls[one], second.calls[other]) for one, other in known], samples)
        except PlanError:
            return {"calls": (), "operator_call": np.zeros(0, dtype=np.int32)}
        numbers = np.cumsum(pairs[:, 0] != NO_CALL, dtype=np.int32) - 1
        numbers[pairs[:, 0] == NO_CALL] = NO_CALL
        return {"calls": tuple(calls), "operator_call": numbers[places.reshape(-1)]}

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


def in_proportion(recording: Recording, batch_size: int) -> Recording:
    """The recording with all but weights and their likes as much larger as the batch."""
    grown = -(-recording.block_bytes * batch_size // recording.batch_size)
    sizes = np.where(np.isin(recording.block_category, _WEIGHTS), recording.block_bytes, grown)
    held = "no block grows faster than the batch"
    facts = recording.facts | {"conditions": [*recording.facts["conditions"], held]}
    return replace(
        recording, block_bytes=sizes, batch_size=batch_size, facts=facts, calls=(),
        operator_call=np.zeros(0, dtype=np.int32),
    )  # fmt: skip


class _Bends:
    """Blocks that are not affine in the batch, from pairs of recordings at neighbouring batch sizes."""

    def __init__(self, *recordings: Recording) -> None:
        known = sorted(recordings, key=lambda recording: recording.batch_size)
        self._batches = [recording.batch_size for recording in known]
        sizes = np.stack([recording.block_bytes for recording in known])
        steps = np.array(self._batches)[:, None] - self._batches[0]
        pairs = [place for place, (one, other) in enumerate(pairwise(self._batches)) if other == one + 1]
        slopes = sizes[1] - sizes[0]
        straight = (slopes >= 0) & (sizes == sizes[0] + slopes * steps).all(axis=0)
        self.bytes_per_sample = np.where(straight, slopes, 0)
        workspace = recordings[0].block_category == CATEGORIES.index("workspace")
        self._lines, self._curves = np.flatnonzero(~straight & workspace), np.flatnonzero(~straight & ~workspace)
        lines = sizes[:, self._lines]
        self._tangents = [(self._batches[place], lines[place], lines[place + 1] - lines[place]) for place in pairs]
        self._points = sizes[:, self._curves]
        bent = self._parabolas(np.array(self._batches)[:, None])
        wrong = (np.abs(bent - self._points) >= 1).any(axis=0)
        if wrong.any():
            block = int(self._curves[wrong.argmax()])
            points = zip(sizes[:, block].tolist(), self._batches, strict=True)
            found = ", ".join(f"{size} bytes at {batch}" for size, batch in points)
            raise ScalingError(f"{_block(recordings[0], block)} follows no parabola ({found}); record each batch size")

    def _parabolas(self, batch: Any) -> NDArray[np.float64]:
        """Through the first two and the last recording: Newton's divided differences."""
        low, middle, high = (self._batches[place] for place in (0, 1, -1))
        first, second, last = (self._points[place] for place in (0, 1, -1))
        slope = (second - first) / (middle - low)
        bend = ((last - second) / (high - middle) - slope) / (high - low)
        values: NDArray[np.float64] = first + slope * (batch - low) + bend * (batch - low) * (batch - middle)
        return values

    def put_right(self, sizes: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
        """`sizes`, with those of the blocks that are not affine."""
        sizes = np.maximum(sizes, 0)
        lines = [size + slope * (batch_size - batch) for batch, size, slope in self._tangents]
        sizes[self._lines] = np.maximum(np.max(lines, axis=0), 0)
        sizes[self._curves] = np.rint(np.maximum(self._parabolas(batch_size), 0)).astype(np.int64)
        return sizes

    @property
    def note(self) -> str:
        return (
            f"{len(self._lines) + len(self._curves)} blocks are not in proportion to the batch: they follow recordings "
            f"at batches of {', '.join(map(str, self._batches))}"
        )


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
