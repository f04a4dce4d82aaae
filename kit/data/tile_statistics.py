"""Tile statistics: how many valid values each tile of an array has, and which; kept beside the store. Pure numpy.

A tile is a chunk or an equal part of one. From the sums over tiles come the mean and deviation of any part of the
array, the share of valid values of a patch, and its own mean and deviation, without reading the store. A patch that
does not end where tiles do has a share of each tile that it touches, as if a tile's values lay evenly in it: an
estimate, exact where patch and tiles agree.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.config import project_folder
from kit.data.places import within
from kit.data.stores.url import local_folder, redact
from kit.errors import ConfigError, Problem
from kit.units import format_count

if TYPE_CHECKING:
    from kit.data.dataset import Dataset
    from kit.data.variables import ArrayInfo

MOST_TILES = 2_000_000
"""Of one variable: 48 MB of sums."""
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TileStatistics:
    """Of some variables of one shape. Each array is `(variable, tiles of dimension 0, tiles of dimension 1, ...)`."""

    variables: tuple[str, ...]
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    """Sides of a tile, in elements; the last tile of a dimension ends with it."""
    valid: NDArray[np.float64]
    """Values that are not missing."""
    total: NDArray[np.float64]
    """Sum of the valid decoded values, each less the variable's `centre`."""
    squares: NDArray[np.float64]
    """Sum of the squares of the same."""
    centre: NDArray[np.float64]
    """A value of each variable near its mean, so that sums of squares stay exact."""
    state: str
    """Names what the store was when it was read."""
    place: str = ""
    """The file that keeps them."""

    def mean_and_deviation(self, variable: int, where: NDArray[np.bool_] | None = None) -> tuple[float, float] | None:
        """Of the valid values of some tiles, or of all; None where there are none."""
        sums = (self.valid[variable], self.total[variable], self.squares[variable])
        valid, total, squares = (float((part if where is None else part[where]).sum()) for part in sums)
        if not valid:
            return None
        mean = total / valid
        return mean + float(self.centre[variable]), sqrt(max(0.0, squares / valid - mean * mean))

    def of_patches(
        self, patch: tuple[int, ...], offsets: tuple[NDArray[np.float64], ...]
    ) -> dict[str, NDArray[np.float64]]:
        """What patches hold at all combinations of these offsets along the dimensions.

        Returns:
            `valid`: the share of valid values, the least of all variables; `mean` and `deviation` of the first one, 0
            where nothing is valid. Each (offsets along dimension 0, offsets along dimension 1, ...).
        """

        def inside(sums: NDArray[np.float64]) -> NDArray[np.float64]:
            for axis, (side, extent, size) in enumerate(zip(self.tile, self.shape, patch, strict=True)):
                sums = within(sums, side, extent, offsets[axis], size, axis)
            return sums

        valid = np.min([inside(one) for one in self.valid], axis=0) / prod(patch)
        counts = np.maximum(inside(self.valid[0]), 1e-9)
        mean = inside(self.total[0]) / counts
        deviation = np.sqrt(np.maximum(0.0, inside(self.squares[0]) / counts - mean * mean))
        mean = np.where(valid > 0, mean + self.centre[0], 0.0)
        return {"valid": np.clip(valid, 0, 1), "mean": mean, "deviation": np.where(valid > 0, deviation, 0.0)}

    def of(self, dataset: Dataset, arrays: list[ArrayInfo]) -> TileStatistics | None:
        """Those of some variables of a store; None where they are of others, or of what it held before."""
        names = tuple(info.name for info in arrays)
        if not set(names) <= set(self.variables) <= set(dataset.arrays):
            return None
        if self.state != state_of(dataset, dataset.select(self.variables)):
            return None
        if names == self.variables:
            return self
        places = [self.variables.index(name) for name in names]
        parts = {name: getattr(self, name)[places] for name in ("valid", "total", "squares", "centre")}
        return replace(self, variables=names, state=state_of(dataset, arrays), **parts)

    def dump(self) -> bytes:
        head = {
            "format": _FORMAT, "variables": self.variables, "dims": self.dims, "shape": self.shape, "tile": self.tile,
            "state": self.state,
        }  # fmt: skip
        target = io.BytesIO()
        arrays = {name: getattr(self, name) for name in ("valid", "total", "squares", "centre")}
        np.savez_compressed(target, head=np.array(json.dumps(head)), **arrays)
        return target.getvalue()

    @classmethod
    def load(cls, path: Path) -> TileStatistics:
        with np.load(path, allow_pickle=False) as stored:
            head = json.loads(str(stored["head"]))
            arrays = {name: stored[name] for name in ("valid", "total", "squares", "centre")}
        named: Mapping[str, Any] = {name: tuple(head[name]) for name in ("variables", "dims", "shape", "tile")}
        return cls(**named, **arrays, state=head["state"], place=str(path))

    def __repr__(self) -> str:
        tiles = format_count(prod(self.valid.shape[1:]))
        sides = " × ".join(f"{name} {side}" for name, side in zip(self.dims, self.tile, strict=True))
        lines = [f"Statistics of {tiles} tiles of {sides}, kept in {self.place}"]
        for number, name in enumerate(self.variables):
            found = self.mean_and_deviation(number)
            share = float(self.valid[number].sum()) / prod(self.shape)
            mean, deviation = found or (float("nan"), float("nan"))
            lines.append(f"  {name}: {share:.1%} valid, mean {mean:.6g}, standard deviation {deviation:.6g}")
        return "\n".join(lines)


def tile_sides(array: ArrayInfo, patch: Mapping[str, int]) -> tuple[int, ...]:
    """Parts of a chunk that are at most half as large as a patch, where there are not too many of them."""
    sides = []
    for name, chunk in zip(array.dims, array.chunk, strict=True):
        most = max(1, patch.get(name, 1) // 2)
        sides.append(max(side for side in range(1, chunk + 1) if chunk % side == 0 and side <= most))
    for axis in sorted(range(len(sides)), key=lambda axis: sides[axis]):
        if prod(-(-size // side) for size, side in zip(array.shape, sides, strict=True)) <= MOST_TILES:
            break
        sides[axis] = array.chunk[axis]
    return tuple(sides)


def state_of(dataset: Dataset, arrays: list[ArrayInfo]) -> str:
    """Names what a store holds, as far as its metadata and its manifest say."""
    held = [(info.name, info.shape, info.dims, str(info.dtype), info.scale_factor, info.add_offset) for info in arrays]
    listed = [one.manifest.objects for one in _parts(dataset) if one.manifest is not None]
    objects = [(item.key, item.crc32c) for objects in listed for item in objects]
    matched = [one.digest for info in arrays for one in info.matched if one is not None]
    return hashlib.sha256(repr((held, objects, *matched)).encode()).hexdigest()[:16]


def _parts(dataset: Dataset) -> tuple[Dataset, ...]:
    """The stores that it is joined of, or itself."""
    return tuple(inner for one in getattr(dataset, "parts", ()) for inner in _parts(one)) or (dataset,)


def files_of(dataset: Dataset, arrays: list[ArrayInfo]) -> tuple[Path, ...]:
    """Where statistics of these arrays are kept: beside a folder, or else in the project's folder."""
    url = " + ".join(redact(one.url) for one in _parts(dataset))  # that of several names only two of them
    store, names = (
        hashlib.sha256(repr(one).encode()).hexdigest()[:12] for one in (url, [info.name for info in arrays])
    )
    kept = project_folder() / ".kit" / "statistics" / f"{store}.statistics-{names}.npz"
    folder = None if "://" in dataset.url else local_folder(dataset.url)
    if folder is None or not folder.exists():  # several stores have no place of their own
        return (kept,)
    return folder.with_name(f"{folder.name}.statistics-{names}.npz"), kept


def find_statistics(dataset: Dataset, variables: tuple[str, ...] = ()) -> TileStatistics | None:
    """The statistics that are kept of the store as it is, of these variables or of more; None where there are none."""
    arrays = dataset.select(variables)
    for own in files_of(dataset, arrays):
        others = own.parent.glob(f"{glob.escape(own.name.rpartition('-')[0])}-*.npz")
        for path in (own, *sorted(set(others) - {own})):
            if path.is_file() and (found := _loaded(path, path.stat().st_mtime_ns).of(dataset, arrays)) is not None:
                return found
    return None


@lru_cache(maxsize=4)
def _loaded(path: Path, changed: int) -> TileStatistics:  # noqa: ARG001 - a file that changed is another one
    return TileStatistics.load(path)


def need_statistics(dataset: Dataset, variables: tuple[str, ...], path: str) -> TileStatistics:
    """As `find_statistics`.

    Raises:
        ConfigError: under this dotted path, where there are none.
    """
    found = find_statistics(dataset, variables)
    if found is None:
        message = (
            f"it needs the statistics of {redact(dataset.url)}, which are not there, or of what the store held before; "
            "kit.data.statistics(config) makes them in one pass"
        )
        raise ConfigError([Problem(path, message)])
    return found


def with_statistics(dataset: Dataset, found: TileStatistics, where: NDArray[np.bool_] | None) -> Dataset:
    """The dataset with the means and deviations of some tiles, or of all."""
    arrays = dict(dataset.arrays)
    for number, name in enumerate(found.variables):
        values = found.mean_and_deviation(number, where)
        if values is not None:
            arrays[name] = replace(arrays[name], mean=values[0], deviation=values[1])
    return replace(dataset, arrays=arrays)
