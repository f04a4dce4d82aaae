"""A module of repeated blocks, its data, and a CPU of any size, for what is predicted of a run."""

import torch

from kit.memory.replay.cards import DeviceTarget
from kit.testing import TinyData, TinyModule


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.nn.functional.gelu(self.second(torch.nn.functional.gelu(self.first(x))))


class Blocks(TinyModule):
    """Six blocks with 3 MiB of weights in all; a batch of 512 keeps more than they hold."""

    def __init__(self, width=256, layers=6):
        super().__init__()
        self.layer = torch.nn.Sequential(*[Block(width) for _ in range(layers)])

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def blocks_data():
    return TinyData(width=256, samples=2048, batch_size=512)


def cpu_of(capacity_bytes):
    return DeviceTarget(
        name="a small CPU", capacity_bytes=int(capacity_bytes), device_kind="cpu", capability=None,
        outside_bytes=(0, 0), cublas_workspace_bytes=0,
    )  # fmt: skip
