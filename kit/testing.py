"""Small parts for trying a runner: a tiny model and tiny data.

They live in the package, not in the tests, so that anyone can try a config with them.
"""

from __future__ import annotations

import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

Batch = list[torch.Tensor]


class TinyModule(LightningModule):
    """Linear regression, `width` weights; `seconds` is the time a step is made to take."""

    def __init__(self, width: int = 8, learning_rate: float = 0.01, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
        self.learning_rate = learning_rate
        self.seconds = seconds

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - Lightning's signature
        if self.seconds:
            time.sleep(self.seconds)
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class TinyData(LightningDataModule):
    """`samples` random vectors of `width` numbers, with `num_workers` loader processes."""

    def __init__(self, samples: int = 4096, width: int = 8, batch_size: int = 4, num_workers: int = 0) -> None:
        super().__init__()
        self.samples, self.width, self.batch_size, self.num_workers = samples, width, batch_size, num_workers

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, self.width, generator=generator)
        return DataLoader(
            TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size, num_workers=self.num_workers
        )
