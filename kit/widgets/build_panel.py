"""BuildPanel: from a source to a store: who builds it, in how much memory, and what the machine's cores are best for.

A view over `kit.plan_build`, `kit.build` and `kit.advise_schedule`: every edit plans anew in a thread and writes
nothing, only the newest config is shown, and the lines of code below do the same. *Build* starts what is shown and then
stops it; what was stopped or killed goes on where it was. Advice is for this machine or for one that is not here, and
is taken over by a button, never by itself.

ScheduleView: what machine it is for, and how its cores and memory are best shared out, with reasons and warnings.

A view over `kit.advise_schedule`: it answers at once, for this machine or for one that is not here. `Use it` hands the
advice on; what it says of the config's own settings stands in front of it, as warnings.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.config import Config
from kit.data.build.plan import BuildPlan, plan_build
from kit.data.build.schedulers import Schedule, advise_schedule
from kit.errors import BuildError, KitError
from kit.units import format_bytes
from kit.widgets.controls import NumberField, correction_note
from kit.widgets.form import WIDTH, ConfigForm
from kit.widgets.handle import Handle, weakly
from kit.widgets.live import Latest, live_box
from kit.widgets.store import BuildControl, BuildFacts, BuildView, expected_size, find_out, plans_text
from kit.widgets.trial_view import error_html

if TYPE_CHECKING:
    from kit.data.build.source import Source
    from kit.data.dataset import Dataset

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
    from kit.data.build.open_source import load_source

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


THIS_MACHINE, ANOTHER = "this machine", "another machine"
MACHINES = {
    "1 GPU, 20 cores": (20, 1, "128 GiB"),
    "8 GPUs, 20 cores": (20, 8, "128 GiB"),
    "8 GPUs, 160 cores": (160, 8, "1 TiB"),
}
"""Cores, GPUs (one rank each) and memory."""
Machine = tuple[int, int, str]
_STYLE = {"description_width": "initial"}


class ScheduleView:
    """Machine, advice and the button that takes it.

    Args:
        on_use: Called with the advice when the button is clicked.
        on_change: Called when the machine is another.
    """

    def __init__(self, config: Config, on_use: Callable[[Schedule], object], on_change: Callable[[], object]) -> None:
        self.schedule: Schedule | None = None
        self._on_change, self._filling = on_change, False
        self._machines: dict[str, Machine] = {THIS_MACHINE: _here(config), **MACHINES}
        self.machine = ipywidgets.Dropdown(
            options=[*self._machines, ANOTHER], value=THIS_MACHINE, description="machine",
            tooltip="whose cores and memory are shared out", style=_STYLE, layout={"width": "270px"},
        )  # fmt: skip
        self.cores = _number("cores", "how many cores that machine has", 1, 4096)
        self.ranks = _number("GPUs", "processes that train, one a GPU; 1 without a GPU", 1, 1024)
        self.memory = ipywidgets.Text(
            description="memory", tooltip="memory of the machine, such as 128 GiB", continuous_update=False,
            style=_STYLE, layout={"width": "150px"},
        )  # fmt: skip
        self.heavy = ipywidgets.Checkbox(
            description="slow Python transform", indent=False, layout={"width": "auto"},
            tooltip="samples are transformed by slow Python code, which threads cannot share",
        )  # fmt: skip
        self.advice = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.button = ipywidgets.Button(
            description="Use it", icon="arrow-left", tooltip="put these sizes into the settings",
            layout={"width": "90px", "flex": "0 0 auto"},
        )  # fmt: skip
        self._fill(self._machines[THIS_MACHINE])
        self.machine.observe(lambda _: self._picked(), "value")
        for control in (self.cores, self.ranks, self.memory, self.heavy):
            control.observe(lambda _: self._edited(), "value")
        self.button.on_click(lambda _: None if self.schedule is None else on_use(self.schedule))
        row = ipywidgets.HBox(
            [self.machine, self.cores, self.ranks, self.memory, self.heavy],
            layout={"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 12px"},
        )
        notes = [correction_note(number, "0 0 4px") for number in (self.cores, self.ranks)]
        self.ui = ipywidgets.VBox([row, *notes, self.advice, self.button], layout={"width": "100%"})

    def show(self, config: Config) -> None:
        """Advise for this config on the machine chosen."""
        try:
            self.schedule = advise_schedule(config, **self.arguments)
        except KitError as error:
            self.schedule, self.advice.value = None, error_html(str(error), "", [])
        else:
            self.advice.value = f"<div style='overflow-x:auto;line-height:1.4'>{self.schedule._repr_html_()}</div>"
        self.button.disabled = self.schedule is None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of `kit.advise_schedule` for what is not this machine's."""
        names = ("cores", "ranks", "memory_bytes")
        pairs = zip(names, self._typed, self._machines[THIS_MACHINE], strict=True)
        given: dict[str, Any] = {name: typed for name, typed, here in pairs if typed != here}
        return given | ({"heavy_transform": True} if self.heavy.value else {})

    def code(self, config: str) -> str:
        """The call that gives the same advice, for a config written so."""
        given = (f"{name}={value!r}" for name, value in self.arguments.items())
        return f"kit.advise_schedule({', '.join([config, *given])})"

    @property
    def _typed(self) -> Machine:
        return self.cores.value, self.ranks.value, self.memory.value.strip()

    def _picked(self) -> None:
        if self.machine.value in self._machines:
            self._fill(self._machines[self.machine.value])
        self._on_change()

    def _edited(self) -> None:
        """Numbers that were typed may be those of another machine."""
        if self._filling:
            return
        name = next((name for name, machine in self._machines.items() if machine == self._typed), ANOTHER)
        if name == self.machine.value:
            self._on_change()
        else:
            self.machine.value = name

    def _fill(self, machine: Machine) -> None:
        self._filling = True
        try:
            self.cores.value, self.ranks.value, self.memory.value = machine
        finally:
            self._filling = False


def _here(config: Config) -> Machine:
    """Cores, ranks of this config and memory here; one rank where it gets none."""
    try:
        found = advise_schedule(config)
    except KitError:
        found = advise_schedule(config, ranks=1)
    return found.cores, found.ranks, format_bytes(found.memory_bytes)


def heading(text: str) -> str:
    """A line that a section starts with."""
    return f"<div style='font-weight:600;margin:10px 0 2px;line-height:1.4'>{html.escape(text)}</div>"


def _number(name: str, tooltip: str, low: int, high: int) -> Any:
    return NumberField(
        1, least=low, most=high, description=name, tooltip=tooltip, style=_STYLE, layout={"width": "120px"}
    )
