"""Where the predicted time of a step goes: a bar for each part of the module, or each line, by kind of operator.

`speed_figure` groups modules so that the bars stay readable: a part that takes little is shown with its parent. What no
module does (the optimizer, the host, the wait for other devices) has bars of its own. `lines_figure` shows the lines of
code instead, as far as the recording knows them.

`plan_figure` sets what each setting of a speed plan needs of the device against the time of its step. Settings that
nothing beats in both stand on a line; the budget is a border. Both axes are logarithmic where the points span more than
a decade.
"""

from __future__ import annotations

import html
import linecache
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.charts import style as look
from kit.memory.replay.replay import PHASES
from kit.speed.work import KINDS
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.speed.prediction import SpeedEstimate
    from kit.studies.scaling.fastest import SpeedPlan, SpeedPoint

_GIB, _MIB = 2**30, 2**20
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
    return _drawn(estimate, _summed(_parts(estimate), *_columns(estimate)), "part of the module")


def lines_figure(estimate: SpeedEstimate) -> Figure:
    """Seconds of a step by line of code and kind of operator."""
    names = [_short(line) for line in _lines(estimate)]
    return _drawn(estimate, _summed(names, *_columns(estimate)), "line of code")


def breakdown_html(estimate: SpeedEstimate) -> str:
    """The bars of `speed_figure`, of which a click opens each: its lines of code with their seconds.

    It needs neither kernel nor script, so it opens in a saved notebook and on a page too.
    """
    parts, lines, (kinds, seconds) = _parts(estimate), _lines(estimate), _columns(estimate)
    bars, whole = _shown(estimate, _summed(parts, kinds, seconds)), estimate.step_seconds or 1.0
    rows = []
    for name, by_kind in bars.items():
        inside = [place for place, part in enumerate(parts) if part == name or (name == _REST and part not in bars)]
        mine = _summed([lines[place] for place in inside], [kinds[place] for place in inside],
                       [seconds[place] for place in inside])  # fmt: skip
        rows.append(_part_html(name, by_kind, mine, whole))
    used = {kind for by_kind in bars.values() for kind in by_kind if kind}
    key = " ".join(f"<span style='{_SWATCH};background:{colour}'></span>{kind}" for kind, colour in _key(used).items())
    title = f"{html.escape(estimate.sentence)}. A click on a part shows its lines."
    return f"<div style='{_FRAME}'><div>{title}</div><div style='{_QUIET}'>{key}</div>{''.join(rows)}</div>"


def _part_html(name: str, by_kind: Mapping[str, float], lines: Bars, whole: float) -> str:
    spent = sum(by_kind.values())
    bar = "".join(
        f"<span title='{kind or 'waiting'}, {format_seconds(part)}' style='display:inline-block;height:11px;"
        f"width:{100 * part / whole:.2f}%;background:{COLOURS.get(kind, 'gray')}'></span>"
        for kind, part in sorted(by_kind.items(), key=lambda item: -item[1])
    )
    head = (
        f"<span style='{_CELL};width:32%'>{html.escape(name)}</span>"
        f"<span style='{_CELL};width:44%'>{bar}</span>"
        f"<span style='{_CELL};width:20%'>{format_seconds(spent)}, {spent / whole:.0%}</span>"
    )
    if not lines:
        return f"<div style='padding-left:1.1em'>{head}</div>"
    rows = "".join(_line_html(line, kinds) for line, kinds in lines.items())
    return (
        f"<details><summary style='cursor:pointer;white-space:nowrap'>{head}</summary>"
        f"<div style='margin:2px 0 8px 1.1em;{_QUIET}'>{rows}</div></details>"
    )


def _line_html(line: str, kinds: Mapping[str, float]) -> str:
    file, comma, rest = line.partition(", line ")
    number = rest.partition(",")[0]
    code = linecache.getline(file, int(number)).strip() if comma and number.isdigit() else ""
    place = _short(line) if comma else {"optimizer_state": "(the optimizer)"}.get(line, f"({line or 'not known'})")
    words = ", ".join(kind for kind, _ in sorted(kinds.items(), key=lambda item: -item[1])[:3])
    return (
        f"<div style='white-space:nowrap;overflow:hidden;text-overflow:ellipsis'>"
        f"<span style='{_CELL};width:5.5em;text-align:right'>{format_seconds(sum(kinds.values()))}</span> "
        f"<span title='{html.escape(line, quote=True)}'>{html.escape(place)}</span> "
        f"<code>{html.escape(code)}</code> {words}</div>"
    )


_CELL = "display:inline-block;vertical-align:middle;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
_FRAME = "max-width:860px;line-height:1.5"
_QUIET = "font-size:.9em;opacity:.85"
_SWATCH = "display:inline-block;width:10px;height:10px;margin:0 4px 0 8px"
_REST = "(all others)"


def _parts(estimate: SpeedEstimate) -> list[str]:
    """(operators,) the bar of each."""
    step = estimate.time.step
    paths = np.array([step.names[number] for number in step.module.tolist()], dtype=object)
    paths[step.phase == PHASES.index("optimizer")] = "(optimizer)"
    paths[paths == ""] = "(outside any part)"
    for depth in range(_DEEPEST, 0, -1):
        names = [".".join(path.split(".")[:depth]) for path in paths.tolist()]
        if len(set(names)) <= _MOST_BARS:
            break
    return names


def _lines(estimate: SpeedEstimate) -> list[str]:
    step = estimate.time.step
    return [step.names[number] for number in step.line.tolist()]


def _columns(estimate: SpeedEstimate) -> tuple[list[int], list[float]]:
    """(operators,) kinds and seconds."""
    time = estimate.time
    return time.step.kind.tolist(), (time.operator_seconds * estimate.correction).tolist()


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
    return {**kept, _REST: rest} if rest else kept


def _shown(estimate: SpeedEstimate, bars: Bars) -> Bars:
    """The bars that are seen, and the waits of the device."""
    least = _LEAST * (estimate.step_seconds or 1.0)
    shown = {name: parts for name, parts in bars.items() if sum(parts.values()) > least}
    waits = {f"(waits for {name})": spent * estimate.correction for name, spent in estimate.time.waits.items()}
    return shown | {name: {"": spent} for name, spent in waits.items() if spent > least}


def _drawn(estimate: SpeedEstimate, bars: Bars, what: str) -> Figure:
    whole, shown = estimate.step_seconds or 1.0, _shown(estimate, bars)
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


def plan_figure(plan: SpeedPlan) -> Figure:
    """Memory against time of all settings that were looked at, the front of the best, the budget and the choice."""
    chart = look.figure(8.0, 4.6)
    points = list(plan.points)
    most = max([plan.budget_bytes, *(point.needs_bytes for point in points)])
    unit, name = (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")
    axes = look.add_axes(
        chart, (0.1, 0.13, 0.86, 0.7), title="time of a step against memory, of every setting that was looked at",
        x=f"needs, {name}", y="step, s",
    )  # fmt: skip

    def draw(chosen: list[SpeedPoint], **options: Any) -> None:
        axes.plot([one.needs_bytes / unit for one in chosen], [one.step_seconds for one in chosen], **options)

    with look.drawing():
        axes.axvline(plan.budget_bytes / unit, color=look.INK, linewidth=1.2, linestyle="--")
        fits = [point for point in points if point.fits]
        draw([point for point in points if not point.fits], marker="x", linestyle="", color=look.ORANGE,
             label="does not fit")  # fmt: skip
        draw(fits, marker="o", linestyle="", color=look.SKY, label="fits")
        draw(list(plan.front), marker="", color=look.BLUE, linewidth=1.2, label="nothing is better in both")
        if plan.chosen is not None:
            draw([plan.chosen], marker="D", markersize=9, linestyle="", color=look.VERMILION, label="chosen")
        scales: list[tuple[list[float], Any]] = [
            ([float(one.needs_bytes) for one in points], axes.set_xscale),
            ([one.step_seconds for one in points], axes.set_yscale),
        ]
        for values, scale in scales:
            if values and min(values) > 0 and max(values) > 10 * min(values):
                scale("log")
        axes.legend(loc="upper right", fontsize=8.5)
        low, high = axes.get_ylim()
        place = (plan.budget_bytes / unit, low + 0.03 * (high - low))
        look.note(axes, place, f"budget {format_bytes(plan.budget_bytes)}")
    if plan.chosen is not None:
        needs, seconds = format_bytes(plan.chosen.needs_bytes), format_seconds(plan.chosen.step_seconds)
        look.finding(chart, f"{plan.chosen.name}: {seconds} a step, {needs}")
    else:
        look.finding(chart, plan.refusal)
    return chart
