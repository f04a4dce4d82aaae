"""Measuring a loader at one setting: its batches per second, its CPU time, and the memory of its processes.

The consumer takes a batch, sleeps (or, for a step on the CPU, computes) for the simulated training step, and takes the
next. Pass follows pass: the start of a later pass counts, as it does in training. A batch under way is waited for, so
the time limit is exceeded by one batch at most.

A `Subject` is data whose loader can be set. kit's own loader takes every parameter; its loader of rows and a torch
DataLoader take processes and prefetch factor. A DataLoader is copied for each try, so the one that trains has not been
iterated. An iterable data set keeps its number of processes unless the config names candidates: where it does not share
its samples out among them, more processes would train on each sample several times. Other loaders are refused.
Validation loaders stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from kit.config import Config
from kit.data.patches.module import PatchData
from kit.data.rows.loader import RowData
from kit.data.stores.url import redact
from kit.errors import ConfigError, Problem
from kit.sections import Loader
from kit.studies.calibration.rules import (
    LEAST_SECONDS,
    PARAMETERS,
    SLOW_SECONDS,
    LoaderSetting,
    Measurement,
    block_size,
    long_enough,
    standard_error,
    together,
)


class StoppedError(Exception):
    """The trial was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementLimits:
    """What bounds the measurement of one candidate."""

    timeout_seconds: float
    most_batches: int
    step_seconds: float = 0.0
    step_computes: bool = False
    """Whether a simulated step keeps the cores of this process busy, as one on the CPU does."""
    slow_start_seconds: float = math.inf
    growth: float = 1.0
    """Times as many batches and as much time for what takes longer than that to its first batch."""
    to_the_end: bool = False
    """Whether time and batches are used up, whatever is known before."""
    rival: float = 0.0
    """Batches per second that it is compared with; 0 for nothing."""
    stopping: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Observed:
    """What is measured beside the speed."""

    batch_bytes: int = 0
    busy: float = 0.0
    """CPU seconds of this process a second, the simulated steps left out."""
    worker_bytes: int = 0
    """Memory that the largest process of the loader shares with nobody; 0 for none."""


@dataclass(slots=True)
class _Clock:
    """Times blocks of batches after the warm-up."""

    setting: LoaderSetting
    limits: MeasurementLimits
    warmup_batches: int
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    seen: int = 0
    skipped: int = 0
    """Batches of the warm-up; 0 while it lasts."""
    marks: list[tuple[int, float]] = field(default_factory=list)
    """Batches seen, and when: the end of the warm-up, then the ends of blocks."""
    cpu: float = 0.0
    last: float = 0.0

    def tick(self) -> bool:
        """One more batch has been used; whether that is enough."""
        self.last, self.seen = time.perf_counter(), self.seen + 1
        passed = self.last - self.first
        growth = self.limits.growth if self.first - self.began > self.limits.slow_start_seconds else 1.0
        timeout_seconds, most_batches = growth * self.limits.timeout_seconds, growth * self.limits.most_batches
        if not self.skipped:
            if self.seen >= self.warmup_batches or (self.seen > 1 and passed > timeout_seconds / 2):
                self.skipped, self.cpu, self.marks = self.seen, time.process_time(), [(self.seen, self.last)]
        else:
            batches, seconds = self.seen - self.marks[-1][0], self.last - self.marks[-1][1]
            slow = batches >= together(self.setting) and seconds >= SLOW_SECONDS
            if slow or batches >= block_size(self.setting):
                self.marks.append((self.seen, self.last))
        all_seen = self.seen - self.skipped >= most_batches
        if passed >= timeout_seconds or (all_seen and self.counted_seconds >= LEAST_SECONDS):
            return True
        if self.limits.to_the_end or len(self.marks) < 2:
            return False
        return long_enough(self.paces, self.marks[-1][1] - self.marks[0][1], self.limits.rival)

    @property
    def counted_seconds(self) -> float:
        """Since the warm-up; 0 while it lasts."""
        return self.last - self.marks[0][1] if self.marks else 0.0

    @property
    def paces(self) -> tuple[float, ...]:
        """Seconds a batch of each block."""
        pairs = itertools.pairwise(self.marks)
        return tuple((after - before) / (last - first) for (first, before), (last, after) in pairs)

    @property
    def busy(self) -> float:
        """CPU seconds of this process a second since the warm-up, simulated steps left out; 0 for not known."""
        steps = self.limits.step_seconds * (self.seen - self.skipped)
        seconds = self.counted_seconds - steps
        computed = steps if self.limits.step_computes else 0.0
        return max(0.0, time.process_time() - self.cpu - computed) / seconds if seconds > 0 else 0.0

    def result(self) -> Measurement:
        """Too short for the warm-up, everything after the first batch counts, and the error says so."""
        since, batches = self.marks[0][1] if self.marks else 0.0, self.seen - self.skipped
        warmup_seconds = max(0.0, since - self.first)
        if not self.skipped or not batches:
            since, batches = (self.first, self.seen - 1) if self.seen > 1 else (self.began, self.seen)
        seconds = max(1e-9, self.last - since)
        return Measurement(
            setting=self.setting, batches_per_second=batches / seconds, batches=batches, seconds=seconds,
            error=standard_error(self.paces), first_batch_seconds=self.first - self.began,
            whole_seconds=time.perf_counter() - self.began, paces=self.paces,
            warmup_seconds=warmup_seconds,
        )  # fmt: skip


def measure(
    loader: Iterable[Any], setting: LoaderSetting, limits: MeasurementLimits, observed: Observed, filling: int = 0
) -> Measurement:
    """Batches per second of a loader that stands at `setting`; what else is seen is put into `observed`.

    Args:
        loader: What gives the batches, pass after pass.
        setting: Where it stands.
        limits: When to end.
        observed: Added to.
        filling: Batches that fill a cache first. The warm-up takes half of the time at most.

    Raises:
        ConfigError: when the loader gives no batch.
        StoppedError: when `limits.stopping` says so.
    """
    clock, enough = _Clock(setting, limits, max(setting.warmup_batches, filling)), False
    while not enough:  # pass follows pass
        before, batches = clock.seen, iter(loader)
        try:
            for batch in batches:
                if not clock.seen:
                    clock.first = time.perf_counter()
                    observed.batch_bytes = max(observed.batch_bytes, batch_bytes(batch))
                del batch
                if limits.stopping():
                    raise StoppedError
                if limits.step_seconds:
                    simulate_step(limits.step_seconds, limits.step_computes)
                if enough := clock.tick():
                    observed.worker_bytes = max(observed.worker_bytes, worker_bytes() if setting.num_workers else 0)
                    break
        finally:  # ends the processes of a pass that was left early, before the next candidate starts its own
            for name in ("_shutdown_workers", "close"):
                if hasattr(batches, name):
                    getattr(batches, name)()
        if clock.seen == before:
            raise ConfigError([Problem("data", "the loader gives no batch, so there is nothing to calibrate")])
    if not setting.num_workers:
        observed.busy = clock.busy or observed.busy
    return clock.result()


def simulate_step(seconds: float, computes: bool) -> None:
    """A training step: on a GPU the host waits for it; on the CPU it computes, without Python's lock."""
    if not computes:
        time.sleep(seconds)
        return
    end, matrix = time.perf_counter() + seconds, torch.zeros(96, 96)
    product = torch.empty_like(matrix)
    while time.perf_counter() < end:
        torch.mm(matrix, matrix, out=product)


def batch_bytes(batch: Any) -> int:
    """Of the tensors and arrays in a batch, however deep."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if isinstance(batch, Mapping):
        return sum(map(batch_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(batch_bytes, batch))
    return 0


def worker_bytes() -> int:
    """Memory that the largest descendant of this process shares with no other."""
    import psutil

    most = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            most = max(most, int(child.memory_full_info().uss))
    return most


Data = dict[str, Any]
"""What `Trainer.fit` takes: `datamodule`, or `train_dataloaders`."""


class _KitSubject:
    """A data module of kit's own."""

    own: bool
    """Whether kit's engine reads it."""
    workers_change_nothing = True
    """Whether any number of processes gives the same samples."""

    def __init__(self, data: PatchData | RowData) -> None:
        self._data = data

    @contextmanager
    def loader(self, setting: LoaderSetting, turn: int) -> Iterator[Iterable[Any]]:
        """Its batches at a setting; another `turn` draws other samples where the order is random."""
        tried = copy.copy(self._data)
        tried.config, tried.loader = self._data.config.replace(setting.changes), None
        loader = tried.train_dataloader()
        loader.set_epoch(turn)
        try:
            yield loader
        finally:
            loader.close()


class RowSubject(_KitSubject):
    """Rows, whose loader reads whole batches in threads or processes."""

    own = False
    _data: RowData

    def present(self) -> LoaderSetting:
        """Its setting as it is."""
        loader = self._data.config.loader
        return LoaderSetting(num_workers=loader.num_workers, prefetch_factor=loader.prefetch_factor)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a result to hold, as JSON values."""
        rows = self._data.rows
        order = self._data.order().identity()
        return {"place": rows.place, "shape": [*rows.shape], "dtype": rows.stored_dtype, "order": order}


class OwnSubject(_KitSubject):
    """kit's engine."""

    own = True

    def __init__(self, data: PatchData) -> None:
        super().__init__(data)
        data.setup()
        assert data.dataset is not None
        self.dataset = data.dataset

    @property
    def config(self) -> Config:
        """As its data module has it."""
        return self._data.config

    def present(self) -> LoaderSetting:
        loader = self.config.loader
        return LoaderSetting(**{name: getattr(loader, name) for name in PARAMETERS})

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
        kind, source = type(dataset), ""
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        with contextlib.suppress(OSError, TypeError):  # by its text, an edited transform counts as other data
            source = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:12]
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}", "samples": size, "source": source,
            "batch_size": self._loader.batch_size or 0,
        }  # fmt: skip


Subject = OwnSubject | RowSubject | TorchSubject
"""The data of one rank."""


def subject_of(data: Data) -> Subject:
    """The subject in what `Trainer.fit` takes.

    Raises:
        ConfigError: for a loader whose settings cannot be changed.
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


def apply_batches(data: Data, batches: Iterable[Any]) -> Data:
    """The same data, with these batches in place of its loader's."""
    module = data.get("datamodule")
    if module is None:
        return {"train_dataloaders": batches}
    module.__dict__["train_dataloader"] = lambda: batches
    return {"datamodule": module}


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


_KEPT = ("collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")


def set_loader(loader: DataLoader[Any], setting: LoaderSetting) -> DataLoader[Any]:
    """A loader of the same batches at another number of processes and prefetch factor.

    A plain one is made anew, since Lightning reads its arguments again when it replaces the sampler.
    """
    workers = setting.num_workers
    factor = setting.prefetch_factor if workers else None
    arguments: dict[str, Any] = {"num_workers": workers, "prefetch_factor": factor}
    if type(loader) is not DataLoader:
        changed = copy.copy(loader)
        changed.__dict__.update(**arguments, _iterator=None)
        return changed
    arguments |= {name: getattr(loader, name) for name in _KEPT}
    arguments["multiprocessing_context"] = loader.multiprocessing_context if workers else None
    arguments["persistent_workers"] = loader.persistent_workers and workers > 0
    plain = type(loader.batch_sampler) in (BatchSampler, type(None))
    if not plain or (loader.batch_size is None and loader.batch_sampler is not None):
        arguments["batch_sampler"] = loader.batch_sampler
    else:
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        arguments |= {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return DataLoader(loader.dataset, **arguments)
