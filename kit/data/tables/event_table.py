"""The table behind batches of entities: its query chunks, its entities counted, and a watch over what may change.

Everything is planned for one state of the data. A table that has changed since is refused with the reason, at the
start of an epoch, when a query chunk has other entities than were counted, and when a column has another type: half of
one table and half of another is no epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kit.data.tables.event_chunks import distinct
from kit.data.tables.expected import checked, expected_schema, refuse_difference
from kit.data.tables.partition import plan_partitions
from kit.data.tables.source import Query
from kit.errors import PartitionError, QueryError
from kit.units import format_count

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import TableSource


class EventTable:
    """Query chunks of a source.

    Args:
        source: What is read, with or without a cache before it.
        columns: Names to read, the entity's among them; empty for all.
        where: A condition on rows.
        query_chunks: How many there are to be.
        batch_rows: Most rows that come from the database at a time.

    Raises:
        PartitionError: for nulls in the partition column.
        QueryError: when the source cannot be asked.
    """

    def __init__(
        self, source: TableSource, *, columns: Sequence[str] = (), where: str = "", query_chunks: int, batch_rows: int
    ) -> None:
        self.source, self.name = source, source.name
        self.entity, self.date = source.main_entity_column, source.date_column
        self.state = source.state()
        self.query = Query(columns=tuple(columns), where=where, batch_rows=batch_rows)
        self.schema = expected_schema(source, self.query)
        self.partitions = plan_partitions(source, query_chunks)

    def read(self, number: int) -> Generator[pyarrow.RecordBatch, None, None]:
        """The rows of one query chunk.

        Raises:
            QueryError: when the query fails, or its columns are not those that were planned.
        """
        query = Query(
            columns=self.query.columns, where=self.query.where, batch_rows=self.query.batch_rows,
            partition=self.partitions[number],
        )  # fmt: skip
        return checked(self.source.read(query), self.schema, self.name)

    def entities(self) -> tuple[int, ...]:
        """How many entities each query chunk has, counted in a read of their column alone.

        Raises:
            PartitionError: when one is in two query chunks, which another partition column than theirs can do.
        """
        seen: set[Any] | None = None if self._is_by_entity else set()
        counts = []
        for partition in self.partitions:
            query = Query(
                columns=(self.entity,), where=self.query.where, batch_rows=self.query.batch_rows, partition=partition
            )
            values = distinct(self.source.read(query), self.entity)
            if values.null_count:
                raise PartitionError(
                    f"{self.name}: rows without {self.entity} belong to nobody; leave them out by where"
                )
            if seen is not None:
                self._add(seen, values.to_pylist())
            counts.append(len(values))
        return tuple(counts)

    @property
    def _is_by_entity(self) -> bool:
        return len(self.partitions) == 1 or self.source.partition_column == self.entity

    def _add(self, seen: set[Any], values: list[Any]) -> None:
        twice = next((value for value in values if value in seen), None)
        if twice is not None:
            raise PartitionError(
                f"{self.name}: {self.entity} {twice!r} has rows in more than one query chunk, because they are cut by "
                f"{self.source.partition_column}; take {self.entity} as partition_column, or 1 query chunk"
            )
        seen.update(values)

    def identity(self) -> Mapping[str, str]:
        """What tells these rows from others, in plain text."""
        columns = ", ".join(f"{field.name} {field.type}" for field in self.schema)
        return {
            "name": self.name, "table": _short(self.source.identity()), "state": self.state, "schema": columns,
            "query": self.query.where,
        }  # fmt: skip

    def refuse_change(self) -> None:
        """Raises: QueryError: when the data are not those that batches were planned for."""
        refuse_difference(self.schema, expected_schema(self.source, self.query), self.name)
        state = self.source.state()
        if state != self.state:
            raise QueryError(
                f"{self.name} has changed since its batches were planned (state {self.state}, now {state}): an epoch "
                f"is of one state of the data; make the loader anew, as a Trainer does with "
                "reload_dataloaders_every_n_epochs"
            )

    def refuse_other_entities(self, number: int, found: int, planned: int) -> None:
        """Raises: QueryError: when a query chunk has other entities than were counted."""
        if found != planned:
            raise QueryError(
                f"{self.name}: query chunk {number + 1} of {len(self.partitions)} has {format_count(found)} entities, "
                f"and {format_count(planned)} when batches were planned: the table has changed; make the loader anew"
            )

    @property
    def advice(self) -> str:
        """What to do when a query chunk does not fit."""
        more = f"use more than {len(self.partitions)} of queries.load_query_chunks, or more queries.memory_bytes"
        return f"{more}; kit.measure_queries tells what each number needs"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
