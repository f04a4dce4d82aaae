"""Charts of chunk sizes: what a sample reads for each size, and where a plan stands among its candidates.

Two steps: an info function turns a table or a plan into plain numbers (chunks, bytes, samples/s), a draw function turns
the numbers into a `matplotlib.figure.Figure`. Sizes are log axes, because they span powers of two. Colours are paired
with line styles or markers; the choice is named in words. `figure.svg(chart, label)` makes text of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.plan.chunk_plan import ChunkPlan
from kit.plan.table import ChunkTable
from kit.report.figure import BLUE, GREEN, INK, PAPER, VERMILION, add_axes, drawing, figure
from kit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


_CHOICE: Any = {
    "marker": "o", "markersize": 8.5, "markeredgecolor": PAPER, "markeredgewidth": 1.5, "linestyle": "none",
}  # fmt: skip
_OTHERS: Any = {"marker": ".", "markersize": 4.0, "markeredgewidth": 0, "linestyle": "none", "alpha": 0.35}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTableInfo:
    """The numbers of a chunk table as lines; every tuple has one entry per size of chunk, smallest first."""

    labels: tuple[str, ...]
    minimal_chunks: tuple[float, ...]
    expected_chunks: tuple[float, ...]
    maximal_chunks: tuple[float, ...]
    minimal_bytes: tuple[float, ...]
    expected_bytes: tuple[float, ...]
    maximal_bytes: tuple[float, ...]
    sample_bytes: int
    best: int
    """Place of the row with the smallest expected chunks × expected bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInfo:
    """The numbers of a plan: all candidates as points, the fastest of each size as a ladder, and the choice."""

    chunk_bytes: tuple[float, ...]
    requests_per_sample: tuple[float, ...]
    bytes_per_sample: tuple[float, ...]
    samples_per_second: tuple[float, ...]
    ladder: tuple[int, ...]
    """Places of the fastest candidate of each size, smallest size first."""
    chosen: int
    chosen_label: str
    patch_bytes: int
    """Of one sample, all variables."""


def chunk_table_info(table: ChunkTable) -> ChunkTableInfo:
    """A chunk table as plain numbers, ordered by the size of the chunk."""
    rows = sorted(table, key=lambda row: row.chunk_bytes)

    def column(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(row, name)) for row in rows)

    return ChunkTableInfo(
        labels=tuple("×".join(map(str, row.chunk)) for row in rows),
        minimal_chunks=column("minimal_chunks"), expected_chunks=column("expected_chunks"),
        maximal_chunks=column("maximal_chunks"), minimal_bytes=column("minimal_bytes"),
        expected_bytes=column("expected_bytes"), maximal_bytes=column("maximal_bytes"),
        sample_bytes=table.sample_bytes, best=rows.index(table.best),
    )  # fmt: skip


def plan_info(plan: ChunkPlan) -> PlanInfo:
    """A plan as plain numbers, in the order of its candidates."""
    costs = plan.candidates

    def column(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(cost, name)) for cost in costs)

    return PlanInfo(
        chunk_bytes=column("chunk_bytes"), requests_per_sample=column("requests_per_sample"),
        bytes_per_sample=column("bytes_per_sample"), samples_per_second=column("samples_per_second"),
        ladder=tuple(costs.index(cost) for cost in plan.ladder),
        chosen=next(place for place, cost in enumerate(costs) if cost.chunk == plan.chunk),
        chosen_label="×".join(map(str, plan.chunk)), patch_bytes=plan.patch_bytes * plan.variables,
    )  # fmt: skip


def chunk_figure(subject: ChunkTable | ChunkPlan) -> Figure:
    """The chart of a chunk table or of a plan."""
    return chunk_table_figure(subject) if isinstance(subject, ChunkTable) else plan_figure(subject)


def chunk_table_figure(table: ChunkTable | ChunkTableInfo) -> Figure:
    """Bytes and chunks per sample against the size of the chunk: minimal, expected, maximal; the best marked."""
    info = chunk_table_info(table) if isinstance(table, ChunkTable) else table
    chart = figure(6.4, 3.3)
    read = add_axes(chart, (0.105, 0.38, 0.375, 0.52), title="bytes read per sample")
    touched = add_axes(chart, (0.585, 0.38, 0.375, 0.52), title="chunks touched per sample")
    with drawing():
        _draw_range(read, info, "bytes")
        _draw_range(touched, info, "chunks")
        _draw_sample_size(read, info)
        _label_bytes(read.yaxis, *read.get_ylim(), 6)
        _label_counts(touched)
        chart.legend(*touched.get_legend_handles_labels(), loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.0))
    return chart


def plan_figure(plan: ChunkPlan | PlanInfo) -> Figure:
    """Requests and bytes per sample, and predicted samples/s, of every candidate; the choice marked."""
    info = plan_info(plan) if isinstance(plan, ChunkPlan) else plan
    chart = figure(6.4, 4.0)
    rate = f"{info.chosen_label}: {info.samples_per_second[info.chosen]:.3g} samples/s predicted"
    throughput = add_axes(chart, (0.55, 0.21, 0.41, 0.70), title=rate, x="chunk size")
    requests = add_axes(chart, (0.10, 0.625, 0.35, 0.285), title="requests per sample")
    read = add_axes(chart, (0.10, 0.21, 0.35, 0.285), title="bytes read per sample", x="chunk size")
    with drawing():
        _draw_candidates(throughput, info, info.samples_per_second, GREEN)
        _draw_candidates(requests, info, info.requests_per_sample, BLUE)
        _draw_candidates(read, info, info.bytes_per_sample, VERMILION)
        for axes, ticks in ((throughput, 5), (requests, 4), (read, 4)):
            _label_bytes(axes.xaxis, *axes.get_xlim(), ticks)
        _label_counts(throughput)
        _label_counts(requests)
        _label_bytes(read.yaxis, *read.get_ylim(), 5)
        requests.tick_params(labelbottom=False)
        _draw_key(chart)
    return chart


# -- parts


def _draw_range(axes: Axes, info: ChunkTableInfo, kind: str) -> None:
    places = range(len(info.labels))
    low, mean, high = (getattr(info, f"{name}_{kind}") for name in ("minimal", "expected", "maximal"))
    axes.fill_between(places, low, high, color=BLUE, alpha=0.12, linewidth=0)
    axes.plot(places, high, ":", color=VERMILION, marker="v", label="maximal")
    axes.plot(places, mean, "-", color=BLUE, marker="o", label="expected at random offsets")
    axes.plot(places, low, "--", color=GREEN, marker="^", label="minimal")
    axes.plot(
        [info.best], [mean[info.best]], "o", markersize=10, markerfacecolor="none", markeredgecolor=INK,
        label="best balance", linestyle="none",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(list(places), info.labels, rotation=40, ha="right", rotation_mode="anchor")
    for place, text in enumerate(axes.get_xticklabels()):
        text.set_fontweight("bold" if place == info.best else "normal")
    axes.set_xlim(-0.4, len(info.labels) - 0.6)


def _draw_sample_size(axes: Axes, info: ChunkTableInfo) -> None:
    axes.axhline(info.sample_bytes, color=INK, linewidth=0.8, alpha=0.6)
    axes.annotate(
        f"the sample itself, {format_bytes(info.sample_bytes)}", (1.0, info.sample_bytes), fontsize=8,
        xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points", ha="right", va="top",
    )  # fmt: skip
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / (top / bottom) ** 0.1, top)


def _draw_candidates(axes: Axes, info: PlanInfo, values: tuple[float, ...], colour: str) -> None:
    sizes, best = [info.chunk_bytes[place] for place in info.ladder], [values[place] for place in info.ladder]
    axes.plot(info.chunk_bytes, values, color=colour, **_OTHERS)
    axes.plot(sizes, best, "-", color=colour)
    axes.plot([info.chunk_bytes[info.chosen]], [values[info.chosen]], color=colour, **_CHOICE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _draw_key(chart: Figure) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=INK, label="this plan", **_CHOICE),
        Line2D([], [], color=INK, label="fastest of each size"),
        Line2D([], [], color=INK, label="every layout considered", **_OTHERS),
    ]
    chart.legend(handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 0.0))


def _label_bytes(axis: Axis, low: float, high: float, most: int) -> None:
    """At most this many ticks, at powers of two a constant factor apart, written as sizes."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    axis.set_major_locator(FixedLocator([2.0**power for power in range(first, last + 1) if power % step == 0]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def _label_counts(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
