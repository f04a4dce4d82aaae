"""PostgreSQL: a table or query of a server, streamed by a cursor on the server's side.

Each read is one transaction of its own: read-only, and one moment of the data (REPEATABLE READ). The server sends
`batch_rows` rows at a time, so neither side holds a whole result. The password is looked up when connecting, from the
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

from kit.data.tables import sql
from kit.data.tables.arrow_types import POSTGRES
from kit.data.tables.extras import needed
from kit.errors import ConfigError, Problem, UnreachableDatabaseError

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
        self._relation = f'{sql.bracketed(query)} AS "source"' if query else sql.quoted_table(table)

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

    def relation(self, statement: sql.Statement) -> str:  # noqa: ARG002 - nothing to place
        """The table, or the query in brackets."""
        return self._relation

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


class PostgresSession:
    """One transaction of one connection."""

    def __init__(self, opened: Any) -> None:
        self.pid = os.getpid()
        self._opened, self._peak_bytes = opened, 0
        self._server_pid = _local_pid(opened)

    def prepare(self, memory_bytes: int) -> None:
        """Say how dates are written and what a query may take, and begin."""
        import psycopg

        self._opened.read_only = True
        self._opened.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        settings = {"datestyle": "ISO", "timezone": "UTC", "cursor_tuple_fraction": "1"}
        settings |= {"work_mem": f"{max(64, memory_bytes >> 10)}kB"} if memory_bytes else {}
        for name, value in settings.items():
            self._opened.execute("SELECT set_config($1, $2, false)", [name, value])

    def described(self, relation: str, values: Sequence[Any]) -> list[tuple[str, str]]:
        """Names and types of the columns."""
        cursor = self._opened.execute(f"SELECT * FROM {relation} LIMIT 0", values)
        columns = [(column.name, column.type_code) for column in cursor.description or ()]
        names = dict(self._opened.execute(_TYPES_OF, [[code for _, code in columns]]).fetchall())
        return [(name, str(names.get(code, code))) for name, code in columns]

    def rows(self, statement: sql.Statement) -> list[tuple[Any, ...]]:
        """All rows of a small result."""
        rows: list[tuple[Any, ...]] = self._opened.execute(statement.text, statement.values).fetchall()
        return rows

    def batches(
        self, statement: sql.Statement, schema: pyarrow.Schema, batch_rows: int
    ) -> Iterator[pyarrow.RecordBatch]:
        """The rows as the server sends them."""
        import psycopg
        import pyarrow

        with psycopg.RawServerCursor(self._opened, _CURSOR) as cursor:
            cursor.execute(statement.text, statement.values, binary=True)
            while rows := cursor.fetchmany(batch_rows):
                by_column = zip(*rows, strict=True)
                columns = [pyarrow.array(values, field.type) for values, field in zip(by_column, schema, strict=True)]
                self._peak_bytes = max(self._peak_bytes, _private_bytes(self._server_pid))
                yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)

    def peak_bytes(self) -> int | None:
        """The server process's highest private memory; None when it is not on this machine."""
        return self._peak_bytes or None

    def close(self) -> None:
        """End the transaction and the connection."""
        self._opened.close()


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
