"""`kit.data.probe(url)`: how fast a store is from this machine, measured in a few seconds: where a plan of chunks
starts.

Measured on the store's own objects, without writing and within a budget of bytes: latency, bandwidth of one connection
and of all, the requests in flight at which it saturates, requests/s, and how fast its real chunks decode. A figure that
cannot be measured, as where objects are too small, is None with the reason. A figure is what the client here reaches,
so a total that the client itself limits is a lower bound and is called one.

Each load keeps a number of requests in flight, a new one as soon as one ends, through the client that the engine has.
The first request of each connection is left out. Latencies are those of one byte; the bandwidth of a connection follows
from what larger ranges take beyond that.

Known error: a limit that delays requests instead of refusing them shows only as a rate far below what the latency
allows. Objects just read may come from a cache of the store.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from zarr.core.sync import sync

from kit.arguments import checks_arguments, no_config
from kit.chunks.geometry import place_of
from kit.config import Config
from kit.data.dataset import Dataset
from kit.data.open_dataset import open_dataset
from kit.data.stores.counters import Counters
from kit.data.stores.fsspec import RemoteStore
from kit.data.stores.http import Client, Get, HttpClient
from kit.data.stores.transfer import Octets
from kit.data.stores.url import redact, sizes_of_objects
from kit.data.stream.codec import StoredArray
from kit.data.stream.fetch import leaves, open_client, read_index
from kit.data.variables import ArrayInfo
from kit.errors import ConfigError, Problem, StoreError, UnreachableStoreError
from kit.tables import html_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

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
_SLOW_DEVIATIONS = 3
_LEAST_SLOW_FACTOR = 1.5
"""Of the median: less delays no batch."""
_DEVIATION_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median distance from the median."""
_REFUSED_FRACTION = 0.1
"""Of the requests: fewer refusals are faults, not a limit."""
_DECODE_CHUNKS = 12
_DECODE_SECONDS = 0.3
_COLUMNS = ("figure", "value", "how")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Figures of one store as seen from here; None where unknown. `how` explains each by its name."""

    url: str
    latency_seconds: float
    """Median time to the first byte."""
    latency_mean_seconds: float
    """Mean: what requests one after another add up to."""
    latency_deviation_seconds: float
    """Standard deviation: how much slower than most the slowest of many are."""
    latency_p95_seconds: float
    latency_slow_fraction: float
    """Of the requests, those far slower than the spread of the others explains."""
    latency_slow_factor: float
    """Their mean over that of the others; 1 where there are none."""
    bandwidth_bytes_per_second: float | None
    """Of one connection."""
    total_bandwidth_bytes_per_second: float
    parallelism: int
    """Requests in flight beyond which more bring little."""
    requests_per_second: float
    """Small requests reached, all loops together."""
    rate_limited: bool
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
        """The config with these figures in its chunking section; unknown ones stay as they are.

        The mean latency is taken, since times of requests add up. A rate of requests is taken only where the store
        refused more: otherwise it is no limit of the store's.

        Raises:
            ConfigError: for what is no Config.
        """
        given: Any = config  # by a user, who may give anything
        if not isinstance(given, Config):
            raise no_config("apply", given, "call probe.apply(config)")
        rates = {
            "bandwidth_bytes_per_second": self.bandwidth_bytes_per_second,
            "total_bandwidth_bytes_per_second": self.total_bandwidth_bytes_per_second,
            "requests_per_second": self.requests_per_second if self.rate_limited else None,
            "decode_bytes_per_second": self.decode_bytes_per_second,
        }
        changes: dict[str, float] = {
            "latency_seconds": round(self.latency_mean_seconds, 6),
            "latency_deviation_seconds": round(self.latency_deviation_seconds, 6),
            "latency_slow_fraction": round(self.latency_slow_fraction, 4),
            "latency_slow_factor": round(self.latency_slow_factor, 3),
            "request_cpu_seconds": round(self.request_cpu_seconds, 6),
            **{name: max(1, round(rate)) for name, rate in rates.items() if rate is not None},
        }
        if self.compression_ratio is not None:
            changes["compression_ratio"] = round(self.compression_ratio, 4)
        return config.replace({f"chunking.{name}": value for name, value in changes.items()})

    def _rows(self) -> list[tuple[str, str, str]]:
        shown: dict[str, Callable[[float], str]] = {
            **dict.fromkeys((
                "latency_seconds", "latency_mean_seconds", "latency_deviation_seconds", "latency_p95_seconds",
            ), format_seconds),
            "latency_slow_fraction": lambda fraction: f"{fraction:.1%}",
            **dict.fromkeys(("bandwidth_bytes_per_second", "total_bandwidth_bytes_per_second"), _rate_text),
            "parallelism": format_count,
            "requests_per_second": lambda rate: format_count(round(rate)),
            "request_cpu_seconds": format_seconds,
            "decode_bytes_per_second": _rate_text,
            "compression_ratio": lambda ratio: f"{ratio:.2f}",
        }  # fmt: skip
        rows = []
        for name, write in shown.items():
            label = name.removesuffix("_seconds").removesuffix("_bytes_per_second").replace("_", " ")
            value = getattr(self, name)
            rows.append((label, "unknown" if value is None else write(value), self.how.get(name, "")))
        return rows

    def _headline(self) -> str:
        return (
            f"Probe of {redact(self.url)}: {format_count(self.requests)} requests, {format_bytes(self.bytes_read)} "
            f"in {format_seconds(self.elapsed_seconds)}"
        )

    def __repr__(self) -> str:
        rows = self._rows()
        label, value = (max(len(row[place]) for row in rows) for place in (0, 1))
        lines = [f"  {name.ljust(label)}  {shown.rjust(value)}  {how}".rstrip() for name, shown, how in rows]
        return "\n".join([self._headline(), *lines])

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, self._rows(), caption=self._headline())


@checks_arguments
def probe(store: str | Config | Dataset, credentials: str = "default", *, most_bytes: int | str = "1 GiB") -> Probe:
    """Measure the latency, bandwidth and decoding speed of a store in a few seconds. Nothing is written.

    Args:
        store: The URL of a Zarr store, a config whose `data.url` and `data.credentials` name one, or an open dataset.
        credentials: As `data.credentials`, for a URL.
        most_bytes: Most bytes to read. Requests that have begun are finished.

    Returns:
        The measurement. `apply(config)` puts it into the section `chunking`.

    Raises:
        ConfigError: for a budget that is no size, or below 1 MiB.
        StoreError: when there is no store, it does not answer, or it holds no chunk.

    Example:
        >>> found = kit.data.probe(store)
        >>> found.apply(ocean).chunking.latency_seconds < 1
        True
    """
    budget = parse_bytes(most_bytes, "most_bytes")
    if budget < 1 << 20:
        raise ConfigError([Problem("most_bytes", f"{budget} bytes are too few to probe with; allow 1 MiB at least")])
    dataset = store if isinstance(store, Dataset) else open_dataset(store, credentials)
    if dataset.unreachable:  # a cache is no network
        raise UnreachableStoreError(dataset.unreachable)
    counters = Counters()
    with _open_source(dataset, counters) as source:
        return _probe(dataset, source, counters, budget)


def _rate_text(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


def _probe(dataset: Dataset, source: Client, counters: Counters, budget_bytes: int) -> Probe:
    began, store = time.perf_counter(), dataset.open_store()
    info = max(dataset.select(()), key=lambda one: one.nbytes)
    stored = sync(StoredArray.open(store, info))
    counts = [-(-size // side) for size, side in zip(info.shape, info.shard or info.chunk, strict=True)]
    numbers = random.Random(0).sample(range(prod(counts)), min(prod(counts), _MOST_KEYS))
    keys = [stored.object_key(place_of(number, counts)) for number in numbers]
    sizes = {key: size for key, size in sizes_of_objects(store, keys, dataset.url).items() if size > 0}
    if not sizes:
        raise StoreError(f"{redact(dataset.url)}: {info.name} has no chunk in the store, so there is nothing to probe")
    prober = Prober(source, counters, sizes, budget_bytes)
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
    slow_fraction, slow_factor = slow_requests(latency.seconds)
    how["latency_slow_fraction"] = (
        f"of those requests, which took {slow_factor:.1f} times as long as the others" if slow_fraction
        else "of those requests took longer than the spread of the others explains"
    )  # fmt: skip
    one = prober.load(1, prober.telling_range(middle, spread(latency)), 0.0, least=_BANDWIDTH_REQUESTS)
    bandwidth = _bandwidth(one, latency, how)
    steps = _steps(prober, one, how)
    fast = prober.load(_MOST_IN_FLIGHT, 1, step_seconds(middle))
    decode_rate, ratio = _decode(source, stored, info, dataset.url, how)
    best, rate_limited = max(steps, key=lambda step: step.bytes_per_second), _judge_rate(fast, middle, how)
    # Requests in flight that reach the best rate, if each still took as long as alone.
    parallelism = max(1, math.ceil(best.bytes_per_second * statistics.median(one.seconds) / one.range_bytes))
    return Probe(
        url=dataset.url, latency_seconds=middle, latency_mean_seconds=statistics.fmean(latency.seconds),
        latency_deviation_seconds=statistics.pstdev(latency.seconds),
        latency_p95_seconds=quantile(latency.seconds, 0.95), latency_slow_fraction=slow_fraction,
        latency_slow_factor=slow_factor, bandwidth_bytes_per_second=bandwidth,
        total_bandwidth_bytes_per_second=best.bytes_per_second, parallelism=parallelism,
        requests_per_second=fast.requests_per_second, rate_limited=rate_limited,
        request_cpu_seconds=(latency if rate_limited else fast).cpu_seconds_per_request,
        decode_bytes_per_second=decode_rate, compression_ratio=ratio,
        steps=tuple((step.in_flight, step.bytes_per_second) for step in steps), requests=prober.requests,
        bytes_read=prober.bytes_read, elapsed_seconds=time.perf_counter() - began, how=how,
    )  # fmt: skip


def spread(load: Load) -> float:
    """Median distance of the seconds from their median."""
    return _median_distance(load.seconds)


def _median_distance(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def slow_requests(seconds: Sequence[float]) -> tuple[float, float]:
    """The fraction of requests too slow for a lognormal spread like that of most, and how much longer they took."""
    logs = [math.log(max(one, 1e-9)) for one in seconds]
    deviation = _DEVIATION_OF_NORMAL * _median_distance(logs)
    limit = math.exp(statistics.median(logs) + max(_SLOW_DEVIATIONS * deviation, math.log(_LEAST_SLOW_FACTOR)))
    slow, others = ([one for one in seconds if (one > limit) is wanted] for wanted in (True, False))
    return len(slow) / len(seconds), statistics.fmean(slow) / statistics.fmean(others) if slow else 1.0


def _bandwidth(one: Load, latency: Load, how: dict[str, str]) -> float | None:
    """Bytes/s of one connection, from what a range takes beyond the latency; None when that is lost in its spread."""
    beyond = statistics.median(one.seconds) - statistics.median(latency.seconds)
    doubt = 1.5 * spread(latency) * math.sqrt(1 / len(one.seconds) + 1 / len(latency.seconds))
    what = f"{len(one.seconds)} ranges of {format_bytes(one.range_bytes)} one after another"
    if beyond <= 2 * doubt:
        how["bandwidth_bytes_per_second"] = f"{what} take no longer than 1 byte; measuring it needs larger objects"
        return None
    how["bandwidth_bytes_per_second"] = f"{what}, less the latency; ±{doubt / beyond:.0%}"
    return one.range_bytes / beyond


def _steps(prober: Prober, one: Load, how: dict[str, str]) -> list[Load]:
    """Four times as many requests in flight at each step, until that brings little more."""
    steps, why, range_bytes = [one], "still growing, so at least", one.range_bytes
    seconds = step_seconds(statistics.median(one.seconds))
    for in_flight in _IN_FLIGHT:
        most = max(step.bytes_per_second for step in steps)
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
    best = max(steps, key=lambda step: step.bytes_per_second)
    why = "this process was busy all the time, so at least" if best.busy_fraction > _CLIENT_BUSY else why
    said = f"{best.in_flight} ranges of {format_bytes(range_bytes)} in flight"
    how["total_bandwidth_bytes_per_second"] = f"{why}: {said}" if why else f"{said}; more brought no more"
    how["parallelism"] = "that rate times what one range takes alone (Little's law)"
    return steps


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
    source: Client, stored: StoredArray, info: ArrayInfo, url: str, how: dict[str, str]
) -> tuple[float | None, float | None]:
    """Decoded bytes per CPU second, and decoded bytes per stored byte, of some chunks."""
    counts = [-(-size // side) for size, side in zip(info.shape, info.chunk, strict=True)]
    numbers = random.Random(1).sample(range(prod(counts)), min(prod(counts), _DECODE_CHUNKS))
    with ThreadPoolExecutor(_DECODE_CHUNKS, "kit-probe") as threads:
        found = threads.map(lambda number: _chunk_bytes(source, stored, place_of(number, counts), url), numbers)
        chunks = [data for data in found if data is not None]
    if not chunks:
        how["decode_bytes_per_second"] = how["compression_ratio"] = "none of the chunks looked at is stored"
        return None, None
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while count < len(chunks) or time.perf_counter() - began < _DECODE_SECONDS:
        stored.decode(chunks[count % len(chunks)])
        count += 1
    seconds, decoded_bytes = time.process_time() - cpu, info.chunk_bytes
    how["decode_bytes_per_second"] = f"{count} chunks decoded in one thread, by its CPU time"
    how["compression_ratio"] = f"of {len(chunks)} chunks of {info.name}"
    ratio = decoded_bytes * len(chunks) / sum(len(data) for data in chunks)
    return count * decoded_bytes / max(seconds, 1e-9), ratio


def _chunk_bytes(source: Client, stored: StoredArray, coords: tuple[int, ...], url: str) -> Octets | None:
    key = stored.object_key(stored.object_of(coords))
    if stored.per_shard is None:
        return source.read(key)
    index = read_index(source, stored, key, url)
    place = None if index is None else stored.locate(index, coords)
    return None if place is None else source.read(key, *place)


SMALLEST_RANGE_BYTES = 256 << 10
_LATENCY_LOOPS = 8
_LEAST_SECONDS, _MOST_SECONDS = 0.3, 1.0
_LIMITED_RATIO = 6.0
"""Of the slowest requests over the quick ones: no latency is spread so wide, so some have waited to be allowed."""
_REQUEST_SECONDS = 30.0
_MOST_AT_ONCE = 1024
_REFUSED_PAUSE_SECONDS = 0.2
"""Longest pause before a refused request is sent again: short, so that what the store allows is used up and seen."""


@contextmanager
def _open_source(dataset: Dataset, counters: Counters) -> Iterator[Client]:
    """The store of a dataset by the client that the engine has for it, so that a request costs what it costs there.

    Unlike the engine's it sends more at once and retries sooner when it is refused, to use up what the store allows.
    """
    store = dataset.open_store()
    source = open_client(store, dataset.url, _REQUEST_SECONDS, counters, _MOST_AT_ONCE)
    for one in (source, *(one for one, _ in leaves(store, dataset.url))):
        if isinstance(one, RemoteStore | HttpClient):
            one.retries = replace(one.retries, most_pause_seconds=_REFUSED_PAUSE_SECONDS)
    try:
        yield source
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of requests in flight achieved."""

    in_flight: int
    range_bytes: int
    seconds: tuple[float, ...]
    """Of each request counted."""
    requests_per_second: float
    bytes_per_second: float
    cpu_seconds_per_request: float
    """Of this whole process."""
    busy_fraction: float
    """CPU seconds of this process per second: of about 1 on, the client is what limits."""
    refused: int
    """Requests that the store refused or lost, and that were sent again."""


class Prober:
    """Measures one store; `budget_bytes` falls with every byte asked for."""

    def __init__(self, source: Client, counters: Counters, sizes: Mapping[str, int], budget_bytes: int) -> None:
        self._source, self._counters = source, counters
        self._sizes = sorted(sizes.items(), key=lambda item: item[1])
        """Key and bytes of each object, the largest last."""
        self._lock, self._random = threading.Lock(), random.Random(0)
        self.budget_bytes = budget_bytes
        self.requests = self.bytes_read = 0

    def latency(self, seconds: float) -> Load:
        """Requests of one byte, few at a time; one at a time where a limit on their rate holds several back."""
        several = self.load(_LATENCY_LOOPS, 1, seconds)
        quick, slow = quantile(several.seconds, 0.25), quantile(several.seconds, 0.95)
        return self.load(1, 1, seconds) if slow > _LIMITED_RATIO * quick else several

    def telling_range(self, latency_seconds: float, spread_seconds: float) -> int:
        """Bytes of a range that a connection needs well beyond the latency and its spread for, as far as they reach."""
        target_seconds = max(2 * latency_seconds, 10 * spread_seconds)
        most = min(self._sizes[-1][1], max(SMALLEST_RANGE_BYTES, self.budget_bytes // 32))
        count = SMALLEST_RANGE_BYTES
        while count < most:
            began = time.perf_counter()
            self._read(count)
            beyond = time.perf_counter() - began - latency_seconds
            if beyond > max(latency_seconds / 2, 4 * spread_seconds):
                count = max(SMALLEST_RANGE_BYTES, int(count / beyond * target_seconds))
                break
            count *= 4
        return min(count, most)

    def load(self, in_flight: int, range_bytes: int, seconds: float, least: int = 1) -> Load:
        """Keep `in_flight` requests of `range_bytes` going for so long and so many; the first of each is left out.

        As the engine reads: an HttpClient calls back with a response, any other store is read by threads that wait, so
        that the CPU of a request is what the engine will need for one.
        """
        run, client = _Run(seconds, in_flight, least, lambda: self._counters.values()["retries"]), self._source
        if not isinstance(client, HttpClient):
            with ThreadPoolExecutor(in_flight, "kit-probe") as threads:
                for future in [threads.submit(self._keep_reading, run, range_bytes) for _ in range(in_flight)]:
                    future.result()
            return run.load(range_bytes)
        for _ in range(in_flight):
            client.submit([_Chain(self, client, run, 1, opening=True)])
        run.opened.wait()
        run.open()
        client.submit(_Chain(self, client, run, range_bytes) for _ in range(in_flight))
        run.ended.wait()
        if run.error is not None:
            raise run.error
        return run.load(range_bytes)

    def _keep_reading(self, run: _Run, range_bytes: int) -> None:
        try:
            self._read(1)  # opens a connection
        except BaseException:
            run.ready.abort()
            raise
        run.ready.wait()
        while run.goes_on and self.budget_bytes > 0:
            began = time.perf_counter()
            count = self._read(range_bytes)
            run.done.append((began, time.perf_counter(), count))

    def _read(self, count: int) -> int:
        """One request for a range somewhere in an object."""
        return self.took(self._source.read(*self.draw(count)))

    def draw(self, count: int) -> tuple[str, int, int]:
        """A range of so many bytes somewhere in an object, off the budget."""
        with self._lock:
            key, size = self._random.choice(self._sizes)
            if size < count:
                key, size = self._sizes[-1]
            count = min(count, size)
            first = self._random.randint(0, size - count)
            self.requests += 1
            self.budget_bytes -= count
        return key, first, first + count

    def took(self, data: Octets | None) -> int:
        """Count what came."""
        found = 0 if data is None else len(data)
        with self._lock:
            self.bytes_read += found
        return found


class _Chain(Get):
    """One of the requests in flight: its response sends the next; `opening`: it only opens a connection."""

    __slots__ = ("_began", "_client", "_opening", "_prober", "_range_bytes", "_run")

    def __init__(self, prober: Prober, client: HttpClient, run: _Run, range_bytes: int, opening: bool = False) -> None:
        super().__init__(*prober.draw(range_bytes))
        self._prober, self._client, self._run, self._range_bytes = prober, client, run, range_bytes
        self._opening, self._began = opening, 0.0

    def begin(self) -> bool | None:
        self._began = self._began or time.perf_counter()
        return True

    def done(self, data: Octets | None) -> None:
        count, run = self._prober.took(data), self._run
        if self._opening:
            run.opened.count_down()
            return
        run.done.append((self._began, time.perf_counter(), count))
        if run.goes_on and self._prober.budget_bytes > 0 and run.error is None:
            self._client.submit([_Chain(self._prober, self._client, run, self._range_bytes)])
        else:
            run.ended.count_down()

    def fail(self, error: BaseException) -> None:
        self._run.error = error
        self._run.opened.set()
        self._run.ended.set()


class _Latch(threading.Event):
    """Set when it has been counted down to zero, by the one thread of the client."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def count_down(self) -> None:
        self._count -= 1
        if not self._count:
            self.set()


class _Run:
    """What the requests of one load share."""

    def __init__(self, seconds: float, in_flight: int, least: int, retries: Callable[[], int]) -> None:
        self.done: list[tuple[float, float, int]] = []
        self._retries = retries
        self.ready = threading.Barrier(in_flight, self.open)
        self._seconds, self._in_flight, self._least = seconds, in_flight, least
        self.error: BaseException | None = None
        self.opened, self.ended = _Latch(in_flight), _Latch(in_flight)

    def open(self) -> None:
        """Every connection is open: time counts from here."""
        self._start, self._cpu, self._refused = time.perf_counter(), time.process_time(), self._retries()

    @property
    def goes_on(self) -> bool:
        return time.perf_counter() < self._start + self._seconds or len(self.done) < self._least

    def load(self, range_bytes: int) -> Load:
        """Rates from the end of the first round to the deadline, when every thread was busy.

        A request counts by the part of its time between the two, whether it ends just before the deadline or after it.
        """
        elapsed, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        seconds = tuple(ended - began for began, ended, _ in self.done) or (elapsed,)
        first, last = self._start + statistics.median(seconds), self._start + self._seconds
        if first >= last - self._seconds / 2:
            first, last = self._start, self._start + elapsed
        parts = [max(0.0, min(ended, last) - max(began, first)) / (ended - began) for began, ended, _ in self.done]
        moved = sum(part * count for part, (*_, count) in zip(parts, self.done, strict=True))
        return Load(
            in_flight=self._in_flight, range_bytes=range_bytes, seconds=seconds,
            requests_per_second=sum(parts) / (last - first), bytes_per_second=moved / (last - first),
            cpu_seconds_per_request=cpu / max(1, len(self.done)), busy_fraction=cpu / elapsed,
            refused=self._retries() - self._refused,
        )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def step_seconds(request_seconds: float) -> float:
    """How long one step of load lasts: several requests one after another."""
    return min(_MOST_SECONDS, max(_LEAST_SECONDS, 5 * request_seconds))
