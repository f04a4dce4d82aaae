"""Stores for the tests: folders, memory, and an object store on loopback."""

import logging
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from datetime import datetime
from email.utils import formatdate
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import pytest

from kit.config import Config

TINY = Path(__file__).with_name("tiny_source.py")


@pytest.fixture(scope="session")
def _gcs_address():
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    _complete_the_emulator()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="kit-tests")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


def _complete_the_emulator():
    """Answer suffix ranges (`bytes=-n`) and quoted names as the real service does, with the headers it sends.

    The emulator sends the whole object for the first, and nothing for `bucket%2Dname/object` in its XML interface. Of
    an upload that ends with a carriage return it loses that byte, with the line feed that gcsfs puts behind it. It
    knows no HEAD, and is left so: other stores know none either.
    """
    from gcp_storage_emulator import server
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import HANDLERS, Request

    original, received = objects.download, server._read_raw_data
    server._read_raw_data = lambda handler: (received(handler) or b"").replace(b"\n--==0==--", b"\r\n--==0==--") or None

    def download(request, response, storage, *args, **kwargs):
        try:
            found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        except NotFound:
            return original(request, response, storage, *args, **kwargs)
        asked = request.get_header("range", None) or ""
        if asked.startswith("bytes=-"):
            header, start = request.get_header, max(0, int(found["size"]) - int(asked.removeprefix("bytes=-")))
            request.get_header = lambda name, *rest: f"bytes={start}-" if name == "range" else header(name, *rest)
        response["Last-Modified"] = formatdate(datetime.fromisoformat(found["updated"]).timestamp(), usegmt=True)
        response["ETag"], response["x-goog-generation"] = f'"{found["etag"]}"', found["generation"]
        return original(request, response, storage, *args, **kwargs)

    plain = Request.path.fget
    of_json = ("/storage/", "/download/", "/upload/", "/batch")
    Request.path = property(lambda self: plain(self) if plain(self).startswith(of_json) else unquote(plain(self)))
    for _, methods in HANDLERS:
        for method, handler in methods.items():
            if handler is original:
                methods[method] = download


@pytest.fixture
def gcs(_gcs_address, monkeypatch):
    """A fresh `gs://` prefix on an emulated object store."""
    from gcsfs import GCSFileSystem

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _gcs_address)
    GCSFileSystem.clear_instance_cache()
    yield f"gs://kit-tests/{uuid.uuid4().hex}"
    GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def _s3_address():
    """moto's S3 server, in a process that ends with this one."""
    code = """
        import os, sys, threading
        from moto.server import main
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        main(["-H", "127.0.0.1", "-p", sys.argv[1]])
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(port)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urlopen(UrlRequest(f"{address}/kit-tests", method="PUT")).close()
            break
        except URLError:
            assert server.poll() is None
            time.sleep(0.1)
    yield address
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="session")
def _services_read_once():
    """botocore describes a service in a megabyte of JSON, which each new client would read again."""
    from botocore.loaders import JSONFileLoader

    read = cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: read(path))
        yield


@pytest.fixture
def s3(_s3_address, _services_read_once, monkeypatch):
    """A fresh `s3://` prefix on an S3 server of others."""
    variables = {"AWS_ENDPOINT_URL": _s3_address, "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "no-secret"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://kit-tests/{uuid.uuid4().hex}"


@pytest.fixture
def folder_server(tmp_path):
    """`tmp_path` behind a plain HTTP server on loopback."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["file", "memory", "gs", "s3"])
def place(request, tmp_path):
    """A url prefix on each kind of store."""
    if request.param == "file":
        return str(tmp_path)
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return request.getfixturevalue("gcs" if request.param == "gs" else "s3")


@pytest.fixture
def tiny_config():
    """A config of the tiny source: two variables of 5 × 7 × 9 in twelve shards."""

    def make(url, **changes):
        config = Config.make({
            "data": {"source": f"{TINY}:Tiny", "url": str(url), "patch": {"time": 1, "lat": 3, "lon": 3}},
            "chunking": {
                "chunk": {"time": 1, "lat": 4, "lon": 4},
                "shard": {"time": 2, "lat": 8, "lon": 8},
            },
        })  # fmt: skip
        return config.replace({path.replace("__", "."): value for path, value in changes.items()})

    return make
