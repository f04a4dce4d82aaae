"""From a URL and the name of a credential to a Zarr store and its objects, or to a StoreError with the way out.

Paths and `file://` are folders whose objects are written by rename; everything else (`memory://`, `gs://`, `s3://`,
`az://`, `http(s)://`, any other fsspec scheme) goes through fsspec. Chained URLs (`a::b`) and caching wrappers are
refused: one URL names one place. Secrets never travel in a URL or a config; `credentials` says where one is found, and
every error text passes through `redact`.

A store is bound to no event loop until its first read, so a caller with its own loop opens its own store.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import threading
import unicodedata
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore

from kit.config import near, project_folder
from kit.data.stores.fsspec import RemoteStore, open_remote, refuse_metadata, refuse_resolved
from kit.data.stores.transfer import passing, status_of
from kit.errors import StoreError, UnreachableStoreError, did_you_mean, first_few
from kit.json_text import read_json
from kit.machine.endpoints import endpoint_of, server_of, takes_no_key
from kit.machine.machine import waiting_per_core

_ANSWER_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
_REACH_SECONDS = 10.0
"""For finding the address of a host and connecting to it."""
_SIZES_AT_ONCE = 16
_LONGEST_URL = 4096
_LONGEST_NAME_BYTES = 255
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_WRAPPERS = {
    "asynclocal", "blockcache", "cached", "dask", "dir", "filecache", "generic", "reference", "simplecache", "tar",
    "zip",
}  # fmt: skip
_SAME = {"gcs": "gs", "abfs": "az", "abfss": "az"}
_named: set[str] = set()
"""Environment variables that credentials named, so that their values can be kept out of messages."""
Result = TypeVar("Result")


def answer_seconds() -> float:
    """How long opening, listing and one small object may take before the store counts as out of reach.

    Longer where other programs want the cores, as importing a cloud's library and answering take them too.
    """
    return _ANSWER_SECONDS * waiting_per_core()


# -- URLs


def resolve_url(url: str) -> str:
    """An absolute URL, without a trailing slash: a folder becomes an absolute path below the project folder.

    Raises:
        StoreError: for a chained URL, an unknown scheme, a URL that carries credentials or a query, and text that is
            no URL or path at all.
    """
    given: Any = url  # by a user, who may give anything
    if not isinstance(given, str):
        raise StoreError(f"{type(given).__name__} names no store; write a path or a URL such as gs://bucket/name")
    _refuse_odd_text(url)
    if not url.strip() or "\0" in url:
        raise StoreError(
            f"{url!r} names no store; write a path such as data/ocean.zarr or a URL such as gs://bucket/name"
        )
    if "::" in re.sub(r"(://)\[[^\]/]*\]", r"\1", url):  # but for an address such as http://[::1]/x
        raise StoreError(f"{redact(url)}: chained URLs are not accepted; give the URL of the store itself")
    match = _SCHEME.match(url)
    if match is None and "://" in url and "/" not in url.partition("://")[0]:
        raise StoreError(f"{redact(url)[:60]!r} has no scheme; write a path, or such as gs://bucket/name")
    if match is None:
        try:
            return str(_absolute(Path(url).expanduser()))
        except RuntimeError as error:
            raise StoreError(f"{url}: {error}; write the folder out") from None
    scheme = match[1].lower()
    if scheme in ("file", "local"):
        return str(_absolute(Path(url[match.end() :])))
    _check_remote(url, scheme)
    return f"{_SAME.get(scheme, scheme)}://{url[match.end() :].rstrip('/')}"


def _refuse_odd_text(url: str) -> None:
    shown = f"{redact(url)[:60]!r}" + ("…" if len(url) > 60 else "")
    if len(url) > _LONGEST_URL:
        raise StoreError(f"{shown} has {len(url):,} characters, at most {_LONGEST_URL:,} name a store")
    odd = next((letter for letter in url if unicodedata.category(letter) in ("Cc", "Cf", "Cs")), "")
    if odd and url.strip() and "\0" not in url:
        raise StoreError(f"{shown} holds {odd!r}, which no URL or path does; remove it")
    if _SCHEME.match(url) and "::" not in url:
        try:
            host = urlsplit(url).hostname or ""
            if url.lower().startswith("http") and host and not host.isascii():
                host = host.encode("idna").decode()
            if url.lower().startswith("http") and host and not all(0 < len(part) < 64 for part in host.split(".")):
                raise ValueError(f"{host[:60]!r} is no name of a host")
        except ValueError as error:
            raise StoreError(f"{shown} is no URL: {error}; write such as https://host/store.zarr") from None


def _absolute(path: Path) -> Path:
    whole = Path(os.path.normpath(path if path.is_absolute() else project_folder() / path))
    longest = max((len(os.fsencode(part)) for part in whole.parts), default=0)
    if longest > _LONGEST_NAME_BYTES:
        raise StoreError(f"{str(whole)[:60]}…: a name of {longest} bytes, at most {_LONGEST_NAME_BYTES} are possible")
    return whole


def _check_remote(url: str, scheme: str) -> None:
    from fsspec.registry import known_implementations, registry

    known = sorted({*known_implementations, *registry} - _WRAPPERS)
    if scheme in _WRAPPERS:
        raise StoreError(f"{redact(url)}: {scheme}:// wraps another URL; give the URL of the store itself")
    if scheme not in known:
        hint = did_you_mean(scheme, known, "use a path, gs://, s3://, az://, https:// or memory://")
        raise StoreError(f"{redact(url)}: unknown scheme {scheme}://{hint}")
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise StoreError(f"{redact(url)}: the URL carries credentials; leave them out and set credentials to env:NAME")
    if parts.query or parts.fragment:
        raise StoreError(f"{redact(url)}: a URL with a query names one object, not a store; give the store's own URL")
    refuse_metadata(url, redact(url))
    if not parts.netloc.strip("/") and scheme != "memory":
        raise StoreError(f"{redact(url)}: no bucket or host; write {scheme}://bucket/name")


def redact(url: str) -> str:
    """The URL without user, password, query and fragment: fit for messages, logs and reprs."""
    if _SCHEME.match(url) is None:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL, but it may hold a secret
        return re.sub(r"[?#].*", "", re.sub(r"://[^/]*@", "://", url), flags=re.DOTALL)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_shared(url: str) -> bool:
    """Whether other processes see the same store; `memory://` lives in this one only."""
    return not url.lower().startswith("memory:")


def local_folder(url: str) -> Path | None:
    """The folder behind a resolved URL, or None for a store that is not on a local disk."""
    return None if _SCHEME.match(url) else Path(url)


# -- opening


_OPENED_BY = {".zip": "zarr.storage.ZipStore", ".tif": "rioxarray.open_rasterio", ".tiff": "rioxarray.open_rasterio"}
"""What reads a file that is no store, by its suffix."""
TABLES = (".csv", ".tsv", ".parquet", ".parq", ".feather", ".arrow", ".xlsx", ".duckdb", ".sqlite", ".db")
HOW_TABLES_ARE_READ = (
    "kit.data.EventData trains on tables in Parquet, DuckDB and PostgreSQL; write others as Parquet, as with pandas"
)


def open_store(url: str, credentials: str = "default", *, read_only: bool = True) -> Store:
    """The Zarr store at `url`; whether a dataset is in it is `open_dataset`'s question.

    Args:
        url: A path (relative ones start at the project folder) or a URL.
        credentials: `default`; `requester-pays`, which is `default` with the reader's project or account paying;
            `anonymous`; or `env:NAME` for a key in an environment variable: a JSON key (or the path of one) or an
            access token for `gs://`, `KEY:SECRET` for `s3://`, a connection string, a shared access signature or an
            account's key for `az://`, a bearer token for `http(s)://`, and a JSON object of fsspec options for any
            scheme. The account of `az://` is in `AZURE_STORAGE_ACCOUNT_NAME`, where no connection string names it.
        read_only: Refuse writes and ask for no more than reading rights.

    Raises:
        StoreError: within seconds, when the URL, the credentials or the network do not lead to a store.
    """
    url = resolve_url(url)
    folder = local_folder(url)
    if folder is not None:
        if folder.is_file() and folder.suffix.lower() in TABLES:
            raise StoreError(f"{folder} is a table; {HOW_TABLES_ARE_READ}")
        if folder.exists() and not folder.is_dir():
            opened_by = _OPENED_BY.get(folder.suffix.lower(), "xarray.open_dataset")
            raise StoreError(f"{folder} is a file; a store is a folder. Give kit what {opened_by} makes of it")
        if read_only and not folder.exists():
            way_out = "build it with kit.build(config), or correct data.url"
            raise StoreError(f"{folder} does not exist; {way_out}{near(folder)}")
        return LocalStore(folder, read_only=read_only)
    options = options_of(url, credentials, read_only)
    _check_reachable(url, options)
    seconds = answer_seconds()
    opened = _in_time(lambda: open_remote(url, options, read_only), seconds)  # logging in can hang without a deadline
    if not opened.done():
        raise UnreachableStoreError(
            f"{redact(url)}: not open after {seconds:.3g} s; check the network and the credentials "
            "(credentials: anonymous reads a public store)"
        )
    try:
        return opened.result()
    except BaseException as error:
        raise store_error(url, error) from None


def _in_time(work: Callable[[], Result], seconds: float) -> Future[Result]:
    """What `work` gives, by a thread that is waited for no longer than this; whether it is there, `done()` says."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kit-open-store", daemon=True).start()
    wait([future], seconds)
    return future


def options_of(url: str, credentials: str, read_only: bool) -> dict[str, Any]:
    """fsspec's options for the credentials asked for; the only place a secret is held."""
    scheme = url.partition("://")[0]
    options: dict[str, Any] = {"access": "read_only" if read_only else "read_write"} if scheme == "gs" else {}
    endpoint = endpoint_of(url)
    options |= {"endpoint_url": endpoint} if endpoint else {}
    if credentials == "anonymous" or (credentials == "default" and takes_no_key(url)):
        return options | ({"token": "anon"} if scheme == "gs" else {"anon": True} if scheme in ("s3", "az") else {})
    if credentials == "requester-pays":
        if scheme not in ("gs", "s3"):
            raise StoreError(f"{redact(url)}: {scheme}:// knows no requester who pays; use default, or env:NAME")
        return options | {"requester_pays": True}
    if credentials == "default":
        return options
    name = credentials.removeprefix("env:")
    secret = os.environ.get(name, "")
    _named.add(name)
    if not secret:
        raise StoreError(f"{redact(url)}: credentials ask for the environment variable {name}, which is not set")
    try:
        parsed = read_json(secret)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return options | ({"token": parsed} if scheme == "gs" and "type" in parsed else parsed)
    if scheme == "gs":
        from google.oauth2.credentials import Credentials

        token = secret if Path(secret).is_file() else Credentials(token=secret)  # type: ignore[no-untyped-call]
        return options | {"token": token}
    if scheme == "s3":
        key, _, rest = secret.partition(":")
        if not key or not rest.partition(":")[0]:  # libraries would take another key of this machine
            raise StoreError(f"{redact(url)}: {name} is no key of S3; write KEY:SECRET, KEY:SECRET:TOKEN, or JSON")
        return options | {"key": key, "secret": rest.partition(":")[0], "token": rest.partition(":")[2] or None}
    if scheme == "az":
        kinds = (("AccountName=", "connection_string"), ("sig=", "sas_token"))
        return options | {next((kind for mark, kind in kinds if mark in secret), "account_key"): secret}
    return options | {"client_kwargs": {"headers": {"Authorization": f"Bearer {secret}"}}}


def _check_reachable(url: str, options: Mapping[str, Any]) -> None:
    """Refuse at once when there is no way to the host; libraries would retry for most of a minute first."""
    server, connects = server_of(url, options)
    if not server:
        return
    parts = urlsplit(server)
    try:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise StoreError(f"{redact(server)}: the port is not a number") from None
    refuse_metadata(f"//://{host}", redact(url))
    proxy = _proxy_of(parts.scheme, host)
    behind_proxy = proxy is not None

    def reach() -> None:
        refuse_resolved(host, port, redact(url))
        if proxy is not None and all(proxy):
            socket.create_connection(proxy, timeout=_CONNECT_SECONDS).close()
        elif not behind_proxy and connects:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        elif not behind_proxy:
            socket.getaddrinfo(host, port)

    reached = _in_time(reach, _REACH_SECONDS)  # a server of names that is out of reach is asked for most of a minute
    error = reached.exception() if reached.done() else TimeoutError(f"no answer within {_REACH_SECONDS:g} s")
    if not reached.done() and behind_proxy:  # which finds names itself
        return
    if isinstance(error, OSError) and not isinstance(error, StoreError):
        reason = error.strerror or str(error)
        if proxy is not None:
            raise UnreachableStoreError(
                f"{redact(url)}: no connection to the proxy {proxy[0]}:{proxy[1]} ({reason}) that the environment "
                f"names for {host}; correct {parts.scheme}_proxy, or except the host in no_proxy"
            )
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        ended = "; what listened there has ended, such as a simulated cloud" * is_here
        raise UnreachableStoreError(
            f"{redact(url)}: no connection to {host}:{port} ({reason}){ended}; check the network. Without one there "
            "are copies in a folder (data.url), what kit.data.prefetch has put into cache.folder, and simulated clouds "
            "(kit.cloud.simulate)"
        )
    if error is not None:
        raise error


def _proxy_of(scheme: str, host: str) -> tuple[str, int] | None:
    """Where the environment sends requests to a host first; the port is 0 where none is named, None for no proxy."""
    named = getproxies().get(scheme, "")
    if not named or proxy_bypass(host):
        return None
    with contextlib.suppress(ValueError):
        parts = urlsplit(named if "://" in named else f"//{named}")
        return parts.hostname or "", parts.port or 0
    return "", 0


# -- single objects


def read_object(store: Store, key: str, url: str, seconds: float | None = None) -> bytes | None:
    """The bytes under `key`, or None when there is no such object; in no more than `answer_seconds` by default.

    Raises:
        StoreError: when the store does not answer or refuses.
    """
    buffer = run_sync(lambda: store.get(key, default_buffer_prototype()), url, seconds or answer_seconds())
    return None if buffer is None else buffer.to_bytes()


def write_object(store: Store, key: str, data: bytes, url: str) -> None:
    """Put `data` under `key`, whole or not at all.

    Raises:
        StoreError: when the store does not take it.
    """
    run_sync(lambda: store.set(key, default_buffer_prototype().buffer.from_bytes(data)), url, None)


def create_object(store: Store, key: str, data: bytes, url: str) -> bool:
    """Put `data` under `key` where there is nothing; False where there is something.

    Raises:
        StoreError: when the store does not take it.
    """
    assert isinstance(store, RemoteStore), "folders have locks of their own"
    return run_sync(lambda: store.create(key, data), url, None)


def delete_object(store: Store, key: str, url: str) -> None:
    """Remove the object under `key`, if it is there."""
    run_sync(lambda: store.delete(key), url, answer_seconds())


def list_objects(store: Store, prefix: str, url: str, most: int | None = None) -> list[str]:
    """Keys below the folder `prefix` (the whole store for an empty one), sorted; no more than `most` of them."""

    async def collect() -> list[str]:
        keys: list[str] = []
        async for key in store.list_prefix(f"{prefix}/" if prefix else ""):
            keys.append(key)
            if most is not None and len(keys) >= most:
                break
        return sorted(keys)

    return run_sync(collect, url, None)


def near_url(url: str, credentials: str = "default") -> str:
    """What stands in a bucket's folder where no store is, or else beside it, as the end of an error."""
    scheme, _, path = url.rstrip("/").partition("://")
    if scheme not in ("gs", "s3", "az"):  # plain HTTP lists nothing
        return ""
    above, _, name = path.rpartition("/")
    try:
        if names := _names_at(url, credentials):
            return f"; it holds {first_few(names, _MOST_NAMES)}: name one behind the address"
        if above and (names := _names_at(f"{scheme}://{above}", credentials)):
            return did_you_mean(name, names, otherwise=f"beside it are {first_few(names, _MOST_NAMES)}", cutoff=0.5)
    except StoreError:  # what may be read need not be listed
        return ""
    return f"; {redact(f'{scheme}://{above or path}')} is empty, or is not there"


def _names_at(url: str, credentials: str) -> list[str]:
    """Names of objects and folders at a URL, for as long as a reader waits for a hint."""
    store = open_store(url, credentials)

    async def collect() -> list[str]:
        return sorted([name.strip("/") async for name in store.list_dir("")])

    try:
        return run_sync(collect, url, _HINT_SECONDS)
    finally:
        store.close()


_HINT_SECONDS, _MOST_NAMES = 3.0, 5


def sizes_of_objects(store: Store, keys: Iterable[str], url: str) -> dict[str, int]:
    """Bytes of the objects that are there, by key; the others are left out."""

    async def measure() -> dict[str, int]:
        slots, sizes = asyncio.Semaphore(_SIZES_AT_ONCE), {}

        async def one(key: str) -> None:
            async with slots:
                with contextlib.suppress(FileNotFoundError):
                    sizes[key] = await store.getsize(key)

        await asyncio.gather(*(one(key) for key in keys))
        return sizes

    return run_sync(measure, url, None)


def run_sync(work: Callable[[], Coroutine[Any, Any, Result]], url: str, seconds: float | None) -> Result:
    """The result of `work()`, run on the event loop that zarr's stores share, within `seconds`.

    Raises:
        StoreError: for whatever goes wrong, without secrets.
    """

    async def limited() -> Result:
        return await asyncio.wait_for(work(), seconds)

    try:
        return sync(limited())
    except TimeoutError as error:
        if seconds is None:
            raise store_error(url, error) from None
        raise UnreachableStoreError(f"{redact(url)}: no answer within {seconds:.3g} s; check the network") from None
    except StoreError:
        raise
    except Exception as error:
        raise store_error(url, error) from None


def store_error(url: str, error: BaseException) -> StoreError:
    """What went wrong with the store, in one line, with no secret and a way out."""
    if isinstance(error, StoreError):
        return error
    first = next(iter(str(error).splitlines()), "")
    tried = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    broken = passing(error) is not None and not status_of(error)
    return (UnreachableStoreError if broken else StoreError)(
        f"{redact(url)}: {type(error).__name__}: {_scrub(first)[:300]}{_scrub(tried)}{_way_out(error, url)}"
    )


_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def _way_out(error: BaseException, url: str) -> str:
    status = str(getattr(error, "status", "") or getattr(error, "code", ""))
    text = f"{status} {error}".lower()
    if url.startswith("az://") and "account_name" in text:
        return "; name the account in AZURE_STORAGE_ACCOUNT_NAME, or give a connection string as credentials env:NAME"
    if isinstance(error, ImportError):
        return f"; the package that reads {url.partition('://')[0]}:// is not installed"
    if isinstance(error, OSError) and "://" not in url and error.errno in _NO_PLACE:
        return "; there is no such folder, or it cannot be made or written; choose another place or change its rights"
    if isinstance(error, PermissionError) or re.search(r"\b(401|403)\b|forbidden|unauthorized|anonymous caller", text):
        return "; check data.credentials (default, anonymous or env:NAME) and the rights on the bucket"
    if "virtual chunk" in text:
        return (
            "; open the repository yourself, icechunk.Repository.open(..., authorize_virtual_chunk_access=...), and "
            "give kit its readonly_session"
        )
    if isinstance(error, OSError) and error.errno is not None and error.errno in (27, 28, 122):
        return "; free some space or choose another data.url, then run again to resume"
    return ""


def _scrub(text: str) -> str:
    """Text without URL queries, user information and the values of credential variables."""
    words = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
    text = re.sub(r"(://)[^/@\s'\"]+@", r"\1", text)
    text = re.sub(r"(://[^\s'\"?]+)\?[^\s'\"]*", r"\1", text)
    text = re.sub(r"(?i)(bearer|authorization:?|token[=:]|secret[=:]|signature[=:])\s*[^\s,'\"]+", r"\1 …", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and (name in _named or any(word in name.upper() for word in words)):
            text = text.replace(value, "…")
    return text
