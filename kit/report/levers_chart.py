"""levers_figure: memory and speed of every rung of a ladder; sequence_figure: memory against the length of a sequence.

Bars start at zero, so that lengths compare; the measured bar is filled, the predicted one an outline. Memory is bytes
on one device, speed samples a second of all devices. A rung that did not run keeps its row, without bars. Lengths are
positions, on a scale that starts at zero: what grows in proportion is a straight line through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kit.report import figure as look
from kit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.run.levers_check import LeversCheck, Rung
    from kit.run.sequence_check import SequenceCheck

_ROW_INCHES, _EDGE_INCHES = 0.5, 0.75
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


def _curve(axes: Axes, name: str, rungs: Mapping[int, Rung], colour: str, dashes: str) -> None:
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
