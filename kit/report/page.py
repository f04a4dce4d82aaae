"""html_report: trials as one HTML file for a colleague: it opens offline, on light and dark, on paper, and asks nobody.

One file holds everything: styles, charts as inline SVG, no script, and a policy that forbids the browser every request.
It says what was asked and where configs differ, what was predicted beside what was measured, how single trials went, on
what hardware, and what went wrong. One trial of each config is shown closely, the newest that has measured something;
what is left out is said. Secrets never come in (see `kit.records.row`), nor the folder of the runs. A file that this
function did not write is not replaced, unless it is told to.

One trial as a part of a report: what really ran, its charts, and what it suffers from.

Charts are those that a notebook shows, each with its sentence. What a trial cannot tell is left out, and said in one
line; nothing is measured anew for a report.

What a report says in words, and the frame of its parts: no file is read and nothing is drawn here.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from kit.charts import style as look
from kit.config import Config
from kit.errors import ConfigError, KitError, Problem
from kit.records import results
from kit.records.results import Results, write
from kit.records.row import Row, without_secrets
from kit.studies.compare import Comparison, Quantity, compare, setting_text
from kit.studies.repeats import Tried
from kit.tables import FRAME, html_list, html_table, html_warnings
from kit.trial.submit import versions
from kit.trial.trial import Trial
from kit.trial.what_ran import what_ran
from kit.units import format_bytes, format_count

Given = Trial | Tried | Results | Row | str | Path
MOST_CONFIGS = 12
"""Configs that are held against each other."""
MOST_CLOSE = 6
"""Trials that are shown closely, about a third of a megabyte each."""
_MARK = '<meta name="generator" content="kit.html_report">'
_MARK_BYTES = 2000
_MISSING = "–"
_NOT_ASKED = ("name", "trial.folder")
_STYLE = Path(__file__).with_name("html_report.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html_report(trials: Given | Sequence[Given], path: str | Path, *, title: str = "", overwrite: bool = False) -> Path:
    """Write a report of trials.

    Args:
        trials: What `kit.compare` takes, one or several: trials, run directories, folders of runs, `kit.results()`,
            rows of it, or what `kit.try_change` gave. The first config that has measured something is the one that
            others are held against.
        path: The file to write, such as `report.html`; its folder is made.
        title: Heading of the report.
        overwrite: Replace a file that is there already even if this function did not write it.

    Returns:
        The path of the file.

    Raises:
        ConfigError: for no trials, or a file that must not or cannot be written.
        TrialError: for what is no run, or when none can be read.
    """
    file = _place(path, overwrite)
    given: Iterable[Any] = trials if isinstance(trials, list | tuple) else [trials]
    page = report_page(compare(*given), title)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return write(page, file)
    except OSError as error:
        raise ConfigError([Problem("path", f"cannot write {file}: {error.strerror or error}")]) from error


def _place(path: str | Path, overwrite: bool) -> Path:
    """Where to write, once nothing of others is in the way."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError([Problem("path", f"{file} is a folder; name the file, such as {file / 'report.html'}")])
    if file.exists() and not overwrite and not _is_ours(file):
        message = f"{file} is there already and is no report of kit; choose another name, or say overwrite=True"
        raise ConfigError([Problem("path", message)])
    return file


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return _MARK.encode() in opened.read(_MARK_BYTES)
    except OSError:
        return False


def report_page(comparison: Comparison, title: str = "") -> str:
    """The whole file as text; configs that have measured something come first."""
    order = sorted(comparison.groups, key=lambda group: not group.figure("samples_per_second").values)
    comparison = replace(comparison, groups=tuple(order))
    shown = replace(comparison, groups=comparison.groups[:MOST_CONFIGS])
    rows = Results([row for group in comparison.groups for row in group.rows] + [*comparison.unreadable])
    heading = escape(title or f"Trials of {comparison.groups[0].name}")
    parts = [
        section("In short", html_list(_short(comparison, rows))),
        section("What was asked", _asked(shown)),
        section("Predicted and measured", _measured(rows)),
        section("Configs beside each other", _charts(shown)),
        *_close(comparison),
        section("Hardware and versions", _hardware(rows)),
        section("Notes", html_list(_notes(comparison, rows))),
    ]
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>\n<header><h1>{heading}</h1>"
        f"<p>{escape(headline(comparison, rows))}. Written {when} by kit {versions().get('kit', '')}.</p></header>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )
    return _without_folders(page, rows)


def _without_folders(page: str, rows: Sequence[Row]) -> str:
    """Names of runs stay, where they are kept is nobody's business."""
    folders = {Path(row["run_directory"]).parent for row in rows}
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        if len(folder.parts) > 1:
            page = page.replace(f"{escape(str(folder))}/", "…/")
    return page


# -- sections


def _short(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    speed = speed_sentence(comparison) or "No trial has measured a step after warm-up."
    return [text for text in (speed, memory_sentence(rows), failure_sentence(comparison)) if text]


def _asked(comparison: Comparison) -> str:
    """Where the configs differ, what is off its default in all of them, and each of them whole."""
    whole = (_whole(group.name, group.config) for group in comparison.groups)
    return html_list(_trained(comparison)) + _differing(comparison) + _common(comparison) + "".join(whole)


def _trained(comparison: Comparison) -> list[str]:
    """Which module was trained on which data, each pair once, with the configs it belongs to."""
    found: dict[str, list[str]] = {}
    for group in comparison.groups:
        for row in group.rows:
            if row["module"]:
                size = "" if row["parameters"] is None else f" ({format_count(row['parameters'])} parameters)"
                data = row["data"] or "data of its own"
                names = found.setdefault(f"{row['module']}{size} on {data}", [])
                names += [] if group.name in names else [group.name]
    return [text if len(found) == 1 else f"{text}: {', '.join(names)}" for text, names in found.items()]


def _differing(comparison: Comparison) -> str:
    names, differences = [group.name for group in comparison.groups], comparison.differences
    if len(names) == 1:
        return ""
    if not differences:
        return "<p>The configs are the same; module or data differ.</p>"
    cells = [[path, *map(setting_text, values)] for path, values in differences.items()]
    marked = {
        (row, column)
        for row, values in enumerate(differences.values())
        for column, value in enumerate(values, start=1)
        if value != values[0]
    }
    return _table(("setting", *names), cells, f"Where the configs differ; what is unlike {names[0]} is marked", marked)


def _common(comparison: Comparison) -> str:
    default, told = Config(), {*_NOT_ASKED, *comparison.differences}
    changed = default.diff(comparison.groups[0].config).items()
    cells = [[path, setting_text(ours), setting_text(plain)] for path, (plain, ours) in changed if path not in told]
    shared = "Settings that all of them share" if len(comparison.groups) > 1 else "Settings"
    if not cells:
        return f"<p>{shared}: all others have their default.</p>"
    return _table(("setting", "value", "default"), cells, f"{shared}, off their default")


def _whole(name: str, config: Config) -> str:
    yaml = escape(config.replace({"trial.folder": Config().trial.folder}).to_yaml(comments=False))
    return f"<details><summary>the whole config of {escape(name)}, as YAML</summary><pre>{yaml}</pre></details>"


def _measured(rows: Results) -> str:
    """The tables of `kit.results`, and what a ratio is."""
    note = (
        "<p>A ratio is measured / predicted: 1 is a perfect prediction, 2 is twice as much as foreseen. Device memory "
        "is the peak of the rank that needed most; on the CPU, of its first two optimizer steps. The first steps "
        "(<code>trial.warmup_steps</code>) are in no average.</p>"
    )
    total = count(len(rows), "trial")
    return f'{note}<div class="wide">{results.as_html(rows, total)}</div>'


def _charts(comparison: Comparison) -> str:
    from kit.charts import style as look
    from kit.charts.compare import comparison_figure

    if not comparison.quantities:
        return "<p>Nothing was measured that could be drawn.</p>"
    words = "; ".join(_spoken(comparison, quantity) for quantity in comparison.quantities)
    chart = look.svg(comparison_figure(comparison), f"Bars from zero, one row a config. {words}.")
    caption = "Bars are means over the runs of a config, dots are single runs."
    kept = [place for place in range(len(comparison.columns)) if not 2 <= place < 2 + len(comparison.differences)]
    cells = [[line[place] for place in kept] for line in comparison.rows]
    table = html_table([comparison.columns[place] for place in kept], cells, dense=True)
    return figure_html(chart, caption) + f'<div class="wide">{table}</div>' + html_list(comparison.remarks)


def _spoken(comparison: Comparison, quantity: Quantity) -> str:
    values = (f"{group.name} {group.figure(quantity.column).text(quantity.form)}" for group in comparison.groups)
    return f"{quantity.title}: {', '.join(values)}"


def _close(comparison: Comparison) -> list[str]:
    """One trial of each config, closely."""
    chosen = [(group.name, row) for group in comparison.groups if (row := _telling(group.rows)) is not None]
    return [section(f"A closer look: {name}", trial_section(row)) for name, row in chosen[:MOST_CLOSE]]


def _telling(rows: Sequence[Row]) -> Row | None:
    """The newest trial that has measured something, of those that ended well if there is one."""
    found = [row for row in rows if row["steps"]]
    well = [row for row in found if row["state"] in ("COMPLETE", "STOPPED")]
    return max(well or found, key=lambda row: row["started"] or "", default=None)


def _hardware(rows: Sequence[Row]) -> str:
    """One column for each machine and set of versions that trials ran on."""
    places: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        places.setdefault((*_machine(row).values(), str(sorted((row["versions"] or {}).items()))), []).append(row)
    columns = [{"trials": str(len(found)), **_machine(found[0]), **_versions(found[0])} for found in places.values()]
    names = list(dict.fromkeys(name for column in columns for name in column))
    cells = [[name, *(column.get(name, _MISSING) for column in columns)] for name in names]
    kept = [line for line in cells if any(cell != _MISSING for cell in line[1:])]
    heads = ["where they ran"] if len(columns) == 1 else [f"place {place}" for place in range(1, len(columns) + 1)]
    return _table(("", *heads), kept, "")


def _machine(row: Row) -> dict[str, str]:
    sizes = {"device memory": row["device_memory_bytes"], "host memory": row["host_memory_bytes"]}
    words = {"machine": "host", "device": "device", "processor": "cpu", "cores": "cores", "system": "platform"}
    told = {title: _MISSING if row[name] is None else str(row[name]) for title, name in words.items()}
    return told | {title: _MISSING if size is None else format_bytes(size) for title, size in sizes.items()}


def _versions(row: Row) -> dict[str, str]:
    return {str(package): str(version) for package, version in (row["versions"] or {}).items()}


def _notes(comparison: Comparison, rows: Results) -> list[str]:
    notes = [*comparison.troubles]
    left = len(comparison.groups) - MOST_CONFIGS
    if left > 0:
        notes.append(f"{left} more configs are in the tables of trials only: the first {MOST_CONFIGS} are compared")
    close = sum(_telling(group.rows) is not None for group in comparison.groups)
    if close > MOST_CLOSE:
        notes.append(f"{MOST_CLOSE} of {close} configs have a trial shown closely")
    older = sum(row["cpu"] is None for row in rows)
    if older:
        notes.append(f"{older} of {len(rows)} trials did not write down what they ran on in full")
    return notes or ["Every trial ended well."]


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str, marked: Iterable[tuple[int, int]] = ()
) -> str:
    """A table whose cells may wrap."""
    table = html_table(columns, rows, caption=caption, dense=True, highlighted=set(marked))
    return f'<div class="wide wrapping">{table}</div>'


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
    from kit.charts.trial import TrialChart
    from kit.records.trace import trace_of

    trace = trace_of([*trial.events, *trial.steps], trial.config)
    chart = TrialChart(trial.config, trace.world_size or 1, trace.memory().has_device)
    chart.add([*trial.events, *trial.steps])
    return figure_html(chart.svg(), "Memory of each rank, throughput of all ranks, and where their time went, by step.")


def _timing(trial: Trial) -> str:
    from kit.charts.trial import timing_figure
    from kit.records.timing import timing

    found = timing(trial)
    chart = look.svg(timing_figure(found), f"Time of each batch by part. {found.sentence}.")
    return figure_html(chart, "What each batch was spent on, and what each rank's time went to in total.")


def _gantt(trial: Trial) -> str:
    from kit.charts.pipeline import draw_pipeline
    from kit.records.trace import pipeline_info

    info = pipeline_info([*trial.events, *trial.steps], trial.config)
    return figure_html(
        look.svg(draw_pipeline(info), info.sentence), "What each moment was spent on, from set-up to the last step."
    )


def _memory(trial: Trial) -> str:
    from kit.charts.memory import breakdown_info, draw_breakdown
    from kit.records.row import measured_of, predicted_of

    estimate, measured = predicted_of(trial), measured_of(trial)
    peak = None if measured is None else measured.peak_bytes
    words = breakdown_info(estimate, measured_bytes=peak).sentence
    chart = look.svg(look.root(draw_breakdown({"": estimate}, [peak])), f"Memory of the device. {words}")
    return figure_html(chart, "What was predicted to fill the device at the peak, and the peak that was measured.")


def _diagnosis(trial: Trial) -> str:
    from kit.studies.diagnosis.diagnose import diagnose

    return f"<h3>Diagnosis</h3>{diagnose(trial, peaks=False)._repr_html_()}"


_MEMORY = "device_allocated_bytes_ratio"


def section(title: str, body: str) -> str:
    """A part with its heading; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def figure_html(svg: str, caption: str) -> str:
    """A chart, which says itself what it shows, and one line below it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def count(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def headline(comparison: Comparison, rows: Sequence[Row]) -> str:
    """How much the report is about."""
    return f"{count(len(rows), 'trial')} of {count(len(comparison.groups), 'config')}"


def speed_sentence(comparison: Comparison) -> str:
    """Which config was fastest, and how much faster than the first; empty when none was measured."""
    speeds = {group.name: group.figure("samples_per_second").mean for group in comparison.groups}
    known = {name: speed for name, speed in speeds.items() if not math.isnan(speed)}
    if not known:
        return ""
    best, first = max(known, key=known.__getitem__), comparison.groups[0].name
    if len(comparison.groups) == 1:
        return f"{best} processed {known[best]:,.4g} samples/s."
    if best == first:
        return f"{best}, the first, was the fastest: {known[best]:,.4g} samples/s."
    against = f", {known[best] / known[first]:.2f} × the first ({first})" if known.get(first) else ""
    return f"{best} was the fastest: {known[best]:,.4g} samples/s{against}."


def memory_sentence(rows: Sequence[Row]) -> str:
    """How far predictions of memory were off; empty when none can be told."""
    ratios = [row[_MEMORY] for row in rows if row[_MEMORY] is not None]
    if not ratios:
        return "No prediction of memory stands beside a measurement."
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    found = low if low == high else f"{low} to {high}"
    return f"Peak device memory was {found} of what was predicted, in {count(len(ratios), 'trial')}."


def failure_sentence(comparison: Comparison) -> str:
    """How many did not end well; empty when all did."""
    troubles = len(comparison.troubles)
    return f"{count(troubles, 'trial')} did not end well; the notes at the end say why." if troubles else ""
