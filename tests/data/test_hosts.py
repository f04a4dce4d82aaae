"""Hosts: no store is at a link-local address or a cloud's metadata service, however it is written, named or reached.

No test resolves or sends anything beyond loopback: resolvers and sockets are stubs wherever such an address is meant.
"""

import asyncio
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kit.checkpoints.downloading import download_once
from kit.data.stores import fsspec
from kit.data.stores.auth import address_of
from kit.data.stores.counters import Counters
from kit.data.stores.fsspec import guarded_socket, is_metadata
from kit.data.stores.http import HttpClient, _open_socket
from kit.data.stores.url import open_store, read_object, resolve_url
from kit.errors import StoreError

METADATA = [
    "169.254.169.254", "169.254.0.1", "169.254.255.255", "2852039166", "0xA9FEA9FE", "0xa9.0xfe.0xa9.0xfe",
    "0251.0376.0251.0376", "169.254.43518", "169.16689662", "[fe80::1]", "[febf::1]", "[fd00:ec2::254]",
    "[fd20:ce::254]", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[::169.254.169.254]", "[2002:a9fe:a9fe::1]",
    "[64:ff9b::a9fe:a9fe]", "[fe80::1%25eth0]", "metadata.google.internal", "METADATA.Google.Internal.", "metadata",
    "metadata.goog", "instance-data", "100.100.100.200", "192.0.0.192", "168.63.129.16", "169.254.169.254.",
    "１６９.254.169.254", "169。254。169。254", "%31%36%39.254.169.254", "ⓜetadata.google.internal",
]  # fmt: skip
FAIR = [
    "127.0.0.1", "localhost", "[::1]", "10.0.0.1", "192.168.1.254", "169.253.169.254", "169.255.0.1", "[fec0::1]",
    "[2001:db8::a9fe:a9fe]", "storage.googleapis.com", "169.254.169.254.nip.io", "metadata.example.org", "1.1.1.1",
    "2130706433", "minio", "fe80.example.org", "0x7f.1",
]  # fmt: skip


@pytest.fixture
def no_network(monkeypatch):
    """Whatever would leave this process fails the test, but to loopback."""
    connect = socket.socket.connect

    def loopback_only(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), f"a request to {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", loopback_only)


@pytest.mark.parametrize("host", METADATA)
@pytest.mark.parametrize("form", ["http://{}/x", "https://{}:8080/x", "http://{}"])
def test_such_a_host_is_no_store_in_any_spelling(no_network, tmp_path, host, form):
    url = form.format(host)
    for use in (resolve_url, open_store, lambda url: download_once(url, tmp_path / "there")):
        with pytest.raises(StoreError, match="metadata service|no name of a host"):
            use(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", FAIR)
def test_other_hosts_stay_stores(host):
    assert not is_metadata(host)
    assert resolve_url(f"http://{host}/x") == f"http://{host}/x"


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("variable", ["KIT_ENDPOINTS", "provider"])
def test_such_an_endpoint_of_a_bucket_is_refused(no_network, monkeypatch, scheme, variable):
    address = "http://169.254.169.254"
    if variable == "KIT_ENDPOINTS":
        monkeypatch.setenv("KIT_ENDPOINTS", f'{{"{scheme}://bucket": "{address}"}}')
    else:
        monkeypatch.setenv({"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}[scheme], address)
    with pytest.raises(StoreError, match="metadata service"):
        open_store(f"{scheme}://bucket/x")


@pytest.mark.parametrize("found", ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "100.100.100.200"])
@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
def test_a_name_that_leads_there_is_refused(no_network, monkeypatch, found, proxy):
    family = socket.AF_INET6 if ":" in found else socket.AF_INET
    answer = [(family, socket.SOCK_STREAM, 6, "", (found, 80))]
    monkeypatch.setattr(fsspec.socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(StoreError, match="metadata service"):
        open_store("http://innocent.example/x")


def test_no_connection_is_opened_there_by_either_client():
    class Asked:
        family, socktype, protocol, addr = socket.AF_INET, socket.SOCK_STREAM, 6, ("169.254.169.254", 80)

    import pycurl

    assert _open_socket(0, Asked) == pycurl.SOCKET_BAD
    with pytest.raises(StoreError, match="metadata service"):
        guarded_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80)))
    guarded_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))).close()


@pytest.fixture
def redirecting():
    """A server on loopback that sends every request on, and counts what came."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            if self.path.endswith("/fine"):
                self.send_response(200 if "Range" not in self.headers else 206)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"data")
                return
            self.send_response(302)
            self.send_header("Location", self.server.to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.to = [], "/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def reading(client, url):
    """One object by libcurl or by fsspec."""
    store = open_store(url)
    if client == "fsspec":
        store.retries = type(store.retries)(0.1)
        return read_object(store, "x", url)
    wire = HttpClient(address_of(store, url), url, 1, 0.5, Counters())
    try:
        found = wire.read("x")
        return None if found is None else found.tobytes()
    finally:
        wire.close()


@pytest.mark.parametrize("client", ["libcurl", "fsspec"])
def test_a_redirect_to_such_an_address_is_not_followed(monkeypatch, redirecting, client):
    """The address that both clients are told is link-local is one of loopback here: nothing could leave."""
    url = f"http://127.0.0.1:{redirecting.server_address[1]}/store"
    redirecting.to = f"{url}/fine"
    assert reading(client, url) == b"data"
    redirecting.to = f"http://127.0.0.2:{redirecting.server_address[1]}/fine"
    redirecting.asked.clear()
    networks = (fsspec.ipaddress.ip_network("127.0.0.2/32"),)
    monkeypatch.setattr(fsspec, "_NETWORKS", networks)
    with pytest.raises(StoreError):
        reading(client, url)
    assert redirecting.asked
    assert not any("fine" in path for path in redirecting.asked)


def test_the_client_of_fsspec_looks_at_each_address_a_name_has_now(monkeypatch):
    """A name that is another address by the time of the connection is refused by the socket."""
    from kit.data.stores import fsspec as remote

    made = []
    monkeypatch.setattr(remote, "guarded_socket", lambda info: made.append(info[4][0]) or guarded_socket(info))

    async def ask():
        session = await remote.guarded_client()
        try:

            async def rebound(*_, **__):
                return [
                    {"hostname": "h", "host": "127.0.0.2", "port": 9, "family": socket.AF_INET, "proto": 6, "flags": 0}
                ]

            monkeypatch.setattr(session.connector._resolver, "resolve", rebound)
            monkeypatch.setattr(fsspec, "_NETWORKS", (fsspec.ipaddress.ip_network("127.0.0.2/32"),))
            await session.get("http://innocent.example:9/x")
        finally:
            await session.close()

    with pytest.raises(OSError, match="Cannot connect"):  # aiohttp's words for a socket that it was not given
        asyncio.run(ask())
    assert made == ["127.0.0.2"]
