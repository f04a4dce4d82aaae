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

LARGEST_HEAD_BYTES = 1 << 16
LARGEST_BODY_BYTES = 5 << 30
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified", 308: "Resume Incomplete",
    400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 408: "Request Timeout",
    409: "Conflict", 411: "Length Required", 412: "Precondition Failed", 413: "Content Too Large",
    416: "Range Not Satisfiable", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
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


class Memory:
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
    body: Body = field(default_factory=lambda: Memory(b""))

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
    return Response(status, {"Content-Type": "application/json", **(headers or {})}, Memory(json.dumps(value).encode()))


def xml_response(text: str, status: int = 200) -> Response:
    data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Response(status, {"Content-Type": "application/xml"}, Memory(data))


# -- reading a request


class BadRequest(Exception):  # noqa: N818 - an answer, not a failure of this program
    """A request that cannot be understood; it is answered with `status` and the connection is closed."""

    def __init__(self, status: int) -> None:
        self.status = status


def parse_head(head: bytes) -> Request:
    """The request line and the headers.

    Raises:
        BadRequest: when they are none.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadRequest(400)
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadRequest(400)
        headers[name.strip().lower()] = value.strip()
    target = parts[1]
    if "://" in target.partition("?")[0]:
        target = "/" + target.split("/", 3)[3] if target.count("/") > 2 else "/"
    path, _, query = target.partition("?")
    return Request(parts[0], path, dict(parse_qsl(query, keep_blank_values=True)), headers)


def body_length(headers: Mapping[str, str]) -> int:
    """Bytes of the body; -1 when it comes in chunks.

    Raises:
        BadRequest: when the length is no number or too large.
    """
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return -1
    text = headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit():
        raise BadRequest(400)
    if int(text) > LARGEST_BODY_BYTES:
        raise BadRequest(413)
    return int(text)


def take_chunked(buffer: bytearray) -> bytes | None:
    """The whole body in HTTP chunks at the start of the buffer, which loses it; None while some is missing.

    Raises:
        BadRequest: when it is not in chunks.
    """
    parts: list[bytes] = []
    place = 0
    while (end := buffer.find(b"\r\n", place)) >= 0:
        size = _chunk_size(bytes(buffer[place:end]))
        place = end + 2
        if len(buffer) < place + size + 2:
            return None
        if size == 0:
            close = buffer.find(b"\r\n", place)
            while close > place:  # trailers
                place = close + 2
                close = buffer.find(b"\r\n", place)
            if close < 0:
                return None
            del buffer[: close + 2]
            return b"".join(parts)
        parts.append(bytes(buffer[place : place + size]))
        place += size + 2
    return None


def unwrap_aws_chunks(body: bytes) -> bytes:
    """The content of a body in S3's signed or trailed chunks (`size;chunk-signature=…`)."""
    parts: list[bytes] = []
    place = 0
    while (end := body.find(b"\r\n", place)) >= 0:
        size = _chunk_size(body[place:end])
        if size == 0:
            break
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(parts)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadRequest(400) from None


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
