"""What only a GPU can tell of faults 4, 11 and 19: that its memory is free again, and that the kernel took none.

On a CPU tests/faults/table.py names what stands in for each.
"""

import contextlib
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE_SECONDS, wait_until

import kit
from kit.config import Config
from kit.errors import TrialError
from kit.machine.gpus import read_gpus
from kit.testing import TinyData, TinyModule
from kit.trial.trial import Trial

GPUS = read_gpus().gpus
SLACK_BYTES = 64 << 20

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU")]


@pytest.fixture
def config(tmp_path):
    trial = {"max_steps": 4, "warmup_steps": 1, "folder": str(tmp_path / "runs"), "predict_memory": False}
    hardware = {"accelerator": "gpu", "devices": [GPUS[0].index]}
    return Config.make({"hardware": hardware, "trial": trial})


def free_bytes():
    return read_gpus().gpus[0].free_bytes


class Greedy(TinyModule):
    """Takes more than the card has, in pieces, at its third step."""

    def training_step(self, batch, batch_idx):
        import torch

        if self.global_step == 2:
            self.kept = [torch.empty(1 << 30, dtype=torch.uint8, device=self.device) for _ in range(100_000)]
        return super().training_step(batch, batch_idx)


class Holding(TinyModule):
    """Holds a GiB and takes its time."""

    def training_step(self, batch, batch_idx):
        import torch

        if self.global_step == 0:
            self.kept = torch.ones(1 << 30, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


def test_memory_of_a_trial_that_ran_out_is_given_back_and_the_next_one_runs(config):
    before = free_bytes()
    trial = kit.fit(config, Greedy, TinyData)
    with pytest.raises(TrialError, match="out of memory"):
        trial.wait(PATIENCE_SECONDS)
    assert trial.cause == "device_oom"
    assert max(step["device_allocated_bytes"] for step in trial.steps) > 0
    wait_until(lambda: free_bytes() >= before - SLACK_BYTES)
    assert kit.fit(config, TinyModule, TinyData).wait(PATIENCE_SECONDS).state == "COMPLETE"


def test_memory_of_a_trial_is_given_back_when_its_kernel_is_killed(config):
    before = free_bytes()
    code = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
        import kit
        from test_faults_cuda import Holding
        from kit.testing import TinyData
        config = kit.Config.from_yaml({config.replace({"trial.max_steps": 10**6}).to_yaml(comments=False)!r})
        trial = kit.fit(config, lambda: Holding(seconds=0.05), TinyData)
        print(trial.run_directory, flush=True)
        time.sleep(600)
    """)
    tests = __file__.rpartition("/gpu/")[0]
    kernel = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}"], stdout=subprocess.PIPE, text=True
    )
    trial = Trial.open(kernel.stdout.readline().strip())
    wait_until(lambda: trial.poll() and len(trial.steps) > 2)
    assert free_bytes() < before - (1 << 30) + SLACK_BYTES
    below = psutil.Process(kernel.pid).children(recursive=True)
    kernel.kill()
    kernel.communicate()
    wait_until(lambda: free_bytes() >= before - SLACK_BYTES)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert process.status() == psutil.STATUS_ZOMBIE
    assert Trial.open(trial.run_directory).state == "LOST"


@pytest.mark.slow
def test_fifty_trials_leave_the_kernel_without_a_context_and_the_memory_as_it_was(config):
    kit.fit(config, "kit.testing:TinyModule", "kit.testing:TinyData").wait(PATIENCE_SECONDS)
    before = free_bytes()
    for _ in range(50):
        kit.fit(config, "kit.testing:TinyModule", "kit.testing:TinyData").wait(PATIENCE_SECONDS)
    wait_until(lambda: free_bytes() >= before - SLACK_BYTES)
    maps = Path("/proc/self/maps").read_text()
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized()
    assert "/dev/nvidia" not in maps
