"""DiagnosisControl: one button that diagnoses the last trial of a panel, and under it each finding with its own button.

A click reads what the trial wrote, in a thread; nothing is run but the device's peaks, measured once in two seconds.
What it does is `kit.diagnose(trial)`, which stands beside it in code. What is not diagnosed says why.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Callable

import ipywidgets

from kit.errors import KitError
from kit.report.diagnosis import Diagnosis, diagnose
from kit.run.trial import Trial
from kit.widgets.background import Latest
from kit.widgets.diagnosis_view import DiagnosisView
from kit.widgets.handle import close_widgets


class DiagnosisControl:
    """Button, words and findings.

    Args:
        trial: Gives the trial to diagnose.
        check: Raises a KitError while something runs that a changed trial would disturb.
    """

    def __init__(self, trial: Callable[[], Trial], check: Callable[[], object]) -> None:
        self._trial, self._check = trial, check
        self._looking = Latest("kit-diagnose")
        self.view: DiagnosisView | None = None
        """The last diagnosis."""
        self.button = ipywidgets.Button(
            description="Diagnose", icon="stethoscope", disabled=True, layout={"width": "110px", "flex": "0 0 auto"},
            tooltip="say what the trial suffers from, what to change, and try it",
        )  # fmt: skip
        self.words = ipywidgets.HTML()
        self.findings = ipywidgets.VBox([], layout={"width": "100%"})
        self.button.on_click(lambda _: self._looking.submit(self._try))
        head = ipywidgets.HBox([self.button, self.words], layout={"align_items": "center", "grid_gap": "8px"})
        self.ui = ipywidgets.VBox([head, self.findings], layout={"width": "100%", "margin": "6px 0 0"})

    @property
    def busy(self) -> bool:
        """Whether a trial is being read, or a change tried."""
        return self._looking.busy or (self.view is not None and self.view.busy)

    def run(self) -> Diagnosis:
        """Diagnose the trial and show what was found.

        Raises:
            KitError: as `kit.diagnose` does; the reason stands beside the button too.
        """
        self._say("looking …")
        try:
            trial = self._trial()
            found = diagnose(trial)
        except KitError as error:
            self._say(html.escape(str(error)))
            raise
        self._put_away()
        self.view = DiagnosisView(found, self._check)
        self.findings.children = (self.view.ui,)
        self._say(f"the same in code: <code>kit.diagnose({html.escape(repr(str(trial.run_directory)))})</code>")
        return found

    def offer(self, possible: bool) -> None:
        """Let the button be clicked, or not: then an earlier diagnosis is put away."""
        self.button.disabled = not possible
        if not possible:
            self._put_away()
            self._say("")

    def _put_away(self) -> None:
        view, self.view, self.findings.children = self.view, None, ()
        close_widgets([view])

    def _try(self) -> None:
        with contextlib.suppress(KitError):  # it stands beside the button
            self.run()

    def _say(self, text: str) -> None:
        self.words.value = f"<span style='line-height: 1.4; overflow-wrap: anywhere'>{text}</span>" if text else ""
