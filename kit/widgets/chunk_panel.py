"""ChunkPanel: how an array should be cut, for the way it will be read: change the pattern and see.

A view over `kit.plan_chunks`: every edit plans anew in a thread, only the newest config is shown, and the line of code
below does the same. Another size is chosen from a list with its price, and goes into the form. *probe* puts measured
figures of the store in place of the network's (`kit.data.probe`), *measure* reads the store for a few seconds and sets
its samples/s beside the prediction (`kit.data.measure_reading`); both need the store to be there, return at once when
clicked, and write nothing. Measurements are shown for the pattern and the network that they were made with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ipywidgets

from kit.arguments import takes_config
from kit.chunks.cost import LayoutCost
from kit.chunks.search import ChunkPlan
from kit.config import Config
from kit.errors import PlanError
from kit.units import format_bytes, format_count
from kit.widgets.form import ConfigForm
from kit.widgets.live import ConfigPanel, LatestOnlyWorker, live_box, weakly
from kit.widgets.parts import button, code_html, error_words, line, row, two_columns
from kit.widgets.store import ChunkView, headline, layout_hints

if TYPE_CHECKING:
    from kit.data.patches.probe import Probe
    from kit.data.patches.reading import MeasuredReading, Readings

SHOWN = {
    "pattern": ("data.patch", "data.order", "data.stride", "data.variables", "loader.batch_size"),
    "network": (
        "chunking.latency_seconds", "chunking.latency_deviation_seconds", "chunking.bandwidth_bytes_per_second",
        "chunking.total_bandwidth_bytes_per_second", "chunking.requests_per_second", "loader.requests_in_flight",
        "chunking.decode_bytes_per_second", "chunking.compression_ratio",
    ),
    "constraints": (
        "chunking.chunk", "chunking.shard", "chunking.target_shard_bytes", "chunking.largest_object_bytes",
        "chunking.divisibility", "chunking.multiple_of", "chunking.readers", "loader.memory_bytes",
    ),
    "store": ("data.url",),
}  # fmt: skip
_LAYOUT = {"chunking.chunk": "auto", "chunking.shard": "auto", "data.url": "-"}
"""Settings that a measurement does not depend on, because it is kept by chunk."""
_AUTO = "auto"
Chunk = tuple[int, ...]


@takes_config
def chunk_panel(config: Config | None = None) -> ChunkPanel:
    """Show access pattern, network and constraints as widgets, with the ranked layouts and the reasons of the first.

    Args:
        config: What the form starts from; the default config when left out. `panel.config` is the edited copy.

    Returns:
        The panel, which a notebook shows as the last line of a cell.

    Raises:
        ConfigError: for a config that is none.

    Example:
        >>> shown = kit.data.chunk_panel(ocean)
        >>> shown.close()
    """
    return ChunkPanel(config or Config())


class ChunkPanel(ConfigPanel):
    """The widgets, and the methods that mirror them."""

    def __init__(self, config: Config) -> None:
        self._base = config
        self._failure: Exception | None = None
        self._planning = LatestOnlyWorker("kit-chunks")
        self.form = ConfigForm(config, SHOWN, folded=False)
        self.part = ChunkPart(self.form)
        self.view, self.buttons = self.part.view, self.part.buttons
        self.code = line(margin="6px 0 0")
        edited = weakly(self._submit)
        self.form.on_change(lambda _: edited())
        self.form.on_rejected(edited)
        self.ui = live_box([two_columns(self.form.ui, [self.part.ui, self.code])])
        self._own()
        self._submit()

    # -- what the controls do

    @property
    def plan(self) -> ChunkPlan | None:
        """The last plan shown; `wait()` for that of the config as it is now."""
        return self.view.plan

    @property
    def busy(self) -> bool:
        """Whether something is being planned or measured."""
        return self._planning.busy or self.part.busy

    def probe(self) -> Probe:
        """Measure the store of the config and plan with what was found; takes a few seconds.

        Raises:
            StoreError: when there is no store to probe, or it does not answer.
        """
        return self.part.probe()

    def measure(self, seconds: float = 3.0) -> Readings:
        """Read the store of the config for so long and show its samples/s beside the prediction.

        Raises:
            StoreError: when there is no store, or it cannot be read.
        """
        return self.part.measure(seconds)

    def wait(self, timeout: float | None = None) -> ChunkPanel:
        """Return when the config as it is now is planned, and no probe or measurement runs.

        Raises:
            ConfigError: for edits in the form that do not fit.
            KitError: for what the planning failed on.
            TimeoutError: after `timeout` seconds.
        """
        if not (self.part.wait(timeout) and self._planning.wait(timeout)):
            raise TimeoutError(f"still planning after {timeout} s; it goes on")
        self._refresh()
        self.form.check()
        if self._failure is not None:
            raise self._failure
        return self

    def save_png(self, path: str | Path) -> Path:
        """Write the chart as a picture.

        Raises:
            PlanError: while there is no plan.
        """
        picture = self.view.png()
        if picture is None:
            raise PlanError("nothing is planned yet; call wait() first")
        target = Path(path)
        target.write_bytes(picture)
        return target

    # -- what happens

    def _submit(self) -> None:
        """Plan the config as it is now; returns at once. What is shown is grey until there is a plan."""
        config = self.config
        self.code.value = code_html(f"kit.plan_chunks({self._arguments()})")
        self.view.wait_for_answer()
        if self.form.rejected:
            return
        self._planning.submit(lambda: self._plan(config))

    def _plan(self, config: Config) -> None:
        from kit.data.build.layout import plan_chunks

        try:
            plan = plan_chunks(config)
            self.part.show(config, plan)
            self._failure = None
            self.form.show_hints({**layout_hints(config, plan), **self.part.hints(config)})
        except Exception as error:  # a source is the user's own code
            self._failure = error
            self.view.show_error(error_words(error))
        self._refresh()

    def _still(self) -> tuple[str, bytes | None]:
        if self.plan is None:
            return "nothing planned yet", None
        return ": ".join(headline(self.plan)), self.view.still()

    def _ipython_display_(self) -> None:
        self._planning.wait()  # a moment: so that the still has its picture
        self._show()


class ChunkPart:
    """A plan of the form's config with measured figures, and a choice of other chunks, which goes into the form.

    This panel and the Data tab of `kit.panel` share it. Whoever plans gives it each plan by `show`. `check` raises a
    KitError while something runs that measuring would disturb.
    """

    def __init__(self, form: ConfigForm, check: Callable[[], object] = lambda: None) -> None:
        self._form, self._check = form, check
        self._shown: tuple[Config, ChunkPlan, Sequence[LayoutCost]] | None = None
        self._offered: tuple[str, dict[str, Chunk]] = ("", {})
        self._probed: tuple[Config, dict[str, str]] | None = None
        self._measured: dict[str, dict[Chunk, MeasuredReading]] = {}
        self._measuring = LatestOnlyWorker("kit-store")
        self._filling = False
        self.view = ChunkView()
        self.choice = ipywidgets.Dropdown(
            options=[_AUTO], description="chunks", tooltip="how the array is cut: the choice, or another size",
            layout={"width": "auto", "flex": "1 1 260px", "max_width": "420px"}, style={"description_width": "auto"},
        )  # fmt: skip
        probe = "measure latency, bandwidth, request rate and decode speed of the store, in a few seconds"
        measure = "read the store for a few seconds and set its samples/s beside the prediction"
        self.buttons = {
            "probe": button("probe", "signal", probe, "110px"),
            "measure": button("measure", "clock-o", measure, "110px"),
        }
        form.on_change(lambda _: self._edited())
        self.choice.observe(lambda change: self._choose(change["new"]), "value")
        self.buttons["probe"].on_click(lambda _: self._clicked("probing …", self.probe))
        self.buttons["measure"].on_click(lambda _: self._clicked("reading …", self.measure))
        head = row(self.choice, *self.buttons.values(), gap="4px 8px")
        head.layout.flex_flow = "row wrap"
        self.ui = ipywidgets.VBox([head, self.view.status, self.view.ui], layout={"width": "100%"})

    @property
    def busy(self) -> bool:
        """Whether something is being measured."""
        return self._measuring.busy

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing is being measured; False after `timeout` seconds."""
        return self._measuring.wait(timeout)

    def show(self, config: Config, plan: ChunkPlan, built: Sequence[LayoutCost] = ()) -> None:
        """Show the plan of this config, and what the store there is costs to read."""
        self._shown = config, plan, built
        measured = self._measured.get(_pattern(config), {})
        self.view.show(plan, {chunk: one for chunk, one in measured.items() if len(chunk) == len(plan.dims)}, built)
        self._offer(config, plan)

    def hints(self, config: Config) -> dict[str, str]:
        """How each figure of the network was probed, while the config still has it."""
        if self._probed is None:
            return {}
        applied, hints = self._probed
        paths = {info.path for info in Config.fields()} & set(hints)
        return {path: hints[path] for path in paths if config.get(path) == applied.get(path)}

    def probe(self) -> Probe:
        """As `ChunkPanel.probe`."""
        from kit.data.patches.probe import probe

        config = self._form.config
        found = probe(config.data.url, config.data.credentials)
        applied = found.apply(config)
        how = {**found.how, "latency_seconds": found.how["latency_mean_seconds"]}  # the mean is what `apply` takes
        self._probed = applied, {f"chunking.{name}": f"probed: {words}" for name, words in how.items()}
        self._form.config = applied
        return found

    def measure(self, seconds: float = 3.0) -> Readings:
        """As `ChunkPanel.measure`."""
        from kit.data.patches.reading import measure_reading

        config = self._form.config
        readings = measure_reading(config, seconds=seconds)
        self._measured.setdefault(_pattern(config), {}).update({one.chunk: one for one in readings})
        if self._shown is not None:
            self.show(*self._shown)
        return readings

    def _edited(self) -> None:
        if not self._measuring.busy:  # a probe edits the config itself, and its words stay
            self.view.say("")

    def _clicked(self, words: str, method: Callable[[], object]) -> None:
        """Run a method in a thread; an error stands beside the button."""

        def work() -> None:
            try:
                self._check()
                self.view.say(str(method()).splitlines()[0])
            except Exception as error:
                self.view.say(error_words(error))

        self.view.say(words)
        self._measuring.submit(work)

    def _offer(self, config: Config, plan: ChunkPlan) -> None:
        """The sizes to choose from: those of the last plan that was free to choose, for the same way of reading."""
        given, pattern = config.chunking.chunk, _pattern(config)
        if given == "auto":
            self._offered = pattern, {_words(plan, cost): cost.chunk for cost in plan.best_by_size}
        offered = self._offered[1] if self._offered[0] == pattern else {}
        words = next((words for words, chunk in offered.items() if chunk == plan.chunk), _words(plan, plan.chosen))
        self._filling = True  # new options choose the first of them for a moment
        try:
            self.choice.options = [_AUTO, *dict.fromkeys([*offered, words])]
            self.choice.value = _AUTO if given == "auto" else words
        finally:
            self._filling = False

    def _choose(self, words: str | None) -> None:
        if self._filling or words is None or self._shown is None:
            return
        chunk, dims = self._offered[1].get(words), self._shown[1].dims
        if words == _AUTO or chunk is not None:
            layout = "auto" if chunk is None else dict(zip(dims, chunk, strict=True))
            self._form.edit({"chunking.chunk": layout})


def _words(plan: ChunkPlan, cost: LayoutCost) -> str:
    size, rate = format_bytes(cost.chunk_bytes), format_count(cost.samples_per_second)
    return f"{'×'.join(map(str, cost.chunk))}: {size}, {rate} samples/s" + ", the choice" * (cost is plan.chosen)


def _pattern(config: Config) -> str:
    """All of the config but where and how the store is cut: what a measurement was made with."""
    return config.replace(_LAYOUT).fingerprint
