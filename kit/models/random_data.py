"""Random samples of given shapes: enough to measure a model, and there is nothing to download.

Sample i is drawn from a generator seeded by i, so that nothing is kept in memory, any sample comes first, and equal
seeds give equal samples on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a sample: normal float32 numbers, or whole numbers from 0 up to (not including) `below`."""

    shape: tuple[int, ...] = ()
    below: int | None = None
    dtype: torch.dtype | None = None
    """What the numbers are turned into; by default float32, and int64 for whole numbers."""

    def draw(self, generator: torch.Generator) -> Tensor:
        if self.below is None:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        return torch.randint(self.below, self.shape, generator=generator).to(self.dtype or torch.int64)


Fields = Field | tuple[Field, ...] | Mapping[str, Field]


class RandomSamples(Dataset[Any]):
    """`len` samples of `fields`: a tensor, a tuple or a dict of tensors, as the fields are given."""

    def __init__(self, fields: Fields, samples: int, seed: int) -> None:
        self.fields, self.samples, self.seed = fields, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index}: there are {self.samples}, numbered from 0")
        generator = torch.Generator().manual_seed(self.seed * self.samples + index)
        if isinstance(self.fields, Field):
            return self.fields.draw(generator)
        if isinstance(self.fields, Mapping):
            return {name: field.draw(generator) for name, field in self.fields.items()}
        return tuple(field.draw(generator) for field in self.fields)


class RandomData(LightningDataModule):
    """Batches of random samples, in the same order every epoch.

    Args:
        fields: A field, or a tuple or dict of them, as the module wants its batch.
        batch_size: Samples per batch on each device.
        samples: Samples in an epoch.
        seed: Equal seeds give equal samples.
    """

    def __init__(self, fields: Fields, batch_size: int = 8, samples: int = 1024, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.dataset = RandomSamples(fields, samples, seed)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.batch_size)
