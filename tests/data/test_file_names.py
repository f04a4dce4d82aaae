"""Names of files: keys of a bucket stay within one folder, or the whole download is refused by name."""

import hashlib
import json
import subprocess
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.checkpoints.downloading import download_once, fetch_checkpoint
from kit.data.stores.local import check_names, make_file
from kit.errors import StoreError

HOSTILE = [
    ("../evil", "dots"),
    ("../../evil", "dots"),
    ("a/../../evil", "dots"),
    ("a/..", "dots"),
    ("./a", "dots"),
    ("a/./b", "dots"),
    ("..", "dots"),
    ("/etc/evil", "empty part"),
    ("//etc/evil", "empty part"),
    ("a//b", "empty part"),
    ("a/ /b", "empty part"),
    ("\u200b/b", "empty part"),
    ("..\\evil", "slash"),
    ("a\\b", "slash"),
    ("\\\\host\\share", "slash"),
    ("C:/evil", "drive"),
    ("c:evil", "drive"),
    ("a\nb", "control"),
    ("a\x1bb", "control"),
    ("a\x7fb", "control"),
    ("a\u2028b", "control"),
    ("\uff0e\uff0e/evil", "dots"),  # fullwidth dots
    ("\u2025/evil", "dots"),  # one character of two dots
    (".\u200b./evil", "dots"),  # a zero-width space between
    (".\ufeff.", "dots"),
    ("..\uff0fevil", "slash"),  # a fullwidth slash
    ("..\u2215evil", "slash"),  # a division slash
    ("..\u2044evil", "slash"),  # a fraction slash
    ("..\uff3cevil", "slash|dots"),  # a fullwidth backslash
    ("a\u2100b", "slash"),  # one character of "a/c"
    ("photo\u202egnp.exe", "direction"),
    ("a\u2066b", "direction"),
    ("x" * 256, "longer than 255"),
    ("ä" * 130, "longer than 255"),
    ("d/" * 2500 + "x", "longer than 4000"),
]
FINE = [
    "a", "deep/b", ".hidden", "..a", "a..", "...", "deep/...b", "0.0.0", "c/0/1/2", "zarr.json", "Größe/Zahl.npy",
    "2020-01-01T00:00:00.nc", "x y/z", "1\u00bd.txt", "日本/語.npy", "-rf", "~", "$(rm)", "%2e%2e%2fevil", "ab:c",
    "می\u200cخواهم.txt", "x" * 255,
]  # fmt: skip


@pytest.mark.parametrize(("key", "word"), [*HOSTILE, ("a\0b", "control"), ("a\ud800b", "control")])
def test_a_key_that_could_leave_the_folder_is_refused_by_name(key, word):
    with pytest.raises(StoreError, match=word) as caught:
        check_names(["fine", key], "gs://bucket/x")
    assert "gs://bucket/x" in str(caught.value)
    assert str(caught.value).isprintable()


def test_keys_that_are_only_unusual_are_files(tmp_path):
    check_names(FINE, "gs://bucket/x")
    for key in FINE:
        assert make_file(tmp_path, key).read_bytes() == b""
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == len(FINE)


@pytest.mark.parametrize("keys", [["a", "a/b"], ["a/b/c/d", "a/b"], ["x", "a", "x"]])
def test_keys_in_each_others_way_are_refused(keys):
    with pytest.raises(StoreError, match="file and folder|twice"):
        check_names(keys, "gs://bucket/x")


PARTS = st.one_of(
    st.sampled_from(["..", ".", "", "a", "A", "b", "C:", "\\", "\uff0e", "\u2025", "\u200b", "~", "\u202e", "e\u0301"]),
    st.text(max_size=4),
)
KEYS = st.one_of(st.lists(PARTS, min_size=1, max_size=5).map("/".join), st.text(max_size=12))


@given(keys=st.lists(KEYS, min_size=1, max_size=6))
def test_for_any_keys_each_becomes_one_file_within_the_folder_or_none_does(tmp_path_factory, keys):
    outside = tmp_path_factory.mktemp("keys")
    folder = outside / "one" / "two" / "target"
    folder.mkdir(parents=True)
    try:
        check_names(keys, "gs://bucket/x")
    except StoreError:
        return
    for key in keys:
        make_file(folder, key)
    made = {path for path in outside.rglob("*") if path.is_file()}
    assert made == {folder / key for key in keys}
    assert len(made) == len(keys)


def test_a_link_in_the_folder_is_not_followed(tmp_path):
    folder, outside = tmp_path / "target", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "sub").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    with pytest.raises(StoreError, match="link"):
        make_file(folder, "sub/evil")
    with pytest.raises(StoreError, match="file"):
        make_file(folder, "file")
    assert list(outside.iterdir()) == []


def test_where_letters_of_both_cases_are_equal_no_object_is_written_over_another(tmp_path):
    folder = tmp_path / "folded"
    folder.mkdir()
    folds = subprocess.run(["chattr", "+F", folder], capture_output=True, check=False).returncode == 0
    make_file(folder, "README" if folds else "readme")  # a file system that folds names says of both that it is there
    with pytest.raises(StoreError, match="upper and lower case"):
        make_file(folder, "readme")


# -- downloads


def put(cloud, key, data=b"evil"):
    urlopen(Request(f"{cloud.address}/{quote(key)}", data=data, method="PUT")).close()


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("key", ["../../evil", "/etc/evil", "a//b", "c\\d", "\uff0e\uff0e/evil", "good/file"])
def test_a_hostile_key_ends_a_download_before_a_byte_is_written(cloud, tmp_path, scheme, key):
    bucket = f"keys-{hashlib.sha256(key.encode()).hexdigest()[:8]}-{scheme}"
    url = cloud.url(f"{bucket}/x", scheme)
    put(cloud, f"{bucket}/x/good")
    put(cloud, f"{bucket}/x/{key}")
    target = tmp_path / "home" / "target"
    target.parent.mkdir()
    with pytest.raises(StoreError, match="within a folder"):
        download_once(url, target)
    assert everything(tmp_path) == ["home"]


def test_marks_of_empty_folders_are_left_out(cloud, tmp_path):
    url = cloud.url("marks/x", "gs")
    for key, data in (("sub/", b""), ("sub/b", b"1"), ("a", b"2")):
        put(cloud, f"marks/x/{key}", data)
    assert everything(download_once(url, tmp_path / "there")) == ["a", "sub", "sub/b"]
    put(cloud, "marks/x/full/", b"3")
    with pytest.raises(StoreError, match="'full/'"):
        download_once(url, tmp_path / "again")


def write_parcel(folder: Path, name, paths):
    """A checkpoint as an upload leaves it, whose list says where its files go."""
    data = b"weights"
    sha256 = hashlib.sha256(data).hexdigest()
    (folder / name / "parts").mkdir(parents=True)
    (folder / name / "parts" / sha256).write_bytes(data)
    parts = [{"sha256": sha256, "size_bytes": len(data)}]
    files = [{"path": path, "parts": parts} for path in paths]
    content = {"format": "kit parcel 1", "name": name, "saved": 1.0, "files": files}
    (folder / name / "kit-parcel.json").write_text(json.dumps(content))


@pytest.mark.parametrize("path", [key for key, _ in HOSTILE] + ["a\0b", "good/file", "good"])
def test_a_checkpoint_with_a_hostile_path_is_refused_before_a_byte_is_written(tmp_path, path):
    write_parcel(tmp_path / "cloud", "step-1", ["good", path])
    before = everything(tmp_path)
    with pytest.raises(StoreError, match="within a folder"):
        fetch_checkpoint(str(tmp_path / "cloud"), tmp_path / "fetched")
    assert everything(tmp_path) == before


def test_a_checkpoint_of_usual_paths_comes(tmp_path):
    write_parcel(tmp_path / "cloud", "step-1", ["a", "b/.metadata", "b/__0_0.distcp"])
    found = fetch_checkpoint(str(tmp_path / "cloud"), tmp_path / "fetched")
    assert {path.read_bytes() for path in found.rglob("*") if path.is_file()} == {b"weights"}


def test_a_record_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "source").write_bytes(b"data")
    (tmp_path / "precious").write_text("a year of work")
    (tmp_path / "there.download.json").symlink_to(tmp_path / "precious")
    download_once(str(tmp_path / "source"), tmp_path / "there")
    assert (tmp_path / "precious").read_text() == "a year of work"
    assert (tmp_path / "there").read_bytes() == b"data"


def test_a_draft_that_is_a_link_is_not_written_through(tmp_path):
    source, precious = tmp_path / "source", tmp_path / "precious"
    source.mkdir()
    precious.mkdir()
    (source / "a").write_bytes(b"data")
    (precious / "a").write_text("a year of work")
    (tmp_path / "there.partial").symlink_to(precious)
    download_once(str(source), tmp_path / "there")
    assert (precious / "a").read_text() == "a year of work"
    assert not (tmp_path / "there").is_symlink()
