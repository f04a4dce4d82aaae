"""LoaderUsed: how the loader of a fit really stood, so that the record of the trial says what ran.

A config says what kit makes a loader with; calibration, data that was given settings, and a loader of the caller's own
have others. At the first batch, rank 0 reads them off the loader that trains, writes one event, and puts them into the
config of the run directory, which every report reads. Batches of a loader that does not say how large they are count
as large as the largest so far, as they do in a prediction of memory.
"""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from kit.config import Config
from kit.data.epoch_data import EpochData
from kit.memory.batch_shapes import samples_in
from kit.memory.batches import own_batch_size
from kit.run.batch_rule import BATCH, BatchRule
from kit.run.jobs.context import Context
from kit.run.signing import replace_config
from kit.run.what_ran import with_values

_FIELDS = [info.path for info in Config.fields() if info.path.startswith("loader.")]


class LoaderUsed(Callback):
    """Writes `loader_used`, and again when a larger batch comes; corrects the config of the run."""

    def __init__(self, context: Context) -> None:
        self._context, self._asked = context, context.config
        self._largest = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        samples = samples_of(trainer, batch)
        if self._context.rank == 0 and samples > self._largest:
            self._largest = samples
            self._tell({BATCH: samples, **settings_of(trainer)})

    def _tell(self, settings: dict[str, Any]) -> None:
        self._warn(settings[BATCH])
        asked, used = self._asked, with_values(self._asked, settings)
        changed = asked.diff(used)
        self._context.writer.write(
            "loader_used",
            asked={path: before for path, (before, _) in changed.items()},
            used={path: now for path, (_, now) in changed.items()},
        )
        if used != self._context.config:
            self._context.config = used
            with contextlib.suppress(OSError):  # a full disk must not end a training; the event says the same
                replace_config(self._context.paths, used)

    def _warn(self, size: int) -> None:
        """Say what could not be known before the loader was made."""
        told = BatchRule.of_environment(self._context.environment)
        if told is not None and told.size != size and told.made(size).is_worth_a_warning:
            self._context.writer.write("warned", message=told.made(size).note)


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The `loader` settings that the training loader stands at, as far as it has them."""
    loader, data = _first(trainer.train_dataloader), getattr(trainer, "datamodule", None)
    if isinstance(loader, DataLoader):
        return _of_torch(loader)
    own = getattr(data, "config", None) if isinstance(data, EpochData) else None
    return {path: own.get(path) for path in _FIELDS} if isinstance(own, Config) else {}


def samples_of(trainer: Trainer, batch: Any) -> int:
    """Samples in the batch at hand: as many as its loader says, but for an epoch's last, which may be smaller."""
    loader = _first(trainer.train_dataloader)
    found, own = samples_in(batch), own_batch_size(loader)
    if own is None:
        return found or 1
    if found is None or found > own:
        return own
    return found if trainer.is_last_batch or isinstance(loader.dataset, IterableDataset) else own


def _first(loaders: Any) -> Any:
    """Of several loaders the first: its samples are those that a step is said to have."""
    if isinstance(loaders, dict) and loaders:
        return _first(next(iter(loaders.values())))
    return _first(loaders[0]) if isinstance(loaders, list | tuple) and loaders else loaders


def _of_torch(loader: DataLoader[Any]) -> dict[str, Any]:
    found = {
        "num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor, "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last if own_batch_size(loader) else None, "shuffle": _shuffles(loader.sampler),
    }  # fmt: skip
    return {f"loader.{name}": value for name, value in found.items() if value is not None}


def _shuffles(sampler: Any) -> bool | None:
    """None for a sampler whose order nobody knows."""
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    known = {RandomSampler: True, SequentialSampler: False}
    return known.get(type(sampler))
