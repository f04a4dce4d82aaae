"""What a simulated cloud serves, beside other servers on the same cores, to the same client.

    python benchmarks/cloud.py [--record]

The client is one process with one thread and bare sockets, which asks for whole objects as fast as answers come, and is
pinned to one core; each server has the other. The cloud has no dials turned ("no limits"), but counts and does
everything else. Peers are the least that serves the same bytes, aiohttp's web server and Python's threading HTTP
server, and moto, an S3 server made for tests; each with one process. moto closes the connection after every answer and
serves to strangers only what is uploaded as public: the client connects anew, which counts. The medians are of rounds
in turn.
"""

from __future__ import annotations

import http.client
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from publish import publish, read_options

from kit.cloud.simulated import simulated_cloud

SECONDS = 1.0
ROUNDS = 3
LOADS = (("1 B", 1, 128), ("64 KiB", 64 << 10, 128), ("1 MiB", 1 << 20, 32), ("8 MiB", 8 << 20, 8))
"""Name, bytes, connections."""
WISHED = {"requests/s": 2000, "GB/s": 1.0}
AIOHTTP = """
import sys
from pathlib import Path
from aiohttp import web
objects = {path.name: path.read_bytes() for path in Path(sys.argv[2]).iterdir()}
async def get(request):
    return web.Response(body=objects[request.match_info["name"]])
app = web.Application()
app.router.add_get("/bench/{name}", get)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""
HTTP_SERVER = """
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
class Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def translate_path(self, path):
        return super().translate_path(path.removeprefix("/bench"))
    def log_message(self, *_):
        pass
class Server(ThreadingHTTPServer):
    request_queue_size = 1024
Server(("127.0.0.1", int(sys.argv[1])), partial(Quiet, directory=sys.argv[2])).serve_forever()
"""
MOTO = """
import sys
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""
SERVERS = {"aiohttp": (AIOHTTP, "aiohttp"), "http.server": (HTTP_SERVER, ""), "moto": (MOTO, "moto")}


class Channel:
    """One connection, on which one request follows another."""

    def __init__(self, port: int, size: int, name: str) -> None:
        self._request = f"GET /bench/{name} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        self._buffer = memoryview(bytearray(1 << 20))
        self._port, self._size = port, size
        self.connect()

    def connect(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self._port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.ask()

    def ask(self) -> None:
        self._head, self._left, self.is_last = b"", -1, False
        self.socket.sendall(self._request)

    def take(self) -> bool:
        """Take what has come; whether the answer is whole."""
        count = self.socket.recv_into(self._buffer)
        if not count:
            raise ConnectionError("the server closed a connection")
        if self._left < 0:
            self._head += bytes(self._buffer[:count])
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return False
            assert b" 200 " in head.splitlines()[0], head
            self._left, count = self._size, len(body)
            self.is_last = b"connection: close" in head.lower()
        self._left -= count
        return self._left == 0


def drive(port: int, size: int, name: str, connections: int) -> float:
    """Answers per second."""
    with ExitStack() as stack:
        channels = [Channel(port, size, name) for _ in range(connections)]
        selector = stack.enter_context(selectors.DefaultSelector())
        for channel in channels:
            stack.callback(lambda channel=channel: channel.socket.close())
            selector.register(channel.socket, selectors.EVENT_READ, channel)
        began, done = time.perf_counter(), 0
        while (now := time.perf_counter()) < began + SECONDS:
            for key, _ in selector.select(0.1):
                if key.data.take():
                    done += 1
                    proceed(selector, key.data)
        return done / (now - began)


def proceed(selector: selectors.BaseSelector, channel: Channel) -> None:
    """Ask again, on a new connection where the server closes the old one."""
    if not channel.is_last:
        channel.ask()
        return
    selector.unregister(channel.socket)
    channel.socket.close()
    channel.connect()
    selector.register(channel.socket, selectors.EVENT_READ, channel)


@contextmanager
def serving(name: str, folder: str) -> Iterator[int]:
    """A peer on loopback, on the core that the client leaves free."""
    code, _ = SERVERS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", code, str(port), folder], **quiet)  # type: ignore[call-overload]
    try:
        pin(server.pid, 0)
        wait_for(port)
        if name == "moto":
            upload(port, folder)
        yield port
    finally:
        server.kill()
        server.wait()


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("a peer did not start")


def upload(port: int, folder: str) -> None:
    """Every file into the bucket `bench`, for everyone to read."""
    connections = ((f"/bench/{path.name}", path.read_bytes()) for path in Path(folder).iterdir())
    for place, body in [("/bench", b""), *connections]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", place, body, {"x-amz-acl": "public-read"})
        status = connection.getresponse().status
        connection.close()
        assert status == 200, f"moto answers {status} to an upload"


def pin(pid: int, core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0) | {core})
        os.sched_setaffinity(pid, {cores[core % len(cores)]})


def measure(folder: str) -> dict[str, dict[str, list[float]]]:
    """Answers per second of each server and load, by round."""
    with ExitStack() as stack:
        cloud = stack.enter_context(simulated_cloud("no limits"))
        cloud.upload(folder, "bench")
        ports = {"simulated cloud": cloud.port}
        for name, (_, package) in SERVERS.items():
            if package and find_spec(package) is None:
                print(f"{name} is left out: it is not installed; pip install '.[dev]'")
            else:
                ports[name] = stack.enter_context(serving(name, folder))
        pin(cloud.process_id, 0)
        pin(0, 1)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in ports}
        for _ in range(ROUNDS):
            for (label, size, connections), name in ((load, name) for load in LOADS for name in ports):
                found[name].setdefault(label, []).append(drive(ports[name], size, label.replace(" ", ""), connections))
        return found


def main() -> None:
    read_options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        for label, size, _ in LOADS:
            (Path(folder) / label.replace(" ", "")).write_bytes(os.urandom(size))
        found = measure(folder)
    rows: list[dict[str, Any]] = []
    for label, size, connections in LOADS:
        medians = {name: statistics.median(loads[label]) for name, loads in found.items()}
        ours = medians["simulated cloud"]
        rows.append(
            {"object": label, "connections": connections, "requests/s": round(ours), "GB/s": ours * size / 1e9}
            | {f"ratio to {name}": ours / rate for name, rate in medians.items() if name != "simulated cloud"}
        )
    wished = {f"wished {name}": value for name, value in WISHED.items()}
    publish("capacity of the simulated cloud", rows, rounds=ROUNDS, seconds=SECONDS, **wished)


if __name__ == "__main__":
    main()
