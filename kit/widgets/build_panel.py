"""BuildPanel: from a source to a store: who builds it, in how much memory, and what the machine's cores are best for.

A view over `kit.plan_build`, `kit.build` and `kit.advise_schedule`: every edit plans anew in a thread and writes
nothing, only the newest config is shown, and the lines of code below do the same. *Build* starts what is shown and then
stops it; what was stopped or killed goes on where it was. Advice is for this machine or for one that is not here, and
is taken over by a button, never by itself.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.config import Config
from kit.data.build_plan import BuildPlan, plan_build
from kit.errors import BuildError, KitError
from kit.plan.schedule import Schedule
from kit.widgets.background import Latest
from kit.widgets.build_control import BuildControl
from kit.widgets.build_view import BuildFacts, BuildView, plans_text
from kit.widgets.config_form import WIDTH, ConfigForm
from kit.widgets.handle import Handle, weakly
from kit.widgets.live import live_box
from kit.widgets.schedule_view import ScheduleView, heading
from kit.widgets.store_view import expected_size, find_out

if TYPE_CHECKING:
    from kit.data.dataset import Dataset
    from kit.data.source import Source

SHOWN = {
    "source": ("data.source", "data.arguments", "data.variables"),
    "target": ("data.url", "data.credentials", "chunking.chunk", "chunking.shard", "chunking.target_shard_bytes"),
    "who builds": (
        "build.scheduler", "build.workers", "build.threads", "build.memory_bytes", "build.total_memory_bytes",
        "build.address", "build.scratch",
    ),
    "who loads": ("loader.num_workers", "loader.decode_threads", "loader.memory_bytes"),
}  # fmt: skip
SCHEDULERS = ("single-threaded", "threads", "distributed")


def build_panel(config: Config | None = None, *, source: Any = None) -> BuildPanel:
    """Source, target and scheduler on a config, with the plan before it is carried out, and advice on sizes.

    Args:
        config: What the form starts from; it is not changed, `panel.config` is the edited copy.
        source: An xarray object, array or source in hand, in place of the one that the config names.
    """
    return BuildPanel(config or Config(), source)


class BuildPanel(Handle):
    """The widgets, and the methods that mirror them."""

    def __init__(self, config: Config, source: Any = None) -> None:
        self._base, self._given = config, source
        self._planning = Latest("kit-build-plan")
        self.form = ConfigForm(config, SHOWN, folded=False)
        self.view = BuildView()
        self.control = BuildControl(weakly(self._clicked), weakly(self._ask))
        self.control.say("ready", 0.0)
        self.machine = ScheduleView(config, weakly(self.use), weakly(self._advise))
        self.code, self.advice_code = _line(), _line()
        edited = weakly(self._edited)
        self.form.on_change(lambda _: edited())
        self.ui = self._draw()
        self._own()
        self._edited()

    # -- what the controls do

    @property
    def config(self) -> Config:
        """The last valid Config of the form; setting it sets every control."""
        return self.form.config

    @config.setter
    def config(self, config: Config) -> None:
        self.form.config = config

    @property
    def plan(self) -> BuildPlan | None:
        """The last plan shown; `wait()` for that of the config as it is now."""
        return self.view.facts.plan if self.view.facts else None

    @property
    def schedule(self) -> Schedule | None:
        """The advice shown."""
        return self.machine.schedule

    @property
    def dataset(self) -> Dataset | None:
        """The store, when the one of the config as it was last shown is built."""
        return self.view.facts.store.dataset if self.view.facts else None

    @property
    def busy(self) -> bool:
        """Whether something is being planned or built."""
        return self._planning.busy or self.control.busy

    def build(self) -> BuildPanel:
        """Start building what the form says, or go on with it; returns at once. One that runs is left to run.

        Raises:
            ConfigError: for edits in the form that do not fit.
        """
        self.form.check()
        if not self.control.busy:
            self.control.build(self.config, source=self._given)
        return self

    def stop(self) -> None:
        """End the build after the shards now being written; building again goes on there."""
        self.control.stop()

    def use(self, schedule: Schedule) -> None:
        """Put advised sizes into the settings."""
        self.config = schedule.apply(self.config)

    def wait(self, timeout: float | None = None) -> BuildPanel:
        """Return when the config as it is now is planned, and built or stopped if that was asked.

        Raises:
            ConfigError: for edits in the form that do not fit.
            BuildError: when there is no plan, with why.
            KitError: for what the build failed on.
            TimeoutError: after `timeout` seconds.
        """
        if not (self.control.wait(timeout) and self._planning.wait(timeout)):
            raise TimeoutError(f"still busy after {timeout} s; it goes on")
        self._refresh()
        self.form.check()
        if self.control.error is not None:
            raise self.control.error
        if self.view.facts is not None and self.view.facts.why_not:
            raise BuildError(self.view.facts.why_not)
        return self

    def save(self, path: str | Path) -> Path:
        """Write the config as YAML, to be committed."""
        return self.config.save(path)

    # -- what happens

    def _edited(self) -> None:
        if not self.control.busy:
            self.control.error = None
            self.control.say("ready", 0.0)
        self._advise()
        self._ask()

    def _advise(self) -> None:
        self.machine.show(self.config)
        self._show_code()

    def _ask(self) -> None:
        """Plan the config as it is now; returns at once."""
        config = self.config
        self._planning.submit(lambda: self._plan(config))

    def _plan(self, config: Config) -> None:
        facts = plan_all(config, self._given)
        self.view.show(facts)
        self.control.button.disabled = facts.plan is None and not self.control.busy
        self.form.show_hints(_hints(facts))
        self._refresh()

    def _clicked(self) -> None:
        """What a click on Build does; what went wrong stands beside it, and has no place in a log."""
        try:
            self.build()
        except KitError as error:
            self.control.say(f"not started: {error}", 0.0)

    # -- what is shown

    def _show_code(self) -> None:
        config = self.config.as_code(against=self._base)
        source = "" if self._given is None else ", source=source"
        self.code.value = _code_html(f"kit.build({config}{source})", "kit.plan_build in its place only plans")
        self.advice_code.value = _code_html(self.machine.code(config), "")

    def _draw(self) -> Any:
        self.form.ui.layout.flex = f"1 1 {WIDTH}"
        parts = [
            self.view.ui, self.control.ui, self.code,
            ipywidgets.HTML(heading("How should cores and memory be shared out?"), layout={"margin": "8px 0 0"}),
            self.machine.ui, self.advice_code,
        ]  # fmt: skip
        right = ipywidgets.VBox(parts, layout={"flex": "100 1 480px", "min_width": "0"})
        columns = ipywidgets.HBox(
            [self.form.ui, right], layout={"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": "8px 28px"}
        )
        return live_box([columns])

    def _still(self) -> tuple[str, str | None]:
        facts = self.view.facts
        if facts is None or facts.plan is None:
            return "nothing planned yet", None
        return f"{plans_text(facts)}\n{facts.plan}", self.view.still

    def __repr__(self) -> str:
        return f"BuildPanel of {self.config!r}"

    def _ipython_display_(self) -> None:
        self._planning.wait()  # a moment: so that the still has its table
        self._show()


def plan_all(config: Config, source: Any = None) -> BuildFacts:
    """Target, layout, and a plan for each scheduler; what is missing is said, not raised."""
    from kit.data.open_source import load_source

    problem, opened = "", source
    try:
        opened = load_source(config, source)
    except Exception as error:  # a source is the user's own code
        problem = _in_words(error)
    facts = BuildFacts(config=config, store=find_out(config, opened), problem=problem)
    if problem or facts.store.plan is None:
        return facts
    if facts.store.dataset is None:
        facts.store.size = expected_size(config, facts.store.plan, opened)
    found = {name: _plan(facts, name, opened) for name in SCHEDULERS}
    facts.plans = {name: plan for name, plan in found.items() if isinstance(plan, BuildPlan)}
    refused = found[config.build.scheduler]
    facts.problem = refused if isinstance(refused, str) else ""
    return facts


def _plan(facts: BuildFacts, scheduler: str, source: Source) -> BuildPlan | str:
    """The plan with this scheduler, or why there is none."""
    try:
        changed = facts.config.replace({"build.scheduler": scheduler})
        return plan_build(changed, facts.store.plan, source=source)
    except Exception as error:  # a source is the user's own code
        return _in_words(error)


def _hints(facts: BuildFacts) -> dict[str, str]:
    """What `auto` and 0 came to, for the fields they stand in."""
    hints, plan, build = dict(facts.store.hints), facts.plan, facts.config.build
    if not build.total_memory_bytes:
        hints["build.total_memory_bytes"] = "0: no limit for all together"
    if plan is not None and plan.slots.processes and not build.workers and build.scheduler == "distributed":
        hints["build.workers"] = f"0: {plan.slots.processes} here"
    if plan is not None and not build.threads:
        hints["build.threads"] = f"0: {plan.threads} here"
    return hints


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"


def _code_html(call: str, note: str) -> str:
    font = "font-family:var(--jp-code-font-family, monospace);font-size:.9em"
    code = f"{font};white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;line-height:1.4;margin:2px 0"
    also = f"; {note}" if note else ""
    text = f"the same in code{also}: <pre style='{code}'>{html.escape(call)}</pre>"
    return f"<div style='line-height:1.4'>{text}</div>"


def _line() -> Any:
    return ipywidgets.HTML(layout={"margin": "6px 0 0", "width": "100%"})
