"""Sources that are one array, in memory or mapped from a file of any size, and sources that are folders of images.

A file is mapped anew for each few megabytes and unmapped, so that the pages read do not add up in this process's
memory. A disk gives whole pages, so a file counts as cut along its fastest dimension, a page a chunk.

A folder of images has dimensions (image, y, x) and one variable a band; files are sorted by path, all of one size and
kind. A file is decoded whole for each band read of it; sizes are checked when a file is read, so opening a folder of a
million files reads one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.build.rechunk import FETCH_BYTES, Region
from kit.data.build.source import VariableSpec, source_error, spec_of
from kit.data.variables import in_machine_order
from kit.errors import BuildError

_PAGE_BYTES = 4096


class ArraySource:
    """A source of one variable.

    Args:
        array: Numbers in memory, or a `numpy.memmap` over a whole file.
        dims: Names of the dimensions; `dim_0`, `dim_1`, ... when left out.
        name: Of the variable.
        attributes: CF attributes of the variable.
    """

    def __init__(
        self,
        array: NDArray[Any],
        dims: Sequence[str] = (),
        name: str = "values",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        # A view into a mapped file has lost where it begins, so only a whole one is mapped anew.
        mapped = isinstance(array, np.memmap) and array.filename is not None and not array.dtype.hasobject
        whole = mapped and not isinstance(array.base, np.memmap)
        contiguous = array.flags.c_contiguous or array.flags.f_contiguous
        self._values: NDArray[Any] | _MappedFile = _MappedFile(array) if whole and contiguous else array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dims = tuple(dims) or tuple(f"dim_{axis}" for axis in range(array.ndim))
        dtype = in_machine_order(array.dtype)
        self.variables: Mapping[str, VariableSpec] = {name: spec_of(dtype, attributes or {})}
        self.coordinates: Mapping[str, NDArray[Any]] = {}
        self.attributes: Mapping[str, Any] = {}
        self.chunks = {name: self._values.page} if isinstance(self._values, _MappedFile) else {}

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Values of one block."""
        dtype = self.variables[name].dtype
        if isinstance(self._values, _MappedFile):
            return self._values.read(region, dtype)
        return np.asarray(self._values[region], dtype)


def open_npy(
    path: Path, dims: Sequence[str] = (), name: str = "values", attributes: Mapping[str, Any] | None = None
) -> ArraySource:
    """The array of a `.npy` file, mapped.

    Raises:
        ConfigError: when it is not there, no `.npy` file, cut short, or holds Python objects.
    """
    try:
        return ArraySource(np.load(path, mmap_mode="r", allow_pickle=False), dims, name, attributes)
    except (OSError, ValueError) as error:
        raise source_error("source", f"{path} cannot be mapped as an array: {error}") from None


class _MappedFile:
    """A whole array in a file; a handle is opened for each piece."""

    def __init__(self, array: Any) -> None:
        self._path, self._dtype, self._offset = str(array.filename), array.dtype, int(array.offset)
        self._fortran = not array.flags.c_contiguous
        self._shape = array.shape[::-1] if self._fortran else array.shape
        """In the order of the file: the last dimension is contiguous."""
        page = (*(1,) * (array.ndim - 1), min(self._shape[-1], max(1, _PAGE_BYTES // array.itemsize)))
        self.page = page[::-1] if self._fortran else page

    def read(self, region: Region, dtype: np.dtype[Any]) -> NDArray[Any]:
        ordered = region[::-1] if self._fortran else region
        block = np.empty([part.stop - part.start for part in ordered], dtype)
        self._fill(block, ordered, (), self._offset)
        return block.T if self._fortran else block

    def _fill(self, block: NDArray[Any], region: Region, outer: tuple[int, ...], offset: int) -> None:
        """Copy by slabs of whole rows, or row by row where one row is larger than a slab."""
        axis = len(outer)
        row_bytes = prod(self._shape[axis + 1 :]) * self._dtype.itemsize
        first, rest = region[0], region[1:]
        if row_bytes > FETCH_BYTES and rest:
            for place in range(first.start, first.stop):
                self._fill(block[place - first.start], rest, (*outer, place), offset + place * row_bytes)
            return
        step = max(1, FETCH_BYTES // row_bytes)
        for start in range(first.start, first.stop, step):
            stop = min(start + step, first.stop)
            shape = (stop - start, *self._shape[axis + 1 :])
            mapped = np.memmap(self._path, self._dtype, "r", offset + start * row_bytes, shape)
            block[start - first.start : stop - first.start] = mapped[(slice(None), *rest)]
            del mapped


IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
_BANDS = {
    "L": ("grey",), "1": ("grey",), "I;16": ("grey",), "I": ("grey",), "F": ("grey",), "LA": ("grey", "alpha"),
    "RGB": ("red", "green", "blue"), "RGBA": ("red", "green", "blue", "alpha"),
}  # fmt: skip


class ImageFolder:
    """A source of the bands of all images below a folder.

    Args:
        path: The folder, searched with its subfolders.
        pattern: Which files, such as `*.png` or `train/**/*.jpg`.

    Raises:
        ConfigError: when there is no image, or Pillow cannot read the first one.
    """

    def __init__(self, path: Path, pattern: str = "**/*") -> None:
        self._folder = Path(path)
        found = (file for file in self._folder.glob(pattern) if file.suffix.lower() in IMAGES)
        self._files = sorted(str(file.relative_to(self._folder)) for file in found)
        if not self._files:
            known = ", ".join(IMAGES)
            raise source_error("source", f"{path} holds no image file that matches {pattern!r}; known are {known}")
        first = self._first()
        self._mode = first.mode
        names = _BANDS.get(first.mode)
        if names is None:
            raise source_error("source", f"{self._files[0]} is of kind {first.mode}; known are {', '.join(_BANDS)}")
        self.dims = ("image", "y", "x")
        self.shape = (len(self._files), first.size[1], first.size[0])
        dtype = np.asarray(first).dtype
        dtype = np.dtype(np.uint8) if dtype == np.bool_ else dtype.newbyteorder("=")
        self.variables: Mapping[str, VariableSpec] = {name: VariableSpec(dtype) for name in names}
        self.chunks: Mapping[str, tuple[int, ...]] = dict.fromkeys(names, (1, *self.shape[1:]))
        self.coordinates: Mapping[str, NDArray[Any]] = {}
        self.attributes: Mapping[str, Any] = {}

    def read(self, name: str, region: Region) -> NDArray[Any]:
        """Values of one band of some images."""
        band, dtype = [*self.variables].index(name), self.variables[name].dtype
        images, rows, columns = region
        block = np.empty([part.stop - part.start for part in region], dtype)
        for place in range(images.start, images.stop):
            block[place - images.start] = self._decode(self._files[place])[rows, columns, band]
        return block

    def _decode(self, file: str) -> NDArray[Any]:
        """`(y, x, band)` of one image."""
        from PIL import Image

        with Image.open(self._folder / file) as image:
            if image.mode != self._mode or image.size[::-1] != self.shape[1:]:
                height, width = self.shape[1:]
                raise BuildError(
                    f"{file} is {image.size[0]} × {image.size[1]} {image.mode}, but the first image is {width} × "
                    f"{height} {self._mode}; give a pattern that leaves it out"
                )
            values = np.asarray(image)
        return values if values.ndim == 3 else values[..., None]

    def _first(self) -> Any:
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError:
            message = "a folder of images is read by Pillow, which is not installed; pip install pillow"
            raise source_error("source", message) from None
        try:
            with Image.open(self._folder / self._files[0]) as image:
                image.load()
                return image
        except (UnidentifiedImageError, OSError) as error:
            raise source_error("source", f"{self._files[0]} cannot be read: {error}") from None
