"""assign: which column each row is given so that the sum of what they take is least; exact.

The Hungarian method as shortest augmenting paths (Kuhn 1955; Jonker and Volgenant 1987), O(rows² × columns): one row
after another is placed, and those placed before make room along the cheapest path. Numpy is loaded when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def assign(costs: ArrayLike) -> tuple[int, ...]:
    """The column of each row, no two the same.

    Args:
        costs: (rows, columns), finite, with no more rows than columns.

    Raises:
        PlanError: for costs of another form.
    """
    import numpy as np

    given = np.asarray(costs, dtype=np.float64)
    if given.ndim != 2 or given.shape[0] > given.shape[1] or not np.isfinite(given).all():
        raise PlanError(f"costs {given.shape} are no finite (rows, columns) with at least as many columns as rows")
    rows, columns = given.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns + 1)
    taken = np.full(columns + 1, -1)  # the row that has each column; the last column is where a search begins
    for row in range(rows):
        _place(row, given, of_row, of_column, taken)
    found = dict(zip(taken[:-1].tolist(), range(columns), strict=True))
    return tuple(found[row] for row in range(rows))


def _place(row: int, costs: NDArray[Any], of_row: NDArray[Any], of_column: NDArray[Any], taken: NDArray[Any]) -> None:
    """Give `row` a column, by the cheapest path of rows that move on."""
    import numpy as np

    columns = costs.shape[1]
    least, before = np.full(columns, np.inf), np.full(columns, columns)
    seen = np.zeros(columns + 1, bool)
    at, taken[columns] = columns, row
    while taken[at] >= 0:
        seen[at] = True
        here = taken[at]
        reduced = costs[here] - of_row[here] - of_column[:-1]
        nearer = ~seen[:-1] & (reduced < least)
        least[nearer], before[nearer] = reduced[nearer], at
        open_ = np.where(seen[:-1], np.inf, least)
        following = int(open_.argmin())
        step = open_[following]
        of_row[taken[seen]] += step
        of_column[seen] -= step
        least[~seen[:-1]] -= step
        at = following
    while at != columns:
        taken[at] = taken[before[at]]
        at = int(before[at])
