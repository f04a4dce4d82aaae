"""HttpClient: reads of an object store by libcurl, all of them in one thread; the cheapest request there is in Python.

Sending and receiving happen in C, without the interpreter's lock, and no thread waits for an answer: what is asked for
is told of its answer in the wire's own thread. So a request costs less than half the CPU of one by threads, and the
memory of hundreds of connections stays small. It serves what fsspec has opened and logged in to, at the same address
with the same key (`kit.data.stores.auth`). Answers are bytes, or None where there is no such object; an answer to a
range that is something else is an error. What passes is tried again by `kit.data.stores.retry`, without holding up the
others.

The thread begins with the first request and ends when there has been none for a while, so a wire that is forgotten
leaves nothing behind. A wire belongs to the process that made it.

Concurrency: how many requests to keep open, which is as many as help.

Requests in flight hide latency until something else is full: the bandwidth, the store's limit of requests, or the CPU.
From there on they share it, so each takes longer, those of a batch end late and together, and what decodes them first
waits and then cannot keep up; a store that limits requests refuses the rest, and each refused one is sent again.

So the limit starts low and doubles while requests take about as long as they did when few were open; it falls where
they take much longer, as TCP Vegas does with packets (Brakmo and Peterson, 1995), and where the store refuses, by the
part that it refused; from then on it rises slowly. Times are averages over a round: as many answers as may be open, to
requests sent under the same limit. Where nothing but latency binds, the limit is soon the most that is allowed; where
something is full, about twice what fills it are open, so nothing is left idle.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import itertools
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pycurl

from kit.data.stores.auth import Address
from kit.data.stores.fsspec import is_metadata
from kit.data.stores.retry import TOO_MANY, Retries, RetryAttempts
from kit.data.stores.transfer import Counters, Octets, octets
from kit.data.stores.url import store_error
from kit.errors import StoreError

_WEIRD_REPLY, _BROKEN_STREAM = 8, 92
_PASSING = {
    pycurl.E_COULDNT_RESOLVE_PROXY, pycurl.E_COULDNT_RESOLVE_HOST, pycurl.E_COULDNT_CONNECT, pycurl.E_PARTIAL_FILE,
    pycurl.E_GOT_NOTHING, pycurl.E_SEND_ERROR, pycurl.E_RECV_ERROR, pycurl.E_HTTP2, pycurl.E_SSL_CONNECT_ERROR,
    _WEIRD_REPLY, _BROKEN_STREAM,
}  # fmt: skip
"""libcurl's codes for a connection that broke, could not be made, or ended before the body did."""
_READ_BYTES = 256 << 10
_LINGER_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_ROOM_PAUSE_SECONDS = 0.001
_MOST_REDIRECTS = 5


class AnswerError(OSError):
    """What the store says instead of bytes; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Get:
    """One request, told of its answer in the wire's thread; `head` asks for the object's tags, not its bytes."""

    __slots__ = ("attempts", "first", "head", "key", "last")

    def __init__(self, key: str, first: int | None = None, last: int | None = None, head: bool = False) -> None:
        self.key, self.first, self.last, self.head = key, first, last, head
        self.attempts: RetryAttempts | None = None

    def begin(self) -> bool | None:
        """Whether to send it now; None: not yet, and nothing behind it either."""
        return True

    def done(self, data: Octets | None) -> None:
        """What the store gave; None where there is no such object."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """It was tried as often as the policy allows."""
        raise NotImplementedError

    @property
    def most_bytes(self) -> int:
        """Bytes that the answer may have; 0 for no limit. A store that knows no ranges would send whole objects."""
        if self.first is None:
            return 0
        return -self.first if self.first < 0 or self.last is None else self.last - self.first

    @property
    def span(self) -> str | None:
        """In the words of an HTTP range; None for a whole object."""
        if self.first is None:
            return None
        return str(self.first) if self.first < 0 or self.last is None else f"{self.first}-{self.last - 1}"


class _Waiting(Get):
    """A request that a thread waits for."""

    __slots__ = ("future",)

    def __init__(self, key: str, first: int | None, last: int | None, head: bool = False) -> None:
        super().__init__(key, first, last, head)
        self.future: Future[Octets | None] = Future()

    def done(self, data: Octets | None) -> None:
        self.future.set_result(data)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    asked: Get
    parts: list[bytes]
    """What has come."""
    round: int
    at: float
    """When it was sent, by the monotonic clock."""


class HttpClient:
    """The objects below one address; call from any thread.

    Args:
        in_flight: Requests sent and not answered, at most; fewer where more do not help (`kit.data.stores.http`).
        seconds: How long one request may take, and how long attempts may begin.
        counters: Told of every request.
    """

    def __init__(self, address: Address, url: str, in_flight: int, seconds: float, counters: Counters) -> None:
        self._address, self._url = address, url
        self.limit, self._seconds = ConcurrencyLimit(in_flight), seconds
        self._counters = counters
        self.retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, in_flight)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = os.pipe()
        for end in (self._bell, self._rope):
            os.set_blocking(end, False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._close_bell = weakref.finalize(self, _close, self._bell, self._rope)
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._closed = False
        self._due: float | None = None
        """When libcurl wants to be called, whatever the sockets say."""
        self._asked: deque[Get] = deque()
        self._again: list[tuple[float, int, Get]] = []
        self._numbers = itertools.count()
        self._idle: list[Any] = []
        self._sent: dict[Any, _Sent] = {}

    # -- for everybody

    def ask(self, asks: Iterable[Get], soon: bool = False) -> None:
        """Send these as soon as there is room, in order; `soon`: before what waits already.

        Raises:
            StoreError: when the wire is closed.
        """
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._address.shown}: its reader is closed")
            if soon:
                self._asked.extendleft(asks)
            else:
                self._asked.extend(asks)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kit-wire", daemon=True)
                self._thread.start()
            if self._asleep:
                self._ring()

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        asked = _Waiting(key, first, last)
        self.ask([asked])
        return asked.future.result()

    def identity(self, key: str) -> str | None:
        """Which object the key names now, in the store's own words; None when there is none.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        asked = _Waiting(key, None, None, head=True)
        self.ask([asked])
        told = asked.future.result()
        return None if told is None else told.tobytes().decode()

    def close(self) -> None:
        """End the thread and the connections; who still waits is told so. Safe to call twice and after a fork."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed, thread = True, self._thread
            if thread is None:
                self._end()
            else:
                self._ring()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)

    def _ring(self) -> None:
        """Wake the thread; under the lock, under which the bell is closed."""
        self._asleep = False
        with contextlib.suppress(BlockingIOError):  # it is ringing
            os.write(self._rope, b"1")

    # -- the thread

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            held = self._start()
            if self._sent or self._asked or self._again:
                quiet_since = time.monotonic()
            if self._closed or time.monotonic() - quiet_since > _LINGER_SECONDS:
                left: list[Get] = []
                with self._lock:
                    over = self._closed or not self._asked
                    if over:
                        self._thread = None
                    if self._closed:
                        left = self._end()
                for asked in left:
                    self._fail(asked, StoreError(f"{self._address.shown}: closed while {asked.key} was being read"))
                if over:
                    return
            self._serve(self._pause_seconds(held))

    def _serve(self, seconds: float) -> None:
        self._asleep = True
        if self._asked and seconds > _ROOM_PAUSE_SECONDS and len(self._sent) < self.limit.now:
            seconds = 0.0  # asked for after the last look, by someone who saw this thread awake
        ready = self._selector.select(seconds)
        self._asleep = False
        for key, events in ready:
            if key.fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell, 4096)
            else:
                reads = pycurl.CSELECT_IN if events & selectors.EVENT_READ else 0
                writes = pycurl.CSELECT_OUT if events & selectors.EVENT_WRITE else 0
                self._multi.socket_action(key.fd, reads | writes)
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        self._collect()

    def _pause_seconds(self, held: bool) -> float:
        """How long nothing has to be done but to listen."""
        times = [when for when in (self._due, self._again[0][0] if self._again else None) if when is not None]
        longest = _ROOM_PAUSE_SECONDS if held else _LINGER_SECONDS
        return max(0.0, min([longest, *(when - time.monotonic() for when in times)]))

    def _start(self) -> bool:
        """Send what may be sent; whether something waits for room in memory."""
        while self._again and self._again[0][0] <= time.monotonic():
            self._asked.appendleft(heapq.heappop(self._again)[2])
        while self._asked and len(self._sent) < self.limit.now:
            asked = self._asked.popleft()
            try:
                begun = asked.begin()
                if begun:
                    self._send(asked)
            except BaseException as error:
                self._fail(asked, error)
                continue
            if begun is None:
                self._asked.appendleft(asked)
                return True
        if self._asked:
            self.limit.held_back()
        return False

    def _send(self, asked: Get) -> None:
        easy = self._idle.pop() if self._idle else self._new()
        parts: list[bytes] = []
        easy.setopt(pycurl.URL, f"{self._address.base}/{quote(asked.key)}")
        easy.setopt(pycurl.NOBODY, asked.head)
        easy.setopt(pycurl.HEADERFUNCTION if asked.head else pycurl.WRITEFUNCTION, parts.append)
        if asked.span is None:
            easy.unsetopt(pycurl.RANGE)
        else:
            easy.setopt(pycurl.RANGE, asked.span)
        easy.setopt(pycurl.MAXFILESIZE_LARGE, asked.most_bytes)
        for option, value in self._address.login():
            easy.setopt(option, value)
        self._sent[easy] = _Sent(asked, parts, self.limit.round, time.monotonic())
        self._multi.add_handle(easy)

    def _new(self) -> Any:
        easy = pycurl.Curl()
        milliseconds = max(1, int(1000 * self._seconds))
        for option, value in (
            (pycurl.NOSIGNAL, 1), (pycurl.TCP_NODELAY, 1), (pycurl.BUFFERSIZE, _READ_BYTES),
            (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1), (pycurl.USERAGENT, "kit"),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.FOLLOWLOCATION, 1), (pycurl.MAXREDIRS, _MOST_REDIRECTS),
            (pycurl.OPENSOCKETFUNCTION, _open_socket), (pycurl.TIMEOUT_MS, milliseconds), *self._address.options,
        ):  # fmt: skip
            easy.setopt(option, value)
        return easy

    def _collect(self) -> None:
        left = 1
        while left:
            left, good, bad = self._multi.info_read()
            for easy in good:
                sent = self._take(easy)
                asked, status = sent.asked, easy.getinfo(pycurl.RESPONSE_CODE)
                if status in TOO_MANY:
                    self.limit.refused(sent.round)
                else:
                    self.limit.answered(sent.round, time.monotonic() - sent.at)
                self._answer(asked, status, sent.parts)
                sent.parts.clear()  # the handle knows them until it is used again
                if asked.head:
                    easy.close()
                else:
                    self._idle.append(easy)
            for easy, code, message in bad:
                asked = self._take(easy).asked
                status = easy.getinfo(pycurl.RESPONSE_CODE)
                easy.close()
                if code == pycurl.E_FILESIZE_EXCEEDED and status >= 400:  # it is a refusal that is so long
                    self._answer(asked, status, [])
                else:
                    self._try_again(asked, self._error(asked, code, message))

    def _take(self, easy: Any) -> _Sent:
        self._multi.remove_handle(easy)
        return self._sent.pop(easy)

    def _answer(self, asked: Get, status: int, parts: list[bytes]) -> None:
        if status == (200 if asked.span is None else 206):
            data = _tags(parts) if asked.head else parts[0] if len(parts) == 1 else b"".join(parts)
            self._counters.add(requests=1, bytes_read=0 if asked.head else len(data))
            self._tell(asked, octets(data))
        elif status == 404:
            self._counters.add(requests=1)
            self._tell(asked, None)
        else:
            words = http.client.responses.get(status, "")
            whole = "; a range was asked for" if status == 200 else ""
            self._try_again(asked, AnswerError(status, f"the store answers {status} {words}{whole}"))

    def _tell(self, asked: Get, data: Octets | None) -> None:
        try:
            asked.done(data)
        except BaseException as error:
            self._fail(asked, error)

    def _try_again(self, asked: Get, error: Exception) -> None:
        if asked.attempts is None:
            asked.attempts = RetryAttempts(self.retries)
        try:
            pause = asked.attempts.pause_seconds(error)
        except Exception as last:
            self._fail(asked, store_error(self._url, last))
            return
        self.retries.counted()
        heapq.heappush(self._again, (time.monotonic() + pause, next(self._numbers), asked))

    def _error(self, asked: Get, code: int, message: str) -> Exception:
        if code == pycurl.E_OPERATION_TIMEDOUT:
            late = f"no answer for {asked.key} within {self._seconds:g} s; check the network"
            return StoreError(f"{self._address.shown}: {late}")
        if code == pycurl.E_FILESIZE_EXCEEDED:
            return OSError("the store sends more than the range that was asked for")
        return ConnectionError(message) if code in _PASSING else OSError(message)

    def _fail(self, asked: Get, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # whoever asked has gone
            asked.fail(error)

    def _end(self) -> list[Get]:
        """Close everything, under the lock; returns what has had no answer."""
        left = [*self._asked, *(asked for _, _, asked in self._again), *(sent.asked for sent in self._sent.values())]
        for easy in self._sent:
            self._multi.remove_handle(easy)
        self._asked.clear()
        self._again.clear()
        self._sent.clear()
        self._multi.close()
        self._selector.close()
        self._close_bell()
        return left

    # -- libcurl's events

    def _on_socket(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        if what == pycurl.POLL_REMOVE:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
            return
        reads = selectors.EVENT_READ if what & pycurl.POLL_IN else 0
        writes = selectors.EVENT_WRITE if what & pycurl.POLL_OUT else 0
        try:
            self._selector.modify(fd, reads | writes)
        except KeyError:
            self._selector.register(fd, reads | writes)

    def _on_timer(self, milliseconds: int) -> None:
        self._due = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000


class _HandedOver(socket.socket):
    """A socket whose number libcurl copies: this one is closed as soon as it is let go of."""

    def __del__(self) -> None:
        self.close()


def _open_socket(_purpose: int, address: Any) -> Any:
    """A socket to the address that libcurl is about to connect to, unless it is no store's."""
    if is_metadata(str(address.addr[0])):
        return pycurl.SOCKET_BAD
    return _HandedOver(address.family, address.socktype, address.protocol)


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)


def _tags(lines: list[bytes]) -> bytes:
    """What of a response's head changes when the object does."""
    wanted = (b"etag", b"x-goog-generation", b"x-amz-version-id", b"last-modified", b"content-length")
    told = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    return repr([told.get(name, b"").decode("latin-1") for name in wanted]).encode()


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
    """Requests that may be open, between `FEWEST` and `most`; call from one thread."""

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
            self._aim(1 - refused, REFUSED)
        else:
            self._weigh(max(_LEAST_SECONDS, self._seconds / self._answers))
        self._answers, self._refusals, self._seconds = 0, 0, 0.0
        self._held_back = False
        self.round += 1

    def _weigh(self, seconds: float) -> None:
        """More, fewer or as many as in this round, by what its requests took on average."""
        if self.now <= FEWEST and seconds > _MOST_CROWDING * self._alone_seconds:  # not by our crowd: it is slower now
            self._alone_seconds = seconds
        self._alone_seconds = min(self._alone_seconds, seconds)
        crowding = seconds / self._alone_seconds
        if crowding > _MOST_CROWDING:
            self._aim(_CROWDING / crowding, CROWDED)
        elif self._held_back and crowding >= _LEAST_CROWDING:
            self._aim(1.0, CROWDED)
        elif self._held_back:
            self._aim(min(self._growth, _CROWDING / crowding), "" if self._growth == _GROWTH else REFUSED)

    def _aim(self, times: float, reason: str) -> None:
        self.now, self._reason = min(self._most, max(FEWEST, round(self.now * times))), reason
