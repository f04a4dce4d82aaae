"""Patches: what a trainer iterates over, batches of patches as tensors, read by kit's engine (see `EpochLoader`).

The loader processes share the budgets of requests in flight and of memory. In block order each reads the windows for
itself, so threads alone are the better choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from kit.config import Loader
from kit.data import shared_memory
from kit.data.counters import NAMES, absent_chunks, total
from kit.data.dataset import ArrayInfo, Dataset
from kit.data.disk_cache import ReadCache
from kit.data.engine import Engine
from kit.data.epoch_loader import EpochLoader, EpochStream, pins, shared
from kit.data.reader_plan import Arrays, batch_bytes, largest_chunk_bytes
from kit.data.sampling import SamplePlan
from kit.data.spans import Spans
from kit.data.stores import redact
from kit.data.windows import mixing
from kit.errors import ConfigError, KitWarning, Problem
from kit.plan.coalescing import Coalescing
from kit.plan.resources import HOLES_SHARE
from kit.units import format_bytes


class PatchBatch(TypedDict):
    """One batch on one rank."""

    values: Tensor
    """(batch, variable, *dims), float32; 0 where missing."""
    valid: Tensor
    """The same shape, bool: False where the value is missing."""


class PatchLoader(EpochLoader[PatchBatch]):
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
    ) -> None:
        self.plan = plan
        processes = max(1, settings.num_workers)
        _refuse_too_little_memory(dataset.select(variables), plan, settings)
        shared_memory.refuse_too_little(settings, plan.batch_bytes(len(dataset.select(variables))))
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
            allocate=_pinned_array if pins(settings) and not settings.num_workers else np.empty,
        )
        self._patches = _Stream(engine, plan, rank, settings.num_workers)
        self._absent_from = "" if engine.strict else redact(dataset.url)
        """The store whose missing chunks are still to be warned of."""
        super().__init__(plan, settings, self._patches, rank)

    @override
    def _batches(self, epoch: int, first_step: int) -> Iterator[PatchBatch]:
        for batch in super()._batches(epoch, first_step):
            self._warn_of_absent_chunks()
            yield batch

    def _warn_of_absent_chunks(self) -> None:
        """Once, as soon as there are any: how many there were in the end is in `counters`."""
        if self._absent_from and (absent := absent_chunks(self.counters())):
            way_out = "data.strict: true makes that an error"
            warnings.warn(f"{self._absent_from}: {absent}, so far; {way_out}", KitWarning, stacklevel=4)
            self._absent_from = ""

    def counters(self) -> dict[str, int]:
        """What this rank has read since the loader was made, over all its processes; names as in `Counters`."""
        return self._patches.counters()

    @property
    def open_requests(self) -> tuple[int, str]:
        """How many requests may be open now, and the reason where they are fewer than allowed; of this process."""
        return self._patches.engine.open_requests

    @property
    def mixing(self) -> float | None:
        """Independent samples that the batches so far were worth at least, over their size; None before the first.

        1 in random order; see `kit.data.windows.mixing`.
        """
        counts = self.counters()
        if not counts["samples"]:
            return None
        return mixing(counts["pairs_of_one_visit"], counts["pairs"], self.plan.batch_size)


class _Stream(EpochStream[PatchBatch]):
    """Patches read by an engine."""

    def __init__(self, engine: Engine, plan: SamplePlan, rank: int, processes: int) -> None:
        super().__init__(plan, processes)
        self.engine = engine
        self._plan = plan
        self._rank = rank
        self._counts = torch.zeros((processes, len(NAMES)), dtype=torch.int64)
        if processes:
            self._counts = shared(self._counts)

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
    needed = processes * math.ceil((batches + min(kept, everything) + chunks) * HOLES_SHARE / (HOLES_SHARE - 1))
    if needed > settings.memory_bytes:
        name = "window" if plan.windows else "cache"
        problem = Problem(
            "loader.memory_bytes",
            f"{format_bytes(settings.memory_bytes)} cannot hold {settings.batches_ahead + 2} batches "
            f"({format_bytes(batches)}), the {name} ({format_bytes(min(kept, everything))}) and "
            f"{settings.decode_threads + 1} chunks ({format_bytes(chunks)}), with one part in {HOLES_SHARE} for holes"
            + (f" in each of {processes} processes" if settings.num_workers else "")
            + f"; use at least {format_bytes(needed)}, or less of loader.batches_ahead, batch_size or {name}_bytes",
        )
        raise ConfigError([problem])
