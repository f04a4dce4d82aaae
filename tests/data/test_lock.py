"""One writer a store: the second is told who the first is, and no kill leaves a store locked."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kit.data import lock
from kit.data.build import build
from kit.data.dataset import open_dataset
from kit.data.lock import write_lock
from kit.data.manifest import LOCK_KEY
from kit.data.stores import list_objects, open_store, read_object, resolve_url, write_object
from kit.errors import StoreLockedError

HOLD = """
import sys, time
from kit.data.lock import write_lock
from kit.data.stores import open_store
with write_lock(open_store(sys.argv[1], read_only=False), sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.1)


def test_the_second_writer_is_told_who_the_first_is(place, tiny_config):
    config = tiny_config(f"{place}/t.zarr")
    url = resolve_url(config.data.url)
    store = open_store(url, read_only=False)
    with (
        write_lock(store, url),
        pytest.raises(StoreLockedError, match=rf"is being written by process {os.getpid()} on .*; wait for it"),
    ):
        build(config, progress=False)
    build(config, progress=False)
    assert LOCK_KEY not in list_objects(open_store(url), ".kit", url)
    assert open_dataset(config).manifest is not None


def test_a_killed_holder_on_a_local_disk_is_no_obstacle(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "t.zarr")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, config.data.url], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLockedError, match=f"process {holder.pid}"):
            build(config, progress=False)
        os.kill(holder.pid, signal.SIGKILL)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    build(config, progress=False)
    assert not (tmp_path / "t.zarr" / LOCK_KEY).exists()


def test_a_lock_in_an_object_store_is_taken_over_when_nobody_renews_it(gcs, tiny_config):
    config = tiny_config(f"{gcs}/t.zarr")
    store = open_store(config.data.url, read_only=False)
    held = {"host": "elsewhere", "pid": 7, "token": "x", "beat": time.time()}
    write_object(store, LOCK_KEY, json.dumps(held).encode(), config.data.url)
    with pytest.raises(StoreLockedError, match="process 7 on elsewhere"):
        build(config, progress=False)
    held["beat"] -= lock.STALE_SECONDS + 1
    write_object(store, LOCK_KEY, json.dumps(held).encode(), config.data.url)
    build(config, progress=False)
    assert read_object(store, LOCK_KEY, config.data.url) is None


def test_of_two_writers_that_found_no_lock_the_last_to_write_it_wins(gcs, monkeypatch):
    url = f"{gcs}/t.zarr"
    store = open_store(url, read_only=False)
    original = write_object

    def overtaken(store, key, data, url):
        original(store, key, data, url)
        original(store, key, lock._holder("another"), url)

    monkeypatch.setattr(lock, "write_object", overtaken)
    with pytest.raises(StoreLockedError), write_lock(store, url):
        pass


def test_a_held_lock_in_an_object_store_is_renewed(gcs, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    url = f"{gcs}/t.zarr"
    store = open_store(url, read_only=False)
    with write_lock(store, url):
        first = json.loads(read_object(store, LOCK_KEY, url))["beat"]
        deadline = time.monotonic() + 20
        while json.loads(read_object(store, LOCK_KEY, url))["beat"] == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert read_object(store, LOCK_KEY, url) is None
