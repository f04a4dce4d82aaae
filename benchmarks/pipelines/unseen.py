"""Ten pipelines that came after the rules: tokenizers, pandas, npz files, SciPy, Lightning's own callbacks and flags.

They were written before kit was asked about any of them, and no rule was changed before the first table was recorded.
`kind` is "unseen".
"""

from __future__ import annotations

import copy
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pipelines import Parts, Pipeline
from pipelines.models import (
    LONGER,
    VOCABULARY,
    Bert,
    Classifier,
    Gpt,
    Recommender,
    Series,
    convolutions,
    ratings,
    series,
    tokens,
)

WORDS, COLUMNS, SIDE = 400, 64, 32


def tokenizer():
    """A fast tokenizer of transformers, trained on words that are made up."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    made.train_from_iterator(texts(200), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")


def texts(count):
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return [
        " ".join("".join(generator.choice(letters, generator.integers(2, 12))) for _ in range(WORDS))
        for _ in range(count)
    ]


class Reviews(pl.LightningDataModule):
    """Tokenizes each batch when it is put together, as many examples of transformers do."""

    def __init__(self, workers):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        words = tokenizer()

        def collate(rows):
            found = words([text for text, _ in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
            return found["input_ids"], torch.tensor([label for _, label in rows])

        rows = [(text, number % 2) for number, text in enumerate(texts(64))] * 64
        return DataLoader(
            rows, batch_size=16, collate_fn=collate, num_workers=self.workers, persistent_workers=self.workers > 0
        )


class Frame(Dataset):
    """A row of a pandas frame of numbers and words for each sample."""

    def __init__(self, at_once=False):
        import pandas as pd

        generator = np.random.default_rng(0)
        self.frame = pd.DataFrame({f"x{number}": generator.normal(size=4096) for number in range(COLUMNS)})
        self.frame["kind"] = generator.choice(["red", "green", "blue"], 4096)
        self.table = torch.tensor(self.frame.drop(columns="kind").to_numpy(np.float32)) if at_once else None
        self.codes = torch.tensor(self.frame["kind"].map({"red": 0, "green": 1, "blue": 2}).to_numpy())

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        if self.table is not None:
            return self.table[index], self.codes[index]
        row = self.frame.iloc[index]
        kind = {"red": 0, "green": 1, "blue": 2}[row["kind"]]
        return torch.tensor(row.drop("kind").to_numpy(np.float32)), kind


class Archive(Dataset):
    """Takes one image of a compressed npz file for each sample."""

    def __init__(self, path, opened=False):
        self.path = path
        self.images = np.load(path)["images"] if opened else None

    def __len__(self):
        return 512

    def __getitem__(self, index):
        images = np.load(self.path)["images"] if self.images is None else self.images
        return torch.from_numpy(images[index]).float() / 255, index % 10


def archive(folder):
    path = Path(folder, "images.npz")
    if not path.exists():
        images = np.random.default_rng(0).integers(0, 40, (512, 3, SIDE, SIDE), dtype=np.uint8)
        np.savez_compressed(path, images=images)
    return path


class Spectrograms(Dataset):
    """Half a second of noise, as SciPy's spectrogram of it."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        from scipy.signal import spectrogram

        wave = np.random.default_rng(index).normal(size=8000)
        _, _, power = spectrogram(wave, fs=16000, nperseg=256)
        image = torch.from_numpy(np.log(power[:96, :32] + 1e-9)).float()
        return nn.functional.pad(image.view(3, 32, -1), (0, SIDE - image.shape[1])), index % 10


class AveragedWeights(pl.Callback):
    """Keeps a moving average of the weights beside the module."""

    def __init__(self, every):
        self.every, self.average = every, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % self.every:
            return
        now = copy.deepcopy(pl_module.state_dict())
        if self.average is not None:
            now = {name: 0.999 * self.average[name] + 0.001 * value for name, value in now.items()}
        self.average = now


class GradientNorms(Gpt):
    """Logs the norm of each parameter's gradient, as Lightning's page on debugging shows."""

    every = 1

    def on_before_optimizer_step(self, optimizer):
        if self.global_step % self.every == 0:
            self.log_dict(grad_norm(self, norm_type=2))


class GradientNormsSeldom(GradientNorms):
    every = 50


class ManySamples(Dataset):
    """Twenty million samples that cost nothing to read."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((3, SIDE, SIDE), (index % 7) / 7), index % 10


def net():
    return Classifier(convolutions())


def rows():
    return Classifier(nn.Sequential(nn.Linear(COLUMNS, 256), nn.ReLU(), nn.Linear(256, 3)))


def token_batches():
    return DataLoader([{"input_ids": row} for row in tokens()], batch_size=8, shuffle=True)


def pipelines(folder):
    waits, unseen = ("waiting for data",), {"kind": "unseen"}
    short = {"limit_train_batches": 10}

    def sampled(length):
        return lambda: DataLoader(ManySamples(length), batch_size=32, shuffle=True)

    yield Pipeline(
        name="tokenized in the collate function", planted="no prefetch", also=("Python in the data", *waits), **unseen,
        parts=Parts(module=Bert, data=lambda: Reviews(0)), cure=Parts(module=Bert, data=lambda: Reviews(1)),
    )  # fmt: skip
    yield Pipeline(
        name="a pandas row for each sample", planted="Python in the data", also=("no prefetch", *waits), **unseen,
        parts=Parts(module=rows, data=lambda: DataLoader(Frame(), batch_size=64, shuffle=True)),
        cure=Parts(module=rows, data=lambda: DataLoader(Frame(True), batch_size=64, shuffle=True)),
    )  # fmt: skip
    yield Pipeline(
        name="an image of a compressed npz", planted="one row of a large chunk", also=("no prefetch", *waits), **unseen,
        parts=Parts(module=net, data=lambda: DataLoader(Archive(archive(folder)), batch_size=16, shuffle=True)),
        cure=Parts(module=net, data=lambda: DataLoader(Archive(archive(folder), True), batch_size=16, shuffle=True)),
    )  # fmt: skip
    yield Pipeline(
        name="anomaly detection left on", planted="anomaly detection", also=("many tiny operations",), **unseen,
        parts=Parts(module=Series, data=series, config=LONGER, flags={"detect_anomaly": True}),
        cure=Parts(module=Series, data=series, config=LONGER),
    )  # fmt: skip
    yield Pipeline(
        name="weights averaged by deepcopy", planted="slow hook", also=("optimizer larger than the work",), **unseen,
        parts=Parts(module=Recommender, data=ratings, callbacks=lambda: [AveragedWeights(1)]),
        cure=Parts(module=Recommender, data=ratings, callbacks=lambda: [AveragedWeights(50)]),
    )  # fmt: skip
    yield Pipeline(
        name="every gradient's norm in every step", planted="slow hook", **unseen,
        also=("drawing or logging in the step", "many tiny operations", "sync in the step"),
        parts=Parts(module=GradientNorms, data=token_batches),
        cure=Parts(module=GradientNormsSeldom, data=token_batches),
    )  # fmt: skip
    yield Pipeline(
        name="twenty million samples shuffled anew", planted="order drawn anew every epoch", also=waits, **unseen,
        parts=Parts(module=net, data=sampled(20_000_000), flags=short),
        cure=Parts(module=net, data=sampled(20_000), flags=short),
    )  # fmt: skip
    yield Pipeline(
        name="spectrograms by a worker", **unseen,
        parts=Parts(
            module=lambda: Classifier(nn.Sequential(nn.Upsample(scale_factor=2), convolutions())),
            data=lambda: DataLoader(Spectrograms(), batch_size=16, num_workers=1, persistent_workers=True),
        ),
    )  # fmt: skip
    yield Pipeline(
        name="stochastic weight averaging", **unseen,
        parts=Parts(
            module=Gpt, data=token_batches,
            callbacks=lambda: [pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
        ),
    )  # fmt: skip
    yield Pipeline(
        name="clipped and accumulated", **unseen,
        parts=Parts(
            module=Gpt, data=token_batches,
            config={"training.gradient_clip_norm": 1.0, "levers.accumulate_grad_batches": 2},
        ),
    )  # fmt: skip
