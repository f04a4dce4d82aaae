"""URLs, credentials and errors of stores."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import PATIENCE_SECONDS
from zarr.storage import FsspecStore, LocalStore

from kit.data.open_dataset import open_dataset
from kit.data.stores.url import (
    answer_seconds,
    delete_object,
    is_shared,
    list_objects,
    open_store,
    read_object,
    redact,
    resolve_url,
    store_error,
    write_object,
)
from kit.errors import StoreError, UnreachableStoreError

CANARY = "canary-7f3a9b2c"


def test_a_relative_path_starts_at_the_project_folder(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert resolve_url("data/x.zarr") == str(tmp_path / "data" / "x.zarr")
    assert resolve_url(f"file://{tmp_path}/y.zarr") == str(tmp_path / "y.zarr")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "names no store"),
        ("a\0b", "names no store"),
        ("simplecache::gs://bucket/x", "chained"),
        ("reference://x", "wraps another"),
        ("simplecache://x", "wraps another"),
        ("gss://bucket/x", "did you mean"),
        ("wibble://bucket/x", "unknown scheme"),
        ("gs://", "no bucket"),
        (f"https://user:{CANARY}@host/x.zarr", "credentials"),
        (f"https://host/x.zarr?sig={CANARY}", "query"),
    ],
)
def test_a_url_that_names_no_store_is_refused_without_showing_secrets(url, text):
    with pytest.raises(StoreError, match=text) as caught:
        open_store(url)
    assert CANARY not in str(caught.value)


def test_redaction_keeps_the_place_and_drops_the_secrets():
    assert redact(f"https://user:{CANARY}@host:8080/a/b?token={CANARY}#f") == "https://host:8080/a/b"
    assert redact("gs://bucket/x.zarr") == "gs://bucket/x.zarr"
    assert redact("/data/x.zarr") == "/data/x.zarr"


def test_only_memory_is_not_shared():
    assert not is_shared("memory://x")
    assert all(is_shared(url) for url in ("/data/x.zarr", "gs://bucket/x", "https://host/x"))


def test_objects_come_back_as_written_and_are_listed(place):
    store = open_store(place, read_only=False)
    assert read_object(store, "a/b", place) is None
    write_object(store, "a/b", b"12345", place)
    write_object(store, "c", b"", place)
    assert read_object(store, "a/b", place) == b"12345"
    assert list_objects(store, "", place) == ["a/b", "c"]
    assert list_objects(store, "a", place) == ["a/b"]
    delete_object(store, "a/b", place)
    assert read_object(store, "a/b", place) is None
    delete_object(store, "a/b", place)


def test_a_read_only_store_refuses_writes(place):
    write_object(open_store(place, read_only=False), "a", b"1", place)
    with pytest.raises(StoreError):
        write_object(open_store(place), "a", b"2", place)
    assert read_object(open_store(place), "a", place) == b"1"


def test_folders_and_urls_open_as_the_store_that_fits(tmp_path):
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store("memory://x"), FsspecStore)


def test_a_folder_that_is_not_there_and_a_file_in_its_place_say_so(tmp_path):
    with pytest.raises(StoreError, match=r"does not exist.*kit\.build"):
        open_store(str(tmp_path / "none.zarr"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize("scheme", ["gs", "s3", "http"])
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_a_proxy_that_does_not_answer_is_named_and_a_host_without_one_is_asked(cloud, monkeypatch, scheme, name):
    url = cloud.url("bucket/x.zarr", scheme)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"no connection to the proxy 127\.0\.0\.1:9 .*no_proxy"):
        open_store(url, "anonymous")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    open_store(url, "anonymous").close()


def test_a_host_that_does_not_answer_is_refused_after_one_short_attempt(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    connect, attempts = socket.create_connection, []

    def noting(address, timeout):
        attempts.append((address, timeout))
        return connect(address, timeout)

    monkeypatch.setattr("kit.data.stores.url.socket.create_connection", noting)
    for url in ("gs://bucket/x.zarr", "http://127.0.0.1:9/x.zarr"):
        with pytest.raises(StoreError, match=r"no connection to 127\.0\.0\.1:9"):
            open_store(url)
    assert [address for address, _ in attempts] == [("127.0.0.1", 9)] * 2
    assert all(0 < timeout < 10 for _, timeout in attempts)


OPEN_ALL = """
import json, sys
from kit.data.open_dataset import open_dataset

for url in sys.argv[1:]:
    for credentials in ("default", "anonymous"):
        try:
            open_dataset(url, credentials)
        except OSError as error:
            print(json.dumps([url, type(error).__name__, str(error)]), flush=True)
"""
HOSTS = {
    "gs://ocean/x.zarr": "storage.googleapis.com:443", "s3://ocean/x.zarr": "s3.amazonaws.com:443",
    "az://ocean/x.zarr": "sea.blob.core.windows.net:443", "https://ocean.invalid/x.zarr": "ocean.invalid:443",
    "http://127.0.0.1:9/x.zarr": "127.0.0.1:9",
}  # fmt: skip


@pytest.fixture
def without_network(tmp_path):
    """The beginning of a command that has no network at all, and its environment."""
    for begins in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which("unshare") and not subprocess.call([*begins, "true"], stderr=subprocess.DEVNULL):
            kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
            return begins, kept | {"HOME": str(tmp_path), "AZURE_STORAGE_ACCOUNT_NAME": "sea"}
    pytest.skip("this system takes no network away")


def test_without_a_network_each_kind_of_store_names_what_was_tried_and_what_can_be_read_instead(without_network):
    begins, environment = without_network
    command = [*begins, sys.executable, "-c", OPEN_ALL, *HOSTS]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [url for url, _, _ in told] == [url for url in HOSTS for _ in range(2)]
    for url, kind, text in told:
        assert (kind, url in text, HOSTS[url] in text) == ("UnreachableStoreError", True, True)
        assert all(way in text for way in ("data.url", "kit.data.prefetch", "kit.cloud.simulate"))


def test_a_server_of_names_that_never_answers_is_given_up(monkeypatch):
    ended = threading.Event()

    def hang(*_):
        ended.wait(PATIENCE_SECONDS)
        raise OSError  # so that nothing is looked up behind the test

    monkeypatch.setattr("kit.data.stores.url.refuse_resolved", hang)
    monkeypatch.setattr("kit.data.stores.url._REACH_SECONDS", 0.1)
    with pytest.raises(UnreachableStoreError, match=r"ocean\.invalid:443 .*no answer within 0\.1 s"):
        open_store("https://ocean.invalid/x.zarr")
    ended.set()


def test_credentials_that_are_not_set_name_the_variable(monkeypatch):
    monkeypatch.delenv("OCEAN_KEY", raising=False)
    with pytest.raises(StoreError, match="environment variable OCEAN_KEY.*not set"):
        open_store("https://example.invalid/x.zarr", "env:OCEAN_KEY")


@pytest.mark.parametrize(("server", "secret"), [("gcs", CANARY), ("s3", f"tests:{CANARY}")])
def test_a_secret_never_reaches_reprs_errors_or_pickles(request, server, secret, tiny_config, monkeypatch):
    from kit.data.build.build import build

    prefix = request.getfixturevalue(server)
    monkeypatch.setenv("OCEAN_CREDENTIAL", secret)
    config = tiny_config(f"{prefix}/x.zarr", data__credentials="env:OCEAN_CREDENTIAL")
    dataset = build(config, progress=False)
    store = dataset.open_store()
    shown = [
        repr(store),
        str(store),
        repr(dataset),
        str(dataset),
        dataset._repr_html_(),
        repr(config),
        config.to_yaml(),
    ]
    assert all(CANARY not in text for text in shown)
    assert CANARY.encode() not in pickle.dumps(dataset)
    with pytest.raises(StoreError) as caught:
        open_dataset(f"{prefix}/none.zarr", "env:OCEAN_CREDENTIAL")
    assert CANARY not in str(caught.value)


def test_an_error_from_below_is_scrubbed(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", CANARY)
    monkeypatch.setenv("PLAIN", "wordless")
    url = "https://host/x.zarr"
    for text in (
        f"403 for https://u:{CANARY}@host/x",
        f"GET https://host/x?X-Goog-Signature={CANARY}&a=1 failed",
        f"Bearer {CANARY} refused",
        f"something with {CANARY} inside",
    ):
        error = store_error(url, OSError(text))
        assert CANARY not in str(error)
        assert "https://host/x.zarr" in str(error)
    assert "credentials" in str(store_error(url, PermissionError("403 Forbidden")))


def test_a_store_url_may_hold_spaces_and_letters_of_any_language(tmp_path):
    folder = str(tmp_path / "Größe und Zahl.zarr")
    write_object(open_store(folder, read_only=False), "a", b"1", folder)
    assert (Path(folder) / "a").read_bytes() == b"1"


def test_a_store_may_take_longer_to_answer_where_programs_wait_for_the_cores(monkeypatch):
    monkeypatch.setattr("kit.machine.machine.share", lambda: SimpleNamespace(cores=2))
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    alone = answer_seconds()
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    assert answer_seconds() == 3 * alone
