"""Columns: what each column of a table is taken for, by its Arrow type unless it is said.

numeric (numbers: shifted and scaled, a null is flagged) · category (few values: a vocabulary, and a sketch) ·
identifier (many values: a sketch only) · text (a sketch of its words and pairs of words) · time (how long ago) · skip.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kit.data.tables.extras import needed
from kit.errors import ConfigError, Problem

if TYPE_CHECKING:
    import pyarrow

Kind = Literal["numeric", "category", "identifier", "text", "time", "skip"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FITTED: tuple[Kind, ...] = ("numeric", "category", "time")
"""Kinds that must be read once before they are features."""
SKETCHED: tuple[Kind, ...] = ("category", "identifier", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column and what it is taken for."""

    name: str
    kind: Kind
    type: str
    """Its Arrow type in words."""


def compute() -> Any:
    """pyarrow's functions on columns."""
    needed("pyarrow")
    return importlib.import_module("pyarrow.compute")


def choose_columns(
    schema: pyarrow.Schema, entity_column: str, kinds: Mapping[str, str], columns: Sequence[str] = ()
) -> tuple[Column, ...]:
    """The columns that become features, in the order of the schema.

    Args:
        schema: That of the table.
        entity_column: Says whose row it is, and is no feature.
        kinds: Kind by column, where the Arrow type does not say.
        columns: Columns to take; empty for all.

    Raises:
        ConfigError: for a column that is not there, a kind that is none or does not go with the type of its column,
            and when nothing is left.
    """
    problems = [*_unknown_columns(schema, "kinds", kinds), *_unknown_columns(schema, "columns", columns)]
    problems += [*_unknown_kinds(kinds)]
    if problems:
        raise ConfigError(problems)
    taken = [
        Column(name=item.name, kind=_kind(item, kinds), type=str(item.type))
        for item in schema
        if item.name != entity_column and (not columns or item.name in columns)
    ]
    found = tuple(column for column in taken if column.kind != "skip")
    if not found:
        raise ConfigError([Problem("columns", f"no column is left to make features of, beside {entity_column!r}")])
    return found


def kind_of_type(type_: pyarrow.DataType) -> Kind:
    """What a column of that Arrow type is taken for when nothing is said."""
    types = needed("pyarrow").types
    if types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_):
        return "numeric"
    if types.is_timestamp(type_) or types.is_date(type_):
        return "time"
    return "category" if types.is_boolean(type_) or types.is_string(type_) or types.is_large_string(type_) else "skip"


def _kind(field: pyarrow.Field, kinds: Mapping[str, str]) -> Kind:
    by_type = kind_of_type(field.type)
    said = next((kind for kind in KINDS if kind == kinds.get(field.name)), by_type)
    numeric = by_type == "numeric" or str(field.type) == "bool"
    fits = {"numeric": numeric, "time": by_type == "time", "text": str(field.type).endswith("string")}
    if not fits.get(said, True):
        raise ConfigError([Problem(f"kinds.{field.name}", f"a column of {field.type} is no {said}")])
    return said


def _unknown_columns(schema: pyarrow.Schema, path: str, names: Sequence[str] | Mapping[str, str]) -> list[Problem]:
    missing = [name for name in names if name not in schema.names]
    return [Problem(path, f"the table has no column {name!r}{_hint(name, schema.names)}") for name in missing]


def _unknown_kinds(kinds: Mapping[str, str]) -> list[Problem]:
    wrong = [(name, kind) for name, kind in kinds.items() if kind not in KINDS]
    return [
        Problem(f"kinds.{name}", f"{kind!r} is none of {', '.join(KINDS)}{_hint(kind, KINDS)}") for name, kind in wrong
    ]


def _hint(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}" if names is not KINDS else ""
