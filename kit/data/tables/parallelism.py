"""Parallelism: how many columns are worked on at once, and by how many workers each, told before it starts.

What is asked for is `num_concurrent_features` columns at once with `num_cpus` workers each. Their product is kept to
the cores there are: first the columns, then the workers of each. Asking for more is no error, since the defaults are
those of a large machine, but it is said what was cut and why.
"""

from __future__ import annotations

from dataclasses import dataclass

from kit.config import Queries
from kit.errors import ConfigError, Problem


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
