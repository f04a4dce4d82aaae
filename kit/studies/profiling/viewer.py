"""TraceViewer: traces of torch's profiler in the notebook, as one page that needs no network and no other program.

What the page says of each rank: an overview (how much the device worked, what it waited for, step by step), operators,
kernels, memory and the timeline; of several ranks, how a step of each is spent and who waits for whom; before and after
a change, which operations and kernels it changed. Any trace of torch's profiler will do, also another program's.

The timeline has a row of bars for each thread of the host and each stream of the device, with nested bars below their
parents. Wheel or + and − zoom, dragging or arrow keys move, hovering shows the name and length of a bar, and a name
typed into the box is highlighted. The bars can be saved as a trace that chrome://tracing and Perfetto open. Above
`MOST_BARS` of all ranks the shortest bars are left out, and the page says how many.

Ranks: a collective ends on all ranks at nearly the same time, so the rank that comes last is in it for the shortest
time. What the others take longer than that is waiting for it, the rest is the exchange itself. Calls are matched by
their order among those of the same name, which all ranks make alike; where their numbers differ, waiting is not known.
Before and after: seconds of a step, so that traces of different lengths compare.
"""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import TrialError
from kit.studies.profiling.trace import CAUSES, Kernel, Operation, TraceInfo, trace_info
from kit.studies.profiling.trace_events import TraceEvents, read_events
from kit.units import format_bytes, format_seconds

MOST_BARS = 40_000
_MOST_ROWS = 400
"""Of a table of operators or kernels; the rest took least."""
_MOST_MOMENTS = 2_000
"""Of a curve of memory: it is as wide as a screen."""
_KINDS = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy",
          "gpu_memset", "gpu_user_annotation")  # fmt: skip
_ON_DEVICE = ("kernel", "gpu")
_HEIGHT_PIXELS = 560
_NOTABLE_FRACTION = 0.05
"""Of a step: less waiting than that is not told."""
Bar = tuple[int, int, float, float, int]
"""Row, depth, begin and length in µs, and which name."""


class TraceViewer:
    """Shows itself in a notebook; `page` is the whole of it, `save` writes it, `traces` has the numbers."""

    def __init__(self, *paths: str | Path, against: str | Path | None = None) -> None:
        """Read traces, one after another.

        Raises:
            TrialError: when a file is no trace or has no bars.
        """
        self.paths = tuple(map(Path, paths))
        read = [_read(path, MOST_BARS // len(self.paths)) for path in self.paths]
        self.traces: dict[int, TraceInfo] = {trace.rank: trace for trace, _ in read}
        """By rank."""
        if len(self.traces) < len(read):
            ranks = ", ".join(f"{trace.path.name} is of rank {trace.rank}" for trace, _ in read)
            raise TrialError(f"several traces of one rank: {ranks}; compare two with against=")
        self.before = trace_info(read_events(against), against) if against is not None else None
        self.page = self._page(dict(sorted((trace.rank, bars) for trace, bars in read)))

    def save(self, path: str | Path) -> Path:
        """Write the page as one HTML file."""
        file = Path(path)
        file.write_text(self.page, encoding="utf-8")
        return file

    def _page(self, timelines: Mapping[int, Mapping[str, Any]]) -> str:
        ranks = [_rank_data(self.traces[rank], timeline) for rank, timeline in timelines.items()]
        data: dict[str, Any] = {"ranks": ranks, "together": None, "compared": None}
        if len(ranks) > 1:
            times = rank_times([*self.traces.values()])
            data["together"] = {
                "finding": rank_finding(times),
                "parts": ["computing", "exchanging", "waiting", "copying", "idle"],
                "rows": [
                    [one.rank, *map(_known, (one.computing, one.exchanging, one.waiting, one.copying, one.idle)),
                     one.hidden] for one in times
                ],
            }  # fmt: skip
        if self.before is not None:
            data["compared"] = _compared(self.before, self.traces[min(self.traces)])
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028")  # cannot end the script it stands in
        return _TEMPLATE.replace("{{title}}", html.escape(self.paths[0].name)).replace("{{data}}", safe)

    def __repr__(self) -> str:
        sentences = [f"rank {rank}: {trace.sentence}" for rank, trace in sorted(self.traces.items())]
        return "\n".join((
            f"Trace {', '.join(map(str, self.paths))}", *sentences,
            "A notebook shows it; save('trace.html') writes a page. chrome://tracing and Perfetto open the file too.",
        ))  # fmt: skip

    def _repr_html_(self) -> str:
        style = f"width: 100%; box-sizing: border-box; height: {_HEIGHT_PIXELS}px; border: 1px solid #ccc"
        title = html.escape(f"trace {self.paths[0].name}")
        # sandboxed: names of operations are not trusted
        return (
            f'<iframe title="{title}" sandbox="allow-scripts allow-downloads" style="{style}" '
            f'srcdoc="{html.escape(self.page)}"></iframe>'
        )


def open_trace(*paths: str | Path, against: str | Path | None = None) -> TraceViewer:
    """Show traces of torch's profiler, of kit or of any other program, without network.

    Args:
        paths: Files (`.json`, `.json.gz`), one for each rank of one training, or one folder that holds them.
        against: A file of the same training before a change, whose first rank is compared with.

    Returns:
        A page for a notebook, with `save("trace.html")` and, by rank, `traces` with the numbers.

    Raises:
        TrialError: for a folder without traces, files that are none, and several files of one rank.

    Example:
        >>> viewer = kit.studies.open_trace("trace.json")
        >>> print(viewer.traces[0].finding)
        The CPU works 61% of the time; most of the rest (39%) goes to Python
    """
    files = [file for path in map(Path, paths) for file in (_files(path) if path.is_dir() else [path])]
    if not files:
        raise TrialError("no trace was named; give the files that torch's profiler wrote, or their folder")
    return TraceViewer(*files, against=against)


def _files(folder: Path) -> list[Path]:
    found = sorted((*folder.glob("*.json"), *folder.glob("*.json.gz")))
    traces = [path for path in found if ".pt.trace.json" in path.name] or found
    if not traces:
        raise TrialError(f"{folder} holds no trace; torch's profiler writes files that end in .pt.trace.json")
    return traces


def _read(path: Path, most_bars: int) -> tuple[TraceInfo, dict[str, Any]]:
    """The numbers of one file and its timeline; its events are gone after that."""
    events = read_events(path)
    if not len(events):
        raise TrialError(f"{path.name} holds nothing that took time")
    return trace_info(events, path), _timeline(events, most_bars)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


# -- what the page says of a rank


def _rank_data(trace: TraceInfo, timeline: Mapping[str, Any]) -> dict[str, Any]:
    parts = ["busy", *(cause for cause in CAUSES if cause in trace.gap_seconds)]
    steps = trace.step_seconds or ({"busy": trace.busy_seconds, **trace.gap_seconds},)
    return {
        "rank": trace.rank, "device": trace.device, "sentence": trace.sentence, "tiles": _tiles(trace), "parts": parts,
        "steps": [[step.get(part, 0.0) for part in parts] for step in steps],
        "operations": [
            [one.name, one.calls, one.own_seconds, one.total_seconds, one.device_seconds, one.allocated_bytes]
            for one in trace.operations[:_MOST_ROWS]
        ],
        "kernels": [
            [one.name, one.calls, one.seconds, one.seconds / one.calls, one.shortest_seconds, one.longest_seconds,
             _known(one.occupancy), _known(one.blocks), "yes" if one.tensor_cores else ""]
            for one in trace.kernels[:_MOST_ROWS]
        ],
        "timeline": timeline,
    }  # fmt: skip


def _tiles(trace: TraceInfo) -> list[tuple[str, str, str]]:
    """Label, value and explanation of the figures on top."""
    host = "kernels, copies and fills" if trace.device == "gpu" else "operators, but those that load data"
    found = [
        ("a step", format_seconds(trace.window_seconds / trace.steps), f"{trace.steps} steps were profiled")
        if not trace.counted_by
        else ("all of it", format_seconds(trace.window_seconds), trace.steps_words),
        (f"{trace.device.upper()} works", f"{trace.busy_fraction:.0%}", f"of the time: {host}"),
    ]
    if trace.named:
        most = trace.named[0]
        found.append((most.name, format_seconds(most.total_seconds), f"{most.calls} calls of your record_function"))
    if trace.device_name:
        found.insert(0, ("device", trace.device_name, f"rank {trace.rank} of {trace.world_size}"))
    if trace.device == "gpu":
        found += [
            ("tensor cores", f"{trace.tensor_core_fraction:.0%}", "of the time of kernels, judged by their names"),
            ("waits for the GPU", f"{trace.syncs_per_step:.3g}", "a step: the host asked for a value or a sync"),
        ]
        if not math.isnan(trace.occupancy):
            found.append(("occupancy", f"{trace.occupancy:.0%}", "of the warps of a multiprocessor, as estimated"))
    if trace.communicating_seconds:
        hidden = trace.hidden_seconds / trace.communicating_seconds
        said = f"of the time; {hidden:.0%} of it beside computing"
        found.append(("exchanging", f"{trace.communicating_seconds / trace.window_seconds:.0%}", said))
    if trace.memory:
        peak = max(max(values) for _, values in trace.memory.values())
        found.append(("allocated at most", format_bytes(peak), "while it was profiled"))
    return found


def _compared(before: TraceInfo, after: TraceInfo) -> dict[str, Any]:
    was, now = before.window_seconds / before.steps, after.window_seconds / after.steps
    change = f"{was / now:.2f} × as fast" if now <= was else f"{now / was:.2f} × as long"
    rows = [
        ("a step", format_seconds(was), format_seconds(now)),
        ("device works", f"{before.busy_fraction:.0%}", f"{after.busy_fraction:.0%}"),
    ]
    for cause in CAUSES:
        if cause in before.gap_seconds or cause in after.gap_seconds:
            gone = [format_seconds(one.gap_seconds.get(cause, 0.0) / one.steps) for one in (before, after)]
            rows.append((f"{cause}, a step", gone[0], gone[1]))
    return {
        "sentence": f"A step takes {format_seconds(now)}, before {format_seconds(was)}: {change}.",
        "before": before.path.name, "after": after.path.name, "rows": rows,
        "operations": _difference_rows(compare_operations(before, after)),
        "kernels": _difference_rows(compare_kernels(before, after)),
    }  # fmt: skip


def _difference_rows(found: Sequence[Difference]) -> list[list[Any]]:
    return [
        [one.name, one.before, one.after, one.seconds, one.calls_before, one.calls_after] for one in found[:_MOST_ROWS]
    ]


# -- its timeline


def _timeline(events: TraceEvents, most_bars: int) -> dict[str, Any]:
    places = np.flatnonzero(events.of_kinds(*_KINDS))
    if not len(places):
        places = np.arange(len(events))
    left_out = max(0, len(places) - most_bars)
    if left_out:
        longest = np.argpartition(-events.length[places], most_bars - 1)[:most_bars]
        places = np.sort(places[longest])
    zero = float(events.begin[places].min())
    steps = places[events.named(r"^ProfilerStep#")[places] & ~events.named_kinds("gpu")[places]]
    others = events.by_thread(np.setdiff1d(places, steps))
    # Steps first, since each begins in the middle of what Lightning does; then the host, the busiest thread first.
    rows = [("steps", steps)] if len(steps) else []
    titled = [(_title(events, part), part) for part in others]
    rows += sorted(titled, key=lambda row: (row[0].startswith("GPU"), -len(row[1])))
    names: dict[tuple[int, int], int] = {}
    bars: list[Bar] = []
    heights = []
    for row, (_, part) in enumerate(rows):
        depths = _depths(events, part)
        heights.append(1 + max(depths))
        for place, depth in zip(part.tolist(), depths, strict=True):
            name = names.setdefault((int(events.name[place]), int(events.kind[place])), len(names))
            begin, length = round(float(events.begin[place]) - zero, 3), round(float(events.length[place]), 3)
            bars.append((row, depth, begin, length, name))
    return {
        "rows": [[title, height] for (title, _), height in zip(rows, heights, strict=True)], "bars": bars,
        "names": [[events.names[name].removeprefix("[pl][profile]"), events.kinds[kind]] for name, kind in names],
        "memory": _memory(events, zero), "left_out": left_out,
    }  # fmt: skip


def _title(events: TraceEvents, places: NDArray[np.int64]) -> str:
    process, thread = events.threads[int(events.thread[places[0]])]
    on_device = all(events.kinds[kind].startswith(_ON_DEVICE) for kind in np.unique(events.kind[places]).tolist())
    return f"GPU {process}, stream {thread.removeprefix('stream ')}" if on_device else f"thread {thread}"


def _depths(events: TraceEvents, places: NDArray[np.int64]) -> list[int]:
    """In how many others each lies."""
    depths, ends = [], list[float]()
    for begin, end in zip(events.begin[places].tolist(), events.end[places].tolist(), strict=True):
        while ends and ends[-1] <= begin:
            ends.pop()
        depths.append(len(ends))
        ends.append(end)
    return depths


def _memory(events: TraceEvents, zero: float) -> list[tuple[float, float]]:
    """(µs, bytes) of the device that is trained on: of the GPU where the trace has any. The highest of neighbours."""
    devices = sorted(events.allocated, key=lambda device: device == "CPU")
    if not devices:
        return []
    moments, values, _ = events.allocated[devices[0]]
    shown = np.arange(len(values))
    if len(values) > _MOST_MOMENTS:
        parts = np.array_split(shown, _MOST_MOMENTS)
        shown = np.array([part[np.argmax(values[part])] for part in parts])
    return [(round(float(moments[at]) - zero, 1), float(values[at])) for at in shown.tolist()]


_TEMPLATE = (Path(__file__).with_name("trace_viewer.html")).read_text(encoding="utf-8")


# -- several traces beside each other


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where a step of one rank goes; seconds a step that add to its length."""

    rank: int
    computing: float
    """Also while something was exchanged."""
    exchanging: float
    """With nothing else to compute, and with every rank there."""
    waiting: float
    """In a collective for ranks that came later, with nothing else to compute; NaN where calls do not match."""
    copying: float
    """Copies and fills beside no kernel."""
    idle: float
    hidden: float
    """Of the exchange, in which something was computed too."""

    @property
    def step(self) -> float:
        waiting = 0.0 if math.isnan(self.waiting) else self.waiting
        return math.fsum((self.computing, self.exchanging, waiting, self.copying, self.idle))


def rank_times(traces: Sequence[TraceInfo]) -> list[RankTime]:
    """Each rank's step, in the order of the ranks."""
    waited = _waited(traces)
    found = []
    for trace in sorted(traces, key=lambda one: one.rank):
        open_ = max(0.0, trace.communicating_seconds - trace.hidden_seconds)
        in_calls = math.fsum(call.seconds for call in trace.collectives)
        waiting = open_ * (waited.get(trace.rank, math.nan) / in_calls if in_calls else 0.0)
        copying = max(0.0, trace.busy_seconds - trace.computing_seconds - open_)
        idle = trace.window_seconds - trace.computing_seconds - open_ - copying
        exchanging = open_ if math.isnan(waiting) else open_ - waiting
        values = (trace.computing_seconds, exchanging, waiting, copying, max(0.0, idle), trace.hidden_seconds)
        found.append(RankTime(trace.rank, *(value / trace.steps for value in values)))
    return found


def _waited(traces: Sequence[TraceInfo]) -> dict[int, float]:
    """Seconds by rank in collectives beyond those of the rank that came last; empty where calls do not match."""
    by_name: defaultdict[str, list[list[float]]] = defaultdict(list)
    for trace in traces:
        mine: defaultdict[str, list[float]] = defaultdict(list)
        for call in trace.collectives:
            mine[call.name].append(call.seconds)
        for name, seconds in mine.items():
            by_name[name].append(seconds)
    if len(traces) < 2 or any(
        len(ranks) != len(traces) or len({len(seconds) for seconds in ranks}) > 1 for ranks in by_name.values()
    ):
        return {}
    waited = dict.fromkeys((trace.rank for trace in traces), 0.0)
    for ranks in by_name.values():
        for together in zip(*ranks, strict=True):
            for trace, seconds in zip(traces, together, strict=True):
                waited[trace.rank] += seconds - min(together)
    return waited


def rank_finding(times: Sequence[RankTime]) -> str:
    """In one sentence, which rank the others wait for, or that none does."""
    if len(times) < 2:
        return "One rank alone: nothing is exchanged."
    if any(math.isnan(time.waiting) for time in times):
        return "The traces do not hold the same collectives, so who waits for whom is not known."
    last = min(times, key=lambda time: time.waiting)
    others = [time.waiting for time in times if time is not last]
    lost = max(others) - last.waiting
    if lost < _NOTABLE_FRACTION * last.step:
        return f"No rank makes the others wait: at most {format_seconds(max(others))} of a step."
    computing = last.computing / max(min(time.computing for time in times), 1e-12)
    cause = f"it computes {computing:.2f} × as long" if computing > 1.05 else "it begins later, not by computing longer"
    return f"Rank {last.rank} makes the others wait, up to {format_seconds(lost)} a step: {cause}."


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of a step under one name, before and after."""

    name: str
    before: float
    after: float
    calls_before: float
    """A step."""
    calls_after: float

    @property
    def seconds(self) -> float:
        return self.after - self.before


def compare_operations(before: TraceInfo, after: TraceInfo) -> list[Difference]:
    """Operations by how much their step changed; seconds of the GPU where both have one, else of the host."""
    on_gpu = before.device == after.device == "gpu"

    def seconds(operation: Operation) -> float:
        return operation.device_seconds if on_gpu else operation.own_seconds

    return _differences(
        {one.name: (seconds(one) / before.steps, one.calls / before.steps) for one in before.operations},
        {one.name: (seconds(one) / after.steps, one.calls / after.steps) for one in after.operations},
    )


def compare_kernels(before: TraceInfo, after: TraceInfo) -> list[Difference]:
    """Kernels by how much their step changed."""

    def of(kernels: Sequence[Kernel], steps: int) -> dict[str, tuple[float, float]]:
        return {one.name: (one.seconds / steps, one.calls / steps) for one in kernels}

    return _differences(of(before.kernels, before.steps), of(after.kernels, after.steps))


def _differences(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> list[Difference]:
    nothing = (0.0, 0.0)
    found = [
        Difference(name, was[0], now[0], was[1], now[1])
        for name in {**before, **after}
        for was, now in ((before.get(name, nothing), after.get(name, nothing)),)
    ]
    return sorted(found, key=lambda one: -abs(one.seconds))
