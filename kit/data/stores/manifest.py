"""What a store says about itself under `.kit/`: what is being built, what is finished, and what a finished store holds.

`.kit/build.json` is written first and names the build; `.kit/journal-*.jsonl` list finished objects while building;
`.kit/manifest.json` is published last and lists every object with its size and crc32c. A store with a build and no
manifest is unfinished. `.kit` itself is a Zarr group without arrays, so that Zarr and xarray walk past it without a
word. No record holds a time or a machine: equal builds leave equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kit.errors import CorruptChunkError
from kit.json_text import read_json

FOLDER = ".kit"
GROUP_KEY = f"{FOLDER}/zarr.json"
BUILD_KEY = f"{FOLDER}/build.json"
MANIFEST_KEY = f"{FOLDER}/manifest.json"
JOURNAL_PREFIX = f"{FOLDER}/journal-"
LOCK_KEY = f"{FOLDER}/lock.json"
_FORMAT = 1

GROUP_DOCUMENT = b'{"attributes": {}, "zarr_format": 3, "node_type": "group"}'


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of `data`, as object stores and Zarr's shard index use it."""
    import google_crc32c

    return int(google_crc32c.value(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """One finished object, and what it adds to the statistics of its array."""

    array: str
    key: str
    bytes: int
    crc32c: int
    valid: int = 0
    """Elements that are not missing."""
    total: float = 0.0
    """Sum of the valid packed values."""
    squares: float = 0.0
    """Sum of their squares."""

    @property
    def identity(self) -> str:
        """What tells it from another object under the same key."""
        return f"{self.bytes}-{self.crc32c}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """What was found out about one array while it was built."""

    mean: float | None
    deviation: float | None
    valid: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecord:
    """Which build a store belongs to: every field that decides its bytes."""

    shards: int
    """Objects of data (not metadata, not coordinates) the finished store has."""
    fields: Mapping[str, Any]

    def dump(self) -> bytes:
        return _dump({"format": _FORMAT, "shards": self.shards, "fields": dict(self.fields)})

    @classmethod
    def load(cls, data: bytes, where: str) -> BuildRecord:
        values = _load(data, where)
        return cls(shards=int(values["shards"]), fields=values["fields"])

    def diff(self, other: BuildRecord) -> dict[str, tuple[Any, Any]]:
        """`{field: (mine, theirs)}` for every field that differs."""
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        pairs = ((name, self.fields.get(name), other.fields.get(name)) for name in names)
        return {name: (mine, theirs) for name, mine, theirs in pairs if mine != theirs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a finished store holds."""

    build: BuildRecord
    arrays: Mapping[str, ArrayRecord]
    objects: tuple[ObjectRecord, ...]
    raw_bytes: int
    """Size of the data as stored dtypes, before compression."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        return sum(item.bytes for item in self.objects)

    def dump(self) -> bytes:
        objects = [[item.array, item.key, item.bytes, item.crc32c] for item in self.objects]
        values = {
            "format": _FORMAT,
            "shards": self.build.shards,
            "fields": dict(self.build.fields),
            "versions": dict(self.versions),
            "totals": {"objects": len(objects), "bytes": self.stored_bytes, "raw_bytes": self.raw_bytes},
            "arrays": {name: asdict(record) for name, record in self.arrays.items()},
            "objects": objects,
        }
        return _dump(values | {"crc32c": crc32c(_dump(values))})

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        """Raises: CorruptChunkError: when the text is not the manifest that was published."""
        values = _load(data, where)
        if values.pop("crc32c", None) != crc32c(_dump(values)):
            raise CorruptChunkError(f"{where}: {MANIFEST_KEY} fails its checksum; rebuild with overwrite=True")
        build = BuildRecord(shards=values["shards"], fields=values["fields"])
        arrays = {name: ArrayRecord(**record) for name, record in values["arrays"].items()}
        return cls(
            build=build,
            arrays=arrays,
            objects=tuple(ObjectRecord(array=a, key=k, bytes=b, crc32c=c) for a, k, b, c in values["objects"]),
            raw_bytes=values["totals"]["raw_bytes"],
            versions=values["versions"],
        )


def dump_journal(records: Iterable[ObjectRecord]) -> bytes:
    """One line of JSON per finished object."""
    return b"".join(_dump(asdict(record)) for record in records)


def load_journal(data: bytes, where: str) -> list[ObjectRecord]:
    """Raises: CorruptChunkError: naming the journal, when a line is not a record."""
    try:
        return [ObjectRecord(**read_json(line)) for line in data.splitlines()]
    except (ValueError, TypeError):
        raise CorruptChunkError(f"{where}: damaged; delete it and run the build again to redo its shards") from None


def _dump(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _load(data: bytes, where: str) -> dict[str, Any]:
    try:
        values = read_json(data)
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("format") != _FORMAT or "fields" not in values:
        raise CorruptChunkError(f"{where}: damaged, or written by another version of kit; rebuild with overwrite=True")
    return values
