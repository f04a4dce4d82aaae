"""Loaders and data modules of others, none made for a test, each with the samples that a batch of it has."""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    RandomDataset,
    RandomDictDataset,
    RandomIterableDataset,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, ChainDataset, DataLoader, RandomSampler, StackDataset, TensorDataset

from kit.models.zoo import Field, RandomData


class Anything(LightningModule):
    """Trains on whatever holds a tensor of numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        first = next(item for item in tree_leaves(batch) if isinstance(item, torch.Tensor) and item.is_floating_point())
        return (self.weight * first.float().mean()) ** 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def vectors(count=256):
    return TensorDataset(torch.randn(count, 8), torch.randn(count, 1))


def plain():
    return DataLoader(vectors(), batch_size=4, num_workers=1)


def batch_sampler():
    return DataLoader(vectors(), batch_sampler=BatchSampler(RandomSampler(range(256)), 6, drop_last=False))


def whole_batches():
    """The data set is indexed with a list and gives a whole batch."""
    return DataLoader(vectors(), batch_size=None, sampler=BatchSampler(RandomSampler(range(256)), 7, drop_last=True))


def iterable():
    return DataLoader(RandomIterableDataset(8, 200), batch_size=5)


def chained():
    return DataLoader(ChainDataset([RandomIterableDataset(8, 30), RandomIterableDataset(8, 90)]), batch_size=3)


def nested():
    parts = StackDataset(image=RandomDataset(8, 64), more=RandomDictDataset(4, 64))
    return DataLoader(parts, batch_size=8, shuffle=True)


def several():
    loaders = {"a": DataLoader(RandomDataset(8, 64), batch_size=2), "b": DataLoader(RandomDataset(8, 64), batch_size=9)}
    return CombinedLoader(loaders, "min_size")


def time_first():
    """The samples lie along the second dimension, as a recurrent network takes them."""
    return DataLoader(vectors(), batch_size=11, collate_fn=lambda samples: torch.stack([x for x, _ in samples], dim=1))


def list_of_samples():
    """What a detector takes: as many tensors as there are samples."""
    return DataLoader(vectors(), batch_size=2, collate_fn=lambda samples: samples)


def tensor_of_batches():
    """No loader at all: anything that gives batches when it is iterated."""
    return torch.randn(16, 13, 8)


def packed():
    """Sequences of several lengths, as torch packs them."""
    pack = torch.nn.utils.rnn.pack_sequence
    return DataLoader(vectors(), batch_sampler=Growing(3), collate_fn=lambda samples: pack([x for x, _ in samples]))


class Growing(BatchSampler):
    """A sampler of the caller's own, whose batches say nothing of their size."""

    def __init__(self, size, steps=16, by=0):
        super().__init__(range(256), size, drop_last=False)
        self.sizes = [size + by * step for step in range(steps)]

    def __iter__(self):
        return iter([list(range(size)) for size in self.sizes])

    def __len__(self):
        return len(self.sizes)


def random_data():
    return RandomData((Field(shape=(8,)), Field(shape=(1,))), batch_size=6, samples=96)


LOADERS = {
    plain: 4, batch_sampler: 6, whole_batches: 7, iterable: 5, chained: 3, nested: 8, several: 2, time_first: 11,
    list_of_samples: 2, tensor_of_batches: 13, packed: 3, random_data: 6, BoringDataModule: 1,
}  # fmt: skip
