"""How large a store will be, before it is created: exact counts, and compressed bytes estimated from encoded samples.

The ratio comes from chunks spread evenly over each variable, encoded as they will be stored; its known error is that of
a small sample: a few per cent for fields alike everywhere, more when a few regions differ from the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.config import Config
from kit.data.blueprint import Blueprint, make_blueprint
from kit.data.layout import plan_chunks
from kit.data.open_source import load_source
from kit.data.shards import ArrayWriter, ShardTask
from kit.data.source import Source
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from kit.plan.chunks import ChunkPlan

_SAMPLES = 12
_LARGEST_SAMPLE_BYTES = 1 << 26
_INDEX_BYTES = 16
"""Of the shard index, per chunk: offset and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """What a build will write."""

    raw_bytes: int
    """Exact: all variables in their stored dtype, before compression."""
    compressed_bytes: int
    """Estimated."""
    ratio: float
    """raw_bytes / compressed_bytes."""
    objects: int
    """Exact: data objects, metadata and coordinates."""
    chunks: int
    """Exact: what readers can ask for one by one."""
    samples: int
    """Chunks encoded for the estimate."""

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.raw_bytes)} of data, about {format_bytes(self.compressed_bytes)} stored "
            f"(ratio {self.ratio:.2f} from {self.samples} sample chunks), "
            f"{format_count(self.objects)} objects, {format_count(self.chunks)} chunks"
        )

    def __repr__(self) -> str:
        return f"SizeEstimate: {self}"

    def _repr_html_(self) -> str:
        rows = {
            "data": format_bytes(self.raw_bytes),
            "stored (estimated)": format_bytes(self.compressed_bytes),
            "ratio": f"{self.ratio:.2f} from {self.samples} sample chunks",
            "objects": f"{self.objects:,}",
            "chunks": f"{self.chunks:,}",
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{key}</th><td>{value}</td></tr>" for key, value in rows.items()
        )
        return f"<table>{cells}</table>"


def expected_bytes(config: Config, plan: ChunkPlan | None = None, *, source: Any = None) -> SizeEstimate:
    """What building `config` will write; nothing is created.

    Args:
        source: An xarray object, array or source in hand, in place of the one that the config names.

    Raises:
        ConfigError, PlanError: as `build` would, before its first byte.
    """
    opened = load_source(config, source)
    return estimate(opened, make_blueprint(config, opened, plan or plan_chunks(config, source=opened)))


def estimate(source: Source, blueprint: Blueprint) -> SizeEstimate:
    """The estimate for a blueprint; encodes up to twelve chunks of each variable."""
    from numcodecs.zstd import Zstd

    compressed, samples = 0.0, 0
    for name, writer in blueprint.arrays.items():
        raw, stored = 0, 0
        codec = Zstd(level=writer.compression_level, checksum=True)
        for task in _sample_tasks(writer):
            block = np.ascontiguousarray(source.read(name, task.region))
            raw += block.nbytes
            stored += len(codec.encode(block))
            samples += 1
        compressed += writer.nbytes * stored / raw + (_INDEX_BYTES * writer.chunk_count if writer.shard else 0)
    compressed += sum(len(data) for _, data in blueprint.documents)
    return SizeEstimate(
        raw_bytes=blueprint.raw_bytes,
        compressed_bytes=round(compressed),
        ratio=blueprint.raw_bytes / compressed,
        objects=blueprint.build.shards + len(blueprint.documents) + 1,
        chunks=sum(writer.chunk_count for writer in blueprint.arrays.values()),
        samples=samples,
    )


def _sample_tasks(writer: ArrayWriter) -> list[ShardTask]:
    """Chunks spread evenly along every dimension at once, by an additive recurrence; fewer when chunks are large."""
    counts = [-(-size // side) for size, side in zip(writer.shape, writer.chunk, strict=True)]
    chunk_bytes = prod(writer.chunk) * writer.dtype.itemsize
    wanted = max(1, min(_SAMPLES, _LARGEST_SAMPLE_BYTES // chunk_bytes))
    steps = [_golden(len(counts)) ** -(axis + 1) for axis in range(len(counts))]
    indices = [
        tuple(int((0.5 + place * step) % 1 * count) for step, count in zip(steps, counts, strict=True))
        for place in range(wanted)
    ]
    return [_chunk_task(writer, index) for index in dict.fromkeys(indices)]


def _golden(dimensions: int) -> float:
    """The root of x^(d+1) = x + 1, whose powers fill d dimensions most evenly (Roberts, 2018)."""
    root = 2.0
    for _ in range(40):
        root = (1 + root) ** (1 / (dimensions + 1))
    return root


def _chunk_task(writer: ArrayWriter, index: tuple[int, ...]) -> ShardTask:
    bounds = zip(index, writer.chunk, writer.shape, strict=True)
    region = tuple(slice(i * side, min((i + 1) * side, size)) for i, side, size in bounds)
    return ShardTask(array=writer.name, key="", region=region)
