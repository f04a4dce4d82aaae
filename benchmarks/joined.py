"""Joined: samples per second of several stores as one dataset from a simulated cloud, and what a second epoch asks for.

    python benchmarks/joined.py [--before FOLDER] [--joins years members ...] [--record]

Eight joins of stores that xarray and zarr-python wrote, in a cloud with 30 ms to the first byte on the same cores;
random patches, in batches of 32, with 64 requests in flight and 4 batches ahead. "samples/s" is without a cache; the
median of rounds in turn with their least and most. "requests" are those for objects with a cache in a folder: of the
first epoch, of the next one in the same process, and of one in a new process, which asks a store that kit did not build
for the tag of each object once. "predicted" is what kit expects of the first epoch without a
cache, over what it then counts. With `--before` another checkout of kit reads the same stores in turn, and every batch
of both is compared by its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from publish import publish

ANSWER = "answer "
ROUNDS = 3
DAYS, LAT, LON = 48, 192, 192
NAMES = ("years", "members", "days beside hours", "a degree beside a half", "static", "gaps", "built", "from a disk")


def patches(cells: int, **more: int) -> dict[str, int]:
    return {**more, "lat": cells, "lon": cells}


# -- in a process of one version of kit


def serve() -> None:
    """Answer lines of JSON: a config's changes and what to do with it."""
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(json.loads(line))), flush=True)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    from kit.config import Config
    from kit.data.build.layout import predict_reading
    from kit.data.open_dataset import open_dataset
    from kit.data.patches.module import PatchData

    os.environ |= question["environment"]
    config = Config().replace(question["changes"])
    dataset, epochs = open_dataset(config), question.get("epochs", 1)
    data, digest = PatchData(config, dataset), hashlib.sha256()
    loader = data.train_dataloader()
    try:
        batches = iter(loader)
        next(batches)  # opening is no part of the pace
        samples, began, cpu = 0, time.perf_counter(), time.process_time()
        for batch in batches:
            samples += len(batch["values"])
            if question.get("digest"):
                digest.update(batch["values"].numpy().tobytes() + batch["valid"].numpy().tobytes())
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        counts = loader.counters()
        asked = [counts["requests"]]
        for _ in range(epochs - 1):
            for _ in loader:
                pass
            asked.append(loader.counters()["requests"] - sum(asked))
    finally:
        data.teardown()
    steps = loader.plan.batches_per_epoch
    predicted = predict_reading(config.replace({"trial.max_steps": steps, "trial.warmup_steps": 0}), dataset)
    return {
        "samples_per_second": samples / seconds, "cpu_ms": 1000 * cpu / samples, "digest": digest.hexdigest(),
        "requests": counts["requests"], "asked": asked,
        "predicted": predicted["requests_per_sample"] * counts["samples"],
    }  # fmt: skip


# -- the stores


def fields(days: range, seed: int, lat: int = LAT, lon: int = LON, hours: int = 24) -> Any:
    """Smooth with noise, rounded as archives round it, at every so many hours of these days."""
    import xarray

    steps = np.arange(days.start * 24, days.stop * 24, hours)
    y, x = np.linspace(0, 3, lat), np.linspace(0, 4, lon)
    noise = np.random.default_rng(seed).normal(size=(len(steps), lat, lon))
    values = 10 * np.sin(y)[:, None] * np.cos(x) + np.sin(steps / 40)[:, None, None] + 0.1 * noise
    coordinates = {
        "time": np.datetime64("2001-01-01", "ns") + steps * np.timedelta64(1, "h"),
        "lat": np.linspace(-30, 30, lat), "lon": np.linspace(0, 60, lon),
    }  # fmt: skip
    rounded = (np.round(values * 256) / 256).astype("float32")
    return xarray.Dataset({"wind": (("time", "lat", "lon"), rounded)}, coordinates)


def to_zarr(url: str, made: Any, zarr_format: int, chunks: tuple[int, ...], **more: Any) -> None:
    from kit.data.stores.url import open_store

    name = next(iter(made.data_vars))
    made.to_zarr(
        open_store(url, read_only=False), encoding={name: {"chunks": chunks, **more}}, zarr_format=zarr_format,
        consolidated=False,
    )  # fmt: skip


def years(cloud: Any, _: Path) -> dict[str, Any]:
    """Version 3, zstd, by xarray."""
    urls = [cloud.url(f"joins/years{number}.zarr") for number in range(3)]
    for number, url in enumerate(urls):
        to_zarr(url, fields(range(number * DAYS, (number + 1) * DAYS), number), 3, (8, 48, 48))
    return {"urls": urls, "data.join": "time", "data.patch": patches(32, time=4)}


def members(cloud: Any, _: Path) -> dict[str, Any]:
    """Version 2, blosc, by xarray; an element of a new dimension each."""
    from numcodecs import Blosc

    urls = [cloud.url(f"joins/member{number}.zarr") for number in range(4)]
    for number, url in enumerate(urls):
        to_zarr(url, fields(range(DAYS), number), 2, (8, 48, 48), compressors=[Blosc("lz4")])
    return {"urls": urls, "data.join": "member", "data.patch": patches(32, member=2, time=4)}


def days_beside_hours(cloud: Any, _: Path) -> dict[str, Any]:
    """Hours in shards of zstd chunks, days with blosc in version 2."""
    urls = [cloud.url(f"joins/{name}.zarr") for name in ("hours", "days")]
    to_zarr(urls[0], fields(range(DAYS), 5, hours=6), 3, (16, 32, 32), shards=(64, 96, 96))
    to_zarr(urls[1], fields(range(DAYS), 6), 2, (6, 64, 64))
    matched = {"data.match": {"time": "last"}, "data.variables": ["wind", "wind_2"]}
    return {"urls": urls, **matched, "data.patch": patches(32, time=8)}


def a_degree_beside_a_half(cloud: Any, _: Path) -> dict[str, Any]:
    """Another grid in space, uncompressed beside zstd."""
    urls = [cloud.url(f"joins/{name}.zarr") for name in ("fine", "coarse")]
    to_zarr(urls[0], fields(range(DAYS), 7), 3, (8, 48, 48))
    to_zarr(urls[1], fields(range(DAYS), 8, LAT // 2, LON // 2), 3, (8, 32, 32), compressors=None)
    matched = {"data.match": {"lat": "nearest", "lon": "nearest"}, "data.variables": ["wind", "wind_2"]}
    return {"urls": urls, **matched, "data.unmatched": "missing", "data.patch": patches(32, time=4)}


def static(cloud: Any, _: Path) -> dict[str, Any]:
    """A field without time, by zarr-python, beside shards by xarray."""
    urls = [cloud.url(f"joins/{name}.zarr") for name in ("moving", "static")]
    to_zarr(urls[0], fields(range(DAYS), 9), 3, (8, 32, 32), shards=(16, 96, 96))
    to_zarr(urls[1], fields(range(1), 10).rename(wind="depth").isel(time=0, drop=True), 2, (64, 64))
    return {"urls": urls, "data.variables": ["wind", "depth"], "data.patch": patches(32, time=4)}


def gaps(cloud: Any, _: Path) -> dict[str, Any]:
    """Two periods, between which no patch reaches; windows of block order."""
    from zarr.codecs import BloscCodec

    urls = [cloud.url(f"joins/period{number}.zarr") for number in range(2)]
    for number, url in enumerate(urls):
        days = range(number * 100, number * 100 + DAYS)
        to_zarr(url, fields(days, 11 + number), 3, (8, 48, 48), compressors=[BloscCodec(cname="zstd")])
    block = {"data.order": "block", "data.gap_dimension": "time", "loader.window_bytes": 4 << 20}
    return {"urls": urls, "data.join": "time", **block, "data.patch": patches(32, time=4)}


def built(cloud: Any, folder: Path) -> dict[str, Any]:
    """Two years that kit built, whose manifests name their objects."""
    import kit

    urls = []
    for number in range(2):
        place = folder / f"source{number}.zarr"
        fields(range(number * DAYS, (number + 1) * DAYS), 13 + number).to_zarr(place, consolidated=False)
        urls.append(cloud.url(f"joins/built{number}.zarr"))
        config = kit.Config().replace({
            "data.url": urls[-1], "data.source": str(place), "data.patch": patches(32, time=4),
            "chunking.chunk": {"time": 8, "lat": 32, "lon": 32}, "chunking.shard": {"time": 16, "lat": 96, "lon": 96},
        })  # fmt: skip
        kit.build(config, progress=False)
    return {"urls": urls, "data.join": "time", "data.patch": patches(32, time=4)}


def from_a_disk(cloud: Any, folder: Path) -> dict[str, Any]:
    """A bucket beside a folder."""
    urls = [cloud.url("joins/far.zarr"), str(folder / "near.zarr")]
    for number, url in enumerate(urls):
        to_zarr(url, fields(range(DAYS), 15 + number).rename(wind=("wind", "near")[number]), 3, (8, 48, 48))
    return {"urls": urls, "data.variables": ["wind", "near"], "data.patch": patches(32, time=4)}


MAKERS = dict(
    zip(NAMES, (years, members, days_beside_hours, a_degree_beside_a_half, static, gaps, built, from_a_disk),
        strict=True)
)  # fmt: skip


# -- the table


def row(name: str, cloud: Any, versions: dict[str, Any], folder: Path) -> dict[str, Any]:
    situation = cloud.dials
    made = MAKERS[name](cloud.turn("no limits"), folder)
    cloud.turn(**situation.to_dict())
    first, *more = made.pop("urls")
    changes = {
        "data.url": first, "data.more": more, "data.samples_per_epoch": 2048, "data.standardize": False,
        "loader.batch_size": 32, "loader.requests_in_flight": 64, "loader.batches_ahead": 4, **made,
    }  # fmt: skip
    question = {"changes": changes, "environment": {"KIT_ENDPOINTS": os.environ["KIT_ENDPOINTS"]}}
    rates: dict[str, list[dict[str, Any]]] = {version: [] for version in versions}
    for turn in range(ROUNDS):
        for version in [*versions][:: -1 if turn % 2 else 1]:
            rates[version].append(versions[version].ask(question))
    found: dict[str, Any] = {"join": name}
    for version, answers in rates.items():
        pace = [one["samples_per_second"] for one in answers]
        found |= {
            version: f"{statistics.median(pace):,.0f} ({min(pace):,.0f}-{max(pace):,.0f})",
            f"{version}, CPU ms": statistics.median(one["cpu_ms"] for one in answers),
        }
    pairs = [*zip(*rates.values(), strict=True)]
    if len(versions) > 1:
        found["ratio"] = statistics.median(new["samples_per_second"] / old["samples_per_second"] for new, old in pairs)
        digests = [versions[version].ask(question | {"digest": True})["digest"] for version in versions]
        found["equal"] = digests[0] == digests[1]
    found["predicted"] = statistics.median(one["predicted"] / one["requests"] for one in rates["kit"])
    for version, child in versions.items():
        kept = {"cache.size_bytes": 1 << 30, "cache.folder": str(folder / f"cache-{version}")}
        same, new = (child.ask(question | {"changes": changes | kept, "epochs": count}) for count in (2, 1))
        found[f"{version}, requests"] = ", ".join(f"{count:,}" for count in same["asked"] + new["asked"])
        found[f"{version}, cached"] = new["samples_per_second"]
    return found


def main() -> None:
    from streaming import SITUATION
    from versions import HERE, Version

    from kit.cloud.simulated import simulated_cloud

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a folder with another checkout of kit")
    parser.add_argument("--joins", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    versions = {"kit": Version(HERE, __file__, "serve")}
    if given.before:
        versions["before"] = Version(given.before.resolve(), __file__, "serve")
    rows = []
    for name in given.joins:
        with simulated_cloud(SITUATION) as cloud, tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, cloud, versions, Path(folder)))
            print(rows[-1], flush=True)
    for child in versions.values():
        child.close()
    publish("joined", rows, record=given.record, rounds=ROUNDS)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
