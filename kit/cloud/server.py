"""The process of a simulated cloud: `python -m kit.cloud.server`, one loop, one thread, no disk of its own.

The first line of its stdin is a JSON object (folder, port, token, dials); the first line of its stdout names the port.
It ends when the rest of stdin ends or its parent's id changes, which the operating system sees to however the parent
ends. Paths under `/-/` are its own controls and need the token; nothing else is authenticated, and only loopback is
served.

A connection is one generator, which reads a request, does it, and hands the answer on in pieces as the dials allow. It
yields where it has to wait: None for the client (bytes to read, or room to write), a number for that time of the loop's
clock. No task is made for it, so that a small answer leaves in the very call that brought its request. A request is
done when it arrives and answered later. A client that reads slowly holds up itself only.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import hmac
import itertools
import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any, cast

from kit.cloud.api import JsonApi, XmlApi, is_json
from kit.cloud.counts import FaultPlan, LiveCounts, Script
from kit.cloud.dials import Dials, Pace, SharedLink
from kit.cloud.http import HttpError, Request, Response, error_response, json_response, parse_head, read_body, read_head
from kit.cloud.objects import FolderObjects, MemoryObjects, Objects, check_caller, describe, printable
from kit.machine.processes import watch_lifeline

HOST = "127.0.0.1"
CONTROL = "/-/"
TOKEN_HEADER = "x-kit-token"
_PARENT_SECONDS = 1.0
_AT_ONCE_SECONDS = 0.0005
_MOST_WAITING_BYTES = 1 << 20
_SEND_BUFFER_BYTES = 1 << 20
_LINGER_SECONDS = 1.0
_IN_PARTS = hasattr(os, "writev")
_CODES = {"403": "AccessDenied", "404": "NoSuchKey", "408": "RequestTimeout", "429": "SlowDown", "503": "SlowDown"}


class Answer:
    """What a request gets: a response, and what the dials and faults make of it."""

    __slots__ = ("fault", "kind", "response", "shaped")

    def __init__(self, response: Response, kind: str = "", fault: str = "", shaped: bool = True) -> None:
        self.response, self.kind, self.fault, self.shaped = response, kind, fault, shaped


class Alarms:
    """Calls at times of the loop's clock, by one timer of the loop, which compares its timers in Python."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._waiting, (when, next(self._numbers), call))
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer, now = None, self._loop.time()
        try:
            while self._waiting and self._waiting[0][0] <= now:
                heapq.heappop(self._waiting)[2]()
        finally:  # also when one of the calls fails, of which the loop tells
            if self._waiting and self._timer is None:
                self._timer = self._loop.call_at(self._waiting[0][0], self._ring)


class Server:
    """Objects, dials and counts, and what a request gets of them."""

    def __init__(self, objects: Objects, dials: Dials, token: str, loop: asyncio.AbstractEventLoop) -> None:
        self.objects = objects
        self.loop = loop
        self.alarms = Alarms(loop)
        self.link = SharedLink(dials, loop.time())
        self.counter = LiveCounts(loop.time())
        self._faults = FaultPlan(dials.faults, dials.seed)
        self._token = token
        self._generation = int(loop.time() * 1e6)
        self._json = JsonApi(objects, self._next_generation)
        self._xml = XmlApi(objects, self._next_generation)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def answer(self, request: Request) -> Answer:
        """Do what is asked, unless the rate or a fault forbids it."""
        is_control, in_json, fault, kind = request.path.startswith(CONTROL), is_json(request.path), "", "bucket"
        try:
            if is_control:
                return Answer(self._control(request), shaped=False)
            call = (self._json if in_json else self._xml).call(request)
            kind = call.kind
            if not self.link.admits(self.loop.time()):
                self.counter.refused += 1
                raise HttpError(self.link.dials.refusal, "SlowDown", "too many requests")
            fault = self._faults.draw(f"{call.bucket}/{call.key}", kind) if call.key else ""
            if fault.isdigit():
                self.counter.faults[fault] += 1
                raise HttpError(int(fault), _CODES.get(fault, "InternalError"), "a simulated fault")
            response = Response(503) if fault == "reset" else call.run()
        except HttpError as error:
            found = error
        except (ValueError, KeyError, IndexError):
            found = HttpError(400, "InvalidArgument")
        except Exception:
            traceback.print_exc()  # to the file that its owner reads, should it end
            found = HttpError(500, "InternalError")
        else:
            if fault in ("truncate", "drip") and not len(response.body):
                fault = ""  # an empty answer cannot have it
            if fault:
                self.counter.faults[fault] += 1
            return Answer(response, kind, fault)
        return Answer(_error(found, in_json), kind, shaped=not is_control)

    def _control(self, request: Request) -> Response:
        given = request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise HttpError(403, "AccessDenied", "the controls need their token")
        control, now = request.path.removeprefix(CONTROL), self.loop.time()
        if control == "object":
            bucket, _, key = request.query.get("name", "").partition("/")
            self.objects.put(bucket, key, describe(request.body, self._next_generation()))
            return json_response({})
        given_values = json.loads(request.body or b"{}")
        match control:
            case "counts":
                return json_response(self.counter.to_dict(now))
            case "reset":
                self.counter.reset(now)
            case "dials":
                dials, before = Dials(**given_values), self.link.dials
                if (dials.faults, dials.seed) != (before.faults, before.seed):
                    self._faults = FaultPlan(dials.faults, dials.seed, self._faults.scripts)
                self.link.turn(dials, now)
            case "script":
                self._faults.add(Script(given_values["pattern"], tuple(given_values["entries"]), given_values["kind"]))
            case "unscript":
                self._faults = FaultPlan(self.link.dials.faults, self.link.dials.seed)
            case "bucket":
                self.objects.create_bucket(given_values["name"])
            case _:
                raise HttpError(404, "NoSuchControl")
        return json_response({})


def _error(error: HttpError, in_json: bool) -> Response:
    if error.status == 304:
        return Response(304)
    if in_json:
        reasons = [{"message": error.message, "reason": error.code}]
        body = {"error": {"code": error.status, "message": error.message, "errors": reasons}}
        response = json_response(body, error.status)
    else:
        response = error_response(error.status, error.code, printable(error.message))
    response.headers |= {"Content-Range": error.message} if error.status == 416 else {}
    return response


class Connection(asyncio.Protocol):
    """One client, whose requests are answered one after another."""

    def __init__(self, server: Server) -> None:
        self._server, self._loop = server, server.loop
        self._buffer = bytearray()
        self._is_full = self._is_answering = self._is_paused = self._ignores_input = self._is_timed = False
        self._work = self._serve()

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.counter.connections += 1
        self._port = transport.get_extra_info("sockname")[1]
        channel = transport.get_extra_info("socket")
        self._descriptor = channel.fileno()
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._server.counter.connections -= 1
        self._work.close()  # so that an alarm finds nothing to do

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._advance()

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._buffer += data
        if self._is_answering and len(self._buffer) > _MOST_WAITING_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._advance()

    def _advance(self) -> None:
        """Go on until there is something to wait for, unless a timer is to do so."""
        if not self._is_timed:
            for when in self._work:
                if when is None:
                    return
                if when - self._loop.time() > _AT_ONCE_SECONDS:
                    self._is_timed = True
                    self._server.alarms.at(when, self._wake)
                    return

    def _wake(self) -> None:
        self._is_timed = False
        self._advance()

    # -- the conversation

    def _serve(self) -> Generator[float | None, None, None]:
        keeps_alive = True
        while keeps_alive:
            try:
                request = parse_head((yield from read_head(self._buffer)))
                check_caller(request, self._port)
                if request.headers.get("expect", "").lower() == "100-continue":
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.body = yield from read_body(request.headers, self._buffer)
            except HttpError as error:
                yield from self._refuse(error)
                return
            keeps_alive = request.headers.get("connection", "").lower() != "close"
            self._is_answering = True
            keeps_alive = yield from self._respond(request, self._server.answer(request), keeps_alive)
            self._is_answering = False
            if self._is_paused and keeps_alive:
                self._is_paused = False
                self._transport.resume_reading()
            if self._buffer and keeps_alive:  # the other clients first
                self._is_timed = True
                self._loop.call_soon(self._wake)
                yield None
        self._transport.close()

    def _refuse(self, error: HttpError) -> Generator[float, None, None]:
        """Answer what cannot be understood. Closing at once, with bytes unread, would take it from the client."""
        self._ignores_input = True
        self._buffer.clear()
        response = error_response(error.status, error.code, error.message)
        response.headers["Connection"] = "close"
        self._transport.writelines([response.head(), response.body.piece(0, len(response.body))])
        self._transport.write_eof()
        yield self._loop.time() + _LINGER_SECONDS
        self._transport.close()

    def _respond(self, request: Request, answer: Answer, keeps_alive: bool) -> Generator[float | None, None, bool]:
        """Send the answer in its time; whether the connection goes on."""
        now, counter, received, is_paced = self._loop.time(), self._server.counter, len(request.body), False
        response = answer.response.without_body() if request.method == "HEAD" else answer.response
        if answer.shaped:
            counter.began(answer.kind, received)
        try:
            if answer.shaped:
                link = self._server.link
                arrived = link.passes(received, link.own_pace(now), now) if received else now
                own_seconds = 0.0 if answer.fault else link.seconds_of_one_piece(len(response.body))
                is_paced = own_seconds > 0  # what leaves in one piece waits for its connection here: a timer less
                yield max(now, arrived) + link.latency_seconds() + own_seconds
            if answer.fault in ("reset", "lost"):
                channel = self._transport.get_extra_info("socket")
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._transport.abort()
                return False
            if answer.shaped:
                counter.statuses[str(response.status)] += 1
            if not keeps_alive:
                response.headers["Connection"] = "close"
            is_whole = yield from self._send(response, answer, is_paced)
            return keeps_alive and is_whole
        finally:
            response.body.close()
            if answer.shaped:
                counter.in_flight -= 1

    def _send(self, response: Response, answer: Answer, is_paced: bool) -> Generator[float | None, None, bool]:
        """Head and body, a piece at a time; False when the body ends before its promised end."""
        now, link, size, sent = self._loop.time(), self._server.link, len(response.body), 0
        shaped = answer.shaped and not is_paced
        pace = link.own_pace(now, answer.fault == "drip") if shaped else Pace(0, now)
        most, head = link.piece_bytes(pace), response.head()
        stop = size // 2 if answer.fault == "truncate" else size
        if size > most or answer.fault or not size:  # a small body leaves in one piece with its head
            self._transport.write(head)
            head = b""
        while sent < stop:
            while self._is_full:
                yield None
            count = min(most, stop - sent)
            if answer.shaped:
                yield link.passes(count, pace, self._loop.time())
            piece = response.body.piece(sent, sent + count)
            self._write(head, piece)
            head, sent = b"", sent + len(piece)
            if answer.shaped:
                self._server.counter.sent(answer.kind, len(piece))
            if len(piece) < count:  # its source has become shorter
                return False
        return stop == size

    def _write(self, *parts: bytes | memoryview) -> None:
        """As the transport does, and without a copy where nothing waits before it."""
        sent, size = 0, sum(map(len, parts))
        if _IN_PARTS and not self._transport.get_write_buffer_size() and not self._transport.is_closing():
            with contextlib.suppress(OSError):  # full or broken, as the transport will find
                sent = os.writev(self._descriptor, parts)
        if sent < size:
            self._transport.write(memoryview(b"".join(parts))[sent:])


async def serve(settings: dict[str, Any], parent: int) -> None:
    """Serve until the parent is gone."""
    loop = asyncio.get_running_loop()
    objects = FolderObjects(settings["folder"]) if settings["folder"] else MemoryObjects()
    server = Server(objects, Dials(**settings["dials"]), settings["token"], loop)
    listening = await loop.create_server(lambda: Connection(server), HOST, settings["port"], backlog=1024)
    print(json.dumps({"port": listening.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 - the answer
    gc.freeze()
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_SECONDS)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    settings = json.loads(sys.stdin.buffer.readline())
    watch_lifeline(0)
    asyncio.run(serve(settings, parent))


if __name__ == "__main__":
    main()
