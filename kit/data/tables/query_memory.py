"""measure_queries: what a table costs to read in 1, 2, 4, ... query chunks: memory here, in the database, and time.

Each number is tried in a fresh process, one after another, which reads every query chunk as an epoch does and lets it
go. Memory of the client is what that process grew by; memory of the database is what it says of itself, where it can be
known. Predicted is what the model of `kit.plan.query_chunks` says; of the database what the other numbers lead to
expect. Nothing is cached in these reads.

A number that fails, because a query does or the process is killed, keeps its row with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

import kit
from kit.config import Config
from kit.data.tables.query_cache import CachedSource
from kit.data.tables.query_check import Phase, QueryCheck, QuerySetting
from kit.data.tables.query_probe import HEAD, Task
from kit.data.tables.source import Query
from kit.errors import ConfigError, Problem, QueryError
from kit.machine import hardware
from kit.plan.query_chunks import QueryModel, database_memory, embedded_bytes
from kit.units import format_seconds

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import TableSource

_OBJECT_BYTES = {"int64": 32, "double": 24, "bool": 0, "date32[day]": 32}
"""Of a value as Python's object; 48 of a moment, and 49 with its letters of a text."""


def measure_queries(
    source: TableSource,
    config: Config | None = None,
    *,
    counts: Sequence[int] = (1, 2, 4, 8),
    columns: Sequence[str] = (),
    where: str = "",
    phase: Phase = "load",
    timeout_seconds: float = 600.0,
) -> QueryCheck:
    """Read a table once in each number of query chunks, and wait for all of it.

    Args:
        source: What is read; of a cached one what is behind the cache.
        config: `queries.batch_rows`, and for fitting `num_concurrent_features` and `num_cpus`.
        counts: Numbers of query chunks to try.
        columns: Names to read, the entity's among them; empty for all.
        where: A condition on rows.
        phase: `load` reads as an epoch does, `fit` fits the features.
        timeout_seconds: Longest that one number may take.

    Raises:
        ConfigError: for no numbers, and numbers below 1.
        QueryError: when no number could be read, with the reason of the first.
    """
    _refuse_counts(counts)
    source = source.source if isinstance(source, CachedSource) else source
    queries = (config or Config()).queries
    fitting = {"num_concurrent_features": queries.num_concurrent_features, "num_cpus": queries.num_cpus}
    tasks = [
        Task(
            source=source, columns=tuple(columns), where=where, count=count, batch_rows=queries.batch_rows, phase=phase,
            fitting=fitting if phase == "fit" else {},
        )
        for count in sorted(set(counts))
    ]  # fmt: skip
    model = look_at(source, Query(columns=tuple(columns), where=where, batch_rows=queries.batch_rows))
    answers = {task.count: _run(task, timeout_seconds) for task in tasks}
    if all("error" in answer for answer in answers.values()):
        raise QueryError(f"{source.name} could not be read: {next(iter(answers.values()))['error']}")
    databases = {count: answer["database_bytes"] for count, answer in answers.items() if answer.get("database_bytes")}
    model = replace(model, database=database_memory(databases))
    settings = tuple(_setting(count, answer, model, databases, phase) for count, answer in answers.items())
    return QueryCheck(name=source.name, phase=phase, settings=settings, model=model)


def look_at(source: TableSource, query: Query) -> QueryModel:
    """The model of a table, from the sizes of its entities and the bytes of its first rows."""
    batches = iter(source.read(query))
    first = next(batches, None)
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    sizes = source.group_sizes(source.partition_column, query.where)
    widths = [column.nbytes / first.num_rows for column in first.columns] if first is not None and len(first) else [0.0]
    connection = getattr(getattr(source, "declared", None), "connection", None)
    threads = (getattr(connection, "threads", 0) or hardware().cores) if source.shares_process else 0
    unpacked = len(widths) if getattr(connection, "kind", "") == "parquet" else 0
    served = not source.shares_process and first is not None
    return QueryModel(
        rows=sizes.rows, row_bytes=sum(widths), widest_bytes=max(widths), squares=sizes.squares,
        largest_entity_rows=sizes.largest,
        listed_entities=sizes.groups if source.partition_transformation == "exact_group" else 0,
        reading_bytes=embedded_bytes(threads, unpacked) if threads else 0.0,
        object_bytes=_object_bytes(first) if served else 0.0,
        shares_process=source.shares_process, unpacking_threads=threads if unpacked else 0,
    )  # fmt: skip


def _object_bytes(batch: pyarrow.RecordBatch) -> float:
    """Of a row: a tuple and its place in a list, each value as an object, and each as a field of the answer."""
    row = 8.0 + 40.0 + 8.0
    for field, column in zip(batch.schema, batch.columns, strict=True):
        letters = max(0.0, column.nbytes / len(batch) - 4) if str(field.type) == "string" else 0.0
        value = 49 + letters if letters else _OBJECT_BYTES.get(str(field.type), 48)
        row += 8 + value + 16 + (letters + 8 if letters else 16)
    return row


def _run(task: Task, timeout_seconds: float) -> Mapping[str, Any]:
    """The answer of a fresh process, or `{"error": reason}`."""
    payload = cloudpickle.dumps(task)
    home = str(Path(kit.__file__).parents[1])
    given = os.environ.get("PYTHONPATH")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([home, given]) if given else home}
    command = [sys.executable, "-P", "-m", "kit.data.tables.query_probe"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=log, env=variables)
        assert process.stdin is not None
        try:
            process.stdin.write(HEAD.pack(len(payload)) + payload)
            process.stdin.flush()
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"not read after {format_seconds(timeout_seconds)}"}
        except BrokenPipeError:
            process.wait()
        finally:
            process.kill()
            process.stdin.close()
            process.wait()
        return _answer(process.returncode, out, log)


def _answer(status: int, out: Any, log: Any) -> Mapping[str, Any]:
    out.seek(0)
    lines = out.read().decode(errors="replace").splitlines()
    if status == 0 and lines:
        answer: Mapping[str, Any] = json.loads(lines[-1])
        return answer
    log.seek(0)
    last = (log.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    killed = f"its process was ended by signal {-status}" if status < 0 else f"its process ended with status {status}"
    return {"error": f"{killed}{f': {last}' if last else ''}"}


def _setting(
    count: int, answer: Mapping[str, Any], model: QueryModel, databases: Mapping[int, int], phase: Phase
) -> QuerySetting:
    others = database_memory({other: found for other, found in databases.items() if other != count})
    return QuerySetting(
        count=count, predicted_client_bytes=model.client_bytes(count) if phase == "load" else None,
        measured_client_bytes=answer.get("client_bytes"),
        predicted_database_bytes=None if others is None else others.needed_bytes(count),
        measured_database_bytes=answer.get("database_bytes"), seconds=answer.get("seconds"),
        largest_rows=answer.get("largest_rows", 0), note=answer.get("error", ""),
    )  # fmt: skip


def _refuse_counts(counts: Sequence[int]) -> None:
    wrong = [count for count in counts if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    if not counts or wrong:
        message = f"{wrong[0]!r} is none; give whole numbers from 1" if wrong else "none are given; try (1, 2, 4, 8)"
        raise ConfigError([Problem("counts", message)])
