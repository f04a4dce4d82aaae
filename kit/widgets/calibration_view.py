"""CalibrationView: a button that measures loader settings and, while it does, stops; then the table, chart and choice.

The button does what `kit.calibrate` does, in a thread, and gives the result to whoever made the view: a panel takes the
chosen setting over into its form. What went wrong is said in the progress line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ipywidgets

from kit.errors import KitError
from kit.report.calibration_chart import calibration_figure
from kit.report.figure import svg
from kit.units import format_count, format_seconds
from kit.widgets.background import Latest
from kit.widgets.trial_view import progress_html

if TYPE_CHECKING:
    from kit.run.calibration.result import Calibration
    from kit.run.trial import Trial

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
