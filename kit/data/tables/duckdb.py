"""DuckDB: a table or query of a database file, read by an embedded database, read-only.

The file is open only while a read is: in between, its owner can write to it. A session is sealed before it reads: SQL
of a declaration, and views that the file brings with it, reach no other file, extension or network, and change no
setting. `memory_bytes` and `threads` bound the
embedded database. Its highest memory is what its own profiler says of each query: the buffers of the file, of sorting
and of grouping, without the batches it hands over. The state is the size and time of the file and of its write-ahead
log.

Parquet: a file, a folder or a pattern, read as one table by an embedded DuckDB.

Files are taken in order of their paths, and columns by name; all files must have the columns of the first one. A folder
is searched with its subfolders, and `name=value` in a path is no column. The state is the size and time of every file.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kit.config import resolve_path
from kit.data.tables import sql
from kit.data.tables.source import needed
from kit.data.tables.sql import DUCKDB, quoted
from kit.data.tables.table import Session
from kit.errors import ConfigError, Problem, QueryError, UnreachableDatabaseError
from kit.machine.processes import scratch_folder

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.declare import DuckDBConnection, ParquetConnection

MEMORY = ":memory:"
"""The place of a database without a file."""
_SEALED = (
    "allowed_configs=['TimeZone', 'enable_profiling', 'memory_limit', 'threads']", "autoload_known_extensions=false",
    "autoinstall_known_extensions=false", "allow_community_extensions=false", "python_enable_replacements=false",
    "enable_external_access=false", "lock_configuration=true",
)  # fmt: skip
"""What a session may do no more; the lock last, since a function such as enable_logging() could open a file."""
_sealing = threading.Lock()
"""Sessions of one file share their settings, which are locked once."""


class EmbeddedDatabase:
    """What files are read by: DuckDB within this process."""

    shares_process = True

    def __init__(self, connection: DuckDBConnection | ParquetConnection, path: str = "") -> None:
        self.dialect = sql.duckdb_dialect(DUCKDB)
        self._given, self._path = connection.path, path
        self._memory_bytes, self._threads = connection.memory_bytes, connection.threads
        needed("duckdb", self._field("kind"))
        self._check()

    def failures(self) -> tuple[type[Exception], ...]:
        """What DuckDB raises, and pyarrow for it while it streams."""
        return needed("duckdb").Error, needed("pyarrow").ArrowException, OSError

    def advice(self, error: Exception) -> str:
        """Memory that ran out has a way out."""
        text = str(error).lower()
        if "disabled by configuration" in text or "configuration has been locked" in text:
            return "SQL of a declaration reads its own database only; declare other files as sources of their own"
        short = "out of memory" in text
        return "give connection.memory_bytes more, or read in more query chunks" if short else ""

    def _session(self, place: str, *, read_only: bool = False) -> DuckDBSession:
        duckdb = needed("duckdb")
        _refuse_forked(place)
        try:
            opened = duckdb.connect(place, read_only=read_only, config={"temp_directory": _spill_folder(place)})
        except duckdb.Error as error:
            raise UnreachableDatabaseError(
                f"{self._given} cannot be opened: {first_line(error)}; close what is writing to it"
            ) from None
        session, settings = DuckDBSession(opened, place), {"TimeZone": "UTC", "enable_profiling": "no_output"}
        settings |= {"threads": str(self._threads)} if self._threads else {}
        settings |= {"memory_limit": f"{self._memory_bytes >> 10}KiB"} if self._memory_bytes else {}
        session.prepare(settings)
        return session

    def _field(self, name: str) -> str:
        return f"{self._path}.connection.{name}" if self._path else f"connection.{name}"

    def _state_of(self, files: Iterable[Path]) -> str:
        return " ".join(f"{file.name} {_state(file)}" for file in files)

    def _check(self) -> None:
        """Refuse files that are not there."""


class DuckDBDatabase(EmbeddedDatabase):
    """The database file of a declaration."""

    def __init__(self, connection: DuckDBConnection, table: str, query: str, path: str = "") -> None:
        super().__init__(connection, path)
        self.relation = sql.source_of(table, query)

    def connect(self) -> DuckDBSession:
        """The file, read-only.

        Raises:
            UnreachableDatabaseError: when another process is writing to it, or it is none of DuckDB's.
            QueryError: when it was being read while this process was forked.
        """
        file = self._file()
        if not file.is_file():
            raise UnreachableDatabaseError(f"there is no file {file} any more")
        session = self._session(str(file), read_only=True)
        session.seal()
        return session

    def identity(self) -> str:
        """Kind and file."""
        return f"duckdb {self._file()}"

    def state(self) -> str:
        """Of the file and its write-ahead log."""
        log = self._file().with_name(self._file().name + ".wal")
        return self._state_of([self._file(), *([log] if log.exists() else [])])

    def _file(self) -> Path:
        return resolve_path(self._given)

    def _check(self) -> None:
        if not self._file().is_file():
            raise ConfigError([Problem(self._field("path"), f"there is no file {self._file()}")])


_open: Counter[tuple[int, str]] = Counter()
"""Connections by process and file. DuckDB keeps one instance of a file, which does not survive a fork."""


class DuckDBSession(Session):
    """One connection, and the file it holds open."""

    def __init__(self, opened: Any, place: str) -> None:
        super().__init__(opened)
        self._place = place
        _open[self.pid, place] += 1

    def prepare(self, settings: Mapping[str, str]) -> None:
        """Bound what the embedded database may take, and have its profiler count.

        Settings of the connection's start would have to be equal for all that have the same file open.
        """
        for name, value in settings.items():
            self._opened.execute(f"SET {name} = '{value}'")

    def seal(self, files: Sequence[str] = ()) -> None:
        """Close every way out of the database but to these files."""
        with _sealing:
            if self.rows(sql.Statement("SELECT current_setting('lock_configuration')")) == [(True,)]:
                return
            for setting in ([f"allowed_paths=[{', '.join(map(sql.literal, files))}]"] if files else []) + [*_SEALED]:
                self._opened.execute(f"SET {setting}")

    def view(self, name: str, files: Sequence[str]) -> None:
        """Give Parquet files a name."""
        self._opened.read_parquet(list(files), union_by_name=False, hive_partitioning=False).create_view(name)

    @override
    def check(self, relation: str, query: str, wheres: Sequence[str]) -> None:
        select = needed("duckdb").StatementType.SELECT
        for text in sql.alone(relation, query, wheres):
            kinds = [statement.type for statement in self._opened.extract_statements(text)]
            if kinds != [select]:
                raise QueryError(f"{sql.shown(query, wheres)} is not one SELECT or one condition; give one")

    @override
    def described(self, relation: str) -> list[tuple[str, str]]:
        rows = self.rows(sql.Statement(f"DESCRIBE SELECT * FROM {relation}"))
        return [(str(row[0]), str(row[1])) for row in rows]

    @override
    def batches(
        self, statement: sql.Statement, schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        relation = self._opened.sql(statement.text, params=statement.values)
        for batch in relation.to_arrow_reader(batch_rows):
            yield batch.cast(schema)
        self._peak_bytes = _peak(json.loads(self._opened.get_profiling_information("json")))

    @override
    def close(self) -> None:
        _open[self.pid, self._place] -= 1
        super().close()


def _peak(profile: Any) -> int:
    if isinstance(profile, dict):
        return max([int(profile.get("peak_buffer_memory", 0)), *map(_peak, profile.values())])
    return max(map(_peak, profile), default=0) if isinstance(profile, list) else 0


def _state(file: Path) -> str:
    try:
        found = file.stat()
    except OSError:
        return "missing"
    return f"{found.st_size}-{found.st_mtime_ns}"


def _refuse_forked(file: str) -> None:
    for (pid, place), count in _open.items():
        if count and pid != os.getpid() and place == file != MEMORY:
            raise QueryError(
                f"{file} was being read when this process was forked, and DuckDB cannot go on with it here; close that "
                "read first, or start processes by spawn"
            )


def _spill_folder(place: str) -> str:
    """Where what exceeds memory goes: not beside the file, which may lie where nothing can be written."""
    name = uuid.uuid4().hex if place == MEMORY else hashlib.sha256(place.encode()).hexdigest()[:16]
    return str(scratch_folder() / f"kit-duckdb-{os.getpid()}-{name}")


def first_line(error: Exception) -> str:
    """What an error says, without the statement it quotes."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
