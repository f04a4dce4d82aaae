"""Objects: synchronous reads of an object store by obstore, for threads; the cheapest request there is in Python.

A request costs about half the CPU of one through fsspec's event loop, since Rust sends and waits; trying again is left
to `kit.data.retries`. It serves what fsspec has already opened and logged in to, with the same key: `gs://`, `s3://`
and `http(s)://`. Where obstore knows no such option, or cannot work (its threads do not live on in a process forked
from one that used it), there is no Objects and fsspec reads. Answers are bytes, or None where there is no such object;
a store that answers a request for a range with something else is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from zarr.abc.store import Store

from kit.data.codec import Octets, octets
from kit.data.counters import Counters
from kit.data.remote import NO_RETRIES, RemoteStore
from kit.data.retries import Retries
from kit.data.stores import store_error

_unusable: list[int] = []
"""This process, when it was forked from one that had loaded obstore, whoever did."""
_S3_OPTIONS = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}


class Objects:
    """The objects below one prefix; call from any thread."""

    def __init__(self, bucket: Any, prefix: str, url: str, seconds: float, counters: Counters) -> None:
        import obstore

        self._obstore = obstore
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._url = url
        self._counters = counters
        self.retries = Retries(seconds, lambda: counters.add(requests=1, retries=1))

    def read(self, key: str, first: int | None = None, last: int | None = None) -> Octets | None:
        """Bytes `first` to `last`, the last `-first` bytes for a negative one, or the whole object.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        try:
            data = self.retries.run(lambda: self._read(self._prefix + key, first, last))
        except FileNotFoundError:
            data = None
        except Exception as error:
            raise store_error(self._url, error) from None  # its text may carry a secret; this one's does not
        self._counters.add(requests=1, bytes_read=0 if data is None else len(data))
        return data

    def identity(self, key: str) -> str | None:
        """Which object the key names now, in the store's own words; None when there is none.

        Raises:
            StoreError: when the store does not answer or refuses.
        """
        try:
            meta = self.retries.run(lambda: self._obstore.head(self._bucket, self._prefix + key))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise store_error(self._url, error) from None
        self._counters.add(requests=1)
        return repr([str(meta.get(word)) for word in ("e_tag", "version", "size", "last_modified")])

    def _read(self, path: str, first: int | None, last: int | None) -> Octets:
        if first is None:
            data: Any = self._obstore.get(self._bucket, path).bytes()
        elif last is None or first < 0:
            data = self._obstore.get(self._bucket, path, options={"range": {"suffix": -first}}).bytes()
        else:
            data = self._obstore.get_range(self._bucket, path, start=first, end=last)
        return octets(memoryview(data))


def open_objects(store: Store, url: str, seconds: float, counters: Counters) -> Objects | None:
    """The store by obstore; None when fsspec is the one to read it."""
    if not isinstance(store, RemoteStore) or _unusable:
        return None
    scheme = url.partition("://")[0]
    opened = _BUCKETS[scheme](store.fs, url, _limits(seconds)) if scheme in _BUCKETS else None
    if opened is None:
        return None
    return Objects(*opened, url, seconds, counters)


def _after_fork() -> None:
    if "obstore" in sys.modules:
        _unusable.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _limits(seconds: float) -> dict[str, Any]:
    limit = timedelta(seconds=seconds)
    return {
        "client_options": {"timeout": limit, "allow_http": True},
        "retry_config": {"max_retries": 0, "retry_timeout": limit},
    }


def _split(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.partition("://")[2].partition("/")
    return bucket, prefix


def _google(fs: Any, url: str, limits: Mapping[str, Any]) -> tuple[Any, str] | None:
    from obstore.store import GCSStore

    name, prefix = _split(url)
    options: dict[str, Any] = dict(limits)
    endpoint = str(getattr(fs, "_endpoint", "") or "")
    if endpoint:
        options["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    held = getattr(fs, "credentials", None)
    if held is None or held.credentials is None:
        return GCSStore(name, skip_signature=True, **options), prefix

    def token() -> dict[str, Any]:
        held.maybe_refresh()
        expiry = held.credentials.expiry
        return {
            "token": held.credentials.token,
            "expires_at": expiry.replace(tzinfo=UTC) if isinstance(expiry, datetime) else None,
        }

    return GCSStore(name, credential_provider=token, **options), prefix  # type: ignore[arg-type]


def _amazon(fs: Any, url: str, limits: Mapping[str, Any]) -> tuple[Any, str] | None:
    from obstore.store import S3Store

    given = {name: value for name, value in fs.storage_options.items() if value is not None}
    for harmless in ("skip_instance_cache", "use_listings_cache", "asynchronous"):
        given.pop(harmless, None)
    options: dict[str, Any] = {ours: given.pop(theirs) for theirs, ours in _S3_OPTIONS.items() if theirs in given}
    client = dict(given.pop("client_kwargs", {}))
    endpoint = given.pop("endpoint_url", None) or client.pop("endpoint_url", None)
    region = client.pop("region_name", None)
    if given.pop("anon", False):
        options["skip_signature"] = True
    if given.get("config_kwargs") == NO_RETRIES:
        del given["config_kwargs"]
    if given or client:
        return None  # an option that obstore may read otherwise, or not at all
    region = region or _amazon_region() or ("us-east-1" if endpoint else None)
    if not region:
        return None  # s3fs follows a bucket to its region, obstore does not
    options |= {"region": region} | ({"endpoint": endpoint} if endpoint else {})
    if not options.keys() & {"skip_signature", "access_key_id"}:
        if _amazon_key() is None:
            return None
        options["credential_provider"] = _amazon_key
    name, prefix = _split(url)
    return S3Store(name, **options, **limits), prefix


def _amazon_region() -> str | None:
    from botocore.session import Session

    found = os.environ.get("AWS_REGION") or Session().get_config_variable("region")
    return str(found) if found else None


def _amazon_key() -> Any:
    """The key that botocore finds (variables, files, the machine's role), as obstore asks for it; None when none."""
    from botocore.session import Session

    found = Session().get_credentials()
    if found is None:
        return None
    key, expiry = found.get_frozen_credentials(), getattr(found, "_expiry_time", None)
    return {
        "access_key_id": key.access_key, "secret_access_key": key.secret_key, "token": key.token, "expires_at": expiry,
    }  # fmt: skip


def _web(fs: Any, url: str, limits: Mapping[str, Any]) -> tuple[Any, str] | None:
    from obstore.store import HTTPStore

    given = dict(fs.storage_options)
    for harmless in ("skip_instance_cache", "use_listings_cache", "asynchronous"):
        given.pop(harmless, None)
    client = dict(given.pop("client_kwargs", {}))
    headers = client.pop("headers", {})
    if given or client:
        return None
    options = {**limits, "client_options": {**limits["client_options"], "default_headers": headers}}
    return HTTPStore.from_url(url, **options), ""


_BUCKETS = {"gs": _google, "s3": _amazon, "http": _web, "https": _web}
