"""SQL: the few statements that sources send, for the dialects of DuckDB and of PostgreSQL.

Names are quoted and never taken apart from their quotes; values never enter the text but go as parameters. Only what a
declaration gives as SQL (`query`, `where`) is passed on as it is: in brackets, and closed on a line of its own, so that
a comment at its end ends with it. Before, the database parses it on its own, where brackets that it closes and did not
open are an error (`alone`).

Types: the columns of every database as the same seven Arrow types, so that a change of database changes no batch.

Whole numbers are int64, all other numbers float64 (decimals too: exact to about 15 digits), text and what stands for it
(enumerations, UUIDs) string, times timestamp[us] (with a zone: UTC), dates date32. The database itself casts, so what
does not fit (a whole number beyond 2^63) is its error, never a wrong value. Anything else (blobs, lists, documents,
intervals) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kit.data.tables.source import HASH_DIGITS, Partition, Query, needed
from kit.errors import PartitionError, QueryError

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where the databases' SQL differs."""

    known: Mapping[str, Kind]
    """What its types are read as."""
    types: Mapping[Kind, str]
    """What values are cast to."""
    hash_number: str
    """A whole number from `{text}`, as `kit.data.tables.source.hash_number`."""
    is_one_of: str
    """Whether `{value}` is in the list `{values}` of `{type}`."""
    ordered_text: str
    """`{text}` in the order of its code points."""


_TYPES: Mapping[Kind, str] = {
    "integer": "BIGINT", "number": "FLOAT8", "bool": "BOOLEAN", "text": "TEXT", "time": "TIMESTAMP",
    "zoned time": "TIMESTAMP WITH TIME ZONE", "date": "DATE",
}  # fmt: skip
_HASHED: tuple[Kind, ...] = ("integer", "bool", "text", "date")
"""Kinds whose text is the same in every database."""


def duckdb_dialect(known: Mapping[str, Kind]) -> Dialect:
    """DuckDB's."""
    return Dialect(
        known=known,
        types=_TYPES,
        hash_number=f"CAST('0x' || substr(md5({{text}}), 1, {HASH_DIGITS}) AS BIGINT)",
        is_one_of="{value} IN (SELECT unnest(CAST({values} AS {type}[])))",
        ordered_text="{text}",
    )


def postgres_dialect(known: Mapping[str, Kind]) -> Dialect:
    """PostgreSQL's."""
    digits = f"substr(md5(convert_to({{text}}, 'UTF8')), 1, {HASH_DIGITS})"
    return Dialect(
        known=known,
        types=_TYPES,
        hash_number=f"CAST(CAST('x' || {digits} AS BIT({4 * HASH_DIGITS})) AS BIGINT)",
        is_one_of="{value} = ANY(CAST({values} AS {type}[]))",
        ordered_text='{text} COLLATE "C"',
    )


@dataclass(slots=True)
class Statement:
    """A text with places `$1`, `$2`, ... and the values for them."""

    text: str = ""
    values: list[Any] = field(default_factory=list)

    def place(self, value: Any) -> str:
        """The place of a value that the text is going to hold."""
        self.values.append(value)
        return f"${len(self.values)}"


def quoted(name: str) -> str:
    """A name as an identifier, whatever it is made of.

    Raises:
        QueryError: for a name that no database has: empty, or with a null character.
    """
    if not name or "\0" in name:
        raise QueryError(f"{name!r} is no name of a table or column")
    return '"' + name.replace('"', '""') + '"'


def quoted_table(name: str) -> str:
    """`schema.table` as identifiers."""
    return ".".join(map(quoted, name.split(".")))


def source_of(table: str, query: str) -> str:
    """What stands after FROM: a table, or the query in its place."""
    return f'{bracketed(query)} AS "source"' if query else quoted_table(table)


def bracketed(sql: str) -> str:
    """SQL of a declaration in brackets."""
    return f"({sql.strip().removesuffix(';')}\n)"


def alone(relation: str, query: str, wheres: Sequence[str]) -> list[str]:
    """Statements that each must be one SELECT, for the query to be one and each condition one expression.

    A condition stands without brackets, where one that it closes too early is an error, and within them, where what
    follows an expression is.

    Raises:
        QueryError: for a null character, where a database may end to read.
    """
    if "\0" in "".join([query, *wheres]):
        raise QueryError(f"{shown(query, wheres)} holds a null character")
    texts = [f"{query.strip().removesuffix(';')}\n", f"SELECT 1 FROM {relation}"] if query else []
    for where in filter(str.strip, wheres):
        texts += [f"SELECT 1 FROM {relation} WHERE {given}" for given in (f"{where}\n", bracketed(where))]
    return texts


def shown(query: str, wheres: Sequence[str]) -> str:
    """SQL of a declaration as an error quotes it."""
    text = " AND ".join(where for where in (query, *wheres) if where.strip())
    return ascii(text if len(text) <= 80 else f"{text[:77]}...")


def literal(text: str) -> str:
    """A text as a constant, where no parameter is taken.

    Raises:
        QueryError: for a null character, which no database takes.
    """
    if "\0" in text:
        raise QueryError(f"{text!r} holds a null character")
    return "'" + text.replace("'", "''") + "'"


def select(
    dialect: Dialect, statement: Statement, relation: str, columns: Sequence[DatabaseColumn], wheres: Sequence[str]
) -> Statement:
    """Columns of a relation, cast to what they are read as, where all of `wheres` hold."""
    statement.text = f"SELECT {', '.join(_cast(dialect, column) for column in columns)} FROM {relation}"
    return _filtered(statement, wheres)


def count(relation: str, wheres: Sequence[str]) -> Statement:
    """How many rows there are."""
    return _filtered(Statement(f"SELECT count(*) FROM {relation}"), wheres)


def value_counts(dialect: Dialect, relation: str, column: DatabaseColumn, wheres: Sequence[str]) -> Statement:
    """Each value of a column and how many rows have it, in order."""
    statement = _grouped(dialect, f"{_value(dialect, column)} AS value, count(*) AS rows", relation, column, wheres)
    statement.text += f" ORDER BY {_ordered(dialect, column)}"
    return statement


def group_sizes(dialect: Dialect, relation: str, column: DatabaseColumn, wheres: Sequence[str]) -> Statement:
    """How many values a column has; of the rows of each, their sum, the sum of their squares, and the most."""
    sizes = _grouped(dialect, "count(*) AS n", relation, column, wheres)
    found = "count(*), coalesce(sum(n), 0), coalesce(sum(CAST(n AS FLOAT8) * n), 0), coalesce(max(n), 0)"
    return Statement(f"SELECT {found} FROM {bracketed(sizes.text)} AS sizes", sizes.values)


def _grouped(
    dialect: Dialect, selected: str, relation: str, column: DatabaseColumn, wheres: Sequence[str]
) -> Statement:
    statement = _filtered(Statement(f"SELECT {selected} FROM {relation}"), [*wheres, is_known(column)])
    statement.text += f" GROUP BY {_value(dialect, column)}"
    return statement


def is_known(column: DatabaseColumn) -> str:
    """That a column has a value."""
    return f"{quoted(column.name)} IS NOT NULL"


def is_null(column: DatabaseColumn) -> str:
    """That it has none."""
    return f"{quoted(column.name)} IS NULL"


def in_partition(dialect: Dialect, statement: Statement, column: DatabaseColumn, partition: Partition) -> str:
    """The condition that a row is in a query chunk.

    Raises:
        PartitionError: for a column of numbers or times, which have no text that all databases share.
    """
    if column.kind not in _HASHED:
        raise PartitionError(
            f"{column.name} is {column.type_name}, which names no entity; partition by whole numbers, text, dates or "
            "true and false"
        )
    if partition.transformation == "exact_group":
        values = statement.place(list(partition.values))
        return dialect.is_one_of.format(value=_value(dialect, column), values=values, type=dialect.types[column.kind])
    text = f"CAST({_value(dialect, column)} AS TEXT)"
    total, number = statement.place(partition.count), statement.place(partition.number)
    return f"{dialect.hash_number.format(text=text)} % CAST({total} AS BIGINT) = CAST({number} AS BIGINT)"


def order_by(dialect: Dialect, columns: Mapping[str, DatabaseColumn], query: Query) -> str:
    """The end of a statement that sorts."""
    parts = []
    for name in query.order_by:
        column = columns[name.removeprefix("-")]
        parts.append(f"{_ordered(dialect, column)} {'DESC' if name.startswith('-') else 'ASC'} NULLS LAST")
    return f" ORDER BY {', '.join(parts)}" if parts else ""


def _filtered(statement: Statement, wheres: Sequence[str]) -> Statement:
    given = [bracketed(where) for where in wheres if where.strip()]
    statement.text += f" WHERE {' AND '.join(given)}" if given else ""
    return statement


def _value(dialect: Dialect, column: DatabaseColumn) -> str:
    assert column.kind is not None, f"{column.name} is not read"
    return f"CAST({quoted(column.name)} AS {dialect.types[column.kind]})"


def _cast(dialect: Dialect, column: DatabaseColumn) -> str:
    return f"{_value(dialect, column)} AS {quoted(column.name)}"


def _ordered(dialect: Dialect, column: DatabaseColumn) -> str:
    value = _value(dialect, column)
    return dialect.ordered_text.format(text=value) if column.kind == "text" else value


Kind = Literal["integer", "number", "bool", "text", "time", "zoned time", "date"]

_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w ]*?)\s*(\(.*\))?(?P<rest> with(out)? time zone)?", re.DOTALL)

DUCKDB: Mapping[str, Kind] = {
    **dict.fromkeys(("tinyint", "smallint", "integer", "bigint"), "integer"),
    **dict.fromkeys(("utinyint", "usmallint", "uinteger", "ubigint"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    "boolean": "bool",
    **dict.fromkeys(("varchar", "enum", "uuid"), "text"),
    **dict.fromkeys(("timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns"), "time"),
    "timestamp with time zone": "zoned time",
    "date": "date",
}
POSTGRES: Mapping[str, Kind] = {
    **dict.fromkeys(("smallint", "integer", "bigint", "oid"), "integer"),
    **dict.fromkeys(("real", "double precision", "numeric"), "number"),
    "boolean": "bool",
    **dict.fromkeys(("text", "character varying", "character", "bpchar", "name", "uuid", "citext", "enum"), "text"),
    "timestamp without time zone": "time",
    "timestamp with time zone": "zoned time",
    "date": "date",
}
"""What each database calls the types that are read; sizes, precisions and members of an enumeration left out."""


@dataclass(frozen=True, slots=True)
class DatabaseColumn:
    """One column as the database describes it."""

    name: str
    type_name: str
    """The database's own word."""
    kind: Kind | None
    """None for a type that is not read."""


def kind_of(type_name: str, known: Mapping[str, Kind]) -> Kind | None:
    """What a type is read as; None for one that is not read, such as `INTEGER[]`."""
    match = _NAMED.fullmatch(type_name)
    return known.get((match["name"] + (match["rest"] or "")).lower()) if match else None


def arrow_type(kind: Kind) -> pyarrow.DataType:
    """The Arrow type of a kind."""
    arrow = needed("pyarrow")
    types: dict[Kind, pyarrow.DataType] = {
        "integer": arrow.int64(),
        "number": arrow.float64(),
        "bool": arrow.bool_(),
        "text": arrow.string(),
        "time": arrow.timestamp("us"),
        "zoned time": arrow.timestamp("us", tz="UTC"),
        "date": arrow.date32(),
    }
    return types[kind]
