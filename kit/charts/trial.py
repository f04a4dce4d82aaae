"""The chart of one trial: memory per rank beside throughput and where the time goes; numbers first, then the drawing.

`memory_info` and `throughput_info` turn events into plain numbers; `TrialChart` draws them into one kept figure of
fixed boxes, so that a live chart changes its lines and never its layout: limits start where they are and only grow, in
steps of a factor of at most two and a half. Bytes are shown in MiB or GiB, time as percent. Warm-up steps are shaded,
and left out of the averages.

loss_figure: the losses of several runs of the same thing, batch by batch, and whether they are equal.

Trials, committed runs or plain numbers, in any mixture; each is rank 0's, without Lightning's division by accumulation.
The first of several is drawn broad and pale, the others thin on top of it, so that equal ones cover each other. What
they have in common is compared: the largest difference over the common batches, as a fraction of the first's loss.
Differences up to `EQUAL_FRACTION` are of the last digits of 32-bit numbers.

Batches of one trial differ as their samples do: a trial alone that went through many epochs is drawn pale, and the
mean of each epoch on top of it.

The chart of a trial's timing: each batch as a stacked bar, and beside it what every rank spent its time on in total.

Batches are those of the slowest rank, unless another is asked for; more than can be told apart are averaged in groups.
Warm-up is shaded, and left out of the totals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.committed.run import CommittedRun
from kit.config import Config
from kit.errors import ConfigError, Problem, TrialError
from kit.events import Event, number
from kit.records.timing import RankTiming, Timing, rounded_shares, timing
from kit.records.trace import (
    PHASE_LABELS,
    PHASES,
    MemoryInfo,
    Series,
    ThroughputInfo,
    Trace,
    memory_info,
    throughput_info,
    trace_of,
)
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MemoryInfo", "ThroughputInfo", "TrialChart", "memory_info", "throughput_info", "trial_figure"]

_Box = tuple[float, float, float, float]
WIDTH_INCHES, HEIGHT_INCHES = 7.8, 3.4
PHASE_COLOURS = {
    "wait": look.VERMILION, "transfer": look.ORANGE, "forward": look.SKY, "backward": look.BLUE,
    "optimizer": look.GREEN, "communication": look.PURPLE, "validation": look.YELLOW, "other": "#999999",
}  # fmt: skip
_LEFT, _RIGHT, _COLUMN, _BOTTOM, _TOP = 0.075, 0.575, 0.40, 0.25, 0.905
_LEGEND_TOP, _LABELLED_RANKS = 0.118, 5
_TWO_ROWS = 6
"""Names that fit into two rows of the legend."""
_LEGEND: dict[str, Any] = {"ncols": 3, "columnspacing": 1.5, "handletextpad": 0.6, "borderaxespad": 0.2}


class TrialChart:
    """One figure of a trial, made once and fed events; `svg()` and `png()` are pictures of what it has so far."""

    def __init__(self, config: Config, world_size: int = 1, has_device: bool = False) -> None:
        self.trace = Trace(config.trial.warmup_steps, config.trial.max_steps, world_size)
        self.figure = look.figure(WIDTH_INCHES, HEIGHT_INCHES)
        self._steps = step_limit(0, self.trace.max_steps)
        with look.drawing():
            self._memory = _memory_panels(self.figure, world_size, has_device)
            _rank_legend(self.figure, self._memory[0], world_size)
            self._speed = _SpeedPanel(self.figure, _box(_RIGHT, 0.47, 1.0))
            self._band = _BandPanel(self.figure, _box(_RIGHT, 0.0, 0.30), _phases(config, world_size))
            for axes in self._all_axes():
                _shade_warmup(axes, self.trace.warmup_steps)
                _limit_steps(axes, self._steps)

    def _all_axes(self) -> list[Axes]:
        return [*(panel.axes for panel in self._memory), self._speed.axes, self._band.axes]

    def add(self, events: Iterable[Event]) -> None:
        """Take in new events; nothing is drawn until a picture is asked for."""
        self.trace.add(events)

    def svg(self) -> str:
        """The chart as inline SVG that takes its colours from the page."""
        memory, throughput = self._update()
        return look.svg(self.figure, f"{memory.sentence} {throughput.sentence}")

    def png(self, pixels_per_inch: int = look.PIXELS_PER_INCH) -> bytes:
        """The chart as a PNG on white."""
        self._update()
        return look.png(self.figure, pixels_per_inch)

    def _update(self) -> tuple[MemoryInfo, ThroughputInfo]:
        memory, throughput = self.trace.memory(), self.trace.throughput()
        with look.drawing():
            limit = step_limit(self.trace.last_step, self.trace.max_steps)
            if limit != self._steps:
                self._steps = limit
                for axes in self._all_axes():
                    _limit_steps(axes, self._steps)
            for panel in self._memory:
                panel.show(memory)
            self._speed.show(throughput)
            self._band.show(throughput)
        return memory, throughput


def trial_figure(events: Iterable[Event], config: Config) -> Figure:
    """The finished chart of the events of one trial."""
    events = list(events)
    known = trace_of(events, config)
    chart = TrialChart(config, known.world_size or 1, known.memory().has_device)
    chart.add(events)
    chart._update()
    return chart.figure


class _MemoryPanel:
    """Bytes per rank over steps; one line a rank and kind, told apart by colour and by dashes."""

    def __init__(self, figure: Figure, box: _Box, title: str, kinds: tuple[str, ...], world_size: int) -> None:
        self.title, self.kinds, self.limit_bytes = title, kinds, float(1 << 29)
        self.axes = look.add_axes(figure, box)
        self.lines = {
            (kind, rank): self.axes.plot([], [], **_line_look(rank, thin=index > 0))[0]
            for index, kind in enumerate(kinds)
            for rank in range(world_size)
        }
        self.note = _note(self.axes, look.INK)
        self.intervals = 4 if box[3] > 0.4 else 2
        self._limit()

    def _limit(self) -> None:
        unit, factor = ("GiB", 1 << 30) if self.limit_bytes >= 1 << 30 else ("MiB", 1 << 20)
        intervals = 3 if math.log2(self.limit_bytes) % 1 and self.intervals > 2 else self.intervals
        _limit_values(self.axes, self.limit_bytes, intervals, lambda tick: f"{tick / factor:g}")
        self.axes.set_title(f"{self.title}, {unit}", y=1.0)

    def show(self, info: MemoryInfo) -> None:
        for (kind, rank), line in self.lines.items():
            series: dict[int, Series] = getattr(info, kind)
            line.set_data(*series.get(rank, ((), ())))
        if math.isfinite(peak := info.peak(self.kinds[0])):
            self.note.set_text(f"peak {format_bytes(peak)}")
        drawn = [largest for kind in self.kinds if math.isfinite(largest := info.largest(kind))]
        needed = byte_limit(max(drawn, default=0))
        if needed > self.limit_bytes:
            self.limit_bytes = needed
            self._limit()


class _SpeedPanel:
    """Samples per second of all ranks together, with the mean after warm-up as a thin line."""

    def __init__(self, figure: Figure, box: _Box) -> None:
        self.axes = look.add_axes(figure, box)
        self.axes.set_title("throughput, samples/s", y=1.0)
        self.axes.tick_params(labelbottom=False)
        self.limit = 10.0
        (self.line,) = self.axes.plot([], [], color=look.INK, linewidth=1.4)
        (self.mean,) = self.axes.plot([], [], color=look.GREEN, linewidth=1.2, linestyle="--")
        self.note = _note(self.axes, look.GREEN)
        self._limit()

    def _limit(self) -> None:
        _limit_values(self.axes, self.limit, 5 if f"{self.limit:e}".startswith("5") else 2, format_count)

    def show(self, info: ThroughputInfo) -> None:
        self.line.set_data(info.steps, info.samples_per_second)
        if info.measured_steps:
            self.mean.set_data([info.warmup_steps, info.steps[-1]], [info.mean_samples_per_second] * 2)
            self.note.set_text(f"mean {format_count(info.mean_samples_per_second)}")
        needed = rate_limit(max((rate for rate in info.samples_per_second if math.isfinite(rate)), default=0))
        if needed > self.limit:
            self.limit = needed
            self._limit()


class _BandPanel:
    """Where the time of all ranks goes, step by step, stacked to 100 %."""

    def __init__(self, figure: Figure, box: _Box, named: list[str]) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.patches import Patch

        self.axes = look.add_axes(figure, box, x="step", grid="")
        self.axes.set_title("where the time goes, %", y=1.0)
        self.axes.set_ylim(0, 1)
        self.axes.set_yticks([0, 0.5, 1], ["0", "50", "100"])
        self.note = _note(self.axes, look.VERMILION)
        self.bands = {}
        for phase in PHASES:
            self.bands[phase] = PolyCollection([], facecolors=PHASE_COLOURS[phase], edgecolors="none")
            self.axes.add_collection(self.bands[phase], autolim=False)
        patches = [Patch(facecolor=PHASE_COLOURS[phase], label=PHASE_LABELS[phase]) for phase in named]
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (_RIGHT, _LEGEND_TOP)}
        place |= {"fontsize": 7.5, "labelspacing": 0.1} if len(named) > _TWO_ROWS else {}
        figure.legend(handles=patches, handlelength=0.9, handleheight=0.9, **place, **_LEGEND)

    def show(self, info: ThroughputInfo) -> None:
        if info.measured_steps:
            self.note.set_text(f"data wait {info.data_wait_fraction:.0%}")
        bottom = [0.0] * len(info.steps)
        for phase in PHASES:
            shares = (share if math.isfinite(share) else 0.0 for share in info.shares[phase])
            top = [low + share for low, share in zip(bottom, shares, strict=True)]
            self.bands[phase].set_verts([_ribbon(info.steps, bottom, top)] if info.steps else [])
            bottom = top


def _phases(config: Config, world_size: int) -> list[str]:
    """Those that a trial of this config can spend time on."""
    absent = ["communication"] if world_size == 1 else []
    absent += [] if config.trial.validate_every_steps else ["validation"]
    return [phase for phase in PHASES if phase not in absent]


def _ribbon(steps: tuple[float, ...], bottom: list[float], top: list[float]) -> list[tuple[float, float]]:
    """The outline of one band, each step drawn as a column from the step before it to itself."""
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    before = 0.0
    for step, low, high in zip(steps, bottom, top, strict=True):
        upper += [(before, high), (step, high)]
        lower += [(before, low), (step, low)]
        before = step
    return upper + lower[::-1]


def _memory_panels(figure: Figure, world_size: int, has_device: bool) -> list[_MemoryPanel]:
    host = ("host_rss_bytes",)
    if not has_device:
        panel = _MemoryPanel(figure, _box(_LEFT, 0.0, 1.0), "host RSS per rank", host, world_size)
        return [_with_step_label(panel)]
    kinds = ("device_allocated_bytes", "device_reserved_bytes")
    device = _MemoryPanel(figure, _box(_LEFT, 0.47, 1.0), "device memory per rank", kinds, world_size)
    device.axes.tick_params(labelbottom=False)
    panel = _MemoryPanel(figure, _box(_LEFT, 0.0, 0.30), "host RSS per rank", host, world_size)
    return [device, _with_step_label(panel)]


def _with_step_label(panel: _MemoryPanel) -> _MemoryPanel:
    panel.axes.set_xlabel("step")
    return panel


def _box(left: float, low: float, high: float) -> _Box:
    """A rectangle of one column, from the fraction `low` to `high` of the drawing height."""
    height = _TOP - _BOTTOM
    return (left, _BOTTOM + low * height, _COLUMN, (high - low) * height)


def _line_look(rank: int, thin: bool) -> dict[str, Any]:
    colour, dashes = look.COLOURS[rank % len(look.COLOURS)], look.DASHES[rank % len(look.DASHES)]
    style: dict[str, Any] = {"color": colour, "linestyle": dashes}
    return {**style, "linewidth": 0.9, "alpha": 0.6} if thin else {**style, "label": f"rank {rank}"}


def _rank_legend(figure: Figure, panel: _MemoryPanel, world_size: int) -> None:
    lines = [line for line in panel.lines.values() if not str(line.get_label()).startswith("_")]
    notes = [f"and {world_size - _LABELLED_RANKS} more"] if world_size > _LABELLED_RANKS else []
    notes += ["thin: reserved"] if len(panel.lines) > len(lines) else []
    handles = [*(lines[:_LABELLED_RANKS] if world_size > 1 else []), *map(_blank, notes)]
    if handles:
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(_LEFT, _LEGEND_TOP), **_LEGEND)


def _blank(label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", label=label)


def _note(axes: Axes, colour: str) -> Any:
    """Words at the right end of the title line."""
    from matplotlib.transforms import ScaledTranslation

    above = ScaledTranslation(0, 8 / 72, axes.figure.dpi_scale_trans)
    return axes.text(1, 1, "", color=colour, fontsize=8.5, ha="right", va="baseline", transform=axes.transAxes + above)


def _limit_values(axes: Axes, limit: float, intervals: int, text: Callable[[float], str]) -> None:
    ticks = [limit * index / intervals for index in range(intervals + 1)]
    axes.set_ylim(0, limit)
    axes.set_yticks(ticks, [text(tick) for tick in ticks])


def _shade_warmup(axes: Axes, warmup_steps: int) -> None:
    if warmup_steps:
        axes.axvspan(0, warmup_steps, color=look.INK, alpha=0.07, linewidth=0, zorder=0)
        if axes.get_title(loc="left").startswith("throughput"):
            place = axes.get_xaxis_transform()
            axes.text(warmup_steps, 0.96, " warm-up", transform=place, fontsize=8, alpha=0.75, va="top")


def _limit_steps(axes: Axes, steps: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, steps)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))


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


TIMING_WIDTH_INCHES, TIMING_HEIGHT_INCHES = 7.8, 3.3
_MOST_BARS = 120
_MOST_RANKS = 8
_LEAST_WRITTEN = 0.08
"""Share from which on its number fits into its bar."""


def timing_figure(trial: Trial | str | Path | Timing, *, rank: int | None = None) -> Figure:
    """Stacked bars of every batch, and the totals of each rank.

    Args:
        trial: A trial, its run directory, or its `kit.timing`.
        rank: Whose batches; by default the slowest's.

    Raises:
        TrialError: when no step was finished, or there is no such rank.
    """
    found = trial if isinstance(trial, Timing) else timing(trial)
    shown = _slowest(found) if rank is None else rank
    if shown not in found.ranks:
        raise TrialError(f"{found.name} has no rank {rank}; it has {', '.join(map(str, found.ranks))}")
    chart = look.figure(TIMING_WIDTH_INCHES, TIMING_HEIGHT_INCHES)
    batches = look.add_axes(chart, (0.085, 0.25, 0.50, 0.56), x="batch")
    totals = look.add_axes(chart, (0.665, 0.25, 0.31, 0.56), x="share of the time after warm-up, %", grid="x")
    with look.drawing():
        chart.text(0.012, 0.93, found.sentence, fontsize=12.5, fontweight="bold", va="center")
        _draw_batches(batches, found, shown)
        _draw_totals(totals, found)
        _draw_key(chart, found)
    return chart


def _slowest(found: Timing) -> int:
    def seconds(item: tuple[int, RankTiming]) -> float:
        mean = item[1].mean_step_seconds
        return mean if math.isfinite(mean) else 0.0

    return max(found.ranks.items(), key=seconds)[0]


def _draw_batches(axes: Axes, found: Timing, rank: int) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in found.rows if row["rank"] == rank]
    width = math.ceil(len(rows) / _MOST_BARS)
    groups = [rows[start : start + width] for start in range(0, len(rows), width)]
    places = [_middle(group) for group in groups]
    slowest = max((_mean(group, "step_seconds") for group in groups), default=0.0)
    factor, unit = (1.0, "s") if slowest >= 1 else (1e3, "ms")
    bottom = [0.0] * len(groups)
    for phase in PHASES:
        heights = [factor * _mean(group, f"{phase}_seconds") for group in groups]
        axes.bar(places, heights, 0.9 * width, bottom=bottom, color=PHASE_COLOURS[phase], linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    warm = [row["batch"] for row in rows if row["warmup"]]
    if warm:
        axes.axvspan(0.5, max(warm) + 0.5, color=look.INK, alpha=0.07, linewidth=0, zorder=0)
    axes.set_xlim(0.5, max(row["batch"] for row in rows) + 0.5)
    axes.set_ylim(0, _limit(bottom, len(warm) // width))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    whose = f" of rank {rank}" if len(found.ranks) > 1 else ""
    each = f", mean of {width}" if width > 1 else ""
    axes.set_title(f"each batch{whose}{each}, {unit}" + (" (device clock)" if found.clock == "device" else ""))


def _middle(group: Sequence[Mapping[str, Any]]) -> float:
    """Where the bar of a group of batches stands."""
    return float(group[0]["batch"] + group[-1]["batch"]) / 2


def _mean(group: Sequence[Mapping[str, Any]], name: str) -> float:
    return math.fsum(row[name] for row in group) / len(group)


def _limit(heights: Sequence[float], warm: int) -> float:
    """Room for every bar after warm-up; a first step ten times as long may leave through the top."""
    steady = heights[warm:] or heights
    return max(1e-6, min(max(heights), 2.5 * max(steady))) * 1.06


def _draw_totals(axes: Axes, found: Timing) -> None:
    ranks = [*found.ranks.items()][:_MOST_RANKS]
    for place, (_, timing_) in enumerate(ranks):
        left = 0.0
        for phase, share in rounded_shares(timing_.shares).items():
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


def _draw_key(chart: Figure, found: Timing) -> None:
    from matplotlib.patches import Patch

    shown = [phase for phase in PHASES if found.together.seconds[phase] > 0] or list(PHASES)
    handles = [Patch(facecolor=PHASE_COLOURS[phase], label=PHASE_LABELS[phase]) for phase in shown]
    chart.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=len(handles), columnspacing=1.2,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5,
    )  # fmt: skip
