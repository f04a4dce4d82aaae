"""Data in files: JPEG, HDF5, Zarr, and kit's own store."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipelines import Parts, Pipeline
from pipelines.models import Classifier, convolutions

ROWS, WIDTH = 16_384, 256


class Photos(Dataset):
    """A folder of photographs, made small."""

    def __init__(self, folder, draft=False):
        self.files, self.draft = sorted(Path(folder).glob("*.jpg")), draft

    def __len__(self):
        return 100 * len(self.files)

    def __getitem__(self, index):
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            if self.draft:
                image.draft("RGB", (64, 64))
            small = image.convert("RGB").resize((64, 64))
        return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).float() / 255, index % 10


def photos(folder):
    place = Path(folder, "photos")
    if not place.exists():
        from PIL import Image

        place.mkdir()
        generator = np.random.default_rng(0)
        for number in range(8):
            noise = generator.integers(0, 255, (60, 80, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((1600, 1200)).save(place / f"{number}.jpg", quality=85)
    return str(place)


class Hdf5Rows(Dataset):
    """Opened in the process that reads, as h5py wants it."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r", rdcc_nbytes=0)
        return torch.from_numpy(self.file["x"][index]), int(self.file["y"][index])


def hdf5(folder, rows):
    path = Path(folder, f"rows{rows}.h5")
    if not path.exists():
        import h5py

        values = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).round(1).astype("float32")
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, chunks=(rows, WIDTH), compression="gzip", compression_opts=1)
            file.create_dataset("y", data=np.arange(ROWS) % 10)
    return str(path)


class ZarrStream(IterableDataset):
    """Random crops without an end."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        import zarr

        array = zarr.open_array(self.path, mode="r")
        while True:
            place = random.randrange(array.shape[0])
            yield torch.from_numpy(np.asarray(array[place])).unsqueeze(0).repeat(3, 1, 1), place % 10


def zarr_store(folder, rows):
    path = Path(folder, f"images{rows}.zarr")
    if not path.exists():
        import zarr

        values = np.random.default_rng(0).normal(size=(2048, 32, 32)).round(1).astype("float32")
        array = zarr.create_array(str(path), shape=values.shape, chunks=(rows, 32, 32), dtype="float32")
        array[:] = values
    return str(path)


def mlp():
    return Classifier(
        nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    )


def stack():
    return Classifier(nn.Sequential(
        nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    ))  # fmt: skip


def net():
    return Classifier(convolutions())


class Synthetic(IterableDataset):
    """Simulated on the fly, in one process beside the training."""

    def __iter__(self):
        generator = np.random.default_rng(0)
        while True:
            yield torch.from_numpy(generator.normal(size=(3, 32, 32)).astype("float32")), int(generator.integers(10))


def pipelines(folder):
    def photo_loader(draft):
        return lambda: DataLoader(Photos(photos(folder), draft), batch_size=16, num_workers=1, persistent_workers=True)

    def rows_loader(rows, batch_size=32, workers=0):
        return lambda: DataLoader(
            Hdf5Rows(hdf5(folder, rows)), batch_size=batch_size, shuffle=True, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip

    waits = ("waiting for data",)
    yield Pipeline(
        name="photographs", planted="images decoded at full size", parts=Parts(module=net, data=photo_loader(False)),
        cure=Parts(module=net, data=photo_loader(True)), also=waits,
    )  # fmt: skip
    yield Pipeline(
        name="a row of a large HDF5 chunk", planted="one row of a large chunk", also=waits,
        parts=Parts(module=mlp, data=rows_loader(4096, 8)), cure=Parts(module=mlp, data=rows_loader(16, 8)),
    )  # fmt: skip
    yield Pipeline(
        name="an image of a large Zarr chunk", planted="one row of a large chunk", kind="kept aside", also=waits,
        parts=Parts(module=net, data=lambda: DataLoader(ZarrStream(zarr_store(folder, 1024)), batch_size=16)),
        cure=Parts(module=net, data=lambda: DataLoader(ZarrStream(zarr_store(folder, 1)), batch_size=16)),
    )  # fmt: skip
    yield Pipeline(name="HDF5 in small chunks", parts=Parts(module=stack, data=rows_loader(16, 128, 1)))
    yield Pipeline(
        name="simulated on the fly", parts=Parts(module=net, data=lambda: DataLoader(
            Synthetic(), batch_size=64, num_workers=1)),
    )  # fmt: skip
