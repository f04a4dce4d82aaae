"""Stores for the tests: folders, memory, and an object store on loopback."""

import logging
import socket
import threading
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
    """Answer suffix ranges (`bytes=-n`) as the real service does; the emulator sends the whole object instead."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import HANDLERS

    original = objects.download

    def download(request, response, storage, *args, **kwargs):
        asked = request.get_header("range", None) or ""
        if asked.startswith("bytes=-"):
            try:
                size = len(storage.get_file(request.params["bucket_name"], request.params["object_id"]))
            except NotFound:
                size = 0
            header, start = request.get_header, max(0, size - int(asked.removeprefix("bytes=-")))
            request.get_header = lambda name, *rest: f"bytes={start}-" if name == "range" else header(name, *rest)
        return original(request, response, storage, *args, **kwargs)

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


@pytest.fixture(params=["file", "memory", "gs"])
def place(request, tmp_path):
    """A url prefix on each kind of store."""
    if request.param == "file":
        return str(tmp_path)
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return request.getfixturevalue("gcs")


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
