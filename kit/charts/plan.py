"""The chart of a speed plan: what each setting needs of the device against the time of its step, and the chosen one.

Settings that nothing beats in both stand on a line; the budget is a border. Both axes are logarithmic where the points
span more than a decade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.studies.scaling.fastest import SpeedPlan, SpeedPoint

_GIB, _MIB = 2**30, 2**20


def plan_figure(plan: SpeedPlan) -> Figure:
    """Memory against time of all settings that were looked at, the front of the best, the budget and the choice."""
    chart = look.figure(8.0, 4.6)
    points = list(plan.points)
    most = max([plan.budget_bytes, *(point.needs_bytes for point in points)])
    unit, name = (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")
    axes = look.add_axes(
        chart, (0.1, 0.13, 0.86, 0.7), title="time of a step against memory, of every setting that was looked at",
        x=f"needs, {name}", y="step, s",
    )  # fmt: skip

    def draw(chosen: list[SpeedPoint], **options: Any) -> None:
        axes.plot([one.needs_bytes / unit for one in chosen], [one.step_seconds for one in chosen], **options)

    with look.drawing():
        axes.axvline(plan.budget_bytes / unit, color=look.INK, linewidth=1.2, linestyle="--")
        fits = [point for point in points if point.fits]
        draw([point for point in points if not point.fits], marker="x", linestyle="", color=look.ORANGE,
             label="does not fit")  # fmt: skip
        draw(fits, marker="o", linestyle="", color=look.SKY, label="fits")
        draw(list(plan.front), marker="", color=look.BLUE, linewidth=1.2, label="nothing is better in both")
        if plan.chosen is not None:
            draw([plan.chosen], marker="D", markersize=9, linestyle="", color=look.VERMILION, label="chosen")
        scales: list[tuple[list[float], Any]] = [
            ([float(one.needs_bytes) for one in points], axes.set_xscale),
            ([one.step_seconds for one in points], axes.set_yscale),
        ]
        for values, scale in scales:
            if values and min(values) > 0 and max(values) > 10 * min(values):
                scale("log")
        axes.legend(loc="upper right", fontsize=8.5)
        low, high = axes.get_ylim()
        place = (plan.budget_bytes / unit, low + 0.03 * (high - low))
        look.note(axes, place, f"budget {format_bytes(plan.budget_bytes)}")
    if plan.chosen is not None:
        needs, seconds = format_bytes(plan.chosen.needs_bytes), format_seconds(plan.chosen.step_seconds)
        look.finding(chart, f"{plan.chosen.name}: {seconds} a step, {needs}")
    else:
        look.finding(chart, plan.refusal)
    return chart
