"""Topics: what a topic model has found, or what a corpus was made of: shares of documents and terms of topics.

Rows of both are probabilities. They are kept in an .npz file of two plain arrays, which is written beside and renamed:
it is whole or not there. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.config import resolve_path
from kit.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray


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
