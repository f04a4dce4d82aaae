"""The source that a config names, or that a caller has in hand.

`data.source` names a class or function by import path, or a place where data lies (`kit.data.build.open_source`). What
a function returns, or a caller has in hand, may also be an xarray object or a numpy array; it is wrapped.

Places that data can be built from: which kind of source reads a path or URL.

`.npy` is one array, `.nc`, `.h5` and their like are read by xarray, a folder of image files is a stack of images, and
any other folder or URL is a Zarr store. An import path (`package.module:Name`, `file.py:Name`) is no place.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kit.config import Config, resolve_path
from kit.data.build.arrays import IMAGES, ImageFolder
from kit.data.build.source import Source, check_source, source_error
from kit.errors import KitError
from kit.targets import load_target


def load_source(config: Config, given: Any = None) -> Source:
    """The source a config names, made with its arguments; or the one given, wrapped where it needs to be.

    Raises:
        TargetError: when `data.source` cannot be found.
        StoreError: when it is a place that cannot be opened.
        ConfigError: when it is empty, its arguments do not fit, or what it makes is no source.
    """
    if given is not None:
        return as_source(given)
    if config.data.source is None or not config.data.source.strip():
        raise source_error("source", "empty, so there is nothing to build from; give path/to/file.py:Name, or a place")
    make: Any = open_place(config.data.source) or load_target(config.data.source)
    arguments = config.data.arguments
    _check_arguments(make, arguments)
    try:
        made = make(**arguments)
    except KitError:
        raise
    except Exception as error:
        raise source_error(
            "arguments", f"{config.data.source} refused them: {type(error).__name__}: {error}"
        ) from error
    return as_source(made)


def as_source(made: Any) -> Source:
    """`made` itself, or an xarray object or array as a source.

    Raises:
        ConfigError: when it is no source.
    """
    kind = type(made)
    if kind.__module__.partition(".")[0] == "xarray":
        from kit.data.build.grids import XarraySource

        made = XarraySource(made)
    elif isinstance(made, np.ndarray):
        from kit.data.build.arrays import ArraySource

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
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known) or 'none'}"
            raise source_error("arguments", f"the source takes no argument {name!r}; {hint}")


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
        from kit.data.build.arrays import open_npy

        return partial(open_npy, path)
    if suffix in _FILES_OF_XARRAY:
        from kit.data.build.grids import open_file

        return partial(open_file, path)
    if _holds_images(path):
        return partial(ImageFolder, path)
    return _zarr(text)


def _zarr(url: str) -> Callable[..., Any]:
    from kit.data.build.grids import ZarrSource

    return partial(ZarrSource, url)


def _holds_images(folder: Path) -> bool:
    marks = ("zarr.json", ".zgroup", ".zmetadata", ".zarray")
    if not folder.is_dir() or any((folder / mark).exists() for mark in marks):
        return False
    return any(file.suffix.lower() in IMAGES for file in folder.rglob("*"))
