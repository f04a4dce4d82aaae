"""PostgreSQL: a table or query of a server, streamed by a cursor on the server's side.

Each read is one transaction of its own: read-only, and one moment of the data (REPEATABLE READ). The server sends
at most 4096 rows at a time, so neither side holds a whole result. SQL of a declaration is parsed first, as one command
each: what holds more is refused, and so are functions that do more than compute, for which a read-only transaction is
no bar (they read files of the server, send, wait, or reach other databases). The password is looked up when connecting,
from the variable that `env:NAME` names or as libpq does (`~/.pgpass`, a service file); it is never kept, shown or
logged.

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
from kit.data.tables.source import import_extra
from kit.data.tables.table import Database, Session
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
_CONNECTION_LOST = (None, "57P01", "57P02")


class PostgresDatabase(Database):
    """The database that a connection of the declaration leads to."""

    shares_process = False
    dialect = sql.POSTGRES

    def __init__(self, connection: PostgresConnection, table: str, query: str, path: str = "") -> None:
        self._declared, self._path = connection, f"{path}.connection" if path else "connection"
        import_extra("psycopg", f"{self._path}.kind")
        self.relation = sql.relation_of(table, query)
        given = connection
        self._place = f"service {given.service}" if given.service else f"{given.host}, port {given.port}"

    @override
    def connect(self) -> PostgresSession:
        """A connection of its own, ready to read.

        Raises:
            UnreachableDatabaseError: within `connect_seconds` for each address, naming host and port.
            ConfigError: when the variable that names the password is not set.
        """
        import psycopg

        given, password, session = self._declared, self._password(), None
        of_service = {"host", "port"} - given.model_fields_set if given.service else set()
        parameters: dict[str, Any] = {
            "host": given.host, "port": given.port, "dbname": given.database, "user": given.user,
            "service": given.service, "password": password,
        } | dict.fromkeys(of_service, "")  # fmt: skip
        try:
            connection: Any = psycopg.connect(
                **{name: value for name, value in parameters.items() if value},
                connect_timeout=given.connect_seconds, application_name="kit", client_encoding="utf8",
                cursor_factory=psycopg.RawCursor,
            )  # fmt: skip
            session = PostgresSession(connection)
            session.prepare(given.memory_bytes)
        except psycopg.Error as error:
            if session is not None:
                session.close()
            reason = " ".join(str(error).split()) or type(error).__name__
            shown = reason.replace(password, "***") if password else reason
            raise UnreachableDatabaseError(f"the database at {self._place} cannot be used: {shown}") from None
        return session

    @override
    def failures(self) -> tuple[type[Exception], ...]:
        """What psycopg raises, and pyarrow for a value beyond its type."""
        return import_extra("psycopg").Error, import_extra("pyarrow").ArrowException

    @override
    def advice(self, error: Exception) -> str:
        """A lost connection is worth a second try; the rest speaks for itself."""
        lost = isinstance(error, import_extra("psycopg").OperationalError)
        lost = lost and getattr(error, "sqlstate", None) in _CONNECTION_LOST
        return f"the connection to {self._place} was lost, so read again" if lost else ""

    @override
    def identity(self) -> str:
        given = self._declared
        return f"postgresql {given.service or given.host}:{given.port}/{given.database} {given.user}".strip()

    @override
    def state(self) -> str:
        """The snapshot: which transactions are seen; and of which database, since one can be dropped and made anew."""
        session = self.connect()
        try:
            snapshot = "SELECT pg_current_snapshot()::text, oid FROM pg_database WHERE datname = current_database()"
            return "snapshot {} of database {}".format(*session.rows(snapshot)[0])
        finally:
            session.close()

    def _password(self) -> str:
        name = self._declared.password.removeprefix("env:")
        if name and name not in os.environ:
            message = f"there is no environment variable {name}; set it before Python starts"
            raise ConfigError([Problem(f"{self._path}.password", message)])
        return os.environ.get(name, "")


class PostgresSession(Session):
    """One transaction of one connection."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._status = _server_status(connection)

    def prepare(self, memory_bytes: int) -> None:
        """Say that nothing is written, how dates are, and what a query may take."""
        import psycopg

        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        settings = {"default_transaction_read_only": "on", "cursor_tuple_fraction": "1"}
        settings |= {"datestyle": "ISO", "timezone": "UTC", "standard_conforming_strings": "on"}
        settings |= {"work_mem": f"{max(64, memory_bytes >> 10)}kB"} if memory_bytes else {}
        self._connection.autocommit = True  # else a declared query that ends its transaction would take them back
        for name, value in settings.items():
            self._connection.execute("SELECT set_config($1, $2, false)", [name, value])
        self._connection.autocommit = False

    @override
    def check(self, relation: str, query: str, wheres: Sequence[str]) -> None:
        import psycopg

        for text in sql.statements_to_parse(relation, query, wheres):
            parsed = self._connection.pgconn.prepare(b"", text.encode())  # runs nothing; a second command is an error
            if parsed.status != psycopg.pq.ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(parsed)
        given = "\n".join([query or relation, *wheres])
        for name in sorted(_SHOW_FILES & set(_WORD.findall(given.lower()))):
            raise QueryError(f"{name} shows files of the server and is not read")
        if 'u&"' in given.lower():
            raise QueryError('a name in U&"" hides which function it is; write its letters')
        called = {name.lower() for name in _CALLED.findall(given)} - _COMPUTE
        acting = {row[0] for row in self._connection.execute(_ACTS, [list(called)])} | (called & _RUN_TEXT)
        if acting:
            raise QueryError(
                f"the function {min(acting)} does more than compute and is not called from a declaration; leave it "
                "out, or have the owner of the database make a view that calls it"
            )

    @override
    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._connection.execute(statement, prepare=True).fetchall()  # as one command
        return rows

    @override
    def described(self, relation: str) -> list[tuple[str, str]]:
        cursor = self._connection.execute(f"SELECT * FROM {relation} LIMIT 0", prepare=True)
        columns = [(column.name, column.type_code) for column in cursor.description or ()]
        names = dict(self._connection.execute(_TYPES_OF, [[code for _, code in columns]]).fetchall())
        return [(name, str(names.get(code, code))) for name, code in columns]

    @override
    def batches(
        self, statement: str, values: Sequence[Any], schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        import psycopg

        with psycopg.RawServerCursor(self._connection, _CURSOR) as cursor:
            cursor.execute(statement, values, binary=True)
            while batch := _batch(cursor.fetchmany(min(batch_rows, FETCHED_ROWS)), schema):
                self.peak_bytes = max(self.peak_bytes, self._private_bytes())
                yield batch

    def _private_bytes(self) -> int:
        """Private memory of the process that serves this connection; 0 where it cannot be known."""
        try:
            lines = self._status.read_text().splitlines() if self._status else []
        except OSError:
            return 0
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def _batch(rows: Sequence[tuple[Any, ...]], schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """Rows as columns; Python's objects, several times as large, are gone when it returns."""
    arrow = import_extra("pyarrow")
    pool = arrow.system_memory_pool()  # texts grow by doubling, of which Arrow's own would keep every size
    columns = [
        arrow.array([row[place] for row in rows], field.type, memory_pool=pool) for place, field in enumerate(schema)
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def _server_status(connection: Any) -> Path | None:
    """The status file of the process that serves a connection, if it is one of this machine."""
    host, process = connection.info.hostaddr, Path(f"/proc/{connection.info.backend_pid}")
    if host and not ipaddress.ip_address(host).is_loopback:
        return None
    try:
        return process / "status" if (process / "comm").read_text().startswith("postgres") else None
    except OSError:
        return None
