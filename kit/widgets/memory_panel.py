"""MemoryPanel: what a config would need of a device, and what if: move a slider and see.

Batch size and accumulation are answered while they are moved; any other change, also of the sizes of the model, is
recorded anew by dry runs in other processes, and until then the pictures are grey. Every control has a method or a
property, so that a script does the same. Clicks return at once; `wait()` returns when everything is answered. Nothing
is allocated on any device, and the device need not be here.

A slider drives a number field and follows it: the field is exact, the slider is quick. `DialsView` has such a pair for
each size of a model that `kit.memory.sizes` finds, and writes them into the form, whose config stays the only one.
`MemoryPart` is what this panel and a tab of `kit.panel` share: the device, the dials, and the answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.arguments import config_first
from kit.charts import style as look
from kit.charts.timeline import memory_figure
from kit.config import Config
from kit.errors import KitError, PlanError
from kit.memory.dials import DATA_ARGUMENTS, ModelDials, model_dials
from kit.memory.replay.cards import CARDS, COMMON_CARDS, THIS_MACHINE, find_card, target_of
from kit.memory.replay.estimate import MemoryEstimate
from kit.trial.payload import Part, batch_rule
from kit.widgets.controls import NumberField, correction_note
from kit.widgets.form import ConfigForm
from kit.widgets.live import ConfigPanel, live_box, weakly
from kit.widgets.memory_view import CardAnswer, Device, MemoryAnswers, MemoryRequest, MemoryView, headline, sentence
from kit.widgets.parts import LABEL_WIDTH, button, code_html, heading_html, line, note_html, put, row, two_columns

if TYPE_CHECKING:
    from kit.memory.batch_model import MemoryModel

SHOWN = {
    "model": ("arguments",),
    "hardware": ("precision", "strategy", "devices"),
    "levers": ("gradient_checkpointing", "zero_grad_after_step", "optimizer", "attention"),
    "training": ("gradient_clip_norm",),
}
SLIDERS = {"loader.batch_size": 512, "levers.accumulate_grad_batches": 64}
"""Fields answered while they are moved, and where their sliders end."""
_DEVICES = (THIS_MACHINE, *(card.name for card in CARDS))
_NUMBER_WIDTH = "262px"
_LARGEST, _LEAST_QUALITY = 2**31 - 1, 0.01


@config_first
def memory_panel(
    config: Any = None,
    module: Any = None,
    data: Any = None,
    *,
    device: Device = THIS_MACHINE,
    cards: Sequence[str] = COMMON_CARDS,
    sizes: Sequence[str] = (),
) -> MemoryPanel:
    """Show sliders for a config and the memory that it would need of a device.

    Args:
        config: What the form starts from; the default config when left out. `panel.config` is the edited copy.
        module: What would be trained, as `kit.fit` takes it. None takes `model.target`.
        data: What it would be trained on, as `kit.fit` takes it. Its batch size is replaced by that of the form.
        device: A GPU model, a size such as "24 GiB", or "this machine".
        cards: GPU models that are judged beside it.
        sizes: Arguments of the model that set its size and that `kit.memory.sizes` does not know by name.

    Returns:
        The panel, which a notebook shows as the last line of a cell.

    Raises:
        PlanError: for an unknown GPU model.
        ConfigError: for a name in `sizes` that is no argument with a whole number.

    Example:
        >>> shown = kit.memory.panel(config, device="A100-40GB")
        >>> shown.close()
    """
    if sizes:
        model_dials(config, module, data, also=sizes)  # which refuses names that there are not
    cards = [cards] if isinstance(cards, str) else cards
    return MemoryPanel(config, module, data, device=device, cards=cards, sizes=sizes)


class MemoryPanel(ConfigPanel):
    """The widgets, and the methods that mirror them; `options` are those of `MemoryPart`."""

    def __init__(self, config: Config, module: Any = None, data: Any = None, **options: Any) -> None:
        self._base, self._module, self._data = config, module, data
        self.form = ConfigForm(config, SHOWN, folded=False)
        self._batch_note = line(display="none")  # as wide as number and slider together
        self.part = MemoryPart(self.form, module, data, on_end=weakly(self._refresh), **options)
        self.view, self.dials, self.device_control = self.part.view, self.part.dials, self.part.device_control
        self.sliders = self.part.sliders
        snapshot = "write memory.pickle, which torch's memory viewer loads (pytorch.org/memory_viz)"
        self.buttons = {
            "PNG": button("PNG", "image", "write both charts to memory.png", "110px"),
            "snapshot": button("snapshot", "save", snapshot, "110px"),
        }
        self.code = line(margin="6px 0 0")
        predict, export = weakly(self._predict), weakly(self._export)
        self.form.on_change(lambda _: predict())
        self.form.on_rejected(predict)
        self.device_control.observe(lambda _: predict(), "value")
        self.buttons["PNG"].on_click(lambda _: export("save_png", "memory.png"))
        self.buttons["snapshot"].on_click(lambda _: export("save_snapshot", "memory.pickle"))
        self.ui = self._draw()
        self._own()
        self._predict()

    # -- what the controls do

    @property
    def device(self) -> Device:
        """What it is predicted for: a GPU model, a size, or "this machine"; an unknown one is refused."""
        return self.part.device

    @device.setter
    def device(self, device: Device) -> None:
        self.part.device = device

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
        """Whether a request is not answered yet."""
        return self.part.busy

    def wait(self, timeout: float | None = None) -> MemoryPanel:
        """Return when the config as it is now is answered in full.

        Raises:
            ConfigError: for edits in the form that do not fit.
            KitError: for what the prediction failed on.
            TimeoutError: after `timeout` seconds.
        """
        self.part.wait(timeout)
        self._refresh()
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
        from kit.memory.replay.snapshot import save_snapshot, to_snapshot

        recording = self._estimated().recording
        if recording is None:
            raise PlanError("this estimate holds no recording, of which a snapshot is made; predict it anew")
        return save_snapshot(path, to_snapshot(recording))

    def _estimated(self) -> MemoryEstimate:
        if self.estimate is None:
            raise PlanError("nothing is predicted yet; call wait() first")
        return self.estimate

    # -- what happens

    def _predict(self) -> None:
        """For the config and device as they are now; the pictures are grey until there is an answer."""
        self._show_code()
        note = batch_rule(Part.of(self._data), self.config).note
        hint = f"predicted for {self.config.loader.batch_size} here; in a fit, {note}" if note else ""
        put(self._batch_note, note_html(hint) if hint else "")
        if self.form.rejected:
            self.view.wait_for_answer()
            self.view.say("not predicted: the settings do not fit together yet")
        else:
            self.part.predict()

    def _export(self, method: str, name: str) -> None:
        """What a click on an export does; what went wrong stands beside it, and has no place in a log."""
        try:
            self.view.say(f"written: {getattr(self, method)(name)}")
        except (KitError, OSError) as error:
            self.view.say(f"not written: {error}")

    # -- what is shown

    def _show_code(self) -> None:
        arguments = f"{self._arguments()}, device={json.dumps(self.device)}"
        # A user's data may have its own batch size, so with it the batch size predicted for is an argument.
        with_size = f"kit.memory.model({arguments}).estimate({self.config.loader.batch_size})"
        self.code.value = code_html(f"kit.predict_memory({arguments})" if self._data is None else with_size)

    def _draw(self) -> Any:
        self.form.ui.layout.flex = "0 0 auto"
        title = line(heading_html("device"))
        left = ipywidgets.VBox([title, self.device_control, self.form.ui])
        sliders = [_beside(self.form.row(path), slider) for path, slider in self.sliders.items()]
        sliders.insert(1, self._batch_note)
        exports = row(*self.buttons.values(), gap="8px")
        return live_box([two_columns(left, [*sliders, self.dials.ui, self.view.ui, exports, self.code])])

    def _still(self) -> tuple[str, bytes | None]:
        if self.estimate is None:
            return "nothing predicted yet", None
        words = ". ".join((*headline(self.estimate), sentence(self.cards)))
        return words, look.still(memory_figure(self.estimate), 2 * look.PIXELS_PER_INCH)


class MemoryPart:
    """The device that memory is predicted for, the sizes of the model, and what the config of a form needs.

    Args:
        form: Whose config is asked about; sizes are written into it.
        on_end: Called when a request is answered in full.
        on_change: Called whenever more is known.

    The others are as `memory_panel` takes them.
    """

    def __init__(
        self,
        form: ConfigForm,
        module: Any = None,
        data: Any = None,
        *,
        device: Device = THIS_MACHINE,
        cards: Sequence[str] = COMMON_CARDS,
        sizes: Sequence[str] = (),
        make_model: Callable[[Config, Device], MemoryModel] | None = None,
        on_end: Callable[[], object] = lambda: None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self._form, self._cards = form, tuple(find_card(name).name for name in cards)
        numbers = {path: form.controls[path] for path in SLIDERS}
        ends = {path: max(most, int(numbers[path].value)) for path, most in SLIDERS.items()}
        self.sliders = {path: StepsSlider(number, marks(ends[path])) for path, number in numbers.items()}
        self.dials = DialsView(form, module, data, sizes)
        self.view = MemoryView(form.show_problems, on_end, on_change)
        self.answers = MemoryAnswers(make_model or partial(_make_model, module, data), self.view)
        known = _known_device(device)
        self.device_control = ipywidgets.Dropdown(
            options=list(dict.fromkeys([*_DEVICES, known])), value=known, description="predict for",
            tooltip="which GPU model it is predicted for; it need not be here",
            layout={"width": "auto", "margin": "1px 0"}, style={"description_width": LABEL_WIDTH},
        )  # fmt: skip

    def named_sliders(self) -> list[Any]:
        """The sliders with the names and the values of their fields, where those stand elsewhere."""
        for path, slider in self.sliders.items():
            slider.name(self._form.controls[path].description)
        return [slider.widget for slider in self.sliders.values()]

    @property
    def device(self) -> Device:
        """What it is predicted for."""
        chosen: Device = self.device_control.value
        return chosen

    @device.setter
    def device(self, device: Device) -> None:
        known = _known_device(device)
        if known not in self.device_control.options:
            self.device_control.options = (*self.device_control.options, known)
        self.device_control.value = known

    @property
    def answer(self) -> CardAnswer | None:
        """What is known of the device, with the largest batch that fits."""
        return next((answer for answer in self.view.cards_shown if answer.device == self.device), None)

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        return not self.answers.wait(0)

    def predict(self) -> None:
        """Ask about config and device as they are now; the pictures are grey until there is an answer."""
        device = self.device
        names = self._cards if device in self._cards else (device, *self._cards)
        request = MemoryRequest(self._form.config, device, names)
        self.view.wait_for_answer()
        if names != tuple(answer.device for answer in self.view.cards_shown):
            self.view.on_cards(request, tuple(map(CardAnswer, names)))
        self.answers.request(request)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last request is answered in full.

        Raises:
            ConfigError: for edits in the form that do not fit.
            KitError: for what the prediction failed on.
            TimeoutError: after `timeout` seconds.
        """
        if not self.answers.wait(timeout):
            raise TimeoutError(f"still predicting after {timeout} s; it goes on")
        self._form.check()
        if self.view.failure is not None:
            raise self.view.failure


def _make_model(module: Any, data: Any, config: Config, device: Device) -> MemoryModel:
    from kit.memory.batch_model import memory_model

    return memory_model(config, module, data, device=device)


def _known_device(device: Device) -> Device:
    """The device as the table spells it; a size stays as it is written.

    Raises:
        PlanError: for an unknown GPU model, and a size that is none.
    """
    name = THIS_MACHINE if device == THIS_MACHINE else target_of(device).name
    return name if name in _DEVICES else device


def _beside(number: Any, slider: StepsSlider) -> Any:
    left = ipywidgets.VBox([number], layout={"flex": f"0 0 {_NUMBER_WIDTH}"})
    return ipywidgets.HBox([left, slider.widget], layout={"grid_gap": "12px"})


class DialsView:
    """A number field and a slider (`ui`) for each size of a model, under the order in which to change them.

    The rows stay the same widgets while the same arguments are sizes, so that the focus stays; another model gets
    other rows. `also` names arguments that are sizes whatever they are called.
    """

    def __init__(self, form: ConfigForm, module: Any = None, data: Any = None, also: Sequence[str] = ()) -> None:
        self._form, self._module, self._data, self._also = form, module, data, also
        self.dials = ModelDials(form.config, (), {})
        self.fields: dict[str, Any] = {}
        self.sliders: dict[str, StepsSlider] = {}
        self._following = False
        self.ui = ipywidgets.VBox([])
        self._follow(form.config)
        form.on_change(self._follow)
        form.follow(self._of_the_data)

    def _of_the_data(self, before: Config, after: Config) -> dict[str, Any]:
        """What the data is made with, where sizes that it follows are others in `model.arguments`."""
        if before.model == after.model or before.data.arguments != after.data.arguments:
            return {}
        followed = {dial.name: dial.value for dial in self.dials if dial.follows}
        with contextlib.suppress(KitError):  # the prediction says it
            found = model_dials(after, self._module, self._data, also=self._also)
            turned = {dial.name: dial.value for dial in found if followed.get(dial.name, dial.value) != dial.value}
            return {DATA_ARGUMENTS: {**after.data.arguments, **turned}} if turned else {}
        return {}

    def _follow(self, config: Config) -> None:
        """Show the dials of this config."""
        try:
            found = model_dials(config, self._module, self._data, also=self._also)
        except KitError as error:  # the prediction says it
            found = ModelDials(config, (), {}, str(error))
        if [(dial.name, dial.reason) for dial in found] != [(dial.name, dial.reason) for dial in self.dials]:
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
        self.fields, self.sliders, rows = {}, {}, []
        for dial in dials:
            field = self.fields[dial.name] = NumberField(
                dial.value, least=1 if dial.whole else _LEAST_QUALITY, most=_LARGEST, whole=dial.whole,
                description=dial.name.replace("_", " "), layout={"width": "auto", "margin": "1px 0"},
                tooltip=f"model.arguments.{dial.name}: {dial.range_reason}", style={"description_width": LABEL_WIDTH},
            )  # fmt: skip
            slider = self.sliders[dial.name] = StepsSlider(field, dial.marks)
            field.observe(lambda change, name=dial.name: self._turn(name, change["new"]), "value")
            reason = line(note_html(dial.reason))
            rows.append(ipywidgets.VBox([_beside(field, slider), correction_note(field), reason]))
        heading = line(heading_html("model size", dials.order_sentence))
        self.ui.children = [heading, *rows] if rows else []


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
    """A slider (`widget`) tied to a number field both ways, over these marks.

    A number between the marks is added to them when the field has it.
    """

    def __init__(self, field: Any, over: Sequence[float]) -> None:
        value = field.value
        self._field, self._marks, self._following = field, tuple(over), False
        self.widget = ipywidgets.SelectionSlider(
            options=self._options(value), value=value, readout=False, tooltip=field.tooltip,
            layout={"flex": "1 1 120px", "min_width": "100px", "margin": "1px 0"},
        )  # fmt: skip
        field.observe(lambda change: self._follow(change["new"]), "value")
        self.widget.observe(lambda change: self._lead(change["new"]), "value")

    def name(self, words: str) -> None:
        """Show these words and the value too."""
        self.widget.description, self.widget.readout = words, True
        self.widget.style.description_width = LABEL_WIDTH
        self.widget.layout.flex, self.widget.layout.width = "0 0 auto", "auto"

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
