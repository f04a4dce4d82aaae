"""The chart of one trial: memory per rank beside throughput and where the time goes; numbers first, then the drawing.

`memory_info` and `throughput_info` turn events into plain numbers; `TrialChart` draws them into one kept figure of
fixed boxes, so that a live chart changes its lines and never its layout: limits start where they are and only grow, in
steps of a factor of at most two and a half. Bytes are shown in MiB or GiB, time as percent. Warm-up steps are shaded,
and left out of the averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kit.config import Config
from kit.events import Event
from kit.report import figure as look
from kit.report.trace import (
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
