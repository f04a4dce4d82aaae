"""The process of a simulated cloud: `python -m kit.cloud.server`, one loop, one thread, no disk of its own.

Its first line of stdin is a JSON object (folder, port, token, dials); its first line of stdout names the port. It ends
when the rest of stdin ends or its parent's id changes, which the operating system sees to however the parent ends.
Paths under `/-/` are its own controls and need the token; nothing else is authenticated, and only loopback is served.

Connection: one client, whose requests are answered one after another, shaped by timers.

There is no coroutine and no task: bytes come in, a call is resolved, and timers hand its answer on in pieces as the
dials allow. A request is done when it arrives and answered later. A client that reads slowly holds up itself only.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any, Protocol, cast

from kit.cloud.api import JsonApi, Refused, XmlApi, is_json
from kit.cloud.counts import Counter, FaultPlan, Script
from kit.cloud.dials import Dials, Pace, SharedLink
from kit.cloud.http import (
    LARGEST_HEAD_BYTES,
    BadRequest,
    ChunkedBody,
    Request,
    Response,
    body_length,
    error_response,
    json_response,
    parse_head,
)
from kit.cloud.objects import FolderObjects, KeyRefused, MemoryObjects, Objects, check_caller, describe, printable
from kit.machine.processes import watch_lifeline

HOST = "127.0.0.1"
CONTROL = "/-/"
TOKEN_HEADER = "x-kit-token"
_LOOK_SECONDS = 1.0
_CODES = {"403": "AccessDenied", "404": "NoSuchKey", "408": "RequestTimeout", "429": "SlowDown", "503": "SlowDown"}


class Server:
    """Objects, dials and counts, and what a request gets of them."""

    def __init__(self, objects: Objects, dials: Dials, token: str, loop: asyncio.AbstractEventLoop) -> None:
        self.objects = objects
        self.link = SharedLink(dials, loop.time())
        self.counter = Counter(loop.time())
        self._faults = FaultPlan(dials.faults, dials.seed)
        self._loop = loop
        self._token = token
        self._generation = int(loop.time() * 1e6)
        self._json = JsonApi(objects, self._next_generation)
        self._xml = XmlApi(objects, self._next_generation)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def answer(self, request: Request) -> Answer:
        """Do what is asked, unless the rate or a fault forbids it."""
        if request.path.startswith(CONTROL):
            return Answer(self._control(request), shaped=False)
        in_json, fault, kind = is_json(request.path), "", "bucket"
        try:
            call = (self._json if in_json else self._xml).call(request)
            kind = call.kind
            if not self.link.admits(self._loop.time()):
                self.counter.refused += 1
                raise Refused(self.link.dials.refusal, "SlowDown", "too many requests")
            fault = self._faults.draw(call.name, kind) if call.key else ""
            if fault.isdigit() or fault == "reset":
                self.counter.failed(fault)
            if fault.isdigit():
                raise Refused(int(fault), _CODES.get(fault, "InternalError"), "a simulated fault")
            response = Response(503) if fault == "reset" else call.run()
        except Refused as refused:
            return Answer(_error(refused, in_json), kind)
        except BadRequest as bad:
            return Answer(_error(Refused(bad.status, bad.code, bad.message), in_json), kind)
        except (ValueError, KeyError, IndexError):
            return Answer(_error(Refused(400, "InvalidArgument"), in_json), kind)
        except Exception:
            traceback.print_exc()  # to the file that its owner reads, should it end
            return Answer(_error(Refused(500, "InternalError"), in_json), kind)
        return Answer(response, kind, self._met(fault, response))

    def _met(self, fault: str, response: Response) -> str:
        """The fault, when the answer is one that can have it."""
        if fault == "lost" or (fault in ("truncate", "drip") and len(response.body)):
            self.counter.failed(fault)
            return fault
        return fault if fault == "reset" else ""

    # -- controls

    def _control(self, request: Request) -> Response:
        given = request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return error_response(403, "AccessDenied", "the controls need their token")
        control, now = request.path.removeprefix(CONTROL), self._loop.time()
        if control == "object":
            return self._take(request.query.get("name", ""), request.body)
        told = json.loads(request.body or b"{}")
        match control:
            case "counts":
                return json_response(self.counter.to_dict(now))
            case "reset":
                self.counter.reset(now)
            case "dials":
                self._turn(Dials(**told), now)
            case "script":
                self._faults.add(Script(told["pattern"], tuple(told["entries"]), told["kind"]))
            case "unscript":
                self._faults = FaultPlan(self.link.dials.faults, self.link.dials.seed)
            case "bucket":
                return self._make_bucket(told["name"])
            case _:
                return Response(404)
        return json_response({})

    def _take(self, name: str, data: bytes) -> Response:
        bucket, _, key = name.partition("/")
        if not key:
            return Response(400)
        try:
            self.objects.put(bucket, key, describe(data, self._next_generation()))
        except (KeyRefused, KeyError):
            return Response(400)
        return json_response({})

    def _turn(self, dials: Dials, now: float) -> None:
        if (dials.faults, dials.seed) != (self.link.dials.faults, self.link.dials.seed):
            self._faults = FaultPlan(dials.faults, dials.seed, self._faults.scripts)
        self.link.turn(dials, now)

    def _make_bucket(self, name: str) -> Response:
        try:
            self.objects.create_bucket(name)
        except KeyRefused:
            return Response(400)
        return json_response({})


def _error(refused: Refused, in_json: bool) -> Response:
    if refused.status == 304:
        return Response(304)
    headers = {"Content-Range": refused.message} if refused.status == 416 else {}
    if in_json:
        told = {"code": refused.status, "message": refused.message,
                "errors": [{"message": refused.message, "reason": refused.code}]}  # fmt: skip
        return json_response({"error": told}, refused.status, headers)
    response = error_response(refused.status, refused.code, printable(refused.message))
    response.headers |= headers
    return response


async def serve(told: dict[str, Any], parent: int) -> None:
    """Serve until the parent is gone."""
    loop = asyncio.get_running_loop()
    objects = FolderObjects(told["folder"]) if told["folder"] else MemoryObjects()
    server = Server(objects, Dials(**told["dials"]), told["token"], loop)
    listening = await loop.create_server(lambda: Connection(server, loop), HOST, told["port"], backlog=1024)
    print(json.dumps({"port": listening.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 - the answer
    gc.freeze()
    while os.getppid() == parent:
        await asyncio.sleep(_LOOK_SECONDS)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    told = json.loads(sys.stdin.buffer.readline())
    watch_lifeline(0)
    asyncio.run(serve(told, parent))


_AT_ONCE_SECONDS = 0.0005
_MOST_WAITING_BYTES = 1 << 20
_SEND_BUFFER_BYTES = 1 << 20
_HEAD_END = b"\r\n\r\n"
_LINGER_SECONDS = 1.0


class Answer:
    """What a request gets."""

    __slots__ = ("fault", "kind", "response", "shaped")

    def __init__(self, response: Response, kind: str = "", fault: str = "", shaped: bool = True) -> None:
        self.response, self.kind, self.fault, self.shaped = response, kind, fault, shaped


class Service(Protocol):
    """What a connection needs of its server."""

    link: SharedLink
    counter: Counter

    def answer(self, request: Request) -> Answer: ...


class Connection(asyncio.Protocol):
    """See the module."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._loop = loop
        self._buffer = bytearray()
        self._request: Request | None = None
        self._needed = 0
        self._chunks: ChunkedBody | None = None
        self._answer: Answer | None = None
        self._pace = Pace(0, 0)
        self._piece = 0
        self._sent = 0
        self._keep = True
        self._timer: asyncio.TimerHandle | None = None
        self._full = self._closed = self._held = self._deaf = False

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._service.counter.connections += 1
        self._port = transport.get_extra_info("sockname")[1]
        channel = transport.get_extra_info("socket")
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._closed = True
        self._service.counter.connections -= 1
        if self._timer is not None:
            self._timer.cancel()
        self._finish()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._answer is not None and self._timer is None and self._piece:
            self._pump()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._buffer += data
        if self._answer is None:
            self._read()
        elif len(self._buffer) > _MOST_WAITING_BYTES and not self._held:
            self._held = True
            self._transport.pause_reading()

    # -- reading

    def _read(self) -> None:
        try:
            while self._answer is None and not self._closed and self._read_one():
                pass
        except BadRequest as bad:
            self._keep, self._deaf = False, True
            self._buffer.clear()
            self._begin(Answer(bad.response, "bucket", shaped=False))

    def _read_one(self) -> bool:
        """Answer the next request, if all of it has come."""
        if self._request is None and not self._read_head():
            return False
        request = self._request
        assert request is not None
        if self._chunks is not None:
            body = self._chunks.take(self._buffer)
            if body is None:
                return False
            request.body = body
            self._chunks = None
        else:
            if len(self._buffer) < self._needed:
                return False
            if self._needed:
                with memoryview(self._buffer) as view:
                    request.body = bytes(view[: self._needed])
                del self._buffer[: self._needed]
        self._request = None
        self._keep = request.keeps_alive
        self._begin(self._service.answer(request), request)
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(_HEAD_END)
        if (len(self._buffer) if end < 0 else end) > LARGEST_HEAD_BYTES:
            raise BadRequest(431, "HeadersTooLarge", f"more than {LARGEST_HEAD_BYTES} bytes")
        if end < 0:
            return False
        self._request = parse_head(bytes(self._buffer[:end]))
        del self._buffer[: end + len(_HEAD_END)]
        check_caller(self._request, self._port)
        self._needed = body_length(self._request.headers)
        self._chunks = ChunkedBody() if self._needed < 0 else None
        if self._request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    # -- answering

    def _begin(self, answer: Answer, request: Request | None = None) -> None:
        now, service = self._loop.time(), self._service
        received = len(request.body) if request else 0
        self._answer, self._sent, self._piece = answer, 0, 0
        if answer.shaped:
            service.counter.began(answer.kind, received, now)
        if request is not None and request.method == "HEAD":
            answer.response = answer.response.without_body()
        wait = service.link.latency_seconds() if answer.shaped else 0.0
        if received and answer.shaped:
            wait += max(0.0, service.link.passes(received, service.link.own_pace(now), now) - now)
        if wait > _AT_ONCE_SECONDS:
            self._later(now + wait, self._start)
        else:
            self._start()

    def _later(self, when: float, step: object) -> None:
        self._timer = self._loop.call_at(when, self._run, step)

    def _run(self, step: object) -> None:
        self._timer = None
        step()  # type: ignore[operator]

    def _start(self) -> None:
        """The first byte."""
        answer = self._answer
        assert answer is not None
        if answer.fault in ("reset", "lost"):
            self._reset()
            return
        if answer.shaped:
            self._service.counter.answered(str(answer.response.status))
        if not self._keep:
            answer.response.headers["Connection"] = "close"
        now, link, size = self._loop.time(), self._service.link, len(answer.response.body)
        head = answer.response.head()
        if not size:
            self._transport.write(head)
            self._finish()
            return
        self._pace = link.own_pace(now, answer.fault == "drip") if answer.shaped else Pace(0, now)
        self._piece = link.piece_bytes(self._pace)
        if size <= self._piece and not answer.fault:
            self._whole(head, size, now)
        else:
            self._transport.write(head)
            self._pump()

    def _whole(self, head: bytes, size: int, now: float) -> None:
        """A small body leaves in one piece with its head."""
        when = self._service.link.passes(size, self._pace, now) if self._taken().shaped else now
        if when - now > _AT_ONCE_SECONDS:
            self._later(when, lambda: self._write_whole(head, size))
        else:
            self._write_whole(head, size)

    def _write_whole(self, head: bytes, size: int) -> None:
        piece = self._taken().response.body.piece(0, size)
        self._transport.writelines([head, piece])
        self._count(len(piece))
        self._end(len(piece) == size)

    def _pump(self) -> None:
        """Hand on the next pieces as far as they may pass now."""
        answer = self._taken()
        size = len(answer.response.body)
        stop = size // 2 if answer.fault == "truncate" else size
        while not self._full and self._sent < stop:
            now, count = self._loop.time(), min(self._piece, stop - self._sent)
            when = self._service.link.passes(count, self._pace, now) if answer.shaped else now
            if when - now > _AT_ONCE_SECONDS:
                self._later(when, lambda count=count: self._emit(count, stop))
                return
            if not self._send(count):
                return
        if self._sent >= stop:
            self._end(stop == size)

    def _emit(self, count: int, stop: int) -> None:
        if self._send(count):
            if self._sent >= stop:
                self._end(stop == len(self._taken().response.body))
            elif not self._full:
                self._pump()

    def _send(self, count: int) -> bool:
        """Write a piece; False when its source has become too short, which ends the connection."""
        piece = self._taken().response.body.piece(self._sent, self._sent + count)
        self._transport.write(piece)
        self._sent += len(piece)
        self._count(len(piece))
        if len(piece) < count:
            self._end(False)
        return len(piece) == count

    def _count(self, sent: int) -> None:
        answer = self._taken()
        if answer.shaped:
            self._service.counter.sent(answer.kind, sent, self._loop.time())

    def _taken(self) -> Answer:
        assert self._answer is not None
        return self._answer

    def _end(self, whole: bool) -> None:
        if not whole:
            self._keep = False
        self._finish()

    def _finish(self) -> None:
        """Over with this answer; on to the next request."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        answer.response.body.close()
        if answer.shaped:
            self._service.counter.in_flight -= 1
        if self._closed:
            return
        if self._deaf:  # closing at once, with bytes unread, would take the answer from the client
            self._transport.write_eof()
            self._timer = self._loop.call_later(_LINGER_SECONDS, self._transport.close)
        elif not self._keep:
            self._transport.close()
        elif self._held:
            self._held = False
            self._transport.resume_reading()
            self._loop.call_soon(self._read)
        elif self._buffer:
            self._loop.call_soon(self._read)

    def _reset(self) -> None:
        channel = self._transport.get_extra_info("socket")
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


if __name__ == "__main__":
    main()
