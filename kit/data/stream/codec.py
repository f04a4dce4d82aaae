"""StoredArray: where the chunks of one array lie in a store, and how their bytes become numbers.

Two ways give the same numbers. The usual chains of codecs (Zarr 3: `bytes`, then zstd, blosc, gzip and crc32c, plain or
inside `sharding_indexed`; Zarr 2: any compressor and filters) are decoded here, synchronously and mostly without the
GIL, so that threads decode in parallel; any other chain goes through zarr's own pipeline. Sizes are elements unless a
name says bytes. Decoding never yields fewer elements than a chunk has: it raises instead.

ShardIndexes keeps the indexes of shards within a fixed memory, counted as the process grows by them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import floordiv, mod
from typing import Any, Generic, Literal

import google_crc32c
import numpy as np
import zstandard
from numcodecs import blosc, gzip, zstd
from numcodecs.compat import ensure_contiguous_ndarray
from numpy.typing import NDArray
from zarr.abc.codec import Codec, CodecPipeline
from zarr.abc.store import Store
from zarr.api.asynchronous import open_array
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.metadata.v2 import ArrayV2Metadata
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.core.sync import sync

from kit.data.places import Matched
from kit.data.stores.transfer import LARGEST_BYTES, BoundedCache, Found, Octets, octets
from kit.data.variables import ArrayInfo
from kit.errors import CorruptChunkError

ABSENT = 2**64 - 1
"""Offset and length of an inner chunk that a shard does not hold."""
INDEX_CHECKSUM_BYTES = 4
INDEX_ENTRY_BYTES = 16
_BLOSC_HEADER_BYTES = 16
_of_thread = threading.local()
"""A decompressor each, which takes no two calls at once."""

Index = NDArray[np.uint64]
"""A shard's index `(*inner chunk, 2)`: first byte and number of bytes of each inner chunk."""
Step = Callable[[Octets], Octets]


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array as its bytes lie in a store."""

    name: str
    axes: tuple[int, ...]
    """Its dimensions among those of a patch; it is repeated along the others, in which it is one chunk."""
    chunk: tuple[int, ...]
    """What one request reads, along the dimensions of a patch, in stored elements."""
    matched: tuple[Matched | None, ...]
    """As of `ArrayInfo`."""
    per_shard: tuple[int, ...] | None
    """Inner chunks of a shard along each dimension; None when each chunk is an object."""
    fill_value: Any
    index_at_end: bool
    index_checked: bool
    key_of: Callable[[tuple[int, ...]], str]
    steps: tuple[Step, ...] | None
    """From stored bytes to plain bytes; None when zarr's pipeline decodes."""
    in_place: bool
    """Whether a decoded chunk lies in the very bytes that were read."""
    dtype: np.dtype[Any]
    """Type and byte order of the plain bytes."""
    order: Literal["C", "F"]
    """Which dimension is the fastest in the plain bytes: the last (C) or the first."""
    pipeline: CodecPipeline
    spec: ArraySpec

    @classmethod
    async def open(cls, store: Store, info: ArrayInfo) -> StoredArray:
        """Read the array's metadata from `store`, on the running loop."""
        array = await open_array(store=store, path=info.name, mode="r")
        metadata = array.metadata
        spec = metadata.get_chunk_spec((0,) * array.ndim, array.config, default_buffer_prototype())
        codecs = metadata.codecs if isinstance(metadata, ArrayV3Metadata) else ()
        sharding = _plain_sharding(codecs)
        inner = sharding.codecs if sharding else codecs
        inner_spec = replace(spec, shape=sharding.chunk_shape) if sharding else spec
        steps = _steps_of_version_2(metadata) if isinstance(metadata, ArrayV2Metadata) else _steps(inner)
        repeated = {axis: info.shape[axis] for axis in info.repeated}
        sides = iter(inner_spec.shape)
        return cls(
            name=info.name,
            axes=info.stored_axes,
            matched=info.matched,
            chunk=tuple(repeated.get(axis) or next(sides) for axis in range(len(info.shape))),
            per_shard=tuple(map(floordiv, spec.shape, inner_spec.shape)) if sharding else None,
            fill_value=spec.dtype.default_scalar() if spec.fill_value is None else spec.fill_value,
            index_at_end=sharding is None or sharding.index_location.value == "end",
            index_checked=sharding is not None and len(sharding.index_codecs) > 1,
            key_of=metadata.encode_chunk_key,
            steps=steps,
            in_place=steps is not None and all(step is _check_crc32c for step in steps),
            dtype=_stored_dtype(inner_spec, inner) if inner else np.dtype(spec.dtype.to_native_dtype()),
            order=metadata.order if isinstance(metadata, ArrayV2Metadata) else "C",
            pipeline=sharding.codec_pipeline if sharding else array.codec_pipeline,
            spec=inner_spec,
        )

    # -- objects and the index of a shard

    def object_of(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """Coordinates of the object that holds a chunk, along the array's own dimensions."""
        stored = self._stored(coords)
        return stored if self.per_shard is None else tuple(map(floordiv, stored, self.per_shard))

    def object_key(self, outer: tuple[int, ...]) -> str:
        """Key of an object, from the root of the store."""
        return f"{self.name}/{self.key_of(outer)}"

    @property
    def index_bytes(self) -> int:
        assert self.per_shard is not None
        return prod(self.per_shard) * INDEX_ENTRY_BYTES + INDEX_CHECKSUM_BYTES * self.index_checked

    @property
    def index_span(self) -> tuple[int, int | None]:
        """Which bytes of a shard hold its index: (first, last), or (-count, None) for the last `count`."""
        return (-self.index_bytes, None) if self.index_at_end else (0, self.index_bytes)

    def decode_index(self, data: Octets, where: str) -> Index:
        """The index in its stored bytes; `where` says in an error which shard this is.

        Raises:
            CorruptChunkError: when bytes are missing or fail their checksum.
        """
        assert self.per_shard is not None
        try:
            if len(data) != self.index_bytes:
                raise ValueError(f"the shard's index is {len(data)} bytes instead of {self.index_bytes}")
            plain = _check_crc32c(data) if self.index_checked else data
        except ValueError as error:
            raise damage(where, error) from error
        return plain.view("<u8").reshape(*self.per_shard, 2).astype(np.uint64)  # of one piece, as it is kept

    def locate(self, index: Index, coords: tuple[int, ...]) -> tuple[int, int] | None:
        """(first byte, one past the last) of an inner chunk in its shard; None when the shard does not hold it."""
        assert self.per_shard is not None
        first, count = index[tuple(map(mod, self._stored(coords), self.per_shard))].tolist()
        return None if first == count == ABSENT else (first, first + count)

    # -- chunks

    def decode(self, data: Octets) -> NDArray[Any]:
        """The elements of a chunk, shape `chunk`, from its stored bytes. Call from a thread that runs no event loop.

        Raises:
            ValueError, RuntimeError: when the bytes fail a checksum or are not this chunk's size.
        """
        if self.steps is None:
            return sync(self._decode_by_zarr(data))
        for step in self.steps:
            data = step(data)
        if data.nbytes != self.chunk_bytes:
            raise ValueError(f"{data.nbytes} bytes decoded instead of {self.chunk_bytes}")
        return self._elements(data)

    def decode_together(self, data: Sequence[Octets]) -> list[NDArray[Any]]:
        """As `decode` for each of several chunks, which then share memory where zstd alone is to be undone.

        That is one call without the interpreter's lock: else a thread waits for the lock once a chunk, which takes a
        quarter as long as a chunk of 64 KiB. Bytes behind a frame are not looked at.

        Raises:
            zstandard.ZstdError, and as `decode`: when any of them cannot be decoded; which one, `decode` tells.
        """
        if self.steps != (_decompress_zstd,):
            return [self.decode(one) for one in data]
        sizes = np.full(len(data), self.chunk_bytes, np.uint64).tobytes()
        frames: list[Any] = [*data]
        if not hasattr(_of_thread, "zstd"):
            _of_thread.zstd = zstandard.ZstdDecompressor()
        together: Any = _of_thread.zstd.multi_decompress_to_buffer(frames, decompressed_sizes=sizes)
        return [self._elements(one) for one in together]

    @cached_property
    def chunk_bytes(self) -> int:
        """Of a decoded chunk."""
        return prod(self.spec.shape) * self.dtype.itemsize

    def _stored(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """Coordinates of a chunk along the array's own dimensions."""
        return tuple(coords[axis] for axis in self.axes) if self._one_along else coords

    @cached_property
    def _one_along(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.chunk)) if axis not in self.axes)

    def _elements(self, plain: Any) -> NDArray[Any]:
        return self._repeated(np.ndarray(self.spec.shape, self.dtype, plain, order=self.order))

    def _repeated(self, decoded: NDArray[Any]) -> NDArray[Any]:
        """In the shape of `chunk`, of which a view repeats what is stored once."""
        return np.broadcast_to(np.expand_dims(decoded, self._one_along), self.chunk) if self._one_along else decoded

    def copy(self, decoded: NDArray[Any]) -> NDArray[Any]:
        """The same chunk in memory of its own."""
        once = tuple(slice(None) if axis in self.axes else 0 for axis in range(len(self.chunk)))
        return self._repeated(decoded[once].copy())

    async def _decode_by_zarr(self, data: Octets) -> NDArray[Any]:
        """Any chain of codecs, through zarr's own pipeline."""
        stored: Buffer = default_buffer_prototype().buffer.from_array_like(data)
        (decoded,) = await self.pipeline.decode([(stored, self.spec)])
        if decoded is None or decoded.shape != self.spec.shape:
            raise ValueError(f"decoded to {getattr(decoded, 'shape', None)} instead of {self.spec.shape}")
        return self._repeated(np.asarray(decoded.as_numpy_array()))


def damage(what: str, error: Exception) -> CorruptChunkError:
    """The error that says what is damaged, and how."""
    return CorruptChunkError(f"{what} is damaged: {error}; verify the store, then build it anew")


def _plain_sharding(codecs: Sequence[Codec]) -> ShardingCodec | None:
    """The sharding whose inner chunks can be read one by one here; anything stranger is read as whole objects."""
    if len(codecs) != 1 or not isinstance(codecs[0], ShardingCodec):
        return None
    serializer, *rest = codecs[0].index_codecs
    little = (
        isinstance(serializer, BytesCodec) and serializer.endian is not None and serializer.endian.value == "little"
    )
    plain = little and (not rest or (len(rest) == 1 and isinstance(rest[0], Crc32cCodec)))
    return codecs[0] if plain else None


def _steps(codecs: Sequence[Codec]) -> tuple[Step, ...] | None:
    """How to undo a chain after its serializer, last codec first; None for a chain not known here."""
    undo: dict[type, Step] = {
        ZstdCodec: _decompress_zstd, BloscCodec: _decompress_blosc, GzipCodec: _decompress_gzip,
        Crc32cCodec: _check_crc32c,
    }  # fmt: skip
    serializer, *rest = codecs or (None,)
    if not isinstance(serializer, BytesCodec) or any(type(codec) not in undo for codec in rest):
        return None
    return tuple(undo[type(codec)] for codec in reversed(rest))


def _steps_of_version_2(metadata: ArrayV2Metadata) -> tuple[Step, ...]:
    """The compressor, then the filters, last one first: numcodecs' own, all synchronous."""
    chain = [*(metadata.filters or ()), *([metadata.compressor] if metadata.compressor is not None else [])]
    return tuple(_undo(codec) for codec in reversed(chain))


def _undo(codec: Any) -> Step:
    if codec.codec_id == "blosc":
        return _decompress_blosc

    def decode(data: Octets) -> Octets:
        return ensure_contiguous_ndarray(codec.decode(data)).reshape(-1).view(np.uint8)  # type: ignore[no-any-return]

    return decode


def _stored_dtype(spec: ArraySpec, codecs: Sequence[Codec]) -> np.dtype[Any]:
    dtype = np.dtype(spec.dtype.to_native_dtype())
    serializer = codecs[0] if codecs else None
    big = isinstance(serializer, BytesCodec) and serializer.endian is not None and serializer.endian.value == "big"
    return dtype.newbyteorder(">" if big else "<")


def _decompress_zstd(data: Octets) -> Octets:
    """Verifies the frame's own checksum, where it has one; the size is the frame's, to be compared by the caller."""
    return octets(zstd.decompress(data))


def _decompress_blosc(data: Octets) -> Octets:
    """The header tells the length, which blosc itself does not compare with what it is given."""
    stored = int.from_bytes(data[12:_BLOSC_HEADER_BYTES].tobytes(), "little")
    if len(data) < _BLOSC_HEADER_BYTES or stored != len(data):
        raise ValueError(f"{len(data)} bytes instead of the {stored} that the blosc header tells")
    return octets(blosc.decompress(data))


def _decompress_gzip(data: Octets) -> Octets:
    """Verifies the stream's own checksum."""
    return octets(gzip.GZip().decode(data))


def _check_crc32c(data: Octets) -> Octets:
    body, stored = data[:-INDEX_CHECKSUM_BYTES], data[-INDEX_CHECKSUM_BYTES:]
    if google_crc32c.value(body) != int.from_bytes(stored.tobytes(), "little") or len(stored) < INDEX_CHECKSUM_BYTES:
        raise ValueError("the stored checksum (crc32c) is not that of the bytes")
    return body


class ResolvedFuture(Generic[Found]):
    """What is known already, in the words of a future, and a tenth of its memory."""

    __slots__ = ("_found",)

    def __init__(self, found: Found) -> None:
        self._found = found

    def result(self) -> Found:
        return self._found

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        call(self)


class FetchOnceCache(Generic[Found]):
    """What was found under each key, None for nothing there, within a fixed memory; call from any thread.

    Each is fetched once, whoever needs it. A failure is forgotten, so that the next request tries again. Futures are
    for what is on its way only: one takes five times the memory of a small index, and a store may have a million.

    Args:
        largest_bytes: Of all that is kept.
        kept: Where others look and keep too.
    """

    def __init__(self, largest_bytes: int = LARGEST_BYTES, kept: BoundedCache[Found] | None = None) -> None:
        self._kept = BoundedCache[Found]() if kept is None else kept
        self._kept.hold_at_most(largest_bytes)
        self._lock = threading.Lock()
        self._coming: dict[str, Future[Found | None]] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all that is kept."""
        return self._kept.nbytes

    def claim(self, key: str) -> tuple[Future[Found | None] | ResolvedFuture[Found | None], bool]:
        """What is or will be there, and whether the caller has to fetch it and `give` it."""
        with self._lock:
            found, is_kept = self._kept.find(key)
            if is_kept:
                return ResolvedFuture(found), False
            if key in self._coming:
                return self._coming[key], False
            future = self._coming[key] = Future()
            return future, True

    def give(self, key: str, fetched: Found | BaseException | None, keep: bool = True) -> None:
        """Set the result for all that claimed the key."""
        with self._lock:
            future = self._coming.pop(key)
            if keep and not isinstance(fetched, BaseException):
                self._kept.keep(key, fetched)
        if isinstance(fetched, BaseException):
            future.set_exception(fetched)
        else:
            future.set_result(fetched)

    def get(self, key: str, fetch: Callable[[], Found | None]) -> Found | None:
        """As `claim`, fetched by the first thread that asks while the others wait."""
        future, mine = self.claim(key)
        if mine:
            try:
                self.give(key, fetch())
            except BaseException as error:
                self.give(key, error)
        return future.result()


class ShardIndexes(FetchOnceCache[Index]):
    """Indexes by the keys of their shards."""
