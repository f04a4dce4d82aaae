"""MemoryModel: one configuration recorded twice, so that any batch size is answered at once.

Every block of a step grows in proportion to the batch or not at all, so two recordings predict the third exactly, and a
slider costs a replay: no process, some tens of milliseconds. They are made at the batch size of the data and at one
more, because kernels are chosen by size: far from there a few may be others. Micro-batches beyond the second of a step
are all alike, and so are the ranks of ddp: any number of them follows from two. Where another kind of device is asked
for, it is recorded anew, and so is each batch size where two recordings differ in more than sizes.

Blocks that are not in proportion to the batch (the workspace of a convolution on the CPU, a loss of all pairs) are
recorded anew once. When a second size is asked for, five more recordings are made: near the smallest batch, at far
larger ones, and one between. If the first ones predict its peak to within `CHECKED_FRACTION`, any other size follows
from them; else each is recorded, as before.

largest_batch: how many samples fit, found on replays and confirmed by one real recording at the answer. The search
doubles the batch until it no longer fits, then halves the gap. Where kernels are others at the answer than where it
started, it goes on from recordings there. Where every size has to be recorded, each of some seconds, a line through the
last two says which to record next, and the answer is one of which `COARSE_FRACTION` more does not fit. "Fits" is the
verdict `fits` or `fits if`, with the high end of what is held outside the allocator, so a tight batch is too large.
Known error: the allocator's rounding makes reserved bytes rise unevenly, and a larger batch than the one found may
happen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kit.arguments import check_count, config_first
from kit.config import Config
from kit.memory.prediction import estimate_here
from kit.memory.query import MemoryQuery, find_target_device, make_query
from kit.memory.recordings import NEXT, RecordingRequest, recordings_of, with_query_facts
from kit.memory.replay.cards import THIS_MACHINE, DeviceTarget
from kit.memory.replay.estimate import MemoryEstimate
from kit.memory.replay.replay import Recording, replay
from kit.memory.replay.scaling import BatchScaling, ScalingError, difference
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes

_SMALLEST_SIZES = (2, 3)
"""Where the data's batch is 1, which broadcasts where others do not."""
_FAR = 8
"""Times the batch of the data that is recorded at least, where two neighbouring batches do not predict all others."""
CHECKED_FRACTION = 0.01
"""Of a peak that was recorded, how far a predicted one may be off for others to be predicted too."""
_LARGEST = 2**31 - 1
Scaling = BatchScaling | Recording | str
"""How a recording follows the batch: in proportion, not at all (activations unknown), or why it is not known."""


@config_first
def memory_model(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float | None = None,
) -> MemoryModel:
    """Record a configuration at two batch sizes, so that any other is predicted in milliseconds.

    Args:
        config: What would run; the default config when left out.
        module: What would be trained, as `kit.fit` takes it.
        data: What it would be trained on, as `kit.fit` takes it.
        device: A GPU model, its memory, or "this machine", as for `kit.predict_memory`.
        world_size: Ranks instead of the config's.
        timeout_seconds: Limit of each dry run, as for `kit.predict_memory`.

    Returns:
        A model whose `estimate(batch_size)` is what `kit.predict_memory` would say.

    Raises:
        KitError: as `kit.predict_memory` raises.

    Example:
        >>> model = kit.memory.model(config, MyModule, MyData, device="T4-16GB")
        >>> model.estimate(64).device_allocated_bytes > model.estimate(4).device_allocated_bytes
        True
    """
    query, target = make_query(module, data, config, device, world_size)
    return MemoryModel(query, target, timeout_seconds)


class MemoryModel:
    """Estimates of one configuration at any batch size.

    It is recorded at the batch size of the data and one more, or at `near` and one more; `timeout_seconds` is for each
    process. It raises what `predict_memory` does.
    """

    def __init__(
        self, query: MemoryQuery, target: DeviceTarget, timeout_seconds: float | None = None, *, near: int | None = None
    ) -> None:
        self.query, self.target, self.timeout_seconds = query, target, timeout_seconds
        self._near = near
        self._scalings: dict[str, Scaling] = {}
        self._asked_sizes: dict[str, set[int]] = {}
        """Batch sizes that two recordings did not predict, by query."""
        self._scaling(query)

    def __repr__(self) -> str:
        how = self.reason or f"recorded at {self._near or self.batch_size} samples and one more, the others follow"
        module = self.config.model.target if self.query.module.kind == "default" else self.query.module
        return f"memory of {module} on {self.target.name} at any batch size: {how}"

    @property
    def config(self) -> Config:
        return self.query.config

    @property
    def reason(self) -> str:
        """Why other batch sizes have to be recorded; empty when they follow from what was."""
        found = self._scaling(self.query)
        if isinstance(found, Recording):
            return str(found.facts["unknown"])
        return found if isinstance(found, str) else ""

    @property
    def batch_size(self) -> int:
        """Samples per micro-batch as the data makes them."""
        if self.query.data.kind == "default":
            return self.config.loader.batch_size
        return self._record(self.query, None)[0].batch_size

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
        query, target = self._varied(device, accumulate, world_size)
        if batch_size is None:
            batch_size = self.batch_size
        else:
            check_count("batch_size", batch_size, _LARGEST)
        found = self._scaling(query)
        if isinstance(found, str):
            found = self._nonlinear(query, batch_size)
        if isinstance(found, BatchScaling):
            recording = with_query_facts(query, found.at(batch_size))
        elif isinstance(found, Recording):
            recording = with_query_facts(query, replace(found, batch_size=batch_size))
        else:
            recording = self._record(query, batch_size)[0]
        return estimate_here(query, recording, target)

    def knows(
        self,
        *,
        device: str | int | DeviceTarget | None = None,
        accumulate: int | None = None,
        world_size: int | None = None,
    ) -> bool:
        """Whether `estimate` would answer without a process, at any batch size."""
        query, _ = self._varied(device, accumulate, world_size)
        return not isinstance(self._scalings.get(query.key), str | None)

    def _varied(
        self, device: str | int | DeviceTarget | None, accumulate: int | None, world_size: int | None
    ) -> tuple[MemoryQuery, DeviceTarget]:
        if device is None and accumulate is None and world_size is None:
            return self.query, self.target
        config, ranks = self.config, self.query.world_size if world_size is None else world_size
        if accumulate is not None:
            config = config.replace({"levers.accumulate_grad_batches": accumulate})
        target = self.target if device is None else find_target_device(device, config, ranks)
        return self.query.with_config(config, target, ranks), target

    def recorded(self, batch_size: int) -> Recording:
        """A recording really made at this batch size.

        Raises:
            KitError: what `predict_memory` raises.
        """
        return self._record(self.query, batch_size)[0]

    def scaling(self) -> BatchScaling | None:
        """How blocks grow with the batch; None where `reason` says why that is not known."""
        found = self._scaling(self.query)
        return found if isinstance(found, BatchScaling) else None

    def _scaling(self, query: MemoryQuery) -> Scaling:
        if query.key not in self._scalings:
            first, second = self._neighbours(query)
            scaling: Scaling = first
            if not first.facts.get("unknown"):
                try:
                    scaling = BatchScaling(first, second)
                except ScalingError as error:
                    scaling = str(error)
            self._scalings[query.key] = scaling
        return self._scalings[query.key]

    def _neighbours(self, query: MemoryQuery) -> list[Recording]:
        sizes = (None, NEXT) if self._near is None else (self._near, self._near + 1)
        first, second = self._record(query, *sizes)
        if first.batch_size == 1 and not first.facts.get("unknown"):
            return self._record(query, *_SMALLEST_SIZES)
        return [first, second]

    def _nonlinear(self, query: MemoryQuery, batch_size: int) -> Scaling:
        """What a query that two recordings do not answer follows, once a second size of it is asked for."""
        asked = self._asked_sizes.setdefault(query.key, set())
        if batch_size in asked or len(asked) != 1:
            asked.add(batch_size)
            return self._scalings[query.key]
        asked.add(batch_size)
        scaling = self._scalings[query.key] = self._nonlinear_scaling(query, 2 * max(asked))
        return scaling

    def _nonlinear_scaling(self, query: MemoryQuery, reach: int) -> Scaling:
        """From recordings up to a batch of `reach` or more, where these predict one between; else why not."""
        first, second = self._neighbours(query)
        if reason := difference(first, second):
            return reason
        low, far = first.batch_size, max(reach, _FAR * first.batch_size)
        between = max(low + 2, math.isqrt(low * far))
        smallest = _SMALLEST_SIZES if low > max(_SMALLEST_SIZES) else ()
        *pairs, check = self._record(query, *smallest, far, far + 1, between)
        if unknown := next((str(one.facts["unknown"]) for one in (*pairs, check) if one.facts.get("unknown")), ""):
            return unknown
        try:
            scaling = BatchScaling(first, second, *pairs, check)
        except ScalingError as error:
            return str(error)
        predicted, found = (replay(one).peak_allocated_bytes for one in (scaling.at(between), check))
        if abs(predicted - found) > CHECKED_FRACTION * found:
            return (
                f"recordings up to a batch of {far} predict {format_bytes(predicted)} at {between}, where "
                f"{format_bytes(found)} are needed; record each batch size"
            )
        return scaling

    def _record(self, query: MemoryQuery, *batch_sizes: int | None) -> list[Recording]:
        return recordings_of(RecordingRequest(query, batch_sizes), self.timeout_seconds)


MOST_SAMPLES = 1 << 20
COARSE_FRACTION = 0.01
"""How far, where every size has to be recorded, the largest batch may lie below the first that does not fit."""
_FARTHEST = 16
"""Times a batch that the next one to be recorded may be."""
_COLUMNS = ("batch", "verdict", "allocated", "reserved", "outside")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LargestBatch:
    """The largest batch that fits, and what the next one would need."""

    batch_size: int
    """Samples per micro-batch on each device; 0 when not even one fits."""
    estimate: MemoryEstimate
    """At `batch_size`, from a real recording; at 1 when not even that fits."""
    next_estimate: MemoryEstimate | None
    """At the next larger batch that was tried; None when none larger was."""
    reasons: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join([self._headline, text_table(_COLUMNS, self._rows), *(f"- {item}" for item in self.reasons)])

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows, caption=self._headline) + html_list(self.reasons)

    @property
    def _headline(self) -> str:
        what = "not even a batch of 1 fits"
        if self.batch_size:
            what = f"a batch of {self.batch_size} {self.estimate.verdict_in_words}"
        if not self.estimate.complete:
            what = "activations are unknown, so no batch is said to fit"
        size = format_bytes(self.estimate.capacity_bytes)
        return f"{what} on {self.estimate.device}" + ("" if size in self.estimate.device else f" ({size})")

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [str(item.batch_size), item.verdict, format_bytes(item.device_allocated_bytes),
             format_bytes(item.device_reserved_bytes), " to ".join(map(format_bytes, item.outside_bytes))]
            for item in (self.estimate, self.next_estimate)
            if item is not None
        ]  # fmt: skip


@config_first
def largest_batch(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    device: str | int | DeviceTarget = THIS_MACHINE,
    world_size: int | None = None,
    timeout_seconds: float | None = None,
) -> LargestBatch:
    """Predict the largest batch of each device that fits, without the device.

    Args:
        config: What would run; the default config when left out. Its batch size is ignored.
        module: What would be trained, as `kit.fit` takes it.
        data: What it would be trained on, as `kit.fit` takes it.
        device: A GPU model, its memory, or "this machine", as for `kit.predict_memory`.
        world_size: Ranks instead of the config's.
        timeout_seconds: Limit of each dry run, as for `kit.predict_memory`.

    Returns:
        The batch size, its estimate and that of one sample more.

    Raises:
        KitError: as `kit.predict_memory` raises.

    Example:
        >>> kit.memory.largest_batch(config, MyModule, MyData, device="1 GiB").batch_size > 1000
        True
    """
    query, target = make_query(module, data, config, device, world_size)
    return search(MemoryModel(query, target, timeout_seconds))


def search(model: MemoryModel, most: int = MOST_SAMPLES) -> LargestBatch:
    """The largest batch, `most` at most, for a model that was recorded already.

    Raises:
        KitError: what `predict_memory` raises.
    """
    at_one = model.estimate(1)
    if not at_one.may_fit:
        return LargestBatch(batch_size=0, estimate=at_one, next_estimate=None, reasons=(at_one.reasons[0],))
    own = model.batch_size
    model.estimate(own if own > 1 else _SMALLEST_SIZES[0])  # the second size, which may tell all others
    reasons = []
    if model.knows():
        fails = 2
        while fails <= most and model.estimate(fails).may_fit:
            fails *= 2
        fits, fails = _halve(1, fails, model.estimate, most)
    else:
        fits, fails = _approach(at_one, max(own, _SMALLEST_SIZES[0]), model.estimate, most)
    reasons += [model.reason] if model.reason else []
    if fails - fits > 1 and fails <= most:
        reasons.append(f"each size has to be recorded, so the answer lies between {fits} and {fails}")
    scaling = model.scaling()
    if scaling is not None and (differs := scaling.differs_from(model.recorded(fits))):
        reasons.append(f"replays from {model.batch_size} do not predict {fits}, so recordings near it do: {differs}")
        model = MemoryModel(model.query, model.target, model.timeout_seconds, near=fits)
        fits, fails = _halve(*_around(fits, model.estimate, most), model.estimate, most)
        fits = max(1, fits)
    estimate = _recorded(model, fits)
    if not estimate.may_fit:
        reasons.append(f"replays said that {fits} fit, a recording at {fits} says otherwise: {estimate.reasons[0]}")
        fits, fails = _halve(0, fits, lambda batch_size: _recorded(model, batch_size), most)
        estimate = _recorded(model, max(1, fits))
    else:
        reasons.append(f"a recording at {fits} confirms it")
    following = None if fails > most else model.estimate(fails)
    reasons.append(f"{fails}: {following.reasons[0]}" if following else f"the search ended at {most} samples")
    return LargestBatch(batch_size=fits, estimate=estimate, next_estimate=following, reasons=tuple(reasons))


def _approach(
    at_one: MemoryEstimate, size: int, estimate: Callable[[int], MemoryEstimate], most: int
) -> tuple[int, int]:
    """One that fits below one that does not, close enough, by few estimates; the first of them is of `size`."""
    spare_bytes, before, fits, fails, by_line = {1: _spare_bytes(at_one)}, 1, 1, most + 1, False
    size = min(size, most)
    while True:
        found = estimate(size)
        spare_bytes[size] = _spare_bytes(found)
        before, fits, fails = (fits, size, fails) if found.may_fit else (before, fits, size)
        is_between = fails in spare_bytes
        step = max(1, int(COARSE_FRACTION * (fails if is_between else fits)))
        if fits >= most or (is_between and fails - fits <= step):
            return fits, fails
        by_line = not (is_between and by_line)  # else halved, as reserved bytes rise in steps
        low, high = (fits, fails) if is_between else (before, fits)
        needed = (spare_bytes[low] - spare_bytes[high]) / (high - low)  # bytes for each sample
        aim = int(fits + spare_bytes[fits] / needed) if needed > 0 else most
        if is_between:
            size = min(max(aim, fits + step), fails - step) if by_line else max(fits + 1, math.isqrt(fits * fails))
        else:
            size = min(max(aim, fits + step), _FARTHEST * fits, most)


def _spare_bytes(found: MemoryEstimate) -> int:
    return found.capacity_bytes - found.total_bytes[1]


def _halve(fits: int, fails: int, estimate: Callable[[int], MemoryEstimate], most: int) -> tuple[int, int]:
    """Neighbours, of which the first fits and the second does not."""
    if fails > most:
        if most == fits or estimate(most).may_fit:
            return most, most + 1
        fits, fails = max(fits, fails // 2), most
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if estimate(middle).may_fit else (fits, middle)
    return fits, fails


def _around(batch_size: int, estimate: Callable[[int], MemoryEstimate], most: int) -> tuple[int, int]:
    """One that fits below one that does not, looking ever further from `batch_size`; 0 is taken to fit."""
    step = 1 if estimate(batch_size).may_fit else -1
    last, gap = batch_size, 1
    while 0 < (following := batch_size + step * gap) <= most and estimate(following).may_fit == (step > 0):
        last, gap = following, 2 * gap
    return (last, following) if step > 0 else (max(0, following), last)


def _recorded(model: MemoryModel, batch_size: int) -> MemoryEstimate:
    return estimate_here(model.query, model.recorded(batch_size), model.target)
