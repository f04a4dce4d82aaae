"""PostgreSQL: a table or query of a server, streamed by a cursor on the server's side.

Each read is one transaction of its own: read-only, and one moment of the data (REPEATABLE READ). The server sends
at most 4096 rows at a time, so neither side holds a whole result. The password is looked up when connecting, from the
variable that `env:NAME` names or as libpq does (`~/.pgpass`, a service file); it is never kept, shown or logged.

The state is that of the server's snapshot: it changes with every transaction that writes, to any table of the server.
Where that is too often, declare a `version`. Memory is the private memory of the process that serves the connection,
looked at after each batch, while its sorts and hashes are still there; pages of the cache that all share are left out.
It is known for servers on this machine only.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kit.data.tables import sql
from kit.data.tables.arrow_types import POSTGRES
from kit.data.tables.extras import needed
from kit.data.tables.session import Session
from kit.errors import ConfigError, Problem, UnreachableDatabaseError
from kit.plan.query_chunks import FETCHED_ROWS

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.declared import PostgresConnection

_TYPES_OF = """
SELECT oid, CASE WHEN typtype = 'e' THEN 'enum' ELSE format_type(oid, NULL) END FROM pg_type WHERE oid = ANY($1)
"""
_CURSOR = "kit"


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
        settings |= {"datestyle": "ISO", "timezone": "UTC"}
        settings |= {"work_mem": f"{max(64, memory_bytes >> 10)}kB"} if memory_bytes else {}
        self._opened.autocommit = True  # else a declared query that ends its transaction would take them back
        for name, value in settings.items():
            self._opened.execute("SELECT set_config($1, $2, false)", [name, value])
        self._opened.autocommit = False

    @override
    def described(self, relation: str) -> list[tuple[str, str]]:
        cursor = self._opened.execute(f"SELECT * FROM {relation} LIMIT 0")
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
