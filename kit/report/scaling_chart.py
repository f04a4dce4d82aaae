"""scaling_figure: how long a run takes on more and more devices, what it costs, and what holds it up.

Left, hours of all epochs over devices, both logarithmic, with the range, the line of perfect scaling, and what was
measured; the limit that decides is told by shape and colour. Right, device-hours, or money where there are prices, as
bars from zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kit.report import figure as look
from kit.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.report.big_run import BigRun

_MARKS = {
    "compute": ("o", look.BLUE), "cores": ("s", look.SKY), "communication": ("^", look.PURPLE),
    "loading": ("D", look.ORANGE), "loader CPU": ("v", look.ORANGE), "store requests/s": ("P", look.VERMILION),
    "store bandwidth": ("X", look.VERMILION), "memory": ("x", look.INK),
}  # fmt: skip


def scaling_figure(run: BigRun) -> Figure:
    """What `kit.predict_run` answers, drawn."""
    figure = look.figure(7.6, 3.4)
    time = look.add_axes(figure, (0.1, 0.16, 0.5, 0.7), title="time of the run", x="devices", grid="both")
    money = run.rows[0].money is not None
    title = f"money, {run.prices.currency}".rstrip(", ") if money else "device-hours"
    cost = look.add_axes(figure, (0.7, 0.16, 0.28, 0.7), title=title, x="devices")
    with look.drawing():
        _time(time, run)
        _cost(cost, run, money=money)
    return figure


def _time(axes: Axes, run: BigRun) -> None:
    counts = [row.devices for row in run.rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = [row.low_seconds for row in run.rows], [row.high_seconds for row in run.rows]
    axes.fill_between(counts, low, high, color=look.SKY, alpha=0.3, linewidth=0)
    axes.plot(counts, [row.total_seconds for row in run.rows], color=look.INK, linewidth=1.0)
    first = run.rows[0]
    ideal = [first.total_seconds * first.devices / count for count in counts]
    axes.plot(counts, ideal, ":", color=look.INK, linewidth=1.0, label="perfect scaling")
    for bound in dict.fromkeys(row.bound for row in run.rows):
        mark, colour = _MARKS[bound]
        rows = [row for row in run.rows if row.bound == bound]
        axes.plot([row.devices for row in rows], [row.total_seconds for row in rows], mark, color=colour, label=bound)
    measured = [
        (step.devices, row.total_seconds * step.seconds / run.scaling.at(step.devices).seconds_per_batch)
        for step in run.scaling.steps
        for row in run.rows
        if row.devices == step.devices
    ]
    if measured:
        axes.plot(*zip(*measured, strict=True), "+", color=look.INK, markersize=9, mew=1.4, label="measured")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    _seconds_ticks(axes, min(low), max(high))
    axes.legend(loc="best")


def _seconds_ticks(axes: Axes, low: float, high: float) -> None:
    """Powers of four, in words."""
    first, last = math.floor(math.log(low, 4)), math.ceil(math.log(high, 4))
    ticks = [4.0**power for power in range(first, last + 1)]
    axes.set_ylim(ticks[0], ticks[-1] if last > first else 4 * ticks[0])
    axes.set_yticks(ticks, [format_seconds(tick) for tick in ticks])


def _cost(axes: Axes, run: BigRun, *, money: bool) -> None:
    values = [row.money or 0.0 if money else row.device_hours for row in run.rows]
    axes.bar(range(len(values)), values, width=0.6, color=look.GREEN)
    axes.set_xticks(range(len(values)), [str(row.devices) for row in run.rows])
    axes.set_ylim(0, 1.2 * max(values) or 1.0)
    for place, value in enumerate(values):
        axes.annotate(f"{value:.3g}", (place, value), xytext=(0, 2), textcoords="offset points", ha="center",
                      fontsize=7.5, color=look.INK)  # fmt: skip
