"""Messages of HTTP/1.1: requests taken from a buffer as their bytes come, byte ranges, bodies, responses.

Ranges follow RFC 9110: `a-b` (both ends included), `a-` and `-n`. A range that starts at or beyond the end is refused
with 416 and the size. A malformed range, or several at once, are ignored: the answer is the whole object, as of GCS and
S3. What reads from a buffer is a generator: it yields where bytes are missing, and goes on when it is resumed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl
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
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {308: "Resume Incomplete"}


class HttpError(Exception):
    """An error to be answered: a request that cannot be understood, is not allowed, or asks for what is not there."""

    def __init__(self, status: int, code: str = "BadRequest", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code


@dataclass(slots=True)
class Request:
    """One request; names of headers are in lower case."""

    method: str
    path: str
    """Without the query, still percent-encoded."""
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""


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


class FileBody:
    """A part of an open file, which it closes. Read rather than mapped: a file cut short meanwhile ends no process."""

    __slots__ = ("_descriptor", "_first", "_size")

    def __init__(self, descriptor: int, first: int, size: int) -> None:
        self._descriptor, self._first, self._size = descriptor, first, size

    def __len__(self) -> int:
        return self._size

    def piece(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`; fewer when the file has become shorter."""
        return os.pread(self._descriptor, min(stop, self._size) - start, self._first + start)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


Body = MemoryBody | FileBody


@dataclass(slots=True)
class Response:
    """One answer."""

    status: int
    headers: dict[str, Any] = field(default_factory=dict)
    body: Body = field(default_factory=lambda: MemoryBody(b""))

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Unknown')}"]
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
    data = json.dumps(value).encode()
    return Response(status, {"Content-Type": "application/json", **(headers or {})}, MemoryBody(data))


def xml_response(text: str, status: int = 200) -> Response:
    data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Response(status, {"Content-Type": "application/xml"}, MemoryBody(data))


def error_response(status: int, code: str, message: str) -> Response:
    """An error as S3 and the GCS XML API write it."""
    return xml_response(f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>", status)


# -- reading a request


def parse_head(head: bytes) -> Request:
    """The request line and the headers.

    Raises:
        HttpError: when they are none.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    if len(lines) > MOST_HEADERS:
        raise HttpError(431, "TooManyHeaders", f"{len(lines)} headers, but {MOST_HEADERS} are allowed")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1") or _CONTROL.search(first):
        raise HttpError(400, "InvalidRequestLine")
    headers: dict[str, str] = {}
    for line in lines:
        name, value = _parse_header(line)
        if name in _ONLY_ONCE and headers.get(name, value) != value:
            raise HttpError(400, "InvalidHeader", f"{name} is given twice")
        headers[name] = value
    target = parts[1]
    if target.startswith("http://"):  # as proxies are asked; the name in it stands above that of Host
        headers["host"], _, rest = target.removeprefix("http://").partition("/")
        target = f"/{rest}"
    if not target.startswith("/"):
        raise HttpError(400, "InvalidURI", f"{target[:100]!r} is no path")
    path, _, query = target.partition("?")
    return Request(parts[0], path, dict(parse_qsl(query, keep_blank_values=True)) if query else {}, headers)


@lru_cache(maxsize=512)
def _parse_header(line: str) -> tuple[str, str]:
    """Name and value; a client sends most of its lines with every request."""
    name, colon, value = line.partition(":")
    if not colon or not TOKEN.fullmatch(name):
        raise HttpError(400, "InvalidHeader", f"{line[:100]!r} is no header")
    if _CONTROL.search(value):
        raise HttpError(400, "InvalidHeader", f"{name} has control characters")
    return name.lower(), value.strip(" \t")


Reader = Generator[None, None, bytes]


def read_head(buffer: bytearray) -> Reader:
    """The bytes of a head, which the buffer loses together with the empty line after them.

    Raises:
        HttpError: when they are too many.
    """
    while (end := buffer.find(b"\r\n\r\n")) < 0 and len(buffer) <= LARGEST_HEAD_BYTES:
        yield
    if end < 0 or end > LARGEST_HEAD_BYTES:
        raise HttpError(431, "HeadersTooLarge", f"more than {LARGEST_HEAD_BYTES} bytes")
    head = bytes(buffer[:end])
    del buffer[: end + 4]
    return head


def read_body(headers: Mapping[str, str], buffer: bytearray) -> Reader:
    """The body that these headers announce, which the buffer loses.

    Raises:
        HttpError: when its length is no number or too large, is given in two ways, or its chunks do not add up.
    """
    coding, text = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or text is not None:
            raise HttpError(400, "InvalidTransferEncoding", f"{coding[:100]!r}, Content-Length {text!r:.100}")
        return (yield from read_chunks(buffer))
    if text is None:
        return b""
    if not text.isascii() or not text.isdigit():
        raise HttpError(400, "InvalidContentLength", f"Content-Length is {text[:100]!r}, which is no number of bytes")
    return (yield from _take(buffer, _allowed(int(text[:20]))))


def read_chunks(buffer: bytearray) -> Reader:
    """A body in HTTP chunks.

    Raises:
        HttpError: when it is not in chunks, or too large.
    """
    body = bytearray()
    while size := _chunk_size((yield from _take_line(buffer))):
        _allowed(len(body) + size)
        body += yield from _take(buffer, size)
        if (yield from _take(buffer, 2)) != b"\r\n":
            raise HttpError(400, "InvalidChunk", "a chunk is longer than its size")
    trailer_bytes = 0
    while line := (yield from _take_line(buffer)):
        trailer_bytes += len(line)
        if trailer_bytes > LARGEST_HEAD_BYTES:
            raise HttpError(431, "TooManyHeaders", f"more than {LARGEST_HEAD_BYTES} bytes of trailers")
    return bytes(body)


def _take(buffer: bytearray, count: int) -> Reader:
    while len(buffer) < count:
        yield
    with memoryview(buffer) as view:
        taken = bytes(view[:count])
    del buffer[:count]
    return taken


def _take_line(buffer: bytearray) -> Reader:
    while (end := buffer.find(b"\r\n", 0, _LONGEST_LINE_BYTES)) < 0:
        if len(buffer) >= _LONGEST_LINE_BYTES:
            raise HttpError(400, "InvalidChunk", "the line of a chunk does not end")
        yield
    line = yield from _take(buffer, end)
    del buffer[:2]
    return line


def _allowed(size: int) -> int:
    if size > LARGEST_BODY_BYTES:
        raise HttpError(413, "EntityTooLarge", f"{size} bytes or more, but {LARGEST_BODY_BYTES} are allowed")
    return size


def _chunk_size(line: bytes) -> int:
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise HttpError(400, "InvalidChunk", f"{line[:100]!r} is no size of a chunk")
    return int(match[1], 16)


def unwrap_aws_chunks(body: bytes) -> bytes:
    """The content of a body in S3's signed or trailed chunks (`size;chunk-signature=…`).

    Raises:
        HttpError: when a chunk or the last one is missing.
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
    raise HttpError(400, "IncompleteBody", "the last chunk has not come")


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and end of the range asked for; None for the whole object.

    Raises:
        HttpError: with 416, when it starts at or beyond the end.
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
        raise HttpError(416, "InvalidRange", f"bytes */{size}")
    return start, stop
