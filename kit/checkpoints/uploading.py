"""Uploads: a file or folder put into a store as a parcel, and the parcels that are there.

A part that is there with its size is not sent again, so an upload that was killed goes on where it was. The list goes
last, and only when the source has not changed since the first byte was read: at every moment a reader finds the last
whole parcel of that name, or none. What fails and may pass is tried again by the store (`kit.data.stores.retry`).
Memory: `at_once` parts.

Unfinished uploads: parts in a store that no list names, because their upload was broken off and not taken up again.

Nobody reads them and they cost storage. An upload of the same name goes on with them or removes them; under a name of
its own (`step=400.ckpt`) nothing ever does. They look like an upload that is under way, whose parts must not go: what
is dropped is only what has not changed for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

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
from kit.config import Checkpoint
from kit.data.stores.local import check_names
from kit.data.stores.url import (
    ask,
    delete_object,
    list_objects,
    local_folder,
    open_store,
    read_object,
    redact,
    resolve_url,
    sizes_of_objects,
    write_object,
)
from kit.errors import StoreError
from kit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zarr.abc.store import Store

_DEFAULTS = Checkpoint()
_LOOK_SECONDS = 0.1
_PROBE = ".kit-can-write"


class UploadCancelled(StoreError):  # noqa: N818 - it was asked for
    """An upload that was given up on request; what it sent stays, unseen, for the next attempt."""


class SourceChanged(StoreError):  # noqa: N818 - no fault of anyone
    """The file or folder became another while it was read; nothing was published."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What one upload did."""

    url: str
    """Of the parcel."""
    parcel: Bundle
    sent_bytes: int
    """The rest was there."""
    seconds: float

    def __str__(self) -> str:
        there = self.parcel.size_bytes - self.sent_bytes
        known = f", {format_bytes(there)} of them were there" if there else ""
        return f"{redact(self.url)}: {format_bytes(self.parcel.size_bytes)} in {format_seconds(self.seconds)}{known}"


class Parcels:
    """The parcels below one URL, open for writing or only for reading."""

    def __init__(self, url: str, store: Store) -> None:
        self.url, self.store = url, store

    @classmethod
    def open(cls, url: str, credentials: str = "default", *, read_only: bool = False) -> Self:
        """The parcels below `url`, none of which is read yet.

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
        key = f"{_PROBE}-{os.getpid()}-{time.time_ns():x}"
        write_object(self.store, key, b"kit asks whether it may write here\n", self.url)
        with contextlib.suppress(StoreError):
            delete_object(self.store, key, self.url)

    # -- what is there

    def find(self, name: str) -> Bundle | None:
        """The whole parcel of that name; None when there is none."""
        data = read_object(self.store, list_key(check_name(name)), self.url)
        return None if data is None else Bundle.load(data, f"{redact(self.url)}/{name}")

    def all(self) -> list[Bundle]:
        """Every whole parcel, the one saved first first."""
        found = [self.find(name) for name in self.names()]
        return sorted((parcel for parcel in found if parcel is not None), key=lambda parcel: parcel.saved)

    def names(self) -> list[str]:
        """What has begun to be put there, whole or not."""

        async def names() -> list[str]:
            return sorted([name.strip("/") async for name in self.store.list_dir("")])

        return [name for name in ask(names, self.url, None) if not name.startswith(".")]

    # -- putting something there

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
        began, name = time.monotonic(), check_name(name or source.name)
        before = _look_at(source)
        check_names((path for path, _, _ in before if path), str(source))
        known = self._known_parts(name)
        sending = _Sending(self, source, name, known, at_once, cancelled or threading.Event())
        files = sending.run(before, part_bytes)
        if _look_at(source) != before:
            raise SourceChanged(f"{source} changed while it was uploaded; nothing was published")
        parcel = Bundle(name, saved_at(before), files)
        write_object(self.store, list_key(name), parcel.dump(), self.url)
        self._remove(name, known.keys() - {part.sha256 for part in parcel.parts()})
        return Upload(f"{self.url}/{name}", parcel, sending.sent_bytes, time.monotonic() - began)

    def _known_parts(self, name: str) -> dict[str, int]:
        keys = list_objects(self.store, f"{name}/parts", self.url)
        sizes = sizes_of_objects(self.store, keys, self.url)
        return {key.rpartition("/")[2]: size for key, size in sizes.items()}

    # -- removing

    def prune(self, keep: int) -> None:
        """Remove the whole parcels saved first, until `keep` are left: the list of each before its parts."""
        for parcel in self.all()[:-keep] if keep else ():
            delete_object(self.store, list_key(parcel.name), self.url)
            self._remove(parcel.name, [part.sha256 for part in parcel.parts()])

    def _remove(self, name: str, parts: Sequence[str] | set[str]) -> None:
        """Parts that no list names; where removing is not allowed they stay, unseen."""
        with contextlib.suppress(StoreError):
            for sha256 in set(parts):
                delete_object(self.store, part_key(name, sha256), self.url)


class _Sending:
    """The parts of one source on their way."""

    def __init__(
        self, to: Parcels, source: Path, name: str, known: dict[str, int], at_once: int, cancelled: threading.Event
    ) -> None:
        self._to, self._source, self._name = to, source, name
        self._known, self._at_once = known, at_once
        self._cancelled, self._over = cancelled, threading.Event()
        self.sent_bytes = 0

    def run(self, seen: Signature, part_bytes: int) -> tuple[PackedFile, ...]:
        try:
            return ask(lambda: self._all(seen, part_bytes), self._to.url, None)
        except BaseException:  # an interrupt of this thread is unknown to the loop
            self._over.set()
            raise

    async def _all(self, seen: Signature, part_bytes: int) -> tuple[PackedFile, ...]:
        wanted = [(path, span) for path, size, _ in seen for span in spans(size, part_bytes)]
        slots = asyncio.Semaphore(self._at_once)
        tasks = [asyncio.ensure_future(self._one(slots, path, span)) for path, span in wanted]
        try:
            await self._watch(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        parts: dict[str, list[BundlePart]] = {path: [] for path, _, _ in seen}
        for (path, _), task in zip(wanted, tasks, strict=True):
            parts[path].append(task.result())
        return tuple(PackedFile(path, tuple(found)) for path, found in parts.items())

    async def _watch(self, tasks: Sequence[asyncio.Future[BundlePart]]) -> None:
        """Until all are done, one has failed, or it is cancelled."""
        waiting: set[asyncio.Future[BundlePart]] = set(tasks)
        while waiting:
            if self._cancelled.is_set() or self._over.is_set():
                raise UploadCancelled(f"{self._source.name}: given up")
            done, waiting = await asyncio.wait(waiting, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()

    async def _one(self, slots: asyncio.Semaphore, path: str, span: tuple[int, int]) -> BundlePart:
        async with slots:
            data, sha256 = await asyncio.to_thread(self._read, path, *span)
            if self._known.get(sha256) != len(data):
                self._known[sha256] = len(data)  # of equal parts one is sent
                buffer = default_buffer_prototype().buffer.from_bytes(data)
                await self._to.store.set(part_key(self._name, sha256), buffer)
                self.sent_bytes += len(data)
            return BundlePart(sha256, len(data))

    def _read(self, path: str, first: int, last: int) -> tuple[bytes, str]:
        file = self._source / path if path else self._source
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
    """Copy a checkpoint, a file or the folder of a sharded one, to below a URL; calling it again goes on.

    Args:
        path: The file or folder.
        url: Where checkpoints are kept: a path or URL; this one gets its own name there.
        credentials: As `data.credentials`.
        name: Instead of the file's own.
        keep: Remove the oldest whole ones there until so many are left; 0 keeps all.

    Raises:
        StoreError: when it cannot be read, changes meanwhile, or the store does not take it.
    """
    parcels = Parcels.open(url, credentials)
    sent = parcels.send(Path(path), name)
    parcels.prune(keep)
    return sent


def latest_checkpoint(url: str, *, credentials: str = "default") -> str | None:
    """The URL of the checkpoint below `url` that was saved last and is whole; None when there is none.

    Raises:
        StoreError: when the store cannot be reached or read.
    """
    found = last_parcel(url, credentials)
    return None if found is None else found[0]


def last_parcel(url: str, credentials: str = "default") -> tuple[str, Bundle] | None:
    """The parcel at the URL, or the whole one below it that was saved last, and its URL; None when there is none.

    Raises:
        StoreError: when the store cannot be reached or read.
    """
    url = resolve_url(url)
    folder = local_folder(url)
    if folder is not None and not folder.is_dir():
        return None
    parcels = Parcels.open(url, credentials, read_only=True)
    data = read_object(parcels.store, LIST_NAME, url)
    if data is not None:
        return url, Bundle.load(data, redact(url))
    found = parcels.all()
    return (f"{url}/{found[-1].name}", found[-1]) if found else None


QUIET_SECONDS = 120.0
"""Longer than a part is on its way: 16 MiB at 1 Mbit/s."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The parts of one upload that was broken off."""

    url: str
    """Of what it would have become."""
    parts: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{redact(self.url)}: {self.parts} parts, {format_bytes(self.size_bytes)}, not a whole one"


def unfinished_uploads(
    url: str, *, credentials: str = "default", drop: bool = False, quiet_seconds: float = QUIET_SECONDS
) -> list[Unfinished]:
    """What uploads that were broken off have left below a URL.

    Args:
        url: Where checkpoints are kept, as `kit.upload_checkpoint` takes it.
        credentials: As `data.credentials`.
        drop: Remove them too; what is left out of the answer then was still changing, and stays.
        quiet_seconds: How long nothing may have come to what is dropped; so long it is watched.

    Raises:
        StoreError: when the store cannot be read, or does not let them be removed.
    """
    folder = local_folder(resolve_url(url))
    if folder is not None and not folder.is_dir():
        return []
    parcels = Parcels.open(url, credentials, read_only=not drop)
    found = dict(_look(parcels))
    if drop and found:
        time.sleep(quiet_seconds)
        later = dict(_look(parcels))
        found = {name: parts for name, parts in found.items() if later.get(name) == parts}
        for key in (key for parts in found.values() for key in parts):
            delete_object(parcels.store, key, parcels.url)
    return [Unfinished(f"{parcels.url}/{name}", len(parts), sum(parts.values())) for name, parts in found.items()]


def _look(parcels: Parcels) -> Iterator[tuple[str, dict[str, int]]]:
    """Name, and key and size of each part, of what has parts and no list."""
    for name in parcels.names():
        keys = list_objects(parcels.store, f"{name}/parts", parcels.url)
        if keys and parcels.find(name) is None:
            yield name, sizes_of_objects(parcels.store, keys, parcels.url)
