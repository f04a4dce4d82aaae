"""Models of others on data in memory: healthy ones of several sizes, and faults of the step itself."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import Transformer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

from pipelines import Parts, Pipeline

VOCABULARY = 2000


def tokens(samples=2048, length=64, vocabulary=VOCABULARY):
    return torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))


class Classifier(pl.LightningModule):
    """Any network on (x, y)."""

    def __init__(self, net, lr=1e-3):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


# -- transformers


class Bert(pl.LightningModule):
    def __init__(self, layers=2, width=128):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.bert = BertForSequenceClassification(BertConfig(
            vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=4 * width,
        ))  # fmt: skip

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        return self.bert(input_ids=ids, labels=labels).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-5)


def sentences(batch_size, samples=2048):
    ids = tokens(samples)
    return DataLoader(TensorDataset(ids, ids[:, 0] % 2), batch_size=batch_size, shuffle=True)


class Gpt(pl.LightningModule):
    def __init__(self, layers=2, width=64, lr=3e-4):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt = GPT2LMHeadModel(GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0,
            eos_token_id=0,
        ))  # fmt: skip
        self.lr = lr

    def step(self, batch):
        return self.gpt(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class TextModule(pl.LightningDataModule):
    """As from datasets.load_dataset(...).with_format("torch"): dictionaries of columns."""

    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        rows = [{"input_ids": row} for row in tokens(1024)]
        self.train, self.val = rows[:768], rows[768:]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


def resnet():
    from transformers import ResNetConfig, ResNetModel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = ResNetModel(ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1]))
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.body(x).pooler_output.flatten(1))

    return Classifier(Net())


def vit():
    from transformers import ViTConfig, ViTModel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = ViTModel(ViTConfig(
                hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=384, image_size=32,
                patch_size=8,
            ))  # fmt: skip
            self.head = nn.Linear(96, 10)

        def forward(self, x):
            return self.head(self.body(x).pooler_output)

    return Classifier(Net())


def pictures(batch_size=32):
    x = torch.randn(512, 3, 32, 32)
    return DataLoader(TensorDataset(x, torch.randint(0, 10, (512,))), batch_size=batch_size, shuffle=True)


# -- Lightning's demos and torch.nn


class WordModel(pl.LightningModule):
    """Lightning's demo transformer on tokens in memory."""

    def __init__(self):
        super().__init__()
        self.model = Transformer(vocab_size=VOCABULARY, ninp=96, nhead=4, nhid=192, nlayers=2)

    def training_step(self, batch, batch_idx):
        source, target = batch
        return nn.functional.nll_loss(self.model(source, target), target.view(-1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def words():
    ids = tokens(1024, 36)
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=8)


class Series(pl.LightningModule):
    """An LSTM that forecasts the next value."""

    def __init__(self, hidden=64):
        super().__init__()
        self.lstm = nn.LSTM(8, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, 8)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        seen, _ = self.lstm(x[:, :-1])
        return nn.functional.mse_loss(self.out(seen), x[:, 1:])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def series():
    return DataLoader(TensorDataset(torch.randn(1024, 24, 8)), batch_size=64, shuffle=True)


class OfManyLengths(Dataset):
    """Series of 12 to 300 steps, few of them long, as sentences and utterances are."""

    def __init__(self):
        few = torch.distributions.Pareto(12.0, 1.5).sample((4096,))
        self.lengths = few.clamp(12, 300).long()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.randn(int(self.lengths[index]), 8)


class LikeLengths(Sampler):
    """Batches of like lengths, from blocks drawn at random."""

    def __init__(self, lengths, size=32):
        self.lengths, self.size = lengths, size

    def __len__(self):
        return -(-len(self.lengths) // self.size)

    def __iter__(self):
        blocks = torch.randperm(len(self.lengths)).split(50 * self.size)
        batches = [one for block in blocks for one in block[self.lengths[block].argsort()].split(self.size)]
        return (batches[place].tolist() for place in torch.randperm(len(batches)))


def filled_up(samples):
    return (nn.utils.rnn.pad_sequence(samples, batch_first=True),)


def many_lengths(sorts=False):
    data = OfManyLengths()
    if sorts:
        return DataLoader(data, batch_sampler=LikeLengths(data.lengths), collate_fn=filled_up)
    return DataLoader(data, batch_size=32, shuffle=True, collate_fn=filled_up)


def at_once(batch_size, *tensors):
    """Batches cut from tensors in one go, as torch's documentation has it."""
    data = TensorDataset(*tensors)
    return DataLoader(data, sampler=BatchSampler(RandomSampler(data), batch_size, drop_last=False), batch_size=None)


def perceptron():
    """scikit-learn's MLPClassifier: one hidden layer of 100, batches of 200."""
    return Classifier(nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)))


class ByAdamW(Classifier):
    def __init__(self, fused=None):
        layers = [nn.Linear(512, 1536), nn.GELU(), nn.Linear(1536, 1536), nn.GELU(), nn.Linear(1536, 1536), nn.GELU()]
        super().__init__(nn.Sequential(*layers, nn.Linear(1536, 10)))
        self.fused = fused

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused)


def rows_of_512():
    return at_once(64, torch.rand(4096, 512), torch.randint(0, 10, (4096,)))


def digits():
    return at_once(200, torch.rand(20_000, 64), torch.randint(0, 10, (20_000,)))


def boring():
    return DataLoader(RandomDataset(32, 4096), batch_size=64)


# -- faults of the step


class Recommender(pl.LightningModule):
    """A table of many users, of which a batch sees a few."""

    sparse = False

    def __init__(self, users=100_000, width=32):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=self.sparse)
        self.tower = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch, batch_idx):
        user, rating = batch
        return nn.functional.mse_loss(self.tower(self.users(user)).squeeze(1), rating)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SparseRecommender(Recommender):
    sparse = True

    def configure_optimizers(self):
        self.automatic_optimization = False
        return [torch.optim.SparseAdam([self.users.weight]), torch.optim.AdamW(self.tower.parameters())]

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()


def ratings():
    return at_once(256, torch.randint(0, 100_000, (50_000,)), torch.rand(50_000))


class Hard(Classifier):
    """Counts how many samples are hard, one after another."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        hard = 0
        for loss in losses:
            if loss.item() > 2.5:
                hard += 1
        self.log("hard", float(hard))
        return losses.mean()


class HardAtOnce(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        self.log("hard", (losses > 2.5).sum().float())
        return losses.mean()


def wide():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def many_digits():
    return at_once(256, torch.rand(20_000, 64), torch.randint(0, 10, (20_000,)))


class InMemory(Dataset):
    """Sentences that the caller leaves kit to batch."""

    def __init__(self):
        self.ids = tokens(4096, 16)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], self.ids[index, 0] % 2


class Remembering(Classifier):
    """Keeps what it saw and said of every step, for a plot at the end."""

    def __init__(self, net, keep=True):
        super().__init__(net)
        self.said, self.keep = [], keep

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        if self.keep:
            self.said.append((x, out, y))
        return nn.functional.cross_entropy(out, y)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


LONGER = {"trial.max_steps": 200, "trial.warmup_steps": 10}
"""Of steps that take a few milliseconds."""


def pipelines(folder):
    text = {"trial.validation_batches": 4, "trial.sanity_batches": 0}
    yield Pipeline(name="BERT, batches of 16", parts=Parts(module=Bert, data=lambda: sentences(16)))
    yield Pipeline(name="ResNet of transformers", parts=Parts(module=resnet, data=pictures))
    yield Pipeline(name="ViT of transformers", parts=Parts(module=vit, data=pictures), kind="kept aside")
    yield Pipeline(name="Lightning's demo transformer", parts=Parts(module=WordModel, data=words))
    yield Pipeline(name="LSTM", parts=Parts(module=Series, data=series))
    yield Pipeline(
        name="scikit-learn's perceptron", parts=Parts(module=perceptron, data=digits, config=LONGER),
        also=("drawing or logging in the step",),  # self.log takes 0.4 of 2.7 ms, 1.15 to 1.3 × without it
    )  # fmt: skip
    yield Pipeline(name="BoringModel", parts=Parts(module=BoringModel, data=boring), kind="kept aside")
    yield Pipeline(
        name="GPT-2, validated every 2 steps", planted="validation too often",
        parts=Parts(module=Gpt, data=TextModule, config={**text, "trial.validate_every_steps": 2}),
        cure=Parts(module=Gpt, data=TextModule, config={**text, "trial.validate_every_steps": 18}),
    )  # fmt: skip
    yield Pipeline(
        name="recommender, dense AdamW", planted="optimizer larger than the work",
        parts=Parts(module=Recommender, data=ratings),
        cure=Parts(module=SparseRecommender, data=ratings, config=LONGER),
    )  # fmt: skip
    yield Pipeline(
        name="series filled up to the longest", planted="padding",
        parts=Parts(module=Series, data=many_lengths, config=LONGER),
        cure=Parts(module=Series, data=lambda: many_lengths(sorts=True), config=LONGER),
    )  # fmt: skip
    yield Pipeline(
        name="wide perceptron, AdamW as it comes", planted="optimizer not fused", also=("page faults",),
        parts=Parts(module=ByAdamW, data=rows_of_512),
        cure=Parts(module=lambda: ByAdamW(fused=True), data=rows_of_512),
    )  # fmt: skip
    yield Pipeline(
        name="loss by loss", planted="sync in the step", also=("many tiny operations",),
        parts=Parts(module=lambda: Hard(wide()), data=many_digits, config=LONGER),
        cure=Parts(module=lambda: HardAtOnce(wide()), data=many_digits, config=LONGER),
    )  # fmt: skip
    yield Pipeline(
        name="BERT, batches of 2", planted="batch too small", also=("many tiny operations",),
        parts=Parts(module=lambda: Bert(4, 64), data=InMemory, config={"loader.batch_size": 2}),
        cure=Parts(module=lambda: Bert(4, 64), data=InMemory, config={"loader.batch_size": 32}),
    )  # fmt: skip
    yield Pipeline(
        name="outputs kept for a plot", planted="memory that grows", speeds_up=False, kind="kept aside",
        parts=Parts(module=lambda: Remembering(convolutions()), data=lambda: pictures(64)),
        cure=Parts(module=lambda: Remembering(convolutions(), keep=False), data=lambda: pictures(64)),
    )  # fmt: skip
