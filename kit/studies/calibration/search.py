"""Loader search: which settings are measured, in which order, and when trying more does not pay. Rules only.

A sweep measures one setting after another (`measure` gives None where a setting cannot run) and returns sentences that
say where it stopped and why. It depends on the measurements alone, so it can be repeated with better ones. Its rules:

- **candidates**: 0, 1, 2, 4, 8, 16, 32 processes and the cap itself, with the prefetch factors of the config. Without
  processes there is nothing to prefetch, so 0 is one candidate. One process is left out where no step runs beside it:
  it loads no faster than none.
- **plateau**: two values of a parameter in a row, or the largest prefetch factor, that do not beat the best so far by
  5 %.
- **ceiling**: a simulated step of s seconds allows 1 / s batches a second. Within 5 % of that nothing more is tried.
- **order**: processes rise with the smallest factor. The largest factor is then tried with the fastest number of
  processes, unless that is below 90 % of loading without processes. A factor evens out batches that take unlike times,
  which delay many processes more than few: where the largest brings nothing there, no factor helps fewer processes.
  Where it pays, more processes are tried with it, then fewer while that is enough, then smaller factors for those.
- **one fewer**: a larger factor may also spare processes. It is tried with the next smaller number, unless so many
  processes could not reach 90 % of the peak if each were as fast as loading without them.

The engine's own parameters come first, without processes: requests in flight and batches ahead rise together from 32
and 4 (beside a step from 8 and 1) to their plateau, then each falls again while 90 % of the peak remain. Then a cache
of the whole store, or of half of `loader.memory_bytes`, is measured once it has had time to fill; where it pays,
batches ahead rise with it until they do not. Processes are tried with the cheapest of those settings.

`search` repeats a sweep. It measures each setting of the sweep once, then again in turn those that decide the choice,
and repeats the sweep with the better figures until nothing new is measured. So a plateau that was the noise of one
second does not end the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kit.studies.calibration.rules import (
    ENOUGH,
    GAIN,
    LARGEST_TURN,
    LEAST_BATCHES,
    LOOK_FRACTION,
    MOST_ROUNDS,
    TURN_FRACTION,
    LoaderSetting,
    Measurement,
    block_size,
    finalists,
    in_doubt,
    standard_error,
)
from kit.units import format_count

PATIENCE = 2
REQUESTS = (8, 16, 32, 64, 128, 256)
AHEAD = (1, 2, 4, 8, 16, 32)
FIRST_RUNG = 2
"""Of both, from which they rise where no step says what is enough: where fewer are, they fall from there."""

Measure = Callable[[LoaderSetting], Measurement | None]
"""Measures a setting; None where it cannot run."""
Drop = Callable[[LoaderSetting], str]
"""Why a setting is left out; empty for none."""


class Plateau:
    """Whether raising a parameter further has stopped paying."""

    def __init__(self, patience: int, best: float = 0.0) -> None:
        self.best, self._patience, self._stale = best, patience, 0

    def reached(self, batches_per_second: float) -> bool:
        self._stale = 0 if batches_per_second > GAIN * self.best else self._stale + 1
        self.best = max(self.best, batches_per_second)
        return self._stale >= self._patience


def worker_counts(named: Sequence[int], cap: Callable[[], int]) -> Iterator[int]:
    """Processes to try, rising; `cap` is called once 0 has been measured, and not for counts that were named."""
    if named:
        yield from sorted(set(named))
        return
    yield 0
    most = cap()
    yield from sorted({*(count for count in (1, 2, 4, 8, 16, 32) if count <= most), most} - {0})


@dataclass(slots=True)
class _Known:
    """The measurements of a sweep, so that it takes each once."""

    take: Measure
    drop: Drop
    ceiling: float
    """Batches per second that nothing can exceed."""
    answers: dict[LoaderSetting, Measurement | None] = field(default_factory=dict)

    def measure(self, setting: LoaderSetting) -> Measurement | None:
        if setting not in self.answers:
            self.answers[setting] = None if self.drop(setting) else self.take(setting)
        return self.answers[setting]

    @property
    def found(self) -> list[Measurement]:
        return [item for item in self.answers.values() if item is not None]

    @property
    def fastest_working(self) -> Measurement | None:
        """Of those with processes."""
        working = [item for item in self.found if item.setting.num_workers]
        return max(working, key=lambda item: item.batches_per_second, default=None)

    @property
    def peak(self) -> float:
        """Batches per second."""
        return max((item.batches_per_second for item in self.found), default=0.0)

    @property
    def at_ceiling(self) -> bool:
        return GAIN * self.peak >= self.ceiling

    @property
    def ceiling_reason(self) -> str:
        return f"nothing beyond was tried: the simulated step allows {format_count(self.ceiling)} batches/s"

    def may_do(self, count: int) -> bool:
        """Whether so many processes could be enough, each as fast as loading without them beside a simulated step."""
        speed = next((item.batches_per_second for item in self.found if not item.setting.num_workers), 0.0)
        seconds = 1 / speed - 1 / self.ceiling if speed else 0.0
        return seconds <= 0 or GAIN * count / seconds >= ENOUGH * self.peak

    def fall(self, start: LoaderSetting, settings: Iterable[LoaderSetting]) -> LoaderSetting:
        """The last of `settings` in a row that is enough."""
        for setting in settings:
            found = self.measure(setting)
            if found is None or found.batches_per_second < ENOUGH * self.peak:
                break
            start = setting
        return start


def sweep_workers(
    measure: Measure, base: LoaderSetting, counts: Iterable[int], prefetch: Sequence[int], drop: Drop,
    best: float = 0.0, ceiling: float = math.inf,
) -> list[str]:  # fmt: skip
    """Processes, then prefetch factors, by the rules above.

    Args:
        measure: Measures a setting.
        base: The other parameters.
        counts: Processes to try, rising; the first is taken at once, the others when that has been measured.
        prefetch: Factors to try.
        drop: What is left out.
        best: Batches per second that were reached already, 0 for none.
        ceiling: Batches per second that no setting can exceed.
    """
    known, factors, rest = _Known(measure, drop, ceiling), sorted(set(prefetch)), iter(counts)
    tried = list(itertools.islice(rest, 1))
    reasons = _raise_workers(known, base, tried, rest, factors[0], Plateau(PATIENCE, best))
    fastest = known.fastest_working
    if fastest is None or len(factors) == 1 or fastest.batches_per_second < ENOUGH * max(best, known.peak):
        return reasons
    larger = None
    for factor in [] if known.at_ceiling else reversed(factors[1:]):  # the largest that runs
        larger = known.measure(replace(fastest.setting, prefetch_factor=factor))
        if larger is not None:
            break
    if larger is not None and larger.batches_per_second > GAIN * fastest.batches_per_second:
        _around(known, larger, tried, factors)
        return reasons
    if larger is not None:
        reasons.append(
            f"a prefetch factor of {larger.setting.prefetch_factor} was tried where it pays most, with "
            f"{_processes(larger.setting.num_workers)}, and brings less than 5 %"
        )
    # A large factor for the number of processes below the fewest that are enough.
    peak = max(best, known.peak)
    enough = [item.setting for item in known.found if item.batches_per_second >= ENOUGH * peak]
    if best < ENOUGH * peak and enough:
        fewest = min(enough, key=lambda setting: setting.num_workers)
        fewer = [count for count in tried if 0 < count < fewest.num_workers]
        if fewer and known.may_do(fewer[-1]):
            known.measure(replace(fewest, num_workers=fewer[-1], prefetch_factor=factors[-1]))
    return reasons


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count > 1)


def _raise_workers(
    known: _Known, base: LoaderSetting, tried: list[int], rest: Iterator[int], factor: int, plateau: Plateau
) -> list[str]:
    """Numbers of processes, rising; `tried` becomes all there are."""
    for place in itertools.count():
        if place == 1:
            tried.extend(rest)
        if place == len(tried):
            return []
        count = tried[place]
        found = known.measure(
            replace(base, num_workers=count, prefetch_factor=factor if count else base.prefetch_factor)
        )
        if found is None:  # where these do not fit, more will not
            return []
        stale, left = plateau.reached(found.batches_per_second), len(tried) - place - 1
        if known.at_ceiling and (left or not place):
            return [known.ceiling_reason]
        if stale and left:
            return [f"no more than {_processes(count)} were tried: the last {PATIENCE} numbers brought less than 5 %"]
    return []


def _around(known: _Known, fastest: Measurement, counts: Sequence[int], factors: Sequence[int]) -> None:
    """More processes with a factor that pays, then fewer, then smaller factors for the fewest that are enough."""
    plateau = Plateau(PATIENCE, fastest.batches_per_second)
    for count in (count for count in counts if count > fastest.setting.num_workers):
        found = known.measure(replace(fastest.setting, num_workers=count))
        if found is None or plateau.reached(found.batches_per_second) or known.at_ceiling:
            break
    fewest = (known.fastest_working or fastest).setting
    fewer = [count for count in reversed(counts) if 0 < count < fewest.num_workers and known.may_do(count)]
    fewest = known.fall(fewest, (replace(fewest, num_workers=count) for count in fewer))
    smaller = [factor for factor in reversed(factors) if factor < fewest.prefetch_factor]
    known.fall(fewest, (replace(fewest, prefetch_factor=factor) for factor in smaller))


def sweep_engine(
    measure: Measure, base: LoaderSetting, caches: Sequence[int], drop: Drop, ceiling: float = math.inf
) -> list[str]:
    """Requests in flight and batches ahead rise together, then each falls while that is enough; then a cache.

    Together, because each limits the other: so many batches on order give so many requests and no more. Where memory
    holds no more batches, requests rise alone.
    """
    known, reasons = _Known(measure, drop, ceiling), list[str]()
    plateau, ahead, best = Plateau(PATIENCE), AHEAD[0], None
    rungs = list(zip(REQUESTS, AHEAD, strict=True))
    for requests, more in rungs[FIRST_RUNG if ceiling == math.inf else 0 :]:
        setting = replace(base, num_workers=0, requests_in_flight=requests, batches_ahead=more, cache_bytes=0)
        found = known.measure(setting)
        if found is None:
            found = known.measure(replace(setting, batches_ahead=ahead))
        else:
            ahead = more
        if found is None or plateau.reached(found.batches_per_second):
            break
        best = found if best is None or found.batches_per_second > GAIN * best.batches_per_second else best
        if known.at_ceiling:
            reasons.append(known.ceiling_reason)
            break
    if best is None:
        return reasons
    for name, values in (("batches_ahead", AHEAD), ("requests_in_flight", REQUESTS)):
        for value in sorted((value for value in values if value < getattr(best.setting, name)), reverse=True):
            found = known.measure(replace(best.setting, **{name: value}))
            if found is None or found.batches_per_second < ENOUGH * plateau.best:
                break
            best = found
    for size_bytes in [] if known.at_ceiling else caches:
        cached = known.measure(replace(best.setting, cache_bytes=size_bytes))
        if cached is None or cached.batches_per_second <= GAIN * best.batches_per_second:
            continue
        # A cache may be read further ahead than a store.
        rising = Plateau(1, cached.batches_per_second)
        for ahead in (ahead for ahead in AHEAD if ahead > (cached.setting.batches_ahead or 0)):
            found = known.measure(replace(cached.setting, batches_ahead=ahead))
            if found is None or rising.reached(found.batches_per_second) or known.at_ceiling:
                break
    return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRequest:
    """One measurement of the search."""

    setting: LoaderSetting
    fraction: float
    """Of the batches and the time that the config allows one candidate."""
    rival: float = 0.0
    """Batches per second that make more precision idle when this setting is plainly slower or faster."""
    again: bool = False
    """Whether it is a turn: the setting has been measured before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the config allows one candidate."""

    timeout_seconds: float
    most_batches: int

    @property
    def turns(self) -> bool:
        """Whether there are enough batches for taking turns."""
        return self.most_batches * TURN_FRACTION >= LEAST_BATCHES

    def may_turn(self, item: Measurement) -> bool:
        """Whether a turn is worth its start."""
        filling = item.warmup_seconds if item.setting.cache_bytes else 0.0
        return self.turns and item.first_batch_seconds + filling <= self.slow_start_seconds

    @property
    def slow_start_seconds(self) -> float:
        """A longer start takes half of a turn: a setting that needs it is measured once."""
        return TURN_FRACTION * self.timeout_seconds / 2

    def turn(self, setting: LoaderSetting) -> float:
        """The fraction for one: two blocks, so that their error is known, unless that is too much."""
        return max(TURN_FRACTION, min(LARGEST_TURN, 2 * block_size(setting) / self.most_batches))

    def first_look(self, setting: LoaderSetting) -> float:
        """The fraction for it."""
        return 1.0 if setting.cache_bytes or not self.turns else LOOK_FRACTION


def search(
    sweep: Callable[[Measure], list[str]], measure: Callable[[MeasurementRequest], Measurement | None], bounds: Bounds,
    figures: dict[LoaderSetting, Measurement], eligible: Callable[[LoaderSetting], bool],
    batch_bytes: Callable[[], int],
) -> list[str]:  # fmt: skip
    """Repeat a sweep until no figure makes it try more; returns reasons.

    Args:
        sweep: The sweep, given how to measure a setting.
        measure: Measures; None where the setting cannot run.
        bounds: What one candidate is allowed.
        figures: Filled with the latest figures of each setting, in the order of first looks.
        eligible: Whether a setting may be chosen.
        batch_bytes: Of one batch, called once something has been measured.
    """
    failed: set[LoaderSetting] = set()

    def first_look(setting: LoaderSetting) -> Measurement | None:
        if setting not in figures and setting not in failed:
            rival = max((item.batches_per_second for item in figures.values()), default=0.0)
            found = measure(MeasurementRequest(setting=setting, fraction=bounds.first_look(setting), rival=rival))
            if found is None:
                failed.add(setting)
            else:
                figures[setting] = found
        return figures.get(setting)

    rounds = 0
    while True:
        before = len(figures)
        reasons = sweep(first_look)
        if len(figures) == before:
            break
        while rounds < MOST_ROUNDS:
            measured = [item for item in figures.values() if eligible(item.setting)]
            turning = finalists(
                measured, batch_bytes(), lambda item: bounds.may_turn(item) and item.setting not in failed
            ) if measured else []  # fmt: skip
            if all(item.turns for item in turning) and not (turning and in_doubt(measured, batch_bytes())):
                break  # the choice stands, or nothing can be compared
            rounds += 1
            for item in turning:
                found = measure(
                    MeasurementRequest(setting=item.setting, fraction=bounds.turn(item.setting), again=True)
                )
                if found is None:
                    failed.add(item.setting)
                else:
                    figures[item.setting] = with_turn(item, found)
    again = [item for item in figures.values() if item.turns]
    if again:
        most = max(item.turns for item in again)
        times = "once" if most == 1 else f"up to {most} times"
        why = "since a machine is not always equally fast, and these decide"
        reasons = [f"measured again in turn, {times}, {why}: {'; '.join(str(x.setting) for x in again)}", *reasons]
    return reasons


def with_turn(before: Measurement, found: Measurement) -> Measurement:
    """The figures of all turns; the first look counts for its cost alone."""
    whole = before.whole_seconds + found.whole_seconds
    if not before.turns:
        return replace(
            found, turns=1, first_batch_seconds=before.first_batch_seconds, warmup_seconds=before.warmup_seconds,
            whole_seconds=whole,
        )  # fmt: skip
    batches, seconds = before.batches + found.batches, before.seconds + found.seconds
    paces = (*before.paces, *found.paces)
    return replace(
        before, batches=batches, seconds=seconds, batches_per_second=batches / seconds, paces=paces,
        error=standard_error(paces), turns=before.turns + 1, whole_seconds=whole,
    )  # fmt: skip
