"""One model of each kind that behaves differently in memory, small enough to read, real enough to be measured.

`ResNet` holds activations of convolutions, `Encoder` attention with dropout, `Recommender` parameters that few samples
touch, `Recurrent` a state that lives through time. With `GPT` and `UNet` they are what kit's predictions are tried on.
The defaults are sizes that people train: ResNet-50, BERT base, 64 million numbers of embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

Pair = tuple[Tensor, Tensor]
"""What goes in, and what should come out."""


class _Learner(LightningModule):
    """Says by `loss` what a batch costs; AdamW lowers it."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def loss(self, batch: Pair) -> Tensor:
        raise NotImplementedError

    @override
    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


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


class ResNet(_Learner):
    """Residual convolutions that classify images; the defaults are ResNet-50 (25,557,032 parameters).

    A batch is (batch, 3, height, width) and (batch,) classes.

    Args:
        width: Channels after the first convolution.
        blocks: Blocks of each stage; from one to the next the sides halve and the channels double.
        classes: Number of classes.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        width: int = 64,
        blocks: Sequence[int] = (3, 4, 6, 3),
        classes: int = 1000,
        learning_rate: float = 1e-3,
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

    @override
    def loss(self, batch: Pair) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


class Encoder(_Learner):
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

    @override
    def loss(self, batch: Pair) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


class Recommender(_Learner):
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


class Recurrent(_Learner):
    """An LSTM that foretells the next values of a series from all those before.

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
        foretold: Tensor = self.head(self.memory(series)[0])
        return foretold

    @override
    def loss(self, batch: Pair) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1])

    def chunk_step(self, chunk: Pair, state: Pair | None) -> tuple[Tensor, Pair]:
        """The loss of a sequence chunk and the state of the LSTM after it (see `kit.train.SequenceChunks`)."""
        values, state = self.memory(chunk[0], state)
        loss = functional.mse_loss(self.head(values), chunk[1])
        self.log("loss", loss, batch_size=len(chunk[0]))
        return loss, state
