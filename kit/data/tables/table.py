"""A table: the one implementation of a source, over a database that describes a relation and streams a statement.

What was declared is checked when the table is opened: that it is there, that the named columns are in it, and that
their types are read. Each read looks at the columns again, in its own moment of the data, and refuses when they have
changed. An unfinished read raises; a batch is whole or it is not there.

What a table needs of a database: sessions, each one open connection, and the few facts that differ between them.

A session belongs to the process that opened it. What it streams is of one moment of the data; its highest memory is
known once a stream has come to its end.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kit.data.tables import sql
from kit.data.tables.source import GroupSizes, Query, needed
from kit.data.tables.sql import DatabaseColumn, Kind, arrow_type, kind_of
from kit.errors import ConfigError, Problem, QueryError, SchemaChangedError

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables import sql
    from kit.data.tables.declare import DataSource

_INHERITED: list[Session] = []
"""Connections of the process that this one was forked from: theirs to close."""


class DatabaseTable:
    """A table of a database, as declared.

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
        self._columns = self._found_columns()

    # -- what there is

    def schema(self) -> pyarrow.Schema:
        """The columns that can be read, as they were when the table was opened."""
        return self._schema(tuple(self._columns.values()))

    def row_count(self) -> int:
        """Rows there are.

        Raises:
            QueryError: when the database refuses.
        """
        return int(self._asked(sql.count(self._database.relation, [self.declared.where]))[0][0])

    def null_count(self, column: str) -> int:
        """Rows without a value in a column."""
        wheres = [self.declared.where, sql.is_null(self._column(column))]
        return int(self._asked(sql.count(self._database.relation, wheres))[0][0])

    def value_counts(self, column: str) -> list[tuple[Any, int]]:
        """`(value, rows)` of each value but null, in order of the values."""
        database, wheres = self._database, [self.declared.where]
        rows = self._asked(sql.value_counts(database.dialect, database.relation, self._column(column), wheres))
        return [(value, int(count)) for value, count in rows]

    def group_sizes(self, column: str, where: str = "") -> GroupSizes:
        """How the rows that fulfil a condition are shared among the values of a column."""
        database, wheres = self._database, [self.declared.where, where]
        statement = sql.group_sizes(database.dialect, database.relation, self._column(column), wheres)
        found = self._asked(statement, where)[0]
        return GroupSizes(groups=int(found[0]), rows=int(found[1]), squares=float(found[2]), largest=int(found[3]))

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
            raise self._refused(error) from None

    def memory_bytes(self) -> int | None:
        """The database's highest memory in the reads of this object that have ended; None where it cannot be known."""
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
        statement = self._selected(columns, query)
        session, read = self._database.connect(), 0
        self._sessions.add(session)
        try:
            self._check(session, query.where)
            self._refuse_changes(session)
            for batch in session.batches(statement, self._schema(columns), query.batch_rows):
                read += batch.num_rows
                yield batch
            self._peak_bytes = max(self._peak_bytes, session.peak_bytes() or 0)
        except self._database.failures() as error:
            raise self._refused(error, read) from None
        finally:
            self._sessions.discard(session)
            _release(session)

    def _selected(self, columns: Sequence[DatabaseColumn], query: Query) -> sql.Statement:
        dialect, statement = self._database.dialect, sql.Statement()
        wheres = [self.declared.where, query.where]
        if query.partition is not None:
            column = self._column(query.partition.column)
            wheres.append(sql.in_partition(dialect, statement, column, query.partition))
        sql.select(dialect, statement, self._database.relation, columns, wheres)
        statement.text += sql.order_by(dialect, self._columns, query)
        return statement

    def _asked(self, statement: sql.Statement, where: str = "") -> list[tuple[Any, ...]]:
        session = self._database.connect()
        try:
            self._check(session, where)
            self._refuse_changes(session)
            return session.rows(statement)
        except self._database.failures() as error:
            raise self._refused(error) from None
        finally:
            session.close()

    def _check(self, session: Session, where: str) -> None:
        """Refuse a condition that is more than one; those of the declaration were looked at when it was opened."""
        if where.strip():
            session.check(self._database.relation, "", [where])

    # -- columns

    def _found_columns(self) -> dict[str, DatabaseColumn]:
        found = self._described()
        declared = self.declared
        for path, names in (
            ("columns.allow", declared.columns.allow),
            ("columns.deny", declared.columns.deny),
            ("main_entity_column", (declared.main_entity_column,)),
            ("date_column", (declared.date_column,)),
            ("partition_column", (declared.partition_column,)),
        ):
            for name in names:
                if name and name not in found:
                    raise self._wrong(path, f"{self._what()} has no column {name!r}{_hint(name, found)}")
        kept = {name: found[name] for name in found if name not in declared.columns.deny}
        if declared.columns.allow:
            kept = {name: column for name, column in kept.items() if name in declared.columns.allow}
        if not kept:
            raise self._wrong("columns", f"no column of {', '.join(found)} is left to read")
        self._refuse_types(kept)
        return kept

    def _described(self) -> dict[str, DatabaseColumn]:
        declared, session = self.declared, self._database.connect()
        field = "query" if declared.query else "table"
        failures: tuple[type[Exception], ...] = (QueryError, *self._database.failures())
        try:
            session.check(self._database.relation, declared.query, [])
            columns = self._columns_of(session)
            field = "where"
            session.check(self._database.relation, "", [declared.where])
        except failures as error:
            advice = self._database.advice(error)
            raise self._wrong(field, f"{_reason(error)}{f'; {advice}' if advice else ''}") from None
        finally:
            session.close()
        names = [column.name for column in columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise self._wrong("query", f"it has {', '.join(twice)} more than once; give each column its own name")
        return {column.name: column for column in columns}

    def _columns_of(self, session: Session) -> list[DatabaseColumn]:
        known = self._database.dialect.known
        described = session.described(self._database.relation)
        return [DatabaseColumn(name, kind, kind_of(kind, known)) for name, kind in described]

    def _refuse_types(self, columns: dict[str, DatabaseColumn]) -> None:
        for column in columns.values():
            if column.kind is None:
                raise self._wrong(
                    "columns",
                    f"{column.name} is {column.type_name}, which is not read; leave it out with columns.deny, or cast "
                    "it in a query",
                )

    def _refuse_changes(self, session: Session) -> None:
        now = {column.name: column for column in self._columns_of(session)}
        for name, column in self._columns.items():
            if name not in now:
                raise SchemaChangedError(f"{self.name} has lost its column {name!r} since it was opened; open it again")
            if now[name].type_name != column.type_name:
                raise SchemaChangedError(
                    f"{self.name}: {name} was {column.type_name} when it was opened and is {now[name].type_name} now; "
                    "open it again"
                )

    def _column(self, name: str) -> DatabaseColumn:
        if name not in self._columns:
            raise QueryError(f"{self.name} has no column {name!r}{_hint(name, self._columns)}")
        return self._columns[name]

    def _schema(self, columns: Sequence[DatabaseColumn]) -> pyarrow.Schema:
        kinds: list[tuple[str, Kind]] = [(column.name, column.kind) for column in columns if column.kind is not None]
        schema: pyarrow.Schema = needed("pyarrow").schema([(name, arrow_type(kind)) for name, kind in kinds])
        return schema

    # -- errors

    def _what(self) -> str:
        return "the query" if self.declared.query else self.declared.table or self.name

    def _wrong(self, field: str, message: str) -> ConfigError:
        return ConfigError([Problem(f"{self._path}.{field}" if self._path else field, message)])

    def _refused(self, error: Exception, read: int = 0) -> QueryError:
        after = f" after {read:,} rows, which are not to be used" if read else ""
        advice = self._database.advice(error)
        return QueryError(f"{self.name}: the query failed{after}: {_reason(error)}{f'; {advice}' if advice else ''}")

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sessions": set(), "_peak_bytes": 0}

    def __repr__(self) -> str:
        return f"Table {self.name} ({len(self._columns)} columns, {self._database.identity()})"


def _release(session: Session) -> None:
    if session.pid == os.getpid():
        session.close()
    else:
        _INHERITED.append(session)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _hint(name: str, known: dict[str, DatabaseColumn]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"


class Session(ABC):
    """One open connection.

    Args:
        opened: The library's own connection, which can `execute` and `close`.
    """

    def __init__(self, opened: Any) -> None:
        self.pid = os.getpid()
        """The process that opened it, and closes it."""
        self._opened = opened
        self._peak_bytes = 0

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
        self, statement: sql.Statement, schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        """The rows of a large result, as they come, in batches of this schema."""

    def rows(self, statement: sql.Statement) -> list[tuple[Any, ...]]:
        """All rows of a small result."""
        rows: list[tuple[Any, ...]] = self._opened.execute(statement.text, statement.values).fetchall()
        return rows

    def peak_bytes(self) -> int | None:
        """The database's highest memory for this connection so far; None where it cannot be known."""
        return self._peak_bytes or None

    def close(self) -> None:
        """End the transaction and the connection."""
        self._opened.close()


class Database(Protocol):
    """What a table is in."""

    dialect: sql.Dialect
    relation: str
    """What stands after FROM."""
    shares_process: bool
    """Whether it works within the process that reads."""

    def connect(self) -> Session:
        """A connection of its own.

        Raises:
            UnreachableDatabaseError: when there is none to be had.
        """

    def failures(self) -> tuple[type[Exception], ...]:
        """What its library raises."""

    def advice(self, error: Exception) -> str:
        """What to do about an error, after `; `; empty when the error says enough."""

    def identity(self) -> str:
        """Where it is, without secrets."""

    def state(self) -> str:
        """Another text whenever its data may have changed."""
