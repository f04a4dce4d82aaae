"""Rechunking: throughput and peak memory, kit beside rechunker, Dask and xarray, on the same source in one run.

    pip install --no-deps --target .peers/zarr2 rechunker "zarr<3" "numcodecs<0.16" mypy_extensions asciitree \
        fasteners deprecated wrapt
    python benchmarks/rechunk.py [--record]

A stack of fields, a chunk each, becomes series through time: every new chunk lies across all old ones. Each contender
runs in a process of its own, two tasks at once on two cores, zstd level 3, and is told to take 160 MiB where it can be
told; rechunker's limit is of each task, so it is told 80. Memory is the peak resident set over what the process held
before it began, imports done. kit also checksums every object and leaves a manifest; the others do not. The copy that
rechunker and `kit, copy` make is counted in their time. rechunker needs zarr 2, hence a folder of its own.

The second table is a hit of the read cache beside reading a file of the same size: 64 KiB, all in the page cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from publish import publish, read_options

PEERS = Path(__file__).parents[1] / ".peers" / "zarr2"
SHAPE, CHUNK, TARGET = (256, 512, 512), (1, 512, 512), (256, 32, 32)
NAMED = dict(zip(("t0", "y", "x"), TARGET, strict=True))
MIB = 1 << 20
ALLOWED_BYTES = 160 * MIB
ROUNDS = 3
CONTENDERS = ("kit", "kit, copy", "rechunker", "dask", "xarray")


def write_source(path: Path) -> None:
    """In Zarr's second format, which all can read; a smooth field with noise, so that it compresses by a third."""
    import zarr

    group = zarr.create_group(str(path), zarr_format=2)
    array = group.create_array(
        "t", shape=SHAPE, chunks=CHUNK, dtype="f4", attributes={"_ARRAY_DIMENSIONS": ["t0", "y", "x"]}
    )
    random = np.random.default_rng(0)
    wave = np.sin(np.arange(512) / 40)
    for step in range(SHAPE[0]):
        noise = random.normal(scale=0.01, size=SHAPE[1:])
        array[step] = np.round(wave[:, None] * np.cos(wave + step / 9) + noise, 3).astype("f4")


# -- contenders: each is made with its imports done, and returns what to time


def kit_(source: str, folder: Path, scratch: str = "") -> Callable[[], Any]:
    from kit.config import Config
    from kit.data.build.build import build
    from kit.data.build.plan import plan_build

    config = Config.make({
        "data": {"source": source, "url": str(folder / "target.zarr"), "patch": NAMED},
        "chunking": {"chunk": NAMED, "shard": "none"},
        "build": {"scheduler": "threads", "threads": 2, "memory_bytes": ALLOWED_BYTES, "scratch": scratch},
    })  # fmt: skip
    plan_build(config)
    return lambda: build(config, progress=False)


def kit_copy(source: str, folder: Path) -> Callable[[], Any]:
    return kit_(source, folder, str(folder / "scratch"))


def rechunker_(source: str, folder: Path) -> Callable[[], Any]:
    import dask
    import numcodecs
    import zarr
    from rechunker import rechunk

    array = zarr.open(source, mode="r")["t"]
    places = {"target_store": str(folder / "target.zarr"), "temp_store": str(folder / "copy.zarr")}
    options = {"compressor": numcodecs.Zstd(3)}
    plan = rechunk(
        array,
        TARGET,
        ALLOWED_BYTES // 2,
        **places,
        target_options=options,
        temp_options={"compressor": numcodecs.Zstd(1)},
    )

    def run() -> None:
        with dask.config.set(scheduler="threads", num_workers=2):
            plan.execute()

    return run


def dask_(source: str, folder: Path) -> Callable[[], Any]:
    import dask
    import dask.array
    import zarr

    target = zarr.create_array(
        str(folder / "target.zarr"), name="t", shape=SHAPE, chunks=TARGET, dtype="f4",
        compressors=zarr.codecs.ZstdCodec(level=3),
    )  # fmt: skip
    values = dask.array.from_zarr(source, component="t").rechunk(TARGET)

    def run() -> None:
        with dask.config.set(scheduler="threads", num_workers=2):
            dask.array.store(values, target, lock=False)

    return run


def xarray_(source: str, folder: Path) -> Callable[[], Any]:
    import dask
    import xarray
    import zarr

    data = xarray.open_zarr(source, consolidated=False, chunks={}).chunk(
        dict(zip(("t0", "y", "x"), TARGET, strict=True))
    )
    data["t"].encoding = {"chunks": TARGET, "compressors": (zarr.codecs.ZstdCodec(level=3),)}

    def run() -> None:
        with dask.config.set(scheduler="threads", num_workers=2):
            data.to_zarr(str(folder / "target.zarr"), zarr_format=3, consolidated=False)

    return run


MAKERS = {"kit": kit_, "kit, copy": kit_copy, "rechunker": rechunker_, "dask": dask_, "xarray": xarray_}


def contend(name: str, source: str, folder: Path) -> dict[str, Any]:
    """Time and peak memory of one contender, in this process."""
    import psutil

    run, process = MAKERS[name](source, folder), psutil.Process()
    before, peak, over = process.memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    import zarr

    total = float(
        np.asarray(zarr.open(str(folder / "target.zarr"), mode="r")["t" if name != "rechunker" else ...][:, 7, 9]).sum()
    )
    return {"seconds": seconds, "peak_bytes": peak[0] - before, "sum": total}


def measure(name: str, source: str) -> dict[str, Any] | str:
    """The answer of a fresh process, or why there is none."""
    if name == "rechunker" and not (PEERS / "rechunker").is_dir():
        return "not installed; see the first lines of this file"
    missing = [
        need
        for need in {"dask": ["dask"], "xarray": ["dask", "xarray"]}.get(name, [])
        if not importlib.util.find_spec(need)
    ]
    if missing:
        return f"needs {', '.join(missing)}; pip install 'kit[build]'"
    path = [str(PEERS)] if name == "rechunker" else []
    path += [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--contend", name, source, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rechunking(source: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row a contender, the best of the rounds; and the absent with the reason."""
    found: dict[str, list[dict[str, Any]]] = {}
    absent: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name in CONTENDERS:
            answer = measure(name, source) if name not in absent else absent[name]
            if isinstance(answer, str):
                absent[name] = answer
            else:
                found.setdefault(name, []).append(answer)
    sums = {round(answer["sum"], 2) for answers in found.values() for answer in answers}
    assert len(sums) == 1, f"contenders disagree: {sums}"
    best = {name: min(answers, key=lambda answer: answer["seconds"]) for name, answers in found.items()}
    size_mib, mine = np.prod(SHAPE) * 4 / MIB, best["kit, copy"]
    rows = [
        {
            "contender": name,
            "MiB/s": size_mib / answer["seconds"],
            "speed over kit, copy": mine["seconds"] / answer["seconds"],
            "peak MiB": max(one["peak_bytes"] for one in found[name]) / MIB,
            "memory over allowed": max(one["peak_bytes"] for one in found[name]) / ALLOWED_BYTES,
        }
        for name, answer in best.items()
    ]
    return rows, absent


def cache_hits(folder: Path, count: int = 400, size: int = 1 << 16) -> list[dict[str, Any]]:
    """Reads per second of entries and of plain files, in turns."""
    from kit.data.stores.counters import Counters
    from kit.data.stores.disk_cache import WHOLE, MemoryCache, SharedFolder
    from kit.data.stores.local import Folder

    values = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    shared, memory = SharedFolder(folder / "cache", 2 * values.nbytes, "lru"), MemoryCache(2 * values.nbytes, "lru")
    names = [f"{place * 2654435761 % 2**32:08x}" for place in range(count)]
    (folder / "files").mkdir()
    for name, row in zip(names, values, strict=True):
        shared.put(name, [(WHOLE, row)])
        memory.put(name, [(WHOLE, row)])
        (folder / "files" / name).write_bytes(row.tobytes())
    plain = Folder(folder / "files", Counters())
    readers: dict[str, Callable[[str], Any]] = {
        "local file": lambda name: plain.read(name), "cache, folder": shared.get, "cache, memory": memory.get,
    }  # fmt: skip
    rates: dict[str, float] = {}
    for _ in range(5):
        for label, read in readers.items():
            began = time.perf_counter()
            assert all(len(read(name)) == size for name in names)
            rates[label] = max(rates.get(label, 0.0), count / (time.perf_counter() - began))
    return [
        {"read": label, "reads/s": rate, "ratio to a local file": rate / rates["local file"]}
        for label, rate in rates.items()
    ]


def main() -> None:
    read_options(__doc__)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source.zarr"
        write_source(source)
        rows, absent = rechunking(str(source))
        facts = {f"{name}, left out": reason for name, reason in absent.items()}
        publish("rechunk", rows, source=f"{SHAPE} float32 in {CHUNK}", target=str(TARGET), **facts)
        publish("read cache", cache_hits(Path(place)), size="64 KiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contend"]:
        _, _, contender, where, into = sys.argv
        print(json.dumps(contend(contender, where, Path(into))))
    else:
        main()
