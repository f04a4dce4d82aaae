"""Charts of one trial: memory beside throughput by step, the losses batch by batch, and the time of each batch.

`TrialChart` draws a trial while it runs, into one kept figure of fixed boxes: a live chart changes its lines and never
its layout, limits only grow, in steps of a factor of at most two and a half. Bytes are shown in MiB or GiB, time as
percent. Warm-up steps are shaded, and left out of the averages. Behind the lines stands what was predicted, as a band:
the peak of memory (on a GPU from allocated to reserved, on the CPU the range of the whole process) and samples/s, from
earlier trials of the same. Where nothing was predicted there is no band, and a word says so.

`loss_figure` compares the losses of several runs of the same thing: trials, committed runs or plain numbers. The
largest difference over the common batches is a fraction of the first run's loss; up to `EQUAL_FRACTION` it comes from
the last digits of 32-bit numbers. The first of several is drawn broad and pale, the others thin on top of it, so that
equal ones cover each other. A trial of many epochs alone is drawn pale, with the mean of each epoch on top of it. The
loss of a batch is the mean of its ranks; a mean of an epoch weighs batches by their samples. A short batch is compared
as it is and drawn together with samples of the one before: it would be a spike that says nothing.

`timing_figure` shows each batch as a stacked bar, and the totals of every rank beside it. More batches than can be told
apart are averaged in groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.charts import style as look
from kit.committed.run import CommittedRun
from kit.config import Config
from kit.errors import ConfigError, Problem, TrialError
from kit.events import Event
from kit.memory.replay.estimate import MemoryEstimate
from kit.records.ratios import SpeedRange
from kit.records.timing import Timing, rounded_shares, timing
from kit.records.trace import PHASE_LABELS, PHASES, MemoryInfo, ThroughputInfo, Trace, losses_of
from kit.sections import Trial as TrialSettings
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Box = tuple[float, float, float, float]
WIDTH_INCHES, HEIGHT_INCHES = 7.8, 3.4
PHASE_COLOURS = {
    "wait": look.VERMILION, "transfer": look.ORANGE, "forward": look.SKY, "backward": look.BLUE,
    "optimizer": look.GREEN, "communication": look.PURPLE, "validation": look.YELLOW, "checkpoint": "#666666",
    "logging": "#cccccc", "other": "#999999",
}  # fmt: skip
_LEFT, _RIGHT, _COLUMN, _BOTTOM, _TOP = 0.075, 0.575, 0.40, 0.25, 0.905
_LEGEND_TOP, _LABELLED_RANKS = 0.118, 5
_TWO_ROWS = 6
"""Names that fit into two rows of the legend."""
_LEGEND: dict[str, Any] = {"ncols": 3, "columnspacing": 1.5, "handletextpad": 0.6, "borderaxespad": 0.2}


_BAND_COLOUR, _UNPREDICTED = look.SKY, "no prediction"


class TrialChart:
    """One figure of a trial, made once and fed events; `svg()` and `still()` are pictures of what it has so far."""

    def __init__(self, config: Config, world_size: int = 1, has_device: bool = False) -> None:
        self.trace = Trace(config.trial.warmup_steps, config.trial.max_steps, world_size)
        self.figure = look.figure(WIDTH_INCHES, HEIGHT_INCHES)
        self._steps = 0
        self._predicted = ["", ""]
        """Of memory and of speed, in words."""
        host = (_box(_LEFT, 0.0, 0.30 if has_device else 1.0), "host RSS per rank", ("host_rss_bytes",))
        kinds = ("device_allocated_bytes", "device_reserved_bytes")
        device = (_box(_LEFT, 0.47, 1.0), "device memory per rank", kinds)
        absent = ["communication"] * (world_size == 1) + ["validation"] * (not config.trial.validate_every_steps)
        absent += ["checkpoint", "logging"]  # greys, as other is; most trials have none
        with look.drawing():
            self._memory = [
                _MemoryPanel(self.figure, *panel, world_size) for panel in ([device, host] if has_device else [host])
            ]
            self._memory[0].axes.tick_params(labelbottom=not has_device)
            self._memory[-1].axes.set_xlabel("step")
            self._draw_rank_legend(world_size)
            self._speed = _SpeedPanel(self.figure, _box(_RIGHT, 0.47, 1.0))
            self._bands = _BandPanel(self.figure, _box(_RIGHT, 0.0, 0.30), [n for n in PHASES if n not in absent])
            self._axes = [*(panel.axes for panel in self._memory), self._speed.axes, self._bands.axes]
            if warmup := self.trace.warmup_steps:
                for axes in self._axes:
                    look.shade_warmup(axes, warmup)
                place = self._speed.axes.get_xaxis_transform()
                self._speed.axes.text(warmup, 0.96, " warm-up", transform=place, fontsize=8, alpha=0.75, va="top")
            self._limit_steps()

    def _draw_rank_legend(self, world_size: int) -> None:
        from matplotlib.lines import Line2D

        panel = self._memory[0]
        lines = [panel.lines[panel.kinds[0], rank] for rank in range(world_size)]
        notes = [f"and {world_size - _LABELLED_RANKS} more"] if world_size > _LABELLED_RANKS else []
        notes += ["thin: reserved"] if len(panel.kinds) > 1 else []
        handles = lines[:_LABELLED_RANKS] if world_size > 1 else []
        handles += [Line2D([], [], linestyle="none", label=text) for text in notes]
        if handles:
            place = (_LEFT, _LEGEND_TOP)
            self.figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, **_LEGEND)

    def _limit_steps(self) -> None:
        from matplotlib.ticker import MaxNLocator

        limit = step_limit(self.trace.last_step, self.trace.max_steps)
        if limit != self._steps:
            self._steps = limit
            for axes in self._axes:
                axes.set_xlim(0, limit)
                axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))

    def add(self, events: Iterable[Event]) -> None:
        """Take in new events; nothing is drawn until a picture is asked for."""
        self.trace.add(events)

    def expect(
        self, memory: MemoryEstimate | None = None, speed: SpeedRange | None = None, *, soon: bool = False
    ) -> None:
        """Draw what was predicted behind the lines; `soon` says that memory is still being predicted."""
        with look.drawing():
            band = None if memory is None else memory_band(memory)
            self._memory[0].expect(band, format_bytes, "being predicted" if soon else _UNPREDICTED)
            self._speed.expect(None if speed is None else (speed.low, speed.high), format_count, _UNPREDICTED)
        self._predicted = [panel.predicted.get_text() for panel in (self._memory[0], self._speed)]

    def svg(self) -> str:
        """The chart as inline SVG that takes its colours from the page."""
        (memory, throughput), (of_memory, of_speed) = self._update(), self._predicted
        parts = [
            f"{info.sentence} ({words})" if words else info.sentence
            for info, words in ((memory, of_memory), (throughput, of_speed))
        ]
        return look.svg(self.figure, " ".join(parts))

    def still(self) -> bytes:
        """The chart as a PNG that reads on light and dark."""
        self._update()
        return look.still(self.figure, 2 * look.PIXELS_PER_INCH)

    def _update(self) -> tuple[MemoryInfo, ThroughputInfo]:
        memory, throughput = self.trace.memory(), self.trace.throughput()
        with look.drawing():
            self._limit_steps()
            for panel in self._memory:
                panel.show(memory)
            self._speed.show(throughput)
            self._bands.show(throughput)
        return memory, throughput


@functools.lru_cache(maxsize=16)
def empty_chart(settings: TrialSettings) -> str:
    """The chart of a trial that has not begun, as inline SVG; every panel begins with one."""
    return TrialChart(Config(trial=settings)).svg()


def memory_band(estimate: MemoryEstimate) -> tuple[float, float] | None:
    """(low, high) of the predicted peak as the memory panel measures it; None where activations are unknown."""
    if not estimate.complete:
        return None
    if estimate.device_kind == "cpu":
        return estimate.total_bytes
    return estimate.device_allocated_bytes, estimate.device_reserved_bytes


class _Panel:
    """Axes with words at the right end of their title line and a value axis that only grows."""

    def __init__(self, figure: Figure, box: _Box, note_colour: str, **labels: str) -> None:
        from matplotlib.transforms import ScaledTranslation

        self.axes, self.limit = look.add_axes(figure, box, **labels), 0.0
        place = self.axes.transAxes + ScaledTranslation(0, 8 / 72, figure.dpi_scale_trans)
        self.note = self.axes.text(
            1, 1, "", color=note_colour, fontsize=8.5, ha="right", va="baseline", transform=place
        )

    def _add_band(self) -> None:
        """Places for a band of what was predicted, and for its words, above the lines."""
        from matplotlib.patches import Rectangle

        place = self.axes.get_yaxis_transform()
        look_of_band: dict[str, Any] = {"facecolor": _BAND_COLOUR, "edgecolor": _BAND_COLOUR, "alpha": 0.3}
        self.band = Rectangle((0, 0), 1, 0, transform=place, zorder=0.5, linewidth=1.2, visible=False, **look_of_band)
        self.axes.add_patch(self.band)
        place = self.axes.transAxes
        self.predicted = self.axes.text(0.99, 0.98, "", fontsize=7.5, ha="right", va="top", alpha=0.8, transform=place)
        self.highest = 0.0

    def expect(self, band: tuple[float, float] | None, texts: Callable[[float], str], without: str) -> None:
        """Show this range of what was predicted, or the words for none."""
        low, high = band or (0.0, 0.0)
        self.band.set_visible(band is not None)
        self.band.set_bounds(0, low, 1, high - low)
        ends = list(dict.fromkeys((texts(low), texts(high))))
        self.predicted.set_text(f"predicted {' to '.join(ends)}" if band else without)
        self.highest = high

    def _set_limit(self, limit: float, intervals: int, texts: Callable[[float], str]) -> None:
        self.limit = limit
        ticks = [limit * index / intervals for index in range(intervals + 1)]
        self.axes.set_ylim(0, limit)
        self.axes.set_yticks(ticks, [texts(tick) for tick in ticks])


class _MemoryPanel(_Panel):
    """Bytes per rank over steps; one line a rank and kind, told apart by colour and by dashes."""

    def __init__(self, figure: Figure, box: _Box, title: str, kinds: tuple[str, ...], world_size: int) -> None:
        super().__init__(figure, box, look.INK)
        self.title, self.kinds, self.intervals = title, kinds, 4 if box[3] > 0.4 else 2
        self.lines: dict[tuple[str, int], Any] = {}
        for kind in kinds:
            for rank in range(world_size):
                style: Any = {"linewidth": 0.9, "alpha": 0.6} if kind != kinds[0] else {"label": f"rank {rank}"}
                style["color"] = look.COLOURS[rank % len(look.COLOURS)]
                style["linestyle"] = look.DASHES[rank % len(look.DASHES)]
                (self.lines[kind, rank],) = self.axes.plot([], [], **style)
        self._add_band()
        self._limit(float(1 << 29))

    def _limit(self, limit_bytes: float) -> None:
        unit, factor = ("GiB", 1 << 30) if limit_bytes >= 1 << 30 else ("MiB", 1 << 20)
        intervals = 3 if math.log2(limit_bytes) % 1 and self.intervals > 2 else self.intervals
        self._set_limit(limit_bytes, intervals, lambda tick: f"{tick / factor:g}")
        self.axes.set_title(f"{self.title}, {unit}", y=1.0)

    def show(self, info: MemoryInfo) -> None:
        for (kind, rank), line in self.lines.items():
            line.set_data(*getattr(info, kind).get(rank, ((), ())))
        if math.isfinite(peak := info.peak(self.kinds[0])):
            self.note.set_text(f"peak {format_bytes(peak)}")
        drawn = [largest for kind in self.kinds if math.isfinite(largest := info.largest(kind))]
        needed = byte_limit(max([self.highest, *drawn]))
        if needed > self.limit:
            self._limit(needed)


_STEADY_STEPS, _SPIKE = 10, 4.0
"""After so many steps what is so many times the mean is a single step, and leaves the axis."""


class _SpeedPanel(_Panel):
    """Samples per second of all ranks together, with the mean after warm-up as a thin line."""

    def __init__(self, figure: Figure, box: _Box) -> None:
        super().__init__(figure, box, look.GREEN)
        self.axes.set_title("throughput, samples/s", y=1.0)
        self.axes.tick_params(labelbottom=False)
        (self.line,) = self.axes.plot([], [], color=look.INK, linewidth=1.4)
        (self.mean,) = self.axes.plot([], [], color=look.GREEN, linewidth=1.2, linestyle="--")
        self._add_band()
        self._limit(10.0)

    def _limit(self, limit: float) -> None:
        self._set_limit(limit, 5 if f"{limit:e}".startswith("5") else 2, format_count)

    def show(self, info: ThroughputInfo) -> None:
        self.line.set_data(info.steps, info.samples_per_second)
        if info.measured_steps:
            self.mean.set_data([info.warmup_steps, info.steps[-1]], [info.mean_samples_per_second] * 2)
            self.note.set_text(f"mean {format_count(info.mean_samples_per_second)}")
        most = max(filter(math.isfinite, info.samples_per_second), default=0.0)
        spiked = info.measured_steps >= _STEADY_STEPS and most > _SPIKE * info.mean_samples_per_second
        if spiked:
            self.note.set_text(f"mean {format_count(info.mean_samples_per_second)}, spikes to {format_count(most)}")
            most = _SPIKE * info.mean_samples_per_second
        needed = rate_limit(max(self.highest, most))
        if needed > self.limit or (spiked and needed <= self.limit / 2):
            self._limit(needed)


class _BandPanel(_Panel):
    """The share of each phase in the time of all ranks, step by step, stacked to 100 %."""

    def __init__(self, figure: Figure, box: _Box, named: list[str]) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.patches import Patch

        super().__init__(figure, box, look.VERMILION, x="step", grid="")
        self.axes.set_title("where the time goes, %", y=1.0)
        self.axes.set_ylim(0, 1)
        self.axes.set_yticks([0, 0.5, 1], ["0", "50", "100"])
        self.bands = {phase: PolyCollection([], facecolors=PHASE_COLOURS[phase], edgecolors="none") for phase in PHASES}
        for band in self.bands.values():
            self.axes.add_collection(band, autolim=False)
        patches = [Patch(facecolor=PHASE_COLOURS[phase], label=PHASE_LABELS[phase]) for phase in named]
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (_RIGHT, _LEGEND_TOP)}
        place |= {"fontsize": 7.5, "labelspacing": 0.1} if len(named) > _TWO_ROWS else {}
        figure.legend(handles=patches, handlelength=0.9, handleheight=0.9, **place, **_LEGEND)

    def show(self, info: ThroughputInfo) -> None:
        if info.measured_steps:
            self.note.set_text(f"data wait {info.data_wait_fraction:.0%}")
        steps = np.array(info.steps)
        edges = np.repeat(np.concatenate([[0.0], steps]), 2)[1:-1]  # each step is a column from the one before it
        bottom = np.zeros(len(steps))
        for phase in PHASES:
            top = bottom + np.nan_to_num(np.array(info.shares[phase]), posinf=0, neginf=0)
            upper = np.column_stack([edges, np.repeat(top, 2)])
            lower = np.column_stack([edges, np.repeat(bottom, 2)])
            self.bands[phase].set_verts([np.concatenate([upper, lower[::-1]])] if info.steps else [])
            bottom = top


def _box(left: float, low: float, high: float) -> _Box:
    """A rectangle of one column, from the fraction `low` to `high` of the drawing height."""
    height = _TOP - _BOTTOM
    return (left, _BOTTOM + low * height, _COLUMN, (high - low) * height)


def step_limit(last_step: int, max_steps: int) -> int:
    """All steps when there are few; else 50, 100, 200, 500, ..., so that the start of a long trial can be seen."""
    needed = max(last_step, 50)
    power = int(10 ** math.floor(math.log10(needed)))
    return min(max_steps, next(power * factor for factor in (1, 2, 5, 10) if power * factor >= needed))


def byte_limit(peak_bytes: float) -> float:
    """The smallest of 1, 1.5, 2, 3, 4, 6, ... times a power of two with a tenth to spare above the peak."""
    needed = max(peak_bytes * 1.1, 1.0)
    power = 2.0 ** math.floor(math.log2(needed))
    return next(power * factor for factor in (1, 1.5, 2, 3) if power * factor >= needed)


def rate_limit(peak: float) -> float:
    """The smallest of 1, 2, 5, 10, ... with a twentieth to spare above the peak."""
    needed = max(peak * 1.05, 1e-3)
    power = 10.0 ** math.floor(math.log10(needed))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= needed)


EQUAL_FRACTION = 1e-6
_LOSS_INCHES, _LINE_INCHES = 3.0, 0.18
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
    samples: tuple[float, ...] = ()
    """Samples of the batch of each value; empty where they are not known."""

    @property
    def drawn(self) -> tuple[float, ...]:
        """The values with that of a batch of fewer samples, as an epoch's last, taken together with the one before."""
        if not self.samples or min(self.samples) == max(self.samples):
            return self.values
        full, found = max(self.samples), list(self.values)
        for place, samples in enumerate(self.samples):
            if place and samples < full:
                before, kept = self.values[place - 1], full - samples
                found[place] = (self.values[place] * samples + before * kept) / full
        return tuple(found)

    @property
    def means(self) -> list[tuple[int, int, float]]:
        """(first batch, last batch, mean loss) of each epoch; empty for few epochs, and for epochs of few batches."""
        places = range(self.first + 1, self.first + 1 + len(self.values))
        rows = zip(self.epochs, places, self.values, self.samples or (1.0,) * len(self.values), strict=False)
        parts = [list(part) for _, part in groupby(rows, itemgetter(0))]
        if len(parts) < _LEAST_EPOCHS or len(parts[0]) < _LEAST_BATCHES:
            return []
        return [(part[0][1], part[-1][1], fmean([row[2] for row in part], [row[3] for row in part])) for part in parts]


@dataclass(frozen=True, slots=True)
class LossInfo:
    """Runs, and the first of them, with which the others are compared."""

    runs: tuple[Losses, ...]

    def common(self, other: Losses) -> list[tuple[float, float]]:
        """(loss of the first, loss of `other`) of every batch that both have."""
        base = self.runs[0]
        begin = max(base.first, other.first)
        return list(zip(base.values[begin - base.first :], other.values[begin - other.first :], strict=False))

    def difference(self, other: Losses) -> float:
        """The largest one, as a fraction of the first's loss; NaN without a common batch."""

        def apart(one: float, two: float) -> float:
            if one == two or (math.isnan(one) and math.isnan(two)):
                return 0.0
            fraction = abs(one - two) / abs(one) if one else math.inf
            return math.inf if math.isnan(fraction) else fraction

        return max((apart(one, two) for one, two in self.common(other)), default=math.nan)

    @property
    def sentence(self) -> str:
        """The result of the comparison, a line for each of the others."""
        base, lines = self.runs[0].name, []
        for other in self.runs[1:]:
            count, apart = len(self.common(other)), self.difference(other)
            batches = f"over {count} batch" + "es" * (count > 1)
            if not count:
                lines.append(f"{other.name} has no batch in common with {base}")
            elif apart <= EQUAL_FRACTION:
                lines.append(f"{other.name} has {'exactly ' if apart == 0 else ''}the losses of {base}, {batches}")
            else:
                lines.append(f"{other.name} is up to {apart:.2g} of the loss away from {base}, {batches}")
        return "\n".join(lines) or f"losses of {base}"


def loss_info(*runs: Trial | CommittedRun | Sequence[float]) -> LossInfo:
    """The losses of these runs.

    Raises:
        ConfigError: for nothing to draw, and for a run without losses.
    """
    if not runs:
        raise ConfigError([Problem("runs", "none to draw; give a trial and what committed.run() returned")])
    several = sum(isinstance(run, Trial) for run in runs) > 1
    found = tuple(_losses(run, place, several) for place, run in enumerate(runs, start=1))
    empty = [one.name for one in found if not one.values]
    if empty:
        raise ConfigError([Problem("runs", f"{empty[0]} has no losses: no batch of it has ended, or it returned none")])
    return LossInfo(found)


def loss_figure(*runs: Trial | CommittedRun | Sequence[float]) -> Figure:
    """Losses over batches, with what is equal in words.

    Args:
        runs: Trials, what `committed.run()` returned, or numbers; the others are held against the first.

    Raises:
        ConfigError: for nothing to draw, and for a run without losses.
    """
    info = loss_info(*runs)
    height = _LOSS_INCHES + _LINE_INCHES * max(1, len(info.runs) - 1)
    figure = look.figure(7.6, height)
    place = (0.1, 0.5 / height, 0.86, (_LOSS_INCHES - 0.8) / height)
    axes = look.add_axes(figure, place, title=info.sentence, x="batch", y="loss")
    several = len(info.runs) > 1
    means = [] if several else info.runs[0].means
    with look.drawing():
        for place_of, run in enumerate(info.runs):
            line: dict[str, Any] = {"linewidth": 6.0, "alpha": 0.35} if several and not place_of else {"linewidth": 1.4}
            line = {"linewidth": 0.8, "alpha": 0.4} if means else line
            line["linestyle"] = look.DASHES[max(0, place_of - 1) % len(look.DASHES)]
            batches = range(run.first + 1, run.first + 1 + len(run.values))
            colour, label = look.COLOURS[place_of % len(look.COLOURS)], "each batch" if means else run.name
            axes.plot(batches, run.drawn, color=colour, label=label, **line)
        if means:
            middles = [(first + last) / 2 for first, last, _ in means]
            axes.plot(middles, [mean for *_, mean in means], color=look.BLUE, linewidth=2.0, label="mean of an epoch")
        if several or means:
            axes.legend(loc="best")
        axes.set_xlim(0.5, max(run.first + len(run.values) for run in info.runs) + 0.5)
    return figure


def _losses(run: Any, place: int, several: bool) -> Losses:
    if isinstance(run, Trial):
        run.poll()
        batches = losses_of(run.steps)
        epochs = tuple(batch.epoch for batch in batches if batch.epoch is not None)
        return Losses(
            f"trial {place}" if several else "the trial", tuple(batch.loss for batch in batches),
            epochs=epochs if len(epochs) == len(batches) else (), samples=tuple(batch.samples for batch in batches),
        )  # fmt: skip
    if isinstance(run, CommittedRun):
        return Losses("the committed run", tuple(run.losses), run.first_batch)
    return Losses(f"run {place}", tuple(map(float, run)))


_MOST_BARS, _MOST_RANKS, _LETTERS_OF_TITLE = 120, 8, 74
_LEAST_WRITTEN = 0.08
"""Share from which on its number fits into its bar."""


def timing_figure(trial: Trial | str | Path | Timing, *, rank: int | None = None) -> Figure:
    """Stacked bars of every batch, and the totals of each rank.

    Args:
        trial: A trial, its run directory, or its `kit.studies.timing`.
        rank: Whose batches; by default the slowest's.

    Raises:
        TrialError: when no step was finished, or there is no such rank.
    """
    found = trial if isinstance(trial, Timing) else timing(trial)
    means = {rank: ranked.mean_step_seconds for rank, ranked in found.ranks.items()}
    shown = rank if rank is not None else max(means, key=lambda rank: means[rank] if math.isfinite(means[rank]) else 0)
    if shown not in found.ranks:
        raise TrialError(f"{found.name} has no rank {rank}; it has {', '.join(map(str, found.ranks))}")
    chart = look.figure(7.8, 3.3)
    batches = look.add_axes(chart, (0.085, 0.25, 0.50, 0.56), x="batch")
    totals = look.add_axes(chart, (0.665, 0.25, 0.31, 0.56), x="share of the time after warm-up, %", grid="x")
    with look.drawing():
        is_long = len(found.sentence) > _LETTERS_OF_TITLE
        look.finding(chart, found.sentence.replace("; ", ";\n", 1) if is_long else found.sentence)
        _draw_batches(batches, found, shown)
        _draw_totals(totals, found)
        phases = [phase for phase in PHASES if found.together.seconds[phase] > 0] or list(PHASES)
        look.colour_key(chart, {PHASE_LABELS[phase]: PHASE_COLOURS[phase] for phase in phases})
    return chart


def _draw_batches(axes: Axes, found: Timing, rank: int) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in found.rows if row["rank"] == rank]
    width = math.ceil(len(rows) / _MOST_BARS)
    groups = [rows[start : start + width] for start in range(0, len(rows), width)]
    places = [(group[0]["batch"] + group[-1]["batch"]) / 2 for group in groups]
    slowest = max((_mean(group, "step_seconds") for group in groups), default=0.0)
    factor, unit = (1.0, "s") if slowest >= 1 else (1e3, "ms")
    bottom = [0.0] * len(groups)
    for phase in PHASES:
        heights = [factor * _mean(group, f"{phase}_seconds") for group in groups]
        axes.bar(places, heights, 0.9 * width, bottom=bottom, color=PHASE_COLOURS[phase], linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    warm = [row["batch"] for row in rows if row["warmup"]]
    if warm:
        look.shade_warmup(axes, max(warm) + 0.5, 0.5)
    # Every bar after warm-up is seen whole; a first step ten times as long may leave through the top.
    steady = max(bottom[len(warm) // width :] or bottom)
    axes.set_xlim(0.5, max(row["batch"] for row in rows) + 0.5)
    axes.set_ylim(0, max(1e-6, min(max(bottom), 2.5 * steady)) * 1.06)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    whose = f" of rank {rank}" if len(found.ranks) > 1 else ""
    each = f", mean of {width}" if width > 1 else ""
    axes.set_title(f"each batch{whose}{each}, {unit}" + (" (device clock)" if found.clock == "device" else ""))


def _mean(group: Sequence[Mapping[str, Any]], name: str) -> float:
    return math.fsum(row[name] for row in group) / len(group)


def _draw_totals(axes: Axes, found: Timing) -> None:
    ranks = [*found.ranks.items()][:_MOST_RANKS]
    for place, (_, ranked) in enumerate(ranks):
        left = 0.0
        for phase, share in rounded_shares(ranked.shares).items():
            axes.barh(place, 100 * share, 0.7, left=left, color=PHASE_COLOURS[phase], linewidth=0)
            if share >= _LEAST_WRITTEN:
                axes.text(left + 50 * share, place, f"{share:.0%}", color="white", fontsize=8, ha="center", va="center")
            left += 100 * share
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank, _ in ranks])
    axes.tick_params(axis="y", length=0)
    more = f" (the first {_MOST_RANKS})" if len(found.ranks) > _MOST_RANKS else ""
    axes.set_title(f"in total{more}")
