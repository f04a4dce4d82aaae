"""ConfigForm: a Config as a form; edit a copy, validate it as a whole, replace, keep the last valid one.

Every setting that differs from the config the form started from is marked and has a button that takes it back. With
`folded`, settings stand in groups that fold, those most changed in sight, and a search finds the others. A control is
made when it is first seen, read or set to something else: a page opens each as some messages, and drops what comes as
thousands at once.

The form holds no settings of its own: `form.config` is always a valid Config, and controls, labels, tooltips and error
texts come from `Config.fields()`. An edit that does not fit is shown with its reason beside its field and waits there:
`ddp` chosen before `devices: 2` is taken over as soon as both are given.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets

from kit.config import Config, FieldInfo, paths_of, thaw
from kit.errors import ConfigError, Problem
from kit.widgets.controls import kind_of, label, make_control, read_control, show, write_control
from kit.widgets.parts import (
    ERROR,
    TIPPED,
    WIDTH,
    button,
    fold_button,
    heading_html,
    hide,
    hint_html,
    line,
    note_html,
    put,
    tip_class,
)

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
.kit-hidden.widget-box, .kit-hidden.kit-fold { display: none }
.kit-form .kit-head { margin: 2px 0 0 }
.kit-changed > :first-child .widget-label, .kit-changed > :first-child span { font-weight: 600 }
.kit-row > .kit-back { position: absolute; right: 0; top: 1px; width: 24px; padding: 0; background: none; margin: 0 }
.kit-form .kit-fold { flex: 1 1 auto; width: auto }
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
        self.controls: dict[str, Any] = _Controls(self._make)
        """By path; each is made when it is first asked for."""
        self._looks: dict[Any, Any] = {}
        self._layout = ipywidgets.Layout()  # of all rows and titles
        self._notes: dict[str, Any] = {}
        self._backs: dict[str, Any] = {}
        self._rows: dict[str, Any] = {}
        self._groups: list[_Group] = []
        self.search = ipywidgets.Text(
            placeholder="find a setting", tooltip="words of its name or of what it is for",
            layout={"width": "auto", "margin": "0 26px 2px 0"}, _dom_classes=("kit-search",),
        )  # fmt: skip
        self._nothing_found = line("", display="none")
        self._hints: dict[str, dict[str, str]] = {}
        self._values: dict[str, tuple[Any, Any]] = {}
        self._listeners: list[Callable[[Config], object]] = []
        self._rejected_listeners: list[Callable[[], object]] = []
        self._followers: list[Callable[[Config, Config], Mapping[str, Any]]] = []
        self.rejected: tuple[Problem, ...] = ()
        """Why controls hold what the config does not; nothing of what only using the config reveals."""
        self._waiting: dict[str, str] = {}
        """Edits that are not taken over, though nothing is wrong with the field itself, each with the reason."""
        self.problems: tuple[Problem, ...] = ()
        self._mutex = threading.RLock()
        self._writing = False
        self.search.observe(lambda _: self._find(), "value")
        if folded:
            self.ui = self._draw_folded(shown)
        else:
            groups = (_group(title, map(self.row, _paths(title, names))) for title, names in shown.items())
            self.ui = self._box([_columns(groups)])

    def _make(self, path: str) -> Any:
        """The control of one field, holding what the config has, in its row."""
        with self._mutex:
            if path in self.controls:  # another thread was first
                return self.controls[path]
            closed = self._layout.comm is None
            control = make_control(self._fields[path], self._config.get(path), {} if closed else self._looks)
            row = ipywidgets.VBox([control], layout={} if closed else self._layout, _dom_classes=("kit-row",))
            self.controls[path], self._rows[path] = control, row
            control.observe(lambda _: self._edited(path), ["value", "correction"])
            for part in (control.layout, control.style, control, row.layout, row) if closed else ():
                part.close()
            self._annotate_row(path, self._base.get(path) != self._config.get(path), self.hints.get(path, ""))
            return control

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
        """Put values into controls, all before any is judged, as if they had been typed at once; others stay.

        Raises:
            ConfigError: for a path that is no field.
        """
        for path in changes:
            if path not in self._fields:
                self._config.get(path)  # which says what was meant
                raise ConfigError([Problem(path, "is a part of a field; give the field as a whole")])
        with self._mutex:
            self._write(changes)
            self._accept(*self._followed(*self._apply([*changes][-1])))

    def _write(self, values: Mapping[str, Any]) -> None:
        self._writing = True
        try:
            for path, value in values.items():
                if path not in self.controls and thaw(value) == thaw(self._config.get(path)):
                    continue
                write_control(self._fields[path], self.controls[path], value)
        finally:
            self._writing = False

    @property
    def changed(self) -> tuple[str, ...]:
        """The fields that differ from the config it started from."""
        return tuple(self._base.diff(self._config))

    def reset(self, *paths: str) -> None:
        """Take these fields back to what the form started from; without any, all of them."""
        self.edit({path: self._base.get(path) for path in paths or self._fields})

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

    def on_rejected(self, callback: Callable[[], object]) -> None:
        """Call `callback()` whenever what is `rejected` is another, or nothing is any more."""
        self._rejected_listeners.append(callback)

    def follow(self, changes: Callable[[Config, Config], Mapping[str, Any]]) -> None:
        """Change with every edit what `changes(before, after)` says, before anyone hears of the edit."""
        self._followers.append(changes)

    def _followed(self, config: Config, problems: tuple[Problem, ...]) -> tuple[Config, tuple[Problem, ...]]:
        for follower in self._followers:
            if changes := follower(self._config, config):
                self._write(changes)
                config = config.replace(changes)
        return config, problems

    def _edited(self, path: str) -> None:
        with self._mutex:
            if not self._writing:
                self._accept(*self._followed(*self._apply(path)))

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
            if thaw(value) != thaw(self._config.get(path)):
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
        changed, self._config = config != self._config, config
        self._say_problems(problems)
        if changed:
            for listener in list(self._listeners):
                listener(config)

    def _say_problems(self, problems: tuple[Problem, ...]) -> None:
        edits, unreadable = self._read() if problems else ({}, [])
        before, self.problems = self.rejected, problems
        self.rejected = problems if edits or unreadable else ()
        reason = "; ".join(f"{problem.path}: {problem.message}" for problem in problems)
        own = {path for path in edits for problem in problems if _concerns(problem, path)}
        self._waiting = dict.fromkeys([path for path in edits if path not in own], f"not taken over yet; {reason}")
        self._annotate()
        if before != self.rejected:
            for listener in list(self._rejected_listeners):
                listener()

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
            self._say_problems(tuple(problems))

    def _annotate(self) -> None:
        """Mark what differs, and say under each control what there is to say."""
        changed, hints = set(self.changed), self.hints
        for group in self._groups:
            group.mark(changed)
        for path in self.controls:
            self._annotate_row(path, path in changed, hints.get(path, ""))

    def _annotate_row(self, path: str, changed: bool, hint: str) -> None:
        """Under a control stands what is wrong with it; else what was corrected and the hint."""
        if self._rows[path].comm is None:  # closed
            return
        if changed or path in self._backs:
            self._mark(path, changed)
        errors = " ".join(problem.message for problem in self.problems if _concerns(problem, path))
        errors = errors or self._waiting.get(path, "")
        correction = getattr(self.controls[path], "correction", "")
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
        if path not in self._backs:
            was = show(self._fields[path], self._base.get(path)) or "nothing"
            back = self._backs[path] = button("", "undo", f"back to {was}, as it was at first", "24px")
            back.add_class("kit-back")
            back.on_click(lambda _: self.reset(path))
            self._rows[path].children += (back,)
        self._backs[path].layout.display = None if changed else "none"
        (self._rows[path].add_class if changed else self._rows[path].remove_class)("kit-changed")

    # -- layout

    def row(self, path: str) -> Any:
        """The control of one field with its note, to be placed elsewhere than in the form."""
        self.controls[path]  # made with its row
        return self._rows[path]

    def _draw_folded(self, shown: Mapping[str, Sequence[str]]) -> Any:
        """Every section as a group; those of `shown` first and open."""
        sections = dict.fromkeys([*shown, *(_section(info) for info in self._fields.values())])
        for title in sections:
            paths = [info.path for info in self._fields.values() if _section(info) == title]
            first = _paths(title, shown.get(title, ()))
            self._groups.append(_Group(title, paths, first, self.row, self._layout, opened=title in shown))
        box = self._box([self.search, self._nothing_found, *(group.ui for group in self._groups)])
        tipped = [info for info in self._fields.values() if kind_of(info) in TIPPED]
        box.later_tooltips = {tip_class(info.help): info.help for info in tipped}
        return box

    def _box(self, children: Sequence[Any]) -> Any:
        layout = {"flex": f"1 1 {WIDTH}", "min_width": "0"}
        children = [*children, line(_STYLE, display="none")]
        return ipywidgets.VBox(children, layout=layout, _dom_classes=("kit-form",))

    def _find(self) -> None:
        """Show the fields that have every word of the search in name or description, or that others call so; all groups
        without a search."""
        words = self.search.value.lower().split()
        found = None
        if words:
            texts = {path: f"{path} {label(info)} {info.help}".lower() for path, info in self._fields.items()}
            starts = [re.compile(rf"(\b|_){re.escape(word)}") for word in words]
            found = {path for path, text in texts.items() if all(start.search(text) for start in starts)}
            found |= self._fields.keys() & {*paths_of("_".join(words))}
        nothing = f"no setting has {' and '.join(map(repr, words))} in its name or description"
        put(self._nothing_found, note_html(nothing, margin="2px 0", role="status") if found == set() else "")
        for group in self._groups:
            group.show(found)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.ui)  # type: ignore[no-untyped-call]


class _Controls(dict[str, Any]):
    """Controls by path, made by `make`, which puts them in here."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, path: str) -> Any:
        return self._make(path)


def _paths(title: str, names: Iterable[str]) -> list[str]:
    return [name if "." in name else f"{title}.{name}" for name in names]


def _group(title: str, rows: Iterable[Any]) -> Any:
    return ipywidgets.VBox([line(heading_html(title)), *rows])


def _columns(groups: Iterable[Any]) -> Any:
    """Groups below each other, or side by side where there is room."""
    template = f"repeat(auto-fill, minmax(min({_NARROWEST}, 100%), 1fr))"
    layout = {"grid_template_columns": template, "grid_gap": "0 28px", "align_items": "flex-start"}
    return ipywidgets.GridBox(list(groups), layout=layout)


class _Group:
    """One section: a title that folds it, its fields in sight, and a button for the others."""

    def __init__(
        self, title: str, paths: Sequence[str], first: Sequence[str], row: Callable[[str], Any], layout: Any, *,
        opened: bool,
    ) -> None:  # fmt: skip
        self._name, self._paths, self._row, self._opened = title, paths, row, opened
        self._first = set(first or paths)
        self._found: set[str] | None = None
        self._all = False
        self._changed = 0
        self._rows: dict[str, Any] = {}
        """That have been in sight, which the others come to."""
        self._layout = layout
        self._more: Any = None
        self._title = fold_button(f"show or hide {title}", layout)
        self._title.on_click(lambda _: self._toggle())
        self._head = ipywidgets.HBox([self._title], layout=layout, _dom_classes=("kit-head",))
        self.ui = ipywidgets.VBox([self._head], layout=layout)
        self.show(None)

    def show(self, found: set[str] | None) -> None:
        """Show these fields of a search; without a search, those that are unfolded."""
        self._found = found
        shown = found.intersection(self._paths) if found is not None else self._unfolded
        self._rows = {path: self._row(path) for path in self._paths if path in shown or path in self._rows}
        for path, one in self._rows.items():
            hide(one, path not in shown)
        self.ui.children = (self._head, *self._rows.values())
        hide(self.ui, found is not None and not shown)
        self._show_more(found is None and self._opened)
        self._label()

    def _show_more(self, wanted: bool) -> None:
        """A button for the settings that are not in sight at first, where there are any."""
        hidden = len(self._paths) - len(self._first)
        if self._more is None and wanted and hidden:
            self._more = fold_button(f"every setting of {self._name}", self._layout, "kit-more")
            self._more.on_click(lambda _: self._toggle_all())
            self._head.children += (self._more,)
        if self._more is not None:
            hide(self._more, not wanted)
            self._more.description = "fewer" if self._all else f"{hidden} more …"

    def mark(self, changed: set[str]) -> None:
        """Say how many of its fields differ."""
        self._changed = len(changed.intersection(self._paths))
        self._label()

    @property
    def _unfolded(self) -> Collection[str]:
        if not self._opened:
            return ()
        return self._paths if self._all else self._first

    def _label(self) -> None:
        sign = "▾" if self._opened or self._found is not None else "▸"
        self._title.description = f"{sign} {self._name}" + f" · {self._changed} changed" * bool(self._changed)

    def _toggle(self) -> None:
        self._opened = not self._opened
        self.show(self._found)

    def _toggle_all(self) -> None:
        self._all = not self._all
        self.show(self._found)


def _section(info: FieldInfo) -> str:
    return info.section if "." in info.path else "experiment"


def _concerns(problem: Problem, path: str) -> bool:
    return problem.path == path or problem.path.startswith(path + ".")
