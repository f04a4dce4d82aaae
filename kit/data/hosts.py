"""Hosts: addresses that are never a store, in whichever spelling, name or redirect they come.

Link-local addresses are those of the machine's own network card; clouds answer there with the machine's keys. A
config, a bucket or a server that leads there would have kit ask for them. It is refused before a request leaves: when a
URL is read, when its name has been resolved, and again for each connection that libcurl or aiohttp opens.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from typing import Any
from urllib.parse import unquote, urlsplit

from kit.errors import StoreError

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
