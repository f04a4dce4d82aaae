"""The artists of a breakdown chart: one bar with its words, and the legend below the bars. Made once, moved often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.report import figure as look
from kit.report.memory_look import LOOKS
from kit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from kit.report.memory_breakdown import BreakdownInfo

LEFT_FRACTION, WIDTH_FRACTION = 0.025, 0.935
LEGEND_LINE_INCHES, LEGEND_EDGE_INCHES = 0.205, 0.06
LEGEND_COLUMNS = 3
_SMALLEST_LABEL_FRACTION, _LETTER_FRACTION = 0.075, 0.0105
_RESERVE, _OUTSIDE = "reserved, not allocated", "outside the allocator"
_RESERVE_FILL: dict[str, Any] = {"facecolor": look.INK, "alpha": 0.13, "edgecolor": "none", "linewidth": 0}
_OUTSIDE_FILL: dict[str, Any] = {"edgecolor": look.INK, "linewidth": 1.1, "alpha": 0.75}


class Bar:
    """One row: words, the stacked bar, the allocator's reserve, the range outside, the capacity, the measured bar."""

    def __init__(self, axes: Axes, top: float, measured: bool) -> None:
        self.axes = axes
        self._low, self._high = top + 0.22, top + 0.47
        height = self._high - self._low
        self.title = axes.text(0, top + 0.14, "", fontsize=9.5, va="baseline", transform=_fraction_by_data(axes))
        self.note = axes.text(
            1, top + 0.14, "", fontsize=8.5, ha="right", va="baseline", transform=_fraction_by_data(axes)
        )
        self.reserve = _patch(axes, self._low, height, **_RESERVE_FILL)
        self.parts = {name: _patch(axes, self._low, height, **_fill(name)) for name in LOOKS}
        self.labels = {name: _part_label(axes, (self._low + self._high) / 2, name) for name in LOOKS}
        (self.outside,) = axes.plot([], [], color=look.INK, linewidth=1.1, marker="|", markersize=8, alpha=0.75)
        (self.capacity,) = axes.plot([], [], color=look.INK, linewidth=1.4, linestyle=(0, (4, 2)), zorder=5)
        self.measured = _patch(axes, self._high + 0.035, 0.085, facecolor=look.INK, linewidth=0) if measured else None

    def show(self, info: BreakdownInfo, limit: float) -> None:
        self.title.set_text(info.headline)
        self.note.set_text(" · ".join(filter(None, (info.measured_words, _capacity_words(info, limit)))))
        self.reserve.set_width(info.reserved_bytes)
        self._stack(dict(info.parts), limit)
        low, high = (info.reserved_bytes + part for part in info.outside_bytes)
        middle = (self._low + self._high) / 2
        self.outside.set_data(*(([low, high], [middle, middle]) if info.shows_outside else ((), ())))
        inside = info.capacity_bytes is not None and info.capacity_bytes <= limit
        ends = [self._low - 0.05, self._high + 0.05]
        self.capacity.set_data(*(([info.capacity_bytes] * 2, ends) if inside else ((), ())))
        if self.measured is not None:
            self.measured.set_width(info.measured_bytes or 0)

    def _stack(self, parts: Mapping[str, int], limit: float) -> None:
        start = 0
        for name, patch in self.parts.items():
            width = parts.get(name, 0)
            patch.set_x(start)
            patch.set_width(width)
            patch.set_visible(width > 0)
            wide = width >= limit * max(_SMALLEST_LABEL_FRACTION, _LETTER_FRACTION * len(LOOKS[name].label))
            self.labels[name].set_x(start + width / 2)
            self.labels[name].set_visible(wide)
            start += width


class Legend:
    """Signs and words in columns below the axis: what each colour is, and for a single bar how much of it."""

    def __init__(self, figure: Figure | SubFigure, top: float, height_inches: float) -> None:
        from matplotlib.patches import Rectangle

        self._top, self._line, self._edge = top, LEGEND_LINE_INCHES / height_inches, LEGEND_EDGE_INCHES / height_inches
        size = (0.022, 0.115 / height_inches)
        fills = {**{name: _fill(name) for name in LOOKS}, _RESERVE: _RESERVE_FILL, _OUTSIDE: _OUTSIDE_FILL}
        self.signs = {name: Rectangle((0, 0), *size, transform=figure.transSubfigure, **fills[name]) for name in fills}
        self.words = {name: figure.text(0, 0, "", fontsize=8.5, va="baseline") for name in fills}
        self.signs[_OUTSIDE].set_height(0)  # a level line, as the bracket is
        for sign in self.signs.values():
            figure.add_artist(sign)

    def show(self, infos: Sequence[BreakdownInfo]) -> None:
        present = legend_entries(infos)
        single = infos[0] if len(infos) == 1 else None
        for name, sign in self.signs.items():
            sign.set_visible(name in present)
            self.words[name].set_visible(name in present)
        lines = legend_lines(infos)
        for place, name in enumerate(present):
            column, line = divmod(place, lines)
            left, low = (
                LEFT_FRACTION + column * WIDTH_FRACTION / LEGEND_COLUMNS,
                self._top - self._edge - (line + 0.75) * self._line,
            )
            self.signs[name].set_xy((left, low + (0.25 * self._line if name == _OUTSIDE else 0)))
            self.words[name].set_position((left + 0.03, low))
            self.words[name].set_text(_legend_words(name, single))


def legend_entries(infos: Sequence[BreakdownInfo]) -> list[str]:
    """What the bars hold, in the order in which it is drawn."""
    held = {name for info in infos for name in (*dict(info.parts), *info.elsewhere)}
    present = [name for name in LOOKS if name in held]
    present += [_RESERVE] if any(info.reserved_bytes > info.allocated_bytes for info in infos) else []
    return [*present, *([_OUTSIDE] if any(info.outside_bytes[1] for info in infos) else [])]


def legend_lines(infos: Sequence[BreakdownInfo]) -> int:
    """Lines that the legend of these bars takes."""
    return max(1, math.ceil(len(legend_entries(infos)) / LEGEND_COLUMNS))


def _legend_words(name: str, info: BreakdownInfo | None) -> str:
    label = LOOKS[name].label if name in LOOKS else name
    if info is None:
        return label
    if name == _RESERVE:
        return f"{label}  {format_bytes(info.reserved_bytes - info.allocated_bytes)}"
    if name == _OUTSIDE:
        return f"{label}  {_range(*info.outside_bytes)}"
    part = dict(info.parts).get(name, 0)
    if not part:
        return f"{label}  none at the peak"
    return f"{label}  {format_bytes(part)}  {_percent(part / info.allocated_bytes)}"


def _range(low_bytes: int, high_bytes: int) -> str:
    """`300–700 MiB`"""
    low, high = format_bytes(low_bytes), format_bytes(high_bytes)
    number, _, unit = low.partition(" ")
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"


def _percent(share: float) -> str:
    return f"({share:.0%})" if share >= 0.01 else "(< 1%)"


def _capacity_words(info: BreakdownInfo, limit: float) -> str:
    if info.capacity_bytes is None:
        return ""
    return f"capacity {format_bytes(info.capacity_bytes)}{'' if info.capacity_bytes <= limit else ' →'}"


def _fill(name: str) -> dict[str, Any]:
    """A pattern is drawn in the page's background, and so is the rim that parts neighbours."""
    style = LOOKS[name]
    return {"facecolor": style.colour, "hatch": style.hatch, "edgecolor": look.PAPER, "linewidth": 0.6}


def _patch(axes: Axes, low: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    patch = Rectangle((0, low), 0, height, **style)
    axes.add_patch(patch)
    return patch


def _part_label(axes: Axes, middle: float, name: str) -> Any:
    style = LOOKS[name]
    return axes.text(
        0, middle, style.label, color=style.text_colour, fontsize=8, ha="center", va="center_baseline", visible=False
    )


def _fraction_by_data(axes: Axes) -> Any:
    """x in fractions of the axes, y in data."""
    return axes.get_yaxis_transform()
