"""Routes: what a request asks for, before it is done, so that it can be counted, refused or made to fail first.

Paths under `/storage`, `/upload`, `/download` and `/batch` are the GCS JSON API; every other path is `/bucket/key`, the
GCS XML API and S3 in path style, which differ in the names of a few headers. Nothing is authenticated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from kit.cloud.message import BadRequest, Request, Response, byte_range
from kit.cloud.objects import StoredObject

JSON_ROOTS = ("/storage/", "/upload/storage/", "/download/storage/", "/batch/storage/")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is understood."""

    kind: str
    """One of `kit.cloud.faults.KINDS_OF_REQUEST`."""
    bucket: str
    key: str
    """Empty when it names no object."""
    run: Callable[[], Response]

    @property
    def name(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else ""


class Refused(Exception):  # noqa: N818 - an answer, not a failure of this program
    """A request that is answered with an error; each API writes it in its own way."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code


def is_json(path: str) -> bool:
    return path.startswith(JSON_ROOTS)


def check_conditions(item: StoredObject | None, request: Request) -> None:
    """Refuse a write or a read whose conditions do not hold.

    Raises:
        Refused: 412, or 304 for a read of what the caller already has.
    """
    query, headers = request.query, request.headers
    generation = str(item.generation) if item else "0"
    wanted = query.get("ifGenerationMatch", headers.get("x-goog-if-generation-match"))
    if wanted is not None and wanted != generation:
        raise Refused(412, "PreconditionFailed", f"the generation is {generation}, not {wanted}")
    if (other := query.get("ifGenerationNotMatch")) is not None and other == generation:
        raise _unchanged(request)
    etags = headers.get("if-match")
    if etags is not None and (item is None or not _names(etags, item)):
        raise Refused(412, "PreconditionFailed", "the ETag is another one")
    etags = headers.get("if-none-match")
    if etags is not None and item is not None and _names(etags, item):
        raise _unchanged(request)


def _unchanged(request: Request) -> Refused:
    is_read = request.method in ("GET", "HEAD")
    return Refused(304, "NotModified") if is_read else Refused(412, "PreconditionFailed", "the object is there")


def _names(etags: str, item: StoredObject) -> bool:
    return any(tag.strip().removeprefix("W/").strip('"') in ("*", item.etag) for tag in etags.split(","))


def media(item: StoredObject, request: Request) -> Response:
    """The bytes of an object, or the range of them that is asked for, with everything clients check.

    Raises:
        Refused: 416 beyond the end, 304 or 412 by its conditions, 404 when the file has gone.
    """
    check_conditions(item, request)
    headers = object_headers(item)
    try:
        part = byte_range(request.headers["range"], item.size) if "range" in request.headers else None
    except BadRequest:
        raise Refused(416, "InvalidRange", f"bytes */{item.size}") from None
    start, stop = part or (0, item.size)
    try:
        body = item.open(start, stop)
    except OSError:
        raise Refused(404, "NoSuchKey", "the object is gone") from None
    if part is None:
        return Response(200, headers, body)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.size}"
    return Response(206, headers, body)


def object_headers(item: StoredObject) -> dict[str, Any]:
    headers = {
        "Content-Type": item.content_type,
        "ETag": f'"{item.etag}"',
        "Last-Modified": formatdate(item.updated, usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": item.generation,
        "x-goog-metageneration": 1,
        "x-goog-storage-class": "STANDARD",
        "x-goog-stored-content-length": item.size,
        "x-goog-stored-content-encoding": "identity",
    }
    hashes = [f"crc32c={item.crc32c}"] * bool(item.crc32c) + [f"md5={item.md5}"] * bool(item.md5)
    if hashes:
        headers["x-goog-hash"] = ",".join(hashes)
    for prefix in ("x-goog-meta-", "x-amz-meta-"):
        headers.update({f"{prefix}{name}": value for name, value in item.metadata.items()})
    return headers
