"""Aggregates: a few numbers of all events of an entity, which the order of the events leaves unchanged bit for bit.

Sums of floats depend on their order; so the values of an entity are sorted before they are added.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kit.data.tables.exact_sum import Floats
from kit.data.tables.hashing import Rows

NUMERIC = ("mean", "lowest", "highest", "missing")
TIME = ("since_last", "since_first", "missing")
LARGEST = 10.0
"""Standard deviations from the mean beyond which a number is cut off: an outlier of one entity is none of the batch."""
_DAY = 86_400_000_000


def of_numbers(values: Floats, entities: Rows, count: int, mean: float, deviation: float) -> Floats:
    """Mean, lowest, highest and the share that is missing, (entity, 4), in standard deviations from the mean.

    Args:
        values: One number an event, (event,); those that are not finite are missing.
        entities: Whose event it is, (event,).
        count: Entities.
        mean: Of all rows of the column.
        deviation: Of all rows of the column.
    """
    known = np.isfinite(values)
    with np.errstate(over="ignore"):
        scaled = np.clip((values[known] - mean) / (deviation or np.inf), -LARGEST, LARGEST)
    extremes = _extremes(scaled, entities[known], count)
    return np.column_stack([*extremes, _missing(known, entities, count)])


def of_moments(moments: Rows, known: NDArray[np.bool_], entities: Rows, count: int, latest: int) -> Floats:
    """log(1 + days) since the last event and since the first, and the share that is missing, (entity, 3).

    Args:
        moments: Microseconds, (event,), of any value where they are not `known`.
        known: Which events have a moment, (event,).
        entities: Whose event it is, (event,).
        count: Entities.
        latest: What days are counted back from; later events count as of that moment.
    """
    ago = np.maximum(latest - moments[known], 0) / _DAY
    _, shortest, longest = _extremes(ago, entities[known], count)
    return np.column_stack([np.log1p(shortest), np.log1p(longest), _missing(known, entities, count)])


def most_frequent(codes: Rows, entities: Rows, count: int, values: int) -> Rows:
    """The most frequent code of each entity, the lowest among equals, (entity,); 0 for one without events.

    Args:
        codes: One an event, (event,), each from 0 to values - 1.
        entities: Whose event it is, (event,).
        count: Entities.
        values: Different codes.
    """
    pairs, often = np.unique(entities * values + codes, return_counts=True)
    whose, what = pairs // values, pairs % values
    order = np.lexsort((what, -often, whose))
    first = order[np.unique(whose[order], return_index=True)[1]]
    found = np.zeros(count, np.int64)
    found[whose[first]] = what[first]
    return found


def _extremes(values: Floats, entities: Rows, count: int) -> tuple[Floats, Floats, Floats]:
    """Mean, lowest and highest of each entity, (entity,) each; 0 for one without values."""
    order = np.lexsort((values, entities))
    values = values[order]
    sizes = np.bincount(entities, minlength=count)
    some = np.flatnonzero(sizes)
    ends = np.cumsum(sizes)[some]
    starts = ends - sizes[some]
    mean, lowest, highest = np.zeros(count), np.zeros(count), np.zeros(count)
    if len(some):
        mean[some] = np.add.reduceat(values, starts) / sizes[some]
        lowest[some], highest[some] = values[starts], values[ends - 1]
    return mean, lowest, highest


def _missing(known: NDArray[np.bool_], entities: Rows, count: int) -> Floats:
    events = np.bincount(entities, minlength=count)
    return np.bincount(entities[~known], minlength=count) / np.maximum(events, 1)
