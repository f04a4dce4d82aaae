"""A table: the one implementation of a source, over a database that describes a relation and streams a statement.

What was declared is checked when the table is opened: that it is there, that the named columns are in it, and that
their types are read. Each read looks at the columns again, in its own moment of the data, and refuses when they have
changed. An unfinished read raises; a batch is whole or it is not there.

A database gives sessions, each one open connection, and the few facts that differ between databases. A session belongs
to the process that opened it. What it streams is of one moment of the data; its highest memory is known once a stream
has come to its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.data.tables import sql
from kit.data.tables.source import GroupSizes, Query, import_extra
from kit.errors import ConfigError, Problem, QueryError, SchemaChangedError, did_you_mean, first_line

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.declare import DataSource
    from kit.data.tables.sql import DatabaseColumn

_INHERITED: list[Session] = []
"""Connections of the process that this one was forked from: theirs to close."""


class Session(ABC):
    """One open connection.

    Args:
        connection: The library's own, which can `execute` and `close`.
    """

    def __init__(self, connection: Any) -> None:
        self.pid = os.getpid()
        """The process that opened it, and closes it."""
        self.peak_bytes = 0
        """The database's highest memory for this connection so far; 0 where it cannot be known."""
        self._connection = connection

    @abstractmethod
    def check(self, relation: str, query: str, wheres: Sequence[str]) -> None:
        """Have the database parse SQL of a declaration, without running it.

        Raises:
            QueryError: when the query is not one SELECT, a condition not one expression, or a function in them does
                more than compute.
        """

    @abstractmethod
    def described(self, relation: str) -> list[tuple[str, str]]:
        """`(name, type)` of each column."""

    @abstractmethod
    def batches(
        self, statement: str, values: Sequence[Any], schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        """The rows of a large result, as they come, in batches of this schema."""

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """All rows of a small result."""
        rows: list[tuple[Any, ...]] = self._connection.execute(statement).fetchall()
        return rows

    def close(self) -> None:
        """End the transaction and the connection."""
        self._connection.close()


class Database(ABC):
    """What a table is in."""

    dialect: sql.Dialect
    relation: str
    """What stands after FROM."""
    shares_process: bool
    """Whether it works within the process that reads."""

    @abstractmethod
    def connect(self) -> Session:
        """A new connection.

        Raises:
            UnreachableDatabaseError: when the database gives none.
        """

    @abstractmethod
    def failures(self) -> tuple[type[Exception], ...]:
        """What its library raises."""

    @abstractmethod
    def advice(self, error: Exception) -> str:
        """What to do about an error; empty when the error says enough."""

    @abstractmethod
    def identity(self) -> str:
        """Where it is, without secrets."""

    @abstractmethod
    def state(self) -> str:
        """Another text whenever its data may have changed."""

    def reason(self, error: Exception) -> str:
        """An error in one line, with what to do about it."""
        advice = self.advice(error)
        return first_line(error) + (f"; {advice}" if advice else "")


_MISSING_COLUMN = re.compile(r'column "?(?:\w+\.)?(\w+)"? (?:not found|does not exist)')
"""As DuckDB and PostgreSQL say it."""


def _other_column(error: Exception, columns: Iterable[str]) -> str:
    """What there is in place of a column that an error says is missing; empty for any other error."""
    missing = _MISSING_COLUMN.search(str(error))
    return did_you_mean(missing[1], columns) if missing else ""


class DatabaseTable:
    """A table of a database, as declared; see `TableSource` for what its methods give.

    Args:
        declared: What to read and under which name.
        database: What reads it.
        path: Where the declaration stands in its file, for errors: `data_sources.0`.

    Raises:
        ConfigError: when the table or a column that is named is not there, or a column is of a type that is not read.
        UnreachableDatabaseError: when the database does not answer.
    """

    def __init__(self, declared: DataSource, database: Database, path: str = "") -> None:
        self.declared, self._database, self._path = declared, database, path
        self.name = declared.name
        self.main_entity_column = declared.main_entity_column
        self.date_column = declared.date_column
        self.partition_column = declared.partition_column or declared.main_entity_column
        self.partition_transformation: str = declared.partition_values_transformation
        self.shares_process = database.shares_process
        self._sessions: set[Session] = set()
        self._peak_bytes = 0
        self._columns = self._chosen_columns(self._described())

    # -- what there is

    def schema(self) -> pyarrow.Schema:
        """The columns that can be read, as they were when the table was opened."""
        return _schema(self._columns.values())

    def row_count(self) -> int:
        return int(self._rows(sql.select("count(*)", self._database.relation, [self.declared.where]))[0][0])

    def null_count(self, column: str) -> int:
        wheres = [self.declared.where, f"{sql.quoted(self._column(column).name)} IS NULL"]
        return int(self._rows(sql.select("count(*)", self._database.relation, wheres))[0][0])

    def value_counts(self, column: str) -> list[tuple[Any, int]]:
        database, wheres = self._database, [self.declared.where]
        rows = self._rows(sql.value_counts(database.dialect, database.relation, self._column(column), wheres))
        return [(value, int(count)) for value, count in rows]

    def group_sizes(self, column: str, where: str = "") -> GroupSizes:
        statement = sql.group_sizes(self._database.relation, self._column(column), [self.declared.where, where])
        groups, rows, squares, largest = self._rows(statement, where)[0]
        return GroupSizes(groups=int(groups), rows=int(rows), squares=float(squares), largest=int(largest))

    def identity(self) -> str:
        """Sixteen hex digits of what is read and where: equal for equal tables of one database. Holds no secret."""
        allowed = [f"{column.name} {column.type_name}" for column in self._columns.values()]
        parts = [self._database.identity(), self.declared.table, self.declared.query, self.declared.where, *allowed]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def state(self) -> str:
        """Another text whenever the data may have changed; the declared `version` where there is one."""
        if self.declared.version:
            return f"version {self.declared.version}"
        try:
            return self._database.state()
        except self._database.failures() as error:
            raise self._failed(error) from None

    def memory_bytes(self) -> int | None:
        return self._peak_bytes or None

    # -- reading

    def read(self, query: Query = Query()) -> Iterator[pyarrow.RecordBatch]:  # noqa: B008 - frozen
        """The rows, batch after batch, in one moment of the data.

        Raises:
            QueryError: for an unknown column, and when the database refuses or fails mid-way; batches that came before
                are then not to be used.
            SchemaChangedError: when the columns are no longer those the table was opened with.
            UnreachableDatabaseError: when the database does not answer.
        """
        columns = [self._column(name) for name in query.columns or self._columns]
        for name in query.order_by:
            self._column(name.removeprefix("-"))
        return self._stream(columns, query)

    def close(self) -> None:
        """End the reads that are still open; the table can be read again."""
        while self._sessions:
            _release(self._sessions.pop())

    def _stream(self, columns: Sequence[DatabaseColumn], query: Query) -> Iterator[pyarrow.RecordBatch]:
        dialect, wheres, values = self._database.dialect, [self.declared.where, query.where], list[Any]()
        if query.partition is not None:
            condition, values = sql.in_partition(dialect, self._column(query.partition.column), query.partition)
            wheres.append(condition)
        statement = sql.select_columns(self._database.relation, columns, wheres)
        statement += sql.order_by(dialect, self._columns, query.order_by)
        session, read = self._database.connect(), 0
        self._sessions.add(session)
        try:
            self._check(session, query.where)
            for batch in session.batches(statement, values, _schema(columns), query.batch_rows):
                read += batch.num_rows
                yield batch
            self._peak_bytes = max(self._peak_bytes, session.peak_bytes)
        except self._database.failures() as error:
            raise self._failed(error, read) from None
        finally:
            self._sessions.discard(session)
            _release(session)

    def _rows(self, statement: str, where: str = "") -> list[tuple[Any, ...]]:
        """All rows of a small result; `where` is the condition in it that the declaration does not have."""
        session = self._database.connect()
        try:
            self._check(session, where)
            return session.rows(statement)
        except self._database.failures() as error:
            raise self._failed(error) from None
        finally:
            session.close()

    def _check(self, session: Session, where: str) -> None:
        """Refuse a condition that is more than one, and columns that have changed since the table was opened.

        The conditions of the declaration were looked at when it was opened.
        """
        if where.strip():
            session.check(self._database.relation, "", [where])
        types = dict(session.described(self._database.relation))
        for name, column in self._columns.items():
            if name not in types:
                raise SchemaChangedError(f"{self.name} has lost its column {name!r} since it was opened; open it again")
            if types[name] != column.type_name:
                raise SchemaChangedError(
                    f"{self.name}: {name} was {column.type_name} when it was opened and is {types[name]} now; "
                    "open it again"
                )

    def check(self, where: str) -> None:
        """Have the database look at a condition that is to be read by, without reading a row.

        Raises:
            ConfigError: when it is no condition on the columns of this table.
        """
        failures: tuple[type[Exception], ...] = (QueryError, *self._database.failures())
        session = self._database.connect()
        try:
            session.check(self._database.relation, "", [where])
        except failures as error:
            raise self._wrong("where", self._database.reason(error) + _other_column(error, self._columns)) from None
        finally:
            session.close()

    # -- columns

    def _described(self) -> dict[str, DatabaseColumn]:
        """All columns of the relation; the SQL of the declaration is checked before and after."""
        declared, database, session = self.declared, self._database, self._database.connect()
        field = "query" if declared.query else "table"
        failures: tuple[type[Exception], ...] = (QueryError, *database.failures())
        columns: list[DatabaseColumn] = []
        try:
            session.check(database.relation, declared.query, [])
            columns = [database.dialect.column(*described) for described in session.described(database.relation)]
            field = "where"
            session.check(database.relation, "", [declared.where])
        except failures as error:
            hint = self._other_tables() if field == "table" else _other_column(error, [one.name for one in columns])
            raise self._wrong(field, database.reason(error) + hint) from None
        finally:
            session.close()
        names = [column.name for column in columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise self._wrong("query", f"it has {', '.join(twice)} more than once; give each column another name")
        return {column.name: column for column in columns}

    def _other_tables(self) -> str:
        """What the database has in place of a table that it has not; empty where it does not say."""
        with contextlib.suppress(QueryError, *self._database.failures()):
            # In a session of its own: the transaction that met the error answers nothing more.
            with contextlib.closing(self._database.connect()) as session:
                rows = session.rows("SELECT table_schema, table_name FROM information_schema.tables")
            named = {name for schema, table in rows for name in (table, f"{schema}.{table}")}
            if self.declared.table not in named:
                shown = [table for schema, table in rows if schema not in ("information_schema", "pg_catalog")]
                return did_you_mean(self.declared.table.rpartition(".")[2], sorted(shown))
        return ""

    def _chosen_columns(self, found: Mapping[str, DatabaseColumn]) -> dict[str, DatabaseColumn]:
        """Those that the declaration allows, and all that it names are there."""
        declared = self.declared
        what = "the query" if declared.query else declared.table or self.name
        for path, names in (
            ("columns.allow", declared.columns.allow),
            ("columns.deny", declared.columns.deny),
            *((field, (getattr(declared, field),)) for field in _COLUMN_FIELDS),
        ):
            for name in names:
                if name and name not in found:
                    raise self._wrong(path, f"{what} has no column {name!r}{did_you_mean(name, found)}")
        allowed = declared.columns.allow or tuple(found)
        kept = {name: found[name] for name in found if name in allowed and name not in declared.columns.deny}
        if not kept:
            raise self._wrong("columns", f"no column of {', '.join(found)} is left to read")
        unread = [f"{column.name} is {column.type_name}" for column in kept.values() if column.kind is None]
        if unread:
            way_out = "leave out such columns with columns.deny, or cast them in a query"
            raise self._wrong("columns", f"{', '.join(unread)}, which is not read; {way_out}")
        return kept

    def _column(self, name: str) -> DatabaseColumn:
        if name not in self._columns:
            raise QueryError(f"{self.name} has no column {name!r}{did_you_mean(name, self._columns)}")
        return self._columns[name]

    # -- errors

    def _wrong(self, field: str, message: str) -> ConfigError:
        return ConfigError([Problem(f"{self._path}.{field}" if self._path else field, message)])

    def _failed(self, error: Exception, read: int = 0) -> QueryError:
        after = f" after {read:,} rows, which are not to be used" if read else ""
        hint = _other_column(error, self._columns)
        return QueryError(f"{self.name}: the query failed{after}: {self._database.reason(error)}{hint}")

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sessions": set(), "_peak_bytes": 0}

    def __repr__(self) -> str:
        return f"Table {self.name} ({len(self._columns)} columns, {self._database.identity()})"


_COLUMN_FIELDS = ("main_entity_column", "date_column", "partition_column")


def _schema(columns: Iterable[DatabaseColumn]) -> pyarrow.Schema:
    return import_extra("pyarrow").schema([(column.name, column.arrow_type) for column in columns])


def _release(session: Session) -> None:
    if session.pid == os.getpid():
        session.close()
    else:
        _INHERITED.append(session)
