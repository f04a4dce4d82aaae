"""One field in several layouts on a simulated cloud: what benchmarks/streaming.py and benchmarks/layouts.py read.

Four bands of float32, smooth with noise and rounded as archives round it, so that zstd halves it; the same numbers in
every layout. They are written before the cloud is turned to its situation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from obstore.store import S3Store
from zarr.codecs import ZstdCodec
from zarr.storage import ObjectStore

from kit.cloud.simulated import SimulatedCloud
from kit.config import Config

BANDS, SIDE, PATCH = 4, 6144, 64
BATCH_SIZE = 64
STRIPE = 2048
ROUNDED_TO = 1 / 256
BUCKET = "benchmark"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the field is cut; sides are those of a square, over all bands or of one."""

    chunk: int
    shard: int | None = None
    together: bool = True
    """Whether all bands lie in one array, and so in one chunk."""
    compressed: bool = True

    @property
    def name(self) -> str:
        shard = f" in shards of {self.shard}²" if self.shard else ""
        return f"{self.chunk}²{shard}{'' if self.together else ', a band each'}, {'zstd' if self.compressed else 'raw'}"

    @property
    def path(self) -> str:
        parts = [f"c{self.chunk}", f"s{self.shard}" if self.shard else "", "" if self.together else "apart"]
        return f"{BUCKET}/{'-'.join(filter(None, parts))}-{'zstd' if self.compressed else 'raw'}"

    @property
    def arrays(self) -> tuple[str, ...]:
        return ("field",) if self.together else tuple(f"band_{number}" for number in range(BANDS))

    @property
    def patch(self) -> dict[str, int]:
        return ({"band": BANDS} if self.together else {}) | {"y": PATCH, "x": PATCH}


def field(rows: slice) -> np.ndarray:
    """Some rows of the field `(band, y, x)`."""
    y, x = np.arange(rows.start, rows.stop, dtype=np.float32), np.arange(SIDE, dtype=np.float32)
    noise = np.random.default_rng(rows.start).standard_normal((BANDS, len(y), SIDE), np.float32)
    waves = 10 * np.sin(y / 90)[:, None] * np.cos(x / 70)
    values = waves * np.arange(1, BANDS + 1, dtype=np.float32)[:, None, None] + 0.1 * noise
    return (np.round(values / ROUNDED_TO) * ROUNDED_TO).astype(np.float32)


def write(cloud: SimulatedCloud, layouts: Sequence[Layout]) -> None:
    """Every layout, in one pass over the field, at the full speed of the machine."""
    situation = cloud.dials
    cloud.turn("no limits")
    made = [(layout, _arrays(cloud, layout)) for layout in layouts]
    for rows in (slice(first, first + STRIPE) for first in range(0, SIDE, STRIPE)):
        values = field(rows)
        for layout, arrays in made:
            if layout.together:
                arrays[0][:, rows] = values
            else:
                for array, band in zip(arrays, values, strict=True):
                    array[rows] = band
    cloud.turn(**situation.to_dict()).reset_counts()


def object_store(address: str, path: str, *, read_only: bool = False) -> ObjectStore[S3Store]:
    """The store at `bucket/path` of a cloud, by obstore: the fastest that zarr-python has."""
    bucket, _, prefix = path.partition("/")
    options: dict[str, Any] = {"endpoint": address, "client_options": {"allow_http": True}, "region": "us-east-1"}
    return ObjectStore(S3Store(bucket, prefix=prefix or None, skip_signature=True, **options), read_only=read_only)


def _arrays(cloud: SimulatedCloud, layout: Layout) -> list[Any]:
    cloud.url(layout.path)
    group = zarr.open_group(object_store(cloud.address, layout.path), mode="w")
    bands: dict[str, Any] = {"shape": (SIDE, SIDE), "dimension_names": ["y", "x"]}
    if layout.together:
        bands = {"shape": (BANDS, SIDE, SIDE), "dimension_names": ["band", "y", "x"]}

    def cut(side: int) -> tuple[int, ...]:
        return (BANDS, side, side) if layout.together else (side, side)

    return [
        group.create_array(
            name, chunks=cut(layout.chunk), shards=cut(layout.shard) if layout.shard else None, dtype="float32",
            compressors=[ZstdCodec(level=3)] if layout.compressed else None, **bands,
        )
        for name in layout.arrays
    ]  # fmt: skip


def config_of(layout: Layout, url: str, **changes: Any) -> Config:
    """Random patches of the store, with 64 requests in flight; `changes` by dotted path, with `__` for the dot."""
    loader = {"batch_size": BATCH_SIZE, "requests_in_flight": 64, "batches_ahead": 8, "decode_threads": 2}
    data = {"url": url, "patch": layout.patch, "standardize": False, "samples_per_epoch": 1 << 22}
    config = Config.make({"data": {**data, "variables": layout.arrays}, "loader": loader})
    return config.replace({name.replace("__", "."): value for name, value in changes.items()})


def offsets(config: Config) -> Iterator[np.ndarray]:
    """Offsets `(sample, dim)` of the batches of the config's first epoch, in its order."""
    from kit.data.open_dataset import open_dataset
    from kit.data.sampling import sample_plan

    plan = sample_plan(config, open_dataset(config), 1)
    return (plan.batch(0, step, 0) for step in range(plan.batches_per_epoch))
