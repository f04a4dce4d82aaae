"""A table as a source of rows, whatever the database, and the query chunks that it is cut into.

A `TableSource` is a description that can be pickled and sent to a child process. Every read opens its own connection
and closes it at its end, so several may go on at once, none holds a lock between reads, and no password is kept. All
rows of one read are of one moment; two reads may be of two, which `state` tells. A read gives the columns of its query
with the types of the source. Any other type is a changed schema; nullability and metadata are not compared, since they
differ between a database and a file of its rows.

Every row is in exactly one query chunk, with all other rows of its entity:

- `hash_mod` takes the first 60 bits of the MD5 of the entity's text (UTF-8; whole numbers in decimal, `true`/`false`,
  dates as 2026-01-31), modulo the number of query chunks. The databases and `hash_number` compute the same number, so
  nothing else needs to be known. Chunks have about equally many entities.
- `exact_group` counts the rows of each entity first and deals the entities out, the largest first, always to the chunk
  with fewest rows: about equally many rows, also where few entities hold most of them. The list of entities is part of
  each query, which suits up to about a million.

An entity that is null would be in no chunk or in all, so it is refused. `exact_group` can miss rows that are added
between planning and reading: compare `state`.
"""

from __future__ import annotations

import hashlib
import heapq
import importlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from numbers import Integral
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from kit.arguments import checks_arguments
from kit.errors import ConfigError, PartitionError, Problem, SchemaChangedError

if TYPE_CHECKING:
    import pyarrow

Transformation = Literal["hash_mod", "exact_group"]
HASH_DIGITS = 15
"""Hexadecimal digits of the MD5 that are kept: what fits a signed integer of 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One query chunk of a table.

    Raises:
        PartitionError: for a number that is not below the count.
    """

    column: str
    transformation: Transformation
    number: int
    """0 .. count - 1"""
    count: int
    values: tuple[Any, ...] = field(default=(), repr=False)
    """`exact_group`: the entities of this one."""

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise PartitionError(f"query chunk {self.number} of {self.count}: numbers go from 0 to {self.count - 1}")


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
    """A table of entities' rows. Its methods raise QueryError when the database refuses."""

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
        """Rows of the table."""

    def null_count(self, column: str) -> int:
        """Rows without a value in a column."""

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
            QueryError: when the query is refused, or fails mid-way; batches that came before are not to be used then.
        """

    def memory_bytes(self) -> int | None:
        """The database's highest memory in the reads of this object that have ended; None where it cannot be known."""

    def close(self) -> None:
        """End the reads that are still open."""


def refuse_no_table(given: object, name: str) -> None:
    """Refuse what is no open table.

    Raises:
        ConfigError: with what opens one.
    """
    if not hasattr(given, "partition_transformation"):
        place = repr(str(given)) if isinstance(given, str | PathLike) else "path"
        message = f"{name} takes an open table, got {type(given).__name__}; give kit.data.open_table({place}, ...)"
        raise ConfigError([Problem("source", message)])


_EXTRAS = {
    "duckdb": "DuckDB and Parquet tables are read by duckdb",
    "psycopg": "PostgreSQL tables are read by psycopg",
    "pyarrow": "tables are passed on as pyarrow's record batches",
}


def import_extra(name: str, path: str = "connection.kind") -> Any:
    """A library that only tables need, imported when it is first used.

    Raises:
        ConfigError: at `path` when it is not installed, with the line that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        why = "which is not installed" if error.name == library else f"which does not load ({error})"
        raise ConfigError([Problem(path, f"{_EXTRAS[library]}, {why}; pip install 'kit[tables]'")]) from None


def expected_schema(source: TableSource, query: Query) -> pyarrow.Schema:
    """The columns of the query in its order, with the types of the source."""
    schema = source.schema()
    names = query.columns or tuple(schema.names)
    fields = [schema.field(name) for name in names if name in schema.names]  # an unknown one is refused by the source
    return import_extra("pyarrow").schema(fields)


def checked(
    batches: Iterable[pyarrow.RecordBatch], expected: pyarrow.Schema, name: str
) -> Generator[pyarrow.RecordBatch, None, None]:
    """The batches, as long as they have the columns expected.

    Raises:
        SchemaChangedError: naming the first column that is other than expected.
    """
    for batch in batches:
        refuse_difference(expected, batch.schema, name)
        yield batch


def refuse_difference(expected: pyarrow.Schema, found: pyarrow.Schema, name: str) -> None:
    """Raises: SchemaChangedError: when names or types differ."""
    mine, theirs = ({field.name: str(field.type) for field in schema} for schema in (expected, found))
    if mine == theirs:
        return
    differing = (column for column in [*mine, *theirs] if mine.get(column) != theirs.get(column))
    column = next(differing, None)
    what = f"columns were {[*mine]} and are {[*theirs]}"
    if column is not None:
        was, now = mine.get(column, "not there"), theirs.get(column, "not there")
        what = f"column {column!r} was {was} and is {now}"
    raise SchemaChangedError(
        f"{name}: {what}: the schema has changed since the table was opened; open it again, and fit features anew"
    )


def hash_number(value: int | str | bool | date) -> int:
    """The number of 60 bits that `hash_mod` takes an entity by."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:HASH_DIGITS], 16)


@checks_arguments
def plan_partitions(source: TableSource, count: int) -> tuple[Partition, ...]:
    """Cut a table into query chunks by the column and the transformation that its declaration names.

    Args:
        source: The table.
        count: Number of query chunks. Some are empty when there are fewer entities.

    Returns:
        The query chunks. Every row is in exactly one of them, and no entity is in two.

    Raises:
        PartitionError: for a count below 1, and for nulls in the column, with how many.

    Example:
        >>> table = kit.data.open_table(shop, table="purchases", main_entity_column="customer_id")
        >>> len(kit.data.plan_partitions(table, 4))
        4
    """
    refuse_no_table(source, "plan_partitions")
    asked: Any = count  # by a user, who may give anything
    if isinstance(asked, bool) or not isinstance(asked, Integral):
        raise PartitionError(f"{asked!r} is no number of query chunks; give a whole number from 1")
    if count < 1:
        raise PartitionError(f"{count} query chunks of {source.name}: there is at least 1")
    column = source.partition_column
    if not column:
        raise PartitionError(f"{source.name} has no partition_column; name one, or its main_entity_column")
    if nulls := source.null_count(column):
        raise PartitionError(
            f"{source.name}: {nulls:,} rows have no {column}, so they belong to no query chunk; leave them out with "
            f"where: '\"{column}\" IS NOT NULL', or name another partition_column"
        )
    transformation: Transformation = "exact_group" if source.partition_transformation == "exact_group" else "hash_mod"
    groups: list[list[Any]] = [[] for _ in range(count)]
    if transformation == "exact_group":
        # Largest first, each to the lightest group (Graham's LPT rule): no group is more than 4/3 of the best possible
        # largest one. Ties go by value, then by number, so that the groups are always the same.
        lightest = [(0, number) for number in range(count)]
        for value, rows in sorted(source.value_counts(column), key=lambda pair: -pair[1]):
            weight, number = lightest[0]
            groups[number].append(value)
            heapq.heapreplace(lightest, (weight + rows, number))
    return tuple(
        Partition(column=column, transformation=transformation, number=number, count=count, values=tuple(values))
        for number, values in enumerate(groups)
    )
