"""comparison_figure: small multiples, one panel a quantity, one row a config: bars are means, dots are single runs.

Bars start at zero, so that lengths compare. roofline_figure: achieved FLOP/s against FLOPs per byte under the roof of
the device, both axes logarithmic, and beside it what the step's time went to.

levers_figure: memory and speed of every rung of a ladder; sequence_figure: memory against the length of a sequence.

Bars start at zero, so that lengths compare; the measured bar is filled, the predicted one an outline. Memory is bytes
on one device, speed samples a second of all devices. A rung that did not run keeps its row, without bars. Lengths are
positions, on a scale that starts at zero: what grows in proportion is a straight line through it.

calibration_figure: throughput of every loader setting that was tried, with the chosen one marked.

Batches per second, from zero, in the order in which the settings were tried; a whisker is the standard error. The
dashed line is what counts as enough, 90 % of the peak: the chosen setting is the cheapest that reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.studies.calibration.rules import ENOUGH
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.studies.calibration.result import Calibration
    from kit.studies.calibration.rules import Measurement
    from kit.studies.compare import Comparison, Quantity
    from kit.studies.diagnosis.diagnose import Diagnosis, Roofline
    from kit.studies.levers import LeversCheck, LeverStep, SequenceCheck

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


_WIDTH_INCHES = 8.6


def levers_figure(check: LeversCheck) -> Figure:
    """Two panels with a row for each rung, the first on top."""
    height = _EDGE_INCHES + _ROW_INCHES * len(check.rungs)
    figure = look.figure(_WIDTH_INCHES, height)
    bottom, tall = 0.48 / height, (height - _EDGE_INCHES) / height
    memory = look.add_axes(
        figure, (0.24, bottom, 0.38, tall), title="peak allocated on a device, MiB (outline: predicted)", grid="x"
    )
    speed = look.add_axes(figure, (0.68, bottom, 0.27, tall), title="samples a second", grid="x")
    with look.drawing():
        for axes in (memory, speed):
            axes.set_ylim(len(check.rungs) - 0.5, -0.5)
            axes.set_yticks(range(len(check.rungs)))
        memory.set_yticklabels([rung.name for rung in check.rungs])
        speed.set_yticklabels([])
        for row, rung in enumerate(check.rungs):
            _memory_row(memory, row, rung)
            if rung.samples_per_second is not None:
                speed.barh(row, rung.samples_per_second, height=0.42, color=look.GREEN)
                _say(speed, row, rung.samples_per_second, f"{rung.samples_per_second:,.0f}")
        _leave_room(memory)
        _leave_room(speed)
    return figure


def sequence_figure(check: SequenceCheck) -> Figure:
    """Peak against the length of a sequence, whole and in chunks: lines are predicted, dots are measured."""
    figure = look.figure(6.8, 3.4)
    title = "peak allocated on a device, MiB (line: predicted, dots: measured)"
    axes = look.add_axes(figure, (0.1, 0.16, 0.68, 0.72), title=title, x="positions of a sequence", grid="both")
    with look.drawing():
        axes.set_xlim(0, 1.06 * check.lengths[-1])
        for place, (name, rungs) in enumerate(check.curves.items()):
            _curve(axes, name, rungs, look.COLOURS[place], look.DASHES[place])
        axes.set_ylim(bottom=0)
        axes.set_xticks([0, *check.lengths])
    return figure


def _curve(axes: Axes, name: str, rungs: Mapping[int, LeverStep], colour: str, dashes: str) -> None:
    predicted = {length: rung.predicted_bytes / 2**20 for length, rung in rungs.items() if rung.predicted_bytes}
    measured = {length: rung.measured_bytes / 2**20 for length, rung in rungs.items() if rung.measured_bytes}
    axes.plot(list(predicted), list(predicted.values()), dashes, color=colour)
    axes.plot(list(measured), list(measured.values()), "o", color=colour, label=name)
    for end, height in list((measured or predicted).items())[-1:]:
        ratio = rungs[end].ratio
        text = name if ratio is None else f"{name}\nratio {ratio:.3f}"
        axes.annotate(
            text, (end, height), xytext=(10, 0), textcoords="offset points", va="center", color=colour,
            annotation_clip=False,
        )  # fmt: skip


def _memory_row(axes: Axes, row: int, rung: Any) -> None:
    measured, predicted = rung.measured_bytes, rung.predicted_bytes
    if measured is not None:
        axes.barh(row, measured / 2**20, height=0.42, color=look.BLUE)
    if predicted is not None:
        axes.barh(row, predicted / 2**20, height=0.58, fill=False, edgecolor=look.INK, linewidth=1.1)
    longest = max((value for value in (measured, predicted) if value is not None), default=0)
    ratio = "" if rung.ratio is None else f" · ratio {rung.ratio:.2f}"
    _say(axes, row, longest / 2**20, "did not run" if measured is None else format_bytes(measured) + ratio)


def _say(axes: Axes, row: int, end: float, text: str) -> None:
    axes.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=look.INK)


def _leave_room(axes: Axes) -> None:
    """Words stand right of the bars."""
    longest = max((bar.get_width() for bars in axes.containers for bar in bars), default=0.0)
    axes.set_xlim(0, 1.75 * longest or 1.0)


_CALIBRATION_ROW_INCHES, _CALIBRATION_EDGE_INCHES, _BARS_INCHES = 0.27, 0.85, 4.8
_LETTER_INCHES = 0.068


def calibration_figure(calibration: Calibration) -> Figure:
    """A bar for each setting, the first on top."""
    rows = max(1, len(calibration.measured))
    height = _CALIBRATION_EDGE_INCHES + _CALIBRATION_ROW_INCHES * rows
    names = [str(item.setting) for item in calibration.measured]
    left = 0.3 + _LETTER_INCHES * max(map(len, names), default=0)
    width = left + _BARS_INCHES
    figure = look.figure(width, height)
    rectangle = (left / width, 0.5 / height, 0.96 * _BARS_INCHES / width, (height - _CALIBRATION_EDGE_INCHES) / height)
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
