"""What the host does beside the step: callbacks, hooks, drawing, checkpoints, threads, garbage."""

from __future__ import annotations

import gc
import io
import json
import threading

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipelines import Parts, Pipeline
from pipelines.models import Classifier, WordModel, convolutions, pictures, series, words


class Segmenter(pl.LightningModule):
    """Draws its prediction every so many steps."""

    def __init__(self, every=1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
            nn.Conv2d(24, 1, 3, padding=1),
        )  # fmt: skip
        self.every = every

    def training_step(self, batch, batch_idx):
        image, mask = batch
        out = self.net(image)
        if batch_idx % self.every == 0:
            self.log_prediction(image[0, 0], out[0, 0])
        return nn.functional.binary_cross_entropy_with_logits(out, mask)

    def log_prediction(self, image, out):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4, 2))
        left, right = figure.subplots(1, 2)
        left.imshow(image.numpy())
        right.imshow(out.detach().numpy())
        figure.savefig(io.BytesIO(), format="png")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def masks():
    x = torch.randn(256, 1, 64, 64)
    return DataLoader(TensorDataset(x, (x > 0).float()), batch_size=16)


class WeightWatcher(pl.Callback):
    """Keeps a histogram of the weights, made in Python."""

    def __init__(self, every=1):
        self.every, self.histograms = every, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % self.every == 0:
            self.histograms = [self.histogram(parameter) for parameter in module.parameters()]

    def histogram(self, parameter):
        counts = {}
        for value in parameter.detach().flatten()[:2000].tolist():
            bin_ = round(value, 2)
            counts[bin_] = counts.get(bin_, 0) + 1
        return counts


class Heartbeat(pl.Callback):
    """Reports how the machine does, from a thread that never rests."""

    def on_fit_start(self, trainer, module):
        self.stopped = threading.Event()
        threading.Thread(target=self.report, daemon=True, name="heartbeat").start()

    def report(self):
        while not self.stopped.is_set():
            state = {f"metric{i}": [j * 0.5 for j in range(50)] for i in range(50)}
            self.last = sum(sum(values) for values in state.values()) + len(json.dumps(len(state)))

    def on_fit_end(self, trainer, module):
        self.stopped.set()


class Forecaster(pl.LightningModule):
    """Many small operators, as decoders of several heads have."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(8, 64) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(64, 8) for _ in range(2))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = torch.zeros(())
        for cell, head in zip(self.cells, self.heads, strict=True):
            state = torch.zeros(len(x), 64)
            for t in range(x.shape[1] - 1):
                state = cell(x[:, t], state)
                loss = loss + nn.functional.mse_loss(head(state), x[:, t + 1])
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Tidy(pl.LightningModule):
    """A network whose author frees memory after every step, with a large index in the process."""

    def __init__(self, collect=True):
        super().__init__()
        self.net, self.collect = convolutions(), collect

    def on_fit_start(self):
        self.index = {i: [i, (i, str(i))] for i in range(300_000)}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.collect:
            gc.collect()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def large():
    """Half a second of writing, a tenth of training."""
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 10)))


def saved(folder, every):
    return [ModelCheckpoint(dirpath=f"{folder}/checkpoints{every}", every_n_train_steps=every, save_top_k=-1)]


def pipelines(folder):
    yield Pipeline(
        name="a figure in every step", planted="drawing or logging in the step",
        parts=Parts(module=Segmenter, data=masks),
        cure=Parts(module=lambda: Segmenter(50), data=masks),
    )  # fmt: skip
    yield Pipeline(
        name="histograms in a callback", planted="slow hook",
        parts=Parts(module=WordModel, data=words, callbacks=lambda: [WeightWatcher()]),
        cure=Parts(module=WordModel, data=words, callbacks=lambda: [WeightWatcher(100)]),
    )  # fmt: skip
    yield Pipeline(
        name="a busy thread", planted="interpreter held by a thread", kind="kept aside",
        also=("many tiny operations",),
        parts=Parts(module=Forecaster, data=series, callbacks=lambda: [Heartbeat()]),
        cure=Parts(module=Forecaster, data=series),
    )  # fmt: skip
    yield Pipeline(
        name="gc.collect() after every step", planted="garbage collection",
        parts=Parts(module=Tidy, data=pictures), cure=Parts(module=lambda: Tidy(collect=False), data=pictures),
    )  # fmt: skip
    yield Pipeline(
        name="a checkpoint every step", planted="checkpoints too often", kind="kept aside",
        parts=Parts(module=large, data=pictures, callbacks=lambda: saved(folder, 1)),
        cure=Parts(module=large, data=pictures, callbacks=lambda: saved(folder, 1000)),
    )  # fmt: skip
