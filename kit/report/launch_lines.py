"""Launch lines: how a committed file is started, by Python, torchrun or SLURM; text only, nothing is started here.

One process for each device, joined by PyTorch and Lightning; kit has no launcher of its own. A file says how many nodes
and devices it is for. The same ranks may be spread otherwise: `spread` over another number of nodes keeps their number,
and with it the global batch, by two options after the file.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kit.errors import ConfigError, Problem

PORT = 29500
_ENTRY = "kit.train.cli"
_OWN_STORE = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
"""Before torchrun, where it may restart ranks: sharing its store, they may read the addresses of ranks that are gone
(pytorch/pytorch#135712)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
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

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    def spread(self, nodes: int) -> Launch:
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
