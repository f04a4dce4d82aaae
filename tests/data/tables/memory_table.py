"""MemoryTable: a table source over Arrow rows in memory, cut by the same hash as the databases do."""

import threading

import pyarrow

from kit.data.tables.source import hash_number
from kit.errors import QueryError


class MemoryTable:
    """Rows, and who reads them: `most_at_once` reads at the same time, and a failure after so many batches."""

    partition_transformation = "hash_mod"

    def __init__(self, rows, entity="customer", date_column="time", fail_after=None):
        self.rows, self.main_entity_column, self.partition_column = rows, entity, entity
        self.name, self.date_column, self.fail_after = "memory", date_column, fail_after
        self.batches, self.open, self.most_at_once, self.states = 0, 0, 0, iter(())
        self._lock = threading.Lock()

    def schema(self):
        return self.rows.schema

    def null_count(self, column):
        return self.rows.column(column).null_count

    def state(self):
        return next(self.states, "one")

    def read(self, query):
        with self._lock:
            self.open += 1
            self.most_at_once = max(self.most_at_once, self.open)
        try:
            yield from self._batches(query)
        finally:
            with self._lock:
                self.open -= 1

    def _batches(self, query):
        for batch in self._rows(query.partition).select(query.columns).to_batches(max_chunksize=query.batch_rows):
            self.batches += 1
            if self.fail_after is not None and self.batches > self.fail_after:
                raise QueryError("memory: the connection was lost")
            yield batch

    def _rows(self, partition):
        ids = self.rows.column(partition.column).to_pylist()
        mask = [hash_number(value) % partition.count == partition.number for value in ids]
        return self.rows.filter(pyarrow.array(mask, "bool"))
