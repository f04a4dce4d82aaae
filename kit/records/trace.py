"""Trace: the step events of one trial as plain numbers: memory per rank, throughput of all ranks, where time went.

Bytes, seconds, samples per second and fractions; nothing is drawn here and no file is read. A trace takes events one by
one, so that a live chart pays only for what is new. A step counts towards throughput once every rank has reported it,
and it lasts as long as its slowest rank, a validation before it left out (in the shares it is not). The first
`warmup_steps` steps are kept in every series and left out of every average. A series of more than `LARGEST_SERIES`
points is binned: memory keeps the largest value of a bin, because a peak must not be averaged away; throughput keeps
samples over seconds.

Pipeline: the events of one trial as spans: set-up, get batch, train, epoch; and what the store gave meanwhile.

Times are seconds since the first batch was asked for; what lies before 0 is set-up (imports, model, store). *Get batch*
is the time from a batch's first request to its last byte decoded, several at once when batches are read ahead; where
the loader does not tell (a torch DataLoader, loader processes) it is the time that training waited for it. *Train* runs
from the batch in hand to the next one wanted, so the gaps between two trains are what the rank waited.

Waits, and the share of time they take, leave out the warm-up steps; the wait for the very first batch is the loader's
start-up and is told apart, because in a short trial it may outweigh everything else. Rates are of all ranks together,
from counts taken after each step, and so are spread evenly over the steps between two bins.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kit.config import Config
from kit.events import Event, number
from kit.trial.what_ran import used_event, with_values
from kit.units import format_bytes, format_count, format_seconds

LARGEST_SERIES = 400
"""More than one point a pixel of a chart column cannot be seen, and makes a live chart slow."""
PHASES = ("wait", "transfer", "forward", "backward", "optimizer", "communication", "validation", "other")
PHASE_LABELS = {"wait": "data wait", **{phase: phase for phase in PHASES[1:]}}
MEMORY_KINDS = ("host_rss_bytes", "device_allocated_bytes", "device_reserved_bytes")

Series = tuple[tuple[float, ...], tuple[float, ...]]
"""Steps and values, each `(point,)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """What each rank held after each step, in bytes."""

    ranks: tuple[int, ...]
    host_rss_bytes: dict[int, Series]
    device_allocated_bytes: dict[int, Series]
    """Empty on the CPU."""
    device_reserved_bytes: dict[int, Series]
    warmup_steps: int
    max_steps: int
    reported_host_rss_bytes: float = 0.0
    """The largest that a rank reported at its end: what lay between two steps is in it too."""

    def largest(self, kind: str) -> float:
        """The largest value of one kind after any step, over all ranks; NaN when there is none."""
        series: dict[int, Series] = getattr(self, kind)
        return max((value for _, values in series.values() for value in values), default=math.nan)

    def peak(self, kind: str) -> float:
        """The largest value of one kind that is known of, over all ranks; NaN when there is none."""
        seen, reported = self.largest(kind), self.reported_host_rss_bytes if kind == "host_rss_bytes" else 0.0
        return reported if reported and not seen >= reported else seen

    @property
    def has_device(self) -> bool:
        return bool(self.device_allocated_bytes)

    @property
    def sentence(self) -> str:
        """What the panel shows, for those who do not see it."""
        if not self.ranks:
            return "Memory per rank by step: nothing measured yet."
        text = f"Memory per rank by step, {_count(len(self.ranks), 'rank')}: "
        text += f"peak host RSS {format_bytes(self.peak('host_rss_bytes'))}"
        if self.has_device:
            text += f", peak device memory allocated {format_bytes(self.peak('device_allocated_bytes'))}"
            text += f" and reserved {format_bytes(self.peak('device_reserved_bytes'))}"
        return text + "."


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputInfo:
    """How fast all ranks together went, and on what their time was spent."""

    steps: tuple[float, ...]
    samples_per_second: tuple[float, ...]
    """Samples of all ranks over the seconds of the slowest, per step `(point,)`."""
    shares: dict[str, tuple[float, ...]]
    """For each of `PHASES` the fraction of the time of all ranks `(point,)`; a point's fractions add to 1."""
    mean_samples_per_second: float
    """Over the steps after warm-up; NaN before there is one."""
    data_wait_fraction: float
    mean_shares: dict[str, float]
    measured_steps: int
    warmup_steps: int
    max_steps: int

    @property
    def sentence(self) -> str:
        """What the panel shows, for those who do not see it."""
        if not self.measured_steps:
            return f"Throughput: nothing measured yet after {_count(self.warmup_steps, 'warm-up step')}."
        return (
            f"Throughput over {_count(self.measured_steps, 'step')} after warm-up: "
            f"{format_count(self.mean_samples_per_second)} samples/s, "
            f"{self.data_wait_fraction:.0%} of the time spent waiting for data."
        )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(slots=True)
class _Step:
    """One optimizer step, summed over the ranks that have reported it."""

    ranks: int = 0
    samples: float = 0.0
    slowest_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class Trace:
    """Everything the charts need of one trial, kept up to date by `add`."""

    def __init__(self, warmup_steps: int, max_steps: int, world_size: int | None = None) -> None:
        self.warmup_steps, self.max_steps = warmup_steps, max_steps
        self.world_size = world_size
        self._memory: dict[str, dict[int, tuple[list[float], list[float]]]] = {kind: {} for kind in MEMORY_KINDS}
        self._reported_host_rss_bytes = 0.0
        self._open: dict[int, _Step] = {}
        self._closed: list[tuple[int, _Step]] = []

    def add(self, events: Iterable[Event]) -> Trace:
        """Take in new events; any kind but `step`, `fit_started` and `fit_ended` is passed over."""
        for event in events:
            if event["kind"] == "fit_started":
                self.world_size = int(event.get("world_size") or 1)
                self.max_steps = int(event.get("max_steps") or self.max_steps)
            elif event["kind"] == "fit_ended":
                reported = _finite(event.get("peak_host_rss_bytes"))
                self._reported_host_rss_bytes = max(self._reported_host_rss_bytes, reported)
            elif event["kind"] == "step":
                self._remember_memory(event)
                self._remember_step(event)
        return self

    def _remember_memory(self, event: Event) -> None:
        for kind in MEMORY_KINDS:
            value = number(event.get(kind))
            if math.isfinite(value):
                steps, values = self._memory[kind].setdefault(event["rank"], ([], []))
                steps.append(event["step"])
                values.append(value)

    def _remember_step(self, event: Event) -> None:
        step = self._open.setdefault(event["step"], _Step())
        step.ranks += 1
        step.samples += _finite(event.get("samples"))
        training = _finite(event.get("step_seconds")) - _finite(event.get("validation_seconds"))
        step.slowest_seconds = max(step.slowest_seconds, training)
        for phase in PHASES:
            step.phase_seconds[phase] += _finite(event.get(f"{phase}_seconds"))
        if step.ranks >= (self.world_size or 1):
            self._closed.append((event["step"], self._open.pop(event["step"])))

    @property
    def last_step(self) -> int:
        """The last step every rank has reported; 0 before the first."""
        return self._closed[-1][0] if self._closed else 0

    def memory(self) -> MemoryInfo:
        """Memory per rank; a long series keeps the largest value of each bin."""
        binned = {
            kind: {rank: _bin_largest(*series) for rank, series in sorted(ranks.items())}
            for kind, ranks in self._memory.items()
        }
        ranks = tuple(sorted({rank for series in self._memory.values() for rank in series}))
        return MemoryInfo(
            ranks=ranks,
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
            reported_host_rss_bytes=self._reported_host_rss_bytes,
            **binned,
        )

    def throughput(self) -> ThroughputInfo:
        """Throughput and shares; averages leave the warm-up steps out."""
        bins = [_merge(part) for part in _bins(self._closed)]
        warm = [step for number_, step in self._closed if number_ > self.warmup_steps]
        _, mean = _merge([(0, step) for step in warm])
        return ThroughputInfo(
            steps=tuple(last for last, _ in bins),
            samples_per_second=tuple(_rate(step) for _, step in bins),
            shares={phase: tuple(_share(step, phase) for _, step in bins) for phase in PHASES},
            mean_samples_per_second=_rate(mean),
            data_wait_fraction=_share(mean, "wait"),
            mean_shares={phase: _share(mean, phase) for phase in PHASES},
            measured_steps=len(warm),
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
        )


def trace_of(events: Iterable[Event], config: Config) -> Trace:
    """The trace of events already read, such as those of a run directory."""
    events = list(events)
    ranks = {event["rank"] for event in events if event["kind"] == "step"}
    return Trace(config.trial.warmup_steps, config.trial.max_steps, len(ranks) or None).add(events)


def memory_info(events: Iterable[Event], config: Config) -> MemoryInfo:
    """Memory per rank over the steps of these events."""
    return trace_of(events, config).memory()


def throughput_info(events: Iterable[Event], config: Config) -> ThroughputInfo:
    """Throughput over all ranks, and where the time went, over the steps of these events."""
    return trace_of(events, config).throughput()


def _finite(value: Any) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0


def _rate(step: _Step) -> float:
    return step.samples / step.slowest_seconds if step.slowest_seconds else math.nan


def _share(step: _Step, phase: str) -> float:
    total = sum(step.phase_seconds.values())
    return step.phase_seconds[phase] / total if total else math.nan


def _merge(part: Sequence[tuple[int, _Step]]) -> tuple[int, _Step]:
    """Consecutive steps as one, under the number of the last."""
    if len(part) == 1:
        return part[0]
    merged = _Step(
        samples=sum(step.samples for _, step in part),
        slowest_seconds=sum(step.slowest_seconds for _, step in part),
        phase_seconds={phase: sum(step.phase_seconds[phase] for _, step in part) for phase in PHASES},
    )
    return (part[-1][0] if part else 0), merged


def _bins(items: Sequence[Any]) -> list[Sequence[Any]]:
    width = max(1, math.ceil(len(items) / LARGEST_SERIES))
    return [items[start : start + width] for start in range(0, len(items), width)]


def _bin_largest(steps: Sequence[float], values: Sequence[float]) -> Series:
    if len(values) <= LARGEST_SERIES:
        return tuple(steps), tuple(values)
    return tuple(part[-1] for part in _bins(steps)), tuple(max(part) for part in _bins(values))


Spans = tuple[tuple[float, float], ...]
"""(beginning, end) of each, in seconds since the first batch was asked for."""

MOST_BINS = 60
_LEAST_BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the store gave over time, all ranks together."""

    edges: tuple[float, ...]
    """Seconds, `(bin + 1,)`."""
    bytes_per_second: tuple[float, ...]
    requests_per_second: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInfo:
    """The numbers of the chart; mappings are by rank."""

    set_up: Mapping[int, Spans]
    """From the start of the process to the first batch asked for."""
    start_up: Mapping[int, Spans]
    """From there to the first batch in hand."""
    get_batch: Mapping[int, Spans]
    overlaps: bool
    """Whether get batch is the reading itself; else it is the wait."""
    train: Mapping[int, Spans]
    wait: Mapping[int, Spans]
    """For every batch but the first."""
    save: Mapping[int, Spans]
    validation: Mapping[int, Spans]
    epoch: Mapping[int, Spans]
    waits: tuple[float, ...]
    """Seconds that each step after warm-up waited for its batch, all ranks."""
    data_wait_fraction: float
    """NaN without a step after warm-up."""
    samples_per_second: float
    rates: Rates | None
    """None where the loader does not count."""
    limit_bytes_per_second: float | None
    """What the config says the network carries; None where the store is on this machine."""
    limit_requests_per_second: float | None
    settings: tuple[tuple[str, str], ...]
    """How batches were read, as far as the loader tells."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.train)

    @property
    def end_seconds(self) -> float:
        return max((end for spans in self.train.values() for _, end in spans), default=0.0)

    @property
    def set_up_seconds(self) -> float:
        """Of the slowest rank."""
        return _longest(self.set_up)

    @property
    def start_up_seconds(self) -> float:
        """Of the slowest rank."""
        return _longest(self.start_up)

    @property
    def mean_get_batch_seconds(self) -> float:
        return _mean(self.get_batch)

    @property
    def mean_train_seconds(self) -> float:
        return _mean(self.train)

    @property
    def finding(self) -> str:
        """What the chart shows, in one sentence."""
        if not self.waits:
            return "All steps were warm-up: give the trial more to tell the wait for data"
        share = self.data_wait_fraction
        if share < 0.01:
            return "Training waits for data less than 1 % of the time"
        return f"Waiting for data takes {100 * share:.0f} % of the time"

    @property
    def sentence(self) -> str:
        """The whole chart, for those who do not see it."""
        text = f"{self.finding}. Set-up {format_seconds(self.set_up_seconds)}, loader start-up "
        text += f"{format_seconds(self.start_up_seconds)}, get batch {format_seconds(self.mean_get_batch_seconds)} and "
        text += f"train {format_seconds(self.mean_train_seconds)} on average."
        if self.rates is not None:
            text += f" The store gave {format_bytes(round(max(self.rates.bytes_per_second)))}/s at most"
            text += f" in {max(self.rates.requests_per_second):.0f} requests/s."
        return text


def pipeline_info(events: Iterable[Event], config: Config, seconds: tuple[float, float] | None = None) -> PipelineInfo:
    """A trial's events as spans and rates.

    Args:
        events: Of all ranks.
        config: What was run.
        seconds: Leave out what lies outside of these, as of the first batch asked for; the shares stay of the whole.

    Raises:
        ValueError: when no rank has finished a step.
    """
    events = [*events]
    steps = _steps_by_rank(events)
    if not steps:
        raise ValueError("no step was finished")
    asked = {event["rank"]: event["time"] for event in events if event["kind"] == "fit_started"}
    zero = min(asked.values(), default=min(rank[0]["train_started"] for rank in steps.values()))
    trace = trace_of(events, config)
    throughput, warm = trace.throughput(), config.trial.warmup_steps
    reads = all("read_started" in event for rank in steps.values() for event in rank)
    window = seconds or (-math.inf, math.inf)
    trained = {
        rank: [(event["train_started"], event["train_ended"]) for event in found] for rank, found in steps.items()
    }
    rates = _rates([[(zero, 0.0, 0.0), *map(_counted, found)] for found in steps.values()], zero, window)

    def cut(spans: Iterable[tuple[float, float]]) -> Spans:
        shifted = ((begin - zero, end - zero) for begin, end in spans)
        return tuple(span for span in shifted if span[1] >= window[0] and span[0] <= window[1])

    return PipelineInfo(
        set_up={rank: cut(_whole(events, "rank_started", rank, asked.get(rank))) for rank in steps},
        start_up={rank: cut([(asked.get(rank, zero), first[0]["train_started"])]) for rank, first in steps.items()},
        get_batch={rank: cut(_reads(found) if reads else _waited(found)) for rank, found in steps.items()},
        overlaps=reads,
        train={rank: cut(spans) for rank, spans in trained.items()},
        wait={rank: cut(_waited(found[1:])) for rank, found in steps.items()},
        save={rank: cut(_told(events, rank, "save")) for rank in steps},
        validation={rank: cut(_told(events, rank, "validation")) for rank in steps},
        epoch={rank: cut(_epochs(found, asked.get(rank))) for rank, found in steps.items()},
        waits=tuple(
            number(event["wait_seconds"]) for found in steps.values() for event in found if event["step"] > warm
        ),
        data_wait_fraction=throughput.data_wait_fraction,
        samples_per_second=throughput.mean_samples_per_second,
        rates=rates,
        settings=_settings(config, events, len(steps), own=rates is not None),
        **_limits(config),
    )


def _steps_by_rank(events: Sequence[Event]) -> dict[int, list[Event]]:
    steps: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == "step" and "train_ended" in event:
            steps[event["rank"]].append(event)
    return dict(sorted(steps.items()))


def _whole(events: Sequence[Event], kind: str, rank: int, end: float | None) -> Spans:
    """From the event of that kind to `end`."""
    began = [event["time"] for event in events if event["kind"] == kind and event["rank"] == rank]
    return ((began[0], end),) if began and end is not None else ()


def _reads(steps: Sequence[Event]) -> list[tuple[float, float]]:
    return [(event["read_started"], event["read_ended"]) for event in steps]


def _waited(steps: Sequence[Event]) -> list[tuple[float, float]]:
    return [(event["train_started"] - number(event["wait_seconds"]), event["train_started"]) for event in steps]


def _told(events: Sequence[Event], rank: int, name: str) -> list[tuple[float, float]]:
    """What the rank told whole."""
    return [
        (event["started"], event["ended"])
        for event in events
        if event["kind"] == "span" and event["rank"] == rank and event["name"] == name
    ]


def _epochs(steps: Sequence[Event], asked: float | None) -> list[tuple[float, float]]:
    """Each epoch from the end of the one before, so that the wait for its first batch is in it."""
    last = {event["epoch"]: event["train_ended"] for event in steps}
    begin = steps[0]["train_started"] if asked is None else asked
    return [*pairwise([begin, *last.values()])]


# -- rates


def _counted(event: Event) -> tuple[float, float, float]:
    return event["train_ended"], number(event.get("bytes_read")), number(event.get("requests"))


def _rates(
    ranks: Sequence[Sequence[tuple[float, float, float]]], zero: float, window: tuple[float, float]
) -> Rates | None:
    if any(math.isnan(value) for counts in ranks for count in counts for value in count):
        return None
    end = max(counts[-1][0] for counts in ranks)
    begin, end = max(zero, zero + window[0]), min(end, zero + window[1])
    bins = min(MOST_BINS, max(_LEAST_BINS, max(len(counts) for counts in ranks) // 2))
    edges = [begin + (end - begin) * place / bins for place in range(bins + 1)]
    totals = [
        [sum(_between(counts, edge, column) for counts in ranks) for edge in edges] for column in (1, 2)
    ]  # bytes, requests
    width = (end - begin) / bins or math.nan
    speeds = [tuple(max(0.0, after - before) / width for before, after in pairwise(total)) for total in totals]
    return Rates(edges=tuple(edge - zero for edge in edges), bytes_per_second=speeds[0], requests_per_second=speeds[1])


def _between(counts: Sequence[tuple[float, float, float]], moment: float, column: int) -> float:
    """A count at a moment between two steps, on the straight line between them."""
    place = bisect_left(counts, moment, key=lambda count: count[0])
    if place == 0:
        return counts[0][column]
    if place == len(counts):
        return counts[-1][column]
    before, after = counts[place - 1], counts[place]
    share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 1.0
    return before[column] + share * (after[column] - before[column])


def _limits(config: Config) -> dict[str, float | None]:
    """What the config says of the network; a store in a folder or in memory has none."""
    from kit.data.stores.url import is_shared, local_folder, resolve_url

    url = resolve_url(config.data.url)
    if local_folder(url) is not None or not is_shared(url):
        return {"limit_bytes_per_second": None, "limit_requests_per_second": None}
    chunking = config.chunking
    return {
        "limit_bytes_per_second": float(chunking.total_bandwidth_bytes_per_second),
        "limit_requests_per_second": float(chunking.requests_per_second) or None,
    }


def _settings(config: Config, events: Sequence[Event], ranks: int, own: bool) -> tuple[tuple[str, str], ...]:
    """Of kit's own engine all, of another loader what it was seen to stand at."""
    used = used_event(events)
    loader = config.loader if used is None else with_values(config, used["used"]).loader
    size = ("batch size", f"{loader.batch_size}" + (f" × {ranks} ranks" if ranks > 1 else ""))
    processes = ("loader processes", f"{loader.num_workers} × {loader.prefetch_factor} ahead")
    if not own:
        return () if used is None else (size, processes if loader.num_workers else ("loader processes", "none"))
    return (
        ("order", config.data.order),
        size,
        processes if loader.num_workers else ("batches ahead", str(loader.batches_ahead)),
        ("in flight", f"{loader.requests_in_flight} requests"),
        ("decode threads", str(loader.decode_threads)),
    )


def _longest(spans: Mapping[int, Spans]) -> float:
    return max((end - begin for found in spans.values() for begin, end in found), default=0.0)


def _mean(spans: Mapping[int, Spans]) -> float:
    lengths = [end - begin for found in spans.values() for begin, end in found]
    return statistics.fmean(lengths) if lengths else math.nan


def histogram(waits: Sequence[float], bins: int = 40) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Edges `(bins + 1,)` from 0 to the mean and three deviations, and counts `(bins,)`; longer waits fall in the last.

    The range is that of the reference chart (mean + 3σ), so that a few very long waits do not hide the rest.
    """
    top = statistics.fmean(waits) + 3 * statistics.pstdev(waits) if waits else 0.0
    top = max(min(top, max(waits, default=0.0)), 1e-4)
    counts = [0] * bins
    for wait in waits:
        counts[min(bins - 1, int(wait / top * bins))] += 1
    return tuple(top * place / bins for place in range(bins + 1)), tuple(counts)


def merged(spans: Spans, least_gap_seconds: float) -> Spans:
    """Spans closer than this as one: what is narrower than a pixel cannot be seen, and costs a path each."""
    found: list[list[Any]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] < least_gap_seconds:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return tuple((begin, end) for begin, end in found)
