"""Unfinished uploads: parts in a store that no list names, because their upload was broken off and not taken up again.

Nobody reads them and they cost storage. An upload of the same name goes on with them or removes them; under a name of
its own (`step=400.ckpt`) nothing ever does. They look like an upload that is under way, whose parts must not go: what
is dropped is only what has not changed for a while.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kit.data.stores import delete_object, list_objects, local_folder, redact, resolve_url, sizes_of_objects
from kit.data.uploads import Parcels
from kit.units import format_bytes

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
