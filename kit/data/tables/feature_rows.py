"""FeatureRows: the events that features are made of, column by column, and whose each of them is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.tables.extras import needed
from kit.data.tables.hashing import Hashes, Rows, hashes_of, word_hashes
from kit.data.tables.statistics import FittedColumn, moments_of, words_of
from kit.errors import PartitionError

Mask = NDArray[np.bool_]
_EARLIEST = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRows:
    """Rows of a table, and whose each is."""

    table: Any
    entities: Rows
    """(row,), from 0 to count - 1."""
    count: int
    """Entities."""
    ids: Rows
    """(entity,)"""

    @classmethod
    def of(cls, events: Any, entity_column: str) -> FeatureRows:
        """Those of a table or a record batch.

        Raises:
            PartitionError: for a row without an entity.
        """
        pyarrow = needed("pyarrow")
        table = pyarrow.table(events) if isinstance(events, pyarrow.RecordBatch) else events
        ids = _flat(table.column(entity_column))
        if ids.null_count:
            raise PartitionError(
                f"{ids.null_count:,} of {len(ids):,} events have no {entity_column}, so they are nobody's; "
                f"leave them out: where: {entity_column} IS NOT NULL"
            )
        encoded = ids.dictionary_encode()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        count = len(encoded.dictionary)
        return cls(table=table, entities=codes, count=count, ids=_ids(encoded.dictionary))

    def only(self, mask: Mask) -> FeatureRows:
        """Some of the rows; entities keep their places."""
        table = self.table.filter(needed("pyarrow").array(mask))
        return dataclasses.replace(self, table=table, entities=self.entities[mask])

    def column(self, name: str) -> Any:
        """A column as one Arrow array."""
        return _flat(self.table.column(name))

    def moments(self, name: str) -> tuple[Rows, Mask]:
        """Microseconds, (row,), and which rows have one."""
        column = self.column(name)
        known: Mask = column.is_valid().to_numpy(zero_copy_only=False)
        found = np.full(len(column), _EARLIEST)
        found[known] = moments_of(column.drop_null())
        return found, known

    def hashes(self, name: str) -> tuple[Mask, Hashes]:
        """Which rows have a value, and its hash of those."""
        column = self.column(name)
        known: Mask = column.is_valid().to_numpy(zero_copy_only=False)
        return known, hashes_of(words_of(column.drop_null()))

    def values(self, column: FittedColumn) -> tuple[Rows, Hashes]:
        """Whose each value is, and its hash; a text has many values, a null none."""
        if column.kind != "text":
            known, hashes = self.hashes(column.name)
            return self.entities[known], hashes
        texts = self.column(column.name)
        known = texts.is_valid().to_numpy(zero_copy_only=False)
        places, hashes = word_hashes(words_of(texts.drop_null()))
        return self.entities[known][places], hashes


def _flat(column: Any) -> Any:
    """One array of a column of several."""
    flat = column.combine_chunks()
    return flat.chunk(0) if hasattr(flat, "num_chunks") else flat


def _ids(entities: Any) -> Rows:
    if needed("pyarrow").types.is_integer(entities.type):
        return np.array(entities.to_numpy(zero_copy_only=False), np.int64)
    return (hashes_of(words_of(entities)) >> np.uint64(1)).astype(np.int64)
