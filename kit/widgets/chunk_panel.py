"""ChunkPanel: how an array should be cut, for the way it will be read: change the pattern and see.

A view over `kit.plan_chunks`: every edit plans anew in a thread, only the newest config is shown, and the line of code
below does the same. *probe* puts measured figures of the store in place of the network's (`kit.probe`), *measure* reads
the store for a few seconds and sets its samples/s beside the prediction (`kit.measure_reading`); both need the store to
be there, return at once when clicked, and write nothing. What was measured is forgotten as soon as pattern or network
change, as it says nothing of the new ones.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.chunks.search import ChunkPlan
from kit.config import Config
from kit.errors import KitError, PlanError
from kit.widgets.form import WIDTH, ConfigForm
from kit.widgets.handle import Handle, weakly
from kit.widgets.live import Latest, live_box
from kit.widgets.store import ChunkView, Measurements, headline, layout_hints

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
"""What a measurement does not depend on, because it is kept by chunk."""
_BUTTONS = {
    "probe": ("signal", "measure latency, bandwidth, request rate and decode speed of the store, in a few seconds"),
    "measure": ("clock-o", "read the store for a few seconds and set its samples/s beside the prediction"),
}


def chunk_panel(config: Config | None = None) -> ChunkPanel:
    """Pattern, network and constraints on a config, with the ranked layouts and why the first one is chosen.

    Args:
        config: What the form starts from; it is not changed, `panel.config` is the edited copy.
    """
    return ChunkPanel(config or Config())


class ChunkPanel(Handle):
    """The widgets, and the methods that mirror them."""

    def __init__(self, config: Config) -> None:
        self._base = config
        self._failure: Exception | None = None
        self._probed: tuple[Config, dict[str, str]] | None = None
        self._measured: dict[str, dict[tuple[int, ...], MeasuredReading]] = {}
        self._planning, self._asking = Latest("kit-chunks"), Latest("kit-store")
        self.form = ConfigForm(config, SHOWN, folded=False)
        self.view = ChunkView()
        self.buttons = {name: _button(name) for name in _BUTTONS}
        self.code = ipywidgets.HTML(layout={"margin": "6px 0 0", "width": "100%"})
        edited, clicked = weakly(self._edited), weakly(self._clicked)
        self.form.on_change(lambda _: edited())
        self.buttons["probe"].on_click(lambda _: clicked("probing …", "probe"))
        self.buttons["measure"].on_click(lambda _: clicked("reading …", "measure"))
        self.ui = self._draw()
        self._own()
        self._ask()

    # -- what the controls do

    @property
    def config(self) -> Config:
        """The last valid Config of the form; setting it sets every control."""
        return self.form.config

    @config.setter
    def config(self, config: Config) -> None:
        self.form.config = config

    @property
    def plan(self) -> ChunkPlan | None:
        """The last plan shown; `wait()` for that of the config as it is now."""
        return self.view.plan

    @property
    def busy(self) -> bool:
        """Whether something asked is not answered yet."""
        return self._planning.busy or self._asking.busy

    def probe(self) -> Probe:
        """Measure the store of the config and plan with what was found; takes a few seconds.

        Raises:
            StoreError: when there is no store to probe, or it does not answer.
        """
        from kit.data.patches.probe import probe

        found = probe(self.config.data.url, self.config.data.credentials)
        applied = found.apply(self.config)
        how = {**found.how, "latency_seconds": found.how["latency_mean_seconds"]}  # the mean is what `apply` takes
        self._probed = applied, {f"chunking.{name}": f"probed: {words}" for name, words in how.items()}
        self.config = applied
        return found

    def measure(self, seconds: float = 3.0) -> Readings:
        """Read the store of the config for so long and show its samples/s beside the prediction.

        Raises:
            StoreError: when there is no store, or it cannot be read.
        """
        from kit.data.patches.reading import measure_reading

        config = self.config
        readings = measure_reading(config, seconds=seconds)
        self._measured.setdefault(_pattern(config), {}).update({one.chunk: one for one in readings})
        self._ask()
        return readings

    def wait(self, timeout: float | None = None) -> ChunkPanel:
        """Return when the config as it is now is planned, and probed or measured if that was asked.

        Raises:
            ConfigError: for edits in the form that do not fit.
            KitError: for what the planning failed on.
            TimeoutError: after `timeout` seconds.
        """
        if not (self._asking.wait(timeout) and self._planning.wait(timeout)):
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

    def save(self, path: str | Path) -> Path:
        """Write the config as YAML, to be committed."""
        return self.config.save(path)

    # -- what happens

    def _edited(self) -> None:
        """What a button found belongs to the config it was asked of; probing itself edits, and then speaks."""
        if not self._asking.busy:
            self.view.say("")
        self._ask()

    def _ask(self) -> None:
        """Plan the config as it is now; returns at once."""
        config = self.config
        self._show_code()
        self._planning.submit(lambda: self._plan(config))

    def _plan(self, config: Config) -> None:
        from kit.data.build.layout import plan_chunks

        try:
            plan = plan_chunks(config)
            self.view.show(plan, self._measurements(config, plan))
            self._failure = None
            self.form.show_hints({**layout_hints(config, plan), **self._probe_hints(config)})
        except Exception as error:  # a source is the user's own code
            self._failure = error
            self.view.show_error(_in_words(error))
        self._refresh()

    def _measurements(self, config: Config, plan: ChunkPlan) -> Measurements:
        """What was measured of this pattern, in chunks that the plan knows."""
        known = self._measured.get(_pattern(config), {})
        return {chunk: one for chunk, one in known.items() if len(chunk) == len(plan.dims)}

    def _probe_hints(self, config: Config) -> dict[str, str]:
        """How each figure was found, for as long as it stands."""
        if self._probed is None:
            return {}
        applied, hints = self._probed
        paths = {info.path for info in Config.fields()} & set(hints)
        return {path: hints[path] for path in paths if config.get(path) == applied.get(path)}

    def _clicked(self, words: str, method: str) -> None:
        """What a click on a button does; what went wrong stands beside it, and has no place in a log."""
        self.view.say(words)
        self._asking.submit(lambda: self._work(getattr(self, method)))

    def _work(self, work: Callable[[], Any]) -> None:
        try:
            self.view.say(str(work()).splitlines()[0])
        except Exception as error:
            self.view.say(_in_words(error))

    # -- what is shown

    def _show_code(self) -> None:
        call = f"kit.plan_chunks({self.config.as_code(against=self._base)})"
        font = "font-family:var(--jp-code-font-family, monospace);font-size:.9em"
        code = f"{font};white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;line-height:1.4;margin:2px 0"
        text = f"the same in code: <pre style='{code}'>{html.escape(call)}</pre>"
        self.code.value = f"<div style='line-height:1.4'>{text}</div>"

    def _draw(self) -> Any:
        self.form.ui.layout.flex = f"1 1 {WIDTH}"
        row = ipywidgets.HBox(
            [*self.buttons.values(), self.view.status], layout={"grid_gap": "8px", "align_items": "center"}
        )
        right = ipywidgets.VBox([row, self.view.ui, self.code], layout={"flex": "100 1 480px", "min_width": "0"})
        columns = ipywidgets.HBox(
            [self.form.ui, right], layout={"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": "8px 28px"}
        )
        return live_box([columns])

    def _still(self) -> tuple[str, bytes | None]:
        if self.plan is None:
            return "nothing planned yet", None
        return ": ".join(headline(self.plan)), self.view.png()

    def __repr__(self) -> str:
        return f"ChunkPanel of {self.config!r}"

    def _ipython_display_(self) -> None:
        self._planning.wait()  # a moment: so that the still has its picture
        self._show()


def _button(name: str) -> Any:
    icon, tooltip = _BUTTONS[name]
    return ipywidgets.Button(
        description=name, icon=icon, tooltip=tooltip, layout={"width": "110px", "flex": "0 0 auto"}
    )


def _pattern(config: Config) -> str:
    """What a measurement belongs to: all of the config but where and how it is cut."""
    return config.replace(_LAYOUT).fingerprint


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"
