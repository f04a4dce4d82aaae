"""Addresses: where the objects of a store that fsspec has opened really are, and how its key is shown there.

For libcurl (`kit.data.stores.http`): the web address below which the keys lie, the options that every request has, and
those that change, since a token runs out. Signing is libcurl's. Where fsspec was given an option that is not known here
there is no address, and fsspec reads. No repr shows a key.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

import certifi
import pycurl
from zarr.abc.store import Store

from kit.data.stores.fsspec import NO_RETRIES, RemoteStore
from kit.data.stores.url import redact

Options = Iterable[tuple[int, Any]]
_GOOGLE = "https://storage.googleapis.com"
_SIGNED_SECONDS, _RENEW_SECONDS = 3600.0, 600.0
_BEGUN = _SIGNED_SECONDS + 900.0
"""A signature begins before it is made: clocks differ."""
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
    signature: Callable[[], str] = field(default=str, repr=False)
    """What is put behind the URL of every request, from the question mark on; asked for before each."""


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
    held, payer = getattr(fs, "credentials", None), getattr(fs, "requester_pays", False)
    project = payer if isinstance(payer, str) else getattr(fs, "project", "")
    if payer and not project:
        return None
    pays = [f"x-goog-user-project: {project}"] if payer else []
    if held is None or held.credentials is None:
        return _address(base, url, [(pycurl.HTTPHEADER, pays)] if pays else ())

    def login() -> Options:
        held.maybe_refresh()
        return [(pycurl.HTTPHEADER, [f"Authorization: Bearer {held.credentials.token}", *pays])]

    return _address(base, url, login=login)


def _amazon(fs: Any, url: str) -> Address | None:
    given = {name: value for name, value in fs.storage_options.items() if value is not None}
    for harmless in _HARMLESS:
        given.pop(harmless, None)
    client = dict(given.pop("client_kwargs", {}))
    endpoint = given.pop("endpoint_url", None) or client.pop("endpoint_url", None)
    region = client.pop("region_name", None)
    anonymous, pays = given.pop("anon", False), given.pop("requester_pays", False)
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
        headers += ["x-amz-request-payer: requester"] if pays else []
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


def _azure(fs: Any, url: str) -> Address | None:
    """By a key or a shared access signature, or without; a login of Entra ID is for fsspec."""
    service = getattr(fs, "service_client", None)
    held = getattr(service, "credential", None)
    if service is None or (held is not None and not hasattr(held, "account_key")):
        return None
    place = urlsplit(service.url)
    base = f"{place.scheme}://{place.netloc}{place.path.rstrip('/')}/{quote(url.partition('://')[2])}"
    if held is None:
        return replace(_address(base, url), signature=lambda: f"?{place.query}" if place.query else "")
    return replace(_address(base, url), signature=_Signature(held, url.partition("://")[2].partition("/")[0]))


class _Signature:
    """A signature for reading one container, made of an account's key and renewed before it runs out."""

    def __init__(self, key: Any, container: str) -> None:
        self._key, self._container = key, container
        self._made, self._until = "", 0.0

    def __call__(self) -> str:
        if time.time() > self._until - _RENEW_SECONDS:
            from azure.storage.blob import ContainerSasPermissions, generate_container_sas

            self._until = time.time() + _SIGNED_SECONDS
            start, end = (datetime.fromtimestamp(at, UTC) for at in (self._until - _BEGUN, self._until))
            self._made = generate_container_sas(
                self._key.account_name, self._container, account_key=self._key.account_key,
                permission=ContainerSasPermissions(read=True),
                start=start, expiry=end,
            )  # fmt: skip
        return f"?{self._made}"


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


_FOUND = {"gs": _google, "s3": _amazon, "az": _azure, "http": _web, "https": _web}
