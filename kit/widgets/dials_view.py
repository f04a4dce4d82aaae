"""DialsView: a number field and a slider for each size of a model, as `kit.model_dials` finds them.

Where the model says in which order to turn them, that stands above them.

It edits the arguments in a form and follows them, so that the form's config stays the only one. The rows stay the same
widgets while the same arguments are dials; another model gets rows of its own.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import ipywidgets

from kit.config import Config
from kit.errors import KitError
from kit.plan.memory.size_dials import Dial
from kit.run.model_dials import ModelDials, model_dials
from kit.widgets.config_form import ConfigForm
from kit.widgets.controls import LABEL_WIDTH
from kit.widgets.number_field import NumberField, correction_note
from kit.widgets.steps import StepsSlider

_LARGEST = 2**31 - 1
_LEAST_QUALITY = 0.01
_NUMBER_WIDTH = "262px"
_BESIDE = f"0 0 4px calc({LABEL_WIDTH} + 8px)"
_QUIET = "var(--jp-ui-font-color2, #666)"


class DialsView:
    """The rows (`ui`), and the fields by argument (`fields`).

    Args:
        form: Holds the config.
        module: What `kit.fit` takes as module.
        data: What `kit.fit` takes as data.
        also: Arguments to be taken for sizes whatever they are called.
    """

    def __init__(self, form: ConfigForm, module: Any = None, data: Any = None, also: Sequence[str] = ()) -> None:
        self._form, self._module, self._data, self._also = form, module, data, tuple(also)
        self.dials = ModelDials(form.config, (), {})
        self.fields: dict[str, Any] = {}
        self.sliders: dict[str, StepsSlider] = {}
        self._following = False
        self.ui = ipywidgets.VBox([])
        self._follow(form.config)
        form.on_change(self._follow)

    def _follow(self, config: Config) -> None:
        """Show the dials of this config."""
        try:
            found = model_dials(config, self._module, self._data, also=self._also)
        except KitError as error:  # told where it is predicted
            found = ModelDials(config, (), {}, str(error))
        if [*map(_drawn, found)] != [*map(_drawn, self.dials)]:
            self._draw(found)
        self.dials, self._following = found, True
        try:
            for dial in found:
                if self.fields[dial.name].value != dial.value:  # what a correction says stays
                    self.fields[dial.name].value = dial.value
        finally:
            self._following = False

    def _turn(self, name: str, value: float) -> None:
        if not self._following:
            self._form.edit(self.dials.changes(**{name: value}))

    def _draw(self, dials: ModelDials) -> None:
        self.fields = {dial.name: _field(dial) for dial in dials}
        self.sliders = {dial.name: StepsSlider(self.fields[dial.name], dial.marks) for dial in dials}
        for name, field in self.fields.items():
            field.observe(lambda change, name=name: self._turn(name, change["new"]), "value")
        heading = _heading(dials.order_sentence)
        self.ui.children = [heading, *(self._row(dial) for dial in dials)] if self.fields else []

    def _row(self, dial: Dial) -> Any:
        number = ipywidgets.VBox([self.fields[dial.name]], layout={"flex": f"0 0 {_NUMBER_WIDTH}"})
        controls = ipywidgets.HBox([number, self.sliders[dial.name].widget], layout={"grid_gap": "12px"})
        style = f"margin:{_BESIDE};font-size:.85em;line-height:1.3;color:{_QUIET}"
        words = f"<div style='{style}'>{html.escape(dial.reason)}</div>"
        note = correction_note(self.fields[dial.name], _BESIDE)
        return ipywidgets.VBox([controls, note, ipywidgets.HTML(words, layout={"margin": "0"})])


def _drawn(dial: Dial) -> tuple[str, str]:
    """What a row shows of a dial that only another row can show otherwise."""
    return dial.name, dial.reason


def _field(dial: Dial) -> Any:
    return NumberField(
        dial.value, least=1 if dial.whole else _LEAST_QUALITY, most=_LARGEST, whole=dial.whole,
        description=dial.name.replace("_", " "),
        tooltip=f"model.arguments.{dial.name}: {dial.range_reason}",
        layout={"width": "auto", "margin": "1px 0"}, style={"description_width": LABEL_WIDTH},
    )  # fmt: skip


def _heading(order: str) -> Any:
    words = f" <span style='font-weight:400;color:{_QUIET}'>{html.escape(order)}</span>" if order else ""
    text = f"<div style='font-weight:600;margin:8px 0 2px;line-height:1.4'>model size{words}</div>"
    return ipywidgets.HTML(text, layout={"margin": "0"})
