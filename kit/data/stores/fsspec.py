"""Remote: a store behind fsspec, with kit's retries instead of the client's own, and its connections closed at the end.

Every operation is tried again by `kit.data.stores.retry`; whether an object exists is never taken from an error. What a
broken connection leaves in doubt is done again: writes put the same bytes in the same place, and deleting twice is
deleting. gcsfs, s3fs and HTTP are bound to the loop of their first request.

Hosts: addresses that are never a store, in whichever spelling, name or redirect they come.

Link-local addresses are those of the machine's own network card; clouds answer there with the machine's keys. A
config, a bucket or a server that leads there would have kit ask for them. It is refused before a request leaves: when a
URL is read, when its name has been resolved, and again for each connection that libcurl or aiohttp opens.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import io
import ipaddress
import re
import socket
import unicodedata
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore

from kit.data.stores.retry import Retries, status_of
from kit.errors import StoreError

READ_SECONDS = 20.0
WRITE_SECONDS = 120.0
"""Attempts begin for so long; a large object takes its time on a narrow connection."""
_LARGE_BYTES = 1 << 20
"""Of a body, from where on aiohttp would warn."""
NO_RETRIES = {"retries": {"max_attempts": 0}}
"""botocore's words for it."""


class RemoteStore(FsspecStore):
    """An fsspec store that tries again; `retries` is the policy of reads, which their reader may replace."""

    retries = Retries(READ_SECONDS)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        get = super().get
        return await self.retries.run_async(lambda: get(key, prototype, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> builtins.list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges))

    async def set(self, key: str, value: Buffer, byte_range: tuple[int, int] | None = None) -> None:
        put = super().set
        try:
            await Retries(WRITE_SECONDS).run_async(lambda: put(key, value, byte_range))
        except FileNotFoundError:
            if not hasattr(self.fs, "sync_fs"):  # of an object store: a bucket that is not there is not made
                raise
            await self._make_folder(key)
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
        except FileNotFoundError:
            if not hasattr(self.fs, "sync_fs"):
                raise
            await self._make_folder(key)
            return await self.create(key, data)
        except OSError as error:
            if status_of(error) not in (409, 412):  # S3 says 409 to one of two that come at the same moment
                raise
            return False
        return True

    async def _make_folder(self, key: str) -> None:
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

    async def list(self) -> AsyncIterator[str]:
        for key in await self._listed(super().list):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        listing = super().list_dir
        for key in await self._listed(lambda: listing(prefix)):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        listing = super().list_prefix
        for key in await self._listed(lambda: listing(prefix)):
            yield key

    async def _listed(self, listing: Callable[[], AsyncIterator[str]]) -> tuple[str, ...]:
        async def collect() -> tuple[str, ...]:
            return tuple([key async for key in listing()])

        return await self.retries.run_async(collect)

    async def close_client(self) -> None:
        """Close the connections, on the loop they belong to, which fsspec leaves to its user."""
        session = getattr(self.fs, "_session", None)
        if session is not None and hasattr(session, "close"):
            await session.close()
        creator = getattr(self.fs, "_s3creator", None)
        if creator is not None:
            self.fs._s3creator = None
            await creator.__aexit__(None, None, None)


def open_remote(url: str, options: dict[str, Any], read_only: bool) -> RemoteStore:
    """The store at a checked URL; `options` are fsspec's."""
    options = {"skip_instance_cache": True, "use_listings_cache": False, **options}
    scheme = url.partition("://")[0]
    if scheme == "gs":
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
        weakref.finalize(store, _close_s3, store.fs)
    if scheme in ("http", "https"):
        weakref.finalize(store, lambda fs: _close_session(getattr(fs, "_session", None)), store.fs)
    return store


async def guarded_client(**options: Any) -> Any:
    """An HTTP client whose connections, also of redirects, lead to no metadata service."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=guarded_socket), **options)


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
            """As gcsfs does it, but on the session's own loop, not on whichever loop runs where this is collected."""
            _close_session(session)

    return Gcs


def _close_s3(fs: Any) -> None:
    """Close s3fs' connections, whose session lies deep within botocore's client."""
    endpoint = getattr(getattr(fs, "_s3", None), "_endpoint", None)
    sessions = getattr(getattr(endpoint, "http_session", None), "_sessions", None) or {}
    for session in sessions.values():
        _close_session(session)


def _close_session(session: Any) -> None:
    """Close the connections of a store nobody holds any more; fsspec does so for its blocking ones only."""
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


_NAMES = frozenset(
    ("metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal")
)
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
    return found is not None and any(
        item in network for item in _all_in(found) for network in _NETWORKS if item.version == network.version
    )


def refuse_metadata(url: str, shown: str) -> None:
    """Refuse a URL whose host is one, as it is written; nothing is resolved.

    Raises:
        StoreError: for such a URL.
    """
    if is_metadata(_host(url)):
        raise refused(shown, _host(url))


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


def _host(url: str) -> str:
    """As lenient as the clients are: after a user, before a port, in brackets or not."""
    netloc = re.split(r"[/\\?#]", url.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
    try:
        return urlsplit(f"//{netloc}").hostname or netloc
    except ValueError:
        return netloc


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address in any spelling that a C library takes: also 2852039166, 0xA9FEA9FE, 0251.0376.0.1, 169.254.1."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if not re.fullmatch(r"[0-9a-fx.]+", host) or not host[0].isdigit():
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


def _all_in(found: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Any]:
    """The address, and those of IPv4 that lie within one of IPv6."""
    if isinstance(found, ipaddress.IPv4Address):
        return [found]
    last = [ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)] if any(found in net for net in _EMBEDS) else []
    inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
    return [found, *last, *(item for item in inner if item is not None)]
