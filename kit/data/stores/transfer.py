"""Octets: bytes as arrays, which can be cut and copied without Python's lock.

BoundedCache: what was found once, within a fixed memory.

ConcurrencyLimit: how many requests may be open at once.

Retries: one policy for every store and client: what is worth another attempt, after which pause, for how long.

Retried are 408, 429 and 5xx, connections that break or cannot be made, and bodies that end early. Anything else is an
answer: 403 and 404 come back at once, and so does a certificate that is refused. The pause before attempt n + 1 is
drawn from 0 to `min(most, first × 2^(n-1))` seconds ("full jitter"), so that many readers refused together do not come
back together. No attempt begins after the deadline; one that has begun is ended by its client's own limit. The
clients' own retries are off, so that every request is counted; only aiohttp and libcurl send a request once more by
themselves, uncounted, when a connection that they had kept is gone.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kit.data.stores.counters import Counters as Counters  # where pickles of datasets name it
from kit.units import format_seconds

Octets = NDArray[np.uint8]


def octets(data: bytes | memoryview) -> Octets:
    """Bytes as an array, without a copy."""
    return np.frombuffer(data, np.uint8)


LARGEST_BYTES = 64 << 20
_ENTRY_BYTES = 192
"""What keeping anything under a key takes, beside the key and the thing."""
Found = TypeVar("Found")


class BoundedCache(Generic[Found]):
    """What was found under each key, None for nothing there; the least recently used go. Call from any thread.

    A pickled copy is empty, as it is another process's.
    """

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self._largest_bytes = largest_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[str, Found | None] = OrderedDict()
        self.nbytes = 0
        """Memory of all of them, with their keys and what keeping them takes."""

    def find(self, key: str) -> tuple[Found | None, bool]:
        """What is kept under a key, and whether anything is."""
        with self._lock:
            if key not in self._found:
                return None, False
            self._found.move_to_end(key)
            return self._found[key], True

    def keep(self, key: str, found: Found | None) -> None:
        """Find it from now on."""
        with self._lock:
            if key not in self._found:
                self.nbytes += _kept_bytes(key, found)
            self._found[key] = found
            self._drop()

    def hold_at_most(self, largest_bytes: int) -> None:
        """Take no more memory than this from now on, nor than before."""
        with self._lock:
            self._largest_bytes = min(self._largest_bytes, largest_bytes)
            self._drop()

    def _drop(self) -> None:
        while self.nbytes > self._largest_bytes and len(self._found) > 1:
            self.nbytes -= _kept_bytes(*self._found.popitem(last=False))

    def __reduce__(self) -> tuple[type[BoundedCache[Found]], tuple[int]]:
        return BoundedCache, (self._largest_bytes,)


def _kept_bytes(key: str, found: Any) -> int:
    return sys.getsizeof(key) + (0 if found is None else sys.getsizeof(found)) + _ENTRY_BYTES


FEWEST = 32
"""Open in any case. So few do not crowd a network that is worth streaming from."""
_GROWTH, _GROWTH_ONCE_REFUSED = 2.0, 1.05
_LEAST_CROWDING, _CROWDING, _MOST_CROWDING = 1.5, 2.0, 2.5
"""Seconds of a request, in those of one when few were open: below the first more are opened, above the last fewer, so
that it will be the one between."""
_REFUSED = 0.01
"""Of a round: fewer refusals have other reasons."""
_LEAST_SECONDS = 1e-6
CROWDED, REFUSED = "with more, each takes longer", "the store refuses more"


class ConcurrencyLimit:
    """How many requests may be open, between `FEWEST` and `most`: as many as help. Call from one thread.

    More open requests hide latency until something else is full: the bandwidth, the store's rate of requests, or the
    CPU. From there on each only takes longer, all those of a batch end late, and the store refuses some, which are then
    sent again. So the limit behaves as TCP Vegas does with packets (Brakmo and Peterson, 1995): it starts at `FEWEST`
    and doubles while requests take about as long as they did when few were open, and falls where they take much longer.
    Where the store refuses requests it falls by the part refused, and from then on rises slowly.

    It is adjusted once a round: when as many responses have come as requests may be open, by the average time of those
    sent under the same limit. Where only latency binds it is soon at `most`; where something is full it is about twice
    what fills it, so nothing is left idle.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.now = min(FEWEST, most)
        """Requests that may be open."""
        self.round = 0
        """To be noted with a request when it is sent."""
        self._answers, self._refusals, self._seconds = 0, 0, 0.0
        self._held_back = False
        self._growth = _GROWTH
        self._reason = ""
        self._alone_seconds = float("inf")
        """The shortest average of a round."""

    @property
    def reason(self) -> str:
        """Why no more may be open; empty where that is all that were asked for, or nothing speaks against more."""
        return self._reason if self.now < self._most else ""

    def held_back(self) -> None:
        """There are requests that this limit alone keeps from being sent."""
        self._held_back = True

    def answered(self, sent_in: int, seconds: float) -> None:
        """A request that was sent in this round has been answered after so long."""
        if sent_in == self.round:  # else it was sent when there were more or fewer
            self._answers += 1
            self._seconds += seconds
            self._end_full_round()

    def refused(self, sent_in: int) -> None:
        """The store had too many requests to answer this one."""
        if sent_in == self.round:
            self._refusals += 1
            self._end_full_round()

    def _end_full_round(self) -> None:
        total = self._answers + self._refusals
        if total < self.now:
            return
        refused = self._refusals / total
        if refused > _REFUSED:
            self._growth = _GROWTH_ONCE_REFUSED
            self._change(1 - refused, REFUSED)
        else:
            self._change_by_time(max(_LEAST_SECONDS, self._seconds / self._answers))
        self._answers, self._refusals, self._seconds = 0, 0, 0.0
        self._held_back = False
        self.round += 1

    def _change_by_time(self, seconds: float) -> None:
        """More, fewer or as many as in this round, by what its requests took on average."""
        if self.now <= FEWEST and seconds > _MOST_CROWDING * self._alone_seconds:  # not by our crowd: it is slower now
            self._alone_seconds = seconds
        self._alone_seconds = min(self._alone_seconds, seconds)
        crowding = seconds / self._alone_seconds
        if crowding > _MOST_CROWDING:
            self._change(_CROWDING / crowding, CROWDED)
        elif self._held_back and crowding >= _LEAST_CROWDING:
            self._change(1.0, CROWDED)
        elif self._held_back:
            self._change(min(self._growth, _CROWDING / crowding), "" if self._growth == _GROWTH else REFUSED)

    def _change(self, factor: float, reason: str) -> None:
        self.now, self._reason = min(self._most, max(FEWEST, round(self.now * factor))), reason


FIRST_PAUSE_SECONDS = 0.1
MOST_PAUSE_SECONDS = 2.0
TOO_MANY = (429, 503)
"""The status of a request refused because there are too many."""
_PERMANENT = (501, 505)
"""Of the 5xx: what the server will never do."""
_BROKEN = {
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "ChunkedEncodingError", "ConnectionError", "ReadTimeout",  # requests, as gcsfs raises them
    "HTTPClientError", "IncompleteReadError", "ResponseStreamingError",  # botocore, and its own ConnectionError
    "RemoteProtocolError", "TransportError",  # httpx
}  # fmt: skip
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Retries:
    """The policy with its deadline, and who is told of every attempt that failed and is made again."""

    seconds: float
    """From the first attempt until the last may begin."""
    counted: Callable[[], None] = lambda: None
    most_pause_seconds: float = MOST_PAUSE_SECONDS

    def run(self, work: Callable[[], Result]) -> Result:
        """`work()`, tried again as long as it pays; its last error otherwise, with a note of the attempts."""
        attempts = RetryAttempts(self)
        while True:
            try:
                return work()
            except Exception as error:
                time.sleep(attempts.pause_seconds(error))
            self.counted()

    async def run_async(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """As `run`, on a loop."""
        attempts = RetryAttempts(self)
        while True:
            try:
                return await work()
            except Exception as error:
                await asyncio.sleep(attempts.pause_seconds(error))
            self.counted()


class RetryAttempts:
    """Those of one piece of work."""

    def __init__(self, policy: Retries) -> None:
        self._policy = policy
        self._began = time.monotonic()
        self._failed = 0

    def pause_seconds(self, error: Exception) -> float:
        """How long to wait before the next attempt; raises the error when there is to be none."""
        cause = passing(error)
        if cause is None:
            raise error
        self._failed += 1
        longest = min(self._policy.most_pause_seconds, FIRST_PAUSE_SECONDS * 2 ** min(self._failed - 1, 16))
        pause = random.uniform(0, longest)
        elapsed = time.monotonic() - self._began
        if elapsed + pause > self._policy.seconds:
            last = cause if isinstance(error, FileNotFoundError) else error  # it may be there, so that is not told
            last.add_note(f"tried {self._failed} times in {format_seconds(elapsed)}")
            raise last
        return pause


def passing(error: BaseException) -> Exception | None:
    """The error, or the one behind it, when the same request may well succeed later; None when it is an answer."""
    for one in _chain(error):
        status = _status(one)
        if status:
            return one if status in (408, 429) or (500 <= status < 600 and status not in _PERMANENT) else None
        names = {base.__name__ for base in type(one).__mro__}
        broken = isinstance(one, ConnectionError | TimeoutError | http.client.IncompleteRead) or names & _BROKEN
        if broken and not names & {"ClientSSLError", "SSLError", "SSLCertVerificationError"}:
            return one
    return None


def status_of(error: BaseException) -> int:
    """The HTTP status that an error, or one behind it, tells of; 0 for none."""
    return next((status for one in _chain(error) if (status := _status(one))), 0)


def _chain(error: BaseException) -> Iterator[Exception]:
    """The error and what it was raised from; libraries put a broken connection behind errors of their own."""
    seen: BaseException | None = error
    for _ in range(8):
        if not isinstance(seen, Exception):
            return
        yield seen
        seen = seen.__cause__


def _status(error: Exception) -> int:
    """The HTTP status an error tells of; 0 for none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    for name in ("status", "code"):  # aiohttp, gcsfs
        value = str(getattr(error, name, ""))
        if re.fullmatch(r"[1-5]\d\d", value):
            return int(value)
    return 0
