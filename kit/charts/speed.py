"""Where the predicted time of a step goes: a bar for each part of the module, or each line, by kind of operator.

`speed_figure` groups modules so that the bars stay readable: a part that takes little is shown with its parent. What no
module does (the optimizer, the host, the wait for other devices) has bars of its own. `lines_figure` shows the lines of
code instead, as far as the recording knows them.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kit.charts import style as look
from kit.memory.replay.replay import PHASES
from kit.speed.work import KINDS
from kit.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.speed.prediction import SpeedEstimate

_MOST_BARS, _DEEPEST = 12, 6
_LEAST, _LINE = 0.002, 110
COLOURS = {
    "matmul": look.BLUE, "convolution": look.BLUE, "attention": look.SKY, "recurrent": look.SKY,
    "normalization": look.PURPLE, "elementwise": look.ORANGE, "reduction": look.VERMILION, "indexing": look.GREEN,
    "copy": look.YELLOW,
}  # fmt: skip
Bars = dict[str, dict[str, float]]
"""Seconds by bar and kind."""


def speed_figure(estimate: SpeedEstimate) -> Figure:
    """Seconds of a step by part of the module and kind of operator."""
    step, seconds = estimate.time.step, estimate.time.operator_seconds * estimate.correction
    optimizer = step.phase == PHASES.index("optimizer")
    paths = np.array([step.names[number] for number in step.module.tolist()], dtype=object)
    paths[optimizer] = "(optimizer)"
    paths[paths == ""] = "(outside any part)"
    for depth in range(_DEEPEST, 0, -1):
        names = [".".join(path.split(".")[:depth]) for path in paths.tolist()]
        if len(set(names)) <= _MOST_BARS:
            break
    return _drawn(estimate, _summed(names, step.kind.tolist(), seconds.tolist()), "part of the module")


def lines_figure(estimate: SpeedEstimate) -> Figure:
    """Seconds of a step by line of code and kind of operator."""
    step, seconds = estimate.time.step, estimate.time.operator_seconds * estimate.correction
    names = [_short(step.names[number]) for number in step.line.tolist()]
    return _drawn(estimate, _summed(names, step.kind.tolist(), seconds.tolist()), "line of code")


def _short(line: str) -> str:
    """`model.py, line 34` of a whole path."""
    file, comma, rest = line.partition(", ")
    return f"{file.rsplit('/', 1)[-1]}, {rest.partition(',')[0]}" if comma else line or "(not known)"


def _summed(names: list[str], kinds: list[int], seconds: list[float]) -> Bars:
    found: Bars = defaultdict(lambda: defaultdict(float))
    for name, kind, spent in zip(names, kinds, seconds, strict=True):
        found[name][KINDS[kind]] += spent
    ranked = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    rest: dict[str, float] = defaultdict(float)
    for _, parts in ranked[_MOST_BARS:]:
        for name_of_kind, spent in parts.items():
            rest[name_of_kind] += spent
    kept = dict(ranked[:_MOST_BARS])
    return {**kept, "(all others)": rest} if rest else kept


def _drawn(estimate: SpeedEstimate, bars: Bars, what: str) -> Figure:
    time, factor = estimate.time, estimate.correction
    waits = {
        "(host)": max(0.0, time.seconds - time.busy_seconds - time.exchange_seconds) * factor,
        "(other devices)": time.exchange_seconds * factor,
    }
    whole = estimate.step_seconds or 1.0
    shown = {name: parts for name, parts in bars.items() if sum(parts.values()) > _LEAST * whole}
    shown |= {name: {"": spent} for name, spent in waits.items() if spent > _LEAST * whole}
    height = 1.35 + 0.27 * len(shown)
    chart = look.figure(8.6, height)
    axes = look.add_axes(
        chart, (0.3, 0.42 / height, 0.52, (height - 1.3) / height), title="", x=f"ms of a step, by {what}", grid="x"
    )
    with look.drawing():
        _draw_bars(shown, whole, axes)
        axes.set_yticks(range(len(shown)), list(shown))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        used = {kind for parts in shown.values() for kind in parts if kind}
        look.colour_key(chart, _key(used), loc="upper right", bbox_to_anchor=(0.995, 1 - 0.55 / height))
        words = textwrap.fill(f"predicted: {estimate.sentence}", _LINE)
        chart.text(0.02, 1 - 0.08 / height, words, va="top", fontsize=9.5, color=look.INK)
    return chart


def _key(used: set[str]) -> Mapping[str, str]:
    """One entry for each colour that is there."""
    found: dict[str, str] = {}
    for kind, colour in COLOURS.items():
        if kind in used:
            named = next((name for name, known in found.items() if known == colour), "")
            found.pop(named, None)
            found[f"{named}, {kind}" if named else kind] = colour
    return found


def _draw_bars(shown: Bars, whole: float, axes: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    longest = max((sum(parts.values()) for parts in shown.values()), default=whole)
    for place, parts in enumerate(shown.values()):
        left = 0.0
        for kind in ["", *COLOURS]:
            spent = parts.get(kind, 0.0)
            if spent:
                axes.barh(place, 1e3 * spent, left=1e3 * left, height=0.72, color=COLOURS.get(kind, look.STILL_INK))
                left += spent
        look.note(axes, (1e3 * left, place), f"{format_seconds(left)}, {left / whole:.0%}")
    axes.set_xlim(0, 1.25e3 * longest)
