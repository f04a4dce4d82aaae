"""Uploads: seen only when whole, sent once, and on from where a kill left them."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_until

from kit.checkpoints.downloading import fetch_checkpoint
from kit.checkpoints.parts import Bundle, BundlePart, PackedFile, part_key, spans
from kit.checkpoints.uploading import BundleStore, SourceChanged, UploadCancelled, latest_checkpoint, upload_checkpoint
from kit.data.stores.local import why_not
from kit.data.stores.url import list_objects, open_store, read_object, write_object
from kit.errors import CorruptChunkError, StoreError

VICTIM = Path(__file__).with_name("transfer_victims.py")
PART = 1 << 16
DATA = random.Random(8).randbytes(12 * PART + 100)
LONG = random.Random(9).randbytes(40 * PART)
PASSING = ("408", "429", "500", "503", "reset", "lost")


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "here" / "epoch=1-step=40.ckpt"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return path


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint of several files, one of them empty, two of them alike."""
    folder = tmp_path / "here" / "sharded.ckpt"
    (folder / "ranks").mkdir(parents=True)
    for name, data in ((".metadata", b"m"), ("ranks/0", DATA), ("ranks/1", DATA), ("empty", b"")):
        (folder / name).write_bytes(data)
    return folder


def send(path, url, **options):
    return BundleStore.open(url).send(path, **{"part_bytes": PART, **options})


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def after_writing(store, count, work):
    """Have `await work()` done in the middle of a sending: once so many objects have been written."""
    put, written = store.set, []

    async def noting(key, value):
        await put(key, value)
        written.append(key)
        if len(written) == count:
            await work()

    store.set = noting


# -- every kind of store


def test_a_file_and_a_folder_come_back_as_they_were_and_are_sent_once(place, checkpoint, sharded, tmp_path):
    url = f"{place}/run/checkpoints"
    assert latest_checkpoint(url) is None
    assert fetch_checkpoint(url, tmp_path / "none") is None
    os.utime(checkpoint, (1000, 1000))
    first = upload_checkpoint(checkpoint, url)
    assert first.sent_bytes == first.bundle.size_bytes == len(DATA)
    assert upload_checkpoint(checkpoint, url).sent_bytes == 0
    send(sharded, url)
    assert latest_checkpoint(url) == f"{first.url.rpartition('/')[0]}/sharded.ckpt"  # it was saved later
    assert content(fetch_checkpoint(url, tmp_path / "there")) == content(sharded)
    assert fetch_checkpoint(first.url, tmp_path / "there").read_bytes() == DATA


@pytest.mark.parametrize("place", ["file", "gs"], indirect=True)
def test_equal_parts_are_sent_and_kept_once(place, sharded):
    sent = send(sharded, f"{place}/equal")
    assert sent.sent_bytes == len(DATA) + 1
    assert sent.bundle.size_bytes == 2 * len(DATA) + 1


@pytest.mark.parametrize("place", ["file", "gs"], indirect=True)
def test_the_oldest_go_when_so_many_are_to_be_kept(place, tmp_path):
    url = f"{place}/kept"
    for number in range(4):
        path = tmp_path / f"step={number}.ckpt"
        path.write_bytes(DATA[number : number + PART])
        os.utime(path, (number + 1, number + 1))
        upload_checkpoint(path, url, keep=2)
    assert [bundle.name for bundle in BundleStore.open(url).all()] == ["step=2.ckpt", "step=3.ckpt"]
    assert len(list_objects(open_store(url), "", url)) == 4  # a part and a list of each


@pytest.mark.parametrize("place", ["file", "gs"], indirect=True)
def test_a_new_one_of_the_same_name_takes_the_place_of_the_old_one(place, checkpoint, tmp_path):
    url = f"{place}/again"
    send(checkpoint, url)
    checkpoint.write_bytes(DATA[: 3 * PART] + b"new")
    sent = send(checkpoint, url)
    assert sent.sent_bytes == 3
    assert len(list_objects(open_store(url), "", url)) == 5  # nothing of the old one is left
    found = fetch_checkpoint(url, tmp_path / "there")
    assert found.read_bytes() == checkpoint.read_bytes()
    checkpoint.write_bytes(DATA[::-1])
    send(checkpoint, url)
    newer = fetch_checkpoint(url, tmp_path / "there")
    assert newer.name == found.name == checkpoint.name
    assert newer.read_bytes() == DATA[::-1]


# -- bad days


@pytest.mark.parametrize(("scheme", "fault"), [*(("gs", fault) for fault in PASSING), ("s3", "503"), ("s3", "lost")])
def test_what_passes_is_tried_again(cloud, checkpoint, tmp_path, scheme, fault):
    url = cloud.url(f"passing/{scheme}-{fault}", scheme)
    checkpoint.write_bytes(DATA[: 3 * PART])
    cloud.script("passing/*", [fault, fault])
    sent = send(checkpoint, url)
    assert cloud.counts().faults[fault] > len(sent.bundle.files[0].parts)
    cloud.forget_scripts().script("passing/*", [fault, "truncate"], kind="read")
    assert fetch_checkpoint(url, tmp_path / "there").read_bytes() == checkpoint.read_bytes()


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_whatever_chance_brings_what_arrives_is_whole(cloud, sharded, tmp_path, scheme):
    url = cloud.url(f"chance/{scheme}", scheme)
    faults = {"503": 0.1, "429": 0.05, "reset": 0.05, "lost": 0.05, "truncate": 0.1}
    cloud.turn(faults=faults, seed=4)
    send(sharded, url)
    assert content(fetch_checkpoint(url, tmp_path / "there")) == content(sharded)
    assert cloud.counts().faults


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_nothing_is_seen_until_the_list_is_there_and_then_no_part_is_sent_again(cloud, checkpoint, scheme):
    url = cloud.url(f"unseen/{scheme}", scheme)
    cloud.script("unseen/*/kit-parcel.json", [403], kind="write")
    with pytest.raises(StoreError, match=r"data\.credentials.*rights"):
        send(checkpoint, url)
    assert latest_checkpoint(url) is None
    assert send(checkpoint, url).sent_bytes == 0
    assert latest_checkpoint(url) == f"{url}/{checkpoint.name}"


def test_the_old_one_holds_until_the_new_one_is_whole(cloud, checkpoint, tmp_path):
    url = cloud.url("holds/run")
    send(checkpoint, url)
    checkpoint.write_bytes(DATA[::-1])
    cloud.script("holds/*/parts/*", [403], kind="write")
    cancelled = threading.Event()
    with pytest.raises(StoreError, match=r"data\.credentials.*rights"):
        send(checkpoint, url, cancelled=cancelled)
    assert fetch_checkpoint(url, tmp_path / "old").read_bytes() == DATA
    cloud.forget_scripts()
    assert not cancelled.is_set()  # that is its caller's to say
    send(checkpoint, url, cancelled=cancelled)
    assert fetch_checkpoint(url, tmp_path / "new").read_bytes() == DATA[::-1]


@pytest.mark.parametrize("change", ["longer", "removed"])
def test_what_changes_while_it_is_sent_is_not_published(cloud, checkpoint, change):
    url = cloud.url(f"changing/{change}")
    checkpoint.write_bytes(LONG)
    bundles = BundleStore.open(url)

    async def spoil():
        if change == "removed":
            checkpoint.unlink()
        else:
            os.truncate(checkpoint, len(LONG) + 1)

    after_writing(bundles.store, 3, spoil)
    with pytest.raises(SourceChanged, match="nothing was published"):
        bundles.send(checkpoint, part_bytes=PART, at_once=1)
    assert latest_checkpoint(url) is None


def test_what_is_given_up_goes_on_later(cloud, checkpoint):
    url = cloud.url("given-up/run")
    bundles, over = BundleStore.open(url), threading.Event()
    checkpoint.write_bytes(LONG)

    async def give_up():
        over.set()
        await asyncio.Event().wait()  # for ever

    after_writing(bundles.store, 8, give_up)
    with pytest.raises(UploadCancelled):
        bundles.send(checkpoint, part_bytes=PART, at_once=1, cancelled=over)
    assert latest_checkpoint(url) is None
    assert send(checkpoint, url).sent_bytes == len(LONG) - 8 * PART


@pytest.mark.fault
@pytest.mark.parametrize("scheme", ["gs", "s3", "file"])
def test_after_a_kill_in_the_middle_nothing_is_seen_and_only_the_rest_is_sent(cloud, checkpoint, tmp_path, scheme):
    remote = scheme != "file"
    checkpoint.write_bytes(data := LONG if remote else DATA * 60)
    url = cloud.url(f"killed/{scheme}", scheme) if remote else str(tmp_path / "killed")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    victim = subprocess.Popen([sys.executable, str(VICTIM), "upload", str(checkpoint), url], **pipes)
    try:
        assert victim.stdout.readline() == "10 parts are there\n"
        if remote:  # in the middle of the next one
            cloud.turn(latency_seconds=1)
            victim.stdin.write("go\n")
            victim.stdin.flush()
            wait_until(lambda: cloud.counts().in_flight)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    assert latest_checkpoint(url) is None
    if remote:
        cloud.turn("no limits")
    mark = cloud.counts()
    sent = send(checkpoint, url)
    assert 0 < sent.sent_bytes <= len(data) - 10 * PART
    if remote:
        assert cloud.counts(mark).bytes_received < len(data) - 5 * PART
    assert fetch_checkpoint(url, tmp_path / "there").read_bytes() == data


# -- bad input


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "a\\b", "a\0b", "a\nb"])
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path, checkpoint, name):
    with pytest.raises(StoreError, match="plain name"):
        upload_checkpoint(checkpoint, str(tmp_path / "cloud"), name=name)


@pytest.mark.parametrize("path", ["/etc/passwd", "../../x", "a/../../x"])
def test_a_list_that_leads_out_of_its_folder_is_refused(tmp_path, sharded, path):
    url = str(tmp_path / "cloud")
    send(sharded, url)
    key = "sharded.ckpt/kit-parcel.json"
    store = open_store(url, read_only=False)
    write_object(store, key, read_object(store, key, url).replace(b"ranks/0", path.encode()), url)
    with pytest.raises(StoreError, match="within a folder"):
        fetch_checkpoint(url, tmp_path / "there")
    write_object(store, key, b'{"format": "kit parcel 9"}', url)
    with pytest.raises(StoreError, match="list of parts"):
        latest_checkpoint(url)


def test_a_folder_that_could_not_be_fetched_again_is_not_uploaded(tmp_path, sharded):
    (sharded / "a\\b").write_bytes(b"1")
    with pytest.raises(StoreError, match="within a folder"):
        send(sharded, str(tmp_path / "cloud"))
    assert not list((tmp_path / "cloud").rglob("*"))


def test_a_part_that_was_replaced_is_found_and_nothing_arrives(tmp_path, checkpoint):
    url = str(tmp_path / "cloud")
    part = send(checkpoint, url).bundle.files[0].parts[7]
    write_object(open_store(url, read_only=False), part_key(checkpoint.name, part.sha256), b"\1" * PART, url)
    with pytest.raises(CorruptChunkError, match="replaced or damaged"):
        fetch_checkpoint(url, tmp_path / "there")
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_a_part_that_was_cut_short_is_sent_again(tmp_path, checkpoint):
    url = str(tmp_path / "cloud")
    part = send(checkpoint, url).bundle.files[0].parts[7]
    write_object(open_store(url, read_only=False), part_key(checkpoint.name, part.sha256), b"\1", url)
    assert send(checkpoint, url).sent_bytes == part.size_bytes
    assert fetch_checkpoint(url, tmp_path / "there").read_bytes() == DATA


def test_a_source_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        upload_checkpoint(tmp_path / "none.ckpt", str(tmp_path / "cloud"))


# -- the format


@given(size=st.integers(0, 10_000), part=st.integers(1, 3000))
def test_parts_cover_every_byte_once(size, part):
    cuts = spans(size, part)
    assert [byte for first, last in cuts for byte in range(first, last)] == list(range(size))
    assert all(0 < last - first <= part for first, last in cuts)


names = st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="/\\."), min_size=1).filter(
    lambda name: not why_not(name)
)
parts = st.builds(BundlePart, st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(1, 1 << 40))
files = st.builds(PackedFile, names, st.lists(parts, max_size=3).map(tuple))


@given(
    st.builds(
        Bundle, names, st.floats(0, 1e11), st.lists(files, max_size=3, unique_by=lambda file: file.path).map(tuple)
    )
)
def test_a_list_reads_back_as_it_was_written(bundle):
    assert Bundle.load(bundle.dump(), "here") == bundle
