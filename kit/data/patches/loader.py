"""Loaders: what a trainer iterates over, whole batches in an order that only a plan decides; and `PatchLoader`.

A plan says how many batches an epoch has and which samples are in each, on every rank; a stream reads them. With
`num_workers` 0 the stream's own threads read ahead in this process. With W loader processes, process w streams every
W-th batch and the batches are taken in turn, so that any W yields the same batches in the same order. The processes
share the budgets of requests in flight and of memory; in block order each reads the windows for itself, so threads
alone are the better choice. They are forked from a server that has opened nothing, and open the store themselves; a
script that starts them guards its own start with `if __name__ == "__main__"`.

`state_dict` says how far the current pass has come. A loader that takes it goes on with exactly the samples not yet
handed over, with any number of processes and of ranks and any batch size (see `kit.data.epochs`); what then cannot be
as it would have been is a warning.

Lightning leaves such a loader as it is, since it is no torch DataLoader: every rank reads its own part of the plan
already, and no sampler is put in its place.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Self, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from kit.chunks.requests import Coalescing
from kit.data.dataset import Dataset
from kit.data.epochs import mixing
from kit.data.samples import EpochPlan, SamplePlan
from kit.data.stores.counters import NAMES, absent_chunks, total
from kit.data.stores.disk_cache import ReadCache
from kit.data.stores.url import redact
from kit.data.stream import memory
from kit.data.stream.engine import Engine, Span, Spans
from kit.data.stream.memory import Arrays
from kit.errors import warn_caller
from kit.machine.processes import die_with, note_process, shorten_socket_paths
from kit.sections import Loader

Batch = TypeVar("Batch")
AnyPlan = TypeVar("AnyPlan", bound=EpochPlan)


class EpochPasses(Generic[Batch, AnyPlan]):
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        plan: Which batches there are.
        rank: This process's rank in the plan.
    """

    def __init__(self, plan: AnyPlan, rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        """The epoch that the next pass reads."""
        self.on_length: Callable[[int], None] | None = None
        """Called with the batches of the epoch that begins, where an epoch was resumed with other ranks or batches."""
        self._plan = self._rest = self._now = plan
        """Of a whole epoch, of the rest of a resumed one, and of the pass under way or the next."""
        self._first_step = 0
        """Where the next pass begins: past what was handed over before a resume."""
        self._handed = (0, 0)
        """The epoch of the pass under way, or else of the next one, and its batches handed over."""

    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """The batches of an epoch, from that step on."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes and threads of a pass; the next one starts them again."""
        raise NotImplementedError

    def plan_of(self, first_step: int) -> AnyPlan:
        """Of a pass that begins with that step."""
        return self._rest if first_step else self._plan

    def __len__(self) -> int:
        """Batches in the epoch under way, or else in the next one; with those handed over before a resume."""
        return self._now.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        # The body runs at the first `next`: making an iterator, as Lightning does to check for one, starts no epoch.
        epoch, self.epoch = self.epoch, self.epoch + 1
        first, self._first_step = self._first_step, 0
        self._handed, self._now = (epoch, first), self.plan_of(first)
        for batch in self._batches(epoch, first):
            if self._handed[0] == epoch:
                self._handed = (epoch, self._handed[1] + 1)
            yield batch
        if self._handed[0] == epoch:
            self._handed, self._now = (epoch + 1, 0), self._plan

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, or the rest of it after a `load_state_dict` in its middle."""
        if epoch != self.epoch:
            self._first_step = 0
        self.epoch = epoch
        self._handed = (epoch, self._first_step)
        self._begin(self.plan_of(self._first_step))

    def state_dict(self) -> dict[str, Any]:
        """How far the pass under way has come, in plain numbers, the same on every rank."""
        epoch, step = self._handed
        return {"epoch": epoch, "step": step, "plan": self._now.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass go on where that state was taken, to the sample, with any batch size and ranks.

        Raises:
            ConfigError: when the samples or their order are not those of the state, or what they are read from has
                changed since, each reason named.
        """
        rest = self._plan.resume(state["plan"], state["step"])
        for note in rest.notes:
            warn_caller(f"resumed in the middle of an epoch: {note}")
        self._rest, self.epoch, self._first_step = rest, state["epoch"], state["step"]
        self._handed = (self.epoch, self._first_step)
        self._begin(self.plan_of(self._first_step))

    def _begin(self, plan: AnyPlan) -> None:
        self._now = plan
        if self.on_length is not None and self._rest.batches_per_epoch != self._plan.batches_per_epoch:
            self.on_length(plan.batches_per_epoch)

    batch_sampler = None
    """What Lightning asks a loader for that has a sampler, where it validates."""

    @property
    def sampler(self) -> Self:
        """Where Lightning looks for `set_epoch` before each epoch, also after a resume."""
        return self


class EpochStream(IterableDataset[Batch], Generic[Batch, AnyPlan]):
    """Every W-th batch of the current epoch, in loader process w; all of them in a process that loads for itself."""

    def __init__(self, plan: AnyPlan, processes: int) -> None:
        self.plan = self.rest = plan
        """Of a whole epoch, and of the rest of a resumed one."""
        numbers = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        self.epoch, self.first_step = map(shared, numbers) if processes else numbers

    @property
    def plan_now(self) -> AnyPlan:
        """Of the current epoch."""
        return self.rest if int(self.first_step) else self.plan

    def steps(self) -> tuple[int | None, range]:
        """Which loader process this is (None for no such process), and the steps that it reads."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        steps = range(int(self.first_step) + worker, self.plan_now.batches_per_epoch, workers)
        return info.id if info else None, steps

    @property
    def spans(self) -> Spans:
        """When each batch was read, in a process that loads for itself."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading and let go of what is open; the next pass opens it again."""
        raise NotImplementedError


class EpochLoader(EpochPasses[Batch, AnyPlan]):
    """The batches of one rank, read by a stream.

    Args:
        plan: Which batches there are.
        settings: How they are read ahead.
        stream: Reads them.
        rank: This process's rank in the plan.
    """

    def __init__(self, plan: AnyPlan, settings: Loader, stream: EpochStream[Batch, AnyPlan], rank: int) -> None:
        super().__init__(plan, rank)
        self._settings, self._stream = settings, stream
        self._processes: DataLoader[Batch] | None = None

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._processes is not None and self._stream.rest != self._rest:
            self.close()  # they have the plan that they were started with
        self._stream.rest = self._rest

    @override
    def _batches(self, epoch: int, first_step: int) -> Iterator[Batch]:
        self._stream.epoch.fill_(epoch)
        self._stream.first_step.fill_(first_step)
        if not self._settings.num_workers:
            return iter(self._stream)
        with warnings.catch_warnings():
            # Processes beyond the cores are the config's choice; whether they help is measured, not guessed.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            if self._processes is None:
                self._processes = self._make_processes()
            return iter(self._processes)

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

    def _make_processes(self) -> DataLoader[Batch]:
        """Never forks of this process, which has opened the store: of a server that has not, where there are such."""
        seed = self._plan.seed
        shorten_socket_paths()
        server = "forkserver" in multiprocessing.get_all_start_methods()
        if server:
            multiprocessing.set_forkserver_preload([type(self._stream).__module__])
        return DataLoader(
            self._stream, batch_size=None, num_workers=self._settings.num_workers,
            prefetch_factor=self._settings.prefetch_factor, persistent_workers=True, pin_memory=pins(self._settings),
            multiprocessing_context="forkserver" if server else "spawn",
            worker_init_fn=partial(_begin_process, dict(os.environ), os.getpid(), seed, self.rank),
            generator=torch.Generator().manual_seed(seed),  # else it draws from the model's generator
        )  # fmt: skip


def pins(settings: Loader) -> bool:
    """Whether batches go to pinned memory."""
    return settings.pin_memory and torch.cuda.is_available()


def shared(tensor: Tensor) -> Tensor:
    """Put a tensor where other processes write to the same memory."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


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


class PatchBatch(TypedDict):
    """One batch on one rank."""

    values: Tensor
    """(batch, variable, *dims), float32; 0 where missing."""
    valid: Tensor
    """The same shape, bool: False where the value is missing."""


class PatchLoader(EpochLoader[PatchBatch, SamplePlan]):
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        dataset: What the store holds.
        plan: Which samples exist and which batch each belongs to.
        settings: How batches are read ahead.
        rank: This process's rank in the plan.
        variables: Names of the variables, stacked in this order; empty for all of one shape.
        standardize: Shift and scale by the mean and deviation found while building.
        coalescing: Which neighbours in a shard share a request.
        read_cache: Keeps what requests to an object store gave.
        whole_bytes: As `kit.data.stream.memory.refuse_too_little_memory` takes it.

    Raises:
        ConfigError: for an unknown or non-numeric variable, one to be standardised without statistics, or too little
            `loader.memory_bytes` or shared memory.
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
        coalescing: Coalescing | None = None,
        read_cache: ReadCache | None = None,
        whole_bytes: int | None = None,
    ) -> None:
        self.plan = plan
        processes = max(1, settings.num_workers)
        memory.refuse_too_little_memory(dataset.select(variables), plan, settings, whole_bytes)
        memory.refuse_too_little_shared_memory(settings, plan.batch_bytes(len(dataset.select(variables))))
        engine = Engine(
            dataset, variables, requests_in_flight=max(1, settings.requests_in_flight // processes),
            decode_threads=settings.decode_threads, batches_ahead=settings.batches_ahead, standardize=standardize,
            cache_bytes=0 if plan.windows else settings.cache_bytes // processes, coalescing=coalescing,
            read_cache=read_cache, memory_bytes=settings.memory_bytes // processes,
            allocate=_pinned_array if pins(settings) and not settings.num_workers else np.empty,
        )  # fmt: skip
        self._patches = _Stream(engine, plan, rank, settings.num_workers)
        self._absent_from = "" if engine.strict else redact(dataset.url)
        """The store whose missing chunks are still to be warned of."""
        super().__init__(plan, settings, self._patches, rank)

    @override
    def _batches(self, epoch: int, first_step: int) -> Iterator[PatchBatch]:
        for batch in super()._batches(epoch, first_step):
            # Once, as soon as there are any: how many there were in the end is in `counters`.
            if self._absent_from and (absent := absent_chunks(self.counters())):
                message = f"{self._absent_from}: {absent}, so far; data.strict: true makes that an error"
                warn_caller(message)
                self._absent_from = ""
            yield batch

    def counters(self) -> dict[str, int]:
        """What this rank has read since the loader was made, over all its processes; names as in `Counters`."""
        return self._patches.counters()

    @property
    def open_requests(self) -> tuple[int, str]:
        """How many requests may be open now, and the reason where they are fewer than allowed; of this process."""
        return self._patches.engine.open_requests

    @property
    def held_bytes(self) -> int:
        """Memory of what this process keeps and requests, beside batches; none where loader processes read."""
        return self._patches.engine.held_bytes

    @property
    def mixing(self) -> float | None:
        """Independent samples that the batches so far were worth at least, over their size; None before the first.

        1 in random order; see `kit.data.epochs.mixing`.
        """
        counts = self.counters()
        if not counts["samples"]:
            return None
        return mixing(counts["pairs_of_one_visit"], counts["pairs"], self.plan.batch_size)


class _Stream(EpochStream[PatchBatch, SamplePlan]):
    """Patches read by an engine."""

    def __init__(self, engine: Engine, plan: SamplePlan, rank: int, processes: int) -> None:
        super().__init__(plan, processes)
        self.engine, self._rank = engine, rank
        counts = torch.zeros((processes, len(NAMES)), dtype=torch.int64)
        self._counts = shared(counts) if processes else counts

    @property
    def spans(self) -> Spans:
        return self.engine.spans

    def close(self) -> None:
        self.engine.close()

    def __iter__(self) -> Iterator[PatchBatch]:
        worker, steps = self.steps()
        before = None if worker is None else self._counts[worker] - self._own_counts()
        for values, valid in self._arrays(int(self.epoch), steps):
            if before is not None:
                self._counts[worker] = before + self._own_counts()
            yield {"values": torch.from_numpy(values), "valid": torch.from_numpy(valid)}

    def _arrays(self, epoch: int, steps: range) -> Iterator[Arrays]:
        plan, rank = self.plan_now, self._rank
        if plan.windows is None:
            yield from self.engine.stream((plan.batch(epoch, step, rank) for step in steps), plan.patch)
            return
        served = ((plan.batch(epoch, step, rank), plan.window(epoch, step, rank)) for step in steps)
        for step, arrays in zip(steps, self.engine.stream_windows(served, plan.patch), strict=True):
            same, pairs = plan.pairs_of_one_visit(epoch, step, rank)
            self.engine.count(pairs=pairs, pairs_of_one_visit=same)
            yield arrays

    def _own_counts(self) -> Tensor:
        counts = self.engine.counters
        return torch.tensor([counts[name] for name in NAMES])

    def counters(self) -> dict[str, int]:
        rows = (dict(zip(NAMES, row, strict=True)) for row in self._counts.tolist())
        return total([self.engine.counters, *rows])


def _pinned_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array in pinned memory, which torch keeps and gives again when the batch before is forgotten."""
    kind = torch.bool if np.dtype(dtype) == np.bool_ else torch.float32
    return torch.empty(shape, dtype=kind, pin_memory=True).numpy()
