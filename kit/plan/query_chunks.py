"""How much memory a table takes when it is read in query chunks, and how many stay within what is allowed.

One query chunk is in memory at a time. Its largest has more rows than the mean one, because entities are whole:

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
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist, fmean

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
    held = [count for count in counts if measured[count] >= _AT_LIMIT * most]
    first, last = held[-1] if held[-1] < counts[-1] else counts[0], counts[-1]
    rows = (measured[first] - measured[last]) / (1 / first - 1 / last)
    rows = min(rows, measured[first] * first)
    fixed = measured[first] - rows / first
    return DatabaseMemory(fixed_bytes=fixed, rows_bytes=rows, most_bytes=most if len(held) > 1 else math.inf)


def embedded_bytes(threads: int, columns: int = 0) -> float:
    """What an embedded database takes that it does not count; `columns` of Parquet files, which it unpacks."""
    return _INSTANCE_BYTES + threads * (_THREAD_BYTES + columns * _UNPACKED_BYTES)


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
        highest = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
        return min(self.rows, math.ceil(max(mean + highest * spread, biggest + (self.rows - biggest) / count)))

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
        place = bisect.bisect_left(counts, True, key=lambda count: self._fits(count, client_bytes, database_bytes))
        return counts[place] if place < len(counts) else None

    def _fits(self, count: int, client_bytes: int | None, database_bytes: int | None) -> bool:
        pairs = ((self.client_bytes(count), client_bytes), (self.database_bytes(count), database_bytes))
        return all(needed is None or allowed is None or needed <= allowed for needed, allowed in pairs)
