"""The breakdown chart: what fills a device at the peak, one stacked bar per estimate, beside what was measured.

A bar ends at the allocated peak; the pale part behind it is what the allocator holds beyond that (reserved), the
bracket after it the range of what lies outside the allocator (context, libraries), the broken line the capacity. Bytes
throughout. `BreakdownChart` is made once and shown other estimates in place: its boxes never move, and its axis moves
in steps, so that a slider can drive it.

Refused: nothing. An incomplete estimate is drawn with what is known, and says that its activations are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.report import figure as look
from kit.report.memory_bar import (
    LEFT_FRACTION,
    LEGEND_EDGE_INCHES,
    LEGEND_LINE_INCHES,
    WIDTH_FRACTION,
    Bar,
    Legend,
    legend_lines,
)
from kit.report.memory_look import LOOKS, ticks_of
from kit.report.trial_charts import byte_limit
from kit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    from kit.plan.memory.estimate import MemoryEstimate

WIDTH_INCHES = 7.8
_ROW_INCHES, _MEASURED_INCHES, _AXIS_INCHES = 0.56, 0.16, 0.32
_SMALL_SHARE_OF_CAPACITY = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownInfo:
    """The numbers of one bar."""

    label: str
    parts: tuple[tuple[str, int], ...]
    """(category, bytes), in the order of CATEGORIES, none of them 0; they add up to `allocated_bytes`."""
    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: tuple[int, int]
    """(low, high), beyond the allocator."""
    capacity_bytes: int | None
    measured_bytes: int | None
    complete: bool
    elsewhere: tuple[str, ...] = ()
    """Categories that are empty at the peak, but not in the timeline drawn below the bar: the legend has them too."""

    @property
    def shows_outside(self) -> bool:
        """Whether what lies outside the allocator is drawn: beside a small model it would be most of the picture."""
        return 0 < self.outside_bytes[1] <= self.reserved_bytes

    @property
    def largest_bytes(self) -> float:
        """The most that any part of the bar reaches."""
        outside = self.outside_bytes[1] if self.shows_outside else 0
        return max(self.reserved_bytes + outside, self.allocated_bytes, self.measured_bytes or 0)

    @property
    def headline(self) -> str:
        """What stands above the bar."""
        total = f"{'' if self.complete else 'at least '}{format_bytes(self.allocated_bytes)}"
        parts = [f"{self.label}: {total}" if self.label else f"{total} allocated"]
        if self.reserved_bytes > self.allocated_bytes:
            parts.append(f"{format_bytes(self.reserved_bytes)} reserved")
        if not self.complete:
            parts.append("activations unknown")
        return " · ".join(parts)

    @property
    def measured_words(self) -> str:
        """`measured 1.1 GiB, ratio 0.98`; empty when nothing was measured."""
        if self.measured_bytes is None:
            return ""
        ratio = f", ratio {self.measured_bytes / self.allocated_bytes:.3f}" if self.allocated_bytes else ""
        return f"measured {format_bytes(self.measured_bytes)}{ratio}"

    @property
    def sentence(self) -> str:
        """The bar in words, for those who do not see it."""
        shares = ", ".join(f"{LOOKS[name].label} {format_bytes(part)}" for name, part in self.parts)
        capacity = "" if self.capacity_bytes is None else f"; capacity {format_bytes(self.capacity_bytes)}"
        measured = f"; {self.measured_words}" if self.measured_words else ""
        return f"{self.headline} at the peak: {shares}{capacity}{measured}."


def breakdown_info(
    estimate: MemoryEstimate, label: str = "", measured_bytes: int | None = None, *, above_timeline: bool = False
) -> BreakdownInfo:
    """An estimate as the numbers of one bar; `above_timeline` when its legend serves a timeline too."""
    parts = tuple((name, estimate.breakdown[name]) for name in LOOKS if estimate.breakdown.get(name, 0))
    return BreakdownInfo(
        label=label, parts=parts, allocated_bytes=estimate.device_allocated_bytes,
        reserved_bytes=estimate.device_reserved_bytes, outside_bytes=estimate.outside_bytes,
        capacity_bytes=estimate.capacity_bytes, measured_bytes=measured_bytes, complete=estimate.complete,
        elsewhere=tuple(name for name in estimate.timeline.categories if name not in dict(parts) and above_timeline),
    )  # fmt: skip


def breakdown_limit(infos: Sequence[BreakdownInfo]) -> float:
    """The end of the axis: a little beyond the capacity where that leaves the bars readable, else beyond the bars."""
    largest = max(info.largest_bytes for info in infos)
    capacity = max((info.capacity_bytes or 0 for info in infos), default=0)
    if capacity * _SMALL_SHARE_OF_CAPACITY <= largest <= capacity:
        return capacity * 1.1
    return byte_limit(largest)


def breakdown_height(rows: int, *, measured: bool, legend_lines: int) -> float:
    """Inches of a chart of so many bars."""
    legend = legend_lines * LEGEND_LINE_INCHES + 2 * LEGEND_EDGE_INCHES
    return rows * (_ROW_INCHES + (_MEASURED_INCHES if measured else 0)) + _AXIS_INCHES + legend


class BreakdownChart:
    """Bars below each other, their number fixed; `show` turns them to other estimates.

    Args:
        rows: Number of bars.
        measured: Whether there is room for a measured bar below each.
        legend_lines: Lines of the legend.
        figure: What it is drawn in, as high as `breakdown_height` says; by default a figure of its own.
    """

    def __init__(
        self,
        rows: int = 1,
        *,
        measured: bool = False,
        legend_lines: int = 4,
        figure: Figure | SubFigure | None = None,
    ) -> None:
        self._row_inches = _ROW_INCHES + (_MEASURED_INCHES if measured else 0)
        bars, legend = rows * self._row_inches, legend_lines * LEGEND_LINE_INCHES + 2 * LEGEND_EDGE_INCHES
        self.height_inches = breakdown_height(rows, measured=measured, legend_lines=legend_lines)
        self.figure = figure or look.figure(WIDTH_INCHES, self.height_inches)
        bottom = (legend + _AXIS_INCHES) / self.height_inches
        self.axes = look.add_axes(
            self.figure, (LEFT_FRACTION, bottom, WIDTH_FRACTION, bars / self.height_inches), grid=""
        )
        with look.drawing():
            self.axes.set_ylim(rows * self._row_inches, 0)
            self.axes.set_xticks([])
            self.axes.set_yticks([])
            self.axes.spines["left"].set_visible(False)
            self._bars = [Bar(self.axes, place * self._row_inches, measured) for place in range(rows)]
            self._legend = Legend(self.figure, legend / self.height_inches, self.height_inches)
        self._infos: tuple[BreakdownInfo, ...] = ()

    def show(self, infos: Sequence[BreakdownInfo]) -> None:
        """Draw these, one a bar."""
        self._infos = tuple(infos)
        limit = breakdown_limit(infos)
        with look.drawing():
            places, words, unit = ticks_of(limit)
            self.axes.set_xlim(0, limit)
            self.axes.set_xticks(places, [*words[:-1], f"{words[-1]} {unit}"])
            for bar, info in zip(self._bars, infos, strict=True):
                bar.show(info, limit)
            self._legend.show(infos)

    @property
    def sentence(self) -> str:
        """The chart in words."""
        return " ".join(info.sentence for info in self._infos) or "Breakdown of memory: nothing predicted yet."

    def svg(self) -> str:
        """The chart as inline SVG that takes its colours from the page."""
        return look.svg(look.root(self.figure), self.sentence)


def draw_breakdown(estimates: Mapping[str, MemoryEstimate], measured: Sequence[int | None]) -> Figure:
    """The finished chart of estimates by the words above their bars; missing measured peaks are None."""
    peaks = [*measured, *[None] * (len(estimates) - len(measured))]
    pairs = zip(estimates.items(), peaks, strict=True)
    infos = [breakdown_info(estimate, label, peak) for (label, estimate), peak in pairs]
    with_measured = any(peak is not None for peak in peaks)
    chart = BreakdownChart(len(infos), measured=with_measured, legend_lines=legend_lines(infos))
    chart.show(infos)
    return look.root(chart.figure)
