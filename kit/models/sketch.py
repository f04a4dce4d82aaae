"""SketchModel: foretells what an entity will do next from sketches of what it did, whose size is set by its dials.

A batch is what `kit.EventData` gives (see `kit.data.tables.features`): sketches, numbers and categories of an entity's
earlier events, and as target the sketch of its later ones. Nothing is labelled by hand. The square root of a sketch has
length 1 in each row of buckets, so that rare and frequent values weigh alike; it goes through one linear layer, as the
numbers do, to which an embedding of each category is added. Then come `num_layers` residual blocks and a linear layer
that gives a distribution over each row of buckets.

The loss is the Kullback-Leibler divergence of the target from that distribution, in nats, averaged over the rows of
buckets that have a target: 0 when every later event is foretold with its frequency. A model that gives every bucket of
a row the same chance has the logarithm of the width less the entropy of the target.

`Sketches` are random sketches of that form: enough to measure a model, with nothing in them to be learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from kit.data.tables.sketching import DEPTH, sketch_width
from kit.errors import ConfigError

Events = Mapping[str, Tensor]
"""Tensors by name, one row of each for an entity."""


class ResidualBlock(nn.Module):
    """A perceptron beside a shortcut: (entity, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = values + self.body(values)
        return changed


class SketchModel(LightningModule):
    """A model of entities over sketches of their events.

    `Features.model_arguments()` are the arguments that the data decides.

    Args:
        sketched_columns: Columns that a sketch is of.
        numbers: Numbers of an entity.
        categories: Values of each category, those for missing and unknown among them.
        hidden_dim: Numbers an entity is carried as.
        num_layers: Residual blocks.
        sketch_quality: Width of the sketches, 1 for 128 buckets: the same as that of the data.
        learning_rate: Of AdamW.

    Raises:
        ConfigError: for a quality that is not above 0.
    """

    dial_order: ClassVar[dict[str, str]] = {
        "hidden_dim": "the first to change: down where memory is short, up where the data is rich; weights grow with "
        "its square",
        "num_layers": "only after hidden_dim, and on clear underfitting; weights and activations grow with every one",
        "sketch_quality": "down where the input is very wide; the input and the layers at both ends grow in "
        "proportion, and less of it mixes up more values",
    }

    def __init__(
        self,
        sketched_columns: int = 4,
        numbers: int = 8,
        categories: Sequence[int] = (),
        hidden_dim: int = 2048,
        num_layers: int = 4,
        sketch_quality: float = 1.0,
        learning_rate: float = 1e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.rows, self.buckets = sketched_columns * DEPTH, sketch_width(sketch_quality)
        self.sketches = nn.Linear(self.rows * self.buckets, hidden_dim)
        self.numbers = nn.Linear(numbers, hidden_dim)
        self.categories = nn.ModuleList(nn.Embedding(values, hidden_dim) for values in categories)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, self.rows * self.buckets)
        for embedding in self.categories:
            nn.init.normal_(embedding.weight, std=0.02)  # type: ignore[arg-type]

    def represent(self, batch: Events) -> Tensor:
        """What is known of each entity, (entity, hidden_dim).

        Raises:
            ConfigError: for sketches of another width than the model was made for.
        """
        self._check(batch)
        values: Tensor = self.sketches(batch["sketch"].sqrt()) + self.numbers(batch["numeric"])
        for place, embedding in enumerate(self.categories):
            values = values + embedding(batch["categorical"][:, place])
        for block in self.blocks:
            values = block(values)
        known: Tensor = self.norm(values)
        return known

    def _check(self, batch: Events) -> None:
        given, made = batch["sketch"].shape[1], self.rows * self.buckets
        if given != made:
            raise ConfigError(
                f"SketchModel was made for sketches of {made} numbers, the data has {given}; give model.arguments what "
                "features.model_arguments() says, with the same sketch_quality in data.arguments"
            )

    @override
    def forward(self, batch: Events) -> Tensor:
        """Logits of what comes next, (entity, row of buckets, bucket)."""
        logits: Tensor = self.head(self.represent(batch)).view(-1, self.rows, self.buckets)
        return logits

    def loss(self, batch: Events) -> Tensor:
        """Mean divergence of the target from what is foretold, in nats; 0 for a batch without targets."""
        target = batch["target"].view(-1, self.rows, self.buckets)
        missed = functional.kl_div(self(batch).log_softmax(dim=-1), target, reduction="none").sum(dim=-1)
        known = target.sum(dim=-1)
        loss: Tensor = (missed * known).sum() / known.sum().clamp(min=1)
        return loss

    @override
    def training_step(self, batch: Events, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch["sketch"]))
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class _RandomEntities(Dataset[dict[str, Tensor]]):
    """Entities of one event before and one after, each seeded by its number."""

    def __init__(
        self, columns: int, numbers: int, categories: Sequence[int], quality: float, count: int, seed: int
    ) -> None:
        self.columns, self.numbers, self.categories, self.count, self.seed = columns, numbers, categories, count, seed
        self.buckets = sketch_width(quality)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(f"entity {index}: there are {self.count}, numbered from 0")
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        sketch, target = (self._sketch(generator) for _ in range(2))
        chosen = [int(torch.randint(values, (), generator=generator)) for values in self.categories]
        return {
            "entity": torch.tensor(index), "events": torch.tensor(1),
            "numeric": torch.randn(self.numbers, generator=generator),
            "categorical": torch.tensor(chosen, dtype=torch.int64), "sketch": sketch, "target": target,
        }  # fmt: skip

    def _sketch(self, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(self.buckets, (self.columns * DEPTH,), generator=generator)
        return functional.one_hot(chosen, self.buckets).flatten().float()


class Sketches(LightningDataModule):
    """Batches of random entities, in the same order every epoch.

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
