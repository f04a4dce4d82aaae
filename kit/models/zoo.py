"""Small models of the kinds that differ in memory, random samples for them, and a model of entities and their events.

`ResNet` holds activations of convolutions, `Encoder` attention with dropout, `Recommender` parameters that few samples
touch, `Recurrent` a state that lives through time. With `GPT` and `UNet` they are what kit's predictions are tried on.
The defaults are sizes that people train: ResNet-50, BERT base, 64 million numbers of embeddings.

`RandomData` draws sample i from a generator seeded by i: nothing is kept in memory, samples come in any order, and
equal seeds give equal samples on any machine.

`SketchModel` predicts what an entity will do next from sketches of what it did. A batch is what `kit.data.EventData`
gives (see `kit.data.tables.features`): sketches, numbers and categories of an entity's earlier events, and as target
the sketch of its later ones, so nothing is labelled by hand. The square root of a sketch has length 1 in each row of
buckets, so that rare and frequent values weigh alike; it goes through one linear layer, as the numbers do, to which an
embedding of each category is added. Then come `num_layers` residual blocks and a linear layer that gives a distribution
over each row of buckets. The loss is the Kullback-Leibler divergence of the target from that distribution, in nats,
averaged over the rows of buckets that have a target: 0 when every later event is predicted with its frequency. A model
that gives every bucket of a row the same chance has the logarithm of the width less the entropy of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from kit.data.tables.features import DEPTH, sketch_width
from kit.errors import ConfigError

Pair = tuple[Tensor, Tensor]
"""What goes in, and what should come out."""


class Learner(LightningModule):
    """A module whose `loss` of a batch AdamW lowers."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._logged("loss", batch)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._logged("val_loss", batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._logged("test_loss", batch)

    def masked_mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """The mean of `values` by `weights` over the batches of all ranks, as one rank with all of them would have it.

        Each rank gives its part, times the number of ranks: the mean over the ranks, which ddp and fsdp take of
        gradients, is then that of all. A rank's own mean would make the values of a rank with few of them weigh more.
        Validation takes a rank's own, because its ranks may have different numbers of batches.
        """
        whole = weights.sum().float()
        if self.training and self._trainer is not None and self._trainer.world_size > 1:
            whole = self._trainer.strategy.reduce(whole.detach(), reduce_op="mean")
        return (values * weights).sum() / torch.where(whole > 0, whole, 1.0)

    def _logged(self, name: str, batch: Any) -> Tensor:
        loss = self.loss(batch)
        parts = [batch] if isinstance(batch, Tensor) else [*batch.values()] if isinstance(batch, Mapping) else batch
        self.log(name, loss, batch_size=len(parts[0]), sync_dist=name != "loss")
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Classifier(Learner):
    """A learner whose logits are compared with classes; a batch is (inputs, classes)."""

    @override
    def loss(self, batch: Pair) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut, `4 * width` channels out."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.body = nn.Sequential(
            *_convolution(channels_in, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, channels, 1),
        )
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels_in, channels, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        change: Tensor = self.body(images)
        change += self.shortcut(images)
        return functional.relu(change, inplace=True)


def _convolution(channels_in: int, channels: int, side: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, side, stride=stride, padding=side // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels)


class ResNet(Classifier):
    """Residual convolutions that classify images; the defaults are ResNet-50 (25,557,032 parameters).

    A batch is (batch, 3, height, width) and (batch,) classes.

    Args:
        width: Channels after the first convolution.
        blocks: Blocks of each stage; from one to the next the sides halve and the channels double.
        classes: Number of classes.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000, learning_rate: float = 1e-3
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.stem = nn.Sequential(
            *_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        )
        channels, stages = width, []
        for stage, count in enumerate(blocks):
            for place in range(count):
                stages.append(Bottleneck(channels, width * 2**stage, stride=2 if stage and not place else 1))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, class)."""
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits


class Encoder(Classifier):
    """A transformer encoder that classifies sequences, of torch's own layers; the defaults are BERT base.

    A batch is (batch, token) and (batch,) classes.

    Args:
        vocabulary: Number of different tokens.
        width: Numbers a token is carried as.
        heads: Attention heads of a layer.
        layers: Layers.
        context: Longest sequence, in tokens.
        classes: Number of classes.
        dropout: Fraction of the numbers that is dropped in each layer.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        vocabulary: int = 30522,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        context: int = 512,
        classes: int = 10,
        dropout: float = 0.1,
        learning_rate: float = 3e-4,
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, token) to (batch, class)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.encoder(self.tokens(tokens) + self.positions(places)).mean(dim=1))
        return logits


class Recommender(Learner):
    """Features of many values each, looked up and judged by a perceptron: nearly all parameters are embeddings.

    A batch is (batch, feature) values, each below `values`, and (batch,) answers, 0 or 1.

    Args:
        features: Features of a sample.
        values: Different values of each feature.
        width: Numbers a value is carried as.
        learning_rate: Of AdamW.
    """

    def __init__(self, features: int = 20, values: int = 100_000, width: int = 32, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.tables = nn.ModuleList(nn.Embedding(values, width) for _ in range(features))
        self.judge = nn.Sequential(nn.Linear(features * width, 256), nn.ReLU(), nn.Linear(256, 1))

    @override
    def forward(self, values: Tensor) -> Tensor:
        """(batch, feature) to (batch,) logits."""
        found = [table(column) for table, column in zip(self.tables, values.unbind(1), strict=True)]
        logits: Tensor = self.judge(torch.cat(found, dim=1))
        return logits.squeeze(1)

    @override
    def loss(self, batch: Pair) -> Tensor:
        return functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())


class Recurrent(Learner):
    """An LSTM that predicts the next values of a series from all earlier ones.

    A batch is (batch, time, feature) and the same, one step later.

    Args:
        features: Numbers at each time.
        width: Numbers of the state.
        layers: Layers of the LSTM.
        learning_rate: Of AdamW.
    """

    def __init__(self, features: int = 16, width: int = 512, layers: int = 2, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.memory = nn.LSTM(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, features)

    @override
    def forward(self, series: Tensor) -> Tensor:
        """(batch, time, feature) to the same, one step later."""
        predicted: Tensor = self.head(self.memory(series)[0])
        return predicted

    @override
    def loss(self, batch: Pair) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1])

    def chunk_step(self, chunk: Pair, state: Pair | None) -> tuple[Tensor, Pair]:
        """The loss of a sequence chunk and the state of the LSTM after it (see `kit.train.SequenceChunks`)."""
        values, state = self.memory(chunk[0], state)
        loss = functional.mse_loss(self.head(values), chunk[1])
        self.log("loss", loss, batch_size=len(chunk[0]))
        return loss, state


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
        return self.draw(index, torch.Generator().manual_seed(self.seed * self.samples + index))

    def draw(self, index: int, generator: torch.Generator) -> Any:  # noqa: ARG002
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


class SketchModel(Learner):
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
        super().__init__(learning_rate)
        self.save_hyperparameters()
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
        """The representation of each entity, (entity, hidden_dim).

        Raises:
            ConfigError: for sketches of another width than the model was made for.
        """
        given, made = batch["sketch"].shape[1], self.rows * self.buckets
        if given != made:
            raise ConfigError(
                f"SketchModel was made for sketches of {made} numbers, the data has {given}; give model.arguments what "
                "features.model_arguments() says, with the same sketch_quality in data.arguments"
            )
        values: Tensor = self.sketches(batch["sketch"].sqrt()) + self.numbers(batch["numeric"])
        for place, embedding in enumerate(self.categories):
            values = values + embedding(batch["categorical"][:, place])
        for block in self.blocks:
            values = block(values)
        represented: Tensor = self.norm(values)
        return represented

    @override
    def forward(self, batch: Events) -> Tensor:
        """Logits of what comes next, (entity, row of buckets, bucket)."""
        logits: Tensor = self.head(self.represent(batch)).view(-1, self.rows, self.buckets)
        return logits

    @override
    def loss(self, batch: Events) -> Tensor:
        """Mean divergence of the target from the prediction, in nats; 0 for a batch without targets."""
        target = batch["target"].view(-1, self.rows, self.buckets)
        missed = functional.kl_div(self(batch).log_softmax(dim=-1), target, reduction="none").sum(dim=-1)
        known = target.sum(dim=-1)
        return self.masked_mean(missed, known)
