"""One writer a store: the second is told who the first is, and no kill leaves a store locked."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from properties import crossed, nightly
from waiting import wait_until

from kit.data.build.build import build
from kit.data.open_dataset import open_dataset
from kit.data.stores import lock
from kit.data.stores.lock import write_lock
from kit.data.stores.manifest import LOCK_KEY, crc32c
from kit.data.stores.url import (
    create_object,
    delete_object,
    list_objects,
    open_store,
    read_object,
    resolve_url,
    write_object,
)
from kit.errors import StoreLockedError

HOLD = """
import sys, time
from kit.data.stores.lock import write_lock
from kit.data.stores.url import open_store
with write_lock(open_store(sys.argv[1], read_only=False), sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


RACE = """
import sys
from kit.cloud.simulated import simulated_cloud
from kit.data.stores import lock
from kit.data.stores.lock import write_lock
from kit.data.stores.url import open_store
from kit.errors import StoreLockedError
lock.SETTLE_SECONDS = 0.05
url = sys.stdin.readline().strip()
store = open_store(url, read_only=False)
print("ready", flush=True)
for line in sys.stdin:
    try:
        with write_lock(store, url):
            print("won", flush=True)
            sys.stdin.readline()
    except StoreLockedError as error:
        print("lost", error, flush=True)
        sys.stdin.readline()
    print("over", flush=True)
"""


def holder(token):
    """What this process would write into a lock."""
    values = {"host": socket.gethostname(), "pid": os.getpid(), "token": token, "beat": time.time()}
    return json.dumps(values).encode()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.1)


def test_the_second_writer_is_told_who_the_first_is(place, tiny_config):
    config = tiny_config(f"{place}/t.zarr")
    url = resolve_url(config.data.url)
    store = open_store(url, read_only=False)
    with (
        write_lock(store, url),
        pytest.raises(StoreLockedError, match=rf"written by process {os.getpid()} on .*wait"),
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

    def overtaken(store, key, data, url):
        write_object(store, key, data, url)
        write_object(store, key, holder("another"), url)
        return True

    monkeypatch.setattr(lock, "create_object", overtaken)  # as a store that takes no notice of conditions
    with pytest.raises(StoreLockedError), write_lock(store, url):
        pass


def test_a_held_lock_in_an_object_store_is_renewed(gcs, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    url = f"{gcs}/t.zarr"
    store = open_store(url, read_only=False)
    with write_lock(store, url):
        first = json.loads(read_object(store, LOCK_KEY, url))["beat"]
        wait_until(lambda: json.loads(read_object(store, LOCK_KEY, url))["beat"] != first)
    assert read_object(store, LOCK_KEY, url) is None


# -- two at the same moment


@contextlib.contextmanager
def racers(url):
    """Two processes that try for the store at the moment they are told."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", RACE], **pipes) for _ in range(2)]
    try:
        assert ask(processes, url) == [["ready"]] * 2
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def ask(processes, line):
    for process in processes:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return [process.stdout.readline().split(maxsplit=1) for process in processes]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "lost_before"), crossed(["gs", "s3"], [False, True]))
def test_of_two_processes_that_race_for_a_store_exactly_one_wins_every_time(cloud, scheme, lost_before):
    held = {"host": "elsewhere", "pid": 7, "token": "x", "beat": time.time() - lock.STALE_SECONDS - 1}
    url = cloud.url("race/t.zarr", scheme)
    store = open_store(url, read_only=False)
    with racers(url) as processes:
        for _ in range(20 if nightly() else 5):
            if lost_before:
                write_object(store, LOCK_KEY, json.dumps(held).encode(), url)
            answers = ask(processes, "go")
            assert sorted(answer[0] for answer in answers) == ["lost", "won"], answers
            (winner,) = (process for process, answer in zip(processes, answers, strict=True) if answer[0] == "won")
            (told,) = (answer[1] for answer in answers if answer[0] == "lost")
            assert f"process {winner.pid} on" in told
            assert ask(processes, "release") == [["over"]] * 2
            assert list_objects(store, ".kit", url) == []


@pytest.mark.parametrize("scheme", ["gs", "s3", "memory"])
def test_an_object_is_created_once(cloud, scheme):
    url = "memory://once/t.zarr" if scheme == "memory" else cloud.url("once/t.zarr", scheme)
    store = open_store(url, read_only=False)
    assert create_object(store, "a/b", b"first", url)
    assert not create_object(store, "a/b", b"second", url)
    assert read_object(store, "a/b", url) == b"first"
    delete_object(store, "a/b", url)
    assert create_object(store, "a/b", b"third", url)
    delete_object(store, "a/b", url)


def test_a_lock_whose_taker_was_lost_too_is_taken(cloud):
    url = cloud.url("race/twice.zarr")
    store = open_store(url, read_only=False)
    lost = json.dumps({"token": "x", "beat": 0.0}).encode()
    heir = f"{LOCK_KEY}.{crc32c(lost):08x}.partial"
    write_object(store, LOCK_KEY, lost, url)
    write_object(store, heir, holder("y"), url)
    with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on"), write_lock(store, url):
        pass  # while its taker lives
    write_object(store, heir, lost, url)
    with write_lock(store, url):
        assert list_objects(store, ".kit", url) == [LOCK_KEY]
    assert list_objects(store, ".kit", url) == []


def test_a_holder_that_lost_its_lock_while_it_slept_leaves_that_of_the_next_alone(cloud, monkeypatch, new_threads):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    url = cloud.url("race/slept.zarr")
    store = open_store(url, read_only=False)
    with write_lock(store, url):
        write_object(store, LOCK_KEY, holder("next"), url)
        wait_until(lambda: not new_threads("kit-lock"))
    assert json.loads(read_object(store, LOCK_KEY, url))["token"] == "next"
