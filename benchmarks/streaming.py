"""Streaming: samples per second of kit's engine beside zarr reads one sample at a time, on the same store in one run.

    python benchmarks/streaming.py [--record]

Random patches of three packed variables, from a local folder and from the same folder behind a fixed latency per
request.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from publish import publish
from zarr.abc.store import ByteRequest, Store
from zarr.codecs import ZstdCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from kit.data.dataset import Dataset, open_dataset
from kit.data.engine import Engine
from kit.data.sampling import SamplePlan

VARIABLES = ("temperature", "salinity", "speed")
SHAPE, CHUNK, SHARD, PATCH = (16, 512, 512), (4, 64, 64), (16, 256, 256), (4, 64, 64)
BATCH_SIZE = 16
LATENCY_SECONDS = 0.02
NAIVE_THREADS = 8


class SlowStore(WrapperStore[Store]):
    """The same bytes, each request answered after a fixed time."""

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        await asyncio.sleep(LATENCY_SECONDS)
        return await self._store.get(key, prototype, byte_range)


@dataclass(frozen=True, kw_only=True)
class SlowDataset(Dataset):
    def open_store(self) -> Store:
        return SlowStore(super().open_store())


def write_store(folder: str) -> None:
    """Smooth fields with noise, packed in 16 bits: they compress about as measured fields do."""
    group = zarr.open_group(folder, mode="w")
    rng = np.random.default_rng(0)
    waves = np.sin(np.linspace(0, 20, SHAPE[1]))[:, None] * np.cos(np.linspace(0, 30, SHAPE[2]))
    for name in VARIABLES:
        field = 8000 * waves + rng.normal(0, 40, SHAPE)
        array = group.create_array(
            name, shape=SHAPE, chunks=CHUNK, shards=SHARD, dtype="int16",
            compressors=[ZstdCodec(level=3, checksum=True)], dimension_names=["time", "lat", "lon"],
            attributes={"scale_factor": 0.01},
        )  # fmt: skip
        array[...] = field.astype(np.int16)


def offsets(samples: int) -> Iterator[np.ndarray]:
    plan = SamplePlan(
        shape=SHAPE, patch=PATCH, order="random", stride=PATCH, samples_per_epoch=samples, batch_size=BATCH_SIZE,
        world_size=1, seed=0, shuffle=True, drop_last=True,
    )  # fmt: skip
    return (plan.batch(0, step, 0) for step in range(plan.batches_per_epoch))


def read_sample(arrays: list[Any], offset: np.ndarray) -> np.ndarray:
    region = tuple(slice(first, first + side) for first, side in zip(offset.tolist(), PATCH, strict=True))
    return np.stack([array[region] * np.float32(0.01) for array in arrays])


def naive(dataset: Dataset, samples: int) -> None:
    """As a Dataset with `__getitem__` does it in the training process."""
    group = zarr.open_group(dataset.open_store(), mode="r")
    arrays = [group[name] for name in VARIABLES]
    for batch in offsets(samples):
        np.stack([read_sample(arrays, offset) for offset in batch])


def threads(dataset: Dataset, samples: int) -> None:
    """The same, the samples of a batch read by a pool of threads."""
    group = zarr.open_group(dataset.open_store(), mode="r")
    arrays = [group[name] for name in VARIABLES]
    with ThreadPoolExecutor(NAIVE_THREADS) as pool:
        for batch in offsets(samples):
            np.stack(list(pool.map(lambda offset: read_sample(arrays, offset), batch)))


def engine(dataset: Dataset, samples: int) -> None:
    with Engine(dataset, VARIABLES, requests_in_flight=64, decode_threads=2, batches_ahead=4) as reader:
        for _ in reader.stream(offsets(samples), PATCH):
            pass


def samples_per_second(work: Callable[[Dataset, int], None], dataset: Dataset, samples: int) -> float:
    start = time.perf_counter()
    work(dataset, samples)
    return samples / (time.perf_counter() - start)


def measure() -> dict[str, dict[str, float]]:
    """`{store: {reader: samples per second}}`; slow readers read fewer samples."""
    with tempfile.TemporaryDirectory() as folder:
        write_store(folder)
        near = open_dataset(folder)
        far = SlowDataset(**{name: getattr(near, name) for name in near.__dataclass_fields__})
        return {
            "local folder": {
                "zarr, one sample at a time": samples_per_second(naive, near, 64),
                f"zarr, {NAIVE_THREADS} threads": samples_per_second(threads, near, 64),
                "kit engine": samples_per_second(engine, near, 512),
            },
            f"{LATENCY_SECONDS * 1000:.0f} ms a request": {
                "zarr, one sample at a time": samples_per_second(naive, far, 16),
                f"zarr, {NAIVE_THREADS} threads": samples_per_second(threads, far, 64),
                "kit engine": samples_per_second(engine, far, 512),
            },
        }


def main() -> None:
    rows = [
        {"store": store, "reader": reader, "samples/s": rate, "ratio": rate / next(iter(rates.values()))}
        for store, rates in measure().items()
        for reader, rate in rates.items()
    ]
    publish("samples per second of random patches", rows, zarr=zarr.__version__)


if __name__ == "__main__":
    main()
