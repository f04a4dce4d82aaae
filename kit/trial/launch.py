"""Ranks: how one is started, forked from the warm supervisor or as a fresh interpreter, and what it does until it ends.

A fork of a process that has imported torch starts at once. It is right only while that process has never touched a GPU,
and while the trial's environment agrees with its own in all that libraries read when they are loaded; the supervisor
starts fresh interpreters otherwise. Either way a rank is in the process group of its trial, has its own log as stdout
and stderr, and holds the read end of the trial's lifeline, a pipe whose other end the supervisor holds.

Before its job a rank ties its life to the supervisor's, whatever Python is doing, and takes over the kernel's folder,
sys.path and devices. It tells what happens in its own event file. It leaves by `os._exit`, because a distributed
process may hang in its exit handlers. Its exit code alone is never taken for success (`kit.trial.verdict`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import kit
from kit.config import Config
from kit.errors import KitWarning
from kit.events import EventWriter
from kit.json_text import read_json
from kit.machine.processes import (
    SCRATCH,
    die_with_parent,
    guard_forks,
    keep_freed_memory,
    note_process,
    scratch_folder,
    watch_lifeline,
)
from kit.registry import load
from kit.train import rendezvous
from kit.train.one_lightning import use_one_lightning
from kit.trial import scratch
from kit.trial.context import Context, confine_rank, confined_job
from kit.trial.directory import Control, RunPaths
from kit.trial.verdict import EXIT_CANNOT_WRITE, EXIT_FAILED, describe_failure

_READ_AT_LOAD = re.compile(r"OMP_(NUM_THREADS|WAIT_POLICY)|GOMP_SPINCOUNT|MKL_.*|PYTORCH_.*ALLOC.*|CUDA_MODULE_LOADING")
_MOST_DESCRIPTORS = 1 << 20
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
    variables: Mapping[str, str], world_size: int, devices: Sequence[str], port: int, folder: Path
) -> dict[str, str]:
    """The environment of the ranks, apart from their own number; `folder` is the trial's scratch folder.

    TORCHELASTIC_RUN_ID outranks SLURM's variables, which a notebook inside an allocation has. Gloo is told the loopback
    interface, also because it would otherwise look up the host's own name, which not every container can resolve.
    """
    return {
        **variables,
        **rendezvous.INTERFACES,
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "TORCHELASTIC_RUN_ID": "kit",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": rendezvous.HOST,
        "MASTER_PORT": str(port),
        SCRATCH: str(folder),
    }


def python_path(variables: Mapping[str, str]) -> str:
    """PYTHONPATH of a new interpreter, so that it finds this kit however the kernel found it."""
    home = str(Path(kit.__file__).parents[1])
    given = variables.get("PYTHONPATH")
    return os.pathsep.join([home, given]) if given else home


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
    kept = sorted({launch.lifeline, launch.store} if rank == 0 else {launch.lifeline})
    for first, end in itertools.pairwise([2, *kept, _MOST_DESCRIPTORS]):  # another trial's pipes would keep it alive
        os.closerange(first + 1, end)
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    _redirect(os.open(launch.paths.log(rank), _LOG_FLAGS, 0o644), 1, 2)
    os.environ.clear()
    os.environ.update(_variables_of(launch, rank))
    tempfile.tempdir = None  # the supervisor's own may be gone by now; found anew, as the kernel's variables say
    sys.argv = ["kit-rank", str(rank)]


def _redirect(source: int, *targets: int) -> None:
    for target in targets:
        os.dup2(source, target)
    os.close(source)


def _variables_of(launch: Launch, rank: int) -> dict[str, str]:
    store = {} if rank else {rendezvous.DESCRIPTOR: str(launch.store)}
    # GLOBAL_RANK is what litdata goes by before the ranks have met, as it goes by WORLD_SIZE.
    return {**launch.variables, **dict.fromkeys(("RANK", "LOCAL_RANK", "GLOBAL_RANK"), str(rank)), **store}


def spawn_rank(launch: Launch, rank: int, group: int) -> int:
    """Start one rank as a fresh interpreter; it finds its lifeline as its standard input."""
    variables = _variables_of(launch, rank)
    arguments = ["-P", "-m", "kit.trial.launch", str(launch.paths.directory), str(rank), str(os.getpid())]
    os.set_inheritable(launch.store, rank == 0)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *arguments],
        {**variables, "PYTHONPATH": python_path(variables)},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, launch.lifeline, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(launch.paths.log(rank)), _LOG_FLAGS, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=group,
        setsigdef=[signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
    )


def run_rank(paths: RunPaths, rank: int, supervisor: int, lifeline: int) -> NoReturn:
    """Be rank `rank` of the trial in `paths`; stdin, stdout, stderr and the environment are already this rank's."""
    confine_rank(paths, rank)
    die_with_parent(supervisor)
    watch_lifeline(lifeline)
    guard_forks(lifeline)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = EXIT_CANNOT_WRITE
    try:
        writer = EventWriter(paths.events(rank), rank)
        writer.write("rank_started", pid=os.getpid())
        code = _work(paths, rank, writer)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _work(paths: RunPaths, rank: int, writer: EventWriter) -> int:
    """Do the job; the exit code. Only a failure to write events gets out."""
    context: Context | None = None
    try:
        environment = read_json(paths.environment.read_bytes())
        _settle(environment)
        _send_warnings(writer)
        context = Context(paths, Config.load(paths.config), environment, rank, writer, Control(paths.control))
        if context.config.hardware.keep_freed_memory and environment.get("accelerator") != "gpu":
            keep_freed_memory()
        with confined_job(context):
            job = load(f"job.{environment.get('job', 'fit')}")  # only now: each job brings its own libraries
            gc.freeze()
            gc.enable()
            job(context)
    except BaseException as error:
        traceback.print_exc()
        writer.write("failed", **describe_failure(error, context))
        return EXIT_FAILED
    return 0


def _settle(environment: dict[str, Any]) -> None:
    """The kernel's folder and import paths, this rank's threads, a start method that lets notebook classes through."""
    import torch

    if Path(environment["folder"]).is_dir():
        os.chdir(environment["folder"])
    sys.path[:] = list(dict.fromkeys([*environment["sys_path"], *sys.path]))
    use_one_lightning()
    torch.set_num_threads(environment["threads_per_rank"])
    os.environ.setdefault("OMP_NUM_THREADS", str(environment["threads_per_rank"]))  # else Lightning's ddp sets its own
    multiprocessing.set_start_method("fork", force=True)
    scratch.take(scratch_folder())
    note_process()


def _send_warnings(writer: EventWriter) -> None:
    """What kit itself warns of reaches the notebook; every warning still reaches the log."""
    show = warnings.showwarning

    def show_and_send(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, KitWarning):
            writer.write("warned", message=str(message))
        show(message, category, *rest, **options)

    warnings.showwarning = show_and_send


def main() -> None:
    """`python -m kit.trial.launch RUN_DIRECTORY RANK SUPERVISOR`, with the lifeline as standard input."""
    gc.disable()  # until all is imported: collections among a million new objects take a fifth of that time
    lifeline = os.dup(0)
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    run_rank(RunPaths(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), lifeline)


if __name__ == "__main__":
    main()
