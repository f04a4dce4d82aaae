"""`kit.probe(url)`: what a store gives this machine, in a few seconds: the figures that a plan of chunks starts from.

Measured on the store's own objects, without writing: latency, bandwidth of one connection and of all, the requests in
flight at which it saturates, requests/s, and how fast its real chunks decode. A figure that the objects are too small
to tell is None, and says so; nothing is made up. A figure is what the client here reaches, so a total that the client
itself limits is a lower bound and is called one.

Known error: a limit that delays requests instead of refusing them shows only as a rate far below what the latency
allows. Objects just read may come from a cache of the store.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from zarr.core.sync import sync

from kit.config import Config
from kit.data.codec import StoredArray
from kit.data.counters import Counters
from kit.data.dataset import ArrayInfo, Dataset, open_dataset
from kit.data.octets import Octets
from kit.data.probing import Load, Part, Prober, Source, close_source, open_source, quantile, step_seconds
from kit.data.requests import read_index
from kit.data.stores import redact, sizes_of_objects
from kit.errors import StoreError
from kit.tables import html_table, text_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from zarr.abc.store import Store

_MOST_KEYS = 24
_MOST_IN_FLIGHT = 128
_LATENCY_SECONDS = 0.9
_SATURATED_GAIN = 1.2
"""Four times the requests in flight that bring less than this much more: the store is saturated."""
_BANDWIDTH_REQUESTS = 6
_IN_FLIGHT = (4, 16, 64, 128)
_QUEUE_SECONDS = 10.0
"""A step whose requests would take longer than this is left out."""
_CLIENT_BUSY = 0.85
_REFUSED_FRACTION = 0.1
"""Of the requests: fewer refusals are faults, not a limit."""
_DECODE_CHUNKS = 12
_DECODE_SECONDS = 0.3
_COLUMNS = ("figure", "value", "how")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Figures of one store as seen from here; None where it could not be told. `how` explains each by its name."""

    url: str
    latency_seconds: float
    """Median time to the first byte."""
    latency_mean_seconds: float
    """Mean: what requests one after another add up to."""
    latency_deviation_seconds: float
    """Standard deviation: how much slower than most the slowest of many are."""
    latency_p95_seconds: float
    bandwidth_bytes_per_second: float | None
    """Of one connection."""
    total_bandwidth_bytes_per_second: float
    parallelism: int
    """Requests in flight beyond which more bring little."""
    requests_per_second: float
    """Small requests reached, all loops together."""
    held_back: bool
    """Whether the store refuses requests beyond that rate."""
    request_cpu_seconds: float
    decode_bytes_per_second: float | None
    """Decoded bytes per CPU second of one core."""
    compression_ratio: float | None
    """Decoded bytes per stored byte of the chunks looked at."""
    steps: tuple[tuple[int, float], ...]
    """Requests in flight and bytes/s of each step of load."""
    requests: int
    bytes_read: int
    elapsed_seconds: float
    how: Mapping[str, str]

    def apply(self, config: Config) -> Config:
        """The config with these figures in its chunking section; those that could not be told stay.

        The mean latency is taken, since times of requests add up. A rate of requests is taken only where the store
        held it back: otherwise it is no limit of the store's.
        """
        changes: dict[str, Any] = {
            "latency_seconds": round(self.latency_mean_seconds, 6),
            "latency_deviation_seconds": round(self.latency_deviation_seconds, 6),
            "total_bandwidth_bytes_per_second": max(1, round(self.total_bandwidth_bytes_per_second)),
            "request_cpu_seconds": round(self.request_cpu_seconds, 6),
        }
        if self.bandwidth_bytes_per_second is not None:
            changes["bandwidth_bytes_per_second"] = max(1, round(self.bandwidth_bytes_per_second))
        if self.held_back:
            changes["requests_per_second"] = max(1, round(self.requests_per_second))
        if self.decode_bytes_per_second is not None:
            changes["decode_bytes_per_second"] = max(1, round(self.decode_bytes_per_second))
        if self.compression_ratio is not None:
            changes["compression_ratio"] = round(self.compression_ratio, 4)
        return config.replace({f"chunking.{name}": value for name, value in changes.items()})

    def _rows(self) -> list[tuple[str, str, str]]:
        def row(name: str, value: float | None, write: Any, unit: str = "") -> tuple[str, str, str]:
            label = name.removesuffix("_seconds").removesuffix("_bytes_per_second").replace("_", " ")
            return label, "not told" if value is None else f"{write(value)}{unit}", self.how.get(name, "")

        return [
            row("latency_seconds", self.latency_seconds, format_seconds),
            row("latency_mean_seconds", self.latency_mean_seconds, format_seconds),
            row("latency_deviation_seconds", self.latency_deviation_seconds, format_seconds),
            row("latency_p95_seconds", self.latency_p95_seconds, format_seconds),
            row("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, format_bytes, "/s"),
            row("total_bandwidth_bytes_per_second", self.total_bandwidth_bytes_per_second, format_bytes, "/s"),
            row("parallelism", self.parallelism, format_count),
            row("requests_per_second", round(self.requests_per_second), format_count),
            row("request_cpu_seconds", self.request_cpu_seconds, format_seconds),
            row("decode_bytes_per_second", self.decode_bytes_per_second, format_bytes, "/s"),
            row("compression_ratio", self.compression_ratio, lambda ratio: f"{ratio:.2f}"),
        ]

    def _headline(self) -> str:
        return (
            f"Probe of {redact(self.url)}: {format_count(self.requests)} requests, {format_bytes(self.bytes_read)} "
            f"in {format_seconds(self.elapsed_seconds)}"
        )

    def __str__(self) -> str:
        label = max(len(row[0]) for row in self._rows())
        value = max(len(row[1]) for row in self._rows())
        lines = [f"  {name.ljust(label)}  {shown.rjust(value)}  {how}".rstrip() for name, shown, how in self._rows()]
        return "\n".join([self._headline(), *lines])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._headline())

    def steps_table(self) -> str:
        """Bytes/s by requests in flight, as text."""
        rows = [[format_count(count), f"{format_bytes(rate)}/s"] for count, rate in self.steps]
        return text_table(("in flight", "bytes/s"), rows)


def probe(store: str | Config | Dataset, credentials: str = "default", *, most_bytes: int | str = "1 GiB") -> Probe:
    """Measure the store of a dataset in a few seconds, without writing.

    Args:
        store: The URL of a Zarr store, a config whose `data.url` and `data.credentials` name one, or an open dataset.
        credentials: As in `open_store`; of a URL only.
        most_bytes: How much may be read, at most; requests that have begun are finished.

    Raises:
        StoreError: when there is no store, or it does not answer, or holds no chunk to read.
    """
    dataset, budget = _opened(store, credentials), parse_bytes(most_bytes)
    if budget < 1 << 20:
        raise StoreError(f"{redact(dataset.url)}: {budget} bytes are too few to probe with; allow 1 MiB at least")
    counters = Counters()
    source = open_source(dataset, counters)
    try:
        return _probe(dataset, source, counters, budget)
    finally:
        close_source(source)


def _opened(store: str | Config | Dataset, credentials: str) -> Dataset:
    if isinstance(store, Dataset):
        return store
    if isinstance(store, Config):
        return open_dataset(store.data.url, store.data.credentials)
    return open_dataset(store, credentials)


def _probe(dataset: Dataset, source: Source, counters: Counters, budget_bytes: int) -> Probe:
    began, store = time.perf_counter(), dataset.open_store()
    info = max(dataset.select(()), key=lambda one: one.nbytes)
    stored = sync(StoredArray.open(store, info.name))
    parts = _parts(store, stored, info, dataset.url)
    if not parts:
        raise StoreError(f"{redact(dataset.url)}: {info.name} has no chunk in the store, so there is nothing to probe")
    prober = Prober(source, counters, parts, budget_bytes)
    how: dict[str, str] = {}
    latency = prober.latency(_LATENCY_SECONDS)
    middle = statistics.median(latency.seconds)
    for name, word in (
        ("latency_seconds", "median"),
        ("latency_mean_seconds", "mean"),
        ("latency_deviation_seconds", "standard deviation"),
        ("latency_p95_seconds", "95 %"),
    ):
        how[name] = f"{word} of {len(latency.seconds)} requests of 1 byte, {latency.in_flight} in flight"
    one = prober.load(1, prober.telling_range(middle, spread(latency)), 0.0, least=_BANDWIDTH_REQUESTS)
    bandwidth = _bandwidth(one, latency, how)
    steps = _steps(prober, one, how)
    fast = prober.load(_MOST_IN_FLIGHT, 1, step_seconds(middle))
    decode_rate, ratio = _decode(source, stored, info, dataset.url, how)
    best, held_back = max(steps, key=_rate), _judge_rate(fast, middle, how)
    return Probe(
        url=dataset.url, latency_seconds=middle, latency_mean_seconds=statistics.fmean(latency.seconds),
        latency_deviation_seconds=statistics.pstdev(latency.seconds),
        latency_p95_seconds=quantile(latency.seconds, 0.95), bandwidth_bytes_per_second=bandwidth,
        total_bandwidth_bytes_per_second=best.bytes_per_second, parallelism=_parallelism(one, best),
        requests_per_second=fast.requests_per_second, held_back=held_back,
        request_cpu_seconds=(latency if held_back else fast).cpu_seconds_per_request,
        decode_bytes_per_second=decode_rate, compression_ratio=ratio,
        steps=tuple((step.in_flight, step.bytes_per_second) for step in steps), requests=prober.requests,
        bytes_read=prober.bytes_read, elapsed_seconds=time.perf_counter() - began, how=how,
    )  # fmt: skip


# -- what there is to read


def _parts(store: Store, stored: StoredArray, info: ArrayInfo, url: str) -> list[Part]:
    """Some objects of the array that are there, with their sizes."""
    counts = [-(-size // side) for size, side in zip(info.shape, info.shard or info.chunk, strict=True)]
    everything = prod(counts)
    numbers = range(everything) if everything <= _MOST_KEYS else random.Random(0).sample(range(everything), _MOST_KEYS)
    keys = [stored.object_key(_place(number, counts)) for number in numbers]
    return [Part(key, size) for key, size in sizes_of_objects(store, keys, url).items() if size > 0]


def _place(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    places = []
    for count in reversed(counts):
        number, place = divmod(number, count)
        places.append(place)
    return tuple(reversed(places))


# -- the figures


def spread(load: Load) -> float:
    """Median distance of the seconds from their median."""
    middle = statistics.median(load.seconds)
    return statistics.median(abs(seconds - middle) for seconds in load.seconds)


def _bandwidth(one: Load, latency: Load, how: dict[str, str]) -> float | None:
    """Bytes/s of one connection, from what a range takes beyond the latency; None when that is lost in its spread."""
    beyond = statistics.median(one.seconds) - statistics.median(latency.seconds)
    doubt = 1.5 * spread(latency) * math.sqrt(1 / len(one.seconds) + 1 / len(latency.seconds))
    what = f"{len(one.seconds)} ranges of {format_bytes(one.range_bytes)} one after another"
    if beyond <= 2 * doubt:
        how["bandwidth_bytes_per_second"] = f"{what} take no longer than 1 byte; larger objects are needed to tell"
        return None
    how["bandwidth_bytes_per_second"] = f"{what}, less the latency; ±{doubt / beyond:.0%}"
    return one.range_bytes / beyond


def _steps(prober: Prober, one: Load, how: dict[str, str]) -> list[Load]:
    """Four times as many requests in flight at each step, until that brings little more."""
    steps, why, range_bytes = [one], "still growing, so at least", one.range_bytes
    seconds = step_seconds(statistics.median(one.seconds))
    for in_flight in _IN_FLIGHT:
        most = max(map(_rate, steps))
        if 2 * most * seconds + in_flight * range_bytes > prober.budget_bytes:
            why = "the budget of bytes ended here, so at least"
            break
        if in_flight * range_bytes > _QUEUE_SECONDS * most * (in_flight / steps[-1].in_flight):
            why = ""
            break
        steps.append(prober.load(in_flight, range_bytes, seconds))
        if steps[-1].bytes_per_second < _SATURATED_GAIN * most:
            why = ""
            break
    best = max(steps, key=_rate)
    why = "this process was busy all the time, so at least" if best.busy_fraction > _CLIENT_BUSY else why
    said = f"{best.in_flight} ranges of {format_bytes(range_bytes)} in flight"
    how["total_bandwidth_bytes_per_second"] = f"{why}: {said}" if why else f"{said}; more brought no more"
    how["parallelism"] = "that rate times what one range takes alone (Little's law)"
    return steps


def _parallelism(one: Load, best: Load) -> int:
    """Requests in flight that reach the best rate, if each still took as long as alone."""
    return max(1, math.ceil(best.bytes_per_second * statistics.median(one.seconds) / one.range_bytes))


def _rate(load: Load) -> float:
    return load.bytes_per_second


def _judge_rate(fast: Load, latency: float, how: dict[str, str]) -> bool:
    """Whether the store limits the requests, which only refusals prove; and how the rate was obtained."""
    limited = fast.refused > _REFUSED_FRACTION * len(fast.seconds)
    said = f"requests of 1 byte, {fast.in_flight} in flight"
    if fast.refused:
        said += f"; {fast.refused} were refused or lost" + ("" if limited else ", too few for a limit")
    else:
        possible = format_count(round(fast.in_flight / max(latency, 1e-9)))
        said += f"; no limit of the store was met, and the latency alone would allow {possible}"
    how["requests_per_second"] = said
    how["request_cpu_seconds"] = "CPU time of this process in those requests"
    return limited


def _decode(
    source: Source, stored: StoredArray, info: ArrayInfo, url: str, how: dict[str, str]
) -> tuple[float | None, float | None]:
    """Decoded bytes per CPU second, and decoded bytes per stored byte, of some chunks."""
    chunks = _some_chunks(source, stored, info, url)
    if not chunks:
        how["decode_bytes_per_second"] = how["compression_ratio"] = "none of the chunks looked at is stored"
        return None, None
    decoded_bytes = prod(info.chunk) * info.dtype.itemsize
    count, seconds = _decode_for_a_while(stored, chunks)
    how["decode_bytes_per_second"] = f"{count} chunks decoded in one thread, by its CPU time"
    how["compression_ratio"] = f"of {len(chunks)} chunks of {info.name}"
    ratio = decoded_bytes * len(chunks) / sum(len(data) for data in chunks)
    return count * decoded_bytes / max(seconds, 1e-9), ratio


def _decode_for_a_while(stored: StoredArray, chunks: Sequence[Octets]) -> tuple[int, float]:
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while count < len(chunks) or time.perf_counter() - began < _DECODE_SECONDS:
        stored.decode(chunks[count % len(chunks)])
        count += 1
    return count, time.process_time() - cpu


def _some_chunks(source: Source, stored: StoredArray, info: ArrayInfo, url: str) -> list[Octets]:
    """Stored bytes of a few chunks spread over the array, asked for together."""
    counts = [-(-size // side) for size, side in zip(info.shape, info.chunk, strict=True)]
    everything = prod(counts)
    numbers = random.Random(1).sample(range(everything), min(everything, _DECODE_CHUNKS))
    with ThreadPoolExecutor(_DECODE_CHUNKS, "kit-probe") as threads:
        found = threads.map(lambda number: _chunk_bytes(source, stored, _place(number, counts), url), numbers)
        return [data for data in found if data is not None]


def _chunk_bytes(source: Source, stored: StoredArray, coords: tuple[int, ...], url: str) -> Octets | None:
    key = stored.object_key(stored.object_of(coords))
    if stored.per_shard is None:
        return source.read(key)
    index = read_index(source, stored, key, url)
    place = None if index is None else stored.locate(index, coords)
    return None if place is None else source.read(key, *place)
