"""HttpClient: reads of an object store by libcurl, all of them in one thread; the cheapest request there is in Python.

Sending and receiving happen in C, without the interpreter's lock, and no thread waits for a response: the client's own
thread hands it on. So a request costs less than half the CPU of one by threads, and the memory of hundreds of
connections stays small. The client reads what fsspec has opened and logged in to, at the same address with the same key
(`kit.data.stores.auth`). A response is bytes, or None where there is no such object; a response to a range that is
something else is an error. What may pass is retried by `kit.data.stores.transfer`, without holding up the others.

The thread starts with the first request and ends when there has been none for a while, so a client that is forgotten
leaves nothing behind. A client belongs to the process that made it.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import itertools
import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any
from urllib.parse import quote, urlsplit

import pycurl

from kit.data.stores.auth import Address
from kit.data.stores.counters import Counters
from kit.data.stores.fsspec import is_metadata
from kit.data.stores.transfer import TOO_MANY, ConcurrencyLimit, Octets, Retries, RetryAttempts, octets
from kit.data.stores.url import redact, store_error
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
_MEMORY_PAUSE_SECONDS = 0.001
_MOST_REDIRECTS = 5
_ANY_BYTE = "0-0"
_NO_HEAD = (405, 501)
"""Statuses of a store that knows no HEAD."""

_quoted = lru_cache(maxsize=4096)(quote)
"""A shard is requested from many times."""


class StatusError(OSError):
    """A response with another status than that of success."""

    status = 0


class Get:
    """One request; the client calls `done` or `fail`, in its own thread.

    `head` requests an object's tags only: no bytes where the store gives none by which a new object would show.
    """

    __slots__ = ("attempts", "first", "head", "key", "last")
    cancelled = False

    def __init__(self, key: str, first: int | None = None, last: int | None = None, head: bool = False) -> None:
        self.key, self.first, self.last, self.head = key, first, last, head
        self.attempts: RetryAttempts | None = None

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for the result."""
        return True

    def begin(self) -> bool | None:
        """Whether to send it now; None: not yet, and nothing behind it either."""
        return True

    def done(self, data: Octets | None) -> None:
        """Take the bytes; None where there is no such object."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """It failed, as often as the policy allows."""
        raise NotImplementedError


class _BlockingGet(Get):
    """A request that a thread waits for."""

    __slots__ = ("future",)

    def __init__(self, key: str, first: int | None = None, last: int | None = None, head: bool = False) -> None:
        super().__init__(key, first, last, head)
        self.future: Future[Octets | None] = Future()

    def done(self, data: Octets | None) -> None:
        self.future.set_result(data)

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class Client:
    """Reads the objects of one store; call from any thread."""

    def submit(self, gets: Iterable[Get], urgent: bool = False) -> None:
        """Send these as soon as there is room, in order; `urgent`: before what waits already.

        Raises:
            StoreError: when the client is closed.
        """
        raise NotImplementedError

    def cancel_unwanted(self) -> None:
        """Cancel requests whose result nobody waits for any more, where that is possible."""

    def close(self) -> None:
        """End the requests and the connections; what still waits fails. Safe to call twice and after a fork."""

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        get = _BlockingGet(key, first, last)
        self.submit([get])
        return get.future.result()

    def identity(self, key: str) -> str | None:
        """Which object the key names now, in the store's own words; None when there is none.

        Raises:
            StoreError: when the store does not answer or refuses.
            ConfigError: when it gives nothing that tells a new object from an old one.
        """
        get = _BlockingGet(key, head=True)
        self.submit([get])
        found = get.future.result()
        return None if found is None else found.tobytes().decode()

    def _pass_on(self, get: Get, data: Octets | None) -> None:
        try:
            get.done(data)
        except BaseException as error:
            self._fail(get, error)

    def _fail(self, get: Get, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # nobody waits any more
            get.fail(error)


class _Host:
    """What is sent to one host; others may be faster, slower or refuse what it takes."""

    def __init__(self, in_flight: int) -> None:
        self.limit = ConcurrencyLimit(in_flight)
        self.waiting: deque[Get] = deque()
        self.open = 0
        """Requests sent and not answered."""
        self.knows_head = True
        """Else tags are those of a GET of one byte."""


@lru_cache(maxsize=1024)
def _netloc(base: str) -> str:
    return urlsplit(base).netloc


@dataclass(slots=True)
class _Sent:
    """A request on its way."""

    get: Get
    address: Address
    host: _Host
    span: str | None
    """In the words of an HTTP range; None for a whole object."""
    parts: list[bytes]
    """What has come."""
    round: int
    sent_at: float
    """By the monotonic clock."""


class HttpClient(Client):
    """The objects below one address, or those of several stores.

    Args:
        address: Below which all objects lie; or what gives the address of one, by its key, and its key there.
        in_flight: Requests sent and not answered, at most; fewer to a host where more do not help (`ConcurrencyLimit`).
        seconds: How long one request may take, and how long attempts may begin.
        counters: Count every request.
    """

    def __init__(
        self,
        address: Address | Callable[[str], tuple[Address, str]],
        url: str,
        in_flight: int,
        seconds: float,
        counters: Counters,
    ) -> None:
        self._address, self._url, self._shown = address, url, redact(url)
        self._in_flight, self._seconds = in_flight, seconds
        self._hosts = {"": _Host(in_flight)}
        """By their names; one without a name where all objects lie below one address."""
        self._counters = counters
        self.retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, in_flight)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._on_socket)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._on_timer)
        self._sockets = _Epoll() if hasattr(select, "epoll") else _Selector()
        self._woken, self._wake_up = os.pipe()
        for end in (self._woken, self._wake_up):
            os.set_blocking(end, False)
        self._sockets.watch(self._woken, pycurl.POLL_IN)
        self._close_pipe = weakref.finalize(self, _close, self._woken, self._wake_up)
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._closed = False
        self._due: float | None = None
        """When libcurl wants to be called, whatever the sockets say."""
        self._to_retry: list[tuple[float, int, Get]] = []
        """A heap by when each is due."""
        self._numbers = itertools.count()
        self._idle: list[tuple[Any, Address, list[bytes]]] = []
        """Handles, with the address that each was prepared for, and what it fills."""
        self._sent: dict[Any, _Sent] = {}

    def submit(self, gets: Iterable[Get], urgent: bool = False) -> None:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._shown}: its reader is closed")
            for get in gets:
                waiting = self._host_of(get).waiting
                (waiting.appendleft if urgent else waiting.append)(get)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kit-http", daemon=True)
                self._thread.start()
            if self._asleep:
                self._wake()

    @property
    def open_requests(self) -> tuple[int, str]:
        """How many requests may be open now, to all hosts together, and why no more may to one that has fewer."""
        limits = [host.limit for name, host in [*self._hosts.items()] if name or len(self._hosts) == 1]
        reasons = [limit.reason for limit in limits if limit.reason]
        return min(self._in_flight, sum(limit.now for limit in limits)), reasons[0] if reasons else ""

    @property
    def _waits(self) -> bool:
        return any(host.waiting for host in [*self._hosts.values()])

    def _host_of(self, get: Get) -> _Host:
        """Where the object lies, by the name of the host."""
        if isinstance(self._address, Address):
            return self._hosts[""]
        try:
            name = _netloc(self._address(get.key)[0].base)
        except Exception:  # as it will be again, when it is to be sent, and then it fails
            name = ""
        return self._hosts.get(name) or self._hosts.setdefault(name, _Host(self._in_flight))

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed, thread = True, self._thread
            if thread is None:
                self._end()
            else:
                self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)

    def _wake(self) -> None:
        """Wake the thread; under the lock, under which the pipe is closed."""
        self._asleep = False
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._wake_up, b"1")

    # -- the thread

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            held_up = self._start()
            if self._sent or self._waits or self._to_retry:
                quiet_since = time.monotonic()
            if self._closed or time.monotonic() - quiet_since > _LINGER_SECONDS:
                left: list[Get] = []
                with self._lock:
                    over = self._closed or not self._waits
                    if over:
                        self._thread = None
                    if self._closed:
                        left = self._end()
                for get in left:
                    self._fail(get, StoreError(f"{self._shown}: closed while {get.key} was being read"))
                if over:
                    return
            times = [self._due] if self._due is not None else []
            times += [self._to_retry[0][0]] if self._to_retry else []
            longest = _MEMORY_PAUSE_SECONDS if held_up else _LINGER_SECONDS
            self._serve(max(0.0, min([longest, *(when - time.monotonic() for when in times)])))

    def _serve(self, seconds: float) -> None:
        self._asleep = True
        if seconds > _MEMORY_PAUSE_SECONDS and any(self._may_send(host) for host in [*self._hosts.values()]):
            seconds = 0.0  # submitted after the last look, by a thread that saw this one awake
        ready = self._sockets.ready(seconds)
        self._asleep = False
        for fd, events in ready:
            if fd == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            else:
                self._multi.socket_action(fd, events)
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        self._collect()

    def _start(self) -> bool:
        """Send what may be sent; whether something waits for memory."""
        while self._to_retry and self._to_retry[0][0] <= time.monotonic():
            get = heapq.heappop(self._to_retry)[2]
            self._host_of(get).waiting.appendleft(get)
        hosts = [*self._hosts.values()]
        while able := [host for host in hosts if self._may_send(host)]:
            host = min(able, key=attrgetter("open")) if len(able) > 1 else able[0]
            get = host.waiting.popleft()
            try:
                begun = get.begin()
                if begun:
                    self._send(get, host)
            except BaseException as error:
                self._fail(get, error)
                continue
            if begun is None:
                host.waiting.appendleft(get)
                return True
        for host in hosts:
            if host.waiting and host.open >= host.limit.now:
                host.limit.held_back()
        return False

    def _may_send(self, host: _Host) -> bool:
        return bool(host.waiting) and host.open < host.limit.now and len(self._sent) < self._in_flight

    def _send(self, get: Get, host: _Host) -> None:
        address, key = self._find(get)
        easy, parts = self._handle(address)
        span, most_bytes = None, 0
        if get.first is not None and get.last is not None:
            span, most_bytes = f"{get.first}-{get.last - 1}", get.last - get.first
        elif get.first is not None:
            span, most_bytes = str(get.first), -get.first
        elif get.head and not host.knows_head:
            span, most_bytes = _ANY_BYTE, 1
        easy.setopt(pycurl.URL, f"{address.base}/{_quoted(key)}{address.signature()}")
        if get.head:  # after which the handle is closed
            easy.setopt(pycurl.NOBODY, span is None)
            easy.setopt(pycurl.HEADERFUNCTION, parts.append)
            easy.setopt(pycurl.WRITEFUNCTION, _ignore)
        if span is None:
            easy.unsetopt(pycurl.RANGE)
        else:
            easy.setopt(pycurl.RANGE, span)
        easy.setopt(pycurl.MAXFILESIZE_LARGE, most_bytes)  # a store that knows no ranges would send whole objects
        for option, value in address.login():
            easy.setopt(option, value)
        self._sent[easy] = _Sent(get, address, host, span, parts, host.limit.round, time.monotonic())
        host.open += 1
        self._multi.add_handle(easy)

    def _find(self, get: Get) -> tuple[Address, str]:
        """Where an object lies, and its key there."""
        return (self._address, get.key) if isinstance(self._address, Address) else self._address(get.key)

    def _handle(self, address: Address) -> tuple[Any, list[bytes]]:
        """One for requests to an address, which shows it nothing that was meant for another; and what it fills."""
        if not self._idle:
            return self._prepared(pycurl.Curl(), address)
        easy, before, parts = self._idle.pop()
        if before is address or (before.login is address.login and before.options == address.options):
            return easy, parts
        easy.reset()
        return self._prepared(easy, address)

    def _prepared(self, easy: Any, address: Address) -> tuple[Any, list[bytes]]:
        parts: list[bytes] = []
        milliseconds = max(1, int(1000 * self._seconds))
        for option, value in (
            (pycurl.NOSIGNAL, 1), (pycurl.TCP_NODELAY, 1), (pycurl.BUFFERSIZE, _READ_BYTES),
            (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1), (pycurl.USERAGENT, "kit"),
            (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
            (pycurl.FOLLOWLOCATION, 1), (pycurl.MAXREDIRS, _MOST_REDIRECTS),
            (pycurl.WRITEFUNCTION, parts.append), (pycurl.OPENSOCKETFUNCTION, _open_socket),
            (pycurl.TIMEOUT_MS, milliseconds), *address.options,
        ):  # fmt: skip
            easy.setopt(option, value)
        return easy, parts

    def _collect(self) -> None:
        left = 1
        while left:
            left, good, bad = self._multi.info_read()
            for easy in good:
                sent, status = self._take(easy), easy.getinfo(pycurl.RESPONSE_CODE)
                if status in TOO_MANY:
                    sent.host.limit.refused(sent.round)
                else:
                    sent.host.limit.answered(sent.round, time.monotonic() - sent.sent_at)
                self._on_status(sent, status)
                sent.parts.clear()  # the handle fills them again
                if sent.get.head:
                    easy.close()
                else:
                    self._idle.append((easy, sent.address, sent.parts))
            for easy, code, message in bad:
                sent, status = self._take(easy), easy.getinfo(pycurl.RESPONSE_CODE)
                easy.close()
                if code == pycurl.E_FILESIZE_EXCEEDED and status >= 400:  # it is a refusal that is so long
                    self._on_status(sent, status)
                elif code == pycurl.E_FILESIZE_EXCEEDED and sent.get.head:  # the tags have come before it
                    self._on_status(sent, 206)
                elif code == pycurl.E_FILESIZE_EXCEEDED:
                    self._try_again(sent.get, OSError("the store sends more than the range that was requested"))
                elif code == pycurl.E_OPERATION_TIMEDOUT:
                    late = f"no answer for {self._find(sent.get)[1]} within {self._seconds:g} s; check the network"
                    self._try_again(sent.get, StoreError(f"{sent.address.shown}: {late}"))
                else:
                    kind = ConnectionError if code in _PASSING else OSError
                    self._try_again(sent.get, kind(message))

    def _take(self, easy: Any) -> _Sent:
        self._multi.remove_handle(easy)
        sent = self._sent.pop(easy)
        sent.host.open -= 1
        return sent

    def _on_status(self, sent: _Sent, status: int) -> None:
        get, parts = sent.get, sent.parts
        if status == (200 if sent.span is None else 206):
            data = _tags(parts) if get.head else parts[0] if len(parts) == 1 else b"".join(parts)
            self._counters.add(requests=1, bytes_read=0 if get.head else len(data))
            self._pass_on(get, octets(data))
        elif status == 404:
            self._counters.add(requests=1)
            self._pass_on(get, None)
        elif get.head and sent.span is None and status in _NO_HEAD:
            self._counters.add(requests=1)
            sent.host.knows_head = False
            sent.host.waiting.appendleft(get)
        else:
            words = http.client.responses.get(status, "")
            whole = "; a range was requested" if status == 200 else ""
            error = StatusError(f"the store answers {status} {words}{whole}")
            error.status = status
            self._try_again(get, error)

    def _try_again(self, get: Get, error: Exception) -> None:
        if get.attempts is None:
            get.attempts = RetryAttempts(self.retries)
        try:
            pause = get.attempts.pause_seconds(error)
        except Exception as last:
            self._fail(get, store_error(self._find(get)[0].shown, last))
            return
        self.retries.counted()
        heapq.heappush(self._to_retry, (time.monotonic() + pause, next(self._numbers), get))

    def _end(self) -> list[Get]:
        """Close everything, under the lock; returns the requests without a response."""
        waiting = [get for host in self._hosts.values() for get in host.waiting]
        left = [*waiting, *(get for _, _, get in self._to_retry), *(sent.get for sent in self._sent.values())]
        for easy in self._sent:
            self._multi.remove_handle(easy)
        for host in self._hosts.values():
            host.waiting.clear()
        self._to_retry.clear()
        self._sent.clear()
        self._multi.close()
        self._sockets.close()
        self._close_pipe()
        return left

    # -- libcurl's events

    def _on_socket(self, what: int, fd: int, _multi: Any, _data: Any) -> None:
        self._sockets.watch(fd, what & pycurl.POLL_INOUT)

    def _on_timer(self, milliseconds: int) -> None:
        self._due = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000


class _Epoll:
    """Which sockets are ready, in libcurl's numbers.

    libcurl has a socket watched and forgotten for every request, which takes Python's selectors three times as long. So
    one that is forgotten stays registered: most are watched again at once, and at rest only their end is an event.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, int] = {}
        """0 for those at rest."""

    def watch(self, fd: int, events: int) -> None:
        """From now on for these; for none, not any more."""
        if events:
            reads = select.EPOLLIN if events & pycurl.POLL_IN else 0
            mask = reads | (select.EPOLLOUT if events & pycurl.POLL_OUT else 0)
            try:
                (self._epoll.modify if fd in self._watched else self._epoll.register)(fd, mask)
            except FileNotFoundError:  # closed at rest, and so forgotten; this is another of its number
                self._epoll.register(fd, mask)
        self._watched[fd] = events

    def ready(self, seconds: float) -> list[tuple[int, int]]:
        """Those that are, after so long at most; one that broke is ready for all that it is watched for."""
        found = []
        for fd, events in self._epoll.poll(seconds):
            if not self._watched[fd]:
                del self._watched[fd]
                with contextlib.suppress(OSError):  # it is closed by now
                    self._epoll.unregister(fd)
                continue
            reads = pycurl.CSELECT_IN if events & ~select.EPOLLOUT else 0
            writes = pycurl.CSELECT_OUT if events & ~select.EPOLLIN else 0
            found.append((fd, (reads | writes) & self._watched[fd]))
        return found

    def close(self) -> None:
        self._epoll.close()


class _Selector:
    """The same where there is no epoll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)
        if events:
            self._selector.register(fd, events)

    def ready(self, seconds: float) -> list[tuple[int, int]]:
        return [(key.fd, events) for key, events in self._selector.select(seconds)]

    def close(self) -> None:
        self._selector.close()


class _Duplicated(socket.socket):
    """A socket whose descriptor libcurl duplicates: this one is closed as soon as it is let go of."""

    def __del__(self) -> None:
        self.close()


def _open_socket(_purpose: int, address: Any) -> Any:
    """A socket to the address that libcurl is about to connect to, unless it is no store's."""
    if is_metadata(str(address.addr[0])):
        return pycurl.SOCKET_BAD
    return _Duplicated(address.family, address.socktype, address.protocol)


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)


def _ignore(_data: bytes) -> None:
    """Take a body that is not wanted."""


_TAGS = (b"etag", b"x-goog-generation", b"x-amz-version-id", b"last-modified")


def _tags(lines: list[bytes]) -> bytes:
    """What of a response's head changes when the object does; nothing where nothing does for certain."""
    told = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    size = told.get(b"content-range", b"").rpartition(b"/")[2] or told.get(b"content-length", b"")
    tags = [told.get(name, b"") for name in _TAGS]
    return repr([text.decode("latin-1") for text in (*tags, size)]).encode() if any(tags) else b""
