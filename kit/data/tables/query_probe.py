"""Reads a table in so many query chunks, as an epoch does that reads none ahead, and says what that took.

`python -m kit.data.tables.query_probe` takes its task from its standard input, which is also its lifeline, and answers
with one line of JSON: run it in a process of its own. Memory is what the process grew by once the first rows had been
read, so that libraries are loaded: on Linux the kernel's own peak, started again then; elsewhere the peak since its
start, less what it held.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from kit.data.tables.event_chunks import arrange, gather, let_go, serve
from kit.data.tables.event_table import EventTable
from kit.data.tables.expected import checked, expected_schema
from kit.data.tables.partition import Partition
from kit.data.tables.query_check import Phase
from kit.data.tables.source import Query
from kit.errors import KitError
from kit.processes import peak_rss_bytes, rss_bytes, watch_lifeline

HEAD = struct.Struct("<Q")
_FIRST_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to read and how."""

    source: Any
    columns: tuple[str, ...]
    where: str
    count: int
    batch_rows: int
    phase: Phase
    fitting: dict[str, Any]
    """Further settings of `Config.queries`."""


def main() -> None:
    stdin = sys.stdin.buffer
    task = cloudpickle.loads(stdin.read(HEAD.unpack(stdin.read(HEAD.size))[0]))
    watch_lifeline(stdin.fileno(), whole_group=False)
    try:
        answer = probe(task)
    except (KitError, MemoryError) as error:
        answer = {"error": f"{type(error).__name__}: {error}".rstrip(": ")}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the lifeline is still being read


def probe(task: Task) -> dict[str, Any]:
    """`{"client_bytes", "database_bytes", "seconds", "rows", "entities", "largest_rows"}`."""
    _load_everything(task)
    let_go()
    before = _restart_peak()
    started = time.perf_counter()
    read = _fit(task) if task.phase == "fit" else _load(task)
    seconds = time.perf_counter() - started
    return {
        "client_bytes": max(0, peak_rss_bytes() - before), "database_bytes": task.source.memory_bytes(),
        "seconds": seconds, **read,
    }  # fmt: skip


def _load(task: Task) -> dict[str, Any]:
    table = EventTable(
        task.source, columns=task.columns, where=task.where, query_chunks=task.count, batch_rows=task.batch_rows
    )
    rows = entities = largest = 0
    for number in range(task.count):
        with contextlib.closing(table.read(number)) as batches:
            events = gather(batches, table.schema)
        order, offsets = arrange(events, table.entity, table.date)
        chunk = serve(events, order, offsets, np.arange(len(offsets) - 1))
        rows, entities = rows + events.num_rows, entities + len(chunk)
        largest = max(largest, events.num_rows)
        del events, order, offsets, chunk
        let_go()
    return {"rows": rows, "entities": entities, "largest_rows": largest}


def _fit(task: Task) -> dict[str, Any]:
    from kit.config import Config
    from kit.data.tables.fitting import fit_features

    asked = {"fit_query_chunks": task.count, "batch_rows": task.batch_rows, **task.fitting}
    config = Config().replace({f"queries.{name}": value for name, value in asked.items()})
    fit_features(task.source, config, columns=task.columns, where=task.where, announce=None)
    return {"rows": task.source.row_count(), "entities": 0, "largest_rows": 0}


def _load_everything(task: Task) -> None:
    """Read the first rows by the same way: what is loaded once is not what a query chunk needs."""
    source = task.source
    whole = Partition(column=source.partition_column, transformation="hash_mod", number=0, count=1)
    query = Query(columns=task.columns, where=task.where, batch_rows=_FIRST_ROWS, partition=whole)
    schema = expected_schema(source, query)
    with contextlib.closing(checked(source.read(query), schema, source.name)) as batches:
        events = gather(islice(batches, 1), schema)
    order, offsets = arrange(events, source.main_entity_column, source.date_column)
    serve(events, order, offsets, np.arange(len(offsets) - 1))
    if task.phase == "fit":
        import kit.data.tables.fitting  # noqa: F401


def _restart_peak() -> int:
    """What the process holds now, from which its peak is counted."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return rss_bytes()


if __name__ == "__main__":
    main()
