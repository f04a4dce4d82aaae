"""Gains that are measured before they are advised: the module itself, a few steps, with a change and without.

A number format or a batch size may help or hurt by a factor, and no peak of a matrix product tells which. So both sides
run for a few steps in processes of their own, one after the other, and their steps are compared: the range of the gain
is two standard errors of the difference of median logarithms, which a few slow steps on a busy machine move little.
Steps are few: `STEPS`, or as many as take `MOST_SECONDS`, two at least; `TURNS` times at most, while the threshold of
the rule lies in the range.
"""

from __future__ import annotations

import math
import statistics

from kit.config import Config
from kit.errors import KitError
from kit.studies.diagnosis.evidence import Evidence
from kit.studies.diagnosis.host_rules import larger_batch, may_be_small
from kit.studies.diagnosis.rule import Change, Range
from kit.studies.diagnosis.rules import RULES, mixed
from kit.studies.repeats import RunSource

STEPS, MOST_SECONDS, WARMUP_STEPS, TURNS = 8, 4.0, 2, 3
THRESHOLDS = {rule.name: rule.threshold for rule in RULES}
_LEAST_PASSES = 0.5
"""Of the time in forward and backward, so that another number format is worth trying."""
_LEAST_FLOPS_OF_A_BYTE = 2.0
"""Below it a step is all traffic and calls."""


def worth_measuring(found: Evidence) -> dict[str, Change]:
    """The changes whose gain only a trial can tell, by the rule that asks."""
    changes: dict[str, Change] = {}
    work, passes = found.work, found.shares.get("forward", 0.0) + found.shares.get("backward", 0.0)
    if work is not None and found.config.hardware.precision in ("auto", "32-true") and passes >= _LEAST_PASSES:
        full = work.flops.get("float32", 0.0)
        if full > 0.5 * sum(work.flops.values()) and full >= _LEAST_FLOPS_OF_A_BYTE * work.bytes:
            changes["full precision"] = {"hardware.precision": mixed(found)}
    if may_be_small(found):
        changes["batch too small"] = larger_batch(found)
    return changes


def measured_gains(found: Evidence, source: RunSource) -> tuple[dict[str, Range], list[str]]:
    """The gain of each change that is worth measuring, and notes on those that could not be measured."""
    gains, notes = dict[str, Range](), list[str]()
    before = list[float]()
    for name, change in worth_measuring(found).items():
        after = list[float]()
        try:
            for turn in range(TURNS):
                if turn or not before:
                    before += step_logarithms(source, source.config, found.step_seconds)
                after += step_logarithms(source, source.config.replace(change), found.step_seconds)
                gains[name] = low, high = difference(before, after)
                if low >= THRESHOLDS[name] or high < THRESHOLDS[name]:
                    break
        except KitError as error:
            gains.pop(name, None)
            notes.append(f"whether {', '.join(change)} would help was not measured: {error}")
    return gains, notes


def step_logarithms(source: RunSource, config: Config, step_seconds: float) -> list[float]:
    """Logarithms of samples per second of a few steps.

    Raises:
        KitError: when the trial cannot start, or fails.
    """
    steps = max(2, min(STEPS, int(MOST_SECONDS / step_seconds)))
    short = config.replace({
        "trial.max_steps": WARMUP_STEPS + steps, "trial.warmup_steps": WARMUP_STEPS, "trial.predict_memory": False,
        "trial.measure_memory": False, "trial.count_work": False, "trial.validate_every_steps": 0,
        "calibration.enabled": False,
    })  # fmt: skip
    trial = source.start(short).wait()
    return [
        math.log(float(step["samples"]) / float(step["step_seconds"]))
        for step in trial.steps if int(step["step"]) > WARMUP_STEPS and step["step_seconds"] > 0
    ]  # fmt: skip


def difference(before: list[float], after: list[float]) -> Range:
    """The gain from `before` to `after`: of medians, and two standard errors to each side."""
    between = statistics.median(after) - statistics.median(before)
    reach = min(0.7, 2 * math.hypot(*map(_error, (before, after))))
    return math.exp(between - reach), math.exp(between + reach)


def _error(logarithms: list[float]) -> float:
    """The standard error of a median, from the median deviation."""
    middle = statistics.median(logarithms)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in logarithms)
    return 1.2533 * deviation / math.sqrt(len(logarithms)) if len(logarithms) > 1 else 0.2
