"""Results: every trial as one row, newest first, with predicted, measured and their ratio.

A row is made and kept by `kit.records.row`. Only run directories are read, and in them only YAML and JSON: no pickle is
ever opened. A run that cannot be read is a row that says so, never an error, and hides no other.

The table that people see has fewer columns than the rows hold, formatted, and none that is empty. Predictions stand as
three columns under one heading, predicted, measured, ratio; in HTML in a table of their own below, so that each fits a
narrow page. Below stand messages of trials that went wrong, why a ratio is far from 1 (`kit.records.ratios`), and what
else was run: passes of a profiler, calibrations and repeats are not trials, and are shown when they are asked for. Of
very many rows the first are shown, with the number of the others; Markdown, which goes into a file, has them all.

Files are for other programs. They have base units, in CSV with the unit in each column's name (`_bytes`, `_seconds`,
`_per_second`, `_fraction`; a ratio is measured / predicted and has none). Columns stand in one order: those of a row,
then `version.<package>`, `metric.<name>`, and `config.<path>` for every field that is off its default in some row.
Numbers read back as the same numbers, and an empty cell means nothing. Text that a spreadsheet would take for a formula
begins with an apostrophe; a line break in a cell is a line feed. A file is whole or not there.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from kit.arguments import checks_arguments
from kit.config import Config
from kit.errors import ConfigError, Problem, did_you_mean
from kit.json_text import written
from kit.memory.alongside import is_predicting
from kit.records.ratios import COUNTED, SPEED, SpeedRange, doubt, doubt_note, speed_key, speed_range, with_speeds
from kit.records.row import COLUMNS, MAPPINGS, UNREADABLE, Row, flat, row_of, speed_of_operators
from kit.tables import FRAME, MISSING, RULE, ResultRows, WaitingLine, csv_text, html_groups, text_table
from kit.trial.directory import CALIBRATIONS, RunPaths, find_runs, runs_folder
from kit.trial.submit import notebook_here
from kit.trial.trial import ENDED, Trial
from kit.units import format_bytes, format_count, format_seconds

KINDS = {
    "trial": ("trial", "trials"),
    "repeat": ("repeat for a comparison", "repeats for comparisons"),
    "profile": ("pass of a profiler", "passes of a profiler"),
    "calibration": ("calibration of a loader", "calibrations of a loader"),
}
"""Kinds of runs, in words, of one and of several."""
_TICK_SECONDS = 0.1
_MOST_NAMES = 8
_MOST_BEFORE = 100
"""Runs that are looked at for the speed of another: a chart does not wait for thousands."""


@checks_arguments
def results(
    folder: str | Path | Trial | Sequence[Trial] = "runs",
    *,
    name: str | None = None,
    notebook: str | None = None,
    kind: str = "trial",
    patience_seconds: float = 60.0,
) -> Results:
    """Read the trials of a folder: one row each, the newest first.

    Waits for a memory prediction that is still being made for a trial that has ended.

    Args:
        folder: The folder of run directories; a relative one starts at the project folder. Or one run directory, or a
            trial or several, of any kind.
        name: Only runs of the experiment of this name.
        notebook: Only runs that were started from the notebook or script of this file name; "this" is the one that
            asks.
        kind: trial, or what else was run: repeat (a run of a study that compares), profile (a pass of a profiler),
            calibration, or all of them.
        patience_seconds: Longest wait for predictions.

    Returns:
        The rows, with prediction, measurement and their ratio. A run that cannot be read is a row that says so.

    Raises:
        ConfigError: when the folder cannot be read, and for an unknown kind.

    Example:
        >>> kit.results().where(state="COMPLETE").best("samples_per_second")["state"]
        'COMPLETE'
        >>> {row["kind"] for row in kit.results(notebook="this")}
        {'trial'}
        >>> kit.results(trial)[0]["state"]
        'COMPLETE'
    """
    if kind not in (*KINDS, "all"):
        hint = did_you_mean(kind, [*KINDS, "all"])
        raise ConfigError([Problem("kind", f"{kind!r} is no kind of run{hint}")])
    several = folder if isinstance(folder, Sequence) and not isinstance(folder, str) else [folder]
    trials = [one for one in several if isinstance(one, Trial)]
    if trials and len(trials) == len(several):
        asked = Asked(trials[0].run_directory.parent, name, notebook, "all", tuple(trial.paths for trial in trials))
    else:
        asked = Asked(cast("str | Path", folder), name, notebook, kind)
    found = asked.read()
    deadline = time.monotonic() + patience_seconds
    with WaitingLine(f"it may take {format_seconds(patience_seconds)}") as line:
        while (waiting := found.predicted_soon) and time.monotonic() < deadline:
            line.show(f"memory prediction of {', '.join(waiting)}")
            time.sleep(_TICK_SECONDS)
            if not all(map(is_predicting, waiting.values())):
                found = asked.read()
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Which runs are asked for, as `results` takes it."""

    folder: str | Path = "runs"
    name: str | None = None
    notebook: str | None = None
    kind: str = "trial"
    runs: tuple[RunPaths, ...] = ()
    """Where they are asked for themselves."""

    def read(self) -> Results:
        """What there is of them now."""
        rows = with_speeds([row_of(paths) for paths in self._runs()])
        mine = [row for row in rows if self._is_mine(row)]
        shown = [row for row in mine if self.kind in ("all", row["kind"] or "trial")]
        others = Counter(row["kind"] for row in mine if row not in shown)
        where, note = str(runs_folder(self.folder)), self._note(others)
        if rows and not mine:
            where += "".join(f" of {what} {one!r}" for what, one in self._of.items() if one is not None)
            names = dict.fromkeys(str(row["name"]) for row in reversed(rows))
            note = f"not shown: runs of {', '.join([*names][:_MOST_NAMES])}; {Asked(self.folder).code} shows them"
        return Results(map(_with_state, reversed(shown)), where, note)

    @property
    def _of(self) -> dict[str, str | None]:
        return {"name": self.name, "notebook": self.notebook}

    def _runs(self) -> list[RunPaths]:
        folders = () if self.runs else (self.folder, runs_folder(self.folder) / CALIBRATIONS)
        found = [*self.runs, *(paths for folder in folders for paths in find_runs(folder))]
        return sorted(found, key=lambda paths: (paths.marker.stat().st_mtime_ns, paths.directory))

    def _is_mine(self, row: Row) -> bool:
        notebook = notebook_here() if self.notebook == "this" else self.notebook
        return self.name in (None, row["name"]) and notebook in (None, row["notebook"])

    def _note(self, others: Counter[str]) -> str:
        """What else there is, and how to see it; empty for nothing."""
        if not others:
            return ""
        counts = [f"{others[kind]:,} {words[others[kind] > 1]}" for kind, words in KINDS.items() if others[kind]]
        return f"not shown: {', '.join(counts)}; {replace(self, kind='all').code} shows them"

    @property
    def code(self) -> str:
        """The call of `results`."""
        named = {**self._of, "kind": None if self.kind == "trial" else self.kind}
        given = [] if str(self.folder) == Config().trial.folder else [repr(str(self.folder))]
        given += [f"{name}={value!r}" for name, value in named.items() if value is not None]
        return f"kit.results({', '.join(given)})"


def speed_before(trial: Trial) -> SpeedRange | None:
    """What the trials just before this one in the same folder say about its speed, else its operators; else None."""
    key = speed_key(trial.asked, trial.environment)
    found = [paths.directory for paths in find_runs(trial.run_directory.parent)]
    place = found.index(trial.run_directory) if trial.run_directory in found else 0
    earlier = (row_of(RunPaths(path)) for path in found[max(0, place - _MOST_BEFORE) : place])
    return speed_range(row for row in earlier if row["speed_key"] == key) or speed_of_operators(trial.paths)


def _with_state(row: Row) -> Row:
    """The row with the word that its prediction is still being made, where it is."""
    unknown = row["device_allocated_bytes_predicted"] is None and row["state"] != UNREADABLE
    under_way = unknown and is_predicting(RunPaths(Path(row["run_directory"])))
    return {**row, "prediction": UNDER_WAY} if under_way else row


class TrialRow(Row):
    """A row: a dict of all its values, shown as the table shows it."""

    def __repr__(self) -> str:
        return as_text([self], self._more)

    def _repr_html_(self) -> str:
        return as_html([self], more=self._more)

    @property
    def _more(self) -> str:
        return f"{len(self)} values by name, as row['samples_per_second']; dict(row) shows them"


class Results(ResultRows[Row]):
    """Rows of trials: index or iterate them as dicts, choose among them, show them as a table, write them to a file."""

    def __init__(self, rows: Iterable[Row], where: str = "", note: str = "") -> None:
        """`where` is the folder they are from, `note` says what else is there."""
        super().__init__(map(TrialRow, rows))
        self._where, self.note = where, note

    @property
    def predicted_soon(self) -> dict[str, RunPaths]:
        """By name, the trials that have ended and whose memory is still being predicted."""
        ended = (row for row in self if row["prediction"] == UNDER_WAY and row["state"] in ENDED)
        return {row["run"]: RunPaths(Path(row["run_directory"])) for row in ended}

    # -- choosing

    def where(self, condition: Callable[[Row], object] | None = None, /, **equal: Any) -> Results:
        """The rows that fulfil a condition: `where(state="COMPLETE", **{"loader.batch_size": 32})`.

        Args:
            condition: What a row must answer with something true.
            equal: Values of columns, or of fields of the config by their dotted path.

        Raises:
            ConfigError: for a name that is neither.
        """
        equals = [(_value_of(name), value) for name, value in equal.items()]
        kept = (row for row in self if all(value_of(row) == value for value_of, value in equals))
        return Results((row for row in kept if condition is None or condition(row)), "" if len(self) else self._where)

    def best(self, column: str = "samples_per_second", *, lowest: bool = False) -> Row:
        """The row with the highest (or lowest) value; the newest of equals.

        Raises:
            ConfigError: for an unknown name, or when no row has a number there.
        """
        value_of = _value_of(column)
        found = [row for row in self if isinstance(value_of(row), int | float)]
        if not found:
            raise ConfigError([Problem(column, f"none of {len(self)} rows has a number there")])
        return (min if lowest else max)(found, key=value_of)

    # -- files

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV, units in the names of columns; written to `path` when given."""
        return written(as_csv(self), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as a JSON list of objects; written to `path` when given."""
        return written(as_json(self), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The table shown, with every row, as Markdown; written to `path` when given."""
        return written(as_markdown(self), path)

    # -- displays

    def __repr__(self) -> str:
        return as_text(self, self.note) if self else self._empty

    def _repr_html_(self) -> str:
        return as_html(self, more=self.note) if self else f'<div style="{FRAME}">{escape(self._empty)}</div>'

    @property
    def _empty(self) -> str:
        more = f"\n{self.note}" if self.note else ""
        return f"No trials in {self._where or 'this selection'}; kit.fit(config) makes one.{more}"


def _value_of(name: str) -> Callable[[Row], Any]:
    """Gives a row's value in a column, or of a field of its config."""
    if name in COLUMNS:
        return lambda row: row[name]
    paths = [info.path for info in Config.fields()]
    if name in paths:
        return lambda row: (row["config"] or {}).get(name)
    hint = did_you_mean(name, [*COLUMNS, *paths], otherwise="")
    raise ConfigError([Problem(name, f"neither a column of results nor a field of a config{hint}")])


Values = Mapping[str, Any]
MOST_ROWS, _MOST_NOTES = 100, 5
UNDER_WAY = "under way"
_COMPARED = ("predicted", "measured", "ratio")


class TableColumn(NamedTuple):
    """One column: the heading above it (empty for none), its own title, and its cell of a row."""

    group: str
    title: str
    text: Callable[[Values], str]
    wraps: bool = False
    """Whether its cells are words, over several lines and from the left."""


def as_text(rows: Sequence[Values], more: str = "") -> str:
    """The rows as aligned text; `more` stands below."""
    shown = rows[:MOST_ROWS]
    columns, cells = _table(shown)
    return "\n".join([text_table(_flat(columns), cells), *_notes(shown, len(rows), more)])


def as_markdown(rows: Sequence[Values]) -> str:
    """The rows as a Markdown table."""
    columns, cells = _table(rows)
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    escaped = str.maketrans({"\\": "\\\\", "|": "\\|", "<": "&lt;", "\n": " "})
    lines = [_flat(columns), rule, *([cell.translate(escaped) for cell in row] for row in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_html(rows: Sequence[Values], caption: str = "", more: str = "") -> str:
    """The rows as two HTML tables, each with two lines of headings: the trials, and what was predicted of them."""
    shown = rows[:MOST_ROWS]
    columns, cells = _table(shown)
    caption = caption or ("1 trial" if len(rows) == 1 else f"{len(rows)} trials, newest first")
    compared = [place for place, column in enumerate(columns) if column.title in _COMPARED]
    facts = [place for place in range(len(columns)) if place not in compared]
    tables = _table_html(caption, columns, cells, facts)
    if compared:
        tables += _table_html("predicted and measured", columns, cells, [0, *compared], "0.92em")
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(shown, len(rows), more))
    return (
        f'<div style="{FRAME}; overflow-x: auto; font-size: 0.88em">{tables}'
        + (f'<ul style="margin: 4px 0; padding-left: 1.5em">{notes}</ul>' if notes else "")
        + "</div>"
    )


def _table_html(
    caption: str,
    columns: Sequence[TableColumn],
    cells: Sequence[Sequence[str]],
    places: Sequence[int],
    size: str = "inherit",
) -> str:
    """A table of the columns at these places; a trial's name may wrap at its hyphens, numbers may not."""

    def line(tag: str, texts: Iterable[str], more: str = "") -> str:
        cells = []
        for place, text in zip(places, texts, strict=True):
            align = "left" if columns[place].wraps else "right; white-space: nowrap"
            style = f"text-align: {align}; padding: 2px 3px{more}"
            cells.append(f'<{tag} style="{style}">{escape(text)}</{tag[:2]}>')
        return f"<tr>{''.join(cells)}</tr>"

    groups = html_groups([columns[place].group for place in places])
    titles = line('th scope="col"', (columns[place].title for place in places), f"; border-bottom: {RULE}")
    body = "".join(line("td", (row[place] for place in places)) for row in cells)
    return (
        f'<table style="border-collapse: collapse; margin: 4px 0; font-size: {size}">'
        f'<caption style="text-align: left; font-weight: bold; padding: 2px 0">{caption}</caption>'
        f"<thead>{groups}{titles}</thead><tbody>{body}</tbody></table>"
    )


def differences(rows: Sequence[Values]) -> list[str]:
    """In words, data and settings of each row that differ among the rows of its experiment and have no column here.

    Passes of a profiler are compared among themselves, and so are the other kinds: what they leave out of themselves is
    not what somebody changed.
    """
    by_kind: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault((row["name"], row["kind"]), []).append(_told_apart(row))
    varying = {
        kind: [path for path in _paths(configs) if len({repr(one.get(path)) for one in configs if one}) > 1]
        for kind, configs in by_kind.items()
    }
    return [_settings_words(_told_apart(row), varying[row["name"], row["kind"]]) for row in rows]


def _told_apart(row: Values) -> Mapping[str, Any]:
    """The config, and before it what was trained on which data."""
    parts = {what: class_name(row[what]) for what in ("module", "data") if row[what]}
    settings = {path: value for path, value in (row["config"] or {}).items() if path != "model.target" or not parts}
    return {**parts, **settings}


def class_name(place: str) -> str:
    """`Forecast` of `parts.py:Forecast`; where a comma and which data of the class it was follow, these alone."""
    name, _, which = place.partition(", ")
    return which or name.rpartition(":")[2]


def _paths(configs: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return (path for path in dict.fromkeys(path for config in configs for path in config) if path not in _SHOWN)


def _settings_words(config: Mapping[str, Any], paths: Sequence[str]) -> str:
    """`max steps 40, gradient checkpointing on, data order block`."""
    words = []
    for path in paths:
        section, _, name = path.rpartition(".")
        label = (name if section in _CLEAR_SECTIONS else f"{section} {name}").replace("_", " ").strip()
        words.append(f"{label} {_ON_OFF.get(str(config.get(path)), config.get(path))}")
    more = [f"{len(words) - _MOST_SETTINGS} more"] if len(words) > _MOST_SETTINGS else []
    return ", ".join([*words[:_MOST_SETTINGS], *more]) or MISSING


def _table(rows: Sequence[Values]) -> tuple[list[TableColumn], list[list[str]]]:
    columns = {column: [column.text(row) for row in rows] for column in _COLUMNS}
    columns[_DIFFERS] = differences(rows)
    kept = {
        column: cells
        for column, cells in columns.items()
        if column.title == "trial" or any(cell != MISSING for cell in cells)
    }
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def _flat(columns: Sequence[TableColumn]) -> list[str]:
    """One line of headings: a group is named at its first column."""
    before, names = "", []
    for column in columns:
        names.append(f"{column.group} {column.title}" if column.group not in ("", before) else column.title)
        before = column.group
    return names


def _notes(shown: Sequence[Values], count: int, more_words: str) -> list[str]:
    """Messages of trials that went wrong, what ratios mean, and what of all the rows is not shown."""
    wrong = (row for row in shown if row["message"] and row["state"] not in ("COMPLETE", "STOPPED"))
    notes = [f"{row['run']}: {row['message']}" for row in wrong]
    far = [f"{_run(row)}: {row['ratio_notes']}" for row in shown if row["ratio_notes"]]
    notes += far[:_MOST_NOTES]
    doubts = {doubt(row, quantity) for row in shown for quantity in (SPEED, *COUNTED) if row[f"{quantity}_predicted"]}
    notes += [doubt_note(words) for words in sorted(filter(None, doubts))]
    if any(map(_is_lower_bound, shown)):
        notes.append("≥: the step could not be recorded in time, so what it keeps is not in the prediction")
    if (more := count - MOST_ROWS) > 0:
        notes.append(f"{more:,} more: choose with where(...) or a slice, or write all with to_csv(path)")
    return [*notes, more_words] if more_words else notes


def _cell(name: str, form: Callable[[Any], str] = str) -> Callable[[Values], str]:
    return lambda row: MISSING if row[name] is None else form(row[name])


def _run(row: Values) -> str:
    return str(row["run"]).removesuffix(f"-{str(row['fingerprint'])[:6]}")


def _kind(row: Values) -> str:
    """Nothing for a trial: most are."""
    words = f"profile ({row['profiler']})" if row["profiler"] else row["kind"]
    return MISSING if words in (None, "trial") else words


def _state(row: Values) -> str:
    return f"{row['state'].lower()} ({row['cause']})" if row["cause"] else row["state"].lower()


def _devices(row: Values) -> str:
    if row["world_size"] is None:
        return MISSING
    strategy = "" if row["strategy"] == "none" else f"{row['strategy']}, "
    return f"{strategy}{row['world_size']} × {(row['accelerator'] or 'device').upper()}"


def _allocated_predicted(row: Values) -> str:
    least = "≥ " if _is_lower_bound(row) else ""
    return row["prediction"] or least + _cell("device_allocated_bytes_predicted", format_bytes)(row)


def _is_lower_bound(row: Values) -> bool:
    """Whether activations were unknown when it was predicted: such a prediction is kept without a ratio."""
    predicted, measured, ratio = (row[f"device_allocated_bytes_{name}"] for name in _COMPARED)
    return bool(predicted and measured) and ratio is None


def _reserved_predicted(row: Values) -> str:
    """None on the CPU, whose allocator reserves nothing that could be measured."""
    on_cpu = row["accelerator"] == "cpu" and row["device_reserved_bytes_measured"] is None
    return MISSING if on_cpu else _cell("device_reserved_bytes_predicted", format_bytes)(row)


def _triple(
    quantity: str, form: Callable[[Any], str], heading: str = "", predicted: Callable[[Values], str] | None = None
) -> tuple[TableColumn, ...]:
    heading = heading or quantity.replace("_per_", "/")
    measured = _cell(f"{quantity}_measured", form) if quantity != SPEED else _speed_measured
    return (
        TableColumn(heading, "predicted", predicted or _cell(f"{quantity}_predicted", form)),
        TableColumn(heading, "measured", measured),
        TableColumn(heading, "ratio", lambda row: _ratio(row, quantity)),
    )


def _speed_measured(row: Values) -> str:
    """Beside a prediction: it stands in a column of its own too."""
    return MISSING if row[f"{SPEED}_predicted"] is None else _cell(SPEED, format_count)(row)


def _ratio(row: Values, quantity: str) -> str:
    """The ratio, or why there is none where both numbers are known."""
    words = doubt(row, quantity) if row[f"{quantity}_predicted"] is not None else ""
    return words or _cell(f"{quantity}_ratio", "{:.2f}".format)(row)


_MOST_SETTINGS = 4
_CLEAR_SECTIONS = ("hardware", "loader", "levers", "training", "trial")
"""Of them the name of a field is enough; others have fields such as `target` and `enabled`."""
_ON_OFF = {"True": "on", "False": "off", "None": "none"}
_SHOWN = {
    "name", "trial.folder", "hardware.accelerator", "hardware.devices", "hardware.strategy", "hardware.precision",
    "loader.batch_size",
}  # fmt: skip
"""Fields of a config that the table shows in columns of their own."""
_DIFFERS = TableColumn("", "what differs", lambda _: MISSING, wraps=True)
"""Its cells depend on the other rows."""
_COLUMNS = (
    TableColumn("", "trial", _run, wraps=True),
    TableColumn("", "state", _state),
    TableColumn("", "kind", _kind),
    TableColumn("", "devices", _devices),
    TableColumn("", "precision", _cell("precision")),
    TableColumn("", "batch", _cell("batch_size")),
    _DIFFERS,
    TableColumn("", "samples/s", _cell("samples_per_second", format_count)),
    TableColumn("", "data wait", _cell("data_wait_fraction", "{:.0%}".format)),
    TableColumn("peak", "host RSS", _cell("host_rss_peak_bytes", format_bytes)),
    TableColumn("peak", "workers", _cell("workers_peak_bytes", format_bytes)),
    TableColumn("peak", "device", _cell("device_allocated_peak_bytes", format_bytes)),
    *_triple(SPEED, format_count, "samples/s"),
    *_triple("device_allocated_bytes", format_bytes, "device allocated", _allocated_predicted),
    *_triple("device_reserved_bytes", format_bytes, "device reserved", _reserved_predicted),
    *_triple("requests_per_sample", format_count),
    *_triple("bytes_per_sample", format_bytes),
)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff0b", "\uff0d", "\uff1d", "\uff20")
_WITH_COLUMNS = ("name", "trial.folder")
"""Fields of a config that have a column of their own."""


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV: a heading, then one line a trial."""
    defaults = flat(Config().values())
    changed = {path for row in rows for path, value in (row["config"] or {}).items() if value != defaults.get(path)}
    known = [path for path in defaults if path in changed and path not in _WITH_COLUMNS]
    keys = [
        *(("versions", package) for package in sorted({name for row in rows for name in row["versions"] or ()})),
        *(("metrics", name) for name in sorted({name for row in rows for name in row["metrics"] or ()})),
        *(("config", path) for path in (*known, *sorted(changed - defaults.keys()))),
    ]
    plain = [name for name in COLUMNS if name not in MAPPINGS]
    heads = [*plain, *(f"{name.removesuffix('s')}.{key}" for name, key in keys)]
    cells = ((*(row[name] for name in plain), *((row[name] or {}).get(key) for name, key in keys)) for row in rows)
    return csv_text(heads, (map(_csv_cell, values) for values in cells))


def as_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON list of objects."""
    return json.dumps(list(rows), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote a carriage return of its own
    return f"'{text}" if value.startswith(_FORMULA) else text
