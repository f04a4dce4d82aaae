"""The recording of a step whose blocks are checkpointed, from one whose blocks are not: pure arithmetic.

A checkpointed block drops what its forward pass keeps for the backward pass, all but its output, and runs that forward
pass again where its backward pass begins. So in the recording the dropped activations are freed when the block's
forward has ended, and its operators and what they allocate stand a second time before the first operator of its
backward. Any subset of blocks is played through the allocator, and priced, in milliseconds.

Blocks are coarse where a model has few: half of eight equal ones may lack a byte, and five leave a seventh of a budget
unused. So modules inside a block may be checkpointed in its place (`Checkpoints.ladder`), down to a single activation
function, wherever their operators stand in one piece and change nothing in place.

A language model's logits, their logarithms of probabilities and the gradients of both often are the peak. A loss that
takes a chunk of the positions at a time, and computes its logits again, holds those of one chunk (`loss_chunks`). What
multiplies by the head is the user's own code, so that is advice.

The output is taken to be what the block's last allocating operator made, the largest of it. What it was given stays,
though nothing else may need it any more. The second forward ends
where the last dropped tensor is there again, as torch's does. Gathered parameters and traffic are not repeated: under
FSDP a block is gathered for its backward pass anyway. Known error: what autocast casts anew in the second forward; a
GPT of 64 channels under CUDA's autocast was thought to need 8 % too much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.replay import CATEGORIES, NO_CALL, PHASES, Recording, replay
from kit.units import format_bytes, format_seconds

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
    held: NDArray[np.int64]
    """Memory blocks that it was given and nobody needs further: they stay until it has run again."""


@dataclass(frozen=True, slots=True)
class Rung:
    """Modules to checkpoint of one block, none inside another."""

    names: tuple[str, ...]
    saved_bytes: int
    """Not kept through a micro-batch."""
    seconds: float
    """Of a step, to compute them again."""

    @classmethod
    def of(cls, parts: Collection[Rung]) -> Rung:
        """Several together."""
        names = tuple(name for part in parts for name in part.names)
        return cls(names, sum(part.saved_bytes for part in parts), sum(part.seconds for part in parts))


_GROUND = Rung((), 0, 0.0)


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
        calls = self._of(block)[:1]
        return sum(int(self.recording.block_bytes[call.dropped].sum()) for call in calls)

    def checkpointed(self, names: Iterable[str]) -> Recording:
        """The recording with these blocks, or modules inside them, checkpointed; none lies in another."""
        calls = sorted((call for name in names for call in self._of(name)), key=lambda call: call.backward)
        return _rewritten(self.recording, calls, self._life) if calls else self.recording

    def ladder(
        self, block: str, seconds: NDArray[np.float64], repeats: NDArray[np.float64],
        call_seconds: Callable[[int], float] = lambda _: 0.0,
    ) -> list[Rung]:  # fmt: skip
        """What may be checkpointed of a block, from its cheapest part up to all of it: each rung replaces the last.

        Each saves more than the one before, and takes longer.

        Args:
            block: Its name.
            seconds: (operators,) what each takes, all its repeats.
            repeats: (operators,) how often each runs in a step; 0 of those that are in no step that is priced.
            call_seconds: What a checkpointed call that repeats so many operators takes beside them.
        """
        prefix = f"{block}."
        inner = {name for name in self.recording.names if name.startswith(prefix) and ", line " not in name}
        inside: dict[str, list[str]] = {}
        for name in sorted(inner):
            parent = name.rpartition(".")[0]
            while parent != block and parent not in inner:
                parent = parent.rpartition(".")[0]
            inside.setdefault(parent, []).append(name)

        def cost(call: BlockCall) -> float:
            beside = float(repeats[call.first]) * call_seconds(len(call.repeated))
            return float(seconds[call.repeated].sum()) + beside

        return self._rungs(block, inside, cost)

    def _rungs(
        self, name: str, inside: Mapping[str, Sequence[str]], cost: Callable[[BlockCall], float]
    ) -> list[Rung]:  # fmt: skip
        parts = [self._rungs(part, inside, cost) for part in inside.get(name, ())]
        found, taken = [], dict[int, Rung]()
        for place, rung in climb(parts):
            taken[place] = rung
            found.append(Rung.of(taken.values()))
        if calls := self._of(name):
            found.append(Rung((name,), self.saved_bytes(name), sum(map(cost, calls))))
        better: list[Rung] = []
        for rung in sorted(found, key=lambda rung: (-rung.saved_bytes, rung.seconds)):
            if rung.saved_bytes and (not better or rung.seconds < better[-1].seconds):
                better.append(rung)
        return better[::-1]

    def _of(self, name: str) -> list[BlockCall]:
        """The calls of a block, or of a module inside one where it may run twice on its own."""
        if name not in self.calls:
            self.calls[name] = [] if self._is_torn(name) else self._calls_of(name)
        return self.calls[name]

    def _is_torn(self, name: str) -> bool:
        """Whether operators of others lie between its own, as where blocks share it, or it changes its input."""
        recording, inside = self.recording, self._inside(name)
        ends = [*recording.batch_starts[1:], len(recording.operator_name)]
        for start, end in zip(recording.batch_starts, ends, strict=True):
            own = start + np.flatnonzero(inside[start:end] & (recording.operator_phase[start:end] == _FORWARD))
            if len(own) and (own[-1] - own[0] + 1 != len(own) or self._in_place[own].any()):
                return True
        return False

    def _inside(self, name: str) -> NDArray[np.bool_]:
        names = self.recording.names
        parts = [place for place, one in enumerate(names) if one == name or one.startswith(f"{name}.")]
        return np.isin(self.recording.operator_module, parts)

    @cached_property
    def _in_place(self) -> NDArray[np.bool_]:
        names = [place for place, name in enumerate(self.recording.names) if name.partition(".")[0].endswith("_")]
        return np.isin(self.recording.operator_name, names)

    @cached_property
    def _life(self) -> _Life:
        return _Life.of(self.recording)

    @cached_property
    def _traffic(self) -> NDArray[np.bool_]:
        names = [place for place, name in enumerate(self.recording.names) if name.startswith(_TRAFFIC)]
        return np.isin(self.recording.operator_name, names)

    def _calls_of(self, block: str) -> list[BlockCall]:
        found, recording, life = [], self.recording, self._life
        inside = self._inside(block)
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
                    while until < last and self._in_place[until + 1]:  # it is filled before it is saved, as a mask is
                        until += 1
                    repeated = np.arange(first, until + 1)
                    repeated = repeated[~self._traffic[repeated]]
                    given = (life.made < first) & (life.freed >= first) & (life.freed <= last)
                    given &= np.isin(recording.block_category, _REPEATED) & (recording.block_phase == _FORWARD)
                    found.append(BlockCall(first, last, int(backward[0]), dropped, repeated, np.flatnonzero(given)))
        return found


def climb(ladders: Sequence[Sequence[Rung]]) -> list[tuple[int, Rung]]:
    """Steps up several ladders, that which costs least for a further byte first: (place of the ladder, its new rung).

    Rungs that a longer step passes at no higher cost are left out, so that costs only rise.
    """
    steps: list[tuple[float, int, int, Rung]] = []
    for place, ladder in enumerate(ladders):
        hull = [_GROUND]
        for rung in ladder:
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], rung):
                hull.pop()
            hull.append(rung)
        steps += [(_slope(*pair), place, number, pair[1]) for number, pair in enumerate(pairwise(hull))]
    return [(place, rung) for _, place, _, rung in sorted(steps, key=lambda step: step[:3])]


def _slope(before: Rung, after: Rung) -> float:
    """Seconds for a byte, of the step from one rung to the next."""
    return (after.seconds - before.seconds) / (after.saved_bytes - before.saved_bytes)


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
        columns[0][2][life.freeing[call.held]] = begin + len(call.repeated) - 1
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
    if len(recording.operator_recomputes):
        first = int(recording.operator_recomputes.max()) + 1
        calls_again = np.repeat(np.arange(first, first + len(lengths)), lengths)
        changed["operator_recomputes"] = np.insert(recording.operator_recomputes, places, calls_again)
    return replace(
        recording, block_phase=phase, block_line=recording.block_line[source] if len(recording.block_line) else
        recording.block_line, event_block=block[sorted_by].astype(np.int32), event_allocates=allocates[sorted_by],
        event_time=time[sorted_by].astype(np.int32),
        batch_starts=tuple(moved(np.array(recording.batch_starts)).tolist()), **changed,
    )  # fmt: skip


_OPERATORS = ("operator_name", "operator_module", "operator_call")


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
