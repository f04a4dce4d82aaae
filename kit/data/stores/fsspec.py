"""RemoteStore: a zarr store behind fsspec, with kit's retries, and no way to a cloud's metadata service.

Every operation is retried by `kit.data.stores.transfer` instead of by the client itself; whether an object exists is
never taken from an error. An operation in doubt after a broken connection is done again: a write puts the same bytes in
the same place, and deleting twice is deleting. gcsfs, s3fs and HTTP are bound to the event loop of their first request.

Link-local addresses belong to the machine's own network, and clouds answer there with the machine's keys. A config, a
bucket or a server that leads there is refused before a request leaves: when a URL is read, when its name has been
resolved, and again for each connection that libcurl or aiohttp opens.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import ipaddress
import re
import socket
import unicodedata
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore

from kit.data.stores.transfer import Retries, status_of
from kit.errors import StoreError

READ_SECONDS = 20.0
WRITE_SECONDS = 120.0
"""How long attempts may begin; a large object takes its time on a narrow connection."""
_LARGE_BYTES = 1 << 20
"""A larger body makes aiohttp warn."""
NO_RETRIES = {"retries": {"max_attempts": 0}}
"""For botocore."""


class RemoteStore(FsspecStore):
    """An fsspec store that tries again; `retries` is the policy of reads, which their reader may replace."""

    retries = Retries(READ_SECONDS)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        get = super().get
        return await self.retries.run_async(lambda: get(key, prototype, byte_range))

    async def set(self, key: str, value: Buffer, byte_range: tuple[int, int] | None = None) -> None:
        put = super().set
        try:
            await Retries(WRITE_SECONDS).run_async(lambda: put(key, value, byte_range))
        except FileNotFoundError as error:
            await self._make_folder(key, error)
            await Retries(WRITE_SECONDS).run_async(lambda: put(key, value, byte_range))

    async def create(self, key: str, data: bytes) -> bool:
        """Put an object where there is none; False where there is one.

        One request with a condition, where the store obeys it (Google, S3); a look before writing, where it does not.
        An answer that is lost leaves it open who wrote: whoever creates must read what is there.
        """
        path = f"{self.path}/{key}"
        try:
            await Retries(WRITE_SECONDS).run_async(lambda: self.fs._pipe_file(path, data, mode="create"))
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            await self._make_folder(key, error)
            return await self.create(key, data)
        except OSError as error:
            if status_of(error) not in (409, 412):  # S3 says 409 to one of two that come at the same moment
                raise
            return False
        return True

    async def _make_folder(self, key: str, error: FileNotFoundError) -> None:
        """Of a file system; a bucket that is not there is not made."""
        if not hasattr(self.fs, "sync_fs"):
            raise error
        await self.fs._makedirs(f"{self.path}/{key}".rpartition("/")[0], exist_ok=True)

    async def delete(self, key: str) -> None:
        delete = super().delete
        await Retries(WRITE_SECONDS).run_async(lambda: delete(key))

    async def delete_dir(self, prefix: str) -> None:
        delete = super().delete_dir
        await Retries(WRITE_SECONDS).run_async(lambda: delete(prefix))

    async def exists(self, key: str) -> bool:
        try:
            await self.getsize(key)
        except FileNotFoundError:
            return False
        return True

    async def getsize(self, key: str) -> int:
        size = super().getsize
        return await self.retries.run_async(lambda: size(key))

    def list(self) -> AsyncIterator[str]:
        return self._retried(super().list)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        return self._retried(super().list_dir, prefix)

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        return self._retried(super().list_prefix, prefix)

    async def _retried(self, listing: Callable[..., AsyncIterator[str]], *prefix: str) -> AsyncIterator[str]:
        async def collect() -> tuple[str, ...]:
            return tuple([key async for key in listing(*prefix)])

        for key in await self.retries.run_async(collect):
            yield key

    async def info(self, key: str) -> dict[str, Any] | None:
        """What the file system says of an object; None when there is none."""
        try:
            return dict(await self.retries.run_async(lambda: self.fs._info(f"{self.path}/{key}")))
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Close the connections too, which fsspec leaves to its user."""
        super().close()
        _close_sessions(self.fs)


def open_remote(url: str, options: dict[str, Any], read_only: bool) -> RemoteStore:
    """The store at a checked URL; `options` are fsspec's."""
    options = {"skip_instance_cache": True, "use_listings_cache": False, **options}
    scheme = url.partition("://")[0]
    if scheme == "gs":
        options["session_kwargs"] = {"trust_env": True} | options.get("session_kwargs", {})  # a proxy
        fs = _gcs_class()(asynchronous=True, **options)
        return RemoteStore(fs=fs, path=fs._strip_protocol(url), read_only=read_only)
    if scheme == "s3":
        options["config_kwargs"] = NO_RETRIES | options.get("config_kwargs", {})
    if scheme in ("http", "https"):
        options.setdefault("get_client", guarded_client)
    store = RemoteStore.from_url(url, storage_options={} if scheme == "memory" else options, read_only=read_only)
    assert isinstance(store, RemoteStore)
    if scheme == "s3":
        store.fs.retries = 1
        if read_only:
            store.fs.max_concurrency = 1  # with more, an object is asked for its size before it is read whole
    _detach_finalizers(store.fs)
    weakref.finalize(store, _close_sessions, store.fs)
    return store


def _detach_finalizers(fs: Any) -> None:
    """Take back what a file system has closed at its end, which `_close_sessions` does.

    adlfs' finalizers hold the file system itself, so that it never ends, and at the exit of Python each prints that
    its loop does not run.
    """
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and alive[0] is fs:
            finalizer.detach()


async def guarded_client(**options: Any) -> Any:
    """An HTTP client whose connections, also of redirects, lead to no metadata service."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(socket_factory=guarded_socket), trust_env=True, **options
    )


@functools.cache
def _gcs_class() -> Any:
    """gcsfs' plain class: fsspec's default one asks a second service, over gRPC, what kind of bucket this is."""
    from gcsfs.core import GCSFileSystem

    one_attempt = GCSFileSystem._request.__wrapped__

    class Gcs(GCSFileSystem):  # type: ignore[misc]
        async def _request(self, *args: Any, data: Any = None, **options: Any) -> Any:
            if isinstance(data, bytes) and len(data) > _LARGE_BYTES:
                data = io.BytesIO(data)  # sent in pieces, between which the loop does other things
            return await one_attempt(self, *args, data=data, **options)

        @staticmethod
        def close_session(loop: object, session: Any, asynchronous: bool = False) -> None:  # noqa: ARG004
            """As gcsfs does, but on the session's own loop, not on whichever loop runs where this is collected."""
            _close_session(session)

    return Gcs


def _close_sessions(fs: Any) -> None:
    """Close the connections of a file system, which s3fs and adlfs keep deep within the clients of others."""
    endpoint = getattr(getattr(fs, "_s3", None), "_endpoint", None)
    sessions = getattr(getattr(endpoint, "http_session", None), "_sessions", None) or {}
    pipeline = getattr(getattr(fs, "service_client", None), "_pipeline", None)
    of_azure = getattr(getattr(pipeline, "_transport", None), "session", None)
    for session in [getattr(fs, "_session", None), of_azure, *sessions.values()]:
        _close_session(session)


def _close_session(session: Any) -> None:
    """Close an aiohttp session on its own loop, without waiting."""
    connector = getattr(session, "_connector", None)
    if session is None or connector is None:
        return

    def close() -> None:
        assert session is not None  # held until its connections are closed
        connector._close()

    loop = session._loop
    if loop.is_running():
        loop.call_soon_threadsafe(close)
    else:
        close()


_NAMES = {"metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal"}
_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16", "fe80::/10",  # link-local: also AWS, Azure, Google, Oracle, DigitalOcean
            "fd00:ec2::/32", "fd20:ce::254/128",  # AWS and Google over IPv6
            "100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32",  # Alibaba, Oracle, Azure
        ),
    )
)  # fmt: skip
_EMBEDS = tuple(map(ipaddress.ip_network, ("::/96", "64:ff9b::/96")))
"""IPv6 addresses whose last four bytes are one of IPv4, beside those that `ipaddress` takes apart."""


def is_metadata(host: str) -> bool:
    """Whether a host, as a URL writes it or a resolver gives it, is link-local or a cloud's metadata service."""
    plain = unicodedata.normalize("NFKC", unquote(host)).replace("。", ".")  # a dot too, in a name
    host = plain.strip("[]").partition("%")[0].rstrip(".").lower()
    if host in _NAMES:
        return True
    found = _address(host)
    if found is None:
        return False
    every: builtins.list[Any] = [found]
    if isinstance(found, ipaddress.IPv6Address):  # and the addresses of IPv4 that lie within it
        last = [ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)] if any(found in net for net in _EMBEDS) else []
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        every += [*last, *filter(None, inner)]
    return any(item in net for item in every for net in _NETWORKS if item.version == net.version)


def refuse_metadata(url: str, shown: str) -> None:
    """Refuse a URL whose host is one, as it is written; nothing is resolved.

    Raises:
        StoreError: for such a URL.
    """
    # As lenient as the clients are: after a user, before a port, in brackets or not.
    netloc = re.split(r"[/\\?#]", url.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
    host = netloc
    with contextlib.suppress(ValueError):
        host = urlsplit(f"//{netloc}").hostname or netloc
    if is_metadata(host):
        raise refused(shown, host)


def refuse_resolved(host: str, port: int, shown: str) -> None:
    """Refuse a name that leads to such an address. A name that is not known is left to whoever connects.

    Raises:
        StoreError: for such a name.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for _, _, _, _, address in found:
        if is_metadata(str(address[0])):
            raise refused(shown, f"{host} ({address[0]})")


def refused(shown: str, host: str) -> StoreError:
    """The error for such a host."""
    return StoreError(
        f"{shown}: {host} is a link-local address or a cloud's metadata service, which is no store; give the store's "
        "own address"
    )


def guarded_socket(address_info: tuple[Any, ...]) -> socket.socket:
    """A socket for aiohttp, unless it would lead there: also after a redirect, or when a name has changed.

    Raises:
        OSError: for such an address.
    """
    family, kind, protocol, _, address = address_info
    if is_metadata(str(address[0])):
        raise refused("a redirect or name", str(address[0]))
    return socket.socket(family, kind, protocol)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address in any spelling that a C library takes: also 2852039166, 0xA9FEA9FE, 0251.0376.0.1, 169.254.1."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    if not re.fullmatch(r"[0-9a-fx.]+", host) or not host[0].isdigit():
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None
