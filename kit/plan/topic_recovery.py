"""compare_topics: how much of the topics of a corpus a model has found.

A model finds topics in any order. Each true one is paired with one that was found, so that the cosines of their terms
add to the most (`kit.plan.assignment`, exact). A pair is described by the cosine of its terms, from 0 to 1, and by the
correlation (Pearson) of its shares over the documents, from -1 to 1; NaN where one of them is the same in all.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError
from kit.plan.assignment import assign
from kit.plan.topics import Topics
from kit.tables import FRAME, html_table, text_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
