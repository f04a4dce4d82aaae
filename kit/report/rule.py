"""Rule: one thing that can be wrong with a trial, as data: what is looked at, from which value on it is a finding, who
says so, and what to do about it.

A rule measures one number of the evidence; None means that this trial does not tell, with what it would take in
`needs`. A finding is a value at or above the threshold. The predicted effect is a factor on throughput, an upper bound
from the parts of a step that were measured (Amdahl's law: what is not changed takes as long as before); a rule that
cannot bound it says None. Nothing here runs, reads or draws anything.

Sources are published guides by title; *kit* are thresholds of our own, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kit.report.evidence import Evidence
from kit.units import format_count

Change = Mapping[str, Any]
Unit = Literal["fraction", "ratio", "count"]

TRAINING_AT_SCALE = "Training at Larger Scale, ch. 7"
BASEMODEL = "BaseModel, Scaling & Memory"
SLIVER = 0.1
"""A wait below a tenth of the time is not worth advice."""


def _nothing(_: Evidence) -> Change:
    return {}


def _unknown(_: Evidence) -> float | None:
    return None


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
    """What a trial must have told for the rule to be asked."""
    measure: Callable[[Evidence], float | None]
    sentence: Callable[[Evidence, float], str]
    """What is wrong, in one sentence."""
    setting: Callable[[Evidence], str]
    """What to change, in words."""
    change: Callable[[Evidence], Change] = _nothing
    """Fields of the config that do it; empty where none does."""
    effect: Callable[[Evidence], float | None] = _unknown
    """Throughput after the change over throughput before, at most."""


def show(unit: Unit, value: float) -> str:
    """A value or threshold as people read it."""
    if unit == "fraction":
        return f"{value:.0%}"
    return f"{value:.2f} ×" if unit == "ratio" else format_count(value)


def shorter(found: Evidence, part_seconds: float, factor: float) -> float | None:
    """A part of the step made `factor` times as fast."""
    after = found.step_seconds - part_seconds * (1 - 1 / factor)
    return found.step_seconds / after if after > 0 and factor > 0 else None
