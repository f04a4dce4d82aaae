"""FileSystem: synchronous reads of any fsspec file system, for threads, so that what they gave can be cached.

It serves the schemes that a wire does not (`kit.data.wire`), and only where a cache is asked for: without one the
loop reads them. Which object a path names is told by what the file system itself says of it: an entity tag, generation,
version or checksum, else the time it was changed, with size and number. One that says none of these could serve old
bytes for new ones, so a cache for it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr.abc.store import Store

from kit.data.counters import Counters
from kit.data.octets import Octets, octets
from kit.data.remote import RemoteStore
from kit.data.retries import Retries
from kit.data.stores import redact, store_error
from kit.errors import ConfigError, Problem

_TAGS = (
    "etag", "e_tag", "generation", "version_id", "versionid", "checksum", "crc32c", "md5", "md5hash", "content_md5",
    "sha", "sha256",
)  # fmt: skip
_TIMES = ("mtime", "last_modified", "lastmodified", "updated", "modified", "modify", "modificationtime", "created")
_MORE = ("size", "ino", "inode", "uid")
"""What tells one object from another beside its time."""


class FileSystem:
    """The objects below one folder; call from any thread."""

    def __init__(self, fs: Any, folder: str, url: str, seconds: float, counters: Counters) -> None:
        self._fs, self._folder, self._url, self._counters = fs, folder.rstrip("/"), url, counters
        self._retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        path = self._path(key)
        data = self._ask(lambda: self._fs.cat_file(path, start=first, end=last))
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return None if data is None else octets(memoryview(data))

    def identity(self, key: str) -> str | None:
        """Which object the key names now, in the file system's own words; None when there is none.

        Raises:
            ConfigError: when it says nothing that tells a new object from an old one.
            StoreError: when the store does not answer or refuses.
        """
        path = self._path(key)
        info = self._ask(lambda: self._fs.info(path))
        self._counters.add(requests=1)
        if info is None:
            return None
        identity = identity_of(info)
        if identity is None:
            raise self._no_identity(path)
        return identity

    def _no_identity(self, path: str) -> ConfigError:
        scheme, where = self._url.partition("://")[0], redact(self._url)
        message = (
            f"is set, but {scheme}:// says neither tag nor time of {path} in {where}, so that old bytes could be "
            "served for new ones; set it to 0"
        )
        return ConfigError([Problem("cache.size_bytes", message)])

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _ask(self, question: Any) -> Any:
        try:
            return self._retries.run(question)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise store_error(self._url, error) from None  # its text may carry a secret; this one's does not


def identity_of(info: Mapping[str, Any]) -> str | None:
    """What of an fsspec `info` changes when the object does; None when nothing does for certain."""
    told = {str(name).lower(): value for name, value in info.items() if value not in (None, "")}
    sure = [name for name in (*_TAGS, *_TIMES) if name in told]
    return repr([(name, str(told[name])) for name in (*sure, *_MORE) if name in told]) if sure else None


def open_file_system(store: Store, url: str, seconds: float, counters: Counters) -> FileSystem | None:
    """The store by its file system's own blocking calls; None for one that is not behind fsspec."""
    if not isinstance(store, RemoteStore):
        return None
    fs = getattr(store.fs, "sync_fs", None)  # an fsspec file system that is blocking at heart
    if fs is None:
        options = {**store.fs.storage_options, "asynchronous": False, "skip_instance_cache": True}
        fs = type(store.fs)(*store.fs.storage_args, **options)
        if hasattr(fs, "retries"):  # s3fs would try again by itself, uncounted
            fs.retries = store.fs.retries
    return FileSystem(fs, store.path, url, seconds, counters)
