"""RowData: rows of an array as Lightning takes them: batches `(values, rows)`, each row once an epoch over all ranks.

`values` is what is in the rows, and `rows` which rows of the selection they are. Only batches ever go to the device,
whatever holds the rows: an array in memory stays there. What is left to None is the config's, of a trial or a committed
file (see `ConfiguredData`), and the default of `kit.Config()` elsewhere. It also works by itself:
`for values, rows in kit.data.RowData("x.npy")` is an epoch.

`RowOrder` says which rows each batch of each rank holds. Pure numpy, no file. Rows are drawn one by one, or in blocks
of `row_block` rows that lie together, `window_blocks` blocks mixed at a time: a disk gives a block in one read, and a
chunk of a store is read once. The order is a function of (seed, epoch, position); positions are cut into global batches
and these among the ranks as `SamplePlan` cuts a grid. So the same seed gives the same global batches whatever holds the
rows, and 1 rank × 2B sees those of 2 ranks × B.

`RowLoader` reads batches ahead, as whole blocks (see `EpochLoader`). With `num_workers` 0 threads take the next batches
while this one is trained on: taking rows runs outside Python's lock.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from kit.arguments import checks_arguments
from kit.chunks.resources import DiskRates
from kit.config import Config
from kit.data.patches.loader import EpochLoader, EpochStream, pins, shared
from kit.data.patches.module import ConfiguredData
from kit.data.places import generator_of
from kit.data.rows.page_cache import drop_cached
from kit.data.rows.rows import Rows, Which, open_rows
from kit.data.rows.sources import ZarrRows
from kit.data.samples import EpochPlan, SamplePlan
from kit.data.stream import memory
from kit.data.stream.engine import Spans
from kit.data.stream.memory import loader_settings
from kit.errors import ConfigError, Problem
from kit.machine.processes import disk_read_bytes
from kit.sections import Loader
from kit.units import format_bytes

RowBatch = tuple[Tensor, Tensor]
"""Values (samples, *columns) and rows (samples,) int64."""
_OWN = ("shuffle", "row_block", "window_blocks")
_MOST_THREADS = 4
_DISK_SECONDS = 0.1
"""Between two looks at how much was read from a disk."""
_COUNTED = ("samples", "bytes_read", "disk_bytes")
_SECONDS = 0.5
_LEAST_BATCHES = 4
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RowOrder(EpochPlan):
    """Which rows are in which batch of every epoch; unless they are shuffled, they come as they lie."""

    rows: int
    row_block: int = 1
    """Rows that lie together and are drawn together."""
    window_blocks: int = 64
    """Blocks that are mixed with one another."""
    first_row: int = 0
    """Where these rows begin among all."""

    def __post_init__(self) -> None:
        problems = []
        if self.row_block < 1 or self.window_blocks < 1:
            message = f"{self.row_block} rows × {self.window_blocks} blocks: use at least 1 of each"
            problems.append(Problem("row_block", message))
        if self.global_batch_size > self.rows:
            most = f"{self.rows // self.world_size or f'{self.rows} ranks'}"
            asked = f"{self.batch_size} rows × {self.world_size} ranks = {self.global_batch_size}"
            message = f"{asked} do not fit {self.rows} rows"
            problems.append(Problem("loader.batch_size", f"{message}; use at most {most}"))
        if problems:
            raise ConfigError(problems)

    @property
    def in_blocks(self) -> bool:
        return self.shuffle and self.row_block > 1

    @cached_property
    def plan(self) -> SamplePlan:
        """The positions of an epoch as a grid of one dimension."""
        return SamplePlan(
            shape=(self.rows,), patch=(1,), order="grid", stride=(1,), samples_per_epoch=self.rows,
            batch_size=self.batch_size, world_size=self.world_size, seed=self.seed,
            shuffle=self.shuffle and not self.in_blocks, drop_last=self.drop_last, earlier=self.earlier,
        )  # fmt: skip

    @property
    @override
    def samples(self) -> int:
        return self.rows

    def batch(self, epoch: int, step: int, rank: int) -> NDArray[np.int64]:
        """The rows that `rank` reads at `step` of `epoch`, in their order.

        Raises:
            IndexError: for a step or rank that there is not.
        """
        if not self.in_blocks:
            return self.plan.batch(epoch, step, rank)[:, 0] + self.first_row
        run, starts = self.plan.positions(step, rank), _block_order(self, epoch)[1]
        first = int(np.searchsorted(starts, run.start, side="right")) - 1
        stop = int(np.searchsorted(starts, run.stop, side="left"))
        parts = []
        for window in range(first, stop):
            begin = int(starts[window])
            parts.append(_window(self, epoch, window)[max(0, run.start - begin) : run.stop - begin])
        return np.concatenate(parts) + self.first_row

    @override
    def identity(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _OWN}, "plan": self.plan.identity()}

    @override
    def resume(self, other: Mapping[str, Any], step: int) -> Self:
        changed = [name for name in _OWN if getattr(self, name) != other.get(name)]
        if changed:
            way_out = "in the state to resume from; resume with the same order, or begin the epoch anew"
            raise ConfigError(
                [Problem(name, f"{getattr(self, name)}, but {other.get(name)} {way_out}") for name in changed]
            )
        return replace(self, earlier=self.plan.resume(other["plan"], step).earlier)


@lru_cache(maxsize=2)
def _block_order(order: RowOrder, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row blocks of an epoch in their order, and the first position of each window of them."""
    blocks = generator_of(order.seed, epoch).permutation(-(-order.rows // order.row_block))
    sizes = np.minimum(order.rows - blocks * order.row_block, order.row_block)
    return blocks, (np.cumsum(sizes) - sizes)[:: order.window_blocks]


@lru_cache(maxsize=2)
def _window(order: RowOrder, epoch: int, number: int) -> NDArray[np.int64]:
    """The rows of a window, in their order."""
    blocks = _block_order(order, epoch)[0][number * order.window_blocks :][: order.window_blocks]
    rows = (blocks[:, None] * order.row_block + np.arange(order.row_block)).reshape(-1)
    return generator_of(order.seed, epoch, number + 1).permutation(rows[rows < order.rows])


class RowLoader(EpochLoader[RowBatch, RowOrder]):
    """The batches of one rank; each pass over it is the next epoch.

    Args:
        rows: What is read.
        order: Which rows are in which batch.
        settings: How batches are read ahead.
        rank: This process's rank in the order.
        whole_bytes: What the config allows all readers together; None where this one has it all.

    Raises:
        ConfigError: when batches that are read ahead do not fit `loader.memory_bytes` or shared memory.
    """

    def __init__(
        self, rows: Rows, order: RowOrder, settings: Loader, *, rank: int = 0, whole_bytes: int | None = None
    ) -> None:
        processes = max(1, settings.num_workers)
        batches = (settings.prefetch_factor if settings.num_workers else settings.batches_ahead) + 2
        needed_bytes = processes * batches * order.batch_size * rows.delivered_row_bytes
        if needed_bytes > settings.memory_bytes:
            each = f" in each of {processes} processes" if settings.num_workers else ""
            message = (
                f"{memory.allowed_text(settings, whole_bytes)} cannot hold {batches} batches of {order.batch_size} "
                f"rows of {format_bytes(rows.delivered_row_bytes)}{each}; use at least "
                f"{memory.enough_text(needed_bytes, settings, whole_bytes)}, or a smaller loader.batch_size"
            )
            raise ConfigError([Problem("loader.memory_bytes", message)])
        memory.refuse_too_little_shared_memory(settings, order.batch_size * rows.delivered_row_bytes)
        self.rows, self.order = rows, order
        stream = _Stream(rows, order, rank, settings)
        self._counts = stream.counts
        super().__init__(order, settings, stream, rank)

    def counters(self) -> dict[str, int]:
        """Since the loader was made, over all its processes: rows delivered, their bytes, and bytes from a disk.

        The last are all that the process has read, whatever for, and 0 where the system does not tell; of a file whose
        page cache is held small, the pages that it no longer held.
        """
        totals: list[int] = self._counts.sum(0).tolist()
        return dict(zip(_COUNTED, totals, strict=True))


class _Stream(EpochStream[RowBatch, RowOrder]):
    def __init__(self, rows: Rows, order: RowOrder, rank: int, settings: Loader) -> None:
        super().__init__(order, settings.num_workers)
        self._rows, self._rank, self._settings = rows, rank, settings
        self._spans = Spans()
        processes = max(1, settings.num_workers)
        self.counts = torch.zeros((processes, len(_COUNTED)), dtype=torch.int64)
        if settings.num_workers:
            self.counts = shared(self.counts)
        if isinstance(rows.source, ZarrRows):  # what one of the processes may use
            shares = {name: getattr(settings, name) // processes for name in ("cache_bytes", "memory_bytes")}
            shares["requests_in_flight"] = max(1, settings.requests_in_flight // processes)
            rows.source.settings = settings.model_copy(update=shares)

    @property
    def spans(self) -> Spans:
        return self._spans

    def close(self) -> None:
        self._rows.close()

    def __iter__(self) -> Iterator[RowBatch]:
        worker, steps = self.steps()
        epoch, from_disk = int(self.epoch), self._disk_bytes()
        batches = self._ahead(epoch, steps) if worker is None else (self._read(epoch, step) for step in steps)
        counts = self.counts[worker or 0].numpy()
        looked = time.monotonic()
        try:
            for values, rows in batches:
                counts[0] += len(rows)
                counts[1] += len(rows) * self._rows.row_bytes
                if time.monotonic() - looked > _DISK_SECONDS:  # each look opens a file
                    now, looked = self._disk_bytes(), time.monotonic()
                    counts[2] += now - from_disk
                    from_disk = now
                yield values, rows
        finally:
            counts[2] += self._disk_bytes() - from_disk

    def _disk_bytes(self) -> int:
        missed = self._rows.source.missed_bytes
        return disk_read_bytes() if missed is None else missed

    def _read(self, epoch: int, step: int, pinned: bool = False) -> RowBatch:
        numbers = self.plan_now.batch(epoch, step, self._rank)
        values, rows = self._rows.take(numbers), torch.from_numpy(numbers)
        return (values.pin_memory(), rows.pin_memory()) if pinned else (values, rows)

    def _ahead(self, epoch: int, steps: range) -> Iterator[RowBatch]:
        """Batches in order, several being read before they are needed."""
        ahead, pinned = self._settings.batches_ahead, pins(self._settings)
        if not ahead:
            yield from (self._read(epoch, step, pinned) for step in steps)
            return
        waiting: deque[Future[RowBatch]] = deque()
        pool = ThreadPoolExecutor(min(ahead, _MOST_THREADS), "kit-rows")
        try:
            for step in steps:
                waiting.append(pool.submit(self._read, epoch, step, pinned))
                self._spans.follow(waiting[-1])
                if len(waiting) > ahead:
                    yield self._next(waiting)
            while waiting:
                yield self._next(waiting)
        finally:
            self._spans.forget()
            pool.shutdown(cancel_futures=True)

    def _next(self, waiting: deque[Future[RowBatch]]) -> RowBatch:
        batch = waiting.popleft().result()
        self._spans.hand_over()
        return batch


class RowData(ConfiguredData):
    """Rows of a `.npy` or `.pt` file, a Zarr array, or numbers in memory.

    World size and rank are the trainer's, or 1 and 0 without one.

    Args:
        source: What `kit.data.open_rows` takes.
        indices: Rows to take, counted from 0 in this order; None for all.
        batch_size: Rows per batch on each device.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the order: the same gives the same batches whatever holds the rows.
        drop_last: Leave out the rows that do not fill the last global batch.
        num_workers: Loader processes; 0 reads ahead in threads.
        prefetch_factor: Batches each loader process keeps ready.
        batches_ahead: Batches that threads read before they are asked for.
        pin_memory: Copy batches to pinned memory first.
        row_block: Rows that lie together and are drawn together: a disk gives them in one read.
        window_blocks: Row blocks that are mixed with one another.
        in_memory: Read all rows into memory before the first batch.
        dtype: Name of the type they are delivered in; None for float32 of floats, and whole numbers as they are.
        variable: Name of the array in a Zarr group of several.
        credentials: As `data.credentials`, for a URL.
        page_cache_bytes: What the page cache may keep of a mapped file; 0 leaves it alone.
        strict: As `data.strict`, for a Zarr array: a chunk that is absent from the store is an error.

    Raises:
        MissingRowsError, RowsError, ConfigError, StoreError: as `kit.data.open_rows`, and for settings that are out of
            bounds.
    """

    @checks_arguments
    def __init__(
        self,
        source: str | PathLike[str] | Tensor | NDArray[Any] | Rows,
        indices: Which | None = None,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool | None = None,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        batches_ahead: int | None = None,
        pin_memory: bool | None = None,
        row_block: int = 1,
        window_blocks: int = 64,
        in_memory: bool = False,
        dtype: str | None = None,
        variable: str = "",
        credentials: str = "default",
        page_cache_bytes: int | str = 0,
        strict: bool = False,
    ) -> None:
        given = {
            "loader.batch_size": batch_size, "loader.shuffle": shuffle, "training.seed": seed,
            "loader.drop_last": drop_last, "loader.num_workers": num_workers,
            "loader.prefetch_factor": prefetch_factor, "loader.batches_ahead": batches_ahead,
            "loader.pin_memory": pin_memory,
        }  # fmt: skip
        super().__init__(Config(), {path: value for path, value in given.items() if value is not None})
        self.rows = open_rows(
            source, indices, dtype=dtype, variable=variable, credentials=credentials, page_cache_bytes=page_cache_bytes,
            strict=strict,
        )  # fmt: skip
        self.row_block, self.window_blocks, self._in_memory = row_block, window_blocks, in_memory
        self.loader: RowLoader | None = None
        self._kept: Rows | None = None
        if not all(isinstance(one, int) and one >= 1 for one in (row_block, window_blocks)):
            message = f"{row_block!r} rows × {window_blocks!r} blocks; give whole numbers from 1"
            raise ConfigError([Problem("row_block", message)])

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *columns)."""
        return self.rows.shape

    @property
    def description(self) -> str:
        """Which rows these are and where they are, by which `kit.results` tells trials apart."""
        chosen = "" if self.rows.indices is None else f"{len(self.rows):,} chosen rows of "
        name = "/".join(self.rows.place.split("/")[-1 if self.rows.file else -2 :])
        where = " in memory" if self._in_memory else " on disk" if self.rows.file else ""
        limit = getattr(self.rows.source, "page_cache_bytes", 0)
        return f"{chosen}{name}{where}" + f", page cache {format_bytes(limit)}" * bool(limit)

    @property
    @override
    def _contents(self) -> str:
        return f"{self.rows}, {self.config.loader.batch_size} in a batch"

    def order(self, world_size: int = 1) -> RowOrder:
        """Which rows are in which batch, for so many ranks.

        Raises:
            ConfigError: when a global batch is larger than the rows.
        """
        loader = self.config.loader
        return RowOrder(
            rows=self._training_rows, batch_size=loader.batch_size, world_size=world_size,
            seed=self.config.training.seed,
            shuffle=loader.shuffle, drop_last=loader.drop_last, row_block=self.row_block,
            window_blocks=self.window_blocks,
        )  # fmt: skip

    @property
    def _training_rows(self) -> int:
        """Rows before those that are kept for validation, in whole row blocks."""
        rows, fraction = len(self.rows), self.config.data.validation_fraction
        border = round(rows * (1 - fraction) / self.row_block) * self.row_block if fraction else rows
        return min(max(border, 1), rows - 1) if fraction else rows

    @override
    def setup(self, stage: str | None = None) -> None:
        if self._in_memory and self._kept is None:
            self._kept = self.rows.in_memory()

    @override
    def train_dataloader(self) -> RowLoader:
        """The batches of this rank.

        Raises:
            ConfigError: when a global batch is larger than the rows, or what is read ahead than `loader.memory_bytes`.
        """
        self.setup()
        self._use_committed()
        world_size, rank = self.ranks
        self._close()
        settings, _ = loader_settings(self.config)
        self.loader = RowLoader(
            self._kept or self.rows, self.order(world_size), settings, rank=rank,
            whole_bytes=self.config.loader.memory_bytes,
        )  # fmt: skip
        self.loader.on_length = self._tell_length
        return self.loader

    @override
    def _validation_batches(self) -> RowLoader:
        world_size, rank = self.ranks
        first, (_, settings) = self._training_rows, loader_settings(self.config)
        rows = len(self.rows) - first
        size = max(1, min(self.config.loader.batch_size, rows // world_size))
        order = replace(
            self.order(world_size), rows=rows, first_row=first, batch_size=size, shuffle=False, drop_last=False
        )
        self.validation_loader = RowLoader(
            self._kept or self.rows, order, settings, rank=rank, whole_bytes=self.config.loader.memory_bytes
        )
        return self.validation_loader

    # -- by itself

    def __iter__(self) -> Iterator[RowBatch]:
        return iter(self._own())

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""
        self._own().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """How far the pass under way has come, for `load_state_dict`; empty in a Trainer, which saves its loader's."""
        return {} if self.loader is None or self.trainer is not None else self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass go on where that state was taken.

        Raises:
            ConfigError: when rows or order are not those of the state.
        """
        if state_dict:
            self._own().load_state_dict(state_dict)

    def close(self) -> None:
        """End loader processes and threads, and let go of the file."""
        self._close()
        self.rows.close()

    def __getstate__(self) -> Mapping[str, Any]:
        return self.__dict__ | {"loader": None, "_kept": None}

    def _own(self) -> RowLoader:
        return self.loader or self.train_dataloader()


def read_rates(rows: Rows, order: RowOrder, settings: Loader) -> DiskRates:
    """How fast rows come, as stored: from the page cache, at random from the disk, and in order.

    Measured on the rows themselves, by the loader that will read them, each way for a fraction of a second. What the
    page cache holds of the file is dropped first and filled as far as was read. Rows in memory and stores have one
    rate: what is cached of a store is the engine's own matter, so it is measured as it is found.

    Raises:
        StoreError: when the rows cannot be read.
    """
    loader = RowLoader(rows, order, settings)
    try:
        if rows.file is None:
            _rate(loader, _LEAST_BATCHES)
            rate, _ = _rate(loader)
            return DiskRates(memory_bytes_per_second=rate, random_bytes_per_second=rate, ordered_bytes_per_second=rate)
        rows.close()
        drop_cached(rows.file)
        cold, batches = _rate(loader)
        warm, _ = _rate(loader, batches)
        rows.close()
        drop_cached(rows.file)
        done, began, block = 0, time.perf_counter(), bytearray(_READ_BYTES)
        with rows.file.open("rb", buffering=0) as file:
            while (count := file.readinto(block)) and time.perf_counter() - began < _SECONDS:
                done += count
        ordered = max(done, 1) / max(time.perf_counter() - began, 1e-9)
    finally:
        loader.close()
    return DiskRates(memory_bytes_per_second=warm, random_bytes_per_second=cold, ordered_bytes_per_second=ordered)


def _rate(loader: RowLoader, batches: int = 0) -> tuple[float, int]:
    """Bytes per second of the first batches of an epoch, so many or as long as is needed, and how many they were."""
    loader.set_epoch(0)
    taken = number = 0
    began = time.perf_counter()
    for number, (_, rows) in enumerate(itertools.islice(loader, batches or None), 1):
        taken += len(rows) * loader.rows.row_bytes
        if not batches and number >= _LEAST_BATCHES and time.perf_counter() - began > _SECONDS:
            break
    return taken / max(time.perf_counter() - began, 1e-9), number
