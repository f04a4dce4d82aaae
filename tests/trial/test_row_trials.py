"""Trials on rows: the same losses from memory and from files, on one rank and on two, by instance and by config."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from waiting import PATIENCE_SECONDS

import kit

SECONDS = PATIENCE_SECONDS


class Factor(LightningModule):
    """One number for each row and one for each column."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Linear(6, 6)

    def training_step(self, batch, _):
        values, rows = batch
        return ((self.rows(values) - rows[:, None] / 64) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def losses(trial):
    """Of every step, the mean over ranks."""
    assert trial.state == "COMPLETE"
    steps = sorted({event["step"] for event in trial.steps})
    return [np.mean([event["loss"] for event in trial.steps if event["step"] == step]) for step in steps]


def test_one_rank_and_two_have_equal_losses_wherever_the_rows_are(config, tmp_path):
    values = np.random.default_rng(0).random((64, 6), "float32")
    np.save(tmp_path / "x.npy", values)
    alone = config().replace({"loader.batch_size": 8})
    memory = kit.fit(alone, Factor, kit.data.RowData(values)).wait(SECONDS)
    by_config = alone.replace({"data.arguments": {"source": str(tmp_path / "x.npy")}})
    disk = kit.fit(by_config, Factor, "kit.data:RowData").wait(SECONDS)
    two = kit.fit(config(2).replace({"loader.batch_size": 4}), Factor, kit.data.RowData(tmp_path / "x.npy")).wait(
        SECONDS
    )
    assert losses(disk) == losses(memory)
    assert losses(two) == pytest.approx(losses(memory), rel=1e-5)
    assert disk.event("fit_ended", "counters")["samples"] >= 64
