"""A module that trains on whatever it is given, and says when to hang."""

import time

import torch
from lightning.pytorch import LightningModule


class AnyBatch(LightningModule):
    def __init__(self, hang_at=0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.hang_at = hang_at

    def training_step(self, batch, batch_idx):
        time.sleep(3600 if self.global_step == self.hang_at > 0 else 0.01)
        return self.weight.square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
