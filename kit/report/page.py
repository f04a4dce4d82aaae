"""Pages for others, each one HTML file: it opens offline, on light and dark, on paper, and asks nobody.

One file holds everything: styles, charts as inline SVG, no script, and a policy that forbids the browser every request.
`html_report` says which configs were run and where they differ, the predictions beside the measurements, how single
trials went, on which hardware, and what went wrong. One trial of each config is shown closely, the newest that has
measured something; a chart that cannot be drawn gives its reason, and nothing is measured anew. Secrets never come in
(see `kit.records.row`), nor the folder of the runs. A file that is no page of kit's is not replaced, unless
`overwrite` says so.

The page that a learner hands in has every guess beside what was predicted and measured. The guesses stand in it a
second time as JSON, which a teacher's script may read:
`re.search('<script type="application/json" id="guesses">(.*?)</script>', text)`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kit.arguments import checks_arguments
from kit.charts import style as look
from kit.charts.compare import score_figure
from kit.config import Config
from kit.course.guesses import COLUMNS, Score
from kit.errors import ConfigError, KitError, Problem, TrialError
from kit.json_text import write_whole
from kit.records import results
from kit.records.results import Results, speed_before
from kit.records.row import Row, predicted_of, without_secrets
from kit.studies.comparison import Comparison, compare, setting_text
from kit.studies.repeats import Tried
from kit.tables import FRAME, MISSING, html_list, html_table, html_warnings
from kit.trial.settings_used import settings_used
from kit.trial.submit import versions
from kit.trial.trial import Trial
from kit.units import format_bytes, format_count

Given = Trial | Tried | Results | Row | str | Path
MOST_CONFIGS = 12
"""Configs that are compared."""
MOST_CLOSE = 6
"""Trials that are shown closely, about a third of a megabyte each."""
_MARK = '<meta name="generator" content="kit.html_report">'
_MARK_BYTES = 2000
_NOT_ASKED = ("name", "trial.folder")
_STYLE = Path(__file__).with_name("html_report.css").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@checks_arguments
class PageFile(type(Path())):  # type: ignore[misc]
    """The path of a page that was written; a notebook shows it as a link."""

    def _repr_html_(self) -> str:
        return f'<a href="{escape(quote(os.path.relpath(self)))}" target="_blank">{escape(self.name)}</a>'


def html_report(trials: Given | Sequence[Given], path: str | Path, *, title: str = "", overwrite: bool = False) -> Path:
    """Write one HTML file with the charts and tables of trials, which opens offline.

    Args:
        trials: What `kit.studies.compare` takes, one or several: trials, run directories, folders of runs,
            `kit.results()`, rows of it, or what `kit.studies.try_change` returned. The first config with a
            measurement is the one that the others are compared with.
        path: The file to write, such as `report.html`. Its folder is made.
        title: Heading of the report.
        overwrite: Replace a file that this function did not write.

    Returns:
        The path of the file.

    Raises:
        ConfigError: for no trials, and a file that must not or cannot be written.
        TrialError: for what is no run, or when no run can be read.

    Example:
        >>> kit.html_report(trial, "report.html").name
        'report.html'
    """
    asked: Any = path  # by a user, who may give anything
    if not isinstance(asked, str | PathLike):
        raise ConfigError([Problem("path", f"{type(asked).__name__} is no path; write such as 'report.html'")])
    file = Path(path).expanduser()
    refuse_folder(file, "report.html")
    if not overwrite:
        refuse_other_files(file, ", or say overwrite=True")
    given: Iterable[Any] = trials if isinstance(trials, list | tuple) else [trials]
    return write_page(file, report_page(compare(*given), title))


def score_page(score: Score, file: Path) -> Path:
    """Write the page that `Score.hand_in` promises.

    Raises:
        ConfigError: for a file that must not or cannot be written.
    """
    refuse_folder(file, "guesses.html")
    refuse_other_files(file)
    table = html_table(COLUMNS, score.rows())
    sections = {
        "Guess, prediction, measurement": f'<div style="overflow-x: auto">{table}</div>',
        "How far off": look.svg(score_figure(score), score.headline) if score.guesses else html_list(["nothing yet"]),
    }
    values = {"learner": score.learner, "points": score.points, "guesses": [asdict(one) for one in score.guesses]}
    kept = json.dumps(values).replace("</", "<\\/")
    page = html_page(escape(score.headline), "", sections)
    data = f'<script type="application/json" id="guesses">{kept}</script>\n</body>'
    return write_page(file, page.replace("</body>", data))


def write_page(file: Path, page: str) -> Path:
    """Write a page, in one step, and the folders above it.

    Raises:
        ConfigError: when it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return PageFile(write_whole(file, page))
    except OSError as error:
        raise ConfigError([Problem("path", f"cannot write {file}: {error.strerror or error}")]) from error


def refuse_other_files(file: Path, way_out: str = "") -> None:
    """Refuse a file that is there and is no page of kit's.

    Raises:
        ConfigError: for such a file, with what else to do.
    """
    if file.exists() and not _is_ours(file):
        message = f"{file} is there already and is no report of kit; choose another name{way_out}"
        raise ConfigError([Problem("path", message)])


def refuse_folder(file: Path, example: str) -> None:
    """Refuse the path of a folder, or of a file that no browser takes for a page.

    Raises:
        ConfigError: for such a path, with `example` as the name of a file that would do.
    """
    if file.suffix.lower() not in ("", ".html", ".htm"):
        message = f"{file.name}: a page is HTML, which opens by its ending; write {file.with_suffix('.html').name}"
        raise ConfigError([Problem("path", message)])
    if file.is_dir():
        raise ConfigError([Problem("path", f"{file} is a folder; name the file, such as {file / example}")])


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
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"]))
    several = counted(len(names), "experiment")
    heading = escape(title or f"Trials of {several if len(names) > 1 else comparison.groups[0].name}")
    close = [(group.name, row) for group in comparison.groups if (row := _newest_measured(group.rows)) is not None]
    sections = {
        "In short": html_list(_short(comparison, rows)),
        "Configs": _configs(shown),
        "Predicted and measured": _measured(rows),
        "Configs beside each other": _charts(shown),
        **{f"A closer look: {name}": trial_section(row) for name, row in close[:MOST_CLOSE]},
        "Hardware and versions": _hardware(rows),
        "Notes": html_list(_notes(comparison, rows, len(close))),
    }
    about = f"{counted(len(rows), 'trial')} of {counted(len(comparison.groups), 'config')}"
    page = html_page(heading, f"{about}.", sections)
    folders = {Path(row["run_directory"]).parent for row in rows}  # a reader sees names of runs, not where they lie
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        if len(folder.parts) > 1:
            page = page.replace(f"{escape(str(folder))}/", "…/")
    return page


def html_page(heading: str, about: str, sections: Mapping[str, str]) -> str:
    """A whole file: a heading, a line below it, and sections under theirs. Heading and line are HTML.

    The line ends with when the page was written and by what.
    """
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    line = f"{about} Written {when} by kit {versions().get('kit', '')}.".lstrip()
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>\n<header><h1>{heading}</h1>"
        f"<p>{line}</p></header>\n"
        + "\n".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in sections.items())
        + "\n</main>\n</body>\n</html>\n"
    )


def counted(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


# -- sections


def _short(comparison: Comparison, rows: Sequence[Row]) -> list[str]:
    """The fastest config, the errors of the predictions of memory, and how many have failed or not ended yet."""
    speeds = {group.name: group.figure("samples_per_second").mean for group in comparison.groups}
    known = {name: speed for name, speed in speeds.items() if not math.isnan(speed)}
    best, first = max(known, key=known.__getitem__, default=""), comparison.groups[0].name
    fast = f"{known[best]:,.4g} samples/s" if known else ""
    if not known:
        speed = "No trial has measured a step after warm-up."
    elif len(comparison.groups) == 1:
        speed = f"{best} processed {fast}."
    elif len(trained := {(row["module"], row["data"]) for row in rows if row["module"]}) > 1:
        speed = f"{len(trained)} pairs of module and data were trained: their speeds are no comparison."
    elif best == first:
        speed = f"{best}, the first, was the fastest: {fast}."
    else:
        against = f", {known[best] / known[first]:.2f} × the first ({first})" if known.get(first) else ""
        speed = f"{best} was the fastest: {fast}{against}."
    ratios = [ratio for row in rows if (ratio := row["device_allocated_bytes_ratio"]) is not None]
    memory = "No prediction of memory stands beside a measurement."
    if ratios:
        low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        found = low if low == high else f"{low} to {high}"
        memory = f"Peak device memory was {found} of what was predicted, in {counted(len(ratios), 'trial')}."
    sentences = [speed, memory]
    if unfinished := len(comparison.unfinished):
        have = "has" if unfinished == 1 else "have"
        sentences.append(f"{counted(unfinished, 'trial')} {have} not ended yet; a report written later has the rest.")
    if troubles := len(comparison.troubles):
        sentences.append(f"{counted(troubles, 'trial')} did not end well; the notes at the end say why.")
    return sentences


def _configs(comparison: Comparison) -> str:
    """Where the configs differ, what is off its default in all of them, and each of them whole."""
    parts = [html_list(_trained(comparison)), _differing(comparison), _common(comparison)]
    for group in comparison.groups:
        yaml = escape(group.config.replace({"trial.folder": Config().trial.folder}).to_yaml(comments=False))
        summary = f"the whole config of {escape(group.name)}, as YAML"
        parts.append(f"<details><summary>{summary}</summary><pre>{yaml}</pre></details>")
    return "".join(parts)


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
    configs, shown = [group.config for group in comparison.groups], {*_NOT_ASKED, *comparison.differences}
    shown |= {path for config in configs for path in configs[0].diff(config)}  # a target that `differences` names apart
    changed = Config().diff(configs[0]).items()
    cells = [[path, setting_text(ours), setting_text(plain)] for path, (plain, ours) in changed if path not in shown]
    shared = "Settings that all of them share" if len(comparison.groups) > 1 else "Settings"
    if not cells:
        return f"<p>{shared}: all others have their default.</p>"
    return _table(("setting", "value", "default"), cells, f"{shared}, off their default")


def _measured(rows: Results) -> str:
    """The tables of `kit.results`, and what a ratio is."""
    note = (
        "<p>A ratio is measured / predicted: 1 is a perfect prediction, 2 is twice as much as predicted. Device memory "
        "is the peak of the rank that needed most; on the CPU, of its first two optimizer steps. The first steps "
        "(<code>trial.warmup_steps</code>) are in no average.</p>"
    )
    total = counted(len(rows), "trial")
    return f'{note}<div class="wide">{results.as_html(rows, total)}</div>'


def _charts(comparison: Comparison) -> str:
    from kit.charts.compare import comparison_figure

    if not comparison.quantities:
        return "<p>Nothing was measured that could be drawn.</p>"
    words = "; ".join(
        f"{quantity.title}: "
        + ", ".join(f"{one.name} {one.figure(quantity.column).text(quantity.form)}" for one in comparison.groups)
        for quantity in comparison.quantities
    )
    chart = look.svg(comparison_figure(comparison), f"Bars from zero, one row a config. {words}.")
    caption = "Bars are means over the runs of a config, dots are single runs."
    kept = [place for place in range(len(comparison.columns)) if not 2 <= place < 2 + len(comparison.differences)]
    cells = [[line[place] for place in kept] for line in comparison.rows]
    table = html_table([comparison.columns[place] for place in kept], cells, dense=True)
    return figure_html(chart, caption) + f'<div class="wide">{table}</div>' + html_list(comparison.remarks)


def _newest_measured(rows: Sequence[Row]) -> Row | None:
    """The newest trial that has measured something, of those that ended well if there are any."""
    found = [row for row in rows if row["steps"]]
    well = [row for row in found if row["state"] in ("COMPLETE", "STOPPED")]
    return max(well or found, key=lambda row: row["started"] or "", default=None)


def _hardware(rows: Sequence[Row]) -> str:
    """One column for each machine and set of versions that trials ran on."""
    places: dict[str, list[Row]] = {}
    for row in rows:
        places.setdefault(f"{_machine(row)} {sorted((row['versions'] or {}).items())}", []).append(row)
    columns = []
    for found in places.values():
        packages = {str(name): str(version) for name, version in (found[0]["versions"] or {}).items()}
        columns.append({"trials": str(len(found)), **_machine(found[0]), **packages})
    names = list(dict.fromkeys(name for column in columns for name in column))
    cells = [[name, *(column.get(name, MISSING) for column in columns)] for name in names]
    kept = [line for line in cells if any(cell != MISSING for cell in line[1:])]
    heads = ["where they ran"] if len(columns) == 1 else [f"place {place}" for place in range(1, len(columns) + 1)]
    return _table(("", *heads), kept, "")


def _machine(row: Row) -> dict[str, str]:
    sizes = {"device memory": row["device_memory_bytes"], "host memory": row["host_memory_bytes"]}
    words = {"machine": "host", "device": "device", "processor": "cpu", "cores": "cores", "system": "platform"}
    found = {title: MISSING if row[name] is None else str(row[name]) for title, name in words.items()}
    return found | {title: MISSING if size is None else format_bytes(size) for title, size in sizes.items()}


def _notes(comparison: Comparison, rows: Results, close: int) -> list[str]:
    notes = [*comparison.unfinished, *comparison.troubles]
    left = len(comparison.groups) - MOST_CONFIGS
    if left > 0:
        notes.append(f"{left} more configs are in the tables of trials only: the first {MOST_CONFIGS} are compared")
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


# -- a trial closely


def trial_section(row: Row) -> str:
    """The HTML of one trial, read from its run directory."""
    try:
        trial = Trial.open(row["run_directory"])
    except KitError as error:
        return f"<p>{escape(str(row['run']))} can no longer be opened: {escape(_safe(str(error)))}</p>"
    cause = f" ({row['cause']})" if row["cause"] else ""
    message = f", {row['message']}" if row["message"] else ""
    ended = f"{str(row['state']).lower()}{cause}{message}; started {row['started']}"
    drawn, missing = [], []
    for draw in (_draw_course, _draw_timing, _draw_pipeline, _draw_memory, _diagnosis):
        try:
            drawn.append(draw(trial))
        except Exception as error:  # a part that cannot be drawn hides no other
            missing.append(_safe(f"{type(error).__name__}: {error}".removeprefix("TrialError: ")).splitlines()[0])
    ran = html_list([_safe(text) for text in settings_used(trial)])
    warnings = html_warnings([_safe(text) for text in trial.warnings])
    left_out = f'<div style="{FRAME}"><p>Not shown:</p>{html_list(missing)}</div>' if missing else ""
    return f"<p>{escape(trial.name)}: {escape(ended)}.</p>{ran}{warnings}{''.join(drawn)}{left_out}"


def _safe(text: str) -> str:
    return str(without_secrets(text))


def figure_html(svg: str, caption: str) -> str:
    """A chart, which says itself what it shows, and one line below it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _draw_course(trial: Trial) -> str:
    from kit.charts.trial import TrialChart
    from kit.records.trace import trace_of

    trace = trace_of([*trial.events, *trial.steps], trial.config)
    chart = TrialChart(trial.config, trace.world_size or 1, trace.memory().has_device)
    estimate = None
    with contextlib.suppress(TrialError):  # there is none
        estimate = predicted_of(trial)
    chart.expect(estimate, speed_before(trial))
    chart.add([*trial.events, *trial.steps])
    return figure_html(chart.svg(), "Memory of each rank, throughput of all ranks, and where their time went, by step.")


def _draw_timing(trial: Trial) -> str:
    from kit.charts.trial import timing_figure
    from kit.records.timing import timing

    found = timing(trial)
    chart = look.svg(timing_figure(found), f"Time of each batch by part. {found.sentence}.")
    return figure_html(chart, "The time of each batch by part, and in total the time of each rank.")


def _draw_pipeline(trial: Trial) -> str:
    from kit.charts.pipeline import draw_pipeline
    from kit.records.trace import pipeline_info

    info = pipeline_info([*trial.events, *trial.steps], trial.config)
    chart = look.svg(draw_pipeline(info), info.sentence)
    return figure_html(chart, "The time of each moment, from set-up to the last step.")


def _draw_memory(trial: Trial) -> str:
    from kit.charts.memory import breakdown_info, draw_breakdown
    from kit.records.row import measured_of

    estimate, measured = predicted_of(trial), measured_of(trial)
    peak = None if measured is None else measured.peak_bytes
    words = breakdown_info(estimate, measured_bytes=peak).sentence
    chart = look.svg(look.root(draw_breakdown({"": estimate}, [peak])), f"Memory of the device. {words}")
    return figure_html(chart, "The predicted contents of the device at the peak, and the measured peak.")


def _diagnosis(trial: Trial) -> str:
    from kit.studies.diagnosis.diagnose import diagnose

    return f"<h3>Diagnosis</h3>{diagnose(trial, peaks=False, short_trials=False)._repr_html_()}"
