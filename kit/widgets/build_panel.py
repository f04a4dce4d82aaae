"""BuildPanel: from a source to a store: who builds it, in how much memory, and what the machine's cores are best for.

A view over `kit.data.plan_build`, `kit.build` and `kit.data.advise_schedule`: every edit plans anew in a thread and
writes nothing, only the newest config is shown, and the lines of code below do the same. *Build* starts what is shown
and then stops it; what was stopped or killed goes on where it was. Advice is for this machine or for one that is not
here, and is taken over by a button, never by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.arguments import takes_config
from kit.config import Config
from kit.data.build.plan import BuildPlan, plan_build
from kit.data.build.schedulers import Schedule, advise_schedule
from kit.errors import BuildError, KitError
from kit.units import format_bytes
from kit.widgets.controls import NumberField, correction_note
from kit.widgets.form import ConfigForm
from kit.widgets.live import Background, ConfigPanel, live_box, weakly
from kit.widgets.parts import button, code_html, error_html, error_words, heading_html, line, two_columns
from kit.widgets.store import BuildControl, BuildFacts, BuildView, expected_size, find_out, plans_text

if TYPE_CHECKING:
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


@takes_config
def build_panel(config: Config | None = None, *, source: Any = None) -> BuildPanel:
    """Show source, target and scheduler of a build as widgets, with the plan before it runs.

    Args:
        config: What the form starts from; the default config when left out. `panel.config` is the edited copy.
        source: An xarray object, an array or a source in memory, instead of the one that the config names.

    Returns:
        The panel, which a notebook shows as the last line of a cell.

    Raises:
        ConfigError: for a config that is none.

    Example:
        >>> shown = kit.data.build_panel(ocean)
        >>> shown.close()
    """
    return BuildPanel(config or Config(), source)


class BuildPanel(ConfigPanel):
    """The widgets, and the methods that mirror them."""

    def __init__(self, config: Config, source: Any = None) -> None:
        self._base, self._given = config, source
        self.form = ConfigForm(config, SHOWN, folded=False)
        self.part = BuildPart(self.form, config, source, weakly(self._on_planned))
        self.view, self.machine, self.advice_code = self.part.view, self.part.machine, self.part.advice_code
        self.control = BuildControl(weakly(self.build), self.part.plan)
        self.control.say("ready", 0.0)
        self.code = line(margin="6px 0 0")
        edited = weakly(self._edited)
        self.form.on_change(lambda _: edited())
        above = [self.view.summary, self.view.layout, *self.part.plans]
        self.ui = live_box([two_columns(self.form.ui, [*above, self.control.ui, self.code, *self.part.advice])])
        self._own()
        self._edited()

    # -- what the controls do

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
        return self.part.busy or self.control.busy

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
        self.part.use(schedule)

    def wait(self, timeout: float | None = None) -> BuildPanel:
        """Return when the config as it is now is planned, and the build, if one was started, has ended.

        Raises:
            ConfigError: for edits in the form that do not fit.
            BuildError: when there is no plan, with why.
            KitError: for what the build failed on.
            TimeoutError: after `timeout` seconds.
        """
        if not (self.control.wait(timeout) and self.part.wait(timeout)):
            raise TimeoutError(f"still busy after {timeout} s; it goes on")
        self._refresh()
        self.form.check()
        if self.control.error is not None:
            raise self.control.error
        if self.view.facts is not None and self.view.facts.why_not:
            raise BuildError(self.view.facts.why_not)
        return self

    # -- what happens

    def _edited(self) -> None:
        if not self.control.busy:
            self.control.error = None
            self.control.say("ready", 0.0)
        given = "" if self._given is None else ", source=source"
        self.code.value = code_html(
            f"kit.build({self._arguments()}{given})", "kit.data.plan_build in its place only plans"
        )
        self.part.advise(self._arguments())
        self.part.plan()

    def _on_planned(self, facts: BuildFacts) -> None:
        self.control.button.disabled = facts.plan is None and not self.control.busy
        self.form.show_hints(build_hints(facts))
        self._refresh()

    def _still(self) -> tuple[str, str | None]:
        facts = self.view.facts
        if facts is None or facts.plan is None:
            return "nothing planned yet", None
        return f"{plans_text(facts)}\n{facts.plan}", self.view.still

    def _ipython_display_(self) -> None:
        self.part.wait()  # a moment: so that the still has its table
        self._show()


class BuildPart(Background):
    """The plans of a build by scheduler (`plans`), and how a machine is best shared out (`advice`).

    This panel and the Data tab of `kit.panel` share it. `on_planned` is called with the facts of each plan.
    """

    def __init__(
        self, form: ConfigForm, config: Config, source: Any = None,
        on_planned: Callable[[BuildFacts], object] = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__("kit-build-plan")
        self._form, self._given, self._on_planned = form, source, on_planned
        self._config_in_code = "config"
        self.view = BuildView()
        self.machine = ScheduleView(config, self.use, lambda: self.advise(self._config_in_code))
        self.advice_code = line(margin="6px 0 0")
        question = line(heading_html("How should cores and memory be shared out?"))
        self.plans = (self.view.error, self.view.table, self.view.reasons)
        self.advice = (question, self.machine.ui, self.advice_code)

    def plan(self) -> None:
        """Plan the form's config as it is now; returns at once."""
        config = self._form.config
        self._latest.submit(lambda: self._plan(config))

    def advise(self, config_in_code: str) -> None:
        """Say how the machine that is chosen is shared out, and how code does, which names the config so."""
        self._config_in_code = config_in_code
        self.machine.show(self._form.config)
        self.advice_code.value = code_html(self.machine.code(config_in_code))

    def use(self, schedule: Schedule) -> None:
        """Put advised sizes into the settings."""
        self._form.config = schedule.apply(self._form.config)

    def _plan(self, config: Config) -> None:
        facts = plan_all(config, self._given)
        self.view.show(facts)
        self._on_planned(facts)


def plan_all(config: Config, source: Any = None) -> BuildFacts:
    """Target, layout, and a plan for each scheduler; errors are among the facts, not raised."""
    from kit.data.build.open_source import load_source

    problem, opened = "", source
    try:
        opened = load_source(config, source)
    except Exception as error:  # a source is the user's own code
        problem = error_words(error)
    facts = BuildFacts(config=config, store=find_out(config, opened), problem=problem)
    if problem or facts.store.plan is None:
        return facts
    if facts.store.dataset is None:
        facts.store.size = expected_size(config, facts.store.plan, opened)
    for scheduler in SCHEDULERS:
        try:
            changed = config.replace({"build.scheduler": scheduler})
            facts.plans[scheduler] = plan_build(changed, facts.store.plan, source=opened)
        except Exception as error:  # a source is the user's own code
            if scheduler == config.build.scheduler:
                facts.problem = error_words(error)
    return facts


def build_hints(facts: BuildFacts) -> dict[str, str]:
    """What `auto` and 0 came to, for the fields they stand in."""
    hints, plan, build = dict(facts.store.hints), facts.plan, facts.config.build
    if not build.total_memory_bytes:
        hints["build.total_memory_bytes"] = "0: no limit for all together"
    if plan is not None and plan.slots.processes and not build.workers and build.scheduler == "distributed":
        hints["build.workers"] = f"0: {plan.slots.processes} here"
    if plan is not None and not build.threads:
        hints["build.threads"] = f"0: {plan.threads} here"
    return hints


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
    """A machine and how its cores and memory are best shared out: `kit.data.advise_schedule` as widgets.

    The answer comes at once. A click on *Use it* calls `on_use` with the advice; another machine calls `on_change`.
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
        self.ranks = _number("ranks", "processes that train: one a GPU, or one on the CPU", 1, 1024)
        self.memory = ipywidgets.Text(
            description="memory", tooltip="memory of the machine, such as 128 GiB", continuous_update=False,
            style=_STYLE, layout={"width": "150px"},
        )  # fmt: skip
        self.heavy = ipywidgets.Checkbox(
            description="slow Python transform", indent=False, layout={"width": "auto"},
            tooltip="samples are transformed by slow Python code, which threads cannot share",
        )  # fmt: skip
        self.advice = line()
        self.button = button("Use it", "arrow-left", "put these sizes into the settings")
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
            self.schedule, self.advice.value = None, error_html(str(error))
        else:
            self.advice.value = f"<div style='overflow-x:auto;line-height:1.4'>{self.schedule._repr_html_()}</div>"
        self.button.disabled = self.schedule is None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords of `kit.data.advise_schedule`: the numbers that differ from this machine's."""
        names = ("cores", "ranks", "memory_bytes")
        pairs = zip(names, self._typed, self._machines[THIS_MACHINE], strict=True)
        given: dict[str, Any] = {name: typed for name, typed, here in pairs if typed != here}
        return given | ({"heavy_transform": True} if self.heavy.value else {})

    def code(self, config: str) -> str:
        """The call that gives the same advice, for a config written so."""
        given = (f"{name}={value!r}" for name, value in self.arguments.items())
        return f"kit.data.advise_schedule({', '.join([config, *given])})"

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


def _number(name: str, tooltip: str, low: int, high: int) -> Any:
    return NumberField(
        1, least=low, most=high, description=name, tooltip=tooltip, style=_STYLE, layout={"width": "120px"}
    )
