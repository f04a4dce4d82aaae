"""ConfigForm: a Config as a form; edit a copy, validate it as a whole, replace, keep the last valid one.

Every setting that differs from the config the form started from is marked and has a button that takes it back. With
`folded`, settings stand in groups that fold, those most changed in sight, and a search finds the others.

The form holds no settings of its own: `form.config` is always a valid Config, and controls, labels, tooltips and error
texts come from `Config.fields()`. An edit that does not fit is shown with its reason beside its field and waits there:
`ddp` chosen before `devices: 2` is taken over as soon as both are given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets

from kit.config import Config, FieldInfo
from kit.errors import ConfigError, Problem
from kit.widgets.controls import label, make_control, plain, read_control, show, write_control
from kit.widgets.parts import ERROR, WIDTH, fold_button, heading_html, hint_html, line, note_html, put

SHOWN = {
    "hardware": ("accelerator", "devices", "strategy", "precision"),
    "loader": ("batch_size", "num_workers", "requests_in_flight"),
    "levers": ("accumulate_grad_batches", "gradient_checkpointing"),
    "trial": ("max_steps", "warmup_steps"),
}
"""Groups that are open at first and their fields in sight; every other field is a click or a search away."""

_NARROWEST = "300px"
_STYLE = """<style>
.kit-form .widget-label-basic { white-space: normal; overflow: visible; height: auto; line-height: 1.3 }
.kit-form .widget-checkbox { height: auto }
.kit-row { position: relative; padding-right: 26px }
.kit-changed > :first-child .widget-label, .kit-changed > :first-child span { font-weight: 600 }
.kit-row > .kit-back { position: absolute; right: 0; top: 1px; width: 24px; padding: 0; background: none; margin: 0 }
.kit-form .kit-fold { flex: 1 1 auto }
.kit-form .kit-fold.kit-more { font-weight: 400; flex: 0 0 auto; margin-right: 26px }
.kit-row > * { min-width: 0; max-width: 100% }
.kit-row .kit-hint > summary { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; cursor: pointer }
.kit-row .kit-hint[open] > summary { white-space: normal }
</style>"""


class ConfigForm:
    """Controls on one Config. `config` reads and replaces it; `on_change` is called after every valid change.

    Args:
        config: What it starts from, and what settings are taken back to.
        shown: Title → its fields in sight, by name in the section of that title, or by dotted path.
        folded: Whether every other field can be unfolded and searched for.
    """

    def __init__(
        self, config: Config | None = None, shown: Mapping[str, Sequence[str]] = SHOWN, *, folded: bool = True
    ) -> None:
        self._config = self._base = config or Config()
        self._fields = {info.path: info for info in Config.fields()}
        self.controls = {path: make_control(info, self._config.get(path)) for path, info in self._fields.items()}
        self._notes: dict[str, Any] = {}
        self._backs: dict[str, Any] = {}
        self._rows = {path: _row(control) for path, control in self.controls.items()}
        self._groups: list[_Group] = []
        self.search = ipywidgets.Text(
            placeholder="find a setting", tooltip="words of its name or of what it is for",
            layout={"width": "auto", "margin": "0 26px 2px 0"},
        )  # fmt: skip
        self._hints: dict[str, dict[str, str]] = {}
        self._values: dict[str, tuple[Any, Any]] = {}
        self._listeners: list[Callable[[Config], object]] = []
        self.problems: tuple[Problem, ...] = ()
        self._mutex = threading.RLock()
        self._writing = False
        for path, control in self.controls.items():
            control.observe(lambda _, path=path: self._edited(path), ["value", "correction"])
        self.search.add_class("kit-search")
        self.search.observe(lambda _: self._find(), "value")
        self.ui = self._draw_folded(shown) if folded else self._draw(shown)

    # -- the config

    @property
    def config(self) -> Config:
        """The last valid Config."""
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        with self._mutex:
            self._write({path: config.get(path) for path in self.controls})
            self._accept(config, ())

    def edit(self, changes: Mapping[str, Any]) -> None:
        """Put values into controls, all before any is judged, as if they had been typed at once; others stay."""
        with self._mutex:
            self._write(changes)
            self._accept(*self._apply([*changes][-1]))

    def _write(self, values: Mapping[str, Any]) -> None:
        self._writing = True
        try:
            for path, value in values.items():
                write_control(self._fields[path], self.controls[path], value)
        finally:
            self._writing = False

    @property
    def changed(self) -> tuple[str, ...]:
        """The fields that differ from the config it started from."""
        return tuple(self._base.diff(self._config))

    def reset(self, *paths: str) -> None:
        """Take these fields back to what the form started from; without any, all of them."""
        self.edit({path: self._base.get(path) for path in paths or self.controls})

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
            if plain(value) != plain(self._config.get(path)):
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

    def show_hints(self, hints: Mapping[str, str], source: str = "") -> None:
        """Show a sentence under each of these fields, such as why `auto` chose what it chose.

        They replace what the same source showed before. Callers in threads hold no lock of their own meanwhile: a
        change of the config calls its listeners under the form's.
        """
        with self._mutex:
            self._hints[source] = dict(hints)
            self._annotate()

    @property
    def hints(self) -> dict[str, str]:
        """The sentence under each field that has one."""
        with self._mutex:
            return {path: hint for hints in self._hints.values() for path, hint in hints.items()}

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show problems of the config that only using it reveals, until the next edit."""
        with self._mutex:
            self.problems = tuple(problems)
            self._annotate()

    def _annotate(self) -> None:
        """Mark what differs. Under each control what is wrong with it; else what was corrected and the hint."""
        changed, hints = set(self.changed), self.hints
        for path in changed | self._backs.keys():
            self._mark(path, path in changed)
        for group in self._groups:
            group.mark(changed)
        for path, control in self.controls.items():
            errors = " ".join(problem.message for problem in self.problems if _concerns(problem, path))
            correction, hint = getattr(control, "correction", ""), hints.get(path, "")
            text = note_html(errors, color=ERROR, role="alert") if errors else ""
            text += note_html(correction, role="status") if correction and not errors else ""
            text += hint_html(hint) if hint and not errors else ""
            if text and path not in self._notes:
                self._notes[path] = line(width="auto")
                self._rows[path].children += (self._notes[path],)
            if path in self._notes and self._notes[path].value != text:
                put(self._notes[path], text)

    def _mark(self, path: str, changed: bool) -> None:
        """Show that a field differs, with a way back. Children are only added, so that the control keeps the focus."""
        if self._rows[path].comm is None:  # closed
            return
        if path not in self._backs:
            was = show(self._fields[path], self._base.get(path)) or "nothing"
            back = self._backs[path] = ipywidgets.Button(icon="undo", tooltip=f"back to {was}, as it was at first")
            back.add_class("kit-back")
            back.on_click(lambda _: self.reset(path))
            self._rows[path].children += (back,)
        self._backs[path].layout.display = None if changed else "none"
        (self._rows[path].add_class if changed else self._rows[path].remove_class)("kit-changed")

    # -- layout

    def row(self, path: str) -> Any:
        """The control of one field with its note, to be placed elsewhere than in the form."""
        return self._rows[path]

    def _draw(self, shown: Mapping[str, Sequence[str]]) -> Any:
        return self._box(
            [_columns(_group(title, map(self.row, _paths(title, names))) for title, names in shown.items())]
        )

    def _draw_folded(self, shown: Mapping[str, Sequence[str]]) -> Any:
        """Every section as a group; those of `shown` first and open."""
        sections = dict.fromkeys([*shown, *(_section(info) for info in self._fields.values())])
        for title in sections:
            rows = {info.path: self._rows[info.path] for info in self._fields.values() if _section(info) == title}
            self._groups.append(_Group(title, rows, _paths(title, shown.get(title, ())), opened=title in shown))
        return self._box([self.search, *(group.ui for group in self._groups)])

    def _box(self, children: Sequence[Any]) -> Any:
        style = ipywidgets.HTML(_STYLE, layout={"display": "none"})
        box = ipywidgets.VBox([*children, style], layout={"flex": f"1 1 {WIDTH}", "min_width": "0"})
        box.add_class("kit-form")
        return box

    def _find(self) -> None:
        """Show the fields that have every word of the search in name or description; all groups without a search."""
        words = self.search.value.lower().split()
        found = None
        if words:
            texts = {path: f"{path} {label(info)} {info.help}".lower() for path, info in self._fields.items()}
            found = {path for path, text in texts.items() if all(word in text for word in words)}
        for group in self._groups:
            group.show(found)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.ui)  # type: ignore[no-untyped-call]


def _paths(title: str, names: Iterable[str]) -> list[str]:
    return [name if "." in name else f"{title}.{name}" for name in names]


def _group(title: str, rows: Iterable[Any]) -> Any:
    return ipywidgets.VBox([ipywidgets.HTML(heading_html(title), layout={"margin": "0"}), *rows])


def _columns(groups: Iterable[Any]) -> Any:
    """Groups below each other, or side by side where there is room."""
    template = f"repeat(auto-fill, minmax(min({_NARROWEST}, 100%), 1fr))"
    layout = {"grid_template_columns": template, "grid_gap": "0 28px", "align_items": "flex-start"}
    return ipywidgets.GridBox(list(groups), layout=layout)


class _Group:
    """One section: a title that folds it, its fields in sight, and a button for the others."""

    def __init__(self, title: str, rows: Mapping[str, Any], first: Sequence[str], *, opened: bool) -> None:
        self._name, self._rows, self._opened = title, rows, opened
        self._first = set(first or rows)
        self._found: set[str] | None = None
        self._all = False
        self._changed = 0
        self._title, self._more = fold_button(f"show or hide {title}"), fold_button(f"every setting of {title}")
        self._more.add_class("kit-more")
        self._title.on_click(lambda _: self._toggle())
        self._more.on_click(lambda _: self._toggle_all())
        head = ipywidgets.HBox([self._title, self._more], layout={"margin": "2px 0 0"})
        self.ui = ipywidgets.VBox([head, *rows.values()])
        self.show(None)

    def show(self, found: set[str] | None) -> None:
        """Show these fields of a search; without a search, those that are unfolded."""
        self._found = found
        shown = self._rows.keys() & found if found is not None else self._unfolded
        for path, one in self._rows.items():
            one.layout.display = None if path in shown else "none"
        self.ui.layout.display = None if found is None or shown else "none"
        hidden = len(self._rows) - len(self._first)
        self._more.layout.display = None if found is None and self._opened and hidden else "none"
        self._more.description = "fewer" if self._all else f"{hidden} more …"
        self._label()

    def mark(self, changed: set[str]) -> None:
        """Say how many of its fields differ."""
        self._changed = len(self._rows.keys() & changed)
        self._label()

    @property
    def _unfolded(self) -> Collection[str]:
        if not self._opened:
            return ()
        return self._rows.keys() if self._all else self._first

    def _label(self) -> None:
        sign = "▾" if self._opened or self._found is not None else "▸"
        self._title.description = f"{sign} {self._name}" + f" · {self._changed} changed" * bool(self._changed)

    def _toggle(self) -> None:
        self._opened = not self._opened
        self.show(self._found)

    def _toggle_all(self) -> None:
        self._all = not self._all
        self.show(self._found)


def _row(control: Any) -> Any:
    made = ipywidgets.VBox([control])
    made.add_class("kit-row")
    return made


def _section(info: FieldInfo) -> str:
    return info.section if "." in info.path else "experiment"


def _concerns(problem: Problem, path: str) -> bool:
    return problem.path == path or problem.path.startswith(path + ".")
