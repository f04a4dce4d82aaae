"""One array cut into objects: which there are, which region each holds, and its bytes as Zarr itself writes them.

A shard is encoded by Zarr into a store in memory that holds the same array metadata, so the bytes are Zarr's own and an
upload is one whole object. Regions tile the array exactly once. All-missing chunks are written like any other, so that
an object that is not there is always an error; zstd's checksum and the shard index's crc32c make every flipped bit one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from kit.data.dataset import encode_float
from kit.data.manifest import ObjectRecord, crc32c
from kit.data.source import Region, Source, VariableSpec
from kit.errors import BuildError, KitError, PlanError

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
        template = MemoryStore()
        zarr.create_array(
            template,
            name=name,
            shape=self.shape,
            chunks=self.chunk,
            shards=self.shard,
            dtype=self.dtype,
            fill_value=_fill_value(spec),
            compressors=ZstdCodec(level=compression_level, checksum=True),
            dimension_names=tuple(dims),
            attributes=_stored_attributes(spec),
        )
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
            array=self.name,
            key=task.key,
            bytes=len(data),
            crc32c=crc32c(data),
            valid=valid,
            total=total,
            squares=squares,
        )


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


def _fill_value(spec: VariableSpec) -> Any:
    """What a reader that does not check sees for a missing object."""
    if spec.missing is not None:
        return spec.missing
    return np.nan if np.dtype(spec.dtype).kind == "f" else 0


def _stored_attributes(spec: VariableSpec) -> dict[str, Any]:
    attributes = plain(spec.attributes)
    if isinstance(attributes.get("_FillValue"), float):
        attributes["_FillValue"] = encode_float(attributes["_FillValue"])
    return attributes


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
