"""The chart of a trial's timing: each batch as a stacked bar, and beside it what every rank spent its time on in total.

Batches are those of the slowest rank, unless another is asked for; more than can be told apart are averaged in groups.
Warm-up is shaded, and left out of the totals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import TrialError
from kit.report import figure as look
from kit.report.timing import RankTiming, Timing, rounded_shares, timing
from kit.report.trace import PHASE_LABELS, PHASES
from kit.report.trial_charts import PHASE_COLOURS
from kit.run.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 7.8, 3.3
_MOST_BARS = 120
_MOST_RANKS = 8
_LEAST_WRITTEN = 0.08
"""Share from which on its number fits into its bar."""


def timing_figure(trial: Trial | str | Path | Timing, *, rank: int | None = None) -> Figure:
    """Stacked bars of every batch, and the totals of each rank.

    Args:
        trial: A trial, its run directory, or its `kit.timing`.
        rank: Whose batches; by default the slowest's.

    Raises:
        TrialError: when no step was finished, or there is no such rank.
    """
    found = trial if isinstance(trial, Timing) else timing(trial)
    shown = _slowest(found) if rank is None else rank
    if shown not in found.ranks:
        raise TrialError(f"{found.name} has no rank {rank}; it has {', '.join(map(str, found.ranks))}")
    chart = look.figure(WIDTH_INCHES, HEIGHT_INCHES)
    batches = look.add_axes(chart, (0.085, 0.25, 0.50, 0.56), x="batch")
    totals = look.add_axes(chart, (0.665, 0.25, 0.31, 0.56), x="share of the time after warm-up, %", grid="x")
    with look.drawing():
        chart.text(0.012, 0.93, found.sentence, fontsize=12.5, fontweight="bold", va="center")
        _draw_batches(batches, found, shown)
        _draw_totals(totals, found)
        _draw_key(chart, found)
    return chart


def _slowest(found: Timing) -> int:
    def seconds(item: tuple[int, RankTiming]) -> float:
        mean = item[1].mean_step_seconds
        return mean if math.isfinite(mean) else 0.0

    return max(found.ranks.items(), key=seconds)[0]


def _draw_batches(axes: Axes, found: Timing, rank: int) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in found.rows if row["rank"] == rank]
    width = math.ceil(len(rows) / _MOST_BARS)
    groups = [rows[start : start + width] for start in range(0, len(rows), width)]
    places = [_middle(group) for group in groups]
    slowest = max((_mean(group, "step_seconds") for group in groups), default=0.0)
    factor, unit = (1.0, "s") if slowest >= 1 else (1e3, "ms")
    bottom = [0.0] * len(groups)
    for phase in PHASES:
        heights = [factor * _mean(group, f"{phase}_seconds") for group in groups]
        axes.bar(places, heights, 0.9 * width, bottom=bottom, color=PHASE_COLOURS[phase], linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    warm = [row["batch"] for row in rows if row["warmup"]]
    if warm:
        axes.axvspan(0.5, max(warm) + 0.5, color=look.INK, alpha=0.07, linewidth=0, zorder=0)
    axes.set_xlim(0.5, max(row["batch"] for row in rows) + 0.5)
    axes.set_ylim(0, _limit(bottom, len(warm) // width))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    whose = f" of rank {rank}" if len(found.ranks) > 1 else ""
    each = f", mean of {width}" if width > 1 else ""
    axes.set_title(f"each batch{whose}{each}, {unit}" + (" (device clock)" if found.clock == "device" else ""))


def _middle(group: Sequence[Mapping[str, Any]]) -> float:
    """Where the bar of a group of batches stands."""
    return float(group[0]["batch"] + group[-1]["batch"]) / 2


def _mean(group: Sequence[Mapping[str, Any]], name: str) -> float:
    return math.fsum(row[name] for row in group) / len(group)


def _limit(heights: Sequence[float], warm: int) -> float:
    """Room for every bar after warm-up; a first step ten times as long may leave through the top."""
    steady = heights[warm:] or heights
    return max(1e-6, min(max(heights), 2.5 * max(steady))) * 1.06


def _draw_totals(axes: Axes, found: Timing) -> None:
    ranks = [*found.ranks.items()][:_MOST_RANKS]
    for place, (_, timing_) in enumerate(ranks):
        left = 0.0
        for phase, share in rounded_shares(timing_.shares).items():
            axes.barh(place, 100 * share, 0.7, left=left, color=PHASE_COLOURS[phase], linewidth=0)
            if share >= _LEAST_WRITTEN:
                axes.text(left + 50 * share, place, f"{share:.0%}", color="white", fontsize=8, ha="center", va="center")
            left += 100 * share
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank, _ in ranks])
    axes.tick_params(axis="y", length=0)
    more = f" (the first {_MOST_RANKS})" if len(found.ranks) > _MOST_RANKS else ""
    axes.set_title(f"in total{more}")


def _draw_key(chart: Figure, found: Timing) -> None:
    from matplotlib.patches import Patch

    shown = [phase for phase in PHASES if found.together.seconds[phase] > 0] or list(PHASES)
    handles = [Patch(facecolor=PHASE_COLOURS[phase], label=PHASE_LABELS[phase]) for phase in shown]
    chart.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=len(handles), columnspacing=1.2,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5,
    )  # fmt: skip
