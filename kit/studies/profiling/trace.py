"""Torch traces: what a `.pt.trace.json` of torch's profiler says, as numbers: operations, gaps, overlap, memory.

Any such file will do, from kit or elsewhere, gzipped or not. Looked at is the window of the profiled steps, or all of
it where none are marked. *Busy* is the time in which the device worked: kernels, copies and fills on a GPU; on the CPU
operators, save those that load or send data, as there a GPU would stand idle. What is left are gaps; a gap of 20 µs or
more is put down, piece by piece, to what the host did meanwhile, the first of these that holds: waiting for the device,
loading data, moving it, communication, forward, backward, optimizer; and Python where it did nothing that has a name.
Shorter gaps are the pace of launching and are summed as `launching`.

The time of an operation is its own: what others do inside of it is theirs.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kit.errors import TrialError
from kit.json_text import read_json
from kit.records.trace import Series
from kit.units import format_bytes, format_seconds

LEAST_GAP_SECONDS = 20e-6
_NAMED_CAUSES = (
    "host sync", "data loading", "host-to-device copy", "communication", "forward", "backward", "optimizer",
)  # fmt: skip
"""Those before count more: an optimizer step holds forward and backward, so it comes last."""
CAUSES = (*_NAMED_CAUSES, "python", "launching")
"""What a gap is put down to."""
_LARGEST_BYTES = 1 << 30
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_SYNC = re.compile(r"Synchronize|^cudaMemcpy$|^cuStreamSync")
_SYNC_OPERATIONS = ("aten::_local_scalar_dense", "aten::nonzero")
_NAMED = (
    (re.compile(r"dataloader_next|DataLoader"), "data loading"),
    (re.compile(r"batch_to_device|batch_transfer"), "host-to-device copy"),
    (re.compile(r"(gloo|nccl|c10d|FSDP)[:_]|all_gather|reduce_scatter|allreduce"), "communication"),
    (re.compile(r"[Oo]ptimizer|zero_grad|gradient_clipping|lr_scheduler"), "optimizer"),
    (re.compile(r"training_step$"), "forward"),
    (re.compile(r"backward$"), "backward"),
)
_WORDS = {"host sync": "waiting for it", "python": "Python", "launching": "launching operations"}
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gap:
    """The device had nothing to do; seconds since the window began."""

    begin: float
    end: float
    cause: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Operation:
    """All calls of one operation."""

    name: str
    calls: int
    own_seconds: float
    """Of the host."""
    device_seconds: float
    """Of the kernels it launched; 0 on the CPU, where the host is the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """One trace, of one rank."""

    path: Path
    rank: int
    device: str
    """cpu or gpu."""
    steps: int
    window_seconds: float
    busy_seconds: float
    host_seconds: float
    """In which the host was inside any operator."""
    overlap_seconds: float
    """In which host and GPU worked at once; NaN on the CPU."""
    gaps: tuple[Gap, ...]
    """Those long enough to be told apart."""
    gap_seconds: Mapping[str, float]
    """By cause; with `busy_seconds` they add to the window."""
    operations: tuple[Operation, ...]
    """Those that took most first."""
    syncs_per_step: float
    """How often the host asked for a value of the device and so waited for it."""
    memory: Mapping[str, Series]
    """Seconds and bytes allocated, by device; empty unless the pass recorded memory."""

    @property
    def busy_fraction(self) -> float:
        return self.busy_seconds / self.window_seconds

    @property
    def overlap_fraction(self) -> float:
        """Of the window; NaN on the CPU."""
        return self.overlap_seconds / self.window_seconds

    def gap_fraction(self, cause: str) -> float:
        """Of the window; one of `CAUSES`."""
        return self.gap_seconds.get(cause, 0.0) / self.window_seconds

    @property
    def finding(self) -> str:
        """In one sentence, whether the device worked."""
        text = f"The {self.device.upper()} works {self.busy_fraction:.0%} of the time"
        cause = max(self.gap_seconds, key=self.gap_seconds.__getitem__, default="")
        if cause and self.gap_fraction(cause) >= 0.02:
            return f"{text}; most of the rest ({self.gap_fraction(cause):.0%}) goes to {_WORDS.get(cause, cause)}"
        return text

    @property
    def sentence(self) -> str:
        """The finding, with what it rests on."""
        text = f"{self.finding} ({self.steps} steps, {format_seconds(self.window_seconds)})"
        if self.memory:
            peak = max(max(values) for _, values in self.memory.values())
            text += f"; {format_bytes(peak)} allocated at most"
        return text


def read_trace(path: str | Path) -> TraceInfo:
    """The numbers of one trace file.

    Raises:
        TrialError: when the file is not there, is no trace, or is an empty one.
    """
    events = read_events(path)
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur") is not None]
    steps = [event for event in spans if str(event["name"]).startswith("ProfilerStep#") and not _on_gpu(event)]
    if not spans:
        raise TrialError(f"{path}: nothing was profiled; give the trial more steps than its warm-up takes")
    low, high = min(map(_begin, steps or spans)), max(map(_end, steps or spans))
    inside = [event for event in spans if _begin(event) < high and _end(event) > low]
    operators = [event for event in inside if event.get("cat") == "cpu_op"]
    on_gpu = [event for event in inside if event.get("cat") in _DEVICE]
    causes = _annotations(inside)
    host = merge(_clipped(operators, low, high))
    working = [event for event in operators if not str(event["name"]).startswith("c10d")]
    on_cpu = _without(merge(_clipped(working, low, high)), causes.get("data loading", ()))
    busy = merge(_clipped(on_gpu, low, high)) if on_gpu else on_cpu
    gaps, launching = _gaps(busy, low, high, causes)
    by_cause: defaultdict[str, float] = defaultdict(float)
    for gap in gaps:
        by_cause[gap.cause] += gap.seconds
    by_cause["launching"] += launching
    return TraceInfo(
        path=Path(path),
        rank=_rank(path),
        device="gpu" if on_gpu else "cpu",
        steps=len(steps) or 1,
        window_seconds=(high - low) / 1e6,
        busy_seconds=_length(busy) / 1e6,
        host_seconds=_length(host) / 1e6,
        overlap_seconds=_length(_both(host, busy)) / 1e6 if on_gpu else math.nan,
        gaps=tuple(gaps),
        gap_seconds={cause: by_cause[cause] for cause in CAUSES if by_cause[cause] > 0},
        operations=_operations(operators, on_gpu),
        syncs_per_step=sum(map(_is_sync, inside)) / (len(steps) or 1),
        memory=_memory(events, low),
    )


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a trace file as they stand in it: microseconds.

    Raises:
        TrialError: when the file is not there or is no trace.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        if size > _LARGEST_BYTES:
            raise TrialError(f"{file} has {format_bytes(size)}; profile fewer steps (profiler.active_steps)")
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        events = [event for event in read_json(data)["traceEvents"] if isinstance(event, dict)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrialError(f"{file} is no trace of torch's profiler: {type(error).__name__}: {error}") from None
    return [event for event in events if "name" in event and "ts" in event]


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _on_gpu(event: Mapping[str, Any]) -> bool:
    return str(event.get("cat", "")).startswith("gpu")


def _is_sync(event: Mapping[str, Any]) -> bool:
    name = str(event["name"])
    if event.get("cat") in ("cuda_runtime", "cuda_driver"):
        return _SYNC.search(name) is not None and "Event" not in name
    return event.get("cat") == "cpu_op" and name in _SYNC_OPERATIONS


def _rank(path: str | Path) -> int:
    """From the name Lightning gives: `...output-1-[Strategy]...`; 0 for a single device."""
    found = re.search(r"profiler_output-(\d+)-", Path(path).name)
    return int(found[1]) if found else 0


# -- spans, in microseconds


def merge(spans: Iterable[Span]) -> list[Span]:
    """Their union, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _clipped(events: Iterable[Mapping[str, Any]], low: float, high: float) -> list[Span]:
    return [(max(low, _begin(event)), min(high, _end(event))) for event in events]


def _length(spans: Sequence[Span]) -> float:
    return math.fsum(end - begin for begin, end in spans)


def _both(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Where two unions overlap."""
    found, place = [], 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        look = place
        while look < len(other) and other[look][0] < end:
            found.append((max(begin, other[look][0]), min(end, other[look][1])))
            look += 1
    return found


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """A union with parts cut out of it."""
    edges = [-math.inf, *(edge for hole in holes for edge in hole), math.inf]
    return _both(spans, [*zip(edges[::2], edges[1::2], strict=True)])


def _annotations(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """When the host did what has a name, by cause."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for event in events:
        cause = _cause(event)
        if cause:
            found[cause].append((_begin(event), _end(event)))
    return {cause: merge(spans) for cause, spans in found.items()}


def _cause(event: Mapping[str, Any]) -> str:
    name, kind = str(event["name"]), event.get("cat")
    if kind in ("cuda_runtime", "cuda_driver"):
        return "host sync" if _is_sync(event) else ""
    if kind != "user_annotation" or name.startswith(("ProfilerStep", "[pl][profile]run_training")):
        return ""
    return next((cause for pattern, cause in _NAMED if pattern.search(name)), "")


def _gaps(
    busy: Sequence[Span], low: float, high: float, causes: Mapping[str, Sequence[Span]]
) -> tuple[list[Gap], float]:
    """Gaps that are long enough, cut where their cause changes, and the seconds of all others."""
    edges = [(low, low), *busy, (high, high)]
    gaps, short = [], 0.0
    for (_, begin), (end, _) in pairwise(edges):
        if end - begin >= LEAST_GAP_SECONDS * 1e6:
            pieces = _pieces((begin, end), causes)
            gaps += [Gap((piece[0] - low) / 1e6, (piece[1] - low) / 1e6, cause) for piece, cause in pieces]
        else:
            short += (end - begin) / 1e6
    return gaps, short


def _pieces(gap: Span, causes: Mapping[str, Sequence[Span]]) -> list[tuple[Span, str]]:
    """Parts of a gap, in order, each with what the host did in it."""
    left, found = [gap], []
    for cause in _NAMED_CAUSES:
        if cause in causes:
            found += [(piece, cause) for piece in _both(left, causes[cause])]
            left = _without(left, causes[cause])
    return sorted([*found, *((piece, "python") for piece in left if piece[1] > piece[0])])


# -- operations and memory


def _operations(operators: Sequence[Mapping[str, Any]], on_gpu: Sequence[Mapping[str, Any]]) -> tuple[Operation, ...]:
    own = _own_seconds(operators)
    launched = _launched_seconds(operators, on_gpu)
    calls: defaultdict[str, int] = defaultdict(int)
    for event in operators:
        calls[str(event["name"])] += 1
    found = [Operation(name, calls[name], own[name], launched.get(name, 0.0)) for name in calls]
    return tuple(sorted(found, key=lambda operation: -(operation.device_seconds if on_gpu else operation.own_seconds)))


def _own_seconds(operators: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each name, what no operator inside of it has."""
    own: defaultdict[str, float] = defaultdict(float)
    threads: defaultdict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in operators:
        threads[event.get("pid"), event.get("tid")].append(event)
    for events in threads.values():
        outer: list[Mapping[str, Any]] = []
        for event in sorted(events, key=lambda event: (_begin(event), -_end(event))):
            while outer and _end(outer[-1]) <= _begin(event):
                outer.pop()
            own[str(event["name"])] += float(event["dur"]) / 1e6
            if outer:
                own[str(outer[-1]["name"])] -= float(event["dur"]) / 1e6
            outer.append(event)
    return {name: max(0.0, seconds) for name, seconds in own.items()}


def _launched_seconds(operators: Sequence[Mapping[str, Any]], on_gpu: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {event.get("args", {}).get("External id"): str(event["name"]) for event in operators}
    found: defaultdict[str, float] = defaultdict(float)
    for event in on_gpu:
        name = names.get(event.get("args", {}).get("External id"))
        if name:
            found[name] += float(event["dur"]) / 1e6
    return found


def _memory(events: Iterable[Mapping[str, Any]], low: float) -> dict[str, Series]:
    """Allocated bytes over time, by device, as seconds since the window began."""
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        held = event.get("args") or {}
        if event["name"] == "[memory]" and "Total Allocated" in held:
            # torch numbers kinds of devices: 0 is the CPU, 1 is CUDA
            device = "CPU" if held.get("Device Type") == 0 else f"GPU {held.get('Device Id', 0)}"
            series[device].append((float(event["ts"]), float(held["Total Allocated"])))
    return {
        device: (tuple((moment - low) / 1e6 for moment, _ in points), tuple(value for _, value in points))
        for device, points in ((device, sorted(found)) for device, found in series.items())
    }
