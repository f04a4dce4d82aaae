"""placements_figure: seconds of an epoch for every placement, predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.report import figure as look
from kit.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.report.placements import Placements

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
