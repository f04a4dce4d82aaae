"""Gains that are measured before they are advised: the module itself, a few steps, with a change and without.

A number format or a batch size may help or hurt by a factor, and no peak of a matrix product tells which; of page
faults nobody knows which ones kept memory prevents; a hook that is left out also takes its memory traffic with it, or
the page faults that its arrays prevented begin. So both sides run for a few steps in processes of their own, in turn
(before after, after before, ...), and each pair's steps are compared by their median logarithm, which a few slow steps
move little. A machine that is faster in one second than in the next makes one pair lie, so a gain counts only after
`LEAST_PAIRS` of them: its range is two standard errors of the mean of the pairs, by the noise of their steps or by how
far the pairs are apart, whichever is more. One pair is enough where it shows plainly that there is no gain. While the
threshold of the rule lies in the range, up to `PAIRS` are run.

A run is `SECONDS` long, or `STEPS` steps where that is longer, within `MOST_SECONDS`; batches that loader processes had
ready before the first step are passed over.

Where a trial waits for data, the training alone is measured so, too (`training_alone`): on its first batch again and
again, its loader ended. The trial itself knows training only beside the reading, which takes cores, caches and memory
from it, in the training thread too. It may be the user's own and be over long since, so steps of that kind are no part
of it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import replace

from kit.errors import KitError, TrialError, TrialStopped
from kit.events import Event
from kit.records.trace import BESIDE_TRAINING
from kit.studies.diagnosis.evidence import Evidence
from kit.studies.diagnosis.host_rules import drawing_hook, left_out_fraction, may_be_small, may_fault, slowest_hook
from kit.studies.diagnosis.rule import SLIVER, Range, Rule
from kit.studies.diagnosis.rules import RULES
from kit.studies.repeats import RunSource

LEAST_PAIRS, PAIRS = 2, 4
STEPS, MOST_STEPS, SECONDS, MOST_SECONDS = 8, 60, 1.0, 4.0
WARMUP_STEPS, READY_BATCHES = 2, 2
"""`READY_BATCHES`: of each loader process, by torch's default."""
_LEAST_PASSES = 0.5
"""Of the time in forward and backward, so that another number format is worth trying."""
_LEAST_FLOPS_OF_A_BYTE = 2.0
"""Below it a step is all traffic and calls."""


def worth_measuring(found: Evidence) -> dict[str, Rule]:
    """The rules whose gain only a trial can tell, by name."""
    names: list[str] = []
    work, passes = found.work, found.shares.get("forward", 0.0) + found.shares.get("backward", 0.0)
    if work is not None and found.config.hardware.precision in ("auto", "32-true") and passes >= _LEAST_PASSES:
        full = work.flops.get("float32", 0.0)
        if full > 0.5 * sum(work.flops.values()) and full >= _LEAST_FLOPS_OF_A_BYTE * work.bytes:
            names.append("full precision")
    if may_fault(found):
        names.append("page faults")
    if may_be_small(found):
        names.append("batch too small")
    if slowest_hook(found)[1] >= SLIVER and drawing_hook(found) is None:
        names.append("slow hook")
    return {rule.name: rule for rule in RULES if rule.name in names}


def measured_gains(found: Evidence, source: RunSource) -> tuple[dict[str, Range], list[str]]:
    """The gain of each change that is worth measuring, and notes on those that could not be measured."""
    gains, notes = dict[str, Range](), list[str]()
    for name, rule in worth_measuring(found).items():
        pairs, change = list[Pair](), rule.change(found)
        altered = replace(
            source.altered, batch_size=rule.batch_size(found) or source.altered.batch_size,
            without_hook=slowest_hook(found)[0] if name == "slow hook" else "",
        )  # fmt: skip
        after = replace(source, config=source.config.replace(change), altered=altered)
        sides = {"before": source, "after": after}
        try:
            while not decided(pairs, rule.threshold):
                runs = {
                    side: few_steps(sides[side], found)
                    for side in (("before", "after") if len(pairs) % 2 == 0 else ("after", "before"))
                }
                if name == "batch too small" and _largest(runs["after"]) <= _largest(runs["before"]):
                    raise TrialError(f"batches are of {_largest(runs['after'])} samples, whatever is asked for")
                pairs.append((step_logarithms(runs["before"]), step_logarithms(runs["after"])))
            times = _largest(runs["after"]) / max(1, _largest(runs["before"]))
            gains[name] = in_whole_steps(difference(pairs), found, max(1.0, times))
        except TrialStopped:  # an interrupt ends all
            raise
        except KitError as error:
            batch = f"a batch of {altered.batch_size} from {found.whose_batches}"
            asked = ", ".join(change) or (f"leaving out {altered.without_hook}" if altered.without_hook else batch)
            by_data = not change and not altered.without_hook
            way_out = "; make it so and compare with kit.studies.try_change(..., new_data=...)" if by_data else ""
            notes.append(f"whether {asked} would help was not measured: {error}{way_out}")
    return gains, notes


def in_whole_steps(gain: Range, found: Evidence, times: float = 1.0) -> Range:
    """The gain, with `times` the samples in a batch, of a step that also does what a short trial leaves out, once.

    A step with more samples takes no less time, whatever the noise says.
    """
    apart, most = left_out_fraction(found), times if times > 1 else math.inf
    low, high = (times / (apart + times * (1 - apart) / min(one, most)) for one in gain)
    return low, high


def without_drawing(found: Evidence, source: RunSource) -> tuple[dict[str, Range], list[str]]:
    """The gain of the trial's steps without drawing and logging, where a short trial can leave that out."""
    if (hook := drawing_hook(found)) is None:
        return {}, []
    try:
        steps = few_steps(replace(source, altered=replace(source.altered, without_hook=hook)), found)
    except TrialStopped:
        raise
    except KitError as error:
        return {}, [f"how long steps take without drawing and logging was not measured: {error}"]
    beside = math.fsum(found.shares.get(part, 0.0) for part in BESIDE_TRAINING if part != "logging")
    after = statistics.median(float(step["step_seconds"]) for step in steps) + beside * found.step_seconds
    gain, reach = max(1.0, found.step_seconds / after), math.exp(2 * _error(step_logarithms(steps)))
    return {"drawing or logging in the step": (gain / reach, gain * reach)}, []


def training_alone(found: Evidence, source: RunSource) -> tuple[float | None, list[str]]:
    """The seconds of a step with nothing read, where data or, beside reading, a core is waited for; why not known."""
    if (found.wait_fraction or 0.0) < SLIVER and not found.reads_on_its_cores:
        return None, []
    try:
        steps = few_steps(replace(source, altered=replace(source.altered, repeats_batch=True)), found)
    except TrialStopped:
        raise
    except KitError as error:
        return None, [f"how long the training takes without reading was not measured: {error}"]
    batches: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:  # of several batches where gradients are accumulated
        apart = math.fsum(step[f"{part}_seconds"] for part in ("wait", *BESIDE_TRAINING))
        batches[int(step["rank"]), int(step["step"])].append(step["step_seconds"] - apart)
    return statistics.median(map(statistics.fmean, batches.values())), []


def _largest(steps: list[Event]) -> int:
    return max((int(step["samples"]) for step in steps), default=0)


Pair = tuple[list[float], list[float]]
"""Logarithms of samples per second of the steps before and after."""


def decided(pairs: list[Pair], threshold: float) -> bool:
    """Whether no further pair is to be run."""
    if not pairs or len(pairs) >= PAIRS:
        return bool(pairs)
    low, high = difference(pairs)
    return high < threshold or (low >= threshold and len(pairs) >= LEAST_PAIRS)


def few_steps(source: RunSource, found: Evidence) -> list[Event]:
    """The steps of a short trial, after its warm-up.

    Raises:
        KitError: when the trial cannot start, or fails.
    """
    alone = source.altered.repeats_batch
    step_seconds = max(1e-6, found.train_seconds) if alone else found.step_seconds
    most = max(2, int(MOST_SECONDS / step_seconds))
    count = min(most, MOST_STEPS, max(STEPS, int(SECONDS / step_seconds)))
    warm = WARMUP_STEPS + (0 if alone else min(most, READY_BATCHES * (found.workers or 0)))
    short = source.config.replace({
        "trial.max_steps": warm + count, "trial.warmup_steps": warm, "trial.predict_memory": False,
        "trial.measure_memory": False, "trial.count_work": False, "trial.validate_every_steps": 0,
        "calibration.enabled": False,
    })  # fmt: skip
    trial = source.start(short).wait()
    steps = [step for step in trial.steps if int(step["step"]) > warm and step["step_seconds"] > 0]
    if not steps:
        raise TrialError(f"{trial.name} measured no step after its {warm} warm-up steps")
    return steps


def step_logarithms(steps: list[Event]) -> list[float]:
    """Logarithms of samples per second."""
    return [math.log(float(step["samples"]) / float(step["step_seconds"])) for step in steps]


def difference(pairs: list[Pair]) -> Range:
    """The gain from before to after: the mean of the pairs, and two standard errors to each side."""
    between = [statistics.median(after) - statistics.median(before) for before, after in pairs]
    of_steps = math.sqrt(math.fsum(_error(side) ** 2 for pair in pairs for side in pair)) / len(pairs)
    of_pairs = statistics.stdev(between) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    middle, reach = statistics.fmean(between), min(0.7, 2 * max(of_steps, of_pairs))
    return math.exp(middle - reach), math.exp(middle + reach)


def _error(logarithms: list[float]) -> float:
    """The standard error of a median, from the median deviation."""
    middle = statistics.median(logarithms)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in logarithms)
    return 1.2533 * deviation / math.sqrt(len(logarithms)) if len(logarithms) > 1 else 0.2
