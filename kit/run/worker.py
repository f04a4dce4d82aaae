"""One rank: what a freshly forked or started process does before, around and after its job.

Before: dies with its supervisor, whatever Python is doing; sees the kernel's folder, sys.path and devices. Around: says
what happens in its own event file. After: leaves by `os._exit`, because a distributed process may hang in its exit
handlers. The exit code alone is never taken for success (see `verdict`).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from kit.config import Config
from kit.errors import KitWarning
from kit.events import EventWriter
from kit.json_text import read_json
from kit.processes import die_with_parent, guard_forks, note_process, scratch_folder, watch_lifeline
from kit.registry import load
from kit.run import scratch
from kit.run.confining import confine_rank, confined_job
from kit.run.control import Control
from kit.run.jobs.context import Context
from kit.run.paths import RunPaths
from kit.run.verdict import EXIT_CANNOT_WRITE, EXIT_FAILED


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
        _leave(code)


def _work(paths: RunPaths, rank: int, writer: EventWriter) -> int:
    """Do the job; the exit code. Only a failure to write events gets out."""
    from kit.run.failure import describe_failure

    context: Context | None = None
    try:
        environment = read_json(paths.environment.read_bytes())
        _settle(environment)
        _send_warnings(writer)
        context = Context(paths, Config.load(paths.config), environment, rank, writer, Control(paths.control))
        with confined_job(context):
            load(f"job.{environment.get('job', 'fit')}")(context)  # only now: each job brings its own libraries
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
    torch.set_num_threads(environment["threads_per_rank"])
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


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def main() -> None:
    """`python -m kit.run.worker RUN_DIRECTORY RANK SUPERVISOR`, with the lifeline as standard input."""
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    run_rank(RunPaths(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), lifeline)


if __name__ == "__main__":
    main()
