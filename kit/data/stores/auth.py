"""Addresses: where the objects of a store that fsspec has opened really are, and how its key is shown there.

For libcurl (`kit.data.stores.http`): the web address below which the keys lie, the options that every request has, and
those that change, since a token runs out. Signing is libcurl's. Where fsspec was given an option that is not known here
there is no address, and fsspec reads. No repr shows a key.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import certifi
import pycurl
from zarr.abc.store import Store

from kit.data.stores.fsspec import NO_RETRIES, RemoteStore
from kit.data.stores.url import redact

Options = Iterable[tuple[int, Any]]
_GOOGLE = "https://storage.googleapis.com"
_HARMLESS = ("skip_instance_cache", "use_listings_cache", "asynchronous", "get_client")


@dataclass(frozen=True, slots=True)
class Address:
    """Where objects lie."""

    base: str = field(repr=False)
    shown: str
    """The URL of the store, as an error may show it."""
    options: tuple[tuple[int, Any], ...] = field(default=(), repr=False)
    login: Callable[[], Options] = field(default=tuple, repr=False)
    """The options that log in, asked for before every request."""


def address_of(store: Store, url: str) -> Address | None:
    """The store's address; None when fsspec is the one to read it."""
    scheme, _, rest = url.partition("://")
    if not isinstance(store, RemoteStore) or scheme not in _FOUND or "?" in rest or sys.platform == "win32":
        return None
    return _FOUND[scheme](store.fs, url)


def _address(base: str, url: str, options: Options = (), login: Callable[[], Options] = tuple) -> Address:
    authorities = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or certifi.where()
    return Address(base.rstrip("/"), redact(url), ((pycurl.CAINFO, authorities), *options), login)


def _google(fs: Any, url: str) -> Address | None:
    endpoint = str(getattr(fs, "_endpoint", "") or "") or _GOOGLE
    base = f"{endpoint if '://' in endpoint else f'http://{endpoint}'}/{quote(url.partition('://')[2])}"
    held = getattr(fs, "credentials", None)
    if getattr(fs, "requester_pays", False):
        return None
    if held is None or held.credentials is None:
        return _address(base, url)

    def login() -> Options:
        held.maybe_refresh()
        return [(pycurl.HTTPHEADER, [f"Authorization: Bearer {held.credentials.token}"])]

    return _address(base, url, login=login)


def _amazon(fs: Any, url: str) -> Address | None:
    given = {name: value for name, value in fs.storage_options.items() if value is not None}
    for harmless in _HARMLESS:
        given.pop(harmless, None)
    client = dict(given.pop("client_kwargs", {}))
    endpoint = given.pop("endpoint_url", None) or client.pop("endpoint_url", None)
    region = client.pop("region_name", None)
    anonymous = given.pop("anon", False)
    named = [given.pop(name, None) for name in ("key", "secret", "token")]
    if given.get("config_kwargs") == NO_RETRIES:
        del given["config_kwargs"]
    if given or client:
        return None  # an option that means something here that is not known
    region = region or _amazon_region() or ("us-east-1" if endpoint else None)
    if not region:
        return None  # s3fs follows a bucket to its region, a signature is for one
    base = f"{endpoint or f'https://s3.{region}.amazonaws.com'}/{quote(url.partition('://')[2])}"
    if anonymous:
        return _address(base, url)
    found = None if named[0] else _amazon_key()
    if not named[0] and found is None:
        return None

    def login() -> Options:
        key, secret, token = named if found is None else found.get_frozen_credentials()[:3]
        headers = [f"x-amz-security-token: {token}"] if token else []
        return [(pycurl.USERNAME, key), (pycurl.PASSWORD, secret), (pycurl.HTTPHEADER, headers)]

    return _address(base, url, [(pycurl.AWS_SIGV4, f"aws:amz:{region}:s3")], login)


def _amazon_region() -> str | None:
    from botocore.session import Session

    found = os.environ.get("AWS_REGION") or Session().get_config_variable("region")
    return str(found) if found else None


def _amazon_key() -> Any:
    """The key that botocore finds (variables, files, the machine's role), which it renews; None when none."""
    from botocore.session import Session

    return Session().get_credentials()


def _web(fs: Any, url: str) -> Address | None:
    given = dict(fs.storage_options)
    for harmless in _HARMLESS:
        given.pop(harmless, None)
    client = dict(given.pop("client_kwargs", {}))
    headers = client.pop("headers", {})
    if given or client:
        return None
    options = [(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in headers.items()])] if headers else []
    return _address(url, url, options)


_FOUND = {"gs": _google, "s3": _amazon, "http": _web, "https": _web}
