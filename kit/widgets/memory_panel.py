"""MemoryPanel: what a config would need of a device, and what if: move a slider and see.

Batch size and accumulation answer while they are moved; whatever else is changed, the sizes of the model among them, is
recorded anew by dry runs in other processes, and until then the pictures are grey. Every control has a method or a
property, so that a script does the same. Clicks return at once; `wait()` returns when everything asked is answered.
Nothing is allocated on any device, and no such device need be here.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets

from kit.config import Config
from kit.errors import KitError, PlanError
from kit.plan.memory.cards import CARDS, THIS_MACHINE, find_card, target_of
from kit.plan.memory.estimate import MemoryEstimate
from kit.report import figure as look
from kit.report.memory_charts import memory_figure
from kit.run.batch_rule import batch_rule
from kit.run.payload import Part
from kit.widgets.config_form import WIDTH, ConfigForm
from kit.widgets.controls import LABEL_WIDTH
from kit.widgets.dials_view import DialsView
from kit.widgets.handle import Handle, weakly
from kit.widgets.live import live_box
from kit.widgets.memory_answers import Answers, Model, Request
from kit.widgets.memory_cards import CardAnswer, Device, sentence
from kit.widgets.memory_view import MemoryView, headline
from kit.widgets.steps import StepsSlider, marks

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
        make_model: Callable[[Config, Device], Model] | None = None,
    ) -> None:
        self._base, self._module, self._data = config, module, data
        self._cards = tuple(find_card(name).name for name in cards)
        self.form = ConfigForm(config, SHOWN, folded=False)
        self.sliders = {path: _slider(self.form.controls[path], most) for path, most in SLIDERS.items()}
        self.dials = DialsView(self.form, module, data, sizes)
        self.view = MemoryView(self.form.show_problems, weakly(self._refresh))
        self._answers = Answers(make_model or partial(_make_model, module, data), self.view)
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
        from kit.plan.memory.snapshot import write_snapshot

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
        request = Request(self.config, device, names)
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


def _make_model(module: Any, data: Any, config: Config, device: Device) -> Model:
    from kit.run.memory.model import memory_model

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
