"""Parts that a broken-off upload has left: listed, and dropped where nobody is sending them any more."""

from types import SimpleNamespace

import pytest

from kit.checkpoints.parts import part_key
from kit.checkpoints.uploading import BundleStore, unfinished_uploads, upload_checkpoint
from kit.data.stores.url import list_objects, open_store, write_object

SHA = "ab" * 32


@pytest.fixture(params=["file", "gs"])
def url(request, tmp_path):
    if request.param == "file":
        return str(tmp_path / "copies")
    return request.getfixturevalue("cloud").url("unfinished/run")


@pytest.fixture
def whole(url, tmp_path):
    """A whole checkpoint is there."""
    path = tmp_path / "step=2.ckpt"
    path.write_bytes(b"whole")
    upload_checkpoint(path, url)


def leave(url, name="step=4.ckpt", size=100, sha256=SHA):
    write_object(open_store(url, read_only=False), part_key(name, sha256), b"x" * size, url)


def test_where_nothing_is_nothing_is_unfinished(tmp_path):
    assert unfinished_uploads(str(tmp_path / "none"), drop=True) == []


def test_what_was_broken_off_is_listed_and_dropped_and_what_is_whole_stays(url, whole):
    leave(url)
    leave(url, sha256="cd" * 32, size=20)
    (found,) = unfinished_uploads(url)
    assert (found.url.rpartition("/")[2], found.parts, found.size_bytes) == ("step=4.ckpt", 2, 120)
    assert "2 parts, 120 B" in str(found)
    assert unfinished_uploads(url) == [found]
    assert unfinished_uploads(url, drop=True, quiet_seconds=0) == [found]
    assert unfinished_uploads(url) == []
    assert [bundle.name for bundle in BundleStore.open(url).all()] == ["step=2.ckpt"]
    assert len(list_objects(open_store(url), "", url)) == 2


def test_one_that_is_still_being_sent_is_left_alone(tmp_path, monkeypatch):
    url, watched = str(tmp_path / "copies"), []

    def send_meanwhile(seconds):
        watched.append(seconds)
        leave(url, name="step=6.ckpt", sha256="cd" * 32)

    leave(url)
    leave(url, name="step=6.ckpt")
    monkeypatch.setattr("kit.checkpoints.uploading.time", SimpleNamespace(sleep=send_meanwhile))
    dropped = unfinished_uploads(url, drop=True, quiet_seconds=2)
    assert watched == [2]
    assert [one.url.rpartition("/")[2] for one in dropped] == ["step=4.ckpt"]
    assert [one.parts for one in unfinished_uploads(url)] == [2]
