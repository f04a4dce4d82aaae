"""The whole of a store before its first byte: arrays, coordinates, metadata and the record that names the build.

Two blueprints with equal records write equal bytes, so a build may be resumed exactly when the records agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.config import Config
from kit.data import manifest as records
from kit.data.manifest import BuildRecord, ObjectRecord, crc32c
from kit.data.shards import ArrayWriter, ShardTask, plain
from kit.data.source import Source, VariableSpec
from kit.errors import PlanError

if TYPE_CHECKING:
    from kit.plan.chunks import ChunkPlan

_COORDINATES: dict[str, dict[str, str]] = {
    "time": {"standard_name": "time", "axis": "T"},
    "lat": {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
    "lon": {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Chunks and shards alone, where there is no plan for reading."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What will be written: `documents` first, then every task of every array."""

    arrays: Mapping[str, ArrayWriter]
    documents: tuple[tuple[ObjectRecord, bytes], ...]
    """Metadata and coordinates, with their bytes; small."""
    build: BuildRecord

    @property
    def raw_bytes(self) -> int:
        return sum(writer.nbytes for writer in self.arrays.values())

    def tasks(self) -> Iterator[ShardTask]:
        for writer in self.arrays.values():
            yield from writer.tasks()


def make_blueprint(config: Config, source: Source, plan: ChunkPlan | Cut) -> Blueprint:
    """Raises: PlanError: when the plan was made for another shape than the source has."""
    dims, shape = tuple(source.dims), tuple(source.shape)
    if (tuple(plan.dims), tuple(plan.shape)) != (dims, shape):
        planned = dict(zip(plan.dims, plan.shape, strict=True))
        found = dict(zip(dims, shape, strict=True))
        raise PlanError(f"the plan is for {planned} but the source has {found}; plan again with plan_chunks(config)")
    level = config.chunking.compression_level
    arrays = {
        name: ArrayWriter(
            name, spec, dims=dims, shape=shape, chunk=plan.chunk, shard=plan.shard, compression_level=level
        )
        for name, spec in source.variables.items()
    }
    build = BuildRecord(
        shards=sum(writer.task_count for writer in arrays.values()),
        fields=_fields(config, source, plan),
    )
    return Blueprint(arrays=arrays, documents=tuple(_documents(source, arrays, build)), build=build)


def _fields(config: Config, source: Source, plan: ChunkPlan | Cut) -> dict[str, Any]:
    """Everything that decides the bytes, flat, as a refusal shows it."""
    named = config.data.source or f"{type(source).__module__}:{type(source).__name__}"
    fields: dict[str, Any] = {"source": named}
    fields |= {f"arguments.{name}": value for name, value in config.data.arguments.items()}
    fields |= {f"shape.{dim}": int(size) for dim, size in zip(source.dims, source.shape, strict=True)}
    fields |= {f"chunk.{dim}": int(side) for dim, side in zip(plan.dims, plan.chunk, strict=True)}
    fields |= {f"shard.{dim}": int(side) for dim, side in zip(plan.dims, plan.shard or (), strict=False)}
    fields["compression_level"] = config.chunking.compression_level
    for name, spec in source.variables.items():
        fields[f"{name}.dtype"] = np.dtype(spec.dtype).str
        fields |= {f"{name}.{key}": value for key, value in plain(spec.attributes).items()}
    for dim, values in source.coordinates.items():
        fields[f"{dim}.crc32c"] = crc32c(np.ascontiguousarray(values).tobytes())
    fields |= {f"attributes.{key}": value for key, value in plain(source.attributes).items()}
    loaded: dict[str, Any] = json.loads(json.dumps(fields))
    return loaded


def _documents(
    source: Source, arrays: Mapping[str, ArrayWriter], build: BuildRecord
) -> Iterator[tuple[ObjectRecord, bytes]]:
    members = {name: writer.document for name, writer in arrays.items()}
    chunks: list[tuple[str, str, bytes]] = []
    for dim, given in source.coordinates.items():
        known = getattr(source, "coordinate_attributes", {}).get(dim, {})
        spec, values = _coordinate(dim, np.asarray(given), known)
        writer = ArrayWriter(
            dim, spec, dims=(dim,), shape=values.shape, chunk=values.shape, shard=None, compression_level=3
        )
        task = writer.task((0,))
        members[dim] = writer.document
        chunks.append((dim, task.key, writer.encode(task, values)))
    yield _document("", records.BUILD_KEY, build.dump())
    yield _document("", records.GROUP_KEY, records.GROUP_DOCUMENT)
    yield _document("", "zarr.json", _root(source, members))
    yield from (_document(name, f"{name}/zarr.json", document) for name, document in members.items())
    yield from (_document(*chunk) for chunk in chunks)


def _root(source: Source, members: Mapping[str, bytes]) -> bytes:
    """The group's metadata with that of its members inside: one request opens the store, and listing is not needed."""
    inline = {name: json.loads(document) for name, document in sorted(members.items())}
    values = {
        "attributes": plain(source.attributes),
        "zarr_format": 3,
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": inline},
        "node_type": "group",
    }
    return json.dumps(values, indent=2).encode()


def _document(array: str, key: str, data: bytes) -> tuple[ObjectRecord, bytes]:
    return ObjectRecord(array=array, key=key, bytes=len(data), crc32c=crc32c(data)), data


def _coordinate(dim: str, values: NDArray[Any], known: Mapping[str, Any]) -> tuple[VariableSpec, NDArray[Any]]:
    """How a coordinate is stored; times become whole seconds since 1970, as CF says."""
    attributes = {**_COORDINATES.get(dim, {}), **known}
    if values.dtype.kind == "M":
        values = values.astype("datetime64[s]").astype(np.int64)
        attributes |= {"units": "seconds since 1970-01-01 00:00:00", "calendar": "proleptic_gregorian"}
    return VariableSpec(values.dtype.newbyteorder("="), attributes), values.astype(values.dtype.newbyteorder("="))
