"""The parts of an array on its map: what is trained on, validated on and tested on, and what lies between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kit.charts.style import BLUE, GREEN, ORANGE, add_axes, drawing, figure
from kit.data.splits import PARTS, Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS, _HATCHES = (BLUE, ORANGE, GREEN), ("", "//", "..")
_NAMES = ("training", "validation", "test")
_BETWEEN = "#d9d9d9"
_MOST = 600
"""Pixels along each side of what is drawn."""
_WIDTH_INCHES = 7.2


def split_figure(split: Split) -> Figure:
    """A map of the parts along the two dimensions that are cut into most regions; along one, where only one is cut.

    Elements that the guard leaves out are grey. Along other dimensions that are cut, the first regions are shown.
    """
    cut = sorted(range(len(split.dims)), key=lambda axis: -split.regions.shape[axis])
    shown = sorted(axis for axis in cut[:2] if split.regions.shape[axis] > 1)
    height = 4.4 if len(shown) == 2 else 1.9
    parts = _raster(split, shown)
    extents = [split.shape[axis] for axis in shown]
    chart = figure(_WIDTH_INCHES, height)
    others = [split.dims[axis] for axis in cut if split.regions.shape[axis] > 1 and axis not in shown]
    title = split.sentence.split("; cut")[0].split("; training")[0]
    if others:
        title += f" (first regions along {', '.join(others)})"
    across = split.dims[shown[-1]]
    axes = add_axes(
        chart, (0.09, 0.62 / height, 0.88, (height - 1.35) / height), title=title, x=f"{across}, element",
        y=f"{split.dims[shown[0]]}, element" if len(shown) == 2 else "", grid="",
    )  # fmt: skip
    with drawing():
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        axes.imshow(
            parts, cmap=ListedColormap([_BETWEEN, *_COLOURS]), vmin=-1, vmax=2, origin="lower", aspect="auto",
            interpolation="nearest", extent=(0, extents[-1], 0, extents[0] if len(shown) == 2 else 1),
        )  # fmt: skip
        if len(shown) < 2:
            axes.set_yticks([])
        keys = [
            Patch(facecolor=_COLOURS[number], label=f"{_NAMES[number]} {split.fractions[part]:.0%}")
            for number, part in enumerate(PARTS)
            if split.fractions[part]
        ]
        keys += [Patch(facecolor=_BETWEEN, label="left out between parts")] if (parts < 0).any() else []
        axes.legend(
            handles=keys, loc="lower left", bbox_to_anchor=(0, 1.0 + 0.24 / (height - 1.35)), ncols=4, borderpad=0
        )
        axes.set_title(title, pad=6)
    return chart


def _raster(split: Split, shown: list[int]) -> NDArray[np.int8]:
    """The part of each element that is drawn, -1 where none may be touched."""
    sizes = [split.shape[axis] for axis in shown]
    sampled = [np.unique(np.linspace(0, size - 1, min(size, _MOST)).astype(np.int64)) for size in sizes]
    found = np.full([len(places) for places in sampled], -1, np.int8)
    ones = (1,) * len(split.dims)
    for number, part in enumerate(PARTS):
        if not split.fractions[part]:
            continue
        places = split.allowed(part, ones, ones)
        if places is None:
            (origin, shape), (axis,) = split.extent(part), shown
            inside = (sampled[0] >= origin[axis]) & (sampled[0] < origin[axis] + shape[axis])
        else:
            index = [np.zeros(1, np.int64)] * len(ones)
            for axis, elements in zip(shown, sampled, strict=True):
                index[axis] = np.searchsorted(places.starts[axis], elements, "right") - 1
            inside = (places.weights[np.ix_(*index)] > 0).reshape(found.shape)
        found[inside] = number
    return found if len(shown) == 2 else found.reshape(1, -1)
