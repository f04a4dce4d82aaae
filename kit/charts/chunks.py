"""Charts of chunk sizes: what a sample reads for each size, and where a plan stands among its candidates.

`plan_info` turns a plan into plain numbers (chunks, bytes, samples/s), `plan_figure` draws them. Sizes are log axes,
because they span powers of two. Colours are paired with line styles or markers: samples/s carry the resource that binds
as colour and marker; measured ones are open diamonds, tied to the prediction of the store as it stands, with their
ratio (measured / predicted) beside them. The choice is named in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
_END = 0.15
"""Share of an axis at each of its ends, where there is no space for words beyond."""
_BOUNDS: dict[str, tuple[str, str]] = {
    "latency": (BLUE, "o"), "bandwidth": (ORANGE, "s"), "total bandwidth": (VERMILION, "^"),
    "request rate": (PURPLE, "v"), "slow requests": (BLUE, "d"), "CPU": (GREEN, "P"), "memory": (SKY, "X"),
    "does not fit": (INK, "x"),
}  # fmt: skip
"""Colour and marker of each resource that may bind, and of layouts that the memory allowed cannot hold."""


class MeasuredLayout(Protocol):
    """The measured speed of a layout: a row of `kit.data.measure_reading`."""

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
class PlanInfo:
    """The numbers of a plan, one of each for every candidate, and the measurements.

    Requests and stored bytes per sample are those of a batch, which shares what it reads; `least` and `most` are those
    of a sample alone, at its best and worst offset.
    """

    chunk_bytes: tuple[float, ...]
    requests_per_sample: tuple[float, ...]
    least_requests: tuple[float, ...]
    most_requests: tuple[float, ...]
    bytes_per_sample: tuple[float, ...]
    samples_per_second: tuple[float, ...]
    bounds: tuple[str, ...]
    """The resource that binds each, or `does not fit`."""
    best: tuple[int, ...]
    """Places of the best candidate of each size, smallest size first."""
    chosen: int
    chosen_label: str
    sample_bytes: float
    """Of one sample, all variables, as stored."""
    measured: tuple[MeasuredPoint, ...] = ()


def plan_info(plan: ChunkPlan, measured: Iterable[MeasuredLayout] = ()) -> PlanInfo:
    """A plan as plain numbers, in the order of its candidates, and the layouts that were measured.

    Raises:
        PlanError: for a measured chunk of another number of dimensions, or a speed that is no number above 0.
    """
    costs, samples = plan.candidates, plan.batch_size

    def column(name: str, share: float = 1.0) -> tuple[float, ...]:
        return tuple(float(getattr(cost, name)) * share for cost in costs)

    points = []
    for one in measured:
        if not hasattr(one, "predicted_samples_per_second"):
            way_out = "give what kit.data.measure_reading(config) answers"
            raise PlanError(f"measured {one!r}: {type(one).__name__} is no measurement of a layout; {way_out}")
        speed, predicted = one.samples_per_second, one.predicted_samples_per_second
        if len(one.chunk) != len(plan.dims) or not (speed > 0 and predicted > 0):
            raise PlanError(
                f"measured {one.chunk}: {speed} samples/s of {predicted} predicted do not belong to a plan of "
                f"{', '.join(plan.dims)}; give one size a dimension and speeds above 0"
            )
        size = math.prod(one.chunk) * plan.chunk_bytes / math.prod(plan.chunk)
        points.append(MeasuredPoint(size, speed, predicted))
    ratio = plan.chosen.bytes_per_batch / plan.chosen.stored_bytes_per_batch
    return PlanInfo(
        chunk_bytes=column("chunk_bytes"), requests_per_sample=column("requests_made_per_batch", 1 / samples),
        least_requests=column("least_requests_per_sample"), most_requests=column("most_requests_per_sample"),
        bytes_per_sample=column("bytes_made_per_batch", 1 / samples),
        samples_per_second=column("samples_per_second"),
        bounds=tuple(cost.bound if cost.fits else "does not fit" for cost in costs),
        best=tuple(costs.index(cost) for cost in plan.best_by_size), chosen=costs.index(plan.chosen),
        chosen_label="×".join(map(str, plan.chunk)), sample_bytes=plan.patch_bytes * plan.variables / ratio,
        measured=tuple(points),
    )  # fmt: skip


def chunk_figure(subject: ChunkTable | ChunkPlan, *, measured: Iterable[MeasuredLayout] = ()) -> Figure:
    """The chart of a chunk table or of a plan; `measured` adds what layouts really gave (`kit.data.measure_reading`).

    Raises:
        PlanError: for measurements that do not belong to the plan, or of a table.
    """
    one = hasattr(measured, "predicted_samples_per_second") or not isinstance(measured, Iterable)
    listed: Any = [measured] if one else measured  # by a user, who may give anything
    if isinstance(subject, ChunkPlan):
        return plan_figure(plan_info(subject, listed))
    if [*listed]:
        raise PlanError("a chunk table predicts no samples/s to measure against; give a plan")
    return chunk_table_figure(subject)


def chunk_table_figure(table: ChunkTable) -> Figure:
    """Bytes and chunks per sample against the size of the chunk: minimal, expected, maximal; the best marked."""
    rows = sorted(table, key=lambda row: row.chunk_bytes)
    labels, best = ["×".join(map(str, row.chunk)) for row in rows], rows.index(table.best)
    chart = figure(6.4, 3.3)
    read = add_axes(chart, (0.105, 0.38, 0.375, 0.52), title="bytes read per sample")
    touched = add_axes(chart, (0.585, 0.38, 0.375, 0.52), title="chunks touched per sample")
    ring: Any = {"markersize": 10, "markerfacecolor": "none", "markeredgecolor": INK, "linestyle": "none"}
    with drawing():
        for axes, kind in ((read, "bytes"), (touched, "chunks")):
            low, mean, high = (
                [float(getattr(row, f"{name}_{kind}")) for row in rows] for name in ("minimal", "expected", "maximal")
            )
            places = range(len(rows))
            axes.fill_between(places, low, high, color=BLUE, alpha=0.12, linewidth=0)
            axes.plot(places, high, ":", color=VERMILION, marker="v", label="maximal")
            axes.plot(places, mean, "-", color=BLUE, marker="o", label="expected at random offsets")
            axes.plot(places, low, "--", color=GREEN, marker="^", label="minimal")
            axes.plot([best], [mean[best]], "o", label="best balance", **ring)
            axes.set_yscale("log")
            axes.set_xticks(list(places), labels, rotation=40, ha="right", rotation_mode="anchor")
            for place, text in enumerate(axes.get_xticklabels()):
                text.set_fontweight("bold" if place == best else "normal")
            axes.set_xlim(-0.4, len(labels) - 0.6)
        _draw_sample_size(read, table.sample_bytes)
        _label_bytes(read.yaxis, *read.get_ylim(), 6)
        _label_counts(touched, 8)
        chart.legend(*touched.get_legend_handles_labels(), loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.0))
    return chart


def plan_figure(info: PlanInfo) -> Figure:
    """Requests and bytes per sample, and samples/s by what binds, of every candidate; the choice marked."""
    chart = figure(6.8, 4.4)
    rate = f"{info.chosen_label}: {format_count(info.samples_per_second[info.chosen])} samples/s predicted"
    throughput = add_axes(chart, (0.53, 0.285, 0.43, 0.635), title=rate, x="chunk size")
    requests = add_axes(chart, (0.10, 0.655, 0.34, 0.265), title="requests per sample")
    read = add_axes(chart, (0.10, 0.285, 0.34, 0.265), title="bytes read per sample", x="chunk size")
    sizes = _at(info.chunk_bytes, info.best)
    with drawing():
        _draw_throughput(throughput, info)
        low, high = _at(info.least_requests, info.best), _at(info.most_requests, info.best)
        requests.fill_between(sizes, low, high, color=BLUE, alpha=0.12, linewidth=0)
        for axes, values in ((requests, info.requests_per_sample), (read, info.bytes_per_sample)):
            axes.plot(info.chunk_bytes, values, color=BLUE, **_OTHERS)
            axes.plot(sizes, _at(values, info.best), "-", color=BLUE)
            axes.plot([info.chunk_bytes[info.chosen]], [values[info.chosen]], color=BLUE, **_CHOICE)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        _draw_sample_size(read, info.sample_bytes)
        for axes, ticks in ((throughput, 5), (requests, 4), (read, 4)):
            _label_bytes(axes.xaxis, *axes.get_xlim(), ticks)
        _label_counts(throughput, 12)
        _label_counts(requests, 6)
        _label_bytes(read.yaxis, *read.get_ylim(), 5)
        requests.tick_params(labelbottom=False)
        _draw_keys(chart, info)
    return chart


def _at(values: Sequence[float], places: Iterable[int]) -> list[float]:
    return [values[place] for place in places]


def _draw_sample_size(axes: Axes, sample_bytes: float) -> None:
    """The bytes of a sample itself: less is not read, unless samples share."""
    axes.axhline(sample_bytes, color=INK, linewidth=0.8, alpha=0.6)
    axes.annotate(
        f"the sample itself, {format_bytes(sample_bytes)}", (1.0, sample_bytes), fontsize=8,
        xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points", ha="right", va="top",
    )  # fmt: skip
    bottom, top = axes.get_ylim()
    below_words = sample_bytes / (top / sample_bytes) ** 0.18
    axes.set_ylim(min(bottom, below_words), top)


def _draw_throughput(axes: Axes, info: PlanInfo) -> None:
    """Every candidate in the colour of what binds it, the best of each size larger, and the measurements."""
    sizes, speeds, chosen = info.chunk_bytes, info.samples_per_second, info.chosen
    axes.plot(_at(sizes, info.best), _at(speeds, info.best), "-", color=INK, linewidth=0.9, alpha=0.45)
    for name in (name for name in _BOUNDS if name in info.bounds):
        colour, marker = _BOUNDS[name]
        small = [place for place, bound in enumerate(info.bounds) if bound == name]
        large = [place for place in small if place in info.best]
        axes.plot(_at(sizes, small), _at(speeds, small), color=colour, **_OTHERS)
        axes.plot(_at(sizes, large), _at(speeds, large), marker, color=colour, markersize=6.0)
    ring: Any = {"markersize": 12, "markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.3}
    axes.plot([sizes[chosen]], [speeds[chosen]], "o", **ring)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for point in info.measured:
        size, speed, predicted = point
        axes.plot([size, size], [predicted, speed], ":", color=INK, linewidth=1.0)
        axes.plot([size], [predicted], "_", color=INK, markersize=8.0, markeredgewidth=1.4)
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
    fastest = max(info.best, key=lambda candidate: info.samples_per_second[candidate])
    rising = size < info.chunk_bytes[fastest]
    return -1 if place > 1 - _END else 1 if place < _END else -1 if rising else 1


def _draw_keys(chart: Figure, info: PlanInfo) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def sign(label: str, **style: Any) -> Line2D:
        return Line2D([], [], label=label, **{"color": INK, "linestyle": "none", **style})

    lines: list[Any] = [
        sign("this plan", marker="o", markersize=8.5, markerfacecolor="none"),
        sign("best of each size", linestyle="-", linewidth=1.2), sign("every layout considered", **_OTHERS),
        Patch(color=BLUE, alpha=0.2, linewidth=0, label="sample alone, least–most"),
    ]  # fmt: skip
    bounds = {name: style for name, style in _BOUNDS.items() if name in info.bounds}
    second = [sign("bound by:"), *(sign(name, color=color, marker=mark) for name, (color, mark) in bounds.items())]
    second += [sign("measured (ratio)", **_MEASURED)] if info.measured else []
    spacing: Any = {"loc": "lower center", "columnspacing": 1.3, "handletextpad": 0.5, "handlelength": 1.8}
    chart.legend(handles=lines, ncols=4, bbox_to_anchor=(0.5, 0.07), **spacing)
    chart.legend(handles=second, ncols=len(second), bbox_to_anchor=(0.5, 0.0), **spacing)


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
