"""Fitting features: one pass over each column, several columns at once, each by several workers.

A column is read query chunk after query chunk, so that the database and this process hold one at a time; its record
batches go to the column's workers, at most two for each of them wait, and what they find is merged. What is found is
the same for every number of query chunks, columns at once and workers (see `kit.data.tables.statistics`). When one
column fails, the others end at their next batch, and the failure is the answer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kit.config import Config
from kit.data.tables.columns import FITTED, Column, choose_columns
from kit.data.tables.features import Features
from kit.data.tables.parallelism import parallelism_of
from kit.data.tables.partition import plan_partitions
from kit.data.tables.sketching import sketch_width
from kit.data.tables.source import Query, TableSource
from kit.data.tables.statistics import FittedColumn, Statistic, new_statistic
from kit.errors import ConfigError, Problem, QueryError
from kit.machine import hardware

if TYPE_CHECKING:
    import pyarrow

_WAITING = 2
"""Batches that wait for each worker."""


def fit_features(
    source: TableSource,
    config: Config | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    columns: Sequence[str] = (),
    where: str = "",
    sketch_quality: float = 1.0,
    target_fraction: float = 0.25,
    announce: Callable[[str], object] | None = print,
) -> Features:
    """What turns the events of an entity into numbers, from one pass over each column of a table.

    Args:
        source: The table.
        config: `queries` says in how many query chunks it is read, how many columns at once and by how many workers.
        kinds: What a column is taken for where its Arrow type does not say: numeric, category, identifier, text, time
            or skip. Numbers are numeric, texts and booleans categories, dates and moments times.
        columns: Columns to make features of; empty for all but the entity.
        where: A condition in the database's SQL, which the rows that are fitted fulfil.
        sketch_quality: Width of the sketches, 1 for 128 buckets.
        target_fraction: Share of an entity's events, the latest, that a model foretells; 0 for none.
        announce: Told how many workers there will be, before anything is read; None for nobody.

    Raises:
        ConfigError: for columns, kinds and numbers that cannot be, and a category of too many values.
        PartitionError: when a row has no entity.
        QueryError: when a query fails, and when the data changed meanwhile.
    """
    settings = config or Config()
    _check(sketch_quality, target_fraction)
    chosen = choose_columns(source.schema(), source.main_entity_column, kinds or {}, columns)
    to_fit = [column for column in chosen if column.kind in FITTED]
    parallelism = parallelism_of(settings.queries, len(to_fit), hardware().cores)
    if announce is not None:
        announce(str(parallelism))
    queries = [
        Query(where=where, partition=partition, batch_rows=settings.queries.batch_rows)
        for partition in plan_partitions(source, settings.queries.fit_query_chunks)
    ]
    state = source.state()
    found = _fit_all(source, to_fit, queries, parallelism.columns_at_once, parallelism.workers_per_column)
    if source.state() != state:
        raise QueryError(
            f"{source.name} changed while its features were fitted, so they are of no one state; fit again"
        )
    return Features(
        entity_column=source.main_entity_column, date_column=source.date_column,
        columns=tuple(found.get(column.name) or _as_it_is(column) for column in chosen),
        sketch_quality=float(sketch_quality), target_fraction=float(target_fraction),
    )  # fmt: skip


def _check(sketch_quality: float, target_fraction: float) -> None:
    sketch_width(sketch_quality)
    if not 0 <= target_fraction < 1:
        raise ConfigError([Problem("target_fraction", f"is {target_fraction}, but must be from 0 to below 1")])


def _as_it_is(column: Column) -> FittedColumn:
    return FittedColumn(name=column.name, kind=column.kind, type=column.type)


def _fit_all(
    source: TableSource, columns: Sequence[Column], queries: Sequence[Query], at_once: int, workers: int
) -> dict[str, FittedColumn]:
    stop = threading.Event()
    with ThreadPoolExecutor(at_once, "kit-column") as pool:
        tasks = [pool.submit(_fit, source, column, queries, workers, stop) for column in columns]
        try:
            found = [task.result() for task in tasks]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return {column.name: fitted for column, fitted in zip(columns, found, strict=True)}


def _fit(
    source: TableSource, column: Column, queries: Sequence[Query], workers: int, stop: threading.Event
) -> FittedColumn:
    total = new_statistic(column)
    waiting: deque[Future[Statistic]] = deque()
    with ThreadPoolExecutor(workers, f"kit-column-{column.name}") as pool:
        for batch in _batches(source, column, queries, stop):
            waiting.append(pool.submit(_statistic_of, column, batch.column(0)))
            if len(waiting) > _WAITING * workers:
                total.merge(waiting.popleft().result())
        for task in waiting:
            total.merge(task.result())
    return FittedColumn(name=column.name, kind=column.kind, type=column.type, **total.fitted())


def _batches(
    source: TableSource, column: Column, queries: Sequence[Query], stop: threading.Event
) -> Iterator[pyarrow.RecordBatch]:
    for query in queries:
        one = Query(columns=(column.name,), where=query.where, partition=query.partition, batch_rows=query.batch_rows)
        for batch in source.read(one):
            if stop.is_set():
                return
            yield batch


def _statistic_of(column: Column, values: pyarrow.Array) -> Statistic:
    found = new_statistic(column)
    found.add(values)
    return found
