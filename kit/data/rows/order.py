"""RowOrder: which rows each batch of each rank holds, every row once an epoch. Pure numpy, no file.

Rows are drawn one by one, or in blocks of `row_block` rows that lie together, `window_blocks` blocks mixed at a time: a
disk gives a block in one read, and a chunk of a store is read once. The order is a function of (seed, epoch, position);
positions are cut into global batches and these among the ranks as `SamplePlan` cuts a grid. So the same seed gives the
same global batches whatever holds the rows, and 1 rank × 2B sees those of 2 ranks × B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.data.sampling import SamplePlan
from kit.errors import ConfigError, Problem

_OWN = ("shuffle", "row_block", "window_blocks")


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The batches of every epoch; equal on every rank."""

    rows: int
    batch_size: int
    """Rows per batch on each rank."""
    world_size: int
    seed: int
    shuffle: bool
    """Whether each epoch has an order of its own; else rows come as they lie."""
    drop_last: bool
    row_block: int = 1
    """Rows that lie together and are drawn together."""
    window_blocks: int = 64
    """Blocks that are mixed with one another."""

    def __post_init__(self) -> None:
        problems = [*_problems(self)]
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
            shuffle=self.shuffle and not self.in_blocks, drop_last=self.drop_last,
        )  # fmt: skip

    @property
    def batches_per_epoch(self) -> int:
        return self.plan.batches_per_epoch

    def batch(self, epoch: int, step: int, rank: int) -> NDArray[np.int64]:
        """The rows that `rank` reads at `step` of `epoch`, in their order.

        Raises:
            IndexError: for a step or rank that there is not.
        """
        if self.in_blocks:
            run = self.plan.positions(step, rank)
            return np.concatenate([*_in_blocks(self, epoch, run)])
        return self.plan.batch(epoch, step, rank)[:, 0]

    def identity(self) -> dict[str, Any]:
        """What decides the batches and their order, in plain values, for `step_after`."""
        return {**{name: getattr(self, name) for name in _OWN}, "plan": self.plan.identity()}

    def step_after(self, other: Mapping[str, Any], step: int) -> int:
        """The step that follows the first `step` global batches of another order, of which `other` is the identity.

        Raises:
            ConfigError: when the other has other rows or another order, or its batches end inside one of ours.
        """
        changed = [name for name in _OWN if getattr(self, name) != other.get(name)]
        if changed:
            way_out = "in the state to resume from; resume with the same order, or begin the epoch anew"
            raise ConfigError(
                [Problem(name, f"{getattr(self, name)}, but {other.get(name)} {way_out}") for name in changed]
            )
        return self.plan.step_after(other["plan"], step)


def _problems(order: RowOrder) -> Iterator[Problem]:
    """Why an order cannot be."""
    if order.row_block < 1 or order.window_blocks < 1:
        yield Problem("row_block", f"{order.row_block} rows × {order.window_blocks} blocks: use at least 1 of each")
    whole = order.batch_size * order.world_size
    if whole > order.rows:
        most = order.rows // order.world_size
        yield Problem(
            "loader.batch_size",
            f"{order.batch_size} rows × {order.world_size} ranks = {whole} do not fit {order.rows} rows; use at most "
            + (f"{most}" if most else f"{order.rows} ranks"),
        )


def _in_blocks(order: RowOrder, epoch: int, run: range) -> Iterator[NDArray[np.int64]]:
    """The rows at a run of positions, window by window."""
    blocks = _blocks(order.rows, order.row_block, order.window_blocks, order.seed, epoch)
    first = int(np.searchsorted(blocks.starts, run.start, side="right")) - 1
    for window in range(first, len(blocks.starts)):
        start = int(blocks.starts[window])
        if start >= run.stop:
            break
        rows = blocks.window(window)
        yield rows[max(0, run.start - start) : run.stop - start]


class _Blocks:
    """The blocks of one epoch, in windows."""

    def __init__(self, rows: int, row_block: int, window_blocks: int, seed: int, epoch: int) -> None:
        count = -(-rows // row_block)
        self._rows, self._row_block, self._window_blocks, self._key = rows, row_block, window_blocks, (seed, epoch)
        self._order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(count)
        sizes = np.minimum(rows - self._order * row_block, row_block)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])[:-1][::window_blocks]
        """First position of each window."""
        self._last: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def window(self, number: int) -> NDArray[np.int64]:
        """The rows of a window, in their order."""
        kept, rows = self._last
        if kept == number:
            return rows
        blocks = self._order[number * self._window_blocks :][: self._window_blocks]
        rows = (blocks[:, None] * self._row_block + np.arange(self._row_block)).reshape(-1)
        rows = rows[rows < self._rows]
        mixed = np.random.Generator(np.random.Philox(np.random.SeedSequence([*self._key, number + 1])))
        rows = mixed.permutation(rows)
        self._last = number, rows
        return rows


@lru_cache(maxsize=2)
def _blocks(rows: int, row_block: int, window_blocks: int, seed: int, epoch: int) -> _Blocks:
    return _Blocks(rows, row_block, window_blocks, seed, epoch)
