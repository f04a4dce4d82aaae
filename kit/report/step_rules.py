"""Rules about the step itself: syncs, number format, tiny operations and calls, idle gaps.

They are asked of the evidence as `kit.report.rule` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.report.evidence import Evidence
from kit.report.profile import MANY_CALLS, MANY_CALLS_FRACTION, SHORT_CALL_SECONDS
from kit.report.rule import BASEMODEL, TRAINING_AT_SCALE, Rule, shorter
from kit.units import format_count, format_seconds


def _syncs(found: Evidence) -> float | None:
    """On a GPU every sync counts; on the CPU one costs a call, and only many of them cost time."""
    if found.work is None:
        return None
    return found.work.own_syncs if found.on_gpu or found.work.own_syncs >= _SYNCS_ON_CPU else 0


_SYNCS_ON_CPU = 50


def _syncs_sentence(found: Evidence, _: float) -> str:
    work = found.work
    line = work.most("syncs") if work else None
    count = format_count(work.own_syncs) if work else "0"
    place = f", most of them in {line['place']}" if line else ""
    what = "makes the GPU run dry" if found.on_gpu else "costs a call each here, and would make a GPU run dry"
    return f"The step asks for the value of a tensor {count} times{place}: that {what}."


def _syncs_effect(found: Evidence) -> float | None:
    """As if the calls of the line that waits took none of the forward pass."""
    line = found.work.most("syncs") if found.work else None
    if line is None or found.work is None or found.on_gpu:
        return None
    forward = found.shares.get("forward", 0.0) * found.step_seconds
    named = sum(entry["calls"] for entry in found.work.lines)
    return shorter(found, 0.99 * forward * line["calls"] / max(1, named), 1e9)


def _precision(found: Evidence) -> float | None:
    peaks, work = found.peaks, found.work
    if peaks is None or work is None or not found.samples_per_second:
        return None
    full = work.flops.get("float32", 0.0)
    if found.config.hardware.precision not in ("auto", "32-true") or not full:
        return 1.0
    devices = found.world_size if found.on_gpu else 1
    share = full / (devices * peaks.peak("float32")) / (work.samples / found.samples_per_second)
    half = max(peaks.peak(name) for name in ("bfloat16", "float16") if name in peaks.flops_per_second)
    return half / peaks.peak("float32") if share >= _COMPUTE_SHARE else 1.0


_COMPUTE_SHARE = 0.1
"""Of the step, what arithmetic in float32 takes at full speed, to be worth advice."""


def _mixed(found: Evidence) -> str:
    """On a GPU, auto is bf16-mixed or 16-mixed by what it is capable of."""
    return "auto" if found.on_gpu else "bf16-mixed"


def _precision_effect(found: Evidence) -> float | None:
    value = _precision(found)
    passes = found.shares.get("forward", 0.0) + found.shares.get("backward", 0.0)
    return None if value is None else shorter(found, passes * found.step_seconds, value)


def _calls(found: Evidence) -> float | None:
    if found.work is None or not found.work.calls or not found.train_seconds > 0:
        return None
    per_call = found.train_seconds / found.work.calls
    return found.work.calls if per_call <= _TINY_CALL_SECONDS else 0.0


_TINY_CALL_SECONDS = 20e-6


def _calls_sentence(found: Evidence, value: float) -> str:
    line = found.work.most("calls") if found.work else None
    place = f"; {line['place']} makes {format_count(line['calls'])} of them" if line else ""
    seconds = format_seconds(found.train_seconds / value)
    return f"A step is {format_count(value)} operations of {seconds} each, more calling than computing{place}."


def _functions(found: Evidence) -> float | None:
    if found.functions is None:
        return None
    return max((row["own_fraction"] for row in found.functions if _is_tiny(row)), default=0.0)


def _is_tiny(row: Mapping[str, Any]) -> bool:
    return bool(row["calls"] >= MANY_CALLS and row["call_seconds"] <= SHORT_CALL_SECONDS)


def _functions_sentence(found: Evidence, value: float) -> str:
    worst = max(filter(_is_tiny, found.functions or ()), key=lambda row: row["own_fraction"])
    calls, each = format_count(worst["calls"]), format_seconds(worst["call_seconds"])
    return f"{worst['function']} was called {calls} times, {each} each, {value:.0%} of the time."


def _gaps(found: Evidence) -> float | None:
    """Gaps long enough to have a cause."""
    trace = found.trace
    if trace is None:
        return None
    return sum(seconds for cause, seconds in trace.gap_seconds.items() if cause != "launching") / trace.window_seconds


def _gaps_sentence(found: Evidence, value: float) -> str:
    causes = dict(found.trace.gap_seconds) if found.trace else {}
    causes.pop("launching", None)
    cause = max(causes, key=lambda name: causes[name])
    return f"The device stands idle {value:.0%} of the time, mostly because of {cause}."


STEP_RULES: tuple[Rule, ...] = (
    Rule(
        name="sync in the step", looks_at="values asked of tensors in the user's code, in one step (on the CPU: from "
        f"{_SYNCS_ON_CPU} on)", unit="count", threshold=1.0, source=f"{TRAINING_AT_SCALE}: gaps come from syncs of "
        "CPU and GPU; the count on a CPU is kit's", needs="counted work (trial.count_work, and three warm-up steps)",
        measure=_syncs, sentence=_syncs_sentence,
        setting=lambda _: "your training_step: keep values on the device (no .item(), bool() or Python loop over "
        "elements) and log the tensor itself", effect=_syncs_effect,
    ),
    Rule(
        name="full precision", looks_at="peak in 16 bits over that in 32, where float32 takes a tenth of the time",
        unit="ratio", threshold=1.3, source=f"{BASEMODEL}: mixed precision by default; the factor is kit's, measured "
        "on this device", needs="counted work and measured peaks", measure=_precision,
        sentence=lambda _, value: f"The step computes in float32, and this device computes {value:.2g} times as fast "
        "in 16 bits.",
        setting=lambda found: f"hardware.precision: {_mixed(found)}",
        change=lambda found: {"hardware.precision": _mixed(found)},
        effect=_precision_effect,
    ),
    Rule(
        name="many tiny operations", looks_at=f"operations of a step that take {_TINY_CALL_SECONDS * 1e6:.0f} µs or "
        "less on average", unit="count", threshold=1000, source=f"{TRAINING_AT_SCALE}: high call counts of little "
        "time can be batched; the numbers are kit's", needs="counted work", measure=_calls,
        sentence=_calls_sentence,
        setting=lambda _: "your model: fewer, larger operations; a larger loader.batch_size spreads the calls over "
        "more samples",
        change=lambda found: {} if found.given_loader else {"loader.batch_size": 2 * found.config.loader.batch_size},
        effect=lambda found: None if found.given_loader else 2.0,
    ),
    Rule(
        name="many tiny calls", looks_at="share of the time in one function of a thousand calls and more, 20 µs or "
        "less each", unit="fraction", threshold=MANY_CALLS_FRACTION, source=f"{TRAINING_AT_SCALE}: functions of "
        "many calls and little time may be batched; the numbers are kit's", needs="an advanced profile",
        measure=_functions, sentence=_functions_sentence,
        setting=lambda _: "that function: call it for many values at once",
        effect=lambda found: 1 / max(1e-3, 1 - (_functions(found) or 0.0)),
    ),
    Rule(
        name="idle gaps", looks_at="share of the trace in which the device had nothing to do", unit="fraction",
        threshold=0.2, source=f"{TRAINING_AT_SCALE}: idle gaps ask for a look at the loader; a fifth is kit's",
        needs="a PyTorch trace", measure=_gaps, sentence=_gaps_sentence,
        setting=lambda _: "what the gaps are attributed to: kit's loader settings for loading, pin_memory for "
        "transfer, the step itself for syncs and Python",
        effect=lambda found: 1 / max(1e-3, 1 - (_gaps(found) or 0.0)),
    ),
)  # fmt: skip
