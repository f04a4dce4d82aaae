"""Partitions: a table cut into query chunks, each row in exactly one, and all rows of an entity in the same one.

`hash_mod` puts an entity by the first 60 bits of the MD5 of its text (UTF-8; whole numbers in decimal, `true`/`false`,
dates as 2026-01-31), modulo the number of query chunks. The databases compute it themselves, all alike, and so does
`hash_number` here: nothing but the number of chunks needs to be known. Chunks are about equal in entities.
`exact_group` counts the rows of each entity first and deals them out, the largest first, always to the chunk with
fewest rows: about equal in rows, also where few entities hold most of them. The list of entities is then part of each
query, which suits up to about a million.

An entity that is null would be in no chunk or all of them, so it is refused. What is added between planning and
reading can be missed by `exact_group`: compare the source's `state`.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from kit.errors import PartitionError

if TYPE_CHECKING:
    from kit.data.tables.source import TableSource

Transformation = Literal["hash_mod", "exact_group"]
HASH_DIGITS = 15
"""Hexadecimal digits of the MD5 that are kept: what fits a signed integer of 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One query chunk of a table.

    Raises:
        PartitionError: for a number that is not below the count.
    """

    column: str
    transformation: Transformation
    number: int
    """0 .. count - 1"""
    count: int
    values: tuple[Any, ...] = field(default=(), repr=False)
    """`exact_group`: the entities of this one."""

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise PartitionError(f"query chunk {self.number} of {self.count}: numbers go from 0 to {self.count - 1}")


def hash_number(value: int | str | bool | date) -> int:
    """The number of 60 bits that `hash_mod` takes an entity by."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:HASH_DIGITS], 16)


def plan_partitions(source: TableSource, count: int) -> tuple[Partition, ...]:
    """`count` query chunks that together are the table, by the column and the transformation its declaration names.

    Some may be empty, when there are fewer entities than chunks.

    Raises:
        PartitionError: for a count below 1, and for nulls in the column, with how many.
    """
    if count < 1:
        raise PartitionError(f"{count} query chunks of {source.name}: there is at least 1")
    column = source.partition_column
    if not column:
        raise PartitionError(f"{source.name} has no partition_column; name one, or its main_entity_column")
    _refuse_nulls(source, column)
    groups = _groups(source, column, count) if source.partition_transformation == "exact_group" else [()] * count
    kind: Transformation = "exact_group" if source.partition_transformation == "exact_group" else "hash_mod"
    return tuple(
        Partition(column=column, transformation=kind, number=number, count=count, values=tuple(values))
        for number, values in enumerate(groups)
    )


def _refuse_nulls(source: TableSource, column: str) -> None:
    nulls = source.null_count(column)
    if nulls:
        raise PartitionError(
            f"{source.name}: {nulls:,} rows have no {column}, so they belong to no query chunk; leave them out with "
            f"where: '{column} IS NOT NULL', or name another partition_column"
        )


def _groups(source: TableSource, column: str, count: int) -> list[list[Any]]:
    """Entities in `count` groups of about equal rows: largest first, each to the lightest group (Graham's LPT rule).

    No group is more than 4/3 of the best possible largest one. Ties go by value, then by number: always the same.
    """
    groups: list[list[Any]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]
    for value, rows in sorted(source.value_counts(column), key=lambda pair: -pair[1]):
        weight, number = lightest[0]
        groups[number].append(value)
        heapq.heapreplace(lightest, (weight + rows, number))
    return groups
