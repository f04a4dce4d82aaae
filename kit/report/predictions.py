"""What reading one sample should cost, worked out from the config and the store it names, to stand beside what it did.

Requests are the expected different chunks of a whole batch over all variables, divided by its samples: the engine
fetches each chunk of a batch once. Bytes are those requests times a chunk's uncompressed bytes times the store's own
ratio of stored to uncompressed, known only for a store that kit built. A store that is gone, unfinished or does not
fit the config predicts nothing; that is no error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kit.config import Config
from kit.errors import KitError

if TYPE_CHECKING:
    from kit.data.dataset import Dataset


class Predictions:
    """Predictions for many configs; each store is opened once."""

    def __init__(self) -> None:
        self._datasets: dict[tuple[str, str], Dataset | None] = {}
        self._answers: dict[str, Mapping[str, float]] = {}

    def of(self, config: Config) -> Mapping[str, float]:
        """`requests_per_sample` and, when the store tells, `bytes_per_sample`; empty when nothing can be said."""
        if config.fingerprint not in self._answers:
            dataset = self._open(config)
            self._answers[config.fingerprint] = {} if dataset is None else _predict(config, dataset)
        return self._answers[config.fingerprint]

    def _open(self, config: Config) -> Dataset | None:
        from kit.data.dataset import open_dataset

        key = (config.data.url, config.data.credentials)
        if key not in self._datasets:
            try:
                self._datasets[key] = open_dataset(*key)
            except KitError:
                self._datasets[key] = None
        return self._datasets[key]


def _predict(config: Config, dataset: Dataset) -> Mapping[str, float]:
    from kit.data.layout import price_stored

    try:
        plan = price_stored(config, dataset)
    except KitError:
        return {}
    requests = plan.requests_per_batch / config.loader.batch_size
    stored = _stored_fraction(dataset)
    known = {} if stored is None else {"bytes_per_sample": requests * plan.chunk_bytes * stored}
    return {"requests_per_sample": requests, **known}


def _stored_fraction(dataset: Dataset) -> float | None:
    """Stored bytes per uncompressed byte."""
    whole = sum(info.nbytes for info in dataset.arrays.values())
    return dataset.manifest.stored_bytes / whole if dataset.manifest and whole else None
