"""Loader search: goes through a sweep, lets what decides be measured again in turn, and through the sweep again.

Pure as the rules it joins: it yields what is to be measured and how long, and hears what that gave. Each setting is
asked for once by the sweep; a sweep that is gone through again hears the better figures, and only what it has not asked
for yet is measured. So a plateau that was the noise of one second is passed once its settings are measured in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

from kit.plan.calibration import LoaderSetting, Measurement, finalists, in_doubt
from kit.plan.loader_pace import (
    LARGEST_TURN,
    LEAST_BATCHES,
    LOOK_FRACTION,
    MOST_ROUNDS,
    TURN_FRACTION,
    block_size,
    standard_error,
)
from kit.plan.loader_sweep import Looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
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


Search = Generator[Ask, Measurement | None, list[str]]
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
                found = yield Ask(setting=setting, fraction=bounds.first_look(setting), rival=rival)
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
) -> Generator[Ask, Measurement | None, None]:  # fmt: skip
    while turning := _who_turns(bounds, figures, failed, eligible, batch_bytes):
        if next(rounds, None) is None:
            return
        for item in turning:
            found = yield Ask(setting=item.setting, fraction=bounds.turn(item.setting), again=True)
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
