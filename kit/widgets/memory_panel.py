"""MemoryPanel: what a config would need of a device, and what if: move a slider and see.

Batch size and accumulation answer while they are moved; whatever else is changed, the sizes of the model among them, is
recorded anew by dry runs in other processes, and until then the pictures are grey. Every control has a method or a
property, so that a script does the same. Clicks return at once; `wait()` returns when everything asked is answered.
Nothing is allocated on any device, and no such device need be here.

DialsView: a number field and a slider for each size of a model, as `kit.model_dials` finds them.

Where the model says in which order to turn them, that stands above them.

It edits the arguments in a form and follows them, so that the form's config stays the only one. The rows stay the same
widgets while the same arguments are dials; another model gets rows of its own.

A slider over many sizes: every whole number while they are small, then eight to each doubling, or marks of your own.

It drives a number field and follows it: the field is exact, the slider is quick. A number that the slider's marks leave
out is added to them when it is needed.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets

from kit.charts import style as look
from kit.charts.timeline import memory_figure
from kit.config import Config
from kit.errors import KitError, PlanError
from kit.memory.dials import Dial, ModelDials, model_dials
from kit.memory.replay.cards import CARDS, THIS_MACHINE, find_card, target_of
from kit.memory.replay.estimate import MemoryEstimate
from kit.trial.payload import Part, batch_rule
from kit.widgets.controls import LABEL_WIDTH, NumberField, correction_note
from kit.widgets.form import WIDTH, ConfigForm
from kit.widgets.handle import Handle, weakly
from kit.widgets.live import live_box
from kit.widgets.memory_view import (
    AnsweringModel,
    CardAnswer,
    Device,
    MemoryAnswers,
    MemoryRequest,
    MemoryView,
    headline,
    sentence,
)

SHOWN = {
    "model": ("arguments",),
    "hardware": ("precision", "strategy", "devices"),
    "levers": ("gradient_checkpointing", "optimizer", "attention"),
    "training": ("gradient_clip_norm",),
}
SHOWN_CARDS = ("T4-16GB", "RTX-4090-24GB", "A100-40GB", "H100-80GB", "H200-141GB")
SLIDERS = {"loader.batch_size": 512, "levers.accumulate_grad_batches": 64}
"""Fields answered while they are moved, and where their sliders end."""
_DEVICES = (THIS_MACHINE, *(card.name for card in CARDS))
_NUMBER_WIDTH = "262px"
_EXPORTS = {
    "PNG": ("image", "write both charts to memory.png"),
    "snapshot": ("save", "write memory.pickle, which torch's memory viewer loads (pytorch.org/memory_viz)"),
}


def memory_panel(
    config: Config | None = None,
    module: Any = None,
    data: Any = None,
    *,
    device: Device = THIS_MACHINE,
    cards: Sequence[str] = SHOWN_CARDS,
    sizes: Sequence[str] = (),
) -> MemoryPanel:
    """Sliders and dropdowns on a config, with what it would need of a device.

    Args:
        config: What the form starts from; it is not changed, `panel.config` is the edited copy.
        module: What would be trained, as `kit.fit` takes it; None takes `model.target`.
        data: What it would be trained on, as `kit.fit` takes it; None takes the config's own store. It is predicted at
            the batch size of the form, whatever its own is.
        device: A GPU model, a size such as "24 GiB", or "this machine".
        cards: GPU models to judge beside it.
        sizes: Arguments of the model that set its size and have names that `kit.model_dials` does not know.

    Raises:
        PlanError: for an unknown GPU model.
    """
    return MemoryPanel(config or Config(), module, data, device=device, cards=cards, sizes=sizes)


class MemoryPanel(Handle):
    """The widgets, and the methods that mirror them."""

    def __init__(
        self,
        config: Config,
        module: Any = None,
        data: Any = None,
        *,
        device: Device = THIS_MACHINE,
        cards: Sequence[str] = SHOWN_CARDS,
        sizes: Sequence[str] = (),
        make_model: Callable[[Config, Device], AnsweringModel] | None = None,
    ) -> None:
        self._base, self._module, self._data = config, module, data
        self._cards = tuple(find_card(name).name for name in cards)
        self.form = ConfigForm(config, SHOWN, folded=False)
        self.sliders = {path: _slider(self.form.controls[path], most) for path, most in SLIDERS.items()}
        self.dials = DialsView(self.form, module, data, sizes)
        self.view = MemoryView(self.form.show_problems, weakly(self._refresh))
        self._answers = MemoryAnswers(make_model or partial(_make_model, module, data), self.view)
        self.device_control = _device_control(device)
        self.buttons = {name: _export_button(name) for name in _EXPORTS}
        self.code = ipywidgets.HTML(layout={"margin": "6px 0 0", "width": "100%"})
        ask, export = weakly(self._ask), weakly(self._export)
        self.form.on_change(lambda _: ask())
        self.device_control.observe(lambda _: ask(), "value")
        self.buttons["PNG"].on_click(lambda _: export("save_png", "memory.png"))
        self.buttons["snapshot"].on_click(lambda _: export("save_snapshot", "memory.pickle"))
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
    def device(self) -> Device:
        """What it is predicted for: a GPU model, a size, or "this machine"; an unknown one is refused."""
        chosen: Device = self.device_control.value
        return chosen

    @device.setter
    def device(self, device: Device) -> None:
        known = _known_device(device)
        if known not in self.device_control.options:
            self.device_control.options = (*self.device_control.options, known)
        self.device_control.value = known

    @property
    def estimate(self) -> MemoryEstimate | None:
        """The last estimate shown; `wait()` for that of the config as it is now."""
        return self.view.estimate

    @property
    def cards(self) -> tuple[CardAnswer, ...]:
        """The verdict for the device and for each of the GPU models, as far as they are known."""
        return self.view.cards_shown

    @property
    def busy(self) -> bool:
        """Whether something asked is not answered yet."""
        return not self._answers.wait(0)

    def wait(self, timeout: float | None = None) -> MemoryPanel:
        """Return when the config as it is now is answered in full.

        Raises:
            ConfigError: for edits in the form that do not fit.
            KitError: for what the prediction failed on.
            TimeoutError: after `timeout` seconds.
        """
        if not self._answers.wait(timeout):
            raise TimeoutError(f"still predicting after {timeout} s; it goes on")
        self._refresh()
        self.form.check()
        if self.view.failure is not None:
            raise self.view.failure
        return self

    def save_png(self, path: str | Path) -> Path:
        """Write breakdown and timeline as a picture.

        Raises:
            PlanError: while there is no estimate.
        """
        target = Path(path)
        target.write_bytes(look.png(memory_figure(self._estimated()), 2 * look.PIXELS_PER_INCH))
        return target

    def save_snapshot(self, path: str | Path) -> Path:
        """Write what torch's memory viewer loads.

        Raises:
            PlanError: while there is no estimate.
        """
        from kit.memory.replay.snapshot import write_snapshot

        recording = self._estimated().recording
        if recording is None:
            raise PlanError("this estimate holds no recording, of which a snapshot is made; predict it anew")
        return write_snapshot(path, recording)

    def save(self, path: str | Path) -> Path:
        """Write the config as YAML, to be committed."""
        return self.config.save(path)

    def _estimated(self) -> MemoryEstimate:
        if self.estimate is None:
            raise PlanError("nothing is predicted yet; call wait() first")
        return self.estimate

    # -- what happens

    def _ask(self) -> None:
        """Ask for the config and device as they are now; what is shown turns grey until there is an answer."""
        device = self.device
        names = self._cards if device in self._cards else (device, *self._cards)
        request = MemoryRequest(self.config, device, names)
        self._show_code()
        note = batch_rule(Part.of(self._data), self.config).note
        told = f"predicted for {self.config.loader.batch_size} here; in a fit, {note}" if note else ""
        self.form.show_hints({"loader.batch_size": told})
        self.view.wait_for_answer()
        if names != tuple(answer.device for answer in self.cards):
            self.view.on_cards(request, tuple(map(CardAnswer, names)))
        self._answers.ask(request)

    def _export(self, method: str, name: str) -> None:
        """What a click on an export does; what went wrong stands beside it, and has no place in a log."""
        try:
            self.view.say(f"written: {getattr(self, method)(name)}")
        except (KitError, OSError) as error:
            self.view.say(f"not written: {error}")

    # -- what is shown

    def _show_code(self) -> None:
        config = self.config.as_code(against=self._base)
        own = {"module": self._module, "data": self._data}
        parts = [name if part is not None else "None" for name, part in own.items()]
        given = parts if set(parts) != {"None"} else []
        arguments = f"{', '.join([*given, config])}, device={json.dumps(self.device)}"
        # One's own data may have a batch size of its own, so there the one predicted for is said.
        own_size = f"kit.memory_model({arguments}).estimate({self.config.loader.batch_size})"
        self.code.value = _code_html(f"kit.predict_memory({arguments})" if self._data is None else own_size)

    def _draw(self) -> Any:
        self.form.ui.layout.flex = "0 0 auto"
        left = ipywidgets.VBox(
            [_heading("device"), self.device_control, self.form.ui], layout={"flex": f"1 1 {WIDTH}", "min_width": "0"}
        )
        exports = ipywidgets.HBox(list(self.buttons.values()), layout={"grid_gap": "8px"})
        right = ipywidgets.VBox(
            [*(self._slider_row(path) for path in SLIDERS), self.dials.ui, self.view.ui, exports, self.code],
            layout={"flex": "100 1 480px", "min_width": "0"},
        )
        columns = ipywidgets.HBox(
            [left, right], layout={"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": "8px 28px"}
        )
        return live_box([columns])

    def _slider_row(self, path: str) -> Any:
        number = self.form.row(path)
        number.layout.flex = f"0 0 {_NUMBER_WIDTH}"
        return ipywidgets.HBox([number, self.sliders[path].widget], layout={"grid_gap": "12px"})

    def _still(self) -> tuple[str, bytes | None]:
        if self.estimate is None:
            return "nothing predicted yet", None
        words = ". ".join((*headline(self.estimate), sentence(self.cards)))
        return words, look.png(memory_figure(self.estimate))

    def __repr__(self) -> str:
        return f"MemoryPanel of {self.config!r}"

    def _ipython_display_(self) -> None:
        self._show()


def _make_model(module: Any, data: Any, config: Config, device: Device) -> AnsweringModel:
    from kit.memory.batch_model import memory_model

    return memory_model(module, data, config, device=device)


def _slider(field: Any, most: int) -> StepsSlider:
    return StepsSlider(field, marks(max(most, int(field.value))))


def _device_control(device: Device) -> Any:
    known = _known_device(device)
    return ipywidgets.Dropdown(
        options=list(dict.fromkeys([*_DEVICES, known])), value=known, description="predict for",
        tooltip="which GPU model it is predicted for; it need not be here", layout={"width": "auto", "margin": "1px 0"},
        style={"description_width": LABEL_WIDTH},
    )  # fmt: skip


def _known_device(device: Device) -> Device:
    """The device as the table spells it; a size stays as it is written.

    Raises:
        PlanError: for an unknown GPU model, and a size that is none.
    """
    name = THIS_MACHINE if device == THIS_MACHINE else target_of(device).name
    return name if name in _DEVICES else device


def _export_button(name: str) -> Any:
    icon, tooltip = _EXPORTS[name]
    return ipywidgets.Button(description=name, icon=icon, tooltip=tooltip, layout={"width": "110px"})


def _heading(title: str) -> Any:
    text = f"<div style='font-weight:600;margin:8px 0 2px;line-height:1.4'>{html.escape(title)}</div>"
    return ipywidgets.HTML(text, layout={"margin": "0"})


def _code_html(call: str) -> str:
    font = "font-family:var(--jp-code-font-family, monospace);font-size:.9em"
    code = f"{font};white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;line-height:1.4;margin:2px 0"
    return f"<div style='line-height:1.4'>the same in code: <pre style='{code}'>{html.escape(call)}</pre></div>"


_LARGEST = 2**31 - 1
_LEAST_QUALITY = 0.01
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
        heading = _dials_heading(dials.order_sentence)
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


def _dials_heading(order: str) -> Any:
    words = f" <span style='font-weight:400;color:{_QUIET}'>{html.escape(order)}</span>" if order else ""
    text = f"<div style='font-weight:600;margin:8px 0 2px;line-height:1.4'>model size{words}</div>"
    return ipywidgets.HTML(text, layout={"margin": "0"})


PER_DOUBLING = 8


def marks(largest: int) -> list[int]:
    """1, 2, ... 8, 9, ... 16, 18, ... 32, 36, ... up to `largest`, which is always among them.

    Raises:
        ValueError: when `largest` is below 1.
    """
    if largest < 1:
        raise ValueError(f"the largest mark is {largest}, but must be at least 1")
    found, step = [1], 1
    while found[-1] < largest:
        if found[-1] >= 2 * PER_DOUBLING * step:
            step *= 2
        found.append(min(found[-1] + step, largest))
    return found


class StepsSlider:
    """A slider (`widget`) tied to a number field both ways, over these marks."""

    def __init__(self, field: Any, over: Sequence[float]) -> None:
        value = field.value
        self._field, self._marks, self._following = field, tuple(over), False
        self.widget = ipywidgets.SelectionSlider(
            options=self._options(value), value=value, readout=False, tooltip=field.tooltip,
            layout={"flex": "1 1 120px", "min_width": "100px", "margin": "1px 0"},
        )  # fmt: skip
        field.observe(lambda change: self._follow(change["new"]), "value")
        self.widget.observe(lambda change: self._lead(change["new"]), "value")

    def _options(self, value: float) -> list[float]:
        return sorted({*self._marks, value})

    def _follow(self, value: float) -> None:
        self._following = True  # new options move the slider for a moment
        try:
            if value not in self.widget.options:
                self.widget.options = self._options(value)
            self.widget.value = value
        finally:
            self._following = False

    def _lead(self, value: float | None) -> None:
        if value is not None and not self._following:
            self._field.value = value
