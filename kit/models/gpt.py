"""GPT: predicts the next token of random text; a decoder of the GPT-2 family whose size is set by its arguments.

The defaults are GPT-2 small with its vocabulary padded to a multiple of 64: 124,475,904 parameters (124 M). Blocks are
pre-norm, attention is torch's scaled_dot_product_attention with a causal mask, and the embedding of a token is also the
weight of the output layer, so these parameters exist once. A sequence may be shorter than `context`, never longer.
With `window` a token sees only so many, itself among them: scores then grow with the length and not with its square.

It can be trained in sequence chunks (`levers.sequence_chunk`): the keys and values of earlier tokens are the state, all
of them, or as many as the window reaches. The loss is that of the whole sequence; the gradient is not quite: it ends at
the state, so that no token teaches the keys and values of an earlier chunk.

`Tokens` are uniformly random and seeded: enough to measure a model, and its loss falls only as far as repeated tokens
allow. Nothing here reads a file.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from kit.errors import ConfigError
from kit.models.zoo import Field, Learner, RandomData

Seen = tuple[()] | tuple[Tensor, Tensor]
"""Keys and values of earlier tokens, (batch, head, token, width) each, as one block computed them; () of none."""
ChunkState = tuple[int, list[Seen]]
"""Tokens before a sequence chunk, and what each block has seen of them."""


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

    def forward(self, values: Tensor, seen: Seen | None = None) -> Tensor | tuple[Tensor, Seen]:
        """The values of a whole sequence; after tokens already `seen`, also what later tokens will see."""
        values, now = self._attended(values, seen)
        values = values + self.perceptron(self.norm_perceptron(values))
        return values if seen is None else (values, now)

    def _attended(self, values: Tensor, seen: Seen | None) -> tuple[Tensor, Seen]:
        split = self.queries_keys_values(self.norm_attention(values)).unflatten(-1, (3, self.heads, -1))
        queries, keys, mixed = split.permute(2, 0, 3, 1, 4)
        if seen:
            keys, mixed = torch.cat([seen[0], keys], dim=2), torch.cat([seen[1], mixed], dim=2)
        found = attend(queries, keys, mixed, self.window)
        values = values + self.projection(found.transpose(1, 2).flatten(2))
        if seen is None:
            return values, ()
        # A copy of what the window still reaches, which does not keep the rest alive.
        first = 0 if self.window is None else max(0, keys.shape[2] - self.window + 1)
        return values, (keys[:, :, first:].detach().clone(), mixed[:, :, first:].detach().clone())


def attend(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Causal attention of (batch, head, token, width); with `window`, to the last so many tokens only.

    The queries are those of the last tokens; keys and values may begin earlier. Beyond one window, queries go in blocks
    as long as it, each with its own keys and those of the block before, in which all that the window reaches lies. So
    the scores are (token, 2 window), and the mask is (window, 2 window).
    """
    length, known = queries.shape[2], keys.shape[2]
    if known == length and (window is None or length <= window):
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    if window is None or length <= window:
        mask = _reach(length, known, known - length, window or known, queries.device)
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return _attend_in_blocks(queries, keys, values, window)


def _reach(length: int, known: int, earlier: int, window: int, device: torch.device) -> Tensor:
    """Which of `known` tokens each of `length` sees, (length, known), the first of which stands at `earlier`."""
    own = torch.arange(earlier, earlier + length, device=device)[:, None]
    other = torch.arange(known, device=device)
    return (other <= own) & (other > own - window)


def _attend_in_blocks(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    length, earlier = queries.shape[2], min(window, keys.shape[2] - queries.shape[2])
    blocks = -(-length // window)
    after = blocks * window - length
    asked = _blocks(functional.pad(queries, (0, 0, 0, after)), window)
    keys, values = (
        _blocks(functional.pad(part[:, :, -(length + earlier) :], (0, 0, window - earlier, after)), window)
        for part in (keys, values)
    )
    mask = _reach(window, 2 * window, window, window, queries.device)
    first = (torch.arange(blocks, device=queries.device) == 0)[:, None, None]
    absent = torch.arange(2 * window, device=queries.device) < window - earlier
    found = functional.scaled_dot_product_attention(
        asked, _with_block_before(keys), _with_block_before(values), attn_mask=mask & ~(first & absent)
    )
    return found.flatten(2, 3)[:, :, :length]


def _blocks(tokens: Tensor, size: int) -> Tensor:
    """(batch, head, token, width) to (batch, head, block, size, width)."""
    return tokens.reshape(*tokens.shape[:2], -1, size, tokens.shape[3])


def _with_block_before(blocks: Tensor) -> Tensor:
    """(batch, head, 1 + block, window, width) to each block but the first with the one before in front."""
    return torch.cat([blocks[:, :, :-1], blocks[:, :, 1:]], dim=3)


class GPT(Learner):
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
        super().__init__(learning_rate)
        if window is not None and window < 1:
            raise ConfigError(f"a window of {window} tokens sees nothing; use 1 or more, or none")
        if width % heads:
            raise ConfigError(f"GPT's width {width} cannot be shared by {heads} heads; make it a multiple of {heads}")
        self.save_hyperparameters()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, window) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # As GPT-2: deviation 0.02, and less for what adds up along the shortcuts.
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("projection.weight", "perceptron.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, token) to the logits of each next one, (batch, token, vocabulary).

        Raises:
            ConfigError: when the sequence is longer than `context`.
        """
        values = self._embedded(tokens, 0)
        for block in self.blocks:
            values = block(values)
        logits: Tensor = self.head(self.norm(values))
        return logits

    def _embedded(self, tokens: Tensor, before: int) -> Tensor:
        """Tokens that stand after so many others, as blocks take them."""
        length = before + tokens.shape[1]
        if length > self.context:
            raise ConfigError(
                f"GPT was made for {self.context} tokens, a sequence has {length}; "
                f"set model.arguments.context: {length}"
            )
        values: Tensor = self.tokens(tokens) + self.positions(torch.arange(before, length, device=tokens.device))
        return values

    @override
    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the token that follows each, over (batch, token + 1)."""
        return _cross_entropy(self(batch[:, :-1]), batch[:, 1:])

    def sequence_chunks(self, batch: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        """(batch, token + 1) cut into chunks of at most `length` tokens, each with those that follow them."""
        ends = range(length, batch.shape[1] - 1 + length, length)
        tokens, following = batch[:, :-1], batch[:, 1:]
        return [(tokens[:, end - length : end], following[:, end - length : end]) for end in ends]

    def chunk_step(self, chunk: tuple[Tensor, Tensor], state: ChunkState | None) -> tuple[Tensor, ChunkState]:
        """The loss of a sequence chunk, and the keys and values that the next one sees (`kit.train.SequenceChunks`).

        The numbers are those of the whole sequence. The gradient ends at the state: no token teaches the keys and
        values of an earlier chunk.
        """
        tokens, following = chunk
        before, seen = state or (0, [()] * len(self.blocks))
        values, now = self._embedded(tokens, before), []
        for block, of_block in zip(self.blocks, seen, strict=True):
            values, kept = block(values, of_block)
            now.append(kept)
        loss = _cross_entropy(self.head(self.norm(values)), following)
        self.log("loss", loss, batch_size=len(tokens))
        return loss, (before + tokens.shape[1], now)


def _cross_entropy(logits: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class Tokens(RandomData):
    """Random sequences of `context` tokens and the one that follows, (batch, context + 1), int64.

    Args:
        vocabulary: Number of different tokens.
        context: Tokens of a sequence that are read; one more is there to be predicted.
        batch_size: Sequences per batch on each device.
        sequences: Sequences in an epoch.
        seed: Equal seeds give equal sequences.
    """

    def __init__(
        self, vocabulary: int = 50304, context: int = 1024, batch_size: int = 8, sequences: int = 1024, seed: int = 0
    ) -> None:
        super().__init__(Field(shape=(context + 1,), below=vocabulary), batch_size, sequences, seed)
