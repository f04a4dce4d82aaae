"""StoreView: the store of a Config: how it is or would be cut, why, how large it is, and a button that builds it.

Planning and opening happen in a thread, so that a slow store never holds up a click; only the newest config is looked
at. The button builds, and while it builds it stops; a stopped build resumes where it was.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ipywidgets

from kit.config import Config
from kit.errors import KitError, UnfinishedStoreError
from kit.units import format_bytes, format_seconds
from kit.widgets.background import Latest
from kit.widgets.trial_view import progress_html

if TYPE_CHECKING:
    from kit.data.dataset import Dataset
    from kit.plan.chunks import ChunkPlan

_UPDATES_PER_SECOND = 5
_QUIET, _ERROR = "var(--jp-ui-font-color2, #666)", "var(--jp-error-color1, #b3261e)"


class _StopBuildError(Exception):
    """Raised out of the progress report: the way to end a build between two shards."""


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
    """Plan, size and Build button; `look` turns them to a config, `facts` is what was found."""

    def __init__(self, config: Config, on_facts: Callable[[StoreFacts], object] = lambda _: None) -> None:
        self.config, self.facts = config, StoreFacts()
        self._on_facts = on_facts
        self._looking, self._building = Latest("kit-look"), Latest("kit-build")
        self._stop_build = threading.Event()
        self.summary = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.chart = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.progress = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.button = ipywidgets.Button(
            description="Build", icon="database", tooltip="write the store; stopped, it resumes where it was",
            layout={"width": "90px", "flex": "0 0 auto"},
        )  # fmt: skip
        self.button.on_click(lambda _: self._clicked())
        self._row = ipywidgets.HBox(
            [self.button, self.progress], layout={"align_items": "center", "grid_gap": "12px", "display": "none"}
        )
        self.ui = ipywidgets.VBox([self.summary, self.chart, self._row])
        self.look(config)

    # -- looking

    def look(self, config: Config) -> None:
        """Show the store of this config; returns at once, and `wait()` returns when it is shown."""
        self.config = config
        self._looking.submit(lambda: self._look(config))

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the newest config is shown and no build runs; False after `timeout` seconds."""
        return self._looking.wait(timeout) and self._building.wait(timeout) and self._looking.wait(timeout)

    def _look(self, config: Config) -> None:
        self._show(find_out(config))
        if self.facts.plan is not None and self.facts.dataset is None and config.data.source is not None:
            self.facts.size = _expected_size(config, self.facts.plan)
            self._show(self.facts)

    def _show(self, facts: StoreFacts) -> None:
        self.facts = facts
        self.summary.value = _summary_html(facts, self.config)
        self.chart.value = "" if facts.plan is None else _plan_html(facts.plan, opened=facts.dataset is None)
        can_build = facts.plan is not None and facts.dataset is None and self.config.data.source is not None
        self._row.layout.display = None if can_build or self._building.busy else "none"
        self._on_facts(facts)

    # -- building

    @property
    def building(self) -> bool:
        return self._building.busy

    def build(self) -> None:
        """Start building in a thread; returns at once."""
        self._stop_build.clear()
        self._say("starting …", 0.0)
        self.button.description, self.button.icon = "Stop", "stop"
        self._building.submit(lambda: self._build(self.config))

    def stop(self) -> None:
        """End the build after the shards now being written."""
        self._stop_build.set()

    def _clicked(self) -> None:
        if self._building.busy:
            self.stop()
        else:
            self.build()

    def _build(self, config: Config) -> None:
        from kit.data.build import build

        report = _Report(self._say, self._stop_build)
        try:
            build(config, self.facts.plan, progress=report)
            self._say("built", 1.0)
        except _StopBuildError:
            self._say("stopped; Build resumes where it was", 0.0)
        except KitError as error:
            self._say(f"not built: {error}", 0.0)
        except Exception as error:
            self._say(f"not built: {type(error).__name__}: {error}", 0.0)
        finally:
            self.button.description, self.button.icon = "Build", "database"
            self._looking.submit(lambda: self._look(self.config))

    def _say(self, words: str, fraction: float) -> None:
        self.progress.value = progress_html(words, fraction, "part built")


class _Report:
    """A progress report in words with the time left; raising from it ends the build."""

    def __init__(self, say: Callable[[str, float], None], stop: threading.Event) -> None:
        self._say, self._stop = say, stop
        self._first: tuple[float, int] | None = None
        self._next = 0.0

    def __call__(self, done: int, total: int, number_of_bytes: int) -> None:
        if self._stop.is_set():
            raise _StopBuildError
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now < self._next and done < total:
            return
        self._next = now + 1 / _UPDATES_PER_SECOND
        start, before = self._first
        left = (now - start) * (total - done) / (done - before) if done > before else 0.0
        note = f" · {format_seconds(round(left))} left" if left >= 1 else ""
        self._say(f"{done} of {total} shards, {format_bytes(number_of_bytes)}{note}", done / max(total, 1))


def find_out(config: Config) -> StoreFacts:
    """Plan and store of a config; what is missing is said, not raised."""
    from kit.data.dataset import open_dataset
    from kit.data.layout import plan_chunks

    facts = StoreFacts()
    try:
        facts.dataset = open_dataset(config)
    except UnfinishedStoreError as error:
        facts.missing = str(error)
    except KitError as error:
        facts.missing = f"{config.data.url}: not built yet" if config.data.source is not None else str(error)
    try:
        facts.plan = plan_chunks(config)
        facts.hints = layout_hints(config, facts.plan)
    except KitError as error:
        facts.problem = str(error)
    except Exception as error:  # a source is the user's own code
        facts.problem = f"{type(error).__name__}: {error}"
    return facts


def _expected_size(config: Config, plan: ChunkPlan) -> str:
    from kit.data.size import expected_bytes

    try:
        size = expected_bytes(config, plan)
    except KitError as error:
        return str(error)
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


def _summary_html(facts: StoreFacts, config: Config) -> str:
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
