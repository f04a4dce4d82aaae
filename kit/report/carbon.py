"""What codecarbon said of trials, and what that makes of a long run: a second opinion beside `kit.plan.bill`.

Its watts are of the whole machine while the trial trained, memory included and without a data centre's overhead (PUE),
so they are not those of the bill; grams are of its own table of grids.
"""

from __future__ import annotations

from collections.abc import Sequence

from kit.run.trial import Trial

_SECONDS_PER_HOUR = 3600.0
_GRAMS_PER_KILOGRAM = 1000.0
_WATT_HOURS_PER_KILOWATT_HOUR = 1000.0


def carbon_reasons(trials: Sequence[Trial], seconds: float) -> list[str]:
    """One sentence for each trial that was asked to estimate it.

    Args:
        trials: Any.
        seconds: Of a run on as many devices as the first of them.
    """
    found = [(trial, trial.event("carbon_estimated")) for trial in trials]
    return [_sentence(trial, event, seconds if trial is trials[0] else None) for trial, event in found if event]


def _sentence(trial: Trial, event: dict[str, float], seconds: float | None) -> str:
    watts = event["joules"] / event["seconds"]
    said = (
        f"codecarbon {event['version']} on {trial.name}: {watts:.3g} W for the whole machine "
        f"({event['cpu_joules'] / event['joules']:.0%} processor, {event['gpu_joules'] / event['joules']:.0%} GPU, "
        f"{event['ram_joules'] / event['joules']:.0%} memory), {event['country']}'s grid"
    )
    if seconds is None:
        return said
    kilowatt_hours = watts * seconds / _SECONDS_PER_HOUR / _WATT_HOURS_PER_KILOWATT_HOUR
    kilograms = event["grams"] / event["seconds"] * seconds / _GRAMS_PER_KILOGRAM
    return f"{said}; {kilowatt_hours:.3g} kWh and {kilograms:.3g} kg for all epochs on its devices, without PUE"
