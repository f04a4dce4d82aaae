"""The timeline chart: what a device holds from moment to moment, by category, with the peak marked and named.

The clock is bytes: a moment lies where as many bytes have been allocated since the first batch, as a fraction of all
that are allocated until the end. A prediction has no seconds and a measurement has, but both allocate the same blocks
in the same order, so on this clock they lie on top of each other where the prediction is right. Heights are allocated
bytes. Of every stretch of the clock the highest moment is kept, so the peak is never averaged away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.charts import style as look
from kit.charts.memory import (
    LOOKS,
    WIDTH_INCHES,
    BreakdownChart,
    breakdown_height,
    breakdown_info,
    draw_breakdown,
    legend_lines,
    peak_words,
    ticks_of,
)
from kit.charts.trial import byte_limit
from kit.records.row import measured_of, predicted_of
from kit.trial.trial import Trial
from kit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    from kit.memory.replay.estimate import MeasuredMemory, MemoryEstimate


LARGEST_SERIES = 400
"""More than one point a pixel cannot be seen, and makes the chart slow to send."""
_LEFT, _AXES_WIDTH = 0.075, 0.885
_AXES_INCHES, _TITLE_INCHES, _STRIP_INCHES, _LABEL_INCHES, _LEGEND_LINE_INCHES = 1.95, 0.34, 0.17, 0.30, 0.22
_LEGEND_COLUMNS = 4
_LONGEST_TITLE = 92
PREDICTED_STEPS = 2
"""Optimizer steps of a dry run, after which the clock of a prediction ends, or a validation follows."""
_STRIP_SHADES = {"setup": 0.04, "forward": 0.10, "backward": 0.20, "optimizer": 0.32, "validation": 0.15, "other": 0.04}
_SMALLEST_SPAN_FRACTION = 0.003

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineInfo:
    """The numbers of the chart."""

    clock: Floats
    """(points,) in fractions, rising."""
    category_bytes: dict[str, Floats]
    """Category → (points,), in the order of CATEGORIES; they add up to the allocated bytes."""
    peak_clock: float
    peak_bytes: int
    peak_words: str
    """`4.2 GiB in backward, at aten::mm in layers.3`."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """(phase, start, end) on the clock."""
    capacity_bytes: int | None = None
    measured_clock: Floats = field(default_factory=lambda: np.zeros(0))
    measured_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    ran_out: bool = False
    """Whether memory ran out where what was measured ends."""

    @property
    def measured_peak_bytes(self) -> int | None:
        return int(self.measured_bytes.max()) if len(self.measured_bytes) else None

    @property
    def largest_bytes(self) -> float:
        return max(self.peak_bytes, self.measured_peak_bytes or 0)

    @property
    def sentence(self) -> str:
        """The chart in words, for those who do not see it."""
        text = f"Allocated bytes over time by category. The peak is {self.peak_words}"
        if self.measured_peak_bytes is not None:
            text += f"; measured {format_bytes(self.measured_peak_bytes)}"
        return text + "."


def timeline_height(legend_lines: int) -> float:
    """Inches of a chart with so many lines of legend."""
    legend = legend_lines * _LEGEND_LINE_INCHES + (0.08 if legend_lines else 0)
    return _TITLE_INCHES + _AXES_INCHES + _STRIP_INCHES + _LABEL_INCHES + legend


class TimelineChart:
    """One figure, made once; `show` turns it to another timeline.

    Args:
        legend_lines: Lines of the legend; none where a legend stands above the chart.
        figure: What it is drawn in, as high as `timeline_height` says; by default a figure of its own.
    """

    def __init__(self, *, legend_lines: int = 0, figure: Figure | SubFigure | None = None) -> None:
        from matplotlib.collections import PolyCollection

        height = timeline_height(legend_lines)
        legend = height - timeline_height(0)
        self.figure = figure or look.figure(WIDTH_INCHES, height)
        low = (legend + _LABEL_INCHES) / height
        box = (_LEFT, low + _STRIP_INCHES / height, _AXES_WIDTH, _AXES_INCHES / height)
        self.axes = look.add_axes(self.figure, box)
        self._strip = look.add_axes(self.figure, (_LEFT, low, _AXES_WIDTH, _STRIP_INCHES / height), grid="")
        self._legend_top = legend / height
        self._info: TimelineInfo | None = None
        self._spans: list[Any] = []
        with look.drawing():
            for axes in (self.axes, self._strip):
                axes.set_xlim(0, 1)
                axes.set_xticks([])
                axes.set_yticks([])
            self._strip.set_ylim(0, 1)
            self._strip.spines["left"].set_visible(False)
            self._strip.set_xlabel("time, in bytes allocated so far", labelpad=3)
            self._areas = {name: PolyCollection([], **_area(name)) for name in LOOKS}
            for area in self._areas.values():
                self.axes.add_collection(area, autolim=False)
            (self._measured,) = self.axes.plot([], [], color=look.INK, linewidth=1.3, zorder=4, label="measured")
            (self._capacity,) = self.axes.plot([], [], color=look.INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
            (self._peak,) = self.axes.plot(
                [], [], "o", markersize=8, color=look.INK, markeredgecolor=look.PAPER, markeredgewidth=1.5, zorder=6,
                clip_on=False,
            )  # fmt: skip
            self._note = self.axes.text(
                1, 0.985, "", transform=self.axes.transAxes, ha="right", va="top", fontsize=8.5,
                bbox={"facecolor": look.PAPER, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip

    def show(self, info: TimelineInfo) -> None:
        """Draw this timeline."""
        self._info = info
        limit = byte_limit(info.largest_bytes)
        places, words, unit = ticks_of(limit)
        title = f"allocated, {unit}. ● peak: {info.peak_words}"
        with look.drawing():
            self.axes.set_ylim(0, limit)
            self.axes.set_yticks(places, words)
            self.axes.set_title(title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…", y=1.0)
            low = np.zeros(len(info.clock))
            for name, area in self._areas.items():
                high = low + info.category_bytes.get(name, 0.0)
                outline = np.column_stack([[*info.clock, *info.clock[::-1]], [*high, *low[::-1]]])
                area.set_verts([outline] if name in info.category_bytes else [])
                low = high
            self._measured.set_data(info.measured_clock, info.measured_bytes)
            self._measured.set(marker="X" if info.ran_out else "", markevery=[-1], markersize=8)
            self._peak.set_data([info.peak_clock], [info.peak_bytes])
            self._mark_capacity(info, limit)
            self._draw_spans(info.spans)
            self._draw_legend(info)

    def _mark_capacity(self, info: TimelineInfo, limit: float) -> None:
        capacity, words = info.capacity_bytes, []
        inside = capacity is not None and capacity <= limit
        self._capacity.set_data(*(([0, 1], [capacity] * 2) if inside else ((), ())))
        if capacity is not None:
            words.append(f"{'- - ' if inside else '↑ '}capacity {format_bytes(capacity)}")
        if info.measured_peak_bytes is not None:
            words.append(f"— measured, peak {format_bytes(info.measured_peak_bytes)}")
        self._note.set_text("   ".join(words))

    def _draw_spans(self, spans: Sequence[tuple[str, float, float]]) -> None:
        while self._spans:
            self._spans.pop().remove()
        words: Any = {"fontsize": 7.5, "ha": "center", "va": "center_baseline", "color": look.INK}
        for phase, start, end in spans:
            shade = _STRIP_SHADES.get(phase, 0.04)
            self._spans.append(self._strip.axvspan(start, end, color=look.INK, alpha=shade, linewidth=0))
            if end - start > 0.0115 * len(phase):
                self._spans.append(self._strip.text((start + end) / 2, 0.45, phase, **words))

    def _draw_legend(self, info: TimelineInfo) -> None:
        from matplotlib.patches import Patch

        if self.figure.legends:
            self.figure.legends[0].remove()
        if not self._legend_top:
            return
        signs = [Patch(**_area(name), label=LOOKS[name].label) for name in info.category_bytes]
        lines = [self._measured] if len(info.measured_clock) else []
        self.figure.legend(
            handles=[*signs, *lines], loc="upper left", bbox_to_anchor=(_LEFT, self._legend_top), ncols=_LEGEND_COLUMNS,
            borderaxespad=0, borderpad=0, columnspacing=1.6, handlelength=1.7,
        )  # fmt: skip

    @property
    def sentence(self) -> str:
        return self._info.sentence if self._info else "Allocated bytes over time: nothing predicted yet."

    def svg(self) -> str:
        """The chart as inline SVG that takes its colours from the page."""
        return look.svg(look.root(self.figure), self.sentence)


def timeline_info(estimate: MemoryEstimate, measured: MeasuredMemory | None = None) -> TimelineInfo:
    """An estimate, and what was measured if anything was, as the numbers of the chart."""
    line = estimate.timeline
    bytes_so_far = np.array(line.clock_bytes, dtype=np.float64)
    total = np.array(line.allocated_bytes, dtype=np.float64)
    clock = bytes_so_far / max(1.0, bytes_so_far.max(initial=0.0))
    kept = thin(clock, total)
    shown = [name for name in LOOKS if any(line.categories.get(name, ()))]
    measured_clock = measured_bytes = np.zeros(0)
    if measured is not None:  # on the clock of a prediction, which ends after two optimizer steps
        trained = [place for place, phase in enumerate(line.phases) if phase != "validation"]
        end = clock[trained[-1]] if trained else 1.0  # a validation may follow, which was not measured with them
        over = measured.clock * (max(1, measured.optimizer_steps) / PREDICTED_STEPS) * end
        inside = over <= 1
        over, held = over[inside], measured.allocated_bytes[inside].astype(np.float64)
        places = thin(over, held)
        measured_clock, measured_bytes = over[places], held[places]
    return TimelineInfo(
        clock=clock[kept],
        category_bytes={name: np.array(line.categories[name], dtype=np.float64)[kept] for name in shown},
        peak_clock=float(clock[line.peak]) if len(clock) else 0.0,
        peak_bytes=estimate.device_allocated_bytes, peak_words=peak_words(estimate),
        spans=_spans(clock, line.phases), capacity_bytes=estimate.capacity_bytes,
        measured_clock=measured_clock, measured_bytes=measured_bytes,
    )  # fmt: skip


def _spans(clock: Floats, phases: Sequence[str]) -> tuple[tuple[str, float, float], ...]:
    """Stretches of one phase that can be seen; what is too short goes to the one before it."""
    spans: list[tuple[str, float, float]] = []
    for place, phase in enumerate(phases):
        end = float(clock[place + 1]) if place + 1 < len(clock) else 1.0
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], end)
        elif end > clock[place]:
            spans.append((phase, float(clock[place]), end))
    return tuple(span for span in spans if span[2] - span[1] >= _SMALLEST_SPAN_FRACTION)


def thin(clock: Floats, height: Floats, most: int = LARGEST_SERIES) -> NDArray[np.int64]:
    """Places of at most `most` points to draw: the highest of each stretch of the clock, in order.

    Args:
        clock: (points,) rising, between 0 and 1.
        height: (points,) what must keep its peaks.
    """
    stretch = np.minimum((clock * most).astype(np.int64), most - 1)
    order = np.lexsort((height, stretch))
    ends = np.flatnonzero(np.append(np.diff(stretch[order]) > 0, True)) if len(order) else order
    return order[ends]


def _area(name: str) -> dict[str, Any]:
    style = LOOKS[name]
    return {"facecolor": style.colour, "hatch": style.hatch, "edgecolor": look.PAPER, "linewidth": 0.0}


def breakdown_figure(
    estimates: MemoryEstimate | Trial | Sequence[MemoryEstimate] | Mapping[str, MemoryEstimate],
    measured: int | Sequence[int | None] | None = None,
) -> Figure:
    """What fills the device at the peak, one stacked bar per estimate, with the measured peak below it if there is one.

    Args:
        estimates: One, a list, a mapping whose keys are written above the bars, or a trial.
        measured: Measured allocated peaks in bytes, in the same order; None for those without.

    Raises:
        TrialError: for a trial without a prediction.
    """
    if isinstance(estimates, Trial):
        found = measured_of(estimates)
        return draw_breakdown({"": predicted_of(estimates)}, [None if found is None else found.peak_bytes])
    if isinstance(estimates, Mapping):
        named = dict(estimates)
    else:
        listed = list(estimates) if isinstance(estimates, Sequence) else [estimates]
        named = {str(place) if len(listed) > 1 else "": estimate for place, estimate in enumerate(listed, 1)}
    peaks = [measured] if measured is None or isinstance(measured, int) else list(measured)
    return draw_breakdown(named, peaks)


def timeline_figure(subject: MemoryEstimate | Trial, measured: MeasuredMemory | None = None) -> Figure:
    """Allocated bytes over two optimizer steps, stacked by category, with the peak marked and named.

    Args:
        subject: What was predicted, or a trial, which has been predicted and measured.
        measured: What the allocator did in a real fit, laid over the prediction: both are drawn against the bytes
            allocated so far, a clock they share.

    Raises:
        TrialError: for a trial without a prediction.
    """
    return draw_timeline(timeline_info(*_predicted_and_measured(subject, measured)))


def draw_timeline(info: TimelineInfo) -> Figure:
    """The chart of these numbers, with its legend."""
    entries = len(info.category_bytes) + bool(len(info.measured_clock))
    chart = TimelineChart(legend_lines=-(-entries // _LEGEND_COLUMNS))
    chart.show(info)
    return look.root(chart.figure)


def memory_figure(subject: MemoryEstimate | Trial, measured: MeasuredMemory | None = None) -> Figure:
    """The breakdown at the peak above the timeline, with one legend; takes and raises what `timeline_figure` does."""
    estimate, measured = _predicted_and_measured(subject, measured)
    peak = None if measured is None else measured.peak_bytes
    info = breakdown_info(estimate, measured_bytes=peak, above_timeline=True)
    lines, with_bar = legend_lines([info]), measured is not None
    heights = breakdown_height(1, measured=with_bar, legend_lines=lines), timeline_height(0)
    whole = look.figure(WIDTH_INCHES, sum(heights))
    with look.drawing():
        grid = whole.add_gridspec(2, 1, height_ratios=heights, left=0, right=1, bottom=0, top=1, hspace=0)
        upper, lower = (whole.add_subfigure(cell) for cell in (grid[0], grid[1]))
    BreakdownChart(1, measured=with_bar, legend_lines=lines, figure=upper).show([info])
    TimelineChart(figure=lower).show(timeline_info(estimate, measured))
    return whole


def _predicted_and_measured(
    subject: MemoryEstimate | Trial, measured: MeasuredMemory | None
) -> tuple[MemoryEstimate, MeasuredMemory | None]:
    if isinstance(subject, Trial):
        return predicted_of(subject), measured or measured_of(subject)
    return subject, measured
