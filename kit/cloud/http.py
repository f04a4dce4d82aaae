"""Messages of HTTP/1.1: requests taken from a buffer, byte ranges, bodies, responses.

Ranges follow RFC 9110: `a-b` (both ends included), `a-` and `-n`; one that starts at or beyond the end is 416 with the
size; one that is malformed, or several, are ignored and the whole object is the answer, as GCS and S3 do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

LARGEST_HEAD_BYTES = 1 << 16
LARGEST_BODY_BYTES = 5 << 30
MOST_HEADERS = 200
_LONGEST_LINE_BYTES = 4096
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What the name of a header is made of."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_ONLY_ONCE = ("host", "origin", "content-length", "transfer-encoding", "range", "content-range")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?", re.DOTALL)
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified", 308: "Resume Incomplete",
    400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout",
    409: "Conflict", 411: "Length Required", 412: "Precondition Failed", 413: "Content Too Large",
    416: "Range Not Satisfiable", 421: "Misdirected Request",
    429: "Too Many Requests", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable",
    504: "Gateway Timeout",
}  # fmt: skip


@dataclass(slots=True)
class Request:
    """One request; names of headers are in lower case."""

    method: str
    path: str
    """Without the query, still percent-encoded."""
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


class Body(Protocol):
    """Bytes to be sent, taken piece by piece."""

    def __len__(self) -> int: ...
    def piece(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes `start` to `stop`; fewer when the source has become shorter."""

    def close(self) -> None: ...


class MemoryBody:
    """A body in memory; pieces are views."""

    __slots__ = ("_view",)

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data)

    def __len__(self) -> int:
        return len(self._view)

    def piece(self, start: int, stop: int) -> memoryview:
        return self._view[start:stop]

    def close(self) -> None:
        pass


class FilePart:
    """A part of an open file, which it closes. Read rather than mapped: a file cut short meanwhile ends no process."""

    __slots__ = ("_descriptor", "_first", "_size")

    def __init__(self, descriptor: int, first: int, size: int) -> None:
        self._descriptor, self._first, self._size = descriptor, first, size

    def __len__(self) -> int:
        return self._size

    def piece(self, start: int, stop: int) -> bytes:
        return os.pread(self._descriptor, min(stop, self._size) - start, self._first + start)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(slots=True)
class Response:
    """One answer; `length` differs from the body's for HEAD alone."""

    status: int
    headers: dict[str, Any] = field(default_factory=dict)
    body: Body = field(default_factory=lambda: MemoryBody(b""))

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {REASONS.get(self.status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if "Content-Length" not in self.headers and self.status not in (204, 304):
            lines.append(f"Content-Length: {len(self.body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def without_body(self) -> Response:
        """The answer to HEAD: the same head."""
        size = self.headers.get("Content-Length", len(self.body))
        self.body.close()
        return Response(self.status, {**self.headers, "Content-Length": size})


def json_response(value: Any, status: int = 200, headers: Mapping[str, Any] | None = None) -> Response:
    return Response(
        status, {"Content-Type": "application/json", **(headers or {})}, MemoryBody(json.dumps(value).encode())
    )


def error_response(status: int, code: str, message: str) -> Response:
    """An error as S3 and the GCS XML API write it."""
    return xml_response(f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>", status)


def xml_response(text: str, status: int = 200) -> Response:
    data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Response(status, {"Content-Type": "application/xml"}, MemoryBody(data))


# -- reading a request


class BadRequest(Exception):  # noqa: N818 - an answer, not a failure of this program
    """A request that cannot be understood or is not allowed; it is answered, and the connection is closed."""

    def __init__(self, status: int, code: str = "BadRequest", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code

    @property
    def response(self) -> Response:
        return error_response(self.status, self.code, self.message)


def parse_head(head: bytes) -> Request:
    """The request line and the headers.

    Raises:
        BadRequest: when they are none.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    if len(lines) > MOST_HEADERS:
        raise BadRequest(431, "TooManyHeaders", f"{len(lines)} headers, but {MOST_HEADERS} are allowed")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or _CONTROL.search(first):
        raise BadRequest(400, "InvalidRequestLine")
    headers: dict[str, str] = {}
    for line in lines:
        name, value = _header(line)
        if name in _ONLY_ONCE and headers.get(name, value) != value:
            raise BadRequest(400, "InvalidHeader", f"{name} is given twice")
        headers[name] = value
    target = parts[1]
    if target.startswith("http://"):  # as proxies are asked; the name in it stands above that of Host
        headers["host"], _, rest = target.removeprefix("http://").partition("/")
        target = f"/{rest}"
    if not target.startswith("/"):
        raise BadRequest(400, "InvalidURI", f"{target[:100]!r} is no path")
    path, _, query = target.partition("?")
    return Request(parts[0], path, dict(parse_qsl(query, keep_blank_values=True)), headers)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not TOKEN.fullmatch(name):
        raise BadRequest(400, "InvalidHeader", f"{line[:100]!r} is no header")
    if _CONTROL.search(value):
        raise BadRequest(400, "InvalidHeader", f"{name} has control characters")
    return name.lower(), value.strip(" \t")


def body_length(headers: Mapping[str, str]) -> int:
    """Bytes of the body; -1 when it comes in chunks.

    Raises:
        BadRequest: when the length is no number or too large, or both are given.
    """
    coding, text = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or text is not None:
            raise BadRequest(400, "InvalidTransferEncoding", f"{coding[:100]!r}, Content-Length {text!r:.100}")
        return -1
    if text is None:
        return 0
    if not text.isascii() or not text.isdigit():
        raise BadRequest(400, "InvalidContentLength", f"Content-Length is {text[:100]!r}, which is no number of bytes")
    return _bounded(int(text[:20]))


def _bounded(size: int) -> int:
    if size > LARGEST_BODY_BYTES:
        raise BadRequest(413, "EntityTooLarge", f"{size} bytes or more, but {LARGEST_BODY_BYTES} are allowed")
    return size


class ChunkedBody:
    """A body in HTTP chunks, taken from a buffer as they come."""

    __slots__ = ("_data", "_ended", "_left", "_trailer_bytes")

    def __init__(self) -> None:
        self._data = bytearray()
        self._left = 0
        """Bytes of the chunk that are still to come, with the end of its line."""
        self._ended = False
        self._trailer_bytes = 0

    def take(self, buffer: bytearray) -> bytes | None:
        """The whole body once its end has come; the buffer loses what belongs to it.

        Raises:
            BadRequest: when it is not in chunks, or too large.
        """
        while not self._left or self._take_data(buffer):
            end = buffer.find(b"\r\n", 0, _LONGEST_LINE_BYTES)
            if end < 0:
                if len(buffer) >= _LONGEST_LINE_BYTES:
                    raise BadRequest(400, "InvalidChunk", "the line of a chunk does not end")
                return None
            line = bytes(buffer[:end])
            del buffer[: end + 2]
            if self._ended and not line:
                return bytes(self._data)
            self._take_line(line)
        return None

    def _take_line(self, line: bytes) -> None:
        if self._ended:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > LARGEST_HEAD_BYTES:
                raise BadRequest(431, "TooManyHeaders", f"more than {LARGEST_HEAD_BYTES} bytes of trailers")
            return
        size = _chunk_size(line)
        _bounded(len(self._data) + size)
        self._ended = not size
        self._left = size + 2 if size else 0

    def _take_data(self, buffer: bytearray) -> bool:
        """Whether the chunk has come to its end."""
        count = min(max(self._left - 2, 0), len(buffer))
        self._data += buffer[:count]
        del buffer[:count]
        self._left -= count
        if self._left > 2 or len(buffer) < 2:
            return False
        if buffer[:2] != b"\r\n":
            raise BadRequest(400, "InvalidChunk", "a chunk is longer than its size")
        del buffer[:2]
        self._left = 0
        return True


def unwrap_aws_chunks(body: bytes) -> bytes:
    """The content of a body in S3's signed or trailed chunks (`size;chunk-signature=…`).

    Raises:
        BadRequest: when a chunk or the last one is missing.
    """
    parts: list[bytes] = []
    place = 0
    while (end := body.find(b"\r\n", place)) >= 0:
        size = _chunk_size(body[place:end])
        if not size:
            return b"".join(parts)
        place = end + 2 + size + 2
        if place > len(body):
            break
        parts.append(body[end + 2 : place - 2])
    raise BadRequest(400, "IncompleteBody", "the last chunk has not come")


def _chunk_size(line: bytes) -> int:
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise BadRequest(400, "InvalidChunk", f"{line[:100]!r} is no size of a chunk")
    return int(match[1], 16)


# -- ranges and names


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and end of the range asked for; None for the whole object.

    Raises:
        BadRequest: with 416, when it starts at or beyond the end.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if first and last and int(first) > int(last):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise BadRequest(416)
    return start, stop


def decoded(text: str) -> str:
    """A path segment without percent-encoding; `+` stays."""
    return unquote(text)
