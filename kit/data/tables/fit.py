"""Fitting features: one pass over each column, several columns at once, each by several workers.

A column is read query chunk after query chunk, so that the database and this process hold one at a time; its record
batches go to the column's workers, at most two for each of them wait, and what they find is merged. What is found is
the same for every number of query chunks, columns at once and workers (see `kit.data.tables.statistics`). When one
column fails, the others end at their next batch, and the failure is the answer.

Parallelism: how many columns are worked on at once, and by how many workers each, told before it starts.

What is asked for is `num_concurrent_features` columns at once with `num_cpus` workers each. Their product is kept to
the cores there are: first the columns, then the workers of each. Asking for more is no error, since the defaults are
those of a large machine, but it is said what was cut and why.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kit.config import Config, Queries
from kit.data.tables.declare import FITTED, Column, choose_columns
from kit.data.tables.features import Features, sketch_width
from kit.data.tables.source import Query, TableSource, plan_partitions
from kit.data.tables.statistics import FittedColumn, Statistic, new_statistic
from kit.errors import ConfigError, Problem, QueryError
from kit.machine.machine import hardware

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """So many columns at once, with so many workers each."""

    columns: int
    """Columns there are to work on."""
    columns_at_once: int
    workers_per_column: int
    reasons: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """Workers that run at the same time, at most."""
        return self.columns_at_once * self.workers_per_column

    def __str__(self) -> str:
        if not self.columns:
            return "No column has to be read before its features are known"
        lines = [
            f"Processing {_counted(self.columns_at_once, 'column')} concurrently, of {self.columns}",
            f"At most {_counted(self.workers_per_column, 'worker')} per column",
            f"At most {_counted(self.workers, 'worker')} in all",
        ]
        return "\n".join([*lines, *(f"- {reason}" for reason in self.reasons)])


def plan_parallelism(columns: int, cores: int, *, num_concurrent_features: int, num_cpus: int) -> Parallelism:
    """What of the parallelism asked for `cores` can carry.

    Args:
        columns: Columns to work on.
        cores: Cores there are.
        num_concurrent_features: Columns to work on at once.
        num_cpus: Workers of one column.

    Raises:
        ConfigError: for less than one column at once or one worker.
    """
    asked = {"num_concurrent_features": num_concurrent_features, "num_cpus": num_cpus}
    wrong = [
        Problem(f"queries.{name}", f"is {value}, but must be at least 1") for name, value in asked.items() if value < 1
    ]
    if wrong:
        raise ConfigError(wrong)
    at_once = max(1, min(num_concurrent_features, columns, cores))
    workers = max(1, min(num_cpus, cores // at_once))
    product = num_concurrent_features * num_cpus
    why = (
        f"num_concurrent_features {num_concurrent_features} x num_cpus {num_cpus} = {product} workers, but there "
        f"{'is 1 core' if cores == 1 else f'are {cores} cores'}: no more are started"
    )
    return Parallelism(
        columns=columns, columns_at_once=at_once, workers_per_column=workers, reasons=(why,) if product > cores else ()
    )


def parallelism_of(queries: Queries, columns: int, cores: int) -> Parallelism:
    """That of a config's queries."""
    return plan_parallelism(
        columns, cores, num_concurrent_features=queries.num_concurrent_features, num_cpus=queries.num_cpus
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
