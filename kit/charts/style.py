"""One look for every chart: text that follows the reader's theme (SVG), a picture on white (PNG) for a file, or one
that reads on light and dark alike (`still`) for a saved notebook.

A chart is a private `matplotlib.figure.Figure`: never pyplot, no window, no current figure. Make axes and artists
inside `with drawing():`, which sets the house style in matplotlib for that block only; later only change their data
(`line.set_data`, `text.set_text`) and call `svg` again. Sizes are inches, at 100 pixels an inch: 6.4 is 640 pixels.

The one invariant: whatever is drawn in `INK` becomes the page's text colour and whatever is drawn in `PAPER` becomes
its background, so one SVG reads well on light and dark. Matplotlib shares caches and settings between figures, so all
of it runs under one lock; saving borrows only the settings of the SVG writer, so that a live chart drawn from a thread
cannot restyle a figure the user is making meanwhile.
"""

from __future__ import annotations

import functools
import hashlib
import html
import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

PIXELS_PER_INCH = 100

INK = "#123456"
"""Drawn where the page's text colour is meant; dark enough to stay readable in a PNG."""
PAPER = "#fefdfe"
"""Drawn where the page's background is meant, such as the rim of a marker."""
STILL_INK = "#767676"
"""The grey that reads on white (contrast 4.5) and on the black of a dark page (4.2) alike."""
_SAME_COLOUR = 8
"""Of 255: rounding of the edges of letters, which are partly transparent."""

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW = "#E69F00", "#56B4E9", "#F0E442"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
"""Okabe and Ito's palette, told apart by colour-blind readers; yellow is left out, too faint for lines on white."""
DASHES = ("-", "--", "-.", ":")
"""Line styles to pair with `COLOURS`, so that no line is told by colour alone."""

_LOCK = threading.RLock()
_FONTS: Any = {"font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}
_STYLE: Any = {
    **_FONTS,
    "font.size": 9.0,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Set the house style in matplotlib while artists are made; every other chart waits its turn."""
    import matplotlib as mpl

    with _LOCK, mpl.rc_context():
        mpl.rcdefaults()  # a style sheet the user has switched on is for the user's own figures
        mpl.rcParams.update(_STYLE)
        yield


def figure(width_inches: float, height_inches: float) -> Figure:
    """An empty transparent figure of this size, known to no window and no pyplot; a notebook shows it as a picture."""
    with drawing():
        return _shown()(figsize=(width_inches, height_inches), dpi=PIXELS_PER_INCH)


@functools.cache
def _shown() -> type[Figure]:
    """Figure, with what a notebook asks for: matplotlib itself answers only where pyplot has been set up."""
    from matplotlib.figure import Figure

    class Chart(Figure):
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            width, height = (round(float(inches) * PIXELS_PER_INCH) for inches in self.get_size_inches())
            return still(self, 2 * PIXELS_PER_INCH), {"width": width, "height": height}

    return Chart


def root(figure: Figure | SubFigure) -> Figure:
    """The whole figure that a part of one belongs to; a whole one belongs to itself."""
    from matplotlib.figure import SubFigure

    while isinstance(figure, SubFigure):
        figure = figure.figure
    return figure


def add_axes(
    figure: Figure | SubFigure,
    rectangle: tuple[float, float, float, float],
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    grid: str = "y",
) -> Axes:
    """Axes in a fixed rectangle `(left, bottom, width, height)`, in fractions of the figure (or of a part of one).

    A fixed rectangle costs no layout pass and does not jump when tick labels change; leave 4 % at the right, where the
    last tick label overhangs. `grid` is "x", "y", "both" or "" for none.
    """
    with drawing():
        axes = figure.add_axes(rectangle)
        axes.set(title=title, xlabel=x, ylabel=y)
        # Ticks are made when they are first drawn, outside this style: what they need is handed to them here.
        axes.tick_params(
            which="both", color=INK, labelcolor=INK, labelsize=8.5, width=0.8, grid_color=INK, grid_alpha=0.15,
            grid_linewidth=0.6, grid_linestyle="-",
        )  # fmt: skip
        axes.tick_params(which="major", length=3.5)
        axes.tick_params(which="minor", length=2.0)
        if grid:
            axes.grid(visible=True, which="major", axis=grid)  # type: ignore[arg-type]
    return axes


def svg(figure: Figure, label: str) -> str:
    """The figure as one inline `<svg>` that takes its colours from the page.

    `label` says in words what the chart shows, for readers who hear the page; it also keeps the ids of two charts on
    one page apart. The same figure and label give the same text.
    """
    import matplotlib as mpl

    stream = io.StringIO()
    salt = hashlib.sha256(label.encode()).hexdigest()
    with _LOCK, mpl.rc_context({**_FONTS, "svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL
    )  # would style the page
    text = re.sub(r' id="[a-z0-9.]+_\d+"', "", text)  # matplotlib numbers groups per figure: two charts would share ids
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--jp-layout-color0, #fff)")
    return re.sub(r"<svg [^>]*>", lambda _: _root(figure, label), text, count=1).strip()


def png(figure: Figure, pixels_per_inch: int = PIXELS_PER_INCH) -> bytes:
    """The figure as a PNG on white, for readers without inline SVG."""
    import matplotlib as mpl

    stream = io.BytesIO()
    with _LOCK, mpl.rc_context(_FONTS):
        figure.savefig(stream, format="png", dpi=pixels_per_inch, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def still(figure: Figure, pixels_per_inch: int = PIXELS_PER_INCH) -> bytes:
    """The figure as a PNG without background, for a saved page of any theme: what is text colour is `STILL_INK`.

    A page that is opened again shows pictures as images, which cannot take its colours.
    """
    import matplotlib as mpl
    import numpy as np
    from PIL import Image

    stream = io.BytesIO()
    with _LOCK, mpl.rc_context(_FONTS):
        figure.savefig(stream, format="png", dpi=pixels_per_inch, transparent=True)
    pixels = np.array(Image.open(stream).convert("RGBA"))
    ink, grey = (np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) for colour in (INK, STILL_INK))
    pixels[(np.abs(pixels[..., :3].astype(int) - ink) <= _SAME_COLOUR).all(axis=-1), :3] = grey
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="png", optimize=True)
    return stream.getvalue()


# -- what many charts have


def finding(figure: Figure, text: str, inches_below_top: float = 0.231) -> None:
    """The sentence above all axes: the result that the chart shows."""
    place = 1 - inches_below_top / float(figure.get_size_inches()[1])
    figure.text(0.012, place, text, fontsize=12.5, fontweight="bold", va="center")


def colour_key(figure: Figure, colours: Mapping[str, str], **options: Any) -> None:
    """A legend at the lower edge: a square of each colour, with its name."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    look: dict[str, Any] = {
        "loc": "lower left", "bbox_to_anchor": (0.0, 0.0), "ncols": len(handles), "columnspacing": 1.2,
        "handlelength": 0.9, "handleheight": 0.9, "handletextpad": 0.5,
    }  # fmt: skip
    figure.legend(handles=handles, **{**look, **options})


def note(axes: Axes, place: tuple[float, float], text: str, *, above: bool = False, **options: Any) -> None:
    """Small words right of a point, such as the end of a bar, or above it."""
    side: dict[str, Any] = {"xytext": (0, 3), "ha": "center"} if above else {"xytext": (4, 0), "va": "center"}
    axes.annotate(text, place, **{"textcoords": "offset points", "fontsize": 8, "color": INK, **side, **options})


def rows(axes: Axes, names: Sequence[str], *, named: bool = True) -> None:
    """A row for each name from the top down, for level bars; not `named` where the axes beside it have the names."""
    axes.set_yticks(range(len(names)), list(names) if named else [""] * len(names))
    axes.set_ylim(max(1, len(names)) - 0.5, -0.5)


def shade_warmup(axes: Axes, end: float, begin: float = 0.0) -> None:
    """Shade the warm-up, which is in no average."""
    axes.axvspan(begin, end, color=INK, alpha=0.07, linewidth=0, zorder=0)


def _root(figure: Figure, label: str) -> str:
    """The opening tag: 100 pixels an inch, shrinking with its column."""
    width, height = (float(inches) for inches in figure.get_size_inches())
    style = "color: var(--jp-ui-font-color1, #222); max-width: 100%; height: auto; stroke-linejoin: round"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{html.escape(label)}" width="{width * PIXELS_PER_INCH:g}" height="{height * PIXELS_PER_INCH:g}" '
        f'viewBox="0 0 {width * 72:g} {height * 72:g}" style="{style}">'
    )
