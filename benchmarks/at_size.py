"""A store of 2 TB in a million shards, read by ten ranks over one network: opening, planning, first batch, memory.

    python benchmarks/at_size.py [--seconds 20] [--ranks 10] [--record]

The simulated cloud answers for every shard with the bytes of one, so nothing of that size is stored. Ranks are
processes with a budget of memory of their own; latency and the bandwidth of all together are those of the dials. Every
rank reads its own part of the epoch, as a fit on so many devices would. What a rank needed beyond its budget is the
growth of its process from before it opened the store. `manifest` is the time and memory that a manifest of a million
objects takes, which a store that kit built has besides; ranks read a store without one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from publish import publish

from kit.cloud import server
from kit.cloud.dials import Dials
from kit.cloud.objects import FolderObjects, StoredObject
from kit.data.stores.manifest import ArrayRecord, BuildRecord, Manifest, ObjectRecord
from kit.machine.endpoints import VARIABLE
from kit.units import format_bytes

SHARDS, SIDE, CHUNK = 1_000_000, 512, 128
SHAPE, SHARD = (2 * SHARDS, SIDE, SIDE), (2, SIDE, SIDE)
NETWORK = Dials(latency_seconds=0.03, latency_spread=0.3, total_bandwidth_bytes_per_second=400e6)
BUDGET_BYTES = 256 << 20


class OneForAll(FolderObjects):
    """A folder that answers for every shard of `big` with the bytes of the first."""

    def find(self, bucket: str, key: str) -> StoredObject | None:
        return super().find(bucket, "store/x/c/0/0/0" if key.startswith("store/x/c/") else key)


def write_store(folder: Path) -> None:
    """The first shard, and the metadata of all."""
    place = folder / "big" / "store"
    group = zarr.open_group(str(place), mode="w")
    array = group.create_array(
        "x", shape=SHARD, shards=SHARD, chunks=(1, CHUNK, CHUNK), dtype="f4", dimension_names=("time", "y", "x")
    )
    smooth = np.cumsum(np.random.default_rng(0).normal(size=SHARD), axis=2)
    array[:] = smooth.round(1).astype("f4")
    document = json.loads((place / "x" / "zarr.json").read_text())
    (place / "x" / "zarr.json").write_text(json.dumps(document | {"shape": [*SHAPE]}))


def rank(number: int, ranks: int, order: str, seconds: float) -> None:
    """Read as one rank of a fit; prints what it took."""
    import psutil

    from kit.config import Config
    from kit.data.open_dataset import open_dataset
    from kit.data.patches.loader import PatchLoader
    from kit.data.sampling import sample_plan

    process = psutil.Process()
    before = process.memory_info().rss
    config = Config().replace(
        {
            "data.url": "gs://big/store", "data.credentials": "anonymous", "data.patch": {"y": 64, "x": 64},
            "data.order": order, "data.samples_per_epoch": 10_000_000, "data.standardize": False,
            "loader.batch_size": 32, "loader.memory_bytes": BUDGET_BYTES, "loader.window_bytes": BUDGET_BYTES // 4,
        }
    )  # fmt: skip
    marks = [time.perf_counter()]
    dataset = open_dataset(config)
    marks.append(time.perf_counter())
    plan = sample_plan(config, dataset, ranks)
    plan.batch(0, plan.batches_per_epoch - 1, number)
    marks.append(time.perf_counter())
    loader = PatchLoader(dataset, plan, config.loader, rank=number)
    batches = iter(loader)
    next(batches)
    marks.append(time.perf_counter())
    samples, most = 0, 0
    while time.perf_counter() < marks[-1] + seconds:
        samples += len(next(batches)["values"])
        most = max(most, process.memory_info().rss)
    took = time.perf_counter() - marks[-1]
    requests = loader.counters()["requests"] / loader.counters()["samples"]
    loader.close()
    opening, planning, first = np.diff(marks).tolist()
    found = {
        "open_seconds": opening, "plan_seconds": planning, "first_batch_seconds": first, "samples_per_second":
        samples / took, "grown_over_allowed": (most - before) / BUDGET_BYTES, "requests_per_sample": requests,
    }  # fmt: skip
    print(json.dumps(found), flush=True)


@contextlib.contextmanager
def serving(folder: Path, network: Dials) -> Iterator[dict[str, str]]:
    """A cloud in a process of its own; gives the environment in which `gs://big/store` is found there."""
    settings = {"folder": str(folder), "port": 0, "token": "", "dials": network.to_dict()}
    cloud = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert cloud.stdin is not None
    assert cloud.stdout is not None
    try:
        cloud.stdin.write(json.dumps(settings).encode() + b"\n")
        cloud.stdin.flush()
        address = f"http://127.0.0.1:{json.loads(cloud.stdout.readline())['port']}"
        yield {**os.environ, VARIABLE: json.dumps({"gs://big": address})}
    finally:
        cloud.terminate()
        cloud.wait()


def run_ranks(folder: Path, ranks: int, order: str, seconds: float) -> list[dict[str, float]]:
    """All ranks at once, on a cloud of their own."""
    with serving(folder, NETWORK) as environment:
        asked = [str(ranks), order, str(seconds)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(number), *asked], stdout=subprocess.PIPE, env=environment
            )
            for number in range(ranks)
        ]
        return [json.loads(one.communicate()[0]) for one in started]


def manifest() -> dict[str, float]:
    """What a manifest of a million objects takes to be read."""
    import psutil

    objects = tuple(
        ObjectRecord(array="x", key=f"x/c/{number}/0/0", bytes=1_234_567, crc32c=number) for number in range(SHARDS)
    )
    record = ArrayRecord(mean=0.0, deviation=1.0, valid=1, elements=1)
    build = BuildRecord(shards=SHARDS, fields={})
    data = Manifest(build=build, arrays={"x": record}, objects=objects, raw_bytes=1).dump()
    del objects
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    found = Manifest.load(data, "benchmark")
    took = time.perf_counter() - began
    assert len(found.objects) == SHARDS
    return {
        "manifest_bytes": len(data), "manifest_seconds": took,
        "manifest_grown_bytes": psutil.Process().memory_info().rss - before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        server.FolderObjects = OneForAll  # type: ignore[misc,attr-defined]
        server.main()
        return
    if given.rank:
        number, ranks, order, seconds = given.rank
        rank(int(number), int(ranks), order, float(seconds))
        return
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder))
        for order in ("random", "block"):
            found = run_ranks(Path(folder), given.ranks, order, given.seconds)
            worst = {name: max(one[name] for one in found) for name in found[0]}
            worst["samples_per_second"] = sum(one["samples_per_second"] for one in found)
            table.append({"order": order, "ranks": given.ranks, **worst})
    facts = {
        "store": f"{format_bytes(int(np.prod(SHAPE)) * 4)} in {SHARDS:,} shards; the slowest rank, samples of all",
        "memory allowed": f"{format_bytes(BUDGET_BYTES)} each", "manifest": manifest(),
    }  # fmt: skip
    publish("at size", table, record=given.record, **facts)


if __name__ == "__main__":
    main()
