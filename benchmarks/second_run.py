"""What a run that finds a full cache asks of the store before its first batch: requests and round trips.

    python benchmarks/second_run.py [--record]

Each store is read once into `cache.folder`; then it is opened anew, as a new process would, and one batch is taken.
Every answer of the simulated cloud takes `LATENCY_SECONDS`, far longer than all that is computed meanwhile, so the
seconds until the batch is there, divided by it, count the requests that waited for one another; other work of
the machine adds to them. A batch touches fewer objects than requests may be open.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from publish import publish, read_options

import kit
from kit.cloud.simulated import Scheme, SimulatedCloud
from kit.config import Config
from kit.data.patches.module import PatchData

LATENCY_SECONDS = 2.0
SIDES = {"time": 16, "lat": 64, "lon": 64}
SCHEMES: tuple[Scheme, ...] = ("gs", "s3", "http")


def config_of(url: str, folder: str) -> Config:
    return Config.make({
        "data": {"url": url, "patch": {"time": 1, "lat": 16, "lon": 16}, "samples_per_epoch": 64, "standardize": False,
                 "variables": ["wind"]},
        "chunking": {"chunk": {"time": 1, "lat": 16, "lon": 16}, "shard": {"time": 4, "lat": 32, "lon": 32}},
        "loader": {"batch_size": 4}, "cache": {"size_bytes": "64 MiB", "folder": folder},
    })  # fmt: skip


def field() -> xarray.Dataset:
    values = np.random.default_rng(1).normal(size=[*SIDES.values()]).astype(np.float32)
    along = {name: np.arange(side, dtype=np.float64) for name, side in SIDES.items()}
    return xarray.Dataset({"wind": (tuple(SIDES), values)}, along)


def with_kit(cloud: SimulatedCloud, place: str, folder: Path) -> None:
    kit.build(config_of(cloud.url(place), str(folder)), source=field(), progress=False)


def with_xarray(**how: Any) -> Callable[[SimulatedCloud, str, Path], None]:
    def write(cloud: SimulatedCloud, place: str, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # consolidated metadata is no part of Zarr 3 yet
            field().to_zarr(folder / "x.zarr", encoding={"wind": {"chunks": (1, 16, 16)}}, **how)
        cloud.upload(folder / "x.zarr", place)

    return write


WRITERS = {
    "kit": with_kit,
    "xarray, Zarr 2, consolidated": with_xarray(zarr_format=2, consolidated=True),
    "xarray, Zarr 3, consolidated": with_xarray(zarr_format=3, consolidated=True),
    "xarray, Zarr 3, not consolidated": with_xarray(zarr_format=3, consolidated=False),
}


def again(cloud: SimulatedCloud, config: Config) -> dict[str, float]:
    """What a second run on this machine asks for."""
    cloud.turn(latency_seconds=LATENCY_SECONDS)
    mark, began = cloud.counts(), time.perf_counter()
    data = PatchData(config)
    next(iter(data.train_dataloader()))
    seconds, found = time.perf_counter() - began, cloud.counts(since=mark)
    data.teardown()
    cloud.turn(latency_seconds=0.0)
    return {"requests": found.requests, "round trips": seconds / LATENCY_SECONDS}


def rows() -> Iterator[dict[str, Any]]:
    with kit.cloud.simulate("no limits", latency_spread=0.0) as cloud:
        for name, scheme in itertools.product(WRITERS, SCHEMES):
            if (name, scheme) == ("xarray, Zarr 3, not consolidated", "http"):
                continue  # whose variables nothing lists
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                where = f"{scheme}-{[*WRITERS].index(name)}"
                WRITERS[name](cloud, f"{where}/x.zarr", folder)
                config = config_of(cloud.url(f"{where}/x.zarr", scheme), str(folder / "cache"))
                kit.data.prefetch(config, progress=False)
                yield {"written by": name, "read from": scheme} | again(cloud, config)
        yield {"written by": "kit, two joined", "read from": "gs"} | joined(cloud)


def joined(cloud: SimulatedCloud) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        folder, urls = Path(place), [cloud.url(f"joined/{number}.zarr") for number in range(2)]
        for url in urls:
            with_kit(cloud, url.removeprefix("gs://"), folder)
            config = config_of(url, str(folder / "cache"))
            kit.data.prefetch(config, progress=False)
        patch = {"member": 1, **config.data.patch}
        changes = {"data.url": urls[0], "data.more": urls[1:], "data.join": "member", "data.patch": patch}
        return again(cloud, config.replace(changes))


def main() -> None:
    read_options(__doc__)
    publish("before the first batch of a second run", [*rows()], latency_seconds=LATENCY_SECONDS)


if __name__ == "__main__":
    main()
