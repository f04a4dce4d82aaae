"""Rule: one thing that can be wrong with a training, as data; and the arithmetic of effects.

An effect is a range of throughput after over before, computed from measured parts of a step by Amdahl's law: a part
that does not change takes as long as before. A rule gives the standard error of the part that goes, twice, or what two
ways of reckoning give; `widened` adds what a rule does not see: how well the trial knows its whole step and
what is left of it, and that no two trials are equally fast. So a measured gain should lie in it nine times of ten.
Nothing here runs, reads or draws anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kit.studies.diagnosis.evidence import Evidence
from kit.units import format_count

Change = Mapping[str, Any]
Unit = Literal["fraction", "ratio", "count"]
Range = tuple[float, float]

TRAINING_AT_SCALE = "Training at Larger Scale, ch. 7"
BASEMODEL = "BaseModel, Scaling & Memory"
SLIVER = 0.1
"""A wait below a tenth of the time is not worth advice."""
MANY_STEPS = 10_000
"""Of a training, after which what every step adds has added up."""
WAITS = ("waiting for data", "training shorter than preprocessing")
"""Complaints that another finding about data explains."""
_MOST_REMOVED = 0.98
BETWEEN_TRIALS = 0.07
"""Standard deviation of the throughput of equal trials: the median of the development pipelines of
`benchmarks/diagnosis.py`, by the noise of their pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong."""

    name: str
    looks_at: str
    """What is measured, in words."""
    unit: Unit
    threshold: float
    source: str
    needs: str
    """What a trial must have recorded for the rule to apply."""
    measure: Callable[[Evidence], float | None]
    sentence: Callable[[Evidence, float], str]
    """What is wrong, in one sentence."""
    setting: Callable[[Evidence], str]
    """What to change, in words."""
    change: Callable[[Evidence], Change] = lambda _: {}
    """Fields of the config that do it; empty where none does."""
    batch_size: Callable[[Evidence], int | None] = lambda _: None
    """Samples per batch that do it, where the caller's own data makes the batches."""
    effect: Callable[[Evidence], Range | None] = lambda _: None
    """Throughput after the change over throughput before, from and to."""
    part: str = ""
    """The part of a step that the change makes shorter."""
    explains: tuple[str, ...] = ()
    """Findings that this one is the cause of, which are then not told beside it."""


def show(unit: Unit, value: float) -> str:
    """A value or threshold as people read it."""
    if unit == "fraction":
        return f"{value:.0%}"
    return f"{value:.2f} ×" if unit == "ratio" else format_count(value)


def without(low: float, high: float | None = None) -> Range:
    """The gain where between `low` and `high` of the time is gone."""
    least, most = sorted((low, low if high is None else high))
    return 1 / (1 - max(0.0, min(least, _MOST_REMOVED))), 1 / (1 - max(0.0, min(most, _MOST_REMOVED)))


def without_part(found: Evidence, part: str, kept: float = 0.0) -> Range:
    """The gain where a part takes only `kept` of its time, by the standard error of its steps."""
    share, error = found.shares.get(part, 0.0) * (1 - kept), found.errors.get(part, 0.0)
    return without(share * (1 - min(0.5, 2 * error)), share * (1 + min(0.5, 2 * error)))


def shorter(found: Evidence, part_seconds: float, factor: float) -> Range | None:
    """A part of the step made `factor` times as fast."""
    after = found.step_seconds - part_seconds * (1 - 1 / factor)
    return (gain := found.step_seconds / after, gain) if after > 0 and factor > 0 else None


def widened(effect: Range | None, found: Evidence, part: str) -> Range | None:
    """An effect with two standard errors of all that was measured; its middle stays.

    The rule's range is about the part R that goes. What is left, O, is not known exactly either: by (R + O) / O an
    error of O counts as much as the share that R has. And the gain is that of two trials.

    Args:
        effect: What the rule reckons, from and to.
        found: Whose steps vary.
        part: What the rule makes shorter; empty where it is no part of a step.
    """
    between = middle(effect)
    if effect is None or between is None:
        return None
    left = {name: share for name, share in found.shares.items() if name != part and share > 0}
    error = math.hypot(*(share * min(1.0, found.errors.get(name, 0.0)) for name, share in left.items()))
    gone = max(0.0, 1 - 1 / between)
    of_left = gone * error / (math.fsum(left.values()) or 1.0)
    reach = math.hypot(math.log(max(effect) / between), 2 * of_left, 2 * math.sqrt(2) * BETWEEN_TRIALS)
    return between * math.exp(-reach), between * math.exp(reach)


def middle(effect: Range | None) -> float | None:
    """The one number to compare a measurement with."""
    if effect is None or not all(math.isfinite(end) and end > 0 for end in effect):
        return None
    return math.sqrt(effect[0] * effect[1])
