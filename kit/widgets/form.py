"""ConfigForm: a Config as a form; edit a copy, validate it as a whole, replace, keep the last valid one.

The form holds no settings of its own: `form.config` is always a valid Config, and controls, labels, tooltips and error
texts come from `Config.fields()`. An edit that does not fit is shown with its reason beside its field and waits there:
`ddp` chosen before `devices: 2` is taken over as soon as both are given.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets

from kit.config import Config, FieldInfo
from kit.errors import ConfigError, Problem
from kit.widgets.controls import LABEL_WIDTH, make_control, read_control, write_control

SHOWN = {
    "hardware": ("accelerator", "devices", "strategy", "precision"),
    "loader": ("batch_size", "num_workers", "requests_in_flight"),
    "calibration": ("enabled",),
    "levers": ("accumulate_grad_batches", "gradient_checkpointing"),
    "chunking": ("chunk", "shard"),
    "trial": ("max_steps", "warmup_steps"),
}
"""Sections and fields in sight; every other field is under "all settings"."""

WIDTH, _NARROWEST = "352px", "300px"
_STYLE = (
    "<style>.kit-form .widget-label-basic { white-space: normal; overflow: visible; height: auto; line-height: 1.3 }"
    " .kit-form .widget-checkbox { height: auto }</style>"
)
_HINT, _ERROR = "var(--jp-ui-font-color2, #666)", "var(--jp-error-color1, #b3261e)"


class ConfigForm:
    """Controls on one Config. `config` reads and replaces it; `on_change` hears of every valid change.

    Args:
        config: What it starts from.
        shown: Title → its fields in sight, by name in the section of that title, or by dotted path.
        folded: Whether every other field can be unfolded below them.
    """

    def __init__(
        self, config: Config | None = None, shown: Mapping[str, Sequence[str]] = SHOWN, *, folded: bool = True
    ) -> None:
        self._config = config or Config()
        self._fields = {info.path: info for info in Config.fields()}
        self.controls = {path: make_control(info, self._config.get(path)) for path, info in self._fields.items()}
        self._notes: dict[str, Any] = {}
        self._rows = {path: ipywidgets.VBox([control]) for path, control in self.controls.items()}
        self._hints: dict[str, str] = {}
        self._values: dict[str, tuple[Any, Any]] = {}
        self._listeners: list[Callable[[Config], object]] = []
        self.problems: tuple[Problem, ...] = ()
        self._mutex = threading.RLock()
        self._writing = False
        for path, control in self.controls.items():
            control.observe(lambda _, path=path: self._edited(path), ["value", "correction"])
        self.ui = self._draw(shown, folded)

    # -- the config

    @property
    def config(self) -> Config:
        """The last valid Config."""
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        with self._mutex:
            self._writing = True
            try:
                for path, control in self.controls.items():
                    write_control(self._fields[path], control, config.get(path))
            finally:
                self._writing = False
            self._accept(config, ())

    def edit(self, changes: Mapping[str, Any]) -> None:
        """Put values into controls, all before any is judged, as if they had been typed at once; others stay."""
        with self._mutex:
            self._writing = True
            try:
                for path, value in changes.items():
                    write_control(self._fields[path], self.controls[path], value)
            finally:
                self._writing = False
            self._accept(*self._apply(next(reversed(list(changes)))))

    def check(self) -> None:
        """That every control holds what the config has.

        Raises:
            ConfigError: naming each control whose value does not fit.
        """
        if self.problems:
            raise ConfigError(self.problems)

    def on_change(self, callback: Callable[[Config], object]) -> Callable[[], None]:
        """Call `callback(config)` after every valid change; the function returned ends that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def _edited(self, path: str) -> None:
        with self._mutex:
            if not self._writing:
                self._accept(*self._apply(path))

    def _apply(self, last_edited: str) -> tuple[Config, tuple[Problem, ...]]:
        """As many of the waiting edits as fit together, and what is wrong with the rest."""
        edits, problems = self._read()
        while edits:
            try:
                return self._config.replace(edits), tuple(problems)
            except ConfigError as error:
                problems += error.problems
                faulty = [path for path in edits if any(_concerns(problem, path) for problem in error.problems)]
                for path in faulty or [last_edited if last_edited in edits else next(iter(edits))]:
                    del edits[path]
        return self._config, tuple(problems)

    def _read(self) -> tuple[dict[str, Any], list[Problem]]:
        """Every control that differs from the config, and every one that does not parse."""
        edits: dict[str, Any] = {}
        problems: list[Problem] = []
        for path in self.controls:
            try:
                value = self._value(path)
            except ConfigError as error:
                problems += error.problems
                continue
            if _thawed(value) != _thawed(self._config.get(path)):
                edits[path] = value
        return edits, problems

    def _value(self, path: str) -> Any:
        """What a control holds; its text is parsed once, because a slider moves faster than YAML is read."""
        control = self.controls[path]
        known = self._values.get(path)
        if known is None or known[0] != control.value:
            known = self._values[path] = (control.value, read_control(self._fields[path], control))
        return known[1]

    def _accept(self, config: Config, problems: tuple[Problem, ...]) -> None:
        changed, self._config, self.problems = config != self._config, config, problems
        self._annotate()
        if changed:
            for listener in list(self._listeners):
                listener(config)

    # -- notes beside the controls

    def show_hints(self, hints: dict[str, str]) -> None:
        """Show a sentence under each of these fields, such as why `auto` chose what it chose."""
        with self._mutex:
            self._hints = dict(hints)
            self._annotate()

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show what is wrong with the config that only its use could tell, until the next edit."""
        with self._mutex:
            self.problems = tuple(problems)
            self._annotate()

    def _annotate(self) -> None:
        for path in self._fields:
            errors = [problem.message for problem in self.problems if _concerns(problem, path)]
            correction = getattr(self.controls[path], "correction", "")
            self._note(path, _note_html(errors, correction, self._hints.get(path, "")))

    def _note(self, path: str, text: str) -> None:
        if path not in self._notes and text:
            self._notes[path] = ipywidgets.HTML(layout={"margin": "0", "width": "auto"})
            self._rows[path].children = (self.controls[path], self._notes[path])
        if path in self._notes and self._notes[path].value != text:
            self._notes[path].value = text
            self._notes[path].layout.display = None if text else "none"

    # -- layout

    def row(self, path: str) -> Any:
        """The control of one field with its note, to be placed elsewhere than in the form."""
        return self._rows[path]

    def _draw(self, shown: Mapping[str, Sequence[str]], folded: bool) -> Any:
        groups = [_group(title, (self._rows[path] for path in _paths(title, names))) for title, names in shown.items()]
        style = ipywidgets.HTML(_STYLE, layout={"display": "none"})
        children = [_columns(groups), *(self._draw_rest(shown) if folded else []), style]
        box = ipywidgets.VBox(children, layout={"flex": f"1 1 {WIDTH}", "min_width": "0"})
        box.add_class("kit-form")
        return box

    def _draw_rest(self, shown: Mapping[str, Sequence[str]]) -> list[Any]:
        """Every field that is not in sight, and the button that unfolds them."""
        in_sight = {path for title, names in shown.items() for path in _paths(title, names)}
        rest: dict[str, list[FieldInfo]] = {}
        for info in self._fields.values():
            if info.path not in in_sight:
                section = info.section if "." in info.path else "experiment"
                rest.setdefault(section, []).append(info)
        content = _columns(
            _group(section, (self._rows[info.path] for info in infos)) for section, infos in rest.items()
        )
        content.layout.display = "none"
        return [_fold("all settings", content), content]

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.ui)  # type: ignore[no-untyped-call]


def _paths(title: str, names: Iterable[str]) -> list[str]:
    return [name if "." in name else f"{title}.{name}" for name in names]


def _group(title: str, rows: Iterable[Any]) -> Any:
    heading = f"<div style='font-weight:600;margin:8px 0 2px;line-height:1.4'>{html.escape(title)}</div>"
    return ipywidgets.VBox([ipywidgets.HTML(heading, layout={"margin": "0"}), *rows])


def _columns(groups: Iterable[Any]) -> Any:
    """Groups below each other, or side by side where there is room."""
    template = f"repeat(auto-fill, minmax(min({_NARROWEST}, 100%), 1fr))"
    layout = {"grid_template_columns": template, "grid_gap": "0 28px", "align_items": "flex-start"}
    return ipywidgets.GridBox(list(groups), layout=layout)


def _fold(title: str, content: Any) -> Any:
    """A button that shows and hides `content`."""
    button = ipywidgets.Button(
        description=f"▸ {title}",
        tooltip=f"show or hide {title}",
        layout={"width": "auto", "margin": "10px 0 2px", "align_self": "flex-start", "padding": "0"},
    )
    button.style.button_color = "transparent"

    def toggle(_: Any) -> None:
        hidden = content.layout.display == "none"
        content.layout.display = "grid" if hidden else "none"
        button.description = f"{'▾' if hidden else '▸'} {title}"

    button.on_click(toggle)
    return button


def _note_html(errors: list[str], correction: str, hint: str) -> str:
    """What is wrong; else what was corrected and what is worth knowing, each a line."""
    lines = [(" role='alert'", _ERROR, " ".join(errors))] if errors else []
    lines = lines or [(" role='status'", _HINT, correction), ("", _HINT, hint)]
    style = f"margin:0 0 4px calc({LABEL_WIDTH} + 8px);font-size:.85em;line-height:1.3"
    return "".join(
        f"<div{role} style='{style};color:{colour}'>{html.escape(text)}</div>" for role, colour, text in lines if text
    )


def _concerns(problem: Problem, path: str) -> bool:
    return problem.path == path or problem.path.startswith(path + ".")


def _thawed(value: Any) -> Any:
    return [_thawed(item) for item in value] if isinstance(value, list | tuple) else value
