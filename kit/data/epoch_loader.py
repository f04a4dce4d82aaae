"""EpochLoader: what a trainer iterates over; whole batches in an order that nothing but a plan decides.

A plan says how many batches an epoch has and what is in each, on every rank; a stream reads them. With `num_workers` 0
the stream's own threads read ahead in this process. With W loader processes, process w streams every W-th batch and the
batches are taken in turn, so that any W yields the same batches in the same order. The processes come from a server
that has opened nothing, and open what they read for themselves; a script that starts them guards its own start with
`if __name__ == "__main__"`.

A state that `state_dict` gave holds for any number of processes (see `kit.data.epoch_passes`).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from kit.config import Loader
from kit.data.epoch_passes import Batch, EpochPasses, Plan
from kit.data.spans import Span, Spans
from kit.processes import die_with, note_process, shorten_socket_paths


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


class EpochLoader(EpochPasses[Batch]):
    """The batches of one rank, read by a stream.

    Args:
        plan: Which batches there are.
        settings: How they are read ahead.
        stream: Reads them.
        rank: This process's rank in the plan.
    """

    def __init__(self, plan: Plan, settings: Loader, stream: EpochStream[Batch], rank: int) -> None:
        super().__init__(plan, rank)
        self._settings = settings
        self._stream = stream
        self._processes: DataLoader[Batch] | None = None

    @override
    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        self._stream.epoch.fill_(epoch)
        self._stream.first_step.fill_(first_step)
        return self._in_processes() if self._settings.num_workers else iter(self._stream)

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
            worker_init_fn=partial(_begin_process, dict(os.environ), os.getpid(), seed, self.rank),
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
    shorten_socket_paths()
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([module])
    return "forkserver"


def _begin_process(variables: Mapping[str, str], trainer: int, seed: int, rank: int, worker: int) -> None:
    """End with the process that trains, and take its environment: the server's is older than places named since."""
    die_with(trainer)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    note_process()
    seed_process(seed, rank, worker)


def seed_process(seed: int, rank: int, worker: int) -> None:
    """Give each loader process of each rank random numbers of its own, the same in every run."""
    words = np.random.SeedSequence([seed, rank, worker]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
