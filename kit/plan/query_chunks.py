"""How much memory a table takes when it is read in query chunks, and how many stay within what is allowed.

One query chunk is in memory at a time, with `rows / count` rows when entities divide it evenly. The reader holds its
rows, the order they are put in, and a copy in that order:

    client = ceil(rows / count) × (2 × row bytes + 24) + batch rows × row bytes + 8 MiB

The 8 MiB are what allocators and the conversion of batches keep: measured, with 1 to 8 query chunks of 600,000 rows. A
database that is embedded adds its own memory.

A database that streams holds what it has read and not yet sent, whatever the number of query chunks; one that sorts,
groups or hands over its answer whole holds the rows of a query chunk. Which of both it is shows in two measurements, so
its memory is a line through them, `fixed + per query chunk / count`, fitted on the first and the last and predicted for
those between. Before anything is measured it is not known.

Known error: within a tenth on even tables. Entities of very different size make the largest query chunk larger than the
mean one; text of very different length makes the first rows a poor sample.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

ORDER_BYTES = 24
"""A row's place in order, twice (8 bytes each), and 8 for the sum that leads to it."""
_COPIES = 2
_KEPT_BYTES = 8 << 20
_MOST = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryModel:
    """Memory of reading one table, by the number of query chunks."""

    rows: int
    row_bytes: float
    """Of a row in memory, on average."""
    batch_rows: int
    """Rows that arrive at a time."""
    database_fixed_bytes: float | None = None
    """What the database needs for any query; None before it is measured."""
    database_rows_bytes: float = 0.0
    """What it needs on top for all rows in one query."""
    shares_process: bool = False
    """The database works inside the reader's process, whose memory then has both."""

    def rows_at_once(self, count: int) -> int:
        return math.ceil(self.rows / count)

    def client_bytes(self, count: int) -> int:
        """What the reader's process needs at its highest, on top of its libraries."""
        rows = self.rows_at_once(count)
        arriving = min(self.batch_rows, rows) * self.row_bytes
        own = rows * (_COPIES * self.row_bytes + ORDER_BYTES) + arriving + _KEPT_BYTES
        shared = self.database_bytes(count) if self.shares_process else None
        return round(own + (shared or 0))

    def database_bytes(self, count: int) -> int | None:
        """What the database needs at its highest; None where it is not known."""
        if self.database_fixed_bytes is None:
            return None
        return round(self.database_fixed_bytes + self.database_rows_bytes / count)

    def smallest(self, client_bytes: int | None, database_bytes: int | None) -> int | None:
        """The fewest query chunks that need no more; None when none does."""
        counts = range(1, max(1, min(self.rows, _MOST)) + 1)  # of which more never need more
        place = bisect.bisect_left(counts, True, key=lambda count: self._fits(count, client_bytes, database_bytes))
        return counts[place] if place < len(counts) else None

    def _fits(self, count: int, client_bytes: int | None, database_bytes: int | None) -> bool:
        pairs = ((self.client_bytes(count), client_bytes), (self.database_bytes(count), database_bytes))
        return all(needed is None or allowed is None or needed <= allowed for needed, allowed in pairs)


def line_through(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """`(fixed, per query chunk)` of the line through the first and the last of (count, bytes); never below zero."""
    (few, most), (many, least) = points[0], points[-1]
    if few == many:
        return float(most), 0.0
    slope = max(0.0, (most - least) / (1 / few - 1 / many))
    slope = min(slope, most * few)
    return most - slope / few, slope
