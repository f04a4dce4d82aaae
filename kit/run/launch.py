"""Two ways to start a rank: fork it from a process that has imported torch, or start a fresh interpreter.

Forking is right only while this process has never touched a GPU and the trial's environment does not differ in what
libraries read when they are loaded; `cold_reason` says when it is not. Every rank gets its own log as stdout and
stderr, joins the process group of its trial, and holds the read end of the trial's lifeline.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kit
from kit.processes import SCRATCH
from kit.run.paths import RunPaths
from kit.run.rendezvous import DESCRIPTOR, HOST, INTERFACES

_READ_AT_LOAD = re.compile(r"OMP_NUM_THREADS|MKL_.*|PYTORCH_.*ALLOC.*|CUDA_MODULE_LOADING")
_MOST_DESCRIPTORS = 1 << 20
LOAD_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Set where the user has not. Threads that spin while they wait for each other take the cores from whom they wait for:
with one of two cores busy, steps of a small U-Net took five times as long."""
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Launch:
    """What the ranks of one trial have in common."""

    paths: RunPaths
    world_size: int
    variables: Mapping[str, str]
    lifeline: int
    """Descriptor of the pipe end that reads end-of-file when the supervisor has gone."""
    store: int
    """Descriptor of the socket that rank 0 serves the store on."""


def launch_variables(
    variables: Mapping[str, str], world_size: int, devices: Sequence[str], port: int, scratch: Path
) -> dict[str, str]:
    """The environment of the ranks, apart from their own number.

    TORCHELASTIC_RUN_ID outranks SLURM's variables, which a notebook inside an allocation has. Gloo is told the loopback
    interface, also because it would otherwise look up the host's own name, which not every container can resolve.
    """
    return {
        **LOAD_DEFAULTS,
        **variables,
        **INTERFACES,
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "TORCHELASTIC_RUN_ID": "kit",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        SCRATCH: str(scratch),
    }


def differing_variables(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The variables read when libraries are loaded that differ between two environments."""
    names = {name for name in {*mine, *theirs} if _READ_AT_LOAD.fullmatch(name)}
    return sorted(name for name in names if mine.get(name) != theirs.get(name))


def touched_device() -> str:
    """What makes this process unfit to fork ranks, if it has touched a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in the warm process"
    for descriptor in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia"):
                return f"{descriptor.readlink()} is open in the warm process"
    return ""


def fork_rank(launch: Launch, rank: int, group: int) -> int:
    """Fork one rank into process group `group` (0: its own); it keeps the lifeline, and rank 0 the store."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_rank(launch, rank, group)
            from kit.run.worker import run_rank

            run_rank(launch.paths, rank, supervisor, launch.lifeline)
        finally:
            os._exit(70)
    with contextlib.suppress(OSError):  # the child does the same; whoever is first
        os.setpgid(pid, group)
    return pid


def _become_rank(launch: Launch, rank: int, group: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, group)
    _keep_only(sorted({launch.lifeline, launch.store} if rank == 0 else {launch.lifeline}))
    _point(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(launch.paths.log(rank), _LOG_FLAGS, 0o644)
    os.dup2(log, 1)
    _point(log, 2)
    os.environ.clear()
    os.environ.update(_own_variables(launch, rank))
    tempfile.tempdir = None  # the supervisor's own may be gone by now; found anew, as the kernel's variables say
    sys.argv = ["kit-rank", str(rank)]


def _keep_only(descriptors: Sequence[int]) -> None:
    """Pipes of other trials would keep those alive when the supervisor is gone."""
    for first, end in itertools.pairwise([2, *descriptors, _MOST_DESCRIPTORS]):
        os.closerange(first + 1, end)


def _point(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def _own_variables(launch: Launch, rank: int) -> dict[str, str]:
    own = {**launch.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return own if rank else {**own, DESCRIPTOR: str(launch.store)}


def spawn_rank(launch: Launch, rank: int, group: int) -> int:
    """Start one rank as a fresh interpreter; it finds its lifeline as its standard input."""
    home = str(Path(kit.__file__).parents[1])
    variables = _own_variables(launch, rank)
    given = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join([home, given]) if given else home
    log = str(launch.paths.log(rank))
    arguments = ["-P", "-m", "kit.run.worker", str(launch.paths.directory), str(rank), str(os.getpid())]
    os.set_inheritable(launch.store, rank == 0)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *arguments],
        variables,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, launch.lifeline, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, _LOG_FLAGS, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=group,
        setsigdef=[signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
    )
