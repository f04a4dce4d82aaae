"""measure_queries: what a table needs when it is read in 1, 2, 4, ... query chunks, beside what is predicted.

Each number is tried in a fresh process, one after another, which reads every query chunk as an epoch does that reads
none ahead, and lets it go; nothing is cached in these reads. Memory of the client is what that process grew by once the
first rows had been read, so that libraries are loaded: on Linux the kernel's own peak, started again then; elsewhere
the peak since its start, less what it held. Memory of the database is what it says of itself, where it can be known. A
number that fails, because a query does or the process is killed, keeps its row with the reason.

Predicted is what `kit.data.tables.chunks.QueryModel` says; of the database what the other numbers lead to expect, so
its ratio is never of a value with itself, and a single number has none. Fitting holds a few batches of a column at a
time, whatever the number of query chunks: what it needs is measured and not predicted.

The process is `python -m kit.data.tables.measure`. It takes its task from its standard input, which is also its
lifeline, and answers with one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import cloudpickle
import numpy as np

import kit
from kit.arguments import checks_arguments
from kit.config import Config
from kit.data.tables.cache import CachedSource
from kit.data.tables.chunks import (
    EventTable,
    QueryModel,
    arrange,
    database_memory,
    embedded_bytes,
    gather,
    release_memory,
    serve,
    within,
)
from kit.data.tables.source import Partition, Query, checked, expected_schema, refuse_no_table
from kit.errors import ConfigError, KitError, Problem, QueryError
from kit.machine.machine import hardware
from kit.machine.processes import peak_rss_bytes, rss_bytes, watch_lifeline
from kit.registry import Drawable
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from kit.data.tables.source import TableSource

Phase = Literal["load", "fit"]
_COLUMNS = (
    "query chunks", "client predicted", "measured", "ratio", "database predicted", "measured", "ratio", "took",
    "rows at once",
)  # fmt: skip
_OBJECT_BYTES = {"int64": 32, "double": 24, "bool": 0, "date32[day]": 32}
"""Of a value as Python's object; 48 of a moment, and 49 with its letters of a text."""
_FIRST_ROWS = 256


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
class QueryCheck(Drawable):
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
        client = None if client_bytes is None else parse_bytes(client_bytes, "client_bytes")
        database = None if database_bytes is None else parse_bytes(database_bytes, "database_bytes")
        limits = " and ".join(
            f"{format_bytes(allowed)} {where}"
            for allowed, where in ((client, "here"), (database, "in the database"))
            if allowed is not None
        )
        for setting in self.settings:
            fits = within(setting.measured_client_bytes, client) and within(setting.measured_database_bytes, database)
            if setting.seconds is not None and fits:
                measured = f"{format_bytes(setting.measured_client_bytes or 0)} here"
                if setting.measured_database_bytes is not None:
                    measured += f" and {format_bytes(setting.measured_database_bytes)} in the database"
                chunks = f"{setting.count} query chunk{'s' * (setting.count > 1)}"
                reason = f"{chunks}: measured {measured}{f', within {limits}' if limits else ''}"
                return QueryAdvice(count=setting.count, reason=f"{reason}; fewer reads are faster")
        if self.phase == "fit":
            return QueryAdvice(count=None, reason=f"no number that was measured stays within {limits}; measure more")
        scale = max([1.0, *(setting.client_ratio or 0.0 for setting in self.settings)])
        count = self.model.smallest(None if client is None else int(client / scale), database)
        most = max((setting.count for setting in self.settings if setting.seconds is not None), default=0)
        if count is None or count <= most:
            known = (each.measured_client_bytes for each in self.settings if each.measured_client_bytes)
            least = format_bytes(min([scale * self.model.client_bytes(max(1, self.model.rows)), *known]))
            reason = f"no number of query chunks is known to stay within {limits}: the fewest rows need {least} here"
            return QueryAdvice(count=None, reason=f"{reason}; allow more")
        needed = format_bytes(scale * self.model.client_bytes(count))
        reason = f"{count} query chunks, predicted and not measured: about {needed} here, within {limits}"
        return QueryAdvice(count=count, reason=reason)

    @property
    def rows(self) -> list[list[str]]:
        rows = []
        for each in self.settings:
            cells: tuple[tuple[float | None, Callable[[float], str]], ...] = (
                (each.predicted_client_bytes, format_bytes), (each.measured_client_bytes, format_bytes),
                (each.client_ratio, "{:.2f}".format), (each.predicted_database_bytes, format_bytes),
                (each.measured_database_bytes, format_bytes), (each.database_ratio, "{:.2f}".format),
                (each.seconds, format_seconds), (each.largest_rows or None, format_count),
            )  # fmt: skip
            rows.append([str(each.count), *("–" if value is None else form(value) for value, form in cells)])
        return rows

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

    def _repr_html_(self) -> str:
        caption = f"{self.name}: memory and time by query chunks"
        return html_table(_COLUMNS, self.rows, caption=caption, dense=True) + html_list(self.sentences)


def _ratio(measured: int | None, predicted: int | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


@checks_arguments
def measure_queries(
    source: TableSource,
    config: Config | None = None,
    *,
    counts: Sequence[int] | int = (1, 2, 4, 8),
    columns: Sequence[str] = (),
    where: str = "",
    phase: Phase = "load",
    timeout_seconds: float = 600.0,
) -> QueryCheck:
    """Read a table once in each of several numbers of query chunks, and wait for all of it.

    Args:
        source: The table. Of a cached table, the one behind the cache is read.
        config: `queries.batch_rows`, and for fitting `num_concurrent_features` and `num_cpus`.
        counts: Numbers of query chunks to try.
        columns: Columns to read, the entity's among them. Empty reads all.
        where: A condition on rows.
        phase: `load` reads as an epoch does, `fit` fits the features.
        timeout_seconds: Longest time for one number.

    Returns:
        For each number: memory here and in the database, predicted and measured, and seconds.

    Raises:
        ConfigError: for no numbers, and numbers below 1.
        QueryError: when no number could be read, with the reason of the first.

    Example:
        >>> table = kit.data.open_table(shop, table="purchases", main_entity_column="customer_id")
        >>> [setting.count for setting in kit.data.measure_queries(table, counts=(1, 2)).settings]
        [1, 2]
    """
    refuse_no_table(source, "measure_queries")
    counts = (counts,) if isinstance(counts, int) else counts
    wrong = [count for count in counts if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    if not counts or wrong:
        message = f"{wrong[0]!r} is none; give whole numbers from 1" if wrong else "none are given; try (1, 2, 4, 8)"
        raise ConfigError([Problem("counts", message)])
    source = source.source if isinstance(source, CachedSource) else source
    given = (config or Config()).queries
    query = Query(columns=tuple(columns), where=where, batch_rows=given.batch_rows)
    fitting = {"num_concurrent_features": given.num_concurrent_features, "num_cpus": given.num_cpus}
    model = look_at(source, query)
    answers: dict[int, Mapping[str, Any]] = {}
    for count in sorted(set(counts)):
        task = ReadTask(source=source, query=query, count=count, phase=phase, fitting=fitting)
        answers[count] = _run(task, timeout_seconds)
    if all("error" in answer for answer in answers.values()):
        raise QueryError(f"{source.name} could not be read: {next(iter(answers.values()))['error']}")
    databases = {count: answer["database_bytes"] for count, answer in answers.items() if answer.get("database_bytes")}
    model, settings = replace(model, database=database_memory(databases)), []
    for count, answer in answers.items():
        others = database_memory({other: found for other, found in databases.items() if other != count})
        settings.append(
            QuerySetting(
                count=count, predicted_client_bytes=model.client_bytes(count) if phase == "load" else None,
                measured_client_bytes=answer.get("client_bytes"),
                predicted_database_bytes=None if others is None else others.needed_bytes(count),
                measured_database_bytes=answer.get("database_bytes"), seconds=answer.get("seconds"),
                largest_rows=answer.get("largest_rows", 0), note=answer.get("error", ""),
            )
        )  # fmt: skip
    return QueryCheck(name=source.name, phase=phase, settings=tuple(settings), model=model)


def look_at(source: TableSource, query: Query) -> QueryModel:
    """The model of a table, from the sizes of its entities and the bytes of its first rows."""
    batches = iter(source.read(query))
    first = next(batches, None)
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    sizes = source.group_sizes(source.partition_column, query.where)
    widths, object_bytes = [0.0], 0.0
    if first is not None and len(first):
        widths = [column.nbytes / first.num_rows for column in first.columns]
        # A row is a tuple and its place in a list, each value of it an object, and a field of the answer.
        object_bytes = 8.0 + 40.0 + 8.0
        for field, width in zip(first.schema, widths, strict=True):
            letters = max(0.0, width - 4) if str(field.type) == "string" else 0.0
            value = 49 + letters if letters else _OBJECT_BYTES.get(str(field.type), 48)
            object_bytes += 8 + value + 16 + (letters + 8 if letters else 16)
    connection = getattr(getattr(source, "declared", None), "connection", None)
    threads = (getattr(connection, "threads", 0) or hardware().cores) if source.shares_process else 0
    unpacked = len(widths) if getattr(connection, "kind", "") == "parquet" else 0
    return QueryModel(
        rows=sizes.rows, row_bytes=sum(widths), widest_bytes=max(widths), squares=sizes.squares,
        largest_entity_rows=sizes.largest,
        listed_entities=sizes.groups if source.partition_transformation == "exact_group" else 0,
        reading_bytes=embedded_bytes(threads, unpacked) if threads else 0.0,
        object_bytes=0.0 if source.shares_process else object_bytes,
        shares_process=source.shares_process, unpacking_threads=threads if unpacked else 0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTask:
    """What to read and how."""

    source: Any
    query: Query
    count: int
    phase: Phase
    fitting: dict[str, Any]
    """Further settings of `Config.queries`, for fitting."""


def _run(task: ReadTask, timeout_seconds: float) -> Mapping[str, Any]:
    """The answer of a fresh process, or `{"error": reason}`."""
    home, path = str(Path(kit.__file__).parents[1]), os.environ.get("PYTHONPATH")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([home, path]) if path else home}
    command = [sys.executable, "-P", "-m", "kit.data.tables.measure"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=log, env=variables)
        assert process.stdin is not None
        try:
            process.stdin.write(cloudpickle.dumps(task))
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
        said, logged = (_lines(file) for file in (out, log))
    status = process.returncode
    if status == 0 and said:
        answer: Mapping[str, Any] = json.loads(said[-1])
        return answer
    ended = f"its process was ended by signal {-status}" if status < 0 else f"its process ended with status {status}"
    return {"error": f"{ended}{f': {logged[-1]}' if logged else ''}"}


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


# -- in the process that reads


def main() -> None:
    task = cloudpickle.load(sys.stdin.buffer)
    watch_lifeline(sys.stdin.fileno(), whole_group=False)
    try:
        answer = _measure(task)
    except (KitError, MemoryError) as error:
        answer = {"error": f"{type(error).__name__}: {error}".rstrip(": ")}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the lifeline is still being read


def _measure(task: ReadTask) -> dict[str, Any]:
    """`{"client_bytes", "database_bytes", "seconds", "largest_rows"}`."""
    source = task.source
    _read_first_rows(source, task.query)
    if task.phase == "fit":
        from kit.data.tables.fit import fit_features
    release_memory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before, largest_rows, started = rss_bytes(), 0, time.perf_counter()
    if task.phase == "fit":
        fitting = {"fit_query_chunks": task.count, "batch_rows": task.query.batch_rows, **task.fitting}
        config = Config().replace({f"queries.{name}": value for name, value in fitting.items()})
        fit_features(source, config, columns=task.query.columns, where=task.query.where, announce=None)
    else:
        largest_rows = _load(task)
    seconds = time.perf_counter() - started
    return {
        "client_bytes": max(0, peak_rss_bytes() - before), "database_bytes": source.memory_bytes(), "seconds": seconds,
        "largest_rows": largest_rows,
    }  # fmt: skip


def _read_first_rows(source: Any, query: Query) -> None:
    """By the same way as all later ones: what is loaded once is not what a query chunk needs."""
    whole = Partition(column=source.partition_column, transformation="hash_mod", number=0, count=1)
    query = replace(query, batch_rows=_FIRST_ROWS, partition=whole)
    schema = expected_schema(source, query)
    with contextlib.closing(checked(source.read(query), schema, source.name)) as batches:
        events = gather(islice(batches, 1), schema)
    order, offsets = arrange(events, source.main_entity_column, source.date_column)
    serve(events, order, offsets, np.arange(len(offsets) - 1))


def _load(task: ReadTask) -> int:
    """Read every query chunk as an epoch does; the rows of the largest one."""
    query, largest = task.query, 0
    table = EventTable(
        task.source, columns=query.columns, where=query.where, query_chunks=task.count, batch_rows=query.batch_rows
    )
    for number in range(task.count):
        with contextlib.closing(table.read(number)) as batches:
            events = gather(batches, table.schema)
        order, offsets = arrange(events, table.entity, table.date)
        chunk = serve(events, order, offsets, np.arange(len(offsets) - 1))
        largest = max(largest, events.num_rows)
        del events, order, offsets, chunk
        release_memory()
    return largest


if __name__ == "__main__":
    main()
