"""Small event tables in DuckDB and Parquet, and what is compared of their batches."""

import datetime
import random

import duckdb
import numpy as np
import pyarrow
import pyarrow.parquet

from kit.data.tables.chunks import EventPlan, EventTable
from kit.data.tables.declare import open_table
from kit.data.tables.loader import EventLoader

START = datetime.datetime(2026, 1, 1)


def events(entities=40, rows=400, seed=0):
    """`rows` events of `entities`, in no order; some rows are equal in all but one column."""
    draw = random.Random(seed)
    owners = [*range(entities), *(draw.randrange(entities) for _ in range(rows - entities))]
    draw.shuffle(owners)
    return pyarrow.table({
        "customer": pyarrow.array([1000 + 7 * owner for owner in owners], "int64"),
        "time": pyarrow.array([START + datetime.timedelta(hours=draw.randrange(9)) for _ in owners], "timestamp[us]"),
        "what": pyarrow.array([draw.choice(["tea", "cake", None, "plum jam"]) for _ in owners], "string"),
        "price": pyarrow.array([draw.choice([0.5, 1.25, None, 9.0]) for _ in owners], "float64"),
    })  # fmt: skip


def write(path, table):
    """The table in a new file, `shop.parquet` or `shop.duckdb`; moved into place as an owner of the data would."""
    draft = path.with_name("draft" + path.suffix)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, draft)
    else:
        with duckdb.connect(str(draft)) as opened:
            opened.register("given", table)
            opened.execute("CREATE TABLE shop AS SELECT * FROM given")
    draft.replace(path)


def opened(path, **fields):
    named = {"table": "shop"} if path.suffix == ".duckdb" else {}
    defaults = {"main_entity_column": "customer", "date_column": "time", "connection": {"threads": 1}}
    return open_table(path, **named, **defaults | fields)


def shop(folder, kind="parquet", table=None, **fields):
    """An open table of `events`."""
    path = folder / f"shop.{kind}"
    write(path, events() if table is None else table)
    return opened(path, **fields)


def loader(source, query_chunks=1, batch_size=8, world_size=1, rank=0, encode=None, **settings):
    """Batches of raw events, unless they are encoded."""
    table = EventTable(source, query_chunks=query_chunks, batch_rows=settings.pop("batch_rows", 50))
    memory_bytes, prefetch = settings.pop("memory_bytes", 1 << 30), settings.pop("prefetch", True)
    plan = EventPlan(
        entities=table.entities(), table=table.identity(), batch_size=batch_size, world_size=world_size,
        **{"seed": 3, "shuffle": True, "drop_last": False} | settings,
    )  # fmt: skip
    return EventLoader(table, plan, encode or rows_of, rank=rank, memory_bytes=memory_bytes, prefetch=prefetch)


def rows_of(batch):
    """A batch of events as plain rows."""
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def by_entity(batches):
    """The events of each entity, in their order; every entity's stand together, and in one batch."""
    found = {}
    for batch in batches:
        last = None
        for row in batch:
            if row[0] != last:
                assert row[0] not in found
                found[row[0]] = []
            found[row[0]].append(row[1:])
            last = row[0]
    return found


def expected(table):
    """As `by_entity`, of the whole table: by time, then by the other columns, nulls last."""
    found = {}
    for customer, *row in rows_of(table):
        found.setdefault(customer, []).append(tuple(row))
    return {
        key: sorted(rows, key=lambda row: [(value is None, "" if value is None else value) for value in row])
        for key, rows in found.items()
    }


def tensors_equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
