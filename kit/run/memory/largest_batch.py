"""largest_batch: how many samples fit, found on replays and confirmed by one real recording at the answer.

The search doubles the batch until it no longer fits, then halves the gap; each look is a replay of some tens of
milliseconds. Where kernels are others at the answer than where it started, it goes on from recordings there. "Fits" is
the verdict with the high end of what is held outside the allocator, so a tight batch is too large. Known error: the
allocator's rounding makes reserved bytes rise unevenly, and a larger batch than the one found may happen to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from kit.config import Config
from kit.plan.memory.cards import THIS_MACHINE, Target
from kit.plan.memory.estimate import MemoryEstimate
from kit.run.memory.model import MemoryModel
from kit.run.memory.prediction import TIMEOUT_SECONDS, estimate_here
from kit.run.memory.question import ask
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes

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
    device: str | int | Target = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LargestBatch: ...
@overload
def largest_batch(
    module: Any,
    data: Any,
    config: Config,
    *,
    device: str | int | Target = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LargestBatch: ...
def largest_batch(
    module: Any,
    data: Any = None,
    config: Config | None = None,
    *,
    device: str | int | Target = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> LargestBatch:
    """The largest number of samples per device that fits; takes and raises what `predict_memory` does."""
    if isinstance(module, Config) and config is None:
        module, config = None, module
    question, target = ask(module, data, config, device, world_size)
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
