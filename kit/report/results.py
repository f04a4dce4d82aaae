"""Results: every trial as one row, newest first, with what was predicted beside what was measured and their ratio.

What a row holds is `kit.report.row`'s, where it is kept `kit.report.row_file`'s, how it is written for others
`kit.report.export`'s. Only run directories are read, and in them only YAML and JSON: no pickle is ever opened. A run
that cannot be read is a row that says so, never an error, and hides no other.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from kit.config import Config
from kit.errors import ConfigError, Problem
from kit.report import export, results_table
from kit.report.row import COLUMNS, Row
from kit.report.row_file import row_of
from kit.run.paths import find_runs, runs_folder
from kit.tables import FRAME


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
        return export.written(export.as_csv(self), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as a JSON list of objects; written to `path` when given."""
        return export.written(export.as_json(self), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The table shown, with every row, as Markdown; written to `path` when given."""
        return export.written(export.as_markdown(self), path)

    # -- displays

    def __repr__(self) -> str:
        return results_table.as_text(self) if self else self._empty

    def _repr_html_(self) -> str:
        return results_table.as_html(self) if self else f'<div style="{FRAME}">{html.escape(self._empty)}</div>'

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
