"""TrialView: one trial, watched: progress with the time left, the chart, and how it ended.

A view on a run directory and nothing else: it polls no process, and the trial goes on without it. Pictures are swapped
in place, at most six a second and fewer where drawing is slow. A failed trial shows its root cause first and its
traceback folded.

AttemptsView: a batch search, a back-off or a profile while it runs: its table, and one button that stops it.

A view only: what it shows is `_repr_html_` of the series, and the button does what `stop()` does. When the series has
ended the button is gone and the still below is its text.
"""

from __future__ import annotations

import html
import threading
import time
from typing import TYPE_CHECKING, Any

import ipywidgets

from kit.charts.trial import TrialChart
from kit.config import Config
from kit.tables import html_warnings
from kit.trial.trial import Trial
from kit.trial.what_ran import what_ran
from kit.units import format_bytes, format_count, format_seconds
from kit.widgets.live import LiveDisplay, live_box

if TYPE_CHECKING:
    from kit.studies.series import Series

_DRAWS_PER_SECOND = 6
_LONGEST_PAUSE_SECONDS = 0.5
_TRACEBACK_LINES = 200
_STARTING = "starting the ranks"
_QUIET, _ERROR, _ACCENT = (
    "var(--jp-ui-font-color2, #666)",
    "var(--jp-error-color1, #b3261e)",
    "var(--jp-brand-color1, #0072B2)",
)


class TrialView:
    """The progress line, the chart and the error box; `watch` turns them to a trial."""

    def __init__(self, config: Config) -> None:
        self.trial: Trial | None = None
        self.progress = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.chart = ipywidgets.HTML(layout={"margin": "4px 0 0", "width": "100%"})
        self.notes = ipywidgets.HTML(layout={"margin": "0", "width": "100%"})
        self.error = ipywidgets.HTML(layout={"margin": "0", "display": "none"})
        self._drawing = threading.RLock()
        self.reset(config)

    def reset(self, config: Config, words: str = "ready") -> None:
        """An empty chart with the limits of this config."""
        with self._drawing:
            self._chart, self._seen, self._next_draw = TrialChart(config), (0, 0), 0.0
            self.say(words, 0.0)
            self.show_error("")
            self.notes.value = ""
            self.chart.value = self._chart.svg()

    def watch(self, trial: Trial) -> None:
        """Show this trial from now on, until it has ended."""
        with self._drawing:
            self.reset(trial.config, _STARTING)
            self.trial = trial
            resolved = trial.environment
            self._chart = TrialChart(trial.config, int(resolved["world_size"]), resolved["accelerator"] == "gpu")
            self.show(trial)
        trial.on_change(self.show)

    def show(self, trial: Trial) -> None:
        """Take in what is new and draw it if a drawing is due; the end is always drawn."""
        with self._drawing:
            now = time.monotonic()
            if trial is not self.trial or not (trial.ended or now >= self._next_draw):
                return
            self._take(trial)
            self.chart.value = self._chart.svg()
            took = time.monotonic() - now
            self._next_draw = now + min(max(1 / _DRAWS_PER_SECOND, 4 * took), _LONGEST_PAUSE_SECONDS)
            self._describe(trial)

    def _take(self, trial: Trial) -> None:
        events, steps = self._seen
        self._seen = (len(trial.events), len(trial.steps))
        self._chart.add(trial.events[events : self._seen[0]])
        self._chart.add(trial.steps[steps : self._seen[1]])

    def _describe(self, trial: Trial) -> None:
        done, of = self._chart.trace.last_step, self._chart.trace.max_steps
        fraction = 1.0 if trial.state == "COMPLETE" else done / of
        self.say(in_words(trial, done, of), fraction, spoken=trial.ended or not done)
        self.notes.value = notes_html(trial)
        if trial.error:
            self.show_error(trial.error, trial.traceback)

    def say(self, words: str, fraction: float | None, *, spoken: bool = True) -> None:
        """Put words above the bar; no fraction is a bar that only shows that something goes on."""
        self.progress.value = progress_html(words, fraction, "part done", spoken=spoken)

    def show_error(self, message: str, traceback: str = "") -> None:
        """Show what went wrong, root cause first; an empty message clears the box."""
        self.error.value = error_html(message, traceback, []) if message else ""
        self.error.layout.display = None if message else "none"

    @property
    def still(self) -> tuple[str, bytes | None]:
        """A sentence and a picture that stand without a browser."""
        with self._drawing:
            if self.trial is None:
                return "no trial yet", None
            self._take(self.trial)
            done, of = self._chart.trace.last_step, self._chart.trace.max_steps
            return f"{self.trial.name}: {in_words(self.trial, done, of)}", self._chart.png()


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
    ran = html.escape(" · ".join(what_ran(trial)))
    line = f"<div style='color:{_QUIET};font-size:.9em;line-height:1.4;margin:2px 0'>{ran}</div>" if ran else ""
    return line + html_warnings(trial.warnings)


def error_html(message: str, traceback: str, warnings: list[str]) -> str:
    """A box with the message, and details folded below it."""
    lines = traceback.rstrip().splitlines()
    details = "\n".join([*warnings, *lines[-_TRACEBACK_LINES:]])
    folded = (
        "<details style='margin-top:4px'><summary style='cursor:pointer'>details</summary>"
        f"<pre style='font-size:.85em;line-height:1.35;max-height:320px;overflow:auto'>{html.escape(details)}</pre>"
        "</details>"
    )
    box = f"border-left:4px solid {_ERROR};padding:4px 0 4px 10px;margin:6px 0;line-height:1.4;overflow-wrap:anywhere"
    return f"<div role='alert' style='{box}'>{html.escape(message)}{folded if details else ''}</div>"


class _ShownTrial:
    """A trial as the result of a cell: its view with a Stop button, and a still beside it."""

    def __init__(self, trial: Trial) -> None:
        self.view = TrialView(trial.config)
        self.view.watch(trial)
        self.button = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="end the trial after its current step; what it measured is kept",
            layout={"width": "90px", "flex": "0 0 auto"},
        )  # fmt: skip
        self.button.on_click(lambda _: trial.stop())
        head = ipywidgets.HBox([self.button, self.view.progress], layout={"align_items": "center", "grid_gap": "12px"})
        self.ui = live_box([head, self.view.chart, self.view.notes, self.view.error], max_width="800px")

    def ended(self, trial: Trial, shown: LiveDisplay) -> None:
        if trial.ended:
            self.button.layout.display = "none"
            shown.refresh()


def display(trial: Trial) -> None:
    """Show a trial live as the output of the current cell, and leave a still of it."""
    shown = _ShownTrial(trial)
    sentence = f"{trial!r}\nRun this cell again to see it live."
    outputs = LiveDisplay(shown.ui, sentence, lambda: shown.view.still)
    trial.on_change(lambda trial: shown.ended(trial, outputs))


class AttemptsView:
    """The widgets of one series."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self._display: LiveDisplay | None = None
        self.button = ipywidgets.Button(
            description="Stop", icon="stop", button_style="warning", layout={"width": "90px"},
            tooltip="end the trial that runs and ask for no other; what was found is kept",
        )  # fmt: skip
        self.button.on_click(lambda _: self._stop())
        self.table = ipywidgets.HTML(layout={"width": "100%"})
        self.ui = live_box([self.button, self.table])
        self._forget = series.on_change(lambda _: self.show())
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
        self._display = LiveDisplay(self.ui, "Run this cell again for its button.", self._still)

    def _still(self) -> tuple[str, bytes | None]:
        return repr(self.series), None


def display_attempts(series: Any) -> None:
    """Show a series in a notebook."""
    AttemptsView(series).display()
