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
from kit.studies.diagnosis.unit_costs import PAGE, PAGE_BYTES
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
MOST_REMOVED = 0.98
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
    example: Callable[[Evidence], str] = lambda _: ""
    """The change in code, where it is the user's own that changes; empty where words say it."""
    part: str = ""
    """The part of a step that the change makes shorter."""
    explains: tuple[str, ...] | Callable[[Evidence], tuple[str, ...]] = ()
    """Findings that this one is the cause of, which are then not told beside it."""


def show(unit: Unit, value: float) -> str:
    """A value or threshold as people read it."""
    if unit == "fraction":
        return f"{value:.0%}"
    return f"{value:.2f} ×" if unit == "ratio" else format_count(value)


def without(low: float, high: float | None = None) -> Range:
    """The gain where between `low` and `high` of the time is gone."""
    least, most = sorted((low, low if high is None else high))
    return 1 / (1 - max(0.0, min(least, MOST_REMOVED))), 1 / (1 - max(0.0, min(most, MOST_REMOVED)))


def without_part(found: Evidence, part: str, kept: float = 0.0) -> Range:
    """The gain where a part takes only `kept` of its time: of all that was measured, or of what is left of that by the
    standard error of its steps."""
    share, error = found.shares.get(part, 0.0), min(0.5, 2 * found.errors.get(part, 0.0))
    least = share * (1 - error) / (1 - share * error)  # the rest of the step takes as long as before
    return without(least * (1 - kept), share * (1 - kept))


_MORE_THAN_SHARE = ("optimizer larger than the work",)
"""Whose change makes another part shorter, too."""


def most_gain(rule: Rule, value: float, found: Evidence) -> float:
    """What a change can bring at most: all of the share gone that its rule has measured; infinite for other rules.

    Args:
        rule: Which looked.
        value: What it found.
        found: Where it looked.
    """
    if rule.name in found.measured_gains or rule.name in _MORE_THAN_SHARE:
        return math.inf
    if rule.part == "wait":  # training may be faster where nothing is read beside
        alone = found.train_seconds if found.alone_seconds is None else min(found.train_seconds, found.alone_seconds)
        left = found.step_seconds - found.wait_seconds - found.train_seconds + alone
        return found.step_seconds / left if left > 0 else math.inf
    return 1 / (1 - value) if rule.looks_at.startswith("share of the time") and value < 1 else math.inf


def limited(predicted: Range | None, effect: Range | None, most: float) -> Range | None:
    """A widened effect with no end above `most`, or above the effect itself where that is more."""
    if predicted is None or effect is None:
        return None
    most = max(most, *effect)
    return min(predicted[0], most), min(predicted[1], most)


def shorter(found: Evidence, part_seconds: float, factor: float) -> Range | None:
    """A part of the step made `factor` times as fast."""
    after = found.step_seconds - part_seconds * (1 - 1 / factor)
    return (gain := found.step_seconds / after, gain) if after > 0 and factor > 0 else None


def gone_from_reading(found: Evidence, share: float, is_worker: bool, low: float, high: float) -> Range:
    """The gain where of what reads, a share of its process's time, between `low` and `high` is gone."""
    before = found.train_seconds + found.wait_seconds if is_worker else found.step_seconds
    cured = (_cured_seconds(found, share, is_worker, gone) for gone in (low, high))
    after = [max((1 - MOST_REMOVED) * before, seconds) for seconds in cured]
    return before / after[0], before / after[1]


def _cured_seconds(found: Evidence, share: float, is_worker: bool, gone: float) -> float:
    """Of a step without `gone` of the reading: what is left of it slows the training down as long as it lasts.

    By so much as the training was slower beside the reading, or after it, than alone: reading takes cores, caches and
    memory. In loader processes it lasts for some of the step, which is as long as that makes it; in the training
    thread it adds to the step.
    """
    train, wait = found.train_seconds, found.wait_seconds
    alone = train if found.alone_seconds is None else found.alone_seconds
    slowed = max(0.0, train - alone)
    if is_worker:  # the workers are what sets the pace
        reading = (train + wait) * (1 - share * gone)
        return max(reading, (alone + math.sqrt(alone**2 + 4 * slowed * reading)) / 2)
    reading = max(0.0, wait - share * found.step_seconds * gone)
    beside = found.step_seconds - train - wait
    return alone + slowed * (reading / wait if wait > 0 else 0.0) + reading + beside


_BESIDE = 1.25
"""How much more or less goes with a part than its own time, as with its memory traffic and its page faults."""


def agreed(measured: Range | None, seen: Range) -> Range:
    """One gain that was measured by steps without a part, and reckoned by the share that was seen of it.

    Steps of a busy machine tell little, the share tells nothing of what goes with it. So it is where both allow; where
    they allow nothing together, it is as measured.
    """
    if measured is None:
        return seen
    low, high = max(measured[0], seen[0] / _BESIDE), min(measured[1], seen[1] * _BESIDE)
    return (low, high) if low <= high else measured


HANDOVER_SECONDS = 1e-3
"""What it costs at least to take a batch from another process, and that process to give it."""
_OPERATION_SECONDS = 10e-6
"""Of Python for each operation of torch: an operation itself runs without the interpreter."""
_CHANGING_HANDS = 2.0
"""Times as long as alone that Python may take beside Python: 1.3 to 2.5 was measured on two cores."""
_BUSY_CORES = 0.8
"""Of cores that are never to stand idle, what is used, as batches and steps come in bursts: 0.79 to 0.82 of two."""


def _all_cores_seconds(found: Evidence, more: float = 0.0) -> float:
    """What a batch takes where all cores compute all the time, with `more` CPU seconds of a rank; 0 where not known."""
    cpu = found.cpu_seconds
    if not found.cores:
        return 0.0
    if cpu is None:
        cpu = (0.0 if found.on_gpu else found.train_seconds) + found.wait_seconds
    return (cpu + more) * max(1, found.world_size) / found.cores


def ahead_in_threads(found: Evidence) -> Range | None:
    """The gain where threads of the process that trains read ahead.

    What the training thread does itself while it waits stays with it. Of the reading, waiting for a store is hidden;
    what computes needs a core that is idle, and Python needs the interpreter, which the training holds for its own
    Python. At most they share it without loss; at least what finds it held takes longer than alone.
    """
    train, wait = found.train_seconds, found.wait_seconds
    if not train + wait > 0:
        return None
    reading, busy = found.reading_wait_seconds, wait * (found.busy_wait_fraction or 0.0)
    own = wait - reading
    computed = min(reading, found.beside_seconds + max(0.0, busy - own))
    layout = found.layout  # without one nobody knows how much is Python
    least, most = (computed * (share if layout is None else layout.python_fraction) for share in (0.0, 1.0))
    calls = math.inf if found.work is None else found.work.calls * _OPERATION_SECONDS
    alone = math.fsum(found.shares.get(part, 0.0) for part in ("backward", "communication")) * found.step_seconds
    holding = own + min(max(0.0, train - alone), calls)
    cores = _all_cores_seconds(found)
    shared = max(train + own, reading, holding + least, cores)
    free = max(0.0, train + own - holding)
    fought_for = max(train + own + max(0.0, _CHANGING_HANDS * most - free), reading, cores / _BUSY_CORES)
    return (train + wait) / fought_for, (train + wait) / shared


def ahead_in_processes(found: Evidence, fewest: int, most: int) -> Range | None:
    """The gain where `fewest` to `most` loader processes make the batches, if cores are idle to run them.

    A batch of another process is handed over: both write or map every page of it once. What is done to the batches of
    kit's loader around it, in the training thread, stays there.
    """
    train, wait, workers = found.train_seconds, found.wait_seconds, found.workers or 0
    if not train + wait > 0:
        return None
    own = wait - found.reading_wait_seconds if found.own_loader and found.read_seconds is not None else 0.0
    train, wait = train + own, wait - own
    pages = found.host.get("sample_bytes", 0) * found.batch_samples / PAGE_BYTES
    given = HANDOVER_SECONDS + pages * found.unit_costs.get(PAGE, 0.0)
    making, new = ((train + wait) * workers, 0.0) if workers else (wait + given, given)
    cores = _all_cores_seconds(found, 2 * new)
    ends = ((fewest, _BUSY_CORES), (max(fewest, most), 1.0))
    low, high = (max(train + new, making / max(1, count), cores / used) for count, used in ends)
    return (train + wait) / low, (train + wait) / high


def bounded(effect: Range | None, found: Evidence, part: str) -> Range | None:
    """An effect on reading, at most that of a step without any: the training alone, and what comes beside it."""
    if effect is None or part != "wait" or found.alone_seconds is None:
        return effect
    beside = max(0.0, found.step_seconds - found.wait_seconds - found.train_seconds)
    most = max(1.0, found.step_seconds / (found.alone_seconds + beside))
    return min(effect[0], most), min(effect[1], most)


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
