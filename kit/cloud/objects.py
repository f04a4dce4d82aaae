"""Objects: buckets of bytes under keys, in memory or in a folder; and which requests and names are refused.

A folder holds `bucket/key` as files, each written to a draft and renamed, so that any program can prepare what is
served, and it outlives the server. Keys are listed in the order of their UTF-8 bytes, as the providers do. In a folder,
keys with empty, `.` or `..` parts are refused, and so is a key below another key. Links below it are passed over:
nothing is read, listed, written or deleted through one.

An uploaded object carries its MD5 and CRC32C, which clients check; a file that another program put there has neither,
and an ETag of its time, size and inode. Hashing takes about 2 ms a megabyte of upload.

Any page in a browser may send requests to 127.0.0.1, and a page whose name is made to point there (DNS rebinding) may
read the answers. Such requests carry a foreign name in Host, or the page's own in Origin; both are refused before a
byte of the body is read. Names and metadata come back as header lines and XML, so neither may hold control characters.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import google_crc32c

from kit.cloud.http import TOKEN, Body, FileBody, HttpError, MemoryBody, Request

OCTETS = "application/octet-stream"
_DRAFT = ".kit-draft-"
_LAST = "\U0010ffff"
_DESCRIPTORS = "/proc/self/fd" if hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd") else None  # noqa: PTH112
_UNFIT = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


class KeyRefused(HttpError):  # noqa: N818 - an answer, not a failure of this program
    """A bucket or an object that cannot be kept under its name."""

    def __init__(self, name: str) -> None:
        super().__init__(400, "InvalidName", f"nothing can be kept under the name {name[:100]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store knows of one object; `data` or `path` holds its bytes."""

    size: int
    etag: str
    """Without quotes."""
    generation: int
    updated: float
    """Seconds since the epoch."""
    content_type: str = OCTETS
    md5: str = ""
    """Base64; empty when unknown."""
    crc32c: str = ""
    """Base64, big-endian; empty when unknown."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""
    path: str = ""

    def open(self, start: int, stop: int) -> Body:
        """Bytes `start` to `stop`.

        Raises:
            FileNotFoundError: when the file has gone meanwhile.
        """
        if not self.path:
            return MemoryBody(memoryview(self.data)[start:stop])
        return FileBody(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), start, stop - start)

    def read(self) -> bytes:
        return Path(self.path).read_bytes() if self.path else self.data


def describe(data: bytes, generation: int, content_type: str = OCTETS, metadata: Mapping[str, str] | None = None,
             etag: str = "") -> StoredObject:  # fmt: skip
    """What is known of bytes just put.

    Raises:
        HttpError: for metadata that cannot be given back.
    """
    check_metadata(content_type, metadata or {})
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    crc = google_crc32c.value(data).to_bytes(4, "big")
    return StoredObject(
        size=len(data), etag=etag or digest.hex(),
        generation=generation, updated=time.time(), content_type=content_type or OCTETS,
        md5=base64.b64encode(digest).decode(), crc32c=base64.b64encode(crc).decode(), metadata=dict(metadata or {}),
        data=data,
    )  # fmt: skip


Keys = Generator[str, str | None, None]


class MemoryObjects:
    """Objects in this process."""

    def __init__(self) -> None:
        self._items: dict[str, dict[str, StoredObject]] = {}
        self._keys: dict[str, list[str]] = {}

    def buckets(self) -> list[str]:
        return sorted(self._items)

    def has_bucket(self, bucket: str) -> bool:
        return bucket in self._items

    def create_bucket(self, bucket: str) -> None:
        if not is_name(bucket):
            raise KeyRefused(bucket)
        self._items.setdefault(bucket, {})
        self._keys.setdefault(bucket, [])

    def delete_bucket(self, bucket: str) -> bool:
        """False when it is not empty."""
        if self._items.get(bucket):
            return False
        self._items.pop(bucket, None)
        self._keys.pop(bucket, None)
        return True

    def find(self, bucket: str, key: str) -> StoredObject | None:
        return self._items.get(bucket, {}).get(key)

    def put(self, bucket: str, key: str, item: StoredObject) -> StoredObject:
        """Keep it; what is then known of it.

        Raises:
            KeyRefused: when it cannot be kept under that key.
        """
        items = self._items[bucket]
        if not is_name(key):
            raise KeyRefused(key)
        if key not in items:
            bisect.insort(self._keys[bucket], key)
        items[key] = item
        return item

    def delete(self, bucket: str, key: str) -> bool:
        if self._items.get(bucket, {}).pop(key, None) is None:
            return False
        keys = self._keys[bucket]
        del keys[bisect.bisect_left(keys, key)]
        return True

    def keys(self, bucket: str, prefix: str, after: str) -> Keys:
        """Keys that begin with `prefix` and come after `after`, in order; what is sent moves `after` further."""
        keys = self._keys[bucket]
        place = bisect.bisect_right(keys, after) if after >= prefix else bisect.bisect_left(keys, prefix)
        while place < len(keys) and keys[place].startswith(prefix):
            further = yield keys[place]
            place = bisect.bisect_right(keys, further) if further else place + 1


class FolderObjects:
    """The same, as files of a folder, whose first level are the buckets."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder = self._folder.resolve()

    def _place(self, bucket: str, key: str = "") -> str:
        """The path of a key, or of the part of a key; empty when a link stands in it."""
        path = f"{self._folder}/{bucket}/{key}".rstrip("/")
        return path if os.path.realpath(path) == path else ""

    def buckets(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.iterdir() if self.has_bucket(entry.name))

    def has_bucket(self, bucket: str) -> bool:
        return _is_plain(bucket) and Path(self._place(bucket) or os.devnull).is_dir()

    def create_bucket(self, bucket: str) -> None:
        if not _is_plain(bucket):
            raise KeyRefused(bucket)
        (self._folder / bucket).mkdir(exist_ok=True)

    def delete_bucket(self, bucket: str) -> bool:
        if self.has_bucket(bucket):
            for folder, _, files in os.walk(self._folder / bucket, topdown=False):
                for name in files:
                    if name.startswith(_DRAFT):
                        (Path(folder) / name).unlink(missing_ok=True)
                try:
                    Path(folder).rmdir()
                except OSError:  # also what is no object: nothing that was there is lost
                    return False
        return True

    def find(self, bucket: str, key: str) -> StoredObject | None:
        if not _is_key(key) or not _is_plain(bucket):
            return None
        path = f"{self._folder}/{bucket}/{key}"
        info = _info(path)
        if info is None:
            return None
        etag = f"{info.st_mtime_ns:x}{info.st_ino:x}-{info.st_size:x}"
        return StoredObject(
            size=info.st_size, etag=etag, generation=info.st_mtime_ns // 1000, updated=info.st_mtime, path=path
        )

    def put(self, bucket: str, key: str, item: StoredObject) -> StoredObject:
        if not _is_key(key) or not self._place(bucket, key):
            raise KeyRefused(key)
        path = self._folder / bucket / key
        draft = path.with_name(f"{_DRAFT}{os.getpid()}-{item.generation}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(item.data)
            draft.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            if error.errno in _UNFIT:
                raise KeyRefused(key) from None
            raise
        found = self.find(bucket, key)
        assert found is not None
        return replace(found, md5=item.md5, crc32c=item.crc32c)

    def delete(self, bucket: str, key: str) -> bool:
        if self.find(bucket, key) is None:
            return False
        path = self._folder / bucket / key
        path.unlink(missing_ok=True)
        for parent in path.parents:  # a folder without files is no prefix
            if parent == self._folder / bucket:
                break
            try:
                parent.rmdir()
            except OSError:
                break
        return True

    def keys(self, bucket: str, prefix: str, after: str) -> Keys:
        below = prefix.rpartition("/")[0]
        if below and not _is_key(below):
            return
        if self._place(bucket, below):
            yield from _walk(f"{self._folder}/{bucket}", f"{below}/" if below else "", prefix, after)


Objects = MemoryObjects | FolderObjects


def _walk(root: str, folder: str, prefix: str, after: str) -> Generator[str, str | None, str]:
    """Keys below one folder, in order; returns how far `after` has been moved."""
    try:
        with os.scandir(f"{root}/{folder}") as entries:
            names = sorted(
                entry.name + "/" * entry.is_dir() for entry in entries if is_name(entry.name) and not entry.is_symlink()
            )
    except (FileNotFoundError, NotADirectoryError):
        return after
    for name in names:
        key = folder + name
        matches = key.startswith(prefix) or (name.endswith("/") and prefix.startswith(key))
        if not matches or name.startswith(_DRAFT) or (key <= after and not after.startswith(key)):
            continue
        if name.endswith("/"):
            after = yield from _walk(root, key, prefix, after)
        elif key > after:
            after = (yield key) or after
    return after


def _info(path: str) -> os.stat_result | None:
    """Of a regular file to which no link leads. Once a request: asking for the real path takes 50 µs, this 20."""
    if _DESCRIPTORS is None:
        return Path(path).stat() if os.path.realpath(path) == path and Path(path).is_file() else None
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        is_real = os.readlink(f"{_DESCRIPTORS}/{descriptor}") == path  # noqa: PTH115
    finally:
        os.close(descriptor)
    return info if is_real and stat.S_ISREG(info.st_mode) else None


def _is_plain(name: str) -> bool:
    return is_name(name) and "/" not in name and name not in (".", "..")


def _is_key(key: str) -> bool:
    return is_name(key) and all(_is_plain(part) and not part.startswith(_DRAFT) for part in key.split("/"))


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing."""

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    """Beginnings of keys up to the delimiter, one for all that share it."""
    next_after: str
    """Where the next page starts; empty on the last one."""


def list_page(objects: Objects, bucket: str, prefix: str, delimiter: str, after: str, limit: int) -> Page:
    """At most `limit` keys and prefixes that come after `after`, in order."""
    keys: list[str] = []
    prefixes: list[str] = []
    limit, last = max(1, limit), after
    found = objects.keys(bucket, prefix, after)
    key = next(found, None)
    while key is not None:
        if len(keys) + len(prefixes) >= limit:
            return Page(tuple(keys), tuple(prefixes), last)
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            group = prefix + rest.partition(delimiter)[0] + delimiter
            prefixes.append(group)
            last = group + _LAST
            try:
                key = found.send(last)
            except StopIteration:
                key = None
        else:
            keys.append(key)
            last = key
            key = next(found, None)
    return Page(tuple(keys), tuple(prefixes), "")


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
        HttpError: with 421, 403 or 405.
    """
    hosts = _hosts(port)
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if host.lower() not in hosts:
        raise HttpError(421, "ForeignHost", f"Host is {host[:100]!r}, but only {hosts[0]} is served here")
    if origin is not None and request.method not in ("GET", "HEAD") and origin not in [f"http://{h}" for h in hosts]:
        raise HttpError(403, "CrossOrigin", f"a page of {origin[:100]!r} may not write here")
    if request.method not in METHODS:
        raise HttpError(405, "MethodNotAllowed", f"{request.method[:20]!r} is none of {', '.join(METHODS)}")


@lru_cache(maxsize=64)
def _hosts(port: int) -> tuple[str, ...]:
    return (*(f"{name}:{port}" for name in _NAMES), *_NAMES * (port == 80))


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
        HttpError: naming the first one.
    """
    size = 0
    for name, value in (("content-type", content_type), *metadata.items()):
        if not isinstance(name, str) or not TOKEN.fullmatch(name):
            raise HttpError(400, "InvalidMetadata", f"{name!r:.100} cannot be the name of a header")
        if not isinstance(value, str) or _NO_HEADER.search(value):
            raise HttpError(400, "InvalidMetadata", f"{name}: {value!r:.100} is no text, or has control characters")
        size += len(name) + len(value)
    if size > MOST_METADATA_BYTES:
        raise HttpError(400, "MetadataTooLarge", f"metadata of {size} bytes, but {MOST_METADATA_BYTES} are allowed")
