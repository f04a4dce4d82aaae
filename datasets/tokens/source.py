"""Random tokens: sequences to measure a language model with. There is nothing to download and nothing to learn.

Sequence i is drawn from a generator seeded by i: nothing is kept in memory, and any of them comes first. The batch size
is the config's, as for any Dataset. Vocabulary and length fit the model of `recipe.yaml`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Tokens(Dataset[Tensor]):
    """`sequences` of `context` tokens and the one that follows, (context + 1,), int64."""

    def __init__(self, vocabulary: int = 2048, context: int = 192, sequences: int = 4096, seed: int = 0) -> None:
        self.vocabulary, self.context, self.sequences, self.seed = vocabulary, context, sequences, seed

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.sequences:
            raise IndexError(f"sequence {index}: there are {self.sequences}, numbered from 0")
        generator = torch.Generator().manual_seed(self.seed * self.sequences + index)
        return torch.randint(self.vocabulary, (self.context + 1,), generator=generator)
