"""Topics: what a topic model has found, or what a corpus was made of: shares of documents and terms of topics.

Rows of both are probabilities. They are kept in an .npz file of two plain arrays, which is written beside and renamed:
it is whole or not there. Nothing in it is ever unpickled.

compare_topics: how much of the topics of a corpus a model has found.

A model finds topics in any order. Each true one is paired with one that was found, so that the cosines of their terms
add to the most (`kit.models.topic_recovery`, exact). A pair is described by the cosine of its terms, from 0 to 1, and
by the correlation (Pearson) of its shares over the documents, from -1 to 1; NaN where one of them is the same in all.

assign: which column each row is given so that the sum of what they take is least; exact.

The Hungarian method as shortest augmenting paths (Kuhn 1955; Jonker and Volgenant 1987), O(rows² × columns): one row
after another is placed, and those placed before make room along the cheapest path. Numpy is loaded when it is used.
"""

from __future__ import annotations

import math
import os
import statistics
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import resolve_path
from kit.errors import ConfigError, PlanError, StoreError
from kit.tables import FRAME, html_table, text_table

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class Topics:
    """Shares and terms.

    Raises:
        ConfigError: when their shapes do not fit each other.
    """

    shares: NDArray[Any]
    """How much of each document is of each topic, (documents, topics)."""
    terms: NDArray[Any]
    """How likely each term is in each topic, (topics, terms)."""

    def __post_init__(self) -> None:
        if self.shares.ndim != 2 or self.terms.ndim != 2 or self.shares.shape[1] != self.terms.shape[0]:
            shapes = f"shares {self.shares.shape} and terms {self.terms.shape}"
            raise ConfigError(f"{shapes} are not (documents, topics) and (topics, terms)")

    @property
    def count(self) -> int:
        """Number of topics."""
        return len(self.terms)

    def __repr__(self) -> str:
        documents, terms = len(self.shares), self.terms.shape[1]
        return f"{self.count} topics of {documents:,} documents and {terms:,} terms"

    def save(self, path: str | Path) -> Path:
        """Write an .npz file, in place of one that is there; returns where it is.

        Raises:
            StoreError: when it cannot be written.
        """
        import numpy as np

        place = resolve_path(path)
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.savez(file, shares=self.shares, terms=self.terms)
            part.replace(place)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StoreError(f"{place} cannot be written: {error.strerror or error}; give another place") from error
        return place


def open_topics(path: str | Path) -> Topics:
    """Topics that `Topics.save`, or `kit.models.PoissonNMF` with a `save_path`, wrote.

    Raises:
        StoreError: when there is no such file, or it holds something else.
    """
    import numpy as np

    place = resolve_path(path)
    try:
        with np.load(place, allow_pickle=False) as kept:
            return Topics(kept["shares"], kept["terms"])
    except FileNotFoundError:
        raise StoreError(f"{place} is not there; a fit writes it at its end, with model.arguments.save_path") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise StoreError(f"{place} holds no topics ({error}); it is written by kit.models.PoissonNMF") from error


_COLUMNS = ("true topic", "found as", "share of all", "cosine of terms", "correlation of shares")


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicRecovery:
    """Each true topic beside the one that was found for it."""

    order: tuple[int, ...]
    """The topic found, for each true one."""
    sizes: tuple[float, ...]
    """How much of all documents is of each true topic."""
    cosines: tuple[float, ...]
    correlations: tuple[float, ...]
    aligned: Topics
    """What was found, in the order of the true topics."""

    @property
    def median_cosine(self) -> float:
        return statistics.median(self.cosines)

    @property
    def median_correlation(self) -> float:
        known = [value for value in self.correlations if math.isfinite(value)]
        return statistics.median(known) if known else math.nan

    @property
    def sentence(self) -> str:
        """In one line."""
        worst = min(self.cosines)
        return (
            f"{len(self.order)} topics: median cosine of terms {self.median_cosine:.3f}, least {worst:.3f}; "
            f"median correlation of shares {self.median_correlation:.3f}"
        )

    @property
    def _rows(self) -> list[list[str]]:
        values = zip(self.order, self.sizes, self.cosines, self.correlations, strict=True)
        return [
            [str(place), str(found), f"{size:.1%}", f"{cosine:.3f}", f"{correlation:.3f}"]
            for place, (found, size, cosine, correlation) in enumerate(values)
        ]

    def __repr__(self) -> str:
        return f"{self.sentence}\n{text_table(_COLUMNS, self._rows)}"

    def _repr_html_(self) -> str:
        return f'<div style="{FRAME}">{self.sentence}</div>{html_table(_COLUMNS, self._rows)}'


def compare_topics(found: Topics, truth: Topics) -> TopicRecovery:
    """What was found beside the truth.

    Args:
        found: With at least as many topics.
        truth: Of the same documents and terms.

    Raises:
        ConfigError: when they are not of the same documents and terms, or there are fewer topics than true ones.
    """
    sizes = [(len(one.shares), one.terms.shape[1]) for one in (found, truth)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"found are topics of {sizes[0]} documents and terms, true ones of {sizes[1]}; compare equals"
        )
    if found.count < truth.count:
        raise ConfigError(f"{found.count} topics cannot be paired with {truth.count} true ones; find at least as many")
    cosines = _unit(truth.terms) @ _unit(found.terms).T
    order = assign(-cosines)
    aligned = Topics(found.shares[:, list(order)], found.terms[list(order)])
    return TopicRecovery(
        order=order,
        sizes=tuple(truth.shares.mean(0).tolist()),
        cosines=tuple(cosines[place, column].item() for place, column in enumerate(order)),
        correlations=tuple(_correlations(truth.shares, aligned.shares).tolist()),
        aligned=aligned,
    )


def _unit(rows: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    wide = rows.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))


def _correlations(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Of each column with the same one of the other."""
    import numpy as np

    apart, also = (values - values.mean(0, dtype=np.float64) for values in (one, other))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((apart * also).sum(0) / np.sqrt((apart**2).sum(0) * (also**2).sum(0)))


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
