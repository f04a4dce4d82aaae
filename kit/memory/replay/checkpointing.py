"""The recording of a step whose blocks are checkpointed, from one whose blocks are not: pure arithmetic.

A checkpointed block drops what its forward pass keeps for the backward pass, all but its output, and runs that forward
pass again where its backward pass begins. So in the recording the dropped activations are freed when the block's
forward has ended, and its operators and what they allocate stand a second time before the first operator of its
backward. Any subset of blocks is played through the allocator, and priced, in milliseconds.

The output is taken to be what the block's last allocating operator made, the largest of it. The second forward ends
where the last dropped tensor is there again, as torch's does. Gathered parameters and traffic are not repeated: under
FSDP a block is gathered for its backward pass anyway. Known error: what autocast casts anew in the second forward; a
GPT of 64 channels under CUDA's autocast was thought to need 8 % too much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kit.memory.replay.replay import CATEGORIES, PHASES, Recording

_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_KEPT = CATEGORIES.index("activations")
_REPEATED = tuple(CATEGORIES.index(name) for name in ("activations", "temporaries", "workspace"))
_TRAFFIC = ("all_gather", "reduce_scatter", "all_reduce", "wait_tensor", "split_with_sizes_copy", "resize_")
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One forward pass of a block within a micro-batch, and what checkpointing would make of it."""

    first: int
    """Operator with which it begins."""
    last: int
    """Operator with which it ends."""
    backward: int
    """First operator of its backward pass."""
    dropped: NDArray[np.int64]
    """Memory blocks that it keeps for the backward pass, without its output."""
    repeated: NDArray[np.int64]
    """Operators that run again."""


class Checkpoints:
    """The blocks of one recording that may be checkpointed.

    Args:
        recording: Of a step without gradient checkpointing.
        blocks: Names of their modules; by default those that the recording names.
    """

    def __init__(self, recording: Recording, blocks: Iterable[str] | None = None) -> None:
        self.recording = recording
        names = recording.facts.get("blocks", {}).values() if blocks is None else blocks
        self.calls = {name: self._calls_of(name) for name in names}
        """By block; one that never ran, or drops nothing, has none."""

    def saved_bytes(self, block: str) -> int:
        """What the block keeps through the first micro-batch and would not, checkpointed."""
        calls = self.calls[block][:1]
        return sum(int(self.recording.block_bytes[call.dropped].sum()) for call in calls)

    def checkpointed(self, blocks: Iterable[str]) -> Recording:
        """The recording with these blocks checkpointed."""
        calls = sorted((call for block in blocks for call in self.calls[block]), key=lambda call: call.backward)
        return _rewritten(self.recording, calls, self._life) if calls else self.recording

    @cached_property
    def _life(self) -> _Life:
        return _Life.of(self.recording)

    @cached_property
    def _traffic(self) -> NDArray[np.bool_]:
        names = [place for place, name in enumerate(self.recording.names) if name.startswith(_TRAFFIC)]
        return np.isin(self.recording.operator_name, names)

    def _calls_of(self, block: str) -> list[BlockCall]:
        found, recording, life = [], self.recording, self._life
        parts = [place for place, name in enumerate(recording.names) if name == block or name.startswith(f"{block}.")]
        inside = np.isin(recording.operator_module, parts)
        ends = [*recording.batch_starts[1:], len(recording.operator_name)]
        for start, end in zip(recording.batch_starts, ends, strict=True):
            phase = recording.operator_phase[start:end]
            forward = start + np.flatnonzero(inside[start:end] & (phase == _FORWARD))
            backward = start + np.flatnonzero(inside[start:end] & (phase == _BACKWARD))
            if len(forward) and len(backward) and backward[0] > forward[-1]:
                first, last = int(forward[0]), int(forward[-1])
                made = np.flatnonzero((life.made >= first) & (life.made <= last) & (life.freed > last))
                output = _output(made, life, recording)
                dropped = made[(recording.block_category[made] == _KEPT) & (life.freed[made] >= backward[0])]
                dropped = dropped[(dropped != output) & (life.freed[dropped] < len(recording.operator_name))]
                if len(dropped):
                    until = int(life.made[dropped].max())
                    repeated = np.arange(first, until + 1)
                    repeated = repeated[~self._traffic[repeated]]
                    found.append(BlockCall(first, last, int(backward[0]), dropped, repeated))
        return found


@dataclass(frozen=True, slots=True)
class _Life:
    """(blocks,) when each was allocated and freed, as operators, and the event that freed it."""

    made: NDArray[np.int64]
    freed: NDArray[np.int64]
    """The number of operators where it never was."""
    freeing: NDArray[np.int64]

    @classmethod
    def of(cls, recording: Recording) -> _Life:
        made = np.full(recording.blocks, -1)
        freed, freeing = np.full(recording.blocks, len(recording.operator_name)), np.full(recording.blocks, -1)
        begins = recording.event_allocates
        made[recording.event_block[begins]] = recording.event_time[begins]
        freed[recording.event_block[~begins]] = recording.event_time[~begins]
        freeing[recording.event_block[~begins]] = np.flatnonzero(~begins)
        return cls(made, freed, freeing)


def _output(made: NDArray[np.int64], life: _Life, recording: Recording) -> int:
    """The largest block that the last allocating operator made."""
    if not len(made):
        return -1
    latest = made[life.made[made] == life.made[made].max()]
    return int(latest[recording.block_bytes[latest].argmax()])


def _rewritten(recording: Recording, calls: list[BlockCall], life: _Life) -> Recording:
    """The recording with these calls run again; they are in the order of their backward passes."""
    lengths = np.array([len(call.repeated) for call in calls])
    starts = np.array([call.backward for call in calls])
    before = np.concatenate([[0], np.cumsum(lengths)])

    def moved(times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where operators stand once others are inserted before them."""
        there: NDArray[np.int64] = times + before[np.searchsorted(starts, times, side="right")]
        return there

    event_block = recording.event_block.astype(np.int64)
    columns = [[event_block, recording.event_allocates, moved(recording.event_time.astype(np.int64)),
                np.arange(len(event_block))]]  # fmt: skip
    copies: list[NDArray[np.int64]] = []
    blocks = recording.blocks
    for place, call in enumerate(calls):
        early = np.full(len(call.dropped), moved(np.array([call.last]))[0])
        columns.append([call.dropped, np.zeros(len(early), np.bool_), early, np.full(len(early), _LAST)])
        low, high = np.searchsorted(recording.event_time, [call.first, int(call.repeated[-1]) + 1])
        events = np.arange(low, high)
        within = np.isin(recording.block_category[recording.event_block[events]], _REPEATED)
        events = events[within & np.isin(life.made[recording.event_block[events]], call.repeated)]
        sources = np.unique(recording.event_block[events])
        number = np.full(recording.blocks, -1)
        number[sources] = blocks + np.arange(len(sources))
        blocks += len(sources)
        copies.append(sources.astype(np.int64))
        begin = call.backward + before[place]
        again = begin + np.searchsorted(call.repeated[:-1], recording.event_time[events])
        columns.append([number[recording.event_block[events]], recording.event_allocates[events], again, events])
        # What was dropped is freed by the backward pass as before; anything else as soon as all is there again.
        event_block[life.freeing[call.dropped]] = number[call.dropped]
        rest = sources[(life.freed[sources] > call.repeated[-1]) & ~np.isin(sources, call.dropped)]
        ending = np.full(len(rest), begin + len(call.repeated) - 1)
        columns.append([number[rest], np.zeros(len(rest), np.bool_), ending, np.full(len(rest), _LAST)])
    block, allocates, time, order = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    sorted_by = np.lexsort((order, time))
    source = np.concatenate([np.arange(recording.blocks), *copies])
    phase = np.concatenate([recording.block_phase, np.full(len(source) - recording.blocks, _BACKWARD, np.uint8)])
    places = np.repeat(starts, lengths)
    again = np.concatenate([call.repeated for call in calls])

    def longer(column: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.insert(column, places, column[again]) if len(column) else column

    changed = {
        name: getattr(recording, name)[source] for name in (
            "block_bytes", "block_category", "block_operator", "block_module", "block_stream"
        )
    } | {name: longer(getattr(recording, name)) for name in _OPERATORS if hasattr(recording, name)}  # fmt: skip
    changed["operator_phase"] = np.insert(recording.operator_phase, places, np.full(len(places), _BACKWARD))
    return replace(
        recording, block_phase=phase, block_line=recording.block_line[source] if len(recording.block_line) else
        recording.block_line, event_block=block[sorted_by].astype(np.int32), event_allocates=allocates[sorted_by],
        event_time=time[sorted_by].astype(np.int32),
        batch_starts=tuple(moved(np.array(recording.batch_starts)).tolist()), **changed,
    )  # fmt: skip


_OPERATORS = ("operator_name", "operator_module", "operator_call")
