"""Fitting features: one pass over each column, several columns at once, each by several workers.

A column is read query chunk after query chunk, so that the database and this process hold one at a time; its record
batches go to the column's workers, at most two for each of them wait, and what they find is merged. What is found is
the same for every number of query chunks, columns at once and workers (see `kit.data.tables.statistics`). When one
column fails, the others end at their next batch, and the failure is the answer.

`num_concurrent_features` columns are worked on at once, with `num_cpus` workers each. Their product is kept to the
cores there are: first the columns, then the workers of each. Asking for more is no error, since the defaults are those
of a large machine, but it is said what was cut and why.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from kit.config import Config
from kit.data.tables.features import Features, sketch_width
from kit.data.tables.source import Query, TableSource, plan_partitions, refuse_no_table
from kit.data.tables.statistics import FITTED, Column, FittedColumn, Statistic, choose_columns, new_statistic
from kit.errors import ConfigError, Problem, QueryError
from kit.machine.machine import hardware
from kit.units import plural

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
    """Fit the features that turn the events of an entity into numbers, in one pass over each column of a table.

    Args:
        source: The table.
        config: Its section `queries` says in how many query chunks the table is read, and by how many workers.
        kinds: What a column is where its Arrow type does not say: numeric, category, identifier, text, time or skip.
            By type, numbers are numeric, texts and booleans categories, dates and timestamps times.
        columns: Columns that become features. Empty takes all but the entity.
        where: A condition on rows, in the database's SQL.
        sketch_quality: Width of the sketches; 1 has 128 buckets.
        target_fraction: Fraction of an entity's events, the latest, that a model predicts. 0 predicts none.
        announce: Is called with the number of workers before anything is read. None stays silent.

    Returns:
        The features, which `kit.data.EventData` takes.

    Raises:
        ConfigError: for impossible columns, kinds and numbers, and a category with too many values.
        PartitionError: when a row has no entity.
        QueryError: when a query fails, and when the data changed meanwhile.

    Example:
        >>> table = kit.data.open_table(shop, table="purchases", main_entity_column="customer_id")
        >>> features = kit.data.fit_features(table, columns=["price"], announce=None)
    """
    refuse_no_table(source, "fit_features")
    settings = (config or Config()).queries
    sketch_width(sketch_quality)
    if not 0 <= target_fraction < 1:
        raise ConfigError([Problem("target_fraction", f"is {target_fraction}, but must be from 0 to below 1")])
    chosen = choose_columns(source.schema(), source.main_entity_column, kinds or {}, columns)
    to_fit = [column for column in chosen if column.kind in FITTED]
    parallelism = plan_parallelism(
        len(to_fit), hardware().cores, num_concurrent_features=settings.num_concurrent_features,
        num_cpus=settings.num_cpus,
    )  # fmt: skip
    if announce is not None:
        announce(str(parallelism))
    queries = [
        Query(where=where, partition=partition, batch_rows=settings.batch_rows)
        for partition in plan_partitions(source, settings.fit_query_chunks)
    ]
    state, stop = source.state(), threading.Event()
    with ThreadPoolExecutor(parallelism.columns_at_once, "kit-column") as pool:
        workers = parallelism.workers_per_column
        tasks = {column.name: pool.submit(_fit, source, column, queries, workers, stop) for column in to_fit}
        try:
            fitted = {name: task.result() for name, task in tasks.items()}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if source.state() != state:
        raise QueryError(
            f"{source.name} changed while its features were fitted, so they are of no one state; fit again"
        )
    return Features(
        entity_column=source.main_entity_column, date_column=source.date_column,
        columns=tuple(fitted.get(c.name) or FittedColumn(name=c.name, kind=c.kind, type=c.type) for c in chosen),
        sketch_quality=float(sketch_quality), target_fraction=float(target_fraction),
    )  # fmt: skip


def _fit(
    source: TableSource, column: Column, queries: Sequence[Query], workers: int, stop: threading.Event
) -> FittedColumn:
    """One pass over a column; it ends early, with what it has found, when `stop` is set."""

    def statistic_of(values: pyarrow.Array) -> Statistic:
        found = new_statistic(column)
        found.add(values)
        return found

    total = new_statistic(column)
    waiting: deque[Future[Statistic]] = deque()
    batches = (batch for query in queries for batch in source.read(replace(query, columns=(column.name,))))
    with ThreadPoolExecutor(workers, f"kit-column-{column.name}") as pool:
        for batch in takewhile(lambda _: not stop.is_set(), batches):
            waiting.append(pool.submit(statistic_of, batch.column(0)))
            if len(waiting) > _WAITING * workers:
                total.merge(waiting.popleft().result())
        for task in waiting:
            total.merge(task.result())
    return total.fitted()


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
            f"Processing {plural(self.columns_at_once, 'column')} concurrently, of {self.columns}",
            f"At most {plural(self.workers_per_column, 'worker')} per column",
            f"At most {plural(self.workers, 'worker')} in all",
        ]
        return "\n".join([*lines, *(f"- {reason}" for reason in self.reasons)])


def plan_parallelism(columns: int, cores: int, *, num_concurrent_features: int, num_cpus: int) -> Parallelism:
    """How much of the requested parallelism `cores` can carry.

    Args:
        columns: Columns to work on.
        cores: Cores there are.
        num_concurrent_features: Columns to work on at once.
        num_cpus: Workers of one column.

    Raises:
        ConfigError: for less than one column at once or one worker.
    """
    requested = {"num_concurrent_features": num_concurrent_features, "num_cpus": num_cpus}
    problems = [
        Problem(f"queries.{name}", f"is {value}, but must be at least 1")
        for name, value in requested.items()
        if value < 1
    ]
    if problems:
        raise ConfigError(problems)
    at_once = max(1, min(num_concurrent_features, columns, cores))
    product = num_concurrent_features * num_cpus
    why = (
        f"num_concurrent_features {num_concurrent_features} x num_cpus {num_cpus} = {product} workers, but there "
        f"{'is 1 core' if cores == 1 else f'are {cores} cores'}: no more are started"
    )
    return Parallelism(
        columns=columns, columns_at_once=at_once, workers_per_column=max(1, min(num_cpus, cores // at_once)),
        reasons=(why,) if product > cores else (),
    )  # fmt: skip
