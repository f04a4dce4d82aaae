"""The process of a simulated cloud: `python -m kit.cloud.server`, one loop, one thread, no disk of its own.

Its first line of stdin is a JSON object (folder, port, token, dials); its first line of stdout names the port. It ends
when the rest of stdin ends or its parent's id changes, which the operating system sees to however the parent ends.
Paths under `/-/` are its own controls and need the token; nothing else is authenticated, and only loopback is served.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
import signal
import sys
import traceback
from typing import Any

from kit.cloud.connection import Answer, Connection
from kit.cloud.counts import Counter
from kit.cloud.dials import Dials
from kit.cloud.faults import FaultPlan, Script
from kit.cloud.guard import printable
from kit.cloud.json_api import JsonApi
from kit.cloud.link import Link
from kit.cloud.message import BadRequest, Request, Response, error_response, json_response
from kit.cloud.objects import FolderObjects, KeyRefused, MemoryObjects, Objects, describe
from kit.cloud.routes import Refused, is_json
from kit.cloud.xml_api import XmlApi
from kit.processes import watch_lifeline

HOST = "127.0.0.1"
CONTROL = "/-/"
TOKEN_HEADER = "x-kit-token"
_LOOK_SECONDS = 1.0
_CODES = {"403": "AccessDenied", "404": "NoSuchKey", "408": "RequestTimeout", "429": "SlowDown", "503": "SlowDown"}


class Server:
    """Objects, dials and counts, and what a request gets of them."""

    def __init__(self, objects: Objects, dials: Dials, token: str, loop: asyncio.AbstractEventLoop) -> None:
        self.objects = objects
        self.link = Link(dials, loop.time())
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


if __name__ == "__main__":
    main()
