"""GPT: predicts the next token of random text; a decoder of the GPT-2 family whose size is set by its arguments.

The defaults are GPT-2 small with its vocabulary padded to a multiple of 64: 124,475,904 parameters (124 M). Blocks are
pre-norm, attention is torch's scaled_dot_product_attention with a causal mask, and the embedding of a token is also the
weight of the output layer, so these parameters exist once. A sequence may be shorter than `context`, never longer.
With `window` a token sees only so many, itself among them: scores then grow with the length and not with its square.

`Tokens` are uniformly random and seeded: enough to measure a model, and its loss can fall no lower than the tokens that
are repeated let it. Nothing here reads a file.
"""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from kit.errors import ConfigError
from kit.models.random_data import Field, RandomData


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each beside a shortcut: (batch, token, width) to (batch, token, width)."""

    def __init__(self, width: int, heads: int, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, values: Tensor) -> Tensor:
        values = values + self._attention(self.norm_attention(values))
        change: Tensor = self.perceptron(self.norm_perceptron(values))
        return values + change

    def _attention(self, values: Tensor) -> Tensor:
        split = self.queries_keys_values(values).unflatten(-1, (3, self.heads, -1))
        queries, keys, mixed = split.permute(2, 0, 3, 1, 4)
        seen = attend(queries, keys, mixed, self.window)
        change: Tensor = self.projection(seen.transpose(1, 2).flatten(2))
        return change


def attend(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Causal attention of (batch, head, token, width); with `window`, to the last so many tokens only.

    Queries go in blocks as long as the window, each with its own keys and those of the block before, in which all that
    the window reaches lies. So the scores are (token, 2 window), and the mask is (window, 2 window).
    """
    length = queries.shape[2]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    blocks = -(-length // window)
    padded = [functional.pad(part, (0, 0, 0, blocks * window - length)) for part in (queries, keys, values)]
    asked, known, mixed = (part.reshape(*part.shape[:2], blocks, window, -1) for part in padded)
    place, other = torch.arange(window, device=queries.device), torch.arange(2 * window, device=queries.device)
    seen = (other > place[:, None]) & (other <= place[:, None] + window)
    first = (torch.arange(blocks, device=queries.device) == 0)[:, None, None]
    found = functional.scaled_dot_product_attention(
        asked, _with_block_before(known), _with_block_before(mixed), attn_mask=seen & ~(first & (other < window))
    )
    return found.flatten(2, 3)[:, :, :length]


def _with_block_before(blocks: Tensor) -> Tensor:
    """(batch, head, block, window, width) to the same with the block before in front, zeros before the first."""
    before = functional.pad(blocks[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat([before, blocks], dim=3)


class GPT(LightningModule):
    """A causal language model.

    Args:
        vocabulary: Number of different tokens.
        width: Numbers a token is carried as; a multiple of `heads`.
        heads: Attention heads of a block.
        layers: Blocks.
        context: Longest sequence, in tokens.
        learning_rate: Of AdamW.
        window: Tokens that each one sees, itself among them; None for all before it.

    Raises:
        ConfigError: when `width` is not a multiple of `heads`, and for a window without tokens.
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        context: int = 1024,
        learning_rate: float = 3e-4,
        window: int | None = None,
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"a window of {window} tokens sees nothing; use 1 or more, or none")
        if width % heads:
            raise ConfigError(f"GPT's width {width} cannot be shared by {heads} heads; make it a multiple of {heads}")
        self.save_hyperparameters()
        self.context, self.learning_rate = context, learning_rate
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, window) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialize(layers)
        self.head.weight = self.tokens.weight

    def _initialize(self, layers: int) -> None:
        """GPT-2's: deviation 0.02, and less for what adds up along the shortcuts."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("projection.weight", "perceptron.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, token) to the logits of each next one, (batch, token, vocabulary).

        Raises:
            ConfigError: when the sequence is longer than `context`.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ConfigError(
                f"GPT was made for {self.context} tokens, a sequence has {length}; "
                f"set model.arguments.context: {length}"
            )
        values = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            values = block(values)
        logits: Tensor = self.head(self.norm(values))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the token that follows each, over (batch, token + 1)."""
        logits = self(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch))
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Tokens(RandomData):
    """Random sequences of `context` tokens and the one that follows, (batch, context + 1), int64.

    Args:
        vocabulary: Number of different tokens.
        context: Tokens of a sequence that are read; one more is there to be foretold.
        batch_size: Sequences per batch on each device.
        sequences: Sequences in an epoch.
        seed: Equal seeds give equal sequences.
    """

    def __init__(
        self, vocabulary: int = 50304, context: int = 1024, batch_size: int = 8, sequences: int = 1024, seed: int = 0
    ) -> None:
        super().__init__(Field(shape=(context + 1,), below=vocabulary), batch_size, sequences, seed)
