"""Charts that hold things against each other: configs, levers, sequences, loader settings, a roofline, and guesses.

Bars start at zero, so that lengths compare. Where memory is drawn the measured bar is filled and the predicted one an
outline, in bytes on one device; speed is samples a second of all devices. What did not run keeps its row, without bars.

`comparison_figure` has one panel a quantity and one row a config: bars are means, dots are single runs.
`roofline_figure` shows achieved FLOP/s against FLOPs per byte under the roof of the device, both axes logarithmic, and
beside it the parts of a step's time. `levers_figure` has a row for every lever, `sequence_figure` memory against the
length of a sequence, on a scale that starts at zero: proportional growth is a straight line through it.
`calibration_figure` shows the loader settings in the order in which they were tried, with their standard errors; the
dashed line is enough, 90 % of the peak, and the chosen setting is the cheapest that reaches it.
`metrics_figure` has a panel for each thing that modules logged, over optimizer steps; few values, as of validations and
epochs, have dots.

`score_figure` shows how far each guess of a learner, and each prediction of kit, was from what was measured, with a row
for each question, from the first down. On the axis stands guess over truth, logarithmic, so that half and double are
equally far from the line in the middle; the bands are those in which a guess earns points. What is further off than the
axis reaches stands at its end as an arrow. Questions that are answered by a word say right or wrong.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.course.guesses import BOUNDS, MOST_POINTS, Guess, Score, ratio
from kit.errors import TrialError
from kit.records.trace import metrics_of
from kit.studies.calibration.rules import ENOUGH
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kit.studies.calibration.result import Calibration
    from kit.studies.comparison import Comparison
    from kit.studies.diagnosis.diagnose import Diagnosis, Roofline
    from kit.studies.levers import LeversCheck, SequenceCheck
    from kit.trial.trial import Trial

_ROW_INCHES, _EDGE_INCHES = 0.5, 0.75
_LETTERS = 24
_NAMES_INCHES, _PANEL_INCHES, _GAP_INCHES = 1.9, 1.75, 0.3
_CALIBRATION_ROW_INCHES, _CALIBRATION_EDGE_INCHES, _BARS_INCHES = 0.27, 0.85, 4.8
_LETTER_INCHES = 0.068
_GUESS_ROW_INCHES, _GUESS_EDGE_INCHES, _QUESTION_LETTERS = 0.36, 1.35, 44
_FARTHEST, _BEYOND = 10.0, 1.15
_TICKS = {0.1: "1/10", 0.33333: "1/3", 0.66667: "2/3", 1.0: "1", 1.5: "1.5", 3.0: "3", 10.0: "10"}
_METRICS_INCHES, _METRIC_COLUMNS, _MOST_METRICS, _DOTTED = 2.2, 2, 8, 40
_STAGE = re.compile(r"^(train|val|valid|validation|test)[_/]|[_/](step|epoch)$")
_COLOURS = (look.GREEN, look.ORANGE, look.BLUE, look.PURPLE)
_MIB = 2**20


def comparison_figure(comparison: Comparison) -> Figure:
    """One panel for each quantity that some run has."""
    quantities, groups = comparison.quantities, comparison.groups
    width = _NAMES_INCHES + len(quantities) * (_PANEL_INCHES + _GAP_INCHES)
    height = _EDGE_INCHES + _ROW_INCHES * len(groups)
    chart = look.figure(width, height)
    for place, quantity in enumerate(quantities):
        left = (_NAMES_INCHES + place * (_PANEL_INCHES + _GAP_INCHES)) / width
        box = (left, 0.3 / height, _PANEL_INCHES / width, (height - _EDGE_INCHES) / height)
        axes = look.add_axes(chart, box, title=quantity.title, grid="x")
        largest = 0.0
        with look.drawing():
            for row, group in enumerate(groups):
                found = group.figure(quantity.column)
                if not found.values:
                    continue
                largest = max(largest, *found.values)
                axes.barh(row, found.mean, height=0.5, color=_COLOURS[place % len(_COLOURS)])
                if len(found.values) > 1:
                    dots = [row] * len(found.values)
                    axes.plot(found.values, dots, "o", color=look.INK, markersize=3, mec=look.PAPER, mew=0.5)
                look.note(axes, (max(found.values), row), quantity.form(found.mean))
            axes.set_xlim(0, 1.6 * largest or 1.0)
            axes.set_xticks([])
            look.rows(axes, [group.name for group in groups], named=not place)
    return chart


def roofline_figure(diagnosis: Diagnosis) -> Figure:
    """The trial under the roof of its device, and what of a step its work would take at the peaks: less than all of it.

    Raises:
        ValueError: when the trial has no roofline: its work was not counted, or the peaks are not known.
    """
    roofline = diagnosis.roofline
    if roofline is None:
        raise ValueError("no roofline: the trial's work was not counted (trial.count_work), or its peaks are not known")
    chart = look.figure(7.6, 3.4)
    title = f"FLOP/s in {roofline.dtype}: MFU {roofline.mfu_fraction:.1%}"
    axes = look.add_axes(chart, (0.1, 0.15, 0.5, 0.72), title=title, x="FLOPs per byte moved", grid="both")
    parts = look.add_axes(chart, (0.76, 0.15, 0.2, 0.72), title="of a step, at peak speed", grid="x")
    with look.drawing():
        _draw_roof(axes, roofline)
        shares = {
            "data": roofline.wait_fraction, "communication": roofline.communication_fraction,
            "compute": roofline.compute_fraction, "memory\nbandwidth": min(1.0, roofline.memory_fraction),
        }  # fmt: skip
        for row, (name, share) in enumerate(shares.items()):
            bound = name.replace("\n", " ") == roofline.bound
            parts.barh(row, share, height=0.5, color=look.VERMILION if bound else look.SKY)
            look.note(parts, (share, row), f"{share:.0%}", xytext=(3, 0))
        look.rows(parts, [*shares])
        parts.set_xlim(0, 1.25)
        parts.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    return chart


def _draw_roof(axes: Axes, roofline: Roofline) -> None:
    most = max(roofline.intensity, roofline.ridge) * 8
    least = min(roofline.intensity / 8, roofline.ridge**2 / most)  # the ridge in the middle at least: words stand left
    peak, bandwidth, speed = roofline.peak_flops_per_second, roofline.peak_bytes_per_second, roofline.flops_per_second
    places = [least, roofline.ridge, most]
    axes.loglog(places, [min(peak, place * bandwidth) for place in places], color=look.INK)
    axes.plot([roofline.intensity] * 2, [speed, roofline.roof_flops_per_second], ":", color=look.BLUE)
    axes.plot([roofline.intensity], [speed], "o", color=look.BLUE, markersize=8)
    words: dict[str, Any] = {"fontsize": 8.5, "va": "baseline"}
    achieved = (roofline.intensity, speed)
    look.note(axes, achieved, f"{format_count(speed)}FLOP/s", xytext=(8, -3), **{**words, "color": look.BLUE})
    look.note(axes, (most, peak), f"compute: {format_count(peak)}FLOP/s", xytext=(-4, 4), ha="right", **words)
    middle = math.sqrt(least * roofline.ridge)
    memory = f"memory:\n{format_bytes(bandwidth)}/s"
    look.note(axes, (middle, middle * bandwidth), memory, xytext=(-6, 4), ha="right", **words)
    axes.set_xlim(least, most)
    axes.set_ylim(min(speed, least * bandwidth) / 4, peak * 3)


def levers_figure(check: LeversCheck) -> Figure:
    """Two panels with a row for each lever, the first on top."""
    steps = check.steps
    height = _EDGE_INCHES + _ROW_INCHES * len(steps)
    chart = look.figure(8.6, height)
    bottom, tall = 0.48 / height, (height - _EDGE_INCHES) / height
    title = "peak allocated on a device, MiB (outline: predicted)"
    memory = look.add_axes(chart, (0.24, bottom, 0.38, tall), title=title, grid="x")
    speed = look.add_axes(chart, (0.68, bottom, 0.27, tall), title="samples/s · × the first, in turn", grid="x")
    with look.drawing():
        for row, step in enumerate(steps):
            measured, predicted = step.measured_bytes, step.predicted_bytes
            if measured is not None:
                memory.barh(row, measured / _MIB, height=0.42, color=look.BLUE)
            if predicted is not None:
                memory.barh(row, predicted / _MIB, height=0.58, fill=False, edgecolor=look.INK, linewidth=1.1)
            ratio = "" if step.ratio is None else f" · ratio {step.ratio:.2f}"
            words = "did not run" if measured is None else format_bytes(measured) + ratio
            look.note(memory, (max(measured or 0, predicted or 0) / _MIB, row), words)
            if (fast := step.samples_per_second) is not None:
                first, tried, words = steps[0].samples_per_second, step.tried, ""
                if tried is not None and first and (in_turn := check.speed_fraction(step)) is not None:
                    fast = first * in_turn  # one run alone may say the opposite of runs in turn
                    words = " · no difference" if tried.is_alike else f" · × {in_turn:.2f}"
                speed.barh(row, fast, height=0.42, color=look.GREEN)
                look.note(speed, (fast, row), f"{fast:,.1f}{words}")
        for axes in (memory, speed):
            look.rows(axes, [textwrap.fill(step.name, _LETTERS) for step in steps], named=axes is memory)
            longest = max((bar.get_width() for bars in axes.containers for bar in bars), default=0.0)
            axes.set_xlim(0, 1.75 * longest or 1.0)  # words stand right of the bars
    return chart


def sequence_figure(check: SequenceCheck) -> Figure:
    """Peak against the length of a sequence, whole and in chunks: lines are predicted, dots are measured."""
    chart = look.figure(6.8, 3.4)
    title = "peak allocated on a device, MiB (line: predicted, dots: measured)"
    axes = look.add_axes(chart, (0.1, 0.16, 0.68, 0.72), title=title, x="positions of a sequence", grid="both")
    with look.drawing():
        axes.set_xlim(0, 1.06 * check.lengths[-1])
        for place, (name, steps) in enumerate(check.curves.items()):
            colour = look.COLOURS[place]
            predicted = {length: step.predicted_bytes / _MIB for length, step in steps.items() if step.predicted_bytes}
            measured = {length: step.measured_bytes / _MIB for length, step in steps.items() if step.measured_bytes}
            axes.plot([*predicted], [*predicted.values()], look.DASHES[place], color=colour)
            axes.plot([*measured], [*measured.values()], "o", color=colour, label=name)
            for end, height in [*(measured or predicted).items()][-1:]:
                ratio = steps[end].ratio
                text = name if ratio is None else f"{name}\nratio {ratio:.3f}"
                look.note(axes, (end, height), text, xytext=(10, 0), color=colour, fontsize=9, annotation_clip=False)
        axes.set_ylim(bottom=0)
        axes.set_xticks([0, *check.lengths])
    return chart


def calibration_figure(calibration: Calibration) -> Figure:
    """A bar for each setting, the first on top."""
    rows = max(1, len(calibration.measured))
    height = _CALIBRATION_EDGE_INCHES + _CALIBRATION_ROW_INCHES * rows
    names = [str(item.setting) for item in calibration.measured]
    left = 0.3 + _LETTER_INCHES * max(map(len, names), default=0)
    width = left + _BARS_INCHES
    chart = look.figure(width, height)
    box = (left / width, 0.5 / height, 0.96 * _BARS_INCHES / width, (height - _CALIBRATION_EDGE_INCHES) / height)
    title = f"loader settings tried, in order; dashed: {ENOUGH:.0%} of the peak"
    axes = look.add_axes(chart, box, title=title, x="batches/s", grid="x")
    longest = 0.0
    with look.drawing():
        for row, item in enumerate(calibration.measured):
            chosen, speed = item.setting == calibration.chosen, item.batches_per_second
            error = item.error * speed if item.error < 1 else 0.0
            longest = max(longest, speed + error)
            axes.barh(row, speed, height=0.6, color=look.VERMILION if chosen else look.BLUE, alpha=1 if chosen else 0.7)
            axes.errorbar(speed, row, xerr=error, color=look.INK, linewidth=0.9, capsize=2)
            words = format_count(speed) + (" ← chosen" if chosen else "")
            look.note(axes, (speed + error, row), words, xytext=(5, 0), annotation_clip=False)
        look.rows(axes, names)
        axes.set_xlim(0, 1.25 * longest or 1.0)
        axes.axvline(ENOUGH * calibration.peak, linestyle="--", linewidth=1.1, color=look.INK)
    return chart


def metrics_figure(*trials: Trial) -> Figure:
    """What modules logged, and the loss, over optimizer steps; the same thing of several stages in one panel.

    Args:
        trials: The others are drawn beside the first.

    Raises:
        TrialError: when nothing was logged yet.
    """
    for trial in trials:
        trial.poll()
    return logged_chart(*trials, titled=True)


def logged_chart(*trials: Trial, titled: bool = False) -> Figure:
    """The figure of what is known of the trials, which are not asked for news."""
    panels: defaultdict[str, list[tuple[str, int, Any]]] = defaultdict(list)
    for place, trial in enumerate(trials):
        for name, series in metrics_of([*trial.steps, *trial.events]).items():
            thing = name
            while (shorter := _STAGE.sub("", thing)) and shorter != thing:
                thing = shorter
            if all(series != drawn for *_, drawn in panels[thing]):  # a loss is often logged too
                panels[thing].append((name if len(trials) == 1 else f"{name}, trial {place + 1}", place, series))
    if not panels:
        raise TrialError(f"{trials[0].name}: nothing was logged, as no step was finished; wait() for it")
    shown = sorted(panels)[:_MOST_METRICS]
    lines = math.ceil(len(shown) / _METRIC_COLUMNS)
    height = 0.3 * titled + _METRICS_INCHES * lines
    chart = look.figure(7.8, height)
    for place, thing in enumerate(shown):
        left, line = (0.085, 0.585)[place % _METRIC_COLUMNS], lines - 1 - place // _METRIC_COLUMNS
        width = 0.39 if len(shown) > 1 else 0.89
        box = (left, (0.45 + line * _METRICS_INCHES) / height, width, (_METRICS_INCHES - 0.85) / height)
        axes = look.add_axes(chart, box, title=thing, x="step" if line == 0 else "")
        with look.drawing():
            for number, (name, which, (steps, values)) in enumerate(panels[thing]):
                few: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= _DOTTED else {}
                colour = look.COLOURS[number % len(look.COLOURS)]
                axes.plot(steps, values, color=colour, linestyle=look.DASHES[which % len(look.DASHES)], label=name,
                          linewidth=1.4, **few)  # fmt: skip
            axes.locator_params("x", integer=True)
            if [name for name, *_ in panels[thing]] != [thing]:
                axes.legend(loc="best", fontsize=7)
    if titled:
        more = f"; {len(panels) - len(shown)} more were logged" if len(panels) > len(shown) else ""
        look.finding(chart, f"What {trials[0].name} logged{more}")
    return chart


def score_figure(score: Score) -> Figure:
    """What `kit.course.score` gives, drawn."""
    guesses = [guess for guess in score.guesses if guess.truth is not None]
    height = _GUESS_EDGE_INCHES + _GUESS_ROW_INCHES * max(1, len(guesses))
    chart = look.figure(9.6, height)
    box = (0.36, 0.62 / height, 0.5, (height - _GUESS_EDGE_INCHES) / height)
    axes = look.add_axes(chart, box, x="times what was measured", grid="")
    with look.drawing():
        look.finding(chart, score.headline)
        for bound, shade in zip(sorted(BOUNDS.values(), reverse=True), (0.06, 0.08, 0.1), strict=True):
            axes.axvspan(1 / bound, bound, color=look.GREEN, alpha=shade, linewidth=0, zorder=0)
        axes.axvline(1.0, color=look.INK, linewidth=0.8, zorder=1)
        axes.set_xscale("log")
        axes.set_xlim(1 / _FARTHEST / _BEYOND, _FARTHEST * _BEYOND)
        axes.set_xticks([*_TICKS], [*_TICKS.values()])
        axes.minorticks_off()
        look.rows(axes, [textwrap.fill(guess.question, _QUESTION_LETTERS) for guess in guesses])
        for row, guess in enumerate(guesses):
            _draw_guess(axes, row, guess)
        axes.plot([], [], "o", color=look.VERMILION, label="your guess")
        axes.plot([], [], "D", color=look.BLUE, markersize=4, label="predicted by kit")
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return chart


def _draw_guess(axes: Axes, row: int, guess: Guess) -> None:
    measured = guess.measured is not None
    if isinstance(guess.truth, str):
        answer = "no guess" if guess.first is None else "right" if guess.points == MOST_POINTS else "wrong"
        look.note(axes, (1.0, row), f"{answer}: it is {guess.truth}", xytext=(8, 0))
    else:
        _mark_guess(axes, row, ratio(guess.first, guess.truth), "o", look.VERMILION)
        if measured:
            _mark_guess(axes, row, ratio(guess.predicted, guess.truth), "D", look.BLUE)
    points = "–" if guess.points is None else "•" * guess.points or "0"
    axes.annotate(
        points if measured else f"{points}  (predicted)", (1.0, row), xycoords=("axes fraction", "data"),
        xytext=(8, 0), textcoords="offset points", va="center", fontsize=9, color=look.INK,
    )  # fmt: skip


def _mark_guess(axes: Axes, row: int, place: float | None, marker: str, colour: str) -> None:
    """A marker at guess over truth; an arrow where that is off the axis, nothing where it is not known."""
    if place is None:
        return
    if place <= 1 / _FARTHEST:
        place, marker = 1 / _FARTHEST, "<"
    elif place >= _FARTHEST:
        place, marker = _FARTHEST, ">"
    size = 4 if marker == "D" else 7
    axes.plot([place], [row], marker, color=colour, markersize=size, markeredgecolor=look.PAPER, markeredgewidth=0.6)
