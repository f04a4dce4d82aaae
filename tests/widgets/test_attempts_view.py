import threading

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset
from waiting import PATIENCE_SECONDS

import kit
from kit.config import Config
from kit.widgets.trial_view import AttemptsView


class Wide(LightningModule):
    """Keeps 64 KiB for every sample."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 16384), torch.nn.Linear(16384, 1)

    def training_step(self, batch, batch_idx):
        return self.two(self.one(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def search(tmp_path, **options):
    config = Config.make({
        "hardware": {"accelerator": "cpu", "threads_per_rank": 1, "device_memory_bytes": 64 << 20},
        "trial": {"folder": str(tmp_path / "runs"), "predict_memory": False},
    })  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(4096, 64)), batch_size=8)
    return kit.studies.find_batch_size(config, Wide, loader, **options)


def test_the_table_follows_and_the_button_goes_when_it_has_ended(tmp_path):
    found = search(tmp_path, resolution=0.2)
    view = AttemptsView(found)
    assert view.button.layout.display != "none"
    found.wait(PATIENCE_SECONDS)
    view.show()
    assert view.button.layout.display == "none"
    assert f"{found.batch_size} samples" in view.table.value


def test_the_button_stops_the_search(tmp_path):
    found = search(tmp_path, start=1, resolution=0)
    view, seen = AttemptsView(found), threading.Event()
    found.on_change(lambda series: seen.set() if series.attempts else None)
    assert seen.wait(PATIENCE_SECONDS)
    view.button.click()
    assert view.button.disabled
    assert found.wait(PATIENCE_SECONDS).state == "STOPPED"


def test_without_a_notebook_nothing_is_shown_and_nothing_fails(tmp_path):
    found = search(tmp_path, start=4, most=4).wait(PATIENCE_SECONDS)
    AttemptsView(found).display()
