"""QueryCheck: what a table needs when it is read in 1, 2, 4, ... query chunks, measured beside predicted, and advice.

Predicted is what the model of `kit.data.tables.chunks` says; of the database what the other numbers lead to expect, so
its ratio is never of a value with itself, and a single number has none. Fitting holds a few batches of a column at a
time, whatever the number of query chunks: what it needs is measured and not predicted.

measure_queries: what a table costs to read in 1, 2, 4, ... query chunks: memory here, in the database, and time.

Each number is tried in a fresh process, one after another, which reads every query chunk as an epoch does and lets it
go. Memory of the client is what that process grew by; memory of the database is what it says of itself, where it can be
known. Predicted is what the model of `kit.data.tables.chunks` says; of the database what the other numbers lead to
expect. Nothing is cached in these reads.

A number that fails, because a query does or the process is killed, keeps its row with the reason.

Reads a table in so many query chunks, as an epoch does that reads none ahead, and says what that took.

`python -m kit.data.tables.measure` takes its task from its standard input, which is also its lifeline, and answers
with one line of JSON: run it in a process of its own. Memory is what the process grew by once the first rows had been
read, so that libraries are loaded: on Linux the kernel's own peak, started again then; elsewhere the peak since its
start, less what it held.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
import numpy as np

import kit
from kit.config import Config
from kit.data.tables.cache import CachedSource
from kit.data.tables.chunks import (
    EventTable,
    QueryModel,
    arrange,
    database_memory,
    embedded_bytes,
    gather,
    let_go,
    serve,
)
from kit.data.tables.source import Partition, Query, checked, expected_schema
from kit.errors import ConfigError, KitError, Problem, QueryError
from kit.machine.machine import hardware
from kit.machine.processes import peak_rss_bytes, rss_bytes, watch_lifeline
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    import pyarrow

    from kit.data.tables.source import TableSource

Phase = Literal["load", "fit"]
_COLUMNS = (
    "query chunks", "client predicted", "measured", "ratio", "database predicted", "measured", "ratio", "took",
    "rows at once",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySetting:
    """One number of query chunks and what came of it."""

    count: int
    predicted_client_bytes: int | None
    """None for fitting."""
    measured_client_bytes: int | None = None
    predicted_database_bytes: int | None = None
    measured_database_bytes: int | None = None
    seconds: float | None = None
    """Of reading the whole table once."""
    largest_rows: int = 0
    """Rows of the largest query chunk."""
    note: str = ""
    """Why it did not run."""

    @property
    def client_ratio(self) -> float | None:
        """measured / predicted."""
        return _ratio(self.measured_client_bytes, self.predicted_client_bytes)

    @property
    def database_ratio(self) -> float | None:
        """measured / predicted."""
        return _ratio(self.measured_database_bytes, self.predicted_database_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryAdvice:
    """The number of query chunks to take, and why; `count` is None when no number fits."""

    count: int | None
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QueryCheck:
    """Numbers of query chunks beside each other, fewest first."""

    name: str
    phase: Phase
    settings: tuple[QuerySetting, ...]
    model: QueryModel

    def advise(self, client_bytes: int | str | None = None, database_bytes: int | str | None = None) -> QueryAdvice:
        """The fewest query chunks that stay within what is allowed, here and in the database.

        A measured number is taken before a predicted one; beyond those measured the model decides, scaled by the
        highest ratio that was seen.

        Args:
            client_bytes: Allowed in the reader's process, on top of its libraries; None for any.
            database_bytes: Allowed in the database; None for any.
        """
        client, database = _allowed(client_bytes), _allowed(database_bytes)
        limits = " and ".join(
            f"{format_bytes(allowed)} {where}"
            for allowed, where in ((client, "here"), (database, "in the database"))
            if allowed is not None
        )
        for setting in self.settings:
            if setting.seconds is not None and _fits(setting, client, database):
                return QueryAdvice(count=setting.count, reason=_measured_reason(setting, limits))
        return self._beyond(client, database, limits)

    def _beyond(self, client: int | None, database: int | None, limits: str) -> QueryAdvice:
        if self.phase == "fit":
            return QueryAdvice(count=None, reason=f"no number that was measured stays within {limits}; measure more")
        scale = max([1.0, *(setting.client_ratio or 0.0 for setting in self.settings)])
        count = self.model.smallest(None if client is None else int(client / scale), database)
        most = max((setting.count for setting in self.settings if setting.seconds is not None), default=0)
        if count is None or count <= most:
            least = format_bytes(scale * self.model.client_bytes(max(1, self.model.rows)))
            reason = f"no number of query chunks is known to stay within {limits}: the fewest rows need {least} here"
            return QueryAdvice(count=None, reason=f"{reason}; allow more")
        needed = format_bytes(scale * self.model.client_bytes(count))
        reason = f"{count} query chunks, predicted and not measured: about {needed} here, within {limits}"
        return QueryAdvice(count=count, reason=reason)

    @property
    def rows(self) -> list[list[str]]:
        return [_row(setting) for setting in self.settings]

    @property
    def sentences(self) -> tuple[str, ...]:
        model = self.model
        size = f"{format_count(model.rows)} rows of {model.row_bytes:.0f} bytes"
        what = "reading it whole, as an epoch does" if self.phase == "load" else "fitting its features"
        shared = "the database works inside the client's process, whose memory has both" * model.shares_process
        notes = [f"{setting.count} query chunks: {setting.note}" for setting in self.settings if setting.note]
        return tuple(filter(None, (f"{self.name}: {size}; {what}", shared, self.about_database, *notes)))

    @property
    def about_database(self) -> str:
        """What more query chunks do to the database's memory, in a sentence; empty after a single number."""
        known = {s.count: s.measured_database_bytes for s in self.settings if s.measured_database_bytes}
        memory = self.model.database
        if memory is None:
            return "memory of the database cannot be seen from here"
        if len(known) == 1:
            return ""
        if not memory.rows_bytes:
            return (
                f"the database needs about {format_bytes(memory.fixed_bytes)} for any number of query chunks, since it "
                "sends rows as it finds them, or keeps to its limit and sorts on disk: more of them save memory here"
            )
        most, least = known[min(known)], known[max(known)]
        falls = f"from {format_bytes(most)} at {min(known)} to {format_bytes(least)} at {max(known)} query chunks"
        return f"the database's memory falls {falls}: it keeps the rows of one to sort, group or join them"

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = f"{self.name}: memory and time by query chunks"
        return html_table(_COLUMNS, self.rows, caption=caption, dense=True) + html_list(self.sentences)


def _allowed(value: int | str | None) -> int | None:
    return None if value is None else parse_bytes(value)


def _fits(setting: QuerySetting, client: int | None, database: int | None) -> bool:
    pairs = ((setting.measured_client_bytes, client), (setting.measured_database_bytes, database))
    return all(used is None or allowed is None or used <= allowed for used, allowed in pairs)


def _measured_reason(setting: QuerySetting, limits: str) -> str:
    measured = f"{format_bytes(setting.measured_client_bytes or 0)} here"
    if setting.measured_database_bytes is not None:
        measured += f" and {format_bytes(setting.measured_database_bytes)} in the database"
    within = f", within {limits}" if limits else ""
    return (
        f"{setting.count} query chunk{'s' * (setting.count > 1)}: measured {measured}{within}; fewer reads are faster"
    )


def _row(setting: QuerySetting) -> list[str]:
    took = "–" if setting.seconds is None else format_seconds(setting.seconds)
    return [
        str(setting.count), _bytes(setting.predicted_client_bytes), _bytes(setting.measured_client_bytes),
        _times(setting.client_ratio), _bytes(setting.predicted_database_bytes), _bytes(setting.measured_database_bytes),
        _times(setting.database_ratio), took, format_count(setting.largest_rows) if setting.largest_rows else "–",
    ]  # fmt: skip


def _ratio(measured: int | None, predicted: int | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


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
        ReadTask(
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


def _run(task: ReadTask, timeout_seconds: float) -> Mapping[str, Any]:
    """The answer of a fresh process, or `{"error": reason}`."""
    payload = cloudpickle.dumps(task)
    home = str(Path(kit.__file__).parents[1])
    given = os.environ.get("PYTHONPATH")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([home, given]) if given else home}
    command = [sys.executable, "-P", "-m", "kit.data.tables.measure"]
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


HEAD = struct.Struct("<Q")
_FIRST_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
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


def probe(task: ReadTask) -> dict[str, Any]:
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


def _load(task: ReadTask) -> dict[str, Any]:
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


def _fit(task: ReadTask) -> dict[str, Any]:
    from kit.config import Config
    from kit.data.tables.fit import fit_features

    asked = {"fit_query_chunks": task.count, "batch_rows": task.batch_rows, **task.fitting}
    config = Config().replace({f"queries.{name}": value for name, value in asked.items()})
    fit_features(task.source, config, columns=task.columns, where=task.where, announce=None)
    return {"rows": task.source.row_count(), "entities": 0, "largest_rows": 0}


def _load_everything(task: ReadTask) -> None:
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
        import kit.data.tables.fit  # noqa: F401


def _restart_peak() -> int:
    """What the process holds now, from which its peak is counted."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return rss_bytes()


if __name__ == "__main__":
    main()
