"""Retries: one policy for every store and client: what is worth another attempt, after which pause, for how long.

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
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kit.units import format_seconds

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
