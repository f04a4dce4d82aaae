"""Azure's blob service as far as reading, writing and listing a store need it, on loopback.

It asks for a signature in each request: of the account's key, or a shared access signature that has not run out. Blobs
lie in memory, by `container/name`.
"""

import base64
import http.server
import threading
import time
from contextlib import contextmanager
from datetime import datetime
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT, KEY = "devaccount", base64.b64encode(b"a key of an account on loopback!").decode()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer()

    do_HEAD = do_PUT = do_DELETE = do_GET

    def _answer(self):
        place = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(place.query).items()}
        _, _, *rest = unquote(place.path).split("/")
        name, blobs = "/".join(rest), self.server.blobs
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, name, query, dict(self.headers)))
        if not self._is_signed(query):
            self._send(403, b"<Error><Code>AuthenticationFailed</Code></Error>")
        elif query.get("comp") == "list":
            self._send(200, self._list(name, query), {"Content-Type": "application/xml"})
        elif query.get("restype") == "container":
            self._send(200, b"")
        elif self.command == "PUT" and self.headers.get("If-None-Match") == "*" and name in blobs:
            self._send(409, b"", {"x-ms-error-code": "BlobAlreadyExists"})
        elif self.command == "PUT" and query.get("comp") == "block":
            blobs[f"{name}?{query['blockid']}"] = body
            self._send(201, b"")
        elif self.command == "PUT" and query.get("comp") == "blocklist":
            ids = [part.split("<")[0] for part in body.decode().split("<Latest>")[1:]]
            blobs[name] = b"".join(blobs.pop(f"{name}?{one}") for one in ids)
            self._send(201, b"")
        elif self.command == "PUT":
            blobs[name] = body
            self._send(201, b"")
        elif name not in blobs:
            self._send(404, b"", {"x-ms-error-code": "BlobNotFound"})
        elif self.command == "DELETE":
            del blobs[name]
            self._send(202, b"")
        else:
            self._send_blob(blobs[name])

    def _is_signed(self, query):
        if "sig" in query:
            return datetime.fromisoformat(query["se"]).timestamp() > time.time()
        return self.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:")

    def _send_blob(self, data):
        asked = (self.headers.get("x-ms-range") or self.headers.get("Range") or "").removeprefix("bytes=")
        status, extra = 200, {}
        if asked:
            first, _, last = asked.partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            stop = min(len(data), int(last) + 1) if first and last else len(data)
            status, extra = 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            data = data[start:stop]
        self._send(status, data, {"ETag": '"0x1"', "x-ms-blob-type": "BlockBlob", **extra})

    def _list(self, container, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        inside = sorted(name.removeprefix(f"{container}/") for name in self.server.blobs)
        inside = [name for name in inside if name.startswith(prefix) and "?" not in name]
        folders, files = {}, []
        for name in inside:
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if cut:
                folders[f"{prefix}{head}/"] = None
            else:
                files.append(name)
        told = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}</Last-Modified>"
            f"<Etag>0x1</Etag><Content-Length>{len(self.server.blobs[f'{container}/{name}'])}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in files
        ) + "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders)
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{container}">'
            f"<Blobs>{told}</Blobs><NextMarker/></EnumerationResults>"
        ).encode()

    def _send(self, status, data, headers=()):
        self.send_response(status)
        for name, value in {"Last-Modified": formatdate(usegmt=True), **dict(headers)}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def azure():
    """A running service: `.blobs`, `.seen` (method, name, query, headers) and `.connection`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.blobs, server.seen = {}, []
    server.endpoint = f"http://127.0.0.1:{server.server_port}/{ACCOUNT}"
    server.connection = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={server.endpoint};"
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
