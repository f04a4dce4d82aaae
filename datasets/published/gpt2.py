"""GPT-2 as a book writes it: every operation of attention, norms and GELU by itself, or torch's own in their place.

Written after the text of Raschka's *LLMs-from-scratch*, chapter 5, whose table of GPU memory notebook 12 predicts: the
head has weights of its own, dropout follows attention and perceptron, and gradients are cleared before the forward
pass. `native` takes torch's LayerNorm and GELU, `fused` its scaled dot-product attention.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 50_257, 1024, 768, 12, 12, 0.1


class Gpt2(LightningModule):
    """124 million parameters, and 38 million of the head; trained with AdamW."""

    def __init__(self, native: bool = False, fused: bool = False, learning_rate: float = 5e-4) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(native, fused) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH) if native else Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(embedded))))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:  # noqa: ARG002
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)


class Block(nn.Module):
    """One layer."""

    def __init__(self, native: bool, fused: bool) -> None:
        super().__init__()
        self.attention = FusedAttention() if fused else Attention()
        gelu = nn.GELU(approximate="tanh") if native else Gelu()
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if native else Norm() for _ in range(2))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, values: Tensor) -> Tensor:
        values = self.dropout(self.attention(self.norms[0](values))) + values
        kept: Tensor = self.dropout(self.perceptron(self.norms[1](values))) + values
        return kept


class Attention(nn.Module):
    """Scores are a tensor, masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.outward, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = (part(values).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.inward)
        scores = query @ key.transpose(2, 3)
        length = values.shape[1]
        scores.masked_fill_(torch.ones(length, length, device=values.device).triu(1).bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        mixed: Tensor = self.outward((weights @ value).transpose(1, 2).flatten(2))
        return mixed


class FusedAttention(nn.Module):
    """The scores are never written down."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        parts = self.inward(values).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rate = DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=True)
        kept: Tensor = self.outward(mixed.transpose(1, 2).flatten(2))
        return kept


class Norm(nn.Module):
    """LayerNorm, operation by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        mean, variance = values.mean(-1, keepdim=True), values.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((values - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class Gelu(nn.Module):
    """GELU by its tanh, operation by operation."""

    def forward(self, values: Tensor) -> Tensor:
        inner = values + 0.044715 * torch.pow(values, 3)
        return 0.5 * values * (1 + torch.tanh((2 / torch.pi) ** 0.5 * inner))


class Tokens(Dataset[Tensor]):
    """Random tokens, (CONTEXT + 1,), int64."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
