"""StoreView: the store of a Config: how it is or would be cut, why, how large it is, and a button that builds it.

Planning and opening happen in a thread, so that a slow store never holds up a click; only the newest config is looked
at. The button builds, and while it builds it stops; a stopped build resumes where it was.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.config import Config
from kit.errors import KitError, UnfinishedStoreError
from kit.units import format_bytes
from kit.widgets.background import Latest
from kit.widgets.build_control import BuildControl

if TYPE_CHECKING:
    from kit.data.dataset import Dataset
    from kit.plan.chunks import ChunkPlan

_QUIET, _ERROR = "var(--jp-ui-font-color2, #666)", "var(--jp-error-color1, #b3261e)"


@dataclass(kw_only=True)
class StoreFacts:
    """What is known about the store of one config."""

    plan: ChunkPlan | None = None
    dataset: Dataset | None = None
    missing: str = ""
    """Why the store cannot be read as it is."""
    problem: str = ""
    """Why there is no plan."""
    size: str = ""
    """What a build would write."""
    hints: dict[str, str] = field(default_factory=dict)


class StoreView:
    """Plan, size and Build button; `look` turns them to a config, `facts` is what was found.

    Args:
        config: What is shown first.
        on_facts: Hears what was found.
        check: Raises a KitError while `config` is not what the settings show: then nothing is built.
    """

    def __init__(
        self,
        config: Config,
        on_facts: Callable[[StoreFacts], object] = lambda _: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.config, self.facts = config, StoreFacts()
        self._on_facts, self._check = on_facts, check
        self._looking = Latest("kit-look")
        self.summary = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.chart = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.control = BuildControl(self._clicked, lambda: self.look(self.config))
        self.button, self.progress, self._row = self.control.button, self.control.progress, self.control.ui
        self._row.layout.display = "none"
        self.ui = ipywidgets.VBox([self.summary, self.chart, self._row])
        self.look(config)

    # -- looking

    def look(self, config: Config) -> None:
        """Show the store of this config; returns at once, and `wait()` returns when it is shown."""
        self.config = config
        self._looking.submit(lambda: self._look(config))

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the newest config is shown and no build runs; False after `timeout` seconds."""
        return self._looking.wait(timeout) and self.control.wait(timeout) and self._looking.wait(timeout)

    def _look(self, config: Config) -> None:
        self._show(find_out(config))
        if self.facts.plan is not None and self.facts.dataset is None and config.data.source is not None:
            self.facts.size = expected_size(config, self.facts.plan)
            self._show(self.facts)

    def _show(self, facts: StoreFacts) -> None:
        self.facts = facts
        self.summary.value = summary_html(facts, self.config)
        self.chart.value = "" if facts.plan is None else _plan_html(facts.plan, opened=facts.dataset is None)
        can_build = facts.plan is not None and facts.dataset is None and self.config.data.source is not None
        self._row.layout.display = None if can_build or self.control.busy else "none"
        self._on_facts(facts)

    # -- building

    @property
    def building(self) -> bool:
        return self.control.busy

    def build(self) -> None:
        """Start building in a thread; returns at once.

        Raises:
            KitError: as `check` does.
        """
        self._check()
        self.control.build(self.config, self.facts.plan)

    def _clicked(self) -> None:
        """What a click on Build does; what went wrong stands beside it, and has no place in a log."""
        try:
            self.build()
        except KitError as error:
            self.control.say(f"not started: {error}", 0.0)

    def stop(self) -> None:
        """End the build after the shards now being written."""
        self.control.stop()


def find_out(config: Config, source: Any = None) -> StoreFacts:
    """Plan and store of a config, built from the source in hand where there is one; what is missing is said."""
    from kit.data.dataset import open_dataset
    from kit.data.layout import plan_chunks

    facts = StoreFacts()
    try:
        facts.dataset = open_dataset(config)
    except UnfinishedStoreError as error:
        facts.missing = str(error)
    except KitError as error:
        has_source = source is not None or config.data.source is not None
        facts.missing = f"{config.data.url}: not built yet" if has_source else str(error)
    try:
        facts.plan = plan_chunks(config, source=source)
        facts.hints = layout_hints(config, facts.plan)
    except KitError as error:
        facts.problem = str(error)
    except Exception as error:  # a source is the user's own code
        facts.problem = f"{type(error).__name__}: {error}"
    return facts


def expected_size(config: Config, plan: ChunkPlan, source: Any = None) -> str:
    """What a build would write, in words."""
    from kit.data.size import expected_bytes

    try:
        size = expected_bytes(config, plan, source=source)
    except KitError as error:
        return str(error)
    except Exception as error:  # a source is the user's own code
        return f"how large it will be is not known: {type(error).__name__}: {error}"
    raw, stored = format_bytes(size.raw_bytes), format_bytes(size.compressed_bytes)
    return f"{raw} of data, about {stored} stored in {size.objects:,} objects"


def layout_hints(config: Config, plan: ChunkPlan) -> dict[str, str]:
    """What `auto` came to, for the fields it stands in."""
    hints = {}
    if config.chunking.chunk == "auto":
        hints["chunking.chunk"] = f"{_sizes(plan, plan.chunk)} ({format_bytes(plan.chunk_bytes)})"
    if config.chunking.shard == "auto":
        whole = plan.shard_bytes
        hints["chunking.shard"] = (
            "none: one chunk fills it"
            if plan.shard is None or whole is None
            else f"{_sizes(plan, plan.shard)} ({format_bytes(whole)})"
        )
    return hints


def _sizes(plan: ChunkPlan, sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{name}: {size}" for name, size in zip(plan.dims, sizes, strict=True))


def summary_html(facts: StoreFacts, config: Config) -> str:
    """The state of the store in a line, with its size."""
    if facts.dataset is not None:
        words, note = f"{config.data.url} is built", _built_note(facts.dataset, facts.plan)
    else:
        words, note = facts.missing, facts.size
    text = f"<b>{html.escape(words)}</b> <span style='color:{_QUIET}'>{html.escape(note)}</span>"
    text = f"<div style='line-height:1.5'>{text}</div>"
    if facts.problem and facts.problem != facts.missing:
        text += f"<div role='alert' style='line-height:1.4;color:{_ERROR}'>{html.escape(facts.problem)}</div>"
    return text


def _built_note(dataset: Dataset, plan: ChunkPlan | None) -> str:
    arrays = list(dataset.arrays.values())
    note = f"{len(arrays)} variables, {format_bytes(sum(info.nbytes for info in arrays))} of data"
    if dataset.manifest is not None:
        note += f", {format_bytes(dataset.manifest.stored_bytes)} stored"
    cuts = {info.chunk for info in arrays if plan is not None and info.dims == plan.dims}
    if plan is not None and cuts and plan.chunk not in cuts:
        note += f". It is cut in chunks of {_sizes(plan, cuts.pop())}; another chunk needs another data.url"
    return note


def _plan_html(plan: ChunkPlan, opened: bool) -> str:
    from kit.report.chunk_chart import chunk_figure
    from kit.report.figure import svg

    headline = str(plan).splitlines()[0]
    chart = svg(chunk_figure(plan), f"Chunk sizes and what they cost. {headline}.")
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in plan.reasons)
    return (
        f"<details{' open' if opened else ''} style='line-height:1.4;margin:2px 0 6px'>"
        f"<summary style='cursor:pointer'>{html.escape(headline)}</summary>"
        f"{chart}<details><summary style='cursor:pointer'>why</summary>"
        f"<ul style='margin:2px 0;padding-left:1.4em'>{reasons}</ul></details></details>"
    )
