"""Subject: data whose loader can be set, tried at one setting after another and then handed to a Trainer.

kit's own loader takes every dial, its loader of rows processes and prefetch factor. A torch DataLoader takes processes
and prefetch factor: it is copied for each try, so the one that trains has not been iterated. An iterable data set keeps
its number of processes, unless the config names candidates: where it does not share its samples out among them, more
processes would train on each sample several times. What makes its batches in another way is refused. Loaders for
validation stay as they are.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from kit.config import Config, Loader
from kit.data.module import PatchData
from kit.data.rows.module import RowData
from kit.data.stores import redact
from kit.errors import ConfigError, Problem
from kit.plan.calibration import LoaderSetting

Data = dict[str, Any]
"""What `Trainer.fit` takes: `datamodule`, or `train_dataloaders`."""


class Subject(Protocol):
    """The data of one rank."""

    own: bool
    """Whether kit's engine reads it."""
    workers_change_nothing: bool
    """Whether any number of processes gives the same samples."""

    def present(self) -> LoaderSetting:
        """Where its dials stand."""

    def loader(self, setting: LoaderSetting, turn: int) -> AbstractContextManager[Iterable[Any]]:
        """Its batches at a setting; another `turn` draws other samples where the order is random."""

    def identity(self) -> dict[str, Any]:
        """What must be the same for a result to hold, as JSON values."""


class RowSubject:
    """Rows, whose loader reads whole batches in threads or processes."""

    own = False
    workers_change_nothing = True

    def __init__(self, data: RowData) -> None:
        self._data = data

    def present(self) -> LoaderSetting:
        loader = self._data.config.loader
        return LoaderSetting(num_workers=loader.num_workers, prefetch_factor=loader.prefetch_factor)

    def loader(self, setting: LoaderSetting, turn: int) -> AbstractContextManager[Iterable[Any]]:
        return _at(self._data, setting, turn)

    def identity(self) -> dict[str, Any]:
        rows = self._data.rows
        order = self._data.order().identity()
        return {"place": rows.place, "shape": [*rows.shape], "dtype": rows.stored_dtype, "order": order}


class OwnSubject:
    """kit's engine."""

    own = True
    workers_change_nothing = True

    def __init__(self, data: PatchData) -> None:
        self._data = data
        data.setup()
        assert data.dataset is not None
        self.dataset = data.dataset

    @property
    def config(self) -> Config:
        """As its data module has it."""
        return self._data.config

    def present(self) -> LoaderSetting:
        return setting_of(self.config.loader)

    def loader(self, setting: LoaderSetting, turn: int) -> AbstractContextManager[Iterable[Any]]:
        return _at(self._data, setting, turn)

    def identity(self) -> dict[str, Any]:
        found = self.dataset.manifest
        stored = [found.stored_bytes, sum(item.crc32c for item in found.objects)] if found else []
        arrays = [str(info) for info in self.dataset.select(self.config.data.variables)]
        return {"url": redact(self.dataset.url), "arrays": arrays, "stored": stored}


class TorchSubject:
    """A torch DataLoader."""

    own = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.workers_change_nothing = not isinstance(loader.dataset, IterableDataset)

    def present(self) -> LoaderSetting:
        factor = self._loader.prefetch_factor or Loader().prefetch_factor
        return LoaderSetting(num_workers=self._loader.num_workers, prefetch_factor=factor)

    @contextmanager
    def loader(self, setting: LoaderSetting, turn: int) -> Iterator[Iterable[Any]]:  # noqa: ARG002 - its sampler draws
        tried = set_loader(self._loader, setting)
        try:
            yield tried
        finally:
            shutdown = getattr(getattr(tried, "_iterator", None), "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()

    def identity(self) -> dict[str, Any]:
        dataset = self._loader.dataset
        kind = type(dataset)
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}", "samples": size, "source": _source(kind),
            "batch_size": self._loader.batch_size or 0,
        }  # fmt: skip


@contextmanager
def _at(data: PatchData | RowData, setting: LoaderSetting, turn: int) -> Iterator[Iterable[Any]]:
    """The loader of a copy of kit's own data, at a setting."""
    tried = copy.copy(data)
    tried.config, tried.loader = data.config.replace(setting.changes), None
    loader = tried.train_dataloader()
    loader.set_epoch(turn)
    try:
        yield loader
    finally:
        loader.close()


def subject_of(data: Data) -> Subject:
    """The subject in what `Trainer.fit` takes.

    Raises:
        ConfigError: for a loader whose dials cannot be set.
    """
    module = data.get("datamodule")
    if isinstance(module, PatchData):
        return OwnSubject(module)
    if isinstance(module, RowData):
        return RowSubject(module)
    if isinstance(module, LightningDataModule):
        module.prepare_data()
        module.setup("fit")
    loader = data["train_dataloaders"] if module is None else module.train_dataloader()
    if not isinstance(loader, DataLoader):
        message = f"the settings of {type(loader).__name__} cannot be changed; give a DataLoader or a Dataset"
        raise ConfigError([Problem("data", message)])
    return TorchSubject(loader)


def apply_setting(data: Data, setting: LoaderSetting) -> Data:
    """The same data, read at `setting`."""
    module = data.get("datamodule")
    if module is None:
        return {"train_dataloaders": set_loader(data["train_dataloaders"], setting)}
    if isinstance(module, PatchData | RowData):
        module.config = module.config.replace(setting.changes)
        return data
    own: Callable[[], Any] = module.train_dataloader
    module.__dict__["train_dataloader"] = lambda: set_loader(own(), setting)
    return {"datamodule": module}


def setting_of(loader: Loader) -> LoaderSetting:
    """Where a config's dials stand."""
    return LoaderSetting(
        num_workers=loader.num_workers, prefetch_factor=loader.prefetch_factor, batches_ahead=loader.batches_ahead,
        requests_in_flight=loader.requests_in_flight, cache_bytes=loader.cache_bytes,
    )  # fmt: skip


_KEPT = ("collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")


def set_loader(loader: DataLoader[Any], setting: LoaderSetting) -> DataLoader[Any]:
    """A loader of the same batches at another number of processes and prefetch factor.

    A plain one is made anew, so that what Lightning knows of it is true when it puts a sampler of its own in place.
    """
    workers = setting.num_workers
    dials: dict[str, Any] = {"num_workers": workers, "prefetch_factor": setting.prefetch_factor if workers else None}
    if type(loader) is not DataLoader:
        changed = copy.copy(loader)
        changed.__dict__.update(**dials, _iterator=None)
        return changed
    dials["multiprocessing_context"] = loader.multiprocessing_context if workers else None
    dials["persistent_workers"] = loader.persistent_workers and workers > 0
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(loader.dataset, **kept, **dials, **_batching(loader))


def _batching(loader: DataLoader[Any]) -> dict[str, Any]:
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    sampler = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": loader.batch_size, "drop_last": loader.drop_last, **sampler}


def _source(kind: type) -> str:
    """Digits of the class's text, so that an edited transform counts as other data; empty where there is no text."""
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
