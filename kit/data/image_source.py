"""A folder of image files as a source: dimensions (image, y, x), one variable a band, files sorted by path.

All images have one size and one kind. A file is decoded whole for each band asked of it; sizes are checked when a file
is read, so opening a folder of a million files reads one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.pieces import Region
from kit.data.source import VariableSpec
from kit.errors import BuildError, ConfigError, Problem

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
            raise _error(f"{path} holds no image file that matches {pattern!r}; known are {', '.join(IMAGES)}")
        first = self._first()
        self._mode = first.mode
        names = _BANDS.get(first.mode)
        if names is None:
            raise _error(f"{self._files[0]} is of kind {first.mode}; known are {', '.join(_BANDS)}")
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
            raise _error("a folder of images is read by Pillow, which is not installed; pip install pillow") from None
        try:
            with Image.open(self._folder / self._files[0]) as image:
                image.load()
                return image
        except (UnidentifiedImageError, OSError) as error:
            raise _error(f"{self._files[0]} cannot be read: {error}") from None


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("data.source", message)])
