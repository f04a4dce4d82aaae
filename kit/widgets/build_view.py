"""BuildView: one build, shown before it starts: what is there, how it is cut, who would build it in how much memory.

Everything is swapped in place; nothing here plans or builds. The table sets the scheduler chosen beside the others with
the same settings, so that a choice shows its price.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field

import ipywidgets

from kit.config import Config
from kit.data.build_plan import BuildPlan
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count
from kit.widgets.chunk_view import headline
from kit.widgets.store_view import StoreFacts, summary_html
from kit.widgets.trial_view import error_html

_COLUMNS = ("scheduler", "workers", "tasks", "at once", "memory of each", "allowed", "together", "read")
_ONE_PROCESS = "–"


@dataclass(kw_only=True)
class BuildFacts:
    """What is known of building one config."""

    config: Config
    store: StoreFacts
    plans: Mapping[str, BuildPlan] = field(default_factory=dict)
    """By scheduler: with the one of the config, and the others that would do."""
    problem: str = ""
    """Why it cannot be built as it is."""

    @property
    def plan(self) -> BuildPlan | None:
        """Of the scheduler chosen."""
        return self.plans.get(self.config.build.scheduler)

    @property
    def why_not(self) -> str:
        """Why nothing can be built; empty when something can, or is."""
        return "" if self.plan is not None or self.store.dataset is not None else self.problem or self.store.problem


class BuildView:
    """State of the target, layout, table of schedulers, and reasons."""

    def __init__(self) -> None:
        self.facts: BuildFacts | None = None
        self.summary, self.layout, self.table, self.reasons = (_line() for _ in range(4))
        self.error = ipywidgets.HTML(layout={"margin": "0", "display": "none"})
        self.ui = ipywidgets.VBox([self.summary, self.error, self.layout, self.table, self.reasons])
        self.ui.layout.width = "100%"

    def show(self, facts: BuildFacts) -> None:
        """Show these facts in place of others."""
        self.facts = facts
        self.summary.value = summary_html(facts.store, facts.config)
        self.layout.value = _layout_html(facts)
        self.table.value = f"<div style='overflow-x:auto;line-height:1.4'>{plans_html(facts)}</div>" * bool(facts.plans)
        self.reasons.value = "" if facts.plan is None else _reasons_html(facts.plan)
        self.error.value = error_html(facts.problem, "", []) if facts.problem else ""
        self.error.layout.display = None if facts.problem else "none"

    @property
    def still(self) -> str:
        """What is shown, as HTML that stands without a kernel."""
        parts = (self.summary, self.error, self.layout, self.table, self.reasons)
        return "".join(part.value for part in parts)


def plans_html(facts: BuildFacts) -> str:
    """The schedulers side by side, the chosen one marked."""
    rows = [_row(name, plan) for name, plan in facts.plans.items()]
    chosen = facts.config.build.scheduler
    place = [*facts.plans].index(chosen) if chosen in facts.plans else None
    return html_table(_COLUMNS, rows, caption="before anything is written", marked=place, dense=True)


def plans_text(facts: BuildFacts) -> str:
    """The same as aligned text."""
    return text_table(_COLUMNS, [_row(name, plan) for name, plan in facts.plans.items()])


def _row(name: str, plan: BuildPlan) -> list[str]:
    workers = str(plan.slots.processes or "all") if name == "distributed" else _ONE_PROCESS
    ratio = f" ({plan.read_ratio:.2f} ×)" if plan.read_ratio >= 1.005 else ""
    return [
        name, workers, format_count(plan.tasks), str(plan.threads), format_bytes(plan.peak_bytes),
        format_bytes(plan.memory_bytes), format_bytes(plan.total_bytes), format_bytes(plan.read_bytes) + ratio,
    ]  # fmt: skip


def _layout_html(facts: BuildFacts) -> str:
    plan = facts.store.plan
    if plan is None or facts.store.dataset is not None:
        return ""
    text = html.escape(headline(plan)[0])
    return (
        f"<details style='line-height:1.4;margin:2px 0'><summary style='cursor:pointer'>{text}</summary>"
        f"{html_list(plan.reasons)}</details>"
    )


def _reasons_html(plan: BuildPlan) -> str:
    return f"<div style='line-height:1.4'><b>why</b>{html_list(plan.reasons)}</div>"


def _line() -> ipywidgets.HTML:
    return ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
