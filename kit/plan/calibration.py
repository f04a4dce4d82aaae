"""Calibration: which loader settings to try, when to stop trying, and which to take. Rules only; nothing is measured.

As in the description that it follows: a cap on loader processes from CPUs and free memory, a sweep of num_workers ×
prefetch_factor in batches per second, warm-up batches skipped, an early stop on a plateau, and the cheapest setting
that reaches at least 90 % of the peak. What that leaves open is fixed so:

- **candidates**: 0, 1, 2, 4, 8, 16, 32 processes and the cap itself, each with the prefetch factors of the config.
  Without processes there is nothing to prefetch, so 0 is one candidate.
- **CPU cap**: a rank's share of the cores, over how busy loading keeps one core (its CPU seconds a second, measured
  without processes, between 1/16 and 1), rounded down: processes that wait for a disk or a network hold no core. Counts
  that the caller names are not capped by CPUs.
- **memory cap**: free memory less its safety margin, shared among the ranks, over what one process was measured to hold
  for itself, plus its prefetch factor × the bytes of a batch. Batches on their way lie in shared memory, which must
  have room for them too.
- **warm-up**: two batches, and as many as are on order before the first is taken (processes × prefetch factor, or the
  batches the engine reads ahead).
- **plateau**: two values of a dial in a row, or one prefetch factor, that do not beat the best so far by 5 %.
- **measured long enough**: five blocks of batches, each as many as are on order (5 to 40), over half a second, whose
  mean is known to 3 % (standard error); or the most batches, or the time from its first batch on, that the config
  allows *one candidate*.
- **cheapest**: fewest processes, then fewest bytes kept ready (batches on order, cache), then fewest requests in
  flight.

The engine's own dials come first, without processes: requests in flight and batches ahead rise together from 8 and 1 to
their plateau, then each falls again while 90 % of the peak remain; then a cache of the whole store, or of half of
`loader.memory_bytes`, measured once it has had time to fill. Processes are tried with the cheapest of those settings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kit.units import format_bytes, format_count

ENOUGH = 0.9
"""Of the peak throughput."""
MOST_WORKERS = 32
GAIN = 1.05
"""What counts as faster."""
PATIENCE = 2
REQUESTS = (8, 16, 32, 64, 128, 256)
AHEAD = (1, 2, 4, 8, 16, 32)
_SHARE = 1 / 16
"""The least that loading is taken to keep a core busy."""
_BLOCK, _LARGEST_BLOCK, _BLOCKS, _SETTLED, _SETTLED_SECONDS = 5, 40, 5, 0.03, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSetting:
    """One point of the sweep; the engine's dials are None for a loader that is not kit's own."""

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
        names = ("num_workers", "prefetch_factor", "requests_in_flight", "batches_ahead", "cache_bytes")
        found = {f"loader.{name}": getattr(self, name) for name in names}
        return {path: value for path, value in found.items() if value is not None}

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
        dials = [f"{self.requests_in_flight} requests", f"{self.batches_ahead} ahead"]
        return ", ".join([*processes, *dials, *cache])


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


Looks = Generator[LoaderSetting, Measurement | None, None]
"""A rule: yields the setting to measure, hears what it gave, or None where it could not run."""
Drop = Callable[[LoaderSetting], str]
"""Why a setting is left out; empty for none."""


class Plateau:
    """Whether going on with a dial has stopped paying."""

    def __init__(self, patience: int, best: float = 0.0) -> None:
        self.best, self._patience, self._stale = best, patience, 0

    def reached(self, batches_per_second: float) -> bool:
        self._stale = 0 if batches_per_second > GAIN * self.best else self._stale + 1
        self.best = max(self.best, batches_per_second)
        return self._stale >= self._patience


def worker_counts(named: Sequence[int], cap: Callable[[], int]) -> Iterator[int]:
    """Processes to try, rising; `cap` is asked once 0 has been measured, and not for counts that were named."""
    if named:
        yield from sorted(set(named))
        return
    yield 0
    most = cap()
    yield from sorted({*(count for count in (1, 2, 4, 8, 16, 32) if count <= most), most} - {0})


def cpu_cap(cores: int, busy: float) -> int:
    """Loader processes of one rank that its share of the cores can feed, by the rule above."""
    return max(1, min(MOST_WORKERS, int(cores / min(1.0, max(_SHARE, busy)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCap:
    """What loader processes may hold, and what each was measured to hold."""

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


def sweep_workers(
    base: LoaderSetting, counts: Iterable[int], prefetch: Sequence[int], drop: Drop, best: float = 0.0
) -> Looks:
    """Processes rising, with rising prefetch factors each, until more of either does not pay.

    Args:
        base: Where the other dials stand.
        counts: Processes to try, rising; asked for one at a time.
        prefetch: Factors to try with each.
        drop: What is left out.
        best: Batches per second that are had already, 0 for none.
    """
    plateau = Plateau(PATIENCE, best)
    for count in counts:
        inner = Plateau(1)
        for factor in sorted(set(prefetch)) if count else [base.prefetch_factor]:
            setting = replace(base, num_workers=count, prefetch_factor=factor)
            if drop(setting):
                break
            found = yield setting
            if found is None or inner.reached(found.batches_per_second):
                break
        if not inner.best or plateau.reached(inner.best):  # where these do not fit, more will not
            return


def sweep_engine(base: LoaderSetting, caches: Sequence[int], drop: Drop) -> Looks:
    """Requests in flight and batches ahead rise together, then each falls while that is enough, then the cache.

    Together, because each limits the other: so many batches on order give so many requests and no more. Where memory
    holds no more batches, requests rise alone.
    """
    known: dict[LoaderSetting, Measurement | None] = {}

    def look(setting: LoaderSetting) -> Generator[LoaderSetting, Measurement | None, Measurement | None]:
        if setting not in known:
            known[setting] = None if drop(setting) else (yield setting)
        return known[setting]

    plateau, ahead, best = Plateau(PATIENCE), AHEAD[0], None
    for requests, wanted in zip(REQUESTS, AHEAD, strict=True):
        setting = replace(base, num_workers=0, requests_in_flight=requests, batches_ahead=wanted, cache_bytes=0)
        found = yield from look(setting)
        if found is None:
            found = yield from look(replace(setting, batches_ahead=ahead))
        else:
            ahead = wanted
        if found is None or plateau.reached(found.batches_per_second):
            break
        best = found if best is None or found.batches_per_second > GAIN * best.batches_per_second else best
    if best is None:
        return
    for dial, values in (("batches_ahead", AHEAD), ("requests_in_flight", REQUESTS)):
        for value in sorted((value for value in values if value < getattr(best.setting, dial)), reverse=True):
            found = yield from look(replace(best.setting, **{dial: value}))
            if found is None or found.batches_per_second < ENOUGH * plateau.best:
                break
            best = found
    for size_bytes in caches:
        yield from look(replace(best.setting, cache_bytes=size_bytes))


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


def block_size(setting: LoaderSetting) -> int:
    """Batches that are timed together: one that is late holds up those on order, which then come all at once."""
    return min(_LARGEST_BLOCK, max(_BLOCK, setting.num_workers, setting.batches_ready))


def standard_error(block_seconds: Sequence[float]) -> float:
    """Of the mean, as a fraction of it; 1 for fewer than two blocks."""
    if len(block_seconds) < 2 or not sum(block_seconds):
        return 1.0
    return float(statistics.stdev(block_seconds) / len(block_seconds) ** 0.5 / statistics.fmean(block_seconds))


def settled(block_seconds: Sequence[float]) -> bool:
    """Whether more batches would hardly change the answer."""
    enough = len(block_seconds) >= _BLOCKS and sum(block_seconds) >= _SETTLED_SECONDS
    return enough and standard_error(block_seconds) <= _SETTLED
