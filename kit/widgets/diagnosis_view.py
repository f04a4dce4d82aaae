"""DiagnosisView: a diagnosis with a button at each finding that tries its change and shows before and after.

A view only: the text is the diagnosis's own, a button does what `finding.try_it()` does, in a thread, one at a time; it
says which run it is at, and the answer stands below the finding when it is there. The same in code is shown with it.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets

from kit.errors import ForeignRunError, KitError
from kit.report.diagnosis import Diagnosis, Finding, finding_html
from kit.run.repeats import Tried
from kit.run.trial import Trial
from kit.widgets.live import LiveDisplay, live_box

REPEATS = 3


class DiagnosisView:
    """The widgets of one diagnosis; `check` raises a KitError while something runs that a trial would disturb."""

    def __init__(self, diagnosis: Diagnosis, check: Callable[[], object] = lambda: None) -> None:
        self.diagnosis, self._check = diagnosis, check
        self._display: LiveDisplay | None = None
        self._busy = threading.Lock()
        self.findings = [_FindingView(finding, self._try) for finding in diagnosis.findings]
        head = ipywidgets.HTML(f"<b>{html.escape(diagnosis.headline)}</b>")
        rest = ipywidgets.HTML(_lines(diagnosis.details_html), layout={"width": "100%"})
        self.ui = live_box([head, *(view.ui for view in self.findings), rest])

    @property
    def busy(self) -> bool:
        """Whether a change is being tried."""
        return self._busy.locked()

    def _try(self, view: _FindingView) -> None:
        """In a thread; a second click waits for none, as trials beside each other would slow each other."""
        try:
            self._check()
        except KitError as error:
            view.say(f"not tried: {error}")
            return
        if not self._busy.acquire(blocking=False):
            view.say("another change is being tried; this one can follow")
            return
        for other in self.findings:
            other.button.disabled = True
        threading.Thread(target=self._work, args=(view,), name="kit-try", daemon=True).start()

    def _work(self, view: _FindingView) -> None:
        try:
            view.run()
        finally:
            for other in self.findings:
                other.button.disabled = False
            self._busy.release()
            if self._display is not None:
                self._display.refresh()

    def display(self) -> None:
        self._display = LiveDisplay(self.ui, "Run this cell again for its buttons.", self._still)

    def _still(self) -> tuple[str, str]:
        tried = [view.tried for view in self.findings if view.tried is not None]
        text = "\n".join([repr(self.diagnosis), *map(repr, tried)])
        return text, self.diagnosis._repr_html_() + "".join(answer._repr_html_() for answer in tried)


class _FindingView:
    """One finding, its button where a setting makes the change, and what trying it gave."""

    def __init__(self, finding: Finding, on_click: Callable[[_FindingView], object]) -> None:
        self.finding = finding
        self.tried: Tried | None = None
        self._runs = 0
        self._trust = False
        self.button = ipywidgets.Button(
            description="Try it", icon="play", layout={"width": "auto"},
            tooltip=f"run it {REPEATS} times as it is and {REPEATS} times changed, and compare",
        )  # fmt: skip
        self.button.on_click(lambda _: on_click(self))
        self.answer = ipywidgets.HTML(layout={"width": "100%"})
        text = ipywidgets.HTML(finding_html(finding), layout={"width": "100%"})
        self.ui = ipywidgets.VBox([text, *([self.button] if finding.change else []), self.answer])

    def say(self, text: str) -> None:
        self.answer.value = f"<i>{html.escape(text)}</i>"

    def run(self) -> None:
        self._runs = 0
        self.say("starting …")
        try:
            self.tried = self.finding.try_it(REPEATS, self._on_run, self._trust)
        except ForeignRunError as error:
            self.say(f"not tried: {error}")
            self._trust = True
            self.button.description, self.button.icon = "Run the code of this folder", "exclamation-triangle"
            return
        except KitError as error:
            self.say(f"not tried: {error}")
            return
        self.answer.value = _lines(self.tried._repr_html_())

    def _on_run(self, _: Trial) -> None:
        self._runs += 1
        self.say(f"run {self._runs} of {2 * REPEATS} …")


def _lines(text: str) -> str:
    """With lines as close as elsewhere on the page; a widget's own are as far apart as its controls."""
    return f'<div style="line-height: 1.45">{text}</div>'


def display(diagnosis: Any) -> None:
    """Show a diagnosis in a notebook."""
    DiagnosisView(diagnosis).display()
