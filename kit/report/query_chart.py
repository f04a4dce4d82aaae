"""query_figure: memory and time of reading a table, by the number of query chunks.

Left and middle, the peak of the reader's process and of the database, bars from zero: the measured bar is filled, the
predicted one an outline. Right, seconds of reading the whole table once. A number that could not be read keeps its
place, without bars; a database that does not tell keeps its panel, with a sentence. Below, what more query chunks do to
the database.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kit.report import figure as look
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.data.tables.query_check import QueryCheck

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
