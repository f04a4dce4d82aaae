"""Parts that all panels are made of: places for HTML, buttons, columns, and how progress, code and errors look.

Functions that end in `_html` take plain text and escape it; `put` and `line` hold HTML as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from kit.errors import KitError

WIDTH = "352px"
"""Of the column that a form stands in."""
LABEL_WIDTH = "172px"
BESIDE_LABEL = f"0 0 4px calc({LABEL_WIDTH} + 8px)"
"""The margin of a note that starts where the controls above it start."""
TIPPED = (ipywidgets.Checkbox, ipywidgets.Dropdown)
"""Controls whose tooltip ipywidgets does not show; the page finds it by a class."""
QUIET = "var(--jp-ui-font-color2, #666)"
ERROR = "var(--jp-error-color1, #b3261e)"
_ACCENT = "var(--jp-brand-color1, #0072B2)"
_TRACEBACK_LINES = 200
_CODE = (
    "font-family:var(--jp-code-font-family, monospace);font-size:.9em;white-space:pre-wrap;word-break:normal;"
    "overflow-wrap:anywhere;line-height:1.4;margin:2px 0"
)


class _Html(ipywidgets.HTML):  # type: ignore[misc]
    style = None  # would be a second model that the page has to open, and nothing changes it


class _Button(ipywidgets.Button):  # type: ignore[misc]
    style = None


_ANSWERS_PIXELS, _GAP_PIXELS = 480, 28
_NARROW_STYLE = f"""<style>
.kit-columns {{ container-type: inline-size }}
@container (max-width: {int(WIDTH.removesuffix("px")) + _ANSWERS_PIXELS + _GAP_PIXELS - 1}px) {{
  .kit-columns > .kit-settings.widget-box {{ max-height: 24em; overflow-y: auto }}
}}
</style>"""
"""Where two columns do not fit beside each other."""


def line(text: str = "", **layout: str) -> Any:
    """A place for HTML, as wide as its column."""
    return _Html(text, layout={"margin": "0", "width": "100%", **layout})


def put(place: Any, text: str) -> None:
    """Show this HTML in a place; without any the place is hidden."""
    place.value, place.layout.display = text, None if text else "none"


def hide(place: Any, hidden: bool) -> None:
    """Hide something whose layout others share, within a form."""
    (place.add_class if hidden else place.remove_class)("kit-hidden")


def tip_class(text: str) -> str:
    """The class by which the page finds this tooltip; the same in every notebook that it shows."""
    return f"kit-tip-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


WAITING = "kit-waiting"
"""The class of what is not the answer any more: it turns grey after a fifth of a second, so that nothing flickers."""
WAITING_STYLE = (
    f"<style>.{WAITING} {{ opacity: .35; filter: grayscale(1); transition: opacity .15s linear .2s, "
    "filter .15s linear .2s }</style>"
)


def turn_grey(part: Any, waits: bool) -> None:
    """Turn a widget grey while it waits for its answer, and back."""
    (part.add_class if waits else part.remove_class)(WAITING)


def button(description: str, icon: str, tooltip: str, width: str = "90px", **options: Any) -> Any:
    return _Button(
        description=description, icon=icon, tooltip=tooltip, layout={"width": width, "flex": "0 0 auto"}, **options
    )


def clicked(act: Callable[[], object]) -> None:
    """Do what a button is for; a KitError stands beside the button already."""
    with contextlib.suppress(KitError):
        act()


def relabel(place: Any, description: str, icon: str, style: str, tooltip: str) -> None:
    """Turn a button into another one, in the same place and with the focus kept."""
    place.description, place.icon, place.button_style, place.tooltip = description, icon, style, tooltip


def fold_button(tooltip: str, layout: Any = None, *classes: str) -> Any:
    """A title that shows or hides what is below it."""
    return _Button(tooltip=tooltip, layout=layout or {"width": "auto"}, _dom_classes=("kit-fold", *classes))


class Fold:
    """A title, and below it what a click shows (`ui`); `on_open` is called each time that it is opened."""

    def __init__(self, title: str, children: Sequence[Any], on_open: Callable[[], object] = lambda: None) -> None:
        self._title, self._on_open = title, on_open
        self.opened = False
        self.button, self._content = fold_button(f"show or hide: {title}"), ipywidgets.VBox(children)
        self.button.on_click(lambda _: self.toggle())
        self.ui = ipywidgets.VBox([self.button, self._content], layout={"width": "100%"})
        self._draw()

    def toggle(self) -> None:
        """Show what was hidden, or hide it."""
        self.opened = not self.opened
        self._draw()
        if self.opened:
            self._on_open()

    def _draw(self) -> None:
        self.button.description = f"{'▾' if self.opened else '▸'} {self._title}"
        self._content.layout.display = None if self.opened else "none"


def row(*parts: Any, gap: str = "12px") -> Any:
    return ipywidgets.HBox(parts, layout={"align_items": "center", "grid_gap": gap})


def two_columns(left: Any, right: Sequence[Any]) -> Any:
    """Settings beside what they come to, or above it on a narrow page, where long ones scroll: both stay in sight."""
    left.layout.flex, left.layout.min_width = f"1 1 {WIDTH}", "0"
    left.add_class("kit-settings")
    answers = ipywidgets.VBox(right, layout={"flex": f"100 1 {_ANSWERS_PIXELS}px", "min_width": "0"})
    layout = {"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": f"8px {_GAP_PIXELS}px"}
    return ipywidgets.HBox(
        [left, answers, line(_NARROW_STYLE, display="none")], layout=layout, _dom_classes=("kit-columns",)
    )


def heading_html(text: str, note: str = "") -> str:
    """What a group of controls or a section starts with."""
    quiet = f" <span style='font-weight:400;color:{QUIET}'>{html.escape(note)}</span>" if note else ""
    return f"<div style='font-weight:600;margin:8px 0 2px;line-height:1.4'>{html.escape(text)}{quiet}</div>"


def hint_html(text: str) -> str:
    """A small line under a control that a click unfolds where it is longer."""
    style = f"margin:{BESIDE_LABEL};font-size:.85em;line-height:1.3;color:{QUIET}"
    return f"<details class='kit-hint' style='{style}'><summary>{html.escape(text)}</summary></details>"


def note_html(text: str, *, margin: str = BESIDE_LABEL, color: str = QUIET, role: str = "") -> str:
    """A small line under a control."""
    style = f"margin:{margin};font-size:.85em;line-height:1.3;color:{color}"
    spoken = f" role='{role}'" if role else ""
    return f"<div{spoken} style='{style}'>{html.escape(text)}</div>"


def pre_html(text: str, style: str = "") -> str:
    """Code."""
    return f"<pre style='{_CODE}{style}'>{html.escape(text)}</pre>"


def code_html(call: str, note: str = "", below: str = "") -> str:
    """The call that does what the widgets do; `below` is HTML."""
    also = f"; {html.escape(note)}" if note else ""
    copy = "<button type='button' class='kit-copy'>copy</button>"
    return f"<div style='line-height:1.4'>the same in code{also}: {pre_html(call)}{copy}{below}</div>"


def folded_html(summary: str, content: str, *, style: str = "") -> str:
    """HTML that a click on its summary shows."""
    title = f"<summary style='cursor:pointer'>{html.escape(summary)}</summary>"
    return f"<details style='{style}'>{title}{content}</details>"


def status_html(words: str) -> str:
    """One line on what goes on, also for readers who hear the page."""
    style = f"line-height:1.4;color:{QUIET}"
    return f"<div role='status' aria-live='polite' style='{style}'>{html.escape(words)}</div>"


def progress_html(words: str, fraction: float | None, label: str, *, spoken: bool = True) -> str:
    """Words above a bar filled to `fraction`; with none, a bar that only shows that something goes on.

    Words that change many times a second are not `spoken` to readers who hear the page.
    """
    value = "" if fraction is None else f" value='{fraction:.4f}'"
    style = f"display:block;width:100%;height:8px;margin:3px 0 0;accent-color:{_ACCENT}"
    live = "polite" if spoken else "off"
    return (
        f"<div role='status' aria-live='{live}' style='line-height:1.4'>{html.escape(words)}</div>"
        f"<progress max='1'{value} aria-label='{label}' style='{style}'></progress>"
    )


def error_html(message: str, details: str = "") -> str:
    """A box with the message, and details folded below it; nothing for no message."""
    if not message:
        return ""
    last = "\n".join(details.rstrip().splitlines()[-_TRACEBACK_LINES:])
    pre = f"<pre style='font-size:.85em;line-height:1.35;max-height:320px;overflow:auto'>{html.escape(last)}</pre>"
    folded = folded_html("details", pre, style="margin-top:4px") if last else ""
    box = f"border-left:4px solid {ERROR};padding:4px 0 4px 10px;margin:6px 0;line-height:1.4;overflow-wrap:anywhere"
    return f"<div role='alert' style='{box}'>{html.escape(message)}{folded}</div>"


def red_html(text: str) -> str:
    return f"<span style='color:{ERROR}'>{html.escape(text)}</span>"


def error_words(error: Exception) -> str:
    """What went wrong, in a sentence; of an error that is not kit's its kind too."""
    return str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"


class AnswerView:
    """Base of the views with one line on what goes on and a box for an error."""

    def __init__(self) -> None:
        self.status, self.error = line(), line(display="none")

    def say(self, words: str) -> None:
        """One line on what goes on."""
        self.status.value = status_html(words)

    def show_error(self, message: str, details: str = "") -> None:
        """Say what went wrong, with details folded; an empty message clears the box."""
        put(self.error, error_html(message, details))
