"""ChunkView: one chunk plan, shown: the choice in words, its trade-off drawn, the candidates it beat, and why.

Everything is swapped in place; nothing here plans, reads or measures. Measured samples/s stand beside the predicted
ones in the table and as diamonds in the chart, for as long as they belong to what is planned.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

import ipywidgets

from kit.plan.chunk_plan import ChunkPlan, named
from kit.plan.cost import LayoutCost
from kit.report import figure as look
from kit.report.chunk_chart import Measured, chunk_figure
from kit.tables import html_list, html_table
from kit.units import format_bytes, format_count
from kit.widgets.trial_view import error_html

Measurements = Mapping[tuple[int, ...], Measured]
"""What layouts really gave, by chunk."""

_QUIET = "var(--jp-ui-font-color2, #666)"
_SHOWN_ROWS = 8


class ChunkView:
    """The words, the chart and the table of a plan."""

    def __init__(self) -> None:
        self.plan: ChunkPlan | None = None
        self.measured: Measurements = {}
        self.headline, self.status, self.chart, self.table, self.reasons = (_line() for _ in range(5))
        self.error = ipywidgets.HTML(layout={"margin": "0", "display": "none"})
        self.ui = ipywidgets.VBox([self.headline, self.error, self.chart, self.table, self.reasons])
        self.ui.layout.width = "100%"

    def show(self, plan: ChunkPlan, measured: Measurements) -> None:
        """Show this plan; what was measured of other patterns is not to be among `measured`."""
        self.plan, self.measured = plan, measured
        self.show_error("")
        choice, rate = headline(plan)
        style = "font-size:1.15em;line-height:1.5"
        self.headline.value = f"<div style='{style}'><b>{html.escape(choice)}</b><br>{html.escape(rate)}</div>"
        label = f"Chunk sizes and what they cost. {choice}: {rate}."
        drawn = look.svg(chunk_figure(plan, measured=measured.values()), label)
        self.chart.value = f"<div style='line-height:0'>{drawn}</div>"
        self.table.value = candidates_html(plan, measured)
        self.reasons.value = f"<div style='line-height:1.4'><b>why</b>{html_list(plan.reasons)}</div>"

    def say(self, words: str) -> None:
        """One line on what goes on."""
        style = f"line-height:1.4;color:{_QUIET}"
        self.status.value = f"<div role='status' aria-live='polite' style='{style}'>{html.escape(words)}</div>"

    def show_error(self, message: str) -> None:
        """Say what went wrong; an empty message clears the box."""
        self.error.value = error_html(message, "", []) if message else ""
        self.error.layout.display = None if message else "none"

    def png(self) -> bytes | None:
        """The chart on white; None before there is a plan."""
        if self.plan is None:
            return None
        return look.png(chunk_figure(self.plan, measured=self.measured.values()), 2 * look.PIXELS_PER_INCH)


def headline(plan: ChunkPlan) -> tuple[str, str]:
    """(the layout, what it is predicted to give) in words."""
    shard = "each an object" if plan.shard is None else f"in shards of {named(plan.dims, plan.shard)}"
    each = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    rate = f"{format_count(plan.samples_per_second)} samples/s predicted{each}, bound by {plan.bound}"
    return f"chunks of {named(plan.dims, plan.chunk)}, {shard}", rate


def candidates_html(plan: ChunkPlan, measured: Measurements) -> str:
    """The best candidate of each size around the choice, with its rank among all that were considered."""
    ladder = plan.ladder
    place = ladder.index(plan.chosen)
    start = max(0, min(place - _SHOWN_ROWS // 2, len(ladder) - _SHOWN_ROWS))
    shown = ladder[start : start + _SHOWN_ROWS]
    others = [cost for cost in plan.candidates if cost.chunk in measured and cost not in shown]
    shown = tuple(sorted((*shown, *others), key=lambda cost: cost.chunk_bytes))
    columns = ["chunk", "rank", "size", "requests/sample", "read/sample", "samples/s", "bound by"]
    columns += ["as built", "measured", "ratio"] if measured else []
    rows = [_row(plan, cost, measured) for cost in shown]
    caption = f"{len(plan.candidates)} layouts considered, by size"
    table = html_table(columns, rows, caption=caption, marked=shown.index(plan.chosen), mark="this plan", dense=True)
    return f"<div style='overflow-x:auto;line-height:1.4'>{table}</div>"


def _row(plan: ChunkPlan, cost: LayoutCost, measured: Measurements) -> list[str]:
    return [
        "×".join(map(str, cost.chunk)), str(plan.candidates.index(cost) + 1), format_bytes(cost.chunk_bytes),
        f"{cost.requests_per_batch / plan.batch_size:.3g}",
        format_bytes(cost.stored_bytes_per_batch / plan.batch_size), format_count(cost.samples_per_second),
        cost.bound if cost.fits else "does not fit", *(_found(measured.get(cost.chunk)) if measured else []),
    ]  # fmt: skip


def _found(one: Measured | None) -> list[str]:
    """What was predicted of the store as it was built, its shards counted, what it gave, and their ratio."""
    if one is None:
        return ["–", "–", "–"]
    speeds = (one.predicted_samples_per_second, one.samples_per_second)
    return [*map(format_count, speeds), f"{speeds[1] / speeds[0]:.2f}"]


def _line() -> ipywidgets.HTML:
    return ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
