"""A committed file run on this machine, and the lines that start one with Python, torchrun or SLURM.

`CommittedRun` starts the launch line of the file, word for word, with two options after it that change no number: no
progress bar, and `kit.train.LossLog`, whose losses it reads. Lightning starts the other ranks. All of them are in one
process group behind a guard (`kit.machine.processes`): nothing in it can reach the kernel, and when the kernel ends,
however it does, so do they. Variables that a launcher or an allocation has set for other processes are taken out of
their environment. States: RUNNING, then COMPLETE, FAILED, or STOPPED (by request). `seconds` are those of the whole
process, `training_seconds` those from the first batch to the last.

`LaunchLines` are text; making them starts nothing. There is one process for each device, and PyTorch and Lightning join
them: kit has no launcher of its own. A file says for how many nodes and devices it is. `spread` puts the same ranks on
another number of nodes by two options after the file, so that the global batch stays what it was.
"""

from __future__ import annotations

import html
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import kit
from kit.config import Config, project_folder, project_path
from kit.errors import ConfigError, HardwareError, Problem, TrialError, TrialStopped
from kit.events import Event, EventReader
from kit.json_text import read_json
from kit.machine.claims import hand_over, release
from kit.machine.processes import identify
from kit.records.trace import losses_of
from kit.registry import Drawable
from kit.trial.directory import runs_folder
from kit.trial.submit import take_devices
from kit.units import format_seconds

RunState = Literal["RUNNING", "COMPLETE", "FAILED", "STOPPED"]
_LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|NODE_RANK|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|PMI|OMPI_COMM)_.*")
_TICK_SECONDS = 0.05
_LAST_LINES = 12
_running: set[CommittedRun] = set()
"""Kept until they have ended: one that nobody holds any more would be ended by that."""


class CommittedRun(Drawable):
    """A committed file that runs, or has run, here; `Committed.run` starts one, and says what it raises."""

    def __init__(self, launch: LaunchLines, config: Config, options: Sequence[str] = ()) -> None:
        if launch.nodes > 1:
            raise HardwareError(
                f"{launch.file} is for {launch.nodes} nodes, and this is one; start launch.torchrun_nodes on each of "
                "them, or commit it with commit.nodes: 1"
            )
        self.launch = launch
        self.folder = _new_folder(launch, config)
        self.state: RunState = "RUNNING"
        self.message = ""
        """Why it FAILED."""
        self._grace_seconds = config.trial.grace_seconds
        self._reader = EventReader(self.folder)
        self._events: list[Event] = []
        self._shown_bytes = 0
        self._stopped_at = 0.0
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._process = self._start(config, options)
        _running.add(self)

    def _start(self, config: Config, given: Sequence[str]) -> subprocess.Popen[bytes]:
        """With GPUs of its own, which are given back when it ends."""
        taken = take_devices(config) if self.launch.gpu else None
        claims, devices = (taken.claims, taken.resolved.devices) if taken is not None else ((), ())
        guard = [sys.executable, "-m", "kit.machine.processes", str(os.getpid()), str(self._end_file)]
        losses = f"--trainer.callbacks.file={self.folder / 'events.0.jsonl'}"
        options = [*given, "--trainer.callbacks+=kit.train.LossLog", losses]
        try:
            with self.log.open("wb") as log:
                process = subprocess.Popen(
                    [*guard, sys.executable, "-m", *self.launch.job, *options],
                    cwd=project_folder(), env=_variables(devices), start_new_session=True,
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
        except BaseException:
            release(claims)
            raise
        hand_over(claims, identify(process.pid), config.name)
        return process

    # -- what it is

    @property
    def log(self) -> Path:
        """What its processes wrote to stdout and stderr."""
        return self.folder / "log.txt"

    @property
    def command(self) -> str:
        """The line that was started."""
        return self.launch.python

    @property
    def _end_file(self) -> Path:
        return self.folder / "ended.json"

    # -- what is known

    @property
    def ended(self) -> bool:
        return self.poll() != "RUNNING"

    @property
    def events(self) -> list[Event]:
        """Those of `kit.train.LossLog` so far."""
        self._events += self._reader.read()
        return self._events

    @property
    def losses(self) -> list[float]:
        """Of every batch, in order, the mean of all ranks; NaN where the module gave none."""
        return [batch.loss for batch in losses_of(self.events)]

    @property
    def first_batch(self) -> int:
        """Batches that are in the checkpoint which it went on from; 0 where it began anew."""
        return self._at_start("batches")

    @property
    def first_step(self) -> int:
        """The same, in optimizer steps."""
        return self._at_start("step")

    def _at_start(self, field: str) -> int:
        return next((int(event[field]) for event in self.events if event["kind"] == "fit_started"), 0)

    @property
    def steps(self) -> int:
        """Optimizer steps that are done, with those before a checkpoint that it went on from."""
        return max((int(event["step"]) for event in self.events), default=0)

    @property
    def seconds(self) -> float:
        """From its start to its end, or until now."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def training_seconds(self) -> float:
        """From the start of training to its end, or to the last batch that is known."""
        times = [float(event["time"]) for event in self.events]
        return times[-1] - times[0] if times else 0.0

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def poll(self) -> RunState:
        """Look whether it has ended; the state afterwards."""
        if self.state != "RUNNING":
            return self.state
        if self._process.poll() is None:
            if self._stopped_at and time.monotonic() - self._stopped_at > self._grace_seconds:
                self._signal(signal.SIGKILL)
            return self.state
        if self._process.stdin is not None:
            self._process.stdin.close()
        _running.discard(self)
        ended: dict[str, Any] = read_json(self._end_file.read_bytes()) if self._end_file.exists() else {}
        self._seconds, code = float(ended.get("seconds", self.seconds)), ended.get("code")
        self.state = "STOPPED" if self._stopped_at else "COMPLETE" if code == 0 else "FAILED"
        if self.state == "FAILED":  # the last line it wrote: an error's name and text, where it had one to tell
            lines = [line.strip() for line in self.output.splitlines() if line.strip()]
            how = "it was killed" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"
            self.message = f"{lines[-1]} ({how})" if lines else how
        return self.state

    # -- ending it

    def stop(self) -> None:
        """Ask it to end: checkpoints that are there stay, and starting the file again goes on from the last.

        Returns at once; what has not ended after `trial.grace_seconds` is killed.
        """
        if self.poll() == "RUNNING" and not self._stopped_at:
            self._stopped_at = time.monotonic()
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all its processes now."""
        if self.poll() == "RUNNING":
            self._stopped_at = self._stopped_at or time.monotonic()
            self._signal(signal.SIGKILL)

    def _signal(self, kind: signal.Signals) -> None:
        if self._process.poll() is None:  # not reaped, so that the group is still its own
            os.killpg(self._process.pid, kind)

    # -- waiting for it

    def wait(self, timeout: float | None = None, *, echo: bool = True) -> Self:
        """Show what it writes until it has ended. An interrupt stops it.

        Args:
            timeout: Seconds; it goes on after them.
            echo: Write its output to stdout as it comes.

        Raises:
            TrialError: when it FAILED; with its last line and its log.
            TrialStopped: after an interrupt.
            TimeoutError: after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._look(echo):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self.folder.name} still runs after {timeout} s; it goes on")
                time.sleep(_TICK_SECONDS)
        except KeyboardInterrupt:
            self.stop()
            while not self.ended:
                try:
                    time.sleep(_TICK_SECONDS)
                except KeyboardInterrupt:  # the second one
                    self.kill()
            raise TrialStopped(f"interrupted after {self.steps} steps; its log is {self.log}") from None
        if self.state == "FAILED":
            lines = self.output.splitlines()[-_LAST_LINES:]
            raise TrialError(self.message, "\n".join([*lines, f"Log: {self.log}"]))
        return self

    def _look(self, echo: bool) -> bool:
        """Whether it has ended, with all that it wrote shown."""
        ended = self.ended
        if echo:
            with self.log.open("rb") as log:
                log.seek(self._shown_bytes)
                text = log.read()
            text = text if ended else text[: text.rfind(b"\n") + 1]
            self._shown_bytes += len(text)
            sys.stdout.write(text.decode("utf-8", "replace"))
            sys.stdout.flush()
        return ended

    # -- displays

    def __repr__(self) -> str:
        losses = self.losses
        if self.poll() == "COMPLETE" and not losses:
            first = f"{self.launch.name}: nothing was left to train; Committed.run(anew=True) begins again"
        else:
            last = f", last loss {losses[-1]:.4g}" if losses else ""
            began = f" from step {self.first_step} on" if self.first_step else ""
            took = f"{format_seconds(self.seconds)}, {format_seconds(self.training_seconds)} of them training"
            first = f"{self.launch.name}: {self.poll()}, {self.steps} steps{began} in {took}{last}"
        return "\n  ".join(filter(None, [first, self.message, self.command, project_path(self.log)]))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _new_folder(launch: LaunchLines, config: Config) -> Path:
    """A folder of its own beside the trials'."""
    parent, stem = runs_folder(config.trial.folder), f"{launch.name}-committed-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
    try:
        folder = next(parent / name for name in names if not (parent / name).exists())
        folder.mkdir(parents=True)
    except OSError as error:
        message = f"cannot make a folder in {parent}: {error.strerror or error}; choose another"
        raise ConfigError([Problem("trial.folder", message)]) from error
    return folder


def _variables(devices: tuple[str, ...]) -> dict[str, str]:
    """Of this process, without what a launcher has set for others."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHERS.fullmatch(name)}
    home = str(Path(kit.__file__).parents[1])
    paths = [home, *filter(None, [kept.get("PYTHONPATH")])]
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
    return {**kept, **shown, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


PORT = 29500
_ENTRY = "kit.train.cli"
_OWN_STORE = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
"""Before torchrun, where it may restart ranks: sharing its store, they may read the addresses of ranks that are gone
(pytorch/pytorch#135712)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLines:
    """A committed file and the ranks it is for."""

    file: str
    """As it is called from `folder`."""
    name: str
    nodes: int
    devices: int
    """On each node."""
    restarts: int
    gpu: bool
    options: tuple[str, ...] = ()
    """After the file."""
    stages: tuple[str, ...] = ()
    """What the trial did after its fit, and the run of the file does not: `test`, `predict`."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    def spread(self, nodes: int) -> LaunchLines:
        """The same ranks on another number of nodes.

        Raises:
            ConfigError: when they cannot be shared out evenly.
        """
        if nodes == self.nodes:
            return self
        if nodes < 1 or self.world_size % nodes:
            message = f"{self.world_size} ranks cannot be shared out evenly over {nodes} nodes"
            raise ConfigError([Problem("commit.nodes", message)])
        devices = self.world_size // nodes
        options = (f"--trainer.num_nodes={nodes}", f"--trainer.devices={devices}")
        return replace(self, nodes=nodes, devices=devices, options=options)

    @property
    def job(self) -> list[str]:
        """What every rank runs, after `python -m`."""
        return [_ENTRY, "fit", "--config", self.file, *self.options]

    @property
    def python(self) -> str:
        """Lightning starts the other ranks of this machine itself."""
        return shlex.join(["python", "-m", *self.job])

    def stage(self, name: str) -> str:
        """Tests or predicts with the last checkpoint of the run, on all of its batches."""
        return shlex.join(["python", "-m", _ENTRY, name, "--config", self.file, *self.options])

    @property
    def torchrun(self) -> str:
        """All ranks of one machine, started again when one fails."""
        return shlex.join([*self._torchrun, "--standalone", *self._ranks, "-m", *self.job])

    @property
    def torchrun_nodes(self) -> str:
        """The same line on every machine; HEAD is the name of any one of them."""
        found = ["--rdzv-backend", "c10d", "--rdzv-id", self.name]
        line = [*self._torchrun, "--nnodes", str(self.nodes), *self._ranks, *found]
        return f'{shlex.join(line)} --rdzv-endpoint "$HEAD:{PORT}" {shlex.join(["-m", *self.job])}'

    @property
    def _torchrun(self) -> list[str]:
        return [*(_OWN_STORE if self.restarts else []), "torchrun"]

    @property
    def _ranks(self) -> list[str]:
        again = ["--max-restarts", str(self.restarts)] if self.restarts else []
        return ["--nproc-per-node", str(self.devices), *again]

    # -- files

    def script(self, up: str) -> str:
        """A shell script for this machine; `up` leads from its folder to the project's. Its arguments go to the job."""
        line = self.torchrun if self.world_size > 1 else self.python
        many = [f"# On each of {self.nodes} machines, with HEAD=name-of-one-of-them:"] if self.nodes > 1 else []
        return _script([*many, f'cd "$(dirname "$0")/{up}"', f'exec {self.torchrun_nodes if many else line} "$@"'])

    def sbatch(self, by: str = "torchrun") -> str:
        """A SLURM batch file: srun starts torchrun once on every node, or (`python`) each rank itself.

        Submit it from the project folder; what a cluster asks for besides (account, partition, time) is its user's.
        """
        tasks = 1 if by == "torchrun" else self.devices
        head = [f"--job-name={self.name}", f"--nodes={self.nodes}", f"--ntasks-per-node={tasks}"]
        head += [f"--gpus-per-node={self.devices}"] if self.gpu else []
        lines = [f"#SBATCH {option}" for option in head] + ["", 'cd "$SLURM_SUBMIT_DIR"']
        if by == "python":
            return _script([*lines, f"srun {self.python}"], strict_at=len(head))
        ranks = shlex.join([*self._ranks, "--rdzv-backend", "c10d"])
        lines += ['HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
        line = f'srun {shlex.join(self._torchrun)} --nnodes "$SLURM_NNODES" {ranks} --rdzv-id "$SLURM_JOB_ID"'
        return _script(
            [*lines, f'{line} --rdzv-endpoint "$HEAD:{PORT}" {shlex.join(["-m", *self.job])}'], strict_at=len(head)
        )


def _script(lines: Sequence[str], strict_at: int = 0) -> str:
    """SLURM reads its options up to the first command, so that `set` comes after them."""
    body = [*lines[:strict_at], "set -euo pipefail", *lines[strict_at:]]
    return "\n".join(["#!/usr/bin/env bash", *body]) + "\n"
