"""scaling_figure: how long a run takes on more and more devices, what it costs, and what holds it up.

Left, hours of all epochs over devices, both logarithmic, with the range, the line of perfect scaling, and what was
measured; the limit that decides is told by shape and colour. Right, device-hours, or money where there are prices, as
bars from zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.report import figure as look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.report.big_run import BigRun

_MARKS = {
    "compute": ("o", look.BLUE), "cores": ("s", look.SKY), "communication": ("^", look.PURPLE),
    "loading": ("D", look.ORANGE), "loader CPU": ("v", look.ORANGE), "store requests/s": ("P", look.VERMILION),
    "store bandwidth": ("X", look.VERMILION), "memory": ("x", look.INK),
}  # fmt: skip
_DAY = 86_400.0
_ROUND_SECONDS = {
    0.001: "1 ms", 0.01: "10 ms", 0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min",
    3600.0: "1 h", 14_400.0: "4 h", _DAY: "1 day", 4 * _DAY: "4 days", 16 * _DAY: "16 days", 60 * _DAY: "60 days",
    365 * _DAY: "1 year", 3650 * _DAY: "10 years",
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
    """Round times, from the last below to the first above."""
    ticks = sorted(_ROUND_SECONDS)
    first = max((place for place, tick in enumerate(ticks) if tick <= low), default=0)
    last = min((place for place, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    shown = ticks[first : max(last, first + 1) + 1]
    axes.set_ylim(min(shown[0], low), max(shown[-1], high))
    axes.set_yticks(shown, [_ROUND_SECONDS[tick] for tick in shown])


def _cost(axes: Axes, run: BigRun, *, money: bool) -> None:
    values = [row.money or 0.0 if money else row.device_hours for row in run.rows]
    axes.bar(range(len(values)), values, width=0.6, color=look.GREEN)
    axes.set_xticks(range(len(values)), [str(row.devices) for row in run.rows])
    axes.set_ylim(0, 1.2 * max(values) or 1.0)
    for place, value in enumerate(values):
        axes.annotate(f"{value:.3g}", (place, value), xytext=(0, 2), textcoords="offset points", ha="center",
                      fontsize=7.5, color=look.INK)  # fmt: skip
