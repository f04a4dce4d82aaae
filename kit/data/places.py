"""Places that data can be built from: which kind of source reads a path or URL.

`.npy` is one array, `.nc`, `.h5` and their like are read by xarray, a folder of image files is a stack of images, and
any other folder or URL is a Zarr store. An import path (`package.module:Name`, `file.py:Name`) is no place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kit.config import resolve_path
from kit.data.image_source import IMAGES, ImageFolder

_TARGET = re.compile(r"[^:\s][^:]*:[A-Za-z_]\w*|[A-Za-z]:[^:]+:[A-Za-z_]\w*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FILES_OF_XARRAY = (".nc", ".nc3", ".nc4", ".cdf", ".h5", ".hdf5", ".grib", ".grib2")


def open_place(text: str) -> Callable[..., Any] | None:
    """What opens the data at `text`, given the arguments of a config; None when `text` is an import path."""
    if _TARGET.fullmatch(text.strip()):
        return None
    if _URL.match(text) and not text.startswith("file://"):
        return _zarr(text)
    path = resolve_path(text.removeprefix("file://"))
    suffix = path.suffix.lower()
    if suffix == ".npy":
        from kit.data.array_source import open_npy

        return partial(open_npy, path)
    if suffix in _FILES_OF_XARRAY:
        from kit.data.xarray_source import open_file

        return partial(open_file, path)
    if _holds_images(path):
        return partial(ImageFolder, path)
    return _zarr(text)


def _zarr(url: str) -> Callable[..., Any]:
    from kit.data.zarr_source import ZarrSource

    return partial(ZarrSource, url)


def _holds_images(folder: Path) -> bool:
    marks = ("zarr.json", ".zgroup", ".zmetadata", ".zarray")
    if not folder.is_dir() or any((folder / mark).exists() for mark in marks):
        return False
    return any(file.suffix.lower() in IMAGES for file in folder.rglob("*"))
