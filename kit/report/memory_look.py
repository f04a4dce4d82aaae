"""The look of memory: one colour and one pattern per category, one wording of a peak, one axis of bytes.

Every chart, bar and table of memory takes its looks from here, so that activations are the same orange with the same
pattern wherever they appear. Hues are families (what the model holds, what training adds, what passes through) and
patterns are members of one, so that no category is told by colour alone. Bytes are binary: MiB below one GiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.plan.memory.recording import CATEGORIES
from kit.report.figure import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from kit.units import format_bytes

if TYPE_CHECKING:
    from kit.plan.memory.estimate import MemoryEstimate

_DARK, _LIGHT = "#1a1a1a", "#ffffff"
_TICKS = 6
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class CategoryLook:
    """How one category is drawn."""

    label: str
    colour: str
    hatch: str = ""
    """Matplotlib's pattern; empty for a plain area."""
    text_colour: str = _LIGHT
    """Readable on `colour`, in either theme."""


LOOKS = {
    "parameters": CategoryLook("parameters", BLUE),
    "buffers": CategoryLook("buffers", BLUE, "..."),
    "gradients": CategoryLook("gradients", SKY, text_colour=_DARK),
    "optimizer_state": CategoryLook("optimizer state", GREEN),
    "inputs": CategoryLook("inputs", YELLOW, text_colour=_DARK),
    "activations": CategoryLook("activations", ORANGE, text_colour=_DARK),
    "autocast_cache": CategoryLook("autocast cache", BLUE, "////"),
    "gathered_parameters": CategoryLook("gathered parameters", SKY, "xxx", text_colour=_DARK),
    "communication": CategoryLook("communication", PURPLE, text_colour=_DARK),
    "workspace": CategoryLook("workspace", VERMILION, "\\\\\\\\"),
    "temporaries": CategoryLook("temporaries", VERMILION),
}
"""Category → look, in the order of CATEGORIES."""
assert tuple(LOOKS) == CATEGORIES

VERDICTS = {
    "fits": ("✓", GREEN),
    "tight": ("≈", ORANGE),
    "does not fit": ("✗", VERMILION),
    "unknown": ("?", "#777777"),
}
"""Verdict → the sign and the colour it is shown with."""


def unit_of(limit_bytes: float) -> tuple[int, str]:
    """(bytes, name) of the unit an axis up to `limit_bytes` is written in."""
    return next(((size, name) for size, name in _UNITS if limit_bytes >= size), (1, "B"))


def ticks_of(limit_bytes: float) -> tuple[list[float], list[str], str]:
    """Round places on an axis from 0 to `limit_bytes`, how each is written, and the unit they are in."""
    size, name = unit_of(limit_bytes)
    most = limit_bytes / size
    power = 10.0 ** math.floor(math.log10(most / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= _TICKS)
    places = [index * step for index in range(math.floor(most / step) + 1)]
    return [place * size for place in places], [f"{place:g}" for place in places], name


def peak_words(estimate: MemoryEstimate) -> str:
    """The peak in words: `4.2 GiB in backward, at _log_softmax_backward_data in head`."""
    peak = estimate.peak
    least = "" if estimate.complete else "at least "
    where = f", at {short_operator(peak.operator)}" if peak.operator else ""
    where += f" in {peak.module}" if peak.operator and peak.module else ""
    return f"{least}{format_bytes(estimate.device_allocated_bytes)} {_WHEN.get(peak.phase, peak.phase)}{where}"


def short_operator(name: str) -> str:
    """`aten::mm.default` -> `mm`: what people call an operator."""
    return name.removeprefix("aten::").removeprefix("aten.").partition(".")[0] or name


_WHEN = {
    "setup": "before the first batch", "forward": "in forward", "backward": "in backward",
    "optimizer": "in the optimizer step", "other": "between the phases of a step",
}  # fmt: skip
