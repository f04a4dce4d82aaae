"""Queries: memory of reading a table in 1 to 64 query chunks, predicted beside measured, here and in the database.

    python benchmarks/queries.py [--record]

Four tables (few columns, numbers, a text, and entities of very different size) in a DuckDB file, in Parquet and on a
PostgreSQL server of its own, on loopback. `kit.data.measure_queries` reads each in 1, 4, 16 and 64 query chunks, each
number in a fresh process. What is shown of a number is measured / predicted, of the reader's process and of the
database; what is predicted of the database comes from its other numbers. Small tables on purpose: with large ones the
rows decide, and those are counted exactly.

    apt-get install postgresql        # else the server is left out
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from publish import publish, read_options

sys.path.append(str(Path(__file__).parents[1] / "tests" / "data" / "tables"))

COUNTS = (1, 4, 16, 64)
THREADS = 2
ROWS = {"few columns": 150_000, "numbers": 100_000, "a text": 100_000, "uneven entities": 100_000}
EVENTS_OF_AN_ENTITY = 25


def main() -> None:
    read_options(__doc__)
    rows, errors, databases = [], [], []
    with tempfile.TemporaryDirectory(prefix="kit-queries-") as folder, _server() as server:
        for name, events in ((name, _events(name)) for name in ROWS):
            for place in _places(Path(folder) / name, events, server):
                check = _measured(place)
                ratios = {setting.count: setting.client_ratio or float("nan") for setting in check.settings}
                errors += [max(ratio, 1 / ratio) - 1 for ratio in ratios.values()]
                databases += [setting.database_ratio or float("nan") for setting in check.settings]
                rows.append(_row(name, place.kind, check, ratios))
    facts = {
        "median error": statistics.median(errors), "worst error": max(errors),
        "within 15 %": sum(error <= 0.15 for error in errors) / len(errors),
        "database, median ratio": statistics.median(databases),
        "database, worst ratio": max(databases, key=lambda ratio: max(ratio, 1 / ratio)),
    }  # fmt: skip
    publish("queries, measured / predicted", rows, threads=THREADS, **facts)


def _row(name: str, kind: str, check: Any, ratios: dict[int, float]) -> dict[str, Any]:
    first, last = check.settings[0], check.settings[-1]
    return {
        "table": name, "rows": check.model.rows, "bytes a row": check.model.row_bytes, "source": kind,
        **{f"here, {count}": ratios[count] for count in COUNTS},
        "MiB at 1": first.measured_client_bytes / 2**20, "at 64": last.measured_client_bytes / 2**20,
        **{f"database, {setting.count}": setting.database_ratio for setting in check.settings},
        "its MiB": last.measured_database_bytes / 2**20,
    }  # fmt: skip


def _measured(place: Any) -> Any:
    import kit

    connection = place.declaration()["connection"] | ({} if place.kind == "postgresql" else {"threads": THREADS})
    declared = {"type": "event", "main_entity_column": "customer", "date_column": "time", "connection": connection}
    return kit.data.measure_queries(place.open(**declared), counts=COUNTS)


# -- the tables


def _events(name: str) -> pa.Table:
    draw, rows = np.random.default_rng(0), ROWS[name]
    entities = rows // EVENTS_OF_AN_ENTITY
    share = draw.random(rows) ** (4 if name == "uneven entities" else 1)
    moments = draw.integers(1_700_000_000_000_000, 1_760_000_000_000_000, rows)
    columns = {
        "customer": pa.array((share * entities).astype(np.int64)),
        "time": pa.array(moments, pa.int64()).cast(pa.timestamp("us")),
    }
    if name == "numbers":
        columns |= {f"number {place}": pa.array(draw.random(rows)) for place in range(10)}
    if name in ("a text", "uneven entities"):
        words = np.array([f"word{place}" for place in range(500)])
        count = 8 if name == "a text" else 2
        titles = (" ".join(chosen) for chosen in words[draw.integers(0, len(words), (rows, count))])
        columns |= {"title": pa.array(titles), "price": pa.array(draw.random(rows), mask=draw.random(rows) < 0.1)}
    return pa.table(columns)


def _places(folder: Path, events: pa.Table, server: Any) -> Iterator[Any]:
    from table_places import Place

    folder.mkdir()
    yield Place("duckdb", folder).write(events)
    (folder / "purchases").mkdir()
    pyarrow.parquet.write_table(events, folder / "purchases" / "events.parquet")
    yield Place("parquet", folder)
    if server is not None:
        yield Place("postgresql", folder, server).write(events)


@contextmanager
def _server() -> Iterator[Any]:
    from postgres_server import PASSWORD, VARIABLE, PostgresServer, folder_of_programs

    if folder_of_programs() is None:
        print("PostgreSQL is left out: it is not installed; apt-get install postgresql")
        yield None
        return
    os.environ[VARIABLE] = PASSWORD
    server = PostgresServer()
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    main()
