"""Rechunks a source ten times larger than its memory, and prints what it took; run as a process of its own.

`python rechunk_victim.py FOLDER SCHEDULER [SCRATCH]` prints a line of JSON: source_bytes, budget_bytes, added_bytes
(peak resident memory of this process over what it held before building), right.
"""

import json
import resource
import sys
import zlib
from pathlib import Path

import numpy as np
import psutil
import zarr

from kit.config import Config
from kit.data.build import build
from kit.data.build_plan import plan_build

BUDGET = 84 << 20
SHAPE = (420, 512, 1024)


def main(folder, scheduler, scratch):
    source = folder / "source.zarr"
    array = zarr.create_group(str(source)).create_array(
        "t", shape=SHAPE, chunks=(1, 512, 1024), dtype="f4", dimension_names=("time", "lat", "lon"), compressors=None
    )
    random = np.random.default_rng(2)
    field = random.normal(size=SHAPE[1:]).astype("f4")
    for step in range(SHAPE[0]):
        array[step] = field + step
    across = {"time": 90, "lat": 64, "lon": 64}
    chunk = across if scratch else {"time": 4, "lat": 128, "lon": 256}
    config = Config.make({
        "data": {"source": str(source), "url": str(folder / "target.zarr"), "patch": {"time": 360, "lat": 16}},
        "chunking": {"chunk": chunk, "shard": "none", "compression_level": 0},
        "build": {"scheduler": scheduler, "memory_bytes": BUDGET, "scratch": scratch and str(folder / scratch)},
    })  # fmt: skip
    plan_build(config)
    clear_peak()
    before = psutil.Process().memory_info().rss
    dataset = build(config, progress=False)
    added = peak() - before
    target = dataset.open_array("t")
    right = all(
        zlib.crc32(np.ascontiguousarray(target[step])) == zlib.crc32(field + np.float32(step)) for step in (0, 89, 419)
    )
    result = {
        "source_bytes": array.nbytes, "budget_bytes": BUDGET, "added_bytes": added, "right": right,
    }  # fmt: skip
    sys.stdout.write(json.dumps(result) + "\n")


def clear_peak():
    """Forget the peak so far, where the kernel can."""
    Path("/proc/self/clear_refs").write_text("5")


def peak():
    status = Path("/proc/self/status").read_text()
    found = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0].split()[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")
