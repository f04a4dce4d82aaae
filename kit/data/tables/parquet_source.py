"""Parquet: a file, a folder or a pattern, read as one table by an embedded DuckDB.

Files are taken in order of their paths, and columns by name; all files must have the columns of the first one. A folder
is searched with its subfolders, and `name=value` in a path is no column. The state is the size and time of every file.
"""

from __future__ import annotations

import glob
from pathlib import Path

from kit.config import resolve_path
from kit.data.tables.duckdb_source import MEMORY, DuckDBSession, EmbeddedDatabase, first_line
from kit.data.tables.sql import quoted
from kit.errors import ConfigError, Problem, QueryError

_VIEW = "parquet files"


class ParquetDatabase(EmbeddedDatabase):
    """The files of a declaration."""

    relation = quoted(_VIEW)

    def connect(self) -> DuckDBSession:
        """An embedded database with the files as its only table."""
        names = [str(file) for file in self._files()]
        files = [glob.escape(name) for name in names]  # DuckDB takes every name for a pattern
        session = self._session(MEMORY)
        try:
            session.seal([*names, *files])
            session.view(_VIEW, files)
        except self.failures() as error:
            session.close()
            raise QueryError(f"{self._given} cannot be read: {first_line(error)}") from None
        return session

    def identity(self) -> str:
        """Kind and place."""
        return f"parquet {resolve_path(self._given)}"

    def state(self) -> str:
        """Of all files."""
        return self._state_of(self._files())

    def _check(self) -> None:
        if not self._files():
            raise ConfigError([Problem(self._field("path"), f"there is no Parquet file at {self._given}")])

    def _files(self) -> list[Path]:
        place = resolve_path(self._given)
        if place.is_file():
            return [place]
        if place.is_dir():
            return sorted(place.rglob("*.parquet"))
        fixed = place
        while any(mark in str(fixed) for mark in "*?["):
            fixed = fixed.parent
        pattern = str(place.relative_to(fixed))
        return sorted(file for file in fixed.glob(pattern) if file.is_file()) if fixed != place else []
