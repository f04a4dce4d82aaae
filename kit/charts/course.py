"""Charts of a course: how far each guess, and each prediction of kit, was from what was measured.

One row for each question, from the first down. On the axis stands guess over truth, logarithmic, so that half and
double are equally far from the line in the middle; the bands are those in which a guess earns points. What is further
off than the axis reaches stands at its end as an arrow. Questions that are answered by a word say right or wrong.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from kit.charts import style as look
from kit.course.guesses import BOUNDS, MOST_POINTS, Guess, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.course.guesses import Score

_ROW_INCHES, _EDGE_INCHES = 0.36, 1.35
_LETTERS = 44
_FARTHEST = 10.0
_EDGE = 1.15
_TICKS = {0.1: "1/10", 0.33333: "1/3", 0.66667: "2/3", 1.0: "1", 1.5: "1.5", 3.0: "3", 10.0: "10"}


def score_figure(score: Score) -> Figure:
    """What `kit.course.score` gives, drawn."""
    guesses = [guess for guess in score.guesses if guess.truth is not None]
    height = _EDGE_INCHES + _ROW_INCHES * max(1, len(guesses))
    chart = look.figure(9.6, height)
    box = (0.36, 0.62 / height, 0.5, (height - _EDGE_INCHES) / height)
    axes = look.add_axes(chart, box, x="times what was measured", grid="")
    with look.drawing():
        look.finding(chart, score.headline)
        for bound, shade in zip(sorted(BOUNDS.values(), reverse=True), (0.06, 0.08, 0.1), strict=True):
            axes.axvspan(1 / bound, bound, color=look.GREEN, alpha=shade, linewidth=0, zorder=0)
        axes.axvline(1.0, color=look.INK, linewidth=0.8, zorder=1)
        axes.set_xscale("log")
        axes.set_xlim(1 / _FARTHEST / _EDGE, _FARTHEST * _EDGE)
        axes.set_xticks([*_TICKS], [*_TICKS.values()])
        axes.minorticks_off()
        look.rows(axes, [textwrap.fill(guess.question, _LETTERS) for guess in guesses])
        for row, guess in enumerate(guesses):
            _draw(axes, row, guess)
        axes.plot([], [], "o", color=look.VERMILION, label="your guess")
        axes.plot([], [], "D", color=look.BLUE, markersize=4, label="predicted by kit")
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return chart


def _draw(axes: Axes, row: int, guess: Guess) -> None:
    measured = guess.measured is not None
    if isinstance(guess.truth, str):
        answer = "no guess" if guess.first is None else "right" if guess.points == MOST_POINTS else "wrong"
        look.note(axes, (1.0, row), f"{answer}: it is {guess.truth}", xytext=(8, 0))
    else:
        _mark(axes, row, ratio(guess.first, guess.truth), "o", look.VERMILION)
        if measured:
            _mark(axes, row, ratio(guess.predicted, guess.truth), "D", look.BLUE)
    points = "–" if guess.points is None else "•" * guess.points or "0"
    axes.annotate(
        points if measured else f"{points}  (predicted)", (1.0, row), xycoords=("axes fraction", "data"),
        xytext=(8, 0), textcoords="offset points", va="center", fontsize=9, color=look.INK,
    )  # fmt: skip


def _mark(axes: Axes, row: int, place: float | None, marker: str, colour: str) -> None:
    """A marker at guess over truth; an arrow where that is off the axis, nothing where it is not known."""
    if place is None:
        return
    if place <= 1 / _FARTHEST:
        place, marker = 1 / _FARTHEST, "<"
    elif place >= _FARTHEST:
        place, marker = _FARTHEST, ">"
    size = 4 if marker == "D" else 7
    axes.plot([place], [row], marker, color=colour, markersize=size, markeredgecolor=look.PAPER, markeredgewidth=0.6)
