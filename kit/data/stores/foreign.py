"""Zarr stores that are no folder of chunks: Icechunk repositories, and references into files of other formats.

Whatever they are, zarr reads them through a `Store` of the library that knows them, and so does kit: chunks are asked
for by that library's client and decoded here. Local and S3 repositories are Icechunk's to read, and Google's; a
repository is opened at the tip of its branch `main`. References are those of kerchunk, in JSON or Parquet, or a
VirtualiZarr dataset; the files that they lead to are opened with the same credentials.

`PrefixStore` shows one group of a store as if it were all of it, or an array that fills a store as an array in it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, WrapperStore

from kit.data.stores.fsspec import guarded_client, refuse_metadata
from kit.data.stores.url import local_folder, open_store, options_of, read_object, redact, resolve_url, store_error
from kit.errors import StoreError
from kit.json_text import read_json
from kit.machine.endpoints import endpoint_of

REFERENCES = (".json", ".parquet", ".parq")
_BRANCH = "refs/branch.main/ref.json"


class PrefixStore(WrapperStore[Store]):
    """A store whose keys begin with `shown` where those of the other begin with `there`; both end in `/`, or are empty.

    Args:
        store: The other.
        there: A group, or nothing.
        shown: The name of an array that fills the other store, or nothing.
    """

    def __init__(self, store: Store, there: str, shown: str = "") -> None:
        super().__init__(store)
        self._there, self._shown = there, shown

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self._there, self._shown)

    def behind(self, key: str) -> tuple[Store, str]:
        """The other store, and the key of an object there."""
        return self._store, self._there + key.removeprefix(self._shown)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if not key.startswith(self._shown):
            return None
        return await self._store.get(self._there + key.removeprefix(self._shown), prototype, byte_range)

    async def exists(self, key: str) -> bool:
        return key.startswith(self._shown) and await self._store.exists(self._there + key.removeprefix(self._shown))

    async def getsize(self, key: str) -> int:
        return await self._store.getsize(self._there + key.removeprefix(self._shown))

    @property
    def supports_consolidated_metadata(self) -> bool:
        return self._store.supports_consolidated_metadata

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async for key in self._store.list_dir(self._there + prefix):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self._store.list_prefix(self._there + prefix):
            yield key.removeprefix(self._there)


class _OfVersion2(WrapperStore[Store]):
    """A store that is asked for nothing that only Zarr 3 has, since it fails on other names than those of version 2."""

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        return None if key.endswith("zarr.json") else await self._store.get(key, prototype, byte_range)


# -- Icechunk


def find_repository(url: str, credentials: str) -> tuple[str, str] | None:
    """The Icechunk repository at a resolved URL or above it, and the path of a group in it; None where there is none.

    Raises:
        StoreError: when a bucket does not answer.
    """
    folder = local_folder(url)
    if folder is not None:
        found = next((place for place in (folder, *folder.parents) if (place / _BRANCH).is_file()), None)
        return None if found is None else (str(found), folder.relative_to(found).as_posix().strip("."))
    root, inside = url, ""
    while root.count("/") > 2:
        if read_object(open_store(root, credentials), _BRANCH, root) is not None:
            return root, inside
        root, _, last = root.rpartition("/")
        inside = f"{last}/{inside}".strip("/")
    return None


def open_repository(url: str, credentials: str) -> Store:
    """The tip of the branch `main` of an Icechunk repository.

    Raises:
        StoreError: when icechunk is not installed, does not read that kind of URL, or cannot open it.
    """
    try:
        import icechunk
    except ImportError:
        raise StoreError(f"{redact(url)} is an Icechunk repository; pip install 'kit[formats]'") from None
    try:
        storage = _storage(icechunk, url, credentials)
        store: Store = icechunk.Repository.open(storage).readonly_session("main").store
    except StoreError:
        raise
    except Exception as error:
        raise store_error(url, error) from None
    return store


def _storage(icechunk: Any, url: str, credentials: str) -> Any:
    folder = local_folder(url)
    if folder is not None:
        return icechunk.local_filesystem_storage(str(folder))
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in ("s3", "gs"):
        raise StoreError(
            f"{redact(url)}: Icechunk reads folders, s3:// and gs://; for another place pass the session itself, "
            "kit.open_dataset(repository.readonly_session('main'))"
        )
    known, endpoint = options_of(url, credentials, read_only=True), endpoint_of(url)
    anonymous = bool(known.get("anon")) or known.get("token") == "anon"
    if scheme == "s3":
        keys = {"access_key_id": known.get("key"), "secret_access_key": known.get("secret"),
                "session_token": known.get("token")}  # fmt: skip
        given = {name: value for name, value in keys.items() if value}
        return icechunk.s3_storage(
            bucket=bucket, prefix=prefix, anonymous=anonymous or None, from_env=not (anonymous or given) or None,
            endpoint_url=endpoint or None, allow_http=endpoint.startswith("http:"), force_path_style=bool(endpoint),
            region=os.environ.get("AWS_REGION") or ("us-east-1" if endpoint else None), **given,
        )  # fmt: skip
    if credentials.startswith("env:"):
        secret = os.environ[credentials.removeprefix("env:")]
        name = "service_account_file" if Path(secret).is_file() else "service_account_key"
        name = name if Path(secret).is_file() or secret.lstrip().startswith("{") else "bearer_token"
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, **{name: secret})
    config = {"base_url": endpoint} if endpoint else None
    return icechunk.gcs_storage(
        bucket=bucket, prefix=prefix, anonymous=anonymous or None, from_env=not anonymous or None, config=config
    )


# -- references


def open_references(url: str, credentials: str) -> Store:
    """What the references of kerchunk at a URL lead to: `.json`, or a folder `.parquet`.

    Raises:
        StoreError: when they cannot be read, or are no references.
    """
    folder = local_folder(resolve_url(url))
    if folder is not None and not url.endswith(".json") and not folder.is_dir():
        open_store(url, credentials)  # which says why it is no store
    if not url.endswith(".json"):
        return references_as_store(resolve_url(url), credentials)
    root, _, name = resolve_url(url).rpartition("/")
    text = read_object(open_store(root or "/", credentials), name, root)
    try:
        found = read_json(text or b"")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"refs", ".zgroup", "zarr.json"} & set(found):
        what = "is not there" if text is None else "holds no references of kerchunk"
        raise StoreError(f"{redact(url)} {what}; give what SingleHdf5ToZarr(...).translate() returns, as JSON")
    return references_as_store(found, credentials, url)


def references_as_store(given: Any, credentials: str, url: str = "references") -> Store:
    """A store of references: a dict of them, or the URL of a folder in Parquet.

    Raises:
        StoreError: when a reference leads to a machine's own network, or what reads them is not installed.
    """
    import fsspec
    from fsspec.implementations.reference import LazyReferenceMapper

    try:
        held, known = given, given
        if isinstance(given, str):
            files, root = fsspec.core.url_to_fs(given, **options_of(given, credentials, read_only=True))
            held, known = LazyReferenceMapper(root, fs=files, engine="pyarrow"), {}
        items = (item for item in held.get("refs", held).values() if isinstance(item, list) and item[0])
        # Those in Parquet are many, and are read as they are asked for.
        places = {str(item[0]) for item in (items if held is given else islice(items, 1))}
        for place in places:
            refuse_metadata(place, redact(place))
        scheme = next((place.partition("://")[0] for place in places if "://" in place), None)
        store = fsspec.filesystem(
            "reference", fo=known, remote_protocol=scheme, remote_options=_options_of_target(scheme, credentials),
            asynchronous=True, skip_instance_cache=True,
        )  # fmt: skip
        if held is given:
            return FsspecStore(store, read_only=True, path="")
        store.references = held
        return _OfVersion2(FsspecStore(store, read_only=True, path=""))
    except ImportError as error:
        raise StoreError(f"{redact(url)}: {error}; pip install 'kit[formats]'") from None
    except StoreError:
        raise
    except Exception as error:
        raise store_error(url, error) from None


def _options_of_target(scheme: str | None, credentials: str) -> dict[str, Any]:
    """fsspec's options for the files that references lead into."""
    if scheme in (None, "file"):
        return {}
    options = options_of(f"{scheme}://", credentials, read_only=True) if scheme in ("gs", "s3") else {}
    return options | ({"get_client": guarded_client} if scheme in ("http", "https") else {}) | {"asynchronous": True}
