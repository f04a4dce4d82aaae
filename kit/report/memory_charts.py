"""Charts of memory: what fills a device at the peak, and what it holds over time, predicted beside measured.

`breakdown_figure` compares estimates as stacked bars, `timeline_figure` shows one of them from moment to moment, and
`memory_figure` has both below each other. They give a `matplotlib.figure.Figure` and take what `kit.predict_memory`
returns, or a trial, which brings its prediction and its measurement along. Their numbers come from
`memory_breakdown.breakdown_info` and `memory_timeline.timeline_info`, their colours from `memory_look`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kit.report import figure as look
from kit.report.memory_bar import legend_lines
from kit.report.memory_breakdown import WIDTH_INCHES, BreakdownChart, breakdown_height, breakdown_info, draw_breakdown
from kit.report.memory_timeline import TimelineChart, draw_timeline, timeline_height, timeline_info
from kit.report.trial_memory import measured_of, predicted_of
from kit.run.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kit.plan.memory.estimate import MemoryEstimate
    from kit.plan.memory.measured import Measured

__all__ = ["breakdown_figure", "memory_figure", "timeline_figure"]


def breakdown_figure(
    estimates: MemoryEstimate | Trial | Sequence[MemoryEstimate] | Mapping[str, MemoryEstimate],
    measured: int | Sequence[int | None] | None = None,
) -> Figure:
    """What fills the device at the peak, one stacked bar per estimate, with the measured peak below it if there is one.

    Args:
        estimates: One, a list, a mapping whose keys are written above the bars, or a trial.
        measured: Measured allocated peaks in bytes, in the same order; None for those without.

    Raises:
        TrialError: for a trial without a prediction.
    """
    if isinstance(estimates, Trial):
        found = measured_of(estimates)
        return draw_breakdown({"": predicted_of(estimates)}, [None if found is None else found.peak_bytes])
    if isinstance(estimates, Mapping):
        named = dict(estimates)
    else:
        listed = list(estimates) if isinstance(estimates, Sequence) else [estimates]
        named = {str(place) if len(listed) > 1 else "": estimate for place, estimate in enumerate(listed, 1)}
    peaks = [measured] if measured is None or isinstance(measured, int) else list(measured)
    return draw_breakdown(named, peaks)


def timeline_figure(subject: MemoryEstimate | Trial, measured: Measured | None = None) -> Figure:
    """Allocated bytes over two optimizer steps, stacked by category, with the peak marked and named.

    Args:
        subject: What was predicted, or a trial, which has been predicted and measured.
        measured: What the allocator did in a real fit, laid over the prediction: both are drawn against the bytes
            allocated so far, a clock they share.

    Raises:
        TrialError: for a trial without a prediction.
    """
    return draw_timeline(timeline_info(*_predicted_and_measured(subject, measured)))


def memory_figure(subject: MemoryEstimate | Trial, measured: Measured | None = None) -> Figure:
    """The breakdown at the peak above the timeline, with one legend; takes and raises what `timeline_figure` does."""
    estimate, measured = _predicted_and_measured(subject, measured)
    peak = None if measured is None else measured.peak_bytes
    info = breakdown_info(estimate, measured_bytes=peak, above_timeline=True)
    lines, with_bar = legend_lines([info]), measured is not None
    heights = breakdown_height(1, measured=with_bar, legend_lines=lines), timeline_height(0)
    whole = look.figure(WIDTH_INCHES, sum(heights))
    with look.drawing():
        grid = whole.add_gridspec(2, 1, height_ratios=heights, left=0, right=1, bottom=0, top=1, hspace=0)
        upper, lower = (whole.add_subfigure(cell) for cell in (grid[0], grid[1]))
    BreakdownChart(1, measured=with_bar, legend_lines=lines, figure=upper).show([info])
    TimelineChart(figure=lower).show(timeline_info(estimate, measured))
    return whole


def _predicted_and_measured(
    subject: MemoryEstimate | Trial, measured: Measured | None
) -> tuple[MemoryEstimate, Measured | None]:
    if isinstance(subject, Trial):
        return predicted_of(subject), measured or measured_of(subject)
    return subject, measured
