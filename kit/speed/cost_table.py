"""CostTable: what calls cost on a device that is here: measured for the same call, or scaled from the nearest one.

A call that was measured takes what it took. Any other takes what the nearest calls of the same operator took, scaled
along the device's roofline; near means alike in every dimension, not only in work: a convolution of few channels is
another kernel than one of many. One whose operator was never measured takes the roofline of its kind.

    seconds(call) = seconds(near) × roof(call) / roof(near)          roof = least + FLOPs / peak + bytes / bandwidth

Measured calls are kept in the kernel's process as numbers; who measures them is `kit.speed.timing_job`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kit.machine.processes import MOST_SLOWNESS
from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.speed.links import Link
from kit.speed.pricing import Cost, slowest
from kit.speed.work import Work, work_of

_NEIGHBOURS = 3
_FAR = 1.5
"""Distance at which a neighbour says little: 1 is a factor of two in one dimension."""
MEASURED_DOUBT, NEAR_DOUBT, FAR_DOUBT, ROOF_DOUBT = 1.2, 1.35, 1.7, 2.5
"""Of 49 settings of 23 models, measured on a machine that others used too, nine of ten lay within 25 %
(`benchmarks/speed.py`)."""


@dataclass(frozen=True)
class CostTable:
    """Costs on this machine's device."""

    name: str
    measured: Mapping[OperatorCall, float]
    """Seconds of each call that was measured."""
    backward_call_seconds: float = 0.0
    """Of the host for each call of a backward pass, beside the call itself: autograd."""
    forward_call_seconds: float = 0.0
    """For each call of a forward pass: modules and hooks in Python, and autograd's graph."""
    step_seconds: float = 0.0
    """Of the Trainer for each batch."""
    checkpoint_call_seconds: float = 0.0
    """Of the host for each checkpointed call, beside the operators that it repeats."""
    checkpoint_operator_seconds: float = 0.0
    """Of the host for each of those, beside the operator: what it saves goes through hooks in Python."""
    optimizer_call_seconds: float = 0.0
    """For each call of the optimizer's: its loop in Python."""
    doubt: float = 1.15
    asynchronous: bool = False
    link: Link | None = None
    """What joins the ranks that were timed together; None for a single one."""
    host_known: bool = True
    """Whether the seconds of the host were measured, and not only calls."""
    pace_seconds: float = 0.0
    """Of the product that tells a CPU's pace, at its fastest, as which all costs are; 0 where it was not asked."""
    slowness: float = 1.0
    """How many times as long that product took in slow moments while calls were timed."""
    of_one_rank: frozenset[OperatorCall] = frozenset()
    """Of the measured calls, those that one rank made alone, slowed as others were among several."""
    busy_cores: float = field(default=0.0, compare=False)
    """That others used while a part of it was measured: then all may be too high."""

    def host_seconds(self, phase: str) -> float:
        """Of the host for each call in a phase."""
        if phase == "optimizer":
            return self.optimizer_call_seconds
        return self.backward_call_seconds if phase == "backward" else self.forward_call_seconds

    def checkpoint_seconds(self, operators: int) -> float:
        """Of the host for a checkpointed call that repeats so many operators, beside those."""
        return self.checkpoint_call_seconds + operators * self.checkpoint_operator_seconds

    def knows(self, call: OperatorCall) -> bool:
        """Whether it was measured, among as many ranks."""
        return call in self.measured and call not in self.of_one_rank

    def with_calls(self, more: Mapping[OperatorCall, float]) -> CostTable:
        """The same with more calls measured."""
        return replace(self, measured={**self.measured, **more}, of_one_rank=self.of_one_rank - more.keys())

    def slowed(self, factor: float) -> CostTable:
        """The same where all takes so many times as long, sums over the ranks included."""
        if factor == 1:
            return self
        slower = {name: getattr(self, name) * factor for name in _OF_HOST}
        measured = {call: factor * seconds for call, seconds in self.measured.items()}
        return replace(self, measured=measured, link=self.link and self.link.slowed(factor), **slower)

    def moving_seconds(self, work: Work) -> float:
        """Of memory, for what a call moves: they hardly change with the pace of a CPU."""
        return work.bytes / self._bandwidth

    def cost(self, call: OperatorCall, work: Work) -> Cost:
        """Of one call."""
        known = self.measured.get(call)
        compute, memory = self._roof_parts(work, _dtype(call))
        bound = slowest(compute, memory, self._least)
        if known is not None:
            doubt, source = (MEASURED_DOUBT, "measured") if self.knows(call) else (NEAR_DOUBT, "near")
            return Cost(known, doubt, source, bound)
        if work.kind == "communication":
            return Cost(0.0, 1.0, "measured", bound)
        if work.kind == "view":
            return Cost(self._least_view, NEAR_DOUBT, "near", "host")
        found = self._from_near(call, work)
        if found is not None:
            seconds, distance = found
            doubt = NEAR_DOUBT if distance < _FAR else FAR_DOUBT
            return Cost(seconds, doubt, "near" if distance < _FAR else "scaled", bound)
        return Cost(self._least + compute + memory, ROOF_DOUBT, "roofline", bound)

    def _from_near(self, call: OperatorCall, work: Work) -> tuple[float, float] | None:
        alike = self._by_operator.get(call.operator) or self._by_operator.get(_base(call.operator))
        if not alike:
            return None
        mine = _features(call)
        ranked = sorted(
            ((_distance(mine, theirs), roof, seconds) for theirs, roof, seconds in alike), key=lambda x: x[0]
        )
        near = ranked[:_NEIGHBOURS]
        roof = self._roof(work, _dtype(call))
        weights = [1 / (distance**2 + 0.01) for distance, _, _ in near]
        logs = [math.log(seconds * roof / theirs) for _, theirs, seconds in near]
        mean = sum(weight * value for weight, value in zip(weights, logs, strict=True)) / sum(weights)
        return math.exp(mean), near[0][0]

    # -- the roofline that scales

    def _roof(self, work: Work, dtype: str) -> float:
        return self._least + sum(self._roof_parts(work, dtype))

    def _roof_parts(self, work: Work, dtype: str) -> tuple[float, float]:
        return work.flops / self.peak_flops_per_second(dtype), work.bytes / self._bandwidth

    def peak_flops_per_second(self, dtype: str) -> float:
        """The best product that was measured in a number format; in one that was not, the best of all."""
        return self._peaks.get(dtype) or max(self._peaks.values(), default=1e11)

    @cached_property
    def _works(self) -> list[tuple[OperatorCall, Work, float]]:
        return [(call, work_of(call), seconds) for call, seconds in self.measured.items()]

    @cached_property
    def _least(self) -> float:
        """Of a call that does next to nothing."""
        return min((seconds for _, work, seconds in self._works if work.kind == "elementwise"), default=3e-6)

    @cached_property
    def _least_view(self) -> float:
        return min((seconds for _, work, seconds in self._works if work.kind == "view"), default=1.5e-6)

    @cached_property
    def _peaks(self) -> dict[str, float]:
        """FLOP/s by number format: the best product."""
        best: dict[str, float] = {}
        for call, work, seconds in self._works:
            if work.flops:
                best[_dtype(call)] = max(best.get(_dtype(call), 0.0), work.flops / seconds)
        return best

    @cached_property
    def _bandwidth(self) -> float:
        """Bytes/s that a large elementwise call moves: the median of those above 8 MiB, or the best."""
        rates = sorted(
            work.bytes / seconds for _, work, seconds in self._works
            if work.kind in ("elementwise", "copy") and work.bytes > 8 << 20
        )  # fmt: skip
        return rates[len(rates) // 2] if rates else 1e10

    @cached_property
    def _by_operator(self) -> dict[str, list[tuple[_Features, float, float]]]:
        found: dict[str, list[tuple[_Features, float, float]]] = defaultdict(list)
        for call, work, seconds in self._works:
            entry = _features(call), self._roof(work, _dtype(call)), seconds
            found[call.operator].append(entry)
            if _base(call.operator) != call.operator:
                found[_base(call.operator)].append(entry)
        return dict(found)

    # -- on disk

    def to_json(self) -> dict[str, Any]:
        """What `of` reads."""
        calls = [[call.to_json(), seconds, call in self.of_one_rank] for call, seconds in self.measured.items()]
        link = dataclasses.asdict(self.link) if self.link else None
        kept = {name: getattr(self, name) for name in (*_KEPT, "host_known")}
        return {"calls": calls, "link": link, **kept}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> CostTable:
        """From JSON values."""
        entries = [(OperatorCall.of(call), float(seconds), of_one) for call, seconds, of_one in value["calls"]]
        link = Link(**value["link"]) if value.get("link") else None
        kept = {name: value[name] for name in _KEPT}
        kept["slowness"] = min(kept["slowness"], MOST_SLOWNESS)  # an earlier kit counted moments of standing still
        return cls(
            measured={call: seconds for call, seconds, _ in entries},
            of_one_rank=frozenset(call for call, _, of_one in entries if of_one),
            link=link, host_known=bool(value.get("host_known", True)), **kept,
        )  # fmt: skip


_OF_HOST = (
    "backward_call_seconds", "forward_call_seconds", "optimizer_call_seconds", "step_seconds",
    "checkpoint_call_seconds", "checkpoint_operator_seconds",
)  # fmt: skip
_KEPT = ("name", *_OF_HOST, "asynchronous", "pace_seconds", "slowness")


def _base(operator: str) -> str:
    """Without overload and the mark of an operator in place: `add_.Tensor` costs what `add.Tensor` does, or nearly."""
    return operator.partition(".")[0].removesuffix("_")


def _dtype(call: OperatorCall) -> str:
    return next(
        (spec.dtype for spec in (*call.inputs, *call.outputs) if spec.dtype not in ("int64", "bool")), "float32"
    )


_Features = tuple[tuple[Any, ...], tuple[float, ...]]
"""What must be alike, and numbers whose difference is a distance, in factors of two."""


def _features(call: OperatorCall) -> _Features:
    specs = [*call.inputs[:3], *call.outputs[:1]]
    marks: list[Any] = [_dtype(call), len(call.inputs) if len(call.inputs) < 8 else 8]
    sizes: list[float] = []
    for spec in specs:
        marks.append((len(spec.shape), _layout(spec), spec.dtype))
        sizes += _sizes(spec)
    if len(call.inputs) > 8:  # a list of tensors: how many and how large together
        sizes = [_log(len(call.inputs)), _log(sum(spec.elements for spec in call.inputs))]
        marks = marks[:2]
    numbers = [_flat(value) for value in call.arguments]
    return (tuple(marks), tuple(x for some in numbers for x in some if isinstance(x, bool | str))), tuple(sizes)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, TensorSpec):
        return []
    return [x for item in value for x in _flat(item)] if isinstance(value, tuple) else [value]


def _sizes(spec: TensorSpec) -> Iterable[float]:
    padded = (1, 1, 1, *spec.shape)[-4:]
    whole = math.prod(spec.shape[:-3]) if len(spec.shape) > 4 else padded[0]
    return [_log(whole), *(_log(size) for size in padded[1:])]


def _log(size: float) -> float:
    return math.log2(max(1, size))


def _layout(spec: TensorSpec) -> str:
    """Whether the last dimension is the dense one, where it is not contiguous."""
    if spec.strides is None:
        return "dense"
    if 0 in spec.strides:
        return "expanded"
    return "rows" if spec.strides[-1] == 1 else "columns"


def _distance(one: _Features, other: _Features) -> float:
    (marks, numbers), sizes = one
    (their_marks, their_numbers), their_sizes = other
    apart = sum(mine != theirs for mine, theirs in zip(marks, their_marks, strict=False))
    marked = float(apart + abs(len(marks) - len(their_marks)) + 0.5 * (numbers != their_numbers))
    if len(sizes) != len(their_sizes):
        return 8.0 + marked
    return 0.7 * math.dist(sizes, their_sizes) + marked
