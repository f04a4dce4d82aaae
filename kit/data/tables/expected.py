"""What a query has to give: the columns asked for, with the types its source has; anything else is a changed schema.

Batches pass through unchanged, each looked at before it is handed on. Types are compared, not nullability or metadata,
which differ between a database and a file of its rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from kit.data.tables.extras import needed
from kit.errors import SchemaChangedError

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import Query, TableSource


def expected_schema(source: TableSource, query: Query) -> pyarrow.Schema:
    """The columns of the query in its order, with the types of the source."""
    schema = source.schema()
    names = query.columns or tuple(schema.names)
    fields = [schema.field(name) for name in names if name in schema.names]  # an unknown one is refused by the source
    return needed("pyarrow").schema(fields)


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
    mine, theirs = _columns(expected), _columns(found)
    if mine == theirs:
        return
    differing = [column for column in [*mine, *theirs] if mine.get(column) != theirs.get(column)]
    column = differing[0] if differing else next(iter(mine), "")
    was, now = mine.get(column, "not there"), theirs.get(column, "not there")
    what = f"column {column!r} was {was} and is {now}" if differing else f"columns were {[*mine]} and are {[*theirs]}"
    raise SchemaChangedError(
        f"{name}: {what}: the schema has changed since the table was opened; open it again, and fit features anew"
    )


def _columns(schema: pyarrow.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}
