"""Results: every trial as one row, newest first, with what was predicted beside what was measured and their ratio.

What a row holds is `kit.records.row`'s, where it is kept `kit.records.row`'s, how it is written for others
`kit.records.results`'s. Only run directories are read, and in them only YAML and JSON: no pickle is ever opened. A run
that cannot be read is a row that says so, never an error, and hides no other.

The table of results that people see: fewer columns than the rows hold, formatted, and none that is empty.

What is predicted stands as three columns under one heading: predicted, measured, ratio; in HTML in a table of its own
below, so that each fits a narrow page. Rows that went wrong say why below. Of very many rows the first are shown, and
how many are not; Markdown, which goes into a file, has them all.

Rows of results as text for other programs and people: CSV, JSON and Markdown, and files that are whole or not there.

Base units, and in CSV the unit in the name of each column (`_bytes`, `_seconds`, `_per_second`, `_fraction`; a ratio is
measured / predicted and has none). Columns stand in one order: those of a row, then `version.<package>` and
`config.<path>` for every field that is off its default in some row. Numbers are written so that they read back as the
same numbers, and nothing is an empty cell. Text that a spreadsheet would take for a formula begins with an apostrophe;
a line break in a cell is a line feed.
"""

from __future__ import annotations

import csv
import difflib
import html
import io
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, overload

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.records.row import COLUMNS, MAPPINGS, Row, flat, row_of
from kit.tables import FRAME, html_groups, text_table
from kit.trial.directory import find_runs, runs_folder
from kit.units import format_bytes, format_count


def results(folder: str | Path = "runs") -> Results:
    """One row per run directory in `folder`, newest first; a relative folder starts at the project folder."""
    rows = [row_of(paths) for paths in find_runs(folder)]
    return Results(reversed(rows), where=str(runs_folder(folder)))


class Results(Sequence[Row]):
    """Rows of trials: index or iterate them as dicts, choose among them, show them as a table, write them to a file."""

    def __init__(self, rows: Iterable[Row], where: str = "") -> None:
        self._rows = tuple(rows)
        self._where = where

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Row | Results:
        return Results(self._rows[index], self._where) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    # -- choosing

    def where(self, condition: Callable[[Row], object] | None = None, /, **equal: Any) -> Results:
        """The rows that fulfil a condition: `where(state="COMPLETE", **{"loader.batch_size": 32})`.

        Args:
            condition: What a row must answer with something true.
            equal: Values of columns, or of fields of the config by their dotted path.

        Raises:
            ConfigError: for a name that is neither.
        """
        looks = [(_look(name), value) for name, value in equal.items()]
        kept = (row for row in self if all(look(row) == value for look, value in looks))
        return Results((row for row in kept if condition is None or condition(row)), self._where)

    def best(self, column: str = "samples_per_second", *, lowest: bool = False) -> Row:
        """The row with the highest (or lowest) value; the newest of equals.

        Raises:
            ConfigError: for an unknown name, or when no row has a number there.
        """
        look = _look(column)
        found = [row for row in self if isinstance(look(row), int | float)]
        if not found:
            raise ConfigError([Problem(column, f"none of {len(self)} rows has a number there")])
        return (min if lowest else max)(found, key=look)

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
        return as_text(self) if self else self._empty

    def _repr_html_(self) -> str:
        return as_html(self) if self else f'<div style="{FRAME}">{html.escape(self._empty)}</div>'

    @property
    def _empty(self) -> str:
        return f"No trials yet in {self._where or 'this selection'}; kit.fit(config) makes one."


def _look(name: str) -> Callable[[Row], Any]:
    """What a row has under the name of a column, or of a field of its config."""
    if name in COLUMNS:
        return lambda row: row[name]
    paths = [info.path for info in Config.fields()]
    if name in paths:
        return lambda row: (row["config"] or {}).get(name)
    close = difflib.get_close_matches(name, [*COLUMNS, *paths], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError([Problem(name, f"neither a column of results nor a field of a config{hint}")])


Values = Mapping[str, Any]
MOST_ROWS = 100
_MISSING = "–"
_COMPARED = ("predicted", "measured", "ratio")
_RULE = "1px solid var(--jp-border-color2, #ccc)"


class TableColumn(NamedTuple):
    """One column: the heading above it (empty for none), its own title, and its cell of a row."""

    group: str
    title: str
    text: Callable[[Values], str]


def as_text(rows: Sequence[Values]) -> str:
    """The rows as aligned text."""
    shown = rows[:MOST_ROWS]
    columns, cells = _table(shown)
    return "\n".join([text_table(_flat(columns), cells), *_troubles(shown), *_left_out(rows)])


def as_markdown(rows: Sequence[Values]) -> str:
    """The rows as a Markdown table."""
    columns, cells = _table(rows)
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    lines = [_flat(columns), rule, *([_markdown_cell(cell) for cell in row] for row in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_html(rows: Sequence[Values], caption: str = "") -> str:
    """The rows as two HTML tables, each with two lines of headings: the trials, and what was predicted of them."""
    shown = rows[:MOST_ROWS]
    columns, cells = _table(shown)
    caption = caption or ("1 trial" if len(rows) == 1 else f"{len(rows)} trials, newest first")
    compared = [place for place, column in enumerate(columns) if column.title in _COMPARED]
    facts = [place for place in range(len(columns)) if place not in compared]
    tables = _table_html(caption, columns, cells, facts)
    if compared:
        tables += _table_html("predicted and measured", columns, cells, [0, *compared], "0.92em")
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*_troubles(shown), *_left_out(rows)))
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
    """A table of the columns at these places."""
    chosen = [columns[place] for place in places]
    first = html_groups([column.group for column in chosen])
    second = "".join(_heading_html(place, column.title) for place, column in enumerate(chosen))
    rows = ([row[place] for place in places] for row in cells)
    body = "".join(f"<tr>{''.join(_cell_html(*cell) for cell in enumerate(row))}</tr>" for row in rows)
    return (
        f'<table style="border-collapse: collapse; margin: 4px 0; font-size: {size}">'
        f'<caption style="text-align: left; font-weight: bold; padding: 2px 0">{caption}</caption>'
        f"<thead>{first}<tr>{second}</tr></thead><tbody>{body}</tbody></table>"
    )


def _table(rows: Sequence[Values]) -> tuple[list[TableColumn], list[list[str]]]:
    columns = {column: [column.text(row) for row in rows] for column in _COLUMNS}
    kept = {
        column: cells
        for column, cells in columns.items()
        if column.title == "trial" or any(cell != _MISSING for cell in cells)
    }
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def _flat(columns: Sequence[TableColumn]) -> list[str]:
    """One line of headings: a group is named at its first column."""
    before, names = "", []
    for column in columns:
        names.append(f"{column.group} {column.title}" if column.group not in ("", before) else column.title)
        before = column.group
    return names


def _troubles(rows: Sequence[Values]) -> list[str]:
    wrong = (row for row in rows if row["message"] and row["state"] not in ("COMPLETE", "STOPPED"))
    return [f"{row['run']}: {row['message']}" for row in wrong]


def _left_out(rows: Sequence[Values]) -> list[str]:
    more = len(rows) - MOST_ROWS
    return [f"{more:,} more: choose with where(...) or a slice, or write all with to_csv(path)"] if more > 0 else []


# -- HTML


def _heading_html(place: int, title: str) -> str:
    return f'<th scope="col" style="{_style(place)}; border-bottom: {_RULE}">{escape(title)}</th>'


def _cell_html(place: int, cell: str) -> str:
    return f'<td style="{_style(place)}">{escape(cell)}</td>'


def _style(place: int) -> str:
    """Names of trials may wrap at their hyphens where the page is narrow; numbers may not."""
    return f"text-align: {'right; white-space: nowrap' if place else 'left'}; padding: 2px 3px"


def _markdown_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# -- columns


def _text(name: str) -> Callable[[Values], str]:
    return lambda row: _MISSING if row[name] is None else str(row[name])


def _number(name: str, form: str) -> Callable[[Values], str]:
    return lambda row: _MISSING if row[name] is None else format(row[name], form)


def _rate(name: str) -> Callable[[Values], str]:
    return lambda row: _MISSING if row[name] is None else format_count(row[name])


def _bytes(name: str) -> Callable[[Values], str]:
    return lambda row: _MISSING if row[name] is None else format_bytes(row[name])


def _trial(row: Values) -> str:
    """The name of the run directory, less the fingerprint, which time makes superfluous."""
    return str(row["run"]).removesuffix(f"-{str(row['fingerprint'])[:6]}")


def _state(row: Values) -> str:
    return f"{row['state'].lower()} ({row['cause']})" if row["cause"] else row["state"].lower()


def _devices(row: Values) -> str:
    if row["world_size"] is None:
        return _MISSING
    strategy = "" if row["strategy"] == "none" else f"{row['strategy']}, "
    return f"{strategy}{row['world_size']} × {(row['accelerator'] or 'device').upper()}"


def _foreseen(quantity: str, cell: Callable[[Values], str]) -> Callable[[Values], str]:
    """A prediction; none of reserved bytes on the CPU, whose allocator reserves nothing that could be measured."""
    if quantity != "device_reserved_bytes":
        return cell
    measured = f"{quantity}_measured"
    return lambda row: _MISSING if row["accelerator"] == "cpu" and row[measured] is None else cell(row)


def _triple(
    quantity: str, cell: Callable[[str], Callable[[Values], str]], heading: str | None = None
) -> tuple[TableColumn, ...]:
    heading = heading or quantity.replace("_per_", "/")
    return (
        TableColumn(heading, "predicted", _foreseen(quantity, cell(f"{quantity}_predicted"))),
        TableColumn(heading, "measured", cell(f"{quantity}_measured")),
        TableColumn(heading, "ratio", _number(f"{quantity}_ratio", ".2f")),
    )


_COLUMNS = (
    TableColumn("", "trial", _trial),
    TableColumn("", "state", _state),
    TableColumn("", "devices", _devices),
    TableColumn("", "precision", _text("precision")),
    TableColumn("", "batch", _text("batch_size")),
    TableColumn("", "samples/s", _rate("samples_per_second")),
    TableColumn("", "data wait", _number("data_wait_fraction", ".0%")),
    TableColumn("peak", "host RSS", _bytes("host_rss_peak_bytes")),
    TableColumn("peak", "device", _bytes("device_allocated_peak_bytes")),
    *_triple("device_allocated_bytes", _bytes, "device allocated"),
    *_triple("device_reserved_bytes", _bytes, "device reserved"),
    *_triple("requests_per_sample", _rate),
    *_triple("bytes_per_sample", _bytes),
)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff0b", "\uff0d", "\uff1d", "\uff20")
_TOLD = ("name", "trial.folder")
"""Fields of a config that have a column of their own."""


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV: a heading, then one line a trial."""
    columns = _columns(rows)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(title for title, _, _ in columns)
    writer.writerows([_csv_cell(_value(row, name, key)) for _, name, key in columns] for row in rows)
    return stream.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON list of objects."""
    return json.dumps(list(rows), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _columns(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(title, name of the row's value, key in it) of each column."""
    plain = [(name, name, "") for name in COLUMNS if name not in MAPPINGS]
    packages = sorted({package for row in rows for package in row["versions"] or ()})
    versions = [(f"version.{package}", "versions", package) for package in packages]
    return [*plain, *versions, *((f"config.{path}", "config", path) for path in _changed(rows))]


def _changed(rows: Iterable[Row]) -> list[str]:
    """Fields that are off their default in some row, in the order of the config."""
    defaults = flat(Config().values())
    changed = {path for row in rows for path, value in (row["config"] or {}).items() if value != defaults.get(path)}
    known = [path for path in defaults if path in changed and path not in _TOLD]
    return [*known, *sorted(changed - defaults.keys())]


def _value(row: Row, name: str, key: str) -> Any:
    return (row[name] or {}).get(key) if key else row[name]


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote a carriage return of its own
    return f"'{text}" if value.startswith(_FORMULA) else text


def written(text: str, path: str | Path | None) -> str:
    """The text itself, also written to `path` when given: in one step, so that no reader finds half of it."""
    if path is not None:
        write(text, Path(path))
    return text


def write(text: str, file: Path) -> Path:
    """Replace a file in one step."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8", newline="")
        return draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
