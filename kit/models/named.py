"""Transformer: a causal language model of transformers by its name; TextData: text files and JSON lines as its tokens.

Nothing is downloaded. A name such as `gpt2` or `llama` is an architecture, built from its configuration with random
weights; a folder that `save_pretrained` wrote gives its configuration and its weights. A method of peft, such as LoRA,
leaves the weights alone and trains a few beside them.

`TextData` reads its files once, when training begins, and keeps the tokens of all of them in memory: two bytes each
where the tokenizer knows no more than 65,536, else four. They lie in one row, with the token that ends a text behind
each one that the tokenizer has such a token for, and are cut into sequences that touch each other in one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from kit.config import Config, resolve_path
from kit.data.patches.module import ConfiguredData
from kit.errors import ConfigError, did_you_mean
from kit.models.zoo import Learner

_INSTALL = "pip install 'kit[transformers]'"
_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Transformer(Learner):
    """A causal language model of the library transformers; a batch is (batch, token + 1).

    Args:
        name: An architecture such as `gpt2`, or a folder that holds a model.
        settings: Entries of its configuration, such as `{"n_layer": 2, "vocab_size": 256}`.
        method: A method of peft with its settings, such as `{"peft_type": "LORA", "r": 8}`; None trains all weights.
        learning_rate: Of AdamW.

    Raises:
        ConfigError: for a name that is neither, a setting or method that does not exist, and a package that is absent.
    """

    def __init__(
        self,
        name: str = "gpt2",
        settings: Mapping[str, Any] | None = None,
        method: Mapping[str, Any] | None = None,
        learning_rate: float = 3e-4,
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.model = _built(name, dict(settings or {}))
        if method is not None:
            self.model = _adapted(self.model, dict(method))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, token) to the logits of each next one, (batch, token, vocabulary)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    @override
    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the token that follows each."""
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def _built(name: str, settings: dict[str, Any]) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(f"{name} is a model of transformers, which is not installed; {_INSTALL}") from None
    folder = resolve_path(name)
    here = (folder / "config.json").is_file()
    if not here and name not in CONFIG_MAPPING:
        hint = did_you_mean(name, list(CONFIG_MAPPING), "give such as gpt2, or a folder with config.json")
        raise ConfigError(f"transformers knows no architecture {name!r}, and {folder} holds no model{hint}")
    config = AutoConfig.from_pretrained(folder, local_files_only=True) if here else AutoConfig.for_model(name)
    unknown = next((key for key in settings if not hasattr(config, key)), None)
    if unknown is not None:
        raise ConfigError(f"{name} has no setting {unknown!r}{did_you_mean(unknown, list(config.to_dict()))}")
    for key, value in settings.items():
        setattr(config, key, value)
    try:
        if any(folder.glob("*.safetensors")) and here:
            return AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True)
        return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{name} cannot be made as a language model: {reason}") from None


def _adapted(model: Any, method: dict[str, Any]) -> Any:
    try:
        from peft import get_peft_config, get_peft_model
    except ImportError:
        raise ConfigError(f"{method} is a method of peft, which is not installed; {_INSTALL}") from None
    try:
        return get_peft_model(model, get_peft_config({"task_type": "CAUSAL_LM", **method}))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"peft does not take {method}: {error}") from None


class _Sequences(Dataset[Tensor]):
    """Sequences of `context` tokens and the one that follows, end to end."""

    def __init__(self, tokens: np.ndarray[Any, Any], context: int) -> None:
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index}: there are {len(self)}, numbered from 0")
        first = index * self._context
        return torch.from_numpy(self._tokens[first : first + self._context + 1].astype(np.int64))


class TextData(ConfiguredData):
    """Sequences of tokens of text files, shuffled; a batch is (batch, context + 1), int64.

    Args:
        files: A file or several, `.jsonl` for JSON lines, anything else plain text; `*` stands for any name.
        tokenizer: A `tokenizer.json`, or a folder with one; None for the bytes of the text (256 tokens).
        context: Tokens of a sequence that are read; one more is there to be predicted.
        field: Of each JSON line, the one that holds the text.
        batch_size: Sequences per batch on each device; None takes `loader.batch_size`.

    Raises:
        ConfigError: when there is no file, no tokenizer, or less text than one sequence.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: str | None = None,
        context: int = 1024,
        field: str = "text",
        batch_size: int | None = None,
    ) -> None:
        super().__init__(Config(), {} if batch_size is None else {"loader.batch_size": batch_size})
        self.files, self.tokenizer, self.context, self.field = files, tokenizer, context, field
        self._sequences: _Sequences | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        self._use_committed()
        if self._sequences is not None:
            return
        encode, size = _encoder(self.tokenizer)
        kind = np.uint16 if size <= 1 << 16 else np.uint32
        parts = [np.asarray(encode(text), kind) for file in self._found() for text in _texts(file, self.field)]
        tokens = np.concatenate(parts) if parts else np.empty(0, kind)
        if len(tokens) <= self.context:
            raise ConfigError(
                f"{self.files} holds {len(tokens):,} tokens, fewer than a context of {self.context} and 1"
            )
        self._sequences = _Sequences(tokens, self.context)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        self.setup()
        assert self._sequences is not None
        order = torch.Generator().manual_seed(self.config.training.seed)
        return DataLoader(self._sequences, self.config.loader.batch_size, shuffle=True, generator=order)

    def _found(self) -> list[Path]:
        names = [self.files] if isinstance(self.files, str) else [*self.files]
        found: list[Path] = []
        for name in names:
            path = resolve_path(name)
            some = sorted(path.parent.glob(path.name)) if "*" in path.name else [path] if path.is_file() else []
            if not some:
                raise ConfigError(f"there is no file {path}; give text files or JSON lines")
            found += some
        return found


def _texts(file: Path, field: str) -> Iterator[str]:
    """The text of a file, or of each of its JSON lines."""
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        yield file.read_text(encoding="utf-8")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line) if line.strip() else None
                text = None if found is None else found[field]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: no text under {field!r} ({error})") from None
            if text is not None:
                yield str(text)


def _encoder(tokenizer: str | None) -> tuple[Callable[[str], Sequence[int] | np.ndarray[Any, Any]], int]:
    """From a text to its tokens, and how many different ones there are."""
    if tokenizer is None:
        return lambda text: np.frombuffer(text.encode(), np.uint8), 256
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"{tokenizer} is read by tokenizers, which is not installed; {_INSTALL}") from None
    path = resolve_path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer {file}; give a tokenizer.json, or the folder that holds it")
    known = Tokenizer.from_file(str(file))
    end = next((found for name in _END_TOKENS if (found := known.token_to_id(name)) is not None), None)
    after = [] if end is None else [end]
    return lambda text: [*known.encode(text).ids, *after], known.get_vocab_size()
