"""Rows of results as text for other programs and people: CSV, JSON and Markdown, and files that are whole or not there.

Base units, and in CSV the unit in the name of each column (`_bytes`, `_seconds`, `_per_second`, `_fraction`; a ratio is
measured / predicted and has none). Columns stand in one order: those of a row, then `version.<package>` and
`config.<path>` for every field that is off its default in some row. Numbers are written so that they read back as the
same numbers, and nothing is an empty cell. Text that a spreadsheet would take for a formula begins with an apostrophe;
a line break in a cell is a line feed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kit.config import Config
from kit.report import results_table
from kit.report.row import COLUMNS, MAPPINGS, Row, flat

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


def as_markdown(rows: Sequence[Row]) -> str:
    """The table that people see, as Markdown, with every row."""
    return results_table.as_markdown(rows)


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
