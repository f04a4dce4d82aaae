"""price: the seconds of a step from its operators and what each costs on a device; pure arithmetic, a millisecond.

Host and device are two clocks. The host makes one call after another; on a GPU each call puts a kernel into a queue,
and the device works it off, so a step takes as long as the slower of them at every point:

    done[i] = max(done[i - 1], called[i]) + device_seconds[i]          called[i] = sum of host_seconds[0 .. i]

A CPU has one clock: what the host spends is added. Gradients travel beside the backward pass (`kit.speed.links`). What
it does not hide is added, and what it hides takes memory and cores from it for as long as those bytes take to be read
and written. On a CPU it hides nothing, as the cores that compute it also add up gradients, and Lightning's word to all
ranks before each micro-batch, whether to go on, counts too. The last rank is waited for. A loader that is slower than
all this decides instead.

What binds a step is what most of it goes to. On a GPU that counts the host up to the last point at which the device
waits for it, and the device from there on: what it does before is done beside the host, and takes no time of its own.

Low and high add up the doubt of each cost: half of it as if all erred alike, and half as if they erred apart.
Invariant: low_seconds <= seconds <= high_seconds, and `operator_seconds` add up to `busy_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kit.memory.replay.calls import OperatorCall, TensorSpec
from kit.memory.replay.replay import PHASES
from kit.speed.links import DEVICES_OF_NODE, Link, Reached, Traffic, waited_for
from kit.speed.operators import StepOperators
from kit.speed.work import KINDS, Work, work_of

LATEST = 2.0
"""Times as late as was measured: what makes ranks late comes and goes."""

CallBound = Literal["compute", "memory bandwidth", "host"]
Bound = CallBound | Literal["communication", "loader"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call on one device."""

    seconds: float
    doubt: float
    """The factor by which it may be wrong either way, above 1: 1.2 is 20 %."""
    source: str
    """measured, near, scaled, or datasheet."""
    bound: CallBound


def slowest(compute: float, memory: float, start: float) -> CallBound:
    """What takes most of a call's seconds; one that takes longest to be started is bound by the host that starts it."""
    if start > max(compute, memory):
        return "host"
    return "compute" if compute > memory else "memory bandwidth"


class Costs(Protocol):
    """What calls cost on a device."""

    @property
    def name(self) -> str:
        """How a reason calls them."""

    @property
    def asynchronous(self) -> bool:
        """Whether the host goes on while the device computes: a GPU."""

    @property
    def step_seconds(self) -> float:
        """Of the host for each micro-batch, beside all calls: the loop of the Trainer."""

    @property
    def doubt(self) -> float:
        """Of all that is not a call's own: 1.1 is 10 %."""

    def cost(self, call: OperatorCall, work: Work) -> Cost:
        """Of one call, on the device."""

    def host_seconds(self, phase: str) -> float:
        """Of the host for each call in a phase: Python, autograd, dispatch."""

    def checkpoint_seconds(self, operators: int) -> float:
        """Of the host for a checkpointed call that repeats so many operators, beside those."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where the time of a step goes, on one device."""

    seconds: float
    low_seconds: float
    high_seconds: float
    work_seconds: float
    """Of device and host, without waits for other devices and for the loader."""
    operator_seconds: NDArray[np.float64]
    """(operators,) of the device, all repeats."""
    host_seconds: float
    """Of all calls and the Trainer's loop."""
    exchange_seconds: float
    """Waited for other devices."""
    loader_seconds: float | None
    """Of a step's batches; None where that is not known."""
    bound: Bound
    sources: Mapping[str, float]
    """Seconds by where their cost is from."""
    step: StepOperators

    @property
    def busy_seconds(self) -> float:
        """Of the device."""
        return float(self.operator_seconds.sum())

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of a step in which the device does nothing, by what it waits for."""
        return {
            "host": max(0.0, self.work_seconds - self.busy_seconds), "other devices": self.exchange_seconds,
            "loader": max(0.0, self.seconds - self.work_seconds - self.exchange_seconds),
        }  # fmt: skip

    def _by(self, numbers: NDArray[np.generic], name: Callable[[int], str]) -> dict[str, float]:
        used, places = np.unique(numbers, return_inverse=True)
        sums = np.bincount(places.reshape(-1), weights=self.operator_seconds, minlength=len(used))
        found: dict[str, float] = {}
        for number, seconds in zip(used.tolist(), sums.tolist(), strict=True):
            found[name(number)] = found.get(name(number), 0.0) + seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def by_phase(self) -> dict[str, float]:
        """Seconds of the device by phase, the largest first."""
        return self._by(self.step.phase, lambda number: PHASES[number])

    @property
    def by_module(self) -> dict[str, float]:
        """By path of the module whose call it is."""
        return self._by(self.step.module, lambda number: self.step.names[number] or "(outside)")

    @property
    def by_kind(self) -> dict[str, float]:
        return self._by(self.step.kind, lambda number: KINDS[number])

    @property
    def by_operator(self) -> dict[str, float]:
        return self._by(self.step.call, lambda number: self.step.calls[number].name)


def price(
    step: StepOperators,
    costs: Costs,
    *,
    traffic: Traffic | None = None,
    devices: int = 1,
    within: Link | None = None,
    between: Link | None = None,
    devices_per_node: int = DEVICES_OF_NODE,
    loader_seconds: float | None = None,
) -> StepTime:
    """The seconds of one optimizer step.

    Args:
        step: Its operators.
        costs: Of the device.
        traffic: What devices exchange; None for one device.
        devices: All of them.
        within: What joins devices of a node.
        between: What joins nodes.
        devices_per_node: Devices of a node.
        loader_seconds: Of the batches of a step; None where they are not known.
    """
    each = [costs.cost(call, work) for call, work in zip(step.calls, step.call_work, strict=True)]
    seconds = np.asarray(np.array([cost.seconds for cost in each])[step.call] * step.repeats, dtype=np.float64)
    per_phase = np.array([costs.host_seconds(phase) for phase in PHASES])
    # A view costs the host nearly what a kernel costs it, but puts nothing into the queue.
    host = (per_phase[step.phase] + _checkpointing(step, costs)) * step.repeats
    loop = costs.step_seconds * step.accumulate
    if costs.asynchronous:
        called = np.cumsum(host) + loop
        ahead = called - np.concatenate([[0.0], np.cumsum(seconds)[:-1]])
        # From this operator on the device never waits for the host again.
        turn = int(ahead.argmax()) if len(seconds) else 0
        waited, decides = (float(called[turn]) if len(called) else loop), np.arange(len(seconds)) >= turn
    else:
        waited, decides = float(host.sum()) + loop, np.ones(len(seconds), dtype=np.bool_)
    done = waited + float(seconds[decides].sum())
    backward = float(seconds[step.phase == PHASES.index("backward")].sum())
    exchange, least, most = 0.0, 0.0, 0.0
    if traffic is not None and devices > 1 and within is not None:
        order: tuple[Reached, ...] = ("usual", "most", "least")
        rings = [traffic.seconds(devices, within, between, devices_per_node, reached) for reached in order]
        last = backward / step.accumulate  # gradients travel in the last micro-batch
        hidden = [last if costs.asynchronous else 0.0, last]  # on a CPU the same cores add them up
        exchange, least = (waited_for(rings[place], hidden[place], traffic.pieces) for place in (0, 1))
        moved = _moved_seconds(costs, traffic.memory_bytes(devices)) if costs.asynchronous else 0.0
        most = rings[2] + moved
        exchange += moved * (1 - exchange / max(rings[0], exchange, 1e-12))
        late = within.late_seconds(done)
        hops = 0 if costs.asynchronous else step.accumulate * math.ceil(math.log2(devices))
        told = hops * within.latency_seconds
        exchange, least, most = exchange + late + told, least + told, most + LATEST * late + told
    doubts = np.log(np.array([cost.doubt for cost in each]))[step.call]
    whole = float(seconds.sum()) or 1e-12
    alike = float((seconds * doubts).sum() / whole)
    by_call = np.bincount(step.call, weights=seconds * doubts, minlength=len(step.calls))
    apart = float(np.sqrt((by_call**2).sum()) / whole)
    factor = float(np.exp(0.5 * (alike + apart))) * costs.doubt
    low, high = done / factor + least, done * factor + most
    total = done + exchange
    sources: dict[str, float] = {}
    for number, spent in enumerate(np.bincount(step.call, weights=seconds, minlength=len(each)).tolist()):
        sources[each[number].source] = sources.get(each[number].source, 0.0) + spent
    bound = _bound(each, step, np.where(decides, seconds, 0.0), waited, exchange)
    found = StepTime(
        seconds=total, low_seconds=low, high_seconds=high, work_seconds=done, operator_seconds=seconds,
        host_seconds=float(host.sum()) + loop, exchange_seconds=exchange, loader_seconds=loader_seconds,
        bound=bound, sources=sources, step=step,
    )  # fmt: skip
    if loader_seconds is not None and loader_seconds > total:
        found = replace(
            found, seconds=loader_seconds, low_seconds=min(low, loader_seconds), high_seconds=max(high, loader_seconds),
            bound="loader",
        )  # fmt: skip
    return found


def _moved_seconds(costs: Costs, nbytes: float) -> float:
    """To read and write so many bytes of the device's memory, as a copy does."""
    half = TensorSpec((int(nbytes / 2),), "uint8")
    copy = OperatorCall("aten::clone", (half,), (), (half,))
    return costs.cost(copy, work_of(copy)).seconds


def _checkpointing(step: StepOperators, costs: Costs) -> NDArray[np.float64]:
    """(operators,) or (1,): seconds of the host for what is run again, beside running it."""
    again = np.asarray(step.recomputes > 0, dtype=np.float64)
    if not again.any():
        return np.zeros(1)
    of_call = costs.checkpoint_seconds(0)
    again *= costs.checkpoint_seconds(1) - of_call
    _, begins = np.unique(step.recomputes, return_index=True)
    again[begins[step.recomputes[begins] > 0]] += of_call
    return again


def _bound(
    each: list[Cost], step: StepOperators, seconds: NDArray[np.float64], host: float, exchange: float
) -> Bound:  # fmt: skip
    """What most of a step goes to; the seconds are of operators that the device does not do beside the host."""
    parts: dict[Bound, float] = {"compute": 0.0, "memory bandwidth": 0.0, "host": host, "communication": exchange}
    for number, spent in enumerate(np.bincount(step.call, weights=seconds, minlength=len(each)).tolist()):
        parts[each[number].bound] += spent
    return max(parts, key=lambda name: parts[name])
