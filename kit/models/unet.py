"""UNet: forecasts the last time slice of a patch from its first ones; size is set by `width` and `depth`.

It predicts the change from the latest slice it sees, so that an untrained network is exactly persistence ("tomorrow is
like today"), and pays the mean squared error over the elements that are valid. Missing elements are neither read nor
scored. The mean is over the valid elements of all ranks, so that gradients are those of one large batch on one rank.
With accumulation each micro-batch has a mean of its own: one with fewer valid elements then weighs more per element.

The channels are `width` at full resolution and double at each of `depth` halvings. Any spatial size works: it is padded
at its far edges to a multiple of 2**depth and cropped again.
"""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from kit.errors import ConfigError
from kit.models.zoo import Learner


class Batch(TypedDict):
    """What `kit.data.PatchData` yields."""

    values: Tensor
    """(batch, variable, time, lat, lon), float32, in standard deviations."""
    valid: Tensor
    """The same shape, bool: False where the value is missing."""


class ConvolutionBlock(nn.Module):
    """Two convolutions beside a shortcut: (batch, channel, lat, lon) to (batch, channel, lat, lon)."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(channels_in, channels, 1)
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(math.gcd(8, channels), channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(math.gcd(8, channels), channels),
            nn.SiLU(),
        )

    def forward(self, values: Tensor) -> Tensor:
        change: Tensor = self.body(values)
        kept: Tensor = self.shortcut(values)
        return kept + change


class UNet(Learner):
    """Forecast of gridded fields.

    Args:
        variables: Variables in a patch.
        history: Time slices the forecast is made from.
        width: Channels at full resolution.
        depth: Halvings of the resolution.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, variables: int = 3, history: int = 1, width: int = 16, depth: int = 3, learning_rate: float = 1e-3
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.variables, self.history, self.depth = variables, history, depth
        channels = [width * 2**level for level in range(depth + 1)]
        inputs = [variables * history, *channels[:-1]]
        pairs = list(zip(channels[1:], channels[:-1], strict=True))
        self.encoder = nn.ModuleList(
            ConvolutionBlock(before, after) for before, after in zip(inputs, channels, strict=True)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, stride=2) for deep, shallow in pairs)
        self.decoder = nn.ModuleList(ConvolutionBlock(deep, shallow) for deep, shallow in pairs)
        self.head = nn.Conv2d(width, variables, 1)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    @override
    def forward(self, past: Tensor) -> Tensor:
        """(batch, variable, history, lat, lon) to the slice after it, (batch, variable, lat, lon)."""
        height, breadth = past.shape[-2:]
        multiple = 2**self.depth
        padding = 0, -breadth % multiple, 0, -height % multiple
        features = functional.pad(past.flatten(1, 2), padding, mode="replicate")
        kept: list[Tensor] = []
        for level, block in enumerate(self.encoder):
            features = block(features if level == 0 else functional.avg_pool2d(features, 2))
            kept.append(features)
        features = kept.pop()
        for up, block in reversed(list(zip(self.up, self.decoder, strict=True))):
            features = block(torch.cat([up(features), kept.pop()], dim=1))
        change: Tensor = self.head(features)[..., :height, :breadth]
        return past[:, :, -1] + change

    @override
    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error over the valid elements of the last slice.

        Raises:
            ConfigError: when the patch has other variables or too few time slices.
        """
        values, valid = batch["values"], batch["valid"]
        self._check(values)
        values = values.where(valid, 0.0)
        error: Tensor = (self(values[:, :, : self.history]) - values[:, :, -1]) ** 2
        return self.masked_mean(error, valid[:, :, -1])

    def _check(self, values: Tensor) -> None:
        if values.ndim != 5:
            raise ConfigError(f"UNet takes (batch, variable, time, lat, lon), not shape {tuple(values.shape)}")
        variables, time = values.shape[1:3]
        if variables != self.variables:
            wanted = f"model.arguments.variables: {variables}, or name {self.variables} in data.variables"
            raise ConfigError(f"UNet was made for {self.variables} variables, a patch has {variables}; set {wanted}")
        if time <= self.history:
            wanted = f"data.patch to {self.history + 1} along its first dimension, or a smaller model.arguments.history"
            raise ConfigError(
                f"a patch has {time} time slices, {self.history} of history and 1 to forecast need "
                f"{self.history + 1}; set {wanted}"
            )
