"""StoreView: the store of a Config: whether it is there, how large it is or would be, and a button that builds it.

Planning and opening happen in a thread, so that a slow store never holds up a click; only the newest config is looked
at, and everything is swapped in place. `BuildView` shows the plan of a build, `BuildControl` carries one out,
`ChunkView` shows a chunk plan: they plan nothing themselves.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.charts import style as look
from kit.charts.chunks import MeasuredLayout, chunk_figure
from kit.chunks.cost import LayoutCost, slowest
from kit.chunks.search import ChunkPlan, named
from kit.config import Config
from kit.data.build.plan import BuildPlan
from kit.errors import KitError, UnfinishedStoreError, UnreachableStoreError
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds
from kit.widgets.live import Background, LatestOnlyWorker
from kit.widgets.parts import (
    ERROR,
    QUIET,
    WAITING_STYLE,
    AnswerView,
    button,
    error_words,
    folded_html,
    line,
    note_html,
    progress_html,
    row,
    turn_grey,
)

if TYPE_CHECKING:
    from kit.data.dataset import Dataset


_STILL_SECONDS = 0.3
"""A store that is known is looked at again when settings have not moved for so long."""


@dataclass(kw_only=True)
class StoreFacts:
    """What is known about the store of one config."""

    config: Config = field(default_factory=Config)
    plan: ChunkPlan | None = None
    dataset: Dataset | None = None
    missing: str = ""
    """Why the store cannot be read as it is."""
    problem: str = ""
    """Why there is no plan."""
    size: str = ""
    """What a build would write."""
    costs: tuple[LayoutCost, ...] = ()
    """Of reading the store as it is cut or, before it is built, as it is planned; add them up."""
    loading_seconds: float | None = None
    """Of a batch of the store where it lies; None before it is built."""
    in_folder: bool = False
    """Whether it lies in a folder: `costs` are then of the network that is planned for."""
    hints: dict[str, str] = field(default_factory=dict)


class StoreView:
    """State, size and Build button of the config that `look` was last given; its plan is among the facts.

    Args:
        config: What is shown first.
        on_facts: Called with the facts whenever they are new.
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
        self._looking = LatestOnlyWorker("kit-look")
        self.summary = line()
        self.control = BuildControl(self.build, lambda: self.look(self.config))
        self.button, self.progress, self._row = self.control.button, self.control.progress, self.control.ui
        self._row.layout.display = "none"
        self.ui = ipywidgets.VBox([self.summary, self._row])
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
        if self.facts.plan is not None:
            time.sleep(_STILL_SECONDS)
            if config is not self.config:  # it moves on: the newest is looked at
                return
        self._show(find_out(config))
        if self.facts.plan is not None and self.facts.dataset is None and config.data.source is not None:
            self.facts.size = expected_size(config, self.facts.plan)
            self._show(self.facts)

    def _show(self, facts: StoreFacts) -> None:
        self.facts = facts
        self.summary.value = summary_html(facts, self.config)
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

    def stop(self) -> None:
        """End the build after the shards now being written."""
        self.control.stop()


def find_out(config: Config, source: Any = None) -> StoreFacts:
    """Plan and store of a config, built from the source given if there is one; errors are among the facts."""
    from kit.data.build.layout import in_folders, plan_chunks, price_store
    from kit.data.open_dataset import open_dataset

    facts = StoreFacts(config=config)
    try:
        facts.dataset = open_dataset(config)
    except (UnfinishedStoreError, UnreachableStoreError) as error:
        facts.missing = str(error)
    except KitError as error:
        has_source = source is not None or config.data.source is not None
        facts.missing = f"{config.data.url}: not built yet" if has_source else str(error)
    try:
        facts.plan = plan_chunks(config, source=source)
        facts.hints = layout_hints(config, facts.plan)
        facts.costs = (
            (facts.plan.chosen,) if facts.dataset is None else price_store(config, facts.dataset, with_network=True)
        )
        if facts.dataset is not None:
            facts.in_folder = in_folders(config)
            here = price_store(config, facts.dataset) if facts.in_folder else facts.costs
            facts.loading_seconds = sum(cost.seconds_per_batch for cost in here)
    except Exception as error:  # a source is the user's own code
        facts.problem = error_words(error)
    return facts


def expected_size(config: Config, plan: ChunkPlan, source: Any = None) -> str:
    """What a build would write, in words."""
    from kit.data.build.layout import expected_bytes

    try:
        size = expected_bytes(config, plan, source=source)
    except KitError as error:
        return str(error)
    except Exception as error:  # a source is the user's own code
        return f"how large it will be is not known: {type(error).__name__}: {error}"
    raw, stored = format_bytes(size.raw_bytes), format_bytes(size.compressed_bytes)
    return f"{raw} of data, about {stored} stored in {size.objects:,} objects"


def layout_hints(config: Config, plan: ChunkPlan) -> dict[str, str]:
    """The sizes that `auto` came to, for the fields it stands in."""
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
    text = f"<b>{html.escape(words)}</b> <span style='color:{QUIET}'>{html.escape(note)}</span>"
    text = f"<div style='line-height:1.5'>{text}</div>"
    if facts.problem and facts.problem != facts.missing:
        text += f"<div role='alert' style='line-height:1.4;color:{ERROR}'>{html.escape(facts.problem)}</div>"
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


_COLUMNS = ("scheduler", "workers", "tasks", "at once", "memory of each", "allowed", "together", "read")
_ONE_PROCESS = "–"


@dataclass(kw_only=True)
class BuildFacts:
    """What is known of building one config."""

    config: Config
    store: StoreFacts
    plans: dict[str, BuildPlan] = field(default_factory=dict)
    """By scheduler: the one of the config, and every other that can build it."""
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


class BuildView(AnswerView):
    """A build before it starts: state of the target, layout, table of schedulers, and reasons.

    The table sets the scheduler of the config beside the others with the same settings, so that a choice shows its
    price.
    """

    def __init__(self) -> None:
        super().__init__()
        self.facts: BuildFacts | None = None
        self.summary, self.layout, self.table, self.reasons = (line() for _ in range(4))
        self.ui = ipywidgets.VBox([self.summary, self.error, self.layout, self.table, self.reasons])
        self.ui.layout.width = "100%"

    def show(self, facts: BuildFacts) -> None:
        """Show these facts in place of others."""
        self.facts = facts
        self.summary.value = summary_html(facts.store, facts.config)
        plan = facts.store.plan if facts.store.dataset is None else None
        style = "line-height:1.4;margin:2px 0"
        self.layout.value = folded_html(headline(plan)[0], html_list(plan.reasons), style=style) if plan else ""
        self.table.value = f"<div style='overflow-x:auto;line-height:1.4'>{plans_html(facts)}</div>" * bool(facts.plans)
        self.reasons.value = "" if facts.plan is None else _reasons_html(facts.plan.reasons)
        self.show_error(facts.problem)

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


def _reasons_html(reasons: Sequence[str]) -> str:
    return f"<div style='line-height:1.4'><b>why</b>{html_list(reasons)}</div>"


_UPDATES_PER_SECOND = 5


class _StopBuildError(Exception):
    """Raised out of the progress report: the way to end a build between two shards."""


class BuildControl(Background):
    """A button that builds a store and, while it builds, stops; beside it how far it is, and where to look.

    `build` returns at once; a thread does the work, and `wait` waits for it. Stopping ends a build between two shards,
    and building again resumes where it was. An error is kept in `error` and shown in the progress line, not raised.

    Args:
        on_click: Called by a click while nothing is built; it calls `build`. A KitError of it stands beside the button.
        on_end: Called when a build has ended, however it did.
    """

    def __init__(self, on_click: Callable[[], object], on_end: Callable[[], object]) -> None:
        self.dataset: Dataset | None = None
        """What the last build gave."""
        self.error: Exception | None = None
        """Why the last build failed; None for one that was stopped."""
        self._on_click, self._on_end = on_click, on_end
        super().__init__("kit-build")
        self._stop = threading.Event()
        self.progress, self.link = line(), line(width="auto", flex="0 0 auto")
        self.button = button("", "", "write the store; stopped, it resumes where it was")
        self._label(busy=False)
        self.button.on_click(lambda _: self._clicked())
        self.ui = row(self.button, self.progress, self.link)

    def build(self, config: Config, plan: ChunkPlan | None = None, source: Any = None) -> None:
        """Start building in a thread; returns at once."""
        self._stop.clear()
        self.dataset = self.error = None
        self.say("starting …", None)
        self._label(busy=True)
        self._latest.submit(lambda: self._build(config, plan, source))

    def stop(self) -> None:
        """End the build after the shards now being written."""
        if self.busy:
            self._stop.set()
            self.say("stopping after the shards being written …", None)

    def say(self, words: str, fraction: float | None) -> None:
        self.progress.value = progress_html(words, fraction, "part built")

    def show_link(self, url: str) -> None:
        """Where Dask shows what its workers do; empty when there are none."""
        address = html.escape(url, quote=True)
        link = f"<a href='{address}' target='_blank' style='text-decoration:underline'>Dask dashboard</a>"
        self.link.value = link if url.startswith("http") else ""

    def _clicked(self) -> None:
        try:
            if self.busy:
                self.stop()
            else:
                self._on_click()
        except KitError as error:
            self.say(f"not started: {error}", 0.0)

    def _build(self, config: Config, plan: ChunkPlan | None, source: Any) -> None:
        from kit.data.build.build import build

        began = time.monotonic()
        try:
            self.dataset = build(config, plan, source=source, progress=_Report(self, self._stop))
            self.say(f"built in {format_seconds(round(time.monotonic() - began, 1))}", 1.0)
        except _StopBuildError:
            self.say("stopped; Build resumes where it was", 0.0)
        except Exception as error:  # a source is the user's own code
            self.error = error
            self.say(f"not built: {error_words(error)}", 0.0)
        finally:
            self.show_link("")
            self._label(busy=False)
            self._on_end()

    def _label(self, busy: bool) -> None:
        self.button.description, self.button.icon, self.button.button_style = (
            ("Stop", "stop", "warning") if busy else ("Build", "database", "primary")
        )


class _Report:
    """A progress report in words with the time left; raising from it ends the build."""

    def __init__(self, control: BuildControl, stop: threading.Event) -> None:
        self._control, self._stop = control, stop
        self.begin("Building", "objects")

    def begin(self, verb: str, noun: str) -> None:
        """Count anew."""
        self._verb, self._noun = verb.lower(), noun
        self._first: tuple[float, int] | None = None
        self._next = 0.0

    def link(self, url: str) -> None:
        """Where the workers can be watched."""
        self._control.show_link(url)

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
        words = f"{self._verb}: {done} of {total} {self._noun}, {format_bytes(number_of_bytes)}{note}"
        self._control.say(words, done / max(total, 1))


Measurements = Mapping[tuple[int, ...], MeasuredLayout]
"""Measured samples/s of layouts, by chunk."""
_SHOWN_ROWS = 8


class ChunkView(AnswerView):
    """One chunk plan: the choice in words, its trade-off drawn, the candidates it beat, and why.

    Measured samples/s stand beside the predicted ones in the table and as diamonds in the chart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: ChunkPlan | None = None
        self.measured: Measurements = {}
        self.headline, self.chart, self.table, self.reasons = (line() for _ in range(4))
        style = line(WAITING_STYLE, display="none")
        self.ui = ipywidgets.VBox([self.headline, self.error, self.chart, self.table, self.reasons, style])
        self.ui.layout.width = "100%"

    def show(self, plan: ChunkPlan, measured: Measurements, built: Sequence[LayoutCost] = ()) -> None:
        """Show this plan; `measured` has measurements of its access pattern only, `built` prices the store there is."""
        self.plan, self.measured = plan, measured
        self.show_error("")
        self.wait_for_answer(False)
        choice, rate = headline(plan)
        style = "font-size:1.15em;line-height:1.5"
        words = f"<b>{html.escape(choice)}</b><br>{html.escape(rate)}"
        beside = note_html(built_words(plan, built), margin="0") if built else ""
        self.headline.value = f"<div style='{style}'>{words}</div>{beside}"
        label = f"Chunk sizes and what they cost. {choice}: {rate}."
        drawn = look.svg(chunk_figure(plan, measured=measured.values()), label)
        self.chart.value = f"<div style='line-height:0'>{drawn}</div>"
        self.table.value = candidates_html(plan, measured)
        self.reasons.value = _reasons_html(plan.reasons)

    def wait_for_answer(self, waits: bool = True) -> None:
        """Turn everything grey: it is not the plan of these settings."""
        for part in (self.headline, self.chart, self.table, self.reasons):
            turn_grey(part, waits)

    def png(self) -> bytes | None:
        """The chart on white; None before there is a plan."""
        if self.plan is None:
            return None
        return look.png(chunk_figure(self.plan, measured=self.measured.values()), 2 * look.PIXELS_PER_INCH)

    def still(self) -> bytes | None:
        """The chart for a saved notebook; None before there is a plan."""
        if self.plan is None:
            return None
        return look.still(chunk_figure(self.plan, measured=self.measured.values()), 2 * look.PIXELS_PER_INCH)


def headline(plan: ChunkPlan) -> tuple[str, str]:
    """(the layout, what it is predicted to give) in words."""
    shard = "each an object" if plan.shard is None else f"in shards of {named(plan.dims, plan.shard)}"
    rate = f"{format_count(plan.samples_per_second)} samples/s predicted{_each(plan)}, bound by {plan.bound}"
    return f"chunks of {named(plan.dims, plan.chunk)}, {shard}", rate


def _each(plan: ChunkPlan) -> str:
    return f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""


def built_words(plan: ChunkPlan, built: Sequence[LayoutCost]) -> str:
    """What a store is predicted to give as it is cut, and why its plan says something else."""
    rate = format_count(plan.batch_size / sum(cost.seconds_per_batch for cost in built))
    return (
        f"{rate} samples/s{_each(plan)} as it is built, bound by {slowest(built).bound}: the sizes of its chunks are "
        "known, and a read cache counts"
    )


def candidates_html(plan: ChunkPlan, measured: Measurements) -> str:
    """The best candidate of each size around the choice, with its rank among all that were considered."""
    best = plan.best_by_size
    start = max(0, min(best.index(plan.chosen) - _SHOWN_ROWS // 2, len(best) - _SHOWN_ROWS))
    shown = best[start : start + _SHOWN_ROWS]
    others = [cost for cost in plan.candidates if cost.chunk in measured and cost not in shown]
    shown = tuple(sorted((*shown, *others), key=lambda cost: cost.chunk_bytes))
    columns = ["chunk", "rank", "size", "requests/sample as read", "read/sample", "samples/s", "bound by"]
    columns += ["as built", "measured", "ratio"] if measured else []
    rows = [_layout_row(plan, cost, measured) for cost in shown]
    caption = f"{len(plan.candidates)} layouts considered, by size"
    table = html_table(columns, rows, caption=caption, marked=shown.index(plan.chosen), mark="this plan", dense=True)
    return f"<div style='overflow-x:auto;line-height:1.4'>{table}</div>"


def _layout_row(plan: ChunkPlan, cost: LayoutCost, measured: Measurements) -> list[str]:
    """One candidate; with measurements also what was predicted of the store as built, what it gave, and their ratio."""
    cells = [
        "×".join(map(str, cost.chunk)), str(plan.candidates.index(cost) + 1), format_bytes(cost.chunk_bytes),
        f"{cost.requests_made_per_batch / plan.batch_size:.3g}",
        format_bytes(cost.bytes_made_per_batch / plan.batch_size), format_count(cost.samples_per_second),
        cost.bound if cost.fits else "does not fit",
    ]  # fmt: skip
    if one := measured.get(cost.chunk):
        predicted, found = one.predicted_samples_per_second, one.samples_per_second
        return [*cells, format_count(predicted), format_count(found), f"{found / predicted:.2f}"]
    return [*cells, *(["–"] * 3 if measured else [])]
