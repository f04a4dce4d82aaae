"""Codec: where the chunks of one stored array are, and how their bytes become numbers.

Two ways give the same numbers. The chains in common use (Zarr 3: `bytes`, then zstd, blosc, gzip and crc32c, plain or
inside `sharding_indexed`; Zarr 2: any compressor and filters) are decoded here, synchronously and mostly without the
GIL, so that threads decode in parallel; any other chain goes through zarr's own pipeline. Sizes are elements unless a
name says bytes. Decoding never yields fewer elements than a chunk has: it raises instead.

Indexes: those of shards, each fetched once whoever asks, the least recently used dropped beyond a fixed memory.

An index holds 16 bytes an inner chunk. A failure is forgotten, so that the next ask tries again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import floordiv, mod
from typing import Any, Literal

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

from kit.data.stores.transfer import Octets, octets
from kit.data.stores.url import redact
from kit.errors import CorruptChunkError

ABSENT = 2**64 - 1
"""Offset and length of an inner chunk that a shard does not hold."""
_CHECKSUM_BYTES = 4
_ENTRY_BYTES = 16
_BLOSC_HEADER_BYTES = 16

Index = NDArray[np.uint64]
"""A shard's index `(*inner chunk, 2)`: first byte and number of bytes of each inner chunk."""
Step = Callable[[Octets], Octets]


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array as its bytes lie in a store."""

    name: str
    chunk: tuple[int, ...]
    """What one request reads."""
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
    async def open(cls, store: Store, name: str) -> StoredArray:
        """Read the array's metadata from `store`, on the running loop."""
        array = await open_array(store=store, path=name, mode="r")
        metadata = array.metadata
        spec = metadata.get_chunk_spec((0,) * array.ndim, array.config, default_buffer_prototype())
        codecs = metadata.codecs if isinstance(metadata, ArrayV3Metadata) else ()
        sharding = _plain_sharding(codecs)
        inner = sharding.codecs if sharding else codecs
        inner_spec = _inner_spec(spec, sharding) if sharding else spec
        steps = _steps_of_version_2(metadata) if isinstance(metadata, ArrayV2Metadata) else _steps(inner)
        return cls(
            name=name,
            chunk=inner_spec.shape,
            per_shard=_ratio(spec.shape, inner_spec.shape) if sharding else None,
            fill_value=_fill_value(spec),
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
        """Coordinates of the object that holds a chunk."""
        if self.per_shard is None:
            return coords
        return tuple(map(floordiv, coords, self.per_shard))

    def object_key(self, outer: tuple[int, ...]) -> str:
        """Key of an object, from the root of the store."""
        return f"{self.name}/{self.key_of(outer)}"

    @property
    def index_bytes(self) -> int:
        assert self.per_shard is not None
        return prod(self.per_shard) * _ENTRY_BYTES + _CHECKSUM_BYTES * self.index_checked

    @property
    def index_span(self) -> tuple[int, int | None]:
        """Which bytes of a shard hold its index: (first, last), or (-count, None) for the last `count`."""
        return (-self.index_bytes, None) if self.index_at_end else (0, self.index_bytes)

    def decode_index(self, data: Octets) -> Index:
        """The index in its stored bytes.

        Raises:
            ValueError: when bytes are missing or fail their checksum.
        """
        assert self.per_shard is not None
        if len(data) != self.index_bytes:
            raise ValueError(f"the shard's index is {len(data)} bytes instead of {self.index_bytes}")
        plain = _check_crc32c(data) if self.index_checked else data
        return plain.view("<u8").astype(np.uint64).reshape(*self.per_shard, 2)

    def locate(self, index: Index, coords: tuple[int, ...]) -> tuple[int, int] | None:
        """(first byte, one past the last) of an inner chunk in its shard; None when the shard does not hold it."""
        assert self.per_shard is not None
        first, count = index[tuple(map(mod, coords, self.per_shard))].tolist()
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
        together: Any = zstandard.ZstdDecompressor().multi_decompress_to_buffer(frames, decompressed_sizes=sizes)
        return [self._elements(octets(one)) for one in together]

    @cached_property
    def chunk_bytes(self) -> int:
        """Of a decoded chunk."""
        return prod(self.chunk) * self.dtype.itemsize

    def _elements(self, plain: Octets) -> NDArray[Any]:
        return plain.view(self.dtype).reshape(self.chunk, order=self.order)

    async def _decode_by_zarr(self, data: Octets) -> NDArray[Any]:
        """Any chain of codecs, through zarr's own pipeline."""
        stored: Buffer = default_buffer_prototype().buffer.from_array_like(data)
        (decoded,) = await self.pipeline.decode([(stored, self.spec)])
        if decoded is None or decoded.shape != self.chunk:
            raise ValueError(f"decoded to {getattr(decoded, 'shape', None)} instead of {self.chunk}")
        return np.asarray(decoded.as_numpy_array())


class Damage:
    """A context in which whatever goes wrong with bytes becomes a CorruptChunkError that says `what` is damaged.

    Running out of memory is not damage.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            raise damage(self._what, error) from error


def damage(what: str, error: Exception) -> CorruptChunkError:
    """The error that says what is damaged, and how."""
    return CorruptChunkError(f"{what} is damaged: {error}; verify the store, then build it anew")


def decode_index(stored: StoredArray, key: str, data: Octets, url: str) -> Index:
    """The index of the shard `key` of the store at `url`.

    Raises:
        CorruptChunkError: when bytes are missing or fail their checksum.
    """
    with Damage(f"{redact(url)}: shard {key} of {stored.name}"):
        return stored.decode_index(data)


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


def _inner_spec(spec: ArraySpec, sharding: ShardingCodec) -> ArraySpec:
    return ArraySpec(
        shape=sharding.chunk_shape,
        dtype=spec.dtype,
        fill_value=spec.fill_value,
        config=spec.config,
        prototype=spec.prototype,
    )


def _fill_value(spec: ArraySpec) -> Any:
    return spec.dtype.default_scalar() if spec.fill_value is None else spec.fill_value


def _ratio(outer: Iterable[int], inner: Iterable[int]) -> tuple[int, ...]:
    return tuple(whole // part for whole, part in zip(outer, inner, strict=True))


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
    body, stored = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if google_crc32c.value(body) != int.from_bytes(stored.tobytes(), "little") or len(stored) < _CHECKSUM_BYTES:
        raise ValueError("the stored checksum (crc32c) is not that of the bytes")
    return body


LARGEST_BYTES = 64 << 20


class ShardIndexes:
    """Indexes by the keys of their shards; None stands for a shard that is not there. Call from any thread."""

    def __init__(self, largest_bytes: int = LARGEST_BYTES) -> None:
        self._largest_bytes = largest_bytes
        self._lock = threading.Lock()
        self._futures: OrderedDict[str, Future[Index | None]] = OrderedDict()
        self.nbytes = 0
        """Memory of all of them."""

    def claim(self, key: str) -> tuple[Future[Index | None], bool]:
        """The index that is or will be there, and whether the caller is the one to fetch it and `give` it."""
        with self._lock:
            future = self._futures.get(key)
            if future is not None:
                self._futures.move_to_end(key)
                return future, False
            future = self._futures[key] = Future()
            return future, True

    def give(self, key: str, fetched: Index | BaseException | None) -> None:
        """Answer all who claimed the key."""
        with self._lock:
            future = self._futures[key]
            if isinstance(fetched, BaseException):
                del self._futures[key]
            else:
                self.nbytes += 0 if fetched is None else fetched.nbytes
                self._shrink(key)
        if isinstance(fetched, BaseException):
            future.set_exception(fetched)
        else:
            future.set_result(fetched)

    def get(self, key: str, fetch: Callable[[], Index | None]) -> Index | None:
        """The index, fetched by the first thread that asks while the others wait."""
        future, mine = self.claim(key)
        if mine:
            try:
                self.give(key, fetch())
            except BaseException as error:
                self.give(key, error)
        return future.result()

    def _shrink(self, newest: str) -> None:
        for key in [*self._futures]:
            if self.nbytes <= self._largest_bytes:
                return
            future = self._futures[key]
            if key != newest and future.done() and not future.cancelled():
                index = future.result()
                self.nbytes -= 0 if index is None else index.nbytes
                del self._futures[key]
