"""The source of a table: what reads it, whatever the database; and a query, what is asked of it.

A source is a description that can be pickled and copied into a child process. Every read opens a connection of its own
and closes it at its end, so several may go on at once, none holds a lock between reads, and no password is kept.
All rows of one read are of one moment; two reads may be of two, which `state` tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kit.data.tables.partition import Partition

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What to read of a table.

    Raises:
        ValueError: for batches of no rows.
    """

    columns: tuple[str, ...] = ()
    """In the order they are to come; empty for all."""
    where: str = ""
    """A condition in the database's SQL, as trusted as the file it comes from."""
    order_by: tuple[str, ...] = ()
    """Columns to sort by, nulls last; `-name` descends. Text is sorted by its code points."""
    partition: Partition | None = None
    batch_rows: int = 65_536
    """Most rows of a batch."""

    def __post_init__(self) -> None:
        if self.batch_rows < 1:
            raise ValueError(f"batch_rows is {self.batch_rows}; a batch has at least 1 row")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """How rows are shared among the values of a column; those without a value left out."""

    groups: int
    """Different values."""
    rows: int
    squares: float
    """The sum of the squares of the rows of each."""
    largest: int
    """Rows of the value that has most."""


@runtime_checkable
class TableSource(Protocol):
    """A table of entities' rows."""

    name: str
    main_entity_column: str
    date_column: str
    """Empty when none is declared."""
    partition_column: str
    partition_transformation: str
    """`hash_mod` or `exact_group`."""
    shares_process: bool
    """Whether the database works within the process that reads, so that its memory is part of that process's."""

    def schema(self) -> pyarrow.Schema:
        """The columns that can be read."""

    def row_count(self) -> int:
        """Rows there are."""

    def null_count(self, column: str) -> int:
        """Rows without a value there."""

    def value_counts(self, column: str) -> list[tuple[Any, int]]:
        """`(value, rows)` of each value but null, in order of the values."""

    def group_sizes(self, column: str, where: str = "") -> GroupSizes:
        """How the rows that fulfil a condition are shared among the values of a column."""

    def identity(self) -> str:
        """What is read and where, without secrets: equal for equal tables of one database."""

    def state(self) -> str:
        """Another text whenever the data may have changed."""

    def read(self, query: Query = ...) -> Iterator[pyarrow.RecordBatch]:
        """The rows, batch after batch.

        Raises:
            QueryError: when it cannot be asked, or fails mid-way; batches that came before are not to be used then.
        """

    def memory_bytes(self) -> int | None:
        """The database's highest memory in the reads of this object that have ended; None where it cannot be known."""

    def close(self) -> None:
        """End the reads that are still open."""
