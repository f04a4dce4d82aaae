"""Showing something live and leaving something still: two outputs of one cell.

The first output is the widget. The second is a picture (PNG) or a table (HTML) with a sentence, under a display id,
refreshed when there is a result; where the widget is alive a style rule hides it, and where it is not (a saved
notebook, a page on GitHub, a run without a browser) it is what the reader sees. Nothing here touches an Output widget.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

_HIDE_STILL = "<style>.jp-OutputArea-child:has(.kit-live) + .jp-OutputArea-child { display: none }</style>"

_KEYS = """
function render({ el }) {
  requestAnimationFrame(() => {
    const area = el.closest('.jp-OutputArea-output') ?? el.closest('.jupyter-widgets');
    const keep = (event) => event.target.setAttribute('data-lm-suppress-shortcuts', 'true');
    area?.addEventListener('focusin', keep);
  });
}
export default { render };
"""


def keyboard_guard() -> list[Any]:
    """A widget that keeps JupyterLab's shortcuts away from a focused control; none where anywidget is missing.

    Without it a focused Dropdown hands its arrow keys and letters to the notebook: "b" would insert a cell.
    """
    try:
        import anywidget
    except ImportError:
        return []
    guard = anywidget.AnyWidget(layout={"display": "none"})
    guard.add_traits(_esm=_synced(_KEYS))
    return [guard]


def _synced(text: str) -> Any:
    import traitlets

    return traitlets.Unicode(text).tag(sync=True)


def live_box(children: list[Any], **layout: str) -> Any:
    """A box whose still is hidden while it is alive."""
    style = ipywidgets.HTML(_HIDE_STILL, layout={"display": "none"})
    box = ipywidgets.VBox([*children, style], layout=layout)
    box.add_class("kit-live")
    return box


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
