"""Maps of an array. Of one batch: where its patches lie, and which chunks must be read for them.

The background is the first variable of the store on its last two dimensions, at the other offsets of the batch's first
patch; patches may lie at any of those. Two steps: `batch_map` reads what is drawn, `batch_figure` draws it. An array
too large to draw is cut to a window around the first patch, so that a terabyte costs no more than a megabyte.

`split_figure` draws the parts of an array: what is trained on, validated on and tested on, and what lies between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.charts.style import BLUE, GREEN, INK, ORANGE, PAPER, VERMILION, add_axes, drawing, figure
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.sampling import sample_plan
from kit.data.splits import PARTS, Split
from kit.data.stream.engine import Engine
from kit.data.stream.scatter import chunk_uses
from kit.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_SIDE = 1024
"""Elements drawn along each side, at most."""
_WIDTH_INCHES = 7.2
_COLOURS = (BLUE, ORANGE, GREEN)
_NAMES = ("training", "validation", "test")
_BETWEEN = "#d9d9d9"
_MOST_PIXELS = 600
"""Along each side of the parts that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMap:
    """What is drawn; positions are in elements of the last two dimensions."""

    title: str
    dims: tuple[str, str]
    origin: tuple[int, int]
    """First element of the window."""
    values: NDArray[np.float32]
    """(height, width) of the window; NaN where missing."""
    chunk: tuple[int, int]
    patches: tuple[tuple[int, int], ...]
    """Offset of each patch of the batch."""
    patch: tuple[int, int]
    chunks_read: int
    """Different chunks that the whole batch touches, in one variable."""


def batch_map(config: Config) -> BatchMap:
    """The first batch of the first epoch on one device, with the field under it.

    Raises:
        StoreError: when the store is not built or cannot be read.
        ConfigError: for a patch or batch that does not fit it.
        PlanError: for arrays of fewer than two dimensions.
    """
    dataset = open_dataset(config)
    info = dataset.select(config.data.variables)[0]
    if len(info.shape) < 2:
        raise PlanError(f"{info.name} has {len(info.shape)} dimension; a map needs at least 2")
    plan = sample_plan(config, dataset, world_size=1)
    offsets = plan.batch(0, 0, 0)
    window = [min(size, LARGEST_SIDE) for size in info.shape[-2:]]
    # The window holds the first patch, in its middle where the array allows it.
    first = [
        min(max(0, int(at) - side // 2), size - side)
        for at, side, size in zip(offsets[0, -2:], window, info.shape[-2:], strict=True)
    ]
    corner = np.array([[*offsets[0, :-2], *first]])
    with Engine(dataset, (info.name,)) as engine:
        values, valid = next(engine.stream([corner], (*(1,) * (len(info.shape) - 2), *window)))
    at = [f"{name} {place}" for name, place in zip(info.dims[:-2], offsets[0], strict=False)]
    units = f" [{info.units}]" if info.units else ""
    return BatchMap(
        title=", ".join([f"{info.long_name or info.name}{units}", *at]),
        dims=(info.dims[-2], info.dims[-1]),
        origin=(first[0], first[1]),
        values=np.where(valid, values, np.nan).reshape(window),
        chunk=(info.chunk[-2], info.chunk[-1]),
        patches=tuple((int(row[-2]), int(row[-1])) for row in offsets),
        patch=(plan.patch[-2], plan.patch[-1]),
        chunks_read=len(chunk_uses(offsets, plan.patch, info.chunk, info.matched)),
    )


def batch_figure(config: Config) -> Figure:
    """Map of one batch: the field, the chunk grid, and the patches.

    Raises:
        StoreError, ConfigError, PlanError: see `batch_map`.
    """
    drawn = batch_map(config)
    height, width = drawn.values.shape
    inches = min(max(_WIDTH_INCHES * 0.79 * height / width, 1.5), 6.0)
    chart = figure(_WIDTH_INCHES, inches + 0.9)
    title = f"{len(drawn.patches)} patches of one batch read {drawn.chunks_read} chunks of each variable"
    bottom, tall = 0.5 / (inches + 0.9), inches / (inches + 0.9)
    place = (0.08, bottom, 0.79, tall)
    axes = add_axes(chart, place, title=title, x=f"{drawn.dims[1]}, element", y=f"{drawn.dims[0]}, element", grid="")
    with drawing():
        _draw_field(axes, chart.add_axes((0.885, bottom, 0.018, tall)), drawn)
        _draw_chunks(axes, drawn)
        _draw_patches(axes, drawn)
    return chart


def _draw_field(axes: Axes, beside: Axes, drawn: BatchMap) -> None:
    from matplotlib import colormaps

    (top, left), (height, width) = drawn.origin, drawn.values.shape
    colours = colormaps["cividis"].with_extremes(bad="#c9c9c9")
    image = axes.imshow(
        np.ma.masked_invalid(drawn.values),
        cmap=colours,
        origin="lower",
        interpolation="nearest",
        aspect="auto",
        extent=(left, left + width, top, top + height),
    )
    bar = axes.figure.colorbar(image, cax=beside)
    bar.outline.set_visible(False)
    bar.set_label(drawn.title, size=8.5)
    bar.ax.tick_params(color=INK, labelcolor=INK, labelsize=8)


def _draw_chunks(axes: Axes, drawn: BatchMap) -> None:
    """Chunk borders; none where they would be a grey wash."""
    (top, left), (height, width) = drawn.origin, drawn.values.shape
    style: Any = {"color": PAPER, "linewidth": 0.8, "alpha": 0.75}
    for draw, start, extent, side in (
        (axes.axhline, top, height, drawn.chunk[0]),
        (axes.axvline, left, width, drawn.chunk[1]),
    ):
        if extent / side <= 64:
            for border in range(math.ceil(start / side) * side, start + extent + 1, side):
                draw(border, **style)


def _draw_patches(axes: Axes, drawn: BatchMap) -> None:
    from matplotlib.patches import Rectangle

    height, width = drawn.patch
    for at_y, at_x in drawn.patches:
        axes.add_patch(Rectangle((at_x, at_y), width, height, fill=False, edgecolor=PAPER, linewidth=2.6))
        axes.add_patch(Rectangle((at_x, at_y), width, height, fill=False, edgecolor=VERMILION, linewidth=1.4))


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
    title = split.sentence.split("; cut")[0]
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
    sampled = [np.unique(np.linspace(0, size - 1, min(size, _MOST_PIXELS)).astype(np.int64)) for size in sizes]
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
