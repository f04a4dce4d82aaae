"""LiveDisplay: a live widget, a still of it and a style rule, as three outputs of one cell.

The first output is the widget. The second is a picture (a PNG that reads on light and dark) or a table (HTML) with a
sentence, under a display id, refreshed when there is a result; where the widget is alive a style rule hides it, and
where it is not (a saved notebook, a page on GitHub, a run without a browser) it is what the reader sees. The third is
seen nowhere: in a notebook opened again, where JupyterLab writes "model not found" in the widget's place, its rule says
what to do instead. Nothing here touches an Output widget.

`LatestOnlyWorker` runs work that must not hold up a click: one thread, one job at a time, and of those that wait the
newest only.

A Handle is what a user holds of a panel. ipywidgets keeps every open widget, and a widget keeps whatever it calls, so a
panel that its widgets called outright would live as long as the kernel. They call it through `weakly` instead, and when
a handle is forgotten its widgets are closed. A handle is forgotten when

- no variable holds it, and no trial that it started runs,
- and no cell shows it: a cell that has been run again shows only what it displayed then, and what IPython had kept of
  the earlier result (`Out[3]`, `_3`, `_`) is dropped with it.

Front ends do not say when an output is cleared or a cell deleted; there, and where cells have no ids, `close()` does.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from kit.config import Config
from kit.widgets.parts import TIPPED, line, tip_class

if TYPE_CHECKING:
    from kit.widgets.form import ConfigForm

_PNG_SIZE = (16, 20)
"""Where in a PNG its width and its height stand."""
_GONE = "The kernel that drew this is gone. Run this cell again."
_STYLE = """<style>
.jp-OutputArea-child:has(.kit-live) + .jp-OutputArea-child { display: none }
.kit-live.widget-box, .kit-live .widget-box, .kit-live .widget-gridbox { overflow: visible }  /* margins would scroll */
.kit-live .widget-html, .kit-live .widget-html-content { min-width: 0; max-width: 100% }
.kit-live .widget-tab > .widget-tab-contents {
  overflow: visible; padding: 8px 0 0; border-width: 1px 0 0; background: none }
.kit-live .widget-tab > .lm-TabBar .lm-TabBar-tab { flex: 0 1 auto; min-width: 0; padding: 0 10px }
.kit-live .kit-fold {
  text-align: left; background: none; padding: 0; margin: 0; font-weight: 600; height: 24px; line-height: 24px }
.kit-live .kit-copy { display: none }
.kit-live:has(> .kit-guard) .kit-copy { display: inline-block; font: inherit; font-size: .85em; cursor: pointer }
.kit-live .jupyter-widgets-disconnected::before { display: none }
.kit-live.jupyter-widgets-disconnected > * { opacity: .5 }
.kit-live.jupyter-widgets-disconnected::before {
  content: "GONE"; background: none; width: auto; height: auto;
  padding: 4px 0; font: inherit; font-weight: 600; color: inherit; position: sticky; top: 0; order: -1 }
</style>""".replace("GONE", _GONE)

_SAVED_STYLE = f"""<style class="kit-saved">
.jp-OutputArea-child:has(.kit-saved) {{ display: none }}
.jp-OutputArea-child:has(+ .jp-OutputArea-child + .jp-OutputArea-child .kit-saved)
  > .jp-OutputArea-output.jupyter-widgets:not(:has(.kit-live)) {{ font-size: 0; visibility: hidden }}
.jp-OutputArea-child:has(+ .jp-OutputArea-child + .jp-OutputArea-child .kit-saved)
  > .jp-OutputArea-output.jupyter-widgets:not(:has(.kit-live))::before {{
  content: "{_GONE}"; visibility: visible; font-size: var(--jp-content-font-size1, 14px); font-weight: 600 }}
</style>"""
"""Unlike `_STYLE`, which is part of the widget, it is saved with the notebook."""

_SCRIPT = """
function render({ model, el }) {
  const showTooltip = ({ target }) => {
    const box = target.closest?.('.widget-checkbox, .widget-dropdown');
    const name = [...(box?.classList ?? [])].find((one) => one in model.get('tooltips'));
    if (name) for (const part of [box, ...box.querySelectorAll('[title]')]) part.title = model.get('tooltips')[name];
  };
  const keep = ({ target }) => {  // looked up at each focus: when this is rendered it may not be in the page yet
    const area = el.closest('.jp-OutputArea-output') ?? el.closest('.jupyter-widgets');
    if (area?.contains(target)) target.setAttribute('data-lm-suppress-shortcuts', 'true');
  };
  const copy = ({ target }) => {
    const button = target.closest?.('.kit-copy');
    if (!button || !el.parentElement?.contains(button)) return;
    const place = document.createElement('textarea');  // also where a page without https has no clipboard
    place.value = button.previousElementSibling.textContent;
    document.body.append(place);
    place.select();
    document.execCommand('copy');
    place.remove();
    button.focus();
    button.textContent = 'copied';
    setTimeout(() => { button.textContent = 'copy'; }, 2000);
  };
  const nameControls = () => {  // ipywidgets gives the handle of a slider, and a field without description, no name
    const unnamed = (kind) => el.parentElement?.querySelectorAll(`${kind}:not([aria-label])`) ?? [];
    for (const field of unnamed('.kit-search input')) field.ariaLabel = field.placeholder;
    for (const handle of unnamed('.noUi-handle'))
      for (let box = handle; box && !handle.ariaLabel; box = box.parentElement)
        if (box.querySelector('label')) handle.ariaLabel = `${box.querySelector('label').textContent}, slider`;
  };
  const observer = new MutationObserver(nameControls);
  setTimeout(() => {  // when this is rendered it may not be in the page yet
    nameControls();
    if (el.parentElement) observer.observe(el.parentElement, { childList: true, subtree: true });
  });
  const clear = ({ key, target }) => {
    if (key !== 'Escape' || !target.closest?.('.kit-search') || !el.parentElement?.contains(target)) return;
    target.value = '';
    target.dispatchEvent(new Event('input', { bubbles: true }));
  };
  const handlers = [
    ['focusin', keep], ['focusin', showTooltip], ['mouseover', showTooltip], ['click', copy], ['keydown', clear],
  ];
  for (const [event, handler] of handlers) document.addEventListener(event, handler, true);
  return () => {
    observer.disconnect();
    handlers.forEach(([event, handler]) => document.removeEventListener(event, handler, true));
  };
}
export default { render };
"""


def keyboard_guard(tooltips: Mapping[str, str]) -> list[Any]:
    """A widget that keeps JupyterLab's shortcuts away from a focused control; none where anywidget is missing.

    Without it a focused Dropdown hands its arrow keys and letters to the notebook: "b" would insert a cell. It also
    shows the tooltips of checkboxes and dropdowns, by their classes, where ipywidgets shows the bare name or nothing;
    names sliders and the search, copies the code beside a button of the class `kit-copy`, and lets Escape empty a field
    of the class `kit-search`.
    """
    try:
        guard = _guard_class()(tooltips=dict(tooltips), layout={"display": "none"})
    except ImportError:
        return []
    guard.add_class("kit-guard")
    return [guard]


@functools.cache
def _guard_class() -> Any:
    import anywidget

    class KeyboardGuard(anywidget.AnyWidget):
        _esm = _SCRIPT  # of the class, because an instance sends its state to the browser while it is made
        tooltips = traitlets.Dict().tag(sync=True)

    return KeyboardGuard


def live_box(children: list[Any], **layout: str) -> Any:
    """A box whose still is hidden while it is alive, with tooltips on every control and its keys kept from the page."""
    tooltips: dict[str, str] = {}
    for part in (part for child in children for part in widgets_in(child)):
        tooltips |= getattr(part, "later_tooltips", {})
        if isinstance(part, TIPPED) and part.tooltip is not None:
            part.add_class(tip_class(part.tooltip))
            tooltips[tip_class(part.tooltip)] = part.tooltip
    style = line(_STYLE, display="none")
    return ipywidgets.VBox([*children, *keyboard_guard(tooltips), style], layout=layout, _dom_classes=("kit-live",))


def widgets_in(box: Any) -> Iterator[Any]:
    """Every widget in a box, at any depth, and the box."""
    yield box
    for child in getattr(box, "children", ()):
        yield from widgets_in(child)


class LiveDisplay:
    """The three outputs of one cell; `refresh` renews the still."""

    def __init__(self, box: Any, sentence: str, still: Callable[[], tuple[str, bytes | str | None]]) -> None:
        from IPython.display import display

        self._still = still
        view = {**box._repr_mimebundle_(), "text/plain": sentence}
        display(view, raw=True)  # type: ignore[no-untyped-call]
        bundle, size = self._bundle()
        self._handle = display(bundle, raw=True, metadata=size, display_id=True)  # type: ignore[no-untyped-call]
        display({"text/html": _SAVED_STYLE}, raw=True)  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        if self._handle is not None:  # there is no display outside IPython
            bundle, size = self._bundle()
            self._handle.update(bundle, raw=True, metadata=size)

    def _bundle(self) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """The still, and the size that a picture of twice the pixels is shown in."""
        text, shown = self._still()
        if shown is None:
            return {"text/plain": text}, {}
        if isinstance(shown, str):
            return {"text/plain": text, "text/html": shown}, {}
        width, height = (int.from_bytes(shown[place : place + 4], "big") // 2 for place in _PNG_SIZE)
        picture = {"text/plain": text, "image/png": base64.b64encode(shown).decode()}
        return picture, {"image/png": {"width": width, "height": height}}


class LatestOnlyWorker:
    """Runs jobs in a thread of its own; a job submitted while another runs replaces the one that waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: Callable[[], object] | None = None
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job()` soon; returns at once. The job reports its own errors."""
        with self._lock:
            self._waiting = job
            if not self._idle.is_set():
                return
            self._idle.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing runs or waits; False after `timeout` seconds."""
        return self._idle.wait(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._idle.set()
                    return
            try:
                job()
            except BaseException:
                with self._lock:
                    self._idle.set()
                raise


class Background:
    """Base of the views that work in a thread of their own."""

    def __init__(self, name: str) -> None:
        self._latest = LatestOnlyWorker(name)

    @property
    def busy(self) -> bool:
        return self._latest.busy

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing is at work; False after `timeout` seconds."""
        return self._latest.wait(timeout)


_HISTORY = re.compile(r"_{1,3}|_\d+")


class Handle:
    """Base of the panels. A subclass draws `ui` and a still of itself, and calls `_own` when it is complete."""

    ui: Any
    _display: LiveDisplay | None = None

    def _own(self) -> None:
        """From now on the widgets of all its parts end with this handle."""
        parts = [part for part in vars(self).values() if _is_part(part)]
        self._finish = weakref.finalize(self, close_widgets, parts)
        self._finish.atexit = False

    def close(self) -> None:
        """Give back every widget, as if the panel had been forgotten; what runs goes on, and what was found is kept."""
        for handles in _shown.values():
            handles[:] = [handle for handle in handles if handle is not self]
        _forget([self])
        self._finish()
        self._display = None

    @property
    def closed(self) -> bool:
        return not self._finish.alive

    def _still(self) -> tuple[str, bytes | str | None]:
        """Words, and a picture (PNG) or HTML, for where no kernel is."""
        raise NotImplementedError

    def _refresh(self) -> None:
        """Renew the still beside the live view."""
        if self._display is not None:
            self._display.refresh()

    def _show(self) -> None:
        """Be the output of the current cell."""
        if self.closed:
            from IPython.display import display

            display({"text/plain": f"{self!r}\nClosed; make another one of its config."}, raw=True)  # type: ignore[no-untyped-call]
            return
        _remember(self)
        sentence = f"{self!r}\nRun this cell again for its controls."
        self._display = LiveDisplay(self.ui, sentence, weakly(self._still))


class ConfigPanel(Handle):
    """Base of the panels over a form: a config, its widgets and the same thing in code."""

    form: ConfigForm
    _base: Config
    _module: Any = None
    _data: Any = None

    @property
    def config(self) -> Config:
        """The last valid Config of the form; setting it sets every control."""
        return self.form.config

    @config.setter
    def config(self, config: Config) -> None:
        self.form.config = config

    def save(self, path: str | Path) -> Path:
        """Write the config as YAML, to be committed."""
        return self.config.save(path)

    @property
    def module(self) -> Any:
        """What is trained, as it was given."""
        return self._module

    @property
    def data(self) -> Any:
        """What it is trained on, as it was given."""
        return self._data

    def _arguments(self) -> str:
        """Config, module and data as a line of code passes them: by their names in a notebook, where they have some."""
        panel, config = _name_of(self), self.config.as_code(against=self._base)
        if (name := _name_of(self._base)) is not None:
            unnamed = self.config.as_code() if self._base == Config() or not panel else f"{panel}.config"
            config = config.replace("config", name, 1) if name else unnamed
        module = [] if self._module is None else [self._called("module")]
        data = [] if self._data is None else [("" if module else "data=") + self._called("data")]
        return ", ".join([config, *module, *data])

    def _called(self, part: str) -> str:
        """What stands for `module` or `data` in a line of code."""
        value, panel = getattr(self, part), _name_of(self)
        if panel is None:
            return part
        unnamed = f"{panel}.{part}" if panel else f"{type(value).__name__}(...)"
        return _name_of(value) or (json.dumps(value) if isinstance(value, str) else unnamed)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.config!r}"

    def _ipython_display_(self) -> None:
        self._show()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method for callbacks that must not keep its object alive; once that is gone it does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call


def close_widgets(parts: Iterable[Any]) -> None:
    """Close every widget that is found in these: views, containers and widgets, down to their layouts and styles."""
    seen: dict[int, Any] = {}
    waiting = list(parts)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, ipywidgets.Widget):
            waiting += [getattr(item, name) for name in item.keys]
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        elif _is_part(item):
            waiting += vars(item).values()
    for item in seen.values():
        if isinstance(item, ipywidgets.Widget):
            item.close()


def _is_part(item: Any) -> bool:
    is_view = type(item).__module__.startswith("kit.widgets.") and hasattr(item, "__dict__")
    return is_view or isinstance(item, ipywidgets.Widget | dict)


# -- what cells show

_shown: dict[str | None, list[Handle]] = {}
"""By the id of the cell that shows them; what is shown is kept, whoever else has let go of it."""
_replaced: list[Handle] = []
"""What the cell that runs had shown before."""


def _remember(handle: Handle) -> None:
    """Keep what the running cell shows, until that cell has been run again."""
    shell = _shell()
    if shell is None:
        return
    if _on_run not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", _on_run)
        shell.events.register("post_run_cell", _on_end)
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    shown = _shown.setdefault(parent.get("metadata", {}).get("cellId"), [])
    if not any(one is handle for one in shown):
        shown.append(handle)


def _on_run(info: Any) -> None:
    if info.cell_id is not None:
        _replaced.extend(_shown.pop(info.cell_id, ()))


def _on_end(_: Any) -> None:
    """Drop what the cell showed before, unless it is shown still."""
    ended, _replaced[:] = list(_replaced), []
    shown = {id(handle) for handles in _shown.values() for handle in handles}
    _forget([handle for handle in ended if id(handle) not in shown])


def _forget(handles: Iterable[Handle]) -> None:
    """Have IPython keep none of these as the result of a cell; variables of the user's keep theirs."""
    shell, gone = _shell(), {id(handle) for handle in handles}
    if shell is None or not gone:
        return
    for kept in (shell.user_ns, shell.user_ns_hidden, shell.user_ns.get("_oh", {})):
        results = [name for name in kept if isinstance(name, int) or _HISTORY.fullmatch(name)]
        for name in [name for name in results if id(kept[name]) in gone]:
            del kept[name]
    for name in ("_", "__", "___"):
        if id(getattr(shell.displayhook, name, None)) in gone:
            setattr(shell.displayhook, name, "")


def _name_of(value: Any) -> str | None:
    """The name of an object in the notebook, empty where it has none; None where this is no notebook."""
    if "IPython" not in sys.modules or (shell := _shell()) is None:
        return None
    names = list(shell.user_ns.items())  # a cell that runs meanwhile adds others
    return next((name for name, one in names if one is value and not name.startswith("_")), "")


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()
