"""Too little shared memory for loader processes is refused before they start, with the size that they need."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import pytest
import zarr

import kit
from kit.config import Config
from kit.data.patches.module import PatchData
from kit.data.stream import memory
from kit.data.stream.memory import needed_bytes, refuse_too_little_shared_memory
from kit.errors import ConfigError
from kit.sections import Loader

MIB = 1 << 20


@pytest.fixture
def config(tmp_path):
    """Batches of 4 × 32 × 32 × 32 numbers, 640 KiB with their validity."""
    group = zarr.open_group(tmp_path / "store.zarr", mode="w")
    values = np.ones((64, 32, 32), "f4")
    group.create_array("a", data=values, chunks=(8, 32, 32), dimension_names=("time", "y", "x"))
    return Config().replace({
        "data.url": str(tmp_path / "store.zarr"), "data.patch": {"time": 32, "y": 32, "x": 32},
        "data.standardize": False, "data.samples_per_epoch": 16, "loader.batch_size": 4, "loader.num_workers": 2,
        "loader.prefetch_factor": 4, "trial.folder": str(tmp_path / "runs"), "trial.predict_memory": False,
        "hardware.accelerator": "cpu",
    })  # fmt: skip


@pytest.fixture
def room(monkeypatch):
    """Sets what /dev/shm has free."""

    def be(free_bytes):
        told = types.SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096)
        monkeypatch.setattr(memory.os, "statvfs", lambda _: told)

    return be


def test_what_is_needed_grows_with_processes_batches_and_ranks():
    one = Loader(num_workers=1, prefetch_factor=1)
    assert needed_bytes(Loader(num_workers=0), MIB) == 0
    assert needed_bytes(one, MIB) >= 2 * MIB
    assert needed_bytes(Loader(num_workers=4, prefetch_factor=8), MIB) >= 33 * MIB
    assert needed_bytes(one, MIB, ranks=3) == 3 * needed_bytes(one, MIB)


def test_exactly_enough_is_enough(room):
    settings = Loader(num_workers=2, prefetch_factor=4)
    needed = needed_bytes(settings, MIB)
    room(needed + 4096)
    refuse_too_little_shared_memory(settings, MIB)
    room(needed - 4096)
    with pytest.raises(ConfigError, match=r"2 processes × 4 batches of 1 MiB need 9.* MiB .*shm-size"):
        refuse_too_little_shared_memory(settings, MIB)


def test_data_by_itself_refuses_before_a_process_and_without_processes_needs_none(config, room):
    room(4 * MIB)
    data = PatchData(config)
    data.setup()
    with pytest.raises(ConfigError, match="loader.num_workers"):
        data.train_dataloader()
    rows = kit.data.RowData(np.ones((64, 1 << 16), "f4"), batch_size=16, num_workers=2)
    with pytest.raises(ConfigError, match="loader.num_workers"):
        rows.train_dataloader()
    data = PatchData(config.replace({"loader.num_workers": 0}))
    data.setup()
    assert len([*data.train_dataloader()]) == 4


SMALL = """
import sys
from kit.config import Config
from kit.errors import ConfigError
from kit.memory.alongside import fit
try:
    fit(Config.from_yaml(sys.stdin.read()))
except ConfigError as error:
    print(error)
"""


def test_a_trial_on_a_machine_of_little_shared_memory_is_refused_before_anything(config, tmp_path):
    mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$0" -c "$1"'
    line = ["unshare", "-m", "sh", "-c", mount, sys.executable, SMALL]
    done = subprocess.run(
        line, input=config.to_yaml(comments=False), capture_output=True, text=True, timeout=120, check=False
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this user may not mount")
    assert "loader.num_workers" in done.stdout, done.stderr
    assert "/dev/shm has 4 MiB free" in done.stdout
    assert not (tmp_path / "runs").exists()
    assert os.statvfs("/dev/shm").f_blocks  # ours is as it was
