"""Uploads: a checkpoint put into a store as a bundle, the bundles that are there, and what broken-off uploads left.

An upload sends only the parts that are not there, so one that was killed goes on where it was. The list of parts goes
last, and only when the source has not changed since the first byte was read: at every moment a reader finds the last
complete bundle of that name, or none. The store retries what may pass (`kit.data.stores.transfer`). Memory: as many
parts as are sent at once.

Parts that no list names belong to an upload that is under way or was broken off. Nobody reads them and they cost
storage. An upload of the same name sends the rest or removes them; under a name that never comes again
(`step=400.ckpt`) only `unfinished_uploads` drops them, once they have not changed for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from zarr.core.buffer import default_buffer_prototype

from kit.checkpoints.parts import (
    LIST_NAME,
    Bundle,
    BundlePart,
    PackedFile,
    Signature,
    check_name,
    list_key,
    part_key,
    saved_at,
    signature,
    spans,
)
from kit.data.stores.local import check_names
from kit.data.stores.url import (
    delete_object,
    list_objects,
    local_folder,
    open_store,
    read_object,
    redact,
    resolve_url,
    run_sync,
    sizes_of_objects,
    write_object,
)
from kit.errors import StoreError
from kit.sections import Checkpoint
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zarr.abc.store import Store

_DEFAULTS = Checkpoint()
_LOOK_SECONDS = 0.1
QUIET_SECONDS = 120.0
"""Longer than a part is on its way: 16 MiB at 1 Mbit/s."""
Result = TypeVar("Result")


class UploadCancelled(StoreError):  # noqa: N818 - it was asked for
    """An upload that was cancelled; what it sent stays, unseen, for the next attempt."""


class SourceChanged(StoreError):  # noqa: N818 - no fault of anyone
    """The file or folder became another while it was read; nothing was published."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What one upload did."""

    url: str
    """Of the bundle."""
    bundle: Bundle
    sent_bytes: int
    """The rest was there."""
    seconds: float

    def __str__(self) -> str:
        there = self.bundle.size_bytes - self.sent_bytes
        known = f", {format_bytes(there)} of them were there" if there else ""
        return f"{redact(self.url)}: {format_bytes(self.bundle.size_bytes)} in {format_seconds(self.seconds)}{known}"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The parts of one upload that was broken off."""

    url: str
    """Of the bundle that it would have become."""
    parts: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{redact(self.url)}: {self.parts} parts, {format_bytes(self.size_bytes)}, not a whole one"


class BundleStore:
    """The bundles below one URL, open for writing or only for reading."""

    def __init__(self, url: str, store: Store) -> None:
        self.url, self.store = url, store

    @classmethod
    def open(cls, url: str, credentials: str = "default", *, read_only: bool = False) -> Self:
        """The bundles below `url`, none of which is read yet.

        Raises:
            StoreError: within seconds, when the URL, the credentials or the network do not lead to a store.
        """
        url = resolve_url(url)
        return cls(url, open_store(url, credentials, read_only=read_only))

    def check_writable(self) -> None:
        """Write one small object, and remove it where that is allowed.

        Raises:
            StoreError: when the store does not take it.
        """
        key = f".kit-can-write-{os.getpid()}-{time.time_ns():x}"
        write_object(self.store, key, b"kit asks whether it may write here\n", self.url)
        with contextlib.suppress(StoreError):
            delete_object(self.store, key, self.url)

    def find(self, name: str) -> Bundle | None:
        """The complete bundle of that name; None when there is none."""
        data = read_object(self.store, list_key(check_name(name)), self.url)
        return None if data is None else Bundle.load(data, f"{redact(self.url)}/{name}")

    def all(self) -> list[Bundle]:
        """Every complete bundle, the one saved first first."""
        found = [self.find(name) for name in self._names()]
        return sorted((bundle for bundle in found if bundle is not None), key=lambda bundle: bundle.saved)

    def unfinished(self) -> dict[str, dict[str, int]]:
        """Key and size of each part, by name, of what has parts and no list."""
        found = {}
        for name in self._names():
            parts = self._part_sizes(name)
            if parts and self.find(name) is None:
                found[name] = parts
        return found

    def send(
        self,
        source: Path,
        name: str = "",
        *,
        part_bytes: int = _DEFAULTS.part_bytes,
        at_once: int = _DEFAULTS.parts_in_flight,
        cancelled: threading.Event | None = None,
    ) -> Upload:
        """Put a file or folder there, under its own name when none is given.

        Raises:
            SourceChanged: when it was written to meanwhile.
            UploadCancelled: when `cancelled` was set.
            StoreError: when it cannot be read, or the store does not take it.
        """
        began, name, sent_bytes = time.monotonic(), check_name(name or source.name), 0
        before = _look_at(source)
        check_names((path for path, _, _ in before if path), str(source))
        known = {key.rpartition("/")[2]: size for key, size in self._part_sizes(name).items()}
        old = {*known}

        async def send_part(path: str, first: int, last: int) -> BundlePart:
            nonlocal sent_bytes
            data, sha256 = await asyncio.to_thread(_read_part, source / path if path else source, first, last)
            if known.get(sha256) != len(data):
                known[sha256] = len(data)  # of equal parts one is sent
                await self.store.set(part_key(name, sha256), default_buffer_prototype().buffer.from_bytes(data))
                sent_bytes += len(data)
            return BundlePart(sha256, len(data))

        cuts = [(path, *span) for path, size, _ in before for span in spans(size, part_bytes)]
        parts = run_all([partial(send_part, *cut) for cut in cuts], at_once, self.url, cancelled)
        if _look_at(source) != before:
            raise SourceChanged(f"{source} changed while it was uploaded; nothing was published")
        each = iter(parts)
        files = [PackedFile(path, tuple(islice(each, len(spans(size, part_bytes))))) for path, size, _ in before]
        bundle = Bundle(name, saved_at(before), tuple(files))
        write_object(self.store, list_key(name), bundle.dump(), self.url)
        self._remove(name, old - {part.sha256 for part in parts})
        return Upload(f"{self.url}/{name}", bundle, sent_bytes, time.monotonic() - began)

    def prune(self, keep: int) -> None:
        """Remove the complete bundles saved first, until `keep` are left: the list of each before its parts."""
        for bundle in self.all()[:-keep] if keep else ():
            delete_object(self.store, list_key(bundle.name), self.url)
            self._remove(bundle.name, {part.sha256 for part in bundle.parts()})

    def _names(self) -> list[str]:
        """Of all bundles, complete or not."""

        async def names() -> list[str]:
            return sorted([name.strip("/") async for name in self.store.list_dir("")])

        return [name for name in run_sync(names, self.url, None) if not name.startswith(".")]

    def _part_sizes(self, name: str) -> dict[str, int]:
        return sizes_of_objects(self.store, list_objects(self.store, f"{name}/parts", self.url), self.url)

    def _remove(self, name: str, parts: Iterable[str]) -> None:
        """Parts that no list names; where removing is not allowed they stay, unseen."""
        with contextlib.suppress(StoreError):
            for sha256 in parts:
                delete_object(self.store, part_key(name, sha256), self.url)


def run_all(
    work: Sequence[Callable[[], Awaitable[Result]]], at_once: int, url: str, cancelled: threading.Event | None = None
) -> list[Result]:
    """The results of all work, so much of it at once; a failure, an interrupt or `cancelled` ends the rest.

    Raises:
        UploadCancelled: when `cancelled` was set.
        StoreError: the first failure.
    """
    interrupted = threading.Event()

    async def run() -> list[Result]:
        slots = asyncio.Semaphore(at_once)

        async def one(item: Callable[[], Awaitable[Result]]) -> Result:
            async with slots:
                return await item()

        tasks = [asyncio.ensure_future(one(item)) for item in work]
        waiting = {*tasks}
        try:
            while waiting:
                if interrupted.is_set() or (cancelled is not None and cancelled.is_set()):
                    raise UploadCancelled(f"{redact(url)}: cancelled")
                done, waiting = await asyncio.wait(waiting, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    try:
        return run_sync(run, url, None)
    except BaseException:  # an interrupt of this thread is unknown to the loop
        interrupted.set()
        raise


def _read_part(file: Path, first: int, last: int) -> tuple[bytes, str]:
    try:
        with file.open("rb") as opened:
            opened.seek(first)
            data = opened.read(last - first)
    except FileNotFoundError:
        raise SourceChanged(f"{file} was removed while it was uploaded; nothing was published") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error}") from None
    if len(data) < last - first:
        raise SourceChanged(f"{file} became shorter while it was uploaded; nothing was published")
    return data, hashlib.sha256(data).hexdigest()


def _look_at(source: Path) -> Signature:
    try:
        return signature(source)
    except FileNotFoundError as error:
        raise SourceChanged(f"{error.filename} is not there; nothing was published") from None
    except OSError as error:
        raise StoreError(f"{source} cannot be read: {error}") from None


def upload_checkpoint(
    path: str | Path, url: str, *, credentials: str = "default", name: str = "", keep: int = 0
) -> Upload:
    """Copy a checkpoint to a bucket. A second call sends only what is missing.

    Args:
        path: A file, or the folder of a sharded checkpoint.
        url: Where checkpoints are kept: a path or URL. This one gets its own name below it.
        credentials: As `data.credentials`.
        name: Another name than the file's own.
        keep: Remove the oldest complete checkpoints there until so many are left. 0 keeps all.

    Returns:
        What was sent and what was there already, in bytes.

    Raises:
        StoreError: when the file cannot be read or changes meanwhile, or the store does not accept it.

    Example:
        >>> kit.checkpoints.upload("last.ckpt", bucket).url.rpartition("/")[2]
        'last.ckpt'
    """
    bundles = BundleStore.open(url, credentials)
    sent = bundles.send(Path(path), name)
    bundles.prune(keep)
    return sent


def latest_checkpoint(url: str, *, credentials: str = "default") -> str | None:
    """The URL of the newest complete checkpoint below a URL.

    Args:
        url: Where checkpoints are kept.
        credentials: As `data.credentials`.

    Returns:
        Its URL, or None when there is none.

    Raises:
        StoreError: when the store cannot be reached or read.

    Example:
        >>> upload = kit.checkpoints.upload("last.ckpt", bucket)
        >>> kit.checkpoints.latest(bucket).rpartition("/")[2]
        'last.ckpt'
    """
    found = latest_bundle(url, credentials)
    return None if found is None else found[0]


def latest_bundle(url: str, credentials: str = "default") -> tuple[str, Bundle] | None:
    """The bundle at the URL, or the complete one below it that was saved last, and its URL; None when there is none.

    Raises:
        StoreError: when the store cannot be reached or read.
    """
    url = resolve_url(url)
    folder = local_folder(url)
    if folder is not None and not folder.is_dir():
        return None
    bundles = BundleStore.open(url, credentials, read_only=True)
    data = read_object(bundles.store, LIST_NAME, url)
    if data is not None:
        return url, Bundle.load(data, redact(url))
    found = bundles.all()
    return (f"{url}/{found[-1].name}", found[-1]) if found else None


def unfinished_uploads(
    url: str, *, credentials: str = "default", drop: bool = False, quiet_seconds: float = QUIET_SECONDS
) -> list[Unfinished]:
    """What interrupted uploads have left below a URL.

    Args:
        url: Where checkpoints are kept, as `kit.checkpoints.upload` takes it.
        credentials: As `data.credentials`.
        drop: Remove it too. An upload that was still changing stays, and is not in the answer.
        quiet_seconds: How long nothing may change before an upload is dropped. It is watched for so long.

    Returns:
        The uploads, each with its name and the bytes that it holds.

    Raises:
        StoreError: when the store cannot be read, or does not let them be removed.

    Example:
        >>> kit.checkpoints.unfinished(bucket)
        []
    """
    folder = local_folder(resolve_url(url))
    if folder is not None and not folder.is_dir():
        return []
    bundles = BundleStore.open(url, credentials, read_only=not drop)
    found = bundles.unfinished()
    if drop and found:
        time.sleep(quiet_seconds)
        later = bundles.unfinished()
        found = {name: parts for name, parts in found.items() if later.get(name) == parts}
        for key in (key for parts in found.values() for key in parts):
            delete_object(bundles.store, key, bundles.url)
    return [Unfinished(f"{bundles.url}/{name}", len(parts), sum(parts.values())) for name, parts in found.items()]
