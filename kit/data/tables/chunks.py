"""Query chunks: how they are read and arranged, which batch their entities belong to, and what memory they take.

`EventTable` reads the query chunks of a source for one state of the data. A table that has changed since is refused
with the reason, at the start of an epoch, when a query chunk has other entities than were counted, and when a column
has another type: half of one table and half of another is no epoch.

An `EventChunk` is a query chunk in memory: whole entities in the order they are served, each with all its events by
date and then by every other column, so that the order depends on neither the database nor the number of query chunks.
It is built only when its query has come to its end. `ChunkBudget` bounds its memory: rows × row bytes as they arrive,
`ORDER_BYTES` a row for their order, and a copy of the rows that this rank serves; the first two go when the third is
made.

`EventPlan` says which batch of which rank each entity belongs to; the invariant is that of `kit.data.samples`. Pure
numpy; only the number of entities of each query chunk is kept. An epoch goes through the query chunks in an order drawn
from (seed, epoch), and through the entities of each in one drawn from (seed, epoch, query chunk).

`QueryModel` predicts the memory by the number of query chunks. One is in memory at a time; the largest has more rows
than the mean one, because entities are whole:

    largest = rows / count + z(count) × sqrt((1 - 1 / count) / count × Σ rows of each entity²)

where z is the expected largest of `count` normal draws (Blom 1958), and not less than the largest entity with its share
of the others; groups that are dealt out evenly (`exact_group`) have the mean, or the largest entity. The reader holds

    client = largest × (2 × row + widest column + 24) + reading

- twice the rows: as they came, and a copy in the order they are served;
- the widest column once more: columns are copied one by one, each first joined into one piece;
- 24 bytes: a row's place in order, twice, and the sum that leads to it;
- 160 bytes for each entity where they are dealt out: they are counted and listed in Python.

Reading is what the way of reading needs beside the rows, whatever their number:

- embedded database: 1.5 MiB, 2.2 MiB for each thread, and what the database says of itself; from Parquet each thread
  unpacks columns in memory that the database does not count: 0.2 MiB a column, and a tenth of what it does count;
- server: 4096 rows as Python's objects and as the fields of an answer; and, for more rows than these, 2 MiB, the piece
  in which Arrow takes memory from the system (an embedded database's own leaves that much behind).

A database that streams holds what it has read and not yet sent, whatever the number of query chunks; one that sorts,
groups or hands over its answer whole holds the rows of a query chunk, up to a limit beyond which it takes its disk.
Which of them it is shows in measurements: `DatabaseMemory` is a line through them. Before any it is not known, and
left out of what an embedded one needs.

Known error, by `benchmarks/queries.py`: median 13 %, worst 29 %; what needs less than 4 MiB from a server is put up to
60 % too high, as Python has some at hand. The first rows stand for all: texts that grow with time mislead it.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kit.chunks.requests import largest_normal
from kit.data.epochs import segments_after
from kit.data.places import generator_of
from kit.data.samples import EpochPlan
from kit.data.tables.source import Query, checked, expected_schema, import_extra, plan_partitions, refuse_difference
from kit.errors import ConfigError, PartitionError, Problem, QueryError
from kit.machine.processes import give_memory_back
from kit.units import format_bytes

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import TableSource

Numbers = NDArray[np.int64]

ORDER_BYTES = 24
"""A row's place in order, twice (8 bytes each), and 8 for the sum that leads to it."""
FETCHED_ROWS = 4096
"""Most rows of one answer of a server: as Python's objects they are ten times as large, and more are no faster."""
_MIB = 1 << 20
_COPIES = 2
_ENTITY_BYTES = 160
_INSTANCE_BYTES, _THREAD_BYTES, _UNPACKED_BYTES = 1.5 * _MIB, 2.2 * _MIB, 0.2 * _MIB
_UNPACKED_FRACTION = 0.1
_PIECE_BYTES = 2 * _MIB
_MOST = 65_536
_STREAMING = 0.8
"""Least memory over most, from which a database counts as one that needs the same for any number of query chunks."""
_AT_LIMIT = 0.9


# -- a query chunk in memory


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


class Stopped(Exception):  # noqa: N818 - not an error: nobody needs the rest
    """A read that was given up."""


class ChunkBudget:
    """Memory for query chunks of one pass, in bytes; a read that would not fit beside what is in use waits.

    Args:
        allowed_bytes: What both may take together.
        name: Of the table, for the error.
        advice: What to do when one query chunk alone does not fit.
    """

    def __init__(self, allowed_bytes: int, name: str, advice: str) -> None:
        self.allowed_bytes, self._name, self._advice = allowed_bytes, name, advice
        self._changed = threading.Condition()
        self._used_bytes = 0
        self._stopped = False

    def use(self, used_bytes: int) -> None:
        """What is in use from now on; 0 for nothing."""
        with self._changed:
            self._used_bytes = used_bytes
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait_for(self, needed_bytes: int) -> None:
        """Return when so much fits beside what is in use.

        Raises:
            ConfigError: when it never will.
            Stopped: when nobody waits for the rows any more.
        """
        with self._changed:
            if needed_bytes > self.allowed_bytes and not self._stopped:
                message = (
                    f"{format_bytes(self.allowed_bytes)} cannot hold a query chunk of {self._name}: it needs more than "
                    f"{format_bytes(needed_bytes - 1)}; {self._advice}"
                )
                raise ConfigError([Problem("queries.memory_bytes", message)])
            self._changed.wait_for(lambda: self._stopped or self._used_bytes + needed_bytes <= self.allowed_bytes)
            if self._stopped:
                raise Stopped


def gather(
    batches: Iterable[pyarrow.RecordBatch], schema: pyarrow.Schema, budget: ChunkBudget | None = None
) -> pyarrow.Table:
    """All rows of a query, once it has come to its end.

    Raises:
        ConfigError: when the budget cannot hold them and a copy.
        Stopped: when the budget was stopped.
    """
    gathered: list[Any] = []
    rows = size = 0
    for batch in batches:
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if budget is not None:
            budget.wait_for(2 * size + ORDER_BYTES * rows)
        gathered.append(batch)
    return import_extra("pyarrow").Table.from_batches(gathered) if gathered else schema.empty_table()


def arrange(events: pyarrow.Table, entity: str, date: str = "") -> tuple[Numbers, Numbers]:
    """The order of rows that puts the events of each entity together, entities by their value.

    Args:
        events: Whole entities, in any order.
        entity: Column that identifies entities.
        date: Column that events are in order of; the others decide among equals.

    Returns:
        Row numbers (rows,), and where each entity begins in them (entities + 1,).
    """
    others = [name for name in events.column_names if name not in (entity, date)]
    names = [entity, *[date] * (date in events.column_names and date != entity), *others]
    compute = import_extra("pyarrow.compute")
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
    served = events.take(import_extra("pyarrow").array(rows[begins + np.arange(len(begins))])).combine_chunks()
    return EventChunk(served, np.concatenate([[0], ends]).astype(np.int64), events.nbytes, events.num_rows)


def release_memory() -> None:
    """Hand the memory of rows that are gone to the system, which Arrow and the allocator would keep in pieces."""
    import_extra("pyarrow").default_memory_pool().release_unused()
    give_memory_back()


# -- the query chunks of a table


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
        QueryError: when the source cannot be queried.
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
        self.advice = (
            f"use more than {query_chunks} of queries.load_query_chunks, or more queries.memory_bytes; "
            "kit.data.measure_queries measures what each number needs"
        )
        """What to do when a query chunk does not fit."""

    def read(self, number: int) -> Generator[pyarrow.RecordBatch, None, None]:
        """The rows of one query chunk.

        Raises:
            QueryError: when the query fails, or its columns are not those that were planned.
        """
        query = replace(self.query, partition=self.partitions[number])
        return checked(self.source.read(query), self.schema, self.name)

    def entities(self) -> tuple[int, ...]:
        """How many entities each query chunk has, counted in a read of their column alone.

        Raises:
            PartitionError: when one is in two query chunks, which another partition column than theirs can do.
        """
        compute, concat = import_extra("pyarrow.compute"), import_extra("pyarrow").concat_arrays
        apart = len(self.partitions) == 1 or self.source.partition_column == self.entity
        seen: set[Any] = set()
        counts = []
        for partition in self.partitions:
            known: Any = None
            for batch in self.source.read(replace(self.query, columns=(self.entity,), partition=partition)):
                found = compute.unique(batch.column(self.entity))
                known = found if known is None else compute.unique(concat([known, found]))
                del batch
            if known is not None and known.null_count:
                raise PartitionError(
                    f"{self.name}: rows without {self.entity} belong to nobody; leave them out by where"
                )
            values = [] if known is None or apart else known.to_pylist()
            twice = next((value for value in values if value in seen), None)
            if twice is not None:
                raise PartitionError(
                    f"{self.name}: {self.entity} {twice!r} has rows in more than one query chunk, because they are cut "
                    f"by {self.source.partition_column}; take {self.entity} as partition_column, or 1 query chunk"
                )
            seen.update(values)
            counts.append(0 if known is None else len(known))
        return tuple(counts)

    def identity(self) -> Mapping[str, str]:
        """Identifies these rows, in plain text."""
        columns = ", ".join(f"{field.name} {field.type}" for field in self.schema)
        table = hashlib.sha256(self.source.identity().encode()).hexdigest()[:16]
        return {
            "name": self.name, "table": table, "state": self.state, "schema": columns, "query": self.query.where,
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


# -- batches

_PATHS = {"seed": "training.seed", "shuffle": "loader.shuffle", "drop_last": "loader.drop_last"}
_CHANGES = {
    "table": "is another table",
    "state": "has changed",
    "schema": "has other columns",
    "query": "is read with another condition",
}
"""What is read, and what it means when it differs."""


@dataclass(frozen=True, kw_only=True)
class EventPlan(EpochPlan):
    """The entities of every epoch, which are its samples, and their batches."""

    entities: tuple[int, ...]
    """Of each query chunk."""
    table: Mapping[str, str]
    """What is read: `name`, and what identifies its rows (see `_CHANGES`)."""
    validation_fraction: float = 0.0
    validates: bool = False
    """Whether the entities are those kept for validation, the last of each query chunk, instead of the others."""

    def __post_init__(self) -> None:
        if not self.batches_per_epoch:
            name = self.table.get("name", "the table")
            if not any(self.entities):
                message = f"{name} has no rows to read: it is empty, or its where keeps none"
                raise ConfigError([Problem("table", message)])
            least = self.global_batch_size if self.drop_last else self.world_size
            way_out = (
                "use a smaller batch, fewer ranks, or keep the last batch" if self.drop_last else "use fewer ranks"
            )
            message = f"{name} has {self.samples} entities, and a step needs at least {least}; {way_out}"
            raise ConfigError([Problem("loader.batch_size", message)])

    @property
    @override
    def samples(self) -> int:
        return sum(map(len, self.parts))

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """The entities of each query chunk that are served, by their number among its values in order."""
        cuts = [count - round(count * self.validation_fraction) for count in self.entities]
        pairs = zip(cuts, self.entities, strict=True)
        return tuple(range(cut, count) if self.validates else range(cut) for cut, count in pairs)

    def chunk_order(self, epoch: int) -> Numbers:
        """The query chunks in the order they are read."""
        count = len(self.entities)
        return generator_of(self.seed, epoch, 0).permutation(count) if self.shuffle else np.arange(count)

    def entity_order(self, epoch: int, chunk: int) -> Numbers:
        """The entities of a query chunk, by their number among its values in order, in the order they are served."""
        part = np.arange(self.parts[chunk].start, self.parts[chunk].stop)
        return generator_of(self.seed, epoch, chunk + 1).permutation(part) if self.shuffle else part

    def shares(self, epoch: int, first_step: int, rank: int) -> Iterator[tuple[int, Numbers]]:
        """(query chunk, entities in it) that `rank` is served from `first_step` on; none that it needs nothing of."""
        begin, last = 0, self.batches_per_epoch - 1
        for chunk in self.chunk_order(epoch).tolist():
            end = begin + len(self.parts[chunk])
            parts = [np.arange(0)]
            likely = self.steps.before + max(0, begin - self.steps.samples_before) // self.global_batch_size
            for step in range(max(first_step, min(last, likely)), last + 1):
                run = self.steps.positions(step, rank)
                if run.start >= end:
                    break
                parts.append(np.arange(max(run.start, begin), min(run.stop, end)))
            places = np.concatenate(parts) - begin
            if len(places):
                yield chunk, self.entity_order(epoch, chunk)[places]
            begin = end

    # -- resuming

    @override
    def identity(self) -> dict[str, Any]:
        return {
            "entities": [*map(len, self.parts)], "table": dict(self.table), "batch_size": self.batch_size,
            "world_size": self.world_size, "seed": self.seed, "shuffle": self.shuffle, "drop_last": self.drop_last,
            "earlier": [*map(asdict, self.earlier)],
        }  # fmt: skip

    @override
    def resume(self, other: Mapping[str, Any], step: int) -> Self:
        problems = [*self._differences(other)]
        if problems:
            raise ConfigError(problems)
        if not step:
            return self
        return replace(self, earlier=segments_after(other, step, (self.batch_size, self.world_size, 1)))

    def _differences(self, other: Mapping[str, Any]) -> Iterator[Problem]:
        theirs, name = other["table"], self.table.get("name", "the table")
        reasons = [words for key, words in _CHANGES.items() if theirs.get(key) != self.table.get(key)]
        if reasons:
            seen = "so it is unknown which of its entities were seen already"
            way_out = "begin the next epoch with set_epoch, or the run anew"
            yield Problem("data", f"{name} {' and '.join(reasons)} since the state was taken, {seen}; {way_out}")
        elif len(other["entities"]) != len(self.entities):
            now = f"this epoch has {len(self.entities)}"
            message = f"the state was taken with {len(other['entities'])} query chunks, {now}: another order"
            yield Problem("queries.load_query_chunks", f"{message}; use {len(other['entities'])} until the epoch ends")
        elif other["entities"] != [*map(len, self.parts)]:
            yield Problem("data", f"the entities of {name} are divided in another way than when the state was taken")
        for key, path in _PATHS.items():
            mine = getattr(self, key)
            if other[key] != mine:
                yield Problem(path, f"was {other[key]} when the state was taken and is {mine}; use {other[key]}")


# -- memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseMemory:
    """What a database needs by the number of query chunks."""

    fixed_bytes: float
    """For any query."""
    rows_bytes: float = 0.0
    """On top, for all rows in one query."""
    most_bytes: float = math.inf
    """A limit that it keeps to."""

    def needed_bytes(self, count: int) -> int:
        """At its highest."""
        return round(min(self.most_bytes, self.fixed_bytes + self.rows_bytes / count))


def database_memory(measured: Mapping[int, int]) -> DatabaseMemory | None:
    """The line `fixed + rows / count` through what was measured, by number of query chunks; None for nothing.

    About the same for all is no line: a database that streams. Where the fewest query chunks all need the most, a limit
    holds them, and the line begins at the last of these.
    """
    if not measured:
        return None
    counts = sorted(measured)
    most = max(measured.values())
    if min(measured.values()) >= _STREAMING * most or measured[counts[-1]] >= measured[counts[0]]:
        return DatabaseMemory(fixed_bytes=fmean(measured.values()))
    at_limit = [count for count in counts if measured[count] >= _AT_LIMIT * most]
    first, last = at_limit[-1] if at_limit[-1] < counts[-1] else counts[0], counts[-1]
    rows = (measured[first] - measured[last]) / (1 / first - 1 / last)
    rows = min(rows, measured[first] * first)
    fixed = measured[first] - rows / first
    return DatabaseMemory(fixed_bytes=fixed, rows_bytes=rows, most_bytes=most if len(at_limit) > 1 else math.inf)


def embedded_bytes(threads: int, columns: int = 0) -> float:
    """What an embedded database takes that it does not count; `columns` of Parquet files, which it unpacks."""
    return _INSTANCE_BYTES + threads * (_THREAD_BYTES + columns * _UNPACKED_BYTES)


def within(needed_bytes: int | None, allowed_bytes: int | None) -> bool:
    """Whether memory stays within what is allowed; None is not known, or not limited."""
    return needed_bytes is None or allowed_bytes is None or needed_bytes <= allowed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryModel:
    """Memory of reading one table, by the number of query chunks."""

    rows: int
    row_bytes: float
    """Of a row in memory, on average."""
    widest_bytes: float = 0.0
    """Of it in its widest column."""
    squares: float = 0.0
    """The sum of the squares of the rows of each entity; at least the rows."""
    largest_entity_rows: int = 1
    listed_entities: int = 0
    """Entities that are dealt out to query chunks of about equal rows; 0 where their hash decides."""
    reading_bytes: float = 0.0
    """What the way of reading needs beside the rows."""
    object_bytes: float = 0.0
    """Of a row as Python's objects and in the server's answer, where it comes by these."""
    database: DatabaseMemory | None = None
    """None before it is measured."""
    shares_process: bool = False
    """The database works inside the reader's process, whose memory then has both."""
    unpacking_threads: int = 0
    """Threads that each unpack a part of what the database counts, beside it."""

    def rows_at_once(self, count: int) -> int:
        """Rows of the largest query chunk."""
        mean, biggest = self.rows / count, self.largest_entity_rows
        if self.listed_entities:
            return min(self.rows, math.ceil(max(mean, biggest)))
        spread = math.sqrt(max(self.squares, self.rows) * (1 - 1 / count) / count)
        highest = mean + largest_normal(count) * spread
        return min(self.rows, math.ceil(max(highest, biggest + (self.rows - biggest) / count)))

    def client_bytes(self, count: int) -> int:
        """What the reader's process needs at its highest, on top of its libraries."""
        rows = self.rows_at_once(count)
        own = rows * (_COPIES * self.row_bytes + self.widest_bytes + ORDER_BYTES) + self.reading_bytes
        own += self.listed_entities * _ENTITY_BYTES
        if self.object_bytes:
            own += self.object_bytes * min(rows, FETCHED_ROWS) + _PIECE_BYTES * (rows > FETCHED_ROWS)
        if self.shares_process and self.database is not None:
            own += self.database.needed_bytes(count) * (1 + _UNPACKED_FRACTION * self.unpacking_threads)
        return round(own)

    def database_bytes(self, count: int) -> int | None:
        """What the database needs at its highest; None where it is not known."""
        return None if self.database is None else self.database.needed_bytes(count)

    def smallest(self, client_bytes: int | None, database_bytes: int | None) -> int | None:
        """The fewest query chunks that need no more; None when none does."""
        counts = range(1, max(1, min(self.rows, _MOST)) + 1)  # of which more never need more

        def fits(count: int) -> bool:
            client, database = self.client_bytes(count), self.database_bytes(count)
            return within(client, client_bytes) and within(database, database_bytes)

        place = bisect.bisect_left(counts, True, key=fits)
        return counts[place] if place < len(counts) else None
