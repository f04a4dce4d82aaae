"""Corpus: documents of which the topics are known, any row block first, of any size.

Term counts are Poisson with mean `length` × share × term, so a document has Poisson(`length`) terms in all and their
kinds are multinomial: what tinytopics draws, without a draw for each document. Shares are Dirichlet(`mixing`) and terms
of a topic Dirichlet(`spread`). Documents are drawn in groups of GROUP, each from a generator of its own: equal seeds
give equal documents however they are cut into row blocks, and memory holds one group and the topics.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kit.errors import ConfigError, Problem
from kit.plan.topics import Topics

GROUP = 128


class Corpus:
    """`rows` is what `kit.write_rows` takes, with `shape`.

    Args:
        documents: Rows.
        terms: Columns.
        topics: Topics the documents are mixtures of.
        length: Mean number of terms in a document.
        seed: Equal seeds give equal corpora.
        mixing: Below 1 a document is mostly of one topic, above it of all of them.
        spread: Below 1 a topic is mostly of a few terms, above it of all of them.

    Raises:
        ConfigError: for numbers below 1, and for a length, mixing or spread that is not above 0.
    """

    def __init__(
        self,
        documents: int = 2000,
        terms: int = 1000,
        topics: int = 8,
        length: float = 200.0,
        seed: int = 13,
        mixing: float = 0.3,
        spread: float = 0.1,
    ) -> None:
        counts = {"documents": documents, "terms": terms, "topics": topics}
        sizes = {"length": length, "mixing": mixing, "spread": spread}
        problems = [Problem(name, f"{value!r}: use 1 or more") for name, value in counts.items() if value < 1]
        problems += [
            Problem(name, f"{value!r}: use a number above 0") for name, value in sizes.items() if not value > 0
        ]
        if problems:
            raise ConfigError(problems)
        self.topics, self.length, self.seed, self.mixing, self.spread = topics, length, seed, mixing, spread
        self.shape = (documents, terms)
        """(documents, terms)."""

    @cached_property
    def topic_terms(self) -> NDArray[np.float64]:
        """How likely each term is in each topic, (topics, terms)."""
        random = np.random.default_rng([self.seed, 0])
        return random.dirichlet(np.full(self.shape[1], self.spread), size=self.topics)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Counts of documents `start` up to, not including, `stop`, (documents, terms)."""
        made = np.empty((stop - start, self.shape[1]), np.float32)
        for first, last in self._groups(start, stop):
            random, shares = self._group(first // GROUP)
            counts = random.poisson(self.length * (shares @ self.topic_terms))
            begin = first // GROUP * GROUP
            made[first - start : last - start] = counts[first - begin : last - begin]
        return made

    def shares(self, start: int = 0, stop: int | None = None) -> NDArray[np.float64]:
        """How much of each of those documents is of each topic, (documents, topics)."""
        stop = self.shape[0] if stop is None else stop
        parts = [
            self._group(first // GROUP)[1][first % GROUP : first % GROUP + last - first]
            for first, last in self._groups(start, stop)
        ]
        return np.concatenate([np.empty((0, self.topics)), *parts])

    @property
    def truth(self) -> Topics:
        """What a topic model should find."""
        return Topics(self.shares(), self.topic_terms)

    def _groups(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of groups that lie between two documents.

        Raises:
            IndexError: for documents that there are not.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"documents {start} to {stop}: there are {self.shape[0]}, numbered from 0")
        edges = [start, *range((start // GROUP + 1) * GROUP, stop, GROUP), stop]
        return [(first, last) for first, last in pairwise(edges) if last > first]

    def _group(self, number: int) -> tuple[np.random.Generator, NDArray[np.float64]]:
        """Shares of a whole group, and the generator that goes on with its counts."""
        random = np.random.default_rng([self.seed, 1, number])
        return random, random.dirichlet(np.full(self.topics, self.mixing), size=GROUP)
