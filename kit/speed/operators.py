"""StepOperators: the operators of one optimizer step, in order: how often each runs, where, and what it is called with.

The step is the second that was recorded: the first also makes the optimizer's state. What ddp does in the second step
alone, the new layout of its buckets, is left out. Of accumulated micro-batches two are recorded: the first of a step
writes gradients, and all that follow add to them and are alike, but for the last one's exchange. Validation, and what
ran before the first batch, is no part of a step.

From the step of one device follows that of each of several (`shared_step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import PlanError
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.replay import EVALUATIONS, PHASES, Recording
from kit.speed.work import KINDS, Work, work_of

_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))


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

    @property
    def order(self) -> list[OperatorCall]:
        """(operators,) the call that each makes, as a step makes them."""
        return [self.calls[number] for number in self.call]

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


# -- the same step on several devices


def why_not_shared(recording: Recording, strategy: str) -> str:
    """Why the step of one device does not tell what several do under a strategy; empty where it does."""
    facts = recording.facts
    if facts.get("unknown") or not facts.get("units"):
        return "not all of it is known, or the module's own code decides what is shared"
    if facts.get("refused_strategies", {}).get(strategy.partition(":")[0]):
        return "torch refuses it on several devices"
    if facts.get("asks_devices"):
        return f"it asks how many devices there are at {facts['asks_devices']}"
    if strategy == "ddp":
        unused = sum(sum(sizes) for _, sizes, _ in facts["units"]) != facts["trainable_parameters"]
        return "some of its parameters get no gradient" if unused else ""
    step = step_of(recording)
    used = np.unique(step.call[step.phase == _OPTIMIZER]).tolist()
    if {step.call_work[number].kind for number in used if "_norm" not in step.calls[number].name} - _SHARED_KINDS:
        return "its optimizer may need whole parameters"
    return ""


def shared_step(recording: Recording, strategy: str, devices: int) -> StepOperators:
    """The step of one device as each of several has it: with copies and collectives, and a share of the optimizer.

    ddp copies gradients into buckets and back. fsdp gathers the parameters of a unit before its forward pass and its
    backward pass, and scatters the gradients after it. As many operators are added
    as torch makes: those that compute nothing cost the host as much as others.
    """
    step = step_of(recording)
    step = replace(step, facts={**step.facts, "strategy": strategy, "world_size": devices})
    name, *sizes = strategy.split(":")
    shards = int(sizes[1]) if sizes else devices if name == "fsdp" else 1
    dtype = "bfloat16" if step.facts["precision"] == "bf16-true" else "float32"
    batch = np.searchsorted(recording.batch_starts, step.place, side="right")
    first, last, added = int(batch.min()), int(batch.max()), list[_Added]()
    for number in range(first, last + 1):
        if name == "fsdp":
            for unit in step.facts["units"]:
                more = len(unit[1]) * (number > first) + bool(sizes)  # sums of gradients; of copies of the model
                added += _gathered(step, batch == number, unit, shards, dtype, more)
        else:
            added += _copied(step, batch == number, dtype, is_first=number == first, is_last=number == last)
    return _with_added(_optimizing_shares(step, shards), sorted(added, key=lambda one: one.before))


_SHARED_KINDS = {"elementwise", "copy", "view"}
_LOOKS = OperatorCall("aten::view", (), (), ())
"""An operator that the host makes and that computes nothing."""
_OF_UNIT = 10
"""Such operators around each collective of a unit of fsdp: names for profilers, results without numbers."""


@dataclass(frozen=True, slots=True)
class _Added:
    """An operator that sharing adds."""

    before: int
    """The place among the operators of the step."""
    beside: int
    """The operator with whose module, phase and repeats it counts."""
    call: OperatorCall
    times: int = 1
    repeats: bool = True
    """Whether it runs in every micro-batch."""


def _flat(elements: float, dtype: str) -> TensorSpec:
    return TensorSpec((int(elements),), dtype)


def _copy(elements: int, dtype: str) -> OperatorCall:
    spec = _flat(elements, dtype)
    return OperatorCall("aten::copy_", (spec, spec), (), (spec,))


def _copied(
    step: StepOperators, part: NDArray[np.bool_], dtype: str, *, is_first: bool, is_last: bool
) -> Iterator[_Added]:
    """What ddp adds: buffers of rank 0 to the first micro-batch, gradients into buckets and back to the last."""
    forward, backward = (np.flatnonzero(part & (step.phase == phase)) for phase in (_FORWARD, _BACKWARD))
    start = int(forward[0]) if len(forward) else 0
    yield _Added(start, start, _LOOKS, 2)
    for kind, buffers in step.facts["buffers"].items() if is_first else ():
        parts = tuple(_flat(size, kind) for size in buffers)
        yield _Added(start, start, OperatorCall("aten::cat", (parts,), (), (_flat(sum(buffers), kind),)))
        yield _Added(start, start, _LOOKS, 3 * len(buffers) + 1)
        yield from (_Added(start, start, _copy(size, kind)) for size in buffers)
    if len(backward) and is_last:
        end = int(backward[-1])
        for size in (size for _, trainable, _ in step.facts["units"] for size in trainable):
            yield _Added(end + 1, end, _copy(size, dtype), 2, repeats=False)
            yield _Added(end + 1, end, _LOOKS, repeats=False)


def _gathered(
    step: StepOperators, part: NDArray[np.bool_], unit: tuple[str, list[int], list[int]], shards: int, dtype: str,
    more_scattering: int,
) -> Iterator[_Added]:  # fmt: skip
    """What fsdp adds to a micro-batch for a unit."""
    name, trainable, frozen = unit
    sizes = [*trainable, *frozen]
    inside = [not name or one == name or one.startswith(f"{name}.") for one in step.names]
    own = part & np.array(inside)[step.module]
    whole, scattered = _flat(sum(sizes), dtype), _flat(sum(trainable), dtype)
    shares = tuple(_flat(-(-size // shards), dtype) for size in sizes)
    gather = (
        OperatorCall("fsdp::all_gather_copy_in", (shares, whole), (), (_flat(sum(sizes) / shards, dtype), whole)),
        OperatorCall("c10d::_allgather_base_", (whole,), (), (whole,)),
        OperatorCall("fsdp::split_with_sizes_copy", (whole,), (("out", (whole,)),), ()),
    )
    forward, backward = (np.flatnonzero(own & (step.phase == phase)) for phase in (_FORWARD, _BACKWARD))
    # The outermost unit stays gathered unless its own `forward` is called within its step. It has a name more, and the
    # results of others pass a function that gathers again.
    again = bool(name) or step.facts["module"] in {step.names[number] for number in np.unique(step.module).tolist()}
    for places, needed, more in ((forward, True, 1 if name else 2), (backward, again, 0)):
        if len(places) and needed and sizes:
            first = int(places[0])
            yield _Added(first, first, _LOOKS, len(sizes) + _OF_UNIT + more)
            yield from (_Added(first, first, call) for call in gather)
    if len(backward) and trainable:
        end = int(backward[-1])
        yield _Added(end + 1, end, _LOOKS, len(trainable) + _OF_UNIT + (1 if name else 3) + more_scattering)
        yield _Added(end + 1, end, OperatorCall("fsdp::chunk_cat", (scattered,), (("out", scattered),), ()))
        yield _Added(end + 1, end, OperatorCall("c10d::_reduce_scatter_base_", (scattered,), (), (scattered,)))
    elif sizes and (passes := np.flatnonzero(part & (step.phase == _BACKWARD))).size:
        yield _Added(int(passes[-1]) + 1, int(passes[-1]), _LOOKS, 4)  # names alone


def _optimizing_shares(step: StepOperators, shards: int) -> StepOperators:
    """The same with a share of each tensor that the optimizer sees, and of gradients that add up: rows of its first
    dimension."""
    if shards == 1:
        return step
    optimizer = step.phase == _OPTIMIZER
    seen = {spec.shape for number in np.unique(step.call[optimizer]) for spec in step.calls[number].inputs}

    def of_gradients(call: OperatorCall) -> bool:
        shapes = {spec.shape for spec in call.inputs}
        return call.name.startswith("_amp_foreach") or (call.operator == "aten::add_.Tensor" and shapes <= seen)

    optimizer |= (step.phase != _FORWARD) & np.array(list(map(of_gradients, step.calls)))[step.call]
    used = np.unique(step.call[optimizer])
    shared = [_share(step.calls[number], shards) for number in used.tolist()]
    number = step.call.copy()
    number[optimizer] = len(step.calls) + np.searchsorted(used, step.call[optimizer])
    return replace(step, calls=(*step.calls, *shared), call=number)


def _share(value: Any, shards: int) -> Any:
    if isinstance(value, OperatorCall):
        parts = (_share(part, shards) for part in (value.arguments, value.named, value.results))
        return OperatorCall(value.operator, *parts)
    if isinstance(value, tuple):
        return tuple(_share(item, shards) for item in value)
    if isinstance(value, TensorSpec) and value.shape:
        return TensorSpec((-(-value.shape[0] // shards), *value.shape[1:]), value.dtype, value.strides)
    return value


def _with_added(step: StepOperators, added: Sequence[_Added]) -> StepOperators:
    calls = list(dict.fromkeys(one.call for one in added))
    numbers = {call: len(step.calls) + place for place, call in enumerate(calls)}
    before, beside = ([getattr(one, name) for one in added] for name in ("before", "beside"))
    times = np.array([one.times * (step.repeats[one.beside] if one.repeats else 1) for one in added], dtype=np.int32)

    def longer(column: NDArray[Any], values: Any = None) -> NDArray[Any]:
        return np.insert(column, before, column[beside] if values is None else values) if len(column) else column

    return replace(
        step, calls=(*step.calls, *calls), call=longer(step.call, [numbers[one.call] for one in added]),
        repeats=longer(step.repeats, times), recomputes=longer(step.recomputes, 0), phase=longer(step.phase),
        module=longer(step.module), line=longer(step.line), place=longer(step.place),
    )  # fmt: skip
