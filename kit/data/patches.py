"""Patches: what a trainer iterates over, batches of patches as tensors, in an order that nothing but the plan decides.

With `num_workers` 0 the engine's own threads read ahead in this process. With W loader processes, process w streams
every W-th batch through an engine of its own and the batches are taken in turn, so that any W yields the same batches
in the same order. The processes come from a server that never opens a store, share the budgets of requests in flight
and of memory, and open the store for themselves; a script that starts them guards its own start with
`if __name__ == "__main__"`. In block order each reads the windows for itself, so threads alone are the better choice.

`state_dict` says how far the current pass has come; a loader that takes it goes on with exactly the batches not yet
handed over, with any number of processes, and with another number of ranks or batch size where the order allows it.

Lightning leaves the loader as it is, since it is no torch DataLoader: every rank reads its own part of the plan
already, and no sampler is put in its place.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kit.config import Loader
from kit.data.counters import NAMES, total
from kit.data.dataset import ArrayInfo, Dataset
from kit.data.disk_cache import ReadCache
from kit.data.engine import Engine
from kit.data.reader_plan import Arrays, batch_bytes, largest_chunk_bytes
from kit.data.sampling import SamplePlan
from kit.data.spans import Span
from kit.data.windows import mixing
from kit.errors import ConfigError, Problem
from kit.plan.coalescing import Coalescing
from kit.units import format_bytes


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
        coalescing: Which neighbours in a shard share a request.
        read_cache: Keeps what requests to an object store gave.

    Raises:
        ConfigError: for an unknown or non-numeric variable, one to be standardised without statistics, or too little
            `loader.memory_bytes`.
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
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.epoch = 0
        """The epoch that the next pass reads."""
        self._first_step = 0
        """Where the next pass begins: past what was handed over before a resume."""
        self._handed = (0, 0)
        """The epoch of the pass under way, or else of the next one, and its batches handed over."""
        self._settings = settings
        processes = max(1, settings.num_workers)
        _refuse_too_little_memory(dataset.select(variables), plan, settings)
        engine = Engine(
            dataset,
            variables,
            requests_in_flight=max(1, settings.requests_in_flight // processes),
            decode_threads=settings.decode_threads,
            batches_ahead=settings.batches_ahead,
            standardize=standardize,
            cache_bytes=0 if plan.windows else settings.cache_bytes // processes,
            coalescing=coalescing,
            read_cache=read_cache,
            memory_bytes=settings.memory_bytes // processes,
            allocate=_pinned_array if self._pins and not settings.num_workers else np.empty,
        )
        self._stream = _Stream(engine, plan, rank, settings.num_workers)
        self._processes: DataLoader[PatchBatch] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.plan.batches_per_epoch

    def __iter__(self) -> Iterator[PatchBatch]:
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
        return {"epoch": epoch, "step": step, "plan": self.plan.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass go on where that state was taken.

        Raises:
            ConfigError: when the samples or their order are not those of the state, each field named; another number
                of ranks or batch size is accepted in random and grid order where it meets the state's end of a batch.
        """
        step = self.plan.step_after(state["plan"], state["step"])
        self.epoch, self._first_step = state["epoch"], step
        self._handed = (self.epoch, step)

    @property
    def sampler(self) -> Self:
        """Where Lightning looks for `set_epoch` before each epoch, also after a resume."""
        return self

    def counters(self) -> dict[str, int]:
        """What this rank has read since the loader was made, over all its processes; names as in `Counters`."""
        return self._stream.counters()

    @property
    def last_span(self) -> Span | None:
        """When the batch handed over last began to be read, and was ready; None where loader processes read it."""
        return None if self._settings.num_workers else self._stream.engine.spans.last

    @property
    def mixing(self) -> float | None:
        """Independent samples that the batches so far were worth at least, over their size; None before the first.

        1 in random order; see `kit.data.windows.mixing`.
        """
        counts = self.counters()
        if not counts["samples"]:
            return None
        return mixing(counts["pairs_of_one_visit"], counts["pairs"], self.plan.batch_size)

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
            multiprocessing_context=_fresh_processes(),
            worker_init_fn=partial(_seed_process, self.plan.seed, self.rank),
            generator=torch.Generator().manual_seed(self.plan.seed),  # else it draws from the model's generator
        )


class _Stream(IterableDataset[PatchBatch]):
    """Every W-th batch of the current epoch, in loader process w; all of them in a process that loads for itself."""

    def __init__(self, engine: Engine, plan: SamplePlan, rank: int, processes: int) -> None:
        self.engine = engine
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.first_step = torch.zeros((), dtype=torch.int64)
        self._plan = plan
        self._rank = rank
        self._counts = torch.zeros((processes, len(NAMES)), dtype=torch.int64)
        if processes:
            self.epoch, self.first_step = _shared(self.epoch), _shared(self.first_step)
            self._counts = _shared(self._counts)

    def __iter__(self) -> Iterator[PatchBatch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        steps = range(int(self.first_step) + worker, self._plan.batches_per_epoch, workers)
        before = self._counts[worker] - self._own_counts() if info else None
        for values, valid in self._arrays(int(self.epoch), steps):
            if before is not None:
                self._counts[worker] = before + self._own_counts()
            yield {"values": torch.from_numpy(values), "valid": torch.from_numpy(valid)}

    def _arrays(self, epoch: int, steps: range) -> Iterator[Arrays]:
        plan, rank = self._plan, self._rank
        if plan.windows is None:
            return self.engine.stream((plan.batch(epoch, step, rank) for step in steps), plan.patch)
        served = ((plan.batch(epoch, step, rank), plan.window(step, rank)) for step in steps)
        return self._counting_pairs(epoch, steps, self.engine.stream_windows(served, plan.patch))

    def _counting_pairs(self, epoch: int, steps: range, batches: Iterator[Arrays]) -> Iterator[Arrays]:
        """The batches, each counted by how well it is mixed."""
        for step, arrays in zip(steps, batches, strict=True):
            same, pairs = self._plan.pairs_of_one_visit(epoch, step, self._rank)
            self.engine.count(pairs=pairs, pairs_of_one_visit=same)
            yield arrays

    def _own_counts(self) -> Tensor:
        return torch.tensor([self.engine.counters[name] for name in NAMES])

    def counters(self) -> dict[str, int]:
        rows = (dict(zip(NAMES, row, strict=True)) for row in self._counts.tolist())
        return total([self.engine.counters, *rows])


def _fresh_processes() -> str:
    """Never a fork of this process, which has opened the store: one of a server that has not, where there are such."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([__name__])
    return "forkserver"


def _shared(tensor: Tensor) -> Tensor:
    """Put a tensor where forked processes write to the same memory."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _pinned_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array in pinned memory, which torch keeps and gives again when the batch before is forgotten."""
    kind = torch.bool if np.dtype(dtype) == np.bool_ else torch.float32
    return torch.empty(shape, dtype=kind, pin_memory=True).numpy()


def _refuse_too_little_memory(arrays: Sequence[ArrayInfo], plan: SamplePlan, settings: Loader) -> None:
    """Raises: ConfigError: when batches, kept chunks and one request at a time do not fit `loader.memory_bytes`."""
    processes = max(1, settings.num_workers)
    everything = sum(info.nbytes for info in arrays)
    kept = settings.window_bytes if plan.windows else settings.cache_bytes // processes
    batches = (settings.batches_ahead + 2) * batch_bytes(arrays, plan.batch_size, plan.patch)
    chunks = (settings.decode_threads + 1) * largest_chunk_bytes(arrays)
    needed = processes * (batches + min(kept, everything) + chunks)
    if needed > settings.memory_bytes:
        name = "window" if plan.windows else "cache"
        problem = Problem(
            "loader.memory_bytes",
            f"{format_bytes(settings.memory_bytes)} cannot hold {settings.batches_ahead + 2} batches "
            f"({format_bytes(batches)}), the {name} ({format_bytes(min(kept, everything))}) and "
            f"{settings.decode_threads + 1} chunks ({format_bytes(chunks)})"
            + (f" in each of {processes} processes" if settings.num_workers else "")
            + f"; use at least {format_bytes(needed)}, or less of loader.batches_ahead, batch_size or {name}_bytes",
        )
        raise ConfigError([problem])


def _seed_process(seed: int, rank: int, worker: int) -> None:
    """Give each loader process of each rank random numbers of its own, the same in every run."""
    words = np.random.SeedSequence([seed, rank, worker]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))
