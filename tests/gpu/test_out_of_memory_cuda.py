"""What only a GPU can tell: that torch's own history names the lines that filled the card."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import Dataset
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.errors import TrialError
from kit.machine.gpus import read_gpus
from kit.memory.replay.snapshot import load_snapshot
from kit.trial.meters import MOST_ENTRIES

GPUS = read_gpus().gpus
MIB = 1 << 20

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU")]


class Noise(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((64,), float(index))


class Wide(LightningModule):
    """Two blocks of 512 MiB a step at two lines of its own, more than the limit holds of them together."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 131072), nn.Linear(131072, 1)

    def training_step(self, batch, batch_idx):
        hidden = self.one(batch)
        bent = torch.tanh(hidden)
        return self.two(bent).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def test_the_snapshot_of_a_card_names_the_lines_that_filled_it(tmp_path):
    values = {
        "hardware": {"accelerator": "gpu", "devices": [GPUS[0].index], "device_memory_bytes": 800 * MIB},
        "loader": {"batch_size": 1024, "num_workers": 0},
        "trial": {"max_steps": 3, "warmup_steps": 1, "folder": str(tmp_path), "predict_memory": False},
    }
    trial = kit.fit(Config.make(values), Wide, Noise)
    with pytest.raises(TrialError, match=r"memory_report"):
        trial.wait(PATIENCE_SECONDS)
    memory = load_snapshot(trial.paths.memory_snapshot(0))
    first = Wide.training_step.__code__.co_firstlineno
    held = {one.owner.rpartition("/")[2]: one.bytes for one in memory.holdings}
    assert held[f"test_out_of_memory_cuda.py, line {first + 1}, in training_step"] == 512 * MIB
    assert memory.asked_by.endswith(f"test_out_of_memory_cuda.py, line {first + 2}, in training_step")
    assert memory.asked_bytes == 512 * MIB
    assert held["parameters"] >= (65 * 131072 + 131073) * 4
    assert memory.batch[-1] == 0
    assert memory.allocated_bytes <= memory.reserved_bytes <= 800 * MIB
    assert 0 < len(memory.series) <= MOST_ENTRIES
    assert "The smallest change that fits" in trial.memory_report().read_text(encoding="utf-8")
