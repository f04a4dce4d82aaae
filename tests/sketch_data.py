"""Random entities, as `kit.data.EventData` would give them: enough to measure a SketchModel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from typing_extensions import override

from kit.data.tables.features import DEPTH, sketch_width
from kit.models import Field
from kit.models.zoo import RandomSamples


class _RandomEntities(RandomSamples):
    """Entities of one event before and one after."""

    def __init__(
        self, columns: int, numbers: int, categories: Sequence[int], quality: float, count: int, seed: int
    ) -> None:
        super().__init__(Field(shape=(numbers,)), count, seed)
        self.columns, self.categories, self.buckets = columns, categories, sketch_width(quality)

    @override
    def draw(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        def sketch() -> Tensor:
            chosen = torch.randint(self.buckets, (self.columns * DEPTH,), generator=generator)
            return functional.one_hot(chosen, self.buckets).flatten().float()

        sketched, target = sketch(), sketch()
        chosen = [int(torch.randint(values, (), generator=generator)) for values in self.categories]
        return {
            "entity": torch.tensor(index), "events": torch.tensor(1), "numeric": super().draw(index, generator),
            "categorical": torch.tensor(chosen, dtype=torch.int64), "sketch": sketched, "target": target,
        }  # fmt: skip


class Sketches(LightningDataModule):
    """Batches of random entities, in the same order every epoch: enough to measure a model, with nothing to be learnt.

    Args:
        sketched_columns: Columns that a sketch is of.
        numbers: Numbers of an entity.
        categories: Values of each category.
        sketch_quality: Width of the sketches, 1 for 128 buckets.
        batch_size: Entities per batch on each device.
        entities: Entities in an epoch.
        seed: Equal seeds give equal entities.

    Raises:
        ConfigError: for a quality that is not above 0.
    """

    def __init__(
        self,
        sketched_columns: int = 4,
        numbers: int = 8,
        categories: Sequence[int] = (),
        sketch_quality: float = 1.0,
        batch_size: int = 8,
        entities: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.dataset = _RandomEntities(sketched_columns, numbers, categories, sketch_quality, entities, seed)

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.dataset, batch_size=self.batch_size)
