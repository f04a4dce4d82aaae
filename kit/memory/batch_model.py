"""MemoryModel: one configuration recorded twice, so that any batch size is answered at once.

Every block of a step grows in proportion to the batch or not at all, so two recordings foretell the third exactly, and
a slider costs a replay: no process, some tens of milliseconds. They are made at the batch size of the data and at one
more, because kernels are chosen by size: far from there a few blocks may be others. Micro-batches beyond the second of
a step are all alike, and so are the ranks of ddp: these numbers are free too, once two of them were recorded. Where two
recordings do not tell the same story, or another kind of device is asked for, it is recorded anew.

largest_batch: how many samples fit, found on replays and confirmed by one real recording at the answer.

The search doubles the batch until it no longer fits, then halves the gap; each look is a replay of some tens of
milliseconds. Where kernels are others at the answer than where it started, it goes on from recordings there. "Fits" is
the verdict with the high end of what is held outside the allocator, so a tight batch is too large. Known error: the
allocator's rounding makes reserved bytes rise unevenly, and a larger batch than the one found may happen to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, overload

from kit.config import Config
from kit.memory.prediction import TIMEOUT_SECONDS, estimate_here
from kit.memory.query import MemoryQuery, find_target_device, make_query
from kit.memory.recordings import NEXT, RecordingRequest, as_asked, known, recordings
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate
from kit.memory.replay.replay import Recording
from kit.memory.replay.scaling import BatchScaling, ScalingError
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes

_SMALLEST_SIZES = (2, 3)
"""Where the data's batch is 1, which broadcasts where others do not."""
Scaling = BatchScaling | Recording | str
"""How a recording follows the batch: in proportion, not at all (activations unknown), or why it is not known."""


@overload
def memory_model(
    config: Config,
    /,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryModel: ...
@overload
def memory_model(
    module: Any,
    data: Any,
    config: Config,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryModel: ...
def memory_model(
    module: Any,
    data: Any = None,
    config: Config | None = None,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MemoryModel:
    """Record a configuration at two batch sizes; takes and raises what `predict_memory` does."""
    if config is None and isinstance(module, Config):
        module, config = None, module
    question, target = make_query(module, data, config, device, world_size)
    return MemoryModel(question, target, timeout_seconds)


class MemoryModel:
    """Estimates of one configuration at any batch size.

    Args:
        question: The configuration.
        target: The device.
        timeout_seconds: For each process.
        near: Record at this batch size and one more, instead of that of the data.

    Raises:
        KitError: what `predict_memory` raises.
    """

    def __init__(
        self,
        question: MemoryQuery,
        target: DeviceTarget,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        near: int | None = None,
    ) -> None:
        self.question, self.target, self.timeout_seconds = question, target, timeout_seconds
        self._near = near
        self._scalings: dict[str, Scaling] = {}
        self._scaling(question)

    @property
    def config(self) -> Config:
        return self.question.config

    @property
    def reason(self) -> str:
        """Why other batch sizes have to be recorded; empty when they follow from what was."""
        found = self._scaling(self.question)
        if isinstance(found, Recording):
            return str(found.facts["unknown"])
        return found if isinstance(found, str) else ""

    @property
    def batch_size(self) -> int:
        """Samples per micro-batch as the data makes them."""
        if self.question.data.kind == "default":
            return self.config.loader.batch_size
        (recording,) = recordings(RecordingRequest(self.question), self.timeout_seconds)
        return recording.batch_size

    def estimate(
        self,
        batch_size: int | None = None,
        *,
        device: str | int | DeviceTarget | None = None,
        accumulate: int | None = None,
        world_size: int | None = None,
    ) -> MemoryEstimate:
        """The estimate at another batch size, on another device, with other accumulation or more ranks.

        Raises:
            KitError: what `predict_memory` raises.
        """
        question, target = self._varied(device, accumulate, world_size)
        return estimate_here(question, self._recording(question, batch_size or self.batch_size), target)

    def knows(
        self,
        *,
        device: str | int | DeviceTarget | None = None,
        accumulate: int | None = None,
        world_size: int | None = None,
    ) -> bool:
        """Whether `estimate` would answer without a process, at any batch size."""
        question, _ = self._varied(device, accumulate, world_size)
        return not isinstance(self._scalings.get(question.key), str | None)

    def _varied(
        self, device: str | int | DeviceTarget | None, accumulate: int | None, world_size: int | None
    ) -> tuple[MemoryQuery, DeviceTarget]:
        if device is None and accumulate is None and world_size is None:
            return self.question, self.target
        config, ranks = self.config, world_size or self.question.world_size
        if accumulate is not None:
            config = config.replace({"levers.accumulate_grad_batches": accumulate})
        target = self.target if device is None else find_target_device(device, config, ranks)
        return self.question.with_config(config, target, ranks), target

    def recorded(self, batch_size: int) -> Recording:
        """A recording really made at this batch size.

        Raises:
            KitError: what `predict_memory` raises.
        """
        (recording,) = recordings(RecordingRequest(self.question, (batch_size,)), self.timeout_seconds)
        return recording

    def scaling(self) -> BatchScaling | None:
        """How blocks grow with the batch; None where `reason` says why that is not known."""
        found = self._scaling(self.question)
        return found if isinstance(found, BatchScaling) else None

    def _recording(self, question: MemoryQuery, batch_size: int) -> Recording:
        scaling = self._scaling(question)
        if isinstance(scaling, BatchScaling):
            return as_asked(question, scaling.at(batch_size))
        if isinstance(scaling, Recording):
            return as_asked(question, replace(scaling, batch_size=batch_size))
        exact = known(question, batch_size)
        return exact or recordings(RecordingRequest(question, (batch_size,)), self.timeout_seconds)[0]

    def _scaling(self, question: MemoryQuery) -> Scaling:
        key = question.key
        if key not in self._scalings:
            self._scalings[key] = _scaling_of(*self._pair(question))
        return self._scalings[key]

    @property
    def _sizes(self) -> tuple[int | None, int]:
        return (None, NEXT) if self._near is None else (self._near, self._near + 1)

    def _pair(self, question: MemoryQuery) -> tuple[Recording, Recording]:
        first, second = recordings(RecordingRequest(question, self._sizes), self.timeout_seconds)
        if first.batch_size == 1 and not first.facts.get("unknown"):
            first, second = recordings(RecordingRequest(question, _SMALLEST_SIZES), self.timeout_seconds)
        return first, second


def _scaling_of(first: Recording, second: Recording) -> Scaling:
    if first.facts.get("unknown"):
        return first
    try:
        return BatchScaling(first, second)
    except ScalingError as error:
        return str(error)


MOST_SAMPLES = 1 << 20
_COLUMNS = ("batch", "verdict", "allocated", "reserved", "outside")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LargestBatch:
    """The largest batch that fits, and what the next one would need."""

    batch_size: int
    """Samples per micro-batch on each device; 0 when not even one fits."""
    estimate: MemoryEstimate
    """At `batch_size`, from a real recording; at 1 when not even that fits."""
    next_estimate: MemoryEstimate | None
    """At the next larger batch; None when none larger was tried."""
    reasons: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join([self._headline, text_table(_COLUMNS, self._rows), *(f"- {item}" for item in self.reasons)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows, caption=self._headline) + html_list(self.reasons)

    @property
    def _headline(self) -> str:
        what = f"a batch of {self.batch_size} fits" if self.batch_size else "not even a batch of 1 fits"
        if not self.estimate.complete:
            what = "activations are unknown, so no batch is said to fit"
        size = format_bytes(self.estimate.capacity_bytes)
        return f"{what} on {self.estimate.device}" + ("" if size in self.estimate.device else f" ({size})")

    @property
    def _rows(self) -> list[list[str]]:
        return [_row(found) for found in (self.estimate, self.next_estimate) if found is not None]


@overload
def largest_batch(
    config: Config,
    /,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LargestBatch: ...
@overload
def largest_batch(
    module: Any,
    data: Any,
    config: Config,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LargestBatch: ...
def largest_batch(
    module: Any,
    data: Any = None,
    config: Config | None = None,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LargestBatch:
    """The largest number of samples per device that fits; takes and raises what `predict_memory` does."""
    if isinstance(module, Config) and config is None:
        module, config = None, module
    question, target = make_query(module, data, config, device, world_size)
    return search(MemoryModel(question, target, timeout_seconds))


def search(model: MemoryModel) -> LargestBatch:
    """The largest batch for a model that was recorded already.

    Raises:
        KitError: what `predict_memory` raises.
    """
    at_one = model.estimate(1)
    if not at_one.fits:
        return LargestBatch(batch_size=0, estimate=at_one, next_estimate=None, reasons=(at_one.reasons[0],))
    fits, fails = _halve(1, _double(model.estimate), model.estimate)
    reasons = [model.reason] if model.reason else []
    if differs := _differs(model, fits):
        reasons.append(f"replays from {model.batch_size} do not foretell {fits}, so recordings near it do: {differs}")
        near = MemoryModel(model.question, model.target, model.timeout_seconds, near=fits)
        fits, fails = _halve(*_around(fits, near.estimate), near.estimate)
        model, fits = near, max(1, fits)
    estimate = _recorded(model, fits)
    if not estimate.fits:
        reasons.append(f"replays said that {fits} fit, a recording at {fits} says otherwise: {estimate.reasons[0]}")
        fits, fails = _halve(0, fits, lambda batch_size: _recorded(model, batch_size))
        estimate = _recorded(model, max(1, fits))
    else:
        reasons.append(f"a recording at {fits} confirms it")
    following = None if fails > MOST_SAMPLES else model.estimate(fails)
    reasons.append(f"{fails}: {following.reasons[0]}" if following else f"the search ended at {MOST_SAMPLES} samples")
    return LargestBatch(batch_size=fits, estimate=estimate, next_estimate=following, reasons=tuple(reasons))


def _double(estimate: Callable[[int], MemoryEstimate]) -> int:
    """The first power of two that does not fit, or the first beyond `MOST_SAMPLES`."""
    batch_size = 2
    while batch_size <= MOST_SAMPLES and estimate(batch_size).fits:
        batch_size *= 2
    return batch_size


def _halve(fits: int, fails: int, estimate: Callable[[int], MemoryEstimate]) -> tuple[int, int]:
    """Neighbours, of which the first fits and the second does not."""
    if fails > MOST_SAMPLES:
        return MOST_SAMPLES, fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if estimate(middle).fits else (fits, middle)
    return fits, fails


def _around(batch_size: int, estimate: Callable[[int], MemoryEstimate]) -> tuple[int, int]:
    """One that fits below one that does not, looking ever further from `batch_size`; 0 is taken to fit."""
    step = 1 if estimate(batch_size).fits else -1
    last, gap = batch_size, 1
    while 0 < (following := batch_size + step * gap) <= MOST_SAMPLES and estimate(following).fits == (step > 0):
        last, gap = following, 2 * gap
    return (last, following) if step > 0 else (max(0, following), last)


def _recorded(model: MemoryModel, batch_size: int) -> MemoryEstimate:
    return estimate_here(model.question, model.recorded(batch_size), model.target)


def _differs(model: MemoryModel, batch_size: int) -> str:
    """What a recording at `batch_size` shows to be otherwise than replays foretell."""
    scaling = model.scaling()
    return scaling.differs_from(model.recorded(batch_size)) if scaling is not None else ""


def _row(found: MemoryEstimate) -> list[str]:
    outside = " to ".join(map(format_bytes, found.outside_bytes))
    allocated, reserved = format_bytes(found.device_allocated_bytes), format_bytes(found.device_reserved_bytes)
    return [str(found.batch_size), found.verdict, allocated, reserved, outside]
