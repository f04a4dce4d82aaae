"""Objects by a wire and by fsspec are the same bytes from the same server, in a forked process too."""

from __future__ import annotations

import http.server
import json
import multiprocessing
import re
import select
import shutil
import socket
import threading
import tracemalloc
from concurrent.futures import Future
from urllib.parse import urlsplit

import numpy as np
import pycurl
import pytest
from waiting import PATIENCE_SECONDS, wait_until
from zarr_stores import write_array

from kit.cloud.simulated import simulated_cloud
from kit.data.open_dataset import open_dataset
from kit.data.stores.auth import address_of
from kit.data.stores.counters import Counters
from kit.data.stores.http import Get, HttpClient, _Epoll
from kit.data.stores.transfer import FEWEST, ConcurrencyLimit
from kit.data.stores.url import open_store
from kit.data.stream.engine import Engine
from kit.data.stream.fetch import AsyncClient
from kit.errors import CorruptChunkError, MissingChunkError, StoreError
from kit.machine.endpoints import VARIABLE

SHAPE, PATCH = (6, 40, 50), (2, 9, 11)
SCHEMES = ["gs", "s3", "http"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the server keeps its buckets."""
    return tmp_path_factory.mktemp("buckets")


@pytest.fixture(scope="module")
def running_cloud(folder):
    with simulated_cloud("no limits", folder=folder) as running:
        yield running


@pytest.fixture
def cloud(cloud, folder):
    """A bucket `b` with an array in chunks and one in shards, on a server of our own."""
    shutil.rmtree(folder / "b", ignore_errors=True)
    random = np.random.default_rng(0)
    for name, shards in {"chunks": None, "shards": (6, 20, 50)}.items():
        values = random.normal(size=SHAPE).astype("f4")
        write_array(folder / "b" / name, "a", values, chunks=(2, 10, 25), shards=shards)
    return cloud


def url_of(cloud, scheme, layout):
    """Plain HTTP lists nothing, so its readers name the variable."""
    return cloud.url(f"b/{layout}", scheme)


def some_offsets(seed=0):
    return np.random.default_rng(seed).integers(0, np.array(SHAPE) - PATCH + 1, (20, 3))


def read(dataset):
    with Engine(dataset, requests_in_flight=8) as engine:
        ((values, valid),) = engine.stream([some_offsets()], PATCH)
        return values, valid, engine.counters, type(engine._open()._client)


@pytest.mark.parametrize("layout", ["chunks", "shards"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_clients_give_the_values_of_the_folder(cloud, folder, scheme, layout, monkeypatch):
    dataset = open_dataset(url_of(cloud, scheme, layout), variables=["a"])
    by_wire = read(dataset)
    monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    by_fsspec = read(dataset)
    local = read(open_dataset(str(folder / "b" / layout)))
    assert (by_wire[3], by_fsspec[3]) == (HttpClient, AsyncClient)
    for got in (by_wire, by_fsspec):
        assert np.array_equal(got[0], local[0])
        assert np.array_equal(got[1], local[1])
        assert got[2]["chunks_decoded"] == local[2]["chunks_decoded"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_object_is_read_whole_in_part_and_from_its_end(cloud, folder, scheme):
    (folder / "b" / "x").mkdir()
    (folder / "b" / "x" / "k").write_bytes(b"0123456789")
    counters, url = Counters(), url_of(cloud, scheme, "x")
    source = HttpClient(address_of(open_store(url), url), url, 4, PATIENCE_SECONDS, counters)
    assert bytes(source.read("k")) == b"0123456789"
    assert bytes(source.read("k", 2, 5)) == b"234"
    assert bytes(source.read("k", -3)) == b"789"
    assert source.read("nothing") is None
    assert (counters.values()["requests"], counters.values()["bytes_read"]) == (4, 16)


def test_where_there_is_no_epoll_python_watches_the_sockets(cloud, folder, monkeypatch):
    monkeypatch.delattr("select.epoll", raising=False)
    assert ask_all(cloud, folder, 50)[1]["requests"] == 50


class Noted(ConcurrencyLimit):
    """Seven at once whatever happens, and what it was told."""

    def __init__(self, most):
        super().__init__(min(most, 7))
        self.seconds, self.refusals = [], 0

    def answered(self, sent_in, seconds):
        self.seconds.append(seconds)

    def refused(self, sent_in):
        self.refusals += 1


class Told(Get):
    """A request whose answer comes to a future."""

    def __init__(self, key):
        super().__init__(key)
        self.future = Future()

    def done(self, data):
        self.future.set_result(data)

    def fail(self, error):
        self.future.set_exception(error)


def ask_all(cloud, folder, requests):
    """A wire that has had so many answers of a byte, and what it counted."""
    (folder / "b" / "x").mkdir()
    (folder / "b" / "x" / "k").write_bytes(b"1")
    url, counters = url_of(cloud, "http", "x"), Counters()
    cloud.reset_counts()
    source = HttpClient(address_of(open_store(url), url), url, 256, PATIENCE_SECONDS, counters)
    asked = [Told("k") for _ in range(requests)]
    source.submit(asked)
    assert all(bytes(one.future.result(PATIENCE_SECONDS)) == b"1" for one in asked)
    source.close()
    return source, counters.values()


def test_no_more_requests_are_open_than_the_limit_allows_and_it_is_told_how_each_went(cloud, folder, monkeypatch):
    monkeypatch.setattr("kit.data.stores.http.ConcurrencyLimit", Noted)
    cloud.turn(latency_seconds=0.05, requests_per_second=20)
    source, counted = ask_all(cloud, folder, 40)
    seen = cloud.counts()
    assert seen.most_in_flight <= 7
    assert len(source._hosts[""].limit.seconds) == 40
    assert min(source._hosts[""].limit.seconds) >= 0.05
    assert seen.refused == source._hosts[""].limit.refusals == counted["retries"] > 0


def test_where_only_latency_binds_all_that_are_allowed_are_soon_open(cloud, folder, monkeypatch):
    answered = ConcurrencyLimit.answered
    # As long as the store takes: how long this machine takes is no crowd.
    monkeypatch.setattr(ConcurrencyLimit, "answered", lambda limit, sent_in, _: answered(limit, sent_in, 0.3))
    cloud.turn(latency_seconds=0.3)
    source, counted = ask_all(cloud, folder, 800)
    assert (source._hosts[""].limit.now, source._hosts[""].limit.reason) == (256, "")
    assert FEWEST < cloud.counts().most_in_flight <= 256
    assert counted["retries"] == 0


def test_a_connection_that_waits_keeps_nothing_of_its_last_answer(cloud, folder):
    (folder / "b" / "x").mkdir()
    (folder / "b" / "x" / "k").write_bytes(bytes(8 << 20))
    url = url_of(cloud, "http", "x")
    source = HttpClient(address_of(open_store(url), url), url, 4, PATIENCE_SECONDS, Counters())
    source.read("k")
    tracemalloc.start()
    try:
        assert len(source.read("k")) == 8 << 20
        wait_until(lambda: tracemalloc.get_traced_memory()[0] <= 1 << 20)
    finally:
        tracemalloc.stop()
        source.close()


@pytest.mark.parametrize("by", ["wire", "fsspec"])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_refusal_is_an_error_without_a_secret(cloud, scheme, by, monkeypatch):
    if by == "fsspec":
        monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    dataset = open_dataset(url_of(cloud, scheme, "chunks"))
    cloud.script("b/chunks/a/c/*", [403] * 50)
    with pytest.raises(StoreError) as caught:
        read(dataset)
    assert not isinstance(caught.value, MissingChunkError | CorruptChunkError)
    assert "rights" in str(caught.value)


@pytest.mark.fault
@pytest.mark.parametrize("by", ["wire", "fsspec"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_truncated_object_on_the_store_is_named_as_damage(cloud, folder, scheme, by, monkeypatch):
    if by == "fsspec":
        monkeypatch.setattr("kit.data.stream.fetch.address_of", lambda *_: None)
    dataset = open_dataset(url_of(cloud, scheme, "chunks"), variables=["a"])
    for path in (folder / "b" / "chunks" / "a" / "c").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptChunkError, match="of a .*damaged"):
        read(dataset)


def _read_in_child(dataset, connection):
    values, _, _, source = read(dataset)
    connection.send((float(values.sum()), source.__name__))


@pytest.mark.parametrize("scheme", ["gs", "http"])
def test_a_process_forked_after_a_wire_was_used_reads_by_one_of_its_own(cloud, scheme):
    dataset = open_dataset(url_of(cloud, scheme, "chunks"), variables=["a"])
    values, *_ = read(dataset)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(dataset, there))
    child.start()
    try:
        assert here.poll(PATIENCE_SECONDS)
        assert here.recv() == (float(values.sum()), "HttpClient")
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert np.array_equal(read(dataset)[0], values)


# -- what is sent


class _Noting(http.server.BaseHTTPRequestHandler):
    """Answers every range with `0123456789`, as `server.status` says, and notes what was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        if self.server.status == 302 and not self.path.startswith("/elsewhere"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if self.server.status == 302 else self.server.status)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, *_):
        pass


@pytest.fixture
def noting(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Noting)
    server.seen, server.status = [], 206
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv(VARIABLE, json.dumps({"gs://b": address, "s3://b": address}))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask_noting(url, credentials):
    """What `a b` is, asked of the server by a wire."""
    store = open_store(url, credentials)
    wire = HttpClient(address_of(store, url), url, 2, PATIENCE_SECONDS, Counters())
    try:
        return bytes(wire.read("a b", 0, 10))
    finally:
        wire.close()


@pytest.mark.parametrize("token", [None, "session-token-7"])
def test_a_request_to_s3_is_signed_as_botocore_signs_it(noting, monkeypatch, token):
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    monkeypatch.setenv("MINE", ":".join(["key-1", "secret-2", *([token] if token else [])]))
    assert ask_noting("s3://b/x", "env:MINE") == b"0123456789"
    path, headers = noting.seen[-1]
    assert (path, headers["Range"]) == ("/b/x/a%20b", "bytes=0-9")
    told = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=(\S+), ?SignedHeaders=(\S+), ?Signature=(\S+)", headers["Authorization"]
    )
    lower = {name.lower(): value for name, value in headers.items()}
    request = AWSRequest("GET", f"http://{headers['Host']}{path}", {name: lower[name] for name in told[2].split(";")})
    request.context["timestamp"] = lower["x-amz-date"]
    auth = S3SigV4Auth(Credentials("key-1", "secret-2"), "s3", "us-east-1")
    assert told[1] == auth.scope(request)
    assert told[3] == auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    assert lower.get("x-amz-security-token") == token
    assert ("x-amz-security-token" in told[2].split(";")) == bool(token)


def test_a_token_is_shown_to_its_store_and_to_nobody_it_points_to(noting, monkeypatch):
    monkeypatch.setenv("MINE", "ya29.token")
    noting.status = 302
    assert ask_noting("gs://b/x", "env:MINE") == b"0123456789"
    (_, first), (path, second) = noting.seen
    assert first["Authorization"] == "Bearer ya29.token"
    assert (path, "Authorization" in second) == ("/elsewhere", False)


def test_a_client_of_several_stores_shows_each_only_its_own_key(noting, monkeypatch):
    monkeypatch.setenv("MINE", "ya29.token")
    addresses = {how: address_of(open_store("gs://b/x", how), "gs://b/x") for how in ("env:MINE", "anonymous")}
    wire = HttpClient(lambda key: (addresses[key], "a b"), "two stores", 1, PATIENCE_SECONDS, Counters())
    for key in ("env:MINE", "anonymous", "anonymous", "env:MINE"):
        assert bytes(wire.read(key, 0, 10)) == b"0123456789"
    wire.close()
    shown = [headers.get("Authorization") for _, headers in noting.seen]
    assert shown == ["Bearer ya29.token", None, None, "Bearer ya29.token"]


def test_a_token_that_ran_out_is_renewed_before_the_next_request(noting, monkeypatch):
    monkeypatch.setenv("MINE", "ya29.first")
    store = open_store("gs://b/x", "env:MINE")
    held = store.fs.credentials
    wire = HttpClient(address_of(store, "gs://b/x"), "gs://b/x", 2, PATIENCE_SECONDS, Counters())
    wire.read("a", 0, 10)
    monkeypatch.setattr(held, "maybe_refresh", lambda: setattr(held.credentials, "token", "ya29.second"))
    wire.read("a", 0, 10)
    wire.close()
    assert [headers["Authorization"] for _, headers in noting.seen] == ["Bearer ya29.first", "Bearer ya29.second"]


def test_a_401_comes_back_at_once(noting, monkeypatch):
    monkeypatch.setenv("MINE", "ya29.token")
    noting.status = 401
    with pytest.raises(StoreError, match=r"401.*data\.credentials") as caught:
        ask_noting("gs://b/x", "env:MINE")
    assert len(noting.seen) == 1
    assert "ya29" not in str(caught.value)


def test_an_answer_that_is_not_the_range_asked_for_is_an_error(noting):
    noting.status = 200
    with pytest.raises(StoreError, match="200 OK.*range"):
        ask_noting("gs://b/x", "anonymous")


def test_no_repr_of_an_address_shows_a_key(noting, monkeypatch):
    monkeypatch.setenv("MINE", "key-1:secret-2")
    store = open_store("s3://b/x", "env:MINE")
    shown = repr(address_of(store, "s3://b/x"))
    assert "s3://b/x" in shown
    assert not re.search("secret-2|key-1", shown)


# -- its thread


def test_its_thread_ends_when_nothing_is_asked_for_and_comes_back(cloud, monkeypatch, new_threads):
    monkeypatch.setattr("kit.data.stores.http._LINGER_SECONDS", 0.05)
    url = url_of(cloud, "gs", "chunks")
    wire = HttpClient(address_of(open_store(url), url), url, 4, PATIENCE_SECONDS, Counters())
    for _ in range(3):
        assert wire.read("a/zarr.json") is not None
        wait_until(lambda: not new_threads("kit-http"))


def test_whoever_waits_when_it_is_closed_is_told_so(cloud):
    url = url_of(cloud, "gs", "chunks")
    cloud.turn(latency_seconds=600)
    wire = HttpClient(address_of(open_store(url), url), url, 1, PATIENCE_SECONDS, Counters())
    asked = [Told("a/zarr.json") for _ in range(3)]
    wire.submit(asked)
    wire.close()
    for one in asked:
        with pytest.raises(StoreError, match=r"closed while a/zarr\.json"):
            one.future.result(PATIENCE_SECONDS)
    cloud.turn("no limits")
    with pytest.raises(StoreError, match="is closed"):
        wire.read("a/zarr.json")
    wire.close()


def test_a_host_that_takes_few_requests_holds_up_no_other(cloud, folder, monkeypatch):
    """Stores of two hosts, joined: the limit of one says nothing of the other, and its queue is passed by."""
    monkeypatch.setattr("kit.data.stores.transfer.FEWEST", 4)
    (folder / "b" / "x").mkdir()
    (folder / "b" / "x" / "k").write_bytes(b"1")
    url = url_of(cloud, "http", "x")
    fast = address_of(open_store(url), url)
    with simulated_cloud("no limits", folder=folder) as other:
        slow_url = url_of(other, "http", "x")
        slow = address_of(open_store(slow_url), slow_url)
        other.turn(latency_seconds=0.5)
        source = HttpClient(
            lambda key: (slow if key.startswith("slow") else fast, "k"), url, 64, PATIENCE_SECONDS, Counters()
        )
        waiting, asked = ([Told(f"{name}/{n}") for n in range(40)] for name in ("slow", "fast"))
        source.submit(waiting)
        source.submit(asked)
        assert all(bytes(one.future.result(PATIENCE_SECONDS)) == b"1" for one in asked)
        assert not all(one.future.done() for one in waiting)  # 4 of 40 are open at first
        assert all(bytes(one.future.result(PATIENCE_SECONDS)) == b"1" for one in waiting)
        first, second = (source._hosts[urlsplit(one.base).netloc].limit for one in (slow, fast))
        assert first is not second
        assert source.open_requests[0] == min(64, first.now + second.now)
        source.close()


def test_a_batch_is_handed_to_the_client_in_one_call_however_many_shards_it_touches(cloud, monkeypatch):
    calls, submit = [], HttpClient.submit
    monkeypatch.setattr(HttpClient, "submit", lambda self, gets, urgent=False: (
        calls.append(len(gets := [*gets])) or submit(self, gets, urgent)))  # fmt: skip
    with Engine(open_dataset(url_of(cloud, "gs", "shards")), requests_in_flight=8) as engine:
        for place in ((0, 5, 0), (0, 25, 0)):  # the index of either shard
            engine.read(np.array([place]), PATCH)
        calls.clear()
        engine.read(np.array([(4, 0, 30), (4, 30, 30)]), PATCH)
    assert calls == [2]


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="no epoll")
def test_a_socket_at_rest_is_watched_again_and_so_is_another_of_its_number():
    sockets, here, there = _Epoll(), *socket.socketpair()
    fd = here.fileno()
    for _ in range(2):
        sockets.watch(fd, pycurl.POLL_IN)
        there.send(b"1")
        assert sockets.ready(PATIENCE_SECONDS) == [(fd, pycurl.CSELECT_IN)]
        here.recv(1)
        sockets.watch(fd, 0)
    there.send(b"unasked")
    assert sockets.ready(PATIENCE_SECONDS) == sockets.ready(0) == []  # nobody wants it, and it wakes nobody again
    sockets.watch(fd, pycurl.POLL_IN)
    assert sockets.ready(PATIENCE_SECONDS) == [(fd, pycurl.CSELECT_IN)]
    sockets.watch(fd, 0)
    here.close()
    there.close()
    here, there = socket.socketpair()
    assert fd in (here.fileno(), there.fileno())  # the least number that is free
    mine, other = (here, there) if here.fileno() == fd else (there, here)
    sockets.watch(fd, pycurl.POLL_IN)
    other.send(b"1")
    assert sockets.ready(PATIENCE_SECONDS) == [(fd, pycurl.CSELECT_IN)]
    for one in (mine, other, sockets):
        one.close()
