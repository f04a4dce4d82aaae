"""comparison_figure: small multiples, one panel a quantity, one row a config: bars are means, dots are single runs.

Bars start at zero, so that lengths compare. roofline_figure: achieved FLOP/s against FLOPs per byte under the roof of
the device, both axes logarithmic, and beside it what the step's time went to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kit.report import figure as look
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.report.comparison import Comparison, Quantity
    from kit.report.diagnosis import Diagnosis
    from kit.report.roofline import Roofline

_ROW_INCHES, _EDGE_INCHES = 0.5, 0.75
_NAMES_INCHES, _PANEL_INCHES, _GAP_INCHES = 1.9, 1.75, 0.3
_COLOURS = (look.GREEN, look.ORANGE, look.BLUE, look.PURPLE)


def comparison_figure(comparison: Comparison) -> Figure:
    """One panel for each quantity that some run has."""
    quantities = comparison.quantities
    width = _NAMES_INCHES + len(quantities) * (_PANEL_INCHES + _GAP_INCHES)
    height = _EDGE_INCHES + _ROW_INCHES * len(comparison.groups)
    figure = look.figure(width, height)
    for place, quantity in enumerate(quantities):
        left = (_NAMES_INCHES + place * (_PANEL_INCHES + _GAP_INCHES)) / width
        box = (left, 0.3 / height, _PANEL_INCHES / width, (height - _EDGE_INCHES) / height)
        axes = look.add_axes(figure, box, title=quantity.title, grid="x")
        with look.drawing():
            _panel(axes, comparison, quantity, _COLOURS[place % len(_COLOURS)])
            axes.set_yticks(range(len(comparison.groups)))
            axes.set_yticklabels([group.name for group in comparison.groups] if not place else [])
    return figure


def _panel(axes: Axes, comparison: Comparison, quantity: Quantity, colour: str) -> None:
    largest = 0.0
    for row, group in enumerate(comparison.groups):
        figure = group.figure(quantity.column)
        if not figure.values:
            continue
        largest = max(largest, *figure.values)
        axes.barh(row, figure.mean, height=0.5, color=colour)
        if len(figure.values) > 1:
            rows = [row] * len(figure.values)
            axes.plot(figure.values, rows, "o", color=look.INK, markersize=3, mec=look.PAPER, mew=0.5)
        axes.annotate(
            quantity.form(figure.mean), (max(figure.values), row), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, color=look.INK,
        )  # fmt: skip
    axes.set_ylim(len(comparison.groups) - 0.5, -0.5)
    axes.set_xlim(0, 1.6 * largest or 1.0)
    axes.set_xticks([])


def roofline_figure(diagnosis: Diagnosis) -> Figure:
    """The trial under the roof of its device.

    Raises:
        ValueError: when the trial has no roofline: its work was not counted, or the peaks are not known.
    """
    roofline = diagnosis.roofline
    if roofline is None:
        raise ValueError("no roofline: the trial's work was not counted (trial.count_work), or its peaks are not known")
    figure = look.figure(7.6, 3.4)
    axes = look.add_axes(
        figure, (0.1, 0.15, 0.5, 0.72), title=f"FLOP/s in {roofline.dtype}: MFU {roofline.mfu_fraction:.1%}",
        x="FLOPs per byte moved", grid="both",
    )  # fmt: skip
    parts = look.add_axes(figure, (0.76, 0.15, 0.2, 0.72), title="share of a step", grid="x")
    with look.drawing():
        _roof(axes, roofline)
        _parts(parts, roofline)
    return figure


def _roof(axes: Axes, roofline: Roofline) -> None:
    least, most = min(roofline.intensity, roofline.ridge) / 8, max(roofline.intensity, roofline.ridge) * 8
    peak, bandwidth = roofline.peak_flops_per_second, roofline.peak_bytes_per_second
    places = [least, roofline.ridge, most]
    axes.loglog(places, [min(peak, place * bandwidth) for place in places], color=look.INK)
    axes.plot(
        [roofline.intensity] * 2, [roofline.flops_per_second, roofline.roof_flops_per_second], ":", color=look.BLUE
    )
    axes.plot([roofline.intensity], [roofline.flops_per_second], "o", color=look.BLUE, markersize=8)
    axes.annotate(
        f"{format_count(roofline.flops_per_second)}FLOP/s", (roofline.intensity, roofline.flops_per_second),
        xytext=(8, -3), textcoords="offset points", color=look.BLUE, fontsize=8.5,
    )  # fmt: skip
    axes.annotate(
        f"compute: {format_count(peak)}FLOP/s", (most, peak), xytext=(-4, 4), textcoords="offset points", ha="right",
        fontsize=8.5, color=look.INK,
    )  # fmt: skip
    middle = math.sqrt(least * roofline.ridge)
    axes.annotate(
        f"memory:\n{format_bytes(bandwidth)}/s", (middle, middle * bandwidth), xytext=(-6, 4),
        textcoords="offset points", ha="right", fontsize=8.5, color=look.INK,
    )  # fmt: skip
    axes.set_xlim(least, most)
    axes.set_ylim(min(roofline.flops_per_second, least * bandwidth) / 4, peak * 3)


def _parts(axes: Axes, roofline: Roofline) -> None:
    shares = {
        "data": roofline.wait_fraction,
        "communication": roofline.communication_fraction,
        "compute": roofline.compute_fraction,
        "memory\nbandwidth": min(1.0, roofline.memory_fraction),
    }
    for row, (name, share) in enumerate(shares.items()):
        chosen = name.replace("\n", " ") == roofline.bound
        axes.barh(row, share, height=0.5, color=look.VERMILION if chosen else look.SKY)
        axes.annotate(f"{share:.0%}", (share, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(shares)))
    axes.set_yticklabels(list(shares))
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0, 1.25)
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
