"""Charts of chunk sizes: what a sample reads for each size, and where a plan stands among its candidates.

Two steps: an info function turns a table or a plan into plain numbers (chunks, bytes, samples/s), a draw function turns
the numbers into a `matplotlib.figure.Figure`. Sizes are log axes, because they span powers of two. Colours are paired
with line styles or markers: samples/s carry the resource that binds as colour and marker, measured ones are open
diamonds tied to the prediction of the store as it stands, their ratio (measured / predicted) beside them. The choice is
named in words. `figure.svg(chart, label)` makes text of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kit.charts.style import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, VERMILION, add_axes, drawing, figure
from kit.chunks.search import ChunkPlan
from kit.chunks.table import ChunkTable
from kit.errors import PlanError
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


_CHOICE: Any = {
    "marker": "o", "markersize": 8.5, "markeredgecolor": PAPER, "markeredgewidth": 1.5, "linestyle": "none",
}  # fmt: skip
_OTHERS: Any = {"marker": ".", "markersize": 4.0, "markeredgewidth": 0, "linestyle": "none", "alpha": 0.35}
_MEASURED: Any = {
    "marker": "D", "markersize": 6.5, "markerfacecolor": "none", "markeredgewidth": 1.4, "linestyle": "none",
}  # fmt: skip
_FORETOLD: Any = {"marker": "_", "markersize": 8.0, "markeredgewidth": 1.4, "linestyle": "none"}
_END = 0.15
"""Of an axis: so near to its end there is no room for words beyond."""
_BOUNDS: dict[str, tuple[str, str]] = {
    "latency": (BLUE, "o"), "bandwidth": (ORANGE, "s"), "total bandwidth": (VERMILION, "^"),
    "request rate": (PURPLE, "v"), "slow requests": (BLUE, "d"), "CPU": (GREEN, "P"), "memory": (SKY, "X"),
    "does not fit": (INK, "x"),
}  # fmt: skip
"""Colour and marker of each resource that may bind, and of layouts that the memory allowed does not hold."""


class MeasuredLayout(Protocol):
    """What a layout really gave, as each row of `kit.measure_reading` tells it."""

    @property
    def chunk(self) -> tuple[int, ...]: ...
    @property
    def samples_per_second(self) -> float: ...
    @property
    def predicted_samples_per_second(self) -> float: ...


class MeasuredPoint(NamedTuple):
    """One layout that was measured."""

    chunk_bytes: float
    samples_per_second: float
    predicted_samples_per_second: float
    """Of the store as it stands, its shards and slow requests counted."""

    @property
    def ratio(self) -> float:
        """Measured samples/s over predicted."""
        return self.samples_per_second / self.predicted_samples_per_second


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
    """The numbers of a plan: all candidates as points, the best of each size as a ladder, the choice, measurements.

    Per sample: requests and stored bytes as read, shared by a batch, its window or the cache; and of a sample alone.
    """

    chunk_bytes: tuple[float, ...]
    requests_per_sample: tuple[float, ...]
    """As read."""
    least_requests: tuple[float, ...]
    most_requests: tuple[float, ...]
    """Of a sample on its own, at its best and worst offset."""
    bytes_per_sample: tuple[float, ...]
    """As read, stored."""
    samples_per_second: tuple[float, ...]
    bounds: tuple[str, ...]
    """The resource that binds each, or `does not fit`."""
    ladder: tuple[int, ...]
    """Places of the best candidate of each size, smallest size first."""
    chosen: int
    chosen_label: str
    sample_bytes: float
    """Of one sample, all variables, as stored."""
    measured: tuple[MeasuredPoint, ...] = ()


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


def plan_info(plan: ChunkPlan, measured: Iterable[MeasuredLayout] = ()) -> PlanInfo:
    """A plan as plain numbers, in the order of its candidates, and the layouts that were measured.

    Raises:
        PlanError: for a measured chunk of another number of dimensions, or a speed that is no number above 0.
    """
    costs, samples = plan.candidates, plan.batch_size

    def column(name: str, share: float = 1.0) -> tuple[float, ...]:
        return tuple(float(getattr(cost, name)) * share for cost in costs)

    ratio = plan.chosen.bytes_per_batch / plan.chosen.stored_bytes_per_batch
    return PlanInfo(
        chunk_bytes=column("chunk_bytes"), requests_per_sample=column("requests_per_batch", 1 / samples),
        least_requests=column("least_requests_per_sample"), most_requests=column("most_requests_per_sample"),
        bytes_per_sample=column("stored_bytes_per_batch", 1 / samples),
        samples_per_second=column("samples_per_second"),
        bounds=tuple(cost.bound if cost.fits else "does not fit" for cost in costs),
        ladder=tuple(costs.index(cost) for cost in plan.ladder), chosen=costs.index(plan.chosen),
        chosen_label="×".join(map(str, plan.chunk)), sample_bytes=plan.patch_bytes * plan.variables / ratio,
        measured=tuple(_measurement(plan, one) for one in measured),
    )  # fmt: skip


def _measurement(plan: ChunkPlan, one: MeasuredLayout) -> MeasuredPoint:
    speed, predicted = one.samples_per_second, one.predicted_samples_per_second
    if len(one.chunk) != len(plan.dims) or not (speed > 0 and predicted > 0):
        raise PlanError(
            f"measured {one.chunk}: {speed} samples/s of {predicted} predicted do not belong to a plan of "
            f"{', '.join(plan.dims)}; give one size a dimension and speeds above 0"
        )
    return MeasuredPoint(math.prod(one.chunk) * plan.chunk_bytes / math.prod(plan.chunk), speed, predicted)


def chunk_figure(subject: ChunkTable | ChunkPlan, *, measured: Iterable[MeasuredLayout] = ()) -> Figure:
    """The chart of a chunk table or of a plan; `measured` adds what layouts really gave (`kit.measure_reading`).

    Raises:
        PlanError: for measurements that do not belong to the plan, or of a table.
    """
    measured = tuple(measured)
    if isinstance(subject, ChunkPlan):
        return plan_figure(plan_info(subject, measured))
    if measured:
        raise PlanError("a chunk table predicts no samples/s to measure against; give a plan")
    return chunk_table_figure(subject)


def chunk_table_figure(table: ChunkTable | ChunkTableInfo) -> Figure:
    """Bytes and chunks per sample against the size of the chunk: minimal, expected, maximal; the best marked."""
    info = chunk_table_info(table) if isinstance(table, ChunkTable) else table
    chart = figure(6.4, 3.3)
    read = add_axes(chart, (0.105, 0.38, 0.375, 0.52), title="bytes read per sample")
    touched = add_axes(chart, (0.585, 0.38, 0.375, 0.52), title="chunks touched per sample")
    with drawing():
        _draw_range(read, info, "bytes")
        _draw_range(touched, info, "chunks")
        _draw_sample_size(read, info.sample_bytes)
        _label_bytes(read.yaxis, *read.get_ylim(), 6)
        _label_counts(touched, 8)
        chart.legend(*touched.get_legend_handles_labels(), loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.0))
    return chart


def plan_figure(plan: ChunkPlan | PlanInfo) -> Figure:
    """Requests and bytes per sample, and samples/s by what binds, of every candidate; the choice marked."""
    info = plan_info(plan) if isinstance(plan, ChunkPlan) else plan
    chart = figure(6.8, 4.4)
    rate = f"{info.chosen_label}: {format_count(info.samples_per_second[info.chosen])} samples/s predicted"
    throughput = add_axes(chart, (0.53, 0.285, 0.43, 0.635), title=rate, x="chunk size")
    requests = add_axes(chart, (0.10, 0.655, 0.34, 0.265), title="requests per sample")
    read = add_axes(chart, (0.10, 0.285, 0.34, 0.265), title="bytes read per sample", x="chunk size")
    with drawing():
        _draw_throughput(throughput, info)
        _draw_alone(requests, info, info.least_requests, info.most_requests)
        _draw_candidates(requests, info, info.requests_per_sample)
        _draw_candidates(read, info, info.bytes_per_sample)
        _draw_sample_size(read, info.sample_bytes)
        for axes, ticks in ((throughput, 5), (requests, 4), (read, 4)):
            _label_bytes(axes.xaxis, *axes.get_xlim(), ticks)
        _label_counts(throughput, 12)
        _label_counts(requests, 6)
        _label_bytes(read.yaxis, *read.get_ylim(), 5)
        requests.tick_params(labelbottom=False)
        _draw_keys(chart, info)
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


def _draw_sample_size(axes: Axes, sample_bytes: float) -> None:
    """What a sample itself holds: less is not read, unless samples share."""
    axes.axhline(sample_bytes, color=INK, linewidth=0.8, alpha=0.6)
    axes.annotate(
        f"the sample itself, {format_bytes(sample_bytes)}", (1.0, sample_bytes), fontsize=8,
        xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points", ha="right", va="top",
    )  # fmt: skip
    bottom, top = axes.get_ylim()
    with_room_for_words = sample_bytes / (top / sample_bytes) ** 0.18
    axes.set_ylim(min(bottom, with_room_for_words), top)


def _draw_alone(axes: Axes, info: PlanInfo, least: tuple[float, ...], most: tuple[float, ...]) -> None:
    """The range of a sample on its own, over the ladder."""
    places = info.ladder
    sizes = [info.chunk_bytes[place] for place in places]
    low, high = ([values[place] for place in places] for values in (least, most))
    axes.fill_between(sizes, low, high, color=BLUE, alpha=0.12, linewidth=0)


def _draw_candidates(axes: Axes, info: PlanInfo, values: tuple[float, ...]) -> None:
    sizes, best = [info.chunk_bytes[place] for place in info.ladder], [values[place] for place in info.ladder]
    axes.plot(info.chunk_bytes, values, color=BLUE, **_OTHERS)
    axes.plot(sizes, best, "-", color=BLUE)
    axes.plot([info.chunk_bytes[info.chosen]], [values[info.chosen]], color=BLUE, **_CHOICE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _draw_throughput(axes: Axes, info: PlanInfo) -> None:
    """Every candidate in the colour of what binds it; the ladder larger; measurements tied to their predictions."""
    speeds = info.samples_per_second
    ladder = [(info.chunk_bytes[place], speeds[place]) for place in info.ladder]
    axes.plot(*zip(*ladder, strict=True), "-", color=INK, linewidth=0.9, alpha=0.45)
    for name in _bounds_of(info):
        colour, marker = _BOUNDS[name]
        small = [place for place, bound in enumerate(info.bounds) if bound == name]
        large = [place for place in small if place in info.ladder]
        axes.plot([info.chunk_bytes[p] for p in small], [speeds[p] for p in small], color=colour, **_OTHERS)
        axes.plot(
            [info.chunk_bytes[p] for p in large], [speeds[p] for p in large], color=colour, marker=marker,
            markersize=6.0, linestyle="none",
        )  # fmt: skip
    _draw_ring(axes, info.chunk_bytes[info.chosen], speeds[info.chosen])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _draw_measured(axes, info)


def _draw_measured(axes: Axes, info: PlanInfo) -> None:
    """Each a diamond, a dotted line to what was predicted of it, and the ratio in figures, outside of the hill."""
    for point in info.measured:
        size, speed = point.chunk_bytes, point.samples_per_second
        axes.plot([size, size], [point.predicted_samples_per_second, speed], ":", color=INK, linewidth=1.0)
        axes.plot([size], [point.predicted_samples_per_second], color=INK, **_FORETOLD)
        axes.plot([size], [speed], color=INK, **_MEASURED)
        side = _free_side(axes, info, size)
        axes.annotate(
            f"{point.ratio:.2f}", (size, speed), xytext=(9 * side, 3), textcoords="offset points", fontsize=8,
            ha="left" if side > 0 else "right", va="center",
        )  # fmt: skip


def _free_side(axes: Axes, info: PlanInfo, size: float) -> int:
    """Where words at this size meet no other layout: left (-1) of the fastest, right of it, but not over an end."""
    low, high = axes.get_xlim()
    place = math.log(size / low) / math.log(high / low)
    fastest = max(info.ladder, key=lambda candidate: info.samples_per_second[candidate])
    rising = size < info.chunk_bytes[fastest]
    return -1 if place > 1 - _END else 1 if place < _END else -1 if rising else 1


def _draw_ring(axes: Axes, x: float, y: float) -> None:
    axes.plot([x], [y], "o", markersize=12, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.3)


def _bounds_of(info: PlanInfo) -> list[str]:
    """The resources that bind some candidate, in a fixed order."""
    return [name for name in _BOUNDS if name in info.bounds]


def _draw_keys(chart: Figure, info: PlanInfo) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines: list[Any] = [
        Line2D(
            [], [], color=INK, marker="o", markersize=8.5, markerfacecolor="none", linestyle="none", label="this plan"
        ),
        Line2D([], [], color=INK, linewidth=1.2, label="best of each size"),
        Line2D([], [], color=INK, label="every layout considered", **_OTHERS),
        Patch(color=BLUE, alpha=0.2, linewidth=0, label="sample alone, least–most"),
    ]
    spacing: Any = {"loc": "lower center", "columnspacing": 1.3, "handletextpad": 0.5, "handlelength": 1.8}
    chart.legend(handles=lines, ncols=4, bbox_to_anchor=(0.5, 0.07), **spacing)
    second: list[Any] = [
        Line2D([], [], color=_BOUNDS[name][0], marker=_BOUNDS[name][1], linestyle="none", label=name)
        for name in _bounds_of(info)
    ]
    if info.measured:
        second.append(Line2D([], [], color=INK, label="measured (ratio)", **_MEASURED))
    title = Line2D([], [], linestyle="none", label="bound by:")
    chart.legend(handles=[title, *second], ncols=len(second) + 1, bbox_to_anchor=(0.5, 0.0), **spacing)


def _label_bytes(axis: Axis, low: float, high: float, most: int) -> None:
    """At most this many ticks, at powers of two a constant factor apart, written as sizes."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    axis.set_major_locator(FixedLocator([2.0**power for power in range(first, last + 1) if power % step == 0]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def _label_counts(axes: Axes, most: int) -> None:
    """At most this many ticks: 1, 2, 5, 10 where there is room, else powers of ten a constant factor apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axes.get_ylim()
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    fine = [tick for tick in fine if low <= tick <= high]
    step = max(1, math.ceil((math.log10(high / low) + 1) / most))
    coarse = [10.0**power for power in range(first, last + 1) if power % step == 0]
    axes.yaxis.set_major_locator(FixedLocator(fine if len(fine) <= most else coarse))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low, high)
