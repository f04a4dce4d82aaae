"""Pipeline: the events of one trial as spans: set-up, get batch, train, epoch; and what the store gave meanwhile.

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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kit.config import Config
from kit.events import Event, number
from kit.report.trace import trace_of
from kit.run.what_ran import used_event, with_values
from kit.units import format_bytes, format_seconds

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
    from kit.data.stores import is_shared, local_folder, resolve_url

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
