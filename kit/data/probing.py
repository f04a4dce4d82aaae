"""Probing: what a store does under load, measured by reading it the way the engine does.

Every figure comes from threads that each keep one request going, a new one as soon as one ends. The first request of
each is left out, since it opens a connection. Latencies are those of one byte; the bandwidth of a connection is what
larger ranges take beyond that. Nothing is written, and no more than a budget of bytes is read.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from kit.data.counters import Counters
from kit.data.dataset import Dataset
from kit.data.octets import Octets
from kit.data.remote import RemoteStore
from kit.data.requests import Requests, open_blocking
from kit.data.wire import Ask, Wire

SMALLEST_RANGE_BYTES = 256 << 10
_LATENCY_LOOPS = 8
_LEAST_SECONDS, _MOST_SECONDS = 0.3, 1.0
_HELD_BACK_RATIO = 6.0
"""Of the slowest requests over the quick ones: no latency is spread so wide, so some have waited to be allowed."""
_REQUEST_SECONDS = 30.0
_MOST_AT_ONCE = 1024
_REFUSED_PAUSE_SECONDS = 0.2
"""Longest pause before a refused request is sent again: short, so that what the store allows is used up and seen."""


class Source(Protocol):
    """A store as threads read it."""

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None: ...


class _OnLoop:
    """A store that only a loop can read, behind a loop in a thread of its own."""

    def __init__(self, dataset: Dataset, counters: Counters) -> None:
        self._loop = asyncio.new_event_loop()
        store = dataset.open_store()
        self._requests = Requests(store, dataset.url, _MOST_AT_ONCE, _REQUEST_SECONDS, counters)
        if isinstance(store, RemoteStore):
            store.retries = replace(store.retries, most_pause_seconds=_REFUSED_PAUSE_SECONDS)
        self._thread = threading.Thread(target=self._loop.run_forever, name="kit-probe", daemon=True)
        self._thread.start()

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        return asyncio.run_coroutine_threadsafe(self._requests.read(key, first, last), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._requests.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def open_source(dataset: Dataset, counters: Counters) -> Source:
    """The store of a dataset by the client that the engine has for it, so that a request costs what it costs there.

    Unlike the engine's it sends more at once and comes back sooner when it is refused: what the store allows is to be
    used up and seen. `close_source` lets go of it.

    Raises:
        StoreError: when the store cannot be opened.
    """
    blocking = open_blocking(dataset.open_store(), dataset.url, _REQUEST_SECONDS, counters, _MOST_AT_ONCE)
    if isinstance(blocking, Wire):
        blocking.retries = replace(blocking.retries, most_pause_seconds=_REFUSED_PAUSE_SECONDS)
    return _OnLoop(dataset, counters) if blocking is None else blocking


def close_source(source: Source) -> None:
    if isinstance(source, _OnLoop | Wire):
        source.close()


@dataclass(frozen=True, slots=True)
class Part:
    """An object and how much of it there is to read."""

    key: str
    size: int


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

    def __init__(self, source: Source, counters: Counters, parts: Sequence[Part], budget_bytes: int) -> None:
        self._source = source
        self._counters = counters
        self._parts = sorted(parts, key=lambda part: part.size)
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self.budget_bytes = budget_bytes
        self.requests = 0
        self.bytes_read = 0

    @property
    def largest(self) -> int:
        return self._parts[-1].size

    def latency(self, seconds: float) -> Load:
        """Requests of one byte, few at a time; one at a time where a limit on their rate holds several back."""
        several = self.load(_LATENCY_LOOPS, 1, seconds)
        quick, slow = quantile(several.seconds, 0.25), quantile(several.seconds, 0.95)
        return self.load(1, 1, seconds) if slow > _HELD_BACK_RATIO * quick else several

    def telling_range(self, latency_seconds: float, spread_seconds: float) -> int:
        """Bytes of a range that a connection needs well beyond the latency and its spread for, as far as they reach."""
        wished_seconds = max(2 * latency_seconds, 10 * spread_seconds)
        most = min(self.largest, max(SMALLEST_RANGE_BYTES, self.budget_bytes // 32))
        wished = SMALLEST_RANGE_BYTES
        while wished < most:
            began = time.perf_counter()
            self._read(wished)
            beyond = time.perf_counter() - began - latency_seconds
            if beyond > max(latency_seconds / 2, 4 * spread_seconds):
                wished = max(SMALLEST_RANGE_BYTES, int(wished / beyond * wished_seconds))
                break
            wished *= 4
        return min(wished, most)

    def load(self, in_flight: int, range_bytes: int, seconds: float, least: int = 1) -> Load:
        """Keep `in_flight` requests of `range_bytes` going for so long and so many; the first of each is left out.

        As the engine reads: a wire is told what to do with an answer, any other store is read by threads that wait, so
        that the CPU of a request is what the engine will need for one.
        """
        run = _Run(seconds, in_flight, least, self._retries)
        if isinstance(self._source, Wire):
            self._keep_asking(self._source, run, in_flight, range_bytes)
            return run.load(range_bytes)
        with ThreadPoolExecutor(in_flight, "kit-probe") as threads:
            for future in [threads.submit(self._keep_reading, run, range_bytes) for _ in range(in_flight)]:
                future.result()
        return run.load(range_bytes)

    def _keep_asking(self, wire: Wire, run: _Run, in_flight: int, range_bytes: int) -> None:
        for _ in range(in_flight):
            wire.ask([_Chain(self, wire, run, 1, opening=True)])
        run.opened.wait()
        run.open()
        wire.ask(_Chain(self, wire, run, range_bytes) for _ in range(in_flight))
        run.over.wait()
        if run.error is not None:
            raise run.error

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

    def _retries(self) -> int:
        return self._counters.values()["retries"]

    def _read(self, count: int) -> int:
        """One request for a range somewhere in an object."""
        data = self._source.read(*self.draw(count))
        return self.took(data)

    def draw(self, count: int) -> tuple[str, int, int]:
        """A range of so many bytes somewhere in an object, off the budget."""
        with self._lock:
            part = self._random.choice(self._parts)
            part = part if part.size >= count else self._parts[-1]
            count = min(count, part.size)
            first = self._random.randint(0, part.size - count)
            self.requests += 1
            self.budget_bytes -= count
        return part.key, first, first + count

    def took(self, data: Octets | None) -> int:
        """Count what came."""
        found = 0 if data is None else len(data)
        with self._lock:
            self.bytes_read += found
        return found


class _Chain(Ask):
    """One of the requests that are kept going: each answer asks for the next; `opening`: it only opens a connection."""

    __slots__ = ("_began", "_opening", "_prober", "_range_bytes", "_run", "_wire")

    def __init__(self, prober: Prober, wire: Wire, run: _Run, range_bytes: int, opening: bool = False) -> None:
        super().__init__(*prober.draw(range_bytes))
        self._prober, self._wire, self._run, self._range_bytes = prober, wire, run, range_bytes
        self._opening = opening
        self._began = 0.0

    def begin(self) -> bool | None:
        self._began = self._began or time.perf_counter()
        return True

    def done(self, data: Octets | None) -> None:
        count = self._prober.took(data)
        if self._opening:
            self._run.one_opened()
            return
        run = self._run
        run.done.append((self._began, time.perf_counter(), count))
        if run.goes_on and self._prober.budget_bytes > 0 and run.error is None:
            self._wire.ask([_Chain(self._prober, self._wire, run, self._range_bytes)])
        else:
            run.one_ended()

    def fail(self, error: BaseException) -> None:
        self._run.error = error
        self._run.opened.set()
        self._run.over.set()


class _Run:
    """What the requests of one load share."""

    def __init__(self, seconds: float, in_flight: int, least: int, retries: Callable[[], int]) -> None:
        self.done: list[tuple[float, float, int]] = []
        self._retries = retries
        self.ready = threading.Barrier(in_flight, self.open)
        self._seconds, self._in_flight, self._least = seconds, in_flight, least
        self.error: BaseException | None = None
        self.opened, self.over = threading.Event(), threading.Event()
        self._opened = self._ended = 0

    def one_opened(self) -> None:
        """In the wire's thread, as `one_ended`."""
        self._opened += 1
        if self._opened == self._in_flight:
            self.opened.set()

    def one_ended(self) -> None:
        self._ended += 1
        if self._ended == self._in_flight:
            self.over.set()

    def open(self) -> None:
        """Every connection is open: time counts from here."""
        self._start, self._cpu, self._refused = time.perf_counter(), time.process_time(), self._retries()

    @property
    def goes_on(self) -> bool:
        return time.perf_counter() < self._start + self._seconds or len(self.done) < self._least

    def load(self, range_bytes: int) -> Load:
        """Rates from the end of the first round to the deadline, when every thread was busy.

        A request counts by the part of its time that lies between the two, so that it does not matter whether many
        end just before the deadline or just after it.
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
