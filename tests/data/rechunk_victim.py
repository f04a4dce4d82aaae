"""Rechunks a source several times larger than its memory, and prints what it took; run as a process of its own.

`python rechunk_victim.py FOLDER TIMES SCHEDULER [SCRATCH]` prints a line of JSON: source_bytes, total_bytes (of all),
right, and of each process that builds budget_bytes, peak_bytes (resident) and added_bytes (over what it held before).
"""

import json
import resource
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import psutil
import zarr

from kit.config import Config
from kit.data.build.build import build
from kit.data.build.plan import plan_build
from kit.data.build.schedulers import RUNTIME_BYTES

BUDGET = 84 << 20
FIELD = (512, 1024)
STEPS_PER_BUDGET = 42
WORKERS = 2


def main(folder, times, scheduler, scratch):
    on_workers = scheduler == "distributed"
    budgets = [BUDGET] * WORKERS if on_workers else [BUDGET]
    shape = (times * STEPS_PER_BUDGET * len(budgets), *FIELD)
    field = write_source(folder / "source.zarr", shape)
    across = {"time": 90, "lat": 64, "lon": 64}
    chunk = across if scratch else {"time": 4, "lat": 128, "lon": 256}
    config = Config.make({
        "data": {
            "source": str(folder / "source.zarr"), "url": str(folder / "target.zarr"),
            "patch": {"time": 90, "lat": 16},
        },
        "chunking": {"chunk": chunk, "shard": "none", "compression_level": 0},
        "build": {"scheduler": scheduler, "memory_bytes": BUDGET, "scratch": scratch and str(folder / scratch)},
    })  # fmt: skip
    if on_workers:
        total = WORKERS * (BUDGET + RUNTIME_BYTES)
        more = {"workers": WORKERS, "memory_bytes": 4 * BUDGET, "total_memory_bytes": total}
        config = config.replace({f"build.{name}": value for name, value in more.items()})
    plan_build(config)
    watch = Children() if on_workers else Self()
    dataset = build(config, progress=watch)
    target = dataset.open_array("t")
    right = all(
        zlib.crc32(np.ascontiguousarray(target[step])) == zlib.crc32(field + np.float32(step))
        for step in (0, 89, shape[0] - 1)
    )
    result = {
        "source_bytes": target.nbytes, "budget_bytes": budgets, "total_bytes": config.build.total_memory_bytes,
        "right": right, **watch.result(),
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


def write_source(path, shape):
    array = zarr.create_group(str(path)).create_array(
        "t", shape=shape, chunks=(1, *shape[1:]), dtype="f4", dimension_names=("time", "lat", "lon"), compressors=None
    )
    field = np.random.default_rng(2).normal(size=shape[1:]).astype("f4")
    for step in range(shape[0]):
        array[step] = field + step
    return field


class Self:
    """What this process takes; also a progress of a build."""

    def __init__(self):
        clear_peak()
        self.before = psutil.Process().memory_info().rss

    def __call__(self, done, total, number_of_bytes):
        pass

    def result(self):
        found = peak()
        return {"peak_bytes": [found], "added_bytes": [found - self.before]}


class Children:
    """What the workers take, who are there when the first report comes."""

    def __init__(self):
        self.before, self.peaks, self.over = {}, {}, threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def __call__(self, done, total, number_of_bytes):
        if not self.before:
            everyone = psutil.Process().children(recursive=True)
            self.before = {
                child.pid: child.memory_info().rss for child in everyone if "spawn_main" in str(child.cmdline())
            }
            self.thread.start()
        if done == total:
            self.over.set()

    def watch(self):
        """A process keeps its peak until it ends, so the last look before that is the peak."""
        while not self.over.wait(0.05):
            for pid in self.before:
                self.peaks[pid] = peak(pid)

    def result(self):
        self.thread.join()
        added = [self.peaks[pid] - before for pid, before in self.before.items()]
        return {"peak_bytes": [*self.peaks.values()], "added_bytes": added}


def clear_peak():
    """Forget the peak so far, where the kernel can."""
    Path("/proc/self/clear_refs").write_text("5")


def peak(pid="self"):
    status = Path(f"/proc/{pid}/status").read_text()
    found = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0].split()[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else "")
