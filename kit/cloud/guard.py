"""Guard: what a server on loopback does not take from a page in somebody's browser, nor from a broken client.

Any page may send requests to 127.0.0.1, and one whose name is made to point there (DNS rebinding) may read the answers.
Such requests carry a foreign name in Host, or the page's own in Origin; both are refused before a byte of the body.
Names and metadata come back as header lines and XML, so neither may hold control characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kit.cloud.message import TOKEN, BadRequest, Request

METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "PATCH")
MOST_KEY_BYTES = 1024
MOST_METADATA_BYTES = 8192
"""Both are the providers' own bounds."""
_NAMES = ("127.0.0.1", "localhost", "[::1]")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NO_HEADER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""In metadata bytes from 0x80 on are parts of UTF-8."""


def check_caller(request: Request, port: int) -> None:
    """Refuse what is sent to another host, or written by a page of another site.

    Raises:
        BadRequest: with 421, 403 or 405.
    """
    hosts = [f"{name}:{port}" for name in _NAMES] + list(_NAMES) * (port == 80)
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if host.lower() not in hosts:
        raise BadRequest(421, "ForeignHost", f"Host is {host[:100]!r}, but only {hosts[0]} is served here")
    if origin is not None and request.method not in ("GET", "HEAD") and origin not in [f"http://{h}" for h in hosts]:
        raise BadRequest(403, "CrossOrigin", f"a page of {origin[:100]!r} may not write here")
    if request.method not in METHODS:
        raise BadRequest(405, "MethodNotAllowed", f"{request.method[:20]!r} is none of {', '.join(METHODS)}")


def is_name(text: str) -> bool:
    """Whether a bucket or an object can be called so."""
    printable = bool(text) and not _UNPRINTABLE.search(text)
    return printable and len(text.encode()) <= MOST_KEY_BYTES


def printable(text: str) -> str:
    """The text with a question mark for each control character."""
    return _UNPRINTABLE.sub("?", text)


def check_metadata(content_type: object, metadata: Mapping[str, str]) -> None:
    """Refuse what could not be given back as header lines.

    Raises:
        BadRequest: naming the first one.
    """
    size = 0
    for name, value in (("content-type", content_type), *metadata.items()):
        if not isinstance(name, str) or not TOKEN.fullmatch(name):
            raise BadRequest(400, "InvalidMetadata", f"{name!r:.100} cannot be the name of a header")
        if not isinstance(value, str) or _NO_HEADER.search(value):
            raise BadRequest(400, "InvalidMetadata", f"{name}: {value!r:.100} is no text, or has control characters")
        size += len(name) + len(value)
    if size > MOST_METADATA_BYTES:
        raise BadRequest(400, "MetadataTooLarge", f"metadata of {size} bytes, but {MOST_METADATA_BYTES} are allowed")
