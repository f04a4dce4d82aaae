"""Pipelines as examples of other packages have them: OpenCV, TensorBoard, scikit-learn, xarray, webdataset, a memmap.

They were chosen and written before any of the rules that they are about was changed; three plants that took too little
of the time to be faults (scores, a webdataset, an augmentation) were made larger afterwards. `kind` is "example".
"""

from __future__ import annotations

import csv
import io
import random
import tarfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipelines import Parts, Pipeline
from pipelines.files import photos
from pipelines.models import VOCABULARY, Classifier, Gpt, convolutions, pictures

FRAMES, SIDE, COLUMNS = 2048, 32, 64


class OpenCvPhotos(Dataset):
    """As albumentations' examples read: OpenCV, then a resize."""

    def __init__(self, folder, reduced=False):
        self.files, self.reduced = sorted(Path(folder).glob("*.jpg")), reduced

    def __len__(self):
        return 100 * len(self.files)

    def __getitem__(self, index):
        import cv2

        cv2.setNumThreads(0)
        mode = cv2.IMREAD_REDUCED_COLOR_8 if self.reduced else cv2.IMREAD_COLOR
        image = cv2.imread(str(self.files[index % len(self.files)]), mode)
        image = cv2.resize(image, (64, 64), interpolation=cv2.INTER_AREA)
        return torch.from_numpy(image).permute(2, 0, 1).float() / 255, index % 10


class Autoencoder(pl.LightningModule):
    """Logs what it reconstructs as a picture, as Lightning's GAN does in its training step."""

    def __init__(self, every=1):
        super().__init__()
        self.every = every
        self.net = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
            nn.Conv2d(24, 3, 3, padding=1),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, _ = batch
        out = self.net(x)
        if batch_idx % self.every == 0:
            grid = torch.cat([*out[:8].detach().clamp(0, 1)], dim=2).repeat_interleave(8, 1).repeat_interleave(8, 2)
            self.logger.experiment.add_image("reconstructed", grid, self.global_step)
        return nn.functional.mse_loss(out, x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Scored(Classifier):
    """A report of scikit-learn of each batch."""

    every = 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        if batch_idx % self.every == 0:
            from sklearn.metrics import f1_score, precision_recall_fscore_support, roc_auc_score

            labels, scores = y.numpy(), out.detach().softmax(1).numpy()
            f1_score(labels, scores.argmax(1), average="macro", zero_division=0)
            precision_recall_fscore_support(labels, scores.argmax(1), zero_division=0)
            for one in sorted(set(labels.tolist())):
                roc_auc_score(labels == one, scores[:, one])
        return nn.functional.cross_entropy(out, y)


class ScoredSeldom(Scored):
    every = 100


class Weather(Dataset):
    """One time of a NetCDF file, through xarray."""

    def __init__(self, path):
        self.path, self.data = path, None

    def __len__(self):
        return FRAMES

    def __getitem__(self, index):
        import xarray

        if self.data is None:
            self.data = xarray.open_dataset(self.path, engine="h5netcdf")["t"]
        return torch.from_numpy(self.data.isel(time=index).values).unsqueeze(0).repeat(3, 1, 1), index % 10


def netcdf(folder, times):
    path = Path(folder, f"weather{times}.nc")
    if not path.exists():
        import xarray

        values = np.random.default_rng(0).normal(size=(FRAMES, SIDE, SIDE)).round(1).astype("float32")
        data = xarray.DataArray(values, dims=("time", "lat", "lon"), name="t").to_dataset()
        encoding = {"t": {"chunksizes": (times, SIDE, SIDE), "zlib": True, "complevel": 1}}
        data.to_netcdf(path, engine="h5netcdf", encoding=encoding)
    return str(path)


def shards(folder):
    """Tars of 64 × 64 JPEGs with their labels, as webdataset has them."""
    place = Path(folder, "shards")
    if not place.exists():
        from PIL import Image

        place.mkdir()
        generator = np.random.default_rng(0)
        for number in range(4):
            with tarfile.open(place / f"{number}.tar", "w") as tar:
                for sample in range(256):
                    file = io.BytesIO()
                    Image.fromarray(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file, "jpeg")
                    for ending, content in (("jpg", file.getvalue()), ("cls", str(sample % 10).encode())):
                        info = tarfile.TarInfo(f"{number}-{sample:04d}.{ending}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    return sorted(map(str, place.glob("*.tar")))


def tars(folder, workers):
    import webdataset

    data = (
        webdataset.WebDataset(shards(folder), shardshuffle=4, resampled=True).shuffle(100).decode("torchrgb")
        .to_tuple("jpg", "cls").batched(32)
    )  # fmt: skip
    return DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


class Tables(pl.LightningDataModule):
    """Reads its table of text whenever a loader is asked for; epochs are short."""

    def __init__(self, folder, kept=False):
        super().__init__()
        self.path, self.kept, self.loader = Path(folder, "table.csv"), kept, None

    def prepare_data(self):
        if not self.path.exists():
            rows = np.random.default_rng(0).normal(size=(1024, COLUMNS)).round(3)
            with self.path.open("w", newline="") as file:
                csv.writer(file).writerows(rows.tolist())

    def train_dataloader(self):
        if self.loader is None or not self.kept:
            with self.path.open() as file:
                x = torch.tensor([[float(value) for value in row] for row in csv.reader(file)])
            self.loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=128, shuffle=True)
        return self.loader


class Augmented(pl.LightningDataModule):
    """Augments after the transfer, as kornia's examples do on a GPU; here sample by sample."""

    def __init__(self, at_once=False):
        super().__init__()
        self.at_once = at_once

    def train_dataloader(self):
        return pictures()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.at_once:
            return x.flip(3), y
        return torch.stack([self.augmented(one) for one in x]), y

    def augmented(self, image):
        for _ in range(24):
            image = image.roll(random.randrange(4), 2).flip(2) * random.uniform(0.9, 1.1) + 0.01
        return image


class Memmap(IterableDataset):
    """Random pieces of a file of tokens, as nanoGPT takes them."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        data = np.memmap(self.path, dtype=np.uint16, mode="r")
        while True:
            place = random.randrange(len(data) - 65)
            yield {"input_ids": torch.from_numpy(data[place : place + 64].astype(np.int64))}


def memmap(folder):
    path = Path(folder, "tokens.bin")
    if not path.exists():
        np.random.default_rng(0).integers(0, VOCABULARY, 1_000_000).astype(np.uint16).tofile(path)
    return DataLoader(Memmap(path), batch_size=8)


def mlp():
    return Classifier(
        nn.Sequential(nn.Linear(COLUMNS, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
    )


def net():
    return Classifier(convolutions())


def small():
    return Classifier(nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)))


def tensorboard(folder):
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder, name="board")


def pipelines(folder):
    waits = ("waiting for data",)
    example = {"kind": "example"}

    def opencv(reduced):
        return lambda: DataLoader(
            OpenCvPhotos(photos(folder), reduced), batch_size=16, num_workers=1, persistent_workers=True
        )

    def weather(times):
        return lambda: DataLoader(Weather(netcdf(folder, times)), batch_size=8, shuffle=True)

    yield Pipeline(
        name="photographs by OpenCV", planted="images decoded at full size", also=waits, **example,
        parts=Parts(module=net, data=opencv(False)), cure=Parts(module=net, data=opencv(True)),
    )  # fmt: skip
    yield Pipeline(
        name="a picture in TensorBoard in every step", planted="drawing or logging in the step", **example,
        parts=Parts(module=Autoencoder, data=pictures, logger=lambda: tensorboard(folder)),
        cure=Parts(module=lambda: Autoencoder(100), data=pictures, logger=lambda: tensorboard(folder)),
    )  # fmt: skip
    yield Pipeline(
        name="scores by scikit-learn in every step", planted="Python in the step", **example,
        parts=Parts(module=lambda: Scored(convolutions()), data=pictures),
        cure=Parts(module=lambda: ScoredSeldom(convolutions()), data=pictures),
    )  # fmt: skip
    yield Pipeline(
        name="one time of a large NetCDF chunk", planted="one row of a large chunk", also=waits, **example,
        parts=Parts(module=net, data=weather(1024)), cure=Parts(module=net, data=weather(1)),
    )  # fmt: skip
    yield Pipeline(
        name="webdataset in the training process", planted="Python in the data", also=("no prefetch",), **example,
        parts=Parts(module=small, data=lambda: tars(folder, 0)),
        cure=Parts(module=small, data=lambda: tars(folder, 2)),
    )  # fmt: skip
    yield Pipeline(
        name="a table read anew every epoch", planted="loader made anew every epoch", **example,
        parts=Parts(module=mlp, data=lambda: Tables(folder), flags={"reload_dataloaders_every_n_epochs": 1}),
        cure=Parts(module=mlp, data=lambda: Tables(folder, True), flags={"reload_dataloaders_every_n_epochs": 1}),
    )  # fmt: skip
    yield Pipeline(
        name="augmented after the transfer", planted="slow hook", also=("many tiny operations",), **example,
        parts=Parts(module=net, data=Augmented), cure=Parts(module=net, data=lambda: Augmented(True)),
    )  # fmt: skip
    yield Pipeline(name="a memmap of tokens", parts=Parts(module=Gpt, data=lambda: memmap(folder)), **example)
    yield Pipeline(
        name="webdataset with a worker", parts=Parts(module=net, data=lambda: tars(folder, 1)), **example
    )  # fmt: skip
