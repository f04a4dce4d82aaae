"""DiagnosisView: a diagnosis with a button at each finding that tries its change and shows before and after.

A view only: the text is the diagnosis's own, a button does what `finding.try_it()` does, in a thread, one at a time; it
says which run it is at, and the answer stands below the finding when it is there. The same in code is shown with it.

DiagnosisControl: one button that diagnoses the last trial of a panel, and under it each finding with its own button.

A click reads what the trial wrote, in a thread; nothing is run but the device's peaks, measured once in two seconds.
What it does is `kit.diagnose(trial)`, which stands beside it in code. What is not diagnosed says why.

ProfileView: one button that profiles the config of a panel, and what the profilers said, under it.

A click starts the passes and turns the button into Stop; everything runs beside the kernel. When they have ended the
chart, the tables and a button stand there that opens the trace in place. What it does is `kit.profile(config)`.

CalibrationView: a button that measures loader settings and, while it does, stops; then the table, chart and choice.

The button does what `kit.calibrate` does, in a thread, and gives the result to whoever made the view: a panel takes the
chosen setting over into its form. What went wrong is said in the progress line.
"""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.charts import style as look
from kit.charts.compare import calibration_figure
from kit.charts.profile import profile_figure
from kit.charts.style import svg
from kit.errors import ForeignRunError, KitError
from kit.studies.diagnosis.diagnose import Diagnosis, Finding, diagnose, finding_html
from kit.studies.profiling.profile import Profile
from kit.studies.repeats import Tried
from kit.trial.trial import Trial
from kit.units import format_count, format_seconds
from kit.widgets.handle import close_widgets
from kit.widgets.live import Latest, LiveDisplay, live_box
from kit.widgets.trial_view import progress_html

if TYPE_CHECKING:
    from kit.studies.calibration.result import Calibration
    from kit.trial.trial import Trial

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


class ProfileView:
    """The widgets of a profile; `start` makes one."""

    def __init__(self, start: Callable[[], Profile]) -> None:
        self._start = start
        self.profile: Profile | None = None
        """The last one started here."""
        self._shown: Profile | None = None
        self._mutex = threading.RLock()
        self.button = ipywidgets.Button(layout={"width": "110px", "flex": "0 0 auto"})
        self.open_button = ipywidgets.Button(
            description="Open trace", icon="search", tooltip="show the timeline here; it needs no network",
            layout={"width": "120px", "display": "none"},
        )  # fmt: skip
        self.words = ipywidgets.HTML()
        self.chart = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self.tables = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self.trace = ipywidgets.HTML(layout={"width": "100%", "display": "none"})
        self.button.on_click(lambda _: self._clicked())
        self.open_button.on_click(lambda _: self.open_trace())
        self._label(busy=False)
        line = ipywidgets.HBox([self.button, self.open_button, self.words], layout={"align_items": "center"})
        self.ui = ipywidgets.VBox([line, self.chart, self.trace, self.tables])

    @property
    def busy(self) -> bool:
        return self.profile is not None and not self.profile.ended

    def run(self) -> Profile:
        """Start the passes and return at once; the profile that runs, when there is one.

        Raises:
            KitError: as `kit.profile` does; the reason stands beside the button too.
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
        """Show the timeline of the first rank under the button, or put it away."""
        if self.profile is None or self.trace.layout.display == "":
            self._show(self.trace, "")
            return
        try:
            self._show(self.trace, self.profile.viewer()._repr_html_())
        except KitError as error:
            self._say(str(error))

    def _clicked(self) -> None:
        if self.profile is not None and not self.profile.ended:
            self._say("stopping …")
            self.profile.stop()
            return
        threading.Thread(target=self._try, name="kit-profile", daemon=True).start()

    def _try(self) -> None:
        try:
            self.run()
        except KitError:
            return  # it stands beside the button

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
                self._draw(profile)

    def _draw(self, profile: Profile) -> None:
        self._show(self.chart, look.svg(profile_figure(profile), " ".join(profile.sentences)))
        self._show(self.tables, profile._repr_html_())
        self._show(self.trace, "")
        self.open_button.layout.display = "" if profile.trace is not None else "none"

    def _show(self, place: ipywidgets.HTML, text: str) -> None:
        place.value = text
        place.layout.display = "" if text else "none"

    def _say(self, text: str) -> None:
        self.words.value = f"<span style='margin-left:8px'>{html.escape(text)}</span>"

    def _label(self, busy: bool) -> None:
        self.button.description, self.button.icon = ("Stop", "stop") if busy else ("Profile", "bar-chart")
        self.button.tooltip = (
            "end the pass that runs; what the ones before it found is kept"
            if busy
            else "run this config three times, under the simple, the advanced and the pytorch profiler"
        )


Calibrate = Callable[[Callable[["Trial"], object]], "Calibration"]
"""Measures and returns; calls what it is given with the job, once that runs."""


class CalibrationView:
    """Button, progress and result.

    Args:
        calibrate: What a click runs in a thread.
        on_found: Hears the result.
    """

    def __init__(self, calibrate: Calibrate, on_found: Callable[[Calibration], object] = lambda _: None) -> None:
        self._calibrate, self._on_found = calibrate, on_found
        self._measuring = Latest("kit-calibrate")
        self._job: Trial | None = None
        self._stopping = False
        self.found: Calibration | None = None
        """The last result."""
        self.error: Exception | None = None
        """Why there was none."""
        self.progress = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.result = ipywidgets.HTML(layout={"width": "100%"})
        self.button = ipywidgets.Button(layout={"width": "150px", "flex": "0 0 auto"})
        self.button.on_click(lambda _: self.stop() if self.busy else self.start())
        self._label(busy=False)
        head = ipywidgets.HBox([self.button, self.progress], layout={"align_items": "center", "grid_gap": "12px"})
        self.ui = ipywidgets.VBox([head, self.result], layout={"width": "100%", "margin": "6px 0 0"})

    @property
    def busy(self) -> bool:
        return self._measuring.busy

    def start(self) -> None:
        """Measure in a thread; returns at once."""
        if self.busy:
            return
        self._stopping, self.error, self._job = False, None, None
        self._say("starting …", None)
        self._label(busy=True)
        self._measuring.submit(self._run)

    def stop(self) -> None:
        """End it after the batch under way."""
        self._stopping = True
        if self.busy and self._job is not None:
            self._job.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Return when nothing is measured; False after `timeout` seconds."""
        return self._measuring.wait(timeout)

    def show(self, found: Calibration) -> None:
        """Draw a result."""
        self.found = found
        chart = svg(calibration_figure(found), found.headline) if found.measured else ""
        self.result.value = found._repr_html_() + chart
        how = "taken up again" if found.reloaded else f"in {format_seconds(found.seconds)}"
        self._say(f"loader calibrated {how}: {len(found.measured)} settings measured", 1.0)

    def _run(self) -> None:
        try:
            found = self._calibrate(self._watch)
            self.show(found)
            self._on_found(found)
        except Exception as error:  # data is the user's own code
            self.error = error.with_traceback(None)  # which would keep all that was at work
            words = str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"
            self._say("stopped" if self._stopping else f"not calibrated: {words}", 0.0)
        finally:
            self._label(busy=False)

    def _watch(self, job: Trial) -> None:
        self._job = job
        job.on_change(self._tell)
        if self._stopping:  # asked for before there was a job
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
        self.button.description, self.button.icon, self.button.button_style, self.button.tooltip = (
            ("Stop", "stop", "warning", "end it after the batch under way")
            if busy
            else ("Calibrate loader", "tachometer", "", "measure loader settings and take the cheapest fast one")
        )
