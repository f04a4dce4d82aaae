"""TrialView: a trial while it runs: progress with the time left, the chart, what its module logged, and how it ended.

A view on a run directory and nothing else: it polls no process, and the trial goes on without it. Pictures are swapped
in place, at most six a second and fewer where drawing is slow; the loss and all else that was logged every few seconds
and at the end. A failed trial shows its root cause first and its
traceback folded.

AttemptsView: the same for a series of trials (a batch search, a back-off, a profile): its table, and a Stop button.
"""

from __future__ import annotations

import contextlib
import html
import threading
import time
from typing import TYPE_CHECKING, Any

from kit.charts import style as look
from kit.charts.compare import logged_chart
from kit.charts.trial import TrialChart, empty_chart
from kit.config import Config
from kit.errors import TrialError
from kit.memory.alongside import is_predicting
from kit.memory.replay.estimate import MemoryEstimate
from kit.records.ratios import SpeedRange
from kit.records.results import speed_before
from kit.records.row import predicted_of, speed_of_operators
from kit.tables import html_warnings
from kit.trial.settings_used import settings_used
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count, format_seconds
from kit.widgets.live import LiveDisplay, live_box, weakly
from kit.widgets.parts import QUIET, AnswerView, button, line, progress_html, row

if TYPE_CHECKING:
    from kit.studies.series import Series

_DRAWS_PER_SECOND = 6
_LONGEST_PAUSE_SECONDS = 0.5
_LOGGED_SECONDS = 3.0
_LOOK_AGAIN_SECONDS = 1.0
"""After the trial, while its memory is still being predicted."""
_STARTING = "starting the ranks"


class TrialView(AnswerView):
    """The progress line, the chart and the error box; `watch` turns them to a trial."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.trial: Trial | None = None
        self._speed: SpeedRange | None = None
        self._estimate: MemoryEstimate | None = None
        self.progress, self.chart, self.logged, self.notes = line(), line(margin="4px 0 0"), line(), line()
        self.progress.add_class("kit-trial")
        self._drawing = threading.RLock()
        self._chart: TrialChart | None = None
        self.reset(config)

    def reset(self, config: Config, words: str = "ready") -> None:
        """An empty chart with the limits of this config."""
        with self._drawing:
            self.limits = config.trial
            """What the empty chart depends on."""
            self.trial, self._chart, self._seen, self._next_draw, self._next_logged = None, None, (0, 0), 0.0, 0.0
            self.logged.value = ""
            self.say(words, 0.0)
            self.show_error("")
            self.notes.value = ""
            self.chart.value = empty_chart(config.trial)

    def watch(self, trial: Trial) -> None:
        """Show this trial from now on, until it has ended."""
        with self._drawing:
            self.reset(trial.config, _STARTING)
            self.trial = trial
            resolved = trial.environment
            self._chart = TrialChart(trial.config, int(resolved["world_size"]), resolved["accelerator"] == "gpu")
            self._speed, self._estimate = speed_before(trial), None
            self.show(trial)
        trial.on_change(self.show)

    def show(self, trial: Trial) -> None:
        """Take in what is new and draw it if a drawing is due; the end is always drawn."""
        with self._drawing:
            now = time.monotonic()
            if trial is not self.trial or self._chart is None or not (trial.ended or now >= self._next_draw):
                return
            self._take(trial, self._chart)
            self.chart.value = self._chart.svg()
            took = time.monotonic() - now
            self._next_draw = now + min(max(1 / _DRAWS_PER_SECOND, 4 * took), _LONGEST_PAUSE_SECONDS)
            if trial.ended or now >= self._next_logged:
                self._draw_logged(trial)
            done, of = self._chart.trace.last_step, self._chart.trace.max_steps
            fraction = 1.0 if trial.state == "COMPLETE" else done / of
            self.say(in_words(trial, done, of), fraction, spoken=trial.ended or not done)
            self.notes.value = notes_html(trial)
            if trial.error:
                self.show_error(trial.error, trial.traceback)
            if trial.ended and self._estimate is None and is_predicting(trial.paths):  # nobody else calls from now on
                timer = threading.Timer(_LOOK_AGAIN_SECONDS, weakly(self.show), [trial])
                timer.daemon = True
                timer.start()

    def _draw_logged(self, trial: Trial) -> None:
        with contextlib.suppress(TrialError):  # nothing was logged yet
            drawn = logged_chart(trial)
            self.logged.value = look.svg(drawn, f"What {trial.name} logged")
        self._next_logged = time.monotonic() + _LOGGED_SECONDS

    def _take(self, trial: Trial, chart: TrialChart) -> None:
        if self._estimate is None:
            with contextlib.suppress(TrialError):  # there is none, or not yet
                self._estimate = predicted_of(trial)
                self._speed = self._speed or speed_of_operators(trial.paths)
            soon = is_predicting(trial.paths) if trial.ended else trial.paths.predicting.is_file()
            chart.expect(self._estimate, self._speed, soon=soon)
        events, steps = self._seen
        self._seen = (len(trial.events), len(trial.steps))
        chart.add(trial.events[events : self._seen[0]])
        chart.add(trial.steps[steps : self._seen[1]])

    def say(self, words: str, fraction: float | None = None, *, spoken: bool = True) -> None:
        """Put words above the bar; no fraction is a bar that only shows that something goes on."""
        self.progress.value = progress_html(words, fraction, "part done", spoken=spoken)

    @property
    def still(self) -> tuple[str, bytes | None]:
        """A sentence and a picture that stand without a browser."""
        with self._drawing:
            if self.trial is None or self._chart is None:
                return "no trial yet", None
            self._take(self.trial, self._chart)
            done, of = self._chart.trace.last_step, self._chart.trace.max_steps
            return f"{self.trial.name}: {in_words(self.trial, done, of)}", self._chart.still()


def in_words(trial: Trial, done: int, of: int) -> str:
    """The state of a trial in a few words: what happens now and how long it takes, or how it ended."""
    if trial.state == "COMPLETE":
        return f"complete — {_outcome(trial)}"
    if trial.state == "STOPPED":
        return f"stopped after step {done} — {_outcome(trial)}" if done else "stopped before the first step"
    if trial.ended:
        when = f"after step {done}" if done else "before the first step"
        return f"{trial.state.lower()} {when}" + (f" ({trial.cause})" if trial.cause else "")
    if done:
        left = seconds_left(trial, of)
        return f"step {done}/{of}" + (f" · {left} left" if left else "")
    if trial.event("fit_started"):
        return f"{_STARTING}: reading the first batch …"
    tried = sum(event["kind"] == "calibration_step" and not event["again"] for event in trial.events)
    return f"calibrating the loader: {tried} settings measured …" if tried else f"{_STARTING}: loading torch …"


def seconds_left(trial: Trial, of: int) -> str:
    """The time the remaining steps take at the pace since warm-up; empty while there is no pace."""
    warmup = trial.config.trial.warmup_steps
    first = next((event for event in trial.steps if event["step"] > warmup), None)
    last = trial.steps[-1] if trial.steps else None
    if first is None or last is None or last["step"] <= first["step"]:
        return ""
    pace = (last["time"] - first["time"]) / (last["step"] - first["step"])
    return format_seconds(max(1, round(pace * (of - last["step"]))))


def _outcome(trial: Trial) -> str:
    from kit.records.trace import trace_of

    trace = trace_of([*trial.events, *trial.steps], trial.config)
    memory, throughput = trace.memory(), trace.throughput()
    parts = []
    if throughput.measured_steps:
        parts += [
            f"{format_count(throughput.mean_samples_per_second)} samples/s",
            f"data wait {throughput.data_wait_fraction:.0%}",
        ]
    if memory.has_device:
        parts.append(f"device peak {format_bytes(memory.peak('device_allocated_bytes'))}")
    elif memory.ranks:
        parts.append(f"peak {format_bytes(memory.peak('host_rss_bytes'))} host RSS")
    return ", ".join(parts) or "nothing measured"


def notes_html(trial: Trial) -> str:
    """What really ran, in one line, and every warning in a line of its own."""
    ran = html.escape(" · ".join(settings_used(trial)))
    line = f"<div style='color:{QUIET};font-size:.9em;line-height:1.4;margin:2px 0'>{ran}</div>" if ran else ""
    return line + html_warnings(trial.warnings)


def display(trial: Trial) -> None:
    """Show a trial live as the output of the current cell, with a Stop button, and leave a still of it."""
    view = TrialView(trial.config)
    view.watch(trial)
    stop = button("Stop", "stop", "end the trial after its current step; what it measured is kept")
    stop.on_click(lambda _: trial.stop())
    box = live_box([row(stop, view.progress), view.chart, view.logged, view.notes, view.error], max_width="800px")
    shown = LiveDisplay(box, f"{trial!r}\nRun this cell again to see it live.", lambda: view.still)

    def on_change(trial: Trial) -> None:
        if trial.ended:
            stop.layout.display = "none"
            shown.refresh()

    trial.on_change(on_change)


class AttemptsView:
    """The table of one series, which is its own `_repr_html_`, and a button that does what its `stop()` does."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self._display: LiveDisplay | None = None
        tooltip = "end the trial that runs and start no other; what was found is kept"
        self.button = button("Stop", "stop", tooltip, button_style="warning")
        self.button.on_click(lambda _: self._stop())
        self.table = line()
        self.ui = live_box([self.button, self.table])
        series.on_change(lambda _: self.show())
        self.show()

    def _stop(self) -> None:
        self.button.disabled = True
        self.series.stop()

    def show(self) -> None:
        """Draw what is known now."""
        self.table.value = self.series._repr_html_()
        if self.series.ended:
            self.button.layout.display = "none"
            if self._display is not None:
                self._display.refresh()

    def display(self) -> None:
        self._display = LiveDisplay(self.ui, "Run this cell again for its button.", lambda: (repr(self.series), None))


def display_attempts(series: Any) -> None:
    """Show a series in a notebook."""
    AttemptsView(series).display()
