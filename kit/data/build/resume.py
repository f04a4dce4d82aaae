"""Before a build writes: is the place empty, ours to resume, ours to replace, finished, or somebody else's?

Only a store that bears `.kit/build.json` is ever cleared, and it is unpublished first: manifest, then journals, then
data, so that a kill in between leaves an unfinished store and never one that promises what is gone.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from kit.data.build.layout import estimate
from kit.data.build.shards import Blueprint, read_block
from kit.data.build.source import Source
from kit.data.open_dataset import read_build, read_journals, read_manifest
from kit.data.stores import manifest as records
from kit.data.stores.manifest import BuildRecord, ObjectRecord, crc32c
from kit.data.stores.url import delete_object, list_objects, local_folder, read_object, redact
from kit.errors import BuildError
from kit.units import format_bytes

if TYPE_CHECKING:
    from zarr.abc.store import Store

_DRAFT = ".partial"
_DRAFT_SECONDS = 60.0
_SHOWN = 6


def prepare(
    store: Store, url: str, blueprint: Blueprint, source: Source, *, overwrite: bool
) -> dict[str, ObjectRecord] | None:
    """The shards already finished, by key (none for a fresh start); None when the whole build is.

    Raises:
        BuildError: when the place belongs to another build or to other data, or the source has changed.
    """
    _collect_drafts(url)
    if overwrite and read_object(store, records.BUILD_KEY, url) is not None:
        clear(store, url)
        return {}
    existing = read_build(store, url)
    if existing is None:
        refuse_foreign(store, url)
        return {}
    _refuse_other(existing, blueprint.build, store, url)
    if read_manifest(store, url) is not None:
        remove_journals(store, url)
        return None
    journalled = read_journals(store, url)
    there = {key for name in blueprint.arrays for key in list_objects(store, name, url)} if journalled else set()
    there &= {task.key for task in blueprint.tasks()}
    finished = {key: item for key, item in journalled.items() if key in there}
    _refuse_changed_source(finished, blueprint, source, url)
    return finished


def finished_with(store: Store, url: str, blueprint: Blueprint) -> list[str] | None:
    """The fields in which a published and tidy build differs from this one; None when there is no such build.

    Where there is one without any, there is nothing to write, not even a lock.
    """
    existing = read_build(store, url)
    if existing is None or read_manifest(store, url) is None:
        return None
    left = list_objects(store, records.FOLDER, url)
    if any(key.startswith(records.JOURNAL_PREFIX) or key == records.LOCK_KEY for key in left):
        return None
    return [*existing.diff(blueprint.build)]


def remove_journals(store: Store, url: str) -> None:
    """What a finished store no longer needs."""
    for key in list_objects(store, records.FOLDER, url):
        if key.startswith(records.JOURNAL_PREFIX):
            delete_object(store, key, url)


def refuse_foreign(store: Store, url: str) -> None:
    """Raises: BuildError: when there is something that no build of kit has left."""
    if read_object(store, records.BUILD_KEY, url) is not None:
        return
    found = list_objects(store, "", url, most=_SHOWN)
    others = [key for key in found if not key.endswith(_DRAFT) and key != records.LOCK_KEY]
    if others:
        raise BuildError(
            f"{redact(url)} holds {others[0]} and was not built by kit, so it is left alone; choose another data.url"
        )


def _refuse_other(existing: BuildRecord, mine: BuildRecord, store: Store, url: str) -> None:
    changes = existing.diff(mine)
    if not changes:
        return

    def show(value: object) -> str:
        text = "absent" if value is None else repr(value)
        return text if len(text) <= 60 else text[:57] + "..."

    state = "a finished" if read_object(store, records.MANIFEST_KEY, url) is not None else "an unfinished"
    shown = [f"{name} is {show(old)} there and {show(new)} here" for name, (old, new) in changes.items()]
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise BuildError(
        f"{redact(url)} holds {state} build with other settings: {'; '.join(shown[:_SHOWN])}{more}. "
        "Use build(config, overwrite=True) to replace it, or set data.url to another place."
    )


def _refuse_changed_source(finished: dict[str, ObjectRecord], blueprint: Blueprint, source: Source, url: str) -> None:
    """Write one finished shard again in memory: a source or encoder that changed since must not be mixed in."""
    task = next((task for task in blueprint.tasks() if task.key in finished), None)
    if task is None:
        return
    writer = blueprint.arrays[task.array]
    data = writer.encode(task, read_block(source, writer, task))
    if crc32c(data) != finished[task.key].crc32c:
        raise BuildError(
            f"{redact(url)}: {task.array}[{task.place}] comes out different from when this build began, so the source "
            "or the encoder has changed; use build(config, overwrite=True) to begin again"
        )


def clear(store: Store, url: str) -> None:
    """Remove a build, its promise first; the record that names it and the lock stay."""
    keys = list_objects(store, "", url)
    first = [key for key in keys if key == records.MANIFEST_KEY]
    journals = [key for key in keys if key.startswith(records.JOURNAL_PREFIX)]
    rest = [key for key in keys if key not in {*first, *journals, records.BUILD_KEY, records.LOCK_KEY}]
    for key in (*first, *journals, *rest):
        delete_object(store, key, url)


def _collect_drafts(url: str) -> None:
    """Remove what a killed writer left half-written on a local disk; young drafts may be another writer's."""
    folder = local_folder(url)
    if folder is None or not (folder / records.FOLDER).is_dir():
        return
    for draft in folder.rglob(f"*{_DRAFT}"):
        if time.time() - draft.stat().st_mtime > _DRAFT_SECONDS:
            draft.unlink(missing_ok=True)


def check_room(url: str, source: Source, blueprint: Blueprint, finished: dict[str, ObjectRecord]) -> None:
    """Raises: BuildError: when the disk of a local store cannot hold what is still to be written."""
    folder = local_folder(url)
    if folder is None:
        return
    free_bytes = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    if blueprint.raw_bytes * 1.02 < free_bytes:
        return
    left = 1 - len(finished) / blueprint.build.shards
    needed_bytes = estimate(source, blueprint).compressed_bytes * left
    if needed_bytes > free_bytes:
        raise BuildError(
            f"{folder}: building needs about {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} is free; "
            "free some space, choose another data.url, or make the data smaller"
        )
