"""unit_costs: what one small act of a kind costs on this machine, so that a count of them becomes a time.

Short acts are what sampling tells worst: a loop that asks tensors for values holds the interpreter in between, and a
read out of a small chunk costs its call and not its bytes. So these few are timed, for milliseconds, when a trial of
this machine is diagnosed. Each is the median of `TURNS`. A picture that the trial decoded is decoded again, as it was
and at the size that is advised: how much faster that is depends on the picture and on who decodes it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

TURNS, ELEMENTS, MOST_ROW_BYTES = 15, 256, 1 << 18
VALUE, LOOP, PAGE = "value of a tensor", "element of a loop", "page of memory"
"""To ask a tensor for its value; to make the tensors of a loop over elements besides; the first write to a page."""
PAGE_BYTES, _PAGES = 4096, 256


def unit_costs(kinds: Collection[str], row_bytes: int = 256) -> dict[str, float]:
    """Seconds of one act, by kind: `VALUE`, `LOOP`, `PAGE`, or the package that reads a row that is a chunk.

    A package that reads by another, as xarray does, has the time of both. A row is of random numbers, in `row_bytes`,
    `MOST_ROW_BYTES` at most.

    A kind that is not known, or whose package is not installed, is left out.
    """
    found = dict[str, float]()
    for kind in kinds:
        with contextlib.suppress(ImportError, OSError, ValueError, KeyError):
            found[kind] = _ROWS[kind](max(1, min(row_bytes, MOST_ROW_BYTES) // 4)) if kind in _ROWS else _ACTS[kind]()
    return found


def _seconds(act: Callable[[], object], count: int = 1) -> float:
    act()
    spent = []
    for _ in range(TURNS):
        began = time.perf_counter()
        act()
        spent.append((time.perf_counter() - began) / count)
    return statistics.median(spent)


@functools.cache
def _value() -> float:
    import torch

    values = list(torch.zeros(ELEMENTS))
    return _seconds(lambda: [value.item() > 1 for value in values], ELEMENTS)


@functools.cache
def _loop() -> float:
    import torch

    values = torch.zeros(ELEMENTS, requires_grad=True) * 1
    return _seconds(lambda: [value.item() > 1 for value in values], ELEMENTS)


@functools.cache
def _page() -> float:
    """A page that the system fills with zeros; memory of the process that is free would be used again."""

    def touch() -> None:
        with mmap.mmap(-1, _PAGES * PAGE_BYTES) as pages:
            for place in range(0, _PAGES * PAGE_BYTES, PAGE_BYTES):
                pages[place] = 1

    return _seconds(touch, _PAGES)


def _numbers(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, length)).astype("float32")


@functools.lru_cache(64)
def _hdf5_row(length: int) -> float:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(io.BytesIO(), "w") as file:
        file.create_dataset("x", data=_numbers(16, length), chunks=(1, length), compression="gzip")
        return _seconds(lambda: [file["x"][row] for row in range(16)], 16)


@functools.lru_cache(64)
def _zarr_row(length: int) -> float:
    import zarr

    array = zarr.create_array({}, shape=(16, length), chunks=(1, length), dtype="float32")
    array[:] = _numbers(16, length)
    return _seconds(lambda: [array[row] for row in range(16)], 16)


@functools.lru_cache(64)
def _xarray_row(length: int) -> float:
    import xarray

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x.nc"
        values = xarray.DataArray(_numbers(8, length), dims=("row", "x"), name="x").to_dataset()
        values.to_netcdf(path, engine="h5netcdf", encoding={"x": {"chunksizes": (1, length), "zlib": True}})
        with xarray.open_dataset(path, engine="h5netcdf") as opened:
            array = opened["x"]
            return _seconds(lambda: [array.isel(row=row).values for row in range(8)], 8)


@functools.lru_cache(64)
def _parquet_row(length: int) -> float:
    import pyarrow
    from pyarrow import parquet

    columns = {f"x{place}": column for place, column in enumerate(_numbers(8, min(length, _MOST_COLUMNS)).T)}
    held = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), held, row_group_size=1)
    file = parquet.ParquetFile(held)
    return _seconds(lambda: [file.read_row_group(row) for row in range(8)], 8)


_MOST_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a picture takes as it is, and at the least size that still has the pixels that the model gets."""

    whole_seconds: float
    reduced_seconds: float
    pixels_kept: float
    """A fraction: what is done to the picture afterwards has so many."""


DECODED_TURNS, DECODED_SECONDS = 5, 0.5


@functools.lru_cache(64)
def decoded(package: str, file: str, pixels: int, wanted_pixels: int) -> Decoded | None:
    """What decoding a JPEG of `pixels` takes; None where it is gone, another picture, or nobody knows how it is done.

    Both are timed in turn, so that a machine that is faster in one moment than in the next favours neither.
    """
    reduction = max(scale for scale in (1, 2, 4, 8) if scale == 1 or pixels >= wanted_pixels * scale**2)
    spent: dict[int, list[float]] = {1: [], reduction: []}
    seen = dict.fromkeys(spent, 0)
    with contextlib.suppress(ImportError, OSError, ValueError, KeyError):
        decode = _DECODERS[package]()
        for _ in range(DECODED_TURNS):
            for scale, times in spent.items():
                began = time.perf_counter()
                seen[scale] = decode(file, scale)
                times.append(time.perf_counter() - began)
            if sum(map(sum, spent.values())) > DECODED_SECONDS:
                break
        if seen[1] == pixels:
            whole, reduced = (statistics.median(spent[scale]) for scale in (1, reduction))
            return Decoded(whole, reduced, seen[reduction] / pixels)
    return None


def _pillow() -> Callable[[str, int], int]:
    from PIL import Image

    def decode(file: str, scale: int) -> int:
        with Image.open(file) as image:
            if scale > 1:
                image.draft("RGB", (image.width // scale, image.height // scale))
            image.load()
            return int(image.width * image.height)

    return decode


def _opencv() -> Callable[[str, int], int]:
    import cv2  # type: ignore[import-not-found]

    modes = {scale: getattr(cv2, f"IMREAD_REDUCED_COLOR_{scale}") for scale in (2, 4, 8)}

    def decode(file: str, scale: int) -> int:
        image = cv2.imread(file, modes.get(scale, cv2.IMREAD_COLOR))
        return 0 if image is None else int(image.shape[0] * image.shape[1])

    return decode


_DECODERS = {"PIL": _pillow, "cv2": _opencv}
_ACTS = {VALUE: _value, LOOP: _loop, PAGE: _page}
_ROWS = {"h5py": _hdf5_row, "zarr": _zarr_row, "xarray": _xarray_row, "pyarrow": _parquet_row}
