"""Trace: the events of one trial as plain numbers: memory per rank, throughput, where time went, and spans of time.

Bytes, seconds, samples per second and fractions; nothing is drawn here and no file is read.

A `Trace` takes events one by one, so that a live chart pays only for what is new. A step counts towards throughput once
every rank has reported it, and lasts as long as its slowest rank, by the clock on the wall: with validation,
checkpoints and logging, whose shares are shown, and which count after the last step too. The first `warmup_steps` steps
are in every series and in no average. A series of more than `LARGEST_SERIES` points is binned: memory keeps the largest
value of a bin, because a peak must not be averaged away; throughput keeps samples over seconds.

`pipeline_info` gives spans: set-up, get batch, train, epoch, and the rates of the store meanwhile. Times are seconds
since the first batch was requested; before 0 lies set-up (imports, model, store). *Get batch* is the time from the
first request of a batch to its last byte decoded, several at once when batches are read ahead; where the loader does
not tell (a torch DataLoader, loader processes) it is the time that training waited for it. *Train* runs from the batch
in hand to the request for the next, so the gaps between two trains are the rank's waits. Waits, and their share of the
time, leave out the warm-up steps; the wait for the very first batch is the loader's start-up and is kept apart, because
in a short trial it may outweigh everything else. Rates are of all ranks together, from counts taken after each step,
spread evenly between two steps.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.config import Config
from kit.events import Event, number
from kit.trial.settings_used import used_event, with_values
from kit.units import format_bytes, format_count, format_seconds, plural

LARGEST_SERIES = 400
"""More than one point a pixel of a chart column cannot be seen, and makes a live chart slow."""
PHASES = (
    "wait", "transfer", "forward", "backward", "optimizer", "communication", "validation", "checkpoint", "logging",
    "other",
)  # fmt: skip
BESIDE_TRAINING = ("validation", "checkpoint", "logging")
_EVERY_SO_MANY = ("validation", "checkpoint")
_LEAST_SHOWN = 0.01
PHASE_LABELS = {"wait": "data wait", **{phase: phase for phase in PHASES[1:]}}
MEMORY_KINDS = ("host_rss_bytes", "device_allocated_bytes", "device_reserved_bytes")

Floats = NDArray[np.float64]
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
    """The largest that a rank reported at its end; it includes what lay between two steps."""
    workers_peak_bytes: float = math.nan
    """The most that the loader processes of a rank held alone; NaN where there were none, or nobody told."""

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
        """The panel in words, for a reader who does not see it."""
        if not self.ranks:
            return "Memory per rank by step: nothing measured yet."
        text = f"Memory per rank by step, {plural(len(self.ranks), 'rank')}: "
        text += f"peak host RSS {format_bytes(self.peak('host_rss_bytes'))}"
        if math.isfinite(self.workers_peak_bytes):
            text += f", and {format_bytes(self.workers_peak_bytes)} of its loader processes"
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
    error_fraction: float = math.nan
    """Standard error of the mean time of a batch after warm-up, over that mean; NaN below two."""

    @property
    def sentence(self) -> str:
        """The panel in words, for a reader who does not see it."""
        if not self.measured_steps:
            return f"Throughput: nothing measured yet after {plural(self.warmup_steps, 'warm-up step')}."
        shares = ((PHASE_LABELS[name], self.mean_shares[name]) for name in BESIDE_TRAINING)
        beside_training = "".join(f", {share:.0%} on {label}" for label, share in shares if share >= _LEAST_SHOWN)
        return (
            f"Throughput over {plural(self.measured_steps, 'step')} after warm-up: "
            f"{format_count(self.mean_samples_per_second)} samples/s, "
            f"{self.data_wait_fraction:.0%} of the time spent waiting for data{beside_training}."
        )


class Trace:
    """Everything the charts need of one trial, kept up to date by `add`."""

    def __init__(self, warmup_steps: int, max_steps: int, world_size: int | None = None) -> None:
        self.warmup_steps, self.max_steps = warmup_steps, max_steps
        self.world_size = world_size
        self._memory: dict[str, dict[int, tuple[list[float], list[float]]]] = {kind: {} for kind in MEMORY_KINDS}
        self._reported_host_rss_bytes, self._workers_peak_bytes = 0.0, math.nan
        self._open: dict[int, tuple[int, Floats]] = {}
        """Of each step: how many ranks have reported it; samples, seconds of the slowest, and seconds by phase."""
        self._closed: list[tuple[int, Floats]] = []
        self._after: list[Any] = [np.zeros(len(PHASES)), 0.0]
        """After the last step: seconds by phase, and of the slowest rank."""

    def add(self, events: Iterable[Event]) -> Trace:
        """Take in new events; any kind but `step`, `fit_started` and `fit_ended` is passed over."""
        for event in events:
            if event["kind"] == "fit_started":
                self.world_size = int(event.get("world_size") or 1)
                self.max_steps = int(event.get("max_steps") or self.max_steps)
            elif event["kind"] == "fit_ended":
                after = np.array([finite(event.get(f"{phase}_seconds")) for phase in PHASES])
                self._after[0] += after
                self._after[1] = max(self._after[1], float(after.sum()))
                reported = finite(event.get("peak_host_rss_bytes"))
                self._reported_host_rss_bytes = max(self._reported_host_rss_bytes, reported)
            elif event["kind"] == "step":
                self._add_step(event)
        return self

    def _add_step(self, event: Event) -> None:
        for kind in MEMORY_KINDS:
            value = number(event.get(kind))
            if math.isfinite(value):
                steps, values = self._memory[kind].setdefault(event["rank"], ([], []))
                steps.append(event["step"])
                values.append(value)
        self._workers_peak_bytes = np.fmax(self._workers_peak_bytes, number(event.get("workers_bytes"))).item()
        ranks, sums = self._open.pop(event["step"], (0, np.zeros(2 + len(PHASES))))
        sums[0] += finite(event.get("samples"))
        sums[1] = max(sums[1], finite(event.get("step_seconds")))
        sums[2:] += [finite(event.get(f"{phase}_seconds")) for phase in PHASES]
        if ranks + 1 >= (self.world_size or 1):
            self._closed.append((event["step"], sums))
        else:
            self._open[event["step"]] = (ranks + 1, sums)

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
            workers_peak_bytes=self._workers_peak_bytes,
            **binned,
        )

    def throughput(self) -> ThroughputInfo:
        """Throughput and shares; averages leave the warm-up steps out."""
        steps = [step for step, _ in self._closed]
        sums = np.array([sums for _, sums in self._closed]).reshape(-1, 2 + len(PHASES))
        binned = np.array([part.sum(axis=0) for part in _bins(sums)]).reshape(-1, 2 + len(PHASES))
        warm = sums[np.array(steps, int) > self.warmup_steps]
        whole = warm.sum(axis=0, keepdims=True)
        if len(warm):
            after, slowest = self._after
            first = dict(zip(PHASES, warm[0, 2:].tolist(), strict=True))
            counted = after * [belongs_to_last_step(phase, first[phase]) for phase in PHASES]
            whole[0, 1] += slowest * counted.sum() / (after.sum() or 1.0)
            whole[0, 2:] += counted
        (mean_rate,), (mean_shares,) = _rates_and_shares(whole)
        rates, shares = _rates_and_shares(binned)
        return ThroughputInfo(
            steps=tuple(part[-1] for part in _bins(steps)),
            samples_per_second=tuple(rates.tolist()),
            shares={phase: tuple(shares[:, column].tolist()) for column, phase in enumerate(PHASES)},
            mean_samples_per_second=float(mean_rate),
            data_wait_fraction=float(mean_shares[0]),
            mean_shares=dict(zip(PHASES, mean_shares.tolist(), strict=True)),
            measured_steps=len(warm),
            error_fraction=_error_fraction(warm[:, 1]),
            warmup_steps=self.warmup_steps,
            max_steps=self.max_steps,
        )


def belongs_to_last_step(phase: str, first_seconds: float) -> bool:
    """Whether what of a part comes after the last step counts among those measured.

    It does not where the first measured step came with as much, after a warm-up step: of every so many steps there
    would be one more than there are in as many steps as are measured.
    """
    return phase not in _EVERY_SO_MANY or first_seconds == 0


def trace_of(events: Iterable[Event], config: Config) -> Trace:
    """The trace of events already read, such as those of a run directory."""
    events = list(events)
    ranks = {event["rank"] for event in events if event["kind"] == "step"}
    return Trace(config.trial.warmup_steps, config.trial.max_steps, len(ranks) or None).add(events)


class BatchLoss(NamedTuple):
    """A batch of all ranks."""

    epoch: int | None
    loss: float
    """The mean of the ranks' losses, as gradients are a mean over ranks."""
    samples: float


def losses_of(events: Iterable[Event]) -> list[BatchLoss]:
    """The loss of each batch in its order; one without a loss is NaN."""
    found: dict[Any, list[Event]] = {}
    for event in events:
        if event["kind"] == "step":
            found.setdefault((event.get("epoch"), event.get("batch", event["step"])), []).append(event)
    return [
        BatchLoss(
            epoch=None if epoch is None else int(epoch),
            loss=statistics.fmean(number(event.get("loss")) for event in ranks),
            samples=sum(finite(event.get("samples")) for event in ranks),
        )
        for (epoch, _), ranks in found.items()
    ]


def metrics_of(events: Iterable[Event]) -> dict[str, Series]:
    """What the module logged over the optimizer steps: of rank 0, the last value of each; and the mean loss of all."""
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    losses: defaultdict[float, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "step" and event.get("loss") is not None:
            losses[event["step"]].append(number(event["loss"]))
        if event["rank"] == 0 and event["kind"] in ("step", "logged"):
            for name, value in (event.get("metrics") or {}).items():
                found[name][event["step"]] = number(value)
    if losses:
        found["loss"] = {step: statistics.fmean(values) for step, values in losses.items()}
    return {name: (tuple(values), tuple(values.values())) for name, values in sorted(found.items())}


def throughput_info(events: Iterable[Event], config: Config) -> ThroughputInfo:
    """Throughput over all ranks, and where the time went, over the steps of these events."""
    return trace_of(events, config).throughput()


def finite(value: Any) -> float:
    """A value of an event as a finite number; 0 for all else."""
    found = number(value)
    return found if math.isfinite(found) else 0.0


def _rates_and_shares(sums: Floats) -> tuple[Floats, Floats]:
    """Samples per second `(row,)`, and the share of each phase `(row, phase)`; NaN where no time was spent."""
    slowest, total = sums[:, 1], sums[:, 2:].sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = np.where(slowest != 0, sums[:, 0] / slowest, np.nan)
        return rates, np.where(total[:, None] != 0, sums[:, 2:] / total[:, None], np.nan)


def _error_fraction(seconds: Floats) -> float:
    if len(seconds) < 2 or not seconds.mean():
        return math.nan
    return float(seconds.std(ddof=1) / math.sqrt(len(seconds)) / seconds.mean())


def _bins(items: Any) -> list[Any]:
    width = max(1, math.ceil(len(items) / LARGEST_SERIES))
    return [items[start : start + width] for start in range(0, len(items), width)]


def _bin_largest(steps: Sequence[float], values: Sequence[float]) -> Series:
    if len(values) <= LARGEST_SERIES:
        return tuple(steps), tuple(values)
    return tuple(part[-1] for part in _bins(steps)), tuple(max(part) for part in _bins(values))


Spans = tuple[tuple[float, float], ...]
"""(start, end) of each, in seconds since the first batch was requested."""

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
    """From the start of the process to the request for the first batch."""
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
    warmup_seconds: float = 0.0
    """When the last rank had done its warm-up steps, which are in no share; 0 without any."""

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
        """The chart in one sentence."""
        if not self.waits:
            return "All steps were warm-up: give the trial more to tell the wait for data"
        share = self.data_wait_fraction
        if share < 0.01:
            return "Training waits for data less than 1 % of the time"
        return f"Waiting for data takes {100 * share:.0f} % of the time"

    @property
    def sentence(self) -> str:
        """The whole chart in words, for a reader who does not see it."""
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
        seconds: Leave out what lies outside of these, since the first batch was requested; shares stay of the whole.

    Raises:
        ValueError: when no rank has finished a step.
    """
    from kit.data.stores.url import is_shared, local_folder, resolve_url

    events = [*events]
    by_rank: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == "step" and "train_ended" in event:
            by_rank[event["rank"]].append(event)
    if not by_rank:
        raise ValueError("no step was finished")
    steps = dict(sorted(by_rank.items()))
    began = {event["rank"]: event["time"] for event in events if event["kind"] == "fit_started"}
    zero = min(began.values(), default=min(found[0]["train_started"] for found in steps.values()))
    window = seconds or (-math.inf, math.inf)
    reads = all("read_started" in event for found in steps.values() for event in found)
    spans: defaultdict[str, Any] = defaultdict(dict)
    for rank, found in steps.items():
        for name, whole in _spans(found, [event for event in events if event["rank"] == rank], zero, reads).items():
            shifted = ((begin - zero, end - zero) for begin, end in whole)
            spans[name][rank] = tuple(span for span in shifted if span[1] >= window[0] and span[0] <= window[1])
    throughput, warmup_steps = trace_of(events, config).throughput(), config.trial.warmup_steps
    warm = [event for found in steps.values() for event in found if event["step"] > warmup_steps]
    cold = [event["train_ended"] - zero for found in steps.values() for event in found if event["step"] <= warmup_steps]
    rates = _rates(steps.values(), zero, window)
    url, chunking = resolve_url(config.data.url), config.chunking
    remote = local_folder(url) is None and is_shared(url)
    return PipelineInfo(
        **spans,
        overlaps=reads,
        waits=tuple(number(event["wait_seconds"]) for event in warm),
        data_wait_fraction=throughput.data_wait_fraction,
        samples_per_second=throughput.mean_samples_per_second,
        rates=rates,
        settings=_settings(config, events, len(steps), own=rates is not None),
        limit_bytes_per_second=float(chunking.total_bandwidth_bytes_per_second) if remote else None,
        limit_requests_per_second=(float(chunking.requests_per_second) or None) if remote else None,
        warmup_seconds=max(cold, default=0.0),
    )


def _spans(
    steps: Sequence[Event], events: Sequence[Event], zero: float, reads: bool
) -> dict[str, list[tuple[float, float]]]:
    """The spans of one rank, from its steps and all of its events, in seconds since the epoch."""
    first = steps[0]["train_started"]
    began = next((event["time"] for event in reversed(events) if event["kind"] == "fit_started"), None)
    started = next((event["time"] for event in events if event["kind"] == "rank_started"), None)
    waited = [(event["train_started"] - number(event["wait_seconds"]), event["train_started"]) for event in steps]
    epoch_ends = {event["epoch"]: event["train_ended"] for event in steps}
    found = {
        "set_up": [(started, began)] if started is not None and began is not None else [],
        "start_up": [(zero if began is None else began, first)],
        "get_batch": [(event["read_started"], event["read_ended"]) for event in steps] if reads else waited,
        "train": [(event["train_started"], event["train_ended"]) for event in steps],
        "wait": waited[1:],
        "save": [],
        "validation": [],
        "epoch": [*pairwise([first if began is None else began, *epoch_ends.values()])],  # the wait for it included
    }
    for event in events:
        if event["kind"] == "span" and event["name"] in ("save", "validation"):
            found[event["name"]].append((event["started"], event["ended"]))
    return found


def _rates(ranks: Iterable[Sequence[Event]], zero: float, window: tuple[float, float]) -> Rates | None:
    counts = []  # of each rank (step + 1, 3): time, bytes, requests
    for steps in ranks:
        after = [(step["train_ended"], number(step.get("bytes_read")), number(step.get("requests"))) for step in steps]
        counts.append(np.array([(zero, 0.0, 0.0), *after]))
    if any(np.isnan(count).any() for count in counts):
        return None
    begin, end = max(zero, zero + window[0]), min(max(float(count[-1, 0]) for count in counts), zero + window[1])
    bins = min(MOST_BINS, max(_LEAST_BINS, max(map(len, counts)) // 2))
    edges = np.linspace(begin, end, bins + 1)
    width = (end - begin) / bins or math.nan
    totals = (sum(np.interp(edges, count[:, 0], count[:, column]) for count in counts) for column in (1, 2))
    bytes_per_second, requests_per_second = (np.maximum(0.0, np.diff(total) / width).tolist() for total in totals)
    return Rates(
        edges=tuple((edges - zero).tolist()),
        bytes_per_second=tuple(bytes_per_second),
        requests_per_second=tuple(requests_per_second),
    )


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
    counts, edges = np.histogram(np.minimum(waits, top), bins, (0.0, top))
    return tuple(edges.tolist()), tuple(counts.tolist())


def merged(spans: Spans, least_gap_seconds: float) -> Spans:
    """Spans closer than this as one: what is narrower than a pixel cannot be seen, and costs a path each."""
    found: list[list[Any]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] < least_gap_seconds:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return tuple((begin, end) for begin, end in found)
