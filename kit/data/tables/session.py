"""What a table needs of a database: sessions, each one open connection, and the few facts that differ between them.

A session belongs to the process that opened it. What it streams is of one moment of the data; its highest memory is
known once a stream has come to its end.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables import sql


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
