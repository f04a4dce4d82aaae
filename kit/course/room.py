"""A room: one JupyterLab for each of several people on one machine, each in a folder and a share of its own.

    python -m kit.course.room 8 --names ada,ben,eve --folder ../room

Each person gets a copy of the notebooks and datasets, which stays as it is when the room is opened again, a port, an
address with a token, and `KIT_SEAT`, by which `kit.hardware()` tells an equal share of cores and memory, and trials
keep to it. Ctrl+C closes the room: every server ends, and its kernels and trials with it.

Servers listen on this machine alone unless `--ip` says otherwise; whoever has the address has the account that the
room runs under, so all of them are that one user to the system. Kernels are bound to the share's cores too.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ConfigError, Problem
from kit.machine.machine import SEAT, Seat, share
from kit.registry import REPOSITORY
from kit.tables import text_table
from kit.units import format_bytes

MOST_PEOPLE = 100
_FIRST_PORT = 8890
_TOKEN_BYTES = 16
_END_SECONDS = 20.0
_TICK_SECONDS = 0.5
_COPIED = ("notebooks", "datasets")
_LEFT_OUT = ("runs", "data", ".ipynb_checkpoints", "__pycache__", "_build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One person's part of the room."""

    seat: Seat
    folder: Path
    port: int
    token: str

    def address(self, host: str) -> str:
        """What the person opens."""
        return f"http://{host}:{self.port}/lab/tree/notebooks/00_start.ipynb?token={self.token}"


def plan_room(people: int, names: Sequence[str], folder: Path, port: int) -> list[Place]:
    """The places of a room; nothing is written.

    Raises:
        ConfigError: for no people, too many, more names than people, and names that are no folder names.
    """
    if not 1 <= people <= MOST_PEOPLE:
        raise ConfigError([Problem("people", f"are {people}, but must be 1 to {MOST_PEOPLE}")])
    if len(names) > people:
        raise ConfigError([Problem("names", f"are {len(names)}, but only {people} people have a place")])
    all_names = [*names, *(f"person-{number}" for number in range(len(names) + 1, people + 1))]
    odd = [name for name in all_names if not name.replace("-", "").replace("_", "").isalnum()]
    if odd or len(set(all_names)) < people:
        message = f"have {odd[0]!r}: take letters and digits" if odd else "have the same name twice"
        raise ConfigError([Problem("names", message)])
    return [
        Place(
            seat=Seat(number, people, name), folder=folder / name, port=port + number - 1,
            token=secrets.token_hex(_TOKEN_BYTES),
        )
        for number, name in enumerate(all_names, start=1)
    ]  # fmt: skip


def furnish(place: Place, source: Path = REPOSITORY) -> bool:
    """Give a place its notebooks and datasets; False where they are there already, which are left as they are."""
    if (place.folder / "pyproject.toml").exists():
        return False
    for name in _COPIED:
        shutil.copytree(source / name, place.folder / name, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    project = f'[project]\nname = "{place.seat.name}"\nversion = "0"\n'
    (place.folder / "pyproject.toml").write_text(project, encoding="utf-8")
    return True


def open_place(place: Place, ip: str) -> subprocess.Popen[bytes]:
    """Start its JupyterLab, in a process group of its own, bound to the share's cores."""
    cores = place.seat.cores(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    with (place.folder / "jupyter.log").open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.ip={ip}",
                f"--ServerApp.port={place.port}", "--ServerApp.port_retries=0", "--log-level=WARN",
                f"--ServerApp.root_dir={place.folder}", "--KernelManager.transport_encryption=auto",
            ],
            env={
                **os.environ, SEAT: f"{place.seat.number}/{place.seat.of} {place.seat.name}",
                "JUPYTER_TOKEN": place.token,  # not on the command line, where everybody sees it
            },
            cwd=place.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    if cores:
        os.sched_setaffinity(process.pid, cores)
    return process


def close_place(process: subprocess.Popen[bytes]) -> None:
    """End a server as Ctrl+C does, which ends its kernels; what is left of its group is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Open a room until Ctrl+C; the exit status."""
    asked = argparse.ArgumentParser(prog="python -m kit.course.room", description=(__doc__ or "").splitlines()[0])
    asked.add_argument("people", type=int, help="how many share the machine")
    asked.add_argument("--names", default="", help="their names, with commas; person-1 and so on without")
    asked.add_argument("--folder", type=Path, default=Path("room"), help="where each gets a folder")
    asked.add_argument("--port", type=int, default=_FIRST_PORT, help="of the first; the others follow")
    asked.add_argument("--ip", default="127.0.0.1", help="where the servers listen")
    given = asked.parse_args(arguments)
    names = [name.strip() for name in given.names.split(",") if name.strip()]
    try:
        places = plan_room(given.people, names, given.folder.absolute(), given.port)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as open_places:
        rows = []
        processes = []
        for place in places:
            new = furnish(place)
            processes.append(open_place(place, given.ip))
            open_places.callback(close_place, processes[-1])
            what = "new" if new else "as it was left"
            cores = len(place.seat.cores(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else "–"
            rows.append([place.seat.name, str(cores), what, place.address(given.ip)])
        mine = format_bytes(share().memory_bytes // given.people)
        sys.stdout.write(f"{text_table(('name', 'cores', 'folder', 'address'), rows)}\n")
        sys.stdout.write(f"Each has {mine} of memory. Ctrl+C closes the room; the folders stay.\n")
        sys.stdout.flush()
        try:
            return _watch(places, processes)
        except KeyboardInterrupt:
            return 0


def _watch(places: Sequence[Place], processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all servers have ended; each is told with where its last words are."""
    running = dict(zip(places, processes, strict=True))
    while running:
        for place in [place for place, process in running.items() if process.poll() is not None]:
            del running[place]
            sys.stderr.write(f"the server of {place.seat.name} has ended; see {place.folder / 'jupyter.log'}\n")
        time.sleep(_TICK_SECONDS)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
