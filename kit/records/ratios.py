"""Ratios: when measured / predicted says something, why it is far from 1, and what earlier trials say about speed.

Memory is counted byte by byte, and its ratio always stands. Speed, requests and bytes are means over batches: of too
few, or of batches that differ too much, no ratio is given but the reason. A ratio that is `FAR` from 1, one of memory
`FAR_MEMORY`, is explained by what the trial has counted; where nothing counted explains it, that is said.

Speed is predicted from earlier trials of the same: config as far as it decides on speed, module, data, machine and
devices. Where there is none, the operators of its step predict it (`kit.speed`), corrected by how far they were off in
earlier trials of the same module, as far as that is more than chance. The rate at which a store can be read predicts
it least of all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.json_text import read_json
from kit.machine.processes import BUSY_CORES
from kit.memory.replay.replay import DIFFERING
from kit.trial.directory import RunPaths
from kit.units import format_count

FAR = 0.2
"""A ratio further than this from 1, either way, is explained."""
FAR_MEMORY = 0.05
"""That of memory, which is counted to the byte and differs from trial to trial by next to nothing."""
_MEMORY = "device_allocated_bytes"
LEAST_BATCHES = 8
"""One batch that takes twice as long, as any other program on the machine can bring about, moves the mean of eight by
an eighth: by less than `FAR`. The mean of fewer can be far from 1 by such a batch alone."""
LARGEST_ERROR_FRACTION = FAR / 2
"""Standard error of a mean: twice that is `FAR`, so that with a larger one chance alone makes a ratio far."""
SPEED = "samples_per_second"
COUNTED = ("requests_per_sample", "bytes_per_sample")
MOST_EFFICIENCY = 1.2
"""Of devices against as many times one of them: more is no scaling, but a trial that something else slowed down."""
NO_SPEED = ("name", "trial.", "training.max_", "commit.", "profiler.", "build.", "queries.", "calibration.")
"""Settings that change neither how fast a step is nor what it reads."""
_MOST_EARLIER = 5
TRIAL_DEVIATION = 0.07
"""Of the speed of one trial: two of the same setting differ by 6.6 % at the median of 93 (`benchmarks/speed.py`)."""
_ENDED = ("COMPLETE", "STOPPED")
_WORDS = {
    "requests_per_sample": "requests", "bytes_per_sample": "bytes", _MEMORY: "memory",
    "device_reserved_bytes": "reserved memory", SPEED: "speed",
}  # fmt: skip
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRange:
    """What is expected of samples per second, of all devices together."""

    samples_per_second: float
    low: float
    high: float
    source: str
    """Where it comes from, in a few words."""
    busy_cores: float = 0.0
    """That others used while operators were measured."""
    pace_seconds: float = 0.0
    """Of the product that tells a CPU's pace, at the fastest, of which the speed is; 0 where it was not asked."""
    computing_fraction: float = 1.0
    """Of a step's seconds, what changes with the pace."""


def speed_key(config: Config, environment: Mapping[str, Any]) -> str:
    """Digits that are the same for trials of the same, as far as speed goes; after a hyphen those of the callbacks,
    loggers and flags that `kit.fit` was given, where there are any.

    `environment` is that of a run: what was given, the machine, the kind of devices and how many of them.
    """
    settings = {info.path: config.get(info.path) for info in Config.fields()}
    kept = {path: repr(value) for path, value in settings.items() if not path.startswith(NO_SPEED)}
    given, machine = environment.get("given") or {}, environment.get("machine") or {}
    what = [given.get(name, "") for name in ("module", "data", "module_identity", "data_identity")]
    where = [machine.get("host"), environment.get("accelerator"), environment.get("world_size")]
    own = (environment.get("trainer") or {}).get("made")
    return _digits([kept, what, where]) + (f"-{_digits(own)}" if own else "")


def _digits(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def speed_range(earlier: Iterable[Values]) -> SpeedRange | None:
    """What these rows, the newest last, say about another trial of the same; None where none of them can.

    Rows of trials that had the machine to themselves count; others only where there is no such row.
    """
    measures = [row for row in earlier if is_measure(row)]
    rows = ([row for row in measures if not _is_disturbed(row)] or measures)[-_MOST_EARLIER:]
    if not rows:
        return None
    speeds = [row[SPEED] for row in rows]
    errors = [2 * (row[f"{SPEED}_error_fraction"] or 0.0) for row in rows]
    count = f"{len(rows)} earlier trials" if len(rows) > 1 else "an earlier trial"
    return SpeedRange(
        samples_per_second=statistics.median(speeds),
        low=min(speed * (1 - error) for speed, error in zip(speeds, errors, strict=True)),
        high=max(speed * (1 + error) for speed, error in zip(speeds, errors, strict=True)),
        source=f"{count} of the same",
    )


def is_measure(row: Values) -> bool:
    """Whether the speed of a row says how fast another trial of the same will be."""
    return bool(row[SPEED]) and row["state"] in _ENDED and row["kind"] != "profile" and not doubt(row, SPEED)


def _is_disturbed(row: Values) -> bool:
    """Whether other programs used cores meanwhile."""
    return (row.get("other_cores") or 0.0) > BUSY_CORES


# -- what a ratio says


def doubt(row: Values, quantity: str) -> str:
    """In a few words, why a ratio of this quantity says nothing; empty where it says something."""
    name = {SPEED: "measured_batches", **dict.fromkeys(COUNTED, "batches_read")}.get(quantity)
    batches = None if name is None else row[name]
    if batches is None:
        return ""
    if batches < LEAST_BATCHES:
        return "too few batches"
    error = row[f"{SPEED}_error_fraction"] if quantity == SPEED else None
    return "too uneven" if error is not None and error > LARGEST_ERROR_FRACTION else ""


def doubt_note(words: str) -> str:
    """What such words mean, and the way out."""
    if words == "too uneven":
        return (
            f"too uneven: the mean time of a batch is known to ± {2 * LARGEST_ERROR_FRACTION:.0%} at best, so a ratio "
            "could be chance; raise trial.max_steps"
        )
    return (
        f"too few batches: of fewer than {LEAST_BATCHES} after warm-up a single slow one decides the mean, so there is "
        "no ratio; raise trial.max_steps"
    )


def is_far(found: float | None, quantity: str) -> bool:
    """Whether a ratio has to be explained."""
    far = FAR_MEMORY if quantity == _MEMORY else FAR
    return found is not None and not 1 / (1 + far) <= found <= 1 + far


def explain(row: Values, before: Values | None = None) -> str:
    """Every ratio of a row that is far from 1, each with its reason; `before` is the trial that predicted its speed."""
    parts = []
    for quantity, words in _WORDS.items():
        found = row[f"{quantity}_ratio"]
        if is_far(found, quantity):
            why = _why_speed(row, before) if quantity == SPEED else _why(row, quantity, found)
            parts.append(f"{words} {found:.2f} of predicted: {why}")
    return "; ".join(parts)


def _why(row: Values, quantity: str, found: float) -> str:
    if quantity not in COUNTED:
        is_less = found < 1 and _differ(str(row["run_directory"]))
        shorter = "the largest batch is predicted, and those that ran may have held less; " if is_less else ""
        return f"{shorter}trial.figure('memory') lays what was measured over what was predicted"
    reasons = _fewer(row) if found < 1 else _more(row)
    return ", ".join(reasons) or "nothing that the trial has counted explains it"


@functools.lru_cache(maxsize=4096)
def _differ(run_directory: str) -> bool:
    """Whether the samples or batches of what was predicted differ in size; asked once of each run."""
    try:
        predicted = read_json(RunPaths(Path(run_directory)).prediction.read_bytes())
    except (OSError, ValueError):
        return False
    return any(str(note).startswith(DIFFERING) for note in predicted.get("notes", ()))


def _fewer(row: Values) -> list[str]:
    """Why less was read than predicted."""
    reasons = []
    if share := _share(row["read_cache_hits"], row["read_cache_misses"]):
        reasons.append(f"a warm cache gave {share:.0%} of what was read")
    if (row["epochs"] or 1) > 1:
        reasons.append(f"the epoch is short: the trial went through its data {row['epochs']} times")
    if (share := _share(row["cache_hits"], row["cache_misses"])) >= 0.01:
        reasons.append(f"chunks were shared: {share:.0%} of those a batch wanted were there from other batches")
    if share := _share(row["chunks_filled"], row["chunks_decoded"]):
        reasons.append(f"{share:.0%} of the chunks are absent from the store")
    return reasons


def _more(row: Values) -> list[str]:
    """Why more was read than predicted."""
    reasons = []
    if share := _share(row["retries"], (row["requests"] or 0) - (row["retries"] or 0)):
        reasons.append(f"{share:.0%} of the requests failed and were sent again")
    ahead = int((row["config"] or {}).get("loader.batches_ahead") or 0)
    if ahead and ahead >= FAR / 2 * (row["batches_read"] or math.inf):
        reasons.append(f"the trial is short: up to {ahead} batches were read ahead and never trained on")
    return reasons


def _why_speed(row: Values, before: Values | None) -> str:
    """Which part of a sample's time has changed most: waiting for data, or all else."""
    low, high = row.get(f"{SPEED}_low"), row.get(f"{SPEED}_high")
    if before is None and low and high:
        place = "within" if low <= row[SPEED] <= high else "outside"
        told = f"{place} what is expected of it, {format_count(low)} to {format_count(high)} samples/s"
        if row[SPEED] < row[f"{SPEED}_predicted"]:
            return told + _others(row.get("other_cores"), "meanwhile") + _at_its_pace(row)
        return told + _others(row.get("other_cores_when_predicted"), "while those were measured")
    if before is None or None in (row["data_wait_fraction"], before["data_wait_fraction"]):
        return "nothing that the trials have counted explains it"
    (wait, rest), (wait_before, rest_before) = _parts(row), _parts(before)
    if abs(wait - wait_before) >= abs(rest - rest_before):
        share, share_before = row["data_wait_fraction"], before["data_wait_fraction"]
        cause = " (a warm cache: by then the files were in memory)" if wait < wait_before else ""
        return f"waiting for data took {share:.0%} of the time, {share_before:.0%} in the trial before{cause}"
    slowed, when = (row, "meanwhile") if rest > rest_before else (before, "in that one")
    told = f"apart from waiting for data a sample took {rest / rest_before:.2f} times as long as in the trial before"
    return told + _others(slowed.get("other_cores"), when)


def _at_its_pace(row: Values) -> str:
    """How much of it is the pace of the cores; nothing where that is little, or not known."""
    slowdown = row.get("slowdown") or 1.0
    if slowdown < 1 + FAR / 2:
        return ""
    at_pace = slowdown * row[SPEED] / row[f"{SPEED}_predicted"]
    return (
        f"; the cores were slower than they can be, so that a step takes {slowdown:.2f} times as long (other programs, "
        f"the loader, a neighbour on a shared host, a lowered clock): {at_pace:.2f} of what is predicted at that pace"
    )


def _others(cores: float | None, when: str) -> str:
    """What all else on the machine used; nothing where that is too little to slow a trial, or not known."""
    if (cores or 0.0) <= BUSY_CORES:
        return ""
    return f"; other programs, such as the browser and this kernel, kept {cores:.1f} cores busy {when}"


def _parts(row: Values) -> tuple[float, float]:
    """(seconds that a sample waited for data, all others)."""
    seconds, share = 1 / row[SPEED], row["data_wait_fraction"]
    return share * seconds, (1 - share) * seconds


def _share(part: float | None, rest: float | None) -> float:
    whole = (part or 0) + (rest or 0)
    return (part or 0) / whole if whole else 0.0


def with_speeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, the oldest first, with the speed that those before each of them predicted, and far ratios explained.

    That depends on other rows, so it is never kept with one.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    by_model: dict[tuple[Any, ...], list[tuple[bool, float]]] = {}
    found = []
    for row in rows:
        earlier = alike.setdefault(row["speed_key"] or row["run"], [])
        known = speed_range(earlier)
        own = str(row["speed_key"] or "").partition("-")[2]  # a callback that takes its time is no fault of the model's
        named = (row["module"], row["host"], row["accelerator"], row["world_size"], own)
        of_model = by_model.setdefault(named, [])
        predicted = row[f"{SPEED}_predicted"]  # by the operators of its step, corrected by earlier trials of the model
        before = [ratio for disturbed, ratio in of_model if not disturbed] or [ratio for _, ratio in of_model]
        if predicted and is_measure(row):
            of_model.append((_is_disturbed(row), row[SPEED] * (row.get("slowdown") or 1.0) / predicted))
        new = dict(row)
        if known is not None:
            bounds = {"predicted": known.samples_per_second, "low": known.low, "high": known.high}
            new |= {f"{SPEED}_{name}": value for name, value in bounds.items()}
        elif predicted and before:
            factor = correction(before)
            for name in ("predicted", "low", "high"):
                new[f"{SPEED}_{name}"] = row[f"{SPEED}_{name}"] and row[f"{SPEED}_{name}"] * factor
        predicted = new[f"{SPEED}_predicted"]
        if predicted and row[SPEED] and not doubt(row, SPEED):
            new[f"{SPEED}_ratio"] = row[SPEED] / predicted
        last = next((one for one in reversed(earlier) if is_measure(one)), None)
        found.append({**new, "ratio_notes": explain(new, last) or None})
        earlier.append(row)
    return found


def correction(ratios: Sequence[float]) -> float:
    """By how much trials of a model, measured / predicted, correct its next prediction.

    Trials of one setting differ too, so a ratio near 1 says little of the model, and one far from it nearly all. Of its
    logarithm x as much counts as of a value that is known to a standard deviation of s: x² / (x² + s²).
    """
    off = math.log(statistics.median(ratios))
    doubt = TRIAL_DEVIATION / math.sqrt(len(ratios))
    return math.exp(off**3 / (off**2 + doubt**2))


def beyond_its_devices(efficiency: float) -> str:
    """What a scaling efficiency above `MOST_EFFICIENCY` means."""
    return (
        f"{efficiency:.3g} × as fast as so many single devices, which more devices do not bring about: something else "
        "slowed the trial on fewer, so neither is known before it runs again alone"
    )


def range_words(known: SpeedRange) -> str:
    """`290 to 340`."""
    low, high = format_count(known.low), format_count(known.high)
    return low if low == high else f"{low} to {high}"
