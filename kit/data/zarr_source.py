"""A Zarr store in another layout as a source: packed values as they are stored, read by whole chunks.

Variables are those of one shape (the largest, or those named); coordinates along their dimensions come along, others do
not. The source holds no handle when it is pickled. A store that kit built must be whole; in any other an object that is
not there reads as fill values, as Zarr says. How many chunks lie in absent objects is warned of, where the store can be
listed; what a shard that is there leaves out is not looked at.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.attributes import coordinate_attributes, json_attributes, packing_attributes
from kit.data.counters import absent_chunks
from kit.data.dataset import ArrayInfo, in_machine_order, open_dataset
from kit.data.pieces import Region, read_pieces
from kit.data.source import VariableSpec
from kit.data.stores import redact, sizes_of_objects
from kit.errors import KitWarning, MissingChunkError


class ZarrSource:
    """A source of the variables of a store.

    Args:
        url: A path or URL, as in `data.url`.
        credentials: As in `data.credentials`.
        variables: Names of the variables; empty for all of the largest shape.
        strict: Whether a chunk that another writer's store does not hold is an error.

    Raises:
        MissingChunkError: for a store that is not whole, when kit built it or it is to be `strict`.
        StoreError: when there is no store.
        ConfigError: for a variable that does not exist.
    """

    def __init__(
        self, url: str, credentials: str = "default", variables: Sequence[str] = (), strict: bool = False
    ) -> None:
        self._dataset = open_dataset(url, credentials)
        chosen = self._dataset.select(tuple(variables))
        self._refuse_incomplete(chosen)
        self._arrays: dict[str, Any] = {}
        self._say_what_is_absent([info.name for info in chosen], strict)
        self.dims, self.shape = chosen[0].dims, chosen[0].shape
        self.variables: Mapping[str, VariableSpec] = {info.name: self._spec(info) for info in chosen}
        self.chunks: Mapping[str, tuple[int, ...]] = {info.name: info.chunk for info in chosen}
        along = {dim: info for dim, info in self._dataset.coordinates.items() if self._fits(dim, info)}
        self.coordinates: Mapping[str, NDArray[Any]] = {dim: self._dataset.coordinate(dim) for dim in along}
        self.coordinate_attributes = {dim: coordinate_attributes(self._array(dim).attrs) for dim in along}
        self.attributes: Mapping[str, Any] = json_attributes(self._dataset.attributes)

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Packed values of one block."""
        array, dtype = self._array(name), self.variables[name].dtype
        return read_pieces(lambda piece: np.asarray(array[piece]), region, self.chunks[name], dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = self._dataset.open_array(name)
        return self._arrays[name]

    def _spec(self, info: ArrayInfo) -> VariableSpec:
        dtype = in_machine_order(info.dtype)
        attributes = packing_attributes({**self._array(info.name).attrs, "_FillValue": info.missing}, dtype)
        return VariableSpec(dtype, attributes)

    def _fits(self, dim: str, info: ArrayInfo) -> bool:
        return dim in self.dims and info.shape == (self.shape[self.dims.index(dim)],) and info.dtype.kind in "iuf"

    def _say_what_is_absent(self, names: Sequence[str], strict: bool) -> None:
        """Chunks that another writer left out; nothing is said of a server that lists no objects."""
        if self._dataset.manifest is not None:
            return
        arrays = [self._array(name) for name in names]
        try:
            filled = sum(array.nchunks - array.nchunks_initialized for array in arrays)
        except (NotImplementedError, OSError):
            return
        absent = absent_chunks({"chunks_filled": filled, "chunks_decoded": sum(a.nchunks for a in arrays) - filled})
        if absent and strict:
            raise MissingChunkError(f"{redact(self._dataset.url)}: {absent}; strict: false reads it")
        if absent:
            message = f"{redact(self._dataset.url)}: {absent}; strict: true in data.arguments makes that an error"
            warnings.warn(message, KitWarning, stacklevel=3)

    def _refuse_incomplete(self, chosen: Sequence[ArrayInfo]) -> None:
        """A shard that is gone would be built as fill values; the manifest knows which there must be."""
        manifest, url = self._dataset.manifest, self._dataset.url
        if manifest is None:
            return
        names = {info.name for info in chosen}
        wanted = {item.key: item.bytes for item in manifest.objects if item.array in names}
        there = sizes_of_objects(self._dataset.open_store(), wanted, url)
        wrong = [key for key, size in wanted.items() if there.get(key) != size]
        if wrong:
            raise MissingChunkError(
                f"{redact(url)}: {wrong[0]} is missing or cut short ({len(wrong)} of {len(wanted)} objects); "
                "verify the store, then build it anew"
            )
