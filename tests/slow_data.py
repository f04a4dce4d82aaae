"""Data that waits, computes or breaks, for calibrations."""

import time

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Waiting(Dataset):
    """`seconds` of waiting for each sample, as for a network."""

    def __init__(self, seconds=0.002, samples=4096):
        self.seconds, self.samples = seconds, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        time.sleep(self.seconds)
        x = torch.full((8,), float(index % 7))
        return x, x.sum().reshape(1)


class WaitingData(LightningDataModule):
    def __init__(self, seconds=0.002, samples=4096, batch_size=4):
        super().__init__()
        self.seconds, self.samples, self.batch_size = seconds, samples, batch_size
        self.asked = []

    def setup(self, stage=None):
        self.asked.append(stage)

    def train_dataloader(self):
        return DataLoader(Waiting(self.seconds, self.samples), batch_size=self.batch_size)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(8), torch.zeros(1)


class Broken(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        raise KeyError("no such sample")
