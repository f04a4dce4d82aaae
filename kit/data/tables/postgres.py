"""PostgreSQL: a table or query of a server, streamed by a cursor on the server's side.

Each read is one transaction of its own: read-only, and one moment of the data (REPEATABLE READ). The server sends
at most 4096 rows at a time, so neither side holds a whole result. SQL of a declaration is parsed first, as one command
each: what holds more is refused, and so are functions that do more than compute, for which a read-only transaction is
no bar (they read files of the server, send, wait, or reach other databases). The password is looked
up when connecting, from the variable that `env:NAME` names or as libpq does (`~/.pgpass`, a service file); it is never
kept, shown or logged.

The state is that of the server's snapshot: it changes with every transaction that writes, to any table of the server.
Where that is too often, declare a `version`. Memory is the private memory of the process that serves the connection,
looked at after each batch, while its sorts and hashes are still there; pages of the cache that all share are left out.
It is known for servers on this machine only.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kit.data.tables import sql
from kit.data.tables.chunks import FETCHED_ROWS
from kit.data.tables.source import needed
from kit.data.tables.sql import POSTGRES
from kit.data.tables.table import Session
from kit.errors import ConfigError, Problem, QueryError, UnreachableDatabaseError

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.declare import PostgresConnection

_TYPES_OF = """
SELECT oid, CASE WHEN typtype = 'e' THEN 'enum' ELSE format_type(oid, NULL) END FROM pg_type WHERE oid = ANY($1)
"""
_CURSOR = "kit"
_ACTS = """
SELECT proname FROM pg_catalog.pg_proc JOIN pg_catalog.pg_language AS l ON l.oid = prolang
WHERE proname = ANY($1) AND provolatile = 'v' AND (NOT lanpltrusted OR pronamespace = 'pg_catalog'::regnamespace)
"""
"""Of these names, the functions that the server counts as more than computing, written in C or another language that
may do anything."""
_COMPUTE = frozenset((
    "clock_timestamp", "gen_random_bytes", "gen_random_uuid", "random", "random_normal", "timeofday",
    "uuid_generate_v1", "uuid_generate_v1mc", "uuid_generate_v4", "uuidv4", "uuidv7",
))  # fmt: skip
"""Those that only give another value each time."""
_RUN_TEXT = frozenset(("connectby", "crosstab", "crosstab2", "crosstab3", "crosstab4", "crosstabn", "xpath_table"))
"""Functions of extensions that run a text as SQL and are not counted among those that act."""
_WORD = re.compile(r"[a-z_][\w$]*")
_CALLED = re.compile(r"""([A-Za-z_][\w$]*)"?\s*(?=\(|--|/\*)""")
"""Every word that a bracket follows, or a comment that may hide one: also in texts, which a function may run."""
_SHOW_FILES = frozenset(("pg_file_settings", "pg_hba_file_rules", "pg_ident_file_mappings"))
"""Views that read files of the server."""


class PostgresDatabase:
    """The database that a connection of the declaration leads to."""

    shares_process = False

    def __init__(self, connection: PostgresConnection, table: str, query: str, path: str = "") -> None:
        needed("psycopg", f"{path}.connection.kind" if path else "connection.kind")
        self.dialect = sql.postgres_dialect(POSTGRES)
        self._connection, self._path = connection, path
        self.relation = sql.source_of(table, query)

    def connect(self) -> PostgresSession:
        """A connection of its own, ready to read.

        Raises:
            UnreachableDatabaseError: within `connect_seconds` for each address, naming host and port.
            ConfigError: when the variable that names the password is not set.
        """
        import psycopg

        try:
            opened = psycopg.connect(**self._parameters(), cursor_factory=psycopg.RawCursor)
        except psycopg.Error as error:
            raise self._unreachable(error) from None
        session = PostgresSession(opened)
        try:
            session.prepare(self._connection.memory_bytes)
        except psycopg.Error as error:
            session.close()
            raise self._unreachable(error) from None
        return session

    def failures(self) -> tuple[type[Exception], ...]:
        """What psycopg raises, and pyarrow for a value beyond its type."""
        return needed("psycopg").Error, needed("pyarrow").ArrowException

    def advice(self, error: Exception) -> str:
        """A lost connection is worth a second try; the rest speaks for itself."""
        lost = isinstance(error, needed("psycopg").OperationalError) and getattr(error, "sqlstate", None) in (
            None, "57P01", "57P02",
        )  # fmt: skip
        return f"the connection to {self._place()} was lost, so read again" if lost else ""

    def identity(self) -> str:
        """Kind, host, port, database and user."""
        given = self._connection
        return f"postgresql {given.service or given.host}:{given.port}/{given.database} {given.user}".strip()

    def state(self) -> str:
        """The snapshot: which transactions are seen; and of which database, since one can be dropped and made anew."""
        session = self.connect()
        asked = "SELECT pg_current_snapshot()::text, oid FROM pg_database WHERE datname = current_database()"
        try:
            return "snapshot {} of database {}".format(*session.rows(sql.Statement(asked))[0])
        finally:
            session.close()

    def _parameters(self) -> dict[str, Any]:
        given = self._connection
        of_service = {"host", "port"} - given.model_fields_set if given.service else set()
        parameters: dict[str, Any] = {
            "host": given.host, "port": given.port, "dbname": given.database, "user": given.user,
            "service": given.service, "password": self._password(),
        }  # fmt: skip
        parameters |= dict.fromkeys(of_service, "")
        return {
            **{name: value for name, value in parameters.items() if value},
            "connect_timeout": given.connect_seconds,
            "application_name": "kit",
            "client_encoding": "utf8",
        }

    def _password(self) -> str:
        name = self._connection.password.removeprefix("env:")
        if name and name not in os.environ:
            path = f"{self._path}.connection.password" if self._path else "connection.password"
            raise ConfigError([Problem(path, f"there is no environment variable {name}; set it before Python starts")])
        return os.environ.get(name, "")

    def _place(self) -> str:
        given = self._connection
        return f"service {given.service}" if given.service else f"{given.host}, port {given.port}"

    def _unreachable(self, error: Exception) -> UnreachableDatabaseError:
        reason = " ".join(str(error).split()) or type(error).__name__
        password = self._password()
        shown = reason.replace(password, "***") if password else reason
        return UnreachableDatabaseError(f"the database at {self._place()} cannot be used: {shown}")


class PostgresSession(Session):
    """One transaction of one connection."""

    def __init__(self, opened: Any) -> None:
        super().__init__(opened)
        self._server_pid = _local_pid(opened)

    def prepare(self, memory_bytes: int) -> None:
        """Say that nothing is written, how dates are, and what a query may take."""
        import psycopg

        self._opened.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        settings = {"default_transaction_read_only": "on", "cursor_tuple_fraction": "1"}
        settings |= {"datestyle": "ISO", "timezone": "UTC", "standard_conforming_strings": "on"}
        settings |= {"work_mem": f"{max(64, memory_bytes >> 10)}kB"} if memory_bytes else {}
        self._opened.autocommit = True  # else a declared query that ends its transaction would take them back
        for name, value in settings.items():
            self._opened.execute("SELECT set_config($1, $2, false)", [name, value])
        self._opened.autocommit = False

    @override
    def check(self, relation: str, query: str, wheres: Sequence[str]) -> None:
        for text in sql.alone(relation, query, wheres):
            self._parse(text)
        given = "\n".join([query or relation, *wheres])
        for name in sorted(_SHOW_FILES & set(_WORD.findall(given.lower()))):
            raise QueryError(f"{name} shows files of the server and is not read")
        if 'u&"' in given.lower():
            raise QueryError('a name in U&"" hides which function it is; write its letters')
        called = {name.lower() for name in _CALLED.findall(given)} - _COMPUTE
        for name in sorted({row[0] for row in self._opened.execute(_ACTS, [list(called)])} | (called & _RUN_TEXT)):
            raise QueryError(
                f"the function {name} does more than compute and is not called from a declaration; leave it out, or "
                "have the owner of the database make a view that calls it"
            )

    def _parse(self, text: str) -> None:
        """Have the server parse one command, and run nothing: a second one is its error."""
        import psycopg

        parsed = self._opened.pgconn.prepare(b"", text.encode())
        if parsed.status != psycopg.pq.ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(parsed)

    @override
    def rows(self, statement: sql.Statement) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self._opened.execute(
            statement.text,
            statement.values,
            prepare=True,  # as one command, also without values
        ).fetchall()
        return found

    @override
    def described(self, relation: str) -> list[tuple[str, str]]:
        cursor = self._opened.execute(f"SELECT * FROM {relation} LIMIT 0", prepare=True)
        columns = [(column.name, column.type_code) for column in cursor.description or ()]
        names = dict(self._opened.execute(_TYPES_OF, [[code for _, code in columns]]).fetchall())
        return [(name, str(names.get(code, code))) for name, code in columns]

    @override
    def batches(
        self, statement: sql.Statement, schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        import psycopg

        with psycopg.RawServerCursor(self._opened, _CURSOR) as cursor:
            cursor.execute(statement.text, statement.values, binary=True)
            while batch := _batch(cursor.fetchmany(min(batch_rows, FETCHED_ROWS)), schema):
                self._peak_bytes = max(self._peak_bytes, _private_bytes(self._server_pid))
                yield batch


def _batch(rows: Sequence[tuple[Any, ...]], schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """Rows as columns; Python's objects, several times as large, are gone when it returns."""
    arrow = needed("pyarrow")
    pool = arrow.system_memory_pool()  # texts grow by doubling, of which Arrow's own would keep every size
    columns = [
        arrow.array([row[place] for row in rows], field.type, memory_pool=pool) for place, field in enumerate(schema)
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def _local_pid(opened: Any) -> int | None:
    """The process that serves a connection, if it is one of this machine."""
    host, pid = opened.info.hostaddr, opened.info.backend_pid
    if host and not ipaddress.ip_address(host).is_loopback:
        return None
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return int(pid) if name.startswith("postgres") else None


def _private_bytes(pid: int | None) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
