"""Charts of where time goes: the pipeline of a trial, and what its profilers saw.

`kit.records.trace.pipeline_info` turns events into numbers, `draw_pipeline` the numbers into one figure. Rows stand
for set-up, get batch, train and epoch, with a lane for each rank (and for batches read at the same time). Waiting for
data has one colour wherever it appears: in the gaps of *train* and in the histogram. The title is the finding. A limit
is drawn where it is near, and said in words where it is far.

`profile_figure` shows what most time was spent in, as each profiler sees it. Left the parts of the work as Lightning
names them, in the middle Python functions, right operations of the device; each bar is a thing's own time, and what it
holds is not in it. Below, the profiled steps on one line: the device working, and the gaps in the colour of what the
host did meanwhile. Memory is drawn where the pass recorded it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.errors import TrialError
from kit.records.trace import PipelineInfo, Spans, histogram, merged, pipeline_info
from kit.studies.profiling.trace import CAUSES, TraceInfo
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.studies.profiling.profile import Profile

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

    if seconds is None:
        end = max(info.end_seconds, 1e-3)
        low, high = max(_set_up_begin(info), -end * _SET_UP_SHARE / (1 - _SET_UP_SHARE)), end * 1.01
    else:
        low, high = seconds
    gantt = look.add_axes(chart, box(_LEFT, _SPLIT, 2.45, 0.62), grid="x")
    waits = look.add_axes(chart, box(_HISTOGRAM_LEFT, _RIGHT, 2.45, 0.62), x="wait of a step", y="steps")
    lower = [gantt]
    if info.rates:
        bytes_, requests = (
            look.add_axes(chart, box(_LEFT, _SPLIT, bottom, top)) for bottom, top in ((3.72, 2.98), (4.82, 4.08))
        )
        lower += [bytes_, requests]
    with look.drawing():
        look.finding(chart, info.finding, 0.28)
        _draw_gantt(gantt, info, low, high)
        _draw_waits(waits, info)
        if info.rates:
            _draw_rates(bytes_, requests, info)
        for axes in lower:
            axes.set_xlim(low, high)
            axes.tick_params(labelbottom=axes is lower[-1])
        lower[-1].set_xlabel("seconds since the first batch was asked for")
        _draw_facts(chart, info, 1 - (2.98 if info.rates else 3.08) / height)
        names = ["set-up", "loader start-up", "get batch", "train", "waiting for data", "epoch", *_optional_rows(info)]
        look.colour_key(chart, {name: _COLOURS[name] for name in names}, columnspacing=1.4)
    return chart


def _set_up_begin(info: PipelineInfo) -> float:
    return min((begin for spans in info.set_up.values() for begin, _ in spans), default=0.0)


def _optional_rows(info: PipelineInfo) -> dict[str, Mapping[int, Spans]]:
    """Rows that are drawn only where there is something in them."""
    rows = {"validation": info.validation, "save": info.save}
    return {name: spans for name, spans in rows.items() if any(spans.values())}


# -- the Gantt


def _draw_gantt(axes: Axes, info: PipelineInfo, low: float, high: float) -> None:
    least_gap = (high - low) / _PIXELS
    rows = {"set-up": info.set_up, "get batch": info.get_batch, "train": info.train, **_optional_rows(info)}
    rows["epoch"] = info.epoch
    ranks = info.ranks[:MOST_RANKS]
    height = 0.8 / len(ranks)
    for place, (name, spans) in enumerate(rows.items()):
        for lane, rank in enumerate(ranks):
            extent = (place - 0.4 + (lane + 0.04) * height, 0.92 * height)
            if name == "get batch":
                _draw_at_once(axes, spans[rank], extent, least_gap)
                continue
            if name == "set-up":
                _bars(axes, info.start_up[rank], extent, "loader start-up", least_gap)
            if name == "train":
                _bars(axes, info.wait[rank], extent, "waiting for data", least_gap)
            _bars(axes, spans[rank], extent, name, 0.0 if name == "epoch" else least_gap)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    several = f", {len(info.ranks)} ranks from top to bottom" if len(info.ranks) > 1 else ""
    several += f" (the first {MOST_RANKS})" if len(info.ranks) > MOST_RANKS else ""
    if info.warmup_seconds > max(0.0, low):
        look.shade_warmup(axes, min(info.warmup_seconds, high), max(0.0, low))
        several += "; warm-up is shaded"
    axes.set_title(f"{'each moment' if len(info.ranks) > 1 else 'what each moment was spent on'}{several}")
    if low > _set_up_begin(info):
        text = f" ‹ {format_seconds(info.set_up_seconds)}"
        axes.text(low, height / 2 - 0.4, text, va="center", fontsize=8, color="white", fontweight="bold")


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
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    rates = info.rates
    assert rates is not None
    binary: tuple[Any, ...] = (
        bytes_, rates.bytes_per_second, info.limit_bytes_per_second, "read from the store",
        lambda value: f"{format_bytes(value)}/s",
    )  # fmt: skip
    decimal: tuple[Any, ...] = (
        requests, rates.requests_per_second, info.limit_requests_per_second, "requests to the store",
        lambda value: f"{format_count(round(value))}/s",
    )  # fmt: skip
    for axes, values, limit, title, text in (binary, decimal):
        axes.stairs(values, rates.edges, fill=True, color=look.GREEN, alpha=0.35)
        axes.stairs(values, rates.edges, color=look.GREEN, linewidth=1.2)
        peak, near = max(values), limit if limit and max(values) >= _NEAR * limit else 0.0
        allowed = "" if limit is None else f", of the config's {text(limit)}"
        axes.set_title(f"{title}: at most {text(peak)}{allowed}")
        axes.set_ylim(0, max(peak, near, 1e-9) * 1.12)
        if near:
            axes.axhline(near, color=look.INK, linewidth=1.2, linestyle="--")
        axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 4, 5, 8, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value) if value else "0"))
    top = bytes_.get_ylim()[1]
    step = 2.0 ** math.ceil(math.log2(top / 4))
    bytes_.yaxis.set_major_locator(FixedLocator([place * step for place in range(int(top / step) + 1)]))


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


# -- what profilers saw

_BARS = 7
_LONGEST_NAME = 28
_SEEN_FRACTION = 0.002
"""Of the line, about a pixel."""
_MOST_GAPS = 4000
_CAUSES = {
    "host sync": look.PURPLE, "data loading": look.VERMILION, "host-to-device copy": look.ORANGE,
    "communication": "#6a3d9a", "forward": look.SKY, "backward": look.BLUE, "optimizer": look.GREEN,
    "python": "#999999", "launching": "#d0d0d0",
}  # fmt: skip
_Bar = tuple[str, float]


def profile_figure(profile: Profile) -> Figure:
    """Own times by each profiler, and the timeline of the first rank.

    Raises:
        TrialError: when no pass has ended yet.
    """
    trace = profile.trace
    columns = {
        "Lightning's actions": _merged((row["action"], row["own_seconds"]) for row in profile.actions),
        "Python functions": _merged((_function(row), row["own_seconds"]) for row in profile.functions),
        "operations": [
            (one.name, one.device_seconds if trace.device == "gpu" else one.own_seconds)
            for one in trace.operations[:_BARS]
        ]
        if trace
        else [],
    }
    shown = {title: bars for title, bars in columns.items() if bars}
    if not shown:
        raise TrialError(f"{profile.folder}: no pass has ended, so there is nothing to draw; wait() for it")
    below = (0.75 if trace else 0.0) + (0.95 if trace and trace.memory else 0.0)
    height = 0.55 + 0.3 + _BARS * 0.36 + 0.55 + below
    chart = look.figure(WIDTH_INCHES, height)
    with look.drawing():
        look.finding(chart, trace.finding if trace else "What most time was spent in", 0.25)
        width = 0.97 / len(shown)
        for place, (title, bars) in enumerate(shown.items()):
            box = (0.015 + place * width, 1 - (0.85 + _BARS * 0.36) / height, width - 0.035, _BARS * 0.36 / height)
            _draw_bars(look.add_axes(chart, box, title=f"{title}, own time", grid="x"), bars)
        if trace:
            _draw_below(chart, trace, height)
    return chart


def _merged(bars: Iterable[_Bar]) -> list[_Bar]:
    """All ranks of a name together, the longest first."""
    found: dict[str, float] = {}
    for name, seconds in bars:
        found[name] = found.get(name, 0.0) + seconds
    return sorted(found.items(), key=lambda bar: -bar[1])[:_BARS]


def _draw_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    longest = max(seconds for _, seconds in bars) or 1e-9
    for place, (name, seconds) in enumerate(bars):
        axes.barh(place + 0.17, seconds / longest, 0.4, color=look.SKY, linewidth=0)
        plain = _plain(name)
        short = plain if len(plain) <= _LONGEST_NAME else plain[: _LONGEST_NAME - 1] + "…"
        axes.text(0, place - 0.24, short, fontsize=7.8, va="center")
        axes.text(1, place - 0.24, format_seconds(seconds), fontsize=7.8, va="center", ha="right")
    axes.set_xlim(0, 1)
    axes.set_ylim(_BARS - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_below(chart: Figure, trace: TraceInfo, height: float) -> None:
    memory = 0.95 if trace.memory else 0.0
    line = look.add_axes(chart, (0.075, (0.75 + memory) / height, 0.885, 0.28 / height), grid="")
    line.set_title(f"the {trace.device.upper()}, and what it waited for")
    line.broken_barh([(0, 1e3 * trace.window_seconds)], (0, 1), facecolor="#333333", linewidth=0)
    seen = {cause for cause in CAUSES if trace.gap_fraction(cause) >= _SEEN_FRACTION and cause != "launching"}
    for cause in seen:
        spans = [(1e3 * gap.begin, 1e3 * gap.seconds) for gap in trace.gaps[:_MOST_GAPS] if gap.cause == cause]
        line.broken_barh(spans, (0, 1), facecolor=_CAUSES[cause], linewidth=0)
    line.set_xlim(0, 1e3 * trace.window_seconds)
    line.set_yticks([])
    if trace.memory:
        line.tick_params(labelbottom=False)
        _draw_memory(look.add_axes(chart, (0.075, 0.72 / height, 0.885, 0.72 / height)), trace)
    chart.axes[-1].set_xlabel("ms since the first profiled step began")
    look.colour_key(chart, {"working": "#333333", **{cause: _CAUSES[cause] for cause in CAUSES if cause in seen}})


def _draw_memory(axes: Axes, trace: TraceInfo) -> None:
    colours = dict(zip(trace.memory, look.COLOURS, strict=False))
    for device, (seconds, values) in trace.memory.items():
        moments = [1e3 * moment for moment in seconds]
        axes.step(moments, values, where="post", color=colours[device], linewidth=1.0, label=device)
    most = max(max(values) for _, values in trace.memory.values())
    axes.set_xlim(0, 1e3 * trace.window_seconds)
    axes.set_ylim(0, most * 1.1 or 1)
    axes.set_yticks([0, most], ["0", format_bytes(most)])
    axes.set_title(f"allocated ({', '.join(trace.memory)})")


def _plain(name: str) -> str:
    """An action without the kind that Lightning puts before it, a built-in function without Python's `<...>`.

    The name of a strategy goes too: there is one, and its actions have names of their own.
    """
    built_in = re.match(r"<(?:built-in )?method '?([\w.]+)", name)
    if built_in:
        return built_in[1].removeprefix("torch._C.")
    kind, _, plain = name.rpartition("]")
    return plain.rpartition(".")[2] if kind.endswith("[Strategy") else (plain or name).lstrip(".")


def _function(row: Mapping[str, Any]) -> str:
    """A function without a name, such as a lambda, gets its file and line."""
    name = str(row["function"])
    return f"{name} {Path(row['file']).name}:{row['line']}" if row["file"] != "~" and name.startswith("<") else name
