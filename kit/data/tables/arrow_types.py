"""Types: the columns of every database as the same seven Arrow types, so that a change of database changes no batch.

Whole numbers are int64, all other numbers float64 (decimals too: exact to about 15 digits), text and what stands for it
(enumerations, UUIDs) string, times timestamp[us] (with a zone: UTC), dates date32. The database itself casts, so what
does not fit (a whole number beyond 2^63) is its error, never a wrong value. Anything else (blobs, lists, documents,
intervals) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kit.data.tables.extras import needed

if TYPE_CHECKING:
    import pyarrow

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
class Column:
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
