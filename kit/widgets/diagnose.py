"""What a panel measures beside a trial: a diagnosis, a profile, a calibration of the loader.

DiagnosisView is a diagnosis with a button at each finding that tries its change, in a thread, one at a time, and shows
before and after under it. DiagnosisControl makes one of the last trial of a panel (`kit.studies.diagnose(trial)`).
ProfileView starts the passes of a profile (`kit.studies.profile(config)`) and shows chart, tables and the trace in
place. CalibrationView measures loader settings (`kit.studies.calibrate`) and hands the result to the panel. The button
of what runs stops it. An error stands beside its button.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.charts import style as look
from kit.charts.compare import calibration_figure
from kit.charts.pipeline import profile_figure
from kit.errors import ForeignRunError, KitError
from kit.studies.diagnosis.diagnose import Diagnosis, Finding, diagnose, finding_html
from kit.studies.profiling.profile import Profile
from kit.studies.repeats import MOST, Tried
from kit.trial.trial import Trial
from kit.units import format_count, format_seconds
from kit.widgets.live import Background, LiveDisplay, close_widgets, live_box
from kit.widgets.parts import button, clicked, error_words, line, progress_html, put, relabel, row

if TYPE_CHECKING:
    from kit.studies.calibration.result import Calibration


class DiagnosisView(Background):
    """The widgets of one diagnosis; `check` raises a KitError while something runs that a trial would disturb."""

    def __init__(self, diagnosis: Diagnosis, check: Callable[[], object] = lambda: None) -> None:
        super().__init__("kit-try")
        self.diagnosis, self._check = diagnosis, check
        self._display: LiveDisplay | None = None
        self.findings = [_FindingView(finding, self._try) for finding in diagnosis.findings]
        head = line(_close_lines(diagnosis.head_html))
        rest = line(_close_lines(diagnosis.details_html))
        self.ui = live_box([head, *(view.ui for view in self.findings), rest])

    def _try(self, view: _FindingView) -> None:
        """In a thread; a second click is refused, as trials beside each other would slow each other."""
        try:
            self._check()
        except KitError as error:
            view.say(f"not tried: {error}")
            return
        if self.busy:
            view.say("another change is being tried; this one can follow")
            return
        for other in self.findings:
            other.button.disabled = True
        self._latest.submit(lambda: self._work(view))

    def _work(self, view: _FindingView) -> None:
        try:
            view.run()
        finally:
            if self._display is not None:
                self._display.refresh()
            for other in self.findings:
                other.button.disabled = False

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
        tooltip = f"run it in turn as it is and changed, {MOST} times each at most, until the difference is decided"
        self.button = button("Try it", "play", tooltip, "110px")
        self.button.on_click(lambda _: on_click(self))
        self.answer = line()
        text = line(finding_html(finding))
        self.ui = ipywidgets.VBox([text, *([self.button] if finding.can_try else []), self.answer])

    def say(self, text: str) -> None:
        self.answer.value = f"<i>{html.escape(text)}</i>"

    def run(self) -> None:
        self._runs = 0
        self.say("starting …")
        try:
            self.tried = self.finding.try_it(on_run=self._on_run, trust=self._trust)
        except ForeignRunError as error:
            self.say(f"not tried: {error}")
            self._trust = True
            self.button.description, self.button.icon = "Run the code of this folder", "exclamation-triangle"
            self.button.layout.width = "auto"
            return
        except KitError as error:
            self.say(f"not tried: {error}")
            return
        self.answer.value = _close_lines(self.tried._repr_html_())

    def _on_run(self, _: Trial) -> None:
        self._runs += 1
        self.say(f"run {self._runs}, of {2 * MOST} at most …")


def _close_lines(text: str) -> str:
    """With lines as close as elsewhere on the page; those of a widget are as far apart as its controls."""
    return f'<div style="line-height: 1.45; overflow-wrap: anywhere">{text}</div>'


def display(diagnosis: Any) -> None:
    """Show a diagnosis in a notebook."""
    DiagnosisView(diagnosis).display()


class DiagnosisControl(Background):
    """A button that diagnoses what `trial()` returns, and, in `ui`, the findings.

    `on_shown` is called when other findings are shown. `check` raises a KitError while something runs that a changed
    trial would disturb. A click reads what the trial wrote, measures the device's peaks for two seconds, and runs the
    module for a few steps where only that tells an effect.
    """

    def __init__(
        self, trial: Callable[[], Trial], check: Callable[[], object], on_shown: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__("kit-diagnose")
        self._trial, self._check, self._on_shown = trial, check, on_shown
        self.view: DiagnosisView | None = None
        """The last diagnosis."""
        tooltip = "say what the trial suffers from, what to change, and try it"
        self.button = button("Diagnose", "stethoscope", tooltip, "110px", disabled=True)
        self.words, self.code = line(), line(display="none")
        self.findings = ipywidgets.VBox([], layout={"width": "100%"})
        self.button.on_click(lambda _: self._latest.submit(lambda: clicked(self.run)))
        self.ui = ipywidgets.VBox([self.words, self.findings, self.code], layout={"width": "100%"})

    @property
    def busy(self) -> bool:
        """Whether a trial is being read, or a change tried."""
        return super().busy or (self.view is not None and self.view.busy)

    def run(self) -> Diagnosis:
        """Diagnose the trial and show what was found.

        Raises:
            KitError: as `kit.studies.diagnose` does; the reason stands beside the button too.
        """
        self._say("looking …")
        try:
            trial = self._trial()
            found = diagnose(trial)
        except KitError as error:
            self._say(html.escape(str(error)))
            raise
        self._close_view()
        self.view = DiagnosisView(found, self._check)
        self.findings.children = (self.view.ui,)
        self._on_shown()
        self._say("")
        call = f"kit.studies.diagnose({html.escape(repr(str(trial.run_directory)))})"
        put(self.code, _close_lines(f"the same in code: <code>{call}</code>"))
        return found

    def reset(self) -> None:
        """Close the diagnosis, and disable the button: there is no ended trial."""
        self.button.disabled = True
        self._close_view()
        put(self.code, "")
        self._say("")

    def _close_view(self) -> None:
        view, self.view, self.findings.children = self.view, None, ()
        close_widgets([view])
        self._on_shown()

    def _say(self, text: str) -> None:
        put(self.words, _close_lines(text) if text else "")


class ProfileView:
    """A button that starts a profile, and, in `ui`, its chart and tables; `start` makes one."""

    def __init__(self, start: Callable[[], Profile]) -> None:
        self._start = start
        self.profile: Profile | None = None
        """The last one started here."""
        self._shown: Profile | None = None
        self._mutex = threading.RLock()
        self.button = button("", "", "", "110px")
        self.open_button = button("Open trace", "search", "show the timeline here; it needs no network", "120px")
        self.open_button.layout.display = "none"
        self.words = line()
        self.chart, self.tables, self.trace = (line(display="none") for _ in range(3))
        self.button.on_click(lambda _: self._clicked())
        self.open_button.on_click(lambda _: self.open_trace())
        self._label(busy=False)
        self.ui = ipywidgets.VBox([row(self.open_button, self.words), self.chart, self.trace, self.tables])

    @property
    def busy(self) -> bool:
        return self.profile is not None and not self.profile.ended

    def run(self) -> Profile:
        """Start the passes and return at once; the profile that runs, when there is one.

        Raises:
            KitError: as `kit.studies.profile` does; the reason stands beside the button too.
        """
        with self._mutex:
            if self.profile is not None and not self.profile.ended:
                return self.profile
            self._label(busy=True)
            self._say("checking …")
            try:
                self.profile = self._start()
            except Exception as error:
                self._label(busy=False)
                self._say(str(error))
                raise
            self.profile.on_change(self._on_profile)
            return self.profile

    def open_trace(self) -> None:
        """Show the timeline of the first rank under the button, or hide it."""
        if self.profile is None or self.trace.value:
            put(self.trace, "")
            return
        try:
            put(self.trace, self.profile.viewer()._repr_html_())
        except KitError as error:
            self._say(str(error))

    def _clicked(self) -> None:
        if self.profile is not None and not self.profile.ended:
            self._say("stopping …")
            self.profile.stop()
            return
        threading.Thread(target=clicked, args=(self.run,), name="kit-profile", daemon=True).start()

    def _on_profile(self, profile: Profile) -> None:
        if profile.ended:
            self.settle()
        else:
            self._say(f"{profile!r} …")

    def settle(self) -> None:
        """Show what an ended profile found, once."""
        with self._mutex:
            profile = self.profile
            if profile is None or not profile.ended or profile is self._shown:
                return
            self._shown = profile
            self._label(busy=False)
            self._say(str(profile.error or profile.state))
            if profile.tables:
                put(self.chart, look.svg(profile_figure(profile), " ".join(profile.sentences)))
                put(self.tables, profile._repr_html_())
                put(self.trace, "")
                self.open_button.layout.display = None if profile.trace is not None else "none"

    def _say(self, text: str) -> None:
        self.words.value = f"<span style='line-height:1.4'>{html.escape(text)}</span>"

    def _label(self, busy: bool) -> None:
        if busy:
            relabel(self.button, "Stop", "stop", "", "end the pass that runs; what the ones before it found is kept")
        else:
            tooltip = "run this config three times, under the simple, the advanced and the pytorch profiler"
            relabel(self.button, "Profile", "bar-chart", "", tooltip)


Calibrate = Callable[[Callable[[Trial], object]], "Calibration"]
"""Measures and returns the result; calls its argument with the job, once that runs."""


class CalibrationView(Background):
    """A button that measures loader settings, and, in `ui`, its progress and its result.

    Args:
        calibrate: What a click runs in a thread.
        on_found: Called with the result.
    """

    def __init__(self, calibrate: Calibrate, on_found: Callable[[Calibration], object] = lambda _: None) -> None:
        self._calibrate, self._on_found = calibrate, on_found
        super().__init__("kit-calibrate")
        self._job: Trial | None = None
        self._stopping = False
        self.found: Calibration | None = None
        """The last result."""
        self.error: Exception | None = None
        """Why there was none."""
        self.progress, self.result = line(), line()
        self.button = button("", "", "", "150px")
        self.button.on_click(lambda _: self.stop() if self.busy else self.start())
        self._label(busy=False)
        self.ui = ipywidgets.VBox([self.progress, self.result], layout={"width": "100%"})

    def start(self) -> None:
        """Measure in a thread; returns at once."""
        if self.busy:
            return
        self._stopping, self.error, self._job = False, None, None
        self._say("starting …", None)
        self._label(busy=True)
        self._latest.submit(self._run)

    def stop(self) -> None:
        """End it after the batch under way."""
        self._stopping = True
        if self.busy and self._job is not None:
            self._job.stop()

    def show(self, found: Calibration) -> None:
        """Draw a result."""
        self.found = found
        chart = look.svg(calibration_figure(found), found.headline) if found.measured else ""
        self.result.value = found._repr_html_() + chart
        how = "from an earlier run" if found.reloaded else f"in {format_seconds(found.seconds)}"
        self._say(f"loader calibrated {how}: {len(found.measured)} settings measured", 1.0)

    def _run(self) -> None:
        try:
            found = self._calibrate(self._watch)
            self.show(found)
            self._on_found(found)
        except Exception as error:  # data is the user's own code
            self.error = error.with_traceback(None)  # a traceback would keep the panel alive
            self._say("stopped" if self._stopping else f"not calibrated: {error_words(error)}", 0.0)
        finally:
            self._label(busy=False)

    def _watch(self, job: Trial) -> None:
        self._job = job
        job.on_change(self._tell)
        if self._stopping:  # the click came before the job
            job.stop()

    def _tell(self, job: Trial) -> None:
        steps = [event for event in job.events if event["kind"] == "calibration_step"]
        if steps and not job.ended and not self._stopping:
            speed = format_count(float(steps[-1]["batches_per_second"]))
            looked = sum(not step["again"] for step in steps)
            doing = f"{looked} settings measured" + ", the best of them again" * steps[-1]["again"]
            self._say(f"{doing}; {steps[-1]['setting']}: {speed} batches/s", None)

    def _say(self, words: str, fraction: float | None) -> None:
        self.progress.value = progress_html(words, fraction, "part measured")

    def _label(self, busy: bool) -> None:
        if busy:
            relabel(self.button, "Stop", "stop", "warning", "end it after the batch under way")
        else:
            tooltip = "measure loader settings and take the cheapest fast one"
            relabel(self.button, "Calibrate loader", "tachometer", "", tooltip)
