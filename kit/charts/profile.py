"""The chart of a profile: what most time was spent in, as each profiler sees it, and the device's memory over time.

Left the parts of the work as Lightning names them, in the middle Python functions, right operations of the device; each
bar is a thing's own time, and what it holds is not in it. Below, the profiled steps on one line: the device working,
and the gaps in the colour of what the host did meanwhile. Memory is drawn where the pass recorded it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.errors import TrialError
from kit.studies.profiling.trace import CAUSES, TraceInfo
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.studies.profiling.profile import Profile

WIDTH_INCHES = 7.8
_BARS = 7
_LONGEST_NAME = 28
_SEEN_FRACTION = 0.002
"""Of the line, about a pixel."""
_MOST_GAPS = 4000
_COLOURS = {
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
        "operations": [] if trace is None else _of_device(trace),
    }
    shown = {title: bars for title, bars in columns.items() if bars}
    if not shown:
        raise TrialError(f"{profile.folder}: no pass has ended, so there is nothing to draw; wait() for it")
    below = (0.75 if trace else 0.0) + (0.95 if trace and trace.memory else 0.0)
    height = 0.55 + 0.3 + _BARS * 0.36 + 0.55 + below
    chart = look.figure(WIDTH_INCHES, height)
    with look.drawing():
        text = trace.finding if trace else "What most time was spent in"
        chart.text(0.012, 1 - 0.25 / height, text, fontsize=12.5, fontweight="bold", va="center")
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


def _of_device(trace: TraceInfo) -> list[_Bar]:
    on_gpu = trace.device == "gpu"
    return [(one.name, one.device_seconds if on_gpu else one.own_seconds) for one in trace.operations[:_BARS]]


def _draw_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    longest = max(seconds for _, seconds in bars) or 1e-9
    for place, (name, seconds) in enumerate(bars):
        axes.barh(place + 0.17, seconds / longest, 0.4, color=look.SKY, linewidth=0)
        axes.text(0, place - 0.24, _short(_plain(name), _LONGEST_NAME), fontsize=7.8, va="center")
        axes.text(1, place - 0.24, format_seconds(seconds), fontsize=7.8, va="center", ha="right")
    axes.set_xlim(0, 1)
    axes.set_ylim(_BARS - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_below(chart: Figure, trace: TraceInfo, height: float) -> None:
    from matplotlib.patches import Patch

    memory = 0.95 if trace.memory else 0.0
    line = look.add_axes(chart, (0.075, (0.75 + memory) / height, 0.885, 0.28 / height), grid="")
    line.set_title(f"the {trace.device.upper()}, and what it waited for")
    line.broken_barh([(0, 1e3 * trace.window_seconds)], (0, 1), facecolor="#333333", linewidth=0)
    seen = {cause for cause in CAUSES if trace.gap_fraction(cause) >= _SEEN_FRACTION and cause != "launching"}
    for cause in seen:
        spans = [(1e3 * gap.begin, 1e3 * gap.seconds) for gap in trace.gaps[:_MOST_GAPS] if gap.cause == cause]
        line.broken_barh(spans, (0, 1), facecolor=_COLOURS[cause], linewidth=0)
    line.set_xlim(0, 1e3 * trace.window_seconds)
    line.set_yticks([])
    if trace.memory:
        line.tick_params(labelbottom=False)
        _draw_memory(look.add_axes(chart, (0.075, 0.72 / height, 0.885, 0.72 / height)), trace)
    chart.axes[-1].set_xlabel("ms since the first profiled step began")
    handles = [Patch(facecolor="#333333", label="working")]
    handles += [Patch(facecolor=_COLOURS[cause], label=cause) for cause in CAUSES if cause in seen]
    chart.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=len(handles), columnspacing=1.2,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5,
    )  # fmt: skip


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
    """Without the kind that Lightning puts before an action, and what Python puts around what is built in.

    Of a strategy the name is left out too: there is one, and its actions are told from others by theirs.
    """
    built_in = re.match(r"<(?:built-in )?method '?([\w.]+)", name)
    if built_in:
        return built_in[1].removeprefix("torch._C.")
    kind, _, plain = name.rpartition("]")
    return plain.rpartition(".")[2] if kind.endswith("[Strategy") else (plain or name).lstrip(".")


def _function(row: Mapping[str, Any]) -> str:
    """One without a name of its own is told by its place."""
    name = str(row["function"])
    return f"{name} {Path(row['file']).name}:{row['line']}" if row["file"] != "~" and name.startswith("<") else name


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
