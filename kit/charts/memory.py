"""The breakdown chart: what fills a device at the peak, one stacked bar per estimate, beside what was measured.

A bar ends at the allocated peak; the pale part behind it is what the allocator holds beyond that (reserved), the
bracket after it the range of what lies outside the allocator (context, libraries), the broken line the capacity. All
numbers are bytes: MiB below one GiB. `BreakdownChart` is made once and shown other estimates in place: its boxes never
move, and its axis grows in steps, so that a slider can drive it. An incomplete estimate is drawn as far as it is known,
and says so.

Every chart, bar and table of memory takes its looks from `LOOKS`: colours are families (what the model holds, what
training adds, what passes through), patterns are members of one, so that no category is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.charts.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from kit.charts.trial import byte_limit
from kit.memory.replay.replay import CATEGORIES
from kit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from kit.memory.replay.estimate import MemoryEstimate

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
    legend = legend_lines * _LEGEND_LINE_INCHES + 2 * _LEGEND_EDGE_INCHES
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
        self, rows: int = 1, *, measured: bool = False, legend_lines: int = 4, figure: Figure | SubFigure | None = None
    ) -> None:
        height = breakdown_height(rows, measured=measured, legend_lines=legend_lines)
        row = _ROW_INCHES + (_MEASURED_INCHES if measured else 0)
        legend = legend_lines * _LEGEND_LINE_INCHES + 2 * _LEGEND_EDGE_INCHES
        self.figure = figure or look.figure(WIDTH_INCHES, height)
        box = (_LEFT_FRACTION, (legend + _AXIS_INCHES) / height, _WIDTH_FRACTION, rows * row / height)
        self.axes = look.add_axes(self.figure, box, grid="")
        with look.drawing():
            self.axes.set_ylim(rows * row, 0)
            self.axes.set_xticks([])
            self.axes.set_yticks([])
            self.axes.spines["left"].set_visible(False)
            self._bars = [_Bar(self.axes, place * row, measured) for place in range(rows)]
            self._legend = _Legend(self.figure, legend / height, height)
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


_LEFT_FRACTION, _WIDTH_FRACTION = 0.025, 0.935
_LEGEND_LINE_INCHES, _LEGEND_EDGE_INCHES = 0.205, 0.06
_LEGEND_COLUMNS = 3
_SMALLEST_LABEL_FRACTION, _LETTER_FRACTION = 0.075, 0.0105
_RESERVE, _OUTSIDE = "reserved, not allocated", "outside the allocator"
_RESERVE_FILL: dict[str, Any] = {"facecolor": look.INK, "alpha": 0.13, "edgecolor": "none", "linewidth": 0}
_OUTSIDE_FILL: dict[str, Any] = {"edgecolor": look.INK, "linewidth": 1.1, "alpha": 0.75}


class _Bar:
    """One row: words, the stacked bar, the allocator's reserve, the range outside, the capacity, the measured bar."""

    def __init__(self, axes: Axes, top: float, measured: bool) -> None:
        from matplotlib.patches import Rectangle

        def patch(low: float, height: float, **style: Any) -> Any:
            return axes.add_patch(Rectangle((0, low), 0, height, **style))

        low, high = self._low, self._high = top + 0.22, top + 0.47
        words: Any = {"va": "baseline", "transform": axes.get_yaxis_transform()}
        label: Any = {"fontsize": 8, "ha": "center", "va": "center_baseline", "visible": False}
        self.title = axes.text(0, top + 0.14, "", fontsize=9.5, **words)
        self.note = axes.text(1, top + 0.14, "", fontsize=8.5, ha="right", **words)
        self.reserve = patch(low, high - low, **_RESERVE_FILL)
        self.parts = {name: patch(low, high - low, **_fill(name)) for name in LOOKS}
        self.labels = {
            name: axes.text(
                0, (low + high) / 2, style.label, color=style.text_colour, **label,
                bbox={"facecolor": style.colour, "linewidth": 0, "pad": 1.5} if style.hatch else None,
            ) for name, style in LOOKS.items()
        }  # fmt: skip
        (self.outside,) = axes.plot([], [], color=look.INK, linewidth=1.1, marker="|", markersize=8, alpha=0.75)
        (self.capacity,) = axes.plot([], [], color=look.INK, linewidth=1.4, linestyle=(0, (4, 2)), zorder=5)
        self.measured = patch(high + 0.035, 0.085, facecolor=look.INK, linewidth=0) if measured else None

    def show(self, info: BreakdownInfo, limit: float) -> None:
        capacity, words = info.capacity_bytes, info.measured_words
        if capacity is not None:
            arrow = "" if capacity <= limit else " →"
            words += f"{' · ' if words else ''}capacity {format_bytes(capacity)}{arrow}"
        self.title.set_text(info.headline)
        self.note.set_text(words)
        self.reserve.set_width(info.reserved_bytes)
        start, parts = 0, dict(info.parts)
        for name, patch in self.parts.items():
            width = parts.get(name, 0)
            patch.set(x=start, width=width, visible=width > 0)
            least = max(_SMALLEST_LABEL_FRACTION, _LETTER_FRACTION * len(LOOKS[name].label))
            self.labels[name].set(x=start + width / 2, visible=width >= limit * least)
            start += width
        low, high = (info.reserved_bytes + part for part in info.outside_bytes)
        middle = (self._low + self._high) / 2
        self.outside.set_data(*(([low, high], [middle, middle]) if info.shows_outside else ((), ())))
        inside, ends = capacity is not None and capacity <= limit, [self._low - 0.05, self._high + 0.05]
        self.capacity.set_data(*(([capacity] * 2, ends) if inside else ((), ())))
        if self.measured is not None:
            self.measured.set_width(info.measured_bytes or 0)


class _Legend:
    """Signs and words in columns below the axis: the category of each colour, and for a single bar its size."""

    def __init__(self, figure: Figure | SubFigure, top: float, height_inches: float) -> None:
        from matplotlib.patches import Rectangle

        self._line, self._top = _LEGEND_LINE_INCHES / height_inches, top - _LEGEND_EDGE_INCHES / height_inches
        size = (0.022, 0.115 / height_inches)
        fills = {**{name: _fill(name) for name in LOOKS}, _RESERVE: _RESERVE_FILL, _OUTSIDE: _OUTSIDE_FILL}
        self.signs = {name: Rectangle((0, 0), *size, transform=figure.transSubfigure, **fills[name]) for name in fills}
        self.words = {name: figure.text(0, 0, "", fontsize=8.5, va="baseline") for name in fills}
        self.signs[_OUTSIDE].set_height(0)  # a level line, as the bracket is
        for sign in self.signs.values():
            figure.add_artist(sign)

    def show(self, infos: Sequence[BreakdownInfo]) -> None:
        present, lines = legend_entries(infos), legend_lines(infos)
        for name, sign in self.signs.items():
            sign.set_visible(name in present)
            self.words[name].set_visible(name in present)
        for place, name in enumerate(present):
            column, line = divmod(place, lines)
            left = _LEFT_FRACTION + column * _WIDTH_FRACTION / _LEGEND_COLUMNS
            low = self._top - (line + 0.75) * self._line
            self.signs[name].set_xy((left, low + (0.25 * self._line if name == _OUTSIDE else 0)))
            self.words[name].set_position((left + 0.03, low))
            label = LOOKS[name].label if name in LOOKS else name
            self.words[name].set_text(f"{label}  {_size_words(name, infos[0])}" if len(infos) == 1 else label)


def legend_entries(infos: Sequence[BreakdownInfo]) -> list[str]:
    """The categories and marks in the bars, in the order in which they are drawn."""
    names = {name for info in infos for name in (*dict(info.parts), *info.elsewhere)}
    present = [name for name in LOOKS if name in names]
    present += [_RESERVE] if any(info.reserved_bytes > info.allocated_bytes for info in infos) else []
    return [*present, *([_OUTSIDE] if any(info.outside_bytes[1] for info in infos) else [])]


def legend_lines(infos: Sequence[BreakdownInfo]) -> int:
    """Lines that the legend of these bars takes."""
    return max(1, math.ceil(len(legend_entries(infos)) / _LEGEND_COLUMNS))


def _size_words(name: str, info: BreakdownInfo) -> str:
    """`1.2 GiB  (34%)`, and of the range outside the allocator `300–700 MiB`."""
    if name == _RESERVE:
        return format_bytes(info.reserved_bytes - info.allocated_bytes)
    if name == _OUTSIDE:
        low, high = map(format_bytes, info.outside_bytes)
        number, _, unit = low.partition(" ")
        return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"
    part = dict(info.parts).get(name, 0)
    if not part:
        return "none at the peak"
    share = part / info.allocated_bytes
    return f"{format_bytes(part)}  ({f'{share:.0%}' if share >= 0.01 else '< 1%'})"


def _fill(name: str) -> dict[str, Any]:
    """A pattern is drawn in the page's background, and so is the rim between neighbours."""
    style = LOOKS[name]
    return {"facecolor": style.colour, "hatch": style.hatch, "edgecolor": look.PAPER, "linewidth": 0.6}


_DARK, _LIGHT = "#1a1a1a", "#ffffff"
_TICKS = 6
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class CategoryLook:
    """How one category is drawn."""

    label: str
    colour: str
    hatch: str = ""
    """Matplotlib's pattern; empty for a plain area."""
    text_colour: str = _LIGHT
    """Readable on `colour`, in either theme."""


LOOKS = {
    "parameters": CategoryLook("parameters", BLUE),
    "buffers": CategoryLook("buffers", BLUE, "..."),
    "gradients": CategoryLook("gradients", SKY, text_colour=_DARK),
    "optimizer_state": CategoryLook("optimizer state", GREEN),
    "inputs": CategoryLook("inputs", YELLOW, text_colour=_DARK),
    "activations": CategoryLook("activations", ORANGE, text_colour=_DARK),
    "autocast_cache": CategoryLook("autocast cache", BLUE, "////"),
    "gathered_parameters": CategoryLook("gathered parameters", SKY, "xxx", text_colour=_DARK),
    "communication": CategoryLook("communication", PURPLE, text_colour=_DARK),
    "workspace": CategoryLook("workspace", VERMILION, "\\\\\\\\"),
    "temporaries": CategoryLook("temporaries", VERMILION),
    "last_gradients": CategoryLook("last step's gradients", SKY, "///", text_colour=_DARK),
}
"""Category → look, in the order of CATEGORIES."""
assert tuple(LOOKS) == CATEGORIES

VERDICTS = {
    "fits": ("✓", GREEN), "fits if": ("✓?", ORANGE), "tight": ("≈", ORANGE), "does not fit": ("✗", VERMILION),
    "unknown": ("?", "#777777"),
}  # fmt: skip
"""Verdict → the sign and the colour it is shown with."""


def ticks_of(limit_bytes: float) -> tuple[list[float], list[str], str]:
    """Round places on an axis from 0 to `limit_bytes`, how each is written, and the unit they are in."""
    size, name = next(((size, name) for size, name in _UNITS if limit_bytes >= size), (1, "B"))
    most = limit_bytes / size
    power = 10.0 ** math.floor(math.log10(most / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= _TICKS)
    places = [index * step for index in range(math.floor(most / step) + 1)]
    return [place * size for place in places], [f"{place:g}" for place in places], name


def peak_words(estimate: MemoryEstimate) -> str:
    """The peak in words: `4.2 GiB in backward, at _log_softmax_backward_data in head`."""
    peak = estimate.peak
    least = "" if estimate.complete else "at least "
    where = f", at {short_operator(peak.operator)}" if peak.operator else ""
    where += f" in {peak.module}" if peak.operator and peak.module else ""
    return f"{least}{format_bytes(estimate.device_allocated_bytes)} {_WHEN.get(peak.phase, peak.phase)}{where}"


def short_operator(name: str) -> str:
    """`aten::mm.default` -> `mm`: what people call an operator."""
    return name.removeprefix("aten::").removeprefix("aten.").partition(".")[0] or name


_WHEN = {
    "setup": "before the first batch", "forward": "in forward", "backward": "in backward",
    "optimizer": "in the optimizer step", "other": "between the phases of a step", "validation": "in validation",
}  # fmt: skip
