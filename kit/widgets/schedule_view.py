"""ScheduleView: what machine it is for, and how its cores and memory are best shared out, with reasons and warnings.

A view over `kit.advise_schedule`: it answers at once, for this machine or for one that is not here. `Use it` hands the
advice on; what it says of the config's own settings stands in front of it, as warnings.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets

from kit.config import Config
from kit.errors import KitError
from kit.plan.schedule import Schedule, advise_schedule
from kit.units import format_bytes
from kit.widgets.number_field import NumberField, correction_note
from kit.widgets.trial_view import error_html

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
