"""Showing something live and leaving something still: two outputs of one cell.

The first output is the widget. The second is a picture (PNG) or a table (HTML) with a sentence, under a display id,
refreshed when there is a result; where the widget is alive a style rule hides it, and where it is not (a saved
notebook, a page on GitHub, a run without a browser) it is what the reader sees. Nothing here touches an Output widget.

Work that must not hold up a click: one thread, one job at a time, and only the newest of those that wait.
"""

from __future__ import annotations

import base64
import functools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ipywidgets
import traitlets

_HIDE_STILL = "<style>.jp-OutputArea-child:has(.kit-live) + .jp-OutputArea-child { display: none }</style>"

_MANNERS = """
function render({ model, el }) {
  const tell = ({ target }) => {
    const box = target.closest?.('.widget-checkbox, .widget-dropdown');
    const name = [...(box?.classList ?? [])].find((one) => one in model.get('tooltips'));
    if (name) for (const part of [box, ...box.querySelectorAll('[title]')]) part.title = model.get('tooltips')[name];
  };
  const keep = ({ target }) => {  // looked up at each focus: when this is rendered it may not be in the page yet
    const area = el.closest('.jp-OutputArea-output') ?? el.closest('.jupyter-widgets');
    if (area?.contains(target)) target.setAttribute('data-lm-suppress-shortcuts', 'true');
  };
  const heard = [['focusin', keep], ['focusin', tell], ['mouseover', tell]];
  for (const [event, answer] of heard) document.addEventListener(event, answer);
  return () => heard.forEach(([event, answer]) => document.removeEventListener(event, answer));
}
export default { render };
"""


def keyboard_guard(tooltips: Mapping[str, str]) -> list[Any]:
    """A widget that keeps JupyterLab's shortcuts away from a focused control; none where anywidget is missing.

    Without it a focused Dropdown hands its arrow keys and letters to the notebook: "b" would insert a cell. It also
    shows the tooltips of checkboxes and dropdowns, by their classes: ipywidgets shows the bare name, or nothing.
    """
    try:
        return [_guard_class()(tooltips=dict(tooltips), layout={"display": "none"})]
    except ImportError:
        return []


@functools.cache
def _guard_class() -> Any:
    import anywidget

    class KeyboardGuard(anywidget.AnyWidget):
        _esm = _MANNERS  # of the class: an instance has told the browser what it holds once it is made
        tooltips = traitlets.Dict().tag(sync=True)

    return KeyboardGuard


def live_box(children: list[Any], **layout: str) -> Any:
    """A box whose still is hidden while it is alive, and in which keys and tooltips are as they should be."""
    tooltips = {}
    kinds = (ipywidgets.Checkbox, ipywidgets.Dropdown)
    for part in (part for child in children for part in widgets_in(child) if isinstance(part, kinds)):
        if part.tooltip is None:
            continue
        name = f"kit-tip-{secrets.token_hex(8)}"  # its own in a page that shows several notebooks
        part.add_class(name)
        tooltips[name] = part.tooltip
    style = ipywidgets.HTML(_HIDE_STILL, layout={"display": "none"})
    box = ipywidgets.VBox([*children, *keyboard_guard(tooltips), style], layout=layout)
    box.add_class("kit-live")
    return box


def widgets_in(box: Any) -> Iterator[Any]:
    """Every widget in a box, at any depth, and the box."""
    yield box
    for child in getattr(box, "children", ()):
        yield from widgets_in(child)


class LiveDisplay:
    """The two outputs of one cell; `refresh` renews the still."""

    def __init__(self, box: Any, sentence: str, still: Callable[[], tuple[str, bytes | str | None]]) -> None:
        from IPython.display import display

        self._still = still
        view = {**box._repr_mimebundle_(), "text/plain": sentence}
        display(view, raw=True)  # type: ignore[no-untyped-call]
        self._handle = display(self._bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        if self._handle is not None:  # there is no display outside IPython
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> Mapping[str, str]:
        text, shown = self._still()
        if shown is None:
            return {"text/plain": text}
        if isinstance(shown, str):
            return {"text/plain": text, "text/html": shown}
        return {"text/plain": text, "image/png": base64.b64encode(shown).decode()}


class Latest:
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
