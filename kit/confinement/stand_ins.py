"""Stand-ins for processes and connections: a program that a hook starts, or a call it makes, seems to work and does
nothing.

A program that is started has ended with exit code 0 and printed nothing. An address that is connected to answers every
request of HTTP with 200 and `{}`, and hangs up on other protocols. So a hook that reports to a server goes on as it
would. A fork, or a program that takes the place of this one, has no stand-in and is refused with `RefusedError`.

`Refusals` says what a confined job was kept from, and on whose behalf, in a few sentences. The caller is named by that
function of the user's which Lightning, or kit, had called: `on_train_end`, `configure_optimizers`, `<module>` of a file
that is being imported. A refusal that no function of the user's caused, such as of a cache that a library keeps, gets
no sentence.

`replaced` exchanges an attribute of a class or module for the length of a block. A dry run makes Lightning and torch
believe in devices and ranks that are not there: every such change is made with it, and undone in reverse order.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import multiprocessing.process
import os
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
_LOOKED_UP = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737)."""
_MOST_REQUEST_BYTES = 1 << 26


class RefusedError(PermissionError):
    """What a confined job does not do, and has no stand-in for."""


@contextlib.contextmanager
def no_processes(refusals: Refusals, refused: Callable[[], bool]) -> Iterator[None]:
    """Where `refused` says so, inside, nothing is started."""

    def execute(process: Any, command: Any, *arguments: Any) -> None:
        refusals.tried("starting", command if isinstance(command, str) else " ".join(map(str, command)))
        ends = arguments[9:15]  # those that the program would have had, so that its output is at its end
        for mine, other in ((ends[0], ends[1]), (ends[3], ends[2]), (ends[5], ends[4])):
            if mine != -1 and other != -1:
                os.close(mine)
        process._closed_child_pipe_fds = True
        if getattr(process, "_devnull", None) is not None:
            os.close(process._devnull)
        process.pid, process.returncode, process._child_created = 0, 0, False

    def system(command: Any) -> int:
        refusals.tried("starting", command)
        return 0

    def start(process: Any) -> None:
        refusals.tried("starting", f"process {process.name}")
        raise RefusedError(f"process {process.name} is not started: nothing is, in {refusals.job}")

    popen, process = subprocess.Popen, multiprocessing.process.BaseProcess
    with (
        replaced(popen, "_execute_child", _either(refused, execute, vars(popen)["_execute_child"])),
        replaced(os, "system", _either(refused, system, vars(os)["system"])),
        replaced(process, "start", _either(refused, start, process.start)),
    ):
        yield


def _either(refused: Callable[[], bool], stand_in: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def either(*arguments: Any, **options: Any) -> Any:
        return (stand_in if refused() else call)(*arguments, **options)

    return either


@contextlib.contextmanager
def no_connections(refusals: Refusals, refused: Callable[[], bool]) -> Iterator[None]:
    """Where `refused` says so, inside, nobody is connected to or looked up."""
    look_up, wrap, set_option = socket.getaddrinfo, ssl.SSLContext.wrap_socket, socket.socket.setsockopt
    answered = weakref.WeakSet[socket.socket]()

    def connected(connection: socket.socket, address: Any) -> None:
        refusals.tried("connecting to", _named(address))
        mine, other = socket.socketpair()
        timeout = connection.gettimeout()
        os.dup2(mine.fileno(), connection.fileno())
        mine.close()
        connection.settimeout(timeout)
        threading.Thread(target=_answer, args=(other,), name="kit-nobody", daemon=True).start()
        answered.add(connection)

    def connected_without_error(connection: socket.socket, address: Any) -> int:
        connected(connection, address)
        return 0

    def sent(_: socket.socket, data: Any, *rest: Any) -> int:
        refusals.tried("connecting to", _named(rest[-1]))
        return len(data)

    def looked_up(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        is_number = host is None
        with contextlib.suppress(ValueError):
            is_number = is_number or bool(ipaddress.ip_address(host.decode() if isinstance(host, bytes) else str(host)))
        if is_number:
            return look_up(host, port, *rest, **options)
        refusals.tried("looking up", host)
        return look_up(_LOOKED_UP, port, *rest, **options)

    def wrapped(context: ssl.SSLContext, connection: socket.socket, *rest: Any, **options: Any) -> Any:
        if connection in answered:  # it says the same without a certificate
            return connection
        return wrap(context, connection, *rest, **options)

    def option_set(connection: socket.socket, *rest: Any) -> None:
        if connection not in answered:  # which is no connection of TCP
            set_option(connection, *rest)

    with (
        overridden(socket.socket, "connect", _either(refused, connected, socket.socket.connect)),
        overridden(socket.socket, "connect_ex", _either(refused, connected_without_error, socket.socket.connect_ex)),
        overridden(socket.socket, "sendto", _either(refused, sent, socket.socket.sendto)),
        overridden(socket.socket, "setsockopt", option_set),
        replaced(socket, "getaddrinfo", _either(refused, looked_up, look_up)),
        replaced(ssl.SSLContext, "wrap_socket", wrapped),
    ):
        yield


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


def _named(address: Any) -> str:
    return ":".join(map(str, address[:2])) if isinstance(address, tuple) else str(address)


_MOST_SENTENCES = 8
_LONGEST = 200
_KIT = Path(__file__).parents[1]
_USERS_PARTS = (f"{_KIT}/models/", f"{_KIT}/testing.py")
"""Of kit, what stands where a user's own module or data would."""
_DATA_FILES = ("/torch/utils/data/", f"{_KIT}/data/")
_CALLERS = tuple(
    f"{_KIT}/{place}" for place in ("trial/", "studies/", "memory/predict_job.py", "memory/record/dry_run.py")
)
_HOOK_CALLS = {"_call_lightning_module_hook", "_call_callback_hooks", "_call_strategy_hook"}


class Refusals:
    """What was tried so far."""

    def __init__(self, job: str) -> None:
        self.job = job
        """Who kept it from happening, such as "the prediction"."""
        self.count = 0
        """Of everything that was tried, the same thing again included."""
        self.things: set[str] = set()
        self._tried: dict[tuple[str, str, str], None] = {}

    def tried(self, doing: str, thing: object) -> None:
        """`thing` was tried: "writing" a path, "connecting to" an address, "starting" a program."""
        text = str(thing)
        who = asking()
        self.things.add(text)
        if who:
            self.count += 1
            self._tried.setdefault((who, doing, text))

    def found(self, doing: str, thing: object) -> None:
        """`thing` was found to have been tried, nobody knows by whom."""
        if str(thing) not in self.things:
            self.things.add(str(thing))
            self._tried.setdefault(("the module", doing, str(thing)))

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that one function tried."""
        tried = list(self._tried)
        notes = [
            f"{self.job} kept {who} from {doing} {text[:_LONGEST]}" for who, doing, text in tried[:_MOST_SENTENCES]
        ]
        more = len(tried) - _MOST_SENTENCES
        return [*notes, f"{self.job} kept {more} more things from happening"] if more > 0 else notes


def asking() -> str:
    """The user's function that the present call comes from; empty where there is none."""
    name = ""
    for code in _codes():
        if is_users(code):
            name = code.co_name
        elif name and (_calls_a_hook(code) or code.co_filename.startswith(_CALLERS)):
            break
    return name


def hook_asks() -> bool:
    """Whether the present call comes from a hook of a module or callback, and not to read data."""
    by_user = False
    for code in _codes():
        by_user = by_user or is_users(code)
        if any(part in code.co_filename for part in _DATA_FILES):
            return False
        if _calls_a_hook(code):
            return by_user
    return False


@functools.cache
def is_users(code: CodeType) -> bool:
    """Whether it belongs neither to Python, nor to a package, nor to the part of kit that runs the user's code."""
    file = code.co_filename
    if file.startswith(_USERS_PARTS):
        return True
    return not (file.startswith(("<frozen", f"{_KIT}/", *_library_folders())) or "site-packages/" in file)


def _calls_a_hook(code: CodeType) -> bool:
    return code.co_name in _HOOK_CALLS and "/lightning/" in code.co_filename


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(f"{paths[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _codes() -> Iterator[CodeType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside; afterwards it is what was stored there, static and class methods included.

    Raises:
        AttributeError: when `owner` itself has no such attribute (one it inherits is not exchanged).
    """
    if name not in vars(owner):
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no attribute {name} of its own")
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """As `replaced`, for an attribute that `owner` has or inherits; one that was inherited is inherited again."""
    if name in vars(owner):
        with replaced(owner, name, value):
            yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
