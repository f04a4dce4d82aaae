"""EpochLoader: what a trainer iterates over; whole batches in an order that nothing but a plan decides.

A plan says how many batches an epoch has and what is in each, on every rank; a stream reads them. With `num_workers` 0
the stream's own threads read ahead in this process. With W loader processes, process w streams every W-th batch and the
batches are taken in turn, so that any W yields the same batches in the same order. The processes come from a server
that has opened nothing, and open what they read for themselves; a script that starts them guards its own start with
`if __name__ == "__main__"`.

`state_dict` says how far the current pass has come; a loader that takes it goes on with exactly the batches not yet
handed over, with any number of processes, and with another number of ranks or batch size where the plan allows it.

Lightning leaves the loader as it is, since it is no torch DataLoader: every rank reads its own part of the plan
already, and no sampler is put in its place.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kit.config import Loader
from kit.data.spans import Span, Spans

Batch = TypeVar("Batch")


class Plan(Protocol):
    """The batches of every epoch; equal on every rank."""

    @property
    def seed(self) -> int: ...

    @property
    def batches_per_epoch(self) -> int: ...

    def identity(self) -> dict[str, Any]:
        """What decides the batches and their order, in plain values."""

    def step_after(self, other: Mapping[str, Any], step: int) -> int:
        """The step that follows the first `step` global batches of the plan of that identity."""


class EpochStream(IterableDataset[Batch]):
    """Every W-th batch of the current epoch, in loader process w; all of them in a process that loads for itself."""

    def __init__(self, plan: Plan, processes: int) -> None:
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.first_step = torch.zeros((), dtype=torch.int64)
        self._batches_per_epoch = plan.batches_per_epoch
        if processes:
            self.epoch, self.first_step = shared(self.epoch), shared(self.first_step)

    def steps(self) -> tuple[int | None, range]:
        """Which loader process this is (None for no such process), and the steps that it reads."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        steps = range(int(self.first_step) + worker, self._batches_per_epoch, workers)
        return info.id if info else None, steps

    @property
    def spans(self) -> Spans:
        """When each batch was read, in a process that loads for itself."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading and let go of what is open; the next pass opens it again."""
        raise NotImplementedError


class EpochLoader(Generic[Batch]):
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        plan: Which batches there are.
        settings: How they are read ahead.
        stream: Reads them.
        rank: This process's rank in the plan.
    """

    def __init__(self, plan: Plan, settings: Loader, stream: EpochStream[Batch], rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        """The epoch that the next pass reads."""
        self._plan = plan
        self._first_step = 0
        """Where the next pass begins: past what was handed over before a resume."""
        self._handed = (0, 0)
        """The epoch of the pass under way, or else of the next one, and its batches handed over."""
        self._settings = settings
        self._stream = stream
        self._processes: DataLoader[Batch] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._plan.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        # The body runs at the first `next`: making an iterator, as Lightning does to check for one, starts no epoch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        first, self._first_step = self._first_step, 0
        self._handed = (epoch, first)
        self._stream.epoch.fill_(epoch)
        self._stream.first_step.fill_(first)
        for batch in self._in_processes() if self._settings.num_workers else iter(self._stream):
            if self._handed[0] == epoch:
                self._handed = (epoch, self._handed[1] + 1)
            yield batch
        if self._handed[0] == epoch:
            self._handed = (epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, or the rest of it after a `load_state_dict` in its middle."""
        if epoch != self.epoch:
            self._first_step = 0
        self.epoch = epoch
        self._handed = (epoch, self._first_step)

    def state_dict(self) -> dict[str, Any]:
        """How far the pass under way has come, in plain numbers, the same on every rank."""
        epoch, step = self._handed
        return {"epoch": epoch, "step": step, "plan": self._plan.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass go on where that state was taken.

        Raises:
            ConfigError: when the samples or their order are not those of the state, each field named; another number
                of ranks or batch size is accepted where the order allows it and it meets the state's end of a batch.
        """
        step = self._plan.step_after(state["plan"], state["step"])
        self.epoch, self._first_step = state["epoch"], step
        self._handed = (self.epoch, step)

    @property
    def sampler(self) -> Self:
        """Where Lightning looks for `set_epoch` before each epoch, also after a resume."""
        return self

    @property
    def last_span(self) -> Span | None:
        """When the batch handed over last began to be read, and was ready; None where loader processes read it."""
        return None if self._settings.num_workers else self._stream.spans.last

    def close(self) -> None:
        """End loader processes and threads; the next pass starts them again."""
        processes, self._processes = self._processes, None
        if processes is not None:
            # A traceback may keep the iterator alive, and with it its processes; Lightning ends them in the same way.
            shutdown = getattr(getattr(processes, "_iterator", None), "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        self._stream.close()

    def _in_processes(self) -> Iterator[Batch]:
        with warnings.catch_warnings():
            # Processes beyond the cores are the config's choice; whether they help is measured, not guessed.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            if self._processes is None:
                self._processes = self._make_processes()
            return iter(self._processes)

    def _make_processes(self) -> DataLoader[Batch]:
        seed = self._plan.seed
        return DataLoader(
            self._stream,
            batch_size=None,
            num_workers=self._settings.num_workers,
            prefetch_factor=self._settings.prefetch_factor,
            persistent_workers=True,
            pin_memory=pins(self._settings),
            multiprocessing_context=_fresh_processes(type(self._stream).__module__),
            worker_init_fn=partial(seed_process, seed, self.rank),
            generator=torch.Generator().manual_seed(seed),  # else it draws from the model's generator
        )


def pins(settings: Loader) -> bool:
    """Whether batches go to pinned memory."""
    return settings.pin_memory and torch.cuda.is_available()


def shared(tensor: Tensor) -> Tensor:
    """Put a tensor where other processes write to the same memory."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _fresh_processes(module: str) -> str:
    """Never a fork of this process, which has opened the store: one of a server that has not, where there are such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([module])
    return "forkserver"


def seed_process(seed: int, rank: int, worker: int) -> None:
    """Give each loader process of each rank random numbers of its own, the same in every run."""
    words = np.random.SeedSequence([seed, rank, worker]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
