"""A small project in a folder of its own, its committed file, and real processes that run it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import zarr
from warm_python import programs

import kit
from kit.charts.trial import LossInfo
from kit.config import Config

HOME = str(Path(kit.__file__).parents[1])
SECONDS = 400
PYTHON = sys.executable  # where tests put another in its place
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")

LOSSES = '''
import json
import os
import signal
import time

import kit
from lightning.pytorch import Callback


class Lost(Callback):
    """The machine is lost after `step` steps, once some checkpoint has been copied."""

    def __init__(self, step: int, url: str) -> None:
        self.step, self.url = step, url

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            while kit.checkpoints.latest(self.url) is None:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class Losses(Callback):
    """Writes the loss of every batch of every rank; Lightning hands it on divided by the micro-batches."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        with open(f"{self.folder}.{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(float(loss) * trainer.accumulate_grad_batches) + "\\n")
'''

TRACER = '''
import json
import os
import signal

import torch
from lightning.pytorch import LightningModule


class Tracer(LightningModule):
    """Writes which samples each step took, and is killed once on `rank` after `step` steps."""

    def __init__(self, rank: int = 1, step: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fatal = (rank, step)

    def training_step(self, batch, batch_idx):
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not again and (self.global_rank, self.global_step) == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        samples = batch["values"].flatten(1)[:, :1] * 2048
        row = [again, self.current_epoch, self.global_step, samples.flatten().tolist()]
        with open(f"samples.{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")
        return self.layer(samples / 2048).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
'''


def make_project(folder: Path) -> Config:
    """A store whose every value is its place over 2,048, two modules, and the config of two ranks on the CPU."""
    (folder / "pyproject.toml").touch()
    (folder / "losses.py").write_text(LOSSES)
    (folder / "tracer.py").write_text(TRACER)
    array = zarr.open_group(str(folder / "store.zarr"), mode="w").create_array(
        "sst", shape=(8, 16, 16), chunks=(4, 8, 8), dtype="float32", dimension_names=("time", "lat", "lon")
    )
    array[:] = np.arange(2048, dtype="float32").reshape(8, 16, 16) / 2048
    return Config.make(
        {
            "name": "small",
            "hardware": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "threads_per_rank": 1},
            "data": {"url": "store.zarr", "patch": {"time": 2, "lat": 8, "lon": 8}, "samples_per_epoch": 32},
            "loader": {"batch_size": 2},
            "model": {"arguments": {"variables": 1, "width": 4, "depth": 1}},
            "trial": {"max_steps": 8, "warmup_steps": 1, "predict_memory": False, "measure_memory": False},
        }
    ).replace({"data.standardize": False})


def variables(**more: str) -> dict[str, str]:
    """The environment of a run: Python and torchrun that begin at once, loopback, and no launcher's leftovers."""
    left = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM_", "GROUP_", "NODE_RANK", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return {
        **kept, "PATH": os.pathsep.join([str(programs()), kept.get("PATH", "")]), "PYTHONPATH": HOME,
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip


def fresh() -> dict[str, str]:
    """What `variables` needs so that every process is a new interpreter, and its ranks are its children."""
    return {"PATH": os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]])}


def start(line: list[str], folder: Path, **more: str) -> subprocess.Popen:
    """A command in a process group of its own, its output in a pipe."""
    return subprocess.Popen(
        line, cwd=folder, env=variables(**more), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(*processes: subprocess.Popen) -> list[str]:
    """What they wrote, once all ended well; all that is left of them is killed."""
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
        codes = [process.returncode for process in processes]
        assert codes == [0] * len(codes), "\n".join(output[-4000:] for output in outputs)
        return outputs
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def lines_of(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_exact(info: LossInfo, batches: int) -> None:
    """The second run has every loss of the first, and its sentence tells so."""
    (other,) = info.runs[1:]
    assert (info.difference(other), len(info.common(other))) == (0, batches)
    assert re.search(f"exactly.* {batches} batches", info.sentence), info.sentence
