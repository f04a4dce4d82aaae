"""RowData: rows of an array as Lightning takes them: batches `(values, rows)`, each row once an epoch over all ranks.

Only batches ever go to the device, whatever holds the rows: an array in memory stays there. What is left to None is the
config's, of a trial or a committed file (see `ConfiguredData`), and the default of `kit.Config()` elsewhere. It also
works by itself: `for values, rows in kit.RowData("x.npy")` is an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from kit.config import Config
from kit.data.epoch_data import ConfiguredData
from kit.data.rows.loader import RowBatch, RowLoader
from kit.data.rows.order import RowOrder
from kit.data.rows.rows import Rows, Which, open_rows
from kit.errors import ConfigError, Problem


class RowData(ConfiguredData):
    """Rows of a `.npy` or `.pt` file, a Zarr array, or numbers in memory.

    World size and rank are the trainer's, or 1 and 0 without one.

    Args:
        source: What `kit.open_rows` takes.
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
        MissingRowsError, RowsError, ConfigError, StoreError: as `kit.open_rows`, and for settings that are out of
            bounds.
    """

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
        if row_block < 1 or window_blocks < 1:
            raise ConfigError([Problem("row_block", f"{row_block} rows × {window_blocks} blocks: at least 1 of each")])

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *columns)."""
        return self.rows.shape

    def order(self, world_size: int = 1) -> RowOrder:
        """Which rows are in which batch, for so many ranks.

        Raises:
            ConfigError: when a global batch is larger than the rows.
        """
        loader = self.config.loader
        return RowOrder(
            rows=len(self.rows), batch_size=loader.batch_size, world_size=world_size, seed=self.config.training.seed,
            shuffle=loader.shuffle, drop_last=loader.drop_last, row_block=self.row_block,
            window_blocks=self.window_blocks,
        )  # fmt: skip

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
        self.loader = RowLoader(self._kept or self.rows, self.order(world_size), self.config.loader, rank=rank)
        return self.loader

    # -- by itself

    def __iter__(self) -> Iterator[RowBatch]:
        return iter(self._own())

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`."""
        self._own().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """How far the pass under way has come, for `load_state_dict`; empty in a Trainer, which asks its loader."""
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
