"""Files of arrays as xarray objects: NetCDF and HDF5 with their groups, GRIB, `.npz` and `.npy`.

A path may go on behind the file, to a group in it: `ocean.nc/surface`. A file in a bucket is read by ranges, through
kit's own client, as HDF5's reader asks for them: one at a time, so for training it is better built into a store first.
An `.npz` is read whole into memory when it is opened; a `.npy` is mapped. Their dimensions are `dim_0`, `dim_1`, ...,
shared by the arrays of the largest shape; those of an array of another shape begin with its name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype

from kit.config import near, resolve_path
from kit.data.stores.url import open_store, redact, resolve_url, run_sync, sizes_of_objects
from kit.errors import StoreError

if TYPE_CHECKING:
    import xarray

_OF_XARRAY = (".nc", ".nc3", ".nc4", ".cdf", ".h5", ".hdf5", ".grib", ".grib2")
_OF_NUMPY = (".npz", ".npy")
_REMOTE = re.compile(r"(?!file://)[A-Za-z][A-Za-z0-9+.-]+://")
_READ_AHEAD_BYTES = 1 << 20
_MOST_GROUPS = 8


def split_group(text: str) -> tuple[str, str] | None:
    """The file of arrays at a path or URL, and the group in it; None for what is no such file."""
    parts = re.split(r"(?<!/)/(?!/)", text)
    for count in range(1, len(parts) + 1):
        place = "/".join(parts[:count])
        if not place.lower().endswith(_OF_XARRAY + _OF_NUMPY):
            continue
        if _REMOTE.match(text) or not resolve_path(place.removeprefix("file://")).is_dir():
            return place, "/".join(parts[count:])
    return None


def open_file(
    place: str, group: str = "", credentials: str = "default", *, engine: str | None = None, decode: bool = True
) -> xarray.Dataset:
    """What a file of arrays holds, read when it is asked for.

    Args:
        place: A path or URL.
        group: The group of a NetCDF or HDF5 file.
        credentials: As `data.credentials`, for a URL.
        engine: Of xarray; the first that can read the file.
        decode: Whether numbers are unpacked and times decoded.

    Raises:
        StoreError: when xarray is not installed, the file is not there or cannot be read, or has no such group.
    """
    try:
        import xarray
    except ImportError:
        raise StoreError(
            f"{redact(place)} is read by xarray, which is not installed; pip install 'kit[build]'"
        ) from None
    file: Any = _remote_file(place, credentials) if _REMOTE.match(place) else _local_file(place)
    try:
        if place.lower().endswith(_OF_NUMPY):
            return _of_numpy(np.load(file, mmap_mode=None if isinstance(file, io.IOBase) else "r"))
        opened = xarray.open_dataset(file, group=group or None, engine=engine, decode_cf=decode, cache=False)
        if not opened.data_vars:
            raise ValueError(_groups_in(xarray, file))
    except (ValueError, OSError, ImportError, EOFError) as error:
        reason = (str(error).splitlines() or [""])[0]
        shown = redact(place) + (f", group {group}" if group else "")
        raise StoreError(f"{shown} cannot be read: {reason}") from None
    return opened


def _groups_in(xarray: Any, file: Any) -> str:
    """Why there is nothing, and where there is something."""
    found = [path.strip("/") for path, node in xarray.open_groups(file).items() if node.data_vars]
    if not found:
        return "it holds no variables"
    shown = ", ".join(found[:_MOST_GROUPS]) + (", ..." if len(found) > _MOST_GROUPS else "")
    return f"its variables are in groups; add one of them to the path: {shown}"


def _local_file(place: str) -> Path:
    path = resolve_path(place.removeprefix("file://"))
    if not path.is_file():
        raise StoreError(f"there is no file {path}{near(path)}")
    return path


def _of_numpy(loaded: Any) -> xarray.Dataset:
    import xarray

    arrays = {"values": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    largest = max((array.shape for array in arrays.values()), key=lambda shape: (len(shape), prod(shape)), default=())

    def dims(name: str, shape: Sequence[int]) -> list[str]:
        return [f"{'' if shape == largest else f'{name}_'}dim_{axis}" for axis in range(len(shape))]

    return xarray.Dataset({name: (dims(name, array.shape), array) for name, array in arrays.items()})


def _remote_file(place: str, credentials: str) -> io.BufferedReader:
    root, _, name = resolve_url(place).rpartition("/")
    store = open_store(root, credentials)
    size = sizes_of_objects(store, [name], root).get(name)
    if size is None:
        raise StoreError(f"there is no file {redact(place)}")
    return io.BufferedReader(_Ranges(store, name, root, size), _READ_AHEAD_BYTES)


class _Ranges(io.RawIOBase):
    """One object of a store as a file."""

    def __init__(self, store: Store, key: str, url: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._url, self._size, self._place = store, key, url, size, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    @override
    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        span = RangeByteRequest(self._place, min(self._size, self._place + len(view)))
        if span.start >= span.end:
            return 0
        found = run_sync(lambda: self._store.get(self._key, default_buffer_prototype(), span), self._url, None)
        data = b"" if found is None else found.to_bytes()
        view[: len(data)] = data
        self._place += len(data)
        return len(data)
