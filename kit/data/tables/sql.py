"""SQL: the few statements that sources send, for the dialects of DuckDB and of PostgreSQL.

Names are quoted and never taken apart from their quotes; values never enter the text but go as parameters. Only what a
declaration gives as SQL (`query`, `where`) is passed on as it is: in brackets, and closed on a line of its own, so that
a comment at its end ends with it. Before, the database parses it on its own, where brackets that it closes and did not
open are an error (`statements_to_parse`).

The columns of every database are read as the same seven Arrow types, so that a change of database changes no batch.
Whole numbers are int64, all other numbers float64 (decimals too: exact to about 15 digits), text and what stands for it
(enumerations, UUIDs) string, times timestamp[us] (with a zone: UTC), dates date32. The database itself casts, so what
does not fit (a whole number beyond 2^63) is its error, never a wrong value. Anything else (blobs, lists, documents,
intervals) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kit.data.tables.source import HASH_DIGITS, Partition, import_extra
from kit.errors import PartitionError, QueryError

if TYPE_CHECKING:
    import pyarrow

Kind = Literal["integer", "number", "bool", "text", "time", "zoned time", "date"]
_TYPES: Mapping[Kind, tuple[str, str]] = {
    "integer": ("BIGINT", "int64"),
    "number": ("FLOAT8", "float64"),
    "bool": ("BOOLEAN", "bool"),
    "text": ("TEXT", "string"),
    "time": ("TIMESTAMP", "timestamp[us]"),
    "zoned time": ("TIMESTAMP WITH TIME ZONE", "timestamp[us]"),
    "date": ("DATE", "date32"),
}
"""The type of SQL that each kind is cast to, and the one of Arrow that it is read as."""
_HASHED: tuple[Kind, ...] = ("integer", "bool", "text", "date")
"""Kinds whose text is the same in every database."""
_TYPE_NAME = re.compile(r"(?P<name>[A-Za-z_][\w ]*?)\s*(\(.*\))?(?P<rest> with(out)? time zone)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where the databases' SQL differs."""

    kinds: Mapping[str, Kind]
    """What its types are read as, by name; sizes, precisions and members of an enumeration left out."""
    hash_number: str
    """A whole number from `{text}`, as `kit.data.tables.source.hash_number`."""
    is_one_of: str
    """Whether `{value}` is in the list `$1` of `{type}`."""
    ordered_text: str
    """`{text}` in the order of its code points."""

    def column(self, name: str, type_name: str) -> DatabaseColumn:
        """A column as the database describes it."""
        match = _TYPE_NAME.fullmatch(type_name)
        kind = self.kinds.get((match["name"] + (match["rest"] or "")).lower()) if match else None
        return DatabaseColumn(name, type_name, kind)


DUCKDB = Dialect(
    kinds={
        **dict.fromkeys(("tinyint", "smallint", "integer", "bigint"), "integer"),
        **dict.fromkeys(("utinyint", "usmallint", "uinteger", "ubigint"), "integer"),
        **dict.fromkeys(("float", "double", "decimal"), "number"),
        "boolean": "bool",
        **dict.fromkeys(("varchar", "enum", "uuid"), "text"),
        **dict.fromkeys(("timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns"), "time"),
        "timestamp with time zone": "zoned time",
        "date": "date",
    },
    hash_number=f"CAST('0x' || substr(md5({{text}}), 1, {HASH_DIGITS}) AS BIGINT)",
    is_one_of="{value} IN (SELECT unnest(CAST($1 AS {type}[])))",
    ordered_text="{text}",
)
POSTGRES = Dialect(
    kinds={
        **dict.fromkeys(("smallint", "integer", "bigint", "oid"), "integer"),
        **dict.fromkeys(("real", "double precision", "numeric"), "number"),
        "boolean": "bool",
        **dict.fromkeys(("text", "character varying", "character", "bpchar", "name", "uuid", "citext", "enum"), "text"),
        "timestamp without time zone": "time",
        "timestamp with time zone": "zoned time",
        "date": "date",
    },
    hash_number=f"CAST(CAST('x' || substr(md5(convert_to({{text}}, 'UTF8')), 1, {HASH_DIGITS}) "
    f"AS BIT({4 * HASH_DIGITS})) AS BIGINT)",
    is_one_of="{value} = ANY(CAST($1 AS {type}[]))",
    ordered_text='{text} COLLATE "C"',
)


@dataclass(frozen=True, slots=True)
class DatabaseColumn:
    """One column as the database describes it."""

    name: str
    type_name: str
    """The database's own word."""
    kind: Kind | None
    """None for a type that is not read, such as `INTEGER[]`."""

    @property
    def value(self) -> str:
        """The column in a statement, cast to the type that it is read as."""
        assert self.kind is not None, f"{self.name} is not read"
        return f"CAST({quoted(self.name)} AS {_TYPES[self.kind][0]})"

    @property
    def arrow_type(self) -> pyarrow.DataType:
        assert self.kind is not None, f"{self.name} is not read"
        arrow = import_extra("pyarrow")
        if self.kind == "zoned time":
            return arrow.timestamp("us", tz="UTC")
        return arrow.type_for_alias(_TYPES[self.kind][1])


def quoted(name: str) -> str:
    """A name as an identifier, whatever it is made of.

    Raises:
        QueryError: for a name that no database has: empty, or with a null character.
    """
    if not name or "\0" in name:
        raise QueryError(f"{name!r} is no name of a table or column")
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as a constant, where no parameter is taken.

    Raises:
        QueryError: for a null character, which no database takes.
    """
    if "\0" in text:
        raise QueryError(f"{text!r} holds a null character")
    return "'" + text.replace("'", "''") + "'"


def bracketed(sql: str) -> str:
    """SQL of a declaration in brackets."""
    return f"({sql.strip().removesuffix(';')}\n)"


def relation_of(table: str, query: str) -> str:
    """What stands after FROM: `schema.table` as identifiers, or the query in its place."""
    return f'{bracketed(query)} AS "source"' if query else ".".join(map(quoted, table.split(".")))


def statements_to_parse(relation: str, query: str, wheres: Sequence[str]) -> list[str]:
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


def select(selected: str, relation: str, wheres: Sequence[str]) -> str:
    """A SELECT of the rows where all of `wheres` hold."""
    conditions = " AND ".join(bracketed(where) for where in wheres if where.strip())
    return f"SELECT {selected} FROM {relation}{f' WHERE {conditions}' if conditions else ''}"


def select_columns(relation: str, columns: Sequence[DatabaseColumn], wheres: Sequence[str]) -> str:
    """Columns, cast to what they are read as."""
    return select(", ".join(f"{column.value} AS {quoted(column.name)}" for column in columns), relation, wheres)


def value_counts(dialect: Dialect, relation: str, column: DatabaseColumn, wheres: Sequence[str]) -> str:
    """Each value of a column and how many rows have it, in order."""
    known = select(f"{column.value} AS value, count(*) AS rows", relation, [*wheres, _is_known(column)])
    return f"{known} GROUP BY {column.value} ORDER BY {_ordered(dialect, column)}"


def group_sizes(relation: str, column: DatabaseColumn, wheres: Sequence[str]) -> str:
    """How many values a column has; of the rows of each, their sum, the sum of their squares, and the most."""
    sizes = f"{select('count(*) AS n', relation, [*wheres, _is_known(column)])} GROUP BY {column.value}"
    found = "count(*), coalesce(sum(n), 0), coalesce(sum(CAST(n AS FLOAT8) * n), 0), coalesce(max(n), 0)"
    return f"SELECT {found} FROM {bracketed(sizes)} AS sizes"


def _is_known(column: DatabaseColumn) -> str:
    return f"{quoted(column.name)} IS NOT NULL"


def in_partition(dialect: Dialect, column: DatabaseColumn, partition: Partition) -> tuple[str, list[Any]]:
    """The condition that a row is in a query chunk, and the values of its parameters `$1`, `$2`.

    Raises:
        PartitionError: for a column of numbers or times, which have no text that all databases share.
    """
    if column.kind not in _HASHED:
        raise PartitionError(
            f"{column.name} is {column.type_name}, which names no entity; partition by whole numbers, text, dates or "
            "true and false"
        )
    if partition.transformation == "exact_group":
        condition = dialect.is_one_of.format(value=column.value, type=_TYPES[column.kind][0])
        return condition, [list(partition.values)]
    number = dialect.hash_number.format(text=f"CAST({column.value} AS TEXT)")
    return f"{number} % CAST($1 AS BIGINT) = CAST($2 AS BIGINT)", [partition.count, partition.number]


def order_by(dialect: Dialect, columns: Mapping[str, DatabaseColumn], names: Sequence[str]) -> str:
    """The end of a statement that sorts; `-name` descends."""
    parts = (
        f"{_ordered(dialect, columns[name.removeprefix('-')])} {'DESC' if name.startswith('-') else 'ASC'} NULLS LAST"
        for name in names
    )
    return f" ORDER BY {', '.join(parts)}" if names else ""


def _ordered(dialect: Dialect, column: DatabaseColumn) -> str:
    return dialect.ordered_text.format(text=column.value) if column.kind == "text" else column.value
