"""placements_figure: seconds of an epoch for every placement, predicted beside measured.

query_figure: memory and time of reading a table, by the number of query chunks.

Left and middle, the peak of the reader's process and of the database, bars from zero: the measured bar is filled, the
predicted one an outline. Right, seconds of reading the whole table once. A number that could not be read keeps its
place, without bars; a database that does not tell keeps its panel, with a sentence. Below, what more query chunks do to
the database.

scaling_figure: how long a run takes on more and more devices, what it costs, and what holds it up.

Left, hours of all epochs over devices, both logarithmic, with the range, the line of perfect scaling, and what was
measured; the limit that decides is told by shape and colour. Right, device-hours, or money where there are prices, as
bars from zero.

Charts of topics: how documents are made of them, and which terms they are made of.

`structure_figure` stacks the shares of every document, sorted by their largest topic and its share; more documents than
can be told apart are averaged in groups of neighbours. `terms_figure` has a small chart for each topic with its most
likely terms. A topic has the same colour in both. Numbers come first (`structure_info`, `terms_info`), then the chart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.errors import ConfigError, Problem
from kit.models.topic_recovery import Topics
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from kit.data.tables.measure import QueryCheck
    from kit.studies.placement import Placements
    from kit.studies.scaling.predict import BigRun

_WIDTH_INCHES, _ROW_INCHES, _EDGE_INCHES = 8.4, 0.5, 1.1
_LEFT, _WIDE = 0.29, 0.53
_HALF = 0.36
_ROOM = 1.12
"""Of the longest bar, so that its number stands within the axes."""


def placements_figure(placements: Placements) -> Figure:
    """Two bars for each placement that was run."""
    rows = [row for row in placements.rows if row.measured_seconds and row.predicted_seconds]
    height = _EDGE_INCHES + _ROW_INCHES * max(1, len(rows))
    figure = look.figure(_WIDTH_INCHES, height)
    box = (_LEFT, 0.65 / height, _WIDE, (height - _EDGE_INCHES) / height)
    axes = look.add_axes(figure, box, title="an epoch after the first", x="seconds", grid="x")
    longest = 0.0
    with look.drawing():
        for place, row in enumerate(rows):
            both = ((row.predicted_seconds, look.SKY, "predicted"), (row.measured_seconds, look.BLUE, "measured"))
            for shift, (seconds, colour, name) in zip((-0.5, 0.5), both, strict=True):
                assert seconds is not None
                longest = max(longest, seconds)
                label = name if place == 0 else None
                axes.barh(place + shift * _HALF, seconds, height=_HALF, color=colour, label=label)
                axes.annotate(
                    format_seconds(seconds), (seconds, place + shift * _HALF), xytext=(4, 0),
                    textcoords="offset points", va="center", fontsize=8, color=look.INK,
                )  # fmt: skip
        axes.set_yticks(range(len(rows)), [f"{row.name}\n{row.case}" for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, _ROOM * longest or 1.0)
        if rows:
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0))
    return figure


_MIB = 2**20


def query_figure(check: QueryCheck) -> Figure:
    """What `kit.measure_queries` answers, drawn."""
    figure = look.figure(8.6, 3.5)
    titles = ("client peak, MiB (outline: predicted)", "database peak, MiB (outline: predicted)", "seconds of a pass")
    panels = [
        look.add_axes(figure, (left, 0.25, 0.26, 0.61), title=title, x="query chunks")
        for left, title in zip((0.06, 0.39, 0.72), titles, strict=True)
    ]
    client, database, time = panels
    settings = check.settings
    with look.drawing():
        for axes in panels:
            axes.set_xticks(range(len(settings)), [str(setting.count) for setting in settings])
            axes.set_xlim(-0.6, len(settings) - 0.4)
        pairs = [(setting.predicted_client_bytes, setting.measured_client_bytes) for setting in settings]
        _memory(client, pairs, look.BLUE)
        known = [(setting.predicted_database_bytes, setting.measured_database_bytes) for setting in settings]
        _memory(database, known, look.GREEN)
        if all(measured is None for _, measured in known):
            database.text(0.5, 0.5, "cannot be seen from here", transform=database.transAxes, ha="center")
        for place, setting in enumerate(settings):
            if setting.seconds is not None:
                time.bar(place, setting.seconds, width=0.6, color=look.ORANGE)
                _say(time, place, setting.seconds, format_seconds(setting.seconds))
        time.set_ylim(0, 1.25 * max((setting.seconds or 0.0 for setting in settings), default=0.0) or 1.0)
        figure.text(0.06, 0.02, textwrap.fill(check.about_database, 130), fontsize=8.5, color=look.INK)
    return figure


def _memory(axes: Axes, pairs: Sequence[tuple[int | None, int | None]], colour: str) -> None:
    for place, (predicted, measured) in enumerate(pairs):
        if measured is not None:
            axes.bar(place, measured / _MIB, width=0.5, color=colour)
        if predicted is not None:
            axes.bar(place, predicted / _MIB, width=0.7, fill=False, edgecolor=look.INK, linewidth=1.1)
        highest = max((value for value in (predicted, measured) if value is not None), default=None)
        if highest is not None:
            _say(axes, place, highest / _MIB, format_bytes(measured) if measured is not None else "did not run")
    tallest = max((value for pair in pairs for value in pair if value is not None), default=0)
    axes.set_ylim(0, 1.25 * tallest / _MIB or 1.0)


def _say(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(text, (place, height), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8,
                  color=look.INK)  # fmt: skip


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


def scaling_figure(run: BigRun) -> Figure:
    """What `kit.predict_run` answers, drawn."""
    figure = look.figure(7.6, 3.4)
    time = look.add_axes(figure, (0.1, 0.16, 0.5, 0.7), title="time of the run", x="devices", grid="both")
    money = run.rows[0].money is not None
    title = f"money, {run.prices.currency}".rstrip(", ") if money else "device-hours"
    cost = look.add_axes(figure, (0.7, 0.16, 0.28, 0.7), title=title, x="devices")
    with look.drawing():
        _time(time, run)
        _cost(cost, run, money=money)
    return figure


def _time(axes: Axes, run: BigRun) -> None:
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
    measured = [
        (step.devices, row.total_seconds * step.seconds / run.scaling.at(step.devices).seconds_per_batch)
        for step in run.scaling.steps
        for row in run.rows
        if row.devices == step.devices
    ]
    if measured:
        axes.plot(*zip(*measured, strict=True), "+", color=look.INK, markersize=9, mew=1.4, label="measured")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    _seconds_ticks(axes, min(low), max(high))
    axes.legend(loc="best")


def _seconds_ticks(axes: Axes, low: float, high: float) -> None:
    """Round times, from the last below to the first above."""
    ticks = sorted(_ROUND_SECONDS)
    first = max((place for place, tick in enumerate(ticks) if tick <= low), default=0)
    last = min((place for place, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    shown = ticks[first : max(last, first + 1) + 1]
    axes.set_ylim(min(shown[0], low), max(shown[-1], high))
    axes.set_yticks(shown, [_ROUND_SECONDS[tick] for tick in shown])


def _cost(axes: Axes, run: BigRun, *, money: bool) -> None:
    values = [row.money or 0.0 if money else row.device_hours for row in run.rows]
    axes.bar(range(len(values)), values, width=0.6, color=look.GREEN)
    axes.set_xticks(range(len(values)), [str(row.devices) for row in run.rows])
    axes.set_ylim(0, 1.2 * max(values) or 1.0)
    for place, value in enumerate(values):
        axes.annotate(f"{value:.3g}", (place, value), xytext=(0, 2), textcoords="offset points", ha="center",
                      fontsize=7.5, color=look.INK)  # fmt: skip


_TOPICS_WIDTH_INCHES, _HEIGHT_INCHES, _TOPICS_ROW_INCHES = 7.8, 3.3, 1.9
_MOST_COLUMNS = 600
_MOST_NAMED, _MOST_CHARTS, _ACROSS = 24, 30, 5
_PALETTE = (*look.COLOURS, look.YELLOW, "#7F7F7F")
"""Yellow and grey too: areas are told apart where lines would be too faint."""
_TINTS = (0.0, -0.45, 0.5)
"""Of the palette, for topics beyond its colours: as it is, towards black, towards white."""


@dataclass(frozen=True, slots=True)
class StructureInfo:
    """Documents in the order they are drawn in."""

    heights: NDArray[Any]
    """Shares of groups of neighbours, (groups, topics)."""
    group: int
    """Documents in each group; the last may have fewer."""
    documents: int


@dataclass(frozen=True, slots=True)
class TermsInfo:
    """The likeliest terms of each topic, from the likeliest on."""

    names: tuple[tuple[str, ...], ...]
    probabilities: tuple[tuple[float, ...], ...]


def structure_info(shares: NDArray[Any]) -> StructureInfo:
    """Documents sorted by their largest topic, then by its share, falling."""
    import numpy as np

    largest = shares.argmax(1)
    order = np.lexsort((-shares.max(1), largest))
    group = math.ceil(len(order) / _MOST_COLUMNS)
    starts = np.arange(0, len(order), group)
    sizes = np.diff([*starts, len(order)])[:, None]
    return StructureInfo(np.add.reduceat(shares[order], starts, axis=0) / sizes, group, len(order))


def terms_info(terms: NDArray[Any], count: int = 10, names: Sequence[str] | None = None) -> TermsInfo:
    """The `count` likeliest terms of each topic.

    Raises:
        ConfigError: for fewer than one term, and when there are not as many names as terms.
    """
    if count < 1:
        raise ConfigError([Problem("count", f"{count} terms: show 1 or more")])
    if names is not None and len(names) != terms.shape[1]:
        raise ConfigError([Problem("names", f"{len(names)} names for {terms.shape[1]} terms; give one each")])
    order = (-terms).argsort(axis=1, kind="stable")[:, :count].tolist()
    named = tuple(tuple(str(place if names is None else names[place]) for place in row) for row in order)
    likely = tuple(tuple(float(terms[topic, place]) for place in row) for topic, row in enumerate(order))
    return TermsInfo(named, likely)


def structure_figure(topics: Topics) -> Figure:
    """Stacked shares of every document."""
    info = structure_info(topics.shares)
    chart = look.figure(_TOPICS_WIDTH_INCHES, _HEIGHT_INCHES)
    each = f"; means of {info.group} neighbours" if info.group > 1 else ""
    axes = look.add_axes(
        chart, (0.085, 0.27, 0.875, 0.61), title=f"shares of {topics.count} topics in {info.documents:,} documents",
        x=f"documents, sorted by their largest topic{each}", y="share", grid="",
    )  # fmt: skip
    edges = [min(place * info.group, info.documents) for place in range(len(info.heights) + 1)]
    colours = topic_colours(topics.count)
    with look.drawing():
        heights = [[*column, column[-1]] for column in info.heights.T.tolist()]
        axes.stackplot(edges, heights, colors=colours, step="post", linewidth=0)
        axes.set_xlim(0, info.documents)
        axes.set_ylim(0, 1)
        _draw_key(chart, colours)
    return chart


def _draw_key(chart: Figure, colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=str(topic)) for topic, colour in enumerate(colours[:_MOST_NAMED])]
    more = f" (the first {_MOST_NAMED})" if len(colours) > _MOST_NAMED else ""
    chart.legend(
        handles=handles, title=f"topic{more}", loc="lower left", bbox_to_anchor=(0.06, 0.0), ncols=12, fontsize=8,
        columnspacing=1.0, handlelength=0.9, handleheight=0.9, handletextpad=0.4, alignment="left", title_fontsize=8,
    )  # fmt: skip


def terms_figure(topics: Topics, count: int = 10, names: Sequence[str] | None = None) -> Figure:
    """The likeliest terms of each topic; all charts share one scale.

    Args:
        topics: What was found; at most 30 topics are drawn.
        count: Terms of each.
        names: Of all terms; their numbers without.

    Raises:
        ConfigError: as `terms_info`.
    """
    info = terms_info(topics.terms, count, names)
    shown = min(topics.count, _MOST_CHARTS)
    down = math.ceil(shown / _ACROSS)
    across = math.ceil(shown / down)
    height = 0.45 + down * max(_TOPICS_ROW_INCHES, 0.16 * count + 0.6)
    chart = look.figure(_TOPICS_WIDTH_INCHES, height)
    limit = 1.06 * max(row[0] for row in info.probabilities[:shown])
    colours = topic_colours(topics.count)
    for topic in range(shown):
        _draw_terms(chart, info, topic, _box(topic, across, down, height), limit, colours[topic])
    with look.drawing():
        more = f", of {topics.count} topics the first {shown}" if topics.count > shown else ""
        title = f"most likely terms and their probabilities{more}"
        chart.text(0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center")
    return chart


def _box(place: int, across: int, down: int, height: float) -> tuple[float, float, float, float]:
    """Where the chart of a topic stands, in fractions of the figure."""
    row, column = divmod(place, across)
    width, tall = 0.97 / across, (height - 0.35) / down
    bottom = height - 0.35 - (row + 1) * tall + 0.3
    return column * width + 0.062, bottom / height, width - 0.075, (tall - 0.6) / height


def _draw_terms(
    chart: Figure, info: TermsInfo, topic: int, box: tuple[float, float, float, float], limit: float, colour: str
) -> None:
    axes = look.add_axes(chart, box, title=f"topic {topic}", grid="x")
    places = range(len(info.names[topic]))
    with look.drawing():
        axes.barh(places, info.probabilities[topic], 0.75, color=colour, linewidth=0)
        axes.set_yticks(places, info.names[topic])
        axes.tick_params(labelsize=7, length=0)
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.set_xlim(0, limit)
        axes.locator_params(axis="x", nbins=3)


def topic_colours(count: int) -> list[str]:
    """A colour for each topic: the palette, then its tints, over and over."""
    from matplotlib.colors import to_hex, to_rgb

    found = []
    for topic in range(count):
        turn, place = divmod(topic, len(_PALETTE))
        tint = _TINTS[turn % len(_TINTS)]
        towards = 1.0 if tint > 0 else 0.0
        red, green, blue = (part + (towards - part) * abs(tint) for part in to_rgb(_PALETTE[place]))
        found.append(to_hex((red, green, blue)))
    return found
