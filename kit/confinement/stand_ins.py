"""Stand-ins for processes and connections: what a hook starts or calls seems to work, and nothing happens.

A program that is started has ended with exit code 0 and printed nothing; an address that is connected to answers every
request of HTTP with 200 and `{}`, and hangs up on others. So a hook that reports to a server goes on as it would. What
has no stand-in (a fork, a program that takes this one's place) is refused with `RefusedError`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import socket
import ssl
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kit.confinement.kept import Kept
from kit.memory.patches import overridden, replaced

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
_LOOKED_UP = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737)."""
_MOST_REQUEST_BYTES = 1 << 26
Question = Callable[[], bool]


class RefusedError(PermissionError):
    """What a confined job does not do, and has no stand-in for."""


@contextlib.contextmanager
def no_processes(kept: Kept, refused: Question) -> Iterator[None]:
    """Where `refused` says so, inside, nothing is started."""
    run, system = vars(subprocess.Popen)["_execute_child"], vars(os)["system"]
    start = multiprocessing.process.BaseProcess.start

    def execute(process: Any, command: Any, *arguments: Any) -> None:
        if not refused():
            run(process, command, *arguments)
            return
        kept.tried("starting", command if isinstance(command, str) else " ".join(map(str, command)))
        _close_pipes(process, arguments[9:15])
        process.pid, process.returncode, process._child_created = 0, 0, False

    def shell(command: Any) -> int:
        if not refused():
            return int(system(command))
        kept.tried("starting", command)
        return 0

    def begin(process: Any) -> None:
        if not refused():
            start(process)
            return
        kept.tried("starting", f"process {process.name}")
        raise RefusedError(f"process {process.name} is not started: nothing is, in {kept.job}")

    with (
        replaced(subprocess.Popen, "_execute_child", execute),
        replaced(os, "system", shell),
        replaced(multiprocessing.process.BaseProcess, "start", begin),
    ):
        yield


def _close_pipes(process: Any, ends: tuple[int, ...]) -> None:
    """The ends that the program would have had, so that its output is at its end."""
    for mine, other in ((ends[0], ends[1]), (ends[3], ends[2]), (ends[5], ends[4])):
        if mine != -1 and other != -1:
            os.close(mine)
    process._closed_child_pipe_fds = True
    if getattr(process, "_devnull", None) is not None:
        os.close(process._devnull)


@contextlib.contextmanager
def no_connections(kept: Kept, refused: Question) -> Iterator[None]:
    """Where `refused` says so, inside, nobody is connected to or looked up."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    send_to, look_up, wrap = socket.socket.sendto, socket.getaddrinfo, ssl.SSLContext.wrap_socket
    set_option, answered = socket.socket.setsockopt, weakref.WeakSet[socket.socket]()

    def stand_in(connection: socket.socket, address: Any) -> None:
        kept.tried("connecting to", _named(address))
        _answered_by_nobody(connection)
        answered.add(connection)

    def connected(connection: socket.socket, address: Any) -> None:
        return stand_in(connection, address) if refused() else connect(connection, address)

    def connected_or_not(connection: socket.socket, address: Any) -> int:
        if not refused():
            return connect_ex(connection, address)
        stand_in(connection, address)
        return 0

    def sent(connection: socket.socket, data: Any, *rest: Any) -> int:
        if not refused():
            return send_to(connection, data, *rest)
        kept.tried("connecting to", _named(rest[-1]))
        return len(data)

    def looked_up(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if not refused() or host is None or _is_number(host):
            return look_up(host, port, *rest, **options)
        kept.tried("looking up", host)
        return look_up(_LOOKED_UP, port, *rest, **options)

    def wrapped(context: ssl.SSLContext, connection: socket.socket, *rest: Any, **options: Any) -> Any:
        if connection in answered:  # it says the same without a certificate
            return connection
        return wrap(context, connection, *rest, **options)

    def option_set(connection: socket.socket, *rest: Any) -> None:
        if connection not in answered:  # which is no connection of TCP
            set_option(connection, *rest)

    with (
        overridden(socket.socket, "connect", connected),
        overridden(socket.socket, "connect_ex", connected_or_not),
        overridden(socket.socket, "sendto", sent),
        overridden(socket.socket, "setsockopt", option_set),
        replaced(socket, "getaddrinfo", looked_up),
        replaced(ssl.SSLContext, "wrap_socket", wrapped),
    ):
        yield


def _answered_by_nobody(connection: socket.socket) -> None:
    mine, other = socket.socketpair()
    waits = connection.gettimeout()
    os.dup2(mine.fileno(), connection.fileno())
    mine.close()
    connection.settimeout(waits)
    threading.Thread(target=_answer, args=(other,), name="kit-nobody", daemon=True).start()


def _answer(other: socket.socket) -> None:
    """Take a request to its end, answer it, and leave."""
    seen = b""
    with other, contextlib.suppress(OSError):
        while len(seen) < _MOST_REQUEST_BYTES and not _is_whole(seen):
            part = other.recv(1 << 16)
            if not part:
                return
            seen += part
            if not seen[:1].isalpha():
                return
        other.sendall(_ANSWER)


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    if not end:
        return False
    fields = dict(line.lower().partition(b":")[::2] for line in head.splitlines())
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return body.endswith(b"0\r\n\r\n")
    size = fields.get(b"content-length", b"0").strip()
    return len(body) >= (int(size) if size.isdigit() else 0)


def _is_number(host: Any) -> bool:
    text = host.decode() if isinstance(host, bytes) else str(host)
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, text)
            return True
    return False


def _named(address: Any) -> str:
    return ":".join(map(str, address[:2])) if isinstance(address, tuple) else str(address)
