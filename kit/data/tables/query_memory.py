"""measure_queries: what a table costs to read in 1, 2, 4, ... query chunks: memory here, in the database, and time.

Each number is tried in a fresh process, one after another, which reads every query chunk as an epoch does and lets it
go. Memory of the client is what that process grew by; memory of the database is what it says of itself, where it can be
known. Predicted is what the model of `kit.plan.query_chunks` says; for the database it is fitted on the first and the
last number, so there the ratio says something of those between only. Nothing is cached in these reads.

A number that fails, because a query does or the process is killed, keeps its row with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

import kit
from kit.config import Config
from kit.data.tables.query_cache import CachedSource
from kit.data.tables.query_probe import HEAD, Phase, Task
from kit.data.tables.source import Query
from kit.errors import ConfigError, Problem, QueryError
from kit.plan.query_chunks import QueryModel, line_through
from kit.tables import html_list, html_table, text_table
from kit.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from kit.data.tables.source import TableSource

_COLUMNS = (
    "query chunks", "client predicted", "measured", "ratio", "database predicted", "measured", "ratio", "took",
    "rows at once",
)  # fmt: skip
_ABOUT_THE_SAME = 1.2
_EMBEDDED = ("duckdb", "parquet")
"""Kinds of connection whose database works inside the process that reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySetting:
    """One number of query chunks and what came of it."""

    count: int
    predicted_client_bytes: int
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
        unknown = all(setting.measured_database_bytes is None for setting in self.settings)
        unseen = "memory of the database cannot be seen from here" * unknown
        streams = (
            "the database's memory hardly depends on the number of query chunks, since it sends rows as it finds them: "
            "more of them save memory here"
        ) * self._streams
        notes = [f"{setting.count} query chunks: {setting.note}" for setting in self.settings if setting.note]
        return tuple(filter(None, (f"{self.name}: {size}; {what}", shared, unseen, streams, *notes)))

    @property
    def _streams(self) -> bool:
        """Whether the database needs about the same for every number of query chunks."""
        known = [setting.measured_database_bytes for setting in self.settings if setting.measured_database_bytes]
        return len(known) > 1 and max(known) <= _ABOUT_THE_SAME * min(known)

    def __repr__(self) -> str:
        return "\n".join([text_table(_COLUMNS, self.rows), *(f"- {text}" for text in self.sentences)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        caption = f"{self.name}: memory and time by query chunks"
        return html_table(_COLUMNS, self.rows, caption=caption, dense=True) + html_list(self.sentences)


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
    model = _with_database(model, answers)
    settings = tuple(_setting(count, answer, model) for count, answer in answers.items())
    return QueryCheck(name=source.name, phase=phase, settings=settings, model=model)


def look_at(source: TableSource, query: Query) -> QueryModel:
    """The model of a table, from its number of rows and the bytes of its first ones."""
    batches = iter(source.read(query))
    first = next(batches, None)
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    row_bytes = first.nbytes / first.num_rows if first is not None and first.num_rows else 0.0
    connection = getattr(getattr(source, "declared", None), "connection", None)
    shares = getattr(connection, "kind", "") in _EMBEDDED
    return QueryModel(rows=source.row_count(), row_bytes=row_bytes, batch_rows=query.batch_rows, shares_process=shares)


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


def _with_database(model: QueryModel, answers: Mapping[int, Mapping[str, Any]]) -> QueryModel:
    points = [(count, answer["database_bytes"]) for count, answer in answers.items() if answer.get("database_bytes")]
    if not points:
        return model
    fixed, of_rows = line_through(points)
    return replace(model, database_fixed_bytes=fixed, database_rows_bytes=of_rows)


def _setting(count: int, answer: Mapping[str, Any], model: QueryModel) -> QuerySetting:
    return QuerySetting(
        count=count, predicted_client_bytes=model.client_bytes(count),
        measured_client_bytes=answer.get("client_bytes"), predicted_database_bytes=model.database_bytes(count),
        measured_database_bytes=answer.get("database_bytes"), seconds=answer.get("seconds"),
        largest_rows=answer.get("largest_rows", 0), note=answer.get("error", ""),
    )  # fmt: skip


def _refuse_counts(counts: Sequence[int]) -> None:
    wrong = [count for count in counts if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    if not counts or wrong:
        message = f"{wrong[0]!r} is none; give whole numbers from 1" if wrong else "none are given; try (1, 2, 4, 8)"
        raise ConfigError([Problem("counts", message)])


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
