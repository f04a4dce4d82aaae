"""A query chunk in memory: whole entities, each with all its events in one order, in the order they are served.

The order of events within an entity is by date and then by every other column, so it depends on neither the database
nor the number of query chunks. A chunk is built only when its query has come to its end: one that fails half-way leaves
nothing.

Memory: rows × row bytes as they arrive, 8 bytes a row for their order, and a copy of the rows that this rank serves;
the first two go when the third is made. `Room` bounds it, with the chunk that is being used counted too.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.data.tables.extras import needed
from kit.errors import ConfigError, Problem
from kit.plan.query_chunks import ORDER_BYTES
from kit.processes import give_memory_back
from kit.units import format_bytes

if TYPE_CHECKING:
    import pyarrow

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventChunk:
    """Entities of a query chunk in the order they are served."""

    events: pyarrow.Table
    offsets: Numbers
    """Where the events of each entity begin, and where the last end: (entities + 1,)."""
    read_bytes: int = 0
    """Bytes of all rows as they arrived, those of other ranks too."""
    read_rows: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def part(self, first: int, stop: int) -> pyarrow.Table:
        """The events of entities `first` to `stop`, without a copy."""
        begin, end = int(self.offsets[first]), int(self.offsets[stop])
        return self.events.slice(begin, end - begin)


class Stopped(Exception):  # noqa: N818 - not an error: nobody wants the rest
    """A read that was given up."""


class Room:
    """Memory for query chunks of one pass, in bytes; a read that would not fit beside what is held waits for it to go.

    Args:
        allowed_bytes: What both may take together.
        name: Of the table, for the error.
        advice: What to do when one query chunk alone does not fit.
    """

    def __init__(self, allowed_bytes: int, name: str, advice: str) -> None:
        self.allowed_bytes, self._name, self._advice = allowed_bytes, name, advice
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._stopped = False

    def hold(self, held_bytes: int) -> None:
        """What is being used from now on; 0 for nothing."""
        with self._changed:
            self._held_bytes = held_bytes
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def ask(self, needed_bytes: int) -> None:
        """Return when there is room for so much.

        Raises:
            ConfigError: when there never will be.
            Stopped: when nobody waits for the rows any more.
        """
        with self._changed:
            if needed_bytes > self.allowed_bytes and not self._stopped:
                raise ConfigError([Problem("queries.memory_bytes", self._too_little(needed_bytes))])
            self._changed.wait_for(lambda: self._stopped or self._held_bytes + needed_bytes <= self.allowed_bytes)
            if self._stopped:
                raise Stopped

    def _too_little(self, needed_bytes: int) -> str:
        return (
            f"{format_bytes(self.allowed_bytes)} cannot hold a query chunk of {self._name}: it needs more than "
            f"{format_bytes(needed_bytes - 1)}; {self._advice}"
        )


def gather(batches: Iterable[pyarrow.RecordBatch], schema: pyarrow.Schema, room: Room | None = None) -> pyarrow.Table:
    """All rows of a query, once it has come to its end.

    Raises:
        ConfigError: when `room` cannot hold them and a copy.
        Stopped: when the room was closed.
    """
    held: list[Any] = []
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if room is not None:
            room.ask(2 * size + ORDER_BYTES * rows)
        held.append(batch)
    table = needed("pyarrow").Table
    return table.from_batches(held) if held else schema.empty_table()


def arrange(events: pyarrow.Table, entity: str, date: str = "") -> tuple[Numbers, Numbers]:
    """The order of rows that puts the events of each entity together, entities by their value.

    Args:
        events: Whole entities, in any order.
        entity: Column that tells entities apart.
        date: Column that events are in order of; the others decide among equals.

    Returns:
        Row numbers (rows,), and where each entity begins in them (entities + 1,).
    """
    others = [name for name in events.column_names if name not in (entity, date)]
    names = [entity, *[date] * (date in events.column_names and date != entity), *others]
    compute = _compute()
    rows = compute.sort_indices(events, sort_keys=[(name, "ascending") for name in names])
    values = events.column(entity).take(rows).combine_chunks()
    if not len(values):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    changes = compute.not_equal(values.slice(1), values.slice(0, len(values) - 1))
    begins = np.flatnonzero(np.asarray(changes.to_numpy(zero_copy_only=False), dtype=bool)) + 1
    return rows.to_numpy().view(np.int64), np.concatenate([[0], begins, [len(values)]]).astype(np.int64)


def serve(events: pyarrow.Table, rows: Numbers, offsets: Numbers, chosen: Numbers) -> EventChunk:
    """The chosen entities, by number, in this order, with their events; see `arrange`."""
    lengths = np.diff(offsets)[chosen]
    ends = np.cumsum(lengths)
    begins = np.repeat(offsets[chosen] - (ends - lengths), lengths)
    wanted = rows[begins + np.arange(len(begins))]
    served = events.take(needed("pyarrow").array(wanted)).combine_chunks()
    return EventChunk(served, np.concatenate([[0], ends]).astype(np.int64), events.nbytes, events.num_rows)


def _compute() -> Any:
    needed("pyarrow")
    return importlib.import_module("pyarrow.compute")


def let_go() -> None:
    """Hand the memory of rows that are gone to the system, which Arrow and the allocator would keep in pieces."""
    needed("pyarrow").default_memory_pool().release_unused()
    give_memory_back()


def joined(parts: list[pyarrow.Table]) -> pyarrow.Table:
    return parts[0] if len(parts) == 1 else needed("pyarrow").concat_tables(parts)


def copied(events: pyarrow.Table) -> pyarrow.Table:
    """The same rows in memory of their own, so that what they were a part of can go."""
    return events.take(needed("pyarrow").array(np.arange(events.num_rows)))


def distinct(batches: Iterable[pyarrow.RecordBatch], column: str) -> pyarrow.Array:
    """The different values of a column, in the order they first come."""
    pyarrow, compute = needed("pyarrow"), _compute()
    known: Any = None
    for values in _batches_of(batches, column):
        found = compute.unique(values)
        known = found if known is None else compute.unique(pyarrow.concat_arrays([known, found]))
    return pyarrow.array([]) if known is None else known


def _batches_of(batches: Iterable[pyarrow.RecordBatch], column: str) -> Iterator[pyarrow.Array]:
    for batch in batches:
        yield batch.column(column)
