"""Foretold: requests and bytes of a sample that a trial's prediction says, beside what its loader then counts.

    python benchmarks/foretold.py [--layouts 0 1 ...] [--orders random grid block] [--record]

Stores of one field in a simulated cloud, 30 ms to the first byte, 64 requests in flight, batches of 64 samples and 4
ahead: written by zarr-python, whose shards have chunks in Morton's order, by hand with chunks in C order, as other
libraries write them, and built by kit, whose manifest tells sizes. Each store is probed once. Then each order
(random, grid, block) is read for a short epoch, a few batches of it, and longer; without a read cache, with an empty
one ("cold"), and with one that `prefetch` filled half ("half"). A step takes 20 ms, as of a training that waits seldom.
ratio = measured / predicted. What a trial counts at its end are the batches read ahead too, as predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import zarr
from publish import publish
from streaming_store import BATCH_SIZE, Layout, config_of, object_store, write

import kit
from kit.cloud.simulated import SimulatedCloud, simulated_cloud
from kit.config import Config
from kit.data.build.layout import predict_reading
from kit.data.open_dataset import open_dataset
from kit.data.patches.module import PatchData

SITUATION = "same region"
LAYOUTS = (
    Layout(chunk=64, shard=1024),
    Layout(chunk=128, shard=2048),
    Layout(chunk=256),
    Layout(chunk=128, compressed=False),
    Layout(chunk=128, shard=1024, together=False),
)
STEP_SECONDS = 0.02
CACHES = ("none", "cold", "half")


def counted(config: Config) -> dict[str, float]:
    """Requests and bytes of a sample, as a trial counts them when it ends."""
    data = PatchData(config)
    loader = data.train_dataloader()
    epochs = chain.from_iterable(repeat(loader))
    try:
        for _ in islice(epochs, config.trial.max_steps + 1):  # the loop of a Trainer holds one more than it trained on
            time.sleep(STEP_SECONDS)
        counts = loader.counters()
    finally:
        data.teardown()
    return {name: counts[name] / counts["samples_read"] for name in ("requests", "bytes_read")}


# -- stores


def in_c_order(cloud: SimulatedCloud, layout: Layout) -> str:
    """A copy of a sharded store with the chunks of each shard in C order; its path."""
    import google_crc32c
    import obstore

    path = f"{layout.path}-c-order"
    cloud.url(path)
    there, copy = (object_store(cloud.address, one).store for one in (layout.path, path))
    assert layout.shard is not None
    count = (layout.shard // layout.chunk) ** 2
    for listed in chain.from_iterable(obstore.list(there)):
        data = bytes(obstore.get(there, listed["path"]).bytes())
        if "/c/" in listed["path"]:
            index = np.frombuffer(data[-16 * count - 4 : -4], "<u8").reshape(-1, 2).astype(np.int64)
            lengths = index[:, 1]
            begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            new = np.stack([begins, lengths], axis=1).astype("<u8").tobytes()
            body = b"".join(data[first : first + length] for first, length in index.tolist())
            data = body + new + google_crc32c.value(new).to_bytes(4, "little")
        obstore.put(copy, listed["path"], data)
    return path


def built(cloud: SimulatedCloud, layout: Layout) -> str:
    """A copy of a store that kit has built, in the layout that it plans; its path."""
    import xarray

    path = f"{layout.path}-built"
    values = zarr.open_array(object_store(cloud.address, f"{layout.path}/field", read_only=True), mode="r")
    source = xarray.Dataset({"field": (("band", "y", "x"), np.asarray(values[:, :2048, :4096]))})
    config = config_of(layout, cloud.url(path)).replace({"chunking.latency_seconds": 0.03})
    kit.build(config, source=source, progress=False)
    return path


def stores(cloud: SimulatedCloud, layouts: list[Layout]) -> Iterator[tuple[str, Layout, str]]:
    """Names, layouts and paths; each is written when it is asked for."""
    for layout in layouts:
        write(cloud, [layout])
        yield layout.name, layout, layout.path
        if layout is LAYOUTS[0]:
            situation = cloud.dials
            cloud.turn("no limits")
            more = [("the same, C order", in_c_order(cloud, layout)), ("built by kit", built(cloud, layout))]
            cloud.turn(**situation.to_dict())
            for name, path in more:
                yield name, layout, path


# -- rows


def cases() -> Iterator[tuple[str, str, int, int]]:
    """What is read: in words, the cache, samples of an epoch, and steps."""
    for cache in CACHES:
        yield "short epoch", cache, 4 * BATCH_SIZE, 8
    yield "8 batches", "none", 1 << 22, 8
    yield "60 batches", "none", 1 << 22, 60


def row(name: str, config: Config, what: str, cache: str, order: str, folder: str) -> dict[str, Any]:
    if cache != "none":
        config = config.replace({"cache.size_bytes": 4 << 30, "cache.folder": folder})
    if cache == "half":
        fill_half(config)
    dataset = open_dataset(config)
    predicted = predict_reading(config, dataset)
    found = counted(config)
    ratios = {
        "requests": predicted["requests_per_sample"],
        "measured": found["requests"],
        "ratio": ratio(found["requests"], predicted["requests_per_sample"]),
    }
    size = predicted.get("bytes_per_sample")
    sizes = {
        "KiB": size and size / 1024, "measured KiB": found["bytes_read"] / 1024,
        "ratio of bytes": None if size is None else ratio(found["bytes_read"], size),
    }  # fmt: skip
    return {"store": name, "order": order, "read": what, "cache": cache, **ratios, **sizes}


def ratio(measured: float, predicted: float) -> float:
    """Measured / predicted; 1 where a cache gives all, as predicted."""
    return measured / predicted if predicted else math.inf if measured else 1.0


def fill_half(config: Config) -> None:
    def stop(done: int, total: int, _: int) -> None:
        if done >= total / 2:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        kit.data.prefetch(config, progress=stop)


def rows(layouts: list[Layout], orders: Sequence[str]) -> Iterator[dict[str, Any]]:
    with simulated_cloud(SITUATION) as cloud:
        for name, layout, path in stores(cloud, layouts):
            url = cloud.url(path)
            probed = kit.data.probe(url).apply(config_of(layout, url, loader__batches_ahead=4))
            for order in orders:
                for what, cache, samples, steps in cases():
                    changes = {
                        "data.order": order, "data.samples_per_epoch": samples, "trial.max_steps": steps,
                        "trial.warmup_steps": 0, "training.max_epochs": 20,
                    }  # fmt: skip
                    with tempfile.TemporaryDirectory() as folder:
                        yield row(name, probed.replace(changes), what, cache, order, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", type=int, nargs="+", default=[*range(len(LAYOUTS))], help="by their numbers")
    parser.add_argument("--orders", nargs="+", default=["random", "grid", "block"])
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    found = []
    for one in rows([LAYOUTS[number] for number in given.layouts], given.orders):
        found.append(one)
        print({name: f"{value:.3g}" if isinstance(value, float) else value for name, value in one.items()}, flush=True)
    errors = sorted(abs(one["ratio"] - 1) for one in found)
    facts = {
        "median |ratio - 1|": statistics.median(errors), "of 90 % of the rows at most": errors[int(0.9 * len(errors))],
        "within 15 %": f"{sum(error <= 0.15 for error in errors)} of {len(errors)}",
    }  # fmt: skip
    publish("requests of a trial, foretold", found, record=given.record, cloud=SITUATION, **facts)


if __name__ == "__main__":
    main()
