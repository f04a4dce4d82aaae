"""Calibration rules: one loader setting, what it gave, how many processes fit, and which is chosen. Pure; no clock.

Loader processes are capped by CPUs and free memory, num_workers × prefetch_factor are swept in batches per second, and
the cheapest setting that reaches at least 90 % of the peak is chosen. `kit.studies.calibration.search` says which
settings are tried. Here:

- **CPU cap**: a rank's share of the cores, over how busy loading keeps one core (its CPU seconds a second, measured
  without processes, between 1/16 and 1), rounded down: processes that wait for a disk or a network need no core. Counts
  that the caller names are not capped by CPUs.
- **memory cap**: free memory less its safety margin, shared among the ranks, over what one process was measured to
  allocate for itself, plus its prefetch factor × the bytes of a batch. Batches travel in shared memory, which must have
  space for them too.
- **warm-up**: two batches, and as many as are on order before the first is taken (processes × prefetch factor, or the
  batches the engine reads ahead).
- **cheapest**: fewest processes, then fewest bytes kept ready (batches on order, cache), then fewest requests in
  flight.
- **turns**: a machine is faster in one second than in the next, so settings measured at different times do not compare.
  A choice that this may have made is measured in turn with its rivals: the fastest of the dearer settings, where the
  choice may be below 90 % of it, and cheaper ones that may be plainly enough; by twice the standard errors, and 7 % of
  drift for what was not measured in turn. That is done once, and while the choice is in doubt up to three times in all;
  these figures replace the first ones. What starts or fills too slowly for a turn is measured once: where it is chosen,
  the fastest cheaper setting is measured once more, and there are no turns.

How long one setting is timed: batches are timed in blocks, since those of several processes come in bursts. A block is
the least multiple of the processes (or of half of what the engine reads ahead) that is five batches or more, 40 at
most; where loading is slow, half a second and one batch of each process are enough. The first time, a setting is timed
until

- its mean is known to 3 % (standard error over the blocks), or
- it is plainly no rival or plainly a gain: below 90 % of the fastest so far, or 5 % above it, by twice the standard
  error, or
- ten blocks have passed, or a quarter of the batches or of the time that the config allows one candidate,

but in the first two cases never before five blocks, and in none but for the time before a quarter of a second, since
in less a pause of the machine is all that is measured. A turn gets an eighth of batches and
time, or as much as two blocks take up to a quarter. Where a turn would have fewer than five batches, or its start would
take half of its time, there are no turns, and then, as with a cache, the first time may use up all batches and time.

In simulations of 600 pipelines whose batches vary by 2 to 40 %, on machines that drift by up to 15 %, the rules chose
a setting within 10 % of the best in 96 %, in a third of the time of exhaustive search in 97 % (`tests/studies`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kit.units import format_bytes, format_count

ENOUGH = 0.9
"""Of the peak throughput."""
MOST_WORKERS = 32
GAIN = 1.05
"""What counts as faster."""
DOUBT = 2.0
"""Standard errors within which two figures may be the same."""
DRIFT = 0.07
"""Standard error of a figure that was not measured in turn: a machine is faster in one second than in the next."""
LARGEST_ERROR = 0.2
"""Of a figure where it decides: more is bursts of batches, each followed by a pause, so their mean is known better."""
_SHARE = 1 / 16
"""The least that loading is taken to keep a core busy."""
PARAMETERS = ("num_workers", "prefetch_factor", "requests_in_flight", "batches_ahead", "cache_bytes")
"""Fields of the config's `loader` that a setting has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetting:
    """One point of the sweep; the engine's parameters are None for a loader that is not kit's own."""

    num_workers: int
    prefetch_factor: int
    requests_in_flight: int | None = None
    batches_ahead: int | None = None
    cache_bytes: int | None = None

    @property
    def own(self) -> bool:
        """Whether kit's engine reads."""
        return self.requests_in_flight is not None

    @property
    def batches_ready(self) -> int:
        """On order before the consumer asks."""
        ahead = self.batches_ahead or 0
        return self.num_workers * (self.prefetch_factor + ahead) if self.num_workers else ahead

    @property
    def warmup_batches(self) -> int:
        return 2 + self.batches_ready

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of a Config that it sets."""
        values = {f"loader.{name}": getattr(self, name) for name in PARAMETERS}
        return {path: value for path, value in values.items() if value is not None}

    def cost(self, batch_bytes: int) -> tuple[int, int, int]:
        """(processes, bytes kept ready, requests in flight): what is compared to find the cheapest."""
        kept = self.batches_ready * batch_bytes + (self.cache_bytes or 0)
        return self.num_workers, kept, self.requests_in_flight or 0

    def __str__(self) -> str:
        noun = "process" if self.num_workers == 1 else "processes"
        processes = [f"{self.num_workers} {noun} × {self.prefetch_factor}"] if self.num_workers else []
        if not self.own:
            return "".join(processes) or "no processes"
        cache = [f"cache {format_bytes(self.cache_bytes)}"] if self.cache_bytes else []
        return ", ".join([*processes, f"{self.requests_in_flight} requests", f"{self.batches_ahead} ahead", *cache])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one setting gave."""

    setting: LoaderSetting
    batches_per_second: float
    batches: int
    """Measured, without the warm-up."""
    seconds: float
    """Of those."""
    error: float
    """Standard error of the throughput, as a fraction of it; 1 where there are too few batches to tell."""
    first_batch_seconds: float
    """Start to first batch."""
    whole_seconds: float
    """What trying it cost."""
    turns: int = 0
    """How often it was measured again in turn with others; the figures are then those of the turns."""
    paces: tuple[float, ...] = ()
    """Seconds a batch of each block of batches: what the error is made from."""
    warmup_seconds: float = 0.0
    """From the first batch to the first that counts, such as a cache takes to fill."""


def cpu_cap(cores: int, busy: float) -> int:
    """Loader processes of one rank that its share of the cores can feed, by the rule above."""
    return max(1, min(MOST_WORKERS, int(cores / min(1.0, max(_SHARE, busy)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCap:
    """What loader processes may allocate, and what each was measured to allocate."""

    free_bytes: int
    """Of this rank's share."""
    shared_bytes: int
    """Free shared memory of this rank's share; batches travel through it."""
    margin: float
    worker_bytes: int
    """One process for itself."""
    batch_bytes: int

    def most(self, prefetch_factor: int) -> int:
        """Processes that fit, with so many batches each."""
        ready = prefetch_factor * self.batch_bytes
        by_memory = self._allowed(self.free_bytes) // max(1, self.worker_bytes + ready)
        return min(by_memory, self._allowed(self.shared_bytes) // ready) if ready else by_memory

    def _allowed(self, free_bytes: int) -> int:
        return int(free_bytes * (1 - self.margin))

    def why_not(self, setting: LoaderSetting) -> str:
        """Why a setting does not fit; empty when it does."""
        workers, ready = setting.num_workers, setting.prefetch_factor * self.batch_bytes
        if workers <= self.most(setting.prefetch_factor):
            return ""
        needed, allowed = workers * (self.worker_bytes + ready), self._allowed(self.free_bytes)
        if needed > allowed:
            each = f"{format_bytes(self.worker_bytes)} and {setting.prefetch_factor} batches"
            return f"{workers} processes of {each} each need {format_bytes(needed)} of {format_bytes(allowed)} allowed"
        allowed = self._allowed(self.shared_bytes)
        return f"their batches need {format_bytes(workers * ready)} of {format_bytes(allowed)} of shared memory allowed"


def choose(measured: Sequence[Measurement], batch_bytes: int) -> Measurement:
    """The cheapest that reaches `ENOUGH` of the peak."""
    peak = max(item.batches_per_second for item in measured)
    enough = [item for item in measured if item.batches_per_second >= ENOUGH * peak]
    return min(enough, key=lambda item: (item.setting.cost(batch_bytes), -item.batches_per_second))


def why_chosen(chosen: Measurement, measured: Sequence[Measurement]) -> str:
    """One sentence."""
    fastest = max(measured, key=lambda item: item.batches_per_second)
    reached = chosen.batches_per_second / fastest.batches_per_second
    speed = f"{format_count(fastest.batches_per_second)} batches/s"
    if chosen is fastest:
        return f"{chosen.setting} is the fastest, {speed}, and nothing cheaper reaches {ENOUGH:.0%} of it"
    return (
        f"{chosen.setting} is the cheapest that reaches {ENOUGH:.0%} of the peak: {reached:.0%} of {speed}, which "
        f"{fastest.setting} gave"
    )


def finalists(
    measured: Sequence[Measurement], batch_bytes: int, able: Callable[[Measurement], bool] = lambda _: True
) -> list[Measurement]:
    """The settings to measure in turn before the choice stands, in the order of `measured`; empty for no turns.

    Args:
        measured: What may be chosen.
        batch_bytes: Of one batch.
        able: Whether something can be measured in turn.
    """
    chosen = choose(measured, batch_bytes)
    cost = chosen.setting.cost(batch_bytes)
    if not able(chosen):  # it starts too slowly; that it beat what is cheaper may have been one bad second of that
        cheaper = [item for item in measured if item.setting.cost(batch_bytes) < cost and able(item)]
        fastest = sorted(cheaper, key=lambda item: item.batches_per_second)[-1:]
        return [] if any(item.turns for item in cheaper) else fastest
    dearer = [item for item in measured if item.setting.cost(batch_bytes) > cost and able(item)]
    rival = max(dearer, key=lambda item: item.batches_per_second, default=None)  # it would be worth its price next
    rivals = [rival] if rival is not None and _may_fall_short(chosen, rival) else []
    doubted = filter(able, _cheaper_in_doubt(measured, chosen, batch_bytes))
    ids = {id(item) for item in (chosen, *rivals, *doubted)}
    return [item for item in measured if id(item) in ids] if len(ids) > 1 else []


def in_doubt(measured: Sequence[Measurement], batch_bytes: int) -> bool:
    """Whether the errors allow another choice."""
    chosen = choose(measured, batch_bytes)
    peak = max(measured, key=lambda item: item.batches_per_second)
    return (chosen is not peak and _may_fall_short(chosen, peak)) or bool(
        _cheaper_in_doubt(measured, chosen, batch_bytes)
    )


def _cheaper_in_doubt(measured: Sequence[Measurement], chosen: Measurement, batch_bytes: int) -> list[Measurement]:
    """Cheaper ones that may be plainly enough: to leave out what is just enough costs no speed."""
    peak = max(measured, key=lambda item: item.batches_per_second)
    cost = chosen.setting.cost(batch_bytes)
    return [
        item for item in measured
        if item.setting.cost(batch_bytes) < cost and _ratio(item, peak, DOUBT) > ENOUGH * GAIN
    ]  # fmt: skip


def _may_fall_short(item: Measurement, peak: Measurement) -> bool:
    return _ratio(item, peak, -DOUBT) < ENOUGH


def _ratio(item: Measurement, peak: Measurement, errors: float) -> float:
    """Of their throughputs, so many standard errors from what was measured."""
    drift = 0.0 if item.turns and peak.turns else math.sqrt(2) * DRIFT
    ratio = item.batches_per_second / peak.batches_per_second
    known = (min(one.error, LARGEST_ERROR) for one in (item, peak))
    return ratio * (1 + errors * math.hypot(*known, drift))


LOOK_FRACTION = 1 / 4
TURN_FRACTION, LARGEST_TURN = 1 / 8, 1 / 4
"""Of what the config allows one candidate."""
MOST_ROUNDS = 3
LEAST_BATCHES = 5
"""Of a block, and of a turn."""
SLOW_SECONDS = 0.5
LEAST_SECONDS = 0.25
"""In fewer, a pause of the machine is all that is measured."""
_LARGEST_BLOCK, _BLOCKS, _MOST_BLOCKS, _SETTLED = 40, 5, 10, 0.03


def together(setting: LoaderSetting) -> int:
    """Batches that may come at once."""
    return min(_LARGEST_BLOCK, max(1, setting.num_workers, (setting.batches_ahead or 0) // 2))


def block_size(setting: LoaderSetting) -> int:
    """Batches that are timed as one."""
    burst = together(setting)
    return min(_LARGEST_BLOCK, -(-LEAST_BATCHES // burst) * burst)


def standard_error(paces: Sequence[float]) -> float:
    """Of the mean of blocks, as a fraction of it; 1 for fewer than two."""
    if len(paces) < 2 or not sum(paces):
        return 1.0
    return min(1.0, float(statistics.stdev(paces) / len(paces) ** 0.5 / statistics.fmean(paces)))


def long_enough(paces: Sequence[float], seconds: float, rival: float = 0.0) -> bool:
    """Whether a setting has been timed enough, by the rule above.

    Args:
        paces: Seconds a batch of each block.
        seconds: Of all blocks.
        rival: Batches per second of the fastest so far; 0 for none.
    """
    if len(paces) < _BLOCKS or seconds < LEAST_SECONDS:
        return False
    error, speed = standard_error(paces), 1 / statistics.fmean(paces)
    low, high = speed * (1 - DOUBT * error), speed * (1 + DOUBT * error)
    plain = rival > 0 and (high < ENOUGH * rival or low > GAIN * rival)
    return error <= _SETTLED or len(paces) >= _MOST_BLOCKS or plain
