"""Charts of placements, of reading a table, and of runs at scale.

`placements_figure` shows what was counted in every placement: bytes that came from the disk, predicted beside measured,
and the memory of the process that rows hold. `query_figure` shows
the peak memory of the reader and of the database, measured (filled) over predicted (outline), and the seconds of
reading the whole table, by the number of query chunks; a count that failed keeps its place, without bars.
`scaling_figure` shows hours of all epochs over devices, both logarithmic, with their range, perfect scaling and what
was measured, the limit that decides told by shape and colour; beside it device-hours, or money where there are prices.
`cards_figure` shows money, or device-hours, against the time of the run, a line for each card over its devices.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kit.charts import style as look
from kit.units import format_bytes, format_price, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.data.tables.measure import QueryCheck
    from kit.studies.placement import Placements
    from kit.studies.scaling.cards import CardComparison
    from kit.studies.scaling.predict import BigRun

_ROW_INCHES, _EDGE_INCHES = 0.5, 1.1
_HALF = 0.36
_WITH_WORDS = 1.12
"""Of the longest bar, so that its number stands within the axes."""
_MIB = 2**20


def placements_figure(placements: Placements) -> Figure:
    """Bars for each placement that was run: what it read from the disk, and what its rows hold in memory."""
    rows = [row for row in placements.rows if row.measured_seconds]
    height = _EDGE_INCHES + _ROW_INCHES * max(1, len(rows))
    chart = look.figure(9.6, height)
    places = range(len(rows))
    titles = ("read from the disk in two epochs, MiB", "held by rows in own memory, MiB")
    boxes = ((0.25, 0.33), (0.63, 0.22))
    disk, memory = (
        look.add_axes(chart, (left, 0.65 / height, width, (height - _EDGE_INCHES) / height), title=title, grid="x")
        for (left, width), title in zip(boxes, titles, strict=True)
    )
    with look.drawing():
        for name, colour, shift in (("predicted", look.SKY, -_HALF / 2), ("measured", look.BLUE, _HALF / 2)):
            _draw_bars(disk, [getattr(row, f"{name}_disk_bytes") for row in rows], shift, _HALF, colour, name)
        _draw_bars(memory, [row.held_bytes for row in rows], 0.0, 2 * _HALF, look.BLUE, "measured")
        for axes in (disk, memory):
            longest = max((bar.get_width() for bars in axes.containers for bar in bars), default=0.0)
            axes.set_xlim(0, _WITH_WORDS * longest or 1.0)
            axes.set_ylim(len(rows) - 0.4, -0.6)
        disk.set_yticks(places, [f"{row.name}\n{row.case}" for row in rows])
        memory.set_yticks(places, [""] * len(rows))
        if rows:
            disk.legend(*disk.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.82, 1.0))
    return chart


def _draw_bars(
    axes: Axes, sizes: Sequence[int | None], shift: float, height: float, colour: str, label: str
) -> None:  # fmt: skip
    """Horizontal bars with their sizes in words; what is not known has none."""
    known = [(place, size) for place, size in enumerate(sizes) if size is not None]
    ends = [size / _MIB for _, size in known]
    axes.barh([place + shift for place, _ in known], ends, height=height, color=colour, label=label)
    for (place, size), end in zip(known, ends, strict=True):
        look.note(axes, (end, place + shift), format_bytes(size))


def query_figure(check: QueryCheck) -> Figure:
    """What `kit.data.measure_queries` answers, drawn."""
    chart = look.figure(8.6, 3.5)
    titles = ("client peak, MiB (outline: predicted)", "database peak, MiB (outline: predicted)", "seconds of a pass")
    client, database, time = panels = [
        look.add_axes(chart, (left, 0.25, 0.26, 0.61), title=title, x="query chunks")
        for left, title in zip((0.06, 0.39, 0.72), titles, strict=True)
    ]
    settings = check.settings
    with look.drawing():
        for axes in panels:
            axes.set_xticks(range(len(settings)), [str(setting.count) for setting in settings])
            axes.set_xlim(-0.6, len(settings) - 0.4)
        pairs = [(setting.predicted_client_bytes, setting.measured_client_bytes) for setting in settings]
        _draw_memory(client, pairs, look.BLUE)
        known = [(setting.predicted_database_bytes, setting.measured_database_bytes) for setting in settings]
        _draw_memory(database, known, look.GREEN)
        if all(measured is None for _, measured in known):
            database.text(0.5, 0.5, "cannot be seen from here", transform=database.transAxes, ha="center")
        for place, setting in enumerate(settings):
            if setting.seconds is not None:
                time.bar(place, setting.seconds, width=0.6, color=look.ORANGE)
                look.note(time, (place, setting.seconds), format_seconds(setting.seconds), above=True)
        time.set_ylim(0, 1.25 * max((setting.seconds or 0.0 for setting in settings), default=0.0) or 1.0)
        chart.text(0.06, 0.02, textwrap.fill(check.about_database, 130), fontsize=8.5, color=look.INK)
    return chart


def _draw_memory(axes: Axes, pairs: Sequence[tuple[int | None, int | None]], colour: str) -> None:
    tallest = 0
    for place, (predicted, measured) in enumerate(pairs):
        if measured is not None:
            axes.bar(place, measured / _MIB, width=0.5, color=colour)
        if predicted is not None:
            axes.bar(place, predicted / _MIB, width=0.7, fill=False, edgecolor=look.INK, linewidth=1.1)
        if predicted is not None or measured is not None:
            highest = max(predicted or 0, measured or 0)
            tallest = max(tallest, highest)
            words = format_bytes(measured) if measured is not None else "did not run"
            look.note(axes, (place, highest / _MIB), words, above=True)
    axes.set_ylim(0, 1.25 * tallest / _MIB or 1.0)


_MARKS = {
    "compute": ("o", look.BLUE), "cores": ("s", look.SKY), "communication": ("^", look.PURPLE),
    "loading": ("D", look.ORANGE), "loader CPU": ("v", look.ORANGE), "store requests/s": ("P", look.VERMILION),
    "store bandwidth": ("X", look.VERMILION), "memory": ("x", look.INK),
}  # fmt: skip
_DAY = 86_400.0
_ROUND_SECONDS = {
    0.001: "1 ms", 0.01: "10 ms", 0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min",
    3600.0: "1 h", 14_400.0: "4 h", _DAY: "1 day", 4 * _DAY: "4 days", 16 * _DAY: "16 days", 60 * _DAY: "60 days",
    365 * _DAY: "1 year", 3650 * _DAY: "10 years",
}  # fmt: skip
_BETWEEN = {
    0.002: "2 ms", 0.005: "5 ms", 0.02: "20 ms", 0.05: "50 ms", 0.2: "0.2 s", 0.5: "0.5 s", 2.0: "2 s", 5.0: "5 s",
    20.0: "20 s", 40.0: "40 s", 120.0: "2 min", 300.0: "5 min", 1200.0: "20 min", 2400.0: "40 min", 7200.0: "2 h",
    28_800.0: "8 h", 43_200.0: "12 h", 2 * _DAY: "2 days", 3 * _DAY: "3 days", 6 * _DAY: "6 days", 8 * _DAY: "8 days",
    30 * _DAY: "30 days", 120 * _DAY: "120 days", 730 * _DAY: "2 years", 1825 * _DAY: "5 years",
}  # fmt: skip
"""For an axis on which only the ends are round."""
_FEWEST_TICKS, _MOST_TICKS = 3, 9


def scaling_figure(run: BigRun) -> Figure:
    """What `kit.studies.predict_run` answers, drawn."""
    chart = look.figure(7.6, 3.4)
    time = look.add_axes(chart, (0.1, 0.16, 0.5, 0.7), title="time of the run", x="devices", grid="both")
    money = run.rows[0].money is not None
    title = f"money, {run.prices.currency}".rstrip(", ") if money else "device-hours"
    cost = look.add_axes(chart, (0.7, 0.16, 0.28, 0.7), title=title, x="devices")
    with look.drawing():
        _draw_time(time, run)
        values = [row.money or 0.0 if money else row.device_hours for row in run.rows]
        cost.bar(range(len(values)), values, width=0.6, color=look.GREEN)
        cost.set_xticks(range(len(values)), [str(row.devices) for row in run.rows])
        cost.set_ylim(0, 1.2 * max(values) or 1.0)
        for place, value in enumerate(values):
            look.note(cost, (place, value), f"{value:.3g}", above=True, xytext=(0, 2), fontsize=7.5)
    return chart


def _around(times: Mapping[float, str], least: float, most: float) -> dict[float, str]:
    """From the last of the times below the least to the first above the most."""
    ticks = sorted(times)
    begin = max(0, bisect_right(ticks, least) - 1)
    return {tick: times[tick] for tick in ticks[begin : max(bisect_left(ticks, most), begin + 1) + 1]}


def _draw_time(axes: Axes, run: BigRun) -> None:
    counts = [row.devices for row in run.rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = [row.low_seconds for row in run.rows], [row.high_seconds for row in run.rows]
    axes.fill_between(counts, low, high, color=look.SKY, alpha=0.3, linewidth=0)
    axes.plot(counts, [row.total_seconds for row in run.rows], color=look.INK, linewidth=1.0)
    first = run.rows[0]
    ideal = [first.total_seconds * first.devices / count for count in counts]
    axes.plot(counts, ideal, ":", color=look.INK, linewidth=1.0, label="perfect scaling")
    for bound in dict.fromkeys(row.bound for row in run.rows):
        mark, colour = _MARKS[bound]
        rows = [row for row in run.rows if row.bound == bound]
        axes.plot([row.devices for row in rows], [row.total_seconds for row in rows], mark, color=colour, label=bound)
    beside = run.beside_seconds
    measured = [
        (
            step.devices,
            row.total_seconds * (step.seconds + beside) / (run.scaling.at(step.devices).seconds_per_batch + beside),
        )
        for step in run.scaling.steps
        for row in run.rows
        if row.devices == step.devices
    ]
    if measured:
        axes.plot(*zip(*measured, strict=True), "+", color=look.INK, markersize=9, mew=1.4, label="measured")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    # Trials that differ by more than what they took leave a range that begins at nothing, which has no place here.
    least = min((one for one in low if one > 0), default=min(row.total_seconds for row in run.rows))
    most = max(high)
    shown = _around(_ROUND_SECONDS, least, most)
    if len(shown) < _FEWEST_TICKS:
        shown = _around(_ROUND_SECONDS | _BETWEEN, least, most)
    axes.set_ylim(min(min(shown), least), max(max(shown), most))
    axes.set_yticks([*shown], [*shown.values()])
    axes.legend(loc="best")


def cards_figure(comparison: CardComparison) -> Figure:
    """What `kit.studies.compare_cards` answers, drawn: what is to the left ends sooner, what is below costs less."""
    chart = look.figure(8.0, 4.4)
    currency = comparison[0].prices.currency
    # A logarithmic axis has no place for what is free, and one axis none for hours beside money.
    money = comparison.priced and all(row.run.money for row in comparison)
    costs = [(row.run.money if money else None) or row.run.device_hours for row in comparison]
    cost = f"money, {currency}".rstrip(", ") if money else "device-hours"
    axes = look.add_axes(
        chart, (0.1, 0.13, 0.66, 0.68), title=f"{cost}, and time of the run on each number of devices", x="whole run",
        y=cost, grid="both",
    )  # fmt: skip
    with look.drawing():
        axes.set_xscale("log")
        axes.set_yscale("log")
        for place, card in enumerate(comparison.runs):
            pairs = [(row, each) for row, each in zip(comparison, costs, strict=True) if row.card == card]
            pairs.sort(key=lambda pair: pair[0].run.devices)
            colour = look.COLOURS[place % len(look.COLOURS)]
            points = [(row.run.total_seconds, each) for row, each in pairs]
            style = look.DASHES[place // len(look.COLOURS) % len(look.DASHES)]
            axes.plot(*zip(*points, strict=True), style, color=colour, label=card, linewidth=1.0)
            for (row, _), point in zip(pairs, points, strict=True):
                axes.plot(*point, "o" if row.fits else "x", color=colour)
                look.note(axes, point, str(row.run.devices), above=True, xytext=(0, 3), fontsize=7.5)
        if not all(row.fits for row in comparison):
            axes.plot([], [], "x", color=look.INK, label="does not fit")
        axes.minorticks_off()
        _set_ends(axes, "x", [row.run.total_seconds for row in comparison], _ROUND_SECONDS | _BETWEEN)
        _set_ends(axes, "y", costs, {step * 10.0**power: format_price(step * 10.0**power)
                                     for power in range(-6, 9) for step in (1, 2, 5)})  # fmt: skip
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    for place, part in enumerate(comparison.sentence.split("; ")):
        look.finding(chart, part, 0.231 + 0.22 * place)
    return chart


def _set_ends(axes: Axes, direction: str, values: Sequence[float], ticks: Mapping[float, str]) -> None:
    """From the last tick below all values to the first above; of two whose words would touch, one is not written."""
    shown = _around(ticks, min(values), max(values))
    low, high = min(*shown, *values), max(*shown, *values)
    axes.set(**{f"{direction}lim": (low, high)})
    apart = math.log(high / low) / _MOST_TICKS
    kept: dict[float, str] = {}
    for tick, words in shown.items():
        if not kept or math.log(tick / max(kept)) >= apart:
            kept[tick] = words
    axes.set(**{f"{direction}ticks": [*kept], f"{direction}ticklabels": [*kept.values()]})
