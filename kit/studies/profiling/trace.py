"""TraceInfo: what a trace of torch's profiler says: operations, kernels, gaps, overlap, collectives, memory.

The file may be from kit or elsewhere (`kit.studies.profiling.trace_events`). The numbers are of the window of the
profiled steps, or of the whole file where none are marked. The device is *busy* during kernels, copies and fills on a
GPU; on the CPU during operators, except those that load or send data, during which a GPU would be idle. The rest are
gaps. A gap of 20 µs or more is attributed, piece by piece, to what the host did meanwhile. The first that applies
counts: waiting for the device, loading data, moving it, communication, forward, backward, optimizer; Python where
nothing with a name ran. Shorter gaps come from launching operations one by one and are summed as `launching`.

The own time of an operation leaves out operations inside of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.errors import TrialError
from kit.records.trace import Series
from kit.studies.profiling.trace_events import (
    NOTHING,
    TraceEvents,
    Union,
    both,
    clip,
    gaps,
    length,
    merge,
    read_events,
    without,
)
from kit.units import format_bytes, format_seconds

LEAST_GAP_SECONDS = 20e-6
_NAMED_CAUSES = (
    "host sync", "data loading", "host-to-device copy", "communication", "forward", "backward", "optimizer",
)  # fmt: skip
"""Those before count more: an optimizer step holds forward and backward, so it comes last."""
CAUSES = (*_NAMED_CAUSES, "python", "launching")
"""What a gap is put down to."""
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_SYNC = re.compile(r"^(?!.*Event).*(Synchronize|^cudaMemcpy$|^cuStreamSync)")
_SYNC_OPERATIONS = re.compile(r"^aten::(_local_scalar_dense|nonzero)$")
_FROM_HOST, _UNPINNED = re.compile(r"HtoD|HostToDevice"), re.compile(r"Pageable *->")
_STEP = re.compile(r"^ProfilerStep#")
_WHOLE = re.compile(r"^(ProfilerStep|\[pl\]\[profile\]run_training)")
_NAMED = (
    (re.compile(r"dataloader_next|DataLoader"), "data loading"),
    (re.compile(r"batch_to_device|batch_transfer"), "host-to-device copy"),
    (re.compile(r"(gloo|nccl|c10d|FSDP)[:_]|all_gather|reduce_scatter|allreduce"), "communication"),
    (re.compile(r"[Oo]ptimizer|zero_grad|gradient_clipping|lr_scheduler"), "optimizer"),
    (re.compile(r"training_step$"), "forward"),
    (re.compile(r"backward$"), "backward"),
)
_WORDS = {"host sync": "waiting for it", "python": "Python", "launching": "launching operations"}
_COLLECTIVE = {"gpu": re.compile(r"nccl", re.IGNORECASE), "cpu": re.compile(r"^(gloo|nccl|mpi|ucc):")}
"""Kernels on a GPU; on the CPU what the thread of the process group does."""
_TENSOR_CORES = re.compile(
    r"tensorop|[hw]g?mma|(?<![a-z])(mma|hmma|imma)|xmma|[hisf]?(884|1688|8816|16816|16832|161616|64x\d+x16)(?!\d)"
    r"|tc_?gemm|flash_(fwd|bwd)|fmha|nvjet"
)
"""In names of kernels of cuBLAS, cuDNN, CUTLASS and attention: instructions of tensor cores, by their shapes."""


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
    total_seconds: float = 0.0
    """Of the host, with all operations inside."""
    allocated_bytes: float = 0.0
    """That it asked for itself, of all devices; 0 unless the pass recorded memory."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel, copy or fill."""

    name: str
    calls: int
    seconds: float
    shortest_seconds: float
    longest_seconds: float
    occupancy: float
    """Fraction of the warps it keeps, by the profiler's estimate and weighed by time; NaN where it is not said."""
    blocks: float
    """For each multiprocessor, weighed by time: below 1 some have nothing to do. NaN where it is not said."""
    tensor_cores: bool
    """Judged by its name."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call that ranks make together; seconds since the window began."""

    name: str
    begin: float
    seconds: float
    bytes: float
    """That go in; NaN where the trace does not say."""


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
    device_name: str = ""
    """As the file says it; empty where it does not."""
    world_size: int = 1
    step_seconds: tuple[Mapping[str, float], ...] = ()
    """For each marked step: seconds busy, and by cause of gaps."""
    kernels: tuple[Kernel, ...] = ()
    """Those that took most first; empty on the CPU."""
    collectives: tuple[Collective, ...] = ()
    """In their order."""
    computing_seconds: float = math.nan
    """In which any kernel but those of collectives ran, or any operator on the CPU."""
    communicating_seconds: float = 0.0
    """In which any collective ran."""
    hidden_seconds: float = 0.0
    """Of these, in which something was computed too."""
    unpinned_copy_seconds: float = 0.0
    """In which a GPU copied from memory of the host that is not pinned, for which the host waits."""
    bare_copy_seconds: float = 0.0
    """In which it copied from any memory of the host, and computed nothing."""
    counted_by: str = ""
    """How steps are told: empty where they are marked, `optimizer` where steps of an optimizer were counted, `nothing`
    where all is taken as one."""
    named: tuple[Operation, ...] = ()
    """What the program itself named with `record_function`, that which took most first; all are on the CPU."""

    @property
    def busy_fraction(self) -> float:
        return self.busy_seconds / self.window_seconds

    @property
    def tensor_core_fraction(self) -> float:
        """Of the time of kernels; NaN without any."""
        return _weighed([(float(kernel.tensor_cores), kernel.seconds) for kernel in self.kernels])

    @property
    def occupancy(self) -> float:
        """Of all kernels, weighed by time; NaN where the trace does not say it."""
        return _weighed([(kernel.occupancy, kernel.seconds) for kernel in self.kernels])

    def gap_fraction(self, cause: str) -> float:
        """Of the window; one of `CAUSES`."""
        return self.gap_seconds.get(cause, 0.0) / self.window_seconds

    @property
    def finding(self) -> str:
        """In one sentence, whether the device worked."""
        if not self.operations and not self.busy_seconds:
            return (
                "No operator was recorded: the file was written while the profiler was not recording (write it in "
                "on_trace_ready, or end the schedule with repeat=1)"
            )
        text = f"The {self.device.upper()} works {self.busy_fraction:.0%} of the time"
        cause = max(self.gap_seconds, key=self.gap_seconds.__getitem__, default="")
        if cause and self.gap_fraction(cause) >= 0.02:
            return f"{text}; most of the rest ({self.gap_fraction(cause):.0%}) goes to {_WORDS.get(cause, cause)}"
        return text

    @property
    def steps_words(self) -> str:
        """How many there are, and how that is known."""
        if self.counted_by == "nothing":
            return "no steps are marked"
        counted = f"{self.steps} step{'s' * (self.steps != 1)}"
        return f"no steps are marked, {counted} of an optimizer" if self.counted_by else counted

    @property
    def sentence(self) -> str:
        """The finding, with what it rests on."""
        text = f"{self.finding} ({self.steps_words}, {format_seconds(self.window_seconds)})"
        if self.memory:
            peak = max(max(values) for _, values in self.memory.values())
            text += f"; {format_bytes(peak)} allocated at most"
        if self.named:
            each = (f"{one.name} {one.total_seconds / self.window_seconds:.0%}" for one in self.named[:_MOST_NAMED])
            text += f"; of the time, by record_function: {', '.join(each)}"
        return text


def read_trace(path: str | Path) -> TraceInfo:
    """The numbers of one trace file.

    Raises:
        TrialError: when the file is not there, is no trace, or is an empty one.
    """
    return trace_info(read_events(path), path)


def trace_info(events: TraceEvents, path: str | Path) -> TraceInfo:
    """The numbers of events that have been read.

    Raises:
        TrialError: when there are none.
    """
    if not len(events):
        raise TrialError(f"{path}: nothing was profiled; give the trial more steps than its warm-up takes")
    marks = events.named(_STEP) & ~events.named_kinds("gpu")
    low, high = (float(events.begin[marks].min()), float(events.end[marks].max())) if marks.any() else _ends(events)
    inside = (events.begin < high) & (events.end > low)
    operators, on_gpu = inside & events.of_kinds("cpu_op"), inside & events.of_kinds(*_DEVICE)
    device = "gpu" if on_gpu.any() else "cpu"
    causes = _annotations(events, inside)
    working = operators & ~events.named("^c10d")
    on_cpu = without(_union(events, working, low, high), causes.get("data loading", NOTHING))
    busy = _union(events, on_gpu, low, high) if device == "gpu" else on_cpu
    by_cause = _gaps(busy, low, high, causes)
    exchanging = inside & events.named(_COLLECTIVE[device])
    exchanging &= on_gpu if device == "gpu" else events.of_kinds("cpu_op", "user_annotation")
    communicating = _union(events, exchanging, low, high)
    kernels = inside & events.of_kinds("kernel") & ~exchanging
    computing = _union(events, kernels, low, high) if device == "gpu" else on_cpu
    copies = inside & events.of_kinds("gpu_memcpy") & events.named(_FROM_HOST)
    steps = np.stack((events.begin[marks], events.end[marks]), axis=1)
    optimizer_steps = 0 if len(steps) else _optimizer_steps(events, inside)
    count = len(steps) or optimizer_steps or 1
    return TraceInfo(
        path=Path(path), rank=_rank(events, path), device=device, steps=count,
        window_seconds=(high - low) / 1e6, busy_seconds=length(busy) / 1e6,
        gaps=tuple(
            Gap((begin - low) / 1e6, (end - low) / 1e6, cause)
            for begin, end, cause in sorted(
                (begin, end, cause)
                for cause, spans in by_cause.items() if cause != "launching"
                for begin, end in spans.tolist()
            )
        ),
        gap_seconds=_seconds(by_cause), operations=_operations(events, operators, on_gpu),
        syncs_per_step=int((inside & _syncs(events)).sum()) / count,
        memory={
            device: (tuple(((moments - low) / 1e6).tolist()), tuple(values.tolist()))
            for device, (moments, values, _) in events.allocated.items()
        },
        device_name=_device_name(events), world_size=int(_distributed(events).get("world_size", 1)),
        step_seconds=tuple(_step(span, busy, by_cause) for span in steps[:, None, :]),
        kernels=_kernels(events, on_gpu), collectives=_collectives(events, exchanging, low),
        computing_seconds=length(computing) / 1e6, communicating_seconds=length(communicating) / 1e6,
        hidden_seconds=length(both(communicating, computing)) / 1e6,
        unpinned_copy_seconds=length(_union(events, copies & events.named(_UNPINNED), low, high)) / 1e6,
        bare_copy_seconds=length(without(_union(events, copies, low, high), computing)) / 1e6,
        counted_by="" if len(steps) else "optimizer" if optimizer_steps else "nothing",
        named=_named_by_program(events, inside),
    )  # fmt: skip


_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")
_OF_LIBRARIES = re.compile(
    r"^(ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)|\[pl\]|\[|autograd::|aten::|c10d|nccl|gloo|FSDP|"
    r"DistributedDataParallel|Torch-Compiled|## |record_param_comms)"
)
_MOST_NAMED = 5


def _optimizer_steps(events: TraceEvents, inside: NDArray[np.bool_]) -> int:
    """Of the optimizer that stepped most often, as several may step in one step of the training."""
    chosen = inside & events.named(_OPTIMIZER_STEP) & ~events.named_kinds("gpu")
    names = [events.names[code] for code in events.name[chosen].tolist()]
    return max((names.count(name) for name in {*names}), default=0)


def _named_by_program(events: TraceEvents, inside: NDArray[np.bool_]) -> tuple[Operation, ...]:
    """See `TraceInfo.named`."""
    chosen = inside & events.of_kinds("user_annotation") & ~events.named(_OF_LIBRARIES)
    found = dict[str, list[float]]()
    for code, seconds in zip(events.name[chosen].tolist(), (events.end - events.begin)[chosen].tolist(), strict=True):
        found.setdefault(events.names[code], []).append(seconds / 1e6)
    named = [
        Operation(name=name, calls=len(each), own_seconds=0.0, device_seconds=0.0, total_seconds=sum(each))
        for name, each in found.items()
    ]
    return tuple(sorted(named, key=lambda one: -one.total_seconds))


def _ends(events: TraceEvents) -> tuple[float, float]:
    """Where what ran begins and ends. What spans the whole file is a heading of the profiler's own."""
    ran = events.of_kinds("cpu_op", "user_annotation", *_DEVICE, *_CALLS)
    chosen = ran if ran.any() else np.ones(len(events), bool)
    return float(events.begin[chosen].min()), float(events.end[chosen].max())


def _union(events: TraceEvents, chosen: NDArray[np.bool_], low: float, high: float) -> Union:
    return clip(np.stack((events.begin[chosen], events.end[chosen]), axis=1), low, high)


def _distributed(events: TraceEvents) -> Mapping[str, Any]:
    found = events.facts.get("distributedInfo")
    return found if isinstance(found, dict) else {}


def _rank(events: TraceEvents, path: str | Path) -> int:
    """As the file says, else as its name does; Lightning names several ranks so."""
    said = _distributed(events).get("rank")
    named = re.search(r"(?:profiler_output-|rank[-_]?)(\d+)", Path(path).name)
    return said if isinstance(said, int) else int(named[1]) if named else 0


def _device_name(events: TraceEvents) -> str:
    devices = events.facts.get("deviceProperties")
    names = [str(one.get("name", "")) for one in devices if isinstance(one, dict)] if isinstance(devices, list) else []
    return next(filter(None, names), "")


def _syncs(events: TraceEvents) -> NDArray[np.bool_]:
    waits = events.of_kinds(*_CALLS) & events.named(_SYNC)
    return waits | (events.of_kinds("cpu_op") & events.named(_SYNC_OPERATIONS))


# -- gaps


def _annotations(events: TraceEvents, inside: NDArray[np.bool_]) -> dict[str, Union]:
    """The named activities of the host, by the cause of a gap that they are."""
    cause_of = np.full(len(events.names), len(_NAMED), np.int64)
    for place, name in enumerate(events.names):
        if not _WHOLE.match(name):
            cause_of[place] = next((at for at, (named, _) in enumerate(_NAMED) if named.search(name)), len(_NAMED))
    noted = inside & events.of_kinds("user_annotation")
    found = {"host sync": inside & events.of_kinds(*_CALLS) & events.named(_SYNC)}
    found |= {cause: noted & (cause_of[events.name] == place) for place, (_, cause) in enumerate(_NAMED)}
    spans = {cause: np.stack((events.begin[chosen], events.end[chosen]), axis=1) for cause, chosen in found.items()}
    return {cause: merge(parts) for cause, parts in spans.items() if len(parts)}


def _gaps(busy: Union, low: float, high: float, causes: Mapping[str, Union]) -> dict[str, Union]:
    """By cause, the gaps that are long enough, cut where their cause changes; the others are `launching`."""
    idle = gaps(busy, low, high)
    is_long = idle[:, 1] - idle[:, 0] >= LEAST_GAP_SECONDS * 1e6
    left, found = idle[is_long], {"launching": idle[~is_long]}
    for cause in _NAMED_CAUSES:
        if cause in causes:
            found[cause] = both(left, causes[cause])
            left = without(left, causes[cause])
    return found | {"python": left}


def _seconds(by_cause: Mapping[str, Union]) -> dict[str, float]:
    seconds = {cause: length(by_cause.get(cause, NOTHING)) / 1e6 for cause in CAUSES}
    return {cause: value for cause, value in seconds.items() if value > 0}


def _step(span: Union, busy: Union, by_cause: Mapping[str, Union]) -> dict[str, float]:
    gone = _seconds({cause: both(span, spans) for cause, spans in by_cause.items()})
    return {"busy": length(both(span, busy)) / 1e6, **gone}


# -- operations and kernels


def _operations(events: TraceEvents, operators: NDArray[np.bool_], on_gpu: NDArray[np.bool_]) -> tuple[Operation, ...]:
    kinds = len(events.names)
    calls = np.bincount(events.name[operators], minlength=kinds)
    total = np.bincount(events.name[operators], events.length[operators], kinds)
    own, allocated, device = np.zeros(kinds), np.zeros(kinds), np.zeros(kinds)
    asked = [(moments, np.maximum(change, 0)) for moments, _, change in events.allocated.values()]
    launches = _Launches(events, on_gpu)
    for places in events.by_thread(operators):
        moments, running = _innermost(events, places)
        names = np.where(running < 0, kinds, events.name[running])

        def add(to: NDArray[np.float64], when: NDArray[np.float64], amounts: NDArray[np.float64]) -> None:
            at = np.searchsorted(moments, when, "right") - 1  # noqa: B023 - called at once
            known = (at >= 0) & (at < len(moments) - 1)  # noqa: B023
            to += np.bincount(names[at[known]], amounts[known], kinds + 1)[:kinds]  # noqa: B023

        own += np.bincount(names[:-1], np.diff(moments), kinds + 1)[:kinds]
        for when, change in asked:
            add(allocated, when, change)
        add(device, *launches.of_thread(int(events.thread[places[0]])))
    device += launches.by_number(operators)
    found = [
        Operation(events.names[place], int(calls[place]), max(0.0, float(own[place]) / 1e6), float(device[place]) / 1e6,
                  float(total[place]) / 1e6, float(allocated[place]))
        for place in np.flatnonzero(calls).tolist()
    ]  # fmt: skip
    has_gpu = bool(on_gpu.any())
    return tuple(sorted(found, key=lambda operation: -(operation.device_seconds if has_gpu else operation.own_seconds)))


def _innermost(events: TraceEvents, places: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Moments at which another operator of a thread becomes the innermost, and which it is, -1 for none."""
    moments, running = list[float](), list[int]()
    open_ = list[tuple[float, int]]()
    for place, begin, end in zip(
        places.tolist(), events.begin[places].tolist(), events.end[places].tolist(), strict=True
    ):
        while open_ and open_[-1][0] <= begin:
            moments.append(open_.pop()[0])
            running.append(open_[-1][1] if open_ else -1)
        moments.append(begin)
        running.append(place)
        open_.append((min(end, open_[-1][0]) if open_ else end, place))
    while open_:
        moments.append(open_.pop()[0])
        running.append(open_[-1][1] if open_ else -1)
    return np.array(moments), np.array(running, np.int64)


class _Launches:
    """Which call of the host launched each kernel: the call of the runtime with the same number, by which the operator
    is the innermost one of its thread at that moment; without one, the operator whose own number the kernel has."""

    def __init__(self, events: TraceEvents, on_gpu: NDArray[np.bool_]) -> None:
        self._events = events
        self._kernels = np.flatnonzero(on_gpu)
        calls = np.flatnonzero(events.of_kinds(*_CALLS) & (events.correlation >= 0))
        self._calls = _found(events.correlation[calls], calls, events.correlation[self._kernels])

    def of_thread(self, thread: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Moments of the launches of a thread, and the microseconds that their kernels took."""
        mine = (self._calls >= 0) & (self._events.thread[self._calls] == thread)
        return self._events.begin[self._calls[mine]], self._events.length[self._kernels[mine]]

    def by_number(self, operators: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Microseconds by name of operator, of the kernels whose launch is not in the trace."""
        events, kernels = self._events, self._kernels[self._calls < 0]
        launchers = np.flatnonzero(operators & (events.external >= 0))
        at = _found(events.external[launchers], launchers, events.external[kernels])
        lengths = events.length[kernels[at >= 0]]
        return np.asarray(np.bincount(events.name[at[at >= 0]], lengths, len(events.names)))


def _found(numbers: NDArray[np.int64], places: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place whose number each wanted one is, the last of several, -1 for none."""
    if not len(numbers):
        return np.full(len(wanted), -1)
    order = np.argsort(numbers, kind="stable")
    at = np.searchsorted(numbers[order], wanted, "right") - 1
    return np.where((at >= 0) & (numbers[order][at] == wanted), places[order[at]], -1)


def _kernels(events: TraceEvents, on_gpu: NDArray[np.bool_]) -> tuple[Kernel, ...]:
    places = np.flatnonzero(on_gpu)
    ordered = places[np.argsort(events.name[places], kind="stable")]
    groups = np.split(ordered, np.flatnonzero(np.diff(events.name[ordered])) + 1) if len(ordered) else []
    found = []
    for group in groups:
        seconds, name = events.length[group] / 1e6, events.names[int(events.name[group[0]])]
        weights = seconds.tolist()
        found.append(
            Kernel(name, len(group), float(seconds.sum()), float(seconds.min()), float(seconds.max()),
                   _weighed([*zip(events.occupancy[group].tolist(), weights, strict=True)]),
                   _weighed([*zip(events.blocks[group].tolist(), weights, strict=True)]),
                   _TENSOR_CORES.search(name) is not None)
        )  # fmt: skip
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


def _weighed(values: Sequence[tuple[float, float]]) -> float:
    """Mean of (value, weight), of the values that are known."""
    known = [(value, weight) for value, weight in values if not math.isnan(value)]
    whole = math.fsum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / whole if whole else math.nan


def _collectives(events: TraceEvents, exchanging: NDArray[np.bool_], low: float) -> tuple[Collective, ...]:
    sizes = events.bytes[exchanging].tolist()
    return tuple(
        Collective(events.names[name], (begin - low) / 1e6, (end - begin) / 1e6, size)
        for (name, begin, end), size in zip(events.take(exchanging), sizes, strict=True)
    )
