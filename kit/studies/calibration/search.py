"""Loader sweep: which settings are tried, in which order, and when trying more does not pay. Rules only.

A rule is a generator: it yields a setting, hears what that gave, and returns in sentences where it stopped and why. It
is a function of what it hears alone, so it can be gone through again with better figures.

- **candidates**: 0, 1, 2, 4, 8, 16, 32 processes and the cap itself, with the prefetch factors of the config. Without
  processes there is nothing to prefetch, so 0 is one candidate.
- **plateau**: two values of a dial in a row, or the largest prefetch factor, that do not beat the best so far by 5 %.
- **ceiling**: a simulated step of s seconds allows 1 / s batches a second. Who is within 5 % of that need not go on.
- **order**: processes rise with the smallest factor. The largest is then tried with the fastest number of processes,
  unless none reaches 90 % of what loading without them gives. A factor makes up for batches that take unlike times,
  which hold up more processes for longer: where the largest brings nothing there, no factor brings anything to fewer.
  Where it pays, more processes are tried with it, then fewer while that is enough, then smaller factors for those.
- **one fewer**: a larger factor may also spare processes. It is tried with the next smaller number, unless so many
  processes could not reach 90 % of the peak if each were as fast as loading without them.

The engine's own dials come first, without processes: requests in flight and batches ahead rise together from 8 and 1 to
their plateau, then each falls again while 90 % of the peak remain; then a cache of the whole store, or of half of
`loader.memory_bytes`, measured once it has had time to fill; where it pays, batches ahead rise with it until they do
not. Processes are tried with the cheapest of those settings.

Loader search: goes through a sweep, lets what decides be measured again in turn, and through the sweep again.

Pure as the rules it joins: it yields what is to be measured and how long, and hears what that gave. Each setting is
asked for once by the sweep; a sweep that is gone through again hears the better figures, and only what it has not asked
for yet is measured. So a plateau that was the noise of one second is passed once its settings are measured in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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

Looks = Generator[LoaderSetting, Measurement | None, list[str]]
"""A rule: yields the setting to measure, hears what it gave, or None where it could not run; returns reasons."""
Drop = Callable[[LoaderSetting], str]
"""Why a setting is left out; empty for none."""
_Look = Generator[LoaderSetting, Measurement | None, Measurement | None]


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


@dataclass(slots=True)
class _Known:
    """What a rule has heard, so that it asks once."""

    drop: Drop
    ceiling: float
    """Batches per second that nothing can exceed."""
    heard: dict[LoaderSetting, Measurement | None] = field(default_factory=dict)

    def look(self, setting: LoaderSetting) -> _Look:
        if setting not in self.heard:
            self.heard[setting] = None if self.drop(setting) else (yield setting)
        return self.heard[setting]

    @property
    def found(self) -> list[Measurement]:
        return [item for item in self.heard.values() if item is not None]

    @property
    def peak(self) -> float:
        """Batches per second."""
        return max((item.batches_per_second for item in self.found), default=0.0)

    @property
    def at_ceiling(self) -> bool:
        return GAIN * self.peak >= self.ceiling

    def may_do(self, count: int) -> bool:
        """Whether so many processes could be enough, each as fast as loading without them beside a simulated step."""
        speed = next((item.batches_per_second for item in self.found if not item.setting.num_workers), 0.0)
        seconds = 1 / speed - 1 / self.ceiling if speed else 0.0
        return seconds <= 0 or GAIN * count / seconds >= ENOUGH * self.peak

    @property
    def ceiling_reason(self) -> str:
        return f"nothing beyond was tried: the simulated step allows {format_count(self.ceiling)} batches/s"


def sweep_workers(
    base: LoaderSetting, counts: Iterable[int], prefetch: Sequence[int], drop: Drop, best: float = 0.0,
    ceiling: float = math.inf,
) -> Looks:  # fmt: skip
    """Processes, then prefetch factors, by the rules above.

    Args:
        base: Where the other dials stand.
        counts: Processes to try, rising; asked for one, and when that has been measured for the others.
        prefetch: Factors to try.
        drop: What is left out.
        best: Batches per second that are had already, 0 for none.
        ceiling: Batches per second that no setting can exceed.
    """
    known, factors, rest = _Known(drop, ceiling), sorted(set(prefetch)), iter(counts)
    asked = list(itertools.islice(rest, 1))
    reasons = yield from _rise(known, base, asked, rest, factors[0], Plateau(PATIENCE, best))
    working = [item for item in known.found if item.setting.num_workers]
    fastest = max(working, key=lambda item: item.batches_per_second, default=None)
    if fastest is None or len(factors) == 1 or fastest.batches_per_second < ENOUGH * max(best, known.peak):
        return reasons
    larger = None if known.at_ceiling else (yield from _largest_factor(known, fastest.setting, factors))
    if larger is not None and larger.batches_per_second > GAIN * fastest.batches_per_second:
        yield from _around(known, larger, asked, factors)
        return reasons
    if larger is not None:
        reasons.append(
            f"a prefetch factor of {larger.setting.prefetch_factor} was tried where it pays most, with "
            f"{_processes(larger.setting.num_workers)}, and brings less than 5 %"
        )
    yield from _one_fewer(known, asked, factors[-1], best)
    return reasons


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count > 1)


def _rise(
    known: _Known, base: LoaderSetting, asked: list[int], rest: Iterator[int], factor: int, plateau: Plateau
) -> Generator[LoaderSetting, Measurement | None, list[str]]:
    """Numbers of processes, rising; `asked` becomes all there are."""
    for place in itertools.count():
        if place == 1:
            asked.extend(rest)
        if place == len(asked):
            return []
        count = asked[place]
        found = yield from known.look(
            replace(base, num_workers=count, prefetch_factor=factor if count else base.prefetch_factor)
        )
        if found is None:  # where these do not fit, more will not
            return []
        stale, left = plateau.reached(found.batches_per_second), len(asked) - place - 1
        if known.at_ceiling and (left or not place):
            return [known.ceiling_reason]
        if stale and left:
            return [f"no more than {_processes(count)} were tried: the last {PATIENCE} numbers brought less than 5 %"]
    return []


def _largest_factor(known: _Known, fastest: LoaderSetting, factors: Sequence[int]) -> _Look:
    """The largest that runs; None where there is none above the smallest."""
    for factor in reversed(factors[1:]):
        found = yield from known.look(replace(fastest, prefetch_factor=factor))
        if found is not None:
            return found
    return None


def _around(
    known: _Known, fastest: Measurement, counts: Sequence[int], factors: Sequence[int]
) -> Generator[LoaderSetting, Measurement | None, None]:
    """More processes with a factor that pays, then fewer, then smaller factors for the fewest that are enough."""
    plateau = Plateau(PATIENCE, fastest.batches_per_second)
    for count in (count for count in counts if count > fastest.setting.num_workers):
        found = yield from known.look(replace(fastest.setting, num_workers=count))
        if found is None or plateau.reached(found.batches_per_second) or known.at_ceiling:
            break
    working = [item for item in known.found if item.setting.num_workers]
    fewest = max(working, key=lambda item: item.batches_per_second).setting
    fewer = [count for count in reversed(counts) if 0 < count < fewest.num_workers and known.may_do(count)]
    fewest = yield from _fall(known, fewest, (replace(fewest, num_workers=count) for count in fewer))
    smaller = [factor for factor in reversed(factors) if factor < fewest.prefetch_factor]
    yield from _fall(known, fewest, (replace(fewest, prefetch_factor=factor) for factor in smaller))


def _fall(
    known: _Known, start: LoaderSetting, settings: Iterable[LoaderSetting]
) -> Generator[LoaderSetting, Measurement | None, LoaderSetting]:
    """The last of `settings` in a row that is enough."""
    for setting in settings:
        found = yield from known.look(setting)
        if found is None or found.batches_per_second < ENOUGH * known.peak:
            break
        start = setting
    return start


def _one_fewer(
    known: _Known, counts: Sequence[int], factor: int, best: float
) -> Generator[LoaderSetting, Measurement | None, None]:
    """A large factor for the number of processes below the fewest that are enough."""
    peak = max(best, known.peak)
    enough = [item for item in known.found if item.batches_per_second >= ENOUGH * peak]
    if best >= ENOUGH * peak or not enough:
        return
    fewest = min((item.setting for item in enough), key=lambda setting: setting.num_workers)
    fewer = [count for count in counts if 0 < count < fewest.num_workers]
    if fewer and known.may_do(fewer[-1]):
        yield from known.look(replace(fewest, num_workers=fewer[-1], prefetch_factor=factor))


def sweep_engine(base: LoaderSetting, caches: Sequence[int], drop: Drop, ceiling: float = math.inf) -> Looks:
    """Requests in flight and batches ahead rise together, then each falls while that is enough; then a cache.

    Together, because each limits the other: so many batches on order give so many requests and no more. Where memory
    holds no more batches, requests rise alone.
    """
    known, reasons = _Known(drop, ceiling), list[str]()
    plateau, ahead, best = Plateau(PATIENCE), AHEAD[0], None
    for requests, wanted in zip(REQUESTS, AHEAD, strict=True):
        setting = replace(base, num_workers=0, requests_in_flight=requests, batches_ahead=wanted, cache_bytes=0)
        found = yield from known.look(setting)
        if found is None:
            found = yield from known.look(replace(setting, batches_ahead=ahead))
        else:
            ahead = wanted
        if found is None or plateau.reached(found.batches_per_second):
            break
        best = found if best is None or found.batches_per_second > GAIN * best.batches_per_second else best
        if known.at_ceiling:
            reasons.append(known.ceiling_reason)
            break
    if best is None:
        return reasons
    for dial, values in (("batches_ahead", AHEAD), ("requests_in_flight", REQUESTS)):
        smaller = sorted((value for value in values if value < getattr(best.setting, dial)), reverse=True)
        for value in smaller:
            found = yield from known.look(replace(best.setting, **{dial: value}))
            if found is None or found.batches_per_second < ENOUGH * plateau.best:
                break
            best = found
    for size_bytes in [] if known.at_ceiling else caches:
        cached = yield from known.look(replace(best.setting, cache_bytes=size_bytes))
        if cached is not None and cached.batches_per_second > GAIN * best.batches_per_second:
            yield from _more_ahead(known, cached)
    return reasons


def _more_ahead(known: _Known, cached: Measurement) -> Generator[LoaderSetting, Measurement | None, None]:
    """What comes from a cache may be read further ahead than what comes from a store."""
    plateau = Plateau(1, cached.batches_per_second)
    for ahead in (ahead for ahead in AHEAD if ahead > (cached.setting.batches_ahead or 0)):
        found = yield from known.look(replace(cached.setting, batches_ahead=ahead))
        if found is None or plateau.reached(found.batches_per_second) or known.at_ceiling:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRequest:
    """One measurement that is wanted."""

    setting: LoaderSetting
    fraction: float
    """Of the batches and the time that the config allows one candidate."""
    rival: float = 0.0
    """Batches per second that make more precision idle when this setting is plainly slower or faster."""
    again: bool = False
    """Whether it is a turn of what has been measured."""


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
        return self.turns and item.first_batch_seconds <= self.slow_start_seconds and not item.setting.cache_bytes

    @property
    def slow_start_seconds(self) -> float:
        """A longer start takes half of a turn: who needs it is measured once."""
        return TURN_FRACTION * self.timeout_seconds / 2

    def turn(self, setting: LoaderSetting) -> float:
        """The fraction for one: two blocks, so that their error is known, unless that is too much."""
        return max(TURN_FRACTION, min(LARGEST_TURN, 2 * block_size(setting) / self.most_batches))

    def first_look(self, setting: LoaderSetting) -> float:
        """The fraction for it."""
        return 1.0 if setting.cache_bytes or not self.turns else LOOK_FRACTION


Search = Generator[MeasurementRequest, Measurement | None, list[str]]
"""Yields what to measure, hears what it gave, or None where it could not run; returns reasons."""


def search(
    sweep: Callable[[], Looks], bounds: Bounds, figures: dict[LoaderSetting, Measurement],
    eligible: Callable[[LoaderSetting], bool], batch_bytes: Callable[[], int],
) -> Search:  # fmt: skip
    """Go through a sweep until no figure asks it for more.

    Args:
        sweep: Begins it anew.
        bounds: What one candidate is allowed.
        figures: Filled with the latest figures of each setting, in the order of first looks.
        eligible: Whether a setting may be chosen.
        batch_bytes: Of one batch, asked for once something has been measured.
    """
    failed: set[LoaderSetting] = set()
    rounds = iter(range(MOST_ROUNDS))
    while True:
        had = len(figures)
        reasons = yield from _through(sweep(), bounds, figures, failed)
        if len(figures) == had:
            return [*_turn_reasons(figures), *reasons]
        yield from _in_turn(rounds, bounds, figures, failed, eligible, batch_bytes)


def _through(
    looks: Looks, bounds: Bounds, figures: dict[LoaderSetting, Measurement], failed: set[LoaderSetting]
) -> Search:
    try:
        setting = next(looks)
        while True:
            if setting not in figures and setting not in failed:
                rival = max((item.batches_per_second for item in figures.values()), default=0.0)
                found = yield MeasurementRequest(setting=setting, fraction=bounds.first_look(setting), rival=rival)
                if found is None:
                    failed.add(setting)
                else:
                    figures[setting] = found
            setting = looks.send(figures.get(setting))
    except StopIteration as end:
        return list(end.value)


def _in_turn(
    rounds: Iterator[int], bounds: Bounds, figures: dict[LoaderSetting, Measurement], failed: set[LoaderSetting],
    eligible: Callable[[LoaderSetting], bool], batch_bytes: Callable[[], int],
) -> Generator[MeasurementRequest, Measurement | None, None]:  # fmt: skip
    while turning := _who_turns(bounds, figures, failed, eligible, batch_bytes):
        if next(rounds, None) is None:
            return
        for item in turning:
            found = yield MeasurementRequest(setting=item.setting, fraction=bounds.turn(item.setting), again=True)
            if found is None:
                failed.add(item.setting)
            else:
                figures[item.setting] = with_turn(item, found)


def _who_turns(
    bounds: Bounds, figures: dict[LoaderSetting, Measurement], failed: set[LoaderSetting],
    eligible: Callable[[LoaderSetting], bool], batch_bytes: Callable[[], int],
) -> list[Measurement]:  # fmt: skip
    """Two or more; none where the choice stands, or nothing can be compared."""
    measured = [item for item in figures.values() if eligible(item.setting)]
    if not measured:
        return []
    turning = finalists(measured, batch_bytes(), lambda item: bounds.may_turn(item) and item.setting not in failed)
    decided = all(item.turns for item in turning) and not in_doubt(measured, batch_bytes())
    return [] if decided else turning


def with_turn(before: Measurement, found: Measurement) -> Measurement:
    """The figures of all turns; the first look counts for its cost alone."""
    whole = before.whole_seconds + found.whole_seconds
    first = before.first_batch_seconds
    if not before.turns:
        return replace(found, turns=1, first_batch_seconds=first, whole_seconds=whole)
    batches, seconds = before.batches + found.batches, before.seconds + found.seconds
    paces = (*before.paces, *found.paces)
    return replace(
        before, batches=batches, seconds=seconds, batches_per_second=batches / seconds, paces=paces,
        error=standard_error(paces), turns=before.turns + 1, whole_seconds=whole,
    )  # fmt: skip


def _turn_reasons(figures: dict[LoaderSetting, Measurement]) -> list[str]:
    """What was measured in turn."""
    again = [item for item in figures.values() if item.turns]
    if not again:
        return []
    most = max(item.turns for item in again)
    times = "once" if most == 1 else f"up to {most} times"
    names = "; ".join(str(item.setting) for item in again)
    why = "since a machine is not always equally fast, and these decide"
    return [f"measured again in turn, {times}, {why}: {names}"]
