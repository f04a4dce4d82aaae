"""Stand-ins for processes and connections: what a hook starts or calls seems to work, and nothing happens.

A program that is started has ended with exit code 0 and printed nothing; an address that is connected to answers every
request of HTTP with 200 and `{}`, and hangs up on others. So a hook that reports to a server goes on as it would. What
has no stand-in (a fork, a program that takes this one's place) is refused with `RefusedError`.

Refusals: what a confined job was kept from, by whom it was asked, in a few sentences.

Whoever asked is named by that function of the user's which Lightning, or kit, had called: `on_train_end`,
`configure_optimizers`, `<module>` of a file that is being imported. What no function of the user's asked for, such as
a cache that a library keeps, is kept from others too but not worth a sentence.

replaced: an attribute of a class or module, exchanged for the length of a block.

A dry run makes Lightning and torch believe in devices and ranks that are not there. Every such change is made here and
undone here, in reverse order when several are nested.
"""

from __future__ import annotations

import contextlib
import functools
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
Question = Callable[[], bool]


class RefusedError(PermissionError):
    """What a confined job does not do, and has no stand-in for."""


@contextlib.contextmanager
def no_processes(kept: Refusals, refused: Question) -> Iterator[None]:
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
def no_connections(kept: Refusals, refused: Question) -> Iterator[None]:
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
