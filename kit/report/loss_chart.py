"""loss_figure: the losses of several runs of the same thing, batch by batch, and whether they are equal.

Trials, committed runs or plain numbers, in any mixture; each is rank 0's, without Lightning's division by accumulation.
The first of several is drawn broad and pale, the others thin on top of it, so that equal ones cover each other. What
they have in common is compared: the largest difference over the common batches, as a fraction of the first's loss.
Differences up to `EQUAL_FRACTION` are of the last digits of 32-bit numbers.

Batches of one trial differ as their samples do: a trial alone that went through many epochs is drawn pale, and the
mean of each epoch on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, Problem
from kit.events import number
from kit.report import figure as look
from kit.report.committed_run import CommittedRun
from kit.run.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EQUAL_FRACTION = 1e-6
_WIDTH_INCHES, _HEIGHT_INCHES, _LINE_INCHES = 7.6, 3.0, 0.18
_LEAST_BATCHES, _LEAST_EPOCHS = 4, 8
"""For means of epochs to be drawn: of fewer they hide how the loss fell."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one run."""

    name: str
    values: tuple[float, ...]
    first: int = 0
    """Batches of its run before the first value."""
    epochs: tuple[int, ...] = ()
    """Number of the epoch of each value; empty where it is not known."""

    @property
    def means(self) -> list[tuple[int, int, float]]:
        """(first batch, last batch, mean loss) of each epoch; empty for few epochs, and for epochs of few batches."""
        places = range(self.first + 1, self.first + 1 + len(self.values))
        parts = [list(part) for _, part in groupby(zip(self.epochs, places, self.values, strict=False), itemgetter(0))]
        if len(parts) < _LEAST_EPOCHS or len(parts[0]) < _LEAST_BATCHES:
            return []
        return [(part[0][1], part[-1][1], fmean(loss for *_, loss in part)) for part in parts]


@dataclass(frozen=True, slots=True)
class LossInfo:
    """Runs, the first of which the others are held against."""

    runs: tuple[Losses, ...]

    def common(self, other: Losses) -> list[tuple[float, float]]:
        """(loss of the first, loss of `other`) of every batch that both have."""
        base = self.runs[0]
        begin = max(base.first, other.first)
        return list(zip(base.values[begin - base.first :], other.values[begin - other.first :], strict=False))

    def difference(self, other: Losses) -> float:
        """The largest one, as a fraction of the first's loss; NaN without a common batch."""
        return max((_apart(one, two) for one, two in self.common(other)), default=math.nan)

    @property
    def sentence(self) -> str:
        """What was compared and how it came out, a line for each of the others."""
        return "\n".join(self._compared(other) for other in self.runs[1:]) or f"losses of {self.runs[0].name}"

    def _compared(self, other: Losses) -> str:
        count, apart = len(self.common(other)), self.difference(other)
        if not count:
            return f"{other.name} has no batch in common with {self.runs[0].name}"
        batches = f"{count} batch" + "es" * (count > 1)
        if apart <= EQUAL_FRACTION:
            exactly = "exactly " if apart == 0 else ""
            return f"{other.name} has {exactly}the losses of {self.runs[0].name}, over {batches}"
        return f"{other.name} is up to {apart:.2g} of the loss away from {self.runs[0].name}, over {batches}"


def loss_info(*runs: Trial | CommittedRun | Sequence[float]) -> LossInfo:
    """What is to be drawn.

    Raises:
        ConfigError: for nothing to draw, and for a run without losses.
    """
    if not runs:
        raise ConfigError([Problem("runs", "none to draw; give a trial and what kit.Committed.run() returned")])
    several = sum(isinstance(run, Trial) for run in runs) > 1
    found = tuple(_losses(run, place, several) for place, run in enumerate(runs, start=1))
    empty = [one.name for one in found if not one.values]
    if empty:
        raise ConfigError([Problem("runs", f"{empty[0]} has no losses: no batch of it has ended, or it returned none")])
    return LossInfo(found)


def loss_figure(*runs: Trial | CommittedRun | Sequence[float]) -> Figure:
    """Losses over batches, with what is equal in words.

    Args:
        runs: Trials, what `kit.Committed.run()` returned, or numbers; the others are held against the first.

    Raises:
        ConfigError: for nothing to draw, and for a run without losses.
    """
    info = loss_info(*runs)
    height = _HEIGHT_INCHES + _LINE_INCHES * max(1, len(info.runs) - 1)
    figure = look.figure(_WIDTH_INCHES, height)
    place = (0.1, 0.5 / height, 0.86, (_HEIGHT_INCHES - 0.8) / height)
    axes = look.add_axes(figure, place, title=info.sentence, x="batch", y="loss")
    alone = info.runs[0].means if len(info.runs) == 1 else []
    with look.drawing():
        for number_of, run in enumerate(info.runs):
            _draw(axes, run, number_of, pale=bool(alone), broad=number_of == 0 and len(info.runs) > 1)
        if alone:
            middles = [(first + last) / 2 for first, last, _ in alone]
            axes.plot(middles, [mean for *_, mean in alone], color=look.BLUE, linewidth=2.0, label="mean of an epoch")
        if len(info.runs) > 1 or alone:
            axes.legend(loc="best")
        axes.set_xlim(0.5, max(run.first + len(run.values) for run in info.runs) + 0.5)
    return figure


def _draw(axes: Axes, run: Losses, number_of: int, *, pale: bool, broad: bool) -> None:
    batches = range(run.first + 1, run.first + 1 + len(run.values))
    line: dict[str, Any] = {"linewidth": 6.0, "alpha": 0.35} if broad else {"linewidth": 1.4}
    if pale:
        line = {"linewidth": 0.8, "alpha": 0.4}
    dash = look.DASHES[max(0, number_of - 1) % len(look.DASHES)]
    colour, label = look.COLOURS[number_of % len(look.COLOURS)], "each batch" if pale else run.name
    axes.plot(batches, run.values, color=colour, linestyle=dash, label=label, **line)


def _losses(run: Any, place: int, several: bool) -> Losses:
    if isinstance(run, Trial):
        run.poll()
        steps = [event for event in run.steps if event["rank"] == 0]
        values = tuple(number(event.get("loss")) for event in steps)
        epochs = tuple(int(event["epoch"]) for event in steps if "epoch" in event)
        known = epochs if len(epochs) == len(values) else ()
        return Losses(f"trial {place}" if several else "the trial", values, epochs=known)
    if isinstance(run, CommittedRun):
        return Losses("the committed run", tuple(run.losses), run.first_batch)
    return Losses(f"run {place}", tuple(map(float, run)))


def _apart(one: float, two: float) -> float:
    """As a fraction of `one`; equal numbers are not apart, NaN beside NaN neither."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    apart = abs(one - two) / abs(one) if one else math.inf
    return math.inf if math.isnan(apart) else apart
