"""Patches: what a trainer iterates over, batches of patches as tensors, in an order that nothing but the plan decides.

With `num_workers` 0 the engine's own threads read ahead in this process. With W loader processes, process w streams
every W-th batch through an engine of its own and the batches are taken in turn, so that any W yields the same batches
in the same order. The processes are forked and share the budget of requests in flight; only they open the store.

Lightning leaves the loader as it is, since it is no torch DataLoader: every rank reads its own part of the plan
already, and no sampler is put in its place.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Self, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kit.config import Loader
from kit.data.counters import NAMES, total
from kit.data.dataset import Dataset
from kit.data.engine import Engine
from kit.data.sampling import SamplePlan


class PatchBatch(TypedDict):
    """One batch on one rank."""

    values: Tensor
    """(batch, variable, *dims), float32; 0 where missing."""
    valid: Tensor
    """The same shape, bool: False where the value is missing."""


class PatchLoader:
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        dataset: What the store holds.
        plan: Which samples exist and which batch each belongs to.
        settings: How batches are read ahead.
        rank: This process's rank in the plan.
        variables: Names of the variables, stacked in this order; empty for all of one shape.
        standardize: Shift and scale by the mean and deviation found while building.

    Raises:
        ConfigError: for an unknown or non-numeric variable, or one to be standardised without statistics.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: SamplePlan,
        settings: Loader,
        *,
        rank: int = 0,
        variables: Sequence[str] = (),
        standardize: bool = False,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.epoch = 0
        """The epoch that the next pass reads."""
        self._settings = settings
        engine = Engine(
            dataset,
            variables,
            requests_in_flight=max(1, settings.requests_in_flight // max(1, settings.num_workers)),
            decode_threads=settings.decode_threads,
            batches_ahead=settings.batches_ahead,
            standardize=standardize,
        )
        self._stream = _Stream(engine, plan, rank, settings.num_workers)
        self._processes: DataLoader[PatchBatch] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.plan.batches_per_epoch

    def __iter__(self) -> Iterator[PatchBatch]:
        # The body runs at the first `next`: making an iterator, as Lightning does to check for one, starts no epoch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._stream.epoch.fill_(epoch)
        yield from self._in_processes() if self._settings.num_workers else self._in_threads()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""
        self.epoch = epoch

    @property
    def sampler(self) -> Self:
        """Where Lightning looks for `set_epoch` before each epoch, also after a resume."""
        return self

    def counters(self) -> dict[str, int]:
        """What this rank has read since the loader was made, over all its processes; names as in `Counters`."""
        return self._stream.counters()

    def close(self) -> None:
        """End loader processes and threads; the next pass starts them again."""
        processes, self._processes = self._processes, None
        if processes is not None:
            # A traceback may keep the iterator alive, and with it its processes; Lightning ends them in the same way.
            shutdown = getattr(getattr(processes, "_iterator", None), "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        self._stream.engine.close()

    @property
    def _pins(self) -> bool:
        return self._settings.pin_memory and torch.cuda.is_available()

    def _in_threads(self) -> Iterator[PatchBatch]:
        for batch in self._stream:
            yield _pinned(batch) if self._pins else batch

    def _in_processes(self) -> Iterator[PatchBatch]:
        with warnings.catch_warnings():
            # Processes beyond the cores are the config's choice; whether they help is measured, not guessed.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            if self._processes is None:
                self._processes = self._make_processes()
            return iter(self._processes)

    def _make_processes(self) -> DataLoader[PatchBatch]:
        return DataLoader(
            self._stream,
            batch_size=None,
            num_workers=self._settings.num_workers,
            prefetch_factor=self._settings.prefetch_factor,
            persistent_workers=True,
            pin_memory=self._pins,
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
            worker_init_fn=partial(_seed_process, self.plan.seed, self.rank),
            generator=torch.Generator().manual_seed(self.plan.seed),  # else it draws from the model's generator
        )


class _Stream(IterableDataset[PatchBatch]):
    """Every W-th batch of the current epoch, in loader process w; all of them in a process that loads for itself."""

    def __init__(self, engine: Engine, plan: SamplePlan, rank: int, processes: int) -> None:
        self.engine = engine
        self.epoch = torch.zeros((), dtype=torch.int64)
        self._plan = plan
        self._rank = rank
        self._counts = torch.zeros((processes, len(NAMES)), dtype=torch.int64)
        if processes:
            self.epoch, self._counts = _shared(self.epoch), _shared(self._counts)

    def __iter__(self) -> Iterator[PatchBatch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, plan = int(self.epoch), self._plan
        steps = range(worker, plan.batches_per_epoch, workers)
        offsets = (plan.batch(epoch, step, self._rank) for step in steps)
        before = self._counts[worker] - self._own_counts() if info else None
        for values, valid in self.engine.stream(offsets, plan.patch):
            if before is not None:
                self._counts[worker] = before + self._own_counts()
            yield {"values": torch.from_numpy(values), "valid": torch.from_numpy(valid)}

    def _own_counts(self) -> Tensor:
        return torch.tensor([self.engine.counters[name] for name in NAMES])

    def counters(self) -> dict[str, int]:
        rows = (dict(zip(NAMES, row, strict=True)) for row in self._counts.tolist())
        return total([self.engine.counters, *rows])


def _shared(tensor: Tensor) -> Tensor:
    """Put a tensor where forked processes write to the same memory."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _pinned(batch: PatchBatch) -> PatchBatch:
    return {"values": batch["values"].pin_memory(), "valid": batch["valid"].pin_memory()}


def _seed_process(seed: int, rank: int, worker: int) -> None:
    """Give each loader process of each rank random numbers of its own, the same in every run."""
    words = np.random.SeedSequence([seed, rank, worker]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
