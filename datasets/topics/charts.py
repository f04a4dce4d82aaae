"""Charts of topics: how documents are made of them, and which terms they are made of.

`structure_figure` stacks the shares of every document, sorted by their largest topic and its share; more documents than
can be told apart are averaged in groups of neighbours. `terms_figure` has a small chart for each topic with its most
likely terms. A topic has the same colour in both. Both take `Topics` of `topics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_WIDTH_INCHES, _HEIGHT_INCHES, _ROW_INCHES = 7.8, 3.3, 1.9
_MOST_COLUMNS = 600
_MOST_NAMED, _MOST_CHARTS, _ACROSS = 24, 30, 5
_PALETTE = (*look.COLOURS, look.YELLOW, "#7F7F7F")
"""Yellow and grey too: areas are told apart where lines would be too faint."""
_TINTS = (0.0, -0.45, 0.5)
"""Of the palette, for topics beyond its colours: as it is, towards black, towards white."""


@dataclass(frozen=True, slots=True)
class StructureInfo:
    """Documents in the order they are drawn in."""

    heights: NDArray[Any]
    """Shares of groups of neighbours, (groups, topics)."""
    group: int
    """Documents in each group; the last may have fewer."""
    documents: int


@dataclass(frozen=True, slots=True)
class TermsInfo:
    """The likeliest terms of each topic, from the likeliest on."""

    names: tuple[tuple[str, ...], ...]
    probabilities: tuple[tuple[float, ...], ...]


def structure_info(shares: NDArray[Any]) -> StructureInfo:
    """Documents sorted by their largest topic, then by its share, falling."""
    import numpy as np

    largest = shares.argmax(1)
    order = np.lexsort((-shares.max(1), largest))
    group = math.ceil(len(order) / _MOST_COLUMNS)
    starts = np.arange(0, len(order), group)
    sizes = np.diff([*starts, len(order)])[:, None]
    return StructureInfo(np.add.reduceat(shares[order], starts, axis=0) / sizes, group, len(order))


def terms_info(terms: NDArray[Any], count: int = 10, names: Sequence[str] | None = None) -> TermsInfo:
    """The `count` likeliest terms of each topic.

    Raises:
        ConfigError: for fewer than one term, and when there are not as many names as terms.
    """
    if count < 1:
        raise ConfigError([Problem("count", f"{count} terms: show 1 or more")])
    if names is not None and len(names) != terms.shape[1]:
        raise ConfigError([Problem("names", f"{len(names)} names for {terms.shape[1]} terms; give one each")])
    order = (-terms).argsort(axis=1, kind="stable")[:, :count].tolist()
    named = tuple(tuple(str(place if names is None else names[place]) for place in row) for row in order)
    likely = tuple(tuple(float(terms[topic, place]) for place in row) for topic, row in enumerate(order))
    return TermsInfo(named, likely)


def structure_figure(topics: Any) -> Figure:
    """Stacked shares of every document."""
    info = structure_info(topics.shares)
    chart = look.figure(_WIDTH_INCHES, _HEIGHT_INCHES)
    each = f"; means of {info.group} neighbours" if info.group > 1 else ""
    axes = look.add_axes(
        chart, (0.085, 0.27, 0.875, 0.61), title=f"shares of {topics.count} topics in {info.documents:,} documents",
        x=f"documents, sorted by their largest topic{each}", y="share", grid="",
    )  # fmt: skip
    edges = [min(place * info.group, info.documents) for place in range(len(info.heights) + 1)]
    colours = topic_colours(topics.count)
    with look.drawing():
        heights = [[*column, column[-1]] for column in info.heights.T.tolist()]
        axes.stackplot(edges, heights, colors=colours, step="post", linewidth=0)
        axes.set_xlim(0, info.documents)
        axes.set_ylim(0, 1)
        _draw_key(chart, colours)
    return chart


def _draw_key(chart: Figure, colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=str(topic)) for topic, colour in enumerate(colours[:_MOST_NAMED])]
    more = f" (the first {_MOST_NAMED})" if len(colours) > _MOST_NAMED else ""
    chart.legend(
        handles=handles, title=f"topic{more}", loc="lower left", bbox_to_anchor=(0.06, 0.0), ncols=12, fontsize=8,
        columnspacing=1.0, handlelength=0.9, handleheight=0.9, handletextpad=0.4, alignment="left", title_fontsize=8,
    )  # fmt: skip


def terms_figure(topics: Any, count: int = 10, names: Sequence[str] | None = None) -> Figure:
    """The likeliest terms of each topic; all charts share one scale.

    Args:
        topics: What was found; at most 30 topics are drawn.
        count: Terms of each.
        names: Of all terms; their numbers without.

    Raises:
        ConfigError: as `terms_info`.
    """
    info = terms_info(topics.terms, count, names)
    shown = min(topics.count, _MOST_CHARTS)
    down = math.ceil(shown / _ACROSS)
    across = math.ceil(shown / down)
    height = 0.45 + down * max(_ROW_INCHES, 0.16 * count + 0.6)
    chart = look.figure(_WIDTH_INCHES, height)
    limit = 1.06 * max(row[0] for row in info.probabilities[:shown])
    colours = topic_colours(topics.count)
    for topic in range(shown):
        _draw_terms(chart, info, topic, _box(topic, across, down, height), limit, colours[topic])
    with look.drawing():
        more = f", of {topics.count} topics the first {shown}" if topics.count > shown else ""
        title = f"most likely terms and their probabilities{more}"
        chart.text(0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center")
    return chart


def _box(place: int, across: int, down: int, height: float) -> tuple[float, float, float, float]:
    """Where the chart of a topic stands, in fractions of the figure."""
    row, column = divmod(place, across)
    width, tall = 0.97 / across, (height - 0.35) / down
    bottom = height - 0.35 - (row + 1) * tall + 0.3
    return column * width + 0.062, bottom / height, width - 0.075, (tall - 0.6) / height


def _draw_terms(
    chart: Figure, info: TermsInfo, topic: int, box: tuple[float, float, float, float], limit: float, colour: str
) -> None:
    axes = look.add_axes(chart, box, title=f"topic {topic}", grid="x")
    places = range(len(info.names[topic]))
    with look.drawing():
        axes.barh(places, info.probabilities[topic], 0.75, color=colour, linewidth=0)
        axes.set_yticks(places, info.names[topic])
        axes.tick_params(labelsize=7, length=0)
        axes.set_ylim(len(places) - 0.4, -0.6)
        axes.set_xlim(0, limit)
        axes.locator_params(axis="x", nbins=3)


def topic_colours(count: int) -> list[str]:
    """A colour for each topic: the palette, then its tints, over and over."""
    from matplotlib.colors import to_hex, to_rgb

    found = []
    for topic in range(count):
        turn, place = divmod(topic, len(_PALETTE))
        tint = _TINTS[turn % len(_TINTS)]
        towards = 1.0 if tint > 0 else 0.0
        red, green, blue = (part + (towards - part) * abs(tint) for part in to_rgb(_PALETTE[place]))
        found.append(to_hex((red, green, blue)))
    return found
