"""The source that a config names, or that a caller passes.

`data.source` is an import path of a class or function (`package.module:Name`, `file.py:Name`), or a path or URL: `.npy`
is one array, `.nc`, `.h5`, `.npz` and their like are files of arrays, a folder of image files is a stack of images, and
any other folder or URL is a Zarr store, or what `kit.open_dataset` reads as one. An xarray object, a numpy array or an
open store, passed or returned by the function, is wrapped.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from kit.config import Config, near, resolve_path
from kit.data.build.arrays import IMAGES, ArraySource, ImageFolder, open_npy
from kit.data.build.grids import XarraySource, ZarrSource, open_file_source
from kit.data.build.source import Source, check_source, source_error
from kit.data.dataset import XarrayDataset
from kit.data.files import split_group
from kit.data.open_dataset import open_dataset
from kit.data.stores.foreign import find_repository
from kit.data.stores.url import HOW_TABLES_ARE_READ, TABLES
from kit.errors import KitError, StoreError, did_you_mean
from kit.targets import load_target


def load_source(config: Config, given: Any = None) -> Source:
    """The source a config names, made with its arguments; or the one given, wrapped where it needs to be.

    Raises:
        TargetError: when `data.source` cannot be found.
        StoreError: when it is a place that cannot be opened.
        ConfigError: when it is empty, its arguments do not fit, or what it makes is no source.
    """
    variables = config.data.variables
    if isinstance(given, str | PathLike):
        config, given = config.replace({"data.source": fspath(given)}), None
    if given is not None:
        return as_source(given, variables)
    if config.data.source is None or not config.data.source.strip():
        raise source_error("source", "empty, so there is nothing to build from; give path/to/file.py:Name, or a path")
    place = open_place(config.data.source)
    make: Any = place or load_target(config.data.source)
    arguments: Mapping[str, Any] = config.data.arguments
    if place is not None and variables and "wanted" in inspect.signature(place).parameters:
        arguments = {"wanted": variables, **arguments}
    _check_arguments(make, arguments)
    try:
        made = make(**arguments)
    except KitError:
        raise
    except Exception as error:
        raise source_error(
            "arguments", f"{config.data.source} refused them: {type(error).__name__}: {error}"
        ) from error
    return as_source(made, variables)


def as_source(made: Any, wanted: Sequence[str] = ()) -> Source:
    """`made` itself, or an xarray object (its data, with the variables that are wanted) or array as a source.

    Raises:
        ConfigError: when it is no source.
    """
    if f"{type(made).__module__.partition('.')[0]}.{type(made).__name__}" == "xarray.DataArray":
        made = XarraySource(made, wanted=wanted)
    elif type(made).__module__.partition(".")[0] in _HOLDERS:
        opened = open_dataset(made)
        if isinstance(opened, XarrayDataset):
            made = XarraySource(opened.xarray_object, wanted=wanted)
        else:
            made = ZarrSource(opened, wanted=wanted)
    elif isinstance(made, np.ndarray):
        made = ArraySource(made)
    check_source(made)
    return made  # type: ignore[no-any-return]


def _check_arguments(make: Any, arguments: Mapping[str, Any]) -> None:
    try:
        known = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in arguments:
        if name not in known:
            hint = did_you_mean(name, known, otherwise="it takes {}" if known else "it takes none")
            raise source_error("arguments", f"the source takes no argument {name!r}{hint}")


_TARGET = re.compile(r"[^:\s][^:]*:[A-Za-z_]\w*|[A-Za-z]:[^:]+:[A-Za-z_]\w*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_HOLDERS = ("xarray", "zarr", "icechunk", "virtualizarr")
"""Packages whose objects hold data."""


_FILES = (".nc", ".nc4", ".h5", ".hdf5", ".he5", ".grib", ".grib2", ".grb", ".npy", ".npz")


def _check_single(text: str) -> None:
    """Refuse files that are many: how they are joined is not for kit to guess."""
    if _URL.match(text):
        return
    path = resolve_path(text)
    pattern = any(mark in path.name for mark in "*?[") and not path.exists()
    if not pattern and (not path.is_dir() or is_zarr(path)):
        return
    files = [file for file in (path.parent.glob(path.name) if pattern else path.iterdir()) if file.suffix in _FILES]
    if files:
        how = "numpy.concatenate" if files[0].suffix in (".npy", ".npz") else "xarray.open_mfdataset"
        message = f"{text} is no single file; join those there ({len(files)}): kit.build(config, source={how}(...))"
        raise source_error("source", message)


def _check_there(text: str) -> None:
    """Refuse a path on this machine where nothing is, and a table."""
    if _URL.match(text) and not text.startswith("file://"):
        return
    path = resolve_path(text.removeprefix("file://"))
    if path.is_file() and path.suffix.lower() in TABLES:
        raise source_error("source", f"{path} is a table; {HOW_TABLES_ARE_READ}")
    if not path.exists() and find_repository(str(path), "default") is None:
        raise StoreError(f"data.source: there is no file or folder {path}{near(path)}")


def is_zarr(path: Path) -> bool:
    """Whether a folder is a store of Zarr."""
    return any((path / mark).exists() for mark in ("zarr.json", ".zgroup", ".zmetadata", ".zarray"))


def open_place(text: str) -> Callable[..., Any] | None:
    """What opens the data at `text`, given the arguments of a config; None when `text` is an import path."""
    if _TARGET.fullmatch(text.strip()):
        return None
    _check_single(text)
    place = split_group(text)
    _check_there(text if place is None else place[0])
    if place is not None and not text.lower().endswith(".npy"):
        return partial(open_file_source, *place)
    if not _URL.match(text) or text.startswith("file://"):
        path = resolve_path(text.removeprefix("file://"))
        suffix = path.suffix.lower()
        if suffix == ".npy":
            return partial(open_npy, path)
        if path.is_dir() and not is_zarr(path) and any(file.suffix.lower() in IMAGES for file in path.rglob("*")):
            return partial(ImageFolder, path)
    return partial(ZarrSource, text)
