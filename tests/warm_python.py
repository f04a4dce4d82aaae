"""A Python whose libraries are loaded already: `python -m kit.train.cli` begins in a tenth of a second.

A committed file is run by commands, as a cluster runs them, and each of their processes loads torch and Lightning for
seven seconds of a core. Here one process loads them, once for all workers of a test session, and forks. `programs()`
gives a folder with `python` and `torchrun` to stand first on the PATH: they hand arguments, environment, folder and
streams to that process, wait, and end as the fork ends, by its exit code or its signal. A fork takes this `python` for
`sys.executable`, so ranks that Lightning or torchrun start are forks too. What is not one of `_RUN` runs as ever.

Who asks is not the parent of what was asked for. So signals that can be answered are handed on, and the session of a
fork is killed when who asked is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_REQUEST_BYTES = 1 << 20
_LOOK_SECONDS = 0.02
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RUN = ("kit.train.cli", "torch.distributed.run")
_LOADED = (*_RUN, "kit.train", "kit.data", "kit.models", "zarr.api.asynchronous")

_started: list[subprocess.Popen[bytes]] = []  # one at most; it outlives the test that asked first


def programs() -> Path:
    """The folder of `python` and `torchrun`. The process behind them ends with the test session's state folder."""
    folder = Path(os.environ["XDG_STATE_HOME"], "warm-python")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "python").exists():
            _start(folder)
    return folder


def _start(folder: Path) -> None:
    name = f"kit-warm-python-{os.getpid()}-{os.urandom(4).hex()}"
    with _listening(name) as listening:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, "serve", str(listening.fileno()), str(folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()], start_new_session=True,
        )  # fmt: skip
    _started.append(process)
    for program, first in (("torchrun", "-m torch.distributed.run "), ("python", "")):
        line = f'exec "{sys.executable}" -I -S "{__file__}" ask {name} "{sys.executable}" {first}"$@"'
        (folder / program).write_text(f"#!/bin/sh\nWARM_PYTHON={folder}/python {line}\n")
        (folder / program).chmod(0o755)


def _listening(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen(64)
    return listening


# -- who asks: a small process in the place of the one that was asked for


def _ask(name: str, python: str, *arguments: str) -> None:
    if arguments[:1] != ("-m",) or arguments[1] not in _RUN:
        os.execv(python, [python, *arguments])
    asked = {"module": arguments[1], "arguments": arguments[2:], "folder": os.getcwd(), "variables": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0{name}")
        socket.send_fds(line, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
        answers = line.makefile()
        pid = int(answers.readline())
        for number in _HANDED_ON:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        code = os.waitstatus_to_exitcode(int(answers.readline()))
    if code < 0:
        with contextlib.suppress(OSError):  # that which cannot be caught
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# -- the process that has loaded all, and its forks


def _serve(listening: socket.socket, folder: Path) -> None:
    """Fork for each who asks; only in a fork does this return, and there it is what was asked for."""
    running: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while folder.exists():
            for key, _ in selector.select(_LOOK_SECONDS if running else 1.0):
                if key.fileobj is not listening:  # on which nothing more is said: who asked is gone
                    _end(running[key.fileobj])
                    selector.unregister(key.fileobj)
                    continue
                line, _ = listening.accept()
                asked, streams = _request(line)
                if (pid := os.fork()) == 0:
                    os.setsid()
                    for other in (selector, listening, line, *running):
                        other.close()
                    return _become(asked, streams)
                for stream in streams:
                    os.close(stream)
                line.sendall(f"{pid}\n".encode())
                running[line] = pid
                selector.register(line, selectors.EVENT_READ)
            for line, pid in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[line]
                    with contextlib.suppress(KeyError):  # where who asked had gone before
                        selector.unregister(line)
                    with contextlib.suppress(OSError), line:
                        line.sendall(f"{status}\n".encode())
    os._exit(0)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is about to have a session of its own
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def _request(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, streams, _, _ = socket.recv_fds(line, _REQUEST_BYTES, 3)
    while not text.endswith(b"\n"):
        text += line.recv(_REQUEST_BYTES)
    return json.loads(text), streams


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Be a fresh `python -m module` in all that this process can still change."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    sys.executable = os.environ.pop("WARM_PYTHON")
    sys.path[:0] = [asked["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [asked["module"], *asked["arguments"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _ask(*sys.argv[2:])
    os.environ["OMP_NUM_THREADS"] = "1"  # as those that ask have it; read when libraries load
    for _name in _LOADED:
        importlib.import_module(_name)
    for _name in _RUN:  # each is __main__ when it is run, and must not have been imported before
        sys.modules.pop(_name, None)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[2])), Path(sys.argv[3]))
