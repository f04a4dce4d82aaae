"""Downloads: once for all processes of a machine, whole or not at all."""

import hashlib
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from kit.checkpoints import downloading
from kit.checkpoints.downloading import download_once
from kit.data.stores.lock import turn_at
from kit.errors import CorruptChunkError, MissingChunkError, StoreError, StoreLockedError

VICTIM = Path(__file__).with_name("transfer_victims.py")
DATA = random.Random(6).randbytes(1_000_000)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "source"
    for name, data in (("a", DATA), ("deep/b", DATA[:100]), ("empty", b"")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
    return place


@pytest.fixture
def many_pieces(monkeypatch):
    """As if objects were large: read in pieces."""
    monkeypatch.setattr(downloading, "_DEFAULTS", downloading._DEFAULTS.model_copy(update={"part_bytes": 1 << 16}))


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_folder_of_objects_comes_as_it_is(cloud, folder, tmp_path, scheme):
    url = cloud.upload(folder, f"folder/{scheme}", scheme)
    assert content(download_once(url, tmp_path / "there")) == content(folder)


@pytest.mark.parametrize("scheme", ["gs", "s3", "http", "file"])
def test_one_object_comes_in_pieces_that_are_checked(cloud, folder, tmp_path, scheme, many_pieces):
    url = str(folder / "a") if scheme == "file" else cloud.upload(folder / "a", f"object/{scheme}/a", scheme)
    sha256 = hashlib.sha256(DATA).hexdigest()
    assert download_once(url, tmp_path / "there", sha256=sha256).read_bytes() == DATA
    if scheme != "file":  # one more where it is asked for a list of parts
        assert cloud.counts().kinds["read"].requests in (16, 17)
    with pytest.raises(CorruptChunkError, match=f"is {sha256}, not 00"):
        download_once(url, tmp_path / "wrong", sha256="00")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("fault", ["503", "reset", "truncate"])
def test_what_passes_is_tried_again(cloud, folder, tmp_path, fault):
    url = cloud.upload(folder, f"bad/{fault}")
    cloud.script("bad/*", [fault, fault])
    assert content(download_once(url, tmp_path / "there")) == content(folder)
    assert cloud.counts().faults[fault] >= 2


@pytest.mark.slow
def test_of_three_processes_one_reads_and_all_have_it(cloud, folder, tmp_path):
    url = cloud.upload(folder, "three/x")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, str(VICTIM), "download", url, str(tmp_path / "there")]
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        cloud.turn(latency_seconds=0.1)
        answers = [process.communicate("go\n", timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [answer.strip() for answer in answers] == [str(tmp_path / "there")] * 3
    assert content(tmp_path / "there") == content(folder)
    # two files with bytes in them, and whether there is a list of parts
    assert cloud.counts().kinds["read"].requests == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there", "there.download.json"]


def test_what_is_there_is_not_asked_for_again(cloud, folder, tmp_path):
    url = cloud.upload(folder, "again/x")
    download_once(url, tmp_path / "there")
    cloud.reset_counts()
    download_once(url, tmp_path / "there")
    assert cloud.counts().requests == 0


def test_what_has_changed_here_is_neither_used_nor_lost(cloud, folder, tmp_path):
    url = cloud.upload(folder, "changed/x")
    download_once(url, tmp_path / "there")
    (tmp_path / "there" / "a").write_bytes(b"a correction")
    with pytest.raises(StoreError, match="has changed since .*remove"):
        download_once(url, tmp_path / "there")
    assert (tmp_path / "there" / "a").read_bytes() == b"a correction"
    shutil.rmtree(tmp_path / "there")
    assert content(download_once(url, tmp_path / "there")) == content(folder)


def test_what_something_else_put_there_is_left_alone(cloud, folder, tmp_path):
    url = cloud.upload(folder, "mine/x")
    (tmp_path / "mine").write_text("a year of work")
    with pytest.raises(StoreError, match="not downloaded"):
        download_once(url, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "a year of work"
    download_once(url, tmp_path / "there")
    with pytest.raises(StoreError, match="downloaded from gs://mine/x"):
        download_once(cloud.url("mine/y"), tmp_path / "there")


def test_where_there_is_nothing_it_says_so_and_leaves_nothing(cloud, tmp_path):
    with pytest.raises(MissingChunkError, match="there is nothing"):
        download_once(cloud.url("nothing/x"), tmp_path / "there")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault
def test_after_a_kill_in_the_middle_nothing_is_there_and_the_next_one_brings_it(cloud, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(60):
        (source / str(number)).write_bytes(DATA[:50_000])
    url = cloud.upload(source, "killed/x")
    cloud.turn(drip_bytes_per_second=1000).script("killed/x/7", ["drip"])  # so that the kill comes before the end
    command = [sys.executable, str(VICTIM), "download", url, str(tmp_path / "there")]
    victim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        victim.stdin.write(b"go\n")
        victim.stdin.flush()
        wait_until(lambda: "read" in (counts := cloud.counts()).kinds and counts.kinds["read"].requests >= 10)
        wait_until(lambda: "drip" in cloud.counts().faults)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    assert not (tmp_path / "there").exists()
    cloud.turn("no limits").forget_scripts()
    assert content(download_once(url, tmp_path / "there")) == content(source)
    assert not (tmp_path / "there.partial").exists()


def test_who_waits_too_long_for_another_says_for_whom(cloud, folder, tmp_path):
    url = cloud.upload(folder, "waits/x")
    with turn_at(tmp_path / "there.lock", 5), pytest.raises(StoreLockedError, match="process"):
        download_once(url, tmp_path / "there", wait_seconds=0.2)
    assert download_once(url, tmp_path / "there").is_dir()
