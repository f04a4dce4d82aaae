"""Stores written with zarr alone, as anyone may have written them, and stores that watch or spoil what is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray
import zarr
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import WrapperStore

from kit.data.dataset import Dataset

ZSTD = (ZstdCodec(level=1, checksum=True),)


def write_array(folder, name, values, *, chunks, shards=None, compressors=ZSTD, attributes=None, **options):
    """One array beside the others of the folder, with plain dimension names."""
    group = zarr.open_group(str(folder), mode="a")
    array = group.create_array(
        name, shape=values.shape, dtype=values.dtype, chunks=chunks, shards=shards, compressors=compressors,
        attributes=attributes or {}, dimension_names=[f"d{axis}" for axis in range(values.ndim)],
        config={"write_empty_chunks": True}, **options,
    )  # fmt: skip
    array[...] = values
    return array


def regions(offsets, patch):
    return [tuple(map(slice, offset, offset + np.array(patch))) for offset in offsets]


def by_zarr(dataset, offsets, patch):
    """Packed patches `(sample, variable, *dims)` as zarr itself reads them."""
    arrays = [dataset.open_array(info.name)[...] for info in dataset.select()]
    return [[array[region] for array in arrays] for region in regions(offsets, patch)]


def by_xarray(dataset, offsets, patch):
    """Decoded patches `(sample, variable, *dims)`, float64, NaN where missing, as xarray reads them."""
    with xarray.open_zarr(dataset.url, consolidated=False, mask_and_scale=True) as opened:
        arrays = [opened[info.name].values.astype(np.float64) for info in dataset.select()]
    return np.array([[array[region] for array in arrays] for region in regions(offsets, patch)])


@dataclass(frozen=True, kw_only=True)
class SeenThrough(Dataset):
    """A dataset whose store is opened through a wrapper."""

    wrap: Callable[[Store], Store]

    def open_store(self):
        return self.wrap(super().open_store())


def seen_through(dataset, wrap):
    return SeenThrough(**{name: getattr(dataset, name) for name in Dataset.__dataclass_fields__}, wrap=wrap)


class GatedStore(WrapperStore):
    """Notes requests for chunks, and holds each until the gate is open, but those for what it lets through."""

    def __init__(self, store, gate=None):
        super().__init__(store)
        self.gate = gate or threading.Event()
        self.in_flight = self.most_in_flight = 0
        self.keys = []
        self.let_through = set()

    async def get(self, key, prototype, byte_range=None):
        if "/c/" not in key:
            return await self._store.get(key, prototype, byte_range)
        self.keys.append(key)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            while not self.gate.is_set() and key not in self.let_through:
                await asyncio.sleep(0.001)
            return await self._store.get(key, prototype, byte_range)
        finally:
            self.in_flight -= 1


class AsyncStore(WrapperStore):
    """The same store, read by requests on the loop rather than as a folder."""
