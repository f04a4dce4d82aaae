"""TraceEvents: the timed events of a torch trace as columns of numbers, read piece by piece.

A file of 1 GB holds some three million events. As Python objects they would take ten times its size, so they are
decoded one by one and only what is computed with is kept: about 70 bytes an event. The file may be gzipped, may be the
list alone that older tools write, and need not be from kit.

Events are in the order of their beginning, the longer first where two begin at once, so that an event comes after those
that hold it. Times are microseconds since the first event: a float holds those since 1970 to a quarter of one only.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kit.errors import JsonError, TrialError
from kit.json_text import read_json

_EARLIER_KINDS = {
    "Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
}  # fmt: skip
"""Words of torch 1.8 to 1.11, whose operators are also the marks of steps, loaders and optimizers."""
_EARLIER_MARKS = re.compile(r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.")
MOST_EVENTS = 20_000_000
_PIECE = 1 << 22
"""Characters that are read at once."""
_LONGEST_EVENT = 1 << 25
"""Characters; lists of process groups of thousands of ranks are shorter."""
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()
Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceEvents:
    """Columns of equal length, one entry an event, and columns of the allocations that were recorded."""

    names: list[str]
    kinds: list[str]
    """Categories: cpu_op, kernel, user_annotation, ..."""
    threads: list[tuple[str, str]]
    """Process and thread, or device and stream."""
    name: Numbers
    kind: Numbers
    thread: Numbers
    begin: Floats
    """Microseconds since the first event."""
    length: Floats
    """Microseconds."""
    external: Numbers
    """Number of a call of an operator, also at the kernels it launched; -1 where it is not known."""
    correlation: Numbers
    """Number of a launch, at the call of the runtime and at the kernel; -1 where it is not known."""
    bytes: Floats
    """Of a copy or fill, or of the elements that a collective takes in; NaN elsewhere."""
    occupancy: Floats
    """Fraction of the warps of a multiprocessor that a kernel keeps, as the profiler estimates it; NaN elsewhere."""
    blocks: Floats
    """Blocks of a kernel for each multiprocessor; NaN elsewhere."""
    allocated: Mapping[str, tuple[Floats, Floats, Floats]]
    """By device, sorted: microseconds, bytes allocated then, bytes by which they changed."""
    facts: Mapping[str, Any]
    """What the file says beside its events: devices, rank and world size, versions."""

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def end(self) -> Floats:
        """Microseconds since the first event."""
        return np.asarray(self.begin + self.length)

    def of_kinds(self, *kinds: str) -> NDArray[np.bool_]:
        """Which events are of these categories."""
        return np.isin(self.kind, [place for place, kind in enumerate(self.kinds) if kind in kinds])

    def named_kinds(self, start: str) -> NDArray[np.bool_]:
        """Which events are of a category that starts so."""
        return self.of_kinds(*(kind for kind in self.kinds if kind.startswith(start)))

    def named(self, pattern: str | re.Pattern[str]) -> NDArray[np.bool_]:
        """Which events have a name in which the pattern is found."""
        found = [place for place, name in enumerate(self.names) if re.search(pattern, name)]
        return np.isin(self.name, found)

    def take(self, chosen: NDArray[Any]) -> list[tuple[int, float, float]]:
        """Name, begin and end of the chosen events."""
        return [*zip(self.name[chosen].tolist(), self.begin[chosen].tolist(), self.end[chosen].tolist(), strict=True)]

    def by_thread(self, chosen: NDArray[Any]) -> Iterator[Numbers]:
        """The places of the chosen events of each thread, in their order."""
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        ordered = places[np.argsort(self.thread[places], kind="stable")]
        yield from np.split(ordered, np.flatnonzero(np.diff(self.thread[ordered])) + 1) if len(ordered) else ()


def read_events(path: str | Path) -> TraceEvents:
    """The events of a trace file.

    Raises:
        TrialError: when the file is not there, is no trace, is cut short or holds too many events.
    """
    file, columns = Path(path), _Columns()
    try:
        with _opened(file) as text:
            reader = _Reader(text)
            for event in reader:
                columns.add(event)
                if len(columns.begin) > MOST_EVENTS:
                    raise TrialError(
                        f"{file} holds more than {MOST_EVENTS:,} events; profile fewer steps (profiler.active_steps)"
                    )
            return columns.finish(reader.facts())
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise TrialError(f"{file} is no trace of torch's profiler: {type(error).__name__}: {error}") from None


def _opened(file: Path) -> IO[str]:
    """Text, unpacked on the way; what is no UTF-8 in a name is replaced."""
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(file, "rt", encoding="utf-8", errors="replace")
    return file.open(encoding="utf-8", errors="replace")


class _Reader:
    """Decodes the events of a file one by one; `facts` has what stands around them, once they have been read."""

    def __init__(self, text: IO[str]) -> None:
        self._text = text
        self._buffer = ""
        self._head = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        place = self._find_list()
        while True:
            between = _BETWEEN.match(self._buffer, place)
            place = between.end() if between else place
            if self._buffer[place : place + 1] == "]":
                self._buffer = self._buffer[place + 1 :]
                return
            try:
                event, place = _DECODER.raw_decode(self._buffer, place)
            except ValueError as error:
                if not self._read_on(place):
                    raise ValueError(f"it ends within an event: {error}") from None
                place = 0
                continue
            if isinstance(event, dict):
                yield event

    def _find_list(self) -> int:
        while True:
            found = _LIST.search(self._buffer)
            if found:
                self._head = self._buffer[: found.start()]
                return found.end()
            if self._buffer.lstrip()[:1] == "[":
                return self._buffer.index("[") + 1
            if not self._read_on(0):
                raise ValueError("it has no list of events")

    def _read_on(self, place: int) -> bool:
        """Drop what was decoded and read the next piece; False at the end of the file."""
        self._buffer = self._buffer[place:]
        if len(self._buffer) > _LONGEST_EVENT:
            raise ValueError(f"an event of more than {_LONGEST_EVENT:,} characters")
        piece = self._text.read(_PIECE)
        self._buffer += piece
        return bool(piece)

    def facts(self) -> dict[str, Any]:
        """What the file says before and after its events; a part that cannot be read is left out."""
        tail = self._buffer + self._text.read(_PIECE)
        return _object(self._head.rstrip().rstrip(",") + "}") | _object("{" + tail.lstrip().lstrip(","))


def _object(text: str) -> dict[str, Any]:
    try:
        found = read_json(text)
    except JsonError:
        return {}
    return found if isinstance(found, dict) else {}


class _Columns:
    """Columns while they grow."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self.threads: dict[tuple[str, str], int] = {}
        self.name, self.kind, self.thread = array("i"), array("h"), array("i")
        self.begin, self.length = array("d"), array("d")
        self.external, self.correlation = array("q"), array("q")
        self.bytes, self.occupancy, self.blocks = array("d"), array("f"), array("f")
        self.allocated: dict[str, tuple[array[float], array[float], array[float]]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        if "name" not in event or "ts" not in event:
            return
        name, moment, values = str(event["name"]), float(event["ts"]), event.get("args") or {}
        if name == "[memory]" and "Total Allocated" in values:
            # torch numbers kinds of devices: 0 is the CPU, 1 is CUDA
            device = "CPU" if values.get("Device Type") == 0 else f"GPU {values.get('Device Id', 0)}"
            columns = self.allocated.setdefault(device, (array("d"), array("d"), array("d")))
            numbers = (moment, float(values["Total Allocated"]), float(values.get("Bytes", 0)))
            for column, number in zip(columns, numbers, strict=True):
                column.append(number)
        if event.get("ph") != "X" or event.get("dur") is None or not math.isfinite(moment):
            return
        kind, thread = str(event.get("cat", "")), (str(event.get("pid")), str(event.get("tid")))
        if kind in _EARLIER_KINDS:
            kind = "user_annotation" if _EARLIER_MARKS.match(name) else _EARLIER_KINDS[kind]
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.kind.append(self.kinds.setdefault(kind, len(self.kinds)))
        self.thread.append(self.threads.setdefault(thread, len(self.threads)))
        self.begin.append(moment)
        self.length.append(max(0.0, float(event["dur"])))
        self.external.append(int(values.get("External id", values.get("external id", -1))))
        self.correlation.append(int(values.get("correlation", -1)))
        on_device = "stream" in values or "bytes" in values
        self.bytes.append(_bytes(values) if on_device else math.nan)
        occupancy = values.get("est. achieved occupancy %") if on_device else None
        self.occupancy.append(math.nan if occupancy is None else float(occupancy) / 100)
        self.blocks.append(float(values.get("blocks per SM", math.nan)) if on_device else math.nan)

    def finish(self, facts: Mapping[str, Any]) -> TraceEvents:
        begin, length = np.array(self.begin), np.array(self.length)
        moments = [columns[0] for columns in self.allocated.values()]
        zero = begin.min() if len(begin) else min((min(column) for column in moments), default=0.0)
        order = np.lexsort((-length, begin))

        def sorted_by_begin(column: array[Any]) -> NDArray[Any]:
            return np.asarray(np.frombuffer(column, column.typecode)[order]) if len(column) else np.array(column)

        return TraceEvents(
            names=[*self.names], kinds=[*self.kinds], threads=[*self.threads],
            name=sorted_by_begin(self.name), kind=sorted_by_begin(self.kind), thread=sorted_by_begin(self.thread),
            begin=np.asarray(begin[order] - zero), length=np.asarray(length[order]),
            external=sorted_by_begin(self.external), correlation=sorted_by_begin(self.correlation),
            bytes=sorted_by_begin(self.bytes), occupancy=sorted_by_begin(self.occupancy),
            blocks=sorted_by_begin(self.blocks),
            allocated={device: _series(columns, zero) for device, columns in self.allocated.items()}, facts=facts,
        )  # fmt: skip


def _series(columns: tuple[array[float], ...], zero: float) -> tuple[Floats, Floats, Floats]:
    moment, total, change = (np.array(column) for column in columns)
    order = np.argsort(moment, kind="stable")
    return moment[order] - zero, total[order], change[order]


_ELEMENT_BYTES = {
    "double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "short": 2, "char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
"""By the names that torch's profiler gives the types of collectives, in small letters."""


def _bytes(values: Mapping[str, Any]) -> float:
    if "In msg nelems" in values:
        size = _ELEMENT_BYTES.get(str(values.get("dtype", "")).lower().removeprefix("c10::"))
        return float(values["In msg nelems"]) * size if size else math.nan
    return float(values.get("bytes", math.nan))


# -- unions of spans of time, as arrays of shape (spans, 2): beginnings and ends, in order, no span touching another.
# All of these take and give unions but `merge`, which makes one.

Union = NDArray[np.float64]
NOTHING: Union = np.empty((0, 2))


def merge(spans: ArrayLike) -> Union:
    """The union of spans in any order."""
    found = np.asarray(spans, dtype=np.float64).reshape(-1, 2)
    if not len(found):
        return NOTHING
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    first = np.flatnonzero(np.concatenate(([True], found[1:, 0] > reached[:-1])))
    last = np.concatenate((first[1:], [len(found)])) - 1
    return np.stack((found[first, 0], reached[last]), axis=1)


def clip(spans: ArrayLike, low: float, high: float) -> Union:
    """What of the spans lies between two moments, as a union."""
    found = np.clip(np.asarray(spans, dtype=np.float64).reshape(-1, 2), low, high)
    return merge(found[found[:, 1] > found[:, 0]])


def length(union: Union) -> float:
    """The sum of its spans."""
    return float(np.sum(union[:, 1] - union[:, 0]))


def both(one: Union, other: Union) -> Union:
    """Where two unions overlap."""
    first = np.searchsorted(other[:, 1], one[:, 0], "right")
    counts = np.maximum(0, np.searchsorted(other[:, 0], one[:, 1], "left") - first)
    mine = np.repeat(np.arange(len(one)), counts)
    theirs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
    begin = np.maximum(one[mine, 0], other[theirs, 0])
    return np.stack((begin, np.minimum(one[mine, 1], other[theirs, 1])), axis=1)


def without(union: Union, holes: Union) -> Union:
    """A union with parts cut out of it."""
    edges = np.concatenate(([-np.inf], holes.ravel(), [np.inf])).reshape(-1, 2)
    found = both(union, edges)
    return found[found[:, 1] > found[:, 0]]


def gaps(union: Union, low: float, high: float) -> Union:
    """What lies between the spans of a union, from one moment to another."""
    return without(np.array([[low, high]]), union)
