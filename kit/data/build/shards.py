"""What a build writes and how its tasks write it: a blueprint of the store, and one object per shard or chunk.

A blueprint is the whole store before its first byte: arrays, coordinates, metadata and the record that names the build.
Two blueprints with equal records write equal bytes, so a build may be resumed exactly when the records agree.

A shard is encoded by Zarr into a store in memory that holds the same array metadata, so the bytes are Zarr's own and an
upload is one whole object. Regions tile the array exactly once. All-missing chunks are written like any other, so that
a missing object is always an error; zstd's checksum and the shard index's crc32c make every flipped bit one.

A task reads a group, a box of shards of one array, once and writes its shards one by one, in any process. Long tasks
record finished shards every few seconds in a journal of the group, so that a kill loses no more than that. A
`BuildWork` pickles without its handles: each process opens the store, and makes the source, once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from kit.config import Config
from kit.data.build.open_source import load_source
from kit.data.build.source import Region, Source, VariableSpec
from kit.data.stores import manifest as records
from kit.data.stores.manifest import BuildRecord, ObjectRecord, crc32c
from kit.data.stores.url import open_store, write_object
from kit.data.variables import encode_float
from kit.errors import BuildError, KitError, PlanError
from kit.machine.processes import give_memory_back

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from kit.chunks.search import ChunkPlan

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
    shards = sum(writer.task_count for writer in arrays.values())
    build = BuildRecord(shards=shards, fields=_fields(config, source, plan))
    documents = tuple(
        (ObjectRecord(array=array, key=key, bytes=len(data), crc32c=crc32c(data)), data)
        for array, key, data in _documents(source, arrays, build)
    )
    return Blueprint(arrays=arrays, documents=documents, build=build)


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
) -> Iterator[tuple[str, str, bytes]]:
    """(array, key, bytes) of metadata and coordinates, in the order of writing."""
    members = {name: writer.document for name, writer in arrays.items()}
    chunks = []
    for dim, given in source.coordinates.items():
        values, attributes = np.asarray(given), {**_COORDINATES.get(dim, {})}
        attributes |= getattr(source, "coordinate_attributes", {}).get(dim, {})
        if values.dtype.kind == "M":  # whole seconds since 1970, as CF says
            values = values.astype("datetime64[s]").astype(np.int64)
            attributes |= {"units": "seconds since 1970-01-01 00:00:00", "calendar": "proleptic_gregorian"}
        values = values.astype(values.dtype.newbyteorder("="))
        writer = ArrayWriter(
            dim, VariableSpec(values.dtype, attributes), dims=(dim,), shape=values.shape, chunk=values.shape,
            shard=None, compression_level=3,
        )  # fmt: skip
        task = writer.task((0,))
        members[dim] = writer.document
        chunks.append((dim, task.key, writer.encode(task, values)))
    # The group's metadata has that of its members inside: one request opens the store, and listing is not needed.
    inline = {name: json.loads(document) for name, document in sorted(members.items())}
    root = {
        "attributes": plain(source.attributes),
        "zarr_format": 3,
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": inline},
        "node_type": "group",
    }
    yield "", records.BUILD_KEY, build.dump()
    yield "", records.GROUP_KEY, records.GROUP_DOCUMENT
    yield "", "zarr.json", json.dumps(root, indent=2).encode()
    yield from ((name, f"{name}/zarr.json", document) for name, document in members.items())
    yield from chunks


_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One object to write: the unit of work, of resumption and of checking."""

    array: str
    key: str
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.region)

    @property
    def place(self) -> str:
        """The region as messages show it, such as `0:24, 64:128, 0:360`."""
        return ", ".join(f"{part.start}:{part.stop}" for part in self.region)


class ArrayWriter:
    """One array as it will be stored; makes its metadata, its tasks and their bytes."""

    def __init__(
        self,
        name: str,
        spec: VariableSpec,
        *,
        dims: Sequence[str],
        shape: Sequence[int],
        chunk: Sequence[int],
        shard: Sequence[int] | None,
        compression_level: int,
    ) -> None:
        self.name, self.spec = name, spec
        self.dtype = np.dtype(spec.dtype)
        self.compression_level = compression_level
        self.shape, self.chunk = tuple(shape), tuple(chunk)
        self.shard = None if shard is None else tuple(shard)
        _check_cut(name, self.shape, self.chunk, self.shard)
        attributes = plain(spec.attributes)
        if isinstance(attributes.get("_FillValue"), float):
            attributes["_FillValue"] = encode_float(attributes["_FillValue"])
        # What a reader that does not check sees for a missing object.
        fill_value = np.nan if self.dtype.kind == "f" else 0
        template = MemoryStore()
        zarr.create_array(
            template, name=name, shape=self.shape, chunks=self.chunk, shards=self.shard, dtype=self.dtype,
            fill_value=fill_value if spec.missing is None else spec.missing, dimension_names=tuple(dims),
            compressors=ZstdCodec(level=compression_level, checksum=True), attributes=attributes,
        )  # fmt: skip
        self.key = f"{name}/zarr.json"
        self.document = template._store_dict[self.key].to_bytes()
        """The array's `zarr.json`."""
        self._chunk_key = zarr.open_array(template, path=name).metadata.encode_chunk_key

    @property
    def cut(self) -> tuple[int, ...]:
        """What one object holds: the shard, or the chunk of an unsharded array."""
        return self.shard or self.chunk

    @property
    def task_count(self) -> int:
        return prod(-(-size // side) for size, side in zip(self.shape, self.cut, strict=True))

    @property
    def chunk_count(self) -> int:
        return prod(-(-size // side) for size, side in zip(self.shape, self.chunk, strict=True))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def tasks(self) -> Iterator[ShardTask]:
        """Every object of the array, last dimension fastest."""
        counts = [-(-size // side) for size, side in zip(self.shape, self.cut, strict=True)]
        return (self.task(index) for index in np.ndindex(*counts))

    def task(self, index: tuple[int, ...]) -> ShardTask:
        starts = [place * side for place, side in zip(index, self.cut, strict=True)]
        bounds = zip(starts, self.cut, self.shape, strict=True)
        region = tuple(slice(start, min(start + side, size)) for start, side, size in bounds)
        return ShardTask(array=self.name, key=f"{self.name}/{self._chunk_key(index)}", region=region)

    def tasks_in(self, box: Region, counts: Sequence[int]) -> Iterator[ShardTask]:
        """The objects of a box that begins on one and holds at most so many along each dimension."""
        first = [part.start // side for part, side in zip(box, self.cut, strict=True)]
        ends = (-(-part.stop // side) for part, side in zip(box, self.cut, strict=True))
        spans = [range(start, min(end, start + count)) for start, end, count in zip(first, ends, counts, strict=True)]
        return (self.task(index) for index in product(*spans))

    def encode(self, task: ShardTask, block: NDArray[Any]) -> bytes:
        """The object's bytes, as Zarr writes them."""
        store = MemoryStore({self.key: default_buffer_prototype().buffer.from_bytes(self.document)})
        array = zarr.open_array(store, path=self.name, mode="r+").with_config({"write_empty_chunks": True})
        array[task.region] = block
        return store._store_dict[task.key].to_bytes()

    def record(self, task: ShardTask, block: NDArray[Any], data: bytes) -> ObjectRecord:
        """What the journal keeps of a finished object."""
        valid, total, squares = statistics(block, self.spec.missing)
        return ObjectRecord(
            array=self.name, key=task.key, bytes=len(data), crc32c=crc32c(data), valid=valid, total=total,
            squares=squares,
        )  # fmt: skip


def read_block(source: Source, writer: ArrayWriter, task: ShardTask) -> NDArray[Any]:
    """The packed values of one task, checked.

    Raises:
        BuildError: naming variable and region, when the source fails or gives another shape or dtype.
    """
    where = f"{task.array}[{task.place}]"
    try:
        block = np.asarray(source.read(task.array, task.region))
    except KitError as error:
        raise BuildError(f"{where}: {error}") from error
    except Exception as error:
        raise BuildError(f"{where}: the source failed: {type(error).__name__}: {error}") from error
    if block.shape != task.shape or block.dtype != writer.dtype:
        raise BuildError(
            f"{where}: the source gave {block.dtype} of shape {block.shape}, "
            f"but promised {writer.dtype} of shape {task.shape}"
        )
    return block


def statistics(block: NDArray[Any], missing: float | int | None) -> tuple[int, float, float]:
    """(valid elements, their sum, sum of their squares), in pieces so that no large copy is made."""
    valid, total, squares = 0, 0.0, 0.0
    flat = block.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        keep = np.isfinite(piece) if piece.dtype.kind == "f" else np.ones(piece.shape, bool)
        if missing is not None:
            keep &= piece != missing
        values = piece[keep].astype(np.float64)
        valid += values.size
        total += float(values.sum())
        squares += float(np.square(values).sum())
    return valid, total, squares


def plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as JSON takes them: numpy scalars and arrays become numbers and lists."""
    return {
        str(key): value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        for key, value in attributes.items()
    }


def _check_cut(name: str, shape: tuple[int, ...], chunk: tuple[int, ...], shard: tuple[int, ...] | None) -> None:
    if len(chunk) != len(shape) or (shard is not None and len(shard) != len(shape)):
        raise PlanError(f"{name}: chunk {chunk} and shard {shard} must have one size per dimension of shape {shape}")
    if any(side < 1 for side in (*chunk, *(shard or ()))):
        raise PlanError(f"{name}: chunk {chunk} and shard {shard} must be at least 1 along every dimension")
    if shard is not None and any(outer % inner for outer, inner in zip(shard, chunk, strict=True)):
        raise PlanError(f"{name}: shard {shard} must be a multiple of chunk {chunk} along every dimension")


JOURNAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """Shards of one array that are read together."""

    array: str
    number: int
    tasks: tuple[ShardTask, ...]

    @property
    def bounding_task(self) -> ShardTask:
        """The box around the shards, as a task to read."""
        parts = zip(*(task.region for task in self.tasks), strict=True)
        box = tuple(slice(min(part.start for part in axis), max(part.stop for part in axis)) for axis in parts)
        return ShardTask(array=self.array, key="", region=box)


class BuildWork:
    """What every task of one build needs.

    Args:
        config: Names the store, and the source where `given` is None.
        given: A source in hand; it pickles.
        threads: Tasks that run at once in a process, whatever a running cluster hands it.
    """

    _store: Store | None
    _source: Source | None

    def __init__(
        self, config: Config, url: str, arrays: Mapping[str, ArrayWriter], session: str, given: Source | None,
        threads: int,
    ) -> None:  # fmt: skip
        self._config, self._url, self._arrays, self._session, self._given = config, url, arrays, session, given
        self._threads = threads
        self.__setstate__({})

    def use(self, store: Store, source: Source) -> None:
        """What this process has open already."""
        self._store, self._source = store, source

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_slots": None, "_store": None, "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._slots = threading.Lock(), threading.Semaphore(self._threads)
        self._store, self._source = None, self._given

    def run(self, group: ShardGroup) -> list[ObjectRecord]:
        """Read the group, write its shards, and return their records.

        Raises:
            BuildError: naming variable and region, when the source fails.
            StoreError: when the store does not take a shard.
        """
        with self._slots:
            with self._lock:
                if self._store is None:
                    self._store = open_store(self._url, self._config.data.credentials, read_only=False)
                if self._source is None:
                    self._source = load_source(self._config)
                store, source = self._store, self._source
            try:
                return self._write(group, store, source)
            finally:
                give_memory_back()

    def _write(self, group: ShardGroup, store: Store, source: Source) -> list[ObjectRecord]:
        writer, box = self._arrays[group.array], group.bounding_task
        values = read_block(source, writer, box)
        done: list[ObjectRecord] = []
        saved = time.monotonic()
        for task in group.tasks:
            parts = zip(task.region, box.region, strict=True)
            block = values[tuple(slice(part.start - all_.start, part.stop - all_.start) for part, all_ in parts)]
            data = writer.encode(task, block)
            write_object(store, task.key, data, self._url)
            done.append(writer.record(task, block, data))
            if time.monotonic() - saved >= JOURNAL_SECONDS and len(done) < len(group.tasks):
                key = f"{records.JOURNAL_PREFIX}{self._session}-{group.array}-{group.number}.jsonl"
                write_object(store, key, records.dump_journal(done), self._url)
                saved = time.monotonic()
        return done
