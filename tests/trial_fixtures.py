"""Fixtures of tests that run trials: one warm supervisor for the whole session, and proof that nothing survives."""

import contextlib
import tempfile

import numpy as np
import psutil
import pytest
import zarr
from waiting import wait_until

from kit.config import Config
from kit.trial import client


@pytest.fixture
def config(tmp_path):
    """Makes the config of a small trial on `ranks` CPU ranks; keywords change `trial`."""

    def make(ranks=1, strategy=None, **trial):
        hardware = {
            "accelerator": "cpu",
            "devices": ranks,
            "strategy": strategy or ("ddp" if ranks > 1 else "none"),
            "threads_per_rank": 1,
        }
        return Config.make(
            {
                "hardware": hardware,
                "trial": {
                    "max_steps": 8,
                    "warmup_steps": 1,
                    "folder": str(tmp_path / "runs"),
                    "predict_memory": False,  # it would outlive the trial that a test is about
                    "stall_seconds": 90.0,  # before a test gives up, so that it is told where the trial hangs
                    **trial,
                },
            }
        )

    return make


@pytest.fixture
def own(config, tmp_path):
    """Makes the config of a trial on a store of two small variables; it needs neither module nor data."""
    group = zarr.open_group(str(tmp_path / "store.zarr"), mode="w")
    values = np.random.default_rng(0).standard_normal((8, 16, 16)).astype("float32")
    for name in ("sst", "ssh"):
        array = group.create_array(
            name, shape=values.shape, chunks=(4, 8, 8), dtype="float32", dimension_names=("time", "lat", "lon")
        )
        array[:] = values

    def make(ranks=1, strategy=None, **changes):
        base = config(ranks, strategy)
        return base.replace(
            {
                "data.url": str(tmp_path / "store.zarr"),
                "data.patch": {"time": 2, "lat": 8, "lon": 8},
                "data.samples_per_epoch": 64,
                "data.standardize": False,
                "loader.batch_size": 2,
                "model.arguments": {"variables": 2, "width": 4, "depth": 1},
                **changes,
            }
        )

    return make


@pytest.fixture
def no_predictions_left(tmp_path, monkeypatch):
    """No prediction leaves a directory behind; one beside a trial gets a moment to end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    wait_until(lambda: list(folder.iterdir()) == [])


@pytest.fixture(autouse=True)
def no_survivors():
    """Every rank that the test began, and all that it forked, is gone soon after it."""
    before = {*ranks_alive()}
    yield
    wait_until(lambda: not {*ranks_alive()} - before)


def ranks_alive():
    """Living descendants of this session's supervisors."""
    found = []
    for supervisor in client._supervisors.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(supervisor.identity["pid"]).children(recursive=True)
    return [process for process in found if is_alive(process)]


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def steps_taken(trial, steps):
    """A condition: the trial has taken so many steps on every rank."""

    def look():
        trial.poll()
        assert not trial.ended, trial
        done = [max((e["step"] for e in trial.steps if e["rank"] == rank), default=0) for rank in range(world(trial))]
        return min(done) >= steps

    return look


def world(trial):
    return trial.environment["world_size"]


def last_steps(trial):
    """The last step of each rank."""
    return [max(e["step"] for e in trial.steps if e["rank"] == rank) for rank in range(world(trial))]
