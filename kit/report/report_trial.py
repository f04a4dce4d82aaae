"""One trial as a part of a report: what really ran, its charts, and what it suffers from.

Charts are those that a notebook shows, each with its sentence. What a trial cannot tell is left out, and said in one
line; nothing is measured anew for a report.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from kit.errors import KitError
from kit.report import figure as look
from kit.report.report_words import figure_html
from kit.report.row import Row, without_secrets
from kit.run.trial import Trial
from kit.run.what_ran import what_ran
from kit.tables import FRAME, html_list, html_warnings


def trial_section(row: Row) -> str:
    """The HTML of one trial, read from its run directory."""
    try:
        trial = Trial.open(row["run_directory"])
    except KitError as error:
        return f"<p>{escape(str(row['run']))} can no longer be opened: {escape(_safe(str(error)))}</p>"
    intro = f"<p>{escape(trial.name)}: {escape(_ended(row))}.</p>"
    parts, missing = [], []
    for draw in (_course, _timing, _gantt, _memory):
        found, why = _try(draw, trial)
        parts.append(found)
        missing += [why] if why else []
    warnings = html_warnings([_safe(text) for text in trial.warnings])
    diagnosis, why = _try(_diagnosis, trial)
    missing += [why] if why else []
    left_out = f'<div style="{FRAME}"><p>Not shown:</p>{html_list(missing)}</div>' if missing else ""
    said = html_list([_safe(text) for text in what_ran(trial)])
    return intro + said + warnings + "".join(parts) + diagnosis + left_out


def _ended(row: Row) -> str:
    cause = f" ({row['cause']})" if row["cause"] else ""
    message = f", {row['message']}" if row["message"] else ""
    return f"{str(row['state']).lower()}{cause}{message}; started {row['started']}"


def _safe(text: str) -> str:
    return str(without_secrets(text))


def _try(draw: Callable[[Trial], str], trial: Trial) -> tuple[str, str]:
    """What it draws and nothing, or nothing and why it cannot."""
    try:
        return draw(trial), ""
    except Exception as error:  # a part that cannot be drawn hides no other
        return "", _safe(f"{type(error).__name__}: {error}".removeprefix("TrialError: ")).splitlines()[0]


def _course(trial: Trial) -> str:
    from kit.report.trace import trace_of
    from kit.report.trial_charts import TrialChart

    trace = trace_of([*trial.events, *trial.steps], trial.config)
    chart = TrialChart(trial.config, trace.world_size or 1, trace.memory().has_device)
    chart.add([*trial.events, *trial.steps])
    return figure_html(chart.svg(), "Memory of each rank, throughput of all ranks, and where their time went, by step.")


def _timing(trial: Trial) -> str:
    from kit.report.timing import timing
    from kit.report.timing_chart import timing_figure

    found = timing(trial)
    chart = look.svg(timing_figure(found), f"Time of each batch by part. {found.sentence}.")
    return figure_html(chart, "What each batch was spent on, and what each rank's time went to in total.")


def _gantt(trial: Trial) -> str:
    from kit.report.pipeline import pipeline_info
    from kit.report.pipeline_chart import draw_pipeline

    info = pipeline_info([*trial.events, *trial.steps], trial.config)
    return figure_html(
        look.svg(draw_pipeline(info), info.sentence), "What each moment was spent on, from set-up to the last step."
    )


def _memory(trial: Trial) -> str:
    from kit.report.memory_breakdown import breakdown_info, draw_breakdown
    from kit.report.trial_memory import measured_of, predicted_of

    estimate, measured = predicted_of(trial), measured_of(trial)
    peak = None if measured is None else measured.peak_bytes
    words = breakdown_info(estimate, measured_bytes=peak).sentence
    chart = look.svg(look.root(draw_breakdown({"": estimate}, [peak])), f"Memory of the device. {words}")
    return figure_html(chart, "What was predicted to fill the device at the peak, and the peak that was measured.")


def _diagnosis(trial: Trial) -> str:
    from kit.report.diagnosis import diagnose

    return f"<h3>Diagnosis</h3>{diagnose(trial, peaks=False)._repr_html_()}"
