"""One batch on the map: where its patches lie, and which chunks must be read for them.

The background is the first variable of the store on its last two dimensions, at the other offsets of the batch's first
patch; patches may lie at any of those. Two steps: `batch_map` reads what is drawn, `batch_figure` draws it. An array
too large to draw is cut to a window around the first patch, so that a terabyte costs no more than a megabyte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.charts.style import INK, PAPER, VERMILION, add_axes, drawing, figure
from kit.config import Config
from kit.data.open_dataset import open_dataset
from kit.data.sampling import sample_plan
from kit.data.stream.engine import Engine
from kit.data.stream.scatter import chunk_uses
from kit.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_SIDE = 1024
"""Elements drawn along each side, at most."""
_WIDTH_INCHES = 7.2


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
