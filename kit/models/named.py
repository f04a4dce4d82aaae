"""Models of transformers and timm by their name; TextData: text files and JSON lines as tokens.

`model.target: hf:gpt2` is `Transformer` and `timm:resnet18` is `ImageModel`, each with that name.

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
from kit.errors import ConfigError, Problem, did_you_mean, first_line
from kit.models.zoo import Classifier, Learner

_INSTALL, _INSTALL_TIMM = "pip install 'kit[transformers]'", "pip install 'kit[timm]'"
_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


MASKED_FRACTION = 0.15
"""Tokens that a masked language model has to guess, as BERT does (arXiv:1810.04805)."""
_TASKS = {
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "masked-lm": ("AutoModelForMaskedLM", "MASKED_LM"),
    "causal-lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "image-classification": ("AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
}
_PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}


class Transformer(Learner):
    """A model of the library transformers, trained for the task that its architecture is made for.

    A batch of tokens is (batch, token + 1): a causal model predicts each next token; a masked one the tokens that are
    hidden from it, `MASKED_FRACTION` of them; one of encoder and decoder the second half from the first. A batch of
    images is (batch, 3, height, width) and (batch,) classes. A dict, as data of the library gives it, holds what its
    model takes, with `labels`.

    Args:
        name: An architecture such as `gpt2`, `bert`, `t5` or `vit`, or a folder that holds a model.
        settings: Entries of its configuration, such as `{"n_layer": 2, "vocab_size": 256}`.
        method: A method of peft with its settings, such as `{"peft_type": "LORA", "r": 8}`; None trains all weights.
        learning_rate: Of AdamW.
        task: `causal-lm`, `masked-lm`, `seq2seq-lm`, `image-classification`, or `auto`.

    Raises:
        ConfigError: for a name that is neither, a setting or method that does not exist, a task that the architecture
            has no model for, and a package that is absent.
    """

    def __init__(
        self,
        name: str = "gpt2",
        settings: Mapping[str, Any] | None = None,
        method: Mapping[str, Any] | None = None,
        learning_rate: float = 3e-4,
        task: str = "auto",
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.model, self.task = _built(name, dict(settings or {}), task)
        self.masked_token = _masked_token(self.model.config)
        if method is not None:
            self.model = _adapted(self.model, {"task_type": _PEFT_TASKS.get(self.task), **method})

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Tokens (batch, token) to logits (batch, token, vocabulary), or images to logits (batch, class)."""
        if self.task == "image-classification":
            logits: Tensor = self.model(pixel_values=inputs).logits
            return logits
        more = {"use_cache": False} if self.task == "causal-lm" else {}
        tokens: Tensor = self.model(input_ids=inputs, **more).logits
        return tokens

    @override
    def loss(self, batch: Any) -> Tensor:
        """Mean cross-entropy of what has to be predicted; of a dict, the loss that the model itself computes."""
        more = {"use_cache": False} if self.task == "causal-lm" else {}
        if isinstance(batch, Mapping):
            own: Tensor | None = self.model(**batch, **more).loss
            if own is None:
                raise ConfigError([Problem("data", f"a batch of {', '.join(batch)} has no loss; add its labels")])
            return own
        if self.task == "image-classification":
            return functional.cross_entropy(self(batch[0]), batch[1])
        if self.task == "seq2seq-lm":
            half = batch.shape[1] // 2
            loss: Tensor = self.model(input_ids=batch[:, :half], labels=batch[:, half:].contiguous()).loss
            return loss
        if self.task == "masked-lm":
            tokens = batch[:, :-1]
            hidden = torch.rand(tokens.shape, device=tokens.device) < MASKED_FRACTION
            missed = functional.cross_entropy(
                self(tokens.masked_fill(hidden, self.masked_token)).flatten(0, 1), tokens.flatten(), reduction="none"
            )
            return self.masked_mean(missed, hidden.flatten())
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _trained(self, self.learning_rate)


class ImageModel(Classifier):
    """A model of the library timm; a batch is (batch, 3, height, width) and (batch,) classes.

    Args:
        name: As timm lists it, such as `resnet18` or `vit_tiny_patch16_224`.
        classes: Number of classes.
        settings: More arguments of `timm.create_model`, such as `{"img_size": 32, "drop_path_rate": 0.1}`.
        method: A method of peft with its settings, such as `{"peft_type": "LORA", "target_modules": ["qkv"]}`; None
            trains all weights.
        learning_rate: Of AdamW.

    Raises:
        ConfigError: for a name or setting that timm does not know, and a package that is absent.
    """

    def __init__(
        self,
        name: str = "resnet18",
        classes: int = 1000,
        settings: Mapping[str, Any] | None = None,
        method: Mapping[str, Any] | None = None,
        learning_rate: float = 3e-4,
    ) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.model = _image_model(name, classes, dict(settings or {}))
        if method is not None:
            self.model = _adapted(self.model, dict(method))

    @override
    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, class)."""
        logits: Tensor = self.model(images)
        return logits

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _trained(self, self.learning_rate)


def _trained(module: Learner, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW on what a method of peft has left to be trained."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=learning_rate)


def _image_model(name: str, classes: int, settings: dict[str, Any]) -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"{name} is a model of timm, which {_why_no_timm(error)}") from None
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models(), "see timm.list_models()")
        raise ConfigError(f"timm has no model {name!r}{hint}")
    try:
        return timm.create_model(name, pretrained=False, num_classes=classes, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"timm does not make {name} with {settings}: {first_line(error)}") from None


def _why_no_timm(error: ImportError | RuntimeError) -> str:
    """What is absent, and the way to it: timm imports torchvision, whose operators only load into torch's own build."""
    absent = getattr(error, "name", None) or ""
    if absent.partition(".")[0] == "timm":
        return f"is not installed; {_INSTALL_TIMM}"
    if "torchvision" not in f"{absent} {error}":
        return f"cannot be imported ({first_line(error)}); {_INSTALL_TIMM}"
    is_absent = isinstance(error, ModuleNotFoundError) and absent == "torchvision"
    why = "is not installed" if is_absent else f"is of another build than torch ({first_line(error)})"
    way = f"install the torchvision that was made for torch {torch.__version__}, from the index that torch came from"
    return f"imports torchvision, and that {why}; {way}"


def _masked_token(config: Any) -> int:
    """What stands for a hidden token: that of the configuration, or the last of the vocabulary."""
    found = getattr(config, "mask_token_id", None)
    return int(getattr(config, "vocab_size", 1)) - 1 if found is None else int(found)


def _built(name: str, settings: dict[str, Any], task: str) -> tuple[Any, str]:
    """The model, and the task that it is made for."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig
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
    task = _task_of(config, task, name)
    if task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # as T5 has been trained
    kind: Any = getattr(transformers, _TASKS[task][0])
    try:
        if any(folder.glob("*.safetensors")) and here:
            return kind.from_pretrained(folder, config=config, local_files_only=True), task
        return kind.from_config(config), task
    except ValueError as error:
        raise ConfigError(f"{name} cannot be made for {task}: {first_line(error)}") from None


def _task_of(config: Any, task: str, name: str) -> str:
    """The task of an architecture: encoder and decoder first, then masked, because BERT can be made causal too."""
    from transformers.models.auto import modeling_auto

    if task != "auto" and task not in _TASKS:
        raise ConfigError(f"task {task!r} is none of {', '.join(_TASKS)}{did_you_mean(task, list(_TASKS))}")
    mappings = {one: getattr(modeling_auto, f"MODEL_FOR_{words}_MAPPING") for one, (_, words) in _TASKS.items()}
    known = [one for one, models in mappings.items() if type(config) in models]
    if not known or task not in ("auto", *known):
        able = f"for {', '.join(known)}" if known else "for no task that kit trains"
        asked = "a model" if task == "auto" else f"one for {task}"
        raise ConfigError(
            f"transformers makes {name} {able}, but {asked} was asked for; train it in a module of your own"
        )
    if task == "auto" and known[0] == "causal-lm" and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"the encoder of {name} reads neither tokens nor images, which kit's batches are; train it in a module of "
            "your own, or its decoder alone with task: causal-lm"
        )
    return known[0] if task == "auto" else task


def _adapted(model: Any, method: dict[str, Any]) -> Any:
    try:
        from peft import get_peft_config, get_peft_model
    except ImportError:
        raise ConfigError(f"{method} is a method of peft, which is not installed; {_INSTALL}") from None
    try:
        return get_peft_model(model, get_peft_config(method))
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
