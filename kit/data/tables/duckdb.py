"""DuckDB: tables of a database file, and Parquet files, read by an embedded database, read-only.

A session is sealed before it reads: SQL of a declaration, and views that the file brings with it, reach no other file,
extension or network, and change no setting. `memory_bytes` and `threads` bound the embedded database. Its highest
memory is what its own profiler says of each query: the buffers of the file, of sorting and of grouping, without the
batches it hands over. The state is the size and time of every file.

A database file is open only while a read is: in between, its owner can write to it. Its write-ahead log belongs to its
state. Parquet files (a file, a folder with its subfolders, or a pattern) are read as one table, in order of their
paths. All files must have the columns of the first one, taken by name; `name=value` in a path is no column.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import threading
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kit.config import near, resolve_path
from kit.data.tables import sql
from kit.data.tables.source import import_extra
from kit.data.tables.table import Database, Session
from kit.errors import ConfigError, Problem, QueryError, UnreachableDatabaseError, first_line
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
_open: Counter[tuple[int, str]] = Counter()
"""Connections by process and file. DuckDB keeps one instance of a file, which does not survive a fork."""
_VIEW = "parquet files"


class DuckDBSession(Session):
    """One connection, and the file it holds open."""

    def __init__(self, connection: Any, place: str) -> None:
        super().__init__(connection)
        self._place = place
        _open[self.pid, place] += 1

    def seal(self, files: Sequence[str] = ()) -> None:
        """Close every way out of the database but to these files."""
        with _sealing:
            if self.rows("SELECT current_setting('lock_configuration')") == [(True,)]:
                return
            for setting in ([f"allowed_paths=[{', '.join(map(sql.literal, files))}]"] if files else []) + [*_SEALED]:
                self._connection.execute(f"SET {setting}")

    def view(self, name: str, files: Sequence[str]) -> None:
        """Give Parquet files a name."""
        self._connection.read_parquet(list(files), union_by_name=False, hive_partitioning=False).create_view(name)

    @override
    def check(self, relation: str, query: str, wheres: Sequence[str]) -> None:
        select = import_extra("duckdb").StatementType.SELECT
        for text in sql.statements_to_parse(relation, query, wheres):
            if [statement.type for statement in self._connection.extract_statements(text)] != [select]:
                raise QueryError(f"{sql.shown(query, wheres)} is not one SELECT or one condition; give one")
        for where in filter(str.strip, wheres):  # parsing looks for no column
            self.rows(f"DESCRIBE {sql.select('1', relation, [where])}")

    @override
    def described(self, relation: str) -> list[tuple[str, str]]:
        return [(str(row[0]), str(row[1])) for row in self.rows(f"DESCRIBE SELECT * FROM {relation}")]

    @override
    def batches(
        self, statement: str, values: Sequence[Any], schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        for batch in self._connection.sql(statement, params=values).to_arrow_reader(batch_rows):
            yield batch.cast(schema)
        self.peak_bytes = _peak_bytes(json.loads(self._connection.get_profiling_information("json")))

    @override
    def close(self) -> None:
        _open[self.pid, self._place] -= 1
        super().close()


def _peak_bytes(profile: Any) -> int:
    """The highest memory in a profile, which is a tree of operators."""
    if isinstance(profile, dict):
        return max([int(profile.get("peak_buffer_memory", 0)), *map(_peak_bytes, profile.values())])
    return max(map(_peak_bytes, profile), default=0) if isinstance(profile, list) else 0


class EmbeddedDatabase(Database):
    """Files that DuckDB reads within this process."""

    shares_process = True
    dialect = sql.DUCKDB

    def __init__(self, connection: DuckDBConnection | ParquetConnection, path: str = "") -> None:
        self._declared, self._path = connection, f"{path}.connection" if path else "connection"
        import_extra("duckdb", f"{self._path}.kind")
        if not self.files():
            raise ConfigError([Problem(f"{self._path}.path", self.absent())])

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that decide what is read."""

    @abstractmethod
    def absent(self) -> str:
        """The error when there are none."""

    @override
    def failures(self) -> tuple[type[Exception], ...]:
        """What DuckDB raises, and pyarrow for it while it streams."""
        return import_extra("duckdb").Error, import_extra("pyarrow").ArrowException, OSError

    @override
    def advice(self, error: Exception) -> str:
        text = str(error).lower()
        if "disabled by configuration" in text or "configuration has been locked" in text:
            return "SQL of a declaration reads its own database only; declare other files as sources of their own"
        short = "out of memory" in text
        return "give connection.memory_bytes more, or read in more query chunks" if short else ""

    @override
    def identity(self) -> str:
        return f"{self._declared.kind} {resolve_path(self._declared.path)}"

    @override
    def state(self) -> str:
        states = []
        for file in self.files():
            try:
                found = file.stat()
                states.append(f"{file.name} {found.st_size}-{found.st_mtime_ns}")
            except OSError:
                states.append(f"{file.name} missing")
        return " ".join(states)

    def _session(self, place: str, *, read_only: bool = False) -> DuckDBSession:
        """An open database, its memory and threads bounded, its profiler on.

        Bounds are set after the start: settings of the start would have to be equal for all that have the file open.
        """
        duckdb, given = import_extra("duckdb"), self._declared
        if place != MEMORY and any(count and pid != os.getpid() and of == place for (pid, of), count in _open.items()):
            raise QueryError(
                f"{place} was being read when this process was forked, and DuckDB cannot go on with it here; close "
                "that read first, or start processes by spawn"
            )
        # What exceeds memory is not spilled beside the file, which may lie where nothing can be written.
        name = uuid.uuid4().hex if place == MEMORY else hashlib.sha256(place.encode()).hexdigest()[:16]
        spill = str(scratch_folder() / f"kit-duckdb-{os.getpid()}-{name}")
        try:
            connection = duckdb.connect(place, read_only=read_only, config={"temp_directory": spill})
        except duckdb.Error as error:
            raise UnreachableDatabaseError(
                f"{given.path} cannot be opened: {first_line(error)}; close what is writing to it"
            ) from None
        settings = {"TimeZone": "UTC", "enable_profiling": "no_output"}
        settings |= {"threads": str(given.threads)} if given.threads else {}
        settings |= {"memory_limit": f"{given.memory_bytes >> 10}KiB"} if given.memory_bytes else {}
        for setting, value in settings.items():
            connection.execute(f"SET {setting} = '{value}'")
        return DuckDBSession(connection, place)


class DuckDBDatabase(EmbeddedDatabase):
    """The database file of a declaration."""

    def __init__(self, connection: DuckDBConnection, table: str, query: str, path: str = "") -> None:
        super().__init__(connection, path)
        self.relation = sql.relation_of(table, query)

    @override
    def connect(self) -> DuckDBSession:
        """The file, read-only.

        Raises:
            UnreachableDatabaseError: when another process is writing to it, or it is none of DuckDB's.
            QueryError: when it was being read while this process was forked.
        """
        file = resolve_path(self._declared.path)
        if not file.is_file():
            raise UnreachableDatabaseError(f"{self._declared.path} is not there any more: {self.absent()}")
        session = self._session(str(file), read_only=True)
        session.seal()
        return session

    @override
    def files(self) -> list[Path]:
        """The file and its write-ahead log."""
        file = resolve_path(self._declared.path)
        log = file.with_name(f"{file.name}.wal")
        return [file, *([log] if log.is_file() else [])] if file.is_file() else []

    @override
    def absent(self) -> str:
        file = resolve_path(self._declared.path)
        return f"there is no file {file}{near(file)}"


class ParquetDatabase(EmbeddedDatabase):
    """The Parquet files of a declaration."""

    relation = sql.quoted(_VIEW)

    @override
    def connect(self) -> DuckDBSession:
        """An embedded database with the files as its only table."""
        names = [str(file) for file in self.files()]
        files = [glob.escape(name) for name in names]  # DuckDB takes every name for a pattern
        session = self._session(MEMORY)
        try:
            session.seal([*names, *files])
            session.view(_VIEW, files)
        except self.failures() as error:
            session.close()
            raise QueryError(f"{self._declared.path} cannot be read: {first_line(error)}") from None
        return session

    @override
    def files(self) -> list[Path]:
        place = resolve_path(self._declared.path)
        if place.is_file():
            return [place]
        if place.is_dir():
            return sorted(place.rglob("*.parquet"))
        fixed = place
        while any(mark in str(fixed) for mark in "*?["):
            fixed = fixed.parent
        pattern = str(place.relative_to(fixed))
        return sorted(file for file in fixed.glob(pattern) if file.is_file()) if fixed != place else []

    @override
    def absent(self) -> str:
        place = resolve_path(self._declared.path)
        what = "holds no Parquet file" if place.is_dir() else f"is no Parquet file{near(place)}"
        return f"{self._declared.path} {what} (looked at {place})"
