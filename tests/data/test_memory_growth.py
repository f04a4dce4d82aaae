"""A process that streams ends where it began: what it grows by stays near what is allowed, and does not add up."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from kit.chunks.resources import OPENING_BYTES
from kit.data.stores.url import open_store

READER = Path(__file__).with_name("memory_reader.py")
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_memory_does_not_grow_with_what_has_been_streamed(cloud):
    url, allowed = cloud.url("growth/t.zarr"), 32 * MIB
    group = zarr.create_group(open_store(url, read_only=False))
    values = np.random.default_rng(0).normal(size=(48, 512, 512)).astype("f4")
    group.create_array("wind", data=values, chunks=(1, 128, 128), dimension_names=("time", "lat", "lon"))
    command = [sys.executable, str(READER), url, str(allowed), "300", "900"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (early, _), (late, most) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert late - early < 8 * MIB, "of 700 MiB streamed"
    assert most < allowed + OPENING_BYTES + 16 * MIB
