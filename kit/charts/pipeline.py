"""The chart of a pipeline: where the time of a trial went, as a Gantt, with the waits beside it and the wire below it.

`kit.records.trace.pipeline_info` turns events into numbers, `draw_pipeline` the numbers into one figure. Rows stand
for set-up, get batch, train and epoch, with a lane for each rank (and for batches read at the same time). Waiting for
data has one colour wherever it appears: in the gaps of *train* and in the histogram. The title is the finding. A limit
is drawn where it is near, and said in words where it is far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kit.charts import style as look
from kit.errors import TrialError
from kit.records.trace import PipelineInfo, Spans, histogram, merged, pipeline_info
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 7.8
MOST_RANKS = 8
_MOST_AT_ONCE = 4
_PIXELS = 900
"""About as many can be told apart along the time axis."""
_SET_UP_SHARE = 0.3
"""Of the width that set-up may take; what is longer is cut at the left, and its length said."""
_NEAR = 0.2
"""Share of a limit from which on it is drawn."""
_LEFT, _SPLIT, _HISTOGRAM_LEFT, _RIGHT = 0.105, 0.655, 0.735, 0.965
_COLOURS = {
    "set-up": look.PURPLE, "loader start-up": look.ORANGE, "get batch": look.SKY, "train": look.BLUE,
    "waiting for data": look.VERMILION, "validation": "#999999", "save": look.YELLOW, "epoch": look.GREEN,
}  # fmt: skip


def pipeline_figure(trial: Trial | str | Path, *, seconds: tuple[float, float] | None = None) -> Figure:
    """The Gantt of a trial with the waits for data beside it, and bytes/s and requests/s where its loader counts them.

    Args:
        trial: A trial, running or ended, or its run directory.
        seconds: Show this part only, counted from the first batch asked for; the shares stay those of the whole.

    Raises:
        TrialError: when no step was finished yet, or none between these seconds; when the directory is no run.
    """
    opened = trial if isinstance(trial, Trial) else Trial.open(trial)
    opened.poll()
    try:
        info = pipeline_info([*opened.events, *opened.steps], opened.config, seconds)
    except ValueError as error:
        raise TrialError(f"{opened.name}: {error}, so there is nothing to draw; wait() for it") from None
    if not any(info.train.values()):
        raise TrialError(f"{opened.name}: no step lies between {seconds} s; leave seconds out to see the whole")
    return draw_pipeline(info, seconds)


def draw_pipeline(info: PipelineInfo, seconds: tuple[float, float] | None = None) -> Figure:
    """The figure of these numbers."""
    height = 5.6 if info.rates else 3.7
    chart = look.figure(WIDTH_INCHES, height)

    def box(left: float, right: float, bottom: float, top: float) -> tuple[float, float, float, float]:
        """From inches below the top edge."""
        return (left, 1 - bottom / height, right - left, (bottom - top) / height)

    low, high = _limits(info, seconds)
    gantt = look.add_axes(chart, box(_LEFT, _SPLIT, 2.45, 0.62), grid="x")
    waits = look.add_axes(chart, box(_HISTOGRAM_LEFT, _RIGHT, 2.45, 0.62), x="wait of a step", y="steps")
    lower = [gantt]
    if info.rates:
        bytes_, requests = (
            look.add_axes(chart, box(_LEFT, _SPLIT, bottom, top)) for bottom, top in ((3.72, 2.98), (4.82, 4.08))
        )
        lower += [bytes_, requests]
    with look.drawing():
        chart.text(0.012, 1 - 0.28 / height, info.finding, fontsize=12.5, fontweight="bold", va="center")
        _draw_gantt(gantt, info, low, high)
        _draw_waits(waits, info)
        if info.rates:
            _draw_rates(bytes_, requests, info)
        for axes in lower:
            axes.set_xlim(low, high)
            axes.tick_params(labelbottom=axes is lower[-1])
        lower[-1].set_xlabel("seconds since the first batch was asked for")
        _draw_facts(chart, info, 1 - (2.98 if info.rates else 3.08) / height)
        _draw_key(chart, info)
    return chart


def _limits(info: PipelineInfo, seconds: tuple[float, float] | None) -> tuple[float, float]:
    if seconds is not None:
        return seconds
    before = min((begin for spans in info.set_up.values() for begin, _ in spans), default=0.0)
    end = max(info.end_seconds, 1e-3)
    return max(before, -end * _SET_UP_SHARE / (1 - _SET_UP_SHARE)), end * 1.01


# -- the Gantt


def _draw_gantt(axes: Axes, info: PipelineInfo, low: float, high: float) -> None:
    least_gap = (high - low) / _PIXELS
    rows = {"set-up": info.set_up, "get batch": info.get_batch, "train": info.train}
    rows |= {name: spans for name, spans in _told(info).items() if any(spans.values())}
    rows["epoch"] = info.epoch
    for place, (name, spans) in enumerate(rows.items()):
        _draw_row(axes, place, name, spans, info, least_gap)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    ranks = len(info.ranks)
    lanes = "" if ranks == 1 else f", {ranks} ranks from top to bottom"
    lanes += f" (the first {MOST_RANKS})" if ranks > MOST_RANKS else ""
    axes.set_title(f"what each moment was spent on{lanes}")
    if low > min((begin for found in info.set_up.values() for begin, _ in found), default=0.0):
        text = f"‹ {format_seconds(info.set_up_seconds)}"
        axes.text(
            low,
            0.4 / min(ranks, MOST_RANKS) - 0.4,
            f" {text}",
            va="center",
            fontsize=8,
            color="white",
            fontweight="bold",
        )


def _draw_row(
    axes: Axes, place: int, name: str, by_rank: Mapping[int, Spans], info: PipelineInfo, least_gap: float
) -> None:
    ranks = info.ranks[:MOST_RANKS]
    height = 0.8 / len(ranks)
    for lane, rank in enumerate(ranks):
        top = place - 0.4 + lane * height
        extent = (top + 0.04 * height, 0.92 * height)
        if name == "get batch":
            _draw_at_once(axes, by_rank[rank], extent, least_gap)
            continue
        if name == "set-up":
            _bars(axes, info.start_up[rank], extent, "loader start-up", least_gap)
        if name == "train":
            _bars(axes, info.wait[rank], extent, "waiting for data", least_gap)
        _bars(axes, by_rank[rank], extent, name, 0.0 if name == "epoch" else least_gap)


def _draw_at_once(axes: Axes, spans: Spans, extent: tuple[float, float], least_gap: float) -> None:
    """Batches read at the same time stand below each other; more than there is room for share the last lane."""
    lanes: list[list[tuple[float, float]]] = []
    for begin, end in spans:
        free = next((lane for lane in lanes if lane[-1][1] <= begin), None)
        if free is None and len(lanes) < _MOST_AT_ONCE:
            lanes.append(free := [])
        (lanes[-1] if free is None else free).append((begin, end))
    height = extent[1] / max(1, len(lanes))
    for place, lane in enumerate(lanes):
        _bars(axes, tuple(lane), (extent[0] + place * height, 0.88 * height), "get batch", least_gap)


def _bars(axes: Axes, spans: Spans, extent: tuple[float, float], name: str, least_gap: float) -> None:
    shown = [(begin, max(end - begin, least_gap)) for begin, end in merged(spans, least_gap)]
    edge = {"edgecolor": look.PAPER, "linewidth": 1.0} if name == "epoch" else {"linewidth": 0}
    axes.broken_barh(shown, extent, facecolor=_COLOURS[name], zorder=2, **edge)


def _told(info: PipelineInfo) -> dict[str, Mapping[int, Spans]]:
    """What has a row only where it happened."""
    return {"validation": info.validation, "save": info.save}


def _draw_key(chart: Figure, info: PipelineInfo) -> None:
    from matplotlib.patches import Patch

    names = ["set-up", "loader start-up", "get batch", "train", "waiting for data", "epoch"]
    names += [name for name, spans in _told(info).items() if any(spans.values())]
    handles = [Patch(facecolor=_COLOURS[name], label=name) for name in names]
    chart.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=len(names), columnspacing=1.4,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5,
    )  # fmt: skip


# -- beside it and below it


def _draw_waits(axes: Axes, info: PipelineInfo) -> None:
    from matplotlib.ticker import MaxNLocator

    if not info.waits:
        axes.set_title("no step after warm-up")
        return
    edges, counts = histogram(info.waits)
    factor, unit = (1.0, "s") if edges[-1] >= 1 else (1e3, "ms")
    axes.stairs(counts, [edge * factor for edge in edges], fill=True, color=look.VERMILION)
    axes.set_xlabel(f"wait of a step, {unit}")
    axes.set_xlim(0, edges[-1] * factor)
    axes.set_ylim(0, max(counts) * 1.05)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    mean = statistics.fmean(info.waits)
    axes.axvline(mean * factor, color=look.INK, linewidth=1.0, linestyle="--")
    axes.set_title(f"waits: mean {format_seconds(mean)}")


def _draw_rates(bytes_: Axes, requests: Axes, info: PipelineInfo) -> None:
    rates = info.rates
    assert rates is not None
    _draw_rate(
        bytes_, rates.edges, rates.bytes_per_second, info.limit_bytes_per_second, "read from the store",
        lambda value: f"{format_bytes(value)}/s", binary=True,
    )  # fmt: skip
    _draw_rate(
        requests, rates.edges, rates.requests_per_second, info.limit_requests_per_second, "requests to the store",
        lambda value: f"{format_count(round(value))}/s", binary=False,
    )  # fmt: skip


def _draw_rate(
    axes: Axes, edges: tuple[float, ...], values: tuple[float, ...], limit: float | None, title: str,
    text: Callable[[float], str], *, binary: bool,
) -> None:  # fmt: skip
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    axes.stairs(values, edges, fill=True, color=look.GREEN, alpha=0.35)
    axes.stairs(values, edges, color=look.GREEN, linewidth=1.2)
    peak = max(values)
    near = limit is not None and peak >= _NEAR * limit
    note = "" if limit is None else f", limit {text(limit)}"
    axes.set_title(f"{title}: at most {text(peak)}{note}")
    axes.set_ylim(0, max(peak, limit if near and limit else 0.0, 1e-9) * 1.12)
    if near and limit:
        axes.axhline(limit, color=look.INK, linewidth=1.2, linestyle="--")
    if binary:
        top = axes.get_ylim()[1]
        step = 2.0 ** math.ceil(math.log2(top / 4))
        axes.yaxis.set_major_locator(FixedLocator([place * step for place in range(int(top / step) + 1)]))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 4, 5, 8, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value) if value else "0"))


def _draw_facts(chart: Figure, info: PipelineInfo, top: float) -> None:
    """The settings and the averages, as the reference chart has them in a box."""
    facts = [
        ("set-up", format_seconds(info.set_up_seconds)),
        ("loader start-up", format_seconds(info.start_up_seconds)),
        ("get batch, mean", format_seconds(info.mean_get_batch_seconds)),
        ("train, mean", format_seconds(info.mean_train_seconds)),
        ("samples/s", format_count(info.samples_per_second) if info.waits else "–"),
        *info.settings,
    ]
    if not info.rates:
        lines = (facts[: -len(info.settings)], info.settings) if info.settings else (facts,)
        text = "\n".join(" · ".join(f"{name} {value}" for name, value in line) for line in lines)
        chart.text(_LEFT, top, text, fontsize=8.5, va="top")
        return
    step = 0.165 / chart.get_size_inches()[1]
    for place, (name, value) in enumerate(facts):
        chart.text(_HISTOGRAM_LEFT - 0.045, top - place * step, name, fontsize=8.5, va="top")
        chart.text(_RIGHT, top - place * step, value, fontsize=8.5, va="top", ha="right")
