"""Azure, readers who pay, keys that run out in an epoch, and a proxy: on loopback, by the requests that are sent."""

from __future__ import annotations

import gc
import http.server
import json
import threading
import weakref
from datetime import UTC, datetime, timedelta
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import pytest
import zarr
from azure_stub import ACCOUNT, KEY, azure
from waiting import PATIENCE_SECONDS, wait_until
from zarr_stores import write_array

import kit
from kit.cloud.simulated import simulated_cloud
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.stores import auth
from kit.data.stores.auth import address_of
from kit.data.stores.counters import Counters
from kit.data.stores.http import HttpClient
from kit.data.stores.url import open_store
from kit.data.stream.engine import Engine
from kit.errors import ConfigError, StoreError
from kit.machine.endpoints import VARIABLE

pytest.importorskip("adlfs")
SHAPE = (4, 20, 30)
VALUES = np.random.default_rng(3).normal(size=SHAPE).astype("f4")


@pytest.fixture
def blobs(tmp_path, monkeypatch):
    """A service with a store in it, and its connection string where credentials can name it."""
    with azure() as running:
        write_array(tmp_path / "s", "a", VALUES, chunks=(2, 10, 10), shards=(4, 20, 30))
        for file in (tmp_path / "s").rglob("*"):
            if file.is_file():
                running.blobs[f"box/data/{file.relative_to(tmp_path / 's')}"] = file.read_bytes()
        monkeypatch.setenv("MINE", running.connection)
        yield running


def read(url, credentials, count=2):
    with Engine(open_dataset(url, credentials), requests_in_flight=4) as engine:
        batches = [np.array([[0, 3, step], [2, 7, 11]]) for step in range(count)]
        found = [values for values, _ in engine.stream(batches, (2, 8, 9))]
        client = type(engine._open()._client).__name__
    for offsets, values in zip(batches, found, strict=True):
        for (time, lat, lon), one in zip(offsets, values, strict=True):
            assert np.array_equal(one[0], VALUES[time : time + 2, lat : lat + 8, lon : lon + 9])
    return client


@pytest.mark.parametrize("scheme", ["az", "abfs"])
def test_a_store_on_azure_is_read_by_the_fast_client_with_a_key(blobs, scheme):
    assert read(f"{scheme}://box/data", "env:MINE") == "HttpClient"
    signed = [query for _, name, query, headers in blobs.seen if "/c/" in name and "Authorization" not in headers]
    assert signed
    assert all(query["sp"] == "r" for query in signed)  # for reading only


def test_a_store_on_azure_is_built_and_verified(blobs, tiny_config):
    config = tiny_config("az://box/tiny.zarr", data__credentials="env:MINE")
    kit.build(config, progress=False)
    assert "box/tiny.zarr/.kit/manifest.json" in blobs.blobs
    kit.data.verify(config.data.url, config.data.credentials)
    data = kit.data.PatchData(config.replace({"data.patch": {"lat": 3, "lon": 4}, "data.samples_per_epoch": 32}))
    assert sum(len(batch["values"]) for batch in data.train_dataloader()) == 32
    data.teardown()


def test_a_store_on_azure_that_nobody_holds_is_closed(blobs):
    store = open_store("az://box/data", "env:MINE")
    assert zarr.open_group(store, mode="r")["a"].shape == SHAPE
    fs, session = weakref.ref(store.fs), store.fs.service_client._pipeline._transport.session
    assert not session.closed
    del store
    wait_until(lambda: gc.collect() >= 0 and fs() is None, what="letting go of the store")  # twice with Python 3.12
    wait_until(lambda: session.closed, what="closing the connections")


def test_a_shared_access_signature_is_enough_and_one_that_ran_out_is_told(blobs, monkeypatch):
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    for hours, name in ((1, "GOOD"), (-1, "LATE")):
        signature = generate_container_sas(
            ACCOUNT, "box", account_key=KEY, permission=ContainerSasPermissions(read=True, list=True),
            expiry=datetime.now(UTC) + timedelta(hours=hours),
        )  # fmt: skip
        connection = f"BlobEndpoint={blobs.endpoint};AccountName={ACCOUNT};SharedAccessSignature={signature}"
        monkeypatch.setenv(name, connection)
    assert read("az://box/data", "env:GOOD") == "HttpClient"
    with pytest.raises(StoreError, match=r"data\.credentials") as caught:
        open_dataset("az://box/data", "env:LATE")
    assert "sig=" not in str(caught.value)


def test_a_signature_of_a_key_is_renewed_in_an_epoch(blobs, monkeypatch):
    made = []
    monkeypatch.setattr(auth, "_SIGNED_SECONDS", 1.0)
    monkeypatch.setattr(auth, "_RENEW_SECONDS", 1.0)  # so that each is too old for the next request
    sign = auth._Signature.__call__
    monkeypatch.setattr(auth._Signature, "__call__", lambda self: made.append(sign(self)) or made[-1])
    store = open_store("az://box/data", "env:MINE")
    client = HttpClient(address_of(store, "az://box/data"), "az://box/data", 2, PATIENCE_SECONDS, Counters())
    for _ in range(2):
        assert len(client.read("zarr.json"))
    client.close()
    store.close()
    assert len(made) == 2


def test_an_account_that_nothing_names_is_told(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_dataset("az://box/data")


# -- what is sent


class _Noting(http.server.BaseHTTPRequestHandler):
    """Answers every request with `0123456789`, or passes it on as a proxy does, and notes its head."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        status, data = 206, b"0123456789"
        if self.path.startswith("http://"):
            direct = build_opener(ProxyHandler({}))
            try:
                answer = direct.open(Request(self.path, headers=dict(self.headers), method=self.command))
            except HTTPError as error:
                answer = error
            with answer:
                status, data = answer.status, answer.read()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def noting(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Noting)
    server.seen, server.address = [], f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(url, credentials, times=1):
    store = open_store(url, credentials)
    client = HttpClient(address_of(store, url), url, 2, PATIENCE_SECONDS, Counters())
    try:
        return [bytes(client.read("a", 0, 10)) for _ in range(times)]
    finally:
        client.close()


def test_a_reader_who_pays_says_so_in_a_signed_header(noting, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"s3://b": noting.address}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-2")
    assert ask("s3://b/x", "requester-pays") == [b"0123456789"]
    _, headers = noting.seen[-1]
    assert headers["x-amz-request-payer"] == "requester"
    assert "x-amz-request-payer" in headers["authorization"].partition("SignedHeaders=")[2]


def test_a_project_that_pays_is_named_to_google(noting, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"gs://b": noting.address}))
    monkeypatch.setenv("MINE", json.dumps({"token": "anon", "requester_pays": "project-9"}))
    assert ask("gs://b/x", "env:MINE") == [b"0123456789"]
    assert noting.seen[-1][1]["x-goog-user-project"] == "project-9"


def test_a_reader_cannot_pay_where_there_is_no_such_thing():
    with pytest.raises(StoreError, match="requester who pays"):
        open_store("https://127.0.0.1:1/x", "requester-pays")
    assert Config().replace({"data.credentials": "requester-pays"}).data.credentials == "requester-pays"
    with pytest.raises(ConfigError):
        Config().replace({"data.credentials": "payer"})


def test_a_key_for_s3_that_runs_out_is_renewed_before_the_next_request(noting, monkeypatch, tmp_path):
    """By a program that gives keys for a while, as AWS' own tools name one in a profile."""
    count = tmp_path / "count"
    program = tmp_path / "keys.sh"
    program.write_text(
        f"""#!/bin/sh
echo x >> "{count}"
n=$(wc -l < "{count}" | tr -d ' ')
printf '{{"Version": 1, "AccessKeyId": "key-%s", "SecretAccessKey": "secret", "Expiration": "%s"}}' \\
  $n $(date -u -d '+10 seconds' +%Y-%m-%dT%H:%M:%SZ)
"""
    )
    program.chmod(0o755)
    (tmp_path / "config").write_text(f'[default]\nregion = us-east-1\ncredential_process = "{program}"\n')
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", noting.address)
    ask("s3://b/x", "default", times=2)
    keys = [headers["authorization"].partition("Credential=")[2].partition("/")[0] for _, headers in noting.seen]
    assert len(keys) == 2
    assert keys[0] != keys[1]  # ten seconds are too few for botocore to wait for their end


@pytest.mark.parametrize("scheme", ["gs", "s3", "http"])
def test_a_proxy_that_the_environment_names_is_used_for_all_requests(noting, monkeypatch, tmp_path, scheme):
    with simulated_cloud("no limits", folder=tmp_path) as cloud:
        write_array(tmp_path / "b" / "s", "a", VALUES, chunks=(2, 10, 10))
        monkeypatch.setenv("http_proxy", noting.address)
        monkeypatch.setenv("no_proxy", "")
        with Engine(open_dataset(cloud.url("b/s", scheme), variables=["a"])) as engine:
            ((values, _),) = engine.stream([np.array([[0, 3, 5]])], (2, 8, 9))
    assert np.array_equal(values[0, 0], VALUES[0:2, 3:11, 5:14])
    passed = [path for path, _ in noting.seen]
    assert any(path.startswith("http://") and "zarr.json" in path for path in passed)
    assert any("/c/" in path for path in passed)
