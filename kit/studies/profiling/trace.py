"""Torch traces: a `.pt.trace.json` of torch's profiler as numbers: operations, gaps, overlap, memory.

The file may be from kit or elsewhere, gzipped or not. The numbers are of the window of the profiled steps, or of the
whole file where none are marked. The device is *busy* during kernels, copies and fills on a GPU; on the CPU during
operators, except those that load or send data, during which a GPU would be idle. The rest are gaps. A gap of 20 µs or
more is attributed, piece by piece, to what the host did meanwhile. The first that applies counts: waiting for the
device, loading data, moving it, communication, forward, backward, optimizer; Python where nothing with a name ran.
Shorter gaps come from launching operations one by one and are summed as `launching`.

The time of an operation is exclusive: operations inside of it have their own.
"""

from __future__ import annotations

import gzip
import math
import re
from collections import Counter, defaultdict
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
    rank = re.search(r"profiler_output-(\d+)-", Path(path).name)  # Lightning names several ranks so
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur") is not None]
    steps = [event for event in spans if str(event["name"]).startswith("ProfilerStep#")]
    steps = [event for event in steps if not str(event.get("cat", "")).startswith("gpu")]
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
        path=Path(path), rank=int(rank[1]) if rank else 0, device="gpu" if on_gpu else "cpu", steps=len(steps) or 1,
        window_seconds=(high - low) / 1e6, busy_seconds=_length(busy) / 1e6, host_seconds=_length(host) / 1e6,
        overlap_seconds=_length(_both(host, busy)) / 1e6 if on_gpu else math.nan, gaps=tuple(gaps),
        gap_seconds={cause: by_cause[cause] for cause in CAUSES if by_cause[cause] > 0},
        operations=_operations(operators, on_gpu), syncs_per_step=sum(map(_is_sync, inside)) / (len(steps) or 1),
        memory=_memory(events, low),
    )  # fmt: skip


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


def _is_sync(event: Mapping[str, Any]) -> bool:
    name = str(event["name"])
    if event.get("cat") in ("cuda_runtime", "cuda_driver"):
        return _SYNC.search(name) is not None and "Event" not in name
    return event.get("cat") == "cpu_op" and name in _SYNC_OPERATIONS


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
    """The named activities of the host, by the cause of a gap that they are."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for event in events:
        name, kind, cause = str(event["name"]), event.get("cat"), ""
        if kind in ("cuda_runtime", "cuda_driver"):
            cause = "host sync" if _is_sync(event) else ""
        elif kind == "user_annotation" and not name.startswith(("ProfilerStep", "[pl][profile]run_training")):
            cause = next((cause for pattern, cause in _NAMED if pattern.search(name)), "")
        if cause:
            found[cause].append((_begin(event), _end(event)))
    return {cause: merge(spans) for cause, spans in found.items()}


def _gaps(
    busy: Sequence[Span], low: float, high: float, causes: Mapping[str, Sequence[Span]]
) -> tuple[list[Gap], float]:
    """Gaps that are long enough, cut where their cause changes, and the seconds of all others."""
    edges = [(low, low), *busy, (high, high)]
    gaps, short = [], 0.0
    for (_, begin), (end, _) in pairwise(edges):
        if end - begin < LEAST_GAP_SECONDS * 1e6:
            short += (end - begin) / 1e6
            continue
        left, pieces = [(begin, end)], list[tuple[Span, str]]()
        for cause in _NAMED_CAUSES:
            if cause in causes:
                pieces += [(piece, cause) for piece in _both(left, causes[cause])]
                left = _without(left, causes[cause])
        pieces += [(piece, "python") for piece in left if piece[1] > piece[0]]
        gaps += [Gap((piece[0] - low) / 1e6, (piece[1] - low) / 1e6, cause) for piece, cause in sorted(pieces)]
    return gaps, short


# -- operations and memory


def _operations(operators: Sequence[Mapping[str, Any]], on_gpu: Sequence[Mapping[str, Any]]) -> tuple[Operation, ...]:
    calls = Counter(str(event["name"]) for event in operators)
    launchers = {event.get("args", {}).get("External id"): str(event["name"]) for event in operators}
    launched: defaultdict[str | None, float] = defaultdict(float)
    for event in on_gpu:
        launched[launchers.get(event.get("args", {}).get("External id"))] += float(event["dur"]) / 1e6
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
    found = [Operation(name, calls[name], max(0.0, own[name]), launched[name]) for name in calls]
    return tuple(sorted(found, key=lambda operation: -(operation.device_seconds if on_gpu else operation.own_seconds)))


def _memory(events: Iterable[Mapping[str, Any]], low: float) -> dict[str, Series]:
    """Allocated bytes over time, by device, as seconds since the window began."""
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        values = event.get("args") or {}
        if event["name"] == "[memory]" and "Total Allocated" in values:
            # torch numbers kinds of devices: 0 is the CPU, 1 is CUDA
            device = "CPU" if values.get("Device Type") == 0 else f"GPU {values.get('Device Id', 0)}"
            series[device].append((float(event["ts"]), float(values["Total Allocated"])))
    return {
        device: (tuple((moment - low) / 1e6 for moment, _ in points), tuple(value for _, value in points))
        for device, points in ((device, sorted(found)) for device, found in series.items())
    }
