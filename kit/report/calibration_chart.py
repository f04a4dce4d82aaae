"""calibration_figure: throughput of every loader setting that was tried, with the chosen one marked.

Batches per second, from zero, in the order in which the settings were tried; a whisker is the standard error. The
dashed line is what counts as enough, 90 % of the peak: the chosen setting is the cheapest that reaches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.plan.calibration import ENOUGH
from kit.report import figure as look
from kit.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.plan.calibration import Measurement
    from kit.run.calibration.result import Calibration

_ROW_INCHES, _EDGE_INCHES, _BARS_INCHES = 0.27, 0.85, 4.8
_LETTER_INCHES = 0.068


def calibration_figure(calibration: Calibration) -> Figure:
    """A bar for each setting, the first on top."""
    rows = max(1, len(calibration.measured))
    height = _EDGE_INCHES + _ROW_INCHES * rows
    names = [str(item.setting) for item in calibration.measured]
    left = 0.3 + _LETTER_INCHES * max(map(len, names), default=0)
    width = left + _BARS_INCHES
    figure = look.figure(width, height)
    rectangle = (left / width, 0.5 / height, 0.96 * _BARS_INCHES / width, (height - _EDGE_INCHES) / height)
    title = f"loader settings tried, in order; dashed: {ENOUGH:.0%} of the peak"
    axes = look.add_axes(figure, rectangle, title=title, x="batches/s", grid="x")
    with look.drawing():
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_yticks(range(len(names)))
        axes.set_yticklabels(names)
        for row in range(len(names)):
            _bar(axes, calibration, row)
        longest = max((item.batches_per_second + _whisker(item) for item in calibration.measured), default=0.0)
        axes.set_xlim(0, 1.25 * longest or 1.0)
        axes.axvline(ENOUGH * calibration.peak, linestyle="--", linewidth=1.1, color=look.INK)
    return figure


def _whisker(item: Measurement) -> float:
    """Batches per second; 0 where the error is not known."""
    return item.error * item.batches_per_second if item.error < 1 else 0.0


def _bar(axes: Axes, calibration: Calibration, row: int) -> None:
    item = calibration.measured[row]
    chosen = item.setting == calibration.chosen
    speed = item.batches_per_second
    axes.barh(row, speed, height=0.6, color=look.VERMILION if chosen else look.BLUE, alpha=1 if chosen else 0.7)
    error = _whisker(item)
    axes.errorbar(speed, row, xerr=error, color=look.INK, linewidth=0.9, capsize=2)
    axes.annotate(
        format_count(speed) + (" ← chosen" if chosen else ""), (speed + error, row), xytext=(5, 0),
        textcoords="offset points", va="center", fontsize=8, color=look.INK, annotation_clip=False,
    )  # fmt: skip
