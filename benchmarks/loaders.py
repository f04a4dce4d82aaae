"""Loaders as people write them, on which a calibration is measured; no rule was tuned on those that are `aside`.

Each is made in a folder that keeps the files it reads. Processes are named where a data set shares its samples out by
itself. The remote one answers 10 ms after it is asked; those in files read from the page cache, as every epoch but the
first does.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import kit
from kit.config import Config

COUNTS = (0, 1, 2, 3, 4, 6, 8)
"""Processes of loaders that wait: up to four to a core of a small machine."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loader; `make` gives what a Trainer takes, from a folder."""

    name: str
    make: Callable[[Path], dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    aside: bool = False


class Sleeping(Dataset[torch.Tensor]):
    """Waits 2 ms for each sample, as for a network."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((64, 64), float(index))


class Computing(Sleeping):
    """Two milliseconds of Python for each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        total = float(sum(number % 7 for number in range(index, index + 30_000)))
        return torch.full((64, 64), total)


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEGs of 640 × 480, decoded and made smaller by Pillow."""

    def __init__(self, folder: Path) -> None:
        from PIL import Image

        place = folder / "photographs"
        self.files = [place / f"{number}.jpg" for number in range(32)]
        if not place.exists():
            place.mkdir()
            generator = np.random.default_rng(0)
            for file in self.files:
                noise = generator.integers(0, 255, (30, 40, 3), dtype=np.uint8)
                Image.fromarray(noise).resize((640, 480)).save(file, quality=90)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            small = np.asarray(image.convert("RGB").resize((224, 224)))
        return torch.from_numpy(small.copy()).permute(2, 0, 1), index % 10


class Volumes(Dataset[torch.Tensor]):
    """Arrays of 3.1 MB from a memory map; a batch of four is 12.6 MB."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "volumes.npy"
        if not self.path.exists():
            np.save(self.path, np.random.default_rng(0).normal(size=(64, 12, 256, 256)).astype(np.float32))

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self.path, mmap_mode="r")[index % 64].copy())


class Sentences(Dataset[list[int]]):
    """Cheap samples of unlike length."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> list[int]:
        return [(index * 31 + place) % 30_000 for place in range(20 + index * 7 % 200)]


def collate(rows: list[list[int]]) -> torch.Tensor:
    """All the work is here: padding, and masking every seventh token."""
    longest = max(map(len, rows))
    return torch.tensor([[token if token % 7 else 1 for token in row] + [0] * (longest - len(row)) for row in rows])


class Remote(Dataset[torch.Tensor]):
    """One object of a bucket for each sample, over HTTP."""

    def __init__(self, url: str) -> None:
        self.url, self.files = url, None

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> torch.Tensor:
        from urllib.request import urlopen

        with urlopen(f"{self.url}/{index % 64}.npy") as answer:
            return torch.from_numpy(np.load(io.BytesIO(answer.read())))


class Hdf5(Dataset[tuple[torch.Tensor, int]]):
    """Rows of a compressed file, opened in the process that reads."""

    def __init__(self, folder: Path) -> None:
        import h5py

        self.path, self.file = folder / "rows.h5", None
        if not self.path.exists():
            values = np.random.default_rng(0).normal(size=(8192, 1024)).round(1).astype(np.float32)
            with h5py.File(self.path, "w") as file:
                file.create_dataset("x", data=values, chunks=(16, 1024), compression="gzip", compression_opts=4)

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r", rdcc_nbytes=0)
        return torch.from_numpy(self.file["x"][index]), index % 10


class Stream(IterableDataset[torch.Tensor]):
    """Reads a log line by line and shares the lines out."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, each = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, 1 << 18, each):
            line = ",".join(str((number * place) % 997) for place in range(400))
            yield torch.tensor([float(word) for word in line.split(",")])


def webdataset_loader(folder: Path) -> dict[str, Any]:
    import webdataset
    from PIL import Image

    shards = [folder / f"shard-{number:03}.tar" for number in range(16)]
    if not shards[0].exists():
        generator = np.random.default_rng(0)
        for number, shard in enumerate(shards):
            with webdataset.TarWriter(str(shard)) as writer:
                for sample in range(64):
                    noise = generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)
                    image = Image.fromarray(noise).resize((256, 256))
                    writer.write({"__key__": f"{number}-{sample}", "jpg": image, "cls": sample % 10})
    data = webdataset.WebDataset([*map(str, shards)], shardshuffle=False, resampled=True).decode("torchrgb")
    return {"train_dataloaders": DataLoader(data.to_tuple("jpg", "cls"), batch_size=16)}


def monai_loader(_: Path) -> dict[str, Any]:
    from monai.data import DataLoader as MonaiLoader
    from monai.data import Dataset as MonaiDataset
    from monai.transforms import Compose, EnsureChannelFirst, RandRotate90, RandSpatialCrop, ScaleIntensity

    generator = np.random.default_rng(0)
    volumes = [generator.normal(size=(64, 64, 64)).astype(np.float32) for _ in range(16)] * 64
    change = Compose([
        EnsureChannelFirst(channel_dim="no_channel"), ScaleIntensity(), RandRotate90(prob=0.5),
        RandSpatialCrop((32, 32, 32), random_size=False),
    ])  # fmt: skip
    return {"train_dataloaders": MonaiLoader(MonaiDataset(volumes, change), batch_size=8, num_workers=0)}


def geometric_loader(_: Path) -> dict[str, Any]:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    generator = torch.Generator().manual_seed(0)
    graphs = [
        Data(x=torch.randn(30, 16, generator=generator), edge_index=torch.randint(0, 30, (2, 90), generator=generator))
        for number in range(512)
    ] * 16
    return {"train_dataloaders": GraphLoader(graphs, batch_size=64, shuffle=True)}


class Tiles(Dataset[torch.Tensor]):
    """Crops of a large picture in a TIFF of tiles, as microscopes write."""

    def __init__(self, folder: Path) -> None:
        import tifffile

        self.path = folder / "tiles.tif"
        if not self.path.exists():
            picture = np.random.default_rng(0).integers(0, 4096, (2048, 2048), dtype=np.uint16)
            tifffile.imwrite(self.path, picture, tile=(256, 256), compression="zlib")

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> torch.Tensor:
        import tifffile
        import zarr

        with tifffile.imread(self.path, aszarr=True) as store:
            row, column = index * 97 % 1792, index * 193 % 1792
            crop = zarr.open(store, mode="r")[row : row + 256, column : column + 256]
        return torch.from_numpy(np.asarray(crop).astype(np.float32))


def plain(dataset: Callable[[Path], Any], **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"train_dataloaders": DataLoader(dataset(folder), **{"batch_size": 8, **options})}


def rows_of_kit(folder: Path) -> dict[str, Any]:
    path = folder / "rows.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).integers(0, 1000, (65_536, 256)).astype(np.uint16))
    return {"datamodule": kit.data.RowData(path, batch_size=256)}


def remote_loader(_: Path) -> dict[str, Any]:
    """A server in a thread, which answers 10 ms after it is asked."""
    body = io.BytesIO()
    np.save(body, np.zeros((64, 64), np.float32))

    class Late(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(0.01)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body.getvalue())))
            self.end_headers()
            self.wfile.write(body.getvalue())

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # with five a connection that is refused waits a second for its next try

    server = Server(("127.0.0.1", 0), Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"train_dataloaders": DataLoader(Remote(f"http://127.0.0.1:{server.server_port}"), batch_size=4)}


def engine_of_kit(folder: Path) -> dict[str, Any]:
    """kit's engine, 30 ms to the first byte, a small store that a cache could hold whole."""
    cloud = OPEN.enter_context(kit.cloud.simulate("no limits"))
    config = engine_config(folder).replace({"data.url": cloud.url("bucket/ocean.zarr")})
    kit.build(config)
    cloud.turn("same region")
    return {"datamodule": kit.data.PatchData(config)}


def engine_config(folder: Path) -> Config:
    return Config.load(Path(__file__).parents[1] / "datasets/ocean/recipe.yaml").replace({
        "trial.folder": str(folder), "loader.batch_size": 2, "data.samples_per_epoch": 1 << 14, "data.order": "random",
        "loader.memory_bytes": 256 << 20, **ENGINE,
    })  # fmt: skip


OPEN = contextlib.ExitStack()
"""What is closed when all is measured."""
ENGINE = {"calibration.candidate_workers": (0,)}
NAMED = {"calibration.candidate_workers": COUNTS}
CASES = (
    Case(name="sleeping", make=plain(lambda _: Sleeping()), settings=NAMED),
    Case(name="Python-bound", make=plain(lambda _: Computing())),
    Case(name="decoding JPEG", make=plain(Photographs, batch_size=16)),
    Case(name="large arrays", make=plain(Volumes, batch_size=4)),
    Case(name="collate-bound", make=plain(lambda _: Sentences(), batch_size=64, collate_fn=collate)),
    Case(name="remote", make=remote_loader, settings=NAMED),
    Case(name="HDF5", make=plain(Hdf5, batch_size=16)),
    Case(name="IterableDataset", make=plain(lambda _: Stream(), batch_size=16), settings={
        "calibration.candidate_workers": (0, 1, 2, 4)}),
    Case(name="WebDataset", make=webdataset_loader, settings={"calibration.candidate_workers": (0, 1, 2, 4)}),
    Case(name="kit's engine, simulated bucket", make=engine_of_kit, settings=ENGINE),
    Case(name="sleeping, a step of 10 ms", make=plain(lambda _: Sleeping()), settings={
        "calibration.candidate_workers": (0, 1, 2, 3, 4), "calibration.step_seconds": 0.01}),
    Case(name="kit's rows", make=rows_of_kit, settings={"calibration.candidate_workers": (0, 1, 2)}),
    Case(name="MONAI's transforms", make=monai_loader, aside=True),
    Case(name="graphs of torch_geometric", make=geometric_loader, aside=True),
    Case(name="tiles of a TIFF", make=plain(Tiles, batch_size=8, shuffle=True), aside=True),
)  # fmt: skip
