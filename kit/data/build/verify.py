"""Is every object still what was published? Every one is read once; size and crc32c are compared with the manifest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.arguments import checks_arguments
from kit.config import Config
from kit.data.build.build import Progress, make_progress
from kit.data.open_dataset import read_manifest, refuse_unfinished
from kit.data.stores.manifest import ObjectRecord, crc32c
from kit.data.stores.url import open_store, read_object, redact, resolve_url
from kit.errors import CorruptChunkError, MissingChunkError, StoreError
from kit.units import format_bytes

if TYPE_CHECKING:
    from zarr.abc.store import Store

_THREADS = 8
_OBJECT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was read and what is wrong with it."""

    url: str
    """Without secrets."""
    objects: int
    bytes: int
    faults: tuple[StoreError, ...]
    """One MissingChunkError or CorruptChunkError per object at fault, naming array, key and url."""

    def __repr__(self) -> str:
        if not self.faults:
            return f"{self.url}: all {self.objects} objects ({format_bytes(self.bytes)}) are as published"
        lines = [f"{self.url}: {len(self.faults)} of {self.objects} objects are damaged", *map(str, self.faults[:10])]
        return "\n  ".join(lines) + ("\n  ..." if len(self.faults) > 10 else "")


@checks_arguments
def verify(
    config_or_url: Config | str, credentials: str = "default", *, strict: bool = True, progress: bool | Progress = True
) -> Verification:
    """Read every object of a finished store and compare it with the manifest.

    Args:
        config_or_url: A config, or the URL of a store.
        credentials: As `data.credentials`, for a URL.
        strict: Raise the first fault. False returns all of them.
        progress: True shows a line that updates in place, False shows nothing, and a callable is called with (objects
            done, objects in total, bytes read).

    Returns:
        The objects that were read, and the faults.

    Raises:
        MissingChunkError, CorruptChunkError: with array, key and URL, when `strict`.
        UnfinishedStoreError: when the build has not finished.
        StoreError: when the store was not built by kit or cannot be read.

    Example:
        >>> kit.data.verify(store, progress=False).faults
        ()
    """
    if isinstance(config_or_url, Config):
        return verify(config_or_url.data.url, config_or_url.data.credentials, strict=strict, progress=progress)
    url = resolve_url(config_or_url)
    store = open_store(url, credentials)
    manifest = read_manifest(store, url)
    if manifest is None:
        refuse_unfinished(store, url)
        raise StoreError(f"{redact(url)}: no manifest, so kit cannot tell what it should hold")
    faults, read_bytes, shown = [], 0, make_progress(progress, "Verifying", "objects")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kit-verify") as pool:
        checks = pool.map(lambda item: _check(store, url, item), manifest.objects)
        for done, (item, fault) in enumerate(zip(manifest.objects, checks, strict=True), start=1):
            read_bytes += item.bytes
            shown(done, len(manifest.objects), read_bytes)
            if fault is not None:
                faults.append(fault)
    if faults and strict:
        raise faults[0]
    return Verification(
        url=redact(url), objects=len(manifest.objects), bytes=manifest.stored_bytes, faults=tuple(faults)
    )


def _check(store: Store, url: str, item: ObjectRecord) -> StoreError | None:
    where = f"{redact(url)}: {item.array or 'the group'}: {item.key}"
    data = read_object(store, item.key, url, _OBJECT_SECONDS)
    if data is None:
        return MissingChunkError(f"{where} is missing; build again with overwrite=True, or restore it from a copy")
    if len(data) != item.bytes or crc32c(data) != item.crc32c:
        sizes = "" if len(data) == item.bytes else f" ({len(data)} bytes for {item.bytes})"
        return CorruptChunkError(
            f"{where} is not what was published{sizes}; build again with overwrite=True, or restore it from a copy"
        )
    return None
